//! Virtual ranks: fixed parts of a global batch whose gradients are summed in a fixed tree.
//!
//! f32 addition is commutative but not associative. With a fixed number of virtual ranks, and a
//! summation tree whose shape does not depend on the ranks, every rank count gives the same bits.
//! Neighbours are added first: `((01)(23))((45)(67))`. The lower levels of the tree run inside a
//! rank (`base/tree_sum.rs`), the upper ones between ranks (`comm/algorithms/halving_doubling.rs`).
//! Where ranks have unequal numbers of virtual ranks, or such that their sum does not occur in the tree,
//! a rank has several such blocks of the tree and sends the sum of each
//! ([`ReduceAfter::StepInBlocks`]). If gradients are reduced after each micro-batch, the levels of
//! the tree change places ([`VirtualRanks`]). The bits stay; `docs/determinism.md` has all conditions
//! and the cost.
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
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::part;

/// When the gradients of a replica's virtual ranks are reduced over its shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceAfter {
    /// At the end of a step. A rank adds the full gradients of its virtual ranks, which are
    /// consecutive and as many on every rank.
    Step,
    /// At the end of a step, from any number of ranks. A rank adds the full gradients of each of its
    /// blocks of virtual ranks ([`VirtualRanks::blocks`]), and the owner of a part adds the sums of
    /// the blocks of all ranks.
    StepInBlocks,
    /// After each virtual rank, which is one micro-batch. A rank adds the parts that it owns. Its
    /// virtual ranks are as far apart as there are shards, so that those that are reduced together
    /// are consecutive.
    MicroBatch,
}

/// The virtual ranks of a global batch, and the ranks that compute them.
///
/// The tree over the virtual ranks is the same in all orders. After a step its lowest levels are in
/// a rank, the next ones between shards. After a micro-batch its lowest levels are between shards,
/// the next ones in the rank that owns the sum. The highest ones are between replicas. With blocks,
/// the lowest levels are in a rank and all others in the rank that owns the sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualRanks {
    /// The number of virtual ranks. In blocks, any number from that of the ranks on; otherwise a
    /// multiple of `replicas · shards`.
    pub total: usize,
    /// The number of replicas, each with consecutive virtual ranks if these are not in blocks.
    pub replicas: usize,
    /// The number of shards of a replica.
    pub shards: usize,
    /// When gradients are reduced.
    pub reduce_after: ReduceAfter,
    /// The number of virtual ranks of each rank, replica-major, if these are in blocks and their
    /// numbers are not as equal as possible.
    pub counts: Option<Arc<[usize]>>,
}

impl VirtualRanks {
    /// Returns true if these ranks add gradients in the tree over virtual ranks without blocks: all
    /// ranks have as many, and each sum that others are added to is of a power of two of them.
    pub fn are_in_one_tree(total: usize, replicas: usize, shards: usize) -> bool {
        let is_whole = |below: usize, above: usize| above == 1 || below.is_power_of_two();
        let ranks = replicas * shards;
        total.is_multiple_of(ranks)
            && is_whole(total / ranks, ranks)
            && is_whole(total / replicas, replicas)
    }

    /// Returns the most virtual ranks that a rank has.
    pub fn most(&self) -> usize {
        match &self.counts {
            Some(counts) => counts.iter().copied().max().unwrap_or(0),
            None => self.total.div_ceil(self.replicas * self.shards),
        }
    }

    /// Divides `total` virtual ranks among ranks in proportion to these shares, at least one for each
    /// share above 0: the numbers whose largest is reached last, where each rank takes a time for a
    /// virtual rank that is the inverse of its share.
    pub fn deal(total: usize, shares: &[f64]) -> Vec<usize> {
        let mut counts: Vec<usize> = shares.iter().map(|share| usize::from(*share > 0.0)).collect();
        for _ in counts.iter().sum()..total {
            // The rank that would end first with one more.
            let ends = |rank: usize| (counts[rank] + 1) as f64 / shares[rank];
            let working = (0..shares.len()).filter(|rank| shares[*rank] > 0.0);
            let first = working.min_by(|one, other| ends(*one).total_cmp(&ends(*other)));
            counts[first.unwrap_or(0)] += 1;
        }
        counts
    }

