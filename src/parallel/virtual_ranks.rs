//! Virtual ranks: fixed parts of a global batch whose gradients are summed in a fixed tree.
//!
//! f32 addition is commutative but not associative. With a fixed number of virtual ranks, and a
//! summation tree whose shape does not depend on the ranks, every rank count gives the same bits.
//! Neighbours are added first: `((01)(23))((45)(67))`. The lower levels of the tree run inside a
//! rank (`base/tree_sum.rs`), the upper ones between ranks (`comm/algorithms/halving_doubling.rs`).
//! This holds on every number of ranks that divides the virtual ranks into equal groups of a power
//! of two; `docs/determinism.md` has all conditions and the cost.
//!
//! # Rules for new code
//!
//! - Random numbers are functions of a key and a counter (`base/random.rs`), never of a state. Keys
//!   derive from the run's seed and a name: tensor, step, dropout site.
//! - The order of samples is a function of seed, epoch and position (`data/sampler.rs`).
//! - Sums have a fixed shape. GEMMs split K by the size of K alone (`cpu/gemm_blocking.rs`). Sums
//!   over a slice use a fixed number of partial sums at any vector width, and fused multiply-adds
//!   are explicit (`cpu/math.rs`). On GPUs no sum depends on the order of thread blocks
//!   (`cuda/mod.rs`).
//! - The global norm sums the squares of virtual shards in f64 by the same tree. Evaluation uses
//!   fixed chunks of `eval.batch` samples. Batch normalisation is the exception, because its
//!   samples see each other (`nn/layers/channel_norm.rs`).
//! - No result depends on time, addresses, thread scheduling or the arrival of messages. The choice
//!   of a collective by its time is among those with one order of additions
//!   (`comm/autotune/mod.rs`).
//! - Floats in `metrics.jsonl`, `eval.jsonl` and the manifest read back to the same bits:
//!   `serde_json` has the feature `float_roundtrip`.

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
