//! The state that the threads of a process share: its membership, who is known to be lost, and the
//! requests that wait for an answer.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::messages::{Answer, MemberReport, Request, receive, send};
use super::{Member, Membership};
use crate::communicator::Interrupter;
use crate::transport::tcp::{Connection, has_ended};
use hpctrain_base::error::Error;

/// Interval at which a thread whose request waits for an answer checks that the caller still waits.
const CALLER_INTERVAL: Duration = Duration::from_millis(200);

/// The knowledge that the threads of a process share.
#[derive(Default)]
pub struct Known {
    /// The id of this process.
    pub me: String,
    /// The newest membership, of which this process is a member.
    pub membership: Option<Membership>,
    /// The members that are gone, by id: how they were lost.
    pub lost: BTreeMap<String, String>,
    /// The time at which the first loss of this membership was noticed.
    pub noticed: Option<Instant>,
    /// Whether the ranks of the membership are to report.
    pub has_changed: bool,
    /// Ends the requests of this rank.
    pub interrupter: Option<Interrupter>,
    /// Whether this process collects reports.
    pub coordinates: bool,
    /// Whether no process may join.
    pub refuses_joins: bool,
    /// The reports that have arrived, with the number of their requests.
    pub reports: BTreeMap<u64, (MemberReport, Sender<Answer>)>,
    /// The processes that ask to join, with the number of their requests.
    pub joins: BTreeMap<u64, (Member, Sender<Answer>)>,
    /// The number of requests so far.
    requests: u64,
}

impl Known {
    /// Returns the number of the membership, 0 if there is none.
    pub fn number(&self) -> u64 {
        self.membership.as_ref().map_or(0, |membership| membership.number)
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> Option<usize> {
        self.membership.as_ref()?.rank(&self.me)
    }

    /// Returns the lost members, as messages list them.
    pub fn lost_list(&self) -> Vec<(String, String)> {
        self.lost.iter().map(|(id, why)| (id.clone(), why.clone())).collect()
    }

    /// Notes that members are gone, and ends the requests of this rank.
    pub fn note_lost(&mut self, lost: impl IntoIterator<Item = (String, String)>) {
        for (id, why) in lost {
            let is_member = self.membership.as_ref().is_some_and(|all| all.rank(&id).is_some());
            if is_member && id != self.me {
                self.lost.entry(id).or_insert(why);
            }
        }
        self.change();
    }

    /// Notes that the ranks are to report, and ends the requests of this rank.
    pub fn change(&mut self) {
        self.has_changed = true;
        self.noticed.get_or_insert_with(Instant::now);
        if let Some(interrupter) = &self.interrupter {
            interrupter.interrupt(self.cause());
        }
    }

    /// Returns the error with which requests end.
    fn cause(&self) -> Error {
        let first = self.lost.iter().next();
        let named = first.and_then(|(id, why)| {
            let membership = self.membership.as_ref()?;
            let rank = membership.rank(id)?;
            Some((rank, &membership.members[rank].host, why))
        });
        match named {
            Some((rank, host, why)) => Error::lost(format!("rank {rank} on {host} is gone: {why}")),
            None => Error::lost("another rank has found that a rank is gone"),
        }
    }

    /// Enters a membership: answers all requests that wait, and forgets losses before it.
    pub fn enter(&mut self, membership: Membership) {
        for (_, (report, reply)) in std::mem::take(&mut self.reports) {
            let answer = match membership.rank(&report.member.id) {
                Some(_) => Answer::Membership(membership.clone()),
                None => Answer::Expelled(membership.number),
            };
            // A caller that is gone is found to be lost later.
            let _ = reply.send(answer);
        }
        for (_, (member, reply)) in std::mem::take(&mut self.joins) {
            let answer = match membership.rank(&member.id) {
                Some(_) => Answer::Membership(membership.clone()),
                None => Answer::AskAgain,
            };
            let _ = reply.send(answer);
        }
        self.lost.clear();
        self.noticed = None;
        self.has_changed = false;
        self.coordinates = false;
        self.interrupter = None;
        self.membership = Some(membership);
    }

    /// Answers all requests that wait with `answer`.
    pub fn answer_all(&mut self, answer: &Answer) {
        let reports = std::mem::take(&mut self.reports).into_values().map(|(_, reply)| reply);
        let joins = std::mem::take(&mut self.joins).into_values().map(|(_, reply)| reply);
        for reply in reports.chain(joins) {
            let _ = reply.send(answer.clone());
        }
    }
}

/// [`Known`], and a signal of its changes.
#[derive(Default)]
pub struct State {
    known: Mutex<Known>,
    changed: Condvar,
}

impl State {
    /// Locks the state. Call [`State::notify`] after a change.
    pub fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the threads that wait for a change.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change, or until `timeout` has passed.
    pub fn wait<'a>(
        &self,
        known: MutexGuard<'a, Known>,
        timeout: Duration,
    ) -> MutexGuard<'a, Known> {
        self.changed.wait_timeout(known, timeout).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Answers the requests of a connection until it ends.
    pub fn serve(self: &Arc<Self>, mut connection: Connection) {
        // The connection ends with the other process.
        while let Ok(request) = receive::<Request>(&mut connection) {
            let Some(answer) = self.answer(request, connection.stream()) else { return };
            if send(&mut connection, &answer).is_err() {
                return;
            }
        }
    }

