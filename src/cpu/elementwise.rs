//! Fills, copies and sums: one pass over memory each.

use std::ops::Range;

use rayon::prelude::*;

use super::Cpu;
use super::math::{simd, to_bf16};
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{ElementwiseOps, KernelCost};

/// Elements of one task.
pub const CHUNK: usize = 1 << 14;

/// Elements of one partial sum of squares.
pub const SQUARES_CHUNK: usize = 1 << 12;
/// Chunks whose sums are buffered before they are added.
const SQUARES_PART: usize = 256;

pub fn zero(threads: &Threads, y: &mut [f32]) {
    threads.each(y.par_chunks_mut(CHUNK), |y| y.fill(0.0));
}

pub fn copy(threads: &Threads, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    threads.each(x.par_chunks(CHUNK).zip(y.par_chunks_mut(CHUNK)), |(x, y)| y.copy_from_slice(x));
}

/// Computes `y = x`, rounded to bf16 as GPUs do: to the nearest, ties to even. `y` holds its bits.
pub fn round_to_bf16(threads: &Threads, x: &[f32], y: &mut [u16]) {
    assert_eq!(x.len(), y.len());
    threads.each(x.par_chunks(CHUNK).zip(y.par_chunks_mut(CHUNK)), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for (y, x) in y.iter_mut().zip(x) {
                    *y = to_bf16(*x);
                }
            },
        );
    });
}

/// Computes `y += x` on the calling thread; also used by reductions of messages.
pub fn add_serial(x: &[f32], y: &mut [f32]) {
    simd(
        #[inline(always)]
        || {
            for (y, x) in y.iter_mut().zip(x) {
                *y += x;
            }
        },
    );
}

pub fn add(threads: &Threads, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    threads.each(x.par_chunks(CHUNK).zip(y.par_chunks_mut(CHUNK)), |(x, y)| add_serial(x, y));
}

/// Computes `y *= x`.
fn multiply(threads: &Threads, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    threads.each(x.par_chunks(CHUNK).zip(y.par_chunks_mut(CHUNK)), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for (y, x) in y.iter_mut().zip(x) {
                    *y *= x;
                }
            },
        );
    });
}

/// Returns `Σ x²`: f64 sums of fixed chunks, added in order.
pub fn sum_squares(threads: &Threads, x: &[f32]) -> f64 {
    sum_chunks(threads, x.len(), |range| {
        simd(
            #[inline(always)]
            || squares(&x[range]),
        )
    })
}

/// Returns the sum of `sum(range)` over chunks of `0..len` of [`SQUARES_CHUNK`] elements, added in
/// order.
pub fn sum_chunks(threads: &Threads, len: usize, sum: impl Fn(Range<usize>) -> f64 + Sync) -> f64 {
    let mut total = 0.0;
    // The partial sums of one part are on the stack.
    for part in (0..len).step_by(SQUARES_PART * SQUARES_CHUNK) {
        let mut partial = [0.0f64; SQUARES_PART];
        let chunks = (len - part).div_ceil(SQUARES_CHUNK).min(SQUARES_PART);
        threads.each(partial[..chunks].par_iter_mut().enumerate(), |(chunk, partial)| {
            let start = part + chunk * SQUARES_CHUNK;
            *partial = sum(start..(start + SQUARES_CHUNK).min(len));
        });
        total = partial.iter().fold(total, |total, partial| total + partial);
    }
    total
}

/// Returns `Σ x²` of one chunk in a fixed order; called within [`simd`].
#[inline(always)]
pub fn squares(x: &[f32]) -> f64 {
    let mut partials = [0.0f64; 8];
    let (blocks, tail) = x.as_chunks::<8>();
    for block in blocks {
        for i in 0..8 {
            partials[i] += f64::from(block[i]) * f64::from(block[i]);
        }
    }
    partials.iter().sum::<f64>() + tail.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>()
}

impl ElementwiseOps for Cpu {
    fn zero(&self, y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::zero(y.len()));
        zero(&self.threads, y);
        Ok(())
    }

    fn copy(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::copy(x.len()));
        copy(&self.threads, x, y);
        Ok(())
    }

    fn add(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::add(x.len()));
        add(&self.threads, x, y);
        Ok(())
    }

    fn multiply(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::multiply(y.len()));
        multiply(&self.threads, x, y);
        Ok(())
    }

    fn sum(&self, x: &[f32]) -> Result<f64> {
        let _launch = self.start_kernel(KernelCost::sum(x.len()));
        Ok(x.iter().copied().map(f64::from).sum())
    }

    fn sum_squares(&self, x: &[f32]) -> Result<f64> {
        let _launch = self.start_kernel(KernelCost::sum(x.len()));
        Ok(sum_squares(&self.threads, x))
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn ties_go_to_even_and_what_is_not_finite_stays_so() {
        let bits = [
            0x3f80_8000,
            0x3f81_8000,
            0x3f80_8001,
            0x8000_0001,
            0x7f7f_ffff,
            0xff80_0000,
            0x7f80_0001,
        ];
        let mut rounded = [0; 7];
        round_to_bf16(&Threads::new(1), &bits.map(f32::from_bits), &mut rounded);
        assert_eq!(rounded[..6], [0x3f80, 0x3f82, 0x3f81, 0x8000, 0x7f80, 0xff80]);
        assert!(bf16::from_bits(rounded[6]).is_nan());
    }
}
