//! Affine maps of rows, and their two backward products.

use ndarray::{ArrayView2, ArrayViewMut2};

use super::math::simd;
use super::product::{multiply_across, multiply_parallel};
use super::threads::Threads;
use crate::backend::{Gemm, Linear};

/// A row-major matrix over a slice.
pub(super) fn matrix(x: &[f32], rows: usize, columns: usize) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((rows, columns), x).expect("a window has its shape's length")
}

/// As [`matrix`], exclusive.
pub(super) fn matrix_mut(x: &mut [f32], rows: usize, columns: usize) -> ArrayViewMut2<'_, f32> {
    ArrayViewMut2::from_shape((rows, columns), x).expect("a window has its shape's length")
}

pub fn gemm(threads: &Threads, s: Gemm, a: &[f32], b: &[f32], c: &mut [f32]) {
    let b = if s.tb { matrix(b, s.n, s.k).reversed_axes() } else { matrix(b, s.k, s.n) };
    let c = matrix_mut(c, s.m, s.n);
    if s.ta {
        assert_eq!(a.len(), s.k * s.m);
        multiply_across(threads, a, s.m, b, c, s.acc, &mut []);
    } else {
        multiply_parallel(threads, matrix(a, s.m, s.k), b, c, s.acc);
    }
}

/// Rows of one task when a bias is spread over rows.
const ROWS: usize = 32;

pub fn forward(threads: &Threads, s: Linear, x: &[f32], weight: &[f32], bias: &[f32], y: &mut [f32]) {
    if !bias.is_empty() {
        threads.each(y.chunks_mut(ROWS * s.outputs), |y| {
            y.chunks_exact_mut(s.outputs).for_each(|y| y.copy_from_slice(bias));
        });
    }
    let shape = Gemm { m: s.rows, n: s.outputs, k: s.inputs, ta: false, tb: true, acc: !bias.is_empty() };
    gemm(threads, shape, x, weight, y);
}

pub fn backward_input(threads: &Threads, s: Linear, dy: &[f32], weight: &[f32], dx: &mut [f32]) {
    let shape = Gemm { m: s.rows, n: s.inputs, k: s.outputs, ta: false, tb: false, acc: false };
    gemm(threads, shape, dy, weight, dx);
}

pub fn backward_weight(threads: &Threads, s: Linear, dy: &[f32], x: &[f32], dweight: &mut [f32], dbias: &mut [f32]) {
    assert_eq!(dy.len(), s.rows * s.outputs);
    let (x, dweight) = (matrix(x, s.rows, s.inputs), matrix_mut(dweight, s.outputs, s.inputs));
    multiply_across(threads, dy, s.outputs, x, dweight, true, dbias);
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
