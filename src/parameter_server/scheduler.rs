//! The scheduler of a run's work: each piece of work is assigned to a worker under a ticket, and
//! reassigned if the worker is lost.
//!
//! The scheduler uses neither clocks nor connections, which [`super::coordinator_service`] handles.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::protocol::{Work, WorkerReport, WorkerTimes, bits};
use super::tree_reducer::TreeReducer;
use hpctrain_config::Staleness;

/// The number of steps by which finished batches may be ahead of the coordinator: enough that
/// workers need not wait while it writes its records or requests a snapshot, and few enough that
/// the parameters of a checkpoint belong to about its step, and the journal stays small.
const STEPS_AHEAD: usize = 4;

/// A piece of work.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Task {
    /// Virtual ranks of the current step.
    VirtualRanks(Range<usize>),
    /// Batches of a lease that are not done.
    Batches(Range<u64>),
    /// Chunks of the current evaluation.
    Chunks(Range<u64>),
}

impl Task {
    /// Returns the kind of work with its range, such as `{"batches": [41, 45]}`: the first and the
    /// end, which is not included.
    fn to_json(&self) -> Value {
        match self {
            Self::VirtualRanks(range) => json!({"virtual_ranks": [range.start, range.end]}),
            Self::Batches(range) => json!({"batches": [range.start, range.end]}),
            Self::Chunks(range) => json!({"chunks": [range.start, range.end]}),
        }
    }
}

/// A worker.
#[derive(Debug, Clone)]
pub struct WorkerState {
    /// The host and process.
    pub place: String,
    /// The number of batches it has done, plus the clock of the slowest worker when it joined.
    pub clock: u64,
    /// The number of pieces of work it has done.
    pub done: u64,
    /// The total time it spent.
    pub seconds: WorkerTimes,
    /// The ticket of its lease, if it has one.
    lease: Option<u64>,
}

/// The result of a batch in asynchronous training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BatchResult {
    /// The mean loss.
    #[serde(with = "bits")]
    pub loss: f64,
    /// The norm of the gradient.
    #[serde(with = "bits")]
    pub norm: f64,
    /// The number of updates between pull and push; none if the gradient was not finite.
    pub staleness: Option<u64>,
    /// The compute time in seconds.
    pub compute: f64,
}

/// The batches that are done.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FinishedBatches {
    /// The first batch that is not done.
    pub low: u64,
    /// The ranges of batches after `low` that are done: the end of each by its first batch. No two
    /// ranges touch, so there are at most about as many as leases, however far a slow worker is
    /// behind.
    pub ahead: BTreeMap<u64, u64>,
    /// The results that [`WorkScheduler::take_batches`] has not returned, in order of arrival.
    pub untaken: Vec<BatchResult>,
    /// The number of batches by staleness.
    pub histogram: BTreeMap<u64, u64>,
}

/// A gradient that a worker has pushed.
#[derive(Debug, Clone, PartialEq)]
pub struct Contribution {
    /// The host and process of the worker.
    pub place: String,
    /// The number of virtual ranks; 1 for a batch of asynchronous training.
    pub shares: usize,
    /// The sum of the losses of its virtual ranks, or the mean loss of the batch.
    pub loss: f64,
    /// The number of updates between pull and push; none if the gradient was not finite.
    pub staleness: Option<u64>,
    /// The times of the worker.
    pub seconds: WorkerTimes,
}

/// The current training work.
#[derive(Debug)]
enum Training {
    /// There is none.
    None,
    /// A synchronous step.
    Step { step: u64, todo: VecDeque<Range<usize>>, losses: TreeReducer<f64>, compute: f64 },
    /// Batches of asynchronous training.
    Batches {
        /// The first batch that was never assigned.
        next: u64,
        end: u64,
        /// The batches of lost workers, to be reassigned.
        todo: VecDeque<Range<u64>>,
        /// The first batch that is not done.
        low: u64,
        /// The ranges of batches after `low` that are done: the end of each by its first batch.
        ahead: BTreeMap<u64, u64>,
        /// The results that [`WorkScheduler::take_batches`] has not returned.
        done: VecDeque<BatchResult>,
        /// The length of `done` from which on no worker gets a batch.
        max_done: usize,
    },
}

