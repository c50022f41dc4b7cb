//! Polling of the communication thread.
//!
//! Non-blocking requests are polled: hot while compute is blocked on the result, with naps while
//! compute works, because both want the same core. Where the node is oversubscribed (ranks
//! outnumber cores, or Open MPI's `mpi_yield_when_idle` says that the cores are shared), a blocked
//! rank yields its core and, after [`YIELDING`], naps, too. An abort is therefore heard in the
//! middle of a collective; only the library's own collectives block.
//!
//! A nap costs its core some 40 µs on a virtual machine, so each is twice as long as the one
//! before. Compute that blocks, and a new request, end it.

use std::time::{Duration, Instant};

use super::shared::Shared;
use super::transport::Transport;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::DeviceEvent;

/// Hot polls between two offers of the core to others.
const POLLS_PER_YIELD: u32 = 64;

/// Duration of yields of a blocked rank before it naps, on an oversubscribed node: other ranks and
/// programs need its core.
const YIELDING: Duration = Duration::from_micros(200);

/// Duration of brisk polling although nobody waits: most messages of a transfer in progress arrive
/// within it.
const BRISK: Duration = Duration::from_micros(20);

/// The same where another thread of this process ends the wait, as it mostly does within that time:
/// NCCL starts one for each group of messages of a communicator that does not block.
const HANDED_OVER: Duration = Duration::from_micros(300);

/// The first nap between polls while compute works. With the timer slack of the thread it lasts a
/// little longer.
const NAP: Duration = Duration::from_micros(30);

/// The longest one: another rank may wait for this one's next message.
const LONGEST: Duration = Duration::from_micros(120);

/// While a posted message leaves a nap may also last such a part of the time since: its receiver,
/// which was not ready so long, waits longer by no more.
const PART: u32 = 8;

/// The longest one where messages are to arrive and nobody waits for them.
const LONGEST_IDLE: Duration = Duration::from_millis(2);

/// Waits for a device, while messages that are leaving go on and an abort is heard.
pub fn settle(event: &dyn DeviceEvent, wire: &mut dyn Transport, shared: &Shared) -> Result<()> {
    let mut backoff = Backoff::new(false);
    while !event.is_done()? {
        if let Some(code) = shared.aborted() {
            wire.abort(code);
            return Err(Error::comm(format!("aborted with code {code}")));
        }
        wire.progress()?;
        backoff.pause(shared);
    }
    Ok(())
}

/// Waits until a thread of the library of a device's vendor has queued what it was given, as
/// [`settle`].
pub fn handed_over(
    event: &dyn DeviceEvent,
    wire: &mut dyn Transport,
    shared: &Shared,
) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < HANDED_OVER {
        if event.is_done()? {
            return Ok(());
        }
        // It may have this core alone.
        std::thread::yield_now();
    }
    settle(event, wire, shared)
}

/// One wait. While a thread of this rank is blocked, polling is hot, because compute cannot go on;
/// otherwise compute needs the core, and polling soon backs off to naps.
pub struct Backoff {
    polls: u32,
    /// Yields the core between any two polls.
    yields: bool,
    /// Begin of polling while a thread is blocked.
    blocked: Option<Instant>,
    /// Begin of polling while compute works.
    since: Option<Instant>,
    /// The next nap.
    nap: Duration,
}

impl Backoff {
    /// A new wait that yields the core between any two polls if `yields` is set, and otherwise
    /// spins.
    pub fn new(yields: bool) -> Self {
        Self { polls: 0, yields, blocked: None, since: None, nap: NAP }
    }

    /// Ends the naps of a blocked rank: something has moved, and more is about to.
    pub fn restart(&mut self) {
        if self.blocked.take().is_some() {
            self.nap = NAP;
        }
    }

    /// Passes the time until the next poll.
    pub fn pause(&mut self, shared: &Shared) {
        self.pass(shared, |_| LONGEST);
    }

    /// As [`Backoff::pause`], where posted messages leave and there is no other request.
    pub fn leaving(&mut self, shared: &Shared) {
        self.pass(shared, |waited| LONGEST.max(waited / PART).min(LONGEST_IDLE));
    }

    /// As [`Backoff::pause`], where nothing of this rank's is wanted by others.
    pub fn idle(&mut self, shared: &Shared) {
        self.pass(shared, |_| LONGEST_IDLE);
    }

    /// `longest` is the longest nap, by the duration of the wait.
    fn pass(&mut self, shared: &Shared, longest: impl Fn(Duration) -> Duration) {
        self.polls = self.polls.wrapping_add(1);
        if shared.has_waiters() {
            self.since = None;
            if shared.is_oversubscribed() {
                let waited = self.blocked.get_or_insert_with(Instant::now).elapsed();
                if waited >= YIELDING {
                    std::thread::park_timeout(self.nap);
                    self.nap = (2 * self.nap).min(LONGEST);
                    return;
                }
            }
            self.nap = NAP;
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
        if waited < BRISK {
            // No offer of the core: on a shared one compute would take it for a slice of
            // milliseconds.
            std::hint::spin_loop();
        } else {
            std::thread::park_timeout(self.nap.min(longest(waited)));
            self.nap = (2 * self.nap).min(LONGEST_IDLE);
        }
    }
}
