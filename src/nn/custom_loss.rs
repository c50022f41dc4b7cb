//! Losses and metrics of a program, each by its forward on a [`Tape`].

use std::any::Any;
use std::any::TypeId;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::autograd::{Tape, Var};
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::Cpu;
use hpctrain_cuda::Cuda;
use hpctrain_data::Target;
use hpctrain_device::Kernels;

/// A loss by its forward. It is computed in f32 on every device, where `precision.dtype = tf32` rounds
/// the operands of matmuls, sums of columns included; its gradient follows from the forward.
///
/// ```
/// use hpctrain_base::error::Result;
/// use hpctrain_device::{Activation, Kernels};
/// use hpctrain_nn::autograd::{Tape, Var};
/// use hpctrain_nn::loss::{CustomLoss, LossFunction};
///
/// /// The Charbonnier loss, √((p - t)² + ε²), of one value per sample.
/// struct Charbonnier(f32);
///
/// impl LossFunction for Charbonnier {
///     fn name(&self) -> String {
///         "charbonnier".into()
///     }
///
///     fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>> {
///         let values = tape.values(output.width())?;
///         let error = tape.subtract(output, &values)?;
///         let square = tape.activation(&error, Activation::Square)?;
///         let square = tape.activation(&square, Activation::Shift(self.0 * self.0))?;
///         // √x = exp(½ ln x)
///         let ln = tape.activation(&square, Activation::Ln)?;
///         let half = tape.scale(&ln, 0.5)?;
///         let root = tape.activation(&half, Activation::Exp)?;
///         tape.sum_columns(&root)
///     }
/// }
///
/// assert_eq!(CustomLoss::new(Charbonnier(1e-3)).name(), "charbonnier");
/// ```
pub trait LossFunction: Send + Sync + 'static {
    /// Returns the name of the loss, which checkpoints store.
    fn name(&self) -> String;

    /// Returns the targets that samples need, for a network with `outputs` output elements per
    /// prediction: by default as many values.
    fn target(&self, outputs: usize) -> Target {
        Target::Values(outputs)
    }

    /// Returns true if the loss of a sample depends on the other samples of the batch. The forward
    /// then gets the outputs of the whole global batch, all-gathered from all ranks in the order of
    /// the samples, and an evaluation those of its `eval.batch` samples.
    fn over_batch(&self) -> bool {
        false
    }

    /// Returns the loss of each row of `output` (rows × outputs) as rows × 1.
    ///
    /// # Errors
    /// Returns the errors of the operations.
    fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>>;
}

/// A number that evaluations measure besides the loss, by its forward: a mean over all predictions.
pub trait MetricFunction: Send + Sync + 'static {
    /// Returns its name in records.
    fn name(&self) -> String;

    /// Returns the value of each row of `output` (rows × outputs) as rows × 1.
    ///
    /// # Errors
    /// Returns the errors of the operations.
    fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>>;
}

/// The forward of a loss or a metric on a device.
pub(super) trait RowValues<B: Kernels>: Send + Sync {
    fn forward(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>>;
}

/// Makes the forward for a device.
trait Make: Send + Sync {
    fn on_cpu(&self) -> Box<dyn RowValues<Cpu>>;
    fn on_gpu(&self) -> Box<dyn RowValues<Cuda>>;
}

/// Returns the forward for a device.
fn make<B: Kernels>(make: &dyn Make) -> Result<Box<dyn RowValues<B>>> {
    // The CPU and CUDA are the only devices.
    let made: Box<dyn Any> = match TypeId::of::<B>() == TypeId::of::<Cpu>() {
        true => Box::new(make.on_cpu()),
        false => Box::new(make.on_gpu()),
    };
    let made: Result<Box<Box<dyn RowValues<B>>>, _> = made.downcast();
    made.map(|made| *made).map_err(|_| Error::internal("a loss for another device"))
}

struct OfLoss<F>(Arc<F>);

impl<B: Kernels, F: LossFunction> RowValues<B> for OfLoss<F> {
    fn forward(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>> {
        self.0.forward(tape, output)
    }
}

impl<F: LossFunction> Make for OfLoss<F> {
    fn on_cpu(&self) -> Box<dyn RowValues<Cpu>> {
        Box::new(Self(self.0.clone()))
    }

    fn on_gpu(&self) -> Box<dyn RowValues<Cuda>> {
        Box::new(Self(self.0.clone()))
    }
}

struct OfMetric<F>(Arc<F>);

impl<B: Kernels, F: MetricFunction> RowValues<B> for OfMetric<F> {
    fn forward(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>> {
        self.0.forward(tape, output)
    }
}

impl<F: MetricFunction> Make for OfMetric<F> {
    fn on_cpu(&self) -> Box<dyn RowValues<Cpu>> {
        Box::new(Self(self.0.clone()))
    }

