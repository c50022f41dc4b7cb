//! The order of forwards and backwards in a step. Integers in, integers out.

/// One piece of a step's work on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Forward of micro-batch `k`.
    Forward(usize),
    /// Backward of micro-batch `k`.
    Backward(usize),
}

/// One forward, one backward (Narayanan et al., "PipeDream", 2019): stage `stage` of `stages` runs ahead by the
/// number of stages behind it, then alternates. With one stage this is plain gradient accumulation.
pub fn one_forward_one_backward(stage: usize, stages: usize, micros: usize) -> Vec<Action> {
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
}
