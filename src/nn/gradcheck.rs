//! Gradient checking: compares backwards with central differences of the loss, on the CPU in f32.
//!
//! The loss is differentiated along one direction in each tensor. The direction is the sum of the
//! normalised gradient, along which the loss changes much compared with f32 rounding, and of random
//! signs, to which a wrong gradient is hardly orthogonal. The derivative does not exist at kinks,
//! such as that of ReLU at zero: choose inputs away from them.
//!
//! Gradients of `Tensor::overwritten` tensors are NaN before the first backward, which must
//! overwrite them.

use super::{Block, Context, Grads, MicroBatch, Params, Training};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::{Init, UnitLayout};
use hpctrain_base::random::{Stream, derive, name};
use hpctrain_cpu::{Cpu, CpuBuf};
use hpctrain_data::SampleFields;
use hpctrain_device::{Backend as _, MemoryKind};

/// The name and the elements of a tensor.
pub type NamedTensor = (String, Vec<f32>);

/// The step of the central difference.
const STEP: f32 = 5e-4;

/// The name of a block's input in the results of [`block`].
pub const INPUT: &str = "input";

/// The directional derivative of a loss in one tensor, computed in two ways.
#[derive(Debug, Clone, PartialEq)]
pub struct Derivative {
    /// The name of the tensor.
    pub tensor: String,
    /// The derivative from the gradient of the backward.
    pub backward: f64,
    /// The derivative from the difference of two losses.
    pub differences: f64,
    /// The tolerance: rounding and curvature make smaller differences meaningless.
    pub allowed: f64,
}

impl Derivative {
    /// Returns true if the two agree within the tolerance.
    pub fn agrees(&self) -> bool {
        // False if one of them is NaN.
        (self.backward - self.differences).abs() < self.allowed
    }
}

/// Compares the gradients of a loss with finite differences. `at` computes the loss for given
/// values of the tensors, and its gradients with respect to all or some of them, by name. It must
/// be deterministic.
///
/// The tolerance is meant for a loss of the order of one, such as a mean.
///
/// # Errors
/// Returns an error if the derivatives of a tensor do not agree (the first such tensor is named),
/// if a gradient has no tensor of its name and length, or if `at` fails.
pub fn derivatives(
    tensors: &[NamedTensor],
    mut at: impl FnMut(&[NamedTensor]) -> Result<(f64, Vec<NamedTensor>)>,
) -> Result<Vec<Derivative>> {
    let (_, gradients) = at(tensors)?;
    let mut moved = tensors.to_vec();
    let mut all = Vec::with_capacity(gradients.len());
    for (tensor, gradient) in gradients {
        let which = tensors
            .iter()
            .position(|(name, values)| *name == tensor && values.len() == gradient.len());
        let which = which.ok_or_else(|| {
            Error::input(format!(
                "gradient of {tensor}: there is no tensor of that name with {} elements",
                gradient.len()
            ))
        })?;
        let size = gradient.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
        let own = if size > 0.0 { 1.0 / size as f32 } else { 0.0 };
        let signs = 1.0 / (gradient.len() as f32).sqrt();
        let along = |i: usize| gradient[i] * own + sign(i) * signs;
        let mut losses = [0.0; 2];
        for (loss, h) in losses.iter_mut().zip([STEP, -STEP]) {
            for (i, (to, x)) in moved[which].1.iter_mut().zip(&tensors[which].1).enumerate() {
                *to = x + h * along(i);
            }
            (*loss, _) = at(&moved)?;
        }
        let differences = (losses[0] - losses[1]) / (2.0 * f64::from(STEP));
        moved[which].1.copy_from_slice(&tensors[which].1);
        let backward = gradient.iter().enumerate().map(|(i, &g)| f64::from(g * along(i))).sum();
        let found = Derivative { tensor, backward, differences, allowed: 5e-3 * size + 5e-4 };
        if !found.agrees() {
            let Derivative { tensor, backward, differences, .. } = found;
            let message = format!(
                "{tensor}: the derivative is {backward:.6} by backward, {differences:.6} by finite \
                 differences"
            );
            return Err(Error::numeric(message));
        }
        all.push(found);
    }
    Ok(all)
}

