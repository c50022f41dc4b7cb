//! The order of a rank's work in a step: the one list that the step runs, and from which the order of gathers and the
//! estimate of memory follow. Integers in, integers out.
//!
//! Receives are posted one computation ahead, so that a message arrives beside the computation before the one that
//! needs it. Only collectives hold up later requests of a rank, and all ranks of a stage make them at the same places of the
//! same list; so no rank waits for another that waits for it, if the list of every stage ends when each message comes
//! after its send. A test plays that through.

use std::collections::VecDeque;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The messages between neighbouring stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Flow {
    /// Outputs of a stage's last block, to the next stage.
    Activations,
    /// Gradients of a stage's input, to the stage before.
    Gradients,
}

/// The order of computations in a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum PipelineSchedule {
    /// One forward, one backward (Narayanan et al., "PipeDream", 2019).
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// The same with gradients of weights put off into what would be idle time: ZB-H1 (Qi et al., "Zero bubble pipeline
    /// parallelism", 2023).
    #[serde(rename = "zero-bubble")]
    ZeroBubble,
}

impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// One piece of a step's work on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Get ready to receive the message for micro-batch `k`.
    Receive(Flow, usize),
    /// Forward of micro-batch `k`.
    Forward(usize),
    /// Backward of micro-batch `k`.
    Backward(usize),
    /// The same, of which the products that make gradients of weights are put off.
    BackwardInput(usize),
    /// Those products of micro-batch `k`.
    BackwardWeight(usize),
    /// Send the result of the computation before.
    Send(Flow, usize),
}

/// A rank's micro-batches of a step, by lanes, and its place in the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSchedule {
    /// Lanes of this rank.
    pub lanes: usize,
    /// Micro-batches a lane.
    pub micros_per_lane: usize,
    /// Number of the stage.
    pub stage: usize,
    /// Stages.
    pub stages: usize,
    /// The order of computations, where there are several stages.
    pub order: PipelineSchedule,
}

impl StepSchedule {
    /// Without a pipeline.
    pub fn alone(lanes: usize, micros_per_lane: usize) -> Self {
        Self { lanes, micros_per_lane, stage: 0, stages: 1, order: PipelineSchedule::default() }
    }

    /// Micro-batches of the step.
    pub fn micros(self) -> usize {
        self.lanes * self.micros_per_lane
    }

    /// The work of the step in order.
    pub fn actions(self) -> Vec<Action> {
        let computations = one_forward_one_backward(self.stage, self.stages, self.micros());
        self.with_messages(match self.order {
            PipelineSchedule::OneForwardOneBackward => computations,
            PipelineSchedule::ZeroBubble => self.with_weights_put_off(computations),
        })
    }

    /// The lane of micro-batch `k`.
    pub fn lane(self, k: usize) -> usize {
        k / self.micros_per_lane
    }

    /// Whether micro-batch `k` is the first of its lane.
    pub fn lane_start(self, k: usize) -> bool {
        k.is_multiple_of(self.micros_per_lane)
    }

    /// Whether the backward of micro-batch `k` ends its lane, and if so, whether it is the rank's last lane.
    pub fn lane_end(self, k: usize) -> Option<bool> {
        let next = k + 1;
        next.is_multiple_of(self.micros_per_lane).then_some(next == self.micros())
    }

    /// A shorter step in which the same buffers are alive: all micro-batches of a lane after the first find the same, once
    /// the stages behind are at work and as many gradients of weights are put off as ever.
    pub fn shortened(self) -> Self {
        Self { micros_per_lane: self.micros_per_lane.min(2 * self.stages), ..self }
    }

    /// Part of the step in which a stage has nothing to do, where every stage takes as long: (p − 1) / (m + p − 1) of
    /// p stages and m micro-batches (Narayanan et al., 2021). With weights put off, where a forward takes as long as
    /// the gradients of inputs and as those of weights: ℓ·(p − 1) / (3·m + ℓ·(p − 1)) in ℓ lanes (Qi et al., 2023, for one).
    pub fn bubble(self) -> f64 {
        let (idle, busy) = match self.order {
            PipelineSchedule::OneForwardOneBackward => (self.stages - 1, self.micros()),
            PipelineSchedule::ZeroBubble => (self.lanes * (self.stages - 1), 3 * self.micros()),
        };
        idle as f64 / (busy + idle) as f64
    }

    /// The message that a computation needs from another stage.
    fn needs(self, computation: Action) -> Option<Action> {
        match computation {
            Action::Forward(k) if self.stage > 0 => Some(Action::Receive(Flow::Activations, k)),
            Action::Backward(k) | Action::BackwardInput(k) if self.stage + 1 < self.stages => {
                Some(Action::Receive(Flow::Gradients, k))
            }
            _ => None,
        }
    }

    /// The message that another stage needs from a computation.
    fn gives(self, computation: Action) -> Option<Action> {
        match computation {
            Action::Forward(k) if self.stage + 1 < self.stages => Some(Action::Send(Flow::Activations, k)),
            Action::Backward(k) | Action::BackwardInput(k) if self.stage > 0 => Some(Action::Send(Flow::Gradients, k)),
            _ => None,
        }
    }

