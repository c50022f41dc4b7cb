//! Dropout.

use super::Cuda;
use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::ViewMut;
use hpctrain_base::error::Result;
use hpctrain_device::{Dropout, DropoutOps, KernelCost};

impl DropoutOps for Cuda {
    fn dropout(&self, mask: Dropout, x: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::dropout(x.len));
        if mask.rate == 0.0 {
            return Ok(());
        }
        let dropped_below = (f64::from(mask.rate) * 4_294_967_296.0) as u32;
        let kept = 1.0 / (1.0 - mask.rate);
        let [offset, key] = [mask.offset, mask.key].map(Arg::UnsignedLong);
        let args =
            [(&x).into(), Arg::long(x.len), offset, key, Arg::Unsigned(dropped_below), kept.into()];
        self.launch("dropout.cu", "dropout", Grid::over(x.len.div_ceil(4)), &args)
    }
}
