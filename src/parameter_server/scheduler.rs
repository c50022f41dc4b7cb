//! The work of a run and the workers that do it: each piece is given out under a ticket, and given
//! out again if its worker is gone.
//!
//! No clock and no connection is here: [`super::coordinator`] has those.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::protocol::{Work, WorkerReport, WorkerTimes, bits};
use super::tree_reducer::TreeReducer;
use hpctrain_config::Staleness;

/// A piece of work.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Task {
    /// Virtual ranks of the step under way.
    VirtualRanks(Range<usize>),
    /// Batches.
    Batches(Range<u64>),
    /// Chunks of the evaluation under way.
    Chunks(Range<u64>),
}

/// A worker.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its host and process.
    pub place: String,
    /// Batches that it has done, and before it came the slowest other.
    pub clock: u64,
    /// Pieces of work done.
    pub done: u64,
    /// Its time.
    pub seconds: WorkerTimes,
    /// Its lease, if it has one.
    lease: Option<u64>,
}

/// A batch that was done.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// Mean loss.
    #[serde(with = "bits")]
    pub loss: f64,
    /// Norm of the gradient.
    #[serde(with = "bits")]
    pub norm: f64,
    /// Updates between its pull and its push; none if it was not finite.
    pub staleness: Option<u64>,
    /// Seconds that it took to compute.
    pub compute: f64,
}

/// Batches that are done.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// All before this one,
    pub low: u64,
    /// and those.
    pub ahead: BTreeSet<u64>,
    /// Of them, those not yet taken by [`WorkScheduler::take_batches`], in the order of their
    /// coming.
    pub untaken: Vec<Batch>,
    /// All, by updates between pull and push.
    pub histogram: BTreeMap<u64, u64>,
}

/// A gradient that a worker has given.
#[derive(Debug, Clone, PartialEq)]
pub struct Contribution {
    /// Host and process of the worker.
    pub place: String,
    /// Its virtual ranks; 1 where it is a batch of the worker's own.
    pub shares: usize,
    /// The sum of the losses of its virtual ranks, or the mean loss of the batch.
    pub loss: f64,
    /// Updates between its pull and its push; none if it was not finite.
    pub staleness: Option<u64>,
    /// The worker's time.
    pub seconds: WorkerTimes,
}

/// The kind of work that is under way besides evaluations.
#[derive(Debug)]
enum Course {
    /// Nothing.
    None,
    /// A step that all take together.
    Step { step: u64, todo: VecDeque<Range<usize>>, losses: TreeReducer<f64>, compute: f64 },
    /// Batches of each worker's own.
    Batches {
        /// The first batch that nobody has had.
        next: u64,
        end: u64,
        /// Those that came back.
        todo: VecDeque<Range<u64>>,
        /// All batches before this one are done, and those.
        low: u64,
        ahead: BTreeSet<u64>,
        /// Not yet taken by [`WorkScheduler::take_batches`].
        done: VecDeque<Batch>,
    },
}

/// An evaluation under way.
#[derive(Debug)]
struct Evaluation {
    cut: u64,
    chunks: u64,
    todo: VecDeque<Range<u64>>,
    sums: BTreeMap<u64, Vec<f64>>,
}

/// Work and workers.
#[derive(Debug)]
pub struct WorkScheduler {
    staleness: Staleness,
    /// Batches of a lease.
    lease: u64,
    members: BTreeMap<u64, Member>,
    /// Work that was given out: to whom.
    given: BTreeMap<u64, (u64, Task)>,
    /// Tickets of those that are gone, not yet taken by [`WorkScheduler::take_revoked`].
    revoked: Vec<u64>,
    tickets: u64,
    course: Course,
    evaluation: Option<Evaluation>,
    /// Not yet taken by [`WorkScheduler::take_contributions`].
    contributions: Vec<Contribution>,
    /// By updates between pull and push: batches.
    histogram: BTreeMap<u64, u64>,
    /// The end of the run, as an exit code.
    end: Option<i32>,
}

