//! Strided copies of columns.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// A range of columns that is copied from the rows of one matrix to the rows of another.
#[derive(Debug, Clone, Copy)]
pub struct StridedCopy {
    /// The number of rows of both matrices.
    pub rows: usize,
    /// The number of columns copied.
    pub count: usize,
    /// The columns of a source row, and the first one copied.
    pub from: [usize; 2],
    /// The columns of a target row, and the first one written.
    pub to: [usize; 2],
}

/// Strided copies of columns.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ColumnsOps: Backend {
    /// Copies columns of every row; the other columns of `y` are unchanged.
    fn copy_columns(
        &self,
        shape: StridedCopy,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of a copy of columns.
    pub fn copy_columns(s: StridedCopy) -> Self {
        Self::new("copy of columns", 2 * s.rows * s.count).with_shape([s.rows, s.count])
    }
}
