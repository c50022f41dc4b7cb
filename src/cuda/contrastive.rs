//! The supervised contrastive loss.

use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{Element, View, ViewMut};
use super::{Cuda, CudaInts};
use hpctrain_base::error::Result;
use hpctrain_device::{Contrastive, ContrastiveOps, KernelCost};

impl ContrastiveOps for Cuda {
    fn contrastive(
        &self,
        shape: Contrastive,
        similarities: ViewMut<'_>,
        classes: &CudaInts,
        weights: View<'_>,
        losses: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::contrastive(shape, weights.len));
        let Contrastive { rows, columns, first, scale, gradient } = shape;
        let fits = similarities.len == rows * columns
            && classes.len() == columns
            && losses.len == rows
            && first + rows <= columns
            && (weights.len == 0 || weights.len == rows && weights.element == Element::F32);
        assert!(fits && losses.element == Element::F32, "{shape:?}");
        let args = [
            (&similarities).into(),
            classes.into(),
            weights.into(),
            (&losses).into(),
            columns.into(),
            first.into(),
            scale.into(),
            Arg::Int(i32::from(gradient)),
        ];
        let element = similarities.element;
        self.launch_for(element, "contrastive.cu", "contrastive", Grid::new(rows, 256), &args)
    }
}