    /// Computations whose gradients of weights come later by as many backwards as there are stages before this one, so that
    /// those get the gradients of their outputs sooner. A lane's are all done before its sum leaves this rank.
    fn with_weights_put_off(self, computations: Vec<Action>) -> Vec<Action> {
        let mut actions = Vec::with_capacity(computations.len() + self.micros());
        let mut put_off = VecDeque::with_capacity(self.stage + 1);
        for computation in computations {
            match computation {
                // Nobody waits for the first stage.
                Action::Backward(k) if self.stage > 0 => {
                    actions.push(Action::BackwardInput(k));
                    put_off.push_back(k);
                    let waiting = if self.lane_end(k).is_some() { 0 } else { self.stage };
                    let due = put_off.len().saturating_sub(waiting);
                    actions.extend(put_off.drain(..due).map(Action::BackwardWeight));
                }
                other => actions.push(other),
            }
        }
        actions
    }

    /// Computations with the messages between stages.
    fn with_messages(self, computations: Vec<Action>) -> Vec<Action> {
        let mut actions = Vec::with_capacity(3 * computations.len());
        actions.extend(computations.first().and_then(|first| self.needs(*first)));
        for (i, computation) in computations.iter().enumerate() {
            actions.extend(computations.get(i + 1).and_then(|next| self.needs(*next)));
            actions.push(*computation);
            actions.extend(self.gives(*computation));
        }
        actions
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
    use Action::{Backward as B, BackwardInput as I, BackwardWeight as W, Forward as F, Receive as R, Send as S};
    use Flow::{Activations as X, Gradients as G};
    use std::collections::HashMap;

    #[test]
    fn one_stage_alternates() {
        assert_eq!(StepSchedule::alone(1, 3).actions(), [F(0), B(0), F(1), B(1), F(2), B(2)]);
        assert_eq!(one_forward_one_backward(0, 1, 0), []);
    }

    #[test]
    fn earlier_stages_run_ahead() {
        assert_eq!(one_forward_one_backward(0, 3, 4), [F(0), F(1), F(2), B(0), F(3), B(1), B(2), B(3)]);
        assert_eq!(one_forward_one_backward(0, 4, 2), [F(0), F(1), B(0), B(1)]);
    }

    #[test]
    fn messages_are_awaited_one_computation_ahead() {
        let stage = |stage| StepSchedule { stage, stages: 2, ..StepSchedule::alone(1, 2) }.actions();
        assert_eq!(stage(0), [F(0), S(X, 0), R(G, 0), F(1), S(X, 1), R(G, 1), B(0), B(1)]);
        assert_eq!(stage(1), [R(X, 0), F(0), R(X, 1), B(0), S(G, 0), F(1), B(1), S(G, 1)]);
    }

    #[test]
    fn lanes_end_with_their_last_micro_batch() {
        let step = StepSchedule::alone(2, 3);
        let ends: Vec<Option<bool>> = (0..step.micros()).map(|k| step.lane_end(k)).collect();
        assert_eq!(ends, [None, None, Some(false), None, None, Some(true)]);
        assert_eq!((0..6).map(|k| step.lane(k)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
        assert_eq!(step.shortened().micros(), 4);
    }

    #[test]
    fn gradients_of_weights_wait_until_their_lane_ends() {
        let stage = |stage, lanes, micros| {
            let order = PipelineSchedule::ZeroBubble;
            StepSchedule { stage, stages: 3, order, ..StepSchedule::alone(lanes, micros) }
        };
        let computations = |step: StepSchedule| -> Vec<Action> {
            step.actions().into_iter().filter(|action| !matches!(action, R(..) | S(..))).collect()
        };
        assert_eq!(computations(stage(0, 1, 3)), [F(0), F(1), F(2), B(0), B(1), B(2)]);
        assert_eq!(computations(stage(1, 1, 3)), [F(0), F(1), I(0), F(2), I(1), W(0), I(2), W(1), W(2)]);
        assert_eq!(
            computations(stage(2, 1, 4)),
            [F(0), I(0), F(1), I(1), F(2), I(2), W(0), F(3), I(3), W(1), W(2), W(3)]
        );
        assert_eq!(
            computations(stage(2, 2, 2)),
            [F(0), I(0), F(1), I(1), W(0), W(1), F(2), I(2), F(3), I(3), W(2), W(3)]
        );
        // A message does not wait for them.
        assert_eq!(stage(2, 1, 1).actions(), [R(X, 0), F(0), I(0), S(G, 0), W(0)]);
    }

    /// A step played through by all stages.
    struct Played {
        /// Until all are done, where a forward takes one second, as do the gradients of inputs and those of weights, and
        /// messages nothing.
        seconds: usize,
        /// Most forwards whose backwards are yet to come, by stage.
        alive: Vec<usize>,
        /// Most backwards whose weights' gradients are yet to come, by stage.
        put_off: Vec<usize>,
    }

    /// Each stage stops at a computation until the message that it needs is there.
    fn play(step: StepSchedule) -> Played {
        let stages = step.stages;
        let schedule = |stage| StepSchedule { stage, ..step };
        let mut lists: Vec<VecDeque<Action>> = (0..stages).map(|stage| schedule(stage).actions().into()).collect();
        // By sender and kind: messages under way, with their time; received in the order of the posts.
        let mut wire: HashMap<(usize, Flow), VecDeque<(usize, usize)>> = HashMap::new();
        let none = vec![0; stages];
        let (mut clocks, mut alive, mut put_off) = (none.clone(), none.clone(), none.clone());
        let mut most = Played { seconds: 0, alive: none.clone(), put_off: none.clone() };
        let (mut backwards, mut weights) = (none.clone(), none);
        while lists.iter().any(|list| !list.is_empty()) {
            let mut moved = false;
            for stage in 0..stages {
                while let Some(&action) = lists[stage].front() {
                    if let Some(R(flow, k)) = schedule(stage).needs(action) {
                        let from = if flow == X { stage - 1 } else { stage + 1 };
                        let Some((sent, time)) = wire.entry((from, flow)).or_default().pop_front() else { break };
                        assert_eq!(sent, k, "stage {stage} of {stages} takes another message than its own");
                        clocks[stage] = clocks[stage].max(time);
                    }
                    match action {
                        R(..) => {}
                        S(flow, k) => wire.entry((stage, flow)).or_default().push_back((k, clocks[stage])),
                        F(_) => {
                            alive[stage] += 1;
                            most.alive[stage] = most.alive[stage].max(alive[stage]);
                            clocks[stage] += 1;
                        }
                        B(k) | I(k) => {
                            assert_eq!(k, backwards[stage], "gradients are added in the order of micro-batches");
                            assert_eq!(
                                weights[stage] / step.micros_per_lane,
                                k / step.micros_per_lane,
                                "two lanes in one"
                            );
                            (backwards[stage], alive[stage]) = (k + 1, alive[stage] - 1);
                            clocks[stage] += 1;
                            put_off[stage] += 1;
                            most.put_off[stage] = most.put_off[stage].max(put_off[stage]);
                        }
                        W(_) => {}
                    }
                    if let B(k) | W(k) = action {
                        assert_eq!(k, weights[stage], "gradients are added in the order of micro-batches");
                        (weights[stage], put_off[stage]) = (k + 1, put_off[stage] - 1);
                        clocks[stage] += 1;
                    }
                    lists[stage].pop_front();
                    moved = true;
                }
            }
            assert!(moved, "{step:?} stands still");
        }
        assert!(wire.values().all(VecDeque::is_empty), "a message that nobody takes");
        assert!(weights.iter().all(|weights| *weights == step.micros()), "{step:?} leaves gradients of weights");
        Played { seconds: clocks.into_iter().max().unwrap_or(0), ..most }
    }

    #[test]
    fn every_pipeline_ends_with_the_known_bubble_and_memory() {
        for order in [PipelineSchedule::OneForwardOneBackward, PipelineSchedule::ZeroBubble] {
            for stages in 1..=8 {
                for micros in (1..=16).chain([31, 64]) {
                    let step = StepSchedule { stages, order, ..StepSchedule::alone(1, micros) };
                    let played = play(step);
                    for stage in 0..stages {
                        assert_eq!(played.alive[stage], micros.min(stages - stage), "stage {stage} of {step:?}");
                        let put_off = if order == PipelineSchedule::ZeroBubble { micros.min(stage + 1) } else { 1 };
                        assert_eq!(played.put_off[stage], put_off, "stage {stage} of {step:?}");
                    }
                    let bubble = 1.0 - 3.0 * micros as f64 / played.seconds as f64;
                    let known = step.bubble();
                    // The formula of the second is for as many micro-batches as stages at least.
                    if order == PipelineSchedule::OneForwardOneBackward || micros >= stages {
                        assert!((bubble - known).abs() < 1e-9, "{step:?}: {bubble}, not {known}");
                    }
                }
            }
        }
        let two = StepSchedule { stages: 2, ..StepSchedule::alone(1, 8) };
        assert!((two.bubble() - 0.111).abs() < 1e-3);
        assert!((StepSchedule { order: PipelineSchedule::ZeroBubble, ..two }.bubble() - 0.04).abs() < 1e-9);
    }

    #[test]
    fn lanes_lengthen_a_step_as_the_formula_says_at_most() {
        for (stages, lanes, micros) in [(2, 2, 4), (2, 8, 1), (4, 2, 8), (4, 4, 4), (8, 2, 16)] {
            let step =
                StepSchedule { stages, order: PipelineSchedule::ZeroBubble, ..StepSchedule::alone(lanes, micros) };
            let bubble = 1.0 - 3.0 * step.micros() as f64 / play(step).seconds as f64;
            assert!(bubble <= step.bubble() + 1e-9, "{step:?}: {bubble}, not {}", step.bubble());
        }
    }
}