    fn on_gpu(&self) -> Box<dyn RowValues<Cuda>> {
        Box::new(Self(self.0.clone()))
    }
}

/// A custom [loss](LossFunction) on any device. In files only its name is stored.
#[derive(Clone, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct CustomLoss {
    name: String,
    built: Option<Built>,
}

/// The function of a loss.
#[derive(Clone)]
struct Built {
    over_batch: bool,
    target: Arc<dyn Fn(usize) -> Target + Send + Sync>,
    make: Arc<dyn Make>,
}

impl CustomLoss {
    /// Creates a custom loss from its function.
    pub fn new(function: impl LossFunction) -> Self {
        let function = Arc::new(function);
        let of_targets = function.clone();
        let built = Built {
            over_batch: function.over_batch(),
            target: Arc::new(move |outputs| of_targets.target(outputs)),
            make: Arc::new(OfLoss(function.clone())),
        };
        Self { name: function.name(), built: Some(built) }
    }

    /// Returns the name of the loss.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns true if this program has the function of the loss, and not only its name from a
    /// file.
    pub fn is_built(&self) -> bool {
        self.built.is_some()
    }

    /// Returns true if the loss of a sample depends on the other samples of the batch.
    pub fn over_batch(&self) -> bool {
        self.built.as_ref().is_some_and(|built| built.over_batch)
    }

    /// Returns the targets that samples need.
    pub fn target(&self, outputs: usize) -> Target {
        self.built.as_ref().map_or(Target::Unknown, |built| (built.target)(outputs))
    }

    /// Returns the forward on a device.
    pub(super) fn on_device<B: Kernels>(&self) -> Result<Box<dyn RowValues<B>>> {
        match &self.built {
            Some(built) => make(&*built.make),
            None => {
                Err(Error::input(format!("loss {:?} is defined by another program", self.name))
                    .hint("use the program that defines it"))
            }
        }
    }
}

/// Custom losses are equal if their names are equal.
impl PartialEq for CustomLoss {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for CustomLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CustomLoss({:?})", self.name)
    }
}

impl From<String> for CustomLoss {
    fn from(name: String) -> Self {
        Self { name, built: None }
    }
}

impl From<CustomLoss> for String {
    fn from(loss: CustomLoss) -> Self {
        loss.name
    }
}

/// A custom [metric](MetricFunction) on any device.
#[derive(Clone)]
pub struct CustomMetric {
    name: String,
    make: Arc<dyn Make>,
}

impl CustomMetric {
    /// Creates a custom metric from its function.
    pub fn new(function: impl MetricFunction) -> Self {
        Self { name: function.name(), make: Arc::new(OfMetric(Arc::new(function))) }
    }

    /// Returns its name in records.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the forward on a device.
    pub(super) fn on_device<B: Kernels>(&self) -> Result<Box<dyn RowValues<B>>> {
        make(&*self.make)
    }
}

/// Custom metrics are equal if their names are equal.
impl PartialEq for CustomMetric {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for CustomMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CustomMetric({:?})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MicroBatch;
    use crate::autograd::Targets;
    use crate::gradcheck::derivatives;
    use crate::loss::{ContrastiveLoss, Loss, Objective};
    use hpctrain_data::SampleFields;
    use hpctrain_device::{Activation, Backend as _, MemoryKind, RegressionLoss};

    const ROWS: usize = 6;
    const WIDTH: usize = 4;

    /// Losses by their forwards.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Case {
        /// Cross-entropy with label smoothing.
        Classes,
        /// The mean squared error.
        Squares,
        /// ln cosh of the errors.
        LnCosh,
        /// In-batch negatives: the first half of each row belongs to the second half of the same.
        Pairs,
        /// Two numbers for each row.
        Wide,
    }

    impl LossFunction for Case {
        fn name(&self) -> String {
            format!("{self:?}")
        }

        fn target(&self, outputs: usize) -> Target {
            if *self == Case::Classes { Target::Class(outputs) } else { Target::Values(outputs) }
        }

        fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, x: &Var<B>) -> Result<Var<B>> {
            match self {
                Case::Classes => tape.cross_entropy(x, Targets::Classes, 0.2),
                Case::Squares => tape.regression(x, RegressionLoss::Squared),
                Case::LnCosh => {
                    let values = tape.values(WIDTH)?;
                    let error = tape.subtract(x, &values)?;
                    let opposite = tape.scale(&error, -1.0)?;
                    let one = tape.activation(&error, Activation::Exp)?;
                    let other = tape.activation(&opposite, Activation::Exp)?;
                    let sum = tape.add(&one, &other)?;
                    let half = tape.scale(&sum, 0.5)?;
                    let ln = tape.activation(&half, Activation::Ln)?;
                    tape.sum_columns(&ln)
                }
                Case::Pairs => {
                    let query = tape.columns(x, 0..WIDTH / 2)?;
                    let key = tape.columns(x, WIDTH / 2..WIDTH)?;
                    let query = tape.normalize(&query, 1e-6)?;
                    let key = tape.normalize(&key, 1e-6)?;
                    let logits = tape.matmul_transposed(&query, &key)?;
                    let logits = tape.scale(&logits, 5.0)?;
                    tape.cross_entropy(&logits, Targets::Diagonal, 0.0)
                }
                Case::Wide => tape.columns(x, 0..2),
            }
        }
    }

    fn samples(is_weighted: bool) -> MicroBatch<Cpu> {
        let classes = [0, 2, 1, 2, 0, 3];
        let values: Vec<f32> = (0..ROWS * WIDTH).map(|i| ((i * 7) % 5) as f32 * 0.3).collect();
        let weights = [0.5, 1.0, 2.0, 0.0, 1.5, 1.0];
        let weights = if is_weighted { &weights[..] } else { &[] };
        let fields = SampleFields {
            classes: &classes[..],
            values: &values[..],
            weights,
            ..SampleFields::default()
        };
        MicroBatch::upload(&Cpu::new(1), fields, ROWS, 1, 0).unwrap()
    }

    /// Returns the sum of the losses and the gradient of the output.
    fn differentiate(
        loss: &Loss,
        micro: &MicroBatch<Cpu>,
        output: &[f32],
    ) -> Result<(f64, Vec<f32>)> {
        let backend = Cpu::new(2);
        let objective = Objective::<Cpu>::new(loss.clone(), WIDTH, false);
        let mut output = backend.upload(MemoryKind::Activations, output).unwrap();
        let sum = objective.train(&backend, None, micro, &mut output, 1.0)?;
        let mut gradient = vec![0.0; Cpu::len(&output)];
        backend.download(Cpu::all(&output), &mut gradient)?;
        Ok((backend.read(sum)?, gradient))
    }

    fn output() -> Vec<f32> {
        (0..ROWS * WIDTH).map(|i| ((i * 37) % 23) as f32 * 0.11 - 1.0).collect()
    }

    #[test]
    fn gradients_of_losses_agree_with_finite_differences() {
        let contrastive = CustomLoss::new(ContrastiveLoss { temperature: 0.5 });
        let cases = [Case::Classes, Case::Squares, Case::LnCosh, Case::Pairs].map(CustomLoss::new);
        for loss in cases.into_iter().chain([contrastive]) {
            for is_weighted in [false, true] {
                let micro = samples(is_weighted);
                let loss = Loss::Custom(loss.clone());
                let output = vec![("output".to_owned(), output())];
                let found = derivatives(&output, |tensors| {
                    let (value, gradient) = differentiate(&loss, &micro, &tensors[0].1)?;
                    Ok((value, vec![("output".to_owned(), gradient)]))
                });
                found.unwrap_or_else(|e| panic!("{loss:?}: {e}"));
            }
        }
    }

    #[test]
    fn losses_by_the_same_kernels_have_the_bits_of_the_built_in_ones() {
        for is_weighted in [false, true] {
            let micro = samples(is_weighted);
            for (case, built_in) in [
                (Case::Classes, Loss::CrossEntropy { smoothing: 0.2, weights: vec![] }),
                (Case::Squares, Loss::Deviation(RegressionLoss::Squared)),
            ] {
                let custom = Loss::Custom(CustomLoss::new(case));
                let one = differentiate(&custom, &micro, &output()).unwrap();
                let other = differentiate(&built_in, &micro, &output()).unwrap();
                assert_eq!(one.0, other.0, "{case:?}");
                let close = one.1.iter().zip(&other.1).all(|(a, b)| (a - b).abs() < 1e-6);
                assert!(close, "{case:?}: {:?} {:?}", one.1, other.1);
            }
        }
    }

    #[test]
    fn a_pair_that_is_nearer_than_all_others_has_a_small_loss() {
        let micro = samples(false);
        let distinct: Vec<f32> = (0..ROWS)
            .flat_map(|row| {
                let angle = row as f32 * std::f32::consts::TAU / ROWS as f32;
                [angle.cos(), angle.sin(), angle.cos(), angle.sin()]
            })
            .collect();
        let loss = Loss::Custom(CustomLoss::new(Case::Pairs));
        let [near, far] =
            [distinct, output()].map(|output| differentiate(&loss, &micro, &output).unwrap().0);
        assert!(near < 0.5 * far, "{near} {far}");
    }

    #[test]
    fn a_loss_needs_one_number_for_each_row_and_its_program() {
        let refused = |loss: CustomLoss| {
            differentiate(&Loss::Custom(loss), &samples(false), &output()).unwrap_err().to_string()
        };
        assert_eq!(
            refused(CustomLoss::new(Case::Wide)),
            "Wide: its forward returns 6×2, not 6×1\nhint: return one number for each row of the \
             output, such as by Tape::sum_columns"
        );
        let named: CustomLoss = String::from("focal").into();
        assert!(refused(named).contains("loss \"focal\" is defined by another program"));
    }

    #[test]
    fn memory_of_a_loss_is_known_from_shapes() {
        let of = |loss: CustomLoss, rows| {
            let loss = Loss::Custom(loss);
            Objective::<Cpu>::new(loss, WIDTH, false).peak_elements(rows).unwrap()
        };
        // Similarities in four copies at most: saved, scaled, in the kernel, and their gradient.
        let contrastive = of(CustomLoss::new(ContrastiveLoss { temperature: 0.5 }), 100);
        assert!((3 * 100 * 100..5 * 100 * 100).contains(&contrastive), "{contrastive}");
        let squares = of(CustomLoss::new(Case::Squares), 100);
        assert!((3 * 400..5 * 400).contains(&squares), "{squares}");
    }
}