impl WorkScheduler {
    /// Without workers and without work. Tickets are numbered from `tickets` on: those of a
    /// coordinator before it are others.
    pub fn new(staleness: Staleness, lease: u64, tickets: u64) -> Self {
        Self {
            staleness,
            lease: lease.max(1),
            members: BTreeMap::new(),
            given: BTreeMap::new(),
            revoked: Vec::new(),
            tickets,
            course: Course::None,
            evaluation: None,
            contributions: Vec::new(),
            histogram: BTreeMap::new(),
            end: None,
        }
    }

    /// Whether all workers take each step together.
    pub fn is_synchronous(&self) -> bool {
        self.staleness == Staleness::Bound(0)
    }

    /// A worker comes.
    pub fn join(&mut self, member: u64, place: String) {
        // Nobody is to wait until it has caught up.
        let clock = self
            .slowest()
            .or_else(|| self.members.values().map(|member| member.clock).max())
            .unwrap_or(0);
        self.members.insert(
            member,
            Member { place, clock, done: 0, seconds: WorkerTimes::default(), lease: None },
        );
    }

    /// Whether a worker is one.
    pub fn has(&self, member: u64) -> bool {
        self.members.contains_key(&member)
    }

    /// The workers.
    pub fn members(&self) -> &BTreeMap<u64, Member> {
        &self.members
    }

    /// A worker is gone: others get its work.
    pub fn leave(&mut self, member: u64) -> Option<Member> {
        let tickets: Vec<u64> = self
            .given
            .iter()
            .filter(|(_, (of, _))| *of == member)
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in tickets {
            let Some((_, task)) = self.given.remove(&ticket) else { continue };
            self.revoked.push(ticket);
            match (task, &mut self.course, &mut self.evaluation) {
                (Task::VirtualRanks(virtual_ranks), Course::Step { todo, .. }, _) => {
                    todo.push_front(virtual_ranks)
                }
                (Task::Batches(batches), Course::Batches { todo, .. }, _)
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

    /// Gradients that were given since the last call.
    pub fn take_contributions(&mut self) -> Vec<Contribution> {
        std::mem::take(&mut self.contributions)
    }

    /// Tickets whose pushes are no longer to count.
    pub fn take_revoked(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.revoked)
    }

    /// All take step `step` together, of so many virtual ranks.
    pub fn begin_step(&mut self, step: u64, virtual_ranks: usize) {
        let share = (virtual_ranks / self.members.len().max(1)).max(1);
        // The largest group of the tree that gives every worker one.
        let size = if share >= virtual_ranks { virtual_ranks } else { 1 << share.ilog2() };
        let todo = (0..virtual_ranks)
            .step_by(size)
            .map(|first| first..(first + size).min(virtual_ranks))
            .collect();
        self.course =
            Course::Step { step, todo, losses: TreeReducer::new(virtual_ranks), compute: 0.0 };
    }

    /// The sum of the virtual ranks' losses, once all have been computed, and the most seconds that one
    /// worker took.
    pub fn step_result(&self) -> Option<(f64, f64)> {
        match &self.course {
            Course::Step { losses, compute, .. } => losses.whole().map(|loss| (*loss, *compute)),
            _ => None,
        }
    }

    /// Workers train on batches by themselves, up to `end`, but for those that are done.
    pub fn begin_batches(&mut self, done: Done, end: u64) {
        let Done { low, ahead, untaken, histogram } = done;
        let next = ahead.last().map_or(low, |last| last + 1);
        let mut todo = VecDeque::new();
        let mut first = low;
        for batch in &ahead {
            if first < *batch {
                todo.push_back(first..*batch);
            }
            first = batch + 1;
        }
        self.histogram = histogram;
        self.course = Course::Batches { next, end, todo, low, ahead, done: untaken.into() };
    }

    /// The batches that are done, where workers train by themselves.
    pub fn done_batches(&self) -> Option<Done> {
        match &self.course {
            Course::Batches { low, ahead, done, .. } => {
                let untaken = done.iter().copied().collect();
                let histogram = self.histogram.clone();
                Some(Done { low: *low, ahead: ahead.clone(), untaken, histogram })
            }
            _ => None,
        }
    }

    /// The next `count` batches that were done, once there are so many.
    pub fn take_batches(&mut self, count: usize) -> Option<Vec<Batch>> {
        match &mut self.course {
            Course::Batches { done, .. } if done.len() >= count => {
                Some(done.drain(..count).collect())
            }
            _ => None,
        }
    }

    /// The first batch that is not done.
    pub fn low(&self) -> u64 {
        match &self.course {
            Course::Batches { low, .. } => *low,
            _ => 0,
        }
    }

    /// Chunks are to be evaluated with the parameters of a cut.
    pub fn begin_evaluation(&mut self, cut: u64, chunks: u64) {
        let size = chunks.div_ceil(4 * self.members.len().max(1) as u64).max(1);
        let todo = (0..chunks)
            .step_by(size as usize)
            .map(|first| first..(first + size).min(chunks))
            .collect();
        self.evaluation = Some(Evaluation { cut, chunks, todo, sums: BTreeMap::new() });
    }

    /// The sums of all chunks, in order, once all are there: the evaluation is over.
    pub fn take_evaluation(&mut self) -> Option<Vec<Vec<f64>>> {
        let is_done =
            |evaluation: &mut Evaluation| evaluation.sums.len() as u64 == evaluation.chunks;
        Some(self.evaluation.take_if(is_done)?.sums.into_values().collect())
    }

    /// The evaluation under way is of no more use.
    pub fn drop_evaluation(&mut self) {
        self.evaluation = None;
    }

    /// Batches by updates between pull and push.
    pub fn histogram(&self) -> &BTreeMap<u64, u64> {
        &self.histogram
    }

    /// Leases and other work given out: ticket, worker, text.
    pub fn given(&self) -> impl Iterator<Item = (u64, u64, String)> {
        self.given.iter().map(|(ticket, (member, task))| (*ticket, *member, format!("{task:?}")))
    }

    /// The run is over.
    pub fn end(&mut self, code: i32) {
        self.end = Some(code);
    }

    /// Work for a worker that has none, or goes on with its lease. None if there is nothing at the
    /// moment.
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
            let ticket = self.give(member, Task::Chunks(chunks.clone()));
            return Some(Work::Evaluate { ticket, cut, chunks });
        }
        match &mut self.course {
            Course::None => None,
            Course::Step { step, todo, .. } => {
                let step = *step;
                let virtual_ranks = todo.pop_front()?;
                let ticket = self.give(member, Task::VirtualRanks(virtual_ranks.clone()));
                Some(Work::VirtualRanks { ticket, step, virtual_ranks })
            }
            Course::Batches { .. } => self.next_batch(member),
        }
    }

