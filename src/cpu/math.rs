//! Vectorisable building blocks shared by the CPU kernels.
//!
//! Elementwise code is written as scalar loops and compiled for the widest vectors of the machine
//! by [`simd`]. Fused multiply-adds are explicit, since the compiler never fuses by itself, so the
//! bits are the same on every machine. Sums run over [`LANES`] fixed partial sums, so their bits do
//! not depend on the vector width.

use pulp::Simd;

pub use hpctrain_base::simd::{simd, vectors};

/// The number of partial sums in a reduction.
pub const LANES: usize = 16;

/// Returns `eˣ` to about 1 ulp for x in -87..88; 0 below, saturates above. NaN stays NaN.
///
/// Uses Cody-Waite reduction to |r| ≤ ln2/2 and a degree-6 Taylor-Horner polynomial with minimax
/// coefficients (Cephes, `expf`).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.376_26;
    // 1.5·2²³: adding it rounds to an integer, which is then in the low bits of the sum.
    const SHIFT: f32 = 12_582_912.0;
    // Comparisons, not `clamp`: they are one instruction each and let NaN pass.
    let clamped = if x < LOWEST { LOWEST } else { x };
    let clamped = if clamped > HIGHEST { HIGHEST } else { clamped };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, clamped));
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    // 2ⁿ by its exponent bits; the rest of `shifted` is shifted out.
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < LOWEST { 0.0 } else { y * scale }
}

/// Returns `2ˣ` of each vector lane, to about 1 ulp for x in -126..127; 0 below. NaN stays NaN.
///
/// Works like [`exp`] without its reduction: a degree-6 polynomial with minimax coefficients
/// (Cephes, `exp2f`).
#[inline(always)]
pub fn exp2s<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const TERMS: [f32; 6] = [
        1.535_336_2e-4,
        1.339_887_4e-3,
        9.618_437e-3,
        5.550_332_5e-2,
        2.402_264_8e-1,
        6.931_472e-1,
    ];
    // At and below this value the exponent bits below are those of 0.
    const LOWEST: f32 = -127.0;
    const SHIFT: f32 = 12_582_912.0;
    let all = |x| simd.splat_f32s(x);
    let x = simd.select_f32s(simd.less_than_f32s(x, all(LOWEST)), all(LOWEST), x);
    let shifted = simd.add_f32s(x, all(SHIFT));
    let r = simd.sub_f32s(x, simd.sub_f32s(shifted, all(SHIFT)));
    let mut p = all(TERMS[0]);
    for term in &TERMS[1..] {
        p = simd.mul_add_f32s(p, r, all(*term));
    }
    let y = simd.mul_add_f32s(p, r, all(1.0));
    let scale = simd.add_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(127));
    let scale = simd.wrapping_dyn_shl_u32s(scale, simd.splat_u32s(23));
    simd.mul_f32s(y, simd.transmute_f32s_u32s(scale))
}

/// Returns `ln(1 + x)` for x in 0..=1, rounded from f64. NaN stays NaN.
///
/// Sums the series of 2·artanh(x / (2 + x)), whose terms fall by a factor of at least nine: the C
/// library's function has other bits on other architectures.
pub fn ln_1p(x: f32) -> f32 {
    const TERMS: usize = 13;
    let x = f64::from(x);
    let ratio = x / (2.0 + x);
    let square = ratio * ratio;
    let terms = (0..TERMS).rev().map(|term| 1.0 / (2 * term + 1) as f64);
    (2.0 * ratio * terms.fold(0.0, |sum, factor| sum * square + factor)) as f32
}

/// Returns the bits of the nearest bf16, ties to even. NaN stays NaN.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let quiet = bits | 1 << 22;
    let kept = if x.is_nan() { quiet } else { rounded };
    (kept >> 16) as u16
}

/// Adds the partial sums in a fixed binary tree.
#[inline(always)]
fn fold(mut partials: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            partials[i] += partials[i + width];
        }
        width /= 2;
    }
    partials[0]
}

/// Returns `Σ f(x)` over a slice in a fixed order.
#[inline(always)]
pub fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (blocks, tail) = x.as_chunks::<LANES>();
    let mut partials = [0.0; LANES];
    for block in blocks {
        for i in 0..LANES {
            partials[i] += f(block[i]);
        }
    }
    for (partial, &x) in partials.iter_mut().zip(tail) {
        *partial += f(x);
    }
    fold(partials)
}

/// Replaces every `x` with `f(x)` and returns their sum, in the order of [`sum`].
#[inline(always)]
pub fn replace_and_sum(x: &mut [f32], f: impl Fn(f32) -> f32) -> f32 {
    let (blocks, tail) = x.as_chunks_mut::<LANES>();
    let mut partials = [0.0; LANES];
    for block in blocks {
        for i in 0..LANES {
            block[i] = f(block[i]);
            partials[i] += block[i];
        }
    }
    for (partial, x) in partials.iter_mut().zip(tail) {
        *x = f(*x);
        *partial += *x;
    }
    fold(partials)
}

