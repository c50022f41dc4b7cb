//! Fills, copies, sums and the activation functions: one pass over memory each.

use half::bf16;

use super::math::{exp, simd};
use super::threads::Threads;

/// Elements of one task.
pub const CHUNK: usize = 1 << 14;

/// Elements of one partial sum of squares.
const SQUARES_CHUNK: usize = 1 << 12;
/// Chunks whose sums are kept before they are added.
const SQUARES_PART: usize = 256;

pub fn zero(threads: &Threads, y: &mut [f32]) {
    threads.each(y.chunks_mut(CHUNK), |y| y.fill(0.0));
}

pub fn copy(threads: &Threads, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    threads.each(x.chunks(CHUNK).zip(y.chunks_mut(CHUNK)), |(x, y)| y.copy_from_slice(x));
}

/// `y = x`, rounded to bf16 as GPUs do: to the nearest, ties to even. `y` is its bits.
pub fn narrow(threads: &Threads, x: &[f32], y: &mut [u16]) {
    assert_eq!(x.len(), y.len());
    threads.each(x.chunks(CHUNK).zip(y.chunks_mut(CHUNK)), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for (y, x) in y.iter_mut().zip(x) {
                    *y = bf16::from_f32(*x).to_bits();
                }
            },
        );
    });
}

/// `y += x` on the calling thread; what a reduction over the wire uses, too.
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
    threads.each(x.chunks(CHUNK).zip(y.chunks_mut(CHUNK)), |(x, y)| add_serial(x, y));
}

/// `Σ x²`: f64 sums of fixed chunks, added in order.
pub fn sum_squares(threads: &Threads, x: &[f32]) -> f64 {
    let mut total = 0.0;
    // The partial sums of one part wait on the stack.
    for x in x.chunks(SQUARES_PART * SQUARES_CHUNK) {
        let mut partial = [0.0f64; SQUARES_PART];
        threads.each(x.chunks(SQUARES_CHUNK).zip(&mut partial), |(x, partial)| {
            *partial = simd(
                #[inline(always)]
                || {
                    let mut lanes = [0.0f64; 8];
                    let (blocks, tail) = x.as_chunks::<8>();
                    for block in blocks {
                        for i in 0..8 {
                            lanes[i] += f64::from(block[i]) * f64::from(block[i]);
                        }
                    }
                    lanes.iter().sum::<f64>() + tail.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>()
                },
            );
        });
        total = partial.iter().fold(total, |total, partial| total + partial);
    }
    total
}

/// √(2/π) and the cubic coefficient of GELU's tanh form.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

/// The logistic function of 2u, u = √(2/π)(x + 0.044715x³): GELU is x times it.
#[inline(always)]
fn gelu_gate(x: f32) -> f32 {
    let minus_2u = x * (x * x).mul_add(-2.0 * GELU_SCALE * GELU_CUBIC, -2.0 * GELU_SCALE);
    1.0 / (1.0 + exp(minus_2u))
}

pub fn gelu(threads: &Threads, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    threads.each(x.chunks(CHUNK).zip(y.chunks_mut(CHUNK)), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = x * gelu_gate(x);
                }
            },
        );
    });
}

pub fn gelu_backward(threads: &Threads, x: &[f32], dy: &mut [f32]) {
    assert_eq!(x.len(), dy.len());
    threads.each(x.chunks(CHUNK).zip(dy.chunks_mut(CHUNK)), |(x, dy)| {
        simd(
            #[inline(always)]
            || {
                for (dy, &x) in dy.iter_mut().zip(x) {
                    let gate = gelu_gate(x);
                    let two_du = (x * x).mul_add(6.0 * GELU_SCALE * GELU_CUBIC, 2.0 * GELU_SCALE);
                    *dy *= gate * (x * (1.0 - gate)).mul_add(two_du, 1.0);
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_even_and_what_is_not_finite_stays_so() {
        let bits = [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x8000_0001, 0x7f7f_ffff, 0xff80_0000, 0x7f80_0001];
        let mut rounded = [0; 7];
        narrow(&Threads::new(1), &bits.map(f32::from_bits), &mut rounded);
        assert_eq!(rounded[..6], [0x3f80, 0x3f82, 0x3f81, 0x8000, 0x7f80, 0xff80]);
        assert!(bf16::from_bits(rounded[6]).is_nan());
    }
}
