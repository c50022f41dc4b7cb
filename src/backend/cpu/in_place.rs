//! Products in f32 whose tiles stay in registers, and whose left operand is read in place.
//!
//! The right operand is copied into panels of columns, as many as a core's own cache holds. Of the left one the terms of a row are
//! neighbours, and a tile reads a number of few rows at a time, so that to pack them would only cost. Where rows are few and the
//! right operand is the transpose of a weight, the weight's rows take the place of the left operand's, and the result is turned
//! over in small blocks: then the weight, which is larger than the rest, is not packed. Each part of the result packs for itself:
//! no thread waits for another, nor reads what another has just written.
//!
//! Terms are added one after the other, in pieces of fixed length, so bits depend neither on the cut, nor on the number of
//! threads, nor on the width of vectors: they are those of `gemm`. Blocks and panels are those of K. Goto and R. van de Geijn,
//! "Anatomy of high-performance matrix multiplication" (ACM TOMS 34, 2008).

use std::array::from_fn;
use std::cell::RefCell;
use std::ops::Range;

use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use ndarray::{ArrayView2, ArrayViewMut2};
use pulp::{Simd, WithSimd};

use super::cut::{each_of, pieces};
use super::start::Start;
use super::threads::Threads;
use super::transpose::transpose;

/// Columns of a panel: four vectors of AVX-512.
const COLUMNS: usize = 64;

/// Rows of the highest tile.
const HIGH: usize = 6;

/// Rows that go through a group of panels together.
const ROWS: usize = 8 * HIGH;

/// Panels of a group: half of a small L2 cache.
const GROUP: usize = 4;

/// Terms that a tile reads of a row at a time.
const TERMS: usize = 8;

/// Tasks for each thread, if there is enough to cut: threads that are late by one lose little.
const TASKS: usize = 2;

/// Rows of a thread for which it packs all columns itself: packing is a hundredth of the work.
const OWN_ROWS: usize = 256;

/// Least rows, columns and terms: parts of smaller products may be vectors, which `gemm` sums in another order.
const LEAST: usize = 48;

/// So many neighbouring columns of one row; begins on a cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Strip([f32; COLUMNS]);

thread_local! {
    /// Panels; kept, because a fresh allocation would fault page by page.
    static ROOM: RefCell<Vec<Strip>> = const { RefCell::new(Vec::new()) };
}

/// Computes `c`, of this start, and `a·b`, with the bits of `gemm`: true if it is done. Terms of a row of `a` must be neighbours, and
/// terms or columns of `b`; a CPU without AVX2, and small products, have others. Sums are those of pieces of `depth` terms.
pub fn multiply(
    depth: usize,
    threads: &Threads,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    c: ArrayViewMut2<'_, f32>,
    start: Start<'_>,
) -> bool {
    let Some(vectors) = Vectors::find() else { return false };
    let (m, n, k) = (a.nrows(), b.ncols(), a.ncols());
    if m.min(n).min(k) < LEAST || a.strides()[1] != 1 || c.strides()[1] != 1 {
        return false;
    }
    let tasks = TASKS * threads.count();
    let right = match (b.strides(), b.reversed_axes().to_slice()) {
        ([_, 1], _) => Right::Terms(b),
        (_, Some(weight)) => {
            let turned = m <= GROUP * COLUMNS && tasks * m * k + m * n < n * k;
            if let (true, Some(x)) = (turned, a.to_slice()) {
                let wide = tasks.min(n.div_ceil(ROWS));
                each_of(threads, c, [1, wide], [HIGH, ROWS], |_, lines, c| {
                    let (left, right) = (b.reversed_axes(), Right::Lines(x));
                    let to = Place { c, start: start.of(lines.clone()), turned };
                    vectors.run(Part { left, rows: lines, right, columns: 0..m, to, depth });
                });
                return true;
            }
            Right::Lines(weight)
        }
        _ => return false,
    };
    each_of(threads, c, cut(threads.count(), m, n.div_ceil(COLUMNS)), [HIGH, COLUMNS], |rows, columns, c| {
        let to = Place { c, start: start.of(columns.clone()), turned: false };
        vectors.run(Part { left: a, rows, right, columns, to, depth });
    });
    true
}

