//! Small matmuls in the order in which the crate `gemm` sums them with AVX-512, for ARM.
//!
//! If an operand is a vector, or both operands have contiguous terms and the output is small,
//! `gemm` distributes the terms over vector lanes, so the bits of the sums depend on the vector
//! width; on ARM it does not fuse multiplications and additions there, either. The functions here
//! sum over 16 vector lanes, as many as AVX-512 has, on every CPU. The cases are those of
//! `gemm_basic_generic` in gemm-common 0.19. In all others `gemm` adds the terms one after the
//! other, and its bits are the same on all CPUs with fused multiply-adds.

use std::ops::Range;

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, s};

/// Elements of an AVX-512 vector.
const LANES: usize = 16;

/// Vectors that a long dot product sums separately.
const VECTORS: usize = 8;

/// The most elements of an output whose dot products are summed in one vector each.
const SMALL: usize = 256;

/// The most terms for which `gemm` does not fuse multiplications and additions on any CPU.
const FEW_TERMS: usize = 2;

/// Computes `c = a·b`, or `c += a·b` with `acc`, for the terms `terms`, and returns true. Returns
/// false without an effect where the bits of `gemm` do not depend on the vectors of the CPU.
pub fn multiply(
    terms: Range<usize>,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    c: ArrayViewMut2<'_, f32>,
    acc: bool,
) -> bool {
    // The strides that `gemm` receives: those of slices with one row or column would be 0.
    let of_a = [a.strides()[0], a.strides()[1]];
    let of_b = [b.strides()[0], b.strides()[1]];
    let of_c = [c.strides()[0], c.strides()[1]];
    let a = a.slice(s![.., terms.clone()]);
    let b = b.slice(s![terms, ..]);
    let m = a.nrows();
    let n = b.ncols();
    let k = a.ncols();
    if m * n * k == 0 {
        return false;
    }
    let are_rows = of_a[1] == 1 && of_b[0] == 1;
    if are_rows && m * n <= SMALL {
        dots(a, b, c, acc, dot_of_one_vector);
        return true;
    }
    if k <= FEW_TERMS {
        return false;
    }
    if m == 1 && of_b[1] == 1 && of_c[1] == 1 {
        add_scaled_rows(a.row(0), b, c, acc);
    } else if m == 1 && are_rows {
        dots(a, b, c, acc, dot_of_many_vectors);
    } else if n == 1 && of_a[0] == 1 && of_c[0] == 1 {
        add_scaled_rows(b.column(0), a.reversed_axes(), c.reversed_axes(), acc);
    } else if n == 1 && are_rows {
        dots(a, b, c, acc, dot_of_many_vectors);
    } else {
        return false;
    }
    true
}

/// Computes each element of the output as a dot product of contiguous terms.
fn dots(
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    acc: bool,
    dot: impl Fn(&[f32], &[f32]) -> f32,
) {
    for (a, mut c) in a.rows().into_iter().zip(c.rows_mut()) {
        let a = a.to_slice().expect("contiguous terms");
        for (b, c) in b.columns().into_iter().zip(&mut c) {
            let sum = dot(a, b.to_slice().expect("contiguous terms"));
            *c = if acc { sum + *c } else { sum };
        }
    }
}

/// Adds the rows of `b`, multiplied by the elements of `x`, to the only row of `c`, one after the
/// other.
fn add_scaled_rows(
    x: ArrayView1<'_, f32>,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    acc: bool,
) {
    let c = c.row_mut(0).into_slice().expect("contiguous columns");
    for (term, (x, b)) in x.iter().zip(b.rows()).enumerate() {
        let b = b.to_slice().expect("contiguous columns");
        if acc || term > 0 {
            c.iter_mut().zip(b).for_each(|(c, b)| *c = x.mul_add(*b, *c));
        } else {
            c.iter_mut().zip(b).for_each(|(c, b)| *c = x * b);
        }
    }
}

/// Multiplies two vectors elementwise and adds the result to `sums`.
fn multiply_add(x: &[f32; LANES], y: &[f32; LANES], sums: &mut [f32; LANES]) {
    for i in 0..LANES {
        sums[i] = x[i].mul_add(y[i], sums[i]);
    }
}

/// Adds the first `count` elements after the first `count` to these.
fn fold<const N: usize>(x: &mut [f32; N], count: usize) {
    for i in 0..count {
        x[i] += x[i + count];
    }
}

