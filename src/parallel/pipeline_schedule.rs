//! The pipeline schedule: the list of a rank's work in a step, from which the order of all-gathers
//! and the estimate of memory also follow. This module computes with indices only. With one stage
//! the list is plain gradient accumulation.
//!
//! Receives are posted one computation ahead, so that a message arrives during the computation
//! before the one that needs it. Only collectives block later requests of a rank, and all ranks of
//! a stage call them at the same places of the same list. A schedule therefore cannot deadlock if
//! the lists of all stages run to completion when each message arrives after its send, which a test
//! checks.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use serde::{Deserialize, Serialize};

/// The messages between neighbouring stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Flow {
    /// The outputs of a stage's last block, sent to the next stage.
    Activations,
    /// The gradients of a stage's input, sent to the previous stage.
    Gradients,
}

/// The order of computations in a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum PipelineSchedule {
    /// 1F1B: one forward, one backward (Narayanan et al., "PipeDream", 2019).
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// ZB-H1: 1F1B with wgrad deferred into the bubble (Qi et al., "Zero bubble pipeline
    /// parallelism", 2023).
    #[serde(rename = "zero-bubble")]
    ZeroBubble,
    /// All forwards, then all backwards (Huang et al., "GPipe", 2019): the last stage has the
    /// outputs of all micro-batches before the first backward. Losses over the whole batch require
    /// it, and nothing else uses it.
    #[serde(skip)]
    GPipe,
}

impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneForwardOneBackward => "1f1b",
            Self::ZeroBubble => "zero-bubble",
            Self::GPipe => "gpipe",
        })
    }
}

/// One piece of a step's work on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Post the receive of the message for micro-batch `k`.
    Receive(Flow, usize),
    /// Run the forward of micro-batch `k`.
    Forward(usize),
    /// Run the backward of micro-batch `k`.
    Backward(usize),
    /// Run the backward of micro-batch `k` without wgrad, which is deferred.
    BackwardInput(usize),
    /// Run the deferred wgrad of micro-batch `k`.
    BackwardWeight(usize),
    /// Send the result of the previous computation.
    Send(Flow, usize),
}

/// The micro-batches and virtual ranks of a rank in a step, and its place in the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSchedule {
    /// The number of virtual ranks of this rank.
    pub virtual_ranks: usize,
    /// The number of micro-batches per virtual rank.
    pub micros_per_virtual_rank: usize,
    /// The index of the stage.
    pub stage: usize,
    /// The number of stages.
    pub stages: usize,
    /// The pipeline schedule, if there are several stages.
    pub order: PipelineSchedule,
}

impl StepSchedule {
    /// Returns the schedule without a pipeline.
    pub fn alone(virtual_ranks: usize, micros_per_virtual_rank: usize) -> Self {
        Self {
            virtual_ranks,
            micros_per_virtual_rank,
            stage: 0,
            stages: 1,
            order: PipelineSchedule::default(),
        }
    }

    /// Returns the number of micro-batches of the step.
    pub fn micros(self) -> usize {
        self.virtual_ranks * self.micros_per_virtual_rank
    }

    /// Returns the work of the step in order.
    pub fn actions(self) -> Vec<Action> {
        self.with_messages(self.computations())
    }

    fn computations(self) -> Vec<Action> {
        let micros = self.micros();
        let computations = one_forward_one_backward(self.stage, self.stages, micros);
        match self.order {
            PipelineSchedule::OneForwardOneBackward => computations,
            PipelineSchedule::ZeroBubble => self.with_deferred_wgrad(computations),
            PipelineSchedule::GPipe => {
                let forwards = (0..micros).map(Action::Forward);
                forwards.chain((0..micros).map(Action::Backward)).collect()
            }
        }
    }

    /// Returns the virtual rank of micro-batch `k`.
    pub fn virtual_rank(self, k: usize) -> usize {
        k / self.micros_per_virtual_rank
    }

