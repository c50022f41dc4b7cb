//! Normalisation of channels: over a batch (Ioffe and Szegedy, 2015), or over groups of channels
//! within a sample (Wu and He, 2018).
//!
//! Batch normalisation is the one layer whose bits depend on the number of ranks, since samples
//! depend on each other. If synchronised, ranks exchange its sums through `Training::ranks`, and
//! each rank has one virtual rank; otherwise each micro-batch is a batch. Running statistics are
//! tensors at the end of their unit (`Tensor::average`). Their gradient is the mean over the step's
//! batches, so reductions, sharding and checkpoints need no special case. They are excluded from
//! the gradient norm, and the optimizer moves them towards that mean.

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::{Context, Training};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::{Init, Tensor};
use hpctrain_comm::Group;
use hpctrain_device::{Backend, ChannelNormShape, Kernels, MemoryKind};

/// The elements over which mean and variance are computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormScope {
    /// A channel of all samples. Outside training the running statistics are used instead.
    Batch {
        /// The weight of a step's batch in the running statistics.
        momentum: f32,
        /// Whether the batch is that of all ranks rather than one micro-batch.
        synchronised: bool,
    },
    /// This number of groups of neighbouring channels, within each sample.
    Groups(usize),
}

/// Normalisation of channels, the last axis.
#[derive(Debug, Clone, PartialEq)]
pub struct ChannelNorm {
    /// The name before `.weight`, `.bias`, `.running_mean` and `.running_var`.
    pub name: String,
    /// The number of spatial positions per sample.
    pub places: usize,
    pub channels: usize,
    pub epsilon: f32,
    pub scope: NormScope,
}

/// The count, the mean and the sum of squared deviations from the mean of a set of numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Spread {
    /// Combines the statistics of two sets of numbers (Chan, Golub and LeVeque, 1983).
    fn and(self, other: Self) -> Self {
        let count = self.count + other.count;
        let delta = other.mean - self.mean;
        Self {
            count,
            mean: self.mean + delta * other.count / count,
            squares: self.squares
                + other.squares
                + delta * delta * self.count * other.count / count,
        }
    }

    fn variance(self) -> f64 {
        self.squares.max(0.0) / self.count
    }

    /// Returns the unbiased estimate of the variance. It needs at least two numbers.
    fn unbiased(self) -> f64 {
        self.squares.max(0.0) / (self.count - 1.0)
    }
}

impl ChannelNorm {
    fn shape<B: Backend>(&self, cx: &Context<'_, B>) -> ChannelNormShape {
        let Self { places, channels, .. } = *self;
        let samples = cx.micro.samples;
        match self.scope {
            NormScope::Batch { .. } => ChannelNormShape {
                samples: 1,
                places: samples * places,
                channels,
                groups: channels,
            },
            NormScope::Groups(groups) => ChannelNormShape { samples, places, channels, groups },
        }
    }

