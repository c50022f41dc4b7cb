//! Fused optimizer updates: one pass over a contiguous range.

use rayon::prelude::*;

use super::Cpu;
use super::checksum::{ChecksumTotals, ChunkChecksum, NoChecksum, UpdateObserver, with_checksums};
use super::elementwise::{SQUARES_CHUNK, squares, sum_chunks};
use super::math::simd;
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::ops::checksum::CHUNK;
use hpctrain_device::{
    AdamW, Elementwise, ElementwiseUpdate, KernelCost, OptimizerOps, Sgd, UpdateChecksums,
};

/// Makes one pass over a gradient and the `N` buffers that an update changes, all of equal length.
fn pass<const N: usize>(
    threads: &Threads,
    grad: &[f32],
    buffers: [&mut [f32]; N],
    counts: Option<&ChecksumTotals>,
    update: impl Fn(f32, &mut [f32; N]) + Sync + Copy,
) where
    for<'a> [&'a mut [f32]; N]: Together<N>,
{
    assert!(buffers.iter().all(|buffer| buffer.len() == grad.len()));
    let parts = grad.par_chunks(CHUNK).zip(buffers.par_chunks());
    threads.each(parts.enumerate(), |(number, (grad, buffers))| match counts {
        None => over(grad, buffers, NoChecksum, update),
        Some(counts) => over(grad, buffers, ChunkChecksum::new(counts, number), update),
    });
}

/// Updates a chunk. All closures own copies: the compiler must assume that a value behind a
/// reference changes with each element that is written, and would not vectorise.
fn over<const N: usize>(
    grad: &[f32],
    buffers: [&mut [f32]; N],
    mut watch: impl UpdateObserver<N>,
    update: impl Fn(f32, &mut [f32; N]) + Copy,
) where
    for<'a> [&'a mut [f32]; N]: Together<N>,
{
    simd(
        #[inline(always)]
        move || {
            buffers.each(
                grad,
                #[inline(always)]
                move |i, g, elements| {
                    watch.found(i, elements);
                    update(g, elements);
                    watch.left(i, elements);
                },
            );
        },
    );
}

/// Buffers of equal length, iterated together with zipped iterators, which the compiler vectorises.
/// Indices would be bounds-checked.
trait Together<const N: usize>: Sized {
    /// Returns chunks of all buffers.
    fn par_chunks(self) -> impl IndexedParallelIterator<Item = Self>;

    /// Calls `f` with each index, the gradient's element there, and those of the buffers.
    fn each(self, grad: &[f32], f: impl FnMut(usize, f32, &mut [f32; N]));
}

impl<'a> Together<1> for [&'a mut [f32]; 1] {
    fn par_chunks(self) -> impl IndexedParallelIterator<Item = [&'a mut [f32]; 1]> {
        let [x] = self;
        x.par_chunks_mut(CHUNK).map(|x| [x])
    }

    #[inline(always)]
    fn each(self, grad: &[f32], mut f: impl FnMut(usize, f32, &mut [f32; 1])) {
        let [x] = self;
        for (i, (&g, x)) in grad.iter().zip(x).enumerate() {
            let mut elements = [*x];
            f(i, g, &mut elements);
            [*x] = elements;
        }
    }
}

impl<'a> Together<2> for [&'a mut [f32]; 2] {
    fn par_chunks(self) -> impl IndexedParallelIterator<Item = [&'a mut [f32]; 2]> {
        let [x, y] = self;
        x.par_chunks_mut(CHUNK).zip(y.par_chunks_mut(CHUNK)).map(|(x, y)| [x, y])
    }

    #[inline(always)]
    fn each(self, grad: &[f32], mut f: impl FnMut(usize, f32, &mut [f32; 2])) {
        let [x, y] = self;
        for (i, ((&g, x), y)) in grad.iter().zip(x).zip(y).enumerate() {
            let mut elements = [*x, *y];
            f(i, g, &mut elements);
            [*x, *y] = elements;
        }
    }
}

impl<'a> Together<3> for [&'a mut [f32]; 3] {
    fn par_chunks(self) -> impl IndexedParallelIterator<Item = [&'a mut [f32]; 3]> {
        let [x, y, z] = self;
        let all = x.par_chunks_mut(CHUNK).zip(y.par_chunks_mut(CHUNK)).zip(z.par_chunks_mut(CHUNK));
        all.map(|((x, y), z)| [x, y, z])
    }

