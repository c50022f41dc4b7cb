//! Matmuls by tiles that read an operand unpacked (`sgemm/`), or by the single-threaded kernel of
//! `gemm`, a pure-Rust crate, on fixed parts of the output. Both give the same bits; the crate is
//! used for small matmuls and for CPUs without AVX2. On ARM, the small matmuls whose bits would
//! depend on the vector width are summed in the order of AVX-512 (`avx512_order.rs`).
//!
//! For `gemm`, the output is divided along rows and columns into parts, one task each, by its shape
//! alone. Each part packs its operands separately, so an operand that must be packed element by
//! element is divided as little as possible, or transposed once before. Terms are summed in K
//! blocks whose length depends on the number of terms alone, so the division does not change the
//! bits. According to the crate's source code, cache sizes do not either; no other CPU has been
//! tested.
//!
//! Only the f32 part of the `gemm` family is used: the whole crate would also compile kernels for
//! f64, complex numbers and f16. Its kernel takes pointers and strides, which is `unsafe`; the
//! views passed in guarantee them.

use std::cell::RefCell;
use std::ops::Range;

use ndarray::{ArrayView2, ArrayViewMut2, Axis, ShapeBuilder as _};
use rayon::prelude::*;

use super::gemm_blocking::{MAX_BLOCK_DEPTH, block_depth, blocks, each_output_part};
use super::matrix::{add_columns, add_rows, matrix};
use super::output_init::OutputInit;
use super::sgemm;
use super::threads::{Threads, with_chunks};
use super::transpose::transpose;

/// FLOPs of one task: large enough to hide dispatch and packing, small enough to balance.
const TASK_FLOPS: usize = 16 << 20;

/// FLOPs of one task if an operand must be packed element by element.
const PACKING_TASK_FLOPS: usize = 32 << 20;

/// While there are fewer than [`FEW_TASKS`] tasks, they are smaller, down to this size, to occupy
/// the threads.
const LEAST_FLOPS: usize = 8 << 20;
const FEW_TASKS: usize = 4;
const MAX_TASKS: usize = 64;

/// The least rows or columns of a part: fewer leave the kernel's tiles half empty.
const MIN_PART: usize = 48;

/// Rows and columns of the kernel's tiles; parts consist of whole tiles.
pub const TILE_ROWS: usize = 6;
const TILE_COLUMNS: usize = 16;

/// Columns of the output from which on it is faster to transpose an operand first.
const ACROSS_FROM: usize = 256;

/// Elements of an operand that are transposed at once, 4 MiB, and the most of one of its rows.
const ACROSS: usize = 1 << 20;
const DEEPEST: usize = 2048;

/// Columns that one task transposes.
const STRIP: usize = 64;

/// Elements of a cache line.
const LINE: usize = 16;

/// The kernel packs `a` from this many tiles on; below, reading it unpacked is faster.
const PACK_FROM_TILES: usize = 64;

