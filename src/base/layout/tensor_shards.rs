//! Tensor parallelism: the division of tensors among virtual ranks. It computes with integers only.
//!
//! A model is divided among a fixed number of virtual tensor-parallel ranks, each with some heads,
//! some columns of the hidden layers and some rows of the vocabulary. A rank holds consecutive
//! virtual ranks and computes one after the other: a GEMM has the same shape on any rank, and sums
//! over virtual ranks use one tree, so that every number of ranks gives the same bits.
//!
//! A unit has one section for each virtual rank: its parts of sharded tensors, a copy of every
//! whole tensor, and padding. ZeRO shards stay contiguous, and no part of a shard spans two
//! sections. The gradients of whole tensors are added over the virtual ranks of this axis when a
//! virtual rank of the batch ends, before any other sum. Only the first copy counts in norms and
//! checkpoints.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Tensor, part};

/// The division of a tensor among virtual tensor-parallel ranks. Tensors without one are whole in
/// every virtual rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cut {
    /// By rows, of several consecutive segments of equal length. A virtual rank has its share of
    /// each.
    Rows {
        /// The number of segments.
        segments: usize,
    },
    /// By the columns of a matrix.
    Columns,
}

/// The virtual tensor-parallel ranks that a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorShards {
    /// The total number of virtual ranks.
    pub total: usize,
    /// The virtual ranks of this rank.
    pub held: Range<usize>,
    /// Whether sequence parallelism is used: activations outside GEMMs are sharded by rows, too.
    pub sequence: bool,
}

impl TensorShards {
    /// Creates a division with one virtual rank, which has everything.
    pub fn whole() -> Self {
        Self { total: 1, held: 0..1, sequence: false }
    }

    /// Creates the division for rank `rank` of `ranks`, which must divide `total`.
    pub fn of_rank(total: usize, rank: usize, ranks: usize, sequence: bool) -> Self {
        Self { total, held: part(total, rank, ranks), sequence }
    }

    /// Returns the number of ranks that the virtual ranks are divided among.
    pub fn ranks(&self) -> usize {
        self.total / self.held.len()
    }

    /// Returns the elements of each virtual rank of this rank in a buffer that has, one virtual
    /// rank after the other, `rows` rows of its [share](TensorShards::share) of `len` columns.
    /// `stride` returns the distance of rows with a given number of columns.
    pub fn of_virtual_ranks(
        &self,
        rows: usize,
        len: usize,
        stride: impl Fn(usize) -> usize,
    ) -> Vec<Range<usize>> {
        let ends = self.held.clone().scan(0, |end, virtual_rank| {
            let start = *end;
            *end += rows * stride(self.share(len, virtual_rank).len());
            Some(start..*end)
        });
        ends.collect()
    }

    /// Returns which of `rows` rows of activations this rank has under sequence parallelism. Ranks
    /// have all of them if the number is not a multiple of the virtual ranks, which happens only
    /// outside training.
    pub fn rows(&self, rows: usize) -> Range<usize> {
        if !self.divides(rows) {
            return 0..rows;
        }
        rows / self.total * self.held.start..rows / self.total * self.held.end
    }

    /// Returns true if `rows` rows of activations are sharded by sequence parallelism.
    pub fn divides(&self, rows: usize) -> bool {
        self.sequence && self.ranks() > 1 && rows.is_multiple_of(self.total)
    }

    /// Returns which of `len` items a virtual rank has: equally many, but fewer in the last virtual
    /// ranks if their number does not divide `len`.
    pub fn share(&self, len: usize, virtual_rank: usize) -> Range<usize> {
        let most = len.div_ceil(self.total);
        (virtual_rank * most).min(len)..((virtual_rank + 1) * most).min(len)
    }

    /// Returns the scratch elements per row while `len` elements are summed over virtual ranks: the
    /// partial sums of the tree, and an operand with all rows under sequence parallelism. 0 with
    /// one virtual rank, where a GEMM needs no memory but its result's.
    pub fn sums(&self, len: usize) -> usize {
        match self.total {
            1 => 0,
            _ => (1 + self.held.len().ilog2() as usize) * len + self.gathered(len),
        }
    }

