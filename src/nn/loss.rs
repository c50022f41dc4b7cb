//! Losses and metrics of a network's output.
//!
//! In training a loss overwrites the output with its gradient. The engine passes the factor, one by
//! the number of predictions in the global batch. Losses and metrics are sums over predictions, so
//! those of chunks, micro-batches and ranks add up.

use std::ops::Range;
use std::sync::OnceLock;

use super::autograd::rows::{self, OutputRows};
pub use super::contrastive::ContrastiveLoss;
pub use super::custom_loss::{CustomLoss, CustomMetric, LossFunction, MetricFunction};
use super::{Blocks, Context, MicroBatch};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::TensorShards;
use hpctrain_comm::Group;
use hpctrain_data::Target;
use hpctrain_device::{
    Backend, CrossEntropy, CrossEntropyPart, Kernels, LogitsPart, LossWeights, MemoryKind,
    Regression, RegressionLoss, StridedCopy,
};

/// The loss that a network minimises, a mean over all predictions.
#[derive(Debug, Clone, PartialEq)]
pub enum Loss {
    /// Cross-entropy of logits and classes.
    CrossEntropy {
        /// Label smoothing: the fraction of the target that is spread evenly over all classes.
        smoothing: f32,
        /// A weight for each class, or empty. The mean is over predictions, not over weights.
        weights: Vec<f32>,
    },
    /// A deviation of predicted values from target values.
    Deviation(RegressionLoss),
    /// A loss by its forward.
    Custom(CustomLoss),
}

impl Loss {
    /// Returns cross-entropy without label smoothing and class weights.
    pub fn cross_entropy() -> Self {
        Loss::CrossEntropy { smoothing: 0.0, weights: vec![] }
    }

    /// Returns true if the loss of a sample depends on the other samples of the batch.
    pub fn over_batch(&self) -> bool {
        matches!(self, Loss::Custom(loss) if loss.over_batch())
    }

    /// Returns the target that samples need for a network with `outputs` output elements per
    /// prediction.
    pub fn target(&self, outputs: usize) -> Target {
        match self {
            Loss::CrossEntropy { .. } => Target::Class(outputs),
            Loss::Deviation(_) => Target::Values(outputs),
            Loss::Custom(loss) => loss.target(outputs),
        }
    }
}

/// A number that evaluations measure besides the loss.
#[derive(Debug, Clone, PartialEq)]
pub enum Metric {
    /// The fraction of predictions whose likeliest class is the target. For a single logit, those
    /// with the sign of the target.
    Accuracy,
    /// The fraction of predictions whose target is among the five likeliest classes.
    Top5,
    /// The mean absolute error.
    MeanAbsolute,
    /// The root mean squared error.
    RootMeanSquare,
    /// A metric by its forward.
    Custom(CustomMetric),
}

impl Metric {
    /// Returns its name in records.
    pub fn name(&self) -> &str {
        match self {
            Metric::Accuracy => "accuracy",
            Metric::Top5 => "top5_accuracy",
            Metric::MeanAbsolute => "mae",
            Metric::RootMeanSquare => "rmse",
            Metric::Custom(metric) => metric.name(),
        }
    }

    /// Returns the metric from the mean of the values that [`Objective::measure`] sums.
    pub fn from_mean(&self, mean: f64) -> f64 {
        if *self == Metric::RootMeanSquare { mean.sqrt() } else { mean }
    }
}

/// The kind of output of a classifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Classifier {
    /// One logit per class, for this number of classes.
    Softmax(usize),
    /// One logit, for the second of two classes.
    Logit,
}

impl Classifier {
    /// Returns the number of classes.
    pub fn classes(self) -> usize {
        match self {
            Classifier::Softmax(classes) => classes,
            Classifier::Logit => 2,
        }
    }

    /// Returns the number of output elements per sample.
    pub fn outputs(self) -> usize {
        match self {
            Classifier::Softmax(classes) => classes,
            Classifier::Logit => 1,
        }
    }
}

