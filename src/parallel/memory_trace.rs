//! A step played through with sizes alone: the full parameters and the gradients that are alive at
//! each moment.
//!
//! It follows [`Sharded`](super::Sharded) allocation by allocation; a test compares the two. Of
//! activations it knows how many micro-batches wait for their backward.
//!
//! The banner's `memory` lines follow from it: a GPU's memory is one pool, so its line is the
//! largest sum over all moments; on the host every category counts with its own peak.

use super::param_prefetch::{self, BlockUse, alive};
use super::pipeline_schedule::{Action, StepSchedule};
use super::pipeline_stage::Stage;
use super::{Lifetime, ShardingPolicy};

/// Inputs that determine the lifetimes of full buffers in a step.
#[derive(Debug, Clone, Copy)]
pub struct MemoryTimeline<'a> {
    /// The stage of the rank.
    pub stage: &'a Stage,
    /// Elements of the unit in each of its slots.
    pub sizes: &'a [usize],
    /// Ranks that share one copy of the parameters.
    pub shards: usize,
    /// Lifetimes of full buffers.
    pub keep: ShardingPolicy,
    /// The step's order of work.
    pub schedule: StepSchedule,
}

/// Position in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// In the forward of a block.
    Forward(usize),
    /// In the backward of a block.
    Backward(usize),
    /// The same, where gradients of weights are put off.
    BackwardInput(usize),
    /// In the computation of those of a block.
    BackwardWeight(usize),
    /// After the backward of a block, at the end of a virtual rank.
    After(usize),
}

/// Buffers alive at one moment of a step, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The moment.
    pub when: When,
    /// Full parameters.
    pub params: usize,
    /// Gradients, full ones and owned parts.
    pub grads: usize,
    /// Micro-batches that wait for their backward, besides the one at hand.
    pub waiting: usize,
    /// Micro-batches whose gradients of weights are put off, besides the one at hand.
    pub put_off: usize,
}

impl MemoryTimeline<'_> {
    /// The moments of a step that is not the first, in order.
    pub fn step(&self) -> Vec<Moment> {
        let schedule = self.schedule.representative();
        let pass = param_prefetch::step(&self.stage.borrows(), schedule);
        let blocks = self.stage.units.len();
        let mut grads = Gradients::new(self);
        let mut moments = Vec::new();
        let mut turn = 0;
        let mut waiting = 0;
        let mut put_off = 0;
        let window = self.keep.ahead;
        for action in schedule.actions() {
            match action {
                Action::Forward(_) => {
                    for block in 0..blocks {
                        let params = self.params(&pass, turn, window);
                        let when = When::Forward(block);
                        moments.push(Moment {
                            when,
                            params,
                            grads: grads.alive(),
                            waiting,
                            put_off,
                        });
                        turn += 1;
                    }
                    waiting += 1;
                }
                Action::Backward(k) | Action::BackwardInput(k) => {
                    waiting -= 1;
                    let puts_off = matches!(action, Action::BackwardInput(_));
                    let virtual_rank_end = schedule.virtual_rank_end(k);
                    if virtual_rank_end.is_some() {
                        grads.expect();
                    }
                    for block in (0..blocks).rev() {
                        grads.open(block);
                        let params = self.params(&pass, turn, window);
                        let when = if puts_off {
                            When::BackwardInput(block)
                        } else {
                            When::Backward(block)
                        };
                        moments.push(Moment {
                            when,
                            params,
                            grads: grads.alive(),
                            waiting,
                            put_off,
                        });
                        turn += 1;
                        if let (Some(last), false) = (virtual_rank_end, puts_off) {
                            let params = self.params(&pass, turn, window.saturating_sub(1));
                            let grads = grads.virtual_rank_done(block, last, self.stage.is_first());
                            moments.push(Moment {
                                when: When::After(block),
                                params,
                                grads,
                                waiting,
                                put_off,
                            });
                        }
                    }
                    put_off += usize::from(puts_off);
                    if (virtual_rank_end, puts_off) == (Some(true), false) {
                        let grads = grads.reduce();
                        moments.push(Moment {
                            when: When::After(0),
                            params: 0,
                            grads,
                            waiting,
                            put_off,
                        });
                    }
                }
                Action::BackwardWeight(k) => {
                    put_off -= 1;
                    let params = self.params(&pass, turn, window.saturating_sub(1));
                    for block in (0..blocks).rev() {
                        let when = When::BackwardWeight(block);
                        moments.push(Moment {
                            when,
                            params,
                            grads: grads.alive(),
                            waiting,
                            put_off,
                        });
                        if let Some(last) = schedule.virtual_rank_end(k) {
                            let grads = grads.virtual_rank_done(block, last, true);
                            moments.push(Moment { when, params, grads, waiting, put_off });
                        }
                    }
                }
                Action::Receive(..) | Action::Send(..) => {}
            }
        }
        let params = self.updated();
        let grads = grads.end();
        moments.push(Moment { when: When::After(0), params, grads, waiting: 0, put_off: 0 });
        moments
    }

    /// As [`MemoryTimeline::step`], for a forward outside training.
    pub fn forward(&self) -> Vec<Moment> {
        let pass = param_prefetch::forward(&self.stage.borrows());
        let grads = Gradients::new(self).alive();
        let moment = |block| {
            let params = self.params(&pass, block, self.keep.ahead);
            Moment { when: When::Forward(block), params, grads, waiting: 0, put_off: 0 }
        };
        (0..self.stage.units.len()).map(moment).collect()
    }

    /// Full parameters at the end of the update, with the parts that leave for other stages and
    /// come from them.
    fn updated(&self) -> usize {
        let full = match self.keep.params {
            Lifetime::Step => self.sizes.iter().sum(),
            Lifetime::Use => {
                self.sizes[..self.stage.units.len().min(self.keep.ahead)].iter().sum::<usize>()
            }
        };
        let guests = self.stage.units.len()..self.sizes.len();
        let traded = self.stage.lent.iter().map(|lent| lent.slot).chain(guests);
        full + traded.map(|slot| self.sizes[slot] / self.shards).sum::<usize>()
    }

    /// Full parameters at a turn, with those of the `ahead` next ones.
    fn params(&self, pass: &[BlockUse], turn: usize, ahead: usize) -> usize {
        match self.keep.params {
            Lifetime::Step => self.sizes.iter().sum(),
            Lifetime::Use => alive(pass, turn, ahead, self.sizes),
        }
    }
}