thread_local! {
    /// A transposed operand, kept between calls because a fresh allocation would cause page faults.
    static TRANSPOSED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Sets the kernel's packing threshold for the shapes of small networks. Process-wide.
pub fn configure() {
    gemm_common::gemm::set_rhs_packing_threshold(PACK_FROM_TILES);
}

/// Computes `c = a·b`, or `c += a·b` with `acc`, for any strides on one thread.
pub fn multiply(
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    c: ArrayViewMut2<'_, f32>,
    acc: bool,
) {
    multiply_by(block_depth(a.ncols()), a, b, c, acc);
}

/// Computes [`multiply`] in K blocks of `depth` terms.
fn multiply_by(
    depth: usize,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    acc: bool,
) {
    let (m, k) = a.dim();
    let (kb, n) = b.dim();
    assert!(
        kb == k && c.dim() == (m, n),
        "cannot multiply {:?} by {:?} into {:?}",
        a.dim(),
        b.dim(),
        c.dim()
    );
    let [a_strides, b_strides, c_strides] =
        [a.strides(), b.strides(), c.strides()].map(|s| [s[0], s[1]]);
    let kernel = gemm_f32::gemm::f32::get_gemm_fn();
    for terms in blocks(k, depth) {
        let first = terms.start as isize;
        #[cfg(not(target_arch = "x86_64"))]
        if super::avx512_order::multiply(terms.clone(), a, b, c.view_mut(), acc || first > 0) {
            continue;
        }
        // SAFETY: the views guarantee that every element addressed by their dimensions and strides
        // is valid, and that `c` is exclusive, hence overlaps neither `a` nor `b`; the dimensions
        // agree, and `terms` lie within them.
        unsafe {
            // The kernel expects contiguous columns of its result, while ours has contiguous
            // rows: it computes cᵀ = bᵀ·aᵀ.
            kernel(
                n,
                m,
                terms.len(),
                c.as_mut_ptr(),
                c_strides[0],
                c_strides[1],
                acc || first > 0,
                b.as_ptr().wrapping_offset(first * b_strides[0]),
                b_strides[0],
                b_strides[1],
                a.as_ptr().wrapping_offset(first * a_strides[1]),
                a_strides[0],
                a_strides[1],
                1.0,
                1.0,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
            );
        }
    }
}

/// Adds `a·b` to the initial value `start` of `c` on all threads, for any strides. The output is
/// divided into parts, which may depend on the threads, and each sum into K blocks by its number of
/// terms alone, so bits do not depend on the number of threads.
pub fn multiply_parallel(
    threads: &Threads,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    c: ArrayViewMut2<'_, f32>,
    start: OutputInit<'_>,
) {
    multiply_parallel_by(block_depth(a.ncols()), threads, a, b, c, start);
}

/// Computes [`multiply_parallel`] in K blocks of `depth` terms.
fn multiply_parallel_by(
    depth: usize,
    threads: &Threads,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    start: OutputInit<'_>,
) {
    if sgemm::multiply(depth, threads, a, b, c.view_mut(), start) {
        return;
    }
    let packs = [a, b].map(|x| x.strides()[1] != 1);
    each_part(threads, c, a.ncols(), packs, |rows, columns, mut c| {
        let acc = start.for_columns(columns.clone()).write_bias(c.view_mut());
        multiply_by(
            depth,
            a.slice_axis(Axis(0), rows.into()),
            b.slice_axis(Axis(1), columns.into()),
            c,
            acc,
        );
    });
}

/// Calls `f` with the parts of the output of an m×k by k×n matmul and their rows and columns,
/// distributed over the threads. `packs` says which operands the kernel packs element by element.
pub fn each_part(
    threads: &Threads,
    c: ArrayViewMut2<'_, f32>,
    k: usize,
    packs: [bool; 2],
    f: impl Fn(Range<usize>, Range<usize>, ArrayViewMut2<'_, f32>) + Sync,
) {
    let (m, n) = c.dim();
    each_output_part(threads, c, grid(m, n, k, packs), [TILE_ROWS, TILE_COLUMNS], f);
}

/// Computes [`multiply_parallel`] for `aᵀ` and `b`, where `a` is row-major with `m` columns; adds
/// the sums of its columns to `sums`, unless it is empty.
///
/// The kernel would pack `aᵀ` again in every part, element by element. With many parts and long
/// sums, tiles read packed panels of it (`sgemm/`); otherwise it is transposed once, in blocks that
/// fit in the caches.
pub fn multiply_transposed(
    threads: &Threads,
    a: &[f32],
    m: usize,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    start: OutputInit<'_>,
    sums: &mut [f32],
) {
    if b.ncols() < ACROSS_FROM || b.nrows() == 0 {
        multiply_parallel(threads, matrix(a, b.nrows(), m).reversed_axes(), b, c, start);
        return add_rows(threads, a, m, sums);
    }
    // K blocks of the sum over all rows, whose order does not depend on the number of columns.
    let depth = block_depth(b.nrows());
    if sgemm::multiply_transposed(depth, threads, a, m, b, c.view_mut(), start, sums) {
        return;
    }
    let deep = b.nrows().min(DEEPEST / MAX_BLOCK_DEPTH * depth);
    // The leading dimension is an odd number of cache lines: a power of two would map all rows to
    // the same few cache sets.
    let stride = deep.next_multiple_of(2 * LINE) + LINE;
    let high = (ACROSS / stride).next_multiple_of(STRIP).min(m.max(1));
    let mut sums = sums.chunks_mut(high);
    TRANSPOSED.with_borrow_mut(|buffer| {
        buffer.resize(buffer.len().max(high * stride), 0.0);
        for (i, mut c) in c.axis_chunks_iter_mut(Axis(0), high).enumerate() {
            let sums = sums.next().unwrap_or_default();
            for (j, (a, b)) in a.chunks(deep * m).zip(b.axis_chunks_iter(Axis(0), deep)).enumerate()
            {
                let across = &mut buffer[..c.nrows() * stride];
                let strips = with_chunks(across.par_chunks_mut(STRIP * stride), sums, STRIP);
                threads.each(strips.enumerate(), |(strip, (across, sums))| {
                    let first = i * high + strip * STRIP;
                    transpose(a, m, first..first + across.len() / stride, across, stride);
                    if let Some(sums) = sums {
                        add_columns(a, m, first, sums);
                    }
                });
                let across =
                    ArrayView2::from_shape((c.nrows(), b.nrows()).strides((stride, 1)), across);
                let across = across.expect("the buffer has a row for each column");
                multiply_parallel_by(
                    depth,
                    threads,
                    across,
                    b,
                    c.view_mut(),
                    start.at_term(j * deep),
                );
            }
        }
    });
}

/// Returns the number of parts along rows and along columns of an m×k by k×n matmul.
fn grid(m: usize, n: usize, k: usize, [packs_a, packs_b]: [bool; 2]) -> [usize; 2] {
    let flops = 2 * m * n * k;
    let tasks = flops.div_ceil(if packs_a { PACKING_TASK_FLOPS } else { TASK_FLOPS });
    // A power of two divides evenly over common numbers of threads.
    let tasks = tasks
        .max(flops.div_ceil(LEAST_FLOPS).min(FEW_TASKS))
        .clamp(1, MAX_TASKS)
        .next_power_of_two();
    // If an operand is packed element by element, the other one is divided as little as
    // possible: each of its parts packs the first again.
    if packs_a {
        let high = split_count(m, tasks);
        return [high, if high > 1 { 1 } else { split_count(n, tasks) }];
    }
    let wide = split_count(n, tasks);
    [if packs_b && wide > 1 { 1 } else { split_count(m, tasks / wide) }, wide]
}

/// Returns the number of parts of `len` rows or columns: a power of two that is less than twice
/// `most`.
fn split_count(len: usize, most: usize) -> usize {
    let mut parts = 1;
    while parts < most && len >= 2 * parts * MIN_PART {
        parts *= 2;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::random::Stream;

    /// Returns aᵀb + 0.5 for a k×m matrix and a k×n matrix.
    fn multiplied(threads: &Threads, a: &[f32], b: &[f32], [m, n, k]: [usize; 3]) -> Vec<f32> {
        let mut c = vec![0.5; m * n];
        let of_c = ArrayViewMut2::from_shape((m, n), &mut c).unwrap();
        let start = OutputInit::Accumulate;
        multiply_transposed(threads, a, m, matrix(b, k, n), of_c, start, &mut []);
        c
    }

    /// A rank with some of the columns computes the same bits for them.
    #[test]
    fn columns_have_the_same_bits_among_any_others() {
        let numbers = |len: usize, seed: u64| {
            let mut numbers = vec![0.0; len];
            Stream::new(seed).fill_normal(&mut numbers);
            numbers
        };
        let threads = Threads::new(2);
        for k in [1, 511, 513, 2048, 2049, DEEPEST + 3, 2600, 2 * DEEPEST + 100] {
            let m = 70;
            let n = 300;
            let few = 64;
            let a = numbers(k * m, 1);
            let b = numbers(k * n, 2);
            let last: Vec<f32> = b.chunks(n).flat_map(|row| &row[n - few..]).copied().collect();
            let whole = multiplied(&threads, &a, &b, [m, n, k]);
            let part = multiplied(&threads, &a, &last, [m, few, k]);
            for (row, (whole, part)) in whole.chunks(n).zip(part.chunks(few)).enumerate() {
                let same =
                    whole[n - few..].iter().zip(part).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{k} terms, row {row}");
            }
        }
    }

    #[test]
    fn transposed_operands_are_cut_where_they_are_large() {
        // More rows than are transposed at once, and than fit at once; one row less than a
        // strip.
        for (k, m, n) in [(DEEPEST + 3, 700, 256), (5, ACROSS / 32 + 1, 256), (3, 63, 300)] {
            let numbers = |len: usize, step: usize| {
                (0..len).map(|i| (i * step % 13) as f32 - 6.0).collect::<Vec<_>>()
            };
            let a = numbers(k * m, 7);
            let b = numbers(k * n, 5);
            let mut c = vec![1.0; m * n];
            let mut sums = vec![1.0; m];
            let threads = Threads::new(2);
            let of_c = ArrayViewMut2::from_shape((m, n), &mut c).unwrap();
            multiply_transposed(
                &threads,
                &a,
                m,
                matrix(&b, k, n),
                of_c,
                OutputInit::Accumulate,
                &mut sums,
            );
            // Small integers: every order of summation is exact.
            for (i, j) in [(0, 0), (m / 2, n / 3), (m - 1, n - 1), (m.min(512) - 1, 17)] {
                let want: f32 = (0..k).map(|l| a[l * m + i] * b[l * n + j]).sum();
                assert_eq!(c[i * n + j], 1.0 + want, "{k}×{m}×{n} at {i}, {j}");
                assert_eq!(sums[i], 1.0 + (0..k).map(|l| a[l * m + i]).sum::<f32>());
            }
        }
    }
}
