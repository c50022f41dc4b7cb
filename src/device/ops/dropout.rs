//! Dropout.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// The source of a dropout mask: counter-based, without a state.
///
/// Element `i` of the window is kept or dropped by a hash of (`key`, `offset + i`), so the mask is
/// the same in a recomputation and on any number of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// The probability to drop an element; kept ones are scaled by `1 / (1 - rate)`.
    pub rate: f32,
    /// The key of the random stream: run seed, step and layer.
    pub key: u64,
    /// The index of the window's first element in the global batch.
    pub offset: u64,
}

/// Dropout.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait DropoutOps: Backend {
    /// Drops and scales in place; the backward is the same call on the gradient.
    fn dropout(&self, mask: Dropout, x: Self::ViewMut<'_>) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of a mask in place.
    pub fn dropout(len: usize) -> Self {
        Self::new("dropout", 2 * len).with_shape([len])
    }
}
