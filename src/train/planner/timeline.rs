//! Simulates the timeline of a step: the actions of every stage with their seconds.
//!
//! A rank computes one thing at a time, and its communication thread runs one collective at a time
//! concurrently. All ranks of a stage do the same, so there is one clock per stage. Two steps are
//! simulated, since the all-gathers of one reach into the next; the second counts.

use std::collections::HashMap;

use hpctrain_parallel::{
    Action, Flow, Lifetime, Prefetch, ReduceAfter, ShardingPolicy, Stage, StepSchedule, turns,
};

/// Seconds of a block on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct UnitTimes {
    /// Forward of a micro-batch.
    pub forward: f64,
    /// Backward of a micro-batch, including recomputation.
    pub backward: f64,
    /// The wgrad part of the backward, which can be deferred.
    pub weights: f64,
    /// All-gather of the parameters over the shards.
    pub gather: f64,
    /// Reduce-scatter of the gradients over the shards.
    pub reduce_scatter: f64,
    /// All-reduce of a rank's part of the gradients over the replicas.
    pub all_reduce: f64,
    /// Update of the shard that a rank owns.
    pub update: f64,
}

/// Seconds of a stage on a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTimes {
    /// The stage.
    pub stage: Stage,
    /// The blocks of the stage.
    pub units: Vec<UnitTimes>,
    /// Copy of a micro-batch to the device, and its loss in the last stage.
    pub micro: f64,
    /// A message to or from the next stage.
    pub message: f64,
    /// The messages with gradients of tied parameters, to or from another stage, for a virtual rank.
    pub tied: f64,
}

/// Everything that the time of a step depends on.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// The stages in order.
    pub stages: Vec<StageTimes>,
    /// The pipeline schedule, of any stage.
    pub schedule: StepSchedule,
    /// The sharding policy, with the lifetime of full parameters.
    pub keep: ShardingPolicy,
    /// Whether there are several shards.
    pub shards: bool,
    /// The all-gather of loss and norm that all ranks wait for.
    pub summary: f64,
    /// The fraction of a collective's time that overlaps with computation: 1 if other cores run the
    /// collective, 0 if the same cores do.
    pub overlap: f64,
    /// The same for all-gathers before each use of parameters, after which computations also have
    /// to read the parameters again.
    pub param_overlap: f64,
}

/// The simulated times of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timeline {
    /// Seconds of the step.
    pub step: f64,
    /// Fraction of the step in which a rank waits for other stages, on average.
    pub bubble: f64,
    /// Fraction of the step in which a rank waits for collectives or is slowed down by them, on
    /// average.
    pub exposed: f64,
}

/// The clocks of a rank.
struct Rank {
    now: f64,
    /// When the communication thread finishes all requests.
    requests: f64,
    /// When the parameters of each slot are available. `None` if they were not requested.
    arrivals: Vec<Option<f64>>,
    prefetch: Prefetch,
    waited_for_stages: f64,
    waited_for_messages: f64,
    /// The step's actions, and the number of the next one.
    actions: Vec<Action>,
    next: usize,
}

impl Rank {
    /// Requests a collective that takes `seconds`. Returns when it is done.
    fn request(&mut self, seconds: f64, overlap: f64) -> f64 {
        self.requests = self.requests.max(self.now) + seconds;
        let taken = seconds * (1.0 - overlap);
        self.now += taken;
        self.waited_for_messages += taken;
        self.requests
    }

    fn wait_for_message(&mut self, until: f64) {
        self.waited_for_messages += (until - self.now).max(0.0);
        self.now = self.now.max(until);
    }

    fn wait_for_stage(&mut self, until: f64) {
        self.waited_for_stages += (until - self.now).max(0.0);
        self.now = self.now.max(until);
    }
}

