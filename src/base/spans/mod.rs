//! Activity of the threads of a rank: the watchdog reads it at any time, `--trace` writes it down
//! afterwards.
//!
//! A thread registers with its rank once ([`Activity::here`]) and then marks its work with
//! [`span`]. A thread that belongs to no rank may do so too: nothing is kept. A span costs two
//! readings of the clock; only while the rank [records](Activity::record) is anything stored.

mod clock;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use clock::now;

/// Events that a rank keeps at most: some 100 MiB.
const MOST: usize = 1 << 20;

/// A thread of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// Runs the training loop.
    Compute,
    /// Talks to the other ranks.
    Communication,
    /// Reads data ahead.
    Loader,
    /// Writes checkpoints.
    Saver,
}

impl Track {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Communication, Self::Loader, Self::Saver];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Communication => "communication",
            Self::Loader => "loader",
            Self::Saver => "saver",
        }
    }
}

/// Activity of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Nothing of the below.
    Other,
    /// Compute waits for the loader.
    Loading,
    /// A block computes its output.
    Forward,
    /// The loss of a network's output and its gradient are computed.
    Loss,
    /// A block computes its gradients.
    Backward,
    /// The gradients of a block's weights that its backward has put off.
    Weights,
    /// The optimizer updates a unit.
    Update,
    /// The validation loss is computed.
    Evaluation,
    /// A checkpoint is written.
    Checkpoint,
    /// A checkpoint is read.
    Restore,
    /// The model writes text.
    Sampling,
    /// The loader reads a batch.
    Reading,
    /// Compute waits for messages.
    Waiting,
    /// A worker takes parameters from servers.
    Pulling,
    /// A worker gives gradients to servers.
    Pushing,
}

impl Doing {
    /// By their numbers.
    const ALL: [Self; 15] = [
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
    ];

    /// Its name in reports.
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
        }
    }
}

/// Description of a message, for an event of the communication thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Running number among the collectives of the rank.
    pub number: u64,
    /// Name of the group.
    pub group: &'static str,
    /// Ranks in it.
    pub ranks: usize,
    /// Bytes of the operand.
    pub bytes: usize,
    /// Algorithm of the collective.
    pub algorithm: &'static str,
}

/// A piece of time that a thread spent. Times are those of [`now`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanEvent {
    /// The thread.
    pub track: Track,
    /// Name of the work.
    pub name: &'static str,
    /// Name of the block that it concerns.
    pub unit: Option<Arc<str>>,
    /// When it began.
    pub start: u64,
    /// When it was done.
    pub end: u64,
    /// On the communication thread, the message.
    pub message: Option<Message>,
}

/// Events as they come, and the number of those that found no room.
#[derive(Debug, Default)]
pub struct Events {
    /// In the order of their ends.
    pub kept: Vec<SpanEvent>,
    /// Events beyond the most that are kept.
    pub lost: u64,
}

/// The activity of one rank. Clones share it.
#[derive(Clone)]
pub struct Activity(Arc<Inner>);

struct Inner {
    /// Activity of the compute thread, in the lowest 8 bits, and its start, in microseconds.
    phase: AtomicU64,
    recording: AtomicBool,
    events: Mutex<Events>,
}

thread_local! {
    /// Rank and track of this thread.
    static HERE: RefCell<Option<(Activity, Track)>> = const { RefCell::new(None) };
}

/// A phase and its start in one word.
fn pack(doing: Doing, since: u64) -> u64 {
    (since / 1000) << 8 | doing as u64
}

impl Default for Activity {
    fn default() -> Self {
        let phase = AtomicU64::new(pack(Doing::Other, now()));
        Self(Arc::new(Inner { phase, recording: AtomicBool::new(false), events: Mutex::default() }))
    }
}

impl Activity {
    /// The rank that the calling thread belongs to.
    pub fn current() -> Option<Self> {
        HERE.with_borrow(|here| here.as_ref().map(|(activity, _)| activity.clone()))
    }

    /// The calling thread belongs to this rank from now on.
    pub fn here(&self, track: Track) {
        HERE.set(Some((self.clone(), track)));
    }

    /// Activity of the compute thread, and its start.
    pub fn phase(&self) -> (Doing, u64) {
        let word = self.0.phase.load(Ordering::Relaxed);
        let doing = Doing::ALL.get((word & 0xff) as usize).copied();
        (doing.unwrap_or(Doing::Other), (word >> 8) * 1000)
    }

    /// Keeps events from now on, or no longer.
    pub fn record(&self, on: bool) {
        self.0.recording.store(on, Ordering::Relaxed);
    }

    /// Whether events are kept.
    pub fn records(&self) -> bool {
        self.0.recording.load(Ordering::Relaxed)
    }

    /// Keeps an event, if there is room.
    pub fn keep(&self, event: SpanEvent) {
        let mut events = self.events();
        if events.kept.len() < MOST {
            events.kept.push(event);
        } else {
            events.lost += 1;
        }
    }

    /// Everything kept so far; nothing of it stays.
    pub fn take(&self) -> Events {
        std::mem::take(&mut *self.events())
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Work under way; done when it is dropped.
#[must_use = "the work ends where this is dropped"]
pub struct Span(Option<Open>);

struct Open {
    activity: Activity,
    track: Track,
    doing: Doing,
    unit: Option<Arc<str>>,
    start: u64,
    /// The phase that comes back afterwards.
    before: u64,
}

/// The calling thread begins to do something with a unit.
pub fn span(doing: Doing, unit: Option<&Arc<str>>) -> Span {
    let here = HERE.with_borrow(Clone::clone);
    Span(here.map(|(activity, track)| {
        let start = now();
        let before = activity.0.phase.load(Ordering::Relaxed);
        // A wait says little; the work around it says more.
        if track == Track::Compute && doing != Doing::Waiting {
            activity.0.phase.store(pack(doing, start), Ordering::Relaxed);
        }
        let unit = unit.filter(|_| activity.records()).cloned();
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
        if activity.records() {
            activity.keep(SpanEvent {
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
        for (number, doing) in Doing::ALL.into_iter().enumerate() {
            assert_eq!(number, doing as usize);
        }
    }

    #[test]
    fn phases_nest_and_events_are_kept_on_demand() {
        let activity = Activity::default();
        drop(span(Doing::Forward, None));
        activity.here(Track::Compute);
        assert_eq!(activity.phase().0, Doing::Other);
        let block: Arc<str> = "block0".into();
        {
            let _evaluation = span(Doing::Evaluation, None);
            activity.record(true);
            {
                let _forward = span(Doing::Forward, Some(&block));
                let _wait = span(Doing::Waiting, None);
                assert_eq!(activity.phase().0, Doing::Forward);
            }
            assert_eq!(activity.phase().0, Doing::Evaluation);
            activity.record(false);
        }
        assert_eq!(activity.phase().0, Doing::Other);
        let events = activity.take().kept;
        let names: Vec<_> =
            events.iter().map(|event| (event.name, event.unit.as_deref())).collect();
        assert_eq!(names, [("wait for messages", None), ("forward", Some("block0"))]);
        assert!(
            events.iter().all(|event| event.start <= event.end && event.track == Track::Compute)
        );
        assert!(activity.take().kept.is_empty());
    }
}
