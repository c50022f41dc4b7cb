//! Cross-entropy and hits of classes.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Softmax cross-entropy over rows of logits.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy {
    /// Rows of logits.
    pub rows: usize,
    /// Classes a row.
    pub classes: usize,
    /// Elements from a row of logits to the next, as of [`Linear`](super::Linear).
    pub stride: usize,
    /// Factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Replace the logits by their gradient; without it they are left alone.
    pub gradient: bool,
    /// Part of the target that is spread evenly over all classes (Szegedy et al., 2016); 0 is none.
    pub smoothing: f32,
}

/// Logits of some of the classes: a part of the columns of all.
#[derive(Debug, Clone, Copy)]
pub struct LogitsPart {
    /// Rows of logits.
    pub rows: usize,
    /// Classes of the part, at least one.
    pub classes: usize,
    /// Elements from a row of the part's logits to the next, as of [`Linear`](super::Linear).
    pub stride: usize,
    /// Class of its first column; those after it follow.
    pub first: usize,
}

impl LogitsPart {
    /// Numbers that [`ClassifierOps::softmax_part`] has for each row.
    pub const STATS: usize = 4;

    /// The part's column of a class; none if it is in another part.
    pub fn column(self, class: u32) -> Option<usize> {
        (class as usize).checked_sub(self.first).filter(|column| *column < self.classes)
    }
}

/// As [`CrossEntropy`], with the logits of one part of the classes at hand.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropyPart {
    /// The part at hand.
    pub part: LogitsPart,
    /// Parts that all classes are cut into.
    pub parts: usize,
    /// Classes of all parts.
    pub classes: usize,
    /// Factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Replace the part's logits by their gradient; without it they are left alone.
    pub gradient: bool,
    /// Part of the target that is spread evenly over all classes; 0 is none.
    pub smoothing: f32,
}

/// Factors of the losses of a [`CrossEntropy`] and of their gradients, windows of f32; an empty one
/// is none.
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
    /// Writes the loss of every row (`-log softmax(logits)[target]`, unscaled) to `losses`; with
    /// [`CrossEntropy::gradient`], overwrites the logits by their scaled gradient. Both times
    /// `weights`.
    fn cross_entropy(
        &self,
        shape: CrossEntropy,
        logits: Self::ViewMut<'_>,
        targets: &Self::IndexBuf,
        weights: LossWeights<Self::View<'_>>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Writes to `stats` (f32, rows × [`LogitsPart::STATS`]) what the loss of each row needs of
    /// this part: the largest logit, `Σ exp(logit - largest)`, the target's logit (0 if the target
    /// is in another part) and the sum of all logits. Where all are -∞ the largest is [`f32::MIN`].
    /// Targets are numbered among the classes of all parts.
    fn softmax_part(
        &self,
        shape: LogitsPart,
        logits: Self::View<'_>,
        targets: &Self::IndexBuf,
        stats: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// As [`ClassifierOps::cross_entropy`], of all classes, with the logits of a part of them and
    /// the `stats` of all parts (parts × rows × [`LogitsPart::STATS`]), which are merged in their
    /// order. Weights of classes are those of all. The losses have the same bits on every part.
    fn cross_entropy_part(
        &self,
        shape: CrossEntropyPart,
        stats: Self::View<'_>,
        logits: Self::ViewMut<'_>,
        targets: &Self::IndexBuf,
        weights: LossWeights<Self::View<'_>>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Writes to `hits` (f32) 1 for every row of logits whose target is among its `k` largest, else
    /// 0. Of equal logits the first is the larger. From a row of logits to the next it is `stride`
    /// elements, as of [`Linear`](super::Linear).
    fn hits(
        &self,
        classes: usize,
        stride: usize,
        k: usize,
        logits: Self::View<'_>,
        targets: &Self::IndexBuf,
        hits: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Losses of rows, and the gradient of the logits in their place.
    pub fn cross_entropy(s: CrossEntropy, weights: usize) -> Self {
        let passes = if s.gradient { 2 } else { 1 };
        Self::moves("classifier", passes * s.rows * s.classes)
            .on([s.rows, s.classes])
            .exactly(s.rows + weights)
    }

    /// Sums over some of the classes.
    pub fn softmax_part(s: LogitsPart) -> Self {
        let stats = s.rows * LogitsPart::STATS;
        Self::moves("classifier, sums of a part", s.rows * s.classes)
            .on([s.rows, s.classes])
            .exactly(stats)
    }

    /// Losses of rows from the sums of all parts, and the gradient of a part's logits in their
    /// place.
    pub fn cross_entropy_part(s: CrossEntropyPart, weights: usize) -> Self {
        let LogitsPart { rows, classes, .. } = s.part;
        let passes = if s.gradient { 2 } else { 0 };
        let stats = s.parts * rows * LogitsPart::STATS;
        let moved = Self::moves("classifier, part", passes * rows * classes);
        moved.on([rows, classes, s.parts]).exactly(stats + rows + weights)
    }

    /// Whether targets are among the largest.
    pub fn hits(logits: usize, rows: usize) -> Self {
        Self::moves("hits", logits).on([logits]).exactly(rows)
    }
}