    /// Returns whether micro-batch `k` is the first of its virtual rank.
    pub fn virtual_rank_start(self, k: usize) -> bool {
        k.is_multiple_of(self.micros_per_virtual_rank)
    }

    /// Returns, if the backward of micro-batch `k` ends its virtual rank, whether that is the last
    /// virtual rank of this rank.
    pub fn virtual_rank_end(self, k: usize) -> Option<bool> {
        let next = k + 1;
        next.is_multiple_of(self.micros_per_virtual_rank).then_some(next == self.micros())
    }

    /// Returns a shorter step with the same memory: once the pipeline is filled and the maximum of
    /// wgrad is deferred, all further micro-batches of a virtual rank have the same buffers alive.
    /// With all forwards first, every micro-batch adds to them.
    pub fn representative(self) -> Self {
        if self.order == PipelineSchedule::GPipe {
            return self;
        }
        Self { micros_per_virtual_rank: self.micros_per_virtual_rank.min(2 * self.stages), ..self }
    }

    /// Returns the fraction of the step in which a stage is idle, if all stages take the same time,
    /// a forward takes as long as dgrad and as wgrad, and messages take no time. With p stages and
    /// m micro-batches it is (p − 1) / (m + p − 1) (Narayanan et al., 2021); with deferred wgrad
    /// and one virtual rank of at least p micro-batches, (p − 1) / (3·m + p − 1) (Qi et al., 2023).
    pub fn bubble_fraction(self) -> f64 {
        // Deadlocked stages are always idle.
        self.length().map_or(1.0, |length| 1.0 - 3.0 * self.micros() as f64 / length as f64)
    }

    /// Simulates all stages, each of which waits for the message that its next computation needs.
    /// Returns the time until all are done in units of a forward, or none if they deadlock.
    fn length(self) -> Option<usize> {
        let of_stage = |stage| Self { stage, ..self };
        let mut lists: Vec<VecDeque<Action>> =
            (0..self.stages).map(|i| of_stage(i).computations().into()).collect();
        let mut clocks = vec![0; self.stages];
        // The arrival time of each message, by its receiver.
        let mut arrivals = HashMap::new();
        while lists.iter().any(|list| !list.is_empty()) {
            let mut moved = false;
            for stage in 0..self.stages {
                while let Some(&computation) = lists[stage].front() {
                    if let Some(Action::Receive(flow, k)) = of_stage(stage).needs(computation) {
                        let Some(time) = arrivals.remove(&(stage, flow, k)) else { break };
                        clocks[stage] = clocks[stage].max(time);
                    }
                    clocks[stage] += if matches!(computation, Action::Backward(_)) { 2 } else { 1 };
                    if let Some(Action::Send(flow, k)) = of_stage(stage).gives(computation) {
                        let to = if flow == Flow::Activations { stage + 1 } else { stage - 1 };
                        arrivals.insert((to, flow, k), clocks[stage]);
                    }
                    lists[stage].pop_front();
                    moved = true;
                }
            }
            if !moved {
                return None;
            }
        }
        clocks.into_iter().max()
    }

    /// Returns the message that a computation needs from another stage.
    fn needs(self, computation: Action) -> Option<Action> {
        match computation {
            Action::Forward(k) if self.stage > 0 => Some(Action::Receive(Flow::Activations, k)),
            Action::Backward(k) | Action::BackwardInput(k) if self.stage + 1 < self.stages => {
                Some(Action::Receive(Flow::Gradients, k))
            }
            _ => None,
        }
    }

    /// Returns the message that a computation sends to another stage.
    fn gives(self, computation: Action) -> Option<Action> {
        match computation {
            Action::Forward(k) if self.stage + 1 < self.stages => {
                Some(Action::Send(Flow::Activations, k))
            }
            Action::Backward(k) | Action::BackwardInput(k) if self.stage > 0 => {
                Some(Action::Send(Flow::Gradients, k))
            }
            _ => None,
        }
    }

