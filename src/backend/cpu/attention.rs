//! Causal multi-head attention whose memory is linear in the context.
//!
//! Each (sequence, head) is one task. Queries go in blocks; the scores of a block live in a scratch of
//! block × context and are recomputed in the backward from the saved log-denominators
//! (Dao et al., "FlashAttention", 2022, without its tiling of keys, which a CPU's cache does not need).

use std::cell::RefCell;

use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};

use super::Cpu;
use super::math::{LANES, exp, max, simd, sum, sum2};
use super::product::multiply;
use super::threads::Threads;
use crate::backend::{Attention, AttentionOps, Work};
use crate::error::Result;

/// Queries in a block.
const BLOCK: usize = 64;

thread_local! {
    /// Scores of one block and their gradient; kept, because a fresh allocation would fault page by page.
    static SCRATCH: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// The columns of one head of queries, and of the keys and values that it sees, in one sequence's packed rows.
fn heads<'a>(qkv: &'a [f32], shape: Attention, sequence: usize, head: usize) -> [ArrayView2<'a, f32>; 3] {
    let (t, w, width) = (shape.time, shape.head_width, shape.packed_width());
    let rows = &qkv[sequence * t * width..][..t * width];
    let rows = ArrayView2::from_shape((t, width), rows).expect("t packed rows");
    let key = shape.heads + head / shape.group();
    [head, key, key + shape.kv_heads].map(|place| rows.slice_move(s![.., place * w..(place + 1) * w]))
}

/// The disjoint columns of every sequence's rows, `w` wide each.
fn columns(x: &mut [f32], t: usize, width: usize, w: usize) -> impl Iterator<Item = Vec<ArrayViewMut2<'_, f32>>> {
    x.chunks_exact_mut(t * width).map(move |rows| {
        let mut rest = ArrayViewMut2::from_shape((t, width), rows).expect("t rows");
        let mut parts = Vec::with_capacity(width / w);
        while rest.ncols() > 0 {
            let (head, others) = rest.split_at(Axis(1), w);
            parts.push(head);
            rest = others;
        }
        parts
    })
}

/// Of every sequence the positions from `from` on.
pub fn forward(threads: &Threads, shape: Attention, from: usize, qkv: &[f32], y: &mut [f32], lse: &mut [f32]) {
    let (t, w) = (shape.time, shape.head_width);
    let y = columns(y, t - from, shape.heads * w, w).flatten();
    threads.each(y.zip(lse.chunks_mut(t - from)).enumerate(), |(i, (mut y, lse))| {
        let [q, k, v] = heads(qkv, shape, i / shape.heads, i % shape.heads);
        SCRATCH.with_borrow_mut(|[scores, _]| {
            for first in (from..t).step_by(BLOCK) {
                let last = (first + BLOCK).min(t);
                let here = first - from..last - from;
                let mut p = block(scores, last - first, last);
                multiply(q.slice(s![first..last, ..]), k.slice(s![..last, ..]).reversed_axes(), p.view_mut(), false);
                softmax_rows(&mut p, first, shape, &mut lse[here.clone()]);
                multiply(p.view(), v.slice(s![..last, ..]), y.slice_mut(s![here, ..]), false);
            }
        });
    });
}

pub fn backward(
    threads: &Threads,
    shape: Attention,
    qkv: &[f32],
    y: &[f32],
    lse: &[f32],
    dy: &[f32],
    dqkv: &mut [f32],
) {
    let (t, w) = (shape.time, shape.head_width);
    let d = shape.heads * w;
    // A task is one head of keys and values, with the heads of queries that share it one after the other.
    let group = shape.group();
    let tasks = columns(dqkv, t, shape.packed_width(), w).flat_map(|mut dq| {
        let mut dk = dq.split_off(shape.heads);
        let dv = dk.split_off(shape.kv_heads);
        let mut dq = dq.into_iter();
        let groups: Vec<Vec<_>> = (0..shape.kv_heads).map(|_| dq.by_ref().take(group).collect()).collect();
        groups.into_iter().zip(dk).zip(dv)
    });
    threads.each(tasks.zip(lse.chunks(group * t)).enumerate(), |(i, (((dqs, mut dk), mut dv), lse))| {
        let (sequence, first) = (i / shape.kv_heads, i % shape.kv_heads * group);
        for (shared, (dq, lse)) in dqs.into_iter().zip(lse.chunks(t)).enumerate() {
            let head = first + shared;
            let rows = |x| ArrayView2::from_shape((t, d), x).expect("t rows of d");
            let of_head = s![.., head * w..(head + 1) * w];
            let y = rows(&y[sequence * t * d..][..t * d]).slice_move(of_head);
            let dy = rows(&dy[sequence * t * d..][..t * d]).slice_move(of_head);
            let to = [dq, dk.view_mut(), dv.view_mut()];
            backward_of_head(shape, heads(qkv, shape, sequence, head), y, lse, dy, to, shared > 0);
        }
    });
}

