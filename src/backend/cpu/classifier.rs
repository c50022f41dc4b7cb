//! Softmax cross-entropy, fused with its gradient: the logits are overwritten, never copied.

use super::elementwise::CHUNK;
use super::math::{exp, max, simd, sum};
use super::threads::Threads;
use crate::backend::{CrossEntropy, LossWeights};

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
    let parts = logits.chunks_mut(rows * s.classes).zip(targets.chunks(rows)).zip(losses.chunks_mut(rows));
    threads.each(parts.zip((0..).step_by(rows)), |(((logits, targets), losses), first)| {
        simd(
            #[inline(always)]
            || {
                let all = logits.chunks_exact_mut(s.classes).zip(targets).zip(losses).zip(first..);
                for (((logits, &target), loss), row) in all {
                    let top = max(logits);
                    let total = sum(logits, |x| exp(x - top));
                    let of_class = of_classes.get(target as usize).copied().unwrap_or(1.0);
                    let weight = of_class * of_rows.get(row).copied().unwrap_or(1.0);
                    *loss = total.ln() - rest * (logits[target as usize] - top);
                    if s.smoothing > 0.0 {
                        *loss -= spread * sum(logits, |x| x - top);
                    }
                    *loss *= weight;
                    if s.gradient {
                        let scale = s.scale * weight;
                        let factor = scale / total;
                        for x in logits.iter_mut() {
                            *x = exp(*x - top) * factor - scale * spread;
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