    /// Defers wgrad by as many backwards as there are stages before this one, so that those receive
    /// the gradients of their outputs sooner. All wgrad of a virtual rank is done before its
    /// gradient is reduced.
    fn with_deferred_wgrad(self, computations: Vec<Action>) -> Vec<Action> {
        let mut actions = Vec::with_capacity(computations.len() + self.micros());
        let mut deferred = VecDeque::with_capacity(self.stage + 1);
        for computation in computations {
            match computation {
                // No stage waits for the first of several stages. A single stage computes wgrad
                // separately so that it can be timed.
                Action::Backward(k) if self.stage > 0 || self.stages == 1 => {
                    actions.push(Action::BackwardInput(k));
                    deferred.push_back(k);
                    let waiting = if self.virtual_rank_end(k).is_some() { 0 } else { self.stage };
                    let due = deferred.len().saturating_sub(waiting);
                    actions.extend(deferred.drain(..due).map(Action::BackwardWeight));
                }
                other => actions.push(other),
            }
        }
        actions
    }

    /// Adds the point-to-point messages between stages to computations.
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

/// Returns the 1F1B schedule (Narayanan et al., "PipeDream", 2019): stage `stage` of `stages` runs
/// as many forwards ahead as there are stages behind it, then alternates. With one stage this is
/// plain gradient accumulation.
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
    use Action::{
        Backward as B, BackwardInput as I, BackwardWeight as W, Forward as F, Receive as R,
        Send as S,
    };
    use Flow::{Activations as X, Gradients as G};

    #[test]
    fn one_stage_alternates() {
        assert_eq!(StepSchedule::alone(1, 3).actions(), [F(0), B(0), F(1), B(1), F(2), B(2)]);
        assert_eq!(one_forward_one_backward(0, 1, 0), []);
    }

    #[test]
    fn earlier_stages_run_ahead() {
        assert_eq!(
            one_forward_one_backward(0, 3, 4),
            [F(0), F(1), F(2), B(0), F(3), B(1), B(2), B(3)]
        );
        assert_eq!(one_forward_one_backward(0, 4, 2), [F(0), F(1), B(0), B(1)]);
    }

    #[test]
    fn receives_are_posted_one_computation_ahead() {
        let stage =
            |stage| StepSchedule { stage, stages: 2, ..StepSchedule::alone(1, 2) }.actions();
        assert_eq!(stage(0), [F(0), S(X, 0), R(G, 0), F(1), S(X, 1), R(G, 1), B(0), B(1)]);
        assert_eq!(stage(1), [R(X, 0), F(0), R(X, 1), B(0), S(G, 0), F(1), B(1), S(G, 1)]);
    }