    /// Returns the elements per row of a buffer with all gathered rows under sequence parallelism,
    /// and 0 without it.
    pub fn gathered(&self, len: usize) -> usize {
        if self.sequence && self.ranks() > 1 { len } else { 0 }
    }

    /// Returns the elements of a buffer that is sharded under sequence parallelism, per row of the
    /// whole.
    pub fn own(&self, len: usize) -> usize {
        if self.sequence { len.div_ceil(self.ranks()) } else { len }
    }
}

/// A part of a tensor: consecutive elements of it, or of some of its columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardSlab {
    /// The columns; `None` for all.
    pub columns: Option<Range<usize>>,
    /// The flat elements of the matrix of these columns.
    pub range: Range<usize>,
}

impl Tensor {
    /// Returns the parts of the tensor that a virtual rank has, in storage order.
    pub fn slabs(&self, slices: &TensorShards, virtual_rank: usize) -> Vec<ShardSlab> {
        let rows = self.shape.first().copied().unwrap_or(1);
        let columns = self.len() / rows.max(1);
        match self.cut.filter(|_| slices.total > 1) {
            None => vec![ShardSlab { columns: None, range: 0..self.len() }],
            Some(Cut::Rows { segments }) => {
                let of_segment = rows / segments;
                let share = slices.share(of_segment, virtual_rank);
                let slabs = (0..segments).map(|segment| {
                    let first = segment * of_segment;
                    let range = (first + share.start) * columns..(first + share.end) * columns;
                    ShardSlab { columns: None, range }
                });
                slabs.collect()
            }
            Some(Cut::Columns) => {
                let share = slices.share(columns, virtual_rank);
                vec![ShardSlab { range: 0..rows * share.len(), columns: Some(share) }]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Init;

    #[test]
    fn virtual_ranks_share_rows_segments_and_columns() {
        let slices = TensorShards::of_rank(2, 0, 2, false);
        let of = |shape: &[usize], cut, virtual_rank| {
            let slabs = Tensor::new("w", shape, Init::Zeros).cut(cut).slabs(&slices, virtual_rank);
            slabs.into_iter().map(|slab| (slab.columns, slab.range)).collect::<Vec<_>>()
        };
        // A vocabulary of five: three rows, then two.
        assert_eq!(of(&[5, 4], Cut::Rows { segments: 1 }, 0), [(None, 0..12)]);
        assert_eq!(of(&[5, 4], Cut::Rows { segments: 1 }, 1), [(None, 12..20)]);
        // Queries, keys and values of two heads.
        assert_eq!(
            of(&[6, 2], Cut::Rows { segments: 3 }, 1),
            [(None, 2..4), (None, 6..8), (None, 10..12)]
        );
        assert_eq!(
            of(&[6], Cut::Rows { segments: 3 }, 0),
            [(None, 0..1), (None, 2..3), (None, 4..5)]
        );
        assert_eq!(of(&[3, 4], Cut::Columns, 1), [(Some(2..4), 0..6)]);
    }

    #[test]
    fn ranks_hold_consecutive_virtual_ranks() {
        let slices = TensorShards::of_rank(8, 1, 4, true);
        assert_eq!((slices.held.clone(), slices.ranks(), slices.own(64)), (2..4, 4, 16));
        assert_eq!((slices.rows(64), slices.rows(7)), (16..32, 0..7));
        // A virtual rank has three of 23 columns, the last one two.
        assert_eq!(slices.of_virtual_ranks(10, 23, |columns| columns), [0..30, 30..60]);
        assert_eq!(
            TensorShards::of_rank(8, 3, 4, true).of_virtual_ranks(10, 23, |columns| columns),
            [0..30, 30..50]
        );
        assert_eq!(
            TensorShards::of_rank(8, 3, 4, true).of_virtual_ranks(10, 23, |columns| columns + 5),
            [0..80, 80..150]
        );
        assert_eq!(TensorShards::whole().own(64), 64);
    }
}
