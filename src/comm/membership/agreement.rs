//! The agreement on the next membership, after a loss or for a planned change.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};

use super::messages::{Answer, MemberReport, NoAnswer, Request, ask, connect, ended};
use super::prober::{Found, Prober};
use super::state::{Known, State};
use super::{LostRank, Member, Membership, MembershipDirectory};
use crate::transport::tcp::Credentials;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fault;
use hpctrain_base::spawn::spawn;

/// Interval at which the coordinator, and ranks that have reported, check for changes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The longest time that a rank which answers may take to report: it may be in a long computation.
const REPORT_TIMEOUT: Duration = Duration::from_secs(600);

/// The first words of how a process was lost that may still run.
const NO_ANSWER: &str = "no answer";

/// The time after which a process that was refused asks again.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// The end of one attempt to agree.
enum Attempt {
    /// The next membership is known.
    Agreed(Membership),
    /// Another process coordinates, or the one that did is gone.
    Again,
}

/// An agreement under way on one process.
pub struct Agreement<'a> {
    pub state: &'a Arc<State>,
    pub credentials: &'a Credentials,
    /// This process, with the address at which it listens for the next membership.
    pub me: &'a Member,
    pub directory: &'a MembershipDirectory,
    /// The time without an answer after which a process is lost.
    pub timeout: Duration,
    /// The least number of members.
    pub min_ranks: usize,
}