/// A loss and metrics, computed on a device.
pub struct Objective<B: Backend> {
    loss: Loss,
    /// The number of elements of a row of the output.
    width: usize,
    /// The virtual tensor ranks of this rank, each of which has a range of classes.
    slices: TensorShards,
    /// Whether rows of the output are padded, see
    /// [`Block::pads_output`](super::Block::pads_output).
    is_padded: bool,
    /// Whether it has the metrics that apply to the loss; language models have none.
    has_metrics: bool,
    metrics: Vec<Metric>,
    /// The class weights, uploaded to the device on first use.
    weights: OnceLock<B::Buf>,
}

impl<B: Kernels> Objective<B> {
    /// Creates a loss of outputs with `width` elements. If `metrics` is true, it has all metrics
    /// that apply to the loss.
    pub fn new(loss: Loss, width: usize, metrics: bool) -> Self {
        let all = match loss {
            Loss::CrossEntropy { .. } if width > 5 => vec![Metric::Accuracy, Metric::Top5],
            Loss::CrossEntropy { .. } => vec![Metric::Accuracy],
            Loss::Deviation(RegressionLoss::BinaryCrossEntropy) => vec![Metric::Accuracy],
            Loss::Deviation(_) => vec![Metric::MeanAbsolute, Metric::RootMeanSquare],
            Loss::Custom(_) => vec![],
        };
        let has_metrics = metrics;
        let metrics = if has_metrics { all } else { vec![] };
        Self {
            loss,
            width,
            slices: TensorShards::whole(),
            is_padded: false,
            has_metrics,
            metrics,
            weights: OnceLock::new(),
        }
    }

    /// Adds custom metrics.
    pub fn with_metrics(mut self, metrics: &[CustomMetric]) -> Self {
        self.metrics.extend(metrics.iter().cloned().map(Metric::Custom));
        self
    }

    /// Returns true if the loss of a sample depends on the other samples of the batch.
    pub fn over_batch(&self) -> bool {
        self.loss.over_batch()
    }

    /// Returns true if the loss is judged as a perplexity: the cross-entropy of a language model.
    pub fn has_perplexity(&self) -> bool {
        matches!(self.loss, Loss::CrossEntropy { .. }) && !self.has_metrics
    }

    /// Sets the virtual tensor ranks among which the logits are sharded.
    pub fn with_tensor_shards(self, slices: &TensorShards) -> Self {
        Self { slices: slices.clone(), ..self }
    }

    /// Sets whether rows of the output are padded, from the last of these blocks.
    pub fn with_output_blocks(self, blocks: &Blocks<B>) -> Self {
        Self { is_padded: blocks.last().is_some_and(|block| block.pads_output()), ..self }
    }

    /// Returns the stride of output rows with `columns` columns, in elements.
    fn stride(&self, columns: usize) -> usize {
        if self.is_padded { B::row_stride(columns) } else { columns }
    }

    /// Returns the range of each virtual rank's elements in an output of `rows` rows, where virtual
    /// ranks are stored one after the other.
    fn of_virtual_ranks(&self, rows: usize) -> Vec<Range<usize>> {
        self.slices.of_virtual_ranks(rows, self.width, |columns| self.stride(columns))
    }