/// Returns `Σ f(x, y)` over two slices of equal length in a fixed order.
#[inline(always)]
pub fn sum2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let ((x_blocks, x_tail), (y_blocks, y_tail)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut partials = [0.0; LANES];
    for (x, y) in x_blocks.iter().zip(y_blocks) {
        for i in 0..LANES {
            partials[i] += f(x[i], y[i]);
        }
    }
    for (i, (&x, &y)) in x_tail.iter().zip(y_tail).enumerate() {
        partials[i] += f(x, y);
    }
    fold(partials)
}

/// Returns the largest element; -∞ of an empty slice; NaN elements are ignored.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let (blocks, tail) = x.as_chunks::<LANES>();
    let mut maxima = [f32::NEG_INFINITY; LANES];
    for block in blocks {
        for i in 0..LANES {
            maxima[i] = if block[i] > maxima[i] { block[i] } else { maxima[i] };
        }
    }
    maxima.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_f64() {
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let got = f64::from(simd(
                #[inline(always)]
                || exp(x),
            ));
            let expected = f64::from(x).exp();
            assert!((got / expected - 1.0).abs() < 3e-7, "exp({x}) = {got}, not {expected}");
        }
        assert_eq!((exp(-100.0), exp(f32::NEG_INFINITY), exp(0.0)), (0.0, 0.0, 1.0));
        assert!(exp(f32::NAN).is_nan() && exp(200.0) > 1e38);
    }

    #[test]
    fn ln_1p_is_the_rounded_one_of_f64() {
        for bits in (0..=1f32.to_bits()).step_by(1009) {
            let x = f32::from_bits(bits);
            let expected = f64::from(x).ln_1p();
            let error = (f64::from(ln_1p(x)) - expected).abs();
            assert!(error <= 0.5001 * f64::from(x.next_up() - x), "ln(1 + {x})");
        }
        assert_eq!((ln_1p(0.0), ln_1p(1.0)), (0.0, std::f32::consts::LN_2));
        assert!(ln_1p(f32::NAN).is_nan());
    }

    struct Powers<'a>(&'a mut [f32]);

    impl pulp::WithSimd for Powers<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            S::as_mut_simd_f32s(self.0).0.iter_mut().for_each(|x| *x = exp2s(simd, *x));
        }
    }

    #[test]
    fn powers_of_two_are_close_to_f64() {
        // The length is a multiple of any number of vector lanes.
        let x: Vec<f32> = (-126_000..=125_984).map(|i| i as f32 * 1e-3).chain([0.0; 15]).collect();
        let mut y = x.clone();
        vectors(Powers(&mut y));
        assert_eq!(x.len() % 32, 0);
        for (x, y) in x.into_iter().zip(y) {
            let expected = f64::from(x).exp2();
            assert!((f64::from(y) / expected - 1.0).abs() < 2e-7, "2^{x} = {y}, not {expected}");
        }
        let mut special = [
            f32::NEG_INFINITY,
            -1e30,
            -127.0,
            f32::NAN,
            f32::from_bits(0x7fc0_0001),
            0.0,
            -0.0,
            1.0,
        ]
        .repeat(4);
        vectors(Powers(&mut special));
        for special in special.chunks(8) {
            assert_eq!((&special[..3], &special[5..]), (&[0.0; 3][..], &[1.0, 1.0, 2.0][..]));
            assert!(special[3].is_nan() && special[4].is_nan());
        }
    }

    #[test]
    fn bf16_is_the_nearest() {
        // Every upper half, with lower halves around the middle.
        for bits in (0..=u32::from(u16::MAX))
            .flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| high << 16 | low))
        {
            let x = f32::from_bits(bits);
            assert_eq!(to_bf16(x), half::bf16::from_f32(x).to_bits(), "{x} ({bits:x})");
        }
    }

    #[test]
    fn reductions_handle_every_length() {
        for len in [0, 1, 15, 16, 17, 31, 33, 1023] {
            let x: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
            let expected: f64 = x.iter().map(|&x| f64::from(x) * 2.0).sum();
            assert!((f64::from(sum(&x, |x| 2.0 * x)) - expected).abs() < 1e-5);
            assert!((f64::from(sum2(&x, &x, |a, b| a + b)) - expected).abs() < 1e-5);
            let mut twice = x.clone();
            assert_eq!(replace_and_sum(&mut twice, |x| 2.0 * x), sum(&x, |x| 2.0 * x));
            assert!(twice.iter().zip(&x).all(|(twice, x)| *twice == 2.0 * x));
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
