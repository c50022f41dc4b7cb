//! Causal multi-head attention whose memory is linear in the context.
//!
//! Each (sequence, head) is one task. Queries go in blocks, whose scores lie transposed, a row of them for each key: so a
//! vector has the scores of some queries for one key, and maxima and sums of the softmax are those of whole vectors. The
//! scores of a block are kept until its output is summed; the backward computes them again from the saved
//! log-denominators (Dao et al., "FlashAttention", 2022). All products are those of [`tile`](super::tile), which skip most of
//! what the mask hides. A query's result depends on no other query of its block.

use std::cell::RefCell;
use std::mem::take;
use std::ops::Range;

use ndarray::{ArrayViewMut2, Axis};
use pulp::{Simd, WithSimd};

use super::Cpu;
use super::math::{exps, vectors};
use super::threads::Threads;
use super::tile::{ByColumns, ByRows, COLUMNS, ROWS, Strip, pack, panels, products, turn, unpack, vectors_of};
use crate::backend::{Attention, AttentionOps, Work};
use crate::error::Result;

/// Partial sums of a softmax's denominator, of every so-manieth key each.
const PARTS: usize = 4;

/// Numbers of the queries of a block.
const NUMBERS: Strip = {
    let (mut numbers, mut i) = ([0.0; COLUMNS], 0);
    while i < COLUMNS {
        numbers[i] = i as f32;
        i += 1;
    }
    Strip(numbers)
};

const NOTHING: Strip = Strip([0.0; COLUMNS]);

thread_local! {
    /// Packed operands and scores of a task; kept, because a fresh allocation would fault page by page.
    static SCRATCH: RefCell<Vec<Strip>> = const { RefCell::new(Vec::new()) };
}

/// Parts of the scratch, of so many strips each, contents unspecified.
fn parts<const N: usize>(scratch: &mut Vec<Strip>, sizes: [usize; N]) -> [&mut [Strip]; N] {
    let all = sizes.iter().sum();
    if scratch.len() < all {
        scratch.resize(all, NOTHING);
    }
    let mut rest = scratch.as_mut_slice();
    sizes.map(|size| {
        let (own, others) = take(&mut rest).split_at_mut(size);
        rest = others;
        own
    })
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

/// Row number `i` of one head.
#[inline(always)]
fn row_mut<'a>(of_head: &'a mut ArrayViewMut2<'_, f32>, i: usize) -> &'a mut [f32] {
    of_head.row_mut(i).into_slice().expect("columns side by side")
}

/// Columns of one head in rows that lie `stride` apart.
#[derive(Clone, Copy)]
struct Rows<'a> {
    x: &'a [f32],
    stride: usize,
    first: usize,
    width: usize,
}

impl<'a> Rows<'a> {
    fn columns(self) -> Range<usize> {
        self.first..self.first + self.width
    }

    /// One of so many sequences' rows, and its columns from `first` on.
    fn of_sequence(shape: Attention, x: &'a [f32], sequence: usize, stride: usize, first: usize) -> Self {
        let len = shape.time * stride;
        Self { x: &x[sequence * len..][..len], stride, first, width: shape.head_width }
    }

    /// One head of queries, and the keys and values that it sees, of packed rows.
    fn of_head(shape: Attention, qkv: &'a [f32], sequence: usize, head: usize) -> [Self; 3] {
        let key = shape.heads + head / shape.group();
        [head, key, key + shape.kv_heads]
            .map(|place| Self::of_sequence(shape, qkv, sequence, shape.packed_width(), place * shape.head_width))
    }

    /// One head of results.
    fn of_results(shape: Attention, y: &'a [f32], sequence: usize, head: usize) -> Self {
        Self::of_sequence(shape, y, sequence, shape.heads * shape.head_width, head * shape.head_width)
    }

    fn row(self, i: usize) -> &'a [f32] {
        &self.x[i * self.stride..][self.columns()]
    }

    /// The rows of a block.
    fn block(self, block: &Block) -> Self {
        Self { x: &self.x[block.first * self.stride..block.last * self.stride], ..self }
    }

    /// To panels of `height` strips.
    #[inline(always)]
    fn pack(self, to: &mut [Strip], height: usize) {
        pack(self.x, self.stride, self.columns(), to, height);
    }
}

/// Neighbouring queries, whose scores for one key are a strip.
struct Block {
    first: usize,
    last: usize,
}

impl Block {
    /// The blocks of the positions of `queries`.
    fn all(queries: Range<usize>) -> impl Iterator<Item = Self> {
        let end = queries.end;
        queries.step_by(COLUMNS).map(move |first| Self { first, last: (first + COLUMNS).min(end) })
    }

    fn len(&self) -> usize {
        self.last - self.first
    }

