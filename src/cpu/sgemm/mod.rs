//! Products in f32 whose tiles stay in registers, and whose left operand is read in place, where it
//! can be.
//!
//! The right operand is copied into panels of columns, as many as a core's own cache holds. Of the
//! left one the terms of a row are neighbours, and a tile reads a number of few rows at a time, so
//! that to pack them would only cost. Where rows are few and the right operand is the transpose of
//! a weight, the weight's rows take the place of the left operand's, and the result is turned over
//! in small blocks: then the weight, which is larger than the rest, is not packed. Where a row of
//! the left operand is a term, as in gradients of weights, it is copied into panels as high as a
//! tile. Each part of the result packs for itself: no thread waits for another, nor reads what
//! another has just written.
//!
//! Terms are added one after the other, in pieces of fixed length, so bits depend neither on the
//! cut, nor on the number of threads, nor on the width of vectors: they are those of `gemm`. Blocks
//! and panels are those of K. Goto and R. van de Geijn, "Anatomy of high-performance matrix
//! multiplication" (ACM TOMS 34, 2008).

mod microkernel;
mod pack;

use std::cell::RefCell;
use std::ops::Range;

use bytemuck::{Zeroable, cast_slice};
use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::gemm_blocking::{each_of, pieces};
use super::nontemporal::prefetch;
use super::output_init::OutputInit;
use super::threads::{Threads, with_chunks};
use super::transpose::transpose;

use microkernel::{TileStore, multiply_block};
use pack::{COLUMNS, HIGH, LhsView, MrPanel, NrPanel, PANEL, ROWS, RhsView};

/// Panels of a group: half of a small L2 cache.
const GROUP: usize = 4;

/// Tasks for each thread, if there is enough to cut: threads that are late by one lose little.
const TASKS: usize = 2;

/// Rows of a thread from which on it packs all columns itself: packing is then a few hundredths of
/// the work.
const OWN_ROWS: usize = 256;

/// Least rows, columns and terms: parts of smaller products may be vectors, which `gemm` sums in
/// another order.
const LEAST: usize = 48;

/// Terms from which on a left operand that lies across goes into panels, and rows of a thread:
/// packing the right operand anew for each thread would cost more than the left one's transpose.
const ACROSS_TERMS: usize = 1024;
const ACROSS_ROWS: usize = 96;

/// Most rows that are in panels at a time: 1.5 MiB.
const MOST_ROWS: usize = 768;

/// Panels of both operands.
struct PackBuffers {
    right: Vec<NrPanel>,
    left: Vec<MrPanel>,
}

thread_local! {
    /// Kept, because a fresh allocation would fault page by page.
    static ROOM: RefCell<PackBuffers> = const { RefCell::new(PackBuffers { right: Vec::new(), left: Vec::new() }) };
}

/// Computes `c`, of this start, and `a·b`, with the bits of `gemm`: true if it is done. Terms of a
/// row of `a` must be neighbours, and terms or columns of `b`; a CPU without AVX2, and small
/// products, have others. Sums are those of pieces of `depth` terms.
pub fn multiply(
    depth: usize,
    threads: &Threads,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    c: ArrayViewMut2<'_, f32>,
    start: OutputInit<'_>,
) -> bool {
    let Some(vectors) = Vectors::find() else { return false };
    let m = a.nrows();
    let n = b.ncols();
    let k = a.ncols();
    if m.min(n).min(k) < LEAST || a.strides()[1] != 1 || c.strides()[1] != 1 {
        return false;
    }
    let tasks = TASKS * threads.count();
    let right = match (b.strides(), b.reversed_axes().to_slice()) {
        ([_, 1], _) => RhsView::Terms(b),
        (_, Some(weight)) => {
            let turned = m <= GROUP * COLUMNS && tasks * m * k + m * n < n * k;
            if let (true, Some(x)) = (turned, a.to_slice()) {
                let wide = tasks.min(n.div_ceil(ROWS));
                each_of(threads, c, [1, wide], [HIGH, ROWS], |_, lines, c| {
                    let left = b.reversed_axes();
                    let right = RhsView::Lines(x);
                    let to = OutputTile { c, start: start.of(lines.clone()), turned };
                    vectors.run(GemmTask {
                        left: LhsView::Rows(left),
                        rows: lines,
                        right,
                        columns: 0..m,
                        to,
                        depth,
                        sums: &mut [],
                    });
                });
                return true;
            }
            RhsView::Lines(weight)
        }
        _ => return false,
    };
    each_of(
        threads,
        c,
        cut(threads.count(), m, n.div_ceil(COLUMNS)),
        [HIGH, COLUMNS],
        |rows, columns, c| {
            let to = OutputTile { c, start: start.of(columns.clone()), turned: false };
            vectors.run(GemmTask {
                left: LhsView::Rows(a),
                rows,
                right,
                columns,
                to,
                depth,
                sums: &mut [],
            });
        },
    );
    true
}