/// Gradients that are alive, by unit.
struct Gradients<'a> {
    step: &'a MemoryTimeline<'a>,
    /// Whether there is a buffer to add to.
    open: Vec<bool>,
    /// Elements of the gradient of borrowed parameters, while it is there.
    borrowed: Vec<usize>,
    /// Elements of the gradients that blocks which borrow a unit have given back, or are to.
    returned: Vec<usize>,
    /// Units whose sums are there, and not yet on the wire.
    ended: Vec<usize>,
    /// Finished virtual ranks: the heights of their trees.
    trees: Vec<Vec<u32>>,
    /// Whether the full sum is there, or on the wire.
    full: Vec<bool>,
    /// Whether the owned part is there, of a sum whose rest was given up.
    owned: Vec<bool>,
    /// The unit whose sum is on the wire.
    started: Option<usize>,
}

impl<'a> Gradients<'a> {
    /// At the start of a step.
    fn new(step: &'a MemoryTimeline<'a>) -> Self {
        let units = step.stage.units.len();
        let none = vec![false; units];
        let nothing = vec![0; units];
        let open = vec![step.keep.grads == Lifetime::Step; units];
        Self {
            step,
            open,
            borrowed: nothing.clone(),
            returned: nothing,
            ended: vec![],
            trees: vec![vec![]; units],
            full: none.clone(),
            owned: none,
            started: None,
        }
    }

    fn alive(&self) -> usize {
        let alive = |unit: usize| {
            let full = self.trees[unit].len()
                + usize::from(self.open[unit])
                + usize::from(self.full[unit]);
            let part = self.step.sizes[unit] / self.step.shards;
            let loans = self.borrowed[unit] + self.returned[unit];
            full * self.step.sizes[unit] + loans + if self.owned[unit] { part } else { 0 }
        };
        (0..self.open.len()).map(alive).sum()
    }

    /// The backward of a block begins.
    fn open(&mut self, block: usize) {
        self.open[block] = true;
        self.borrowed[block] = self.step.stage.borrowed[block].map_or(0, |loan| loan.len);
    }

    /// The last backward of a virtual rank begins.
    fn expect(&mut self) {
        self.step.stage.lent.iter().for_each(|lent| self.returned[lent.slot] += lent.len);
    }

