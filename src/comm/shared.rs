//! State shared by a rank's handles and its communication thread: counters, the flight recorder,
//! and the abort request.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::health::flight_recorder::FlightRecorder;
use super::health::pending_peers::Partners;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{Activity, ActivityKind, SpanEvent, Track, span};
use hpctrain_device::DeviceTimer;

/// No abort was requested. Exit codes are 32 bits wide, so this is none.
const NO_ABORT: i64 = i64::MIN;

/// Communication statistics of a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Seconds that the communication thread spent on requests, including waits for late ranks. A
    /// request counts when it ends.
    pub busy: f64,
    /// Seconds that threads were blocked in [`wait`](super::Pending::wait), or that compute on the
    /// device was idle until a collective ended: exposed communication.
    pub blocked: f64,
    /// Bytes sent. For vendor collectives, the bytes that a bandwidth-optimal algorithm sends.
    pub sent: u64,
    /// Messages sent, without those of vendor collectives.
    pub messages: u64,
    /// Waits for a device before a message of its memory, and for such messages to end. Where the
    /// device orders them, the host waits for none.
    pub host_waits: u64,
    /// Length of the longest chain of dependent exchanges, over all ranks, that ends on this rank.
    /// Counted only between threads of one process, without point-to-point messages.
    pub rounds: u64,
}

/// Staging memory that messages pass through.
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
    /// The times for which compute on the device was idle, which it has not measured yet.
    idle_timers: Mutex<VecDeque<Box<dyn DeviceTimer>>>,
    sent: AtomicU64,
    messages: AtomicU64,
    host_waits: AtomicU64,
    rounds: AtomicU64,
    abort: AtomicI64,
    /// Whether `interruption` is set.
    is_interrupted: AtomicBool,
    /// The error with which all requests end, once another thread has found that a rank is gone.
    interruption: Mutex<Option<Error>>,
    /// Whether a request has failed because a rank is gone.
    has_lost_ranks: AtomicBool,
    /// The communication thread, once it has started.
    thread: OnceLock<Thread>,
    recorder: Mutex<FlightRecorder>,
    /// The ranks of the exchange under way.
    pub partners: Partners,
    /// The recorded activity of this rank's threads.
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
            idle_timers: Mutex::default(),
            sent: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            host_waits: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            abort: AtomicI64::new(NO_ABORT),
            is_interrupted: AtomicBool::new(false),
            interruption: Mutex::default(),
            has_lost_ranks: AtomicBool::new(false),
            thread: OnceLock::new(),
            recorder: Mutex::default(),
            partners: Partners::default(),
            activity: Activity::default(),
        }
    }
}