impl StepTimes {
    /// Simulates a step. Returns `None` if the stages deadlock.
    pub fn simulate(&self) -> Option<Timeline> {
        let of_stage = |index: usize| StepSchedule { stage: index, ..self.schedule };
        let mut ranks: Vec<Rank> = self.stages.iter().map(|times| self.begin(times)).collect();
        let mut starts = vec![0.0; 2];
        for start in &mut starts {
            for (index, rank) in ranks.iter_mut().enumerate() {
                let turns = turns(&self.stages[index].stage.tied_slots(), of_stage(index));
                rank.prefetch = Prefetch::new(turns);
                (rank.actions, rank.next) = (of_stage(index).actions(), 0);
                (rank.waited_for_stages, rank.waited_for_messages) = (0.0, 0.0);
            }
            *start = ranks.iter().map(|rank| rank.now).fold(0.0, f64::max);
            self.computations(&mut ranks)?;
            self.end(&mut ranks);
        }
        let end = ranks.iter().map(|rank| rank.now).fold(0.0, f64::max);
        let step = end - starts[1];
        let mean =
            |of: fn(&Rank) -> f64| ranks.iter().map(of).sum::<f64>() / ranks.len() as f64 / step;
        let bubble = mean(|rank| rank.waited_for_stages);
        let exposed = mean(|rank| rank.waited_for_messages);
        Some(Timeline { step, bubble, exposed })
    }

    fn begin(&self, times: &StageTimes) -> Rank {
        let slots = times.stage.slots().count();
        let here = if self.keep.params == Lifetime::Use { None } else { Some(0.0) };
        Rank {
            now: 0.0,
            requests: 0.0,
            arrivals: vec![here; slots],
            prefetch: Prefetch::default(),
            waited_for_stages: 0.0,
            waited_for_messages: 0.0,
            actions: vec![],
            next: 0,
        }
    }

    /// Simulates all actions of a step. Returns `None` if the stages deadlock.
    fn computations(&self, ranks: &mut [Rank]) -> Option<()> {
        // Arrival times of messages, by receiver.
        let mut arrivals: HashMap<(usize, Flow, usize), f64> = HashMap::new();
        while ranks.iter().any(|rank| rank.next < rank.actions.len()) {
            let mut moved = false;
            for index in 0..ranks.len() {
                while let Some(&action) = ranks[index].actions.get(ranks[index].next) {
                    let needed = self.needs(index, action);
                    let arrival = needed.map(|(flow, k)| arrivals.get(&(index, flow, k)).copied());
                    match arrival {
                        Some(None) => break,
                        Some(Some(time)) => ranks[index].wait_for_stage(time),
                        None => {}
                    }
                    self.act(index, &mut ranks[index], action, &mut arrivals);
                    ranks[index].next += 1;
                    moved = true;
                }
            }
            if !moved {
                return None;
            }
        }
        Some(())
    }

    /// Returns the message that an action of a stage needs from another stage.
    fn needs(&self, stage: usize, action: Action) -> Option<(Flow, usize)> {
        match action {
            Action::Forward(k) if stage > 0 => Some((Flow::Activations, k)),
            Action::Backward(k) | Action::BackwardInput(k) if stage + 1 < self.stages.len() => {
                Some((Flow::Gradients, k))
            }
            _ => None,
        }
    }

    fn act(
        &self,
        index: usize,
        rank: &mut Rank,
        action: Action,
        arrivals: &mut HashMap<(usize, Flow, usize), f64>,
    ) {
        let times = &self.stages[index];
        let units = 0..times.units.len();
        match action {
            // A receive itself takes no time; the computation that needs the message waits.
            Action::Receive(..) => {}
            Action::Send(flow, k) => {
                let (to, seconds) = match flow {
                    Flow::Activations => (index + 1, times.message),
                    Flow::Gradients => (index - 1, self.stages[index - 1].message),
                };
                arrivals.insert((to, flow, k), rank.now + seconds);
                // Without overlap, this rank itself copies the data into the message.
                rank.now += seconds * (1.0 - self.overlap);
            }
            Action::Forward(_) => {
                rank.now += times.micro;
                for unit in units {
                    self.turn(times, rank);
                    rank.now += times.units[unit].forward;
                    self.release(rank);
                }
            }
            Action::Backward(k) => {
                for unit in units.rev() {
                    self.turn(times, rank);
                    rank.now += times.units[unit].backward;
                    self.release(rank);
                    self.virtual_rank_ends(times, rank, unit, k);
                }
                self.send_tied(times, rank, k);
            }
            Action::BackwardInput(_) => {
                for unit in units.rev() {
                    self.turn(times, rank);
                    rank.now += times.units[unit].backward - times.units[unit].weights;
                    self.release(rank);
                }
            }
            Action::BackwardWeight(k) => {
                for unit in units.rev() {
                    rank.now += times.units[unit].weights;
                    self.virtual_rank_ends(times, rank, unit, k);
                }
                self.send_tied(times, rank, k);
            }
        }
    }