    /// Returns the ranks with which this one shares statistics.
    fn ranks<'a, B: Backend>(&self, cx: &Context<'a, B>) -> Option<&'a Group<B>> {
        match self.scope {
            NormScope::Batch { synchronised: true, .. } => {
                cx.training.as_ref()?.ranks.filter(|ranks| ranks.size() > 1)
            }
            _ => None,
        }
    }

    /// Returns the statistics of every group of every sample.
    fn spreads<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        shape: ChannelNormShape,
        x: &B::Buf,
    ) -> Result<Vec<Spread>> {
        let b = cx.backend;
        let width = shape.channels;
        let mut moments = b.alloc_f32(MemoryKind::Activations, shape.samples * 3 * width)?;
        b.channel_moments(shape, B::all(x), B::all_mut(&mut moments))?;
        let moments = host::<B>(b, B::all(&moments), B::len(&moments))?;
        let count = shape.places as f64;
        let of_channel = |sample: &[f32], channel: usize| {
            let [shift, sum, squares] =
                [0, 1, 2].map(|row| f64::from(sample[row * width + channel]));
            Spread { count, mean: shift + sum / count, squares: squares - sum * sum / count }
        };
        let groups = moments.chunks(3 * width).flat_map(|sample| {
            let channels: Vec<Spread> =
                (0..width).map(|channel| of_channel(sample, channel)).collect();
            channels
                .chunks(shape.channels_per_group())
                .filter_map(|group| group.iter().copied().reduce(Spread::and))
                .collect::<Vec<_>>()
        });
        let own: Vec<Spread> = groups.collect();
        let Some(ranks) = self.ranks(cx) else { return Ok(own) };
        let numbers: Vec<f64> =
            own.iter().flat_map(|spread| [spread.count, spread.mean, spread.squares]).collect();
        let all = exchange(ranks, &numbers)?.into_iter().map(|numbers| {
            let triples = numbers.as_chunks::<3>().0.iter();
            triples
                .map(|&[count, mean, squares]| Spread { count, mean, squares })
                .collect::<Vec<_>>()
        });
        all.reduce(|all, of_rank| all.into_iter().zip(of_rank).map(|(a, b)| a.and(b)).collect())
            .ok_or_else(unanswered)
    }

    /// Returns the mean and rstd of every group of every sample, from this micro-batch or the
    /// running statistics, and the targets of the running statistics, weighted by this
    /// micro-batch's share of the global batch.
    fn statistics<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, B::Buf)> {
        let b = cx.backend;
        let shape = self.shape(cx);
        let rstd = |variance: f64| (1.0 / (variance + f64::from(self.epsilon)).sqrt()) as f32;
        let (stats, targets): (Vec<f32>, Vec<f32>) = match (self.scope, &cx.training) {
            (NormScope::Batch { .. }, None) => {
                let means = host::<B>(b, params[2], self.channels)?;
                let variances = host::<B>(b, params[3], self.channels)?;
                let pairs = means.into_iter().zip(variances);
                (
                    pairs.flat_map(|(mean, variance)| [mean, rstd(f64::from(variance))]).collect(),
                    vec![],
                )
            }
            (over, training) => {
                let spreads = self.spreads(cx, shape, x)?;
                let stats = spreads
                    .iter()
                    .flat_map(|spread| [spread.mean as f32, rstd(spread.variance())])
                    .collect();
                let targets = match (over, training) {
                    (NormScope::Batch { .. }, Some(Training { batch_fraction: share, .. })) => {
                        let target = |value: f64| (f64::from(*share) * value) as f32;
                        let means = spreads.iter().map(|spread| target(spread.mean));
                        means
                            .chain(spreads.iter().map(|spread| target(spread.unbiased())))
                            .collect()
                    }
                    _ => vec![],
                };
                (stats, targets)
            }
        };
        Ok((
            b.upload_f32(MemoryKind::Activations, &stats)?,
            b.upload_f32(MemoryKind::Activations, &targets)?,
        ))
    }
}

impl Op for ChannelNorm {
    fn tensors(&self) -> Vec<Tensor> {
        let name = |end: &str| format!("{}.{end}", self.name);
        let shape = [self.channels];
        let mut tensors = vec![
            Tensor::new(name("weight"), &shape, Init::Ones),
            Tensor::new(name("bias"), &shape, Init::Zeros),
        ];
        if let NormScope::Batch { momentum, .. } = self.scope {
            tensors.push(Tensor::average(name("running_mean"), &shape, Init::Zeros, momentum));
            tensors.push(Tensor::average(name("running_var"), &shape, Init::Ones, momentum));
        }
        tensors
    }

    fn saved_buffers(&self) -> usize {
        2
    }