/// As [`multiply`], of `aᵀ`, where `a` is row-major with `m` columns; adds the sums of its columns
/// to `sums`, unless there are none. True if it is done: sums must be long, and rows many and not
/// fewer than columns.
#[expect(
    clippy::too_many_arguments,
    reason = "one argument for each operand, and how they are summed"
)]
pub fn multiply_across(
    depth: usize,
    threads: &Threads,
    a: &[f32],
    m: usize,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    start: OutputInit<'_>,
    sums: &mut [f32],
) -> bool {
    let Some(vectors) = Vectors::find() else { return false };
    let n = b.ncols();
    let k = b.nrows();
    if k < ACROSS_TERMS || m < n || m < ACROSS_ROWS * threads.count() || n < LEAST {
        return false;
    }
    if b.strides()[1] != 1 || c.strides()[1] != 1 {
        return false;
    }
    let size = m.div_ceil(threads.count()).min(MOST_ROWS).next_multiple_of(ROWS);
    let parts: Vec<_> = c.axis_chunks_iter_mut(Axis(0), size).collect();
    threads.each(
        with_chunks(parts.into_par_iter(), sums, size).enumerate(),
        |(part, (c, sums))| {
            let rows = part * size..part * size + c.nrows();
            let to = OutputTile { c, start, turned: false };
            let left = LhsView::Across { x: a, width: m };
            vectors.run(GemmTask {
                left,
                rows,
                right: RhsView::Terms(b),
                columns: 0..n,
                to,
                depth,
                sums: sums.unwrap_or_default(),
            });
        },
    );
    true
}

/// Parts of so many rows and panels along both, for so many threads. If there are enough rows, each
/// thread keeps to its own, which it has in other kernels, too.
fn cut(threads: usize, rows: usize, panels: usize) -> [usize; 2] {
    if rows >= OWN_ROWS * threads {
        return [threads, panels.div_ceil(GROUP)];
    }
    let tasks = TASKS * threads;
    let wide = evenly(panels, tasks);
    [tasks.div_ceil(wide).min(rows.div_ceil(ROWS)), wide]
}

/// The most parts of the same number of panels, but not more than so many, if that matters.
fn evenly(panels: usize, most: usize) -> usize {
    if panels >= 4 * most {
        return most;
    }
    (1..=most.min(panels)).rev().find(|parts| panels.is_multiple_of(*parts)).unwrap_or(1)
}

/// Vectors that the CPU has.
#[derive(Clone, Copy)]
enum Vectors {
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
}

impl Vectors {
    #[cfg(target_arch = "x86_64")]
    fn find() -> Option<Self> {
        let avx512 = pulp::x86::V4::try_new().map(Self::Avx512);
        avx512.or_else(|| pulp::x86::V3::try_new().map(Self::Avx2))
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn find() -> Option<Self> {
        None
    }

    fn run(self, part: GemmTask<'_, '_>) {
        ROOM.with_borrow_mut(|room| {
            room.right.resize(room.right.len().max(GROUP * part.depth), NrPanel::zeroed());
            if let LhsView::Across { .. } = part.left {
                let panels = part.rows.len().div_ceil(PANEL);
                room.left.resize(room.left.len().max(panels * part.depth), MrPanel::zeroed());
            }
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512(simd) => Simd::vectorize(simd, InRoom { part, room }),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2(simd) => Simd::vectorize(simd, InRoom { part, room }),
            }
        });
    }
}

/// A place for the result.
struct OutputTile<'a> {
    c: ArrayViewMut2<'a, f32>,
    start: OutputInit<'a>,
    /// Rows of the product are columns of `c`.
    turned: bool,
}