/// The current evaluation.
#[derive(Debug)]
struct Evaluation {
    cut: u64,
    chunks: u64,
    todo: VecDeque<Range<u64>>,
    sums: BTreeMap<u64, Vec<f64>>,
}

/// Assigns work to workers.
#[derive(Debug)]
pub struct WorkScheduler {
    staleness: Staleness,
    /// The number of batches of a lease.
    lease: u64,
    members: BTreeMap<u64, WorkerState>,
    /// The worker and the task of each ticket.
    assigned: BTreeMap<u64, (u64, Task)>,
    /// The tickets of lost workers that [`WorkScheduler::take_revoked`] has not returned.
    revoked: Vec<u64>,
    tickets: u64,
    training: Training,
    evaluation: Option<Evaluation>,
    /// The gradients that [`WorkScheduler::take_contributions`] has not returned.
    contributions: Vec<Contribution>,
    /// The number of batches by staleness.
    histogram: BTreeMap<u64, u64>,
    /// The exit code of the run, if it is over.
    end: Option<i32>,
}

impl WorkScheduler {
    /// Creates a scheduler without workers and without work. Tickets are numbered from `tickets`
    /// on, so that they differ from those of a previous coordinator.
    pub fn new(staleness: Staleness, lease: u64, tickets: u64) -> Self {
        Self {
            staleness,
            lease: lease.max(1),
            members: BTreeMap::new(),
            assigned: BTreeMap::new(),
            revoked: Vec::new(),
            tickets,
            training: Training::None,
            evaluation: None,
            contributions: Vec::new(),
            histogram: BTreeMap::new(),
            end: None,
        }
    }

    /// Returns whether training is synchronous: all workers compute each step together.
    pub fn is_synchronous(&self) -> bool {
        self.staleness == Staleness::Bound(0)
    }

    /// Adds a worker.
    pub fn join(&mut self, member: u64, place: String) {
        // It starts at the slowest clock, so that other workers need not wait for it.
        let clock = self
            .slowest()
            .or_else(|| self.members.values().map(|member| member.clock).max())
            .unwrap_or(0);
        self.members.insert(
            member,
            WorkerState { place, clock, done: 0, seconds: WorkerTimes::default(), lease: None },
        );
    }

    /// Returns whether a worker has joined.
    pub fn has(&self, member: u64) -> bool {
        self.members.contains_key(&member)
    }

    /// Returns the workers.
    pub fn members(&self) -> &BTreeMap<u64, WorkerState> {
        &self.members
    }

    /// Removes a worker and returns it; its work is reassigned.
    pub fn leave(&mut self, member: u64) -> Option<WorkerState> {
        let tickets: Vec<u64> = self
            .assigned
            .iter()
            .filter(|(_, (owner, _))| *owner == member)
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in tickets {
            let Some((_, task)) = self.assigned.remove(&ticket) else { continue };
            self.revoked.push(ticket);
            match (task, &mut self.training, &mut self.evaluation) {
                (Task::VirtualRanks(virtual_ranks), Training::Step { todo, .. }, _) => {
                    todo.push_front(virtual_ranks)
                }
                (Task::Batches(batches), Training::Batches { todo, .. }, _)
                    if !batches.is_empty() =>
                {
                    todo.push_front(batches);
                }
                (Task::Chunks(chunks), _, Some(evaluation)) => evaluation.todo.push_front(chunks),
                _ => {}
            }
        }
        self.members.remove(&member)
    }

    /// Returns the gradients that were pushed since the last call.
    pub fn take_contributions(&mut self) -> Vec<Contribution> {
        std::mem::take(&mut self.contributions)
    }

