//! Gated activations.

use super::Cuda;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, SwigluOps};

impl SwigluOps for Cuda {
    fn swiglu(&self, width: usize, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::swiglu(y.len));
        let args = [x.into(), (&y).into(), (y.len / width).into(), width.into()];
        self.launch("swiglu.cu", "swiglu", Grid::over(y.len.div_ceil(8)), &args)
    }

    fn swiglu_backward(&self, width: usize, x: ViewMut<'_>, dy: View<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::swiglu_backward(dy.len));
        let args = [(&x).into(), dy.into(), (dy.len / width).into(), width.into()];
        self.launch("swiglu.cu", "swiglu_backward", Grid::over(dy.len.div_ceil(8)), &args)
    }
}
