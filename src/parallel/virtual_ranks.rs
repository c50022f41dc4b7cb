//! Virtual ranks: the fixed pieces of a global batch whose gradients are summed by one fixed tree.
//!
//! f32 addition is commutative but not associative. Cutting the batch into a fixed number of virtual ranks,
//! and adding virtual ranks in a tree whose shape does not depend on the ranks, makes every rank count give
//! the same bits.

use std::ops::Range;

use hpctrain_base::layout::part;

/// The virtual ranks of a data-parallel rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualRanks {
    /// Virtual ranks of the whole batch.
    pub total: usize,
    /// Data-parallel ranks; divides `total`.
    pub ranks: usize,
    /// This data-parallel rank.
    pub rank: usize,
}

impl VirtualRanks {
    /// The virtual ranks this rank computes.
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
