//! Softmax cross-entropy, fused with its gradient: the logits are overwritten, never copied.

use rayon::prelude::*;

use super::elementwise::CHUNK;
use super::math::{exp, max, replace_and_sum, simd, sum};
use super::threads::Threads;
use super::{Cpu, CpuInts};
use hpctrain_base::error::Result;
use hpctrain_device::{
    ClassifierOps, CrossEntropy, CrossEntropyPart, KernelCost, LogitsPart, LossWeights,
};

/// The least elements of a block of a row, which fits in the L1 cache while its exponentials are
/// computed, and the most blocks of a row.
const BLOCK: usize = 1 << 11;
const MOST_BLOCKS: usize = 64;

/// Merges the largest logit and `Σ exp(x - largest)` of two parts of a row.
#[inline(always)]
fn merged((top, total): (f32, f32), (largest, sum): (f32, f32)) -> (f32, f32) {
    let above = top.max(largest);
    (above, total * exp(top - above) + sum * exp(largest - above))
}

/// Returns the largest logit of a row, and `Σ exp(x - largest)`. With `replace`, logits are
/// replaced by their exponentials relative to the largest logit of their block, which is stored in
/// `tops`: one exponential per logit is enough for loss and gradient.
#[inline(always)]
fn softmax_sum(
    logits: &mut [f32],
    block: usize,
    replace: bool,
    tops: &mut [f32; MOST_BLOCKS],
) -> (f32, f32) {
    let mut all = (f32::MIN, 0.0);
    for (logits, block_top) in logits.chunks_mut(block).zip(tops) {
        // Logits masked by -∞ contribute nothing, even in a block without any others.
        let largest = max(logits).max(f32::MIN);
        let sum = if replace {
            replace_and_sum(logits, |x| exp(x - largest))
        } else {
            sum(logits, |x| exp(x - largest))
        };
        (all, *block_top) = (merged(all, (largest, sum)), largest);
    }
    all
}

pub fn cross_entropy(
    threads: &Threads,
    s: CrossEntropy,
    logits: &mut [f32],
    targets: &[u32],
    weights: LossWeights<&[f32]>,
    losses: &mut [f32],
) {
    assert_eq!((logits.len(), targets.len(), losses.len()), (s.rows * s.classes, s.rows, s.rows));
    assert_eq!(s.stride, s.classes, "padded rows");
    let LossWeights { classes: class_weights, rows: row_weights } = weights;
    assert!(
        class_weights.is_empty() || class_weights.len() == s.classes,
        "a weight for each class"
    );
    assert!(row_weights.is_empty() || row_weights.len() == s.rows, "a weight for each row");
    let rest = 1.0 - s.smoothing;
    let spread = s.smoothing / s.classes as f32;
    let rows = (CHUNK / s.classes.max(1)).max(1);
    let block = BLOCK.max(s.classes.div_ceil(MOST_BLOCKS));
    let parts = logits
        .par_chunks_mut(rows * s.classes)
        .zip(targets.par_chunks(rows))
        .zip(losses.par_chunks_mut(rows));
    threads.each(parts.enumerate(), |(part, ((logits, targets), losses))| {
        let first = part * rows;
        simd(
            #[inline(always)]
            || {
                let mut tops = [0.0; MOST_BLOCKS];
                let all = logits.chunks_exact_mut(s.classes).zip(targets).zip(losses).zip(first..);
                for (((logits, &target), loss), row) in all {
                    let own = logits[target as usize];
                    let others = if s.smoothing > 0.0 { sum(logits, |x| x - own) } else { 0.0 };
                    let (top, total) = softmax_sum(logits, block, s.gradient, &mut tops);
                    let class_weight = class_weights.get(target as usize).copied().unwrap_or(1.0);
                    let weight = class_weight * row_weights.get(row).copied().unwrap_or(1.0);
                    *loss = total.ln() - rest * (own - top);
                    if s.smoothing > 0.0 {
                        *loss -= spread * (others + s.classes as f32 * (own - top));
                    }
                    *loss *= weight;
                    if s.gradient {
                        let scale = s.scale * weight;
                        for (logits, largest) in logits.chunks_mut(block).zip(&tops) {
                            let factor = scale / total * exp(largest - top);
                            for x in logits.iter_mut() {
                                *x = *x * factor - scale * spread;
                            }
                        }
                        logits[target as usize] -= scale * rest;
                    }
                }
            },
        );
    });
}

/// Returns the largest logit of a part of a row, `Σ exp(x - largest)`, and the sum of its logits.
#[inline(always)]
fn part_sums(logits: &[f32]) -> (f32, f32, f32) {
    let mut softmax = (f32::MIN, 0.0);
    let mut plain = 0.0;
    for logits in logits.chunks(BLOCK) {
        // Masked logits contribute nothing, as in `softmax_sum`.
        let largest = max(logits).max(f32::MIN);
        softmax = merged(softmax, (largest, sum(logits, |x| exp(x - largest))));
        // Sums differences from the largest, so that a common shift of all logits costs little
        // precision.
        plain += (logits.len() as f32).mul_add(largest, sum(logits, |x| x - largest));
    }
    (softmax.0, softmax.1, plain)
}

pub fn softmax_part(
    threads: &Threads,
    s: LogitsPart,
    logits: &[f32],
    targets: &[u32],
    stats: &mut [f32],
) {
    let (stats, _) = stats.as_chunks_mut::<{ LogitsPart::STATS }>();
    assert_eq!((logits.len(), targets.len(), stats.len()), (s.rows * s.classes, s.rows, s.rows));
    assert_eq!(s.stride, s.classes, "padded rows");
    let rows = (CHUNK / s.classes.max(1)).max(1);
    let parts = logits
        .par_chunks(rows * s.classes)
        .zip(targets.par_chunks(rows))
        .zip(stats.par_chunks_mut(rows));
    threads.each(parts, |((logits, targets), stats)| {
        simd(
            #[inline(always)]
            || {
                for ((logits, &target), stats) in
                    logits.chunks_exact(s.classes).zip(targets).zip(stats)
                {
                    let (top, total, plain) = part_sums(logits);
                    *stats =
                        [top, total, s.column(target).map_or(0.0, |column| logits[column]), plain];
                }
            },
        );
    });
}

