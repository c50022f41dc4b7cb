//! The gradients of a block's parameters: made in its backward, or partly put off until nobody
//! waits for the gradient of its input.

use std::ops::Range;
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, Kernels, Linear, MemoryKind};

/// Gradients of a block's parameters. The backward adds into them, but for those of
/// [`Tensor::overwritten`](hpctrain_base::layout::Tensor::overwritten) tensors when it is the
/// first.
pub struct Grads<'a, B: Backend> {
    /// The block's unit.
    pub own: B::ViewMut<'a>,
    /// Whether this backward is the first of its virtual rank that `own` is for: overwritten tensors hold
    /// nothing yet.
    pub first: bool,
    /// The elements of [`Block::tied_to`](super::Block::tied_to), which this block alone adds to.
    /// The first backward of a virtual rank overwrites them.
    pub lent: Option<B::ViewMut<'a>>,
    /// Whether this backward is the first of its virtual rank that `lent` is for: it holds nothing yet.
    pub lent_first: bool,
    /// Takes the products that [`Grads::linear`] is to put off; none where it makes them at once.
    pub later: Option<&'a mut Vec<DeferredWgrad<B>>>,
}

/// A window of a block's gradients, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum At {
    /// Of its unit.
    Own(Range<usize>),
    /// Of the borrowed ones.
    Lent(Range<usize>),
}

impl At {
    /// These ranges of the unit.
    pub fn own(ranges: Vec<Range<usize>>) -> Vec<Self> {
        ranges.into_iter().map(At::Own).collect()
    }
}

/// The gradient of an affine map's output, to be read now and perhaps once more later.
pub enum OutputGradient<'a, B: Backend> {
    /// These elements of a buffer stay as they are.
    Kept(&'a Arc<B::Buf>, Range<usize>),
    /// It is about to change: a copy is put off.
    Changing(&'a B::Buf),
}

/// The gradients of an affine map's weight and bias, yet to be computed. Backwards split in two are
/// of Qi et al., "Zero bubble pipeline parallelism", 2023.
pub struct DeferredWgrad<B: Backend> {
    shape: Linear,
    dy: (Arc<B::Buf>, Range<usize>),
    x: Arc<B::Buf>,
    weight: At,
    bias: Range<usize>,
}

impl<B: Kernels> Grads<'_, B> {
    /// Those of the block's own weight and bias. The bias comes later in the unit, or is empty.
    pub fn pair(
        &mut self,
        weight: &Range<usize>,
        bias: &Range<usize>,
    ) -> (B::ViewMut<'_>, B::ViewMut<'_>) {
        let (before, rest) = B::cut_mut(B::reborrow(&mut self.own), bias.start.max(weight.end));
        let (bias, _) = B::cut_mut(rest, bias.len());
        let (_, from_weight) = B::cut_mut(before, weight.start);
        (B::cut_mut(from_weight, weight.len()).0, bias)
    }

    /// The same, for one backward of several.
    pub fn again(&mut self) -> Grads<'_, B> {
        Grads {
            own: B::reborrow(&mut self.own),
            first: self.first,
            lent: self.lent.as_mut().map(B::reborrow),
            lent_first: self.lent_first,
            later: self.later.as_deref_mut(),
        }
    }

    /// Gradients of the weight and bias of an affine map with the input `x`, now or later: then `x`
    /// is kept until they are computed.
    ///
    /// # Errors
    /// The device failed, or nothing is lent.
    pub fn linear(
        &mut self,
        backend: &B,
        shape: Linear,
        dy: OutputGradient<'_, B>,
        x: &Arc<B::Buf>,
        weight: At,
        bias: Range<usize>,
    ) -> Result<()> {
        let Some(later) = &mut self.later else {
            let dy = match dy {
                OutputGradient::Kept(dy, at) => B::view(dy, at),
                OutputGradient::Changing(dy) => B::all(dy),
            };
            return self.add_linear(backend, shape, dy, B::all(x), &weight, &bias);
        };
        let dy = match dy {
            OutputGradient::Kept(dy, at) => (dy.clone(), at),
            OutputGradient::Changing(dy) => {
                let mut kept = backend.alloc(MemoryKind::Activations, B::len(dy))?;
                backend.copy(B::all(dy), B::all_mut(&mut kept))?;
                (Arc::new(kept), 0..B::len(dy))
            }
        };
        later.push(DeferredWgrad { shape, dy, x: x.clone(), weight, bias });
        Ok(())
    }

    /// Adds what a backward has put off.
    ///
    /// # Errors
    /// The device failed.
    pub fn add(&mut self, backend: &B, deferred: DeferredWgrad<B>) -> Result<()> {
        let DeferredWgrad { shape, dy, x, weight, bias } = deferred;
        self.add_linear(backend, shape, B::view(&dy.0, dy.1), B::all(&x), &weight, &bias)
    }

    fn add_linear(
        &mut self,
        backend: &B,
        shape: Linear,
        dy: B::View<'_>,
        x: B::View<'_>,
        weight: &At,
        bias: &Range<usize>,
    ) -> Result<()> {
        match weight {
            At::Own(weight) => {
                let first = self.first;
                let (dweight, dbias) = self.pair(weight, bias);
                backend.linear_backward_weight(shape, dy, x, dweight, dbias, !first)
            }
            At::Lent(weight) => {
                let nothing_lent =
                    || Error::internal("a block that borrows parameters was handed no gradients");
                let lent = B::reborrow(self.lent.as_mut().ok_or_else(nothing_lent)?);
                let (dweight, _) = B::cut_mut(B::cut_mut(lent, weight.start).1, weight.len());
                let (dbias, _) = B::cut_mut(B::reborrow(&mut self.own), 0);
                backend.linear_backward_weight(shape, dy, x, dweight, dbias, !self.lent_first)
            }
        }
    }
}