    /// The virtual rank's gradient of a unit is final; after the last virtual rank its sum goes on the wire at once
    /// if it `reduces`. Returns the most that is alive meanwhile.
    fn virtual_rank_done(&mut self, unit: usize, last: bool, reduces: bool) -> usize {
        let before = self.alive();
        let borrowed = std::mem::take(&mut self.borrowed[unit]);
        self.returned[unit] = 0;
        match self.step.stage.borrowed[unit] {
            // It leaves for another stage, which may not be ready for it before long.
            Some(loan) if loan.from.is_some() => self.returned[unit] = borrowed,
            Some(loan) => self.returned[loan.slot] += borrowed,
            None => {}
        }
        let tree = &mut self.trees[unit];
        let mut height = 0;
        let mut spare = false;
        while tree.pop_if(|other| *other == height).is_some() {
            (height, spare) = (height + 1, true);
        }
        tree.push(height);
        self.open[unit] = spare && !last;
        if !last {
            return before.max(self.alive());
        }
        self.trees[unit].clear();
        self.full[unit] = true;
        self.ended.push(unit);
        // Where other stages wait for this one's gradients, those go first.
        if reduces { before.max(self.reduce()) } else { before.max(self.alive()) }
    }

    /// The sums of units whose virtual ranks have ended go on the wire. Returns the most that is alive
    /// meanwhile.
    fn reduce(&mut self) -> usize {
        let mut most = 0;
        for unit in std::mem::take(&mut self.ended) {
            most = most.max(self.land());
            self.started = Some(unit);
        }
        most
    }

    /// The step's sums are all waited for. Returns the most that is alive meanwhile.
    fn end(&mut self) -> usize {
        self.land()
    }

    /// Of the sum on the wire the owned part is copied, then the rest is given up.
    fn land(&mut self) -> usize {
        let Some(unit) = self.started.take().filter(|_| self.step.keep.grads == Lifetime::Use)
        else {
            return self.alive();
        };
        if self.step.keep.on_host {
            // The part before has left for the host.
            self.owned.fill(false);
        }
        if self.step.shards > 1 {
            self.owned[unit] = true;
            let most = self.alive();
            self.full[unit] = false;
            return most;
        }
        // All of it is the owned part.
        self.full[unit] = false;
        self.owned[unit] = true;
        self.alive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Zero;
    use hpctrain_nn::TiedParam;

    /// The most gradients of a step over blocks of these sizes, and the most parameters.
    fn peaks(
        borrows: &[Option<usize>],
        sizes: &[usize],
        shards: usize,
        virtual_ranks: usize,
        micros: usize,
    ) -> [usize; 2] {
        let keep = Zero::Three.residency().over(shards);
        let schedule = StepSchedule::alone(virtual_ranks, micros);
        let loan = |unit: Option<usize>| unit.map(|unit| TiedParam { unit, len: sizes[unit] });
        let stage = Stage::whole(&borrows.iter().copied().map(loan).collect::<Vec<_>>());
        let timeline = MemoryTimeline { stage: &stage, sizes, shards, keep, schedule };
        let most = |what: fn(&Moment) -> usize| timeline.step().iter().map(what).max().unwrap();
        [most(|moment| moment.grads), most(|moment| moment.params)]
    }

    #[test]
    fn gradients_are_given_up_as_they_go() {
        // Of five blocks two are whole; the kept part of the last four is a quarter.
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 1, 1), [8 + 4, 8]);
        // A lent unit is whole as long as its own block is not done.
        assert_eq!(peaks(&[None, None, Some(0)], &[4; 3], 4, 1, 1)[0], 12 + 1);
    }

    #[test]
    fn micro_batches_and_virtual_ranks_keep_full_ones() {
        // The first micro-batch leaves every gradient open; then the last block's is reduced while
        // its part is kept.
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 1, 2)[0], 20 + 1);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 1, 9)[0], 20 + 1);
        // Of each block a finished virtual rank, or two of them, beside the one being computed.
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 2, 1)[0], 20 + 4);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 4, 1)[0], 40 + 4);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 4, 2)[0], 60);
        // One rank gives nothing up.
        assert_eq!(peaks(&[None; 5], &[4; 5], 1, 1, 1), [20, 20]);
    }
}
