//! Rotary positions.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Rotary positions (Su et al., "RoFormer", 2021) of the first heads of every row: elements i and i
/// + `head_width`/2 of a head turn by angle i of the position.
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    /// Sequences.
    pub batch: usize,
    /// Positions a sequence.
    pub time: usize,
    /// Heads that turn.
    pub heads: usize,
    /// Width of one head; even.
    pub head_width: usize,
    /// Columns of a row.
    pub width: usize,
    /// Turn back: the backward.
    pub back: bool,
}

/// Rotary positions.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait RotaryOps: Backend {
    /// Turns heads of `x` in place, by angles whose cosines and sines are the rows of `table` (t ×
    /// head width: one half each, in f32).
    fn rotary(&self, shape: Rotary, table: Self::View<'_>, x: Self::ViewMut<'_>) -> Result<()>;
}

impl KernelCost {
    /// A turn of so many elements in place.
    pub fn rotary(len: usize) -> Self {
        Self::moves("rotary", 2 * len).on([len])
    }
}