/// Returns the dot product in the order of `gemm`'s horizontal kernel: one vector of sums, whose
/// halves are added. The last terms are padded with zeros.
fn dot_of_one_vector(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (x_vectors, x_rest) = x.as_chunks::<LANES>();
    let (y_vectors, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in x_vectors.iter().zip(y_vectors) {
        multiply_add(x, y, &mut sums);
    }
    if !x_rest.is_empty() {
        let mut padded = [[0.0; LANES]; 2];
        padded[0][..x_rest.len()].copy_from_slice(x_rest);
        padded[1][..y_rest.len()].copy_from_slice(y_rest);
        multiply_add(&padded[0], &padded[1], &mut sums);
    }
    for count in [8, 4, 2, 1] {
        fold(&mut sums, count);
    }
    sums[0]
}

/// Returns the dot product in the order of `gemm`'s matrix-vector kernel: several vectors of sums,
/// which are added in a tree, then the vectors of the rest, then the vector lanes and the last
/// terms one after the other.
fn dot_of_many_vectors(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [[0.0; LANES]; VECTORS];
    let (x_vectors, x_rest) = x.as_chunks::<LANES>();
    let (y_vectors, y_rest) = y.as_chunks::<LANES>();
    let (x_groups, x_vectors) = x_vectors.as_chunks::<VECTORS>();
    let (y_groups, y_vectors) = y_vectors.as_chunks::<VECTORS>();
    for (x, y) in x_groups.iter().zip(y_groups) {
        for i in 0..VECTORS {
            multiply_add(&x[i], &y[i], &mut sums[i]);
        }
    }
    for distance in [1, 2, 4] {
        for i in (0..VECTORS).step_by(2 * distance) {
            let other = sums[i + distance];
            sums[i].iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
        }
    }
    let mut sums = sums[0];
    for (x, y) in x_vectors.iter().zip(y_vectors) {
        multiply_add(x, y, &mut sums);
    }
    let sum = sums.into_iter().reduce(|sum, x| sum + x).unwrap_or_default();
    x_rest.iter().zip(y_rest).fold(sum, |sum, (x, y)| x.mul_add(*y, sum))
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use super::*;
    use hpctrain_base::random::Stream;
    use ndarray::Array2;

    fn numbers(len: usize, seed: u64) -> Vec<f32> {
        let mut numbers = vec![0.0; len];
        Stream::new(seed).fill_normal(&mut numbers);
        numbers
    }

    /// Returns a matrix, stored by columns if `across`.
    fn stored(rows: usize, columns: usize, across: bool, seed: u64) -> Array2<f32> {
        let numbers = numbers(rows * columns, seed);
        if across {
            Array2::from_shape_vec((columns, rows), numbers).unwrap().reversed_axes()
        } else {
            Array2::from_shape_vec((rows, columns), numbers).unwrap()
        }
    }

    /// Computes the matmul with the terms one after the other.
    fn in_order(a: &Array2<f32>, b: &Array2<f32>, c: &mut Array2<f32>, acc: bool) {
        for ((row, column), c) in c.indexed_iter_mut() {
            let mut terms = a.row(row).into_iter().zip(b.column(column));
            *c = if a.ncols() <= FEW_TERMS {
                let first = if acc { *c } else { -0.0 };
                terms.fold(first, |sum, (x, y)| x * y + sum)
            } else {
                let sum = terms.try_fold(0.0, |sum, (x, y)| Some(x.mul_add(*y, sum)));
                sum.unwrap_or(0.0) + if acc { *c } else { -0.0 }
            };
        }
    }

    #[test]
    fn bits_are_those_of_gemm_with_avx512() {
        if !is_x86_feature_detected!("avx512f") {
            return eprintln!("skipped: the CPU has no AVX-512");
        }
        let mut cases = [0; 2];
        for m in [1, 2, 5, 16, 17, 40, 300] {
            for n in [1, 3, 16, 17, 64, 300] {
                for k in [1, 2, 3, 15, 16, 33, 127, 128, 300, 512] {
                    for case in 0..16 {
                        let is = |bit: usize| case >> bit & 1 == 1;
                        let a = stored(m, k, is(0), 1);
                        let b = stored(k, n, is(1), 2);
                        let mut want = stored(m, n, is(2), 3);
                        let mut got = want.clone();
                        let acc = is(3);
                        let done = multiply(0..k, a.view(), b.view(), got.view_mut(), acc);
                        if !done {
                            in_order(&a, &b, &mut got, acc);
                        }
                        cases[usize::from(done)] += 1;
                        crate::gemm::multiply(a.view(), b.view(), want.view_mut(), acc);
                        let same = got.iter().zip(&want).all(|(x, y)| x.to_bits() == y.to_bits());
                        assert!(same, "{m}×{n}×{k}, case {case}, {done}");
                    }
                }
            }
        }
        assert!(cases[0] > 0 && cases[1] > 0, "{cases:?}");
    }
}
