//! Simulates the memory of a step: the full parameters and gradients that are alive at each moment.
//!
//! The simulation follows [`Sharded`](super::Sharded) allocation by allocation; a test compares the
//! two. Of activations it counts only the micro-batches that wait for their backward.
//!
//! The `memory` lines of the startup summary are computed from it: a GPU's memory is one pool, so
//! its line is the largest sum over all moments; on the host every category counts with its own
//! peak.

use std::collections::VecDeque;

use super::param_prefetch::{self, BlockUse, alive};
use super::pipeline_schedule::{Action, StepSchedule};
use super::pipeline_stage::Stage;
use super::{Lifetime, ReduceAfter, ShardingPolicy, VirtualRanks};
use hpctrain_device::Element;

/// The inputs that determine the lifetimes of full buffers in a step.
#[derive(Debug, Clone, Copy)]
pub struct MemoryTimeline<'a> {
    /// The stage of the rank.
    pub stage: &'a Stage,
    /// The number of elements of the unit in each slot.
    pub sizes: &'a [usize],
    /// The virtual ranks, and the ranks among which the parameters are sharded.
    pub ranks: &'a VirtualRanks,
    /// The lifetimes of full buffers.
    pub policy: ShardingPolicy,
    /// The schedule of the step.
    pub schedule: StepSchedule,
}

/// A position in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPosition {
    /// In the forward of a block.
    Forward(usize),
    /// In the backward of a block.
    Backward(usize),
    /// In the backward of a block whose wgrad is deferred.
    BackwardInput(usize),
    /// In the deferred wgrad of a block.
    BackwardWeight(usize),
    /// After the backward of a block, at the end of a virtual rank.
    After(usize),
}

/// Buffers alive at one moment of a step, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryMoment {
    /// The moment.
    pub when: StepPosition,
    /// The full parameters.
    pub params: usize,
    /// The gradients, full ones and owned parts.
    pub grads: usize,
    /// The number of micro-batches that wait for their backward, besides the current one.
    pub waiting: usize,
    /// The number of micro-batches with deferred wgrad, besides the current one.
    pub deferred: usize,
}

impl MemoryTimeline<'_> {
    /// Returns the moments of a step after the first, in order.
    pub fn step(&self) -> Vec<MemoryMoment> {
        let schedule = self.schedule.representative();
        let pass = param_prefetch::step(&self.stage.tied_slots(), schedule);
        let blocks = self.stage.units.len();
        let mut grads = Gradients::new(self);
        let mut moments = Vec::new();
        let mut turn = 0;
        let mut waiting = 0;
        let mut deferred = 0;
        let window = self.policy.prefetch;
        for action in schedule.actions() {
            match action {
                Action::Forward(_) => {
                    for block in 0..blocks {
                        let params = self.params(&pass, turn, window);
                        let when = StepPosition::Forward(block);
                        moments.push(MemoryMoment {
                            when,
                            params,
                            grads: grads.alive(),
                            waiting,
                            deferred,
                        });
                        turn += 1;
                    }
                    waiting += 1;
                }
                Action::Backward(k) | Action::BackwardInput(k) => {
                    waiting -= 1;
                    let defers = matches!(action, Action::BackwardInput(_));
                    let virtual_rank_end = schedule.virtual_rank_end(k);
                    let mut landed = if virtual_rank_end.is_some() { grads.expect() } else { 0 };
                    for block in (0..blocks).rev() {
                        grads.open(block);
                        let params = self.params(&pass, turn, window);
                        let when = if defers {
                            StepPosition::BackwardInput(block)
                        } else {
                            StepPosition::Backward(block)
                        };
                        moments.push(MemoryMoment {
                            when,
                            params,
                            grads: grads.alive().max(std::mem::take(&mut landed)),
                            waiting,
                            deferred,
                        });
                        turn += 1;
                        if let (Some(last), false) = (virtual_rank_end, defers) {
                            let params = self.params(&pass, turn, window.saturating_sub(1));
                            let grads = grads.virtual_rank_done(block, last, self.stage.is_first());
                            moments.push(MemoryMoment {
                                when: StepPosition::After(block),
                                params,
                                grads,
                                waiting,
                                deferred,
                            });
                        }
                    }
                    deferred += usize::from(defers);
                    if virtual_rank_end.is_some() && !defers {
                        let grads = grads.reduce();
                        moments.push(MemoryMoment {
                            when: StepPosition::After(0),
                            params: 0,
                            grads,
                            waiting,
                            deferred,
                        });
                    }
                }
                Action::BackwardWeight(k) => {
                    deferred -= 1;
                    let params = self.params(&pass, turn, window.saturating_sub(1));
                    for block in (0..blocks).rev() {
                        let when = StepPosition::BackwardWeight(block);
                        moments.push(MemoryMoment {
                            when,
                            params,
                            grads: grads.alive(),
                            waiting,
                            deferred,
                        });
                        if let Some(last) = schedule.virtual_rank_end(k) {
                            let grads = grads.virtual_rank_done(block, last, true);
                            moments.push(MemoryMoment { when, params, grads, waiting, deferred });
                        }
                    }
                }
                Action::Receive(..) | Action::Send(..) => {}
            }
        }
        let params = self.updated();
        let grads = grads.end();
        moments.push(MemoryMoment {
            when: StepPosition::After(0),
            params,
            grads,
            waiting: 0,
            deferred: 0,
        });
        moments
    }

    /// Returns the moments of a forward pass outside training, in order.
    pub fn forward(&self) -> Vec<MemoryMoment> {
        let pass = param_prefetch::forward(&self.stage.tied_slots());
        let grads = Gradients::new(self).alive();
        (0..self.stage.units.len())
            .map(|block| MemoryMoment {
                when: StepPosition::Forward(block),
                params: self.params(&pass, block, self.policy.prefetch),
                grads,
                waiting: 0,
                deferred: 0,
            })
            .collect()
    }

    /// Returns the full parameters at the end of the update, with the shards of tied parameters
    /// that are sent to other stages and received from them.
    fn updated(&self) -> usize {
        let full = match self.policy.params {
            Lifetime::Step => self.sizes.iter().sum(),
            Lifetime::Use => {
                self.sizes[..self.stage.units.len().min(self.policy.prefetch)].iter().sum::<usize>()
            }
        };
        let tied_replicas = self.stage.units.len()..self.sizes.len();
        let exchanged = self.stage.tied_exports.iter().map(|lent| lent.slot).chain(tied_replicas);
        full + exchanged.map(|slot| self.ranks.largest_shard(self.sizes[slot])).sum::<usize>()
    }

    /// Returns the full parameters at a turn, with those prefetched for the next `ahead` turns.
    fn params(&self, pass: &[BlockUse], turn: usize, ahead: usize) -> usize {
        match self.policy.params {
            Lifetime::Step => self.sizes.iter().sum(),
            Lifetime::Use => alive(pass, turn, ahead, self.sizes),
        }
    }
}