    /// Returns the blocks of virtual ranks of the rank that has the most blocks.
    pub fn most_blocks(&self) -> Vec<Range<usize>> {
        match &self.counts {
            Some(counts) => (0..counts.len())
                .map(|rank| self.blocks(rank / self.shards, rank % self.shards))
                .max_by_key(Vec::len)
                .unwrap_or_default(),
            None => self.blocks(0, 0),
        }
    }

    /// Returns the elements of the largest shard of a unit with this number of elements, which shards
    /// divide by virtual shards.
    pub fn largest_shard(&self, elements: usize) -> usize {
        elements * self.total.div_ceil(self.shards) / self.total
    }

    /// Returns the blocks of virtual ranks of shard `shard` of replica `replica`, each a full
    /// subtree of the tree over all of them: for every power of two in the number that each rank has
    /// at least, the largest first, one such block for each rank, then the remaining ones one by one
    /// for the first ranks. With given numbers, such a block for each rank whose number has that
    /// power of two.
    pub fn blocks(&self, replica: usize, shard: usize) -> Vec<Range<usize>> {
        let rank = replica * self.shards + shard;
        let ranks = self.replicas * self.shards;
        if let Some(counts) = &self.counts {
            return blocks_of(counts, rank);
        }
        let each = self.total / ranks;
        let mut first = 0;
        let mut blocks = Vec::new();
        for size in (0..usize::BITS).rev().map(|bit| 1 << bit).filter(|size| each & size > 0) {
            blocks.push(first + rank * size..first + (rank + 1) * size);
            first += ranks * size;
        }
        if first + rank < self.total {
            blocks.push(first + rank..first + rank + 1);
        }
        blocks
    }

    /// Returns the virtual ranks of shard `shard` of replica `replica`, in the order in which it
    /// computes them.
    pub fn for_shard(&self, replica: usize, shard: usize) -> Vec<usize> {
        match self.reduce_after {
            ReduceAfter::StepInBlocks => {
                self.blocks(replica, shard).into_iter().flatten().collect()
            }
            ReduceAfter::Step => {
                let all = part(self.total, replica, self.replicas);
                let mine = part(all.len(), shard, self.shards);
                (all.start + mine.start..all.start + mine.end).collect()
            }
            ReduceAfter::MicroBatch => {
                let all = part(self.total, replica, self.replicas);
                (all.start + shard..all.end).step_by(self.shards).collect()
            }
        }
    }

    /// Returns the losses of all virtual ranks in their order, from those that each shard of each
    /// replica with virtual ranks reports. If ranks have as many each, they may report fewer or more of
    /// them, such as those of a part of a batch.
    ///
    /// # Errors
    /// Returns an error if ranks with blocks of virtual ranks report another number of losses than
    /// they have.
    pub fn in_order(&self, reports: &[Vec<f64>]) -> Result<Vec<f64>> {
        match self.reduce_after {
            ReduceAfter::Step => Ok(reports.concat()),
            ReduceAfter::StepInBlocks => self.in_blocks(reports),
            ReduceAfter::MicroBatch => {
                let of_replica = |shards: &[Vec<f64>]| -> Vec<f64> {
                    let virtual_ranks = shards.iter().map(Vec::len).max().unwrap_or(0);
                    (0..virtual_ranks)
                        .flat_map(|k| {
                            shards.iter().filter_map(move |losses| losses.get(k).copied())
                        })
                        .collect()
                };
                Ok(reports.chunks(self.shards).flat_map(of_replica).collect())
            }
        }
    }

