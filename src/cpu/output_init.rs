//! The initial value of the output of a matmul.

use std::ops::Range;

use ndarray::{ArrayView1, ArrayViewMut2};
use pulp::Simd;

/// The initial value of the output, to which the matmul is added.
#[derive(Debug, Clone, Copy)]
pub enum OutputInit<'a> {
    /// Zero: the matmul overwrites the output.
    Zero,
    /// The present contents of the output.
    Accumulate,
    /// A bias for each column.
    Bias(&'a [f32]),
}

impl<'a> OutputInit<'a> {
    /// Returns the bias, if there is one; otherwise the present contents with `acc`, or zero.
    pub fn new(acc: bool, bias: &'a [f32]) -> Self {
        match acc {
            _ if !bias.is_empty() => OutputInit::Bias(bias),
            true => OutputInit::Accumulate,
            false => OutputInit::Zero,
        }
    }

    /// Returns the initial value of some columns.
    #[inline(always)]
    pub fn for_columns(self, columns: Range<usize>) -> Self {
        match self {
            OutputInit::Bias(numbers) => OutputInit::Bias(&numbers[columns]),
            start => start,
        }
    }

    /// Returns the initial value of the K block that begins at `term`: all but the first add to the
    /// output.
    #[inline(always)]
    pub fn at_term(self, term: usize) -> Self {
        if term > 0 { OutputInit::Accumulate } else { self }
    }

    /// Writes or adds `sums` to a row. `self` must be the initial value of the columns of `to`.
    #[inline(always)]
    pub fn store(self, to: &mut [f32], sums: &[f32]) {
        match self {
            OutputInit::Zero => to.copy_from_slice(&sums[..to.len()]),
            OutputInit::Accumulate => to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum),
            OutputInit::Bias(numbers) => {
                to.iter_mut()
                    .zip(numbers)
                    .zip(sums)
                    .for_each(|((to, number), sum)| *to = number + sum);
            }
        }
    }

    /// Does the same as [`OutputInit::put`] for vectors from vector `first` of the columns on.
    #[inline(always)]
    pub fn store_vectors<S: Simd, const WIDE: usize>(
        self,
        simd: S,
        to: &mut [S::f32s],
        first: usize,
        sums: [S::f32s; WIDE],
    ) {
        match self {
            OutputInit::Zero => to.copy_from_slice(&sums),
            OutputInit::Accumulate => {
                for i in 0..WIDE {
                    to[i] = simd.add_f32s(to[i], sums[i]);
                }
            }
            OutputInit::Bias(numbers) => {
                let numbers = &S::as_simd_f32s(numbers).0[first..first + WIDE];
                for i in 0..WIDE {
                    to[i] = simd.add_f32s(numbers[i], sums[i]);
                }
            }
        }
    }

    /// For kernels without a bias: writes the bias to `c`, and returns whether the matmul must be
    /// added to `c`.
    pub fn write_bias(self, mut c: ArrayViewMut2<'_, f32>) -> bool {
        if let OutputInit::Bias(numbers) = self {
            c.assign(&ArrayView1::from(numbers));
        }
        !matches!(self, OutputInit::Zero)
    }
}
