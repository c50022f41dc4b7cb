//! The order in which blocks take their turns, and the units whose full parameters must be at hand:
//! a window of some turns ahead. Integers in, integers out.
//!
//! The window decides by position alone, never by arrivals, so that all ranks gather in the same
//! order.
//!
//! Units and guests are counted together, by their slots in the stage
//! ([`Stage`](super::pipeline_stage::Stage)).
//!
//! A pass is a step (forward and backward of every micro-batch), or one forward of an evaluation or
//! of a sampled token. The window is the current turn and the `parallel.prefetch` turns after it:
//! units that enter it are gathered, units that leave it are dropped. A borrowed unit enters with
//! the turn of the borrowing block, too. The last block's parameters therefore stay for its
//! backward, and at most prefetch + 2 full buffers are alive. With a window of 0 a gather starts at
//! its block's turn, and the last block's parameters still stay. After the update the first units
//! of the next pass are gathered at once, while data is loaded.

use super::pipeline_schedule::{Action, StepSchedule};

/// A block's turn: its unit, and the unit it borrows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockUse {
    /// The block's own unit.
    pub own: usize,
    /// The unit it borrows.
    pub lent: Option<usize>,
}

impl BlockUse {
    /// Its units, its own first.
    pub fn units(self) -> impl Iterator<Item = usize> {
        std::iter::once(self.own).chain(self.lent)
    }
}

/// The turns of a forward of `blocks`, each with the unit that it borrows.
pub fn forward(borrows: &[Option<usize>]) -> Vec<BlockUse> {
    borrows.iter().enumerate().map(|(own, &lent)| BlockUse { own, lent }).collect()
}

/// The turns of a step.
pub fn step(borrows: &[Option<usize>], schedule: StepSchedule) -> Vec<BlockUse> {
    let there = forward(borrows);
    let back: Vec<BlockUse> = there.iter().rev().copied().collect();
    let turns = |action| match action {
        Action::Forward(_) => there.iter(),
        Action::Backward(_) | Action::BackwardInput(_) => back.iter(),
        // Gradients of weights need no parameters.
        Action::BackwardWeight(_) | Action::Receive(..) | Action::Send(..) => [].iter(),
    };
    schedule.actions().into_iter().flat_map(turns).copied().collect()
}

/// Progress of a pass.
#[derive(Debug, Default)]
pub struct Prefetch {
    visits: Vec<BlockUse>,
    /// The turn under way.
    at: usize,
}

impl Prefetch {
    /// A pass of these turns.
    pub fn new(visits: Vec<BlockUse>) -> Self {
        Self { visits, at: 0 }
    }

    /// The turn under way.
    pub fn turn(&self) -> Option<BlockUse> {
        self.visits.get(self.at).copied()
    }

    /// Units of the turn under way and of the `ahead` turns after it, in the order of their use.
    pub fn wanted(&self, ahead: usize) -> impl Iterator<Item = usize> {
        window(&self.visits, self.at, ahead)
    }

    /// Ends the turn under way. Returns the units that it used and the next turns will not: those
    /// of the window, and the one turn whose parameters are here already.
    pub fn pass(&mut self, ahead: usize) -> Vec<usize> {
        let Some(visit) = self.turn() else { return Vec::new() };
        self.at += 1;
        let kept: Vec<usize> = window(&self.visits, self.at, ahead.saturating_sub(1)).collect();
        visit.units().filter(|unit| !kept.contains(unit)).collect()
    }
}

/// Units of turn `at` and of the `ahead` turns after it.
fn window(visits: &[BlockUse], at: usize, ahead: usize) -> impl Iterator<Item = usize> {
    visits.iter().skip(at).take(ahead.saturating_add(1)).flat_map(|visit| visit.units())
}

/// Elements of the full parameters that are alive at turn `at`, with units of these sizes.
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

    /// Three blocks; the last borrows the first's unit.
    const BORROWS: [Option<usize>; 3] = [None, None, Some(0)];

    /// Every gather (+) and release (-) of a pass, as text.
    fn events(visits: Vec<BlockUse>, ahead: usize) -> (String, usize) {
        let turns = visits.len();
        let mut prefetch = Prefetch::new(visits);
        let mut here = Vec::new();
        let mut text = String::new();
        let mut most = 0;
        for _ in 0..turns {
            for unit in prefetch.wanted(ahead) {
                if !here.contains(&unit) {
                    here.push(unit);
                    text += &format!("+{unit}");
                }
            }
            most = most.max(here.len());
            for unit in prefetch.pass(ahead) {
                here.retain(|&other| other != unit);
                text += &format!("-{unit}");
            }
            text += " ";
        }
        assert!(here.is_empty(), "{here:?} are left");
        (text.trim_end().into(), most)
    }

    #[test]
    fn units_come_ahead_and_stay_at_the_turn() {
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
