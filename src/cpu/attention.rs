//! Causal multi-head attention whose memory is linear in the context.
//!
//! Each (sequence, head) is one task. Queries are processed in blocks, whose scores are stored
//! transposed, one row per key: a vector holds the scores of some queries for one key, so maxima
//! and sums of the softmax are computed on whole vectors. The scores of a block are kept until its
//! output is summed; the backward recomputes them from the saved log-denominators (Dao et al.,
//! "FlashAttention", 2022). All matmuls are those of [`small_gemm`](super::small_gemm), which skip
//! most of the masked scores. A query's output has the same bits whichever other queries are in its
//! block.

use std::cell::RefCell;
use std::f32::consts::LOG2_E;
use std::mem::take;
use std::ops::Range;

use ndarray::{ArrayViewMut2, Axis};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::Cpu;
use super::math::{exp2s, max, vectors};
use super::nontemporal::prefetch;
use super::small_gemm::{
    COLUMNS, ColumnGroupMatmul, ROWS, RowGroupMatmul, Strip, column_dot_sums, pack, panels,
    transpose_panels, unpack, vectors_of,
};
use super::threads::{Threads, list};
use hpctrain_base::error::Result;
use hpctrain_device::{Attention, AttentionOps, KernelCost};

/// The number of partial sums of a softmax's denominator, over which keys are distributed in turn.
const PARTS: usize = 4;

/// The number of sequences per thread from which on a task is a whole sequence: a list of all heads
/// would be long.
const SEQUENCES_PER_THREAD: usize = 2;

/// Indices of the queries of a block.
const INDICES: Strip = {
    let mut indices = [0.0; COLUMNS];
    let mut i = 0;
    while i < COLUMNS {
        indices[i] = i as f32;
        i += 1;
    }
    Strip(indices)
};

const ZERO: Strip = Strip([0.0; COLUMNS]);

thread_local! {
    /// Packed operands and scores of a task, kept between tasks because a fresh allocation would
    /// cause page faults.
    static SCRATCH: RefCell<Vec<Strip>> = const { RefCell::new(Vec::new()) };
}

/// Splits the scratch into parts of the given numbers of strips, with unspecified contents.
fn split_scratch<const N: usize>(scratch: &mut Vec<Strip>, sizes: [usize; N]) -> [&mut [Strip]; N] {
    let all = sizes.iter().sum();
    if scratch.len() < all {
        scratch.resize(all, ZERO);
    }
    let mut rest = scratch.as_mut_slice();
    sizes.map(|size| {
        let (own, others) = take(&mut rest).split_at_mut(size);
        rest = others;
        own
    })
}

/// Splits rows of `width` elements into disjoint blocks of `w` columns.
fn columns(x: &mut [f32], width: usize, w: usize) -> Vec<ArrayViewMut2<'_, f32>> {
    let mut rest = ArrayViewMut2::from_shape((x.len() / width, width), x).expect("whole rows");
    let mut parts = Vec::with_capacity(width / w);
    while rest.ncols() > 0 {
        let (head, others) = rest.split_at(Axis(1), w);
        parts.push(head);
        rest = others;
    }
    parts
}

/// Writes rows of panels of `height` strips, each multiplied by its factor.
#[inline(always)]
fn write<S: Simd>(
    simd: S,
    from: &[Strip],
    height: usize,
    factor: impl Fn(usize) -> f32,
    to: &mut ArrayViewMut2<'_, f32>,
    rows: Range<usize>,
) {
    for (i, row) in (rows.start..rows.end.min(to.nrows())).enumerate() {
        unpack(
            simd,
            from,
            height,
            i,
            factor(i),
            to.row_mut(row).into_slice().expect("columns side by side"),
        );
    }
}