/// The gradients that are alive, by unit.
struct Gradients<'a> {
    step: &'a MemoryTimeline<'a>,
    /// Whether there is a buffer for the current virtual rank.
    open: Vec<bool>,
    /// The number of elements of the gradient of tied parameters, while it is alive.
    borrowed: Vec<usize>,
    /// The number of elements of the gradients from blocks that are tied to the unit, received or
    /// expected.
    returned: Vec<usize>,
    /// The units whose gradients are ready, and whose reduction has not started, each with whether
    /// its last virtual rank has ended.
    ended: Vec<(usize, bool)>,
    /// The heights of the partial sums of finished virtual ranks: of full gradients, or of owned
    /// parts if gradients are reduced after each micro-batch.
    trees: Vec<Vec<u32>>,
    /// The virtual ranks of each block of a rank, if gradients are reduced in blocks.
    blocks: Vec<usize>,
    /// The virtual ranks in the tree of each unit, and the finished blocks.
    summed: Vec<(usize, usize)>,
    /// The elements of the full sum that are in memory or being reduced.
    full: Vec<usize>,
    /// Whether the owned part of a sum is in memory after the full sum was freed.
    owned: Vec<bool>,
    /// The units whose owned parts are in memory until they are on the host, the oldest first.
    leaving: VecDeque<usize>,
    /// The units whose gradients are being reduced, each with whether its last virtual rank has
    /// ended.
    started: Vec<(usize, bool)>,
}

/// The owned parts that are in memory at once while they move to the host: one is downloaded, and
/// after the last micro-batch one is reduced over replicas and one has been added.
fn leaving(reduce_after: ReduceAfter) -> usize {
    match reduce_after {
        ReduceAfter::Step | ReduceAfter::StepInBlocks => 1,
        ReduceAfter::MicroBatch => 3,
    }
}

