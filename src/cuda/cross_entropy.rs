//! Cross-entropy, and top-k hits of classes.

use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{Element, View, ViewMut};
use super::reduce::pack;
use super::{Cuda, CudaInts};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{
    ClassifierOps, CrossEntropy, CrossEntropyPart, KernelCost, LogitsPart, LossWeights,
};

/// The most bytes of logits that a block of `cross_entropy.cu` keeps in shared memory and reads
/// once. Longer rows (more than 50,424 classes in bf16) are read twice. Two such blocks fit a
/// multiprocessor with 228 KiB, one fits those with 100 KiB or more: a block may have 99 KiB of
/// these, of which the kernel declares 256 bytes itself.
const KEPT_ROW: usize = (99 << 10) - 512;

fn check_weights(weights: LossWeights<View<'_>>, classes: usize, rows: usize) {
    for (weights, len) in [(weights.classes, classes), (weights.rows, rows)] {
        assert!(
            weights.len == 0 || weights.len == len && weights.element == Element::F32,
            "{len} weights"
        );
    }
}

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
        let _launch =
            self.profile_launch(KernelCost::cross_entropy(shape, of_classes.len + of_rows.len));
        let CrossEntropy { rows, classes, stride, scale, gradient, smoothing } = shape;
        if rows != targets.len() || rows * stride != logits.len || stride < classes {
            return Err(Error::internal(format!(
                "{rows} × {classes} logits for {} targets",
                targets.len()
            )));
        }
        check_weights(weights, classes, rows);
        let args =
            [(&logits).into(), targets.into(), of_classes.into(), of_rows.into(), (&losses).into()];
        let row = (classes + pack(logits.element)) * logits.element.size();
        let keep = (gradient || smoothing > 0.0) && row <= KEPT_ROW;
        let sizes = [classes.into(), stride.into(), scale.into(), smoothing.into()];
        let flags = [gradient, keep].map(|flag| Arg::Int(i32::from(flag)));
        let grid = Grid { shared: if keep { row as u32 } else { 0 }, ..Grid::new(rows, 512) };
        self.launch_for(
            logits.element,
            "cross_entropy.cu",
            "cross_entropy",
            grid,
            &[&args[..], &sizes, &flags].concat(),
        )
    }

    fn softmax_part(
        &self,
        shape: LogitsPart,
        logits: View<'_>,
        targets: &CudaInts,
        stats: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::softmax_part(shape));
        let LogitsPart { rows, classes, stride, first_class: first } = shape;
        let is_long = logits.len == rows * stride && stride >= classes;
        let fits = is_long && targets.len() == rows && stats.len == rows * LogitsPart::STATS;
        assert!(fits && stats.element == Element::F32, "sums of {rows} × {classes} logits");
        let args = [
            logits.into(),
            targets.into(),
            (&stats).into(),
            classes.into(),
            stride.into(),
            first.into(),
        ];
        self.launch("cross_entropy.cu", "softmax_part", Grid::new(rows, 512), &args)
    }

    fn cross_entropy_part(
        &self,
        shape: CrossEntropyPart,
        stats: View<'_>,
        logits: ViewMut<'_>,
        targets: &CudaInts,
        weights: LossWeights<View<'_>>,
        losses: ViewMut<'_>,
    ) -> Result<()> {
        let LossWeights { classes: of_classes, rows: of_rows } = weights;
        let _launch = self
            .profile_launch(KernelCost::cross_entropy_part(shape, of_classes.len + of_rows.len));
        let CrossEntropyPart { part, parts, classes, scale, gradient, smoothing } = shape;
        let LogitsPart { rows, stride, first_class: first, .. } = part;
        let is_long = logits.len == rows * stride && stride >= part.classes;
        let fits = is_long && targets.len() == rows && losses.len == rows;
        assert!(fits, "{rows} × {} logits", part.classes);
        let all = parts * rows * LogitsPart::STATS;
        let is_wide = stats.element == Element::F32;
        assert!(stats.len == all && is_wide, "sums of {parts} parts");
        check_weights(weights, classes, rows);
        let args = [
            stats.into(),
            (&logits).into(),
            targets.into(),
            of_classes.into(),
            of_rows.into(),
            (&losses).into(),
        ];
        let sizes = [parts, part.classes, stride, first, classes].map(Arg::from);
        let factors = [scale.into(), smoothing.into(), Arg::Int(i32::from(gradient))];
        let args = [&args[..], &sizes, &factors].concat();
        self.launch("cross_entropy.cu", "cross_entropy_part", Grid::new(rows, 512), &args)
    }

    fn hits(
        &self,
        classes: usize,
        stride: usize,
        k: usize,
        logits: View<'_>,
        targets: &CudaInts,
        hits: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::hits(logits.len, hits.len));
        let rows = targets.len();
        assert!(
            logits.len == rows * stride && stride >= classes && hits.len == rows,
            "{rows} × {classes} logits"
        );
        let args = [
            logits.into(),
            targets.into(),
            (&hits).into(),
            rows.into(),
            classes.into(),
            stride.into(),
            k.into(),
        ];
        let grid = Grid::new(rows.div_ceil(4), 128);
        self.launch_for(logits.element, "cross_entropy.cu", "hits", grid, &args)
    }
}