    /// First keys of the groups that some query sees.
    fn keys(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.last).step_by(ROWS)
    }

    /// Keys that the group of queries from number `group` of the block on sees.
    fn keys_of(&self, group: usize) -> usize {
        self.last.min(self.first + group + ROWS)
    }

    /// Queries before the first group that sees the group of keys at `key`.
    fn blind(&self, key: usize) -> usize {
        key.saturating_sub(self.first) / ROWS * ROWS
    }

    /// Vectors of the queries that see the group of keys at `key`.
    #[inline(always)]
    fn vectors<S: Simd>(&self, key: usize) -> Range<usize> {
        self.blind(key) / S::F32_LANES..self.len().div_ceil(S::F32_LANES)
    }

    /// `scores` of vector number `vector` for one key, with `other` where the key comes after the query.
    #[inline(always)]
    fn mask<S: Simd>(&self, simd: S, scores: S::f32s, vector: usize, key: usize, other: f32) -> S::f32s {
        if key <= self.first {
            return scores;
        }
        let hidden = simd.splat_f32s((key - self.first) as f32);
        let hidden = simd.less_than_f32s(NUMBERS.vectors::<S>()[vector], hidden);
        simd.select_f32s(hidden, simd.splat_f32s(other), scores)
    }
}

/// Output and log-denominators of one head, for the positions from `from` on.
struct Forward<'a> {
    shape: Attention,
    from: usize,
    qkv: [Rows<'a>; 3],
    y: ArrayViewMut2<'a, f32>,
    lse: &'a mut [f32],
    scratch: &'a mut Vec<Strip>,
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (t, w, scale) = (self.shape.time, self.shape.head_width, scale(self.shape));
        let (height, panels) = (t.next_multiple_of(ROWS), panels(w));
        let (all, few) = (panels * height, panels * COLUMNS);
        let sizes = [all, all, few, few, height, panels * ROWS, 1, PARTS];
        let [k, v, q_rows, q_turned, p, y, tops, totals] = parts(self.scratch, sizes);
        let [q, keys, values] = self.qkv;
        keys.pack(k, height);
        values.pack(v, height);
        for block in Block::all(self.from..t) {
            q.block(&block).pack(q_rows, COLUMNS);
            turn(q_rows, q_turned);
            let q_turned = &q_turned[..w];
            tops.fill(Strip([f32::NEG_INFINITY; COLUMNS]));
            totals.fill(NOTHING);
            for key in block.keys() {
                let (vectors, p) = (block.vectors::<S>(key), &mut p[key..key + ROWS]);
                let scores = ByRows { a: k, height, row: key, b: q_turned, from: 0, to: &mut *p, add: false };
                scores.compute(simd, vectors.clone());
                raise(simd, &block, key, vectors, p, &mut tops[0]);
            }
            for key in block.keys() {
                exponentials(simd, block.vectors::<S>(key), scale, &mut p[key..key + ROWS], &tops[0], totals);
            }
            sum_parts(simd, totals);
            let place = block.first - self.from;
            for (i, lse) in self.lse[place..][..block.len()].iter_mut().enumerate() {
                *lse = tops[0].0[i] * scale + totals[0].0[i].ln();
            }
            for group in (0..block.len()).step_by(ROWS) {
                let keys = block.keys_of(group);
                for (panel, (v, y)) in v.chunks_exact(height).zip(y.chunks_exact_mut(ROWS)).enumerate() {
                    let output = ByColumns { a: &p[..keys], column: group, b: &v[..keys], to: y };
                    output.compute(simd, vectors_of::<S>(w, panel));
                }
                for (row, i) in (group..block.len()).take(ROWS).enumerate() {
                    unpack(simd, y, ROWS, row, totals[1].0[i], row_mut(&mut self.y, place + i));
                }
            }
        }
    }
}

/// Hides scores of the keys that come after a query, and raises each query's maximum to the others; NaN is passed over.
#[inline(always)]
fn raise<S: Simd>(simd: S, block: &Block, key: usize, vectors: Range<usize>, scores: &mut [Strip], tops: &mut Strip) {
    for vector in vectors {
        let mut top = tops.vectors::<S>()[vector];
        for (i, scores) in scores.iter_mut().enumerate() {
            let score = &mut scores.vectors_mut::<S>()[vector];
            *score = block.mask(simd, *score, vector, key + i, f32::NEG_INFINITY);
            top = simd.max_f32s(*score, top);
        }
        tops.vectors_mut::<S>()[vector] = top;
    }
}