    /// The next batch of a worker's lease, or a new lease; none while others are too far behind.
    fn next_batch(&mut self, member: u64) -> Option<Work> {
        let mine = self.members.get(&member)?;
        let slowest = self.slowest().unwrap_or(mine.clock);
        if let Staleness::Bound(bound) = self.staleness
            && mine.clock > slowest + bound
        {
            return None;
        }
        if let Some(Task::Batches(left)) =
            mine.lease.and_then(|lease| self.given.get(&lease)).map(|(_, task)| task)
            && !left.is_empty()
        {
            return Some(Work::GoOn);
        }
        let Course::Batches { next, end, todo, .. } = &mut self.course else { return None };
        let batches = match todo.pop_front() {
            Some(batches) => batches,
            None if next < end => {
                // Towards the end leases are short, so that all end alike.
                let share = (*end - *next).div_ceil(2 * self.members.len().max(1) as u64);
                let first = *next;
                *next = first + self.lease.min(share.max(1));
                first..*next
            }
            None => self.steal()?,
        };
        let ticket = self.give(member, Task::Batches(batches.clone()));
        if let Some(member) = self.members.get_mut(&member) {
            member.lease = Some(ticket);
        }
        Some(Work::Lease { ticket, batches })
    }

    /// The last half of the longest lease, which its worker has not come to: a slow one is not to
    /// hold up the end.
    fn steal(&mut self) -> Option<Range<u64>> {
        let leases = self.given.values_mut().filter_map(|(_, task)| match task {
            Task::Batches(left) if left.end - left.start > 1 => Some(left),
            _ => None,
        });
        let left = leases.max_by_key(|left| left.end - left.start)?;
        // Its first batch is under way.
        let middle = left.start + 1 + (left.end - left.start - 1) / 2;
        let stolen = middle..left.end;
        left.end = middle;
        Some(stolen)
    }

