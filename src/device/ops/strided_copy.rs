//! Copies of columns.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Columns of rows that are copied from one matrix to another.
#[derive(Debug, Clone, Copy)]
pub struct StridedCopy {
    /// Rows of both.
    pub rows: usize,
    /// Columns copied.
    pub count: usize,
    /// Columns of a source row, and the first one copied.
    pub from: [usize; 2],
    /// Columns of a target row, and where the first one goes.
    pub to: [usize; 2],
}

/// Copies of columns.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ColumnsOps: Backend {
    /// Copies columns of rows; those of `y` between them are left alone.
    fn copy_columns(
        &self,
        shape: StridedCopy,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// A copy of columns.
    pub fn copy_columns(s: StridedCopy) -> Self {
        Self::moves("copy of columns", 2 * s.rows * s.count).on([s.rows, s.count])
    }
}