    #[inline(always)]
    fn each(self, grad: &[f32], mut f: impl FnMut(usize, f32, &mut [f32; 3])) {
        let [x, y, z] = self;
        for (i, (((&g, x), y), z)) in grad.iter().zip(x).zip(y).zip(z).enumerate() {
            let mut elements = [*x, *y, *z];
            f(i, g, &mut elements);
            [*x, *y, *z] = elements;
        }
    }
}

pub fn adamw(
    threads: &Threads,
    u: AdamW,
    grad: &[f32],
    buffers: [&mut [f32]; 3],
    counts: Option<&ChecksumTotals>,
) {
    let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
    let rate = (f64::from(u.lr) / correct(u.beta1)) as f32;
    let root = (1.0 / correct(u.beta2).sqrt()) as f32;
    let decay = 1.0 - u.lr * u.weight_decay;
    pass(
        threads,
        grad,
        buffers,
        counts,
        #[inline(always)]
        move |g, [m, v, p]| {
            let g = g * u.grad_scale;
            *m += (1.0 - u.beta1) * (g - *m);
            *v += (1.0 - u.beta2) * (g * g - *v);
            *p = *p * decay - rate * *m / (v.sqrt() * root + u.eps);
        },
    );
}

/// Returns `Σ u²`, where [`adamw`] would subtract `lr·u` from the parameters.
pub fn adamw_step_squares(
    threads: &Threads,
    u: AdamW,
    grad: &[f32],
    m: &[f32],
    v: &[f32],
    p: &[f32],
) -> f64 {
    assert!(grad.len() == m.len() && m.len() == v.len() && v.len() == p.len());
    let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
    let rate = (1.0 / correct(u.beta1)) as f32;
    let root = (1.0 / correct(u.beta2).sqrt()) as f32;
    sum_chunks(threads, p.len(), |range| {
        let grad = &grad[range.clone()];
        let m = &m[range.clone()];
        let v = &v[range.clone()];
        let p = &p[range];
        let mut steps = [0.0f32; SQUARES_CHUNK];
        simd(
            #[inline(always)]
            || {
                for ((((&g, &m), &v), &p), step) in grad.iter().zip(m).zip(v).zip(p).zip(&mut steps)
                {
                    let g = g * u.grad_scale;
                    let m = m + (1.0 - u.beta1) * (g - m);
                    let v = v + (1.0 - u.beta2) * (g * g - v);
                    *step = rate * m / (v.sqrt() * root + u.eps) + u.weight_decay * p;
                }
                squares(&steps[..p.len()])
            },
        )
    })
}

pub fn sgd(
    threads: &Threads,
    u: Sgd,
    grad: &[f32],
    buffers: [&mut [f32]; 2],
    counts: Option<&ChecksumTotals>,
) {
    pass(
        threads,
        grad,
        buffers,
        counts,
        #[inline(always)]
        move |g, [m, p]| {
            let g = g * u.grad_scale + u.weight_decay * *p;
            *m = u.momentum * *m + g;
            *p -= u.lr * if u.nesterov { g + u.momentum * *m } else { *m };
        },
    );
}

pub fn approach(
    threads: &Threads,
    rate: f32,
    x: &[f32],
    y: &mut [f32],
    counts: Option<&ChecksumTotals>,
) {
    pass(
        threads,
        x,
        [y],
        counts,
        #[inline(always)]
        move |x, [y]| *y += rate * (x - *y),
    );
}

