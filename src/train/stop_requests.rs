//! Requests to save or stop: from signals, the clock, evaluators and hooks.
//!
//! Ranks receive requests at different moments. Each sends them with its next [`ControlFlags`], and
//! all ranks act on the flags of the same step.
//!
//! A hook's request to stop, on any rank, and its failure travel in the same flags: they need no
//! message, and the run ends after the step that carries them.

use std::time::{Duration, Instant};

use super::time_limit::TimeLimit;
use hpctrain_base::signals;
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_checkpoint::run_dir::markers::Markers;
use hpctrain_parallel::{AllFlags, ControlFlags};

/// Minimum time between two checks for evaluators' requests: each one loads a file system that
/// other nodes use as well.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The requests that reach this rank.
pub struct StopRequests {
    /// True on rank 0, which alone checks the clock and evaluators' requests.
    root: bool,
    budget: TimeLimit,
    markers: Markers,
    /// Time between checkpoints, if they are saved by the clock.
    every: Option<Duration>,
    saved: Instant,
    /// When to retry a save that failed.
    retry_at: Option<Instant>,
    has_published: bool,
    polled: Instant,
    /// The reason to stop early, once one is known.
    stop_reason: Option<String>,
}

impl StopRequests {
    /// Creates the requests of a rank. `root` is true on rank 0. A checkpoint is due every `every`
    /// seconds; 0 disables this.
    pub fn new(root: bool, budget: TimeLimit, markers: Markers, every: u64) -> Self {
        let now = Instant::now();
        let every = (every > 0).then(|| Duration::from_secs(every));
        Self {
            root,
            budget,
            markers,
            every,
            saved: now,
            retry_at: None,
            has_published: false,
            polled: now,
            stop_reason: None,
        }
    }

    /// Returns the flags that this rank sends to the others. `written` is true if it has finished
    /// its part of the save under way.
    pub fn flags(&mut self, written: bool) -> ControlFlags {
        if self.root && self.stop_reason.is_none() && self.polled.elapsed() >= POLL_INTERVAL {
            self.polled = Instant::now();
            self.stop_reason = self.markers.asked_to_stop();
        }
        let due = self.every.is_some_and(|every| self.saved.elapsed() >= every)
            || self.retry_at.is_some_and(|retry_at| Instant::now() >= retry_at);
        ControlFlags::END.when(self.must_end())
            | ControlFlags::WRITTEN.when(written)
            | ControlFlags::DUE.when(self.root && due)
            | ControlFlags::STOP.when(self.stop_reason.is_some())
    }

    /// Returns true if a signal came, or, on rank 0, if the time is up.
    pub fn must_end(&self) -> bool {
        signals::last_signal().is_some() || self.root && self.budget.is_up()
    }

    /// Returns the outcome that these flags ask for, if they ask the run to end.
    pub fn outcome(&self, flags: &AllFlags) -> Option<RunOutcome> {
        if flags.any(ControlFlags::END) {
            return Some(self.preempted());
        }
        flags.any(ControlFlags::STOP).then(|| {
            RunOutcome::Stopped(self.stop_reason.clone().unwrap_or_default().trim().into())
        })
    }

    /// Returns the outcome of a rank that was asked to end, or learned that another rank was.
    pub fn preempted(&self) -> RunOutcome {
        RunOutcome::Preempted(match signals::last_signal() {
            Some(signal) => format!("{signal} came"),
            None if self.budget.is_up() => "the time is up".into(),
            None => "another rank was asked to".into(),
        })
    }

    /// Notes that a step took this long.
    pub fn note_step(&mut self, took: Duration) {
        self.budget.note_step(took);
    }

    /// Notes that a save has begun.
    pub fn save_begun(&mut self) {
        (self.saved, self.retry_at) = (Instant::now(), None);
    }

    /// Notes that a save has failed and is retried after `pause`.
    pub fn save_failed(&mut self, pause: Duration) {
        (self.saved, self.retry_at) = (Instant::now(), Some(Instant::now() + pause));
    }

    /// Notes that a save was published after this long.
    pub fn note_published(&mut self, took: Duration) {
        self.budget.note_save(took, !self.has_published);
        self.has_published = true;
    }

    /// Sets the reason to stop, if an evaluation or a hook has given one.
    pub fn stop_for(&mut self, why: Option<String>) {
        self.stop_reason = why.or(self.stop_reason.take());
    }

    /// Returns the remaining time for display, if it is limited.
    pub fn time_left(&self) -> Option<String> {
        self.budget.describe()
    }
}
