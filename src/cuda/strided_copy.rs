//! Copies of columns.

use super::Cuda;
use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{ColumnsOps, KernelCost, StridedCopy};

impl ColumnsOps for Cuda {
    fn copy_columns(&self, shape: StridedCopy, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::copy_columns(shape));
        let StridedCopy { rows, count, from, to } = shape;
        assert!(
            x.len == rows * from[0] && y.len == rows * to[0] && x.element == y.element,
            "{shape:?}"
        );
        let sizes = [rows, count, from[0], from[1], to[0], to[1]].map(Arg::from);
        let args = [&[x.into(), (&y).into()], &sizes[..]].concat();
        let grid = Grid::over(rows * count);
        self.launch_for(x.element, "strided_copy.cu", "copy_columns", grid, &args)
    }
}