impl Agreement<'_> {
    /// Agrees with the other ranks on the next membership. All ranks of the membership call it.
    ///
    /// # Errors
    /// Returns an error of kind `Interrupted` if this process is not a member of the next
    /// membership, or too few ranks are left; or another one if a file cannot be written.
    pub fn agree(&self) -> Result<Membership> {
        let before = self.state.lock().number();
        loop {
            if self.directory.newest_number()? > before
                && let Some(newer) = self.directory.newest()?
                && let Attempt::Agreed(membership) = self.entered(newer)?
            {
                return Ok(membership);
            }
            let coordinator = {
                let known = self.state.lock();
                coordinator(&known)
                    .ok_or_else(|| Error::internal("no member of a membership agrees"))?
            };
            fault::point("agree");
            let attempt = if coordinator.id == self.me.id {
                self.coordinate(before)?
            } else {
                self.report(before, &coordinator)?
            };
            if let Attempt::Agreed(membership) = attempt {
                return Ok(membership);
            }
            std::thread::sleep(RETRY_DELAY);
        }
    }

    /// Reports to the coordinator and waits for its answer.
    fn report(&self, before: u64, to: &Member) -> Result<Attempt> {
        // Ranks that take this one for the coordinator know less than it does.
        self.state.lock().answer_all(&Answer::AskAgain);
        let lost = self.state.lock().lost_list();
        let report = MemberReport { membership: before, member: self.me.clone(), lost };
        let answer = self.ask(to, Request::MemberReport(report))?;
        let prober = Prober::start(to.clone(), self.state.clone(), self.credentials.clone())?;
        loop {
            match answer.recv_timeout(POLL_INTERVAL) {
                Ok(Ok(answer)) => return self.answered(answer),
                Ok(Err(NoAnswer::Gone(_) | NoAnswer::Silent(_))) => {
                    // The prober finds out why.
                    std::thread::sleep(RETRY_DELAY);
                    if prober.found() == Found::Gone {
                        self.note_lost(to, "its process has ended".into());
                    }
                    return Ok(Attempt::Again);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(Attempt::Again),
            }
            match prober.found() {
                Found::Gone => self.note_lost(to, "its process has ended".into()),
                Found::Silent(time) if time > self.timeout => self.note_lost(to, silent(time)),
                Found::Silent(_) | Found::Runs { .. } => {}
            }
            if self.state.lock().lost.contains_key(&to.id) {
                return Ok(Attempt::Again);
            }
        }
    }

    /// Acts on the answer of the coordinator.
    fn answered(&self, answer: Answer) -> Result<Attempt> {
        match answer {
            Answer::Membership(membership) => self.entered(membership),
            Answer::Expelled(number) => Err(self.expelled(number)),
            Answer::End { message, interrupted } => Err(ended(message, interrupted)),
            Answer::AskAgain | Answer::Runs { .. } => Ok(Attempt::Again),
        }
    }

    /// Enters a membership, if this process is a member.
    fn entered(&self, membership: Membership) -> Result<Attempt> {
        if membership.rank(&self.me.id).is_none() {
            self.state.lock().answer_all(&Answer::Expelled(membership.number));
            return Err(self.expelled(membership.number));
        }
        self.state.lock().enter(membership.clone());
        self.state.notify();
        Ok(Attempt::Agreed(membership))
    }

    fn expelled(&self, number: u64) -> Error {
        Error::interrupted(format!(
            "the other ranks go on without this one: membership {number} of {} does not have it",
            self.directory.path().display()
        ))
        .hint("it did not answer for elastic.timeout seconds; a new process can join")
    }

    fn note_lost(&self, member: &Member, why: String) {
        self.state.lock().note_lost([(member.id.clone(), why)]);
        self.state.notify();
    }

    /// Sends a request on a thread of its own, and returns the receiver of its answer.
    fn ask(&self, to: &Member, request: Request) -> Result<Receiver<Result<Answer, NoAnswer>>> {
        let (sender, answer) = channel();
        let to = to.clone();
        let credentials = self.credentials.clone();
        let timeout = self.timeout;
        spawn("membership-report", move || {
            let answered = connect(&to, &credentials, timeout)
                .and_then(|mut connection| ask(&mut connection, &request, REPORT_TIMEOUT));
            // The receiver may have given up.
            let _ = sender.send(answered);
        })?;
        Ok(answer)
    }

    /// Collects the reports, and decides on the next membership.
    fn coordinate(&self, before: u64) -> Result<Attempt> {
        self.state.lock().coordinates = true;
        let began = Instant::now();
        let mut probers: HashMap<String, Prober> = HashMap::new();
        loop {
            let (missing, is_first) = {
                let known = self.state.wait(self.state.lock(), POLL_INTERVAL);
                let first = coordinator(&known);
                (missing(&known, before), first.is_none_or(|first| first.id == self.me.id))
            };
            if missing.is_empty() {
                break;
            }
            probers.retain(|id, _| missing.iter().any(|(_, member)| member.id == *id));
            for (is_before, member) in &missing {
                let prober = match probers.get(&member.id) {
                    Some(prober) => prober,
                    None => {
                        let started = Prober::start(
                            member.clone(),
                            self.state.clone(),
                            self.credentials.clone(),
                        )?;
                        probers.entry(member.id.clone()).or_insert(started)
                    }
                };
                match prober.found() {
                    Found::Gone => self.note_lost(member, "its process has ended".into()),
                    Found::Silent(time) if time > self.timeout => {
                        self.note_lost(member, silent(time));
                    }
                    // It knows what was decided.
                    Found::Runs { membership, .. } if membership > before => {
                        self.state.lock().coordinates = false;
                        return Ok(Attempt::Again);
                    }
                    Found::Runs { coordinates: true, .. } if *is_before || !is_first => {
                        // The one that comes first in the order decides.
                        self.state.lock().coordinates = false;
                        return Ok(Attempt::Again);
                    }
                    Found::Silent(_) | Found::Runs { .. } => {}
                }
                if began.elapsed() > REPORT_TIMEOUT {
                    self.note_lost(
                        member,
                        format!("no report for {} s", began.elapsed().as_secs()),
                    );
                }
            }
        }
        drop(probers);
        if self.may_be_cut_off() {
            // The larger part of a network that was cut goes on.
            std::thread::sleep(self.timeout);
        }
        self.decide(before)
    }

    /// Returns true if most members do not answer: this part of the network may be the smaller one.
    fn may_be_cut_off(&self) -> bool {
        let known = self.state.lock();
        let members = known.membership.as_ref().map_or(0, |all| all.members.len());
        let silent = known.lost.values().filter(|why| why.starts_with(NO_ANSWER)).count();
        2 * silent > members
    }

    /// Writes the next membership and answers the reports.
    fn decide(&self, before: u64) -> Result<Attempt> {
        let next = {
            let known = self.state.lock();
            // If another process has written this number, it has decided.
            next(&known, self.me, before + 1)
        };
        fault::point("decide");
        let ranks = next.members.len();
        let decided = if ranks < self.min_ranks {
            let message = format!(
                "{ranks} ranks are left, fewer than elastic.min_ranks = {}",
                self.min_ranks
            );
            Err(Error::interrupted(message).hint("continue with --resume auto on more ranks"))
        } else {
            self.directory.create(&next, &self.me.id)
        };
        match decided {
            Ok(membership) => {
                fault::point("decided");
                self.entered(membership)
            }
            Err(e) => {
                let interrupted = e.exit_code() != 1;
                let end = Answer::End { message: e.message().into(), interrupted };
                self.state.lock().answer_all(&end);
                // The threads that answer need a moment.
                std::thread::sleep(RETRY_DELAY);
                Err(e)
            }
        }
    }
}