impl<'a> Gradients<'a> {
    /// Returns the gradients at the start of a step.
    fn new(step: &'a MemoryTimeline<'a>) -> Self {
        let units = step.stage.units.len();
        let none = vec![false; units];
        let zeros = vec![0; units];
        let open = vec![step.policy.grads == Lifetime::Step; units];
        Self {
            step,
            open,
            borrowed: zeros.clone(),
            returned: zeros.clone(),
            ended: vec![],
            trees: vec![vec![]; units],
            blocks: match step.policy.reduce_after {
                // The first rank has as many as any other.
                ReduceAfter::StepInBlocks => {
                    step.ranks.most_blocks().into_iter().map(|block| block.len()).collect()
                }
                ReduceAfter::Step | ReduceAfter::MicroBatch => vec![],
            },
            summed: vec![(0, 0); units],
            full: zeros.clone(),
            owned: none,
            leaving: VecDeque::new(),
            started: Vec::new(),
        }
    }

    fn alive(&self) -> usize {
        (0..self.open.len()).map(|unit| self.alive_of_unit(unit)).sum()
    }

    /// Returns the elements of gradients of a unit that are alive.
    fn alive_of_unit(&self, unit: usize) -> usize {
        let size = self.step.sizes[unit];
        let part = self.step.ranks.largest_shard(size);
        let of_term = if self.reduces_micro_batches() { part } else { size };
        let of_trees = (self.trees[unit].len() + self.summed[unit].1) * of_term;
        let open = if self.open[unit] { size } else { 0 };
        let tied = self.borrowed[unit] + self.returned[unit];
        of_trees + open + self.full[unit] + tied + if self.owned[unit] { part } else { 0 }
    }

    /// Returns true if gradients are reduced after each micro-batch.
    fn reduces_micro_batches(&self) -> bool {
        self.step.policy.reduce_after == ReduceAfter::MicroBatch
    }

    /// Adds a term to the tree of a unit. Returns whether a merged buffer was freed.
    fn push(&mut self, unit: usize) -> bool {
        let tree = &mut self.trees[unit];
        let mut height = 0;
        while tree.pop_if(|other| *other == height).is_some() {
            height += 1;
        }
        tree.push(height);
        height > 0
    }

    /// Starts the backward of a block.
    fn open(&mut self, block: usize) {
        self.open[block] = true;
        self.borrowed[block] = self.step.stage.tied_imports[block].map_or(0, |loan| loan.len);
    }

    /// Starts the last backward of a virtual rank. Returns the peak meanwhile.
    fn expect(&mut self) -> usize {
        let landed = if self.defers_micro_batches() { self.land() } else { 0 };
        self.step.stage.tied_exports.iter().for_each(|lent| self.returned[lent.slot] += lent.len);
        landed
    }

    /// Returns true if reductions after micro-batches are awaited at the next backward.
    fn defers_micro_batches(&self) -> bool {
        self.reduces_micro_batches() && !self.step.stage.is_first()
    }

    /// Ends a virtual rank's gradient of a unit; after the last virtual rank its reduction starts
    /// at once if it `reduces`. Returns the peak meanwhile.
    fn virtual_rank_done(&mut self, unit: usize, last: bool, reduces: bool) -> usize {
        let is_started = self.started.iter().any(|(started, _)| *started == unit);
        let landed = if is_started { self.land() } else { 0 };
        let before = landed.max(self.alive());
        let borrowed = std::mem::take(&mut self.borrowed[unit]);
        self.returned[unit] = 0;
        match self.step.stage.tied_imports[unit] {
            // It is sent to another stage, which may receive it much later.
            Some(loan) if loan.from.is_some() => self.returned[unit] = borrowed,
            Some(loan) => self.returned[loan.slot] += borrowed,
            None => {}
        }
        if self.reduces_micro_batches() {
            self.open[unit] = false;
            self.full[unit] = self.step.sizes[unit];
            self.ended.push((unit, last));
            return if reduces { before.max(self.reduce()) } else { before.max(self.alive()) };
        }
        let spare = self.push(unit);
        self.open[unit] = spare && !last;
        self.end_block(unit);
        if !last {
            return before.max(self.alive());
        }
        self.trees[unit].clear();
        let (_, blocks) = std::mem::take(&mut self.summed[unit]);
        self.full[unit] = blocks.max(1) * self.step.sizes[unit];
        // Several sums are copied to one buffer.
        let copied = if blocks > 1 { self.alive() + self.full[unit] } else { 0 };
        let before = before.max(copied);
        self.ended.push((unit, last));
        // If other stages wait for gradients of this one, those are sent first.
        if reduces { before.max(self.reduce()) } else { before.max(self.alive()) }
    }

    /// Merges the tree of a unit if a block of virtual ranks has ended.
    fn end_block(&mut self, unit: usize) {
        let (summed, finished) = &mut self.summed[unit];
        *summed += 1;
        if self.blocks.get(*finished) == Some(summed) {
            (*summed, *finished) = (0, *finished + 1);
            self.trees[unit].clear();
        }
    }