    /// Downloads the rows from `from` on of an output of `rows` rows, without padding. With several
    /// virtual ranks, their rows follow one another.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn download(
        &self,
        backend: &B,
        output: &B::Buf,
        rows: usize,
        from: usize,
    ) -> Result<Vec<f32>> {
        let mut host = Vec::new();
        let mut row = Vec::new();
        for (virtual_rank, at) in self.slices.held.clone().zip(self.of_virtual_ranks(rows)) {
            let columns = self.slices.share(self.width, virtual_rank).len();
            let stride = self.stride(columns);
            row.resize((rows - from) * stride, 0.0);
            backend.download(B::view(output, at.start + from * stride..at.end), &mut row)?;
            host.extend(row.chunks_exact(stride.max(1)).flat_map(|row| &row[..columns]));
        }
        Ok(host)
    }

    /// Returns the metrics that are measured besides the loss.
    pub fn metrics(&self) -> &[Metric] {
        &self.metrics
    }

    /// Returns the kind of classifier, or `None` if the network is not one or has no metrics.
    pub fn classifier(&self) -> Option<Classifier> {
        match self.loss {
            _ if !self.has_metrics => None,
            Loss::CrossEntropy { .. } if self.width > 1 => Some(Classifier::Softmax(self.width)),
            Loss::Deviation(RegressionLoss::BinaryCrossEntropy) if self.width == 1 => {
                Some(Classifier::Logit)
            }
            _ => None,
        }
    }

    /// Returns the sum of the losses of a micro-batch's predictions, each times the weights of its
    /// class and sample, and replaces `output` (rows × width) by its gradient times `scale`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn train(
        &self,
        backend: &B,
        tensor: Option<&Group<B>>,
        micro: &MicroBatch<B>,
        output: &mut B::Buf,
        scale: f32,
    ) -> Result<B::Scalar> {
        backend.sum(B::all(&self.losses(backend, tensor, micro, output, scale)?))
    }

    /// Returns the losses of a micro-batch's predictions (f32), which [`Objective::train`] adds up,
    /// and replaces `output` by the gradient of their sum times `scale`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn losses(
        &self,
        backend: &B,
        tensor: Option<&Group<B>>,
        micro: &MicroBatch<B>,
        output: &mut B::Buf,
        scale: f32,
    ) -> Result<B::Buf> {
        let rows = micro.rows();
        let mut losses = backend.alloc_f32(MemoryKind::Activations, rows)?;
        match &self.loss {
            Loss::CrossEntropy { smoothing, .. } => {
                let classes = self.width;
                let stride = self.stride(self.width);
                let shape = CrossEntropy {
                    rows,
                    classes,
                    stride,
                    scale,
                    gradient: true,
                    smoothing: *smoothing,
                };
                let weights = LossWeights {
                    classes: self.weights(backend)?,
                    rows: B::all(&micro.fields.weights),
                };
                self.cross_entropy(backend, tensor, shape, output, micro, weights, &mut losses)?;
            }
            Loss::Deviation(by) => {
                let width = self.unpadded(output, rows)?;
                let shape = Regression { rows, width, loss: *by, scale, gradient: true };
                let values = B::all(&micro.fields.values);
                let weights = B::all(&micro.fields.weights);
                backend.regression(
                    shape,
                    B::all_mut(output),
                    values,
                    weights,
                    B::all_mut(&mut losses),
                )?;
            }
            Loss::Custom(loss) => {
                let function = loss.on_device()?;
                let exact = self.exact(backend, output, rows)?;
                let output_rows = self.output_rows(&exact, rows);
                let cx = Context { backend, micro, training: None, tensor: None };
                let weights = &micro.fields.weights;
                let (values, gradient) =
                    rows::losses(&cx, loss.name(), &*function, output_rows, weights, scale)?;
                losses = values;
                backend.copy(B::all(&gradient), B::all_mut(output))?;
            }
        }
        Ok(losses)
    }

    /// Returns the most elements (f32) that the loss of `rows` rows allocates at once, if it is
    /// custom; 0 for the others, which work in place.
    ///
    /// # Errors
    /// Returns an error if the forward of the loss does not fit the shape of the output.
    pub fn peak_elements(&self, rows: usize) -> Result<usize> {
        match &self.loss {
            Loss::Custom(loss) => {
                let function = loss.on_device::<B>()?;
                // The output in f32, and the autograd tape.
                let tape = rows::peak_elements(loss.name(), &*function, rows, self.width)?;
                Ok(rows * self.width + tape)
            }
            _ => Ok(0),
        }
    }

    /// Returns the output in f32, without padding.
    fn exact(&self, backend: &B, output: &B::Buf, rows: usize) -> Result<B::Buf> {
        let stride = self.stride(self.width);
        let packed;
        let output = if stride > self.width {
            let shape =
                StridedCopy { rows, count: self.width, from: [stride, 0], to: [self.width, 0] };
            let mut copy = backend.alloc(MemoryKind::Activations, rows * self.width)?;
            backend.copy_columns(shape, B::all(output), B::all_mut(&mut copy))?;
            packed = copy;
            &packed
        } else {
            output
        };
        let mut exact = backend.alloc_f32(MemoryKind::Activations, B::len(output))?;
        backend.copy(B::all(output), B::all_mut(&mut exact))?;
        Ok(exact)
    }

    fn output_rows<'a>(&self, exact: &'a B::Buf, rows: usize) -> OutputRows<'a, B> {
        OutputRows { elements: exact, rows, width: B::len(exact) / rows.max(1) }
    }

    /// Computes the losses of rows. If the logits are sharded among virtual tensor ranks, the
    /// maximum and a few sums of each virtual rank are all-gathered once; the gradient then needs
    /// no logits of another virtual rank.
    #[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
    fn cross_entropy(
        &self,
        backend: &B,
        tensor: Option<&Group<B>>,
        shape: CrossEntropy,
        output: &mut B::Buf,
        micro: &MicroBatch<B>,
        weights: LossWeights<B::View<'_>>,
        losses: &mut B::Buf,
    ) -> Result<()> {
        let (targets, TensorShards { total, held, .. }) = (&micro.fields.classes, &self.slices);
        if *total == 1 {
            return backend.cross_entropy(
                shape,
                B::all_mut(output),
                targets,
                weights,
                B::all_mut(losses),
            );
        }
        let CrossEntropy { rows, classes, scale, gradient, smoothing, .. } = shape;
        let parts: Vec<_> = held.clone().zip(self.of_virtual_ranks(rows)).collect();

        let of_virtual_rank = rows * LogitsPart::STATS;
        let mut stats = backend.alloc_f32(MemoryKind::Activations, total * of_virtual_rank)?;
        for (virtual_rank, at) in &parts {
            let to = B::view_mut(
                &mut stats,
                virtual_rank * of_virtual_rank..(virtual_rank + 1) * of_virtual_rank,
            );
            let part = self.logits_part(rows, classes, *virtual_rank);
            backend.softmax_part(part, B::view(output, at.clone()), targets, to)?;
        }
        if let Some(tensor) = tensor {
            stats = tensor.all_gather(stats).wait()?;
        }
        for (virtual_rank, at) in parts {
            let shape = CrossEntropyPart {
                part: self.logits_part(rows, classes, virtual_rank),
                parts: *total,
                classes,
                scale,
                gradient,
                smoothing,
            };
            let logits = B::view_mut(output, at);
            backend.cross_entropy_part(
                shape,
                B::all(&stats),
                logits,
                targets,
                weights,
                B::all_mut(losses),
            )?;
        }
        Ok(())
    }

    /// Returns the logits of a virtual rank, which are a part of `rows` rows of `classes` classes.
    fn logits_part(&self, rows: usize, classes: usize, virtual_rank: usize) -> LogitsPart {
        let share = self.slices.share(classes, virtual_rank);
        LogitsPart {
            rows,
            classes: share.len(),
            stride: self.stride(share.len()),
            first_class: share.start,
        }
    }

    /// Returns sums over a micro-batch's predictions: first of the loss, without label smoothing
    /// and weights, then of the values whose means are the metrics, then of the loss over each
    /// range of `parts`. Sharded logits have no metrics.
    ///
    /// # Errors
    /// Returns an error if the device, or a message between ranks, fails.
    pub fn measure(
        &self,
        backend: &B,
        tensor: Option<&Group<B>>,
        micro: &MicroBatch<B>,
        output: &mut B::Buf,
        parts: &[Range<usize>],
    ) -> Result<Vec<f64>> {
        let rows = micro.rows();
        let mut values = backend.alloc_f32(MemoryKind::Activations, rows)?;
        let mut sums = Vec::with_capacity(1 + self.metrics.len() + parts.len());

        let losses_of_parts;
        let none = backend.alloc_f32(MemoryKind::Activations, 0)?;
        match &self.loss {
            Loss::CrossEntropy { .. } => {
                let classes = self.width;
                let stride = self.stride(self.width);
                let shape = CrossEntropy {
                    rows,
                    classes,
                    stride,
                    scale: 0.0,
                    gradient: false,
                    smoothing: 0.0,
                };
                let weights = LossWeights { classes: B::all(&none), rows: B::all(&none) };
                self.cross_entropy(backend, tensor, shape, output, micro, weights, &mut values)?;
                sums.push(backend.read(backend.sum(B::all(&values))?)?);
                losses_of_parts = sums_of_parts(backend, &values, parts)?;
                for metric in &self.metrics {
                    let k = match metric {
                        Metric::Custom(metric) => {
                            sums.push(self.custom_sum(backend, micro, output, metric)?);
                            continue;
                        }
                        Metric::Top5 => 5,
                        _ => 1,
                    };
                    backend.hits(
                        classes,
                        stride,
                        k,
                        B::all(output),
                        &micro.fields.classes,
                        B::all_mut(&mut values),
                    )?;
                    sums.push(backend.read(backend.sum(B::all(&values))?)?);
                }
            }
            Loss::Deviation(by) => {
                let width = self.unpadded(output, rows)?;
                let shape = Regression { rows, width, loss: *by, scale: 0.0, gradient: false };
                let fields = [&micro.fields.values, &none];
                sums.push(regression_sum(backend, shape, output, fields, &mut values)?);
                losses_of_parts = sums_of_parts(backend, &values, parts)?;
                for metric in &self.metrics {
                    let loss = match metric {
                        Metric::Custom(metric) => {
                            sums.push(self.custom_sum(backend, micro, output, metric)?);
                            continue;
                        }
                        Metric::RootMeanSquare => RegressionLoss::Squared,
                        Metric::Accuracy => RegressionLoss::BinaryAccuracy,
                        _ => RegressionLoss::Absolute,
                    };
                    let shape = Regression { loss, ..shape };
                    sums.push(regression_sum(backend, shape, output, fields, &mut values)?);
                }
            }
            Loss::Custom(loss) => {
                let function = loss.on_device()?;
                let exact = self.exact(backend, output, rows)?;
                let cx = Context { backend, micro, training: None, tensor: None };
                let output_rows = self.output_rows(&exact, rows);
                values = rows::values(&cx, loss.name(), &*function, output_rows)?;
                sums.push(backend.read(backend.sum(B::all(&values))?)?);
                losses_of_parts = sums_of_parts(backend, &values, parts)?;
                for metric in &self.metrics {
                    if let Metric::Custom(metric) = metric {
                        sums.push(self.custom_sum(backend, micro, output, metric)?);
                    }
                }
            }
        }
        sums.extend(losses_of_parts);
        Ok(sums)
    }

    /// Returns the sum of a custom metric over all rows.
    fn custom_sum(
        &self,
        backend: &B,
        micro: &MicroBatch<B>,
        output: &B::Buf,
        metric: &CustomMetric,
    ) -> Result<f64> {
        let rows = micro.rows();
        let function = metric.on_device()?;
        let exact = self.exact(backend, output, rows)?;
        let cx = Context { backend, micro, training: None, tensor: None };
        let output_rows = self.output_rows(&exact, rows);
        let values = rows::values(&cx, metric.name(), &*function, output_rows)?;
        backend.read(backend.sum(B::all(&values))?)
    }

    /// Returns the number of elements per row of an output without padding.
    fn unpadded(&self, output: &B::Buf, rows: usize) -> Result<usize> {
        if self.stride(self.width) > self.width {
            return Err(Error::internal(
                "rows of values are padded, which is only supported for classes",
            ));
        }
        Ok(B::len(output) / rows.max(1))
    }

    fn weights(&self, backend: &B) -> Result<B::View<'_>> {
        if self.weights.get().is_none() {
            let weights = match &self.loss {
                Loss::CrossEntropy { weights, .. } => &weights[..],
                Loss::Deviation(_) | Loss::Custom(_) => &[],
            };
            // If another thread was faster, its weights are the same.
            let _ = self.weights.set(backend.upload_f32(MemoryKind::Activations, weights)?);
        }
        self.weights
            .get()
            .map(B::all)
            .ok_or_else(|| Error::internal("class weights were set, but are missing"))
    }
}

/// Returns the sum of `values` over each range of `parts`.
fn sums_of_parts<B: Kernels>(
    backend: &B,
    values: &B::Buf,
    parts: &[Range<usize>],
) -> Result<Vec<f64>> {
    parts
        .iter()
        .map(|part| match part.is_empty() {
            true => Ok(0.0),
            false => backend.read(backend.sum(B::view(values, part.clone()))?),
        })
        .collect()
}

/// Returns the sum of a regression loss over all rows, and writes that of each row to `losses`.
fn regression_sum<B: Kernels>(
    backend: &B,
    shape: Regression,
    output: &mut B::Buf,
    [targets, weights]: [&B::Buf; 2],
    losses: &mut B::Buf,
) -> Result<f64> {
    let (targets, weights) = (B::all(targets), B::all(weights));
    backend.regression(shape, B::all_mut(output), targets, weights, B::all_mut(losses))?;
    backend.read(backend.sum(B::all(losses))?)
}
