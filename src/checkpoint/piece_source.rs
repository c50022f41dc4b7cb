//! Sources of the values that a run restores.

use std::ops::Range;

use hpctrain_base::error::Result;

/// A source of the elements of all tensors: the files of a checkpoint, or in-memory checkpoints.
pub trait PieceSource {
    /// Reads elements `range` of a tensor, or of the matrix `tensor[:, columns]` if columns are
    /// given, into `out`, which has the same length. Part 0 is the parameters, part k the k-th state
    /// buffer.
    ///
    /// # Errors
    /// Returns an error if the elements cannot be read, or do not exist.
    fn read(
        &mut self,
        tensor: &str,
        part: usize,
        columns: Option<&Range<usize>>,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()>;
}