/// Turns a group's scores into exponentials, and adds them to the totals: of every so-manieth key to one.
#[inline(always)]
fn exponentials<S: Simd>(
    simd: S,
    vectors: Range<usize>,
    scale: f32,
    scores: &mut [Strip],
    tops: &Strip,
    totals: &mut [Strip],
) {
    let scale = simd.splat_f32s(scale);
    for vector in vectors {
        let top = simd.neg_f32s(simd.mul_f32s(tops.vectors::<S>()[vector], scale));
        for scores in scores.chunks_exact_mut(PARTS) {
            for (scores, total) in scores.iter_mut().zip(&mut *totals) {
                let (x, total) = (&mut scores.vectors_mut::<S>()[vector], &mut total.vectors_mut::<S>()[vector]);
                *x = exps(simd, simd.mul_add_f32s(*x, scale, top));
                *total = simd.add_f32s(*total, *x);
            }
        }
    }
}

/// Leaves the sum of the parts in the place of the first, and its inverse in that of the second.
#[inline(always)]
fn sum_parts<S: Simd>(simd: S, totals: &mut [Strip]) {
    for vector in 0..COLUMNS / S::F32_LANES {
        let part = |i: usize| totals[i].vectors::<S>()[vector];
        let total = simd.add_f32s(simd.add_f32s(part(0), part(1)), simd.add_f32s(part(2), part(3)));
        totals[0].vectors_mut::<S>()[vector] = total;
        totals[1].vectors_mut::<S>()[vector] = simd.div_f32s(simd.splat_f32s(1.0), total);
    }
}

/// The gradients of the queries that share one head of keys and values, and of that head.
struct Backward<'a, 'b> {
    shape: Attention,
    /// Of each head of queries: queries, keys, values; output; its gradient.
    heads: &'b dyn Fn(usize) -> ([Rows<'a>; 3], [Rows<'a>; 2]),
    lse: &'a [f32],
    dqs: Vec<ArrayViewMut2<'a, f32>>,
    dk: ArrayViewMut2<'a, f32>,
    dv: ArrayViewMut2<'a, f32>,
    scratch: &'b mut Vec<Strip>,
}

impl WithSimd for Backward<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (t, w, scale) = (self.shape.time, self.shape.head_width, scale(self.shape));
        let (height, panels) = (t.next_multiple_of(ROWS), panels(w));
        let (all, few) = (panels * height, panels * COLUMNS);
        let sizes = [all, all, all, all, few, few, few, few, ROWS, height, panels * ROWS, 2, COLUMNS, COLUMNS];
        let [k, v, dk, dv, q_turned, dy_turned, q_rows, dy_rows, p, ds, dq_rows, of_queries, of_each, turned] =
            parts(self.scratch, sizes);
        for (shared, dq) in self.dqs.iter_mut().enumerate() {
            let ([q, keys, values], [y, dy]) = (self.heads)(shared);
            if shared == 0 {
                keys.pack(k, height);
                values.pack(v, height);
            }
            for block in Block::all(0..t) {
                let [q, y, dy] = [q, y, dy].map(|x| x.block(&block));
                q.pack(q_rows, COLUMNS);
                dy.pack(dy_rows, COLUMNS);
                turn(q_rows, q_turned);
                turn(dy_rows, dy_turned);
                let (q_turned, dy_turned) = (&q_turned[..w], &dy_turned[..w]);
                of_queries[0].0[..block.len()].copy_from_slice(&self.lse[shared * t..][block.first..block.last]);
                for (i, products_of) in of_each.iter_mut().take(block.len()).enumerate() {
                    *products_of = products(simd, y.row(i), dy.row(i));
                }
                turn(of_each, turned);
                of_queries[1] = sum_strips(simd, turned);
                for key in block.keys() {
                    let (vectors, ds) = (block.vectors::<S>(key), &mut ds[key..key + ROWS]);
                    let scores = ByRows { a: k, height, row: key, b: q_turned, from: 0, to: &mut *p, add: false };
                    scores.compute(simd, vectors.clone());
                    let weights = ByRows { a: v, height, row: key, b: dy_turned, from: 0, to: &mut *ds, add: false };
                    weights.compute(simd, vectors.clone());
                    differentiate(simd, &block, key, vectors, scale, [p, ds], of_queries);
                    // The first block that sees the keys overwrites their gradients, the later ones add.
                    let add = shared > 0 || key < block.first;
                    for (a, rows, sums) in [(&*p, &*dy_rows, &mut *dv), (&*ds, &*q_rows, &mut *dk)] {
                        let both = rows.chunks_exact(COLUMNS).zip(sums.chunks_exact_mut(height));
                        for (panel, (rows, sums)) in both.enumerate() {
                            let (b, to) = (&rows[..block.len()], &mut sums[key..key + ROWS]);
                            let gradient = ByRows { a, height: ROWS, row: 0, b, from: block.blind(key), to, add };
                            gradient.compute(simd, vectors_of::<S>(w, panel));
                        }
                    }
                }
                for group in (0..block.len()).step_by(ROWS) {
                    let keys = block.keys_of(group);
                    for (panel, (k, dq)) in k.chunks_exact(height).zip(dq_rows.chunks_exact_mut(ROWS)).enumerate() {
                        let gradient = ByColumns { a: &ds[..keys], column: group, b: &k[..keys], to: dq };
                        gradient.compute(simd, vectors_of::<S>(w, panel));
                    }
                    for (row, i) in (group..block.len()).take(ROWS).enumerate() {
                        unpack(simd, dq_rows, ROWS, row, scale, row_mut(dq, block.first + i));
                    }
                }
            }
        }
        for i in 0..t {
            unpack(simd, dk, height, i, scale, row_mut(&mut self.dk, i));
            unpack(simd, dv, height, i, 1.0, row_mut(&mut self.dv, i));
        }
    }
}