/// Checks a single block, on `samples` samples of `time` rows each (1 for layer-list models), with
/// random parameters, input and output gradient. Besides the derivatives with respect to parameters
/// and input it checks what the trainer relies on: that the backward accumulates gradients, or
/// overwrites them where it should, that tensors with weight decay come first, and that no more is
/// saved for the backward than the block declares.
///
/// ```
/// use hpctrain_nn::gradcheck;
/// use hpctrain_nn::gpt::Gpt;
///
/// let gpt = Gpt { layers: 1, heads: 2, width: 8, context: 5, vocabulary: 10, bias: true, dropout: 0.1 };
/// // The first is the embedding, which has no input; the second a transformer block.
/// let found = gradcheck::block(&*gpt.blocks()[1], 3, 5)?;
/// assert!(found.iter().any(|derivative| derivative.tensor == "h.0.mlp.c_fc.weight"));
/// # Ok::<(), hpctrain_base::error::Error>(())
/// ```
///
/// # Errors
/// Returns an error if a check fails; the message names the block and the tensor. Also returns an
/// error if the block has [tied](Block::tied_to) parameters or no input but the micro-batch: check
/// its network with [`derivatives`] instead.
pub fn block(block: &dyn Block<Cpu>, samples: usize, time: usize) -> Result<Vec<Derivative>> {
    block.check()?;
    Checked::new(block, samples, time)
        .and_then(|checked| checked.run())
        .map_err(|e| e.at(block.name()))
}

/// Returns a fixed random sign for each element.
fn sign(i: usize) -> f32 {
    if derive(1, &[i as u64]).is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// Returns standard normal numbers that depend only on the name.
fn normal(what: &str, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Stream::new(derive(1, &[name(what)])).fill_normal(&mut values);
    values
}

/// A block with data to check it on.
struct Checked<'a> {
    backend: Cpu,
    block: &'a dyn Block<Cpu>,
    layout: UnitLayout,
    micro: MicroBatch<Cpu>,
}

impl<'a> Checked<'a> {
    fn new(block: &'a dyn Block<Cpu>, samples: usize, time: usize) -> Result<Self> {
        if block.tied_to().is_some() || block.input_per_row() == 0 {
            return Err(Error::input(
                "a block with tied parameters or without input cannot be checked on its own",
            )
            .hint("check its network with hpctrain::nn::gradcheck::derivatives"));
        }
        let tensors = block.tensors();
        if !tensors.is_sorted_by_key(|tensor| !tensor.decays()) {
            return Err(Error::input(
                "tensors() has a tensor without weight decay before one with weight decay",
            )
            .hint(
                "return matrices first, then biases and norms: weight decay is one range of a unit",
            ));
        }
        let backend = Cpu::new(1);
        let micro = MicroBatch::upload(&backend, SampleFields::default(), samples, time, 0)?;
        Ok(Self { layout: UnitLayout::new(block.name(), tensors, 1), backend, block, micro })
    }

    fn run(&self) -> Result<Vec<Derivative>> {
        let mut tensors: Vec<NamedTensor> = Vec::new();
        for tensor in &self.layout.tensors {
            let centre = if tensor.init == Init::Ones { 1.0 } else { 0.0 };
            let values =
                normal(&tensor.name, tensor.len()).into_iter().map(|x| centre + 0.3 * x).collect();
            tensors.push((tensor.name.clone(), values));
        }
        tensors.push((INPUT.into(), normal(INPUT, self.micro.rows() * self.block.input_per_row())));
        self.check_accumulation(&tensors)?;
        derivatives(&tensors, |tensors| self.at(tensors, 1))
    }

    /// Checks that the first backward overwrites the gradients that it declares, and that a second
    /// one doubles them.
    fn check_accumulation(&self, tensors: &[NamedTensor]) -> Result<()> {
        let ((_, once), (_, twice)) = (self.at(tensors, 1)?, self.at(tensors, 2)?);
        for (tensor, (_, once)) in self.layout.tensors.iter().zip(&once) {
            if tensor.overwritten && once.iter().any(|x| x.is_nan()) {
                let message = format!(
                    "the first backward does not overwrite the gradient of {}",
                    tensor.name
                );
                return Err(Error::input(message).hint(
                    "assign it where Grads::first is true, or do not call Tensor::overwritten",
                ));
            }
        }
        for ((tensor, once), (_, twice)) in
            once.iter().zip(&twice).filter(|((tensor, _), _)| tensor != INPUT)
        {
            let norm = |values: &mut dyn Iterator<Item = f32>| {
                values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
            };
            let off = norm(&mut once.iter().zip(twice).map(|(once, twice)| twice - 2.0 * once));
            if off > 1e-3 * norm(&mut once.iter().copied()) {
                return Err(Error::input(format!(
                    "the backward does not accumulate the gradient of {tensor}"
                ))
                .hint("gradients of micro-batches are summed: use += instead of ="));
            }
        }
        Ok(())
    }

