//! Rotary position embeddings (RoPE).

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Rotary position embeddings (Su et al., "RoFormer", 2021) of the first heads of every row:
/// elements i and i + `head_width`/2 of a head are rotated by angle i of the position.
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    /// The number of sequences.
    pub batch: usize,
    /// The number of positions in a sequence.
    pub time: usize,
    /// The number of heads that are rotated.
    pub heads: usize,
    /// The width of a head, which is even.
    pub head_width: usize,
    /// The number of columns of a row.
    pub width: usize,
    /// Whether to rotate by the negative angles, as the backward does.
    pub inverse: bool,
}

/// Rotary position embeddings.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait RotaryOps: Backend {
    /// Rotates heads of `x` in place, by angles whose cosines and sines are the rows of `table` (t
    /// × head width, in f32: the cosines, then the sines).
    fn rotary(&self, shape: Rotary, table: Self::View<'_>, x: Self::ViewMut<'_>) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of a rotation of `len` elements in place.
    pub fn rotary(len: usize) -> Self {
        Self::new("rotary", 2 * len).with_shape([len])
    }
}