/// Keeps the sums of a block: those of a row are a strip.
struct StoreToTile<'a>(&'a mut [NrPanel; ROWS]);

impl<S: Simd> TileStore<S> for StoreToTile<'_> {
    #[inline(always)]
    fn take<const WIDE: usize>(&mut self, row: usize, vector: usize, sums: [S::f32s; WIDE]) {
        S::as_mut_simd_f32s(&mut self.0[row].0).0[vector..vector + WIDE].copy_from_slice(&sums);
    }
}

/// Ends the rows of a block, whose columns are those of a whole panel, as they come.
struct StoreToOutput<'a, 'c, S> {
    simd: S,
    c: ArrayViewMut2<'c, f32>,
    start: OutputInit<'a>,
}

impl<S: Simd> TileStore<S> for StoreToOutput<'_, '_, S> {
    #[inline(always)]
    fn take<const WIDE: usize>(&mut self, row: usize, vector: usize, sums: [S::f32s; WIDE]) {
        if row < self.c.nrows() {
            let to = self.c.row_mut(row).into_slice().expect("columns are neighbours");
            let to = &mut S::as_mut_simd_f32s(to).0[vector..vector + WIDE];
            self.start.put_vectors(self.simd, to, vector, sums);
        }
    }
}

impl OutputTile<'_> {
    /// A sink for some rows and the columns of a whole panel, of the piece that begins at `term`.
    #[inline(always)]
    fn write<S: Simd>(
        &mut self,
        simd: S,
        term: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> StoreToOutput<'_, '_, S> {
        let start = self.start.at_term(term).of(columns.clone());
        let c = self.c.slice_mut(s![rows, columns]);
        for row in c.rows() {
            prefetch(row.to_slice().expect("columns are neighbours"), 0, COLUMNS);
        }
        StoreToOutput { simd, c, start }
    }

    /// Ends a block of the piece that begins at `term`: a strip for each of the rows, of which the
    /// columns are there.
    #[inline(always)]
    fn put(
        &mut self,
        term: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        block: &[NrPanel; ROWS],
    ) {
        if self.turned {
            let mut over = [[0.0; ROWS]; COLUMNS];
            transpose(cast_slice(block), COLUMNS, 0..columns.len(), over.as_flattened_mut(), ROWS);
            for (column, from) in columns.zip(&over) {
                self.put_row(term, column, rows.clone(), from);
            }
        } else {
            for (row, from) in rows.zip(block) {
                self.put_row(term, row, columns.clone(), &from.0);
            }
        }
    }

    /// Ends some columns of a row of the result.
    #[inline(always)]
    fn put_row(&mut self, term: usize, row: usize, columns: Range<usize>, from: &[f32]) {
        let start = self.start.at_term(term).of(columns.clone());
        start.put(
            &mut self.c.row_mut(row).into_slice().expect("columns are neighbours")[columns],
            from,
        );
    }
}

/// A part of a product: one task.
struct GemmTask<'a, 'c> {
    left: LhsView<'a>,
    /// Rows of the left operand.
    rows: Range<usize>,
    right: RhsView<'a>,
    /// Columns of the right operand.
    columns: Range<usize>,
    /// These rows and columns of the result.
    to: OutputTile<'c>,
    /// Terms of a piece.
    depth: usize,
    /// Sums of the terms of each row, if a left operand that lies across is to be summed, too.
    sums: &'c mut [f32],
}

/// A part, and room for a group of panels.
struct InRoom<'a, 'c, 'r> {
    part: GemmTask<'a, 'c>,
    room: &'r mut PackBuffers,
}

