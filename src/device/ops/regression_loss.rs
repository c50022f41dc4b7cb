//! Regression losses.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// A loss of a prediction p and its target t, averaged over a row's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RegressionLoss {
    /// The squared error (p - t)².
    Squared,
    /// The absolute error |p - t|.
    Absolute,
    /// The Huber loss: ½(p - t)² up to this distance, linear beyond (Huber, 1964).
    Huber(f32),
    /// The binary cross-entropy of logits: -t·ln σ(p) - (1 - t)·ln(1 - σ(p)).
    BinaryCrossEntropy,
    /// The binary accuracy: 1 where the logit is on the same side of 0 as the target is of ½, else
    /// 0. It has no gradient.
    BinaryAccuracy,
}

/// A regression loss of rows of predictions and targets.
#[derive(Debug, Clone, Copy)]
pub struct Regression {
    /// The number of rows.
    pub rows: usize,
    /// The number of elements of a row.
    pub width: usize,
    /// The loss.
    pub loss: RegressionLoss,
    /// The factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Whether to replace the predictions by their gradient; otherwise they are unchanged.
    pub gradient: bool,
}

/// Regression losses.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait RegressionOps: Backend {
    /// Writes every row's mean loss (f32) to `losses` (f32), unscaled; with
    /// [`Regression::gradient`], overwrites the predictions with their scaled gradient. `weights`
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
    /// Returns the cost of the losses of rows, and of the gradient of the predictions in place.
    pub fn regression(s: Regression, weights: usize) -> Self {
        let passes = if s.gradient { 2 } else { 1 };
        let exact = s.rows * (s.width + 1) + weights;
        Self::new("regression", passes * s.rows * s.width)
            .with_shape([s.rows, s.width])
            .with_f32_elements(exact)
    }
}
