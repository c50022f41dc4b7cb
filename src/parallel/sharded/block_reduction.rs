//! The reduction of gradients of ranks whose virtual ranks are several blocks of the tree
//! ([`ReduceAfter::StepInBlocks`](crate::ReduceAfter)): each rank sends the sum of each of its blocks
//! to the owners of its parts, which add those of all ranks in the order of the tree. The owners
//! divide each shard among its replicas, which then all-gather it.

use std::ops::Range;
use std::sync::Arc;

use crate::{ReduceAfter, VirtualRanks};
use hpctrain_base::layout::share;
use hpctrain_comm::{TermOrder, UnequalCollective};

/// The blocks of virtual ranks of all ranks that compute a step together.
pub struct BlockReduction {
    /// The number of virtual ranks in each block of this rank.
    pub own: Vec<usize>,
    replicas: usize,
    shards: usize,
    order: Arc<TermOrder>,
}

impl BlockReduction {
    /// Returns the blocks of `virtual_ranks` virtual ranks for rank `rank` of a step's data-parallel
    /// ranks, which are replica-major.
    pub fn new(virtual_ranks: usize, replicas: usize, shards: usize, rank: usize) -> Self {
        let dealt = VirtualRanks {
            total: virtual_ranks,
            replicas,
            shards,
            reduce_after: ReduceAfter::StepInBlocks,
        };
        let blocks: Vec<Vec<Range<usize>>> =
            (0..replicas * shards).map(|rank| dealt.blocks(rank / shards, rank % shards)).collect();
        Self {
            own: blocks[rank].iter().map(Range::len).collect(),
            replicas,
            shards,
            order: Arc::new(TermOrder::new(&blocks)),
        }
    }

    /// Returns the reduction of a unit of `len` elements, whose shards have the ranges `of_shard`.
    pub fn collective(
        &self,
        len: usize,
        of_shard: impl Fn(usize) -> Range<usize>,
    ) -> UnequalCollective {
        let part = |rank: usize| {
            let shard = of_shard(rank % self.shards);
            let mine = share(shard.len(), rank / self.shards, self.replicas);
            shard.start + mine.start..shard.start + mine.end
        };
        let ranks = self.replicas * self.shards;
        let replicas_of = |shard: usize| (shard..ranks).step_by(self.shards).collect();
        UnequalCollective {
            len,
            parts: (0..ranks).map(part).collect(),
            terms: Some(self.order.clone()),
            all_gathers: match self.replicas {
                1 => vec![],
                _ => (0..self.shards).map(replicas_of).collect(),
            },
        }
    }
}
