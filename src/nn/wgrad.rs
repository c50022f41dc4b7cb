//! The gradients of a block's parameters. They are computed in its backward, or some are deferred
//! (deferred wgrad) until no other rank waits for the gradient of the block's input.

use std::ops::Range;
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, Kernels, Linear, MemoryKind};

/// Gradients of a block's parameters. The backward accumulates into them, except that the first
/// backward overwrites those of [`Tensor::overwritten`](hpctrain_base::layout::Tensor::overwritten)
/// tensors.
pub struct Grads<'a, B: Backend> {
    /// The gradients of the block's unit.
    pub own: B::ViewMut<'a>,
    /// Whether this is the first backward of its virtual rank into `own`: overwritten tensors are
    /// still uninitialised.
    pub first: bool,
    /// The gradient of [`Block::tied_to`](super::Block::tied_to), to which only this block adds.
    /// The first backward of a virtual rank overwrites it.
    pub tied: Option<B::ViewMut<'a>>,
    /// Whether this is the first backward of its virtual rank into `lent`, which is still
    /// uninitialised.
    pub tied_first: bool,
    /// Receives the matmuls that [`Grads::linear`] defers, or is `None` if it computes them at
    /// once.
    pub deferred: Option<&'a mut Vec<DeferredWgrad<B>>>,
}

/// A range of a block's gradients, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GradRange {
    /// A range of its own unit.
    Own(Range<usize>),
    /// A range of the tied parameter.
    Tied(Range<usize>),
}

impl GradRange {
    /// Returns these ranges of the block's own unit.
    pub fn own(ranges: Vec<Range<usize>>) -> Vec<Self> {
        ranges.into_iter().map(GradRange::Own).collect()
    }
}

/// The gradient of a linear layer's output, read now and perhaps again later.
pub enum OutputGradient<'a, B: Backend> {
    /// Elements of a buffer that will not change.
    Unchanged(&'a Arc<B::Buf>, Range<usize>),
    /// A buffer that will change: deferred wgrad keeps a copy.
    Changing(&'a B::Buf),
}

/// A deferred computation of the weight and bias gradients of a linear layer. Splitting backwards
/// in this way is due to Qi et al., "Zero bubble pipeline parallelism", 2023.
pub struct DeferredWgrad<B: Backend> {
    shape: Linear,
    dy: (Arc<B::Buf>, Range<usize>),
    x: Arc<B::Buf>,
    weight: GradRange,
    bias: Range<usize>,
}

impl<B: Kernels> Grads<'_, B> {
    /// Returns the gradients of a weight and a bias in the block's own unit. The bias comes after
    /// the weight, or is empty.
    pub fn weight_and_bias(
        &mut self,
        weight: &Range<usize>,
        bias: &Range<usize>,
    ) -> (B::ViewMut<'_>, B::ViewMut<'_>) {
        let (before, rest) =
            B::split_at_mut(B::reborrow(&mut self.own), bias.start.max(weight.end));
        let (bias, _) = B::split_at_mut(rest, bias.len());
        let (_, from_weight) = B::split_at_mut(before, weight.start);
        (B::split_at_mut(from_weight, weight.len()).0, bias)
    }

    /// Reborrows the gradients, for one backward of several.
    pub fn reborrow(&mut self) -> Grads<'_, B> {
        Grads {
            own: B::reborrow(&mut self.own),
            first: self.first,
            tied: self.tied.as_mut().map(B::reborrow),
            tied_first: self.tied_first,
            deferred: self.deferred.as_deref_mut(),
        }
    }

    /// Computes the weight and bias gradients of a linear layer with the input `x`, or defers them,
    /// which keeps `x` until they are computed.
    ///
    /// # Errors
    /// Returns an error if the device fails, or if the weight is tied and no gradient of it was
    /// given.
    pub fn linear(
        &mut self,
        backend: &B,
        shape: Linear,
        dy: OutputGradient<'_, B>,
        x: &Arc<B::Buf>,
        weight: GradRange,
        bias: Range<usize>,
    ) -> Result<()> {
        let Some(later) = &mut self.deferred else {
            let dy = match dy {
                OutputGradient::Unchanged(dy, at) => B::view(dy, at),
                OutputGradient::Changing(dy) => B::all(dy),
            };
            return self.add_linear(backend, shape, dy, B::all(x), &weight, &bias);
        };
        let dy = match dy {
            OutputGradient::Unchanged(dy, at) => (dy.clone(), at),
            OutputGradient::Changing(dy) => {
                let mut kept = backend.alloc(MemoryKind::Activations, B::len(dy))?;
                backend.copy(B::all(dy), B::all_mut(&mut kept))?;
                (Arc::new(kept), 0..B::len(dy))
            }
        };
        later.push(DeferredWgrad { shape, dy, x: x.clone(), weight, bias });
        Ok(())
    }

    /// Computes deferred gradients and accumulates them.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn add_deferred(&mut self, backend: &B, deferred: DeferredWgrad<B>) -> Result<()> {
        let DeferredWgrad { shape, dy, x, weight, bias } = deferred;
        self.add_linear(backend, shape, B::view(&dy.0, dy.1), B::all(&x), &weight, &bias)
    }

    fn add_linear(
        &mut self,
        backend: &B,
        shape: Linear,
        dy: B::View<'_>,
        x: B::View<'_>,
        weight: &GradRange,
        bias: &Range<usize>,
    ) -> Result<()> {
        match weight {
            GradRange::Own(weight) => {
                let first = self.first;
                let (dweight, dbias) = self.weight_and_bias(weight, bias);
                backend.linear_backward_weight(shape, dy, x, dweight, dbias, !first)
            }
            GradRange::Tied(weight) => {
                let lent = self.tied.as_mut().ok_or_else(|| {
                    Error::internal("a block with tied parameters was given no gradient for them")
                })?;
                let lent = B::reborrow(lent);
                let (dweight, _) =
                    B::split_at_mut(B::split_at_mut(lent, weight.start).1, weight.len());
                let (dbias, _) = B::split_at_mut(B::reborrow(&mut self.own), 0);
                backend.linear_backward_weight(shape, dy, x, dweight, dbias, !self.tied_first)
            }
        }
    }
}

