//! Causal attention.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Causal multi-head attention over packed queries, keys and values; with fewer heads of keys and
/// values than of queries, grouped-query attention (Ainslie et al., 2023).
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Positions a sequence.
    pub time: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`: as many neighbouring heads of queries share
    /// one.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_width: usize,
}

impl Attention {
    /// Columns of a row of queries, keys and values.
    pub fn packed_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_width
    }

    /// Heads of queries that share one of keys and values.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Causal attention.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait AttentionOps: Backend {
    /// Attention over `qkv` (rows × [`Attention::packed_width`]: queries, keys, values) into `y`
    /// (rows × d); overwrites `y` and `lse` (b·h·t: log of the softmax's denominator, all that the
    /// backward needs of the probabilities).
    fn attention(
        &self,
        shape: Attention,
        qkv: Self::View<'_>,
        y: Self::ViewMut<'_>,
        lse: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// As [`AttentionOps::attention`] of one sequence, for its positions from `first` on: `qkv` has
    /// the rows of all positions, `y` and `lse` (h·(t − first)) have those of the later ones.
    fn attention_from(
        &self,
        shape: Attention,
        first: usize,
        qkv: Self::View<'_>,
        y: Self::ViewMut<'_>,
        lse: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Overwrites `dqkv`.
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
    /// Two products over half a square of scores.
    pub fn attention(s: Attention) -> Self {
        let rows = s.batch * s.time;
        let moved = rows * (s.packed_width() + s.heads * s.head_width);
        Self::moves("attention", moved)
            .on([s.batch, s.time, s.heads, s.head_width])
            .exactly(rows * s.heads)
            .computes(2.0 * scores(s))
    }

    /// Two products over the scores of the positions from `first` on.
    pub fn attention_from(s: Attention, first: usize) -> Self {
        let rows = s.batch * (s.time - first);
        let of_heads = s.heads * s.head_width;
        let moved = s.batch * s.time * 2 * s.kv_heads * s.head_width + rows * 2 * of_heads;
        let pairs = rows as f64 * (s.time + first) as f64 / 2.0;
        Self::moves("attention, from a position", moved)
            .on([s.batch, s.time, s.heads, s.head_width])
            .exactly(rows * s.heads)
            .computes(4.0 * pairs * of_heads as f64)
    }

    /// Five products over half a square of scores.
    pub fn attention_backward(s: Attention) -> Self {
        let rows = s.batch * s.time;
        let moved = 2 * rows * (s.packed_width() + s.heads * s.head_width);
        Self::moves("attention, backward", moved)
            .on([s.batch, s.time, s.heads, s.head_width])
            .exactly(rows * s.heads)
            .computes(5.0 * scores(s))
    }
}

/// Multiplications and additions of half a square of scores, for all heads.
fn scores(s: Attention) -> f64 {
    (s.batch * s.time) as f64 * s.time as f64 * (s.heads * s.head_width) as f64
}