/// The columns of one head in rows with leading dimension `stride`.
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

    /// Creates the rows of one sequence, with a head's columns from `first` on.
    fn of_sequence(
        shape: Attention,
        x: &'a [f32],
        sequence: usize,
        stride: usize,
        first: usize,
    ) -> Self {
        let len = shape.time * stride;
        Self { x: &x[sequence * len..][..len], stride, first, width: shape.head_width }
    }

    /// Creates the rows of a query head and of its key and value heads from packed rows.
    fn of_head(shape: Attention, qkv: &'a [f32], sequence: usize, head: usize) -> [Self; 3] {
        let key = shape.heads + head / shape.group();
        [head, key, key + shape.kv_heads].map(|place| {
            Self::of_sequence(shape, qkv, sequence, shape.packed_width(), place * shape.head_width)
        })
    }

    /// Creates the rows of a head of the output.
    fn of_results(shape: Attention, y: &'a [f32], sequence: usize, head: usize) -> Self {
        Self::of_sequence(
            shape,
            y,
            sequence,
            shape.heads * shape.head_width,
            head * shape.head_width,
        )
    }

    fn row(self, i: usize) -> &'a [f32] {
        &self.x[i * self.stride..][self.columns()]
    }

    /// Returns a range of the rows.
    fn part(self, rows: Range<usize>) -> Self {
        Self { x: &self.x[rows.start * self.stride..rows.end * self.stride], ..self }
    }

    /// Packs the rows into panels of `height` strips.
    #[inline(always)]
    fn pack(self, to: &mut [Strip], height: usize) {
        pack(self.x, self.stride, self.columns(), to, height);
    }
}

/// Prefetches the rows of the next block, a few at a time while this block is computed: more
/// outstanding loads than a core supports would stall it.
struct RowPrefetcher<'a, const N: usize> {
    operands: [Rows<'a>; N],
    rows: Range<usize>,
    step: usize,
}

