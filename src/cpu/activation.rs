//! Elementwise functions: one pass over memory each.

use rayon::prelude::*;

use super::Cpu;
use super::elementwise::CHUNK;
use super::math::{exp, simd};
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{Activation, ActivationOps, KernelCost};

/// √(2/π), and the cubic coefficient of GELU's tanh form.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns the logistic function of 2u, u = √(2/π)(x + 0.044715x³): GELU is x times it.
#[inline(always)]
fn gelu_gate(x: f32) -> f32 {
    let minus_2u = x * (x * x).mul_add(-2.0 * GELU_SCALE * GELU_CUBIC, -2.0 * GELU_SCALE);
    1.0 / (1.0 + exp(minus_2u))
}

/// Computes tanh from the logistic function of 2x, or near zero from its series, where the
/// difference would cancel.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    let square = x * x;
    let series = x * square.mul_add(square.mul_add(2.0 / 15.0, -1.0 / 3.0), 1.0);
    let far = 2.0f32.mul_add(sigmoid(2.0 * x), -1.0);
    if square < 0.01 { series } else { far }
}

/// Computes `y = f(x)`, compiled for the machine's vectors.
fn map(threads: &Threads, x: &[f32], y: &mut [f32], f: impl Fn(f32) -> f32 + Sync + Copy) {
    assert_eq!(x.len(), y.len());
    threads.each(x.par_chunks(CHUNK).zip(y.par_chunks_mut(CHUNK)), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = f(x);
                }
            },
        );
    });
}

/// Computes `dy *= slope(x)`, compiled for the machine's vectors.
fn scale(threads: &Threads, x: &[f32], dy: &mut [f32], slope: impl Fn(f32) -> f32 + Sync + Copy) {
    assert_eq!(x.len(), dy.len());
    threads.each(x.par_chunks(CHUNK).zip(dy.par_chunks_mut(CHUNK)), |(x, dy)| {
        simd(
            #[inline(always)]
            || {
                for (dy, &x) in dy.iter_mut().zip(x) {
                    *dy *= slope(x);
                }
            },
        );
    });
}

pub fn forward(threads: &Threads, f: Activation, x: &[f32], y: &mut [f32]) {
    // All closures are inlined: a function called from a vector loop would be compiled for the
    // oldest supported CPU.
    match f {
        Activation::Relu => map(
            threads,
            x,
            y,
            #[inline(always)]
            |x| if x > 0.0 { x } else { 0.0 },
        ),
        Activation::LeakyRelu(slope) => map(
            threads,
            x,
            y,
            #[inline(always)]
            |x| if x > 0.0 { x } else { slope * x },
        ),
        Activation::Gelu => map(
            threads,
            x,
            y,
            #[inline(always)]
            |x| x * gelu_gate(x),
        ),
        Activation::Silu => map(
            threads,
            x,
            y,
            #[inline(always)]
            |x| x * sigmoid(x),
        ),
        Activation::Tanh => map(threads, x, y, tanh),
        Activation::Sigmoid => map(threads, x, y, sigmoid),
        Activation::Exp => map(threads, x, y, exp),
        Activation::Ln => map(threads, x, y, f32::ln),
        Activation::Square => map(
            threads,
            x,
            y,
            #[inline(always)]
            |x| x * x,
        ),
        Activation::Abs => map(threads, x, y, f32::abs),
        Activation::Scale(number) => map(
            threads,
            x,
            y,
            #[inline(always)]
            |x| number * x,
        ),
        Activation::Shift(number) => map(
            threads,
            x,
            y,
            #[inline(always)]
            |x| x + number,
        ),
    }
}

pub fn backward(threads: &Threads, f: Activation, x: &[f32], dy: &mut [f32]) {
    match f {
        Activation::Relu => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |x| if x > 0.0 { 1.0 } else { 0.0 },
        ),
        Activation::LeakyRelu(slope) => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |x| if x > 0.0 { 1.0 } else { slope },
        ),
        Activation::Gelu => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |x| {
                let gate = gelu_gate(x);
                let two_du = (x * x).mul_add(6.0 * GELU_SCALE * GELU_CUBIC, 2.0 * GELU_SCALE);
                gate * (x * (1.0 - gate)).mul_add(two_du, 1.0)
            },
        ),
        Activation::Silu => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |x| {
                let s = sigmoid(x);
                s * (x * (1.0 - s) + 1.0)
            },
        ),
        Activation::Tanh => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |x| {
                let y = tanh(x);
                1.0 - y * y
            },
        ),
        Activation::Sigmoid => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |x| {
                let y = sigmoid(x);
                y * (1.0 - y)
            },
        ),
        Activation::Exp => scale(threads, x, dy, exp),
        Activation::Ln => scale(threads, x, dy, f32::recip),
        Activation::Square => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |x| 2.0 * x,
        ),
        Activation::Abs => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |x| f32::from(x > 0.0) - f32::from(x < 0.0),
        ),
        Activation::Scale(number) => scale(
            threads,
            x,
            dy,
            #[inline(always)]
            |_| number,
        ),
        Activation::Shift(_) => {}
    }
}

impl ActivationOps for Cpu {
    fn activation(&self, f: Activation, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::activation(f, x.len()));
        forward(&self.threads, f, x, y);
        Ok(())
    }

    fn activation_backward(&self, f: Activation, x: &[f32], dy: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::activation_backward(f, x.len()));
        backward(&self.threads, f, x, dy);
        Ok(())
    }
}
