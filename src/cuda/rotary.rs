//! Rotary position embeddings (RoPE).

use super::Cuda;
use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, Rotary, RotaryOps};

impl RotaryOps for Cuda {
    fn rotary(&self, shape: Rotary, table: View<'_>, x: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::rotary(
            shape.batch * shape.time * shape.heads * shape.head_width,
        ));
        let Rotary { batch, time, heads, head_width, width, inverse: back } = shape;
        let rows = batch * time;
        let half = head_width / 2;
        let args = [
            table.into(),
            (&x).into(),
            rows.into(),
            time.into(),
            heads.into(),
            half.into(),
            width.into(),
        ];
        let args = [&args[..], &[Arg::Int(i32::from(back))]].concat();
        self.launch("rotary.cu", "rotary", Grid::over(rows * heads * half), &args)
    }
}