impl<'a, const N: usize> RowPrefetcher<'a, N> {
    /// Creates a prefetcher for the block after `block`, to be called `steps` times. After the last
    /// block of a task that is the first block of the next `task`, which ends at row `end`.
    fn new(
        block: &Block,
        operands: [Rows<'a>; N],
        task: [Rows<'a>; N],
        end: usize,
        steps: usize,
    ) -> Self {
        let t = operands[0].x.len() / operands[0].stride;
        let (operands, rows) = match block.last < t {
            true => (operands, block.last..t.min(block.last + COLUMNS)),
            false => (task, 0..end),
        };
        Self { operands, step: rows.len().div_ceil(steps), rows }
    }

    #[inline(always)]
    fn step(&mut self) {
        for i in self.rows.by_ref().take(self.step) {
            self.operands
                .iter()
                .for_each(|rows| prefetch(rows.x, i * rows.stride + rows.first, rows.width));
        }
    }
}

/// A block of neighbouring queries, whose scores for one key are a strip.
struct Block {
    first: usize,
    last: usize,
}

impl Block {
    /// Returns the blocks of the positions `queries`.
    fn all(queries: Range<usize>) -> impl Iterator<Item = Self> {
        let end = queries.end;
        queries.step_by(COLUMNS).map(move |first| Self { first, last: (first + COLUMNS).min(end) })
    }

    fn range(&self) -> Range<usize> {
        self.first..self.last
    }

    fn len(&self) -> usize {
        self.last - self.first
    }

    /// Returns the first keys of the groups that some query of the block attends to.
    fn keys(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.last).step_by(ROWS)
    }

    /// Returns the number of keys that the queries from `group` to `group + ROWS` of the block
    /// attend to.
    fn keys_of(&self, group: usize) -> usize {
        self.last.min(self.first + group + ROWS)
    }

    /// Returns the number of queries before the first group that attends to the keys at `key`.
    fn masked_queries(&self, key: usize) -> usize {
        key.saturating_sub(self.first) / ROWS * ROWS
    }

    /// Returns the vectors of the queries that attend to the keys at `key`.
    #[inline(always)]
    fn vectors<S: Simd>(&self, key: usize) -> Range<usize> {
        self.masked_queries(key) / S::F32_LANES..self.len().div_ceil(S::F32_LANES)
    }

    /// Replaces `scores` of vector `vector` for one key by `other` where the key comes after the
    /// query.
    #[inline(always)]
    fn mask<S: Simd>(
        &self,
        simd: S,
        scores: S::f32s,
        vector: usize,
        key: usize,
        other: f32,
    ) -> S::f32s {
        if key <= self.first {
            return scores;
        }
        let hidden = simd.splat_f32s((key - self.first) as f32);
        let hidden = simd.less_than_f32s(INDICES.vectors::<S>()[vector], hidden);
        simd.select_f32s(hidden, simd.splat_f32s(other), scores)
    }
}

/// Computes output and log-denominators of one head, for the positions from `from` on.
struct Forward<'a> {
    shape: Attention,
    from: usize,
    qkv: [Rows<'a>; 3],
    /// The operands of the task that this thread will probably run next.
    next: [Rows<'a>; 3],
    y: ArrayViewMut2<'a, f32>,
    lse: &'a mut [f32],
    scratch: &'a mut Vec<Strip>,
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let t = self.shape.time;
        let w = self.shape.head_width;
        let scale = scale(self.shape);
        let height = t.next_multiple_of(COLUMNS);
        let panels = panels(w);
        let all = panels * height;
        let few = panels * COLUMNS;
        let sizes = [all, all, few, few, height, panels * ROWS, 1, PARTS];
        let [k, v, q_rows, q_turned, p, y, tops, totals] = split_scratch(self.scratch, sizes);
        let [q, keys, values] = self.qkv;
        let mut packed = 0;
        for block in Block::all(self.from..t) {
            for (rows, to) in [(keys, &mut *k), (values, &mut *v)] {
                rows.part(packed..block.last).pack(&mut to[packed..], height);
            }
            packed = block.last;
            q.part(block.range()).pack(q_rows, COLUMNS);
            let here = block.first - self.from;
            if block.len() == 1 {
                let scores = &mut p[..block.last.div_ceil(COLUMNS)];
                let (factor, lse) = single_query(
                    simd,
                    self.shape,
                    block.last,
                    [k, v, q_rows],
                    height,
                    q_turned,
                    scores,
                    y,
                );
                self.lse[here] = lse;
                write(simd, y, ROWS, |_| factor, &mut self.y, here..here + 1);
                continue;
            }
            transpose_panels(q_rows, q_turned);
            let q_turned = &q_turned[..w];
            let steps = 2 * block.keys().count() + block.len().div_ceil(ROWS);
            let mut prefetcher =
                RowPrefetcher::new(&block, self.qkv, self.next, t.min(self.from + COLUMNS), steps);
            tops.fill(Strip([f32::NEG_INFINITY; COLUMNS]));
            totals.fill(ZERO);
            for key in block.keys() {
                prefetcher.step();
                let vectors = block.vectors::<S>(key);
                let p = &mut p[key..key + ROWS];
                let scores = RowGroupMatmul {
                    a: k,
                    height,
                    row: key,
                    b: q_turned,
                    from: 0,
                    to: &mut *p,
                    add: false,
                };
                scores.compute(simd, vectors.clone());
                mask_and_max(simd, &block, key, vectors, p, &mut tops[0]);
            }
            for key in block.keys() {
                prefetcher.step();
                exponentials(
                    simd,
                    block.vectors::<S>(key),
                    scale,
                    &mut p[key..key + ROWS],
                    &tops[0],
                    totals,
                );
            }
            sum_parts(simd, totals);
            for (i, lse) in self.lse[here..][..block.len()].iter_mut().enumerate() {
                *lse = tops[0].0[i] * scale + totals[0].0[i].ln();
            }
            for group in (0..block.len()).step_by(ROWS) {
                prefetcher.step();
                let keys = block.keys_of(group);
                for (panel, (v, y)) in
                    v.chunks_exact(height).zip(y.chunks_exact_mut(ROWS)).enumerate()
                {
                    let output =
                        ColumnGroupMatmul { a: &p[..keys], column: group, b: &v[..keys], to: y };
                    output.compute(simd, vectors_of::<S>(w, panel));
                }
                write(
                    simd,
                    y,
                    ROWS,
                    |i| totals[1].0[group + i],
                    &mut self.y,
                    here + group..here + group + ROWS,
                );
            }
        }
    }
}

/// Computes a block of one query, which attends to the first `keys` keys and is the first of the
/// packed queries, with the same bits as a larger block: here the scores are stored in a row.
/// Writes the output without a common factor to the first strips of `y`; returns the factor and the
/// log-denominator.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "one argument for each operand and each part of the scratch"
)]
fn single_query<S: Simd>(
    simd: S,
    shape: Attention,
    keys: usize,
    [k, v, q]: [&[Strip]; 3],
    height: usize,
    turned: &mut [Strip],
    scores: &mut [Strip],
    y: &mut [Strip],
) -> (f32, f32) {
    let w = shape.head_width;
    let scale = scale(shape);
    let whole = 0..COLUMNS / S::F32_LANES;
    for (strip, scores) in scores.chunks_exact_mut(1).enumerate() {
        for (k, turned) in k.chunks_exact(height).zip(turned.chunks_exact_mut(COLUMNS)) {
            transpose_panels(&k[strip * COLUMNS..][..COLUMNS], turned);
        }
        let b = &turned[..w];
        let matmul = RowGroupMatmul {
            a: q,
            height: COLUMNS,
            row: 0,
            b,
            from: 0,
            to: &mut *scores,
            add: false,
        };
        matmul.compute_row(simd, whole.clone());
    }
    let flat: &mut [f32] = bytemuck::cast_slice_mut(scores);
    flat[keys..].fill(f32::NEG_INFINITY);
    let top = max(flat);
    let factor = scale * LOG2_E;
    let factors = simd.splat_f32s(factor);
    let tops = simd.splat_f32s(-(top * factor));
    for scores in &mut *scores {
        for x in scores.vectors_mut::<S>() {
            *x = exp2s(simd, simd.mul_add_f32s(*x, factors, tops));
        }
    }
    let mut parts = [0.0; PARTS];
    for strip in &*scores {
        for scores in strip.0.as_chunks::<PARTS>().0 {
            for i in 0..PARTS {
                parts[i] += scores[i];
            }
        }
    }
    let total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    for (panel, (v, y)) in v.chunks_exact(height).zip(y.chunks_exact_mut(ROWS)).enumerate() {
        let output = RowGroupMatmul {
            a: &*scores,
            height: 1,
            row: 0,
            b: &v[..keys],
            from: 0,
            to: y,
            add: false,
        };
        output.compute_row(simd, vectors_of::<S>(w, panel));
    }
    (1.0 / total, top * scale + total.ln())
}

