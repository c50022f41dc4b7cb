//! The result of a product before the first terms are added to it.

use std::ops::Range;

use ndarray::{ArrayView1, ArrayViewMut2};
use pulp::Simd;

/// The result before the product is added to it.
#[derive(Debug, Clone, Copy)]
pub enum OutputInit<'a> {
    /// Nothing: the product overwrites it.
    Nothing,
    /// As it is.
    Result,
    /// A number for each column.
    Columns(&'a [f32]),
}

impl<'a> OutputInit<'a> {
    /// A bias, if there is one; else the result as it is, with `acc`, or nothing.
    pub fn new(acc: bool, bias: &'a [f32]) -> Self {
        match acc {
            _ if !bias.is_empty() => OutputInit::Columns(bias),
            true => OutputInit::Result,
            false => OutputInit::Nothing,
        }
    }

    /// That of some columns.
    #[inline(always)]
    pub fn of(self, columns: Range<usize>) -> Self {
        match self {
            OutputInit::Columns(numbers) => OutputInit::Columns(&numbers[columns]),
            start => start,
        }
    }

    /// That of the piece of the sums that begins at this term: all but the first are added.
    #[inline(always)]
    pub fn at_term(self, term: usize) -> Self {
        if term > 0 { OutputInit::Result } else { self }
    }

    /// Ends a row: writes it, or adds it. The columns are those of the row.
    #[inline(always)]
    pub fn put(self, to: &mut [f32], sums: &[f32]) {
        match self {
            OutputInit::Nothing => to.copy_from_slice(&sums[..to.len()]),
            OutputInit::Result => to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum),
            OutputInit::Columns(numbers) => {
                to.iter_mut()
                    .zip(numbers)
                    .zip(sums)
                    .for_each(|((to, number), sum)| *to = number + sum);
            }
        }
    }

    /// As [`OutputInit::put`], of vectors from number `first` of the columns on.
    #[inline(always)]
    pub fn put_vectors<S: Simd, const WIDE: usize>(
        self,
        simd: S,
        to: &mut [S::f32s],
        first: usize,
        sums: [S::f32s; WIDE],
    ) {
        match self {
            OutputInit::Nothing => to.copy_from_slice(&sums),
            OutputInit::Result => {
                for i in 0..WIDE {
                    to[i] = simd.add_f32s(to[i], sums[i]);
                }
            }
            OutputInit::Columns(numbers) => {
                let numbers = &S::as_simd_f32s(numbers).0[first..first + WIDE];
                for i in 0..WIDE {
                    to[i] = simd.add_f32s(numbers[i], sums[i]);
                }
            }
        }
    }

    /// For kernels that know no columns: writes these numbers, and tells whether the product is to
    /// be added.
    pub fn written(self, mut c: ArrayViewMut2<'_, f32>) -> bool {
        if let OutputInit::Columns(numbers) = self {
            c.assign(&ArrayView1::from(numbers));
        }
        !matches!(self, OutputInit::Nothing)
    }
}
