//! A step played through with sizes alone: the full parameters and the gradients that are alive at each moment.
//!
//! It follows [`Sharded`](super::Sharded) allocation by allocation; a test compares the two.
//!
//! The banner's `memory` lines follow from it: a GPU's memory is one pool, so its line is the largest sum over all
//! moments; on the host every category counts with its own peak.

use super::prefetch::{self, Visit, alive};
use super::schedule::{Action, StepSchedule};
use super::{Life, Residency};

/// Inputs that determine the lifetimes of full buffers in a step.
#[derive(Debug, Clone, Copy)]
pub struct MemoryTimeline<'a> {
    /// The unit that each block borrows.
    pub borrows: &'a [Option<usize>],
    /// Elements of every unit.
    pub sizes: &'a [usize],
    /// Ranks that share one copy of the parameters.
    pub shards: usize,
    /// Lifetimes of full buffers.
    pub keep: Residency,
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
    /// After the backward of a block, at the end of a lane.
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
}

impl MemoryTimeline<'_> {
    /// The moments of a step that is not the first, in order.
    pub fn step(&self) -> Vec<Moment> {
        let schedule = self.schedule.shortened();
        let pass = prefetch::step(self.borrows, schedule);
        let mut grads = Gradients::new(self);
        let (mut moments, mut turn) = (Vec::new(), 0);
        for action in schedule.actions() {
            match action {
                Action::Forward(_) => {
                    for block in 0..self.sizes.len() {
                        let params = self.params(&pass, turn, self.keep.ahead);
                        moments.push(Moment { when: When::Forward(block), params, grads: grads.alive() });
                        turn += 1;
                    }
                }
                Action::Backward(k) => {
                    for block in (0..self.sizes.len()).rev() {
                        Visit { own: block, lent: self.borrows[block] }
                            .units()
                            .for_each(|unit| grads.open[unit] = true);
                        let params = self.params(&pass, turn, self.keep.ahead);
                        moments.push(Moment { when: When::Backward(block), params, grads: grads.alive() });
                        turn += 1;
                        if let Some(last) = schedule.lane_end(k) {
                            let most = grads.lane_done(block, last);
                            let params = self.params(&pass, turn, self.keep.ahead.saturating_sub(1));
                            moments.push(Moment { when: When::After(block), params, grads: most });
                        }
                    }
                }
            }
        }
        moments.push(Moment { when: When::After(0), params: 0, grads: grads.end() });
        moments
    }

    /// As [`MemoryTimeline::step`], for a forward outside training.
    pub fn forward(&self) -> Vec<Moment> {
        let pass = prefetch::forward(self.borrows);
        let grads = Gradients::new(self).alive();
        let moment = |block| {
            let params = self.params(&pass, block, self.keep.ahead);
            Moment { when: When::Forward(block), params, grads }
        };
        (0..self.sizes.len()).map(moment).collect()
    }

    /// Full parameters at a turn, with those of the `ahead` next ones.
    fn params(&self, pass: &[Visit], turn: usize, ahead: usize) -> usize {
        match self.keep.params {
            Life::Step => self.sizes.iter().sum(),
            Life::Use => alive(pass, turn, ahead, self.sizes),
        }
    }
}

/// Gradients that are alive, by unit.
struct Gradients<'a> {
    step: &'a MemoryTimeline<'a>,
    /// Whether there is a buffer to add to.
    open: Vec<bool>,
    /// Finished lanes: the heights of their trees.
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
        let units = step.sizes.len();
        let none = vec![false; units];
        let open = vec![step.keep.grads == Life::Step; units];
        Self { step, open, trees: vec![vec![]; units], full: none.clone(), owned: none, started: None }
    }

    fn alive(&self) -> usize {
        let alive = |unit: usize| {
            let full = self.trees[unit].len() + usize::from(self.open[unit]) + usize::from(self.full[unit]);
            let part = self.step.sizes[unit] / self.step.shards;
            full * self.step.sizes[unit] + if self.owned[unit] { part } else { 0 }
        };
        (0..self.open.len()).map(alive).sum()
    }

    /// The lane's gradient of a unit is final. Returns the most that is alive meanwhile.
    fn lane_done(&mut self, unit: usize, last: bool) -> usize {
        let (tree, mut height, mut spare) = (&mut self.trees[unit], 0, false);
        while tree.pop_if(|other| *other == height).is_some() {
            (height, spare) = (height + 1, true);
        }
        tree.push(height);
        self.open[unit] = spare && !last;
        if !last {
            return self.alive();
        }
        self.trees[unit].clear();
        self.full[unit] = true;
        let most = self.land();
        self.started = Some(unit);
        most
    }

    /// The step's sums are all waited for. Returns the most that is alive meanwhile.
    fn end(&mut self) -> usize {
        self.land()
    }

    /// Of the sum on the wire the owned part is copied, then the rest is given up.
    fn land(&mut self) -> usize {
        let Some(unit) = self.started.take().filter(|_| self.step.keep.grads == Life::Use) else {
            return self.alive();
        };
        self.owned[unit] = true;
        let most = self.alive();
        self.full[unit] = false;
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::Zero;

    /// The most gradients of a step over blocks of these sizes, and the most parameters.
    fn peaks(borrows: &[Option<usize>], sizes: &[usize], shards: usize, lanes: usize, micros: usize) -> [usize; 2] {
        let keep = Zero::Three.residency().over(shards);
        let schedule = StepSchedule { lanes, micros_per_lane: micros };
        let timeline = MemoryTimeline { borrows, sizes, shards, keep, schedule };
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
    fn micro_batches_and_lanes_keep_full_ones() {
        // The first micro-batch leaves every gradient open; then the last block's is reduced while its part is kept.
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 1, 2)[0], 20 + 1);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 1, 9)[0], 20 + 1);
        // Of each block a finished lane, or two of them, beside the one being computed.
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 2, 1)[0], 20 + 4);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 4, 1)[0], 40 + 4);
        assert_eq!(peaks(&[None; 5], &[4; 5], 4, 4, 2)[0], 60);
        // One rank gives nothing up.
        assert_eq!(peaks(&[None; 5], &[4; 5], 1, 1, 1), [20, 20]);
    }
}
