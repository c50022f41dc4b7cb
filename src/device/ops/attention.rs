//! Causal attention.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Causal multi-head attention over packed queries, keys and values; grouped-query attention
/// (Ainslie et al., 2023) if there are fewer key/value heads than query heads.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// The number of sequences.
    pub batch: usize,
    /// The number of positions in a sequence.
    pub time: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key/value heads, a divisor of `heads`: `heads / kv_heads` neighbouring query
    /// heads share one.
    pub kv_heads: usize,
    /// The width of a head.
    pub head_width: usize,
}

impl Attention {
    /// Returns the columns of a packed row of queries, keys and values.
    pub fn packed_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_width
    }

    /// Returns the number of query heads that share a key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Causal attention.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait AttentionOps: Backend {
    /// Computes attention over `qkv` (rows × [`Attention::packed_width`]: queries, keys, values)
    /// into `y` (rows × d); overwrites `y` and `lse` (b·h·t: the log of the softmax's denominator,
    /// all that the backward needs of the probabilities).
    fn attention(
        &self,
        shape: Attention,
        qkv: Self::View<'_>,
        y: Self::ViewMut<'_>,
        lse: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes attention of one sequence for its positions from `first` on: `qkv` has the rows of
    /// all positions, `y` and `lse` (h·(t − first)) those of the positions from `first` on.
    fn attention_from(
        &self,
        shape: Attention,
        first: usize,
        qkv: Self::View<'_>,
        y: Self::ViewMut<'_>,
        lse: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes the gradient of [`AttentionOps::attention`]; overwrites `dqkv`.
    fn attention_backward(
        &self,
        shape: Attention,
        qkv: Self::View<'_>,
        y: Self::View<'_>,
        lse: Self::View<'_>,
        dy: Self::View<'_>,
        dqkv: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of attention: two matmuls over half a square of scores.
    pub fn attention(s: Attention) -> Self {
        let rows = s.batch * s.time;
        let moved = rows * (s.packed_width() + s.heads * s.head_width);
        Self::new("attention", moved)
            .with_shape([s.batch, s.time, s.heads, s.head_width])
            .with_f32_elements(rows * s.heads)
            .with_flops(2.0 * scores(s))
    }

    /// Returns the cost of attention for the positions from `first` on: two matmuls over their
    /// scores.
    pub fn attention_from(s: Attention, first: usize) -> Self {
        let rows = s.batch * (s.time - first);
        let d = s.heads * s.head_width;
        let moved = s.batch * s.time * 2 * s.kv_heads * s.head_width + rows * 2 * d;
        let pairs = rows as f64 * (s.time + first) as f64 / 2.0;
        Self::new("attention, from a position", moved)
            .with_shape([s.batch, s.time, s.heads, s.head_width])
            .with_f32_elements(rows * s.heads)
            .with_flops(4.0 * pairs * d as f64)
    }

    /// Returns the cost of the backward: five matmuls over half a square of scores.
    pub fn attention_backward(s: Attention) -> Self {
        let rows = s.batch * s.time;
        let moved = 2 * rows * (s.packed_width() + s.heads * s.head_width);
        Self::new("attention, backward", moved)
            .with_shape([s.batch, s.time, s.heads, s.head_width])
            .with_f32_elements(rows * s.heads)
            .with_flops(5.0 * scores(s))
    }
}

/// Returns the FLOPs of one matmul over half a square of scores, for all heads.
fn scores(s: Attention) -> f64 {
    (s.batch * s.time) as f64 * s.time as f64 * (s.heads * s.head_width) as f64
}