impl WithSimd for InRoom<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let GemmTask { left, rows, right, columns, mut to, depth, sums } = self.part;
        let room = &mut self.room.right;
        let all = left.terms();
        let mut block = [NrPanel::zeroed(); ROWS];
        for terms in pieces(all, depth) {
            let height = terms.len();
            let lines = left.lines(terms.clone(), rows.clone(), &mut self.room.left, sums);
            for first in columns.clone().step_by(GROUP * COLUMNS) {
                let group = (first..columns.end.min(first + GROUP * COLUMNS)).step_by(COLUMNS);
                let group = group.map(|first| first..columns.end.min(first + COLUMNS));
                for (panel, strips) in group.clone().zip(room.chunks_exact_mut(height)) {
                    right.pack(all, terms.clone(), panel, strips);
                }
                for first in rows.clone().step_by(ROWS) {
                    let high = first..rows.end.min(first + ROWS);
                    for (panel, strips) in group.clone().zip(room.chunks_exact(height)) {
                        let of = |range: Range<usize>, all: &Range<usize>| {
                            range.start - all.start..range.end - all.start
                        };
                        let rows_of_block = of(high.clone(), &rows);
                        let columns_of_block = of(panel.clone(), &columns);
                        let high = high.clone();
                        if to.turned || panel.len() < COLUMNS {
                            multiply_block(
                                simd,
                                lines,
                                high,
                                strips,
                                panel.len(),
                                &mut StoreToTile(&mut block),
                            );
                            to.put(terms.start, rows_of_block, columns_of_block, &block);
                        } else {
                            let mut end =
                                to.write(simd, terms.start, rows_of_block, columns_of_block);
                            multiply_block(simd, lines, high, strips, COLUMNS, &mut end);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::ShapeBuilder as _;

    use super::*;
    use crate::gemm::multiply as by_gemm;
    use crate::gemm_blocking::depth;
    use crate::matrix::{add_rows, matrix, matrix_mut};

    fn numbers(len: usize, step: usize) -> Vec<f32> {
        (0..len).map(|i| (i * step % 1009) as f32 / 504.0 - 1.0).collect()
    }

    /// Also the order of sums on machines with other vectors.
    #[test]
    fn bits_are_those_of_gemm_for_all_vectors() {
        #[cfg(target_arch = "x86_64")]
        let all = [
            pulp::x86::V4::try_new().map(Vectors::Avx512),
            pulp::x86::V3::try_new().map(Vectors::Avx2),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let all = [None];
        let all: Vec<Vectors> = all.into_iter().flatten().collect();
        for (m, n, k) in
            [(48, 48, 48), (53, 70, 1031), (6, 64, 8), (100, 257, 513), (257, 130, 96), (1, 5, 3)]
        {
            let a = numbers(m * k, 7);
            let weight = numbers(n * k, 13);
            let a = matrix(&a, m, k);
            let weight = matrix(&weight, n, k);
            let b = weight.reversed_axes().as_standard_layout().into_owned();
            let bias = numbers(n, 3);
            for start in [OutputInit::Nothing, OutputInit::Result, OutputInit::Columns(&bias)] {
                let mut want = vec![0.5; m * n];
                if m.min(n).min(k) >= LEAST {
                    let acc = start.written(matrix_mut(&mut want, m, n));
                    by_gemm(a, b.view(), matrix_mut(&mut want, m, n), acc);
                } else {
                    for (at, want) in want.iter_mut().enumerate() {
                        let sum =
                            (0..k).fold(0.0, |sum, t| a[(at / n, t)].mul_add(b[(t, at % n)], sum));
                        match start {
                            OutputInit::Nothing => *want = sum,
                            OutputInit::Result => *want += sum,
                            OutputInit::Columns(bias) => *want = bias[at % n] + sum,
                        }
                    }
                }
                for vectors in &all {
                    let mut got = vec![0.0; m * n];
                    for right in
                        [RhsView::Terms(b.view()), RhsView::Lines(weight.to_slice().unwrap())]
                    {
                        got.fill(0.5);
                        let to = OutputTile { c: matrix_mut(&mut got, m, n), start, turned: false };
                        vectors.run(GemmTask {
                            left: LhsView::Rows(a),
                            rows: 0..m,
                            right,
                            columns: 0..n,
                            to,
                            depth: depth(k),
                            sums: &mut [],
                        });
                        assert!(got == want, "{m}×{n}×{k}, {start:?}");
                    }
                    let mut got = vec![0.5; m * n];
                    let to = OutputTile { c: matrix_mut(&mut got, m, n), start, turned: true };
                    let right = RhsView::Lines(a.to_slice().unwrap());
                    vectors.run(GemmTask {
                        left: LhsView::Rows(weight),
                        rows: 0..n,
                        right,
                        columns: 0..m,
                        to,
                        depth: depth(k),
                        sums: &mut [],
                    });
                    assert!(got == want, "{m}×{n}×{k}, turned, {start:?}");
                }
            }
        }
    }

    #[test]
    fn parts_have_the_bits_of_the_whole() {
        for (m, n, k) in [(64, 3000, 200), (300, 130, 600), (256, 384, 64), (1000, 50, 77)] {
            let a = numbers(m * k, 11);
            let weight = numbers(n * k, 5);
            // Rows with a gap after each.
            let mut gaps = vec![f32::NAN; m * (k + 3)];
            gaps.chunks_mut(k + 3)
                .zip(a.chunks(k))
                .for_each(|(to, row)| to[..k].copy_from_slice(row));
            let with_gaps = ArrayView2::from_shape((m, k).strides((k + 3, 1)), &gaps).unwrap();
            let weight = matrix(&weight, n, k);
            let b = weight.reversed_axes().as_standard_layout().into_owned();
            let bias = numbers(n, 3);
            let start = OutputInit::Columns(&bias);
            let mut want = vec![0.0; m * n];
            let acc = start.written(matrix_mut(&mut want, m, n));
            by_gemm(matrix(&a, m, k), b.view(), matrix_mut(&mut want, m, n), acc);
            for (threads, left) in [(1, matrix(&a, m, k)), (3, matrix(&a, m, k)), (2, with_gaps)] {
                let threads = Threads::new(threads);
                for right in [b.view(), weight.reversed_axes()] {
                    let mut got = vec![0.5; m * n];
                    let done = multiply(
                        depth(k),
                        &threads,
                        left,
                        right,
                        matrix_mut(&mut got, m, n),
                        start,
                    );
                    assert_eq!(done, Vectors::find().is_some());
                    assert!(!done || got == want, "{m}×{n}×{k}");
                }
            }
        }
    }

    #[test]
    fn threads_have_rows_of_their_own_where_rows_are_many() {
        assert_eq!(cut(2, 2 * OWN_ROWS, 6), [2, 2]);
        assert_eq!(cut(4, 2 * OWN_ROWS, 12), [2, 6]);
        assert_eq!(cut(2, 256, 12), [1, 4]);
        assert_eq!(cut(1, 48, 3), [1, 1]);
    }

    #[test]
    fn operands_that_lie_across_have_the_bits_of_the_transposed() {
        // Pieces, panels, bands and parts that are not full; more rows than are in panels at a
        // time.
        for (m, n, k, threads) in
            [(300, 290, 1031, 1), (MOST_ROWS + 100, 256, 1024, 1), (ACROSS_ROWS * 3, 64, 2100, 3)]
        {
            let a = numbers(k * m, 11);
            let b = numbers(k * n, 5);
            let across = matrix(&a, k, m);
            let b = matrix(&b, k, n);
            let left = across.reversed_axes().as_standard_layout().into_owned();
            for start in [OutputInit::Nothing, OutputInit::Result] {
                let mut want = vec![0.5; m * n];
                let mut got = vec![0.5; m * n];
                let acc = start.written(matrix_mut(&mut want, m, n));
                by_gemm(left.view(), b, matrix_mut(&mut want, m, n), acc);
                let mut want_sums = vec![0.25; m];
                let mut sums = vec![0.25; m];
                add_rows(&Threads::new(1), &a, m, &mut want_sums);
                let c = matrix_mut(&mut got, m, n);
                let threads = Threads::new(threads);
                let done = multiply_across(depth(k), &threads, &a, m, b, c, start, &mut sums);
                assert_eq!(done, Vectors::find().is_some());
                assert!(!done || (got == want && sums == want_sums), "{m}×{n}×{k}, {start:?}");
            }
        }
    }

    #[test]
    fn what_it_cannot_do_is_left_as_it_is() {
        let threads = Threads::new(1);
        let a = numbers(64 * 64, 7);
        let b = numbers(64 * 64, 13);
        let mut c = vec![0.5; 64 * 64];
        let mut tried =
            |a, b| multiply(64, &threads, a, b, matrix_mut(&mut c, 64, 64), OutputInit::Nothing);
        assert!(
            !tried(matrix(&a, 64, 64).reversed_axes(), matrix(&b, 64, 64)),
            "terms of a row are no neighbours"
        );
        let few = matrix(&a[..64 * 47], 64, 47);
        let other = matrix(&b[..47 * 64], 47, 64);
        assert!(!tried(few, other), "few terms");
        assert!(c.iter().all(|c| *c == 0.5));
    }
}