/// Consecutive ranges of these lengths.
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

    fn networks() -> [(&'static str, Blocks<Cpu>); 4] {
        let gpt = |bias, dropout| Gpt {
            layers: 1,
            heads: 2,
            width: 12,
            context: TIME,
            vocabulary: 7,
            bias,
            dropout,
        };
        let llama = |tied, dropout| Llama {
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
        };
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

    /// Gradients of input, unit and loan after two micro-batches, and the elements that one has put
    /// off.
    fn gradients(block: &dyn Block<Cpu>, puts_off: bool) -> ([Vec<u32>; 3], usize) {
        let backend = Cpu::new(2);
        let ids = [1; SAMPLES * TIME];
        let micro = MicroBatch::of_text(&backend, &ids, &ids, TIME, 0).unwrap();
        let training = Training { dropout: 1, ranks: None, share: 1.0 };
        let cx =
            Context { backend: &backend, micro: &micro, training: Some(training), tensor: None };
        let layout = UnitLayout::new(block.name(), block.tensors(), 1);
        let unit = values("unit", layout.padded);
        let loan = block.tied_to().map(|loan| values("loan", loan.len));
        // Tensors that are to be overwritten hold nothing yet.
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
            let params =
                || Params { lent: loan.as_ref().map(Cpu::all), lent_section, ..Params::of(&unit) };
            let x = values(&format!("x {k}"), micro.rows() * block.input_per_row());
            let (y, kept) = block.forward(&cx, params(), &x).unwrap();
            let dy = values(&format!("dy {k}"), Cpu::len(&y));
            let grads = Grads {
                own: Cpu::all_mut(&mut own),
                first: k == 0,
                lent: loan.as_ref().map(|_| Cpu::all_mut(&mut lent)),
                lent_first: k == 0,
                later: puts_off.then_some(later),
            };
            dxs.push(block.backward(&cx, params(), grads, &x, kept, dy).unwrap());
        }
        for (k, later) in deferred.into_iter().enumerate() {
            waiting = later.iter().map(|one| one.dy.1.len() + Cpu::len(&one.x)).sum();
            let lent = loan.as_ref().map(|_| Cpu::all_mut(&mut lent));
            let mut grads = Grads {
                own: Cpu::all_mut(&mut own),
                first: k == 0,
                lent,
                lent_first: k == 0,
                later: None,
            };
            later.into_iter().for_each(|one| grads.add(&backend, one).unwrap());
        }
        let bits = |buf: &CpuBuf| -> Vec<u32> {
            let mut host = vec![0.0; Cpu::len(buf)];
            backend.download(Cpu::all(buf), &mut host).unwrap();
            host.into_iter().map(f32::to_bits).collect()
        };
        ([dxs.iter().flat_map(bits).collect(), bits(&own), bits(&lent)], waiting)
    }

    #[test]
    fn gradients_that_are_put_off_have_the_same_bits() {
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
                assert!(all_there, "{name}, {unit}: a gradient that nothing has overwritten");
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
            Grads::<Cpu> { own, first: true, lent: None, lent_first: true, later: None };
        for (weight, bias) in [(0..2, 4..5), (1..4, 4..6), (2..5, 0..0)] {
            let (w, b) = grads.pair(&weight, &bias);
            assert_eq!((w.len(), b.len()), (weight.len(), bias.len()));
            assert_eq!(
                (w[0] as usize, b.first().map(|b| *b as usize)),
                (weight.start, bias.clone().next())
            );
        }
    }
}
