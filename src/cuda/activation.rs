//! Elementwise activation functions.

use super::Cuda;
use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{Activation, ActivationOps, KernelCost};

impl ActivationOps for Cuda {
    fn activation(&self, f: Activation, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::activation(f, x.len));
        let args = [x.into(), (&y).into(), Arg::long(x.len), f.parameter().into()];
        assert!(x.len == y.len && x.element == y.element, "{f:?}");
        let grid = Grid::over(x.len.div_ceil(8));
        self.launch_for(x.element, "activation.cu", f.names().map, grid, &args)
    }

    fn activation_backward(&self, f: Activation, x: View<'_>, dy: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::activation_backward(f, x.len));
        let args = [x.into(), (&dy).into(), Arg::long(x.len), f.parameter().into()];
        assert!(x.len == dy.len && x.element == dy.element, "the gradient of {f:?}");
        let grid = Grid::over(x.len.div_ceil(8));
        self.launch_for(x.element, "activation.cu", f.names().scale, grid, &args)
    }
}