    /// Returns the tickets that were revoked since the last call, whose pushes servers must ignore.
    pub fn take_revoked(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.revoked)
    }

    /// Starts a synchronous step of `virtual_ranks` virtual ranks.
    pub fn begin_step(&mut self, step: u64, virtual_ranks: usize) {
        let share = (virtual_ranks / self.members.len().max(1)).max(1);
        // The size of the largest groups of the tree of which every worker gets one.
        let size = if share >= virtual_ranks { virtual_ranks } else { 1 << share.ilog2() };
        let todo = (0..virtual_ranks)
            .step_by(size)
            .map(|first| first..(first + size).min(virtual_ranks))
            .collect();
        self.training =
            Training::Step { step, todo, losses: TreeReducer::new(virtual_ranks), compute: 0.0 };
    }

    /// Returns the sum of the virtual ranks' losses, once all are computed, and the compute time of
    /// the slowest piece in seconds.
    pub fn step_result(&self) -> Option<(f64, f64)> {
        match &self.training {
            Training::Step { losses, compute, .. } => losses.whole().map(|loss| (*loss, *compute)),
            _ => None,
        }
    }

    /// Starts asynchronous training on the batches up to `end`, except those that are done. A step
    /// has `step_batches` batches.
    pub fn begin_batches(&mut self, done: FinishedBatches, end: u64, step_batches: usize) {
        let FinishedBatches { low, ahead, untaken, histogram } = done;
        let mut todo = VecDeque::new();
        let mut next = low;
        for (first, after) in &ahead {
            if next < *first {
                todo.push_back(next..*first);
            }
            next = *after;
        }
        self.histogram = histogram;
        let done = untaken.into();
        let max_done = STEPS_AHEAD * step_batches.max(1);
        self.training = Training::Batches { next, end, todo, low, ahead, done, max_done };
    }

    /// Returns the batches that are done, in asynchronous training.
    pub fn done_batches(&self) -> Option<FinishedBatches> {
        match &self.training {
            Training::Batches { low, ahead, done, .. } => {
                let untaken = done.iter().copied().collect();
                let histogram = self.histogram.clone();
                Some(FinishedBatches { low: *low, ahead: ahead.clone(), untaken, histogram })
            }
            _ => None,
        }
    }

    /// Returns the results of the next `count` batches, or none if fewer are done.
    pub fn take_batches(&mut self, count: usize) -> Option<Vec<BatchResult>> {
        match &mut self.training {
            Training::Batches { done, .. } if done.len() >= count => {
                Some(done.drain(..count).collect())
            }
            _ => None,
        }
    }

    /// Returns the first batch that is not done.
    pub fn first_unfinished(&self) -> u64 {
        match &self.training {
            Training::Batches { low, .. } => *low,
            _ => 0,
        }
    }

    /// Starts an evaluation of `chunks` chunks with the parameters of a snapshot.
    pub fn begin_evaluation(&mut self, cut: u64, chunks: u64) {
        let size = chunks.div_ceil(4 * self.members.len().max(1) as u64).max(1);
        let todo = (0..chunks)
            .step_by(size as usize)
            .map(|first| first..(first + size).min(chunks))
            .collect();
        self.evaluation = Some(Evaluation { cut, chunks, todo, sums: BTreeMap::new() });
    }

    /// Ends the evaluation and returns the sums of all chunks in order, or none while some are
    /// missing.
    pub fn take_evaluation(&mut self) -> Option<Vec<Vec<f64>>> {
        let is_done =
            |evaluation: &mut Evaluation| evaluation.sums.len() as u64 == evaluation.chunks;
        Some(self.evaluation.take_if(is_done)?.sums.into_values().collect())
    }

    /// Cancels the current evaluation.
    pub fn drop_evaluation(&mut self) {
        self.evaluation = None;
    }

    /// Returns the number of batches by staleness.
    pub fn histogram(&self) -> &BTreeMap<u64, u64> {
        &self.histogram
    }

    /// Returns the assigned work: ticket, worker and description for the status of the run.
    pub fn assigned_work(&self) -> impl Iterator<Item = (u64, u64, Value)> {
        self.assigned.iter().map(|(ticket, (member, task))| (*ticket, *member, task.to_json()))
    }

    /// Ends the run with an exit code.
    pub fn end(&mut self, code: i32) {
        self.end = Some(code);
    }

    /// Returns the next work of a worker, or none if there is none at the moment.
    pub fn next(&mut self, member: u64) -> Option<Work> {
        if let Some(code) = self.end {
            return Some(Work::End(code));
        }
        if !self.has(member) {
            return Some(Work::Renew);
        }
        if let Some(evaluation) = &mut self.evaluation
            && let Some(chunks) = evaluation.todo.pop_front()
        {
            let cut = evaluation.cut;
            let ticket = self.assign(member, Task::Chunks(chunks.clone()));
            return Some(Work::Evaluate { ticket, cut, chunks });
        }
        match &mut self.training {
            Training::None => None,
            Training::Step { step, todo, .. } => {
                let step = *step;
                let virtual_ranks = todo.pop_front()?;
                let ticket = self.assign(member, Task::VirtualRanks(virtual_ranks.clone()));
                Some(Work::VirtualRanks { ticket, step, virtual_ranks })
            }
            Training::Batches { .. } => self.next_batch(member),
        }
    }

    /// Returns the next batch of a worker's lease, or a new lease; none while the slowest worker or
    /// the coordinator is too far behind.
    fn next_batch(&mut self, member: u64) -> Option<Work> {
        if let Training::Batches { done, max_done, .. } = &self.training
            && done.len() >= *max_done
        {
            return None;
        }
        let worker = self.members.get(&member)?;
        let slowest = self.slowest().unwrap_or(worker.clock);
        if let Staleness::Bound(bound) = self.staleness
            && worker.clock > slowest + bound
        {
            return None;
        }
        if let Some(Task::Batches(left)) =
            worker.lease.and_then(|lease| self.assigned.get(&lease)).map(|(_, task)| task)
            && !left.is_empty()
        {
            return Some(Work::ContinueLease);
        }
        let Training::Batches { next, end, todo, .. } = &mut self.training else { return None };
        let batches = match todo.pop_front() {
            Some(batches) => batches,
            None if next < end => {
                // Leases get shorter towards the end, so that all workers end at about the same
                // time.
                let share = (*end - *next).div_ceil(2 * self.members.len().max(1) as u64);
                let first = *next;
                *next = first + self.lease.min(share.max(1));
                first..*next
            }
            None => self.steal()?,
        };
        let ticket = self.assign(member, Task::Batches(batches.clone()));
        if let Some(member) = self.members.get_mut(&member) {
            member.lease = Some(ticket);
        }
        Some(Work::Lease { ticket, batches })
    }

    /// Takes the last half of the longest lease, which its worker has not reached, so that a slow
    /// worker does not delay the end.
    fn steal(&mut self) -> Option<Range<u64>> {
        let leases = self.assigned.values_mut().filter_map(|(_, task)| match task {
            Task::Batches(left) if left.end - left.start > 1 => Some(left),
            _ => None,
        });
        let left = leases.max_by_key(|left| left.end - left.start)?;
        // Its first batch is being computed.
        let middle = left.start + 1 + (left.end - left.start - 1) / 2;
        let stolen = middle..left.end;
        left.end = middle;
        Some(stolen)
    }

    /// Returns the clock of the slowest worker that has a lease.
    fn slowest(&self) -> Option<u64> {
        let busy = self.members.values().filter(|member| member.lease.is_some());
        busy.map(|member| member.clock).min()
    }

    fn assign(&mut self, member: u64, task: Task) -> u64 {
        self.tickets += 1;
        self.assigned.insert(self.tickets, (member, task));
        self.tickets
    }

    /// Records the report of a worker. Reports with a revoked ticket are ignored.
    pub fn report(&mut self, member: u64, report: &WorkerReport) {
        let ticket = match report {
            WorkerReport::VirtualRanks { ticket, .. }
            | WorkerReport::Batch { ticket, .. }
            | WorkerReport::Chunks { ticket, .. } => *ticket,
            WorkerReport::Failed { .. } => return,
        };
        let Some((owner, task)) = self.assigned.get_mut(&ticket) else { return };
        if *owner != member {
            return;
        }
        let Some(member) = self.members.get_mut(&member) else { return };
        member.done += 1;
        let mut is_over = true;
        match (report, task, &mut self.training, &mut self.evaluation) {
            (
                WorkerReport::VirtualRanks { losses, seconds, .. },
                Task::VirtualRanks(virtual_ranks),
                Training::Step { losses: sums, compute: most, .. },
                _,
            ) => {
                let values: Vec<f64> = losses.iter().map(|bits| f64::from_bits(*bits)).collect();
                let loss = hpctrain_base::tree_sum::tree_sum(&values);
                sums.put(virtual_ranks.clone(), Cow::Owned(loss), |into, from| *into += from);
                *most = most.max(seconds.compute);
                member.seconds += *seconds;
                let place = member.place.clone();
                let shares = virtual_ranks.len();
                let staleness = Some(0);
                self.contributions.push(Contribution {
                    place,
                    shares,
                    loss,
                    staleness,
                    seconds: *seconds,
                });
            }
            (
                WorkerReport::Batch { batch, loss, norm, staleness, seconds, .. },
                Task::Batches(left),
                Training::Batches { low, ahead, done, .. },
                _,
            ) => {
                if *batch != left.start || left.is_empty() {
                    return;
                }
                left.start += 1;
                is_over = left.is_empty();
                member.clock += 1;
                member.seconds += *seconds;
                if is_over {
                    member.lease = None;
                }
                mark_finished(low, ahead, *batch);
                let loss = f64::from_bits(*loss);
                let norm = f64::from_bits(*norm);
                done.push_back(BatchResult {
                    loss,
                    norm,
                    staleness: *staleness,
                    compute: seconds.compute,
                });
                let place = member.place.clone();
                let staleness = *staleness;
                self.contributions.push(Contribution {
                    place,
                    shares: 1,
                    loss,
                    staleness,
                    seconds: *seconds,
                });
                if let Some(staleness) = staleness {
                    *self.histogram.entry(staleness).or_default() += 1;
                }
            }
            (WorkerReport::Chunks { sums, .. }, Task::Chunks(chunks), _, Some(evaluation)) => {
                let values =
                    sums.iter().map(|sums| sums.iter().map(|bits| f64::from_bits(*bits)).collect());
                evaluation.sums.extend(chunks.clone().zip(values));
            }
            _ => {}
        }
        if is_over {
            self.assigned.remove(&ticket);
        }
    }
}