    #[test]
    fn virtual_ranks_end_with_their_last_micro_batch() {
        let step = StepSchedule::alone(2, 3);
        let ends: Vec<Option<bool>> =
            (0..step.micros()).map(|k| step.virtual_rank_end(k)).collect();
        assert_eq!(ends, [None, None, Some(false), None, None, Some(true)]);
        assert_eq!((0..6).map(|k| step.virtual_rank(k)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
        assert_eq!(step.representative().micros(), 4);
    }

    #[test]
    fn deferred_wgrad_ends_with_its_virtual_rank() {
        let stage = |stage, virtual_ranks, micros| {
            let order = PipelineSchedule::ZeroBubble;
            StepSchedule { stage, stages: 3, order, ..StepSchedule::alone(virtual_ranks, micros) }
        };
        let computations = |step: StepSchedule| -> Vec<Action> {
            step.actions().into_iter().filter(|action| !matches!(action, R(..) | S(..))).collect()
        };
        assert_eq!(computations(stage(0, 1, 3)), [F(0), F(1), F(2), B(0), B(1), B(2)]);
        assert_eq!(
            computations(stage(1, 1, 3)),
            [F(0), F(1), I(0), F(2), I(1), W(0), I(2), W(1), W(2)]
        );
        assert_eq!(
            computations(stage(2, 1, 4)),
            [F(0), I(0), F(1), I(1), F(2), I(2), W(0), F(3), I(3), W(1), W(2), W(3)]
        );
        assert_eq!(
            computations(stage(2, 2, 2)),
            [F(0), I(0), F(1), I(1), W(0), W(1), F(2), I(2), F(3), I(3), W(2), W(3)]
        );
        // A message does not wait for wgrad.
        assert_eq!(stage(2, 1, 1).actions(), [R(X, 0), F(0), I(0), S(G, 0), W(0)]);
    }

    /// Checks the order of a stage's actions. Returns the maximum numbers of forwards that wait for
    /// their backwards, and of backwards that wait for their wgrad.
    fn waiting(step: StepSchedule) -> (usize, usize) {
        let mut forwards = 0;
        let mut backwards = 0;
        let mut weights = 0;
        let mut most = (0, 0);
        for action in step.actions() {
            match action {
                F(k) => {
                    assert_eq!(k, forwards, "{step:?}");
                    forwards += 1;
                }
                B(k) | I(k) => {
                    assert_eq!(
                        k, backwards,
                        "{step:?}: gradients are added in the order of micro-batches"
                    );
                    assert_eq!(
                        weights / step.micros_per_virtual_rank,
                        k / step.micros_per_virtual_rank,
                        "{step:?}: two virtual ranks in one"
                    );
                    backwards += 1;
                }
                W(_) | R(..) | S(..) => {}
            }
            most = (most.0.max(forwards - backwards), most.1.max(backwards - weights));
            if let B(k) | W(k) = action {
                assert_eq!(
                    k, weights,
                    "{step:?}: gradients are added in the order of micro-batches"
                );
                weights += 1;
            }
        }
        assert_eq!([forwards, backwards, weights], [step.micros(); 3], "{step:?}");
        most
    }

    /// Checks that messages of one kind are received in the order in which they are sent.
    fn assert_messages_meet(step: StepSchedule) {
        let of = |stage, wanted: fn(Action) -> Option<(Flow, usize)>, flow| -> Vec<usize> {
            let messages = StepSchedule { stage, ..step }.actions().into_iter().filter_map(wanted);
            messages.filter(|(kind, _)| *kind == flow).map(|(_, k)| k).collect()
        };
        let sent = |action| if let S(flow, k) = action { Some((flow, k)) } else { None };
        let received = |action| if let R(flow, k) = action { Some((flow, k)) } else { None };
        for stage in 1..step.stages {
            assert_eq!(of(stage - 1, sent, X), of(stage, received, X), "{step:?}");
            assert_eq!(of(stage, sent, G), of(stage - 1, received, G), "{step:?}");
        }
        for (end, flow) in [(0, G), (step.stages - 1, X)] {
            assert!(of(end, sent, flow).is_empty(), "{step:?}: a message without a receiver");
        }
    }

    #[test]
    fn every_pipeline_ends_with_the_known_bubble_and_memory() {
        let orders = [
            PipelineSchedule::OneForwardOneBackward,
            PipelineSchedule::ZeroBubble,
            PipelineSchedule::GPipe,
        ];
        for order in orders {
            for (stages, micros) in
                (1..=8).flat_map(|p| (1..=16).chain([31, 64]).map(move |m| (p, m)))
            {
                let step = StepSchedule { stages, order, ..StepSchedule::alone(1, micros) };
                assert_messages_meet(step);
                for stage in 0..stages {
                    let deferred = if order == PipelineSchedule::ZeroBubble {
                        micros.min(stage + 1)
                    } else {
                        1
                    };
                    let forwards = match order {
                        PipelineSchedule::GPipe => micros,
                        _ => micros.min(stages - stage),
                    };
                    assert_eq!(
                        waiting(StepSchedule { stage, ..step }),
                        (forwards, deferred),
                        "{step:?}"
                    );
                }
                // With fewer micro-batches than stages, less wgrad can be deferred.
                let idle = match order {
                    PipelineSchedule::OneForwardOneBackward | PipelineSchedule::GPipe => {
                        3 * (stages - 1)
                    }
                    PipelineSchedule::ZeroBubble => stages - 1 + stages.saturating_sub(micros),
                };
                assert_eq!(step.length(), Some(3 * micros + idle), "{step:?}");
            }
        }
        let two = StepSchedule { stages: 2, ..StepSchedule::alone(1, 8) };
        assert!((two.bubble_fraction() - 0.111).abs() < 1e-3);
        assert!(
            (StepSchedule { order: PipelineSchedule::ZeroBubble, ..two }.bubble_fraction() - 0.04)
                .abs()
                < 1e-9
        );
    }

    /// A request of a rank's communication thread.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Request {
        /// A message to another stage of the same shard.
        Send(usize, Message),
        /// A receive, which other requests do not wait for.
        Receive(Message),
        /// A collective of the shards of a stage, which later requests wait for.
        Collective,
    }

    /// A message, by its kind and micro-batch. The gradient of tied parameters has its own kind.
    type Message = (Option<Flow>, usize);

    /// An action of a rank's main thread.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Host {
        Request(Request),
        /// The rank waits for a message.
        Message(Message),
        /// The rank waits until its last collectives but this many have ended.
        Collectives(usize),
    }

