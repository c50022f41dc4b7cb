//! Softmax of rows.

use rayon::prelude::*;

use super::Cpu;
use super::elementwise::CHUNK;
use super::math::{exp, max, simd, sum, sum2};
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, SoftmaxOps};

/// Returns the elements of one task, which consists of whole rows.
fn part(width: usize) -> usize {
    (CHUNK / width).max(1) * width
}

pub fn forward(threads: &Threads, width: usize, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    threads.each(x.par_chunks(part(width)).zip(y.par_chunks_mut(part(width))), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
                    let top = max(x);
                    for (y, &x) in y.iter_mut().zip(x) {
                        *y = exp(x - top);
                    }
                    let inverse = 1.0 / sum(y, |y| y);
                    y.iter_mut().for_each(|y| *y *= inverse);
                }
            },
        );
    });
}

pub fn backward(threads: &Threads, width: usize, y: &[f32], dy: &mut [f32]) {
    assert_eq!(y.len(), dy.len());
    threads.each(y.par_chunks(part(width)).zip(dy.par_chunks_mut(part(width))), |(y, dy)| {
        simd(
            #[inline(always)]
            || {
                for (y, dy) in y.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
                    // dx = y·(dy - Σ y·dy)
                    let dot = sum2(y, dy, |y, dy| y * dy);
                    for (dy, &y) in dy.iter_mut().zip(y) {
                        *dy = y * (*dy - dot);
                    }
                }
            },
        );
    });
}

impl SoftmaxOps for Cpu {
    fn softmax(&self, width: usize, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::softmax(x.len()));
        forward(&self.threads, width, x, y);
        Ok(())
    }

    fn softmax_backward(&self, width: usize, y: &[f32], dy: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::softmax_backward(y.len()));
        backward(&self.threads, width, y, dy);
        Ok(())
    }
}
