//! The order of forwards and backwards in a step: the one list that the step runs, and from which the order of gathers and the
//! estimate of memory follow. Integers in, integers out.

/// One piece of a step's work on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Forward of micro-batch `k`.
    Forward(usize),
    /// Backward of micro-batch `k`.
    Backward(usize),
}

/// A rank's micro-batches of a step, by lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSchedule {
    /// Lanes of this rank.
    pub lanes: usize,
    /// Micro-batches a lane.
    pub micros_per_lane: usize,
}

impl StepSchedule {
    /// Micro-batches of the step.
    pub fn micros(self) -> usize {
        self.lanes * self.micros_per_lane
    }

    /// The work of the step in order.
    pub fn actions(self) -> Vec<Action> {
        one_forward_one_backward(0, 1, self.micros())
    }

    /// The lane of micro-batch `k`.
    pub fn lane(self, k: usize) -> usize {
        k / self.micros_per_lane
    }

    /// Whether the backward of micro-batch `k` ends its lane, and if so, whether it is the rank's last lane.
    pub fn lane_end(self, k: usize) -> Option<bool> {
        let next = k + 1;
        next.is_multiple_of(self.micros_per_lane).then_some(next == self.micros())
    }

    /// A shorter step in which the same buffers are alive: all micro-batches of a lane after the first find the same.
    pub fn shortened(self) -> Self {
        Self { micros_per_lane: self.micros_per_lane.min(2), ..self }
    }
}

/// One forward, one backward (Narayanan et al., "PipeDream", 2019): stage `stage` of `stages` runs ahead by the
/// number of stages behind it, then alternates. With one stage this is plain gradient accumulation.
fn one_forward_one_backward(stage: usize, stages: usize, micros: usize) -> Vec<Action> {
    let ahead = (stages - 1 - stage).min(micros);
    let mut actions: Vec<Action> = (0..ahead).map(Action::Forward).collect();
    for k in 0..micros - ahead {
        actions.extend([Action::Forward(ahead + k), Action::Backward(k)]);
    }
    actions.extend((micros - ahead..micros).map(Action::Backward));
    actions
}

#[cfg(test)]
mod tests {
    use super::*;
    use Action::{Backward as B, Forward as F};

    #[test]
    fn one_stage_alternates() {
        assert_eq!(one_forward_one_backward(0, 1, 3), [F(0), B(0), F(1), B(1), F(2), B(2)]);
        assert_eq!(one_forward_one_backward(0, 1, 0), []);
    }

    #[test]
    fn earlier_stages_run_ahead() {
        assert_eq!(one_forward_one_backward(0, 3, 4), [F(0), F(1), F(2), B(0), F(3), B(1), B(2), B(3)]);
        assert_eq!(one_forward_one_backward(0, 4, 2), [F(0), F(1), B(0), B(1)]);
    }

    #[test]
    fn lanes_end_with_their_last_micro_batch() {
        let step = StepSchedule { lanes: 2, micros_per_lane: 3 };
        let ends: Vec<Option<bool>> = (0..step.micros()).map(|k| step.lane_end(k)).collect();
        assert_eq!(ends, [None, None, Some(false), None, None, Some(true)]);
        assert_eq!((0..6).map(|k| step.lane(k)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
        assert_eq!(step.shortened().micros(), 4);
    }
}
