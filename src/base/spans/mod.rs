//! Records the activity of a rank's threads, for the watchdog and for `--trace`.
//!
//! A thread registers with its rank once ([`Activity::register_thread`]) and then marks its work with
//! [`span`]. Spans of threads without a rank are ignored. A span reads the clock twice; it is
//! stored only while the rank [records](Activity::record).

mod clock;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use clock::now;

/// The most events that a rank keeps: some 100 MiB.
const MAX_EVENTS: usize = 1 << 20;

/// A thread of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The thread that runs the training loop.
    Compute,
    /// The thread that communicates with other ranks.
    Communication,
    /// The thread that prefetches data.
    Loader,
    /// The thread that writes checkpoints.
    Saver,
}

impl Track {
    /// All tracks.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Communication, Self::Loader, Self::Saver];

    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Communication => "communication",
            Self::Loader => "loader",
            Self::Saver => "saver",
        }
    }
}

/// The activity of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivityKind {
    /// None of the following.
    Other,
    /// Compute waits for the loader.
    Loading,
    /// A block computes its output.
    Forward,
    /// The loss of a network's output and its gradient are computed.
    Loss,
    /// A block computes its gradients.
    Backward,
    /// A block's deferred weight gradients (wgrad) are computed.
    Weights,
    /// The optimizer updates a unit.
    Update,
    /// The validation loss is computed.
    Evaluation,
    /// A checkpoint is written.
    Checkpoint,
    /// A checkpoint is read.
    Restore,
    /// The model generates text.
    Sampling,
    /// The loader reads a batch.
    Reading,
    /// Compute waits for messages.
    Waiting,
    /// A worker pulls parameters from parameter servers.
    Pulling,
    /// A worker pushes gradients to parameter servers.
    Pushing,
    /// A hook of the run is called.
    Hook,
}

impl ActivityKind {
    /// All activities, by their numbers.
    const ALL: [Self; 16] = [
        Self::Other,
        Self::Loading,
        Self::Forward,
        Self::Loss,
        Self::Backward,
        Self::Weights,
        Self::Update,
        Self::Evaluation,
        Self::Checkpoint,
        Self::Restore,
        Self::Sampling,
        Self::Reading,
        Self::Waiting,
        Self::Pulling,
        Self::Pushing,
        Self::Hook,
    ];

    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Other => "other work",
            Self::Loading => "wait for data",
            Self::Forward => "forward",
            Self::Loss => "loss",
            Self::Backward => "backward",
            Self::Weights => "gradients of weights",
            Self::Update => "update",
            Self::Evaluation => "evaluation",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Sampling => "sampling",
            Self::Reading => "read",
            Self::Waiting => "wait for messages",
            Self::Pulling => "pull",
            Self::Pushing => "push",
            Self::Hook => "hook",
        }
    }
}

/// The details of a collective, for an event of the communication thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The running number among the collectives of the rank.
    pub number: u64,
    /// The name of the group.
    pub group: &'static str,
    /// The number of ranks in the group.
    pub ranks: usize,
    /// The size of the operand in bytes.
    pub bytes: usize,
    /// The algorithm of the collective.
    pub algorithm: &'static str,
}

/// A recorded span of a thread's work. Times are those of [`now`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanEvent {
    /// The thread.
    pub track: Track,
    /// The name of the work.
    pub name: &'static str,
    /// The name of the unit that it concerns.
    pub unit: Option<Arc<str>>,
    /// The start time.
    pub start: u64,
    /// The end time.
    pub end: u64,
    /// The collective, on the communication thread.
    pub message: Option<Message>,
}

/// Recorded events, and the number of those that were dropped.
#[derive(Debug, Default)]
pub struct Events {
    /// The events, in the order of their ends.
    pub recorded: Vec<SpanEvent>,
    /// The number of events that were dropped because the limit was reached.
    pub lost: u64,
}

/// The activity of one rank. Clones share it.
#[derive(Clone)]
pub struct Activity(Arc<Inner>);

struct Inner {
    /// The activity of the compute thread, in the lowest 8 bits, and its start in microseconds.
    phase: AtomicU64,
    recording: AtomicBool,
    events: Mutex<Events>,
}

thread_local! {
    /// The rank and track of this thread.
    static HERE: RefCell<Option<(Activity, Track)>> = const { RefCell::new(None) };
}

/// Packs a phase and its start into one word.
fn pack(doing: ActivityKind, since: u64) -> u64 {
    (since / 1000) << 8 | doing as u64
}