    /// Does the work of [`Self::in_order`] for blocks of virtual ranks.
    fn in_blocks(&self, reports: &[Vec<f64>]) -> Result<Vec<f64>> {
        let ranks = (0..self.replicas)
            .flat_map(|replica| (0..self.shards).map(move |shard| self.for_shard(replica, shard)));
        let working: Vec<Vec<usize>> = ranks.filter(|mine| !mine.is_empty()).collect();
        let mut all = vec![0.0; self.total];
        for (mine, losses) in working.iter().zip(reports) {
            if mine.len() != losses.len() {
                return Err(Error::comm(format!(
                    "another rank sent {} losses of {} virtual ranks",
                    losses.len(),
                    mine.len()
                )));
            }
            mine.iter().zip(losses).for_each(|(virtual_rank, loss)| all[*virtual_rank] = *loss);
        }
        match reports.len() == working.len() {
            true => Ok(all),
            false => Err(Error::comm("the losses of some ranks are missing")),
        }
    }
}

/// Returns the blocks of a rank where ranks have these numbers of virtual ranks: blocks of larger
/// powers of two are before those of smaller ones, so each begins at a multiple of its length.
fn blocks_of(counts: &[usize], rank: usize) -> Vec<Range<usize>> {
    let mut first = 0;
    let mut blocks = Vec::new();
    for size in (0..usize::BITS).rev().map(|bit| 1 << bit) {
        for (other, _) in counts.iter().enumerate().filter(|(_, count)| *count & size > 0) {
            if other == rank {
                blocks.push(first..first + size);
            }
            first += size;
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::random::Stream;
    use hpctrain_base::tree_sum::Tree;

    #[test]
    fn ranks_share_the_virtual_ranks() {
        let of = |reduce_after, replica, shard| -> Vec<usize> {
            VirtualRanks { total: 16, replicas: 2, shards: 2, reduce_after, counts: None }
                .for_shard(replica, shard)
        };
        assert_eq!(of(ReduceAfter::Step, 1, 0), [8, 9, 10, 11]);
        assert_eq!(of(ReduceAfter::MicroBatch, 1, 0), [8, 10, 12, 14]);
        assert_eq!(of(ReduceAfter::MicroBatch, 0, 1), [1, 3, 5, 7]);
    }

    fn add(into: &mut f32, from: f32) -> Result<(), std::convert::Infallible> {
        *into += from;
        Ok(())
    }

    /// Adds terms in the order of the tree.
    fn sum(terms: impl Iterator<Item = f32>) -> f32 {
        let mut tree = Tree::default();
        for term in terms {
            let Ok(()) = tree.push(term, add);
        }
        let Ok(sum) = tree.finish(add);
        sum.unwrap()
    }

    /// The sums of one rank, of consecutive virtual ranks and of those apart have the same bits, on
    /// every number of shards, replicas and virtual ranks that is a power of two.
    #[test]
    fn both_orders_add_in_the_same_tree() {
        let mut seed = 46;
        for (replicas, shards, micros) in (0..5)
            .flat_map(|r| (0..5).flat_map(move |s| (0..6).map(move |m| (1 << r, 1 << s, 1 << m))))
        {
            let total = replicas * shards * micros;
            let mut terms = vec![0.0; total];
            for _ in 0..10 {
                seed += 1;
                Stream::new(seed).fill_normal(&mut terms);
                terms.iter_mut().enumerate().for_each(|(i, x)| *x *= 10_f32.powi(i as i32 % 9 - 4));
                let dealt = |reduce_after| VirtualRanks {
                    total,
                    replicas,
                    shards,
                    reduce_after,
                    counts: None,
                };
                let step = dealt(ReduceAfter::Step);
                let after_step = sum((0..replicas).map(|replica| {
                    sum((0..shards).map(|shard| {
                        sum(step.for_shard(replica, shard).into_iter().map(|v| terms[v]))
                    }))
                }));
                let micro = dealt(ReduceAfter::MicroBatch);
                let after_micro = sum((0..replicas).map(|replica| {
                    let of_shards: Vec<Vec<usize>> =
                        (0..shards).map(|shard| micro.for_shard(replica, shard)).collect();
                    sum((0..micros).map(|m| sum(of_shards.iter().map(|of| terms[of[m]]))))
                }));
                let whole = sum(terms.iter().copied());
                assert_eq!(
                    [after_step.to_bits(), after_micro.to_bits()],
                    [whole.to_bits(); 2],
                    "{replicas} × {shards} × {micros}"
                );
                let losses: Vec<f64> = terms.iter().copied().map(f64::from).collect();
                for dealt in [&step, &micro] {
                    let reports: Vec<Vec<f64>> = (0..replicas)
                        .flat_map(|replica| {
                            (0..shards).map(move |shard| dealt.for_shard(replica, shard))
                        })
                        .map(|mine| mine.into_iter().map(|v| losses[v]).collect())
                        .collect();
                    assert_eq!(dealt.in_order(&reports).unwrap(), losses);
                }
            }
        }
    }

    /// Every rank has whole blocks of the tree and at most one virtual rank more than another, and
    /// each virtual rank is on one rank.
    #[test]
    fn blocks_are_subtrees_on_any_number_of_ranks() {
        for (ranks, total) in (1..=9).flat_map(|ranks| (ranks..=40).map(move |v| (ranks, v))) {
            let dealt = VirtualRanks {
                total,
                replicas: ranks,
                shards: 1,
                reduce_after: ReduceAfter::StepInBlocks,
                counts: None,
            };
            let mut seen = vec![0; total];
            for rank in 0..ranks {
                let blocks = dealt.blocks(rank, 0);
                assert!(blocks.is_sorted_by_key(|block| block.start));
                for block in blocks {
                    assert!(block.len().is_power_of_two());
                    assert!(block.start.is_multiple_of(block.len()));
                    block.for_each(|virtual_rank| seen[virtual_rank] += 1);
                }
                let count = dealt.for_shard(rank, 0).len();
                assert!(count == dealt.most() || count == total / ranks);
            }
            assert_eq!(seen, vec![1; total], "{total} virtual ranks on {ranks} ranks");
            let reports: Vec<Vec<f64>> = (0..ranks)
                .map(|rank| dealt.for_shard(rank, 0).into_iter().map(|v| v as f64).collect())
                .collect();
            let losses: Vec<f64> = (0..total).map(|v| v as f64).collect();
            assert_eq!(dealt.in_order(&reports).unwrap(), losses);
            assert!(dealt.in_order(&reports[1..]).is_err());
        }
    }

    #[test]
    fn virtual_ranks_are_dealt_by_shares() {
        assert_eq!(VirtualRanks::deal(12, &[2.0, 1.0]), [8, 4]);
        assert_eq!(VirtualRanks::deal(8, &[1.0, 1.0, 1.0]), [3, 3, 2]);
        assert_eq!(VirtualRanks::deal(5, &[100.0, 1.0, 1.0]), [3, 1, 1]);
        for (shares, total) in [(&[5.0, 1.0, 3.0][..], 23), (&[1.0, 10.0], 16), (&[3.0], 7)] {
            let counts = VirtualRanks::deal(total, shares);
            assert_eq!(counts.iter().sum::<usize>(), total);
            let ranks = counts.len();
            let dealt = VirtualRanks {
                total,
                replicas: ranks,
                shards: 1,
                reduce_after: ReduceAfter::StepInBlocks,
                counts: Some(counts.clone().into()),
            };
            let mut seen = vec![0; total];
            for (rank, count) in counts.iter().enumerate() {
                for block in dealt.blocks(rank, 0) {
                    assert!(block.len().is_power_of_two());
                    assert!(block.start.is_multiple_of(block.len()));
                    block.for_each(|virtual_rank| seen[virtual_rank] += 1);
                }
                assert_eq!(dealt.for_shard(rank, 0).len(), *count);
            }
            assert_eq!(seen, vec![1; total]);
            assert_eq!(dealt.most(), *counts.iter().max().unwrap());
        }
    }

    #[test]
    fn one_tree_needs_powers_of_two_below_others() {
        let is = VirtualRanks::are_in_one_tree;
        assert!(is(8, 1, 8) && is(8, 4, 2) && is(12, 3, 1) && is(6, 1, 1) && is(6, 1, 3));
        assert!(!is(12, 4, 1) && !is(12, 2, 3) && !is(8, 3, 1) && !is(12, 4, 3));
    }
}