/// Adds a batch to those that are done: those before `low` and the ranges `ahead`.
fn mark_finished(low: &mut u64, ahead: &mut BTreeMap<u64, u64>, batch: u64) {
    let before = ahead.range(..batch).next_back().filter(|(_, end)| **end == batch);
    let first = before.map_or(batch, |(first, _)| *first);
    let end = ahead.remove(&(batch + 1)).unwrap_or(batch + 1);
    ahead.insert(first, end);
    if let Some(end) = ahead.remove(low) {
        *low = end;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn pool(staleness: Staleness, members: u64) -> WorkScheduler {
        let mut pool = WorkScheduler::new(staleness, 4, 0);
        (1..=members).for_each(|member| pool.join(member, format!("host {member}")));
        pool
    }

    fn batch(ticket: u64, batch: u64) -> WorkerReport {
        let loss = 1f64.to_bits();
        let norm = 1f64.to_bits();
        let seconds = WorkerTimes { compute: 0.1, ..WorkerTimes::default() };
        WorkerReport::Batch { ticket, batch, loss, norm, staleness: Some(0), seconds }
    }

    /// Requests a batch for a worker and returns its report, or none if the worker gets no batch.
    fn compute(
        pool: &mut WorkScheduler,
        leases: &mut BTreeMap<u64, (u64, Range<u64>)>,
        member: u64,
    ) -> Option<WorkerReport> {
        match pool.next(member)? {
            Work::Lease { ticket, batches } => {
                leases.insert(member, (ticket, batches));
            }
            Work::ContinueLease => {}
            other => panic!("{other:?}"),
        }
        let (ticket, left) = leases.get_mut(&member)?;
        Some(batch(*ticket, left.next()?))
    }

    #[test]
    fn assigned_work_is_structured() {
        for (task, json) in [
            (Task::Batches(41..45), r#"{"batches":[41,45]}"#),
            (Task::VirtualRanks(0..2), r#"{"virtual_ranks":[0,2]}"#),
            (Task::Chunks(7..8), r#"{"chunks":[7,8]}"#),
        ] {
            assert_eq!(task.to_json().to_string(), json);
        }
        let mut pool = pool(Staleness::Bound(0), 2);
        pool.begin_step(7, 4);
        let _ = pool.next(1);
        let assigned: Vec<_> = pool.assigned_work().collect();
        assert_eq!(assigned.len(), 1);
        assert!(assigned[0].2["virtual_ranks"][0].is_u64(), "{assigned:?}");
    }

    #[test]
    fn virtual_ranks_of_a_lost_worker_are_reassigned() {
        let mut pool = pool(Staleness::Bound(0), 2);
        pool.begin_step(7, 4);
        let Some(Work::VirtualRanks { ticket: first, virtual_ranks, step: 7 }) = pool.next(1)
        else {
            panic!("no virtual ranks")
        };
        let Some(Work::VirtualRanks { ticket: second, virtual_ranks: others, .. }) = pool.next(2)
        else {
            panic!("no virtual ranks")
        };
        assert_eq!((virtual_ranks.clone(), others, pool.next(1)), (0..2, 2..4, None));
        let report = |ticket, losses: [f64; 2]| WorkerReport::VirtualRanks {
            ticket,
            losses: losses.map(f64::to_bits).to_vec(),
            seconds: WorkerTimes { compute: 1.0, ..WorkerTimes::default() },
        };
        pool.report(2, &report(second, [4.0, 8.0]));
        pool.leave(1);
        assert_eq!((pool.take_revoked(), pool.next(1)), (vec![first], Some(Work::Renew)));
        pool.report(1, &report(first, [100.0, 100.0]));
        assert_eq!(pool.step_result(), None);
        let Some(Work::VirtualRanks { ticket, virtual_ranks: again, .. }) = pool.next(2) else {
            panic!("no virtual ranks")
        };
        assert_eq!(again, virtual_ranks);
        pool.report(2, &report(ticket, [1.0, 2.0]));
        assert_eq!(pool.step_result(), Some((15.0, 1.0)));
    }

    #[test]
    fn every_batch_is_done_once_when_workers_are_lost() {
        let mut pool = pool(Staleness::None, 3);
        pool.begin_batches(FinishedBatches { low: 10, ..FinishedBatches::default() }, 60, 50);
        let mut counts = BTreeMap::new();
        let mut leases = BTreeMap::<u64, (u64, Range<u64>)>::new();
        let mut turn = 0;
        while pool.first_unfinished() < 60 {
            turn += 1;
            let member = 1 + turn % 3 + u64::from(turn > 20);
            if turn == 20 {
                pool.leave(1);
                pool.join(4, "host 4".into());
            }
            match pool.next(member) {
                Some(Work::Lease { ticket, batches }) => {
                    leases.insert(member, (ticket, batches));
                }
                Some(Work::ContinueLease) => {}
                _ => continue,
            }
            let (ticket, left) = leases.get_mut(&member).unwrap();
            let now = left.next().unwrap();
            *counts.entry(now).or_insert(0) += 1;
            pool.report(member, &batch(*ticket, now));
            // A repeated report counts once.
            pool.report(member, &batch(*ticket, now));
        }
        assert!(counts.len() == 50 && counts.values().all(|count| *count == 1), "{counts:?}");
        assert_eq!(pool.take_batches(50).map(|all| all.len()), Some(50));
        assert_eq!((pool.take_batches(1), pool.next(2), pool.histogram()[&0]), (None, None, 50));
        pool.end(0);
        assert_eq!(pool.next(2), Some(Work::End(0)));
    }

    #[test]
    fn batches_continue_from_those_that_are_done() {
        let mut before = pool(Staleness::None, 2);
        before.begin_batches(FinishedBatches::default(), 20, 2);
        let Some(Work::Lease { ticket: slow, batches: of_slow }) = before.next(1) else {
            panic!("no lease")
        };
        let Some(Work::Lease { ticket, batches }) = before.next(2) else { panic!("no lease") };
        before.report(1, &batch(slow, of_slow.start));
        batches.for_each(|now| before.report(2, &batch(ticket, now)));
        assert_eq!(before.take_batches(2).map(|taken| taken.len()), Some(2));
        let done = before.done_batches().unwrap();
        assert_eq!(
            (done.low, done.ahead.clone(), done.untaken.len()),
            (1, BTreeMap::from([(4, 8)]), 3)
        );
        let mut after = WorkScheduler::new(Staleness::None, 4, 1000);
        after.begin_batches(done, 20, 20);
        after.join(9, "host 9".into());
        let mut left = BTreeSet::new();
        while let Some(Work::Lease { ticket, batches }) = after.next(9) {
            assert!(ticket > 1000);
            for now in batches {
                assert!(left.insert(now));
                after.report(9, &batch(ticket, now));
            }
        }
        assert_eq!((left, after.first_unfinished()), ((1..4).chain(8..20).collect(), 20));
        // Three results were restored.
        assert_eq!(after.take_batches(18).map(|taken| taken.len()), Some(18));
        assert_eq!(after.histogram()[&0], 20);
    }

    #[test]
    fn workers_wait_while_the_coordinator_is_behind() {
        for staleness in [Staleness::None, Staleness::Bound(100)] {
            let mut pool = pool(staleness, 2);
            pool.begin_batches(FinishedBatches::default(), 1000, 2);
            let mut leases = BTreeMap::new();
            // Worker 2 has a batch in flight while worker 1 finishes all that it gets.
            let in_flight = compute(&mut pool, &mut leases, 2).unwrap();
            let mut finished = 0;
            while let Some(report) = compute(&mut pool, &mut leases, 1) {
                pool.report(1, &report);
                finished += 1;
                assert!(finished <= STEPS_AHEAD * 2, "{finished} batches are not accounted");
            }
            assert_eq!(finished, STEPS_AHEAD * 2);
            pool.report(2, &in_flight);
            assert_eq!((pool.next(1), pool.next(2)), (None, None));
            // Evaluations need all workers, however far they are ahead.
            pool.begin_evaluation(1, 1);
            assert!(matches!(pool.next(1), Some(Work::Evaluate { .. })));
            assert_eq!(pool.take_batches(2).map(|taken| taken.len()), Some(2));
            assert!(pool.next(2).is_some());
        }
    }

    #[test]
    fn ranges_of_finished_batches_do_not_grow_with_the_lead() {
        let mut low = 0;
        let mut ahead = BTreeMap::new();
        for batch in (64..10_000).chain(20..40) {
            mark_finished(&mut low, &mut ahead, batch);
        }
        assert_eq!((low, ahead.clone()), (0, BTreeMap::from([(20, 40), (64, 10_000)])));
        (40..64).rev().for_each(|batch| mark_finished(&mut low, &mut ahead, batch));
        assert_eq!((low, ahead.clone()), (0, BTreeMap::from([(20, 10_000)])));
        (0..20).for_each(|batch| mark_finished(&mut low, &mut ahead, batch));
        assert_eq!((low, ahead.len()), (10_000, 0));
    }

    #[test]
    fn no_worker_gets_further_ahead_than_the_bound() {
        let mut pool = pool(Staleness::Bound(2), 2);
        pool.begin_batches(FinishedBatches::default(), 100, 100);
        let Some(Work::Lease { ticket: slow, batches: of_slow }) = pool.next(1) else {
            panic!("no lease")
        };
        let Some(Work::Lease { ticket, batches }) = pool.next(2) else { panic!("no lease") };
        for now in batches.clone().take(3) {
            pool.report(2, &batch(ticket, now));
            assert_eq!(pool.next(2).is_some(), now < batches.start + 2);
        }
        pool.report(1, &batch(slow, of_slow.start));
        assert_eq!(pool.next(2), Some(Work::ContinueLease));
        // A worker that joins later need not catch up, and a lost worker is not waited for.
        pool.join(3, "host 3".into());
        assert_eq!(pool.members()[&3].clock, 1);
        pool.report(2, &batch(ticket, batches.start + 3));
        assert_eq!(pool.next(2), None);
        pool.leave(1);
        assert!(pool.next(2).is_some());
    }

    #[test]
    fn a_worker_without_a_lease_delays_no_other() {
        let mut pool = pool(Staleness::Bound(1), 1);
        pool.begin_batches(FinishedBatches::default(), 100, 100);
        let Some(Work::Lease { ticket, batches }) = pool.next(1) else { panic!("no lease") };
        for now in batches {
            pool.report(1, &batch(ticket, now));
        }
        // It has no lease at the moment.
        pool.join(2, "host 2".into());
        assert_eq!(pool.members()[&2].clock, 4);
        assert!(matches!(
            (pool.next(1), pool.next(2)),
            (Some(Work::Lease { .. }), Some(Work::Lease { .. }))
        ));
    }

    #[test]
    fn idle_workers_steal_batches_at_the_end() {
        let mut pool = WorkScheduler::new(Staleness::None, 64, 0);
        pool.join(1, "slow".into());
        pool.begin_batches(FinishedBatches::default(), 9, 9);
        let Some(Work::Lease { ticket: slow, batches }) = pool.next(1) else { panic!("no lease") };
        pool.join(2, "host 2".into());
        let mut done = vec![];
        while let Some(Work::Lease { ticket, batches }) = pool.next(2) {
            for now in batches {
                done.push(now);
                pool.report(2, &batch(ticket, now));
            }
        }
        // All but the batch that the slow worker computes.
        assert_eq!((batches.start, done.len(), pool.first_unfinished()), (0, 8, 0));
        pool.report(1, &batch(slow, 0));
        assert_eq!((pool.first_unfinished(), pool.next(1)), (9, None));
    }

    #[test]
    fn chunks_come_before_batches_and_each_counts_once() {
        let mut pool = pool(Staleness::None, 1);
        pool.begin_batches(FinishedBatches::default(), 100, 100);
        assert!(matches!(pool.next(1), Some(Work::Lease { .. })));
        pool.begin_evaluation(5, 6);
        let mut seen = vec![];
        while let Some(Work::Evaluate { ticket, cut: 5, chunks }) = pool.next(1) {
            let sums = chunks.clone().map(|chunk| vec![(chunk as f64).to_bits()]).collect();
            seen.extend(chunks);
            assert!(pool.take_evaluation().is_none());
            pool.report(1, &WorkerReport::Chunks { ticket, sums });
        }
        assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
        assert_eq!(
            pool.take_evaluation().unwrap(),
            (0..6).map(|chunk| vec![f64::from(chunk)]).collect::<Vec<_>>()
        );
        assert_eq!(pool.next(1), Some(Work::ContinueLease));
    }
}
