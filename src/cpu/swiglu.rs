//! SwiGLU (Shazeer, 2020): rows of gates and ups side by side.

use rayon::prelude::*;

use super::Cpu;
use super::elementwise::CHUNK;
use super::math::{exp, simd};
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, SwigluOps};

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns the number of rows of one task.
fn rows(width: usize) -> usize {
    (CHUNK / width).max(1)
}

pub fn forward(threads: &Threads, width: usize, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), 2 * y.len());
    let rows = rows(width);
    threads.each(x.par_chunks(rows * 2 * width).zip(y.par_chunks_mut(rows * width)), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for (x, y) in x.chunks_exact(2 * width).zip(y.chunks_exact_mut(width)) {
                    let (gate, up) = x.split_at(width);
                    for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                        *y = gate * sigmoid(gate) * up;
                    }
                }
            },
        );
    });
}

pub fn backward(threads: &Threads, width: usize, x: &mut [f32], dy: &[f32]) {
    assert_eq!(x.len(), 2 * dy.len());
    let rows = rows(width);
    threads.each(x.par_chunks_mut(rows * 2 * width).zip(dy.par_chunks(rows * width)), |(x, dy)| {
        simd(
            #[inline(always)]
            || {
                for (x, dy) in x.chunks_exact_mut(2 * width).zip(dy.chunks_exact(width)) {
                    let (gate, up) = x.split_at_mut(width);
                    for ((gate, up), &dy) in gate.iter_mut().zip(up).zip(dy) {
                        let s = sigmoid(*gate);
                        let silu = *gate * s;
                        // silu' = s + silu·(1 - s)
                        (*gate, *up) = (dy * *up * (silu.mul_add(1.0 - s, s)), dy * silu);
                    }
                }
            },
        );
    });
}

impl SwigluOps for Cpu {
    fn swiglu(&self, width: usize, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::swiglu(y.len()));
        forward(&self.threads, width, x, y);
        Ok(())
    }

    fn swiglu_backward(&self, width: usize, x: &mut [f32], dy: &[f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::swiglu_backward(dy.len()));
        backward(&self.threads, width, x, dy);
        Ok(())
    }
}
