//! Operands, results, and comparison with f64 for the tests of operations.

use hpctrain_base::random::Stream;
use hpctrain_device::{Kernels, MemoryKind};

/// Results of kernels, one vector per kernel and shape.
pub type Results = Vec<Vec<f32>>;

/// Returns the relative error allowed, against the largest value of the result.
pub fn tolerance<B: Kernels>(b: &B) -> f64 {
    if b.has_master_weights() { 1e-2 } else { 1e-5 }
}

/// Returns normally distributed numbers that the device's compute type can hold, seeded by `seed`.
pub fn random<B: Kernels>(b: &B, seed: u64, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Stream::new(seed).fill_normal(&mut values);
    rounded(b, &values)
}

/// Returns the values rounded to the device's compute type.
pub fn rounded<B: Kernels>(b: &B, values: &[f32]) -> Vec<f32> {
    down(b, &up(b, values))
}

pub fn ids(seed: u64, len: usize, below: usize) -> Vec<u32> {
    (0..len).map(|i| (Stream::new(seed).uniform(i as u64) * below as f64) as u32).collect()
}

pub fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

pub fn close<B: Kernels>(b: &B, got: &B::Buf, want: &[f64], what: &str) {
    let got = down(b, got);
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-6, |a: f64, b| a.max(b.abs()));
    let mut bias = 0.0;
    for (i, (&g, w)) in got.iter().zip(want).enumerate() {
        let error = f64::from(g) - w;
        assert!(error.abs() <= tolerance(b) * largest, "{what}[{i}]: {g}, in f64 {w}");
        bias += error / largest;
    }
    // Rounding goes up as often as down.
    let count = got.len() as f64;
    assert!(
        bias.abs() <= tolerance(b) * (count.sqrt() + 0.01 * count),
        "{what} is off by {} on average",
        bias / count
    );
}

/// Uploads parameters or activations in the compute type.
pub fn up<B: Kernels>(b: &B, x: &[f32]) -> B::Buf {
    b.upload(MemoryKind::Parameters, x).unwrap()
}

/// Uploads fp32 master weights, gradients of parameters, statistics or losses in f32.
pub fn up_f32<B: Kernels>(b: &B, x: &[f32]) -> B::Buf {
    b.upload_f32(MemoryKind::Gradients, x).unwrap()
}

pub fn down<B: Kernels>(b: &B, x: &B::Buf) -> Vec<f32> {
    let mut host = vec![0.0; B::len(x)];
    b.download(B::all(x), &mut host).unwrap();
    host
}

/// Returns the leading dimensions to test for rows of `columns` elements: without padding, and with
/// the device's.
pub fn strides<B: Kernels>(columns: usize) -> Vec<usize> {
    let mut all = vec![columns, B::row_stride(columns)];
    all.dedup();
    all
}

/// Pads rows to `stride` elements with NaN, which must not influence any result.
pub fn pad_rows(rows: &[f32], columns: usize, stride: usize) -> Vec<f32> {
    let padding = vec![f32::NAN; stride - columns];
    rows.chunks(columns).flat_map(|row| row.iter().chain(&padding).copied()).collect()
}

/// Removes the padding again. Panics if a kernel has written to it.
pub fn unpad_rows<B: Kernels>(b: &B, buf: &B::Buf, columns: usize, stride: usize) -> Vec<f32> {
    let all = down(b, buf);
    assert!(
        all.chunks(stride).all(|row| row[columns..].iter().all(|x| x.is_nan())),
        "padding was written"
    );
    all.chunks(stride).flat_map(|row| row[..columns].iter().copied()).collect()
}

/// Returns the row-major matmul in f64 of `a`, m×k, and `b`, k×n.
pub fn matmul_f64(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    (0..m * n).map(|i| (0..k).map(|l| a(i / n, l) * b(l, i % n)).sum()).collect()
}

/// Panics unless sums that are f32 on every device are as expected, relative to the largest of
/// all.
pub fn close_f32(got: &[f32], expected: &[f64], what: &str) {
    let largest = expected.iter().fold(1.0f64, |largest, x| largest.max(x.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (f64::from(*got) - expected).abs() <= 2e-6 * largest,
            "{what}[{i}]: {got} is not {expected}"
        );
    }
}

/// Returns the bits of results, for an exact comparison.
pub fn bits(results: Results) -> Vec<Vec<u32>> {
    results.into_iter().map(|result| result.into_iter().map(f32::to_bits).collect()).collect()
}

/// The number of bits of TF32's mantissa.
pub const TF32_BITS: u32 = 10;

/// Returns [`random`] numbers that TF32 can hold.
pub fn random_tf32<B: Kernels>(b: &B, seed: u64, len: usize) -> Vec<f32> {
    let lost = f32::MANTISSA_DIGITS - 1 - TF32_BITS;
    random(b, seed, len).into_iter().map(|x| f32::from_bits(x.to_bits() >> lost << lost)).collect()
}
