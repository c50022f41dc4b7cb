//! Monitors the next rank, so that a process that no longer answers is found although no connection
//! has ended: it was stopped, or the network was cut.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Member;
use super::agreement::silent;
use super::messages::{NoAnswer, Request, ask, connect};
use super::prober::ANSWER_TIMEOUT;
use super::state::{Known, State};
use crate::transport::tcp::{Connection, Credentials};
use hpctrain_base::error::Result;
use hpctrain_base::spawn::spawn;

/// The pause between pings.
const PAUSE: Duration = Duration::from_millis(500);

/// Pings the next rank until it is dropped.
pub struct Monitor {
    is_over: Arc<AtomicBool>,
}

/// The rank that is pinged.
struct Next {
    member: Member,
    connection: Option<Connection>,
    /// The last answer or, before it, the first ping.
    since: Instant,
}

impl Monitor {
    /// Starts to monitor the next rank of the membership. A rank without an answer for `timeout` is
    /// lost.
    ///
    /// # Errors
    /// Returns an error if the system refuses the thread.
    pub fn start(state: Arc<State>, credentials: Credentials, timeout: Duration) -> Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        spawn("membership", move || {
            let mut next: Option<Next> = None;
            while !over.load(Ordering::Relaxed) {
                let member = next_member(&state.lock());
                if next.as_ref().map(|next| &next.member) != member.as_ref() {
                    next = member.map(|member| Next {
                        member,
                        connection: None,
                        since: Instant::now(),
                    });
                }
                if let Some(next) = &mut next
                    && let Some(why) = next.ping(&credentials, timeout)
                {
                    state.lock().note_lost([(next.member.id.clone(), why)]);
                    state.notify();
                }
                std::thread::sleep(PAUSE);
            }
        })?;
        Ok(Self { is_over })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Returns the next rank that is not known to be lost.
fn next_member(known: &Known) -> Option<Member> {
    let membership = known.membership.as_ref()?;
    let rank = known.rank()?;
    let count = membership.members.len();
    (1..count)
        .map(|distance| &membership.members[(rank + distance) % count])
        .find(|member| !known.lost.contains_key(&member.id))
        .cloned()
}

impl Next {
    /// Asks the process whether it runs. Returns how it was lost, if it was.
    fn ping(&mut self, credentials: &Credentials, timeout: Duration) -> Option<String> {
        let answered = self.ask(credentials);
        match answered {
            Ok(()) => {
                self.since = Instant::now();
                return None;
            }
            Err(NoAnswer::Gone(_)) if self.connection.is_some() => {}
            // The process refuses a new connection.
            Err(NoAnswer::Gone(why)) => return Some(why),
            Err(NoAnswer::Silent(_)) => {}
        }
        self.connection = None;
        let time = self.since.elapsed();
        (time > timeout).then(|| silent(time))
    }

    fn ask(&mut self, credentials: &Credentials) -> Result<(), NoAnswer> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => self.connection.insert(connect(&self.member, credentials, ANSWER_TIMEOUT)?),
        };
        ask(connection, &Request::Ping, ANSWER_TIMEOUT).map(drop)
    }
}