/// Returns the first member that is not known to be lost.
fn coordinator(known: &Known) -> Option<Member> {
    let membership = known.membership.as_ref()?;
    membership.members.iter().find(|member| !known.lost.contains_key(&member.id)).cloned()
}

/// Returns the members that have neither reported nor are lost, each with whether it comes before
/// this process.
fn missing(known: &Known, before: u64) -> Vec<(bool, Member)> {
    let Some(membership) = &known.membership else { return vec![] };
    let mine = known.rank().unwrap_or(0);
    let has_reported = |id: &str| {
        known
            .reports
            .values()
            .any(|(report, _)| report.membership == before && report.member.id == id)
    };
    let others = membership.members.iter().enumerate().filter(|(rank, member)| {
        *rank != mine && !known.lost.contains_key(&member.id) && !has_reported(&member.id)
    });
    others.map(|(rank, member)| (rank < mine, member.clone())).collect()
}

/// Returns the next membership: the members that have reported in their order, then those that
/// join. Ranks of a host are consecutive.
fn next(known: &Known, me: &Member, number: u64) -> Membership {
    let before = known.membership.as_ref();
    let members = before.map_or(&[][..], |before| &before.members);
    let mut next = Vec::new();
    let mut lost = Vec::new();
    for (rank, member) in members.iter().enumerate() {
        let report = known.reports.values().find(|(report, _)| report.member.id == member.id);
        match report {
            _ if member.id == me.id => next.push(me.clone()),
            Some((report, _)) if !known.lost.contains_key(&member.id) => {
                next.push(report.member.clone());
            }
            _ => lost.push(LostRank {
                id: member.id.clone(),
                rank,
                host: member.host.clone(),
                pid: member.pid,
                why: known.lost.get(&member.id).cloned().unwrap_or_default(),
            }),
        }
    }
    let mut joined = Vec::new();
    for (member, _) in known.joins.values() {
        // A process that asks again has two requests.
        if !next.iter().any(|other| other.id == member.id) {
            joined.push(member.id.clone());
            next.push(member.clone());
        }
    }
    let hosts: Vec<String> = next.iter().map(|member| member.host.clone()).collect();
    next.sort_by_key(|member| hosts.iter().position(|host| *host == member.host));
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let time = time.map_or(0.0, |time| time.as_secs_f64());
    Membership { number, members: next, lost, joined, time }
}

/// Returns how a process was lost that has not answered for this long.
pub fn silent(time: Duration) -> String {
    format!("{NO_ANSWER} for {:.1} s", time.as_secs_f64())
}