pub fn elements(
    threads: &Threads,
    u: ElementwiseUpdate,
    grad: &[f32],
    [first, second, p]: [&mut [f32]; 3],
    counts: Option<&ChecksumTotals>,
) {
    let ElementwiseUpdate { rule, lr, weight_decay, step, grad_scale } = u;
    match rule {
        Elementwise::Adam { beta1, beta2, eps } => {
            let correct = |beta: f32| 1.0 - f64::from(beta).powf(step as f64);
            let rate = (f64::from(lr) / correct(beta1)) as f32;
            let root = (1.0 / correct(beta2).sqrt()) as f32;
            pass(
                threads,
                grad,
                [first, second, p],
                counts,
                #[inline(always)]
                move |g, [m, v, p]| {
                    let g = g * grad_scale + weight_decay * *p;
                    *m += (1.0 - beta1) * (g - *m);
                    *v += (1.0 - beta2) * (g * g - *v);
                    *p -= rate * *m / (v.sqrt() * root + eps);
                },
            );
        }
        Elementwise::Adagrad { eps } => pass(
            threads,
            grad,
            [first, p],
            counts,
            #[inline(always)]
            move |g, [sum, p]| {
                let g = g * grad_scale + weight_decay * *p;
                *sum += g * g;
                *p -= lr * g / (sum.sqrt() + eps);
            },
        ),
        Elementwise::RmsProp { alpha, eps, momentum } => pass(
            threads,
            grad,
            [first, second, p],
            counts,
            #[inline(always)]
            move |g, [v, m, p]| {
                let g = g * grad_scale + weight_decay * *p;
                *v += (1.0 - alpha) * (g * g - *v);
                *m = momentum * *m + g / (v.sqrt() + eps);
                *p -= lr * *m;
            },
        ),
        Elementwise::Lion { beta1, beta2 } => pass(
            threads,
            grad,
            [first, p],
            counts,
            #[inline(always)]
            move |g, [m, p]| {
                let g = g * grad_scale;
                let way = *m + (1.0 - beta1) * (g - *m);
                let sign = if way > 0.0 {
                    1.0
                } else if way < 0.0 {
                    -1.0
                } else {
                    0.0
                };
                *p = *p * (1.0 - lr * weight_decay) - lr * sign;
                *m += (1.0 - beta2) * (g - *m);
            },
        ),
    }
}

impl OptimizerOps for Cpu {
    fn adamw(
        &self,
        update: AdamW,
        grad: &[f32],
        m: &mut [f32],
        v: &mut [f32],
        p: &mut [f32],
        copy: Option<&mut [f32]>,
        checksums: Option<&mut UpdateChecksums<f64>>,
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::adamw(
            grad.len(),
            copy.as_ref().map_or(0, |copy| copy.len()),
        ));
        with_checksums(checksums, |counts| {
            adamw(&self.threads, update, grad, [m, v, &mut *p], counts)
        });
        self.write_copy(p, copy);
        Ok(())
    }

    fn adamw_step_squares(
        &self,
        update: AdamW,
        grad: &[f32],
        m: &[f32],
        v: &[f32],
        p: &[f32],
    ) -> Result<f64> {
        let _launch = self.start_kernel(KernelCost::adamw_step_squares(grad.len()));
        Ok(adamw_step_squares(&self.threads, update, grad, m, v, p))
    }

    fn sgd(
        &self,
        update: Sgd,
        grad: &[f32],
        m: &mut [f32],
        p: &mut [f32],
        copy: Option<&mut [f32]>,
        checksums: Option<&mut UpdateChecksums<f64>>,
    ) -> Result<()> {
        let _launch = self
            .start_kernel(KernelCost::sgd(grad.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        with_checksums(checksums, |counts| sgd(&self.threads, update, grad, [m, &mut *p], counts));
        self.write_copy(p, copy);
        Ok(())
    }

    fn update_average(
        &self,
        rate: f32,
        x: &[f32],
        y: &mut [f32],
        copy: Option<&mut [f32]>,
        checksums: Option<&mut UpdateChecksums<f64>>,
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::update_average(
            x.len(),
            copy.as_ref().map_or(0, |copy| copy.len()),
        ));
        with_checksums(checksums, |counts| approach(&self.threads, rate, x, y, counts));
        self.write_copy(y, copy);
        Ok(())
    }

    fn elementwise_update(
        &self,
        update: ElementwiseUpdate,
        grad: &[f32],
        first: &mut [f32],
        second: &mut [f32],
        p: &mut [f32],
        copy: Option<&mut [f32]>,
        checksums: Option<&mut UpdateChecksums<f64>>,
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::elementwise_update(
            update,
            grad.len(),
            copy.as_ref().map_or(0, |copy| copy.len()),
        ));
        with_checksums(checksums, |counts| {
            elements(&self.threads, update, grad, [first, second, &mut *p], counts)
        });
        self.write_copy(p, copy);
        Ok(())
    }
}