/// Masks scores of the keys that come after a query, and updates each query's maximum with the
/// others; NaN is ignored.
#[inline(always)]
fn mask_and_max<S: Simd>(
    simd: S,
    block: &Block,
    key: usize,
    vectors: Range<usize>,
    scores: &mut [Strip],
    tops: &mut Strip,
) {
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

/// Replaces a group's scores by their exponentials, and adds them to the partial sums, to which
/// keys are assigned in turn.
#[inline(always)]
fn exponentials<S: Simd>(
    simd: S,
    vectors: Range<usize>,
    scale: f32,
    scores: &mut [Strip],
    tops: &Strip,
    totals: &mut [Strip],
) {
    // exp2 with a scaled argument is cheaper than exp.
    let scale = simd.splat_f32s(scale * LOG2_E);
    for vector in vectors {
        let top = simd.neg_f32s(simd.mul_f32s(tops.vectors::<S>()[vector], scale));
        for scores in scores.chunks_exact_mut(PARTS) {
            for (scores, total) in scores.iter_mut().zip(&mut *totals) {
                let x = &mut scores.vectors_mut::<S>()[vector];
                let total = &mut total.vectors_mut::<S>()[vector];
                *x = exp2s(simd, simd.mul_add_f32s(*x, scale, top));
                *total = simd.add_f32s(*total, *x);
            }
        }
    }
}

/// Replaces the first partial sum by the sum of all, and the second by its inverse.
#[inline(always)]
fn sum_parts<S: Simd>(simd: S, totals: &mut [Strip]) {
    for vector in 0..COLUMNS / S::F32_LANES {
        let part = |i: usize| totals[i].vectors::<S>()[vector];
        let total = simd.add_f32s(simd.add_f32s(part(0), part(1)), simd.add_f32s(part(2), part(3)));
        totals[0].vectors_mut::<S>()[vector] = total;
        totals[1].vectors_mut::<S>()[vector] = simd.div_f32s(simd.splat_f32s(1.0), total);
    }
}

/// Computes the gradients of the query heads that share a key/value head, and of that head.
struct Backward<'a, 'b> {
    shape: Attention,
    /// Returns the queries, keys, values, output and gradient of the output of a query head.
    heads: &'b dyn Fn(usize) -> [Rows<'a>; 5],
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
        let t = self.shape.time;
        let w = self.shape.head_width;
        let scale = scale(self.shape);
        let height = t.next_multiple_of(ROWS);
        let panels = panels(w);
        let group = self.shape.group();
        let all = panels * height;
        let few = panels * COLUMNS;
        let sizes = [
            all,
            all,
            all,
            all,
            few,
            few,
            few,
            few,
            ROWS,
            height,
            panels * ROWS,
            2,
            COLUMNS,
            COLUMNS,
        ];
        let [
            k,
            v,
            dk,
            dv,
            q_turned,
            dy_turned,
            q_rows,
            dy_rows,
            p,
            ds,
            dq_strips,
            query_stats,
            row_products,
            transposed,
        ] = split_scratch(self.scratch, sizes);
        for (shared, dq) in self.dqs.iter_mut().enumerate() {
            let [q, keys, values, y, dy] = (self.heads)(shared);
            for block in Block::all(0..t) {
                if shared == 0 {
                    for (rows, to) in [(keys, &mut *k), (values, &mut *v)] {
                        rows.part(block.range()).pack(&mut to[block.first..], height);
                    }
                }
                let steps = 4 * block.keys().count() + block.len().div_ceil(ROWS);
                let operands = [q, keys, values, y, dy];
                let mut prefetcher = RowPrefetcher::new(
                    &block,
                    operands,
                    (self.heads)(shared + 1),
                    t.min(COLUMNS),
                    steps,
                );
                let is_last = shared + 1 == group && block.last == t;
                let [q, y, dy] = [q, y, dy].map(|x| x.part(block.range()));
                q.pack(q_rows, COLUMNS);
                dy.pack(dy_rows, COLUMNS);
                transpose_panels(q_rows, q_turned);
                transpose_panels(dy_rows, dy_turned);
                let q_turned = &q_turned[..w];
                let dy_turned = &dy_turned[..w];
                query_stats[0].0[..block.len()]
                    .copy_from_slice(&self.lse[shared * t..][block.first..block.last]);
                for (i, sums) in row_products.iter_mut().take(block.len()).enumerate() {
                    *sums = column_dot_sums(simd, y.row(i), dy.row(i));
                }
                transpose_panels(row_products, transposed);
                query_stats[1] = sum_strips(simd, transposed);
                for key in block.keys() {
                    prefetcher.step();
                    let vectors = block.vectors::<S>(key);
                    let ds = &mut ds[key..key + ROWS];
                    let scores = RowGroupMatmul {
                        a: k,
                        height,
                        row: key,
                        b: q_turned,
                        from: 0,
                        to: &mut *p,
                        add: false,
                    };
                    scores.compute(simd, vectors.clone());
                    prefetcher.step();
                    let weights = RowGroupMatmul {
                        a: v,
                        height,
                        row: key,
                        b: dy_turned,
                        from: 0,
                        to: &mut *ds,
                        add: false,
                    };
                    weights.compute(simd, vectors.clone());
                    differentiate(simd, &block, key, vectors, scale, [p, ds], query_stats);
                    // The first block that attends to the keys overwrites their gradients, later
                    // blocks add to them.
                    let add = shared > 0 || key < block.first;
                    for (a, rows, sums) in [(&*p, &*dy_rows, &mut *dv), (&*ds, &*q_rows, &mut *dk)]
                    {
                        prefetcher.step();
                        let both = rows.chunks_exact(COLUMNS).zip(sums.chunks_exact_mut(height));
                        for (panel, (rows, sums)) in both.enumerate() {
                            let b = &rows[..block.len()];
                            let to = &mut sums[key..key + ROWS];
                            let gradient = RowGroupMatmul {
                                a,
                                height: ROWS,
                                row: 0,
                                b,
                                from: block.masked_queries(key),
                                to,
                                add,
                            };
                            gradient.compute(simd, vectors_of::<S>(w, panel));
                        }
                    }
                    if is_last {
                        write(simd, &dk[key..], height, |_| scale, &mut self.dk, key..key + ROWS);
                        write(simd, &dv[key..], height, |_| 1.0, &mut self.dv, key..key + ROWS);
                    }
                }
                for group in (0..block.len()).step_by(ROWS) {
                    prefetcher.step();
                    let keys = block.keys_of(group);
                    for (panel, (k, dq)) in
                        k.chunks_exact(height).zip(dq_strips.chunks_exact_mut(ROWS)).enumerate()
                    {
                        let gradient = ColumnGroupMatmul {
                            a: &ds[..keys],
                            column: group,
                            b: &k[..keys],
                            to: dq,
                        };
                        gradient.compute(simd, vectors_of::<S>(w, panel));
                    }
                    write(
                        simd,
                        dq_strips,
                        ROWS,
                        |_| scale,
                        dq,
                        block.first + group..block.first + group + ROWS,
                    );
                }
            }
        }
    }
}

