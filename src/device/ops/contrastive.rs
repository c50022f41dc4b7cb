//! The supervised contrastive loss.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// The similarities of some samples of a batch with all of them.
#[derive(Debug, Clone, Copy)]
pub struct Contrastive {
    /// The number of rows: the samples whose losses are computed.
    pub rows: usize,
    /// The number of columns: the samples of the batch.
    pub columns: usize,
    /// The column of the first row's own sample; the others follow.
    pub first: usize,
    /// The factor of the gradient: 1 / (samples in the global batch).
    pub scale: f32,
    /// Whether to replace the similarities by their gradient; otherwise they are unchanged.
    pub gradient: bool,
}

/// The supervised contrastive loss (Khosla et al., 2020).
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ContrastiveOps: Backend {
    /// Writes the loss of every row to `losses` (f32): the mean of `-log softmax(similarities)` over
    /// the columns of the row's class, where the softmax is over all columns but the row's own. A
    /// row that is the only one of its class has the loss 0. `classes` has the class of every
    /// column; `weights` (f32) a factor of loss and gradient for every row, or is empty.
    fn contrastive(
        &self,
        shape: Contrastive,
        similarities: Self::ViewMut<'_>,
        classes: &Self::IndexBuf,
        weights: Self::View<'_>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of the losses of rows, and of the gradient of the similarities in place.
    pub fn contrastive(s: Contrastive, weights: usize) -> Self {
        let passes = if s.gradient { 3 } else { 2 };
        Self::new("contrastive", passes * s.rows * s.columns)
            .with_shape([s.rows, s.columns])
            .with_f32_elements(s.rows + weights)
    }
}