    /// Begins a block's turn: prefetches, and waits until its parameters are available.
    fn turn(&self, times: &StageTimes, rank: &mut Rank) {
        let wanted: Vec<usize> = rank.prefetch.window(self.keep.prefetch).collect();
        if self.keep.params == Lifetime::Use {
            for slot in wanted {
                if rank.arrivals[slot].is_none() {
                    let seconds = times.units.get(slot).map_or(0.0, |unit| unit.gather);
                    rank.arrivals[slot] = Some(rank.request(seconds, self.param_overlap));
                }
            }
        }
        let Some(visit) = rank.prefetch.turn() else { return };
        for slot in visit.units() {
            let arrival = rank.arrivals[slot].unwrap_or(0.0);
            rank.wait_for_message(arrival);
        }
    }

    fn release(&self, rank: &mut Rank) {
        for slot in rank.prefetch.end_turn(self.keep.prefetch) {
            if self.keep.params == Lifetime::Use {
                rank.arrivals[slot] = None;
            }
        }
    }

    /// Reduces the gradient of a unit if a virtual rank ends with this micro-batch: over shards
    /// after each virtual rank or the last, over replicas after the last.
    fn virtual_rank_ends(&self, times: &StageTimes, rank: &mut Rank, unit: usize, k: usize) {
        let Some(last) = self.schedule.virtual_rank_end(k) else { return };
        let UnitTimes { reduce_scatter, all_reduce, .. } = times.units[unit];
        if last || self.keep.reduce_after == ReduceAfter::MicroBatch {
            rank.request(reduce_scatter, self.overlap);
        }
        if last {
            rank.request(all_reduce, self.overlap);
        }
    }

    /// Sends gradients of tied parameters between stages if a virtual rank ends with this
    /// micro-batch.
    fn send_tied(&self, times: &StageTimes, rank: &mut Rank, k: usize) {
        if self.schedule.virtual_rank_end(k).is_some() {
            rank.request(times.tied, self.overlap);
        }
    }