    /// Returns what a rank does in a step, with ZeRO 3 and a reduction of `blocks` gradients after
    /// each virtual rank. The last stage is tied to the first.
    fn host_actions(step: StepSchedule, blocks: usize) -> Vec<Host> {
        let gathers = [Host::Request(Request::Collective), Host::Collectives(0)];
        let is_tied = step.stages > 1;
        let is_first = step.stage == 0;
        let is_last = step.stage + 1 == step.stages;
        let reduction = [Host::Request(Request::Collective)];
        let reductions = match is_first {
            // The reduction before has overlapped with a block.
            true => [&reduction[..], &[Host::Collectives(1)]].concat().repeat(blocks),
            // They overlap with the computations up to the next backward.
            false => reduction.repeat(blocks),
        };
        let mut all = Vec::new();
        for action in step.actions() {
            match action {
                R(flow, k) => all.push(Host::Request(Request::Receive((Some(flow), k)))),
                S(flow, k) => {
                    let to = if flow == X { step.stage + 1 } else { step.stage - 1 };
                    all.push(Host::Request(Request::Send(to, (Some(flow), k))));
                    if flow == G {
                        all.extend(&reductions);
                    }
                }
                F(_) | B(_) | I(_) => {
                    all.extend(step.needs(action).map(|needed| match needed {
                        R(flow, k) => Host::Message((Some(flow), k)),
                        other => panic!("{other:?}"),
                    }));
                    if let (B(_), false) = (action, is_first) {
                        all.push(Host::Collectives(0));
                    }
                    if let (B(k), true) = (action, is_tied && is_first) {
                        all.push(Host::Request(Request::Receive((None, k))));
                    }
                    all.extend(gathers);
                    if let (B(k), true) = (action, is_tied && is_last) {
                        all.push(Host::Request(Request::Send(0, (None, k))));
                    }
                    if let (B(k), true) = (action, is_first) {
                        all.extend(is_tied.then_some(Host::Message((None, k))));
                        all.extend(&reductions);
                    }
                }
                W(_) => {}
            }
        }
        all.push(Host::Collectives(0));
        all
    }