    fn sizes(&self) -> LayerSizes {
        let elements = self.places * self.channels;
        // The statistics of a batch do not count as elements of each sample.
        let groups =
            if let NormScope::Groups(groups) = self.scope { groups } else { self.channels };
        let exact = if let NormScope::Groups(_) = self.scope { 2 * groups } else { 0 };
        LayerSizes { input: elements, output: elements, saved_f32: exact, ..LayerSizes::default() }
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let shape = self.shape(cx);
        let (stats, targets) = self.statistics(cx, params, x)?;
        let mut y = b.alloc(MemoryKind::Activations, shape.elements())?;
        b.channel_norm(shape, B::all(x), B::all(&stats), params[0], params[1], B::all_mut(&mut y))?;
        Ok((y, vec![stats, targets]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let shape = self.shape(cx);
        let BackwardArgs { params, grads, x, kept, dy, needs_input_grad: wants_input, .. } = back;
        let [stats, targets] = crate::unpack(kept)?;
        let width = shape.channels;
        let stats = B::all(&stats);
        let mut sums = b.alloc_f32(MemoryKind::Activations, shape.samples * 2 * width)?;
        b.channel_norm_sums(shape, B::all(x), B::all(&dy), stats, B::all_mut(&mut sums))?;
        for sample in 0..shape.samples {
            let [of_bias, of_weight] = [0, 1].map(|row| (2 * sample + row) * width);
            b.add(B::view(&sums, of_weight..of_weight + width), B::reborrow(&mut grads[0]))?;
            b.add(B::view(&sums, of_bias..of_bias + width), B::reborrow(&mut grads[1]))?;
        }
        if B::len(&targets) > 0 {
            b.add(B::view(&targets, 0..width), B::reborrow(&mut grads[2]))?;
            b.add(B::view(&targets, width..2 * width), B::reborrow(&mut grads[3]))?;
        }
        if !wants_input {
            return b.alloc(MemoryKind::Activations, 0);
        }
        let sums = host::<B>(b, B::all(&sums), B::len(&sums))?;
        let weight = host::<B>(b, params[0], width)?;
        let means = self.means(cx, shape, &sums, &weight)?;
        let means = b.upload_f32(MemoryKind::Activations, &means)?;
        let mut dx = b.alloc(MemoryKind::Activations, shape.elements())?;
        let to = B::all_mut(&mut dx);
        b.channel_norm_backward(
            shape,
            B::all(x),
            B::all(&dy),
            stats,
            params[0],
            B::all(&means),
            to,
        )?;
        Ok(dx)
    }
}

impl ChannelNorm {
    /// Returns the means that are subtracted from the gradient
    /// ([`ChannelOps::channel_norm_backward`]), for every group of every sample, over all elements
    /// that share statistics.
    fn means<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        shape: ChannelNormShape,
        sums: &[f32],
        weight: &[f32],
    ) -> Result<Vec<f32>> {
        let own: Vec<f64> = (0..shape.samples * shape.groups)
            .flat_map(|group| group_sums(shape, sums, weight, group))
            .collect();
        let (totals, ranks) = match self.ranks(cx) {
            Some(ranks) => {
                let totals = exchange(ranks, &own)?
                    .into_iter()
                    .reduce(|all, of_rank| all.iter().zip(of_rank).map(|(a, b)| a + b).collect());
                (totals.ok_or_else(unanswered)?, ranks.size())
            }
            None => (own, 1),
        };
        let count = (shape.places * shape.channels_per_group() * ranks) as f64;
        Ok(totals.into_iter().map(|total| (total / count) as f32).collect())
    }
}

/// Returns the two sums of [`ChannelNorm::means`] over the channels of a group, weighted by
/// channel; groups are counted over all samples.
fn group_sums(shape: ChannelNormShape, sums: &[f32], weight: &[f32], group: usize) -> [f64; 2] {
    let (sample, group) = (group / shape.groups, group % shape.groups);
    let per_group = shape.channels_per_group();
    let channels = group * per_group..(group + 1) * per_group;
    [0, 1].map(|row| {
        let sums = &sums[(2 * sample + row) * shape.channels..][..shape.channels];
        channels
            .clone()
            .map(|channel| f64::from(weight[channel]) * f64::from(sums[channel]))
            .sum::<f64>()
    })
}

/// Downloads the `len` elements of a view.
fn host<B: Backend>(backend: &B, view: B::View<'_>, len: usize) -> Result<Vec<f32>> {
    let mut numbers = vec![0.0; len];
    backend.download(view, &mut numbers)?;
    Ok(numbers)
}

/// Returns the numbers of every rank, in rank order, by an all-gather.
fn exchange<B: Backend>(ranks: &Group<B>, mine: &[f64]) -> Result<Vec<Vec<f64>>> {
    let bytes = mine.iter().flat_map(|x| x.to_le_bytes()).collect();
    let numbers = |bytes: Vec<u8>| {
        bytes.as_chunks().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect()
    };
    let all: Vec<Vec<f64>> = ranks.gather_bytes(bytes).wait()?.into_iter().map(numbers).collect();
    match all.iter().all(|numbers| numbers.len() == mine.len()) {
        true => Ok(all),
        false => Err(Error::comm(
            "batch_norm: another rank sent statistics of a different number of channels",
        )),
    }
}

fn unanswered() -> Error {
    Error::internal("batch_norm: no rank sent statistics")
}