    /// Ends a step: waits for all reductions and the all-gather of loss and norm, updates, and
    /// requests the all-gathers of new parameters.
    fn end(&self, ranks: &mut [Rank]) {
        for rank in ranks.iter_mut() {
            let reduced = rank.requests;
            rank.wait_for_message(reduced);
        }
        let all = ranks.iter().map(|rank| rank.now).fold(0.0, f64::max);
        for (times, rank) in self.stages.iter().zip(ranks) {
            rank.wait_for_stage(all);
            rank.wait_for_message(all + self.summary);
            for (unit, seconds) in times.units.iter().enumerate() {
                rank.now += seconds.update;
                if self.shards && self.keep.params == Lifetime::Step {
                    rank.arrivals[unit] = Some(rank.request(seconds.gather, self.overlap));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_parallel::{PipelineSchedule, Zero};

    const UNIT: UnitTimes = UnitTimes {
        forward: 1.0,
        backward: 2.0,
        weights: 1.0,
        gather: 0.0,
        reduce_scatter: 0.0,
        all_reduce: 0.0,
        update: 0.0,
    };

    /// Returns a pipeline with one block per stage.
    fn pipeline(stages: usize, micros: usize, order: PipelineSchedule) -> StepTimes {
        let cut: Vec<_> = (0..stages).map(|unit| unit..unit + 1).collect();
        let loans = vec![None; stages];
        let times = (0..stages).map(|index| StageTimes {
            stage: Stage::new(&cut, index, &loans),
            units: vec![UNIT],
            micro: 0.0,
            message: 0.0,
            tied: 0.0,
        });
        StepTimes {
            stages: times.collect(),
            schedule: StepSchedule { stages, order, ..StepSchedule::alone(1, micros) },
            keep: Zero::Zero.sharding_policy(),
            shards: false,
            summary: 0.0,
            overlap: 1.0,
            param_overlap: 1.0,
        }
    }

    /// Returns one stage of three blocks.
    fn blocks(zero: Zero, overlap: f64) -> StepTimes {
        let unit =
            UnitTimes { gather: 0.5, reduce_scatter: 1.0, all_reduce: 0.5, update: 0.125, ..UNIT };
        let stage = Stage::whole(&[None; 3]);
        let alone = pipeline(1, 2, PipelineSchedule::default());
        let stages =
            vec![StageTimes { stage, units: vec![unit; 3], micro: 0.0, message: 0.0, tied: 0.0 }];
        StepTimes {
            stages,
            keep: zero.sharding_policy(),
            shards: zero != Zero::Zero,
            overlap,
            param_overlap: overlap,
            ..alone
        }
    }

    #[test]
    fn idle_time_is_that_of_the_schedule() {
        for order in [PipelineSchedule::OneForwardOneBackward, PipelineSchedule::ZeroBubble] {
            for (stages, micros) in [(1, 3), (2, 8), (4, 4), (4, 16), (8, 32)] {
                let times = pipeline(stages, micros, order);
                let played = times.simulate().unwrap();
                let schedule = times.schedule.bubble_fraction();
                assert!(
                    (played.bubble - schedule).abs() < 1e-9,
                    "{stages}, {micros}: {played:?}, not {schedule}"
                );
                assert_eq!(played.exposed, 0.0);
            }
        }
        let played = pipeline(4, 16, PipelineSchedule::default()).simulate().unwrap();
        assert!((played.step - 3.0 * 19.0).abs() < 1e-9, "{played:?}");
    }

    /// Returns the seconds of a step of two stages with messages.
    fn step_with_messages(micros: usize, overlap: f64) -> f64 {
        let mut times = StepTimes { overlap, ..pipeline(2, micros, PipelineSchedule::default()) };
        times.stages[0].message = 0.5;
        times.simulate().unwrap().step
    }

    #[test]
    fn messages_between_stages_take_time() {
        let mut times = pipeline(2, 1, PipelineSchedule::default());
        let without = times.simulate().unwrap().step;
        times.stages[0].message = 0.5;
        // Once for activations and once for gradients.
        assert!(
            (times.simulate().unwrap().step - without - 1.0).abs() < 1e-9,
            "{:?}",
            times.simulate()
        );
        // The gradient of tied parameters is sent once for each virtual rank.
        times.stages[1].tied = 0.25;
        (times.overlap, times.schedule.virtual_ranks) = (0.0, 4);
        let with = times.simulate().unwrap().step;
        times.stages[1].tied = 0.0;
        let without_tied = times.simulate().unwrap().step;
        assert!((with - without_tied - 4.0 * 0.25).abs() < 1e-9, "{with} and {without_tied}");
        // Ranks that copy messages themselves do so in idle time, if there is any.
        assert_eq!(step_with_messages(1, 0.0), step_with_messages(1, 1.0));
        let [exposed, hidden] = [0.0, 1.0].map(|overlap| step_with_messages(8, overlap));
        assert!(exposed > hidden, "{exposed} and {hidden}");
    }

    #[test]
    fn collectives_hide_beside_computations() {
        let work = 2.0 * 3.0 * 3.0 + 3.0 * 0.125;
        let step = |zero, overlap| blocks(zero, overlap).simulate().unwrap();
        // Only the last reduction overlaps with nothing.
        assert!(
            (step(Zero::Zero, 1.0).step - work - 1.5).abs() < 1e-9,
            "{:?}",
            step(Zero::Zero, 1.0)
        );
        let busy = step(Zero::Zero, 0.0);
        assert!((busy.step - work - 4.5).abs() < 1e-9, "{busy:?}");
        assert!((busy.exposed - 4.5 / busy.step).abs() < 1e-9, "{busy:?}");
        // The first all-gather after the updates is waited for, and the others overlap with the
        // next forward.
        let sharded = step(Zero::One, 1.0);
        assert!((sharded.step - work - 1.5 - (0.5 - 2.0 * 0.125)).abs() < 1e-9, "{sharded:?}");
        // With ZeRO 3, parameters are gathered before every use.
        // Reduced after each of two micro-batches, over replicas once.
        let each = |overlap| {
            let mut times = blocks(Zero::One, overlap);
            times.schedule = StepSchedule::alone(2, 1);
            let after_step = times.simulate().unwrap();
            times.keep.reduce_after = ReduceAfter::MicroBatch;
            times.simulate().unwrap().step - after_step.step
        };
        assert!((each(0.0) - 3.0 * 1.0).abs() < 1e-9, "{}", each(0.0));
        assert!(each(1.0).abs() < 1e-9, "{}", each(1.0));
        let gathers = |zero| step(zero, 0.0).step - busy.step;
        assert!((gathers(Zero::One) - 3.0 * 0.5).abs() < 1e-9, "{}", gathers(Zero::One));
        assert!(gathers(Zero::Three) > 3.0 * 0.5 + 1.0, "{}", gathers(Zero::Three));
    }
}
