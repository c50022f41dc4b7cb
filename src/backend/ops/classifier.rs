//! Cross-entropy and hits of classes.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// Softmax cross-entropy over rows of logits.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy {
    /// Rows of logits.
    pub rows: usize,
    /// Classes a row.
    pub classes: usize,
    /// Factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Replace the logits by their gradient; without it they are left alone.
    pub gradient: bool,
    /// Part of the target that is spread evenly over all classes (Szegedy et al., 2016); 0 is none.
    pub smoothing: f32,
}

/// Factors of the losses of a [`CrossEntropy`] and of their gradients, windows of f32; an empty one is none.
#[derive(Debug, Clone, Copy)]
pub struct LossWeights<V> {
    /// One for each class.
    pub classes: V,
    /// One for each row.
    pub rows: V,
}

/// Cross-entropy and hits of classes.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ClassifierOps: Backend {
    /// Writes the loss of every row (`-log softmax(logits)[target]`, unscaled) to `losses`;
    /// with [`CrossEntropy::gradient`], overwrites the logits by their scaled gradient. Both times `weights`.
    fn cross_entropy(
        &self,
        shape: CrossEntropy,
        logits: Self::ViewMut<'_>,
        targets: &Self::Ints,
        weights: LossWeights<Self::View<'_>>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Writes to `hits` (f32) 1 for every row of logits whose target is among its `k` largest, else 0. Of equal logits the
    /// first is the larger.
    fn hits(
        &self,
        classes: usize,
        k: usize,
        logits: Self::View<'_>,
        targets: &Self::Ints,
        hits: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl Work {
    /// Losses of rows, and the gradient of the logits in their place.
    pub fn cross_entropy(s: CrossEntropy, weights: usize) -> Self {
        let passes = if s.gradient { 2 } else { 1 };
        Self::moves("classifier", passes * s.rows * s.classes).on([s.rows, s.classes]).exactly(s.rows + weights)
    }

    /// Whether targets are among the largest.
    pub fn hits(logits: usize, rows: usize) -> Self {
        Self::moves("hits", logits).on([logits]).exactly(rows)
    }
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, close, down, ids, random, rounded, up, up_f32, wide};

    pub fn classifiers<B: Kernels>(b: &B) -> Results {
        let mut results = Vec::new();
        for (rows, classes) in [(1, 1), (31, 65), (3, 50_257), (600, 33)] {
            let logits: Vec<f32> = random(b, 29, rows * classes).iter().map(|x| 4.0 * x + 100.0).collect();
            let logits = rounded(b, &logits);
            let targets = ids(30, rows, classes);
            let tb = b.upload_ints(&targets).unwrap();
            let scale = 0.25;
            let some: Vec<f32> = (0..classes).map(|class| 0.5 + (class % 3) as f32).collect();
            // Among them a row that does not count.
            let of_rows: Vec<f32> = (0..rows).map(|row| (row % 4) as f32 * 0.7).collect();
            for (smoothing, weights, of_rows) in [(0.0, &[][..], &[][..]), (0.2, &some, &of_rows), (0.0, &[], &of_rows)]
            {
                let (wb, rb) = (up_f32(b, weights), up_f32(b, of_rows));
                let (mut want_loss, mut want_d) = (vec![], vec![]);
                for (row, &target) in targets.iter().enumerate() {
                    let x = wide(&logits[row * classes..][..classes]);
                    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let log_total = x.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top;
                    let factor = |weights: &[f32], at: usize| weights.get(at).map_or(1.0, |weight| f64::from(*weight));
                    let weight = factor(weights, target as usize) * factor(of_rows, row);
                    let smoothing = f64::from(smoothing);
                    let wanted = |class: usize| {
                        smoothing / classes as f64 + if class == target as usize { 1.0 - smoothing } else { 0.0 }
                    };
                    let loss: f64 = x.iter().enumerate().map(|(class, x)| wanted(class) * (log_total - x)).sum();
                    want_loss.push(weight * loss);
                    let gradient = |(class, x): (usize, &f64)| (x - log_total).exp() - wanted(class);
                    want_d.extend(x.iter().enumerate().map(|one| f64::from(scale) * weight * gradient(one)));
                }
                for gradient in [false, true] {
                    let (mut lb, mut losses) = (up(b, &logits), up_f32(b, &vec![0.0; rows]));
                    let shape = CrossEntropy { rows, classes, scale, gradient, smoothing };
                    let weights = LossWeights { classes: B::all(&wb), rows: B::all(&rb) };
                    b.cross_entropy(shape, B::all_mut(&mut lb), &tb, weights, B::all_mut(&mut losses)).unwrap();
                    close(b, &losses, &want_loss, "cross-entropy");
                    if gradient {
                        close(b, &lb, &want_d, "cross-entropy gradient");
                    } else {
                        assert_eq!(down(b, &lb), logits);
                    }
                    results.extend([down(b, &losses), down(b, &lb)]);
                }
            }

            // Few values, so that some logits are equal.
            let few: Vec<f32> = ids(31, rows * classes, 7).into_iter().map(|id| id as f32).collect();
            let fb = up(b, &few);
            for k in [1, 5] {
                let mut hits = up_f32(b, &vec![0.5; rows]);
                b.hits(classes, k, B::all(&fb), &tb, B::all_mut(&mut hits)).unwrap();
                let is_hit = |(row, target): (usize, &u32)| {
                    let row = &few[row * classes..][..classes];
                    let mut order: Vec<usize> = (0..classes).collect();
                    order.sort_by(|one, other| row[*other].total_cmp(&row[*one]));
                    f32::from(order[..k.min(classes)].contains(&(*target as usize)))
                };
                assert_eq!(down(b, &hits), targets.iter().enumerate().map(is_hit).collect::<Vec<_>>(), "top {k}");
            }
        }
        let broken = up(b, &[f32::NAN, 1.0]);
        let (tb, mut hits) = (b.upload_ints(&[1]).unwrap(), up_f32(b, &[1.0]));
        b.hits(2, 1, B::all(&broken), &tb, B::all_mut(&mut hits)).unwrap();
        assert_eq!(down(b, &hits), [0.0]);
        results
    }
}
