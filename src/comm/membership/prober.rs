//! Finds out whether a process that has not reported runs, and asks it to report.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Member;
use super::messages::{Answer, NoAnswer, Request, ask, connect};
use super::state::State;
use crate::transport::tcp::{Connection, Credentials};
use hpctrain_base::error::Result;
use hpctrain_base::spawn::spawn;

/// The time in which a process answers a probe.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause between probes.
const PAUSE: Duration = Duration::from_millis(100);

/// The state of the process, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// It has answered, or not been silent for long.
    Runs {
        /// Whether it collects reports.
        coordinates: bool,
        /// The number of its membership.
        membership: u64,
    },
    /// It has ended.
    Gone,
    /// It has not answered for this long.
    Silent(Duration),
}

/// Probes a process until it is dropped.
pub struct Prober {
    shared: Arc<Shared>,
}

struct Shared {
    is_over: AtomicBool,
    /// The last answer or, before it, the start; and what it was.
    last: Mutex<(Instant, Found)>,
}

impl Prober {
    /// Starts to probe `member`, with what `state` knows of losses.
    ///
    /// # Errors
    /// Returns an error if the system refuses the thread.
    pub fn start(member: Member, state: Arc<State>, credentials: Credentials) -> Result<Self> {
        let shared = Arc::new(Shared {
            is_over: AtomicBool::new(false),
            last: Mutex::new((Instant::now(), Found::Runs { coordinates: false, membership: 0 })),
        });
        let here = shared.clone();
        spawn("membership-probe", move || {
            let mut connection = None;
            while !here.is_over.load(Ordering::Relaxed) {
                let probed = probe(&mut connection, &member, &state, &credentials);
                let is_new = probed.is_err() && connection.take().is_none();
                // A connection that has ended says less than one that is refused.
                if probed.is_err() && !is_new {
                    continue;
                }
                here.note(probed);
                std::thread::sleep(PAUSE);
            }
        })?;
        Ok(Self { shared })
    }

    /// Returns what is known.
    pub fn found(&self) -> Found {
        let (since, found) = *self.shared.last.lock().unwrap_or_else(PoisonError::into_inner);
        match found {
            Found::Runs { .. } if since.elapsed() > 2 * ANSWER_TIMEOUT => {
                Found::Silent(since.elapsed())
            }
            _ => found,
        }
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn note(&self, probed: Result<Answer, NoAnswer>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match probed {
            Ok(Answer::Runs { coordinates, membership }) => {
                *last = (Instant::now(), Found::Runs { coordinates, membership });
            }
            Ok(_) => *last = (Instant::now(), Found::Runs { coordinates: false, membership: 0 }),
            Err(NoAnswer::Gone(_)) => last.1 = Found::Gone,
            Err(NoAnswer::Silent(_)) => {}
        }
    }
}

/// Asks the process to report.
fn probe(
    connection: &mut Option<Connection>,
    member: &Member,
    state: &State,
    credentials: &Credentials,
) -> Result<Answer, NoAnswer> {
    let request = {
        let known = state.lock();
        Request::Lost { membership: known.number(), lost: known.lost_list() }
    };
    let connection = match connection {
        Some(connection) => connection,
        None => connection.insert(connect(member, credentials, ANSWER_TIMEOUT)?),
    };
    ask(connection, &request, ANSWER_TIMEOUT)
}
