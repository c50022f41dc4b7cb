//! Layer and RMS normalisation of rows.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Layer or RMS normalisation of every row.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// The number of rows.
    pub rows: usize,
    /// The number of columns, over which the statistics are taken.
    pub width: usize,
    /// The constant added to the variance, or to the mean square.
    pub epsilon: f32,
    /// Whether to subtract the mean first: layer normalisation (Ba, Kiros and Hinton, 2016).
    /// Otherwise RMS normalisation (Zhang and Sennrich, 2019), where the mean counts as zero.
    pub centred: bool,
}

/// Layer and RMS normalisation of rows.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait NormOps: Backend {
    /// Computes `y = (x - mean)·rstd·weight + bias` for every row, where rstd is 1 / √(mean of (x -
    /// mean)² + ε); overwrites `y` and `stats` (mean and rstd, 2·rows).
    fn norm(
        &self,
        shape: Norm,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
        stats: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes the residual addition at the end of a branch and the norm after it: `stream += x`,
    /// then [`NormOps::norm`] of the stream.
    #[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
    fn add_norm(
        &self,
        shape: Norm,
        x: Self::View<'_>,
        stream: Self::ViewMut<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
        stats: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Adds to `dx` (which holds the residual path's gradient), `dweight` and `dbias`.
    #[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
    fn norm_backward(
        &self,
        shape: Norm,
        dy: Self::View<'_>,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        stats: Self::View<'_>,
        dx: Self::ViewMut<'_>,
        dweight: Self::ViewMut<'_>,
        dbias: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of a norm of every row, with a bias or without.
    pub fn norm(s: Norm, bias: usize) -> Self {
        Self::new("norm", 2 * s.rows * s.width + s.width + bias)
            .with_shape([s.rows, s.width])
            .with_f32_elements(2 * s.rows)
    }

    /// Returns the cost of a residual addition and a norm.
    pub fn add_norm(s: Norm, bias: usize) -> Self {
        let norm = Self::norm(s, bias);
        Self {
            kernel: "add and norm",
            elements: norm.elements + (2 * s.rows * s.width) as f64,
            ..norm
        }
    }

    /// Returns the cost of the gradients of a norm's input, weight and bias.
    pub fn norm_backward(s: Norm, bias: usize) -> Self {
        Self::new("norm, backward", 4 * s.rows * s.width + s.width)
            .with_shape([s.rows, s.width])
            .with_f32_elements(2 * s.rows + 2 * (s.width + bias))
    }
}
