//! The dot products of all pairs of rows.

use super::Cuda;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{DotInteraction, DotInteractionOps, KernelCost};

impl DotInteractionOps for Cuda {
    fn dot_interaction(&self, s: DotInteraction, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::dot_interaction(s));
        let outputs = s.samples * s.outputs();
        assert!(
            x.len == s.samples * s.rows * s.width && y.len == outputs && x.element == y.element,
            "{s:?}"
        );
        let args = [x.into(), (&y).into(), s.samples.into(), s.rows.into(), s.width.into()];
        self.launch("dot_interaction.cu", "pair_products", Grid::over(outputs), &args)
    }

    fn dot_interaction_backward(
        &self,
        s: DotInteraction,
        x: View<'_>,
        dy: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::dot_interaction_backward(s));
        assert!(
            x.len == dx.len
                && dx.len == s.samples * s.rows * s.width
                && dy.len == s.samples * s.outputs(),
            "{s:?}"
        );
        let args =
            [x.into(), dy.into(), (&dx).into(), s.samples.into(), s.rows.into(), s.width.into()];
        self.launch("dot_interaction.cu", "pair_products_backward", Grid::over(dx.len), &args)
    }
}
