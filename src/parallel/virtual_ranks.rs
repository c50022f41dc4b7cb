//! Virtual ranks: fixed parts of a global batch whose gradients are summed in a fixed tree.
//!
//! f32 addition is commutative but not associative. With a fixed number of virtual ranks, and a
//! summation tree whose shape does not depend on the ranks, every rank count gives the same bits.

use std::ops::Range;

use hpctrain_base::layout::part;

/// The virtual ranks of a data-parallel rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualRanks {
    /// The number of virtual ranks of the whole batch.
    pub total: usize,
    /// The number of data-parallel ranks, which divides `total`.
    pub ranks: usize,
    /// This data-parallel rank.
    pub rank: usize,
}

impl VirtualRanks {
    /// Returns the virtual ranks that this rank computes.
    pub fn mine(&self) -> Range<usize> {
        part(self.total, self.rank, self.ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_virtual_ranks() {
        assert_eq!(VirtualRanks { total: 8, ranks: 2, rank: 1 }.mine(), 4..8);
    }
}