/// Parts of so many rows and panels along both, for so many threads. If there are enough rows, each thread keeps to some of them, which it
/// has in other kernels, too.
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

    fn run(self, part: Part<'_, '_>) {
        ROOM.with_borrow_mut(|room| {
            room.resize(room.len().max(GROUP * part.depth), Strip::zeroed());
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512(simd) => Simd::vectorize(simd, InRoom { part, room }),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2(simd) => Simd::vectorize(simd, InRoom { part, room }),
            }
        });
    }
}

/// The operand that goes into panels.
#[derive(Clone, Copy)]
enum Right<'a> {
    /// A row of each term, columns neighbours.
    Terms(ArrayView2<'a, f32>),
    /// A row of each column, terms neighbours, without gaps.
    Lines(&'a [f32]),
}

impl Right<'_> {
    /// Copies some terms, of `all`, of the columns of a panel. Columns that it has besides are of no use.
    fn pack(self, all: usize, terms: Range<usize>, columns: Range<usize>, to: &mut [Strip]) {
        match self {
            Right::Terms(x) => {
                for (term, to) in terms.zip(to) {
                    let row = &x.row(term).to_slice().expect("columns are neighbours")[columns.clone()];
                    match row.first_chunk() {
                        Some(row) => to.0 = *row,
                        None => to.0[..row.len()].copy_from_slice(row),
                    }
                }
            }
            Right::Lines(x) => {
                transpose(&x[columns.start * all..columns.end * all], all, terms, cast_slice_mut(to), COLUMNS);
            }
        }
    }
}

/// A place for the result.
struct Place<'a> {
    c: ArrayViewMut2<'a, f32>,
    start: Start<'a>,
    /// Rows of the product are columns of `c`.
    turned: bool,
}

impl Place<'_> {
    /// Ends a block of the piece that begins at `term`: a strip for each of the rows, of which the columns are there.
    #[inline(always)]
    fn put(&mut self, term: usize, rows: Range<usize>, columns: Range<usize>, block: &[Strip; ROWS]) {
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
        start.put(&mut self.c.row_mut(row).into_slice().expect("columns are neighbours")[columns], from);
    }
}

/// A part of a product: one task.
struct Part<'a, 'c> {
    left: ArrayView2<'a, f32>,
    /// Rows of the left operand.
    rows: Range<usize>,
    right: Right<'a>,
    /// Columns of the right operand.
    columns: Range<usize>,
    /// These rows and columns of the result.
    to: Place<'c>,
    /// Terms of a piece.
    depth: usize,
}

/// A part, and room for a group of panels.
struct InRoom<'a, 'c, 'r> {
    part: Part<'a, 'c>,
    room: &'r mut [Strip],
}

impl WithSimd for InRoom<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Part { left, rows, right, columns, mut to, depth } = self.part;
        let mut block = [Strip::zeroed(); ROWS];
        for terms in pieces(left.ncols(), depth) {
            let height = terms.len();
            for first in columns.clone().step_by(GROUP * COLUMNS) {
                let group = (first..columns.end.min(first + GROUP * COLUMNS)).step_by(COLUMNS);
                let group = group.map(|first| first..columns.end.min(first + COLUMNS));
                for (panel, strips) in group.clone().zip(self.room.chunks_exact_mut(height)) {
                    right.pack(left.ncols(), terms.clone(), panel, strips);
                }
                for first in rows.clone().step_by(ROWS) {
                    let high = first..rows.end.min(first + ROWS);
                    for (panel, strips) in group.clone().zip(self.room.chunks_exact(height)) {
                        multiply_block(simd, left, high.clone(), terms.clone(), strips, panel.len(), &mut block);
                        let of =
                            |range: Range<usize>, all: &Range<usize>| range.start - all.start..range.end - all.start;
                        to.put(terms.start, of(high.clone(), &rows), of(panel, &columns), &block);
                    }
                }
            }
        }
    }
}

/// Computes a block: so many columns of a panel for some rows and terms of the left operand.
#[inline(always)]
fn multiply_block<S: Simd>(
    simd: S,
    left: ArrayView2<'_, f32>,
    rows: Range<usize>,
    terms: Range<usize>,
    strips: &[Strip],
    columns: usize,
    block: &mut [Strip; ROWS],
) {
    let line = |row: usize| &left.row(row).to_slice().expect("terms are neighbours")[terms.clone()];
    let mut row = rows.start;
    while row < rows.end {
        let to = &mut block[row - rows.start..];
        row += match rows.end - row {
            HIGH.. => tiles::<S, HIGH>(simd, from_fn(|r| line(row + r)), strips, columns, to),
            4.. => tiles::<S, 4>(simd, from_fn(|r| line(row + r)), strips, columns, to),
            2.. => tiles::<S, 2>(simd, from_fn(|r| line(row + r)), strips, columns, to),
            _ => tiles::<S, 1>(simd, [line(row)], strips, columns, to),
        };
    }
}