/// Returns the sum of strips, column by column, in as many partial sums as a denominator has.
#[inline(always)]
fn sum_strips<S: Simd>(simd: S, strips: &[Strip]) -> Strip {
    let mut sum = ZERO;
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

/// Replaces a group's scores by probabilities, and the gradients of these by those of the scores,
/// without the scale.
#[inline(always)]
fn differentiate<S: Simd>(
    simd: S,
    block: &Block,
    key: usize,
    vectors: Range<usize>,
    scale: f32,
    [scores, gradients]: [&mut [Strip]; 2],
    query_stats: &[Strip],
) {
    // exp2 with a scaled argument is cheaper than exp.
    let scale = simd.splat_f32s(scale * LOG2_E);
    for vector in vectors {
        let lse = simd.mul_f32s(query_stats[0].vectors::<S>()[vector], simd.splat_f32s(-LOG2_E));
        let dot = simd.neg_f32s(query_stats[1].vectors::<S>()[vector]);
        for (i, (scores, gradients)) in scores.iter_mut().zip(&mut *gradients).enumerate() {
            let p = &mut scores.vectors_mut::<S>()[vector];
            let d = &mut gradients.vectors_mut::<S>()[vector];
            *p = exp2s(simd, simd.mul_add_f32s(*p, scale, lse));
            *p = block.mask(simd, *p, vector, key + i, 0.0);
            *d = simd.mul_f32s(*p, simd.add_f32s(*d, dot));
        }
    }
}

fn scale(shape: Attention) -> f32 {
    1.0 / (shape.head_width as f32).sqrt()
}

/// Calls `f` with the index of each sequence, the index of each of its tasks, and the task.
fn each_task<S: Send, T: Send, I: Iterator<Item = T>>(
    threads: &Threads,
    sequences: impl IndexedParallelIterator<Item = S>,
    tasks: impl Fn(S) -> I + Sync,
    f: impl Fn(usize, usize, T) + Sync,
) {
    let sequences = sequences.enumerate();
    if sequences.len() >= SEQUENCES_PER_THREAD * threads.count() {
        return threads.each(sequences, |(sequence, part)| {
            tasks(part).enumerate().for_each(|(i, task)| f(sequence, i, task));
        });
    }
    let of_sequence =
        |(sequence, part)| tasks(part).enumerate().map(move |(i, task)| (sequence, i, task));
    let all: Vec<_> = list(sequences).into_iter().flat_map(of_sequence).collect();
    threads.each(all, |(sequence, i, task)| f(sequence, i, task));
}

/// Computes output and log-denominators for the positions from `from` on of every sequence.
pub fn forward(
    threads: &Threads,
    shape: Attention,
    from: usize,
    qkv: &[f32],
    y: &mut [f32],
    lse: &mut [f32],
) {
    let rows = shape.time - from;
    let width = shape.heads * shape.head_width;
    let sequences =
        y.par_chunks_exact_mut(rows * width).zip(lse.par_chunks_exact_mut(rows * shape.heads));
    // A task is one head.
    let tasks = |(y, lse)| {
        columns(y, width, shape.head_width).into_iter().zip(<[f32]>::chunks_mut(lse, rows))
    };
    each_task(threads, sequences, tasks, |sequence, head, (y, lse)| {
        let of_task = |i: usize| Rows::of_head(shape, qkv, i / shape.heads, i % shape.heads);
        let i = sequence * shape.heads + head;
        let qkv = of_task(i);
        let next = of_task((i + 1).min(shape.batch * shape.heads - 1));
        SCRATCH.with_borrow_mut(|scratch| {
            vectors(Forward { shape, from, qkv, next, y, lse, scratch })
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
    let t = shape.time;
    let w = shape.head_width;
    let width = shape.packed_width();
    // A task is one key/value head, with the query heads that share it one after the
    // other.
    let group = shape.group();
    let tasks = |rows| {
        let mut dq = columns(rows, width, w);
        let mut dk = dq.split_off(shape.heads);
        let dv = dk.split_off(shape.kv_heads);
        let mut dq = dq.into_iter();
        let groups: Vec<Vec<_>> =
            (0..shape.kv_heads).map(|_| dq.by_ref().take(group).collect()).collect();
        groups.into_iter().zip(dk).zip(dv)
    };
    each_task(
        threads,
        dqkv.par_chunks_exact_mut(t * width),
        tasks,
        |sequence, key, ((dqs, dk), dv)| {
            let first = sequence * shape.heads + key * group;
            let heads = |shared: usize| {
                let head = (first + shared).min(shape.batch * shape.heads - 1);
                let sequence = head / shape.heads;
                let head = head % shape.heads;
                let [q, keys, values] = Rows::of_head(shape, qkv, sequence, head);
                let [y, dy] = [y, dy].map(|x| Rows::of_results(shape, x, sequence, head));
                [q, keys, values, y, dy]
            };
            let lse = &lse[first * t..][..group * t];
            SCRATCH.with_borrow_mut(|scratch| {
                vectors(Backward { shape, heads: &heads, lse, dqs, dk, dv, scratch })
            });
        },
    );
}

impl AttentionOps for Cpu {
    fn attention(
        &self,
        shape: Attention,
        qkv: &[f32],
        y: &mut [f32],
        lse: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::attention(shape));
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
        let _launch = self.start_kernel(KernelCost::attention_from(shape, first));
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
        let _launch = self.start_kernel(KernelCost::attention_backward(shape));
        backward(&self.threads, shape, qkv, y, lse, dy, dqkv);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::random::Stream;

    const SHAPES: [(usize, usize, usize, usize); 10] = [
        (1, 1, 1, 1),
        (2, 2, 1, 3),
        (31, 4, 2, 20),
        (64, 2, 2, 32),
        (66, 2, 1, 48),
        (65, 2, 1, 33),
        (257, 1, 1, 64),
        (100, 2, 2, 80),
        (40, 2, 1, 96),
        (33, 1, 1, 256),
    ];

    fn shapes() -> impl Iterator<Item = Attention> {
        SHAPES.into_iter().map(|(time, heads, kv_heads, head_width)| Attention {
            batch: 1,
            time,
            heads,
            kv_heads,
            head_width,
        })
    }

    fn random(seed: u64, len: usize) -> Vec<f32> {
        let mut numbers = vec![0.0; len];
        Stream::new(seed).fill_normal(&mut numbers);
        numbers
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    /// Returns output and log-denominators of the positions from `from` on.
    fn computed(shape: Attention, from: usize, qkv: &[f32]) -> [Vec<f32>; 2] {
        let rows = shape.time - from;
        let mut y = vec![f32::NAN; rows * shape.heads * shape.head_width];
        let mut lse = vec![f32::NAN; rows * shape.heads];
        forward(&Threads::new(1), shape, from, qkv, &mut y, &mut lse);
        [y, lse]
    }

    #[test]
    fn a_position_has_the_same_bits_with_any_others() {
        for shape in shapes() {
            let t = shape.time;
            let d = shape.heads * shape.head_width;
            let qkv = random(1, t * shape.packed_width());
            let [y, lse] = computed(shape, 0, &qkv);
            let firsts =
                [1, 7, 8, 15, 31, 32, 33, 60, t - 1].into_iter().filter(|first| *first < t);
            for first in firsts {
                let [later, of_later] = computed(shape, first, &qkv);
                assert_eq!(bits(&later), bits(&y[first * d..]), "{shape:?} from {first}");
                let want: Vec<f32> = lse.chunks(t).flat_map(|lse| &lse[first..]).copied().collect();
                assert_eq!(bits(&of_later), bits(&want), "{shape:?} from {first}");
            }
            // Keys after a position do not influence it.
            let seen = t.div_ceil(2);
            let fewer = Attention { time: seen, ..shape };
            let [earlier, _] = computed(fewer, 0, &qkv[..seen * shape.packed_width()]);
            assert_eq!(bits(&earlier), bits(&y[..seen * d]), "{shape:?}, {seen} positions");
        }
    }

    /// Returns output, log-denominators and gradients, computed with one kind of vectors.
    fn compute_with<S: Simd>(simd: S, shape: Attention, [qkv, dy]: [&[f32]; 2]) -> [Vec<f32>; 3] {
        let t = shape.time;
        let w = shape.head_width;
        let group = shape.group();
        let mut scratch = Vec::new();
        let mut y = vec![f32::NAN; t * shape.heads * w];
        let mut lse = vec![f32::NAN; shape.heads * t];
        let heads = y
            .chunks_exact_mut(t * shape.heads * w)
            .flat_map(|y| columns(y, shape.heads * w, w))
            .zip(lse.chunks_mut(t));
        for (head, (y, lse)) in heads.enumerate() {
            let qkv = Rows::of_head(shape, qkv, 0, head);
            simd.vectorize(Forward {
                shape,
                from: 0,
                qkv,
                next: qkv,
                y,
                lse,
                scratch: &mut scratch,
            });
        }
        let mut dqkv = vec![f32::NAN; qkv.len()];
        for dqkv in dqkv.chunks_exact_mut(t * shape.packed_width()) {
            let mut dqs = columns(dqkv, shape.packed_width(), w);
            let mut dks = dqs.split_off(shape.heads);
            let dvs = dks.split_off(shape.kv_heads);
            for (key, (dk, dv)) in dks.into_iter().zip(dvs).enumerate() {
                let later = dqs.split_off(group);
                let heads = |shared: usize| {
                    let head = (key * group + shared).min(shape.heads - 1);
                    let [q, k, v] = Rows::of_head(shape, qkv, 0, head);
                    [
                        q,
                        k,
                        v,
                        Rows::of_results(shape, &y, 0, head),
                        Rows::of_results(shape, dy, 0, head),
                    ]
                };
                let lse = &lse[key * group * t..][..group * t];
                simd.vectorize(Backward {
                    shape,
                    heads: &heads,
                    lse,
                    dqs,
                    dk,
                    dv,
                    scratch: &mut scratch,
                });
                dqs = later;
            }
        }
        [y, lse, dqkv]
    }

    #[test]
    fn code_without_vectors_agrees() {
        for shape in shapes() {
            let qkv = random(2, shape.time * shape.packed_width());
            let dy = random(3, shape.time * shape.heads * shape.head_width);
            let [y, lse] = computed(shape, 0, &qkv);
            let mut dqkv = vec![f32::NAN; qkv.len()];
            backward(&Threads::new(1), shape, &qkv, &y, &lse, &dy, &mut dqkv);
            for (plain, got) in
                compute_with(pulp::Scalar, shape, [&qkv, &dy]).iter().zip([y, lse, dqkv])
            {
                let most = plain.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                assert!(
                    plain.iter().zip(got).all(|(a, b)| (a - b).abs() <= 1e-5 * most),
                    "{shape:?}"
                );
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn vectors_of_any_width_give_the_same_bits() {
        let (Some(avx2), Some(avx512)) = (pulp::x86::V3::try_new(), pulp::x86::V4::try_new())
        else {
            return;
        };
        for shape in shapes() {
            let qkv = random(2, shape.time * shape.packed_width());
            let dy = random(3, shape.time * shape.heads * shape.head_width);
            let of_avx2 = compute_with(avx2, shape, [&qkv, &dy]);
            for (of_avx2, of_avx512) in
                of_avx2.iter().zip(&compute_with(avx512, shape, [&qkv, &dy]))
            {
                assert_eq!(bits(of_avx2), bits(of_avx512), "{shape:?}");
                assert!(of_avx2.iter().all(|x| x.is_finite()), "{shape:?}");
            }
        }
    }
}
