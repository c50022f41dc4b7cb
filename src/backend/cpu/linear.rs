//! Affine maps of rows, and their two backward products.

use ndarray::{ArrayView2, ArrayViewMut2};

use super::math::simd;
use super::product::{multiply_across, multiply_parallel};
use super::threads::Threads;
use crate::backend::{Gemm, Linear};

/// A row-major matrix over a slice.
pub(super) fn matrix<T>(x: &[T], rows: usize, columns: usize) -> ArrayView2<'_, T> {
    ArrayView2::from_shape((rows, columns), x).expect("a window has its shape's length")
}

/// As [`matrix`], exclusive.
pub(super) fn matrix_mut(x: &mut [f32], rows: usize, columns: usize) -> ArrayViewMut2<'_, f32> {
    ArrayViewMut2::from_shape((rows, columns), x).expect("a window has its shape's length")
}

/// The left operand, m×k.
pub(super) fn left<T>(s: Gemm, a: &[T]) -> ArrayView2<'_, T> {
    if s.ta { matrix(a, s.k, s.m).reversed_axes() } else { matrix(a, s.m, s.k) }
}

/// The right operand, k×n.
pub(super) fn right<T>(s: Gemm, b: &[T]) -> ArrayView2<'_, T> {
    if s.tb { matrix(b, s.n, s.k).reversed_axes() } else { matrix(b, s.k, s.n) }
}

pub fn gemm(threads: &Threads, s: Gemm, a: &[f32], b: &[f32], c: &mut [f32]) {
    let c = matrix_mut(c, s.m, s.n);
    if s.ta {
        assert_eq!(a.len(), s.k * s.m);
        multiply_across(threads, a, s.m, right(s, b), c, s.acc, &mut []);
    } else {
        multiply_parallel(threads, left(s, a), right(s, b), c, s.acc);
    }
}

/// Elements of one task when a bias is spread over rows.
const SPREAD: usize = 1 << 14;

/// Every row of `y` becomes the bias, if there is one: what the product is added to.
pub fn spread(threads: &Threads, bias: &[f32], y: &mut [f32]) {
    if bias.is_empty() {
        return;
    }
    let rows = (SPREAD / bias.len()).max(1);
    threads.each(y.chunks_mut(rows * bias.len()), |y| {
        y.chunks_exact_mut(bias.len()).for_each(|y| y.copy_from_slice(bias));
    });
}

/// The product of [`crate::backend::Kernels::linear`], after [`spread`].
pub fn forward(s: Linear, bias: &[f32]) -> Gemm {
    Gemm { m: s.rows, n: s.outputs, k: s.inputs, ta: false, tb: true, acc: !bias.is_empty() }
}

/// The product of [`crate::backend::Kernels::linear_backward_input`].
pub fn backward_input(s: Linear) -> Gemm {
    Gemm { m: s.rows, n: s.inputs, k: s.outputs, ta: false, tb: false, acc: false }
}

/// The product of [`crate::backend::Kernels::linear_backward_weight`].
pub fn weight_gradient(s: Linear, add: bool) -> Gemm {
    Gemm { m: s.outputs, n: s.inputs, k: s.rows, ta: true, tb: false, acc: add }
}

pub fn backward_weight(
    threads: &Threads,
    s: Linear,
    dy: &[f32],
    x: &[f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
    add: bool,
) {
    assert_eq!(dy.len(), s.rows * s.outputs);
    let (x, dweight) = (matrix(x, s.rows, s.inputs), matrix_mut(dweight, s.outputs, s.inputs));
    multiply_across(threads, dy, s.outputs, x, dweight, add, dbias);
}

/// Columns of one task when rows are summed: their sums stay in registers.
const COLUMNS: usize = 64;

/// `sum += Σ_rows x`. Each task owns some columns and walks all rows, so the order of the sum is fixed.
pub(super) fn add_rows(threads: &Threads, x: &[f32], width: usize, sum: &mut [f32]) {
    threads.each(sum.chunks_mut(COLUMNS).enumerate(), |(i, sum)| {
        add_columns(x, width, i * COLUMNS, sum);
    });
}

/// `sum += Σ_rows x` of the columns from `first` on.
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