    /// The clock of the slowest worker that has a lease.
    fn slowest(&self) -> Option<u64> {
        let busy = self.members.values().filter(|member| member.lease.is_some());
        busy.map(|member| member.clock).min()
    }

    fn give(&mut self, member: u64, task: Task) -> u64 {
        self.tickets += 1;
        self.given.insert(self.tickets, (member, task));
        self.tickets
    }

    /// A worker has done something. A report of one that counts as gone is of no account.
    pub fn done(&mut self, member: u64, report: &WorkerReport) {
        let ticket = match report {
            WorkerReport::VirtualRanks { ticket, .. }
            | WorkerReport::Batch { ticket, .. }
            | WorkerReport::Chunks { ticket, .. } => *ticket,
            WorkerReport::Failed { .. } => return,
        };
        let Some((owner, task)) = self.given.get_mut(&ticket) else { return };
        if *owner != member {
            return;
        }
        let Some(member) = self.members.get_mut(&member) else { return };
        member.done += 1;
        let mut is_over = true;
        match (report, task, &mut self.course, &mut self.evaluation) {
            (
                WorkerReport::VirtualRanks { losses, seconds, .. },
                Task::VirtualRanks(virtual_ranks),
                Course::Step { losses: sums, compute: most, .. },
                _,
            ) => {
                let values: Vec<f64> = losses.iter().map(|bits| f64::from_bits(*bits)).collect();
                let loss = hpctrain_base::tree_sum::tree_sum(&values);
                sums.put(virtual_ranks.clone(), loss, |into, from| *into += from);
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
                Course::Batches { low, ahead, done, .. },
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
                ahead.insert(*batch);
                while ahead.remove(low) {
                    *low += 1;
                }
                let loss = f64::from_bits(*loss);
                let norm = f64::from_bits(*norm);
                done.push_back(Batch {
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
            self.given.remove(&ticket);
        }
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn virtual_ranks_of_a_worker_that_is_gone_are_given_out_again() {
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
        pool.done(2, &report(second, [4.0, 8.0]));
        pool.leave(1);
        assert_eq!((pool.take_revoked(), pool.next(1)), (vec![first], Some(Work::Renew)));
        pool.done(1, &report(first, [100.0, 100.0]));
        assert_eq!(pool.step_result(), None);
        let Some(Work::VirtualRanks { ticket, virtual_ranks: again, .. }) = pool.next(2) else {
            panic!("no virtual ranks")
        };
        assert_eq!(again, virtual_ranks);
        pool.done(2, &report(ticket, [1.0, 2.0]));
        assert_eq!(pool.step_result(), Some((15.0, 1.0)));
    }

    #[test]
    fn every_batch_is_done_once_whoever_is_gone() {
        let mut pool = pool(Staleness::None, 3);
        pool.begin_batches(Done { low: 10, ..Done::default() }, 60);
        let mut counts = BTreeMap::new();
        let mut leases = BTreeMap::<u64, (u64, Range<u64>)>::new();
        let mut turn = 0;
        while pool.low() < 60 {
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
                Some(Work::GoOn) => {}
                _ => continue,
            }
            let (ticket, left) = leases.get_mut(&member).unwrap();
            let now = left.next().unwrap();
            *counts.entry(now).or_insert(0) += 1;
            pool.done(member, &batch(*ticket, now));
            // A report that comes twice counts once.
            pool.done(member, &batch(*ticket, now));
        }
        assert!(counts.len() == 50 && counts.values().all(|count| *count == 1), "{counts:?}");
        assert_eq!(pool.take_batches(50).map(|all| all.len()), Some(50));
        assert_eq!((pool.take_batches(1), pool.next(2), pool.histogram()[&0]), (None, None, 50));
        pool.end(0);
        assert_eq!(pool.next(2), Some(Work::End(0)));
    }

    #[test]
    fn batches_go_on_from_those_that_are_done() {
        let mut before = pool(Staleness::None, 2);
        before.begin_batches(Done::default(), 20);
        let Some(Work::Lease { ticket: slow, batches: of_slow }) = before.next(1) else {
            panic!("no lease")
        };
        let Some(Work::Lease { ticket, batches }) = before.next(2) else { panic!("no lease") };
        before.done(1, &batch(slow, of_slow.start));
        batches.for_each(|now| before.done(2, &batch(ticket, now)));
        assert_eq!(before.take_batches(2).map(|taken| taken.len()), Some(2));
        let done = before.done_batches().unwrap();
        assert_eq!((done.low, done.ahead.clone(), done.untaken.len()), (1, (4..8).collect(), 3));
        let mut after = WorkScheduler::new(Staleness::None, 4, 1000);
        after.begin_batches(done, 20);
        after.join(9, "host 9".into());
        let mut left = BTreeSet::new();
        while let Some(Work::Lease { ticket, batches }) = after.next(9) {
            assert!(ticket > 1000);
            for now in batches {
                assert!(left.insert(now));
                after.done(9, &batch(ticket, now));
            }
        }
        assert_eq!((left, after.low()), ((1..4).chain(8..20).collect(), 20));
        // Three were there already.
        assert_eq!(after.take_batches(18).map(|taken| taken.len()), Some(18));
        assert_eq!(after.histogram()[&0], 20);
    }

    #[test]
    fn nobody_gets_further_ahead_than_the_bound() {
        let mut pool = pool(Staleness::Bound(2), 2);
        pool.begin_batches(Done::default(), 100);
        let Some(Work::Lease { ticket: slow, batches: of_slow }) = pool.next(1) else {
            panic!("no lease")
        };
        let Some(Work::Lease { ticket, batches }) = pool.next(2) else { panic!("no lease") };
        for now in batches.clone().take(3) {
            pool.done(2, &batch(ticket, now));
            assert_eq!(pool.next(2).is_some(), now < batches.start + 2);
        }
        pool.done(1, &batch(slow, of_slow.start));
        assert_eq!(pool.next(2), Some(Work::GoOn));
        // One that comes later need not catch up, and one that is gone is not waited for.
        pool.join(3, "host 3".into());
        assert_eq!(pool.members()[&3].clock, 1);
        pool.done(2, &batch(ticket, batches.start + 3));
        assert_eq!(pool.next(2), None);
        pool.leave(1);
        assert!(pool.next(2).is_some());
    }

    #[test]
    fn a_pause_without_leases_holds_up_nobody() {
        let mut pool = pool(Staleness::Bound(1), 1);
        pool.begin_batches(Done::default(), 100);
        let Some(Work::Lease { ticket, batches }) = pool.next(1) else { panic!("no lease") };
        for now in batches {
            pool.done(1, &batch(ticket, now));
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
    fn the_end_is_shared_with_those_that_have_nothing_to_do() {
        let mut pool = WorkScheduler::new(Staleness::None, 64, 0);
        pool.join(1, "slow".into());
        pool.begin_batches(Done::default(), 9);
        let Some(Work::Lease { ticket: slow, batches }) = pool.next(1) else { panic!("no lease") };
        pool.join(2, "host 2".into());
        let mut done = vec![];
        while let Some(Work::Lease { ticket, batches }) = pool.next(2) {
            for now in batches {
                done.push(now);
                pool.done(2, &batch(ticket, now));
            }
        }
        // All but the batch that the slow one is at.
        assert_eq!((batches.start, done.len(), pool.low()), (0, 8, 0));
        pool.done(1, &batch(slow, 0));
        assert_eq!((pool.low(), pool.next(1)), (9, None));
    }

    #[test]
    fn chunks_come_before_batches_and_each_counts_once() {
        let mut pool = pool(Staleness::None, 1);
        pool.begin_batches(Done::default(), 100);
        assert!(matches!(pool.next(1), Some(Work::Lease { .. })));
        pool.begin_evaluation(5, 6);
        let mut seen = vec![];
        while let Some(Work::Evaluate { ticket, cut: 5, chunks }) = pool.next(1) {
            let sums = chunks.clone().map(|chunk| vec![(chunk as f64).to_bits()]).collect();
            seen.extend(chunks);
            assert!(pool.take_evaluation().is_none());
            pool.done(1, &WorkerReport::Chunks { ticket, sums });
        }
        assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
        assert_eq!(
            pool.take_evaluation().unwrap(),
            (0..6).map(|chunk| vec![f64::from(chunk)]).collect::<Vec<_>>()
        );
        assert_eq!(pool.next(1), Some(Work::GoOn));
    }
}