    /// Starts the reductions of units whose virtual ranks have ended. Returns the peak meanwhile.
    fn reduce(&mut self) -> usize {
        let mut most = 0;
        for (unit, last) in std::mem::take(&mut self.ended) {
            if self.step.policy.reduce_dtype == Element::Bf16 {
                // A copy of half the size is reduced.
                let rounded = self.step.sizes[unit].div_ceil(2);
                self.full[unit] += rounded;
                most = most.max(self.alive());
                if self.step.policy.grads == Lifetime::Use {
                    self.full[unit] = rounded;
                }
            }
            if !self.defers_micro_batches() {
                most = most.max(self.land());
            }
            self.started.push((unit, last));
            most = most.max(self.alive());
        }
        most
    }

    /// Waits for all reductions of the step. Returns the peak meanwhile.
    fn end(&mut self) -> usize {
        self.land()
    }

    /// Waits for the current reductions, copies the owned part of each, then frees its full sum.
    /// Returns the peak meanwhile.
    fn land(&mut self) -> usize {
        let started = std::mem::take(&mut self.started);
        if self.step.policy.grads == Lifetime::Step {
            return self.alive();
        }
        started.into_iter().fold(self.alive(), |most, (unit, last)| {
            let peak = self.land_unit(unit, last);
            most.max(peak)
        })
    }

    /// Does the work of [`Gradients::land`] for one unit.
    fn land_unit(&mut self, unit: usize, last: bool) -> usize {
        if self.step.policy.on_host && last {
            self.leaving.push_back(unit);
            if self.leaving.len() > leaving(self.step.policy.reduce_after) {
                // The oldest was downloaded to the host.
                self.leaving.pop_front().into_iter().for_each(|unit| self.owned[unit] = false);
            }
        }
        if self.reduces_micro_batches() {
            let most = self.alive() + self.step.ranks.largest_shard(self.step.sizes[unit]);
            self.full[unit] = 0;
            self.push(unit);
            if last {
                self.trees[unit].clear();
                self.owned[unit] = true;
            }
            return most.max(self.alive());
        }
        let has_others = self.step.ranks.shards > 1 || self.blocks.len() > 1;
        if has_others || self.step.policy.reduce_dtype == Element::Bf16 {
            self.owned[unit] = true;
            let most = self.alive();
            self.full[unit] = 0;
            return most;
        }
        // The full sum is the owned part.
        self.full[unit] = 0;
        self.owned[unit] = true;
        self.alive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Storage, Zero};
    use hpctrain_nn::TiedParam;

    /// Returns the peaks of gradients and of parameters of a step over blocks of these sizes.
    fn peaks(
        borrows: &[Option<usize>],
        sizes: &[usize],
        shards: usize,
        virtual_ranks: usize,
        micros: usize,
    ) -> [usize; 2] {
        let keep = Zero::Three.sharding_policy().for_mesh(shards, 1, Storage::Ranks);
        let schedule = StepSchedule::alone(virtual_ranks, micros);
        let loans: Vec<_> = borrows
            .iter()
            .map(|unit| unit.map(|unit| TiedParam { unit, len: sizes[unit] }))
            .collect();
        let stage = Stage::whole(&loans);
        let ranks = VirtualRanks {
            total: virtual_ranks * shards,
            replicas: 1,
            shards,
            reduce_after: ReduceAfter::Step,
            counts: None,
        };
        let timeline =
            MemoryTimeline { stage: &stage, sizes, ranks: &ranks, policy: keep, schedule };
        let most =
            |what: fn(&MemoryMoment) -> usize| timeline.step().iter().map(what).max().unwrap();
        [most(|moment| moment.grads), most(|moment| moment.params)]
    }

    #[test]
    fn gradients_are_freed_during_the_backward() {
        // Two of five gradients are whole; of the last four, a quarter is kept.
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 1, 1), [8 + 4, 8]);
        // The gradient of a tied unit is whole until its own block is done.
        assert_eq!(peaks(&[None, None, Some(0)], &[4; 3], 4, 1, 1)[0], 12 + 1);
    }

    #[test]
    fn micro_batches_and_virtual_ranks_keep_full_ones() {
        // The first micro-batch leaves every gradient open; then the last block's is reduced while
        // its part is kept.
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 1, 2)[0], 20 + 1);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 1, 9)[0], 20 + 1);
        // Each block has one or two finished virtual ranks besides the current one.
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 2, 1)[0], 20 + 4);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 4, 1)[0], 40 + 4);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 4, 2)[0], 60);
        // A single rank frees nothing.
        assert_eq!(peaks(&[None; 5], &[4; 5], 1, 1, 1), [20, 20]);
    }
}
