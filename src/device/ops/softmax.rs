//! The softmax of rows.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// The softmax of rows.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait SoftmaxOps: Backend {
    /// Computes `y = softmax(x)` over rows of `width` elements; overwrites.
    fn softmax(&self, width: usize, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Replaces the gradient of `y = softmax(x)` with that of `x`.
    fn softmax_backward(
        &self,
        width: usize,
        y: Self::View<'_>,
        dy: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of a softmax of rows.
    pub fn softmax(len: usize) -> Self {
        Self::new("softmax", 2 * len).with_shape([len])
    }

    /// Returns the cost of its gradient in place.
    pub fn softmax_backward(len: usize) -> Self {
        Self::new("softmax, backward", 3 * len).with_shape([len])
    }
}
