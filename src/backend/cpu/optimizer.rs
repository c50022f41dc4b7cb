//! Fused optimizer updates: one pass over a contiguous range.

use super::elementwise::CHUNK;
use super::math::simd;
use super::threads::Threads;
use crate::backend::{AdamW, Sgd};

pub fn adamw(threads: &Threads, u: AdamW, grad: &[f32], m: &mut [f32], v: &mut [f32], p: &mut [f32]) {
    assert!(grad.len() == m.len() && m.len() == v.len() && v.len() == p.len());
    let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
    let rate = (f64::from(u.lr) / correct(u.beta1)) as f32;
    let root = (1.0 / correct(u.beta2).sqrt()) as f32;
    let decay = 1.0 - u.lr * u.weight_decay;
    let parts = grad.chunks(CHUNK).zip(m.chunks_mut(CHUNK)).zip(v.chunks_mut(CHUNK).zip(p.chunks_mut(CHUNK)));
    threads.each(parts, |((grad, m), (v, p))| {
        simd(
            #[inline(always)]
            || {
                for (((&g, m), v), p) in grad.iter().zip(m).zip(v).zip(p) {
                    let g = g * u.grad_scale;
                    *m += (1.0 - u.beta1) * (g - *m);
                    *v += (1.0 - u.beta2) * (g * g - *v);
                    *p = *p * decay - rate * *m / (v.sqrt() * root + u.eps);
                }
            },
        );
    });
}

pub fn sgd(threads: &Threads, u: Sgd, grad: &[f32], m: &mut [f32], p: &mut [f32]) {
    assert!(grad.len() == m.len() && m.len() == p.len());
    let parts = grad.chunks(CHUNK).zip(m.chunks_mut(CHUNK)).zip(p.chunks_mut(CHUNK));
    threads.each(parts, |((grad, m), p)| {
        simd(
            #[inline(always)]
            || {
                for ((&g, m), p) in grad.iter().zip(m).zip(p) {
                    let g = g * u.grad_scale + u.weight_decay * *p;
                    *m = u.momentum * *m + g;
                    *p -= u.lr * if u.nesterov { g + u.momentum * *m } else { *m };
                }
            },
        );
    });
}