pub fn cross_entropy_part(
    threads: &Threads,
    s: CrossEntropyPart,
    stats: &[f32],
    logits: &mut [f32],
    targets: &[u32],
    weights: LossWeights<&[f32]>,
    losses: &mut [f32],
) {
    let part = s.part;
    let (stats, _) = stats.as_chunks::<{ LogitsPart::STATS }>();
    assert_eq!((logits.len(), stats.len()), (part.rows * part.classes, s.parts * part.rows));
    assert_eq!((targets.len(), losses.len(), part.stride), (part.rows, part.rows, part.classes));
    let LossWeights { classes: class_weights, rows: row_weights } = weights;
    assert!(
        class_weights.is_empty() || class_weights.len() == s.classes,
        "a weight for each class"
    );
    assert!(row_weights.is_empty() || row_weights.len() == part.rows, "a weight for each row");
    let rest = 1.0 - s.smoothing;
    let spread = s.smoothing / s.classes as f32;
    let rows = (CHUNK / part.classes.max(1)).max(1);
    let tasks = logits
        .par_chunks_mut(rows * part.classes)
        .zip(targets.par_chunks(rows))
        .zip(losses.par_chunks_mut(rows));
    threads.each(tasks.enumerate(), |(task, ((logits, targets), losses))| {
        let first = task * rows;
        simd(
            #[inline(always)]
            || {
                let all =
                    logits.chunks_exact_mut(part.classes).zip(targets).zip(losses).zip(first..);
                for (((logits, &target), loss), row) in all {
                    let mut softmax = (f32::MIN, 0.0);
                    let mut own = 0.0;
                    let mut plain = 0.0;
                    for index in 0..s.parts {
                        let [largest, sum, target_logit, logit_sum] =
                            stats[index * part.rows + row];
                        softmax = merged(softmax, (largest, sum));
                        own += target_logit;
                        plain += logit_sum;
                    }
                    let (top, total) = softmax;
                    let class_weight = class_weights.get(target as usize).copied().unwrap_or(1.0);
                    let weight = class_weight * row_weights.get(row).copied().unwrap_or(1.0);
                    *loss = total.ln() - rest * (own - top);
                    if s.smoothing > 0.0 {
                        *loss -= spread * (s.classes as f32).mul_add(-top, plain);
                    }
                    *loss *= weight;
                    if s.gradient {
                        let scale = s.scale * weight;
                        let factor = scale / total;
                        for x in logits.iter_mut() {
                            *x = exp(*x - top) * factor - scale * spread;
                        }
                        if let Some(column) = part.column(target) {
                            logits[column] -= scale * rest;
                        }
                    }
                }
            },
        );
    });
}

pub fn hits(
    threads: &Threads,
    classes: usize,
    k: usize,
    logits: &[f32],
    targets: &[u32],
    hits: &mut [f32],
) {
    assert_eq!((logits.len(), targets.len()), (hits.len() * classes, hits.len()));
    let rows = (CHUNK / classes.max(1)).max(1);
    let parts = logits
        .par_chunks(rows * classes)
        .zip(targets.par_chunks(rows))
        .zip(hits.par_chunks_mut(rows));
    threads.each(parts, |((logits, targets), hits)| {
        for ((logits, &target), hit) in logits.chunks_exact(classes).zip(targets).zip(hits) {
            let (before, rest) = logits.split_at(target as usize);
            let own = rest[0];
            // A logit that is NaN is larger than all others.
            let smaller = before.iter().filter(|x| **x < own).count()
                + rest[1..].iter().filter(|x| **x <= own).count();
            let larger = classes - 1 - smaller;
            *hit = if larger < k { 1.0 } else { 0.0 };
        }
    });
}

impl ClassifierOps for Cpu {
    fn cross_entropy(
        &self,
        shape: CrossEntropy,
        logits: &mut [f32],
        targets: &CpuInts,
        weights: LossWeights<&[f32]>,
        losses: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::cross_entropy(
            shape,
            weights.classes.len() + weights.rows.len(),
        ));
        cross_entropy(&self.threads, shape, logits, targets, weights, losses);
        Ok(())
    }

    fn softmax_part(
        &self,
        shape: LogitsPart,
        logits: &[f32],
        targets: &CpuInts,
        stats: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::softmax_part(shape));
        softmax_part(&self.threads, shape, logits, targets, stats);
        Ok(())
    }

    fn cross_entropy_part(
        &self,
        shape: CrossEntropyPart,
        stats: &[f32],
        logits: &mut [f32],
        targets: &CpuInts,
        weights: LossWeights<&[f32]>,
        losses: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::cross_entropy_part(
            shape,
            weights.classes.len() + weights.rows.len(),
        ));
        cross_entropy_part(&self.threads, shape, stats, logits, targets, weights, losses);
        Ok(())
    }

    fn hits(
        &self,
        classes: usize,
        stride: usize,
        k: usize,
        logits: &[f32],
        targets: &CpuInts,
        hits: &mut [f32],
    ) -> Result<()> {
        assert_eq!(stride, classes, "padded rows");
        let _launch = self.start_kernel(KernelCost::hits(logits.len(), hits.len()));
        self::hits(&self.threads, classes, k, logits, targets, hits);
        Ok(())
    }
}
