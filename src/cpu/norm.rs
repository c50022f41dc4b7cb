//! Layer normalisation, and RMS normalisation, which is the same with a mean of zero.

use rayon::prelude::*;

use super::Cpu;
use super::math::{LANES, simd, sum};
use super::threads::{Threads, with_chunks};
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, Norm, NormOps};

/// Rows of one task.
const ROWS: usize = 32;
/// Columns of one task when rows are summed: its partial sums stay in registers.
const COLUMNS: usize = 32;

pub fn forward(
    threads: &Threads,
    s: Norm,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    y: &mut [f32],
    stats: &mut [f32],
) {
    let d = s.width;
    let (mean, rstd) = stats.split_at_mut(s.rows);
    let stats = mean.par_chunks_mut(ROWS).zip(rstd.par_chunks_mut(ROWS));
    threads.each(
        x.par_chunks(ROWS * d).zip(y.par_chunks_mut(ROWS * d)).zip(stats),
        |((x, y), (mean, rstd))| {
            simd(
                #[inline(always)]
                || {
                    let rows = x.chunks_exact(d).zip(y.chunks_exact_mut(d));
                    for ((x, y), (mean, rstd)) in rows.zip(mean.iter_mut().zip(rstd)) {
                        (*mean, *rstd) = normalise(s, x, weight, bias, y);
                    }
                },
            );
        },
    );
}

/// Adds `x` to the stream and computes [`forward`] of it: a row is normalised while its sum is
/// still in the L1 cache.
#[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
pub fn add_forward(
    threads: &Threads,
    s: Norm,
    x: &[f32],
    stream: &mut [f32],
    weight: &[f32],
    bias: &[f32],
    y: &mut [f32],
    stats: &mut [f32],
) {
    let d = s.width;
    let (mean, rstd) = stats.split_at_mut(s.rows);
    let inputs = x.par_chunks(ROWS * d).zip(stream.par_chunks_mut(ROWS * d));
    let outputs =
        y.par_chunks_mut(ROWS * d).zip(mean.par_chunks_mut(ROWS).zip(rstd.par_chunks_mut(ROWS)));
    threads.each(inputs.zip(outputs), |((x, stream), (y, (mean, rstd)))| {
        simd(
            #[inline(always)]
            || {
                let inputs = x.chunks_exact(d).zip(stream.chunks_exact_mut(d));
                let outputs = y.chunks_exact_mut(d).zip(mean.iter_mut().zip(rstd));
                for ((x, stream), (y, (mean, rstd))) in inputs.zip(outputs) {
                    stream.iter_mut().zip(x).for_each(|(stream, x)| *stream += x);
                    (*mean, *rstd) = normalise(s, stream, weight, bias, y);
                }
            },
        );
    });
}

/// Normalises one row; returns its mean and rstd.
#[inline(always)]
fn normalise(s: Norm, x: &[f32], weight: &[f32], bias: &[f32], y: &mut [f32]) -> (f32, f32) {
    if s.centred {
        normalise_as::<true>(s, x, weight, bias, y)
    } else {
        normalise_as::<false>(s, x, weight, bias, y)
    }
}

#[inline(always)]
fn normalise_as<const CENTRED: bool>(
    s: Norm,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    y: &mut [f32],
) -> (f32, f32) {
    let d = s.width as f32;
    let mean = if CENTRED { sum(x, |x| x) / d } else { 0.0 };
    let variance = sum(x, |x| (x - mean) * (x - mean)) / d;
    let rstd = 1.0 / (variance + s.epsilon).sqrt();
    if bias.is_empty() {
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = (x - mean) * rstd * w;
        }
    } else {
        for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
            *y = (x - mean) * rstd * w + b;
        }
    }
    (mean, rstd)
}

#[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
pub fn backward(
    threads: &Threads,
    s: Norm,
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    stats: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    if s.centred {
        backward_of::<true>(threads, s, dy, x, weight, stats, dx, dweight, dbias);
    } else {
        backward_of::<false>(threads, s, dy, x, weight, stats, dx, dweight, dbias);
    }
}

