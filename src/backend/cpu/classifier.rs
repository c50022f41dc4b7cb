//! Softmax cross-entropy, fused with its gradient: the logits are overwritten, never copied.

use super::elementwise::CHUNK;
use super::math::{exp, max, simd, sum};
use super::threads::Threads;
use crate::backend::CrossEntropy;

pub fn cross_entropy(threads: &Threads, s: CrossEntropy, logits: &mut [f32], targets: &[u32], losses: &mut [f32]) {
    assert_eq!((logits.len(), targets.len(), losses.len()), (s.rows * s.classes, s.rows, s.rows));
    let rows = (CHUNK / s.classes.max(1)).max(1);
    let parts = logits.chunks_mut(rows * s.classes).zip(targets.chunks(rows)).zip(losses.chunks_mut(rows));
    threads.each(parts, |((logits, targets), losses)| {
        simd(
            #[inline(always)]
            || {
                for ((logits, &target), loss) in logits.chunks_exact_mut(s.classes).zip(targets).zip(losses) {
                    let top = max(logits);
                    let total = sum(logits, |x| exp(x - top));
                    *loss = total.ln() - (logits[target as usize] - top);
                    if s.gradient {
                        let factor = s.scale / total;
                        for x in logits.iter_mut() {
                            *x = exp(*x - top) * factor;
                        }
                        logits[target as usize] -= s.scale;
                    }
                }
            },
        );
    });
}
