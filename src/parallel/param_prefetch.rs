//! The order in which blocks use their parameters, and the window of units whose full parameters
//! are prefetched. This module computes with indices only.
//!
//! The window depends on positions only, never on arrivals, so that all ranks all-gather in the
//! same order.
//!
//! Units and tied-weight replicas are indexed together, by their slots in the stage
//! ([`Stage`](super::pipeline_stage::Stage)).
//!
//! A pass is a step (forward and backward of every micro-batch), or one forward of an evaluation or
//! of a sampled token. The window is the current turn and the `parallel.prefetch` turns after it:
//! units that enter it are all-gathered, units that leave it are freed. A tied unit also enters
//! with the turn of the block that is tied to it. The last block's parameters therefore stay for
//! its backward, and at most prefetch + 2 full buffers are alive. With a prefetch of 0 an
//! all-gather starts at its block's turn, and the last block's parameters still stay. After the
//! update the first units of the next pass are all-gathered at once, while data is loaded.

use super::pipeline_schedule::{Action, StepSchedule};

/// A block's turn: its unit, and the unit that it is tied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockUse {
    /// The block's own unit.
    pub own: usize,
    /// The unit that it is tied to.
    pub tied: Option<usize>,
}

impl BlockUse {
    /// Returns its units, its own first.
    pub fn units(self) -> impl Iterator<Item = usize> {
        std::iter::once(self.own).chain(self.tied)
    }
}

/// Returns the turns of a forward pass; `borrows` has the unit that each block is tied to.
pub fn forward(borrows: &[Option<usize>]) -> Vec<BlockUse> {
    borrows.iter().enumerate().map(|(own, &lent)| BlockUse { own, tied: lent }).collect()
}

/// Returns the turns of a step.
pub fn step(borrows: &[Option<usize>], schedule: StepSchedule) -> Vec<BlockUse> {
    let forwards = forward(borrows);
    let backwards: Vec<BlockUse> = forwards.iter().rev().copied().collect();
    let turns = schedule.actions().into_iter().flat_map(|action| match action {
        Action::Forward(_) => forwards.iter(),
        Action::Backward(_) | Action::BackwardInput(_) => backwards.iter(),
        // Deferred wgrad needs no parameters.
        Action::BackwardWeight(_) | Action::Receive(..) | Action::Send(..) => [].iter(),
    });
    turns.copied().collect()
}

/// The progress of a pass.
#[derive(Debug, Default)]
pub struct Prefetch {
    visits: Vec<BlockUse>,
    /// The index of the current turn.
    at: usize,
}

impl Prefetch {
    /// Creates a pass of these turns.
    pub fn new(visits: Vec<BlockUse>) -> Self {
        Self { visits, at: 0 }
    }

    /// Returns the current turn.
    pub fn turn(&self) -> Option<BlockUse> {
        self.visits.get(self.at).copied()
    }

    /// Returns the units of the current turn and of the `ahead` turns after it, in order of use.
    pub fn window(&self, ahead: usize) -> impl Iterator<Item = usize> {
        window(&self.visits, self.at, ahead)
    }

    /// Ends the current turn. Returns the units that it used and that the turns of the next window,
    /// whose parameters are already in memory, do not.
    pub fn end_turn(&mut self, ahead: usize) -> Vec<usize> {
        let Some(visit) = self.turn() else { return Vec::new() };
        self.at += 1;
        let kept: Vec<usize> = window(&self.visits, self.at, ahead.saturating_sub(1)).collect();
        visit.units().filter(|unit| !kept.contains(unit)).collect()
    }
}

/// Returns the units of turn `at` and of the `ahead` turns after it.
fn window(visits: &[BlockUse], at: usize, ahead: usize) -> impl Iterator<Item = usize> {
    visits.iter().skip(at).take(ahead.saturating_add(1)).flat_map(|visit| visit.units())
}

/// Returns the number of elements of the full parameters that are alive at turn `at`, with units of
/// these sizes.
pub fn alive(visits: &[BlockUse], at: usize, ahead: usize, sizes: &[usize]) -> usize {
    let units: std::collections::BTreeSet<usize> = window(visits, at, ahead).collect();
    units.into_iter().map(|unit| sizes[unit]).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(micros_per_virtual_rank: usize) -> StepSchedule {
        StepSchedule::alone(1, micros_per_virtual_rank)
    }

    /// Three blocks; the last is tied to the first.
    const BORROWS: [Option<usize>; 3] = [None, None, Some(0)];

    /// Returns every all-gather (+) and release (-) of a pass as text, and the most units alive.
    fn events(visits: Vec<BlockUse>, ahead: usize) -> (String, usize) {
        let turns = visits.len();
        let mut prefetch = Prefetch::new(visits);
        let mut alive = Vec::new();
        let mut text = String::new();
        let mut most = 0;
        for _ in 0..turns {
            for unit in prefetch.window(ahead) {
                if !alive.contains(&unit) {
                    alive.push(unit);
                    text += &format!("+{unit}");
                }
            }
            most = most.max(alive.len());
            for unit in prefetch.end_turn(ahead) {
                alive.retain(|&other| other != unit);
                text += &format!("-{unit}");
            }
            text += " ";
        }
        assert!(alive.is_empty(), "{alive:?} are left");
        (text.trim_end().into(), most)
    }

    #[test]
    fn units_are_prefetched_and_kept_for_the_backward() {
        assert_eq!(events(step(&BORROWS, micros(1)), 0).0, "+0-0 +1-1 +2+0 -2-0 +1-1 +0-0");
        assert_eq!(events(step(&BORROWS, micros(1)), 1).0, "+0+1-0 +2+0-1  +1-2-0 +0-1 -0");
        assert_eq!(events(step(&BORROWS, micros(1)), 2).0, "+0+1+2 -1 +1 -2 -1 -0");
    }

    #[test]
    fn the_peak_is_what_is_alive() {
        let peak = |visits: &[BlockUse], ahead, sizes: &[usize]| {
            (0..visits.len()).map(|at| alive(visits, at, ahead, sizes)).max().unwrap()
        };
        let sizes = [1, 1, 1];
        for count in [1, 2] {
            for ahead in 0..5 {
                let visits = step(&BORROWS, micros(count));
                assert_eq!(
                    events(visits.clone(), ahead).1,
                    peak(&visits, ahead, &sizes),
                    "{count}, {ahead}"
                );
            }
        }
        assert_eq!(peak(&forward(&[None; 9]), 3, &[1; 9]), 4);
        assert_eq!(peak(&forward(&[None; 9]), usize::MAX, &[1; 9]), 9);
    }
}
