//! Regression losses, fused with their gradients.

use rayon::prelude::*;

use super::Cpu;
use super::elementwise::CHUNK;
use super::math::{exp, ln_1p};
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, Regression, RegressionLoss, RegressionOps};

/// Returns the loss of one element and its slope.
fn deviation(by: RegressionLoss, p: f32, t: f32) -> (f32, f32) {
    let error = p - t;
    match by {
        RegressionLoss::Squared => (error * error, 2.0 * error),
        RegressionLoss::Absolute => (error.abs(), if error == 0.0 { 0.0 } else { error.signum() }),
        RegressionLoss::Huber(delta) if error.abs() <= delta => (0.5 * error * error, error),
        RegressionLoss::Huber(delta) => {
            (delta * (error.abs() - 0.5 * delta), delta * error.signum())
        }
        // max(p, 0) - p·t + ln(1 + e^-|p|): no exponential overflows.
        RegressionLoss::BinaryCrossEntropy => {
            let small = exp(-p.abs());
            let sigmoid = if p >= 0.0 { 1.0 } else { small } / (1.0 + small);
            (p.max(0.0) - p * t + ln_1p(small), sigmoid - t)
        }
        RegressionLoss::BinaryAccuracy => (if (p > 0.0) == (t > 0.5) { 1.0 } else { 0.0 }, 0.0),
    }
}

pub fn regression(
    threads: &Threads,
    s: Regression,
    predictions: &mut [f32],
    targets: &[f32],
    weights: &[f32],
    losses: &mut [f32],
) {
    assert_eq!(
        (predictions.len(), targets.len(), losses.len()),
        (s.rows * s.width, s.rows * s.width, s.rows)
    );
    assert!(weights.is_empty() || weights.len() == s.rows, "a weight for each row");
    let rows = (CHUNK / s.width.max(1)).max(1);
    let factor = s.scale / s.width as f32;
    let parts = predictions
        .par_chunks_mut(rows * s.width)
        .zip(targets.par_chunks(rows * s.width))
        .zip(losses.par_chunks_mut(rows));
    threads.each(parts.enumerate(), |(part, ((predictions, targets), losses))| {
        let first = part * rows;
        let rows = predictions
            .chunks_exact_mut(s.width)
            .zip(targets.chunks_exact(s.width))
            .zip(losses)
            .zip(first..);
        for (((predictions, targets), loss), row) in rows {
            let weight = weights.get(row).copied().unwrap_or(1.0);
            let factor = factor * weight;
            let mut total = 0.0;
            for (p, &t) in predictions.iter_mut().zip(targets) {
                let (value, slope) = deviation(s.loss, *p, t);
                total += value;
                if s.gradient {
                    *p = slope * factor;
                }
            }
            *loss = total / s.width as f32 * weight;
        }
    });
}

impl RegressionOps for Cpu {
    fn regression(
        &self,
        shape: Regression,
        predictions: &mut [f32],
        targets: &[f32],
        weights: &[f32],
        losses: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::regression(shape, weights.len()));
        regression(&self.threads, shape, predictions, targets, weights, losses);
        Ok(())
    }
}
