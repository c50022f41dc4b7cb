//! State shared by a rank's handles and its communication thread: counters, the ledger, and the
//! order to abort.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::health::flight_recorder::FlightRecorder;
use super::health::pending_peers::Partners;
use hpctrain_base::spans::{Activity, Doing, SpanEvent, Track, span};

/// No abort was ordered; exit codes are 32 bits wide.
const NO_ABORT: i64 = i64::MIN;

/// Cost of communication for a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Seconds the communication thread spent on requests, waiting for ranks that come late
    /// included. A request counts when it ends.
    pub busy: f64,
    /// Seconds threads were blocked in [`wait`](super::Pending::wait): communication that compute
    /// did not hide.
    pub blocked: f64,
    /// Bytes handed to the wire; for the vendor's collectives the bytes a bandwidth-optimal
    /// algorithm sends.
    pub sent: u64,
    /// Exchanges that had to come one after the other: the longest chain, over all ranks, that ends
    /// here. Counted between threads only, without posted messages.
    pub rounds: u64,
}

/// Memory that messages pass through.
#[derive(Default)]
struct Staging {
    bytes: usize,
    count: Option<Box<dyn Fn(usize) + Send>>,
}

pub struct Shared {
    waiters: AtomicUsize,
    oversubscribed: AtomicBool,
    staging: Mutex<Staging>,
    busy_ns: AtomicU64,
    blocked_ns: AtomicU64,
    sent: AtomicU64,
    rounds: AtomicU64,
    abort: AtomicI64,
    /// The communication thread, once it runs.
    thread: OnceLock<Thread>,
    ledger: Mutex<FlightRecorder>,
    /// The ranks of the exchange under way.
    pub partners: Partners,
    /// Activity of this rank.
    pub activity: Activity,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            waiters: AtomicUsize::new(0),
            oversubscribed: AtomicBool::new(false),
            staging: Mutex::default(),
            busy_ns: AtomicU64::new(0),
            blocked_ns: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            abort: AtomicI64::new(NO_ABORT),
            thread: OnceLock::new(),
            ledger: Mutex::default(),
            partners: Partners::default(),
            activity: Activity::default(),
        }
    }
}

impl Shared {
    pub fn stats(&self) -> Stats {
        let seconds =
            |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed)).as_secs_f64();
        Stats {
            busy: seconds(&self.busy_ns),
            blocked: seconds(&self.blocked_ns),
            sent: self.sent.load(Ordering::Relaxed),
            rounds: self.rounds(),
        }
    }

    /// Exchanges in a row so far.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// An exchange is over, which has sent elements, and received those of another rank's exchange
    /// in that round.
    pub fn exchanged(&self, sent: bool, received: Option<u64>) {
        let before = self.rounds();
        let after = received.map_or(before, |theirs| before.max(theirs))
            + u64::from(sent || received.is_some());
        self.rounds.store(after, Ordering::Relaxed);
    }

    /// Runs `wait` as a wait that compute cannot go on without.
    pub fn blocked<T>(&self, wait: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let _wait = span(Doing::Waiting, None);
        self.waiters.fetch_add(1, Ordering::Relaxed);
        self.wake();
        let value = wait();
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        self.blocked_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        value
    }

    /// The calling thread is the communication thread.
    pub fn is_served_here(&self) {
        // There is one, which calls this once.
        let _ = self.thread.set(std::thread::current());
    }

    /// Ends a nap of the communication thread.
    pub fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Whether compute is blocked: the core is free for the communication thread, and its speed
    /// matters.
    pub fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }

    /// Marks the node as oversubscribed: others need the core of a rank that waits.
    pub fn set_oversubscribed(&self) {
        self.oversubscribed.store(true, Ordering::Relaxed);
    }

    /// Whether the node is oversubscribed.
    pub fn is_oversubscribed(&self) -> bool {
        self.oversubscribed.load(Ordering::Relaxed)
    }

    /// The last collectives.
    pub fn ledger(&self) -> MutexGuard<'_, FlightRecorder> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Operation `number` of the ledger has succeeded.
    pub fn ended(&self, number: u64) {
        let mut ledger = self.ledger();
        if let Some(entry) = ledger.end(number)
            && self.activity.records()
        {
            self.activity.keep(SpanEvent {
                track: Track::Communication,
                name: entry.label.op,
                unit: entry.label.unit.clone(),
                start: entry.started,
                end: entry.ended.unwrap_or(entry.started),
                message: Some(entry.message()),
            });
        }
    }

    pub fn add_busy(&self, time: Duration) {
        self.busy_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub fn add_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Notes memory that messages will pass through from now on.
    pub fn hold(&self, bytes: usize) {
        if bytes > 0 {
            let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
            staging.bytes += bytes;
            if let Some(count) = &staging.count {
                count(bytes);
            }
        }
    }

    /// Notes that such memory was given back, before anybody counts it.
    pub fn release(&self, bytes: usize) {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.bytes = staging.bytes.saturating_sub(bytes);
    }

    /// From now on `count` is called with the bytes of such memory, first with those there are.
    pub fn count_staging(&self, count: Box<dyn Fn(usize) + Send>) {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        count(staging.bytes);
        staging.count = Some(count);
    }

    /// Orders an abort; the first order stands.
    pub fn abort(&self, code: i32) {
        let order = i64::from(code);
        // Only the first caller finds the marker; that a later one does not is as intended.
        let _ = self.abort.compare_exchange(NO_ABORT, order, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The exit code, once an abort was ordered.
    pub fn aborted(&self) -> Option<i32> {
        i32::try_from(self.abort.load(Ordering::Relaxed)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_abort_stands() {
        let shared = Shared::default();
        assert_eq!(shared.aborted(), None);
        shared.abort(3);
        shared.abort(4);
        assert_eq!(shared.aborted(), Some(3));
    }
}
