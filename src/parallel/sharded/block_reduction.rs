//! The reduction of gradients of ranks whose virtual ranks are several blocks of the tree
//! ([`ReduceAfter::StepInBlocks`](crate::ReduceAfter)): each rank sends the sum of each of its blocks
//! to the owners of its parts, which add those of all ranks in the order of the tree. The owners
//! divide each shard among its replicas, which then all-gather it. With central storage the ranks of
//! the first replica own the shards, and may have no virtual ranks themselves.

use std::ops::Range;
use std::sync::Arc;

use crate::{ReduceAfter, Storage, VirtualRanks};
use hpctrain_base::layout::share;
use hpctrain_comm::{TermOrder, UnequalCollective};

/// The blocks of virtual ranks of all ranks that compute a step together.
pub struct BlockReduction {
    /// The virtual ranks of a step, and the ranks that compute them.
    pub assignment: VirtualRanks,
    /// The number of virtual ranks in each block of this rank.
    pub own: Vec<usize>,
    storage: Storage,
    order: Arc<TermOrder>,
}

impl BlockReduction {
    /// Returns the blocks of virtual ranks for rank `rank` of a step's data-parallel ranks, which are
    /// replica-major.
    pub fn new(assignment: VirtualRanks, rank: usize, storage: Storage) -> Self {
        let VirtualRanks { replicas, shards, .. } = assignment;
        let blocks: Vec<Vec<Range<usize>>> = (0..replicas * shards)
            .map(|rank| assignment.blocks(rank / shards, rank % shards))
            .collect();
        Self {
            assignment,
            own: blocks[rank].iter().map(Range::len).collect(),
            storage,
            order: Arc::new(TermOrder::new(&blocks)),
        }
    }

    /// Returns one block of `virtual_ranks` virtual ranks for each of the same ranks.
    pub fn with_equal_blocks(&self, virtual_ranks: usize) -> Self {
        let VirtualRanks { replicas, shards, .. } = self.assignment;
        let ranks = replicas * shards;
        let sums: Vec<Vec<Range<usize>>> =
            (0..ranks).map(|rank| std::iter::once(rank..rank + 1).collect()).collect();
        let total = ranks * virtual_ranks;
        Self {
            assignment: VirtualRanks {
                total,
                reduce_after: ReduceAfter::Step,
                counts: None,
                ..self.assignment
            },
            own: Vec::from([virtual_ranks]),
            storage: self.storage,
            order: Arc::new(TermOrder::new(&sums)),
        }
    }

    /// Returns the reduction of a unit of `len` elements, whose shards have the ranges `of_shard`.
    pub fn collective(
        &self,
        len: usize,
        of_shard: impl Fn(usize) -> Range<usize>,
    ) -> UnequalCollective {
        let VirtualRanks { replicas, shards, .. } = self.assignment;
        let part = |rank: usize| {
            let shard = of_shard(rank % shards);
            let mine = match self.storage {
                Storage::Ranks => share(shard.len(), rank / shards, replicas),
                Storage::Central if rank < shards => 0..shard.len(),
                Storage::Central => 0..0,
            };
            shard.start + mine.start..shard.start + mine.end
        };
        let ranks = replicas * shards;
        let replicas_of = |shard: usize| (shard..ranks).step_by(shards).collect();
        UnequalCollective {
            len,
            parts: (0..ranks).map(part).collect(),
            terms: Some(self.order.clone()),
            all_gathers: match (self.storage, replicas) {
                (Storage::Central, _) | (_, 1) => vec![],
                _ => (0..shards).map(replicas_of).collect(),
            },
        }
    }
}