    /// Queues a request with `insert`, to which its number and the sender of its answer are passed, and
    /// waits for the answer; returns `None` if the caller has ended the connection before.
    fn queued(
        &self,
        mut known: MutexGuard<'_, Known>,
        caller: &TcpStream,
        insert: impl FnOnce(&mut Known, u64, Sender<Answer>),
    ) -> Option<Answer> {
        let (reply, answer) = channel();
        known.requests += 1;
        let request = known.requests;
        insert(&mut known, request, reply);
        drop(known);
        self.notify();
        let answered = awaited(&answer, caller);
        if answered.is_none() {
            let mut known = self.lock();
            known.reports.remove(&request);
            known.joins.remove(&request);
            drop(known);
            self.notify();
        }
        answered
    }

    /// Returns the answer to a request; `None` if the caller has ended the connection before.
    fn answer(&self, request: Request, caller: &TcpStream) -> Option<Answer> {
        let mut known = self.lock();
        let number = known.number();
        match request {
            Request::Ping => {}
            Request::Lost { membership, lost } if membership == number && number > 0 => {
                known.note_lost(lost);
                self.notify();
            }
            Request::Lost { .. } => {}
            Request::MemberReport(report) if report.membership < number => {
                // It was decided without this rank, or the answer was lost with the coordinator.
                return Some(match &known.membership {
                    Some(newer) if newer.rank(&report.member.id).is_some() => {
                        Answer::Membership(newer.clone())
                    }
                    _ => Answer::Expelled(number),
                });
            }
            Request::MemberReport(report) if report.membership > number || number == 0 => {
                return Some(Answer::AskAgain);
            }
            Request::MemberReport(report) => {
                known.note_lost(report.lost.clone());
                return self.queued(known, caller, |known, request, reply| {
                    known.reports.insert(request, (report, reply));
                });
            }
            Request::Join(_) if known.refuses_joins => {
                let message = "no process may join this job: elastic.rejoin = false".into();
                return Some(Answer::End { message, interrupted: true });
            }
            Request::Join(_) if known.rank() != Some(0) => return Some(Answer::AskAgain),
            Request::Join(member) => {
                return self.queued(known, caller, |known, request, reply| {
                    known.joins.insert(request, (member, reply));
                });
            }
        }
        Some(Answer::Runs { membership: known.number(), coordinates: known.coordinates })
    }
}

/// Waits for the answer to a request while its caller waits.
fn awaited(answer: &std::sync::mpsc::Receiver<Answer>, caller: &TcpStream) -> Option<Answer> {
    loop {
        match answer.recv_timeout(CALLER_INTERVAL) {
            Ok(answer) => return Some(answer),
            Err(RecvTimeoutError::Timeout) if !has_ended(caller) => {}
            Err(RecvTimeoutError::Timeout) => return None,
            // The request was dropped without an answer.
            Err(RecvTimeoutError::Disconnected) => return Some(Answer::AskAgain),
        }
    }
}
