//! Sums over rows and over all elements, in an order that depends only on the lengths.

use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{Element, View, ViewMut};
use super::{Cuda, Scalar};

use hpctrain_base::error::Result;
use hpctrain_device::{Backend, MemoryKind};

/// The rows of a chunk. Chunks are summed first, then their sums, in an order that depends only on
/// the number of rows.
pub const CHUNK_ROWS: usize = 128;

/// The number of elements that one block of `sum.cuh` adds.
const SUM_CHUNK: usize = 16_384;

/// Returns the number of elements that a thread moves at a time: `Pack<elem>::SIZE` of `vector.cuh`.
pub fn pack(element: Element) -> usize {
    16 / element.size()
}

/// Returns the grid of `sum_rows` in `rows.cuh`.
pub fn row_chunks(element: Element, chunks: usize, width: usize) -> Grid {
    Grid::plane(chunks, width.div_ceil(32 * pack(element)), (32, 8, 1))
}

impl Cuda {
    /// Computes `out += Σ` over the rows of `x`.
    pub(super) fn add_columns(&self, x: View<'_>, rows: usize, out: &ViewMut<'_>) -> Result<()> {
        let width = out.len;
        let chunks = rows.div_ceil(CHUNK_ROWS);
        let partial = self.alloc_f32(MemoryKind::Activations, chunks * width)?;
        let partial = Self::all(&partial);
        let args = [x.into(), partial.into(), rows.into(), width.into()];
        self.launch(
            "column_sum.cu",
            "column_partial",
            row_chunks(self.element(), chunks, width),
            &args,
        )?;
        self.finish_columns(partial, out, None, chunks, width)
    }

    /// Computes `out += Σ` over the chunks of `partial`, which are `stride` elements apart, and the
    /// same for `second` and the columns after those of `out`. A column has one thread for each
    /// chunk, up to 32, so the order depends only on the number of chunks.
    pub(super) fn finish_columns(
        &self,
        partial: View<'_>,
        out: &ViewMut<'_>,
        second: Option<&ViewMut<'_>>,
        chunks: usize,
        stride: usize,
    ) -> Result<()> {
        let columns = out.len * (1 + usize::from(second.is_some()));
        let parts = chunks.next_power_of_two().min(32) as u32;
        let args = [partial.into(), out.into(), second.map_or(Arg::Pointer(0), Arg::from)];
        let sizes = [chunks.into(), out.len.into(), stride.into()];
        let grid = Grid::plane(columns.div_ceil(32), 1, (32, parts, 1));
        self.launch("column_sum.cu", "column_finish", grid, &[args, sizes].concat())
    }

    /// Returns the sum of the partial sums that `of_chunks(grid, partial)` writes: an f64 for every
    /// chunk of `len` elements.
    pub(super) fn sum_chunks(
        &self,
        len: usize,
        of_chunks: impl FnOnce(Grid, Arg) -> Result<()>,
    ) -> Result<Scalar> {
        let scalar = self.0.scalars.begin()?;
        let blocks = len.div_ceil(SUM_CHUNK).max(1);
        // An f64 has the size of two elements.
        let partial = self.alloc_f32(MemoryKind::Activations, 2 * blocks)?;
        let partial = Arg::from(Self::all(&partial));
        of_chunks(Grid::new(blocks, 256), partial)?;
        let args = [partial, Arg::Pointer(scalar.pointer()), blocks.into()];
        self.launch("sum.cu", "sum_finish", Grid::new(1, 256), &args)?;
        Ok(scalar)
    }
}
