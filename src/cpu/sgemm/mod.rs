//! f32 matmuls with register-tiled micro-kernels; the left operand is read unpacked if its rows are
//! contiguous.
//!
//! The right operand is packed into panels of columns, as many as a core's L2 cache holds. If the
//! rows of the left operand are contiguous, a tile reads a few rows at once, so packing it would
//! only cost time. If it has few rows and the right operand is the transpose of a weight, the
//! operands are swapped: the weight's rows are read unpacked as the left operand, and the result is
//! transposed in small blocks. The weight, which is larger than the rest, is then not packed. If
//! the left operand is transposed, as in gradients of weights, it is packed into panels as high as
//! a tile. Each part of the output packs separately: no thread waits for another, nor reads what
//! another has just written.
//!
//! Terms are added one after the other, in K blocks of fixed length, so bits depend neither on the
//! division, nor on the number of threads, nor on the vector width: they are those of `gemm`.
//! Blocks and panels are those of K. Goto and R. van de Geijn, "Anatomy of high-performance matrix
//! multiplication" (ACM TOMS 34, 2008).

mod microkernel;
mod pack;

use std::cell::RefCell;
use std::ops::Range;

use bytemuck::{Zeroable, cast_slice};
use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::gemm_blocking::{blocks, each_output_part};
use super::nontemporal::prefetch;
use super::output_init::OutputInit;
use super::threads::{Threads, with_chunks};
use super::transpose::transpose;

use microkernel::{TileStore, multiply_block};
use pack::{COLUMNS, HIGH, LhsView, MrPanel, NrPanel, PANEL, ROWS, RhsView};

/// Panels of a group: half of a small L2 cache.
const GROUP: usize = 4;

/// Tasks per thread, if there is enough work: threads that are late by one task lose little.
const TASKS: usize = 2;

/// Rows per thread from which on each thread packs all columns itself: packing is then a few
/// hundredths of the work.
const ROWS_PER_THREAD: usize = 256;

/// The least rows, columns and terms: parts of smaller matmuls may be vectors, which `gemm` sums in
/// another order.
const LEAST: usize = 48;

/// The least terms and rows per thread for which a transposed left operand is packed: below,
/// packing the right operand again for each thread would cost more than transposing the left one.
const TRANSPOSED_TERMS: usize = 1024;
const TRANSPOSED_ROWS: usize = 96;

/// The most rows that are packed at once: 1.5 MiB.
const MOST_ROWS: usize = 768;

/// Packed panels of both operands.
struct PackBuffers {
    right: Vec<NrPanel>,
    left: Vec<MrPanel>,
}

thread_local! {
    /// Kept between calls, because a fresh allocation would cause page faults.
    static PACK_BUFFERS: RefCell<PackBuffers> =
        const { RefCell::new(PackBuffers { right: Vec::new(), left: Vec::new() }) };
}