    /// Returns the loss, which is a fixed random weighted sum of the outputs, and its gradients
    /// after `backwards` backwards.
    fn at(&self, tensors: &[NamedTensor], backwards: usize) -> Result<(f64, Vec<NamedTensor>)> {
        let cx = Context {
            backend: &self.backend,
            micro: &self.micro,
            training: Some(Training { dropout: 1, ranks: None, batch_fraction: 1.0 }),
            tensor: None,
        };
        let mut unit = vec![0.0; self.layout.padded];
        for ((_, range), (_, values)) in self.layout.ranges().zip(tensors) {
            unit[range].copy_from_slice(values);
        }
        let unit = self.backend.upload(MemoryKind::Parameters, &unit)?;
        let input = tensors.last().map_or(&[][..], |(_, values)| values);
        let x = self.backend.upload(MemoryKind::Activations, input)?;
        let mut grads = vec![f32::NAN; self.layout.padded];
        self.layout.zeroed().into_iter().for_each(|range| grads[range].fill(0.0));
        let mut grads = self.backend.upload(MemoryKind::Gradients, &grads)?;
        let params = || Params::with_micro_batch(&unit);

        let mut loss = 0.0;
        let mut dx = Vec::new();
        for backward in 0..backwards {
            let (y, kept) = self.block.forward(&cx, params(), &x)?;
            self.check_saved_sizes(&kept)?;
            let y = self.download(&y)?;
            let scale = 1.0 / (y.len() as f32).sqrt();
            let dy: Vec<f32> = (0..y.len()).map(|i| sign(i) * scale).collect();
            loss = y.iter().zip(&dy).map(|(y, dy)| f64::from(*y) * f64::from(*dy)).sum();
            let dy = self.backend.upload(MemoryKind::Activations, &dy)?;
            let own = Cpu::all_mut(&mut grads);
            let first = backward == 0;
            let into = Grads { own, first, tied: None, tied_first: false, deferred: None };
            dx = self.download(&self.block.backward(&cx, params(), into, &x, kept, dy)?)?;
        }

        let grads = self.download(&grads)?;
        let named = self
            .layout
            .ranges()
            .map(|(tensor, range)| (tensor.name.clone(), grads[range].to_vec()));
        Ok((loss, named.chain([(INPUT.to_string(), dx)]).collect()))
    }

    /// Checks that the block declares all saved elements, since memory estimates rely on it.
    fn check_saved_sizes(&self, kept: &[CpuBuf]) -> Result<()> {
        let kept: usize = kept.iter().map(Cpu::len).sum();
        let said =
            self.micro.rows() * (self.block.saved_elems_per_row() + self.block.saved_f32_per_row());
        if kept <= said {
            return Ok(());
        }
        let message = format!(
            "{kept} elements are saved for the backward, but saved_elems_per_row and \
             saved_f32_per_row declare {said}"
        );
        Err(Error::input(message).hint("count all buffers that forward returns besides the output"))
    }

