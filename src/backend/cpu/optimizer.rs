//! Fused optimizer updates: one pass over a contiguous range.

use super::Cpu;
use super::digest::{Counts, audited, watched};
use super::elementwise::{SQUARES_CHUNK, squares, sum_chunks};
use super::math::simd;
use super::threads::Threads;
use crate::backend::ops::digest::CHUNK;
use crate::backend::{AdamW, Audit, Elements, Elementwise, OptimizerOps, Sgd, Work};
use crate::error::Result;

pub fn adamw(threads: &Threads, u: AdamW, grad: &[f32], [m, v, p]: [&mut [f32]; 3], counts: Option<&Counts>) {
    assert!(grad.len() == m.len() && m.len() == v.len() && v.len() == p.len());
    let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
    let rate = (f64::from(u.lr) / correct(u.beta1)) as f32;
    let root = (1.0 / correct(u.beta2).sqrt()) as f32;
    let decay = 1.0 - u.lr * u.weight_decay;
    let parts = grad.chunks(CHUNK).zip(m.chunks_mut(CHUNK)).zip(v.chunks_mut(CHUNK).zip(p.chunks_mut(CHUNK)));
    threads.each(parts.enumerate(), |(number, ((grad, m), (v, p)))| {
        watched(counts, number, [m, v, p], |[m, v, p]| {
            simd(
                #[inline(always)]
                || {
                    for (((&g, m), v), p) in grad.iter().zip(m.iter_mut()).zip(v.iter_mut()).zip(p.iter_mut()) {
                        let g = g * u.grad_scale;
                        *m += (1.0 - u.beta1) * (g - *m);
                        *v += (1.0 - u.beta2) * (g * g - *v);
                        *p = *p * decay - rate * *m / (v.sqrt() * root + u.eps);
                    }
                },
            );
        });
    });
}

