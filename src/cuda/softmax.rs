//! The softmax of rows.

use super::Cuda;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, SoftmaxOps};

impl SoftmaxOps for Cuda {
    fn softmax(&self, width: usize, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::softmax(x.len));
        let rows = x.len / width;
        let args = [x.into(), (&y).into(), rows.into(), width.into()];
        let grid = Grid::new(rows.div_ceil(4), 128);
        self.launch_for(x.element, "softmax.cu", "softmax", grid, &args)
    }

    fn softmax_backward(&self, width: usize, y: View<'_>, dy: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::softmax_backward(y.len));
        let rows = y.len / width;
        let args = [y.into(), (&dy).into(), rows.into(), width.into()];
        let grid = Grid::new(rows.div_ceil(4), 128);
        self.launch_for(y.element, "softmax.cu", "softmax_backward", grid, &args)
    }
}