/// Computes so many columns of `HIGH` rows, in tiles as wide as the registers allow.
#[inline(always)]
fn tiles<S: Simd, const HIGH: usize>(
    simd: S,
    rows: [&[f32]; HIGH],
    strips: &[Strip],
    columns: usize,
    to: &mut [Strip],
) -> usize {
    let vectors = columns.div_ceil(S::F32_LANES);
    if S::REGISTER_COUNT >= 32 {
        match vectors {
            1 => tile::<S, HIGH, 1>(simd, rows, strips, 0, to),
            2 => tile::<S, HIGH, 2>(simd, rows, strips, 0, to),
            3 => tile::<S, HIGH, 3>(simd, rows, strips, 0, to),
            _ => tile::<S, HIGH, 4>(simd, rows, strips, 0, to),
        }
    } else {
        for vector in (0..vectors).step_by(2) {
            if vector + 1 < vectors {
                tile::<S, HIGH, 2>(simd, rows, strips, vector, to);
            } else {
                tile::<S, HIGH, 1>(simd, rows, strips, vector, to);
            }
        }
    }
    HIGH
}

/// Computes `HIGH` rows and `WIDE` vectors.
#[inline(always)]
fn tile<S: Simd, const HIGH: usize, const WIDE: usize>(
    simd: S,
    rows: [&[f32]; HIGH],
    strips: &[Strip],
    vector: usize,
    to: &mut [Strip],
) {
    let mut sums = [[simd.splat_f32s(0.0); WIDE]; HIGH];
    let (many, rest) = strips.as_chunks::<TERMS>();
    let mut at = 0;
    for strips in many {
        let terms: [&[f32; TERMS]; HIGH] =
            from_fn(|r| rows[r][at..].first_chunk().expect("a row has a term for each strip"));
        for term in 0..TERMS {
            let strip = &S::as_simd_f32s(&strips[term].0).0[vector..vector + WIDE];
            for r in 0..HIGH {
                let x = simd.splat_f32s(terms[r][term]);
                for c in 0..WIDE {
                    sums[r][c] = simd.mul_add_e_f32s(x, strip[c], sums[r][c]);
                }
            }
        }
        at += TERMS;
    }
    for strip in rest {
        let strip = &S::as_simd_f32s(&strip.0).0[vector..vector + WIDE];
        for r in 0..HIGH {
            let x = simd.splat_f32s(rows[r][at]);
            for c in 0..WIDE {
                sums[r][c] = simd.mul_add_e_f32s(x, strip[c], sums[r][c]);
            }
        }
        at += 1;
    }
    let to = to.first_chunk_mut::<HIGH>().expect("rows of a block");
    for r in 0..HIGH {
        S::as_mut_simd_f32s(&mut to[r].0).0[vector..vector + WIDE].copy_from_slice(&sums[r]);
    }
}

#[cfg(test)]
mod tests {
    use ndarray::ShapeBuilder as _;

    use super::super::cut::depth;
    use super::super::matrix::{matrix, matrix_mut};
    use super::super::product::multiply as by_gemm;
    use super::*;

    fn numbers(len: usize, step: usize) -> Vec<f32> {
        (0..len).map(|i| (i * step % 1009) as f32 / 504.0 - 1.0).collect()
    }

