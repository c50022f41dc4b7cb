//! Gated activations.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Gated activations.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait SwigluOps: Backend {
    /// Computes SwiGLU (Shazeer, "GLU variants improve transformer", 2020): `y = silu(gate)·up`,
    /// where a row of `x` (2·`width`) is the gates, then the ups; overwrites `y`.
    fn swiglu(&self, width: usize, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Replaces the gates and ups of `x` with their gradients.
    fn swiglu_backward(&self, width: usize, x: Self::ViewMut<'_>, dy: Self::View<'_>)
    -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of `len` gated elements.
    pub fn swiglu(len: usize) -> Self {
        Self::new("swiglu", 3 * len).with_shape([len])
    }

    /// Returns the cost of their gradients in place of gates and ups.
    pub fn swiglu_backward(len: usize) -> Self {
        Self::new("swiglu, backward", 5 * len).with_shape([len])
    }
}