/// Returns consecutive ranges of these lengths.
pub fn ranges<const N: usize>(lens: [usize; N]) -> [Range<usize>; N] {
    let mut end = 0;
    lens.map(|len| {
        end += len;
        end - len..end
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::Gpt;
    use crate::llama::Llama;
    use crate::{Block, Blocks, Context, FrequencyScaling, MicroBatch, Params, Training};
    use hpctrain_base::layout::UnitLayout;
    use hpctrain_base::random;
    use hpctrain_cpu::{Cpu, CpuBuf};

    const SAMPLES: usize = 3;
    const TIME: usize = 5;

    /// Returns a GPT of one layer.
    fn gpt(bias: bool, dropout: f32) -> Gpt {
        Gpt { layers: 1, heads: 2, width: 12, context: TIME, vocabulary: 7, bias, dropout }
    }

    /// Returns a Llama of one layer.
    fn llama(tied: bool, dropout: f32) -> Llama {
        Llama {
            layers: 1,
            heads: 4,
            kv_heads: 2,
            width: 16,
            hidden: 20,
            context: TIME,
            vocabulary: 9,
            rope_theta: 1e4,
            rope_scaling: FrequencyScaling::Unscaled,
            epsilon: 1e-5,
            tied,
            dropout,
        }
    }

    fn networks() -> [(&'static str, Blocks<Cpu>); 4] {
        [
            ("gpt", gpt(true, 0.0).blocks()),
            ("gpt without biases", gpt(false, 0.3).blocks()),
            ("llama", llama(true, 0.0).blocks()),
            ("llama with its own head", llama(false, 0.3).blocks()),
        ]
    }

    fn values(name: &str, len: usize) -> CpuBuf {
        let mut values = vec![0.0; len];
        random::Stream::new(random::derive(3, &[random::name(name)])).fill_normal(&mut values);
        Cpu::new(1).upload(MemoryKind::Activations, &values).unwrap()
    }

    /// Returns the gradients of input, unit and tied parameter after two micro-batches, and the
    /// number of elements that one of them has deferred.
    fn gradients(block: &dyn Block<Cpu>, defers: bool) -> ([Vec<u32>; 3], usize) {
        let backend = Cpu::new(2);
        let ids = [1; SAMPLES * TIME];
        let micro = MicroBatch::from_text(&backend, &ids, &ids, TIME, 0).unwrap();
        let training = Training { dropout: 1, ranks: None, batch_fraction: 1.0 };
        let cx =
            Context { backend: &backend, micro: &micro, training: Some(training), tensor: None };
        let layout = UnitLayout::new(block.name(), block.tensors(), 1);
        let unit = values("unit", layout.padded);
        let loan = block.tied_to().map(|loan| values("loan", loan.len));
        // Tensors that are to be overwritten are uninitialised.
        let mut own = vec![f32::NAN; layout.padded];
        let mut lent = vec![f32::NAN; loan.as_ref().map_or(0, Cpu::len)];
        layout.zeroed().into_iter().for_each(|range| own[range].fill(0.0));
        let [mut own, mut lent] =
            [&mut own, &mut lent].map(|host| backend.upload(MemoryKind::Gradients, host).unwrap());
        let mut deferred = vec![vec![], vec![]];
        let mut dxs = vec![];
        let mut waiting = 0;
        for (k, later) in deferred.iter_mut().enumerate() {
            let lent_section = loan.as_ref().map_or(0, Cpu::len);
            let params = || Params {
                tied: loan.as_ref().map(Cpu::all),
                tied_section: lent_section,
                ..Params::with_micro_batch(&unit)
            };
            let x = values(&format!("x {k}"), micro.rows() * block.input_per_row());
            let (y, kept) = block.forward(&cx, params(), &x).unwrap();
            let dy = values(&format!("dy {k}"), Cpu::len(&y));
            let grads = Grads {
                own: Cpu::all_mut(&mut own),
                first: k == 0,
                tied: loan.as_ref().map(|_| Cpu::all_mut(&mut lent)),
                tied_first: k == 0,
                deferred: defers.then_some(later),
            };
            dxs.push(block.backward(&cx, params(), grads, &x, kept, dy).unwrap());
        }
        for (k, later) in deferred.into_iter().enumerate() {
            waiting = later.iter().map(|one| one.dy.1.len() + Cpu::len(&one.x)).sum();
            let lent = loan.as_ref().map(|_| Cpu::all_mut(&mut lent));
            let mut grads = Grads {
                own: Cpu::all_mut(&mut own),
                first: k == 0,
                tied: lent,
                tied_first: k == 0,
                deferred: None,
            };
            later.into_iter().for_each(|one| grads.add_deferred(&backend, one).unwrap());
        }
        let bits = |buf: &CpuBuf| -> Vec<u32> {
            let mut host = vec![0.0; Cpu::len(buf)];
            backend.download(Cpu::all(buf), &mut host).unwrap();
            host.into_iter().map(f32::to_bits).collect()
        };
        ([dxs.iter().flat_map(bits).collect(), bits(&own), bits(&lent)], waiting)
    }

    #[test]
    fn deferred_gradients_have_the_same_bits() {
        for (name, blocks) in networks() {
            for block in &blocks[1..] {
                let (at_once, nothing) = gradients(&**block, false);
                let (later, waiting) = gradients(&**block, true);
                let unit = block.name();
                assert_eq!(nothing, 0, "{name}, {unit}");
                assert_eq!(waiting, SAMPLES * TIME * block.deferred_per_row(), "{name}, {unit}");
                assert!(waiting > 0 && at_once == later, "{name}, {unit}: other gradients");
                let all_there =
                    at_once.iter().flatten().all(|bits| !f32::from_bits(*bits).is_nan());
                assert!(all_there, "{name}, {unit}: part of a gradient was never written");
            }
        }
    }

    #[test]
    fn weights_and_biases_are_found() {
        let backend = Cpu::new(1);
        let mut unit =
            backend.upload(MemoryKind::Gradients, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        let own = Cpu::all_mut(&mut unit);
        let mut grads =
            Grads::<Cpu> { own, first: true, tied: None, tied_first: true, deferred: None };
        for (weight, bias) in [(0..2, 4..5), (1..4, 4..6), (2..5, 0..0)] {
            let (w, b) = grads.weight_and_bias(&weight, &bias);
            assert_eq!((w.len(), b.len()), (weight.len(), bias.len()));
            assert_eq!(
                (w[0] as usize, b.first().map(|b| *b as usize)),
                (weight.start, bias.clone().next())
            );
        }
    }
}
