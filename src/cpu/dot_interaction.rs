//! Pairwise dot interactions of a sample's rows.

use rayon::prelude::*;

use super::Cpu;
use super::elementwise::CHUNK;
use super::math::{simd, sum2};
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{DotInteraction, DotInteractionOps, KernelCost};

/// Returns the number of samples of one task.
fn of_task(s: DotInteraction) -> usize {
    (CHUNK / (s.rows * s.width).max(1)).max(1)
}

pub fn forward(threads: &Threads, s: DotInteraction, x: &[f32], y: &mut [f32]) {
    let inputs = s.rows * s.width;
    let outputs = s.outputs();
    assert!(x.len() == s.samples * inputs && y.len() == s.samples * outputs, "{s:?}");
    let samples = of_task(s);
    threads.each(
        x.par_chunks(samples * inputs).zip(y.par_chunks_mut(samples * outputs)),
        |(x, y)| {
            simd(
                #[inline(always)]
                || {
                    for (x, y) in x.chunks_exact(inputs).zip(y.chunks_exact_mut(outputs)) {
                        let (first, mut products) = y.split_at_mut(s.width);
                        first.copy_from_slice(&x[..s.width]);
                        for (i, row) in x.chunks_exact(s.width).enumerate() {
                            let (own, rest) = products.split_at_mut(i);
                            for (product, other) in own.iter_mut().zip(x.chunks_exact(s.width)) {
                                *product = sum2(row, other, |a, b| a * b);
                            }
                            products = rest;
                        }
                    }
                },
            );
        },
    );
}

pub fn backward(threads: &Threads, s: DotInteraction, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    let inputs = s.rows * s.width;
    let outputs = s.outputs();
    assert!(
        x.len() == s.samples * inputs && dx.len() == x.len() && dy.len() == s.samples * outputs,
        "{s:?}"
    );
    let samples = of_task(s);
    let parts = dx
        .par_chunks_mut(samples * inputs)
        .zip(x.par_chunks(samples * inputs))
        .zip(dy.par_chunks(samples * outputs));
    threads.each(parts, |((dx, x), dy)| {
        simd(
            #[inline(always)]
            || {
                let samples = dx
                    .chunks_exact_mut(inputs)
                    .zip(x.chunks_exact(inputs))
                    .zip(dy.chunks_exact(outputs));
                for ((dx, x), dy) in samples {
                    let (first, slopes) = dy.split_at(s.width);
                    let (first_row, rest) = dx.split_at_mut(s.width);
                    first_row.copy_from_slice(first);
                    rest.fill(0.0);
                    for i in 1..s.rows {
                        let (before, own) = dx.split_at_mut(i * s.width);
                        let own = &mut own[..s.width];
                        let row = &x[i * s.width..][..s.width];
                        let slopes = &slopes[i * (i - 1) / 2..][..i];
                        for (j, slope) in slopes.iter().enumerate() {
                            let other = &x[j * s.width..][..s.width];
                            let d_other = &mut before[j * s.width..][..s.width];
                            for k in 0..s.width {
                                own[k] = slope.mul_add(other[k], own[k]);
                                d_other[k] = slope.mul_add(row[k], d_other[k]);
                            }
                        }
                    }
                }
            },
        );
    });
}

impl DotInteractionOps for Cpu {
    fn dot_interaction(&self, shape: DotInteraction, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::dot_interaction(shape));
        forward(&self.threads, shape, x, y);
        Ok(())
    }

    fn dot_interaction_backward(
        &self,
        shape: DotInteraction,
        x: &[f32],
        dy: &[f32],
        dx: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::dot_interaction_backward(shape));
        backward(&self.threads, shape, x, dy, dx);
        Ok(())
    }
}