/// The gradients of one head's queries, keys and values; those of the keys and values are added to if `add`.
fn backward_of_head(
    shape: Attention,
    [q, k, v]: [ArrayView2<'_, f32>; 3],
    y: ArrayView2<'_, f32>,
    lse: &[f32],
    dy: ArrayView2<'_, f32>,
    [mut dq, mut dk, mut dv]: [ArrayViewMut2<'_, f32>; 3],
    add: bool,
) {
    let (t, scale) = (shape.time, scale(shape));
    SCRATCH.with_borrow_mut(|[scores, gradients]| {
        // The last block sees all keys: it overwrites dk and dv, the earlier ones add.
        for first in (0..t).step_by(BLOCK).rev() {
            let last = (first + BLOCK).min(t);
            let add = add || last < t;
            let (mut p, mut dp) = (block(scores, last - first, last), block(gradients, last - first, last));
            let (q, dy) = (q.slice(s![first..last, ..]), dy.slice(s![first..last, ..]));
            let (k, v) = (k.slice(s![..last, ..]), v.slice(s![..last, ..]));
            multiply(q, k.reversed_axes(), p.view_mut(), false);
            multiply(dy, v.reversed_axes(), dp.view_mut(), false);
            for (row, (mut p, mut dp)) in p.rows_mut().into_iter().zip(dp.rows_mut()).enumerate() {
                let (Some(p), Some(dp)) = (p.as_slice_mut(), dp.as_slice_mut()) else { continue };
                let (y, dy) = (y.row(first + row), dy.row(row));
                let lse = lse[first + row];
                let seen = mask(p, first + row + 1);
                simd(
                    #[inline(always)]
                    || {
                        let dot = match (y.as_slice(), dy.as_slice()) {
                            (Some(y), Some(dy)) => sum2(y, dy, |y, dy| y * dy),
                            _ => 0.0,
                        };
                        for (p, dp) in p[..seen].iter_mut().zip(&mut dp[..seen]) {
                            *p = exp(*p * scale - lse);
                            *dp = *p * (*dp - dot) * scale;
                        }
                    },
                );
                p[seen..].fill(0.0);
                dp[seen..].fill(0.0);
            }
            multiply(dp.view(), k, dq.slice_mut(s![first..last, ..]), false);
            multiply(dp.view().reversed_axes(), q, dk.slice_mut(s![..last, ..]), add);
            multiply(p.view().reversed_axes(), dy, dv.slice_mut(s![..last, ..]), add);
        }
    });
}

fn scale(shape: Attention) -> f32 {
    1.0 / (shape.head_width as f32).sqrt()
}

/// A rows × columns matrix in the scratch, contents unspecified.
fn block(scratch: &mut Vec<f32>, rows: usize, columns: usize) -> ArrayViewMut2<'_, f32> {
    if scratch.len() < rows * columns {
        scratch.resize(rows * columns, 0.0);
    }
    ArrayViewMut2::from_shape((rows, columns), &mut scratch[..rows * columns]).expect("cut to size")
}

/// Masks the scores after the first `seen` as far as whole vectors reach, where the exponential will make them
/// zero; returns the number of scores up to there. Scores beyond are not computed at all.
fn mask(scores: &mut [f32], seen: usize) -> usize {
    let computed = seen.next_multiple_of(LANES).min(scores.len());
    scores[seen..computed].fill(f32::NEG_INFINITY);
    computed
}

/// Turns scores into probabilities; query `first + row` sees keys up to itself.
fn softmax_rows(scores: &mut ArrayViewMut2<'_, f32>, first: usize, shape: Attention, lse: &mut [f32]) {
    let scale = scale(shape);
    for (row, (mut p, lse)) in scores.rows_mut().into_iter().zip(lse).enumerate() {
        let Some(p) = p.as_slice_mut() else { continue };
        let computed = mask(p, first + row + 1);
        let (seen, masked) = p.split_at_mut(computed);
        simd(
            #[inline(always)]
            || {
                let top = max(seen) * scale;
                for p in seen.iter_mut() {
                    *p = exp(*p * scale - top);
                }
                let total = sum(seen, |p| p);
                let inverse = 1.0 / total;
                for p in seen.iter_mut() {
                    *p *= inverse;
                }
                *lse = top + total.ln();
            },
        );
        masked.fill(0.0);
    }
}

impl AttentionOps for Cpu {
    fn attention(&self, shape: Attention, qkv: &[f32], y: &mut [f32], lse: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::attention(shape));
        forward(&self.threads, shape, 0, qkv, y, lse);
        Ok(())
    }

    fn attention_from(
        &self,
        shape: Attention,
        first: usize,
        qkv: &[f32],
        y: &mut [f32],
        lse: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::attention_from(shape, first));
        forward(&self.threads, shape, first, qkv, y, lse);
        Ok(())
    }

    fn attention_backward(
        &self,
        shape: Attention,
        qkv: &[f32],
        y: &[f32],
        lse: &[f32],
        dy: &[f32],
        dqkv: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::attention_backward(shape));
        backward(&self.threads, shape, qkv, y, lse, dy, dqkv);
        Ok(())
    }
}
