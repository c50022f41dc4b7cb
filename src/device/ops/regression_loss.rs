//! Losses of numbers.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Measure that compares rows of predictions with rows of targets; the mean over a row's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Deviation {
    /// (p - t)².
    Squared,
    /// |p - t|.
    Absolute,
    /// ½(p - t)² up to this distance, linear beyond (Huber, 1964).
    Huber(f32),
    /// -t·ln σ(p) - (1 - t)·ln(1 - σ(p)): binary cross-entropy of logits.
    Binary,
    /// 1 where a logit and its target are on the same side, of 0 and of ½, else 0; without a slope.
    Agreement,
}

/// Rows of predictions and of targets.
#[derive(Debug, Clone, Copy)]
pub struct Regression {
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Measure of the comparison.
    pub by: Deviation,
    /// Factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Replace the predictions by their gradient; without it they are left alone.
    pub gradient: bool,
}

/// Losses of numbers.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait RegressionOps: Backend {
    /// Writes every row's mean deviation from its targets (f32) to `losses` (f32), unscaled; with
    /// [`Regression::gradient`], overwrites the predictions by their scaled gradient. `weights`
    /// (f32) has a factor of loss and gradient for every row, or is empty.
    fn regression(
        &self,
        shape: Regression,
        predictions: Self::ViewMut<'_>,
        targets: Self::View<'_>,
        weights: Self::View<'_>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Losses of rows of numbers, and the gradient of the predictions in their place.
    pub fn regression(s: Regression, weights: usize) -> Self {
        let passes = if s.gradient { 2 } else { 1 };
        let exact = s.rows * (s.width + 1) + weights;
        Self::moves("regression", passes * s.rows * s.width).on([s.rows, s.width]).exactly(exact)
    }
}