/// Adds `a·b` to the initial value `start` of `c`, with the bits of `gemm`, and returns true.
/// Returns false without an effect for small matmuls, on CPUs without AVX2 or NEON, and unless the rows of
/// `a` and the rows or columns of `b` are contiguous. Sums are divided into K blocks of `depth`
/// terms.
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
            let transposed = m <= GROUP * COLUMNS && tasks * m * k + m * n < n * k;
            if let (true, Some(x)) = (transposed, a.to_slice()) {
                let wide = tasks.min(n.div_ceil(ROWS));
                each_output_part(threads, c, [1, wide], [HIGH, ROWS], |_, lines, c| {
                    let left = b.reversed_axes();
                    let right = RhsView::Lines(x);
                    let to = OutputTile { c, start: start.for_columns(lines.clone()), transposed };
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
    each_output_part(
        threads,
        c,
        cut(threads.count(), m, n.div_ceil(COLUMNS)),
        [HIGH, COLUMNS],
        |rows, columns, c| {
            let to = OutputTile { c, start: start.for_columns(columns.clone()), transposed: false };
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

/// Computes [`multiply`] for `aᵀ`, where `a` is row-major with `m` columns; adds the sums of its
/// columns to `sums`, unless it is empty. Returns false without an effect unless sums are long and
/// rows many and at least as many as columns.
#[expect(
    clippy::too_many_arguments,
    reason = "one argument for each operand, and how they are summed"
)]
pub fn multiply_transposed(
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
    if k < TRANSPOSED_TERMS || m < n || m < TRANSPOSED_ROWS * threads.count() || n < LEAST {
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
            let to = OutputTile { c, start, transposed: false };
            let left = LhsView::Transposed { x: a, width: m };
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

/// Returns the parts along `rows` and along `panels` for `threads` threads. If there are enough
/// rows, each thread has the same rows as in other kernels.
fn cut(threads: usize, rows: usize, panels: usize) -> [usize; 2] {
    if rows >= ROWS_PER_THREAD * threads {
        return [threads, panels.div_ceil(GROUP)];
    }
    let tasks = TASKS * threads;
    let wide = evenly(panels, tasks);
    [tasks.div_ceil(wide).min(rows.div_ceil(ROWS)), wide]
}

/// Returns the most parts with equal numbers of panels, up to `most`; if panels are many, equality
/// does not matter.
fn evenly(panels: usize, most: usize) -> usize {
    if panels >= 4 * most {
        return most;
    }
    (1..=most.min(panels)).rev().find(|parts| panels.is_multiple_of(*parts)).unwrap_or(1)
}

/// The vector extension of the CPU.
#[derive(Clone, Copy)]
enum Vectors {
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
}

impl Vectors {
    #[cfg(target_arch = "x86_64")]
    fn find() -> Option<Self> {
        let avx512 = pulp::x86::V4::try_new().map(Self::Avx512);
        avx512.or_else(|| pulp::x86::V3::try_new().map(Self::Avx2))
    }

    #[cfg(target_arch = "aarch64")]
    fn find() -> Option<Self> {
        pulp::aarch64::Neon::try_new().map(Self::Neon)
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn find() -> Option<Self> {
        None
    }

    fn run(self, part: GemmTask<'_, '_>) {
        PACK_BUFFERS.with_borrow_mut(|buffers| {
            buffers.right.resize(buffers.right.len().max(GROUP * part.depth), NrPanel::zeroed());
            if let LhsView::Transposed { .. } = part.left {
                let panels = part.rows.len().div_ceil(PANEL);
                buffers.left.resize(buffers.left.len().max(panels * part.depth), MrPanel::zeroed());
            }
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512(simd) => Simd::vectorize(simd, BufferedTask { part, buffers }),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2(simd) => Simd::vectorize(simd, BufferedTask { part, buffers }),
                #[cfg(target_arch = "aarch64")]
                Self::Neon(simd) => Simd::vectorize(simd, BufferedTask { part, buffers }),
            }
        });
    }
}

/// The destination of the output.
struct OutputTile<'a> {
    c: ArrayViewMut2<'a, f32>,
    start: OutputInit<'a>,
    /// Whether the output is stored transposed: rows of the matmul are columns of `c`.
    transposed: bool,
}

/// Stores the sums of a block, a strip for each row.
struct StoreToTile<'a>(&'a mut [NrPanel; ROWS]);

impl<S: Simd> TileStore<S> for StoreToTile<'_> {
    #[inline(always)]
    fn store<const WIDE: usize>(&mut self, row: usize, vector: usize, sums: [S::f32s; WIDE]) {
        S::as_mut_simd_f32s(&mut self.0[row].0).0[vector..vector + WIDE].copy_from_slice(&sums);
    }
}

/// Writes the rows of a block to the output as they are computed; its columns are a whole panel.
struct StoreToOutput<'a, 'c, S> {
    simd: S,
    c: ArrayViewMut2<'c, f32>,
    start: OutputInit<'a>,
}

impl<S: Simd> TileStore<S> for StoreToOutput<'_, '_, S> {
    #[inline(always)]
    fn store<const WIDE: usize>(&mut self, row: usize, vector: usize, sums: [S::f32s; WIDE]) {
        if row < self.c.nrows() {
            let to = self.c.row_mut(row).into_slice().expect("columns are contiguous");
            let to = &mut S::as_mut_simd_f32s(to).0[vector..vector + WIDE];
            self.start.store_vectors(self.simd, to, vector, sums);
        }
    }
}

impl OutputTile<'_> {
    /// Returns a store for some rows and the columns of a whole panel, for the K block that begins
    /// at `term`.
    #[inline(always)]
    fn write<S: Simd>(
        &mut self,
        simd: S,
        term: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> StoreToOutput<'_, '_, S> {
        let start = self.start.at_term(term).for_columns(columns.clone());
        let c = self.c.slice_mut(s![rows, columns]);
        for row in c.rows() {
            prefetch(row.to_slice().expect("columns are contiguous"), 0, COLUMNS);
        }
        StoreToOutput { simd, c, start }
    }

    /// Writes a block of the K block that begins at `term`: a strip for each row, with its first
    /// `columns.len()` columns.
    #[inline(always)]
    fn put(
        &mut self,
        term: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        block: &[NrPanel; ROWS],
    ) {
        if self.transposed {
            let mut turned = [[0.0; ROWS]; COLUMNS];
            transpose(
                cast_slice(block),
                COLUMNS,
                0..columns.len(),
                turned.as_flattened_mut(),
                ROWS,
            );
            for (column, from) in columns.zip(&turned) {
                self.put_row(term, column, rows.clone(), from);
            }
        } else {
            for (row, from) in rows.zip(block) {
                self.put_row(term, row, columns.clone(), &from.0);
            }
        }
    }

    /// Writes some columns of a row of the output.
    #[inline(always)]
    fn put_row(&mut self, term: usize, row: usize, columns: Range<usize>, from: &[f32]) {
        let start = self.start.at_term(term).for_columns(columns.clone());
        start.store(
            &mut self.c.row_mut(row).into_slice().expect("columns are contiguous")[columns],
            from,
        );
    }
}

/// A part of a matmul: one task.
struct GemmTask<'a, 'c> {
    left: LhsView<'a>,
    /// Rows of the left operand.
    rows: Range<usize>,
    right: RhsView<'a>,
    /// Columns of the right operand.
    columns: Range<usize>,
    /// The destination of these rows and columns.
    to: OutputTile<'c>,
    /// The number of terms of a K block.
    depth: usize,
    /// The sums of the terms of each row of a transposed left operand, or empty.
    sums: &'c mut [f32],
}

/// A task, and buffers for its packed panels.
struct BufferedTask<'a, 'c, 'b> {
    part: GemmTask<'a, 'c>,
    buffers: &'b mut PackBuffers,
}

impl WithSimd for BufferedTask<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let GemmTask { left, rows, right, columns, mut to, depth, sums } = self.part;
        let packed = &mut self.buffers.right;
        let all = left.terms();
        let mut block = [NrPanel::zeroed(); ROWS];
        for terms in blocks(all, depth) {
            let height = terms.len();
            let lines = left.block(terms.clone(), rows.clone(), &mut self.buffers.left, sums);
            for first in columns.clone().step_by(GROUP * COLUMNS) {
                let group = (first..columns.end.min(first + GROUP * COLUMNS)).step_by(COLUMNS);
                let group = group.map(|first| first..columns.end.min(first + COLUMNS));
                for (panel, strips) in group.clone().zip(packed.chunks_exact_mut(height)) {
                    right.pack(all, terms.clone(), panel, strips);
                }
                for first in rows.clone().step_by(ROWS) {
                    let high = first..rows.end.min(first + ROWS);
                    for (panel, strips) in group.clone().zip(packed.chunks_exact(height)) {
                        let relative = |range: Range<usize>, all: &Range<usize>| {
                            range.start - all.start..range.end - all.start
                        };
                        let rows_of_block = relative(high.clone(), &rows);
                        let columns_of_block = relative(panel.clone(), &columns);
                        let high = high.clone();
                        if to.transposed || panel.len() < COLUMNS {
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
    use crate::gemm_blocking::block_depth;
    use crate::matrix::{add_rows, matrix, matrix_mut};

    fn numbers(len: usize, step: usize) -> Vec<f32> {
        (0..len).map(|i| (i * step % 1009) as f32 / 504.0 - 1.0).collect()
    }

    /// Also checks the order of sums of other vector extensions.
    #[test]
    fn bits_are_those_of_gemm_for_all_vectors() {
        #[cfg(target_arch = "x86_64")]
        let all = [
            pulp::x86::V4::try_new().map(Vectors::Avx512),
            pulp::x86::V3::try_new().map(Vectors::Avx2),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let all = [Vectors::find()];
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
            for start in [OutputInit::Zero, OutputInit::Accumulate, OutputInit::Bias(&bias)] {
                let mut want = vec![0.5; m * n];
                if m.min(n).min(k) >= LEAST {
                    let acc = start.write_bias(matrix_mut(&mut want, m, n));
                    by_gemm(a, b.view(), matrix_mut(&mut want, m, n), acc);
                } else {
                    for (at, want) in want.iter_mut().enumerate() {
                        let sum =
                            (0..k).fold(0.0, |sum, t| a[(at / n, t)].mul_add(b[(t, at % n)], sum));
                        match start {
                            OutputInit::Zero => *want = sum,
                            OutputInit::Accumulate => *want += sum,
                            OutputInit::Bias(bias) => *want = bias[at % n] + sum,
                        }
                    }
                }
                for vectors in &all {
                    let mut got = vec![0.0; m * n];
                    for right in
                        [RhsView::Terms(b.view()), RhsView::Lines(weight.to_slice().unwrap())]
                    {
                        got.fill(0.5);
                        let to =
                            OutputTile { c: matrix_mut(&mut got, m, n), start, transposed: false };
                        vectors.run(GemmTask {
                            left: LhsView::Rows(a),
                            rows: 0..m,
                            right,
                            columns: 0..n,
                            to,
                            depth: block_depth(k),
                            sums: &mut [],
                        });
                        assert!(got == want, "{m}×{n}×{k}, {start:?}");
                    }
                    let mut got = vec![0.5; m * n];
                    let to = OutputTile { c: matrix_mut(&mut got, m, n), start, transposed: true };
                    let right = RhsView::Lines(a.to_slice().unwrap());
                    vectors.run(GemmTask {
                        left: LhsView::Rows(weight),
                        rows: 0..n,
                        right,
                        columns: 0..m,
                        to,
                        depth: block_depth(k),
                        sums: &mut [],
                    });
                    assert!(got == want, "{m}×{n}×{k}, transposed, {start:?}");
                }
            }
        }
    }

    #[test]
    fn parts_have_the_bits_of_the_whole() {
        for (m, n, k) in [(64, 3000, 200), (300, 130, 600), (256, 384, 64), (1000, 50, 77)] {
            let a = numbers(m * k, 11);
            let weight = numbers(n * k, 5);
            // Rows with padding after each.
            let mut gaps = vec![f32::NAN; m * (k + 3)];
            gaps.chunks_mut(k + 3)
                .zip(a.chunks(k))
                .for_each(|(to, row)| to[..k].copy_from_slice(row));
            let with_gaps = ArrayView2::from_shape((m, k).strides((k + 3, 1)), &gaps).unwrap();
            let weight = matrix(&weight, n, k);
            let b = weight.reversed_axes().as_standard_layout().into_owned();
            let bias = numbers(n, 3);
            let start = OutputInit::Bias(&bias);
            let mut want = vec![0.0; m * n];
            let acc = start.write_bias(matrix_mut(&mut want, m, n));
            by_gemm(matrix(&a, m, k), b.view(), matrix_mut(&mut want, m, n), acc);
            for (threads, left) in [(1, matrix(&a, m, k)), (3, matrix(&a, m, k)), (2, with_gaps)] {
                let threads = Threads::new(threads);
                for right in [b.view(), weight.reversed_axes()] {
                    let mut got = vec![0.5; m * n];
                    let done = multiply(
                        block_depth(k),
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
        assert_eq!(cut(2, 2 * ROWS_PER_THREAD, 6), [2, 2]);
        assert_eq!(cut(4, 2 * ROWS_PER_THREAD, 12), [2, 6]);
        assert_eq!(cut(2, 256, 12), [1, 4]);
        assert_eq!(cut(1, 48, 3), [1, 1]);
    }

    #[test]
    fn operands_that_lie_across_have_the_bits_of_the_transposed() {
        // Partial K blocks, panels, bands and parts; more rows than are packed at once.
        for (m, n, k, threads) in [
            (300, 290, 1031, 1),
            (MOST_ROWS + 100, 256, 1024, 1),
            (TRANSPOSED_ROWS * 3, 64, 2100, 3),
        ] {
            let a = numbers(k * m, 11);
            let b = numbers(k * n, 5);
            let across = matrix(&a, k, m);
            let b = matrix(&b, k, n);
            let left = across.reversed_axes().as_standard_layout().into_owned();
            for start in [OutputInit::Zero, OutputInit::Accumulate] {
                let mut want = vec![0.5; m * n];
                let mut got = vec![0.5; m * n];
                let acc = start.write_bias(matrix_mut(&mut want, m, n));
                by_gemm(left.view(), b, matrix_mut(&mut want, m, n), acc);
                let mut want_sums = vec![0.25; m];
                let mut sums = vec![0.25; m];
                add_rows(&Threads::new(1), &a, m, &mut want_sums);
                let c = matrix_mut(&mut got, m, n);
                let threads = Threads::new(threads);
                let done =
                    multiply_transposed(block_depth(k), &threads, &a, m, b, c, start, &mut sums);
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
            |a, b| multiply(64, &threads, a, b, matrix_mut(&mut c, 64, 64), OutputInit::Zero);
        assert!(
            !tried(matrix(&a, 64, 64).reversed_axes(), matrix(&b, 64, 64)),
            "rows are not contiguous"
        );
        let few = matrix(&a[..64 * 47], 64, 47);
        let other = matrix(&b[..47 * 64], 47, 64);
        assert!(!tried(few, other), "few terms");
        assert!(c.iter().all(|c| *c == 0.5));
    }
}