    fn download(&self, buf: &CpuBuf) -> Result<Vec<f32>> {
        let mut host = vec![0.0; Cpu::len(buf)];
        self.backend.download(Cpu::all(buf), &mut host)?;
        Ok(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::layout::Tensor;
    use hpctrain_device::{
        Activation, ActivationOps, ElementwiseOps, Linear, LinearOps, split, split_mut,
    };

    /// The fault of a block.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fault {
        None,
        InputGradient,
        Overwrites,
        KeepsMore,
        Order,
        Borrows,
        NeverOverwrites,
    }

    /// `y = silu(x·Wᵀ + b)`.
    struct Layer(Fault);

    const WIDTH: usize = 5;

    impl Layer {
        fn shape(cx: &Context<'_, Cpu>) -> Linear {
            Linear::new(cx.micro.rows(), WIDTH, WIDTH)
        }
    }

    impl Block<Cpu> for Layer {
        fn name(&self) -> String {
            "layer".into()
        }

        fn tensors(&self) -> Vec<Tensor> {
            let mut tensors = vec![
                Tensor::new("w", &[WIDTH, WIDTH], Init::Normal(1.0)).overwritten(),
                Tensor::new("b", &[WIDTH], Init::Zeros),
            ];
            if self.0 == Fault::Order {
                tensors.reverse();
            }
            tensors
        }

        fn tied_to(&self) -> Option<crate::TiedParam> {
            (self.0 == Fault::Borrows).then_some(crate::TiedParam { unit: 0, len: 1 })
        }

        fn input_per_row(&self) -> usize {
            WIDTH
        }

        fn saved_elems_per_row(&self) -> usize {
            if self.0 == Fault::KeepsMore { WIDTH - 1 } else { WIDTH }
        }

        fn saved_f32_per_row(&self) -> usize {
            0
        }

        fn scratch_per_row(&self) -> usize {
            WIDTH
        }

        fn forward(
            &self,
            cx: &Context<'_, Cpu>,
            params: Params<'_, Cpu>,
            x: &CpuBuf,
        ) -> Result<(CpuBuf, Vec<CpuBuf>)> {
            let b = cx.backend;
            let shape = Self::shape(cx);
            let [weight, bias] = split::<Cpu, 2>(params.own, [WIDTH * WIDTH, WIDTH]);
            let new = || b.alloc(MemoryKind::Activations, shape.rows * WIDTH);
            let mut h = new()?;
            let mut y = new()?;
            b.linear(shape, Cpu::all(x), weight, bias, Cpu::all_mut(&mut h))?;
            b.activation(Activation::Silu, Cpu::all(&h), Cpu::all_mut(&mut y))?;
            Ok((y, vec![h]))
        }

        fn backward(
            &self,
            cx: &Context<'_, Cpu>,
            params: Params<'_, Cpu>,
            grads: Grads<'_, Cpu>,
            x: &CpuBuf,
            saved: Vec<CpuBuf>,
            mut dy: CpuBuf,
        ) -> Result<CpuBuf> {
            let b = cx.backend;
            let shape = Self::shape(cx);
            let [weight, _] = split::<Cpu, 2>(params.own, [WIDTH * WIDTH, WIDTH]);
            let add = !grads.first || self.0 == Fault::NeverOverwrites;
            let [mut dweight, mut dbias] = split_mut::<Cpu, 2>(grads.own, [WIDTH * WIDTH, WIDTH]);
            b.activation_backward(Activation::Silu, Cpu::all(&saved[0]), Cpu::all_mut(&mut dy))?;
            if self.0 == Fault::Overwrites {
                b.zero(Cpu::reborrow(&mut dweight))?;
                b.zero(Cpu::reborrow(&mut dbias))?;
            }
            b.linear_backward_weight(shape, Cpu::all(&dy), Cpu::all(x), dweight, dbias, add)?;
            let mut dx = b.alloc(MemoryKind::Activations, shape.rows * WIDTH)?;
            b.linear_backward_input(shape, Cpu::all(&dy), weight, Cpu::all_mut(&mut dx))?;
            if self.0 == Fault::InputGradient {
                b.add(Cpu::all(&dy), Cpu::all_mut(&mut dx))?;
            }
            Ok(dx)
        }
    }

    #[test]
    fn what_is_right_passes() {
        let found = block(&Layer(Fault::None), 4, 3).unwrap();
        let tensors: Vec<&str> =
            found.iter().map(|derivative| derivative.tensor.as_str()).collect();
        assert_eq!(tensors, ["w", "b", INPUT]);
        assert!(
            found.iter().all(|derivative| derivative.agrees() && derivative.backward.abs() > 0.1),
            "{found:?}"
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (fault, said) in [
            (Fault::InputGradient, "layer: input: the derivative is "),
            (Fault::Overwrites, "layer: the backward does not accumulate the gradient of w"),
            (
                Fault::NeverOverwrites,
                "layer: the first backward does not overwrite the gradient of w",
            ),
            (
                Fault::KeepsMore,
                "layer: 60 elements are saved for the backward, but saved_elems_per_row and \
                 saved_f32_per_row declare 48",
            ),
            (Fault::Order, "layer: tensors() has a tensor without weight decay before"),
            (Fault::Borrows, "layer: a block with tied parameters"),
        ] {
            let error = block(&Layer(fault), 4, 3).unwrap_err().to_string();
            assert!(error.starts_with(said), "{fault:?}: {error}");
        }
    }

    #[test]
    fn gradients_of_nothing_are_refused() {
        let tensors = [("w".to_string(), vec![1.0])];
        let error =
            derivatives(&tensors, |_| Ok((0.0, vec![("v".to_string(), vec![0.0])]))).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("gradient of v: there is no tensor of that name with 1 elements"),
            "{error}"
        );
    }
}
