//! Softmax cross-entropy, fused with its gradient: the logits are overwritten, never copied.

use super::elementwise::CHUNK;
use super::math::{exp, max, replace_and_sum, simd, sum};
use super::threads::Threads;
use super::{Cpu, CpuInts};
use crate::backend::{ClassifierOps, CrossEntropy, LossWeights, Work};
use crate::error::Result;

/// Elements of a row whose exponentials are taken while they are in a core's nearest cache, and most such blocks of a row.
const BLOCK: usize = 1 << 11;
const MOST_BLOCKS: usize = 64;

/// The largest logit of a row, and `Σ exp(x - largest)`. With `replace`, logits become their exponentials, less the largest
/// logit of their block, which is left in `tops`: one exponential a logit is enough for loss and gradient.
#[inline(always)]
fn softmax_sum(logits: &mut [f32], block: usize, replace: bool, tops: &mut [f32; MOST_BLOCKS]) -> (f32, f32) {
    let (mut top, mut total) = (f32::MIN, 0.0);
    for (logits, of_block) in logits.chunks_mut(block).zip(tops) {
        // Of classes that are ruled out by -∞ nothing is left, even where a block has no others.
        let largest = max(logits).max(f32::MIN);
        let sum =
            if replace { replace_and_sum(logits, |x| exp(x - largest)) } else { sum(logits, |x| exp(x - largest)) };
        let above = top.max(largest);
        total = total * exp(top - above) + sum * exp(largest - above);
        (top, *of_block) = (above, largest);
    }
    (top, total)
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
    let LossWeights { classes: of_classes, rows: of_rows } = weights;
    assert!(of_classes.is_empty() || of_classes.len() == s.classes, "a weight for each class");
    assert!(of_rows.is_empty() || of_rows.len() == s.rows, "a weight for each row");
    let (rest, spread) = (1.0 - s.smoothing, s.smoothing / s.classes as f32);
    let rows = (CHUNK / s.classes.max(1)).max(1);
    let block = BLOCK.max(s.classes.div_ceil(MOST_BLOCKS));
    let parts = logits.chunks_mut(rows * s.classes).zip(targets.chunks(rows)).zip(losses.chunks_mut(rows));
    threads.each(parts.zip((0..).step_by(rows)), |(((logits, targets), losses), first)| {
        simd(
            #[inline(always)]
            || {
                let mut tops = [0.0; MOST_BLOCKS];
                let all = logits.chunks_exact_mut(s.classes).zip(targets).zip(losses).zip(first..);
                for (((logits, &target), loss), row) in all {
                    let own = logits[target as usize];
                    let others = if s.smoothing > 0.0 { sum(logits, |x| x - own) } else { 0.0 };
                    let (top, total) = softmax_sum(logits, block, s.gradient, &mut tops);
                    let of_class = of_classes.get(target as usize).copied().unwrap_or(1.0);
                    let weight = of_class * of_rows.get(row).copied().unwrap_or(1.0);
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

pub fn hits(threads: &Threads, classes: usize, k: usize, logits: &[f32], targets: &[u32], hits: &mut [f32]) {
    assert_eq!((logits.len(), targets.len()), (hits.len() * classes, hits.len()));
    let rows = (CHUNK / classes.max(1)).max(1);
    let parts = logits.chunks(rows * classes).zip(targets.chunks(rows)).zip(hits.chunks_mut(rows));
    threads.each(parts, |((logits, targets), hits)| {
        for ((logits, &target), hit) in logits.chunks_exact(classes).zip(targets).zip(hits) {
            let (before, rest) = logits.split_at(target as usize);
            let own = rest[0];
            // A logit that is no number is larger than all.
            let smaller = before.iter().filter(|x| **x < own).count() + rest[1..].iter().filter(|x| **x <= own).count();
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
        let _launch = self.launched(Work::cross_entropy(shape, weights.classes.len() + weights.rows.len()));
        cross_entropy(&self.threads, shape, logits, targets, weights, losses);
        Ok(())
    }

    fn hits(&self, classes: usize, k: usize, logits: &[f32], targets: &CpuInts, hits: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::hits(logits.len(), hits.len()));
        self::hits(&self.threads, classes, k, logits, targets, hits);
        Ok(())
    }
}