impl Shared {
    pub fn stats(&self) -> Stats {
        self.read_idle_timers();
        let seconds =
            |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed)).as_secs_f64();
        Stats {
            busy: seconds(&self.busy_ns),
            blocked: seconds(&self.blocked_ns),
            sent: self.sent.load(Ordering::Relaxed),
            messages: self.messages.load(Ordering::Relaxed),
            host_waits: self.host_waits.load(Ordering::Relaxed),
            rounds: self.rounds(),
        }
    }

    /// Returns the length of the longest chain of dependent exchanges so far.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Records the end of an exchange: `sent` is whether it sent elements, `received` the round of
    /// the sender's exchange if it received some.
    pub fn exchanged(&self, sent: bool, received: Option<u64>) {
        let before = self.rounds();
        let after = received.map_or(before, |theirs| before.max(theirs))
            + u64::from(sent || received.is_some());
        self.rounds.store(after, Ordering::Relaxed);
    }

    /// Runs `wait`, during which the calling thread cannot continue. Returns its time too, which
    /// counts as blocked only by [`Shared::add_blocked`].
    pub fn waiting<T>(&self, wait: impl FnOnce() -> T) -> (T, Duration) {
        let start = Instant::now();
        let _wait = span(ActivityKind::Waiting, None);
        self.waiters.fetch_add(1, Ordering::Relaxed);
        self.wake();
        let value = wait();
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        (value, start.elapsed())
    }

    /// Counts time in which compute could not continue.
    pub fn add_blocked(&self, time: Duration) {
        self.blocked_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Counts the time of `timer` as blocked once the device has measured it: compute was idle on
    /// the device, while the host continued.
    pub fn add_idle(&self, timer: Box<dyn DeviceTimer>) {
        self.idle_timers().push_back(timer);
        self.read_idle_timers();
    }

    /// Counts the idle times that the device has measured so far. They are in the order in which
    /// compute reaches them.
    fn read_idle_timers(&self) {
        let mut timers = self.idle_timers();
        // A device that fails fails its next operation, too, whose error is reported.
        while let Some(Ok(Some(seconds))) = timers.front().map(|timer| timer.seconds()) {
            self.add_blocked(Duration::from_secs_f64(seconds.max(0.0)));
            timers.pop_front();
        }
    }

    fn idle_timers(&self) -> MutexGuard<'_, VecDeque<Box<dyn DeviceTimer>>> {
        self.idle_timers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers the calling thread as the communication thread.
    pub fn register_thread(&self) {
        // There is one communication thread, which calls this once.
        let _ = self.thread.set(std::thread::current());
    }

    /// Wakes the communication thread from a pause.
    pub fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Returns true if a thread is blocked on communication: the core is free for the communication
    /// thread, and latency matters.
    pub fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }

    /// Marks the node as oversubscribed: a waiting rank should yield its core.
    pub fn set_oversubscribed(&self) {
        self.oversubscribed.store(true, Ordering::Relaxed);
    }

    /// Returns true if the node is oversubscribed.
    pub fn is_oversubscribed(&self) -> bool {
        self.oversubscribed.load(Ordering::Relaxed)
    }

    /// Locks the flight recorder of the last collectives.
    pub fn flight_recorder(&self) -> MutexGuard<'_, FlightRecorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that operation `number` of the flight recorder has succeeded.
    pub fn record_end(&self, number: u64) {
        let mut recorder = self.flight_recorder();
        if let Some(entry) = recorder.end(number)
            && self.activity.is_recording()
        {
            self.activity.push(SpanEvent {
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

    /// Adds the time of a collective that the device has measured.
    pub fn add_busy_seconds(&self, seconds: f64) {
        self.add_busy(Duration::from_secs_f64(seconds.max(0.0)));
    }

    /// Counts a message of some bytes; none is sent if there are no bytes.
    pub fn add_sent(&self, bytes: usize) {
        self.add_sent_messages(usize::from(bytes > 0), bytes);
    }

    /// Counts messages of some bytes together.
    pub fn add_sent_messages(&self, messages: usize, bytes: usize) {
        self.messages.fetch_add(messages as u64, Ordering::Relaxed);
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a wait of the host for a device.
    pub fn add_host_wait(&self) {
        self.host_waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds staging memory that was allocated to the count.
    pub fn add_staging(&self, bytes: usize) {
        if bytes > 0 {
            let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
            staging.bytes += bytes;
            if let Some(count) = &staging.count {
                count(bytes);
            }
        }
    }

    /// Subtracts staging memory that was freed. Only for use before [`Shared::count_staging`].
    pub fn subtract_staging(&self, bytes: usize) {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.bytes = staging.bytes.saturating_sub(bytes);
    }

    /// Calls `count` with the bytes of staging memory, now with the present total and later with
    /// each growth.
    pub fn count_staging(&self, count: Box<dyn Fn(usize) + Send>) {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        count(staging.bytes);
        staging.count = Some(count);
    }

    /// Ends all requests with this error. Only the first one has an effect.
    pub fn interrupt(&self, error: Error) {
        self.interruption.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.is_interrupted.store(true, Ordering::Release);
        self.wake();
    }

    /// Returns the error of an interruption, once there was one.
    pub fn check_interruption(&self) -> Result<()> {
        if !self.is_interrupted.load(Ordering::Acquire) {
            return Ok(());
        }
        let error = self.interruption.lock().unwrap_or_else(PoisonError::into_inner).clone();
        error.map_or(Ok(()), Err)
    }

    /// Notes that a request has failed because a rank is gone.
    pub fn note_lost_ranks(&self) {
        self.has_lost_ranks.store(true, Ordering::Release);
    }

    /// Forgets an interruption and lost ranks, for a world without them.
    pub fn forget_losses(&self) {
        self.is_interrupted.store(false, Ordering::Release);
        *self.interruption.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.has_lost_ranks.store(false, Ordering::Release);
    }

    /// Returns true if a request has failed because a rank is gone.
    pub fn has_lost_ranks(&self) -> bool {
        self.has_lost_ranks.load(Ordering::Acquire)
    }

    /// Requests an abort. Only the first request has an effect.
    pub fn abort(&self, code: i32) {
        let order = i64::from(code);
        // Only the first call replaces the marker; later ones fail on purpose.
        let _ = self.abort.compare_exchange(NO_ABORT, order, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Returns the exit code, once an abort was requested.
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
