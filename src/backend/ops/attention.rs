//! Causal attention.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// Causal multi-head attention over packed queries, keys and values; with fewer heads of keys and values than of
/// queries, grouped-query attention (Ainslie et al., 2023).
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Positions a sequence.
    pub time: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`: as many neighbouring heads of queries share one.
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
    /// Attention over `qkv` (rows × [`Attention::packed_width`]: queries, keys, values) into `y` (rows × d); overwrites `y`
    /// and `lse` (b·h·t: log of the softmax's denominator, all that the backward needs of the probabilities).
    fn attention(
        &self,
        shape: Attention,
        qkv: Self::View<'_>,
        y: Self::ViewMut<'_>,
        lse: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// As [`AttentionOps::attention`] of one sequence, for its positions from `first` on: `qkv` has the rows of all positions, `y`
    /// and `lse` (h·(t − first)) have those of the later ones.
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

impl Work {
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
        let (rows, of_heads) = (s.batch * (s.time - first), s.heads * s.head_width);
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

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, close, down, random, up, up_f32, wide};

    pub fn attentions<B: Kernels>(b: &B) -> Results {
        let mut results = Vec::new();
        let alone = [
            (1, 1, 1, 1),
            (2, 2, 2, 3),
            (2, 31, 2, 20),
            (2, 33, 3, 5),
            (1, 130, 2, 33),
            (3, 64, 1, 32),
            (2, 129, 2, 64),
            (1, 65, 1, 128),
            (1, 257, 1, 1),
            (1, 257, 1, 80),
            (1, 40, 1, 96),
            (1, 33, 1, 256),
        ];
        let alone = alone.map(|(batch, time, heads, head_width)| (batch, time, heads, heads, head_width));
        // Heads of keys and values that several of queries share.
        let shared = [(2, 33, 6, 2, 5), (1, 130, 3, 1, 33), (2, 129, 4, 2, 64), (1, 65, 2, 1, 128), (1, 257, 2, 1, 20)];
        // Where tensor cores compute: heads that end within a block of columns, below and above a width of 128.
        let narrow = [(1, 140, 1, 1, 24), (1, 130, 2, 1, 200)];
        let narrow = &narrow[..if b.computes_narrow() { narrow.len() } else { 0 }];
        for (batch, time, heads, kv_heads, head_width) in alone.into_iter().chain(shared).chain(narrow.iter().copied())
        {
            let shape = Attention { batch, time, heads, kv_heads, head_width };
            let (d, packed) = (heads * head_width, shape.packed_width());
            let rows = batch * time;
            let (qkv, dy) = (random(b, 27, rows * packed), random(b, 28, rows * d));
            let (xb, dyb) = (up(b, &qkv), up(b, &dy));
            let (mut y, mut lse) = (up(b, &vec![0.0; rows * d]), up_f32(b, &vec![0.0; rows * heads]));
            b.attention(shape, B::all(&xb), B::all_mut(&mut y), B::all_mut(&mut lse)).unwrap();
            let mut dqkv = up(b, &vec![0.0; rows * packed]);
            let views = (B::all(&xb), B::all(&y), B::all(&lse), B::all(&dyb));
            b.attention_backward(shape, views.0, views.1, views.2, views.3, B::all_mut(&mut dqkv)).unwrap();

            let (mut want_y, mut want_d) = (vec![0.0; rows * d], vec![0.0; rows * packed]);
            let scale = 1.0 / (head_width as f64).sqrt();
            for (sequence, head) in (0..batch * heads).map(|i| (i / heads, i % heads)) {
                let key = heads + head / (heads / kv_heads);
                let places = [head, key, key + kv_heads];
                let at =
                    |part: usize, t: usize, i: usize| (sequence * time + t) * packed + places[part] * head_width + i;
                let of_y = |t: usize, i: usize| (sequence * time + t) * d + head * head_width + i;
                for t in 0..time {
                    let dot = |part_a: usize, ta: usize, part_b: usize, tb: usize| -> f64 {
                        (0..head_width)
                            .map(|i| f64::from(qkv[at(part_a, ta, i)]) * f64::from(qkv[at(part_b, tb, i)]))
                            .sum()
                    };
                    let scores: Vec<f64> = (0..=t).map(|s| dot(0, t, 1, s) * scale).collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                    let p: Vec<f64> = scores.iter().map(|s| (s - top).exp() / total).collect();
                    let dp: Vec<f64> = (0..=t)
                        .map(|s| (0..head_width).map(|i| f64::from(dy[of_y(t, i)]) * f64::from(qkv[at(2, s, i)])).sum())
                        .collect();
                    let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                    for s in 0..=t {
                        let ds = p[s] * (dp[s] - mean) * scale;
                        for i in 0..head_width {
                            want_y[of_y(t, i)] += p[s] * f64::from(qkv[at(2, s, i)]);
                            want_d[at(0, t, i)] += ds * f64::from(qkv[at(1, s, i)]);
                            want_d[at(1, s, i)] += ds * f64::from(qkv[at(0, t, i)]);
                            want_d[at(2, s, i)] += p[s] * f64::from(dy[of_y(t, i)]);
                        }
                    }
                }
            }
            close(b, &y, &want_y, "attention");
            close(b, &dqkv, &want_d, "attention dqkv");
            results.extend([down(b, &y), down(b, &lse), down(b, &dqkv)]);
            if batch == 1 {
                let first = time / 2;
                let rows = time - first;
                let (mut y, mut later) = (up(b, &vec![0.0; rows * d]), up_f32(b, &vec![0.0; rows * heads]));
                b.attention_from(shape, first, B::all(&xb), B::all_mut(&mut y), B::all_mut(&mut later)).unwrap();
                close(b, &y, &want_y[first * d..], "attention from a position");
                let want: Vec<f32> = down(b, &lse).chunks(time).flat_map(|of_head| of_head[first..].to_vec()).collect();
                close(b, &later, &wide(&want), "denominators from a position");
                results.extend([down(b, &y), down(b, &later)]);
            }
        }
        results
    }
}
