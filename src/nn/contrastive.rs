//! The supervised contrastive loss of a whole batch.

use super::autograd::{Tape, Var};
use super::loss::LossFunction;
use hpctrain_base::error::Result;
use hpctrain_data::Target;
use hpctrain_device::Kernels;

/// The constant that is added to the mean square of an embedding, which may be zero.
const EPSILON: f32 = 1e-12;

/// The most classes: their numbers are only compared.
const CLASSES: usize = u32::MAX as usize;

/// The supervised contrastive loss (Khosla et al., 2020) with in-batch negatives: the output of each
/// sample is an embedding, which is drawn to those of its class in the global batch and pushed away
/// from all others. With two samples of each class, such as two views of an image, it is the NT-Xent
/// loss of SimCLR (Chen et al., 2020). Embeddings are scaled to length 1 first.
#[derive(Debug, Clone, Copy)]
pub struct ContrastiveLoss {
    /// The divisor of similarities.
    pub temperature: f32,
}

impl LossFunction for ContrastiveLoss {
    fn name(&self) -> String {
        "contrastive".into()
    }

    fn target(&self, _: usize) -> Target {
        Target::Class(CLASSES)
    }

    fn over_batch(&self) -> bool {
        true
    }

    fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>> {
        let z = tape.normalize(output, EPSILON)?;
        let similarities = tape.matmul_transposed(&z, &z)?;
        let similarities = tape.scale(&similarities, 1.0 / self.temperature)?;
        tape.contrastive(&similarities)
    }
}