/// Sum of strips, column by column, of every so-manieth by itself at first.
#[inline(always)]
fn sum_strips<S: Simd>(simd: S, strips: &[Strip]) -> Strip {
    let mut sum = NOTHING;
    for vector in 0..COLUMNS / S::F32_LANES {
        let mut parts = [simd.splat_f32s(0.0); PARTS];
        for strips in strips.chunks_exact(PARTS) {
            for (part, strip) in parts.iter_mut().zip(strips) {
                *part = simd.add_f32s(*part, strip.vectors::<S>()[vector]);
            }
        }
        let [a, b, c, d] = parts;
        sum.vectors_mut::<S>()[vector] = simd.add_f32s(simd.add_f32s(a, b), simd.add_f32s(c, d));
    }
    sum
}

/// Turns a group's scores into probabilities, and the gradients of these into those of the scores, but for the scale.
#[inline(always)]
fn differentiate<S: Simd>(
    simd: S,
    block: &Block,
    key: usize,
    vectors: Range<usize>,
    scale: f32,
    [scores, gradients]: [&mut [Strip]; 2],
    of_queries: &[Strip],
) {
    let scale = simd.splat_f32s(scale);
    for vector in vectors {
        let lse = simd.neg_f32s(of_queries[0].vectors::<S>()[vector]);
        let dot = simd.neg_f32s(of_queries[1].vectors::<S>()[vector]);
        for (i, (scores, gradients)) in scores.iter_mut().zip(&mut *gradients).enumerate() {
            let (p, d) = (&mut scores.vectors_mut::<S>()[vector], &mut gradients.vectors_mut::<S>()[vector]);
            *p = exps(simd, simd.mul_add_f32s(*p, scale, lse));
            *p = block.mask(simd, *p, vector, key + i, 0.0);
            *d = simd.mul_f32s(*p, simd.add_f32s(*d, dot));
        }
    }
}

fn scale(shape: Attention) -> f32 {
    1.0 / (shape.head_width as f32).sqrt()
}

/// Of every sequence the positions from `from` on.
pub fn forward(threads: &Threads, shape: Attention, from: usize, qkv: &[f32], y: &mut [f32], lse: &mut [f32]) {
    let rows = shape.time - from;
    let y = columns(y, rows, shape.heads * shape.head_width, shape.head_width).flatten();
    threads.each(y.zip(lse.chunks_mut(rows)).enumerate(), |(i, (y, lse))| {
        let qkv = Rows::of_head(shape, qkv, i / shape.heads, i % shape.heads);
        SCRATCH.with_borrow_mut(|scratch| vectors(Forward { shape, from, qkv, y, lse, scratch }));
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
    // A task is one head of keys and values, with the heads of queries that share it one after the other.
    let group = shape.group();
    let tasks = columns(dqkv, t, shape.packed_width(), w).flat_map(|mut dq| {
        let mut dk = dq.split_off(shape.heads);
        let dv = dk.split_off(shape.kv_heads);
        let mut dq = dq.into_iter();
        let groups: Vec<Vec<_>> = (0..shape.kv_heads).map(|_| dq.by_ref().take(group).collect()).collect();
        groups.into_iter().zip(dk).zip(dv)
    });
    threads.each(tasks.zip(lse.chunks(group * t)).enumerate(), |(i, (((dqs, dk), dv), lse))| {
        let (sequence, first) = (i / shape.kv_heads, i % shape.kv_heads * group);
        let heads = |shared| {
            let head = first + shared;
            let results = [y, dy].map(|x| Rows::of_results(shape, x, sequence, head));
            (Rows::of_head(shape, qkv, sequence, head), results)
        };
        SCRATCH.with_borrow_mut(|scratch| vectors(Backward { shape, heads: &heads, lse, dqs, dk, dv, scratch }));
    });
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