    /// Returns true if all ranks come to an end, by stage and shard. A rank depends on the others by
    /// messages and collectives alone, so any order in which they take turns shows it.
    fn all_end(hosts: Vec<Vec<Vec<Host>>>) -> bool {
        #[derive(Default)]
        struct Rank {
            host: VecDeque<Host>,
            requests: VecDeque<Request>,
            posted: Vec<Message>,
            arrived: Vec<Message>,
            collectives: [usize; 2],
        }
        let rank = |host: Vec<Host>| Rank { host: host.into(), ..Rank::default() };
        let mut ranks: Vec<Vec<Rank>> =
            hosts.into_iter().map(|shards| shards.into_iter().map(rank).collect()).collect();
        loop {
            let mut moved = false;
            for stage in 0..ranks.len() {
                // Shards take turns in the other order than stages.
                for shard in (0..ranks[stage].len()).rev() {
                    let rank = &mut ranks[stage][shard];
                    let [begun, ended] = rank.collectives;
                    let may = match rank.host.front() {
                        None => false,
                        Some(Host::Request(_)) => true,
                        Some(Host::Message(message)) => {
                            rank.arrived.contains(message) && rank.posted.contains(message)
                        }
                        Some(Host::Collectives(but)) => ended + but >= begun,
                    };
                    if may && let Some(action) = rank.host.pop_front() {
                        moved = true;
                        if let Host::Request(request) = action {
                            rank.collectives[0] += usize::from(request == Request::Collective);
                            rank.requests.push_back(request);
                        }
                    }
                    match rank.requests.front().copied() {
                        Some(Request::Send(to, message)) => {
                            rank.requests.pop_front();
                            ranks[to][shard].arrived.push(message);
                            moved = true;
                        }
                        Some(Request::Receive(message)) => {
                            rank.requests.pop_front();
                            rank.posted.push(message);
                            moved = true;
                        }
                        Some(Request::Collective) | None => {}
                    }
                }
                let all = ranks[stage].iter_mut();
                if all.into_iter().all(|rank| rank.requests.front() == Some(&Request::Collective)) {
                    for rank in &mut ranks[stage] {
                        rank.requests.pop_front();
                        rank.collectives[1] += 1;
                    }
                    moved = true;
                }
            }
            if !moved {
                return ranks.iter().flatten().all(|rank| rank.host.is_empty());
            }
        }
    }

    /// Gradients that are reduced after each micro-batch hold up a rank's later requests.
    #[test]
    fn reductions_after_each_micro_batch_hold_up_no_stage() {
        for (stages, micros) in (1..=5).flat_map(|p| [1, 2, 4, 8].map(|m| (p, m))) {
            for (shards, blocks) in [(1, 1), (2, 1), (2, 3), (4, 2)] {
                let step = StepSchedule { stages, ..StepSchedule::alone(micros, 1) };
                let of_stage =
                    |stage| vec![host_actions(StepSchedule { stage, ..step }, blocks); shards];
                let mut hosts: Vec<_> = (0..stages).map(of_stage).collect();
                assert!(all_end(hosts.clone()), "{step:?}, {shards} shards of {blocks} blocks");
                // A collective that one rank leaves out is waited for.
                let ours = &mut hosts[stages - 1][0];
                let collective = Host::Request(Request::Collective);
                let last = ours.iter().rposition(|action| *action == collective).unwrap();
                ours.remove(last);
                assert_eq!(all_end(hosts), shards == 1, "{step:?}, {shards} shards");
            }
        }
    }

    #[test]
    fn each_virtual_rank_lengthens_a_step_with_deferred_wgrad() {
        let order = PipelineSchedule::ZeroBubble;
        for (stages, virtual_ranks, micros) in
            [(2, 2, 4), (2, 8, 1), (4, 2, 8), (4, 4, 4), (8, 2, 16), (8, 3, 5)]
        {
            let step = StepSchedule { stages, order, ..StepSchedule::alone(virtual_ranks, micros) };
            assert_messages_meet(step);
            (0..stages)
                .for_each(|stage| assert!(waiting(StepSchedule { stage, ..step }).1 <= stage + 1));
            let one =
                StepSchedule { order, stages, ..StepSchedule::alone(1, virtual_ranks * micros) };
            let alternating =
                StepSchedule { order: PipelineSchedule::OneForwardOneBackward, ..step };
            let lengths = [one, step, alternating].map(|step| step.length().unwrap());
            assert!(lengths.is_sorted(), "{step:?}: {lengths:?}");
        }
    }
}