#[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
fn backward_of<const CENTRED: bool>(
    threads: &Threads,
    s: Norm,
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    stats: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    let d = s.width;
    let (mean, rstd) = stats.split_at(s.rows);
    let rows = dy.par_chunks(ROWS * d).zip(x.par_chunks(ROWS * d)).zip(dx.par_chunks_mut(ROWS * d));
    threads.each(
        rows.zip(mean.par_chunks(ROWS).zip(rstd.par_chunks(ROWS))),
        |(((dy, x), dx), (mean, rstd))| {
            simd(
                #[inline(always)]
                || {
                    let rows =
                        dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(dx.chunks_exact_mut(d));
                    for (((dy, x), dx), (&mean, &rstd)) in rows.zip(mean.iter().zip(rstd)) {
                        // With g = dy·w and n = (x - mean)·rstd: dx = rstd·(g - mean(g) -
                        // n·mean(g·n)), where the second term is the gradient through the mean.
                        let (g_sum, gx_sum) = weighted_sums(dy, weight, x, mean);
                        let g_mean = if CENTRED { g_sum / d as f32 } else { 0.0 };
                        let gn_mean = gx_sum * rstd / d as f32;
                        for (((dx, &dy), &w), &x) in dx.iter_mut().zip(dy).zip(weight).zip(x) {
                            *dx += rstd * (dy * w - g_mean - (x - mean) * rstd * gn_mean);
                        }
                    }
                },
            );
        },
    );
    // Each column is summed over all rows by the one task that owns it, so the order is fixed.
    let columns = with_chunks(dweight.par_chunks_mut(COLUMNS), dbias, COLUMNS);
    threads.each(columns.enumerate(), |(i, (dweight, dbias))| {
        let mut no_bias = [0.0; COLUMNS];
        let width = dweight.len();
        let dbias = dbias.unwrap_or(&mut no_bias[..width]);
        simd(
            #[inline(always)]
            || {
                let at = i * COLUMNS;
                let mut dw = [0.0; COLUMNS];
                let mut db = [0.0; COLUMNS];
                dw[..width].copy_from_slice(dweight);
                db[..width].copy_from_slice(dbias);
                for (row, (dy, x)) in dy.chunks_exact(d).zip(x.chunks_exact(d)).enumerate() {
                    let dy = &dy[at..at + width];
                    let x = &x[at..at + width];
                    let stats = (mean[row], rstd[row]);
                    // Usually all columns are there, a length that the compiler knows.
                    match (dy.first_chunk::<COLUMNS>(), x.first_chunk::<COLUMNS>()) {
                        (Some(dy), Some(x)) => add_row(&mut dw, &mut db, dy, x, stats),
                        _ => add_row(&mut dw[..width], &mut db[..width], dy, x, stats),
                    }
                }
                dweight.copy_from_slice(&dw[..width]);
                dbias.copy_from_slice(&db[..width]);
            },
        );
    });
}

/// Adds a row to the gradients of weight and bias.
#[inline(always)]
fn add_row(dw: &mut [f32], db: &mut [f32], dy: &[f32], x: &[f32], (mean, rstd): (f32, f32)) {
    for (((dw, db), &dy), &x) in dw.iter_mut().zip(db).zip(dy).zip(x) {
        *dw += dy * (x - mean) * rstd;
        *db += dy;
    }
}

/// Returns `Σ dy·w` and `Σ dy·w·(x - mean)` in one pass, in the fixed order of [`sum`].
#[inline(always)]
fn weighted_sums(dy: &[f32], weight: &[f32], x: &[f32], mean: f32) -> (f32, f32) {
    let ((dy, dy_tail), (w, w_tail), (x, x_tail)) =
        (dy.as_chunks::<LANES>(), weight.as_chunks::<LANES>(), x.as_chunks::<LANES>());
    let mut g_sum = [0.0; LANES];
    let mut gx_sum = [0.0; LANES];
    let mut add = |i: usize, dy: f32, w: f32, x: f32| {
        g_sum[i] += dy * w;
        gx_sum[i] += dy * w * (x - mean);
    };
    for ((dy, w), x) in dy.iter().zip(w).zip(x) {
        for i in 0..LANES {
            add(i, dy[i], w[i], x[i]);
        }
    }
    for (i, ((&dy, &w), &x)) in dy_tail.iter().zip(w_tail).zip(x_tail).enumerate() {
        add(i, dy, w, x);
    }
    (sum(&g_sum, |x| x), sum(&gx_sum, |x| x))
}

impl NormOps for Cpu {
    fn norm(
        &self,
        shape: Norm,
        x: &[f32],
        weight: &[f32],
        bias: &[f32],
        y: &mut [f32],
        stats: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::norm(shape, bias.len()));
        forward(&self.threads, shape, x, weight, bias, y, stats);
        Ok(())
    }

    fn add_norm(
        &self,
        shape: Norm,
        x: &[f32],
        stream: &mut [f32],
        weight: &[f32],
        bias: &[f32],
        y: &mut [f32],
        stats: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::add_norm(shape, bias.len()));
        add_forward(&self.threads, shape, x, stream, weight, bias, y, stats);
        Ok(())
    }

    fn norm_backward(
        &self,
        shape: Norm,
        dy: &[f32],
        x: &[f32],
        weight: &[f32],
        stats: &[f32],
        dx: &mut [f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::norm_backward(shape, dbias.len()));
        backward(&self.threads, shape, dy, x, weight, stats, dx, dweight, dbias);
        Ok(())
    }
}
