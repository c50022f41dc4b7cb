//! Cross-entropy and hits of classes.

use super::grid::Grid;
use super::launch::Arg;
use super::memory::{Element, View, ViewMut};
use super::{Cuda, CudaInts};
use crate::backend::{ClassifierOps, CrossEntropy, LossWeights, Work};
use crate::error::{Error, Result};

/// Bytes of logits that a block of `cross_entropy.cu` keeps in shared memory at most: two blocks fit a multiprocessor of 228 KiB,
/// one those of 100 KiB and more.
const KEPT_ROW: usize = 99 << 10;

impl ClassifierOps for Cuda {
    fn cross_entropy(
        &self,
        shape: CrossEntropy,
        logits: ViewMut<'_>,
        targets: &CudaInts,
        weights: LossWeights<View<'_>>,
        losses: ViewMut<'_>,
    ) -> Result<()> {
        let LossWeights { classes: of_classes, rows: of_rows } = weights;
        let _launch = self.launched(Work::cross_entropy(shape, of_classes.len + of_rows.len));
        let CrossEntropy { rows, classes, scale, gradient, smoothing } = shape;
        if rows != targets.len() || rows * classes != logits.len {
            return Err(Error::internal(format!("{rows} × {classes} logits for {} targets", targets.len())));
        }
        for (weights, len) in [(of_classes, classes), (of_rows, rows)] {
            assert!(weights.len == 0 || weights.len == len && weights.element == Element::F32, "{len} weights");
        }
        let args = [(&logits).into(), targets.into(), of_classes.into(), of_rows.into(), (&losses).into()];
        let row = (classes + self.pack()) * self.element().size();
        let keep = gradient && row <= KEPT_ROW;
        let sizes = [classes.into(), scale.into(), smoothing.into()];
        let flags = [gradient, keep].map(|flag| Arg::Int(i32::from(flag)));
        let grid = Grid { shared: if keep { row as u32 } else { 0 }, ..Grid::new(rows, 512) };
        self.launch("cross_entropy.cu", "cross_entropy", grid, &[&args[..], &sizes, &flags].concat())
    }

    fn hits(&self, classes: usize, k: usize, logits: View<'_>, targets: &CudaInts, hits: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::hits(logits.len, hits.len));
        let rows = targets.len();
        assert!(logits.len == rows * classes && hits.len == rows, "{rows} × {classes} logits");
        let args = [logits.into(), targets.into(), (&hits).into(), rows.into(), classes.into(), k.into()];
        self.launch("cross_entropy.cu", "hits", Grid::new(rows.div_ceil(4), 128), &args)
    }
}
