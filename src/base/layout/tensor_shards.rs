//! The division of blocks into virtual ranks along the tensor axis. Integers in, integers out.
//!
//! A network is cut into a fixed number of virtual tensor ranks, each with some heads, some columns of the
//! hidden layers and some rows of the vocabulary. A rank holds consecutive virtual ranks and computes one
//! after the other: a product has the same shape whichever rank computes it, and sums over virtual ranks
//! are added in one tree, so that every number of ranks gives the same bits.

use std::ops::Range;

use super::{Tensor, part};

/// The division of a tensor among virtual tensor ranks. A tensor without one is whole in every virtual rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// By rows. So many equal segments lie one after the other, and a virtual rank has its share of each.
    Rows {
        /// Segments.
        segments: usize,
    },
    /// By columns, of a matrix.
    Columns,
}

/// The virtual tensor ranks that a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorShards {
    /// Virtual ranks in all.
    pub total: usize,
    /// Those of this rank.
    pub held: Range<usize>,
    /// Whether rows between the blocks' products are divided among ranks too: sequence parallelism.
    pub sequence: bool,
}

impl TensorShards {
    /// One virtual rank, which is everything.
    pub fn whole() -> Self {
        Self { total: 1, held: 0..1, sequence: false }
    }

    /// The virtual ranks of rank `rank` of `ranks`, which divide `total`.
    pub fn of_rank(total: usize, rank: usize, ranks: usize, sequence: bool) -> Self {
        Self { total, held: part(total, rank, ranks), sequence }
    }

    /// Ranks that divide the virtual ranks among themselves.
    pub fn ranks(&self) -> usize {
        self.total / self.held.len()
    }

    /// The elements of each virtual rank of this rank, in a buffer with the rows of one virtual rank's
    /// [share](TensorShards::share) of `len` columns after those of another's; from a row of so
    /// many columns to the next it is `stride` elements.
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

    /// Of so many rows of the stream, those of this rank. Ranks do not divide them where they are
    /// no multiple of the virtual ranks, which happens outside training only.
    pub fn rows(&self, rows: usize) -> Range<usize> {
        if !self.divides(rows) {
            return 0..rows;
        }
        rows / self.total * self.held.start..rows / self.total * self.held.end
    }

    /// Whether ranks divide so many rows of the stream.
    pub fn divides(&self, rows: usize) -> bool {
        self.sequence && self.ranks() > 1 && rows.is_multiple_of(self.total)
    }

    /// Of `len` things in a row, those of a virtual rank: equally many, but fewer in the last virtual ranks where
    /// they do not divide.
    pub fn share(&self, len: usize, virtual_rank: usize) -> Range<usize> {
        let most = len.div_ceil(self.total);
        (virtual_rank * most).min(len)..((virtual_rank + 1) * most).min(len)
    }

    /// Elements of a row that live at once while `len` elements are summed over virtual ranks: the partial
    /// sums of a tree, and all rows of an operand where ranks divide them. None without virtual ranks,
    /// where a product needs no memory but its result's.
    pub fn sums(&self, len: usize) -> usize {
        match self.total {
            1 => 0,
            _ => (1 + self.held.len().ilog2() as usize) * len + self.gathered(len),
        }
    }

    /// Elements of a row of a buffer with all rows, where ranks divide them.
    pub fn gathered(&self, len: usize) -> usize {
        if self.sequence && self.ranks() > 1 { len } else { 0 }
    }

    /// Elements of a row of a buffer whose rows are divided among ranks with
    /// [`TensorShards::sequence`], for each row of the whole.
    pub fn own(&self, len: usize) -> usize {
        if self.sequence { len.div_ceil(self.ranks()) } else { len }
    }
}

/// A part of a tensor: consecutive elements of it, or of some of its columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardSlab {
    /// The columns; none are all.
    pub columns: Option<Range<usize>>,
    /// Flat elements, of the matrix of these columns.
    pub range: Range<usize>,
}

impl Tensor {
    /// The parts of the tensor that a virtual rank has, in the order of its storage.
    pub fn slabs(&self, slices: &TensorShards, virtual_rank: usize) -> Vec<ShardSlab> {
        let rows = self.shape.first().copied().unwrap_or(1);
        let columns = self.len() / rows.max(1);
        match self.cut.filter(|_| slices.total > 1) {
            None => vec![ShardSlab { columns: None, range: 0..self.len() }],
            Some(Cut::Rows { segments }) => {
                let of_segment = rows / segments;
                let share = slices.share(of_segment, virtual_rank);
                let slab = |segment: usize| {
                    let first = segment * of_segment;
                    ShardSlab {
                        columns: None,
                        range: (first + share.start) * columns..(first + share.end) * columns,
                    }
                };
                (0..segments).map(slab).collect()
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
        // Of 23 columns a virtual rank has three, the last two.
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
