//! Cross-entropy and top-k hits of classes.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Softmax cross-entropy over rows of logits.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy {
    /// The number of rows of logits.
    pub rows: usize,
    /// The number of classes.
    pub classes: usize,
    /// The leading dimension of the logits, as [`Linear`](super::Linear) has it.
    pub stride: usize,
    /// The factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Whether to replace the logits by their gradient; otherwise they are unchanged.
    pub gradient: bool,
    /// The part of the target that is spread evenly over all classes (label smoothing, Szegedy et
    /// al., 2016); 0 disables it.
    pub smoothing: f32,
}

/// The logits of some of the classes: a shard of the columns of all.
#[derive(Debug, Clone, Copy)]
pub struct LogitsPart {
    /// The number of rows of logits.
    pub rows: usize,
    /// The number of classes of the part, at least one.
    pub classes: usize,
    /// The leading dimension of the part's logits, as [`Linear`](super::Linear) has it.
    pub stride: usize,
    /// The class of its first column; the others follow.
    pub first_class: usize,
}

impl LogitsPart {
    /// The number of values that [`ClassifierOps::softmax_part`] writes for each row.
    pub const STATS: usize = 4;

    /// Returns the part's column of a class, or `None` if it is in another part.
    pub fn column(self, class: u32) -> Option<usize> {
        (class as usize).checked_sub(self.first_class).filter(|column| *column < self.classes)
    }
}

/// Softmax cross-entropy with the logits of one part of the classes (vocabulary-parallel).
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropyPart {
    /// The part whose logits are given.
    pub part: LogitsPart,
    /// The number of parts that all classes are split into.
    pub parts: usize,
    /// The number of classes of all parts.
    pub classes: usize,
    /// The factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Whether to replace the part's logits by their gradient; otherwise they are unchanged.
    pub gradient: bool,
    /// The part of the target that is spread evenly over all classes (label smoothing); 0 disables
    /// it.
    pub smoothing: f32,
}

/// Factors of the losses of a [`CrossEntropy`] and of their gradients, windows of f32; an empty
/// window means no factors.
#[derive(Debug, Clone, Copy)]
pub struct LossWeights<V> {
    /// A factor for each class.
    pub classes: V,
    /// A factor for each row.
    pub rows: V,
}

/// Cross-entropy and top-k hits of classes.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ClassifierOps: Backend {
    /// Writes the loss of every row (`-log softmax(logits)[target]`, unscaled) to `losses`; with
    /// [`CrossEntropy::gradient`], overwrites the logits with their scaled gradient. `weights`
    /// apply to both.
    fn cross_entropy(
        &self,
        shape: CrossEntropy,
        logits: Self::ViewMut<'_>,
        targets: &Self::IndexBuf,
        weights: LossWeights<Self::View<'_>>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Writes to `stats` (f32, rows × [`LogitsPart::STATS`]) what the loss of each row needs from
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
    /// Computes [`ClassifierOps::cross_entropy`] over all classes from the logits of a part of them
    /// and the `stats` of all parts (parts × rows × [`LogitsPart::STATS`]), which are merged in
    /// order. Class weights are those of all classes. The losses have the same bits on every part.
    fn cross_entropy_part(
        &self,
        shape: CrossEntropyPart,
        stats: Self::View<'_>,
        logits: Self::ViewMut<'_>,
        targets: &Self::IndexBuf,
        weights: LossWeights<Self::View<'_>>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Writes 1 to `hits` (f32) for every row of logits whose target is among its `k` largest, else
    /// 0. Of equal logits the first is the larger. `stride` is the leading dimension of the logits,
    /// as [`Linear`](super::Linear) has it.
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
    /// Returns the cost of the losses of rows, and of the gradient of the logits in place.
    pub fn cross_entropy(s: CrossEntropy, weights: usize) -> Self {
        let passes = if s.gradient { 2 } else { 1 };
        Self::new("classifier", passes * s.rows * s.classes)
            .with_shape([s.rows, s.classes])
            .with_f32_elements(s.rows + weights)
    }

    /// Returns the cost of the statistics of some of the classes.
    pub fn softmax_part(s: LogitsPart) -> Self {
        let stats = s.rows * LogitsPart::STATS;
        Self::new("classifier, sums of a part", s.rows * s.classes)
            .with_shape([s.rows, s.classes])
            .with_f32_elements(stats)
    }

    /// Returns the cost of the losses of rows from the statistics of all parts, and of the gradient
    /// of a part's logits in place.
    pub fn cross_entropy_part(s: CrossEntropyPart, weights: usize) -> Self {
        let LogitsPart { rows, classes, .. } = s.part;
        let passes = if s.gradient { 2 } else { 0 };
        let stats = s.parts * rows * LogitsPart::STATS;
        let moved = Self::new("classifier, part", passes * rows * classes);
        moved.with_shape([rows, classes, s.parts]).with_f32_elements(stats + rows + weights)
    }

    /// Returns the cost of finding top-k hits.
    pub fn hits(logits: usize, rows: usize) -> Self {
        Self::new("hits", logits).with_shape([logits]).with_f32_elements(rows)
    }
}
