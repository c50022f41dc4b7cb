//! Slices as matrices, and sums over their rows.

use ndarray::{ArrayView2, ArrayViewMut2};
use rayon::prelude::*;

use super::math::simd;
use super::threads::Threads;
use hpctrain_device::Gemm;

/// Returns a slice as a row-major matrix.
pub(super) fn matrix<T>(x: &[T], rows: usize, columns: usize) -> ArrayView2<'_, T> {
    ArrayView2::from_shape((rows, columns), x).expect("a window has its shape's length")
}

/// Returns an exclusive slice as a row-major matrix.
pub(super) fn matrix_mut(x: &mut [f32], rows: usize, columns: usize) -> ArrayViewMut2<'_, f32> {
    ArrayViewMut2::from_shape((rows, columns), x).expect("a window has its shape's length")
}

/// Returns the left operand, m×k.
pub(super) fn left<T>(s: Gemm, a: &[T]) -> ArrayView2<'_, T> {
    if s.ta { matrix(a, s.k, s.m).reversed_axes() } else { matrix(a, s.m, s.k) }
}

/// Returns the right operand, k×n.
pub(super) fn right<T>(s: Gemm, b: &[T]) -> ArrayView2<'_, T> {
    if s.tb { matrix(b, s.n, s.k).reversed_axes() } else { matrix(b, s.k, s.n) }
}

/// Columns of one task when rows are summed: its partial sums stay in registers.
const COLUMNS: usize = 64;

/// Computes `sum += Σ_rows x`. Each task owns some columns and walks all rows, so the order of
/// summation is fixed.
pub(super) fn add_rows(threads: &Threads, x: &[f32], width: usize, sum: &mut [f32]) {
    threads.each(sum.par_chunks_mut(COLUMNS).enumerate(), |(i, sum)| {
        add_columns(x, width, i * COLUMNS, sum);
    });
}

/// Computes `sum += Σ_rows x` for the columns from `first` on.
pub(super) fn add_columns(x: &[f32], width: usize, first: usize, sum: &mut [f32]) {
    for (i, sum) in sum.chunks_mut(COLUMNS).enumerate() {
        simd(
            #[inline(always)]
            || {
                let mut total = [0.0; COLUMNS];
                total[..sum.len()].copy_from_slice(sum);
                for row in x.chunks_exact(width) {
                    let row = &row[first + i * COLUMNS..][..sum.len()];
                    match row.first_chunk::<COLUMNS>() {
                        Some(row) => (0..COLUMNS).for_each(|j| total[j] += row[j]),
                        None => total.iter_mut().zip(row).for_each(|(total, x)| *total += x),
                    }
                }
                sum.copy_from_slice(&total[..sum.len()]);
            },
        );
    }
}
