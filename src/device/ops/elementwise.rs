//! Fills, copies, sums, elementwise multiplication.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Fills, copies, sums, elementwise multiplication.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ElementwiseOps: Backend {
    /// Computes `y = 0`.
    fn zero(&self, y: Self::ViewMut<'_>) -> Result<()>;
    /// Computes `y = x`.
    fn copy(&self, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Computes `y += x`.
    fn add(&self, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Computes `y *= x`.
    fn multiply(&self, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Computes `Σ x` in f64, in a fixed order.
    fn sum(&self, x: Self::View<'_>) -> Result<Self::Scalar>;
    /// Computes `Σ x²` in f64, summed in fixed chunks.
    fn sum_squares(&self, x: Self::View<'_>) -> Result<Self::Scalar>;
}

impl KernelCost {
    /// Returns the cost of a fill with zeros.
    pub fn zero(len: usize) -> Self {
        Self::new("zero", len).with_shape([len])
    }

    /// Returns the cost of a copy.
    pub fn copy(len: usize) -> Self {
        Self::new("copy", 2 * len).with_shape([len])
    }

    /// Returns the cost of a sum in place.
    pub fn add(len: usize) -> Self {
        Self::new("add", 3 * len).with_shape([len])
    }

    /// Returns the cost of a multiplication in place.
    pub fn multiply(len: usize) -> Self {
        Self::new("multiply", 3 * len).with_shape([len])
    }

    /// Returns the cost of a sum of f32, or of their squares.
    pub fn sum(len: usize) -> Self {
        Self::new("sum", 0).with_shape([len]).with_f32_elements(len)
    }
}
