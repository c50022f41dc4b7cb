//! The supervised contrastive loss, fused with its gradient.

use rayon::prelude::*;

use super::math::{exp, max, simd, sum};
use super::threads::Threads;
use super::{Cpu, CpuInts};
use hpctrain_base::error::Result;
use hpctrain_device::{Contrastive, ContrastiveOps, KernelCost};

fn contrastive(
    threads: &Threads,
    s: Contrastive,
    similarities: &mut [f32],
    classes: &[u32],
    weights: &[f32],
    losses: &mut [f32],
) {
    assert_eq!(similarities.len(), s.rows * s.columns, "{s:?}");
    assert!(classes.len() == s.columns && losses.len() == s.rows, "{s:?}");
    assert!(s.first + s.rows <= s.columns, "{s:?}");
    assert!(weights.is_empty() || weights.len() == s.rows, "a weight for each row");
    let rows = similarities.par_chunks_mut(s.columns.max(1)).zip(losses);
    threads.each(rows.enumerate(), |(row, (similarities, loss))| {
        let own = s.first + row;
        let weight = weights.get(row).copied().unwrap_or(1.0);
        simd(
            #[inline(always)]
            || *loss = weight * of_row(similarities, classes, own, s.gradient, s.scale * weight),
        );
    });
}

/// Returns the loss of one row, and replaces its similarities by their gradient times `scale`.
#[inline(always)]
fn of_row(x: &mut [f32], classes: &[u32], own: usize, gradient: bool, scale: f32) -> f32 {
    let class = classes[own];
    let is_positive = |j: usize| j != own && classes[j] == class;
    let positives = (0..x.len()).filter(|&j| is_positive(j)).count();
    if positives == 0 {
        if gradient {
            x.fill(0.0);
        }
        return 0.0;
    }
    let itself = std::mem::replace(&mut x[own], f32::NEG_INFINITY);
    let top = max(x).max(f32::MIN);
    let total = sum(x, |x| exp(x - top));
    let of_positives: f32 = (0..x.len()).filter(|&j| is_positive(j)).map(|j| x[j] - top).sum();
    let share = 1.0 / positives as f32;
    if gradient {
        let factor = scale / total;
        for x in x.iter_mut() {
            *x = exp(*x - top) * factor;
        }
        for j in (0..x.len()).filter(|&j| is_positive(j)) {
            x[j] -= scale * share;
        }
    } else {
        x[own] = itself;
    }
    total.ln() - of_positives * share
}

impl ContrastiveOps for Cpu {
    fn contrastive(
        &self,
        shape: Contrastive,
        similarities: &mut [f32],
        classes: &CpuInts,
        weights: &[f32],
        losses: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::contrastive(shape, weights.len()));
        contrastive(&self.threads, shape, similarities, classes, weights, losses);
        Ok(())
    }
}
