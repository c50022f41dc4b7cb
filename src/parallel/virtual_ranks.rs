//! Virtual ranks: fixed parts of a global batch whose gradients are summed in a fixed tree.
//!
//! f32 addition is commutative but not associative. With a fixed number of virtual ranks, and a
//! summation tree whose shape does not depend on the ranks, every rank count gives the same bits.
//! Neighbours are added first: `((01)(23))((45)(67))`. The lower levels of the tree run inside a
//! rank (`base/tree_sum.rs`), the upper ones between ranks (`comm/algorithms/halving_doubling.rs`).
//! This holds on every number of ranks that divides the virtual ranks into equal groups of a power
//! of two; `docs/determinism.md` has all conditions and the cost. If gradients are reduced after each
//! micro-batch, the levels of the tree change places ([`VirtualRanks`]), and the bits stay.
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

use hpctrain_base::layout::part;

/// When the gradients of a replica's virtual ranks are reduced over its shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceAfter {
    /// At the end of a step. A rank adds the full gradients of its virtual ranks, which are
    /// consecutive.
    Step,
    /// After each virtual rank, which is one micro-batch. A rank adds the parts that it owns. Its
    /// virtual ranks are as far apart as there are shards, so that those that are reduced together
    /// are consecutive.
    MicroBatch,
}

/// The virtual ranks of a global batch, and the ranks that compute them.
///
/// In both orders the tree over the virtual ranks is the same. After a step its lowest levels are in
/// a rank, the next ones between shards. After a micro-batch its lowest levels are between shards,
/// the next ones in the rank that owns the sum. The highest ones are between replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualRanks {
    /// The number of virtual ranks, which `replicas · shards` divides.
    pub total: usize,
    /// The number of replicas, each with consecutive virtual ranks.
    pub replicas: usize,
    /// The number of shards of a replica.
    pub shards: usize,
    /// When gradients are reduced.
    pub reduce_after: ReduceAfter,
}

impl VirtualRanks {
    /// Returns the virtual ranks of shard `shard` of replica `replica`, in the order in which it
    /// computes them.
    pub fn for_shard(self, replica: usize, shard: usize) -> impl Iterator<Item = usize> {
        let all = part(self.total, replica, self.replicas);
        let (mine, stride) = match self.reduce_after {
            ReduceAfter::Step => {
                let mine = part(all.len(), shard, self.shards);
                (all.start + mine.start..all.start + mine.end, 1)
            }
            ReduceAfter::MicroBatch => (all.start + shard..all.end, self.shards),
        };
        mine.step_by(stride)
    }

    /// Returns the losses of all virtual ranks in their order, from those that each shard of each
    /// replica reports.
    pub fn in_order(self, reports: &[Vec<f64>]) -> Vec<f64> {
        match self.reduce_after {
            ReduceAfter::Step => reports.concat(),
            ReduceAfter::MicroBatch => {
                let of_replica = |shards: &[Vec<f64>]| -> Vec<f64> {
                    let virtual_ranks = shards.iter().map(Vec::len).max().unwrap_or(0);
                    (0..virtual_ranks)
                        .flat_map(|k| {
                            shards.iter().filter_map(move |losses| losses.get(k).copied())
                        })
                        .collect()
                };
                reports.chunks(self.shards).flat_map(of_replica).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::random::Stream;
    use hpctrain_base::tree_sum::Tree;

    #[test]
    fn ranks_share_the_virtual_ranks() {
        let of = |reduce_after, replica, shard| -> Vec<usize> {
            VirtualRanks { total: 16, replicas: 2, shards: 2, reduce_after }
                .for_shard(replica, shard)
                .collect()
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
                let dealt = |reduce_after| VirtualRanks { total, replicas, shards, reduce_after };
                let step = dealt(ReduceAfter::Step);
                let after_step = sum((0..replicas).map(|replica| {
                    sum((0..shards)
                        .map(|shard| sum(step.for_shard(replica, shard).map(|v| terms[v]))))
                }));
                let micro = dealt(ReduceAfter::MicroBatch);
                let after_micro = sum((0..replicas).map(|replica| {
                    let of_shards: Vec<Vec<usize>> = (0..shards)
                        .map(|shard| micro.for_shard(replica, shard).collect())
                        .collect();
                    sum((0..micros).map(|m| sum(of_shards.iter().map(|of| terms[of[m]]))))
                }));
                let whole = sum(terms.iter().copied());
                assert_eq!(
                    [after_step.to_bits(), after_micro.to_bits()],
                    [whole.to_bits(); 2],
                    "{replicas} × {shards} × {micros}"
                );
                let losses: Vec<f64> = terms.iter().copied().map(f64::from).collect();
                for dealt in [step, micro] {
                    let reports: Vec<Vec<f64>> = (0..replicas)
                        .flat_map(|replica| {
                            (0..shards).map(move |shard| dealt.for_shard(replica, shard))
                        })
                        .map(|mine| mine.map(|v| losses[v]).collect())
                        .collect();
                    assert_eq!(dealt.in_order(&reports), losses);
                }
            }
        }
    }
}
