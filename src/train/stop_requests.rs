//! Requests to a rank besides training: by signals, by the clock, by evaluators, by hooks.
//!
//! Ranks are asked at different moments. Each sends the requests it received with its next
//! [`ControlFlags`], and all obey the flags of the same step.
//!
//! A hook's request to stop, on any rank, and its failure travel likewise: they cost no message,
//! and the run ends after the step that carries them.

use std::time::{Duration, Instant};

use super::time_limit::TimeLimit;
use hpctrain_base::signals;
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_checkpoint::run_dir::markers::Markers;
use hpctrain_parallel::{AllFlags, ControlFlags};

/// Least time between two looks for evaluators' requests: each is a request to a file system that
/// other nodes use as well.
const ASK: Duration = Duration::from_millis(100);

/// The requests that reach this rank.
pub struct StopRequests {
    /// Rank 0 alone looks at the clock and for evaluators' requests.
    root: bool,
    budget: TimeLimit,
    markers: Markers,
    /// Time between checkpoints, if it counts.
    every: Option<Duration>,
    saved: Instant,
    /// The moment at which a save that failed is due again.
    again: Option<Instant>,
    has_published: bool,
    asked: Instant,
    /// The reason to stop early, once one is known.
    stop_reason: Option<String>,
}

impl StopRequests {
    /// The requests of a rank; rank 0 is `root`. A checkpoint is due `every` so many seconds, 0 for
    /// never.
    pub fn new(root: bool, budget: TimeLimit, markers: Markers, every: u64) -> Self {
        let now = Instant::now();
        let every = (every > 0).then(|| Duration::from_secs(every));
        Self {
            root,
            budget,
            markers,
            every,
            saved: now,
            again: None,
            has_published: false,
            asked: now,
            stop_reason: None,
        }
    }

    /// The flags of this rank for the others. `written` is whether it has done its part of the save
    /// under way.
    pub fn flags(&mut self, written: bool) -> ControlFlags {
        if self.root && self.stop_reason.is_none() && self.asked.elapsed() >= ASK {
            self.asked = Instant::now();
            self.stop_reason = self.markers.asked_to_stop();
        }
        let due = self.every.is_some_and(|every| self.saved.elapsed() >= every)
            || self.again.is_some_and(|again| Instant::now() >= again);
        ControlFlags::END.when(self.must_end())
            | ControlFlags::WRITTEN.when(written)
            | ControlFlags::DUE.when(self.root && due)
            | ControlFlags::STOP.when(self.stop_reason.is_some())
    }

    /// Whether a signal came, or, on rank 0, the time is up.
    pub fn must_end(&self) -> bool {
        signals::came().is_some() || self.root && self.budget.is_up()
    }

    /// The ending that these flags ask for, if they do.
    pub fn ending(&self, flags: &AllFlags) -> Option<RunOutcome> {
        if flags.any(ControlFlags::END) {
            return Some(self.preempted());
        }
        flags.any(ControlFlags::STOP).then(|| {
            RunOutcome::Stopped(self.stop_reason.clone().unwrap_or_default().trim().into())
        })
    }

    /// The end of a rank that was asked to end, or heard that another was.
    pub fn preempted(&self) -> RunOutcome {
        RunOutcome::Preempted(match signals::came() {
            Some(signal) => format!("{signal} came"),
            None if self.budget.is_up() => "the time is up".into(),
            None => "another rank was asked to".into(),
        })
    }

    /// A step took so long.
    pub fn stepped(&mut self, took: Duration) {
        self.budget.stepped(took);
    }

    /// A save has begun.
    pub fn save_begun(&mut self) {
        (self.saved, self.again) = (Instant::now(), None);
    }

    /// A save has failed, and is due again after a pause.
    pub fn save_failed(&mut self, pause: Duration) {
        (self.saved, self.again) = (Instant::now(), Some(Instant::now() + pause));
    }

    /// A save took so long.
    pub fn published(&mut self, took: Duration) {
        self.budget.saved(took, !self.has_published);
        self.has_published = true;
    }

    /// Sets the reason to stop that an evaluation or a hook may have given.
    pub fn stop_for(&mut self, why: Option<String>) {
        self.stop_reason = why.or(self.stop_reason.take());
    }

    /// For people: the time left, if it is limited.
    pub fn time_left(&self) -> Option<String> {
        self.budget.told()
    }
}
