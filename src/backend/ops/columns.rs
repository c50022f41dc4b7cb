//! Copies of columns.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// Columns of rows that are copied from one matrix to another.
#[derive(Debug, Clone, Copy)]
pub struct Columns {
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
    fn copy_columns(&self, shape: Columns, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
}

impl Work {
    /// A copy of columns.
    pub fn copy_columns(s: Columns) -> Self {
        Self::moves("copy of columns", 2 * s.rows * s.count).on([s.rows, s.count])
    }
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, down, random, up};

    pub fn columns<B: Kernels>(b: &B) -> Results {
        for (rows, count, from, to) in [(1, 1, [1, 0], [1, 0]), (33, 3, [7, 2], [5, 1]), (700, 31, [31, 0], [65, 34])] {
            let (x, y) = (random(b, 67, rows * from[0]), random(b, 68, rows * to[0]));
            let (xb, mut yb, mut want) = (up(b, &x), up(b, &y), y);
            for (row, column) in (0..rows).flat_map(|row| (0..count).map(move |column| (row, column))) {
                want[row * to[0] + to[1] + column] = x[row * from[0] + from[1] + column];
            }
            b.copy_columns(Columns { rows, count, from, to }, B::all(&xb), B::all_mut(&mut yb)).unwrap();
            assert_eq!(down(b, &yb), want);
        }
        vec![]
    }
}