/// `Σ u²`, where [`adamw`] would take `lr·u` off the parameters.
pub fn adamw_step_squares(threads: &Threads, u: AdamW, grad: &[f32], m: &[f32], v: &[f32], p: &[f32]) -> f64 {
    assert!(grad.len() == m.len() && m.len() == v.len() && v.len() == p.len());
    let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
    let rate = (1.0 / correct(u.beta1)) as f32;
    let root = (1.0 / correct(u.beta2).sqrt()) as f32;
    sum_chunks(threads, p.len(), |range| {
        let (grad, m, v, p) = (&grad[range.clone()], &m[range.clone()], &v[range.clone()], &p[range]);
        let mut steps = [0.0f32; SQUARES_CHUNK];
        simd(
            #[inline(always)]
            || {
                for ((((&g, &m), &v), &p), step) in grad.iter().zip(m).zip(v).zip(p).zip(&mut steps) {
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

pub fn sgd(threads: &Threads, u: Sgd, grad: &[f32], [m, p]: [&mut [f32]; 2], counts: Option<&Counts>) {
    assert!(grad.len() == m.len() && m.len() == p.len());
    let parts = grad.chunks(CHUNK).zip(m.chunks_mut(CHUNK)).zip(p.chunks_mut(CHUNK));
    threads.each(parts.enumerate(), |(number, ((grad, m), p))| {
        watched(counts, number, [m, p], |[m, p]| {
            simd(
                #[inline(always)]
                || {
                    for ((&g, m), p) in grad.iter().zip(m.iter_mut()).zip(p.iter_mut()) {
                        let g = g * u.grad_scale + u.weight_decay * *p;
                        *m = u.momentum * *m + g;
                        *p -= u.lr * if u.nesterov { g + u.momentum * *m } else { *m };
                    }
                },
            );
        });
    });
}

pub fn approach(threads: &Threads, rate: f32, x: &[f32], y: &mut [f32], counts: Option<&Counts>) {
    assert_eq!(x.len(), y.len());
    threads.each(x.chunks(CHUNK).zip(y.chunks_mut(CHUNK)).enumerate(), |(number, (x, y))| {
        watched(counts, number, [y], |[y]| {
            simd(
                #[inline(always)]
                || {
                    for (x, y) in x.iter().zip(y.iter_mut()) {
                        *y += rate * (x - *y);
                    }
                },
            );
        });
    });
}

/// One pass with one state buffer.
fn with_one(
    threads: &Threads,
    grad: &[f32],
    [first, p]: [&mut [f32]; 2],
    counts: Option<&Counts>,
    update: impl Fn(f32, &mut f32, &mut f32) + Sync + Copy,
) {
    assert!(grad.len() == first.len() && first.len() == p.len());
    let parts = grad.chunks(CHUNK).zip(first.chunks_mut(CHUNK)).zip(p.chunks_mut(CHUNK));
    threads.each(parts.enumerate(), |(number, ((grad, first), p))| {
        watched(counts, number, [first, p], |[first, p]| {
            simd(
                #[inline(always)]
                || {
                    for ((&g, first), p) in grad.iter().zip(first.iter_mut()).zip(p.iter_mut()) {
                        update(g, first, p);
                    }
                },
            );
        });
    });
}

/// One pass with two.
fn with_two(
    threads: &Threads,
    grad: &[f32],
    [first, second, p]: [&mut [f32]; 3],
    counts: Option<&Counts>,
    update: impl Fn(f32, &mut f32, &mut f32, &mut f32) + Sync + Copy,
) {
    assert!(grad.len() == first.len() && first.len() == second.len() && second.len() == p.len());
    let states = first.chunks_mut(CHUNK).zip(second.chunks_mut(CHUNK));
    let parts = grad.chunks(CHUNK).zip(states).zip(p.chunks_mut(CHUNK));
    threads.each(parts.enumerate(), |(number, ((grad, (first, second)), p))| {
        watched(counts, number, [first, second, p], |[first, second, p]| {
            simd(
                #[inline(always)]
                || {
                    let states = first.iter_mut().zip(second.iter_mut());
                    for ((&g, (first, second)), p) in grad.iter().zip(states).zip(p.iter_mut()) {
                        update(g, first, second, p);
                    }
                },
            );
        });
    });
}

pub fn elements(
    threads: &Threads,
    u: Elements,
    grad: &[f32],
    [first, second, p]: [&mut [f32]; 3],
    counts: Option<&Counts>,
) {
    let Elements { rule, lr, weight_decay, step, grad_scale } = u;
    match rule {
        Elementwise::Adam { beta1, beta2, eps } => {
            let correct = |beta: f32| 1.0 - f64::from(beta).powf(step as f64);
            let rate = (f64::from(lr) / correct(beta1)) as f32;
            let root = (1.0 / correct(beta2).sqrt()) as f32;
            with_two(
                threads,
                grad,
                [first, second, p],
                counts,
                #[inline(always)]
                |g, m, v, p| {
                    let g = g * grad_scale + weight_decay * *p;
                    *m += (1.0 - beta1) * (g - *m);
                    *v += (1.0 - beta2) * (g * g - *v);
                    *p -= rate * *m / (v.sqrt() * root + eps);
                },
            );
        }
        Elementwise::Adagrad { eps } => with_one(
            threads,
            grad,
            [first, p],
            counts,
            #[inline(always)]
            |g, sum, p| {
                let g = g * grad_scale + weight_decay * *p;
                *sum += g * g;
                *p -= lr * g / (sum.sqrt() + eps);
            },
        ),
        Elementwise::RmsProp { alpha, eps, momentum } => with_two(
            threads,
            grad,
            [first, second, p],
            counts,
            #[inline(always)]
            |g, v, m, p| {
                let g = g * grad_scale + weight_decay * *p;
                *v += (1.0 - alpha) * (g * g - *v);
                *m = momentum * *m + g / (v.sqrt() + eps);
                *p -= lr * *m;
            },
        ),
        Elementwise::Lion { beta1, beta2 } => with_one(
            threads,
            grad,
            [first, p],
            counts,
            #[inline(always)]
            |g, m, p| {
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
        audit: Option<&mut Audit<f64>>,
    ) -> Result<()> {
        let _launch = self.launched(Work::adamw(grad.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        audited(audit, |counts| adamw(&self.threads, update, grad, [m, v, &mut *p], counts));
        self.copied(p, copy);
        Ok(())
    }

    fn adamw_step_squares(&self, update: AdamW, grad: &[f32], m: &[f32], v: &[f32], p: &[f32]) -> Result<f64> {
        let _launch = self.launched(Work::adamw_step_squares(grad.len()));
        Ok(adamw_step_squares(&self.threads, update, grad, m, v, p))
    }

    fn sgd(
        &self,
        update: Sgd,
        grad: &[f32],
        m: &mut [f32],
        p: &mut [f32],
        copy: Option<&mut [f32]>,
        audit: Option<&mut Audit<f64>>,
    ) -> Result<()> {
        let _launch = self.launched(Work::sgd(grad.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        audited(audit, |counts| sgd(&self.threads, update, grad, [m, &mut *p], counts));
        self.copied(p, copy);
        Ok(())
    }

    fn approach(
        &self,
        rate: f32,
        x: &[f32],
        y: &mut [f32],
        copy: Option<&mut [f32]>,
        audit: Option<&mut Audit<f64>>,
    ) -> Result<()> {
        let _launch = self.launched(Work::approach(x.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        audited(audit, |counts| approach(&self.threads, rate, x, y, counts));
        self.copied(y, copy);
        Ok(())
    }

    fn elements(
        &self,
        update: Elements,
        grad: &[f32],
        first: &mut [f32],
        second: &mut [f32],
        p: &mut [f32],
        copy: Option<&mut [f32]>,
        audit: Option<&mut Audit<f64>>,
    ) -> Result<()> {
        let _launch = self.launched(Work::elements(update, grad.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        audited(audit, |counts| elements(&self.threads, update, grad, [first, second, &mut *p], counts));
        self.copied(p, copy);
        Ok(())
    }
}