impl Default for Activity {
    fn default() -> Self {
        let phase = AtomicU64::new(pack(ActivityKind::Other, now()));
        Self(Arc::new(Inner { phase, recording: AtomicBool::new(false), events: Mutex::default() }))
    }
}

impl Activity {
    /// Returns the activity of the rank that the calling thread belongs to.
    pub fn current() -> Option<Self> {
        HERE.with_borrow(|here| here.as_ref().map(|(activity, _)| activity.clone()))
    }

    /// Registers the calling thread as a thread of this rank.
    pub fn register_thread(&self, track: Track) {
        HERE.set(Some((self.clone(), track)));
    }

    /// Returns the activity of the compute thread, and its start.
    pub fn phase(&self) -> (ActivityKind, u64) {
        let word = self.0.phase.load(Ordering::Relaxed);
        let doing = ActivityKind::ALL.get((word & 0xff) as usize).copied();
        (doing.unwrap_or(ActivityKind::Other), (word >> 8) * 1000)
    }

    /// Starts or stops recording events.
    pub fn record(&self, on: bool) {
        self.0.recording.store(on, Ordering::Relaxed);
    }

    /// Returns true if events are recorded.
    pub fn is_recording(&self) -> bool {
        self.0.recording.load(Ordering::Relaxed)
    }

    /// Stores an event, unless the limit is reached.
    pub fn push(&self, event: SpanEvent) {
        let mut events = self.events();
        if events.recorded.len() < MAX_EVENTS {
            events.recorded.push(event);
        } else {
            events.lost += 1;
        }
    }

    /// Takes all events recorded so far.
    pub fn take(&self) -> Events {
        std::mem::take(&mut *self.events())
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guard of work in progress, which ends when the guard is dropped.
#[must_use = "the work ends where this is dropped"]
pub struct Span(Option<Open>);

struct Open {
    activity: Activity,
    track: Track,
    doing: ActivityKind,
    unit: Option<Arc<str>>,
    start: u64,
    /// The phase to restore afterwards.
    before: u64,
}

/// Begins a span of work of the calling thread on a unit.
pub fn span(doing: ActivityKind, unit: Option<&Arc<str>>) -> Span {
    let here = HERE.with_borrow(Clone::clone);
    Span(here.map(|(activity, track)| {
        let start = now();
        let before = activity.0.phase.load(Ordering::Relaxed);
        // The work around a wait is the more informative phase.
        if track == Track::Compute && doing != ActivityKind::Waiting {
            activity.0.phase.store(pack(doing, start), Ordering::Relaxed);
        }
        let unit = unit.filter(|_| activity.is_recording()).cloned();
        Open { activity, track, doing, unit, start, before }
    }))
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(Open { activity, track, doing, unit, start, before }) = self.0.take() else {
            return;
        };
        if track == Track::Compute {
            activity.0.phase.store(before, Ordering::Relaxed);
        }
        if activity.is_recording() {
            activity.push(SpanEvent {
                track,
                name: doing.name(),
                unit,
                start,
                end: now(),
                message: None,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_name_phases() {
        for (number, doing) in ActivityKind::ALL.into_iter().enumerate() {
            assert_eq!(number, doing as usize);
        }
    }

    #[test]
    fn phases_nest_and_events_are_kept_on_demand() {
        let activity = Activity::default();
        drop(span(ActivityKind::Forward, None));
        activity.register_thread(Track::Compute);
        assert_eq!(activity.phase().0, ActivityKind::Other);
        let block: Arc<str> = "block0".into();
        {
            let _evaluation = span(ActivityKind::Evaluation, None);
            activity.record(true);
            {
                let _forward = span(ActivityKind::Forward, Some(&block));
                let _wait = span(ActivityKind::Waiting, None);
                assert_eq!(activity.phase().0, ActivityKind::Forward);
            }
            assert_eq!(activity.phase().0, ActivityKind::Evaluation);
            activity.record(false);
        }
        assert_eq!(activity.phase().0, ActivityKind::Other);
        let events = activity.take().recorded;
        let names: Vec<_> =
            events.iter().map(|event| (event.name, event.unit.as_deref())).collect();
        assert_eq!(names, [("wait for messages", None), ("forward", Some("block0"))]);
        assert!(
            events.iter().all(|event| event.start <= event.end && event.track == Track::Compute)
        );
        assert!(activity.take().recorded.is_empty());
    }
}