    /// Also the order of sums on machines with other vectors.
    #[test]
    fn bits_are_those_of_gemm_for_all_vectors() {
        #[cfg(target_arch = "x86_64")]
        let all = [pulp::x86::V4::try_new().map(Vectors::Avx512), pulp::x86::V3::try_new().map(Vectors::Avx2)];
        #[cfg(not(target_arch = "x86_64"))]
        let all = [None];
        let all: Vec<Vectors> = all.into_iter().flatten().collect();
        for (m, n, k) in [(48, 48, 48), (53, 70, 1031), (6, 64, 8), (100, 257, 513), (257, 130, 96), (1, 5, 3)] {
            let (a, weight) = (numbers(m * k, 7), numbers(n * k, 13));
            let (a, weight) = (matrix(&a, m, k), matrix(&weight, n, k));
            let b = weight.reversed_axes().as_standard_layout().into_owned();
            let bias = numbers(n, 3);
            for start in [Start::Nothing, Start::Result, Start::Columns(&bias)] {
                let mut want = vec![0.5; m * n];
                if m.min(n).min(k) >= LEAST {
                    let acc = start.written(matrix_mut(&mut want, m, n));
                    by_gemm(a, b.view(), matrix_mut(&mut want, m, n), acc);
                } else {
                    for (at, want) in want.iter_mut().enumerate() {
                        let sum = (0..k).fold(0.0, |sum, t| a[(at / n, t)].mul_add(b[(t, at % n)], sum));
                        match start {
                            Start::Nothing => *want = sum,
                            Start::Result => *want += sum,
                            Start::Columns(bias) => *want = bias[at % n] + sum,
                        }
                    }
                }
                for vectors in &all {
                    let mut got = vec![0.0; m * n];
                    for right in [Right::Terms(b.view()), Right::Lines(weight.to_slice().unwrap())] {
                        got.fill(0.5);
                        let to = Place { c: matrix_mut(&mut got, m, n), start, turned: false };
                        vectors.run(Part { left: a, rows: 0..m, right, columns: 0..n, to, depth: depth(k) });
                        assert!(got == want, "{m}×{n}×{k}, {start:?}");
                    }
                    let mut got = vec![0.5; m * n];
                    let to = Place { c: matrix_mut(&mut got, m, n), start, turned: true };
                    let right = Right::Lines(a.to_slice().unwrap());
                    vectors.run(Part { left: weight, rows: 0..n, right, columns: 0..m, to, depth: depth(k) });
                    assert!(got == want, "{m}×{n}×{k}, turned, {start:?}");
                }
            }
        }
    }

    #[test]
    fn parts_have_the_bits_of_the_whole() {
        for (m, n, k) in [(64, 3000, 200), (300, 130, 600), (256, 384, 64), (1000, 50, 77)] {
            let (a, weight) = (numbers(m * k, 11), numbers(n * k, 5));
            // Rows with a gap after each.
            let mut gaps = vec![f32::NAN; m * (k + 3)];
            gaps.chunks_mut(k + 3).zip(a.chunks(k)).for_each(|(to, row)| to[..k].copy_from_slice(row));
            let with_gaps = ArrayView2::from_shape((m, k).strides((k + 3, 1)), &gaps).unwrap();
            let weight = matrix(&weight, n, k);
            let b = weight.reversed_axes().as_standard_layout().into_owned();
            let bias = numbers(n, 3);
            let start = Start::Columns(&bias);
            let mut want = vec![0.0; m * n];
            let acc = start.written(matrix_mut(&mut want, m, n));
            by_gemm(matrix(&a, m, k), b.view(), matrix_mut(&mut want, m, n), acc);
            for (threads, left) in [(1, matrix(&a, m, k)), (3, matrix(&a, m, k)), (2, with_gaps)] {
                let threads = Threads::new(threads);
                for right in [b.view(), weight.reversed_axes()] {
                    let mut got = vec![0.5; m * n];
                    let done = multiply(depth(k), &threads, left, right, matrix_mut(&mut got, m, n), start);
                    assert_eq!(done, Vectors::find().is_some());
                    assert!(!done || got == want, "{m}×{n}×{k}");
                }
            }
        }
    }

    #[test]
    fn what_it_cannot_do_is_left_as_it_is() {
        let threads = Threads::new(1);
        let (a, b) = (numbers(64 * 64, 7), numbers(64 * 64, 13));
        let mut c = vec![0.5; 64 * 64];
        let mut tried = |a, b| multiply(64, &threads, a, b, matrix_mut(&mut c, 64, 64), Start::Nothing);
        assert!(!tried(matrix(&a, 64, 64).reversed_axes(), matrix(&b, 64, 64)), "terms of a row are no neighbours");
        let (few, other) = (matrix(&a[..64 * 47], 64, 47), matrix(&b[..47 * 64], 47, 64));
        assert!(!tried(few, other), "few terms");
        assert!(c.iter().all(|c| *c == 0.5));
    }
}
