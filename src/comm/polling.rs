//! Polling of the communication thread.
//!
//! Non-blocking requests are polled: by busy polling while compute is blocked on the result, and
//! with sleeps while compute works, because both need the same core. Where the node is
//! oversubscribed (ranks outnumber cores, or Open MPI's `mpi_yield_when_idle` says that the cores
//! are shared), a blocked rank yields its core and, after [`YIELD_TIME`], sleeps, too. An abort
//! therefore takes effect in the middle of a collective; only vendor collectives block.
//!
//! A sleep costs its core some 40 µs on a virtual machine, so each is twice as long as the one
//! before. Compute that blocks, or a new request, ends it.

use std::time::{Duration, Instant};

use super::shared::Shared;
use super::transport::Transport;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::DeviceEvent;

/// Busy polls between two yields of the core.
const POLLS_PER_YIELD: u32 = 64;

/// Time that a blocked rank yields before it sleeps, on an oversubscribed node: other ranks and
/// programs need its core.
const YIELD_TIME: Duration = Duration::from_micros(200);

/// Duration of busy polling although no thread waits: most messages of a transfer in progress
/// arrive within it.
const BUSY_POLL_TIME: Duration = Duration::from_micros(20);

/// Duration of yielding where another thread of this process ends the wait, usually within that
/// time: NCCL starts one for each group of messages of a non-blocking communicator.
const HANDOVER_TIME: Duration = Duration::from_micros(300);

/// The first sleep between polls while compute works. The timer slack of the thread makes it a
/// little longer.
const FIRST_SLEEP: Duration = Duration::from_micros(30);

/// The longest sleep: another rank may wait for this one's next message.
const LONGEST_SLEEP: Duration = Duration::from_micros(120);

/// While a posted message is being sent, a sleep may also last this fraction of the time since, so
/// that its receiver, which was not ready so far, waits longer by at most that fraction.
const SLEEP_FRACTION: u32 = 8;

/// The longest sleep while messages are to arrive and no thread waits for them.
const LONGEST_IDLE_SLEEP: Duration = Duration::from_millis(2);

/// Waits for a device event, while progressing posted messages and checking for an abort.
///
/// # Errors
/// Returns an error if the event or a message failed, or an abort was requested.
pub fn wait_for_event(
    event: &dyn DeviceEvent,
    transport: &mut dyn Transport,
    shared: &Shared,
) -> Result<()> {
    shared.add_host_wait();
    poll_until_done(event, transport, shared)
}

/// Polls an event until the device has reached it.
fn poll_until_done(
    event: &dyn DeviceEvent,
    transport: &mut dyn Transport,
    shared: &Shared,
) -> Result<()> {
    let mut backoff = Backoff::new(false);
    while !poll_event(event, transport, shared)? {
        backoff.pause(shared);
    }
    Ok(())
}

/// Returns whether the device has reached an event. If not, progresses posted messages and checks for
/// an abort.
///
/// # Errors
/// Returns an error if the event or a message failed, or an abort was requested.
pub fn poll_event(
    event: &dyn DeviceEvent,
    transport: &mut dyn Transport,
    shared: &Shared,
) -> Result<bool> {
    if event.is_done()? {
        return Ok(true);
    }
    progress(transport, shared)?;
    Ok(false)
}

/// Progresses posted messages and checks for an abort.
///
/// # Errors
/// Returns an error if a message failed, or an abort was requested.
pub fn progress(transport: &mut dyn Transport, shared: &Shared) -> Result<()> {
    if let Some(code) = shared.aborted() {
        transport.abort(code);
        return Err(Error::comm(format!("aborted with code {code}")));
    }
    transport.progress().map(drop)
}

/// Waits, like [`wait_for_event`], until a thread of the device vendor's library has queued the work
/// that it was given.
pub fn wait_until_queued(
    event: &dyn DeviceEvent,
    transport: &mut dyn Transport,
    shared: &Shared,
) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < HANDOVER_TIME {
        if event.is_done()? {
            return Ok(());
        }
        // That thread may share this core.
        std::thread::yield_now();
    }
    poll_until_done(event, transport, shared)
}

/// The backoff of one wait. While a thread of this rank is blocked, it busy-polls, because compute
/// cannot continue; otherwise compute needs the core, and polling soon backs off to sleeps.
pub struct Backoff {
    polls: u32,
    /// Whether the core is yielded between any two polls.
    yields: bool,
    /// The start of polling while a thread is blocked.
    blocked: Option<Instant>,
    /// The start of polling while compute works.
    since: Option<Instant>,
    /// The next sleep.
    sleep: Duration,
}

impl Backoff {
    /// Creates a backoff that yields the core between any two polls if `yields` is set, and
    /// otherwise spins.
    pub fn new(yields: bool) -> Self {
        Self { polls: 0, yields, blocked: None, since: None, sleep: FIRST_SLEEP }
    }

    /// Resets the backoff of a blocked rank after progress: more is about to arrive.
    pub fn restart(&mut self) {
        if self.blocked.take().is_some() {
            self.sleep = FIRST_SLEEP;
        }
    }

    /// Pauses until the next poll.
    pub fn pause(&mut self, shared: &Shared) {
        self.pass(shared, |_| LONGEST_SLEEP);
    }

    /// Pauses until the next poll while posted messages are being sent and there is no other
    /// request.
    pub fn leaving(&mut self, shared: &Shared) {
        self.pass(shared, |waited| {
            LONGEST_SLEEP.max(waited / SLEEP_FRACTION).min(LONGEST_IDLE_SLEEP)
        });
    }

    /// Pauses until the next poll while no other rank needs anything of this one.
    pub fn idle(&mut self, shared: &Shared) {
        self.pass(shared, |_| LONGEST_IDLE_SLEEP);
    }

    /// Pauses until the next poll. `longest` returns the longest sleep for a duration of the wait.
    fn pass(&mut self, shared: &Shared, longest: impl Fn(Duration) -> Duration) {
        self.polls = self.polls.wrapping_add(1);
        if shared.has_waiters() {
            self.since = None;
            if shared.is_oversubscribed() {
                let waited = self.blocked.get_or_insert_with(Instant::now).elapsed();
                if waited >= YIELD_TIME {
                    std::thread::park_timeout(self.sleep);
                    self.sleep = (2 * self.sleep).min(LONGEST_SLEEP);
                    return;
                }
            }
            self.sleep = FIRST_SLEEP;
            if self.yields
                || shared.is_oversubscribed()
                || self.polls.is_multiple_of(POLLS_PER_YIELD)
            {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            return;
        }
        self.blocked = None;
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < BUSY_POLL_TIME {
            // Do not yield: on a shared core compute would keep it for milliseconds.
            std::hint::spin_loop();
        } else {
            std::thread::park_timeout(self.sleep.min(longest(waited)));
            self.sleep = (2 * self.sleep).min(LONGEST_IDLE_SLEEP);
        }
    }
}
