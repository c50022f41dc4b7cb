//! Starts the ranks of an elastic job on this host. A process that dies is a rank that is lost: the
//! others go on, and another process is started, which joins them.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use std::os::unix::process::ExitStatusExt as _;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::signals;
use hpctrain_comm::membership::MembershipDirectory;
use hpctrain_comm::{
    ADDRESS_VARIABLE, JOIN_VARIABLE, RENDEZVOUS_VARIABLE, TcpRendezvous, host_name,
};

use crate::rank_processes::{
    INTERRUPTED, Job, POLL_INTERVAL, TIMEOUT, cannot_start, exit_code, forward,
};

/// The file in a rendezvous directory with the path of the run that an elastic job trains.
pub const RUN_FILE: &str = "run";

/// The file in a rendezvous directory with the name of the signal that asks all ranks of an elastic
/// job to end.
pub const SIGNAL_FILE: &str = "signal";

/// The exit code of a process that has found no ranks to join.
pub const NO_RANKS: i32 = 69;

/// The time after which a process is started for a rank that was lost.
const REJOIN_DELAY: Duration = Duration::from_millis(500);

/// The longest such time, after losses that follow one another within [`STABLE_TIME`].
const MAX_REJOIN_DELAY: Duration = Duration::from_secs(30);
const STABLE_TIME: Duration = Duration::from_secs(2);

/// The ranks of an elastic job on this host.
#[derive(Debug, Clone)]
pub struct ElasticRanks {
    /// The program of a rank.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The number of ranks on this host.
    pub slots: usize,
    /// The first rank and the number of ranks of the job; `None` if the processes join a job.
    pub first: Option<(usize, usize)>,
    /// The directory in which the processes of the job find each other.
    pub rendezvous: PathBuf,
    /// Whether the job has ranks on other hosts.
    pub has_other_hosts: bool,
    /// Whether a process is started for a rank that was lost.
    pub rejoin: bool,
}

/// The end of a process of an elastic job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RankEnd {
    /// It has finished its work.
    Finished,
    /// It was killed, or the others went on without it.
    Lost,
    /// It has found no ranks to join.
    Unneeded,
    /// It has failed, and so ends the job.
    Failed,
}

impl RankEnd {
    /// Returns the end of a process. `is_asked` is whether a signal has asked the job to end.
    fn new(status: ExitStatus, is_asked: bool) -> Self {
        match status.code() {
            Some(0) => Self::Finished,
            None => Self::Lost,
            Some(INTERRUPTED) if !is_asked => Self::Lost,
            Some(NO_RANKS) => Self::Unneeded,
            Some(_) => Self::Failed,
        }
    }
}

impl ElasticRanks {
    /// Starts the processes, waits for all, and returns the exit code: 0 if some have finished their
    /// work, else that of the first that failed.
    ///
    /// # Errors
    /// Returns an error if a process cannot be started.
    pub fn launch(self) -> Result<i32> {
        signals::record_signals()?;
        let mut job = Job { ranks: Vec::with_capacity(self.slots) };
        for slot in 0..self.slots {
            let child = match self.first {
                Some((first, ranks)) => self.start(first + slot, ranks),
                None => self.join(),
            };
            job.ranks.push(child.map_err(|e| cannot_start(&self.program, e))?);
        }
        Ok(Running {
            launch: self,
            job,
            starts: vec![],
            seen: 0,
            failed: None,
            lost: None,
            has_succeeded: false,
            last_loss: None,
            delay: REJOIN_DELAY,
        }
        .wait())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        if self.has_other_hosts {
            command.env(ADDRESS_VARIABLE, "host");
        }
        command
    }

    fn start(&self, rank: usize, ranks: usize) -> std::io::Result<Child> {
        let meeting = TcpRendezvous::on_this_host(self.rendezvous.clone(), rank, ranks);
        self.command().env(RENDEZVOUS_VARIABLE, meeting.to_string()).spawn()
    }

    fn join(&self) -> std::io::Result<Child> {
        self.command().env(JOIN_VARIABLE, &self.rendezvous).spawn()
    }

    /// Returns the directory of the run, once the ranks have noted it.
    fn run(&self) -> Option<PathBuf> {
        fs::read_to_string(self.rendezvous.join(RUN_FILE)).ok().map(PathBuf::from)
    }

    /// Returns the signal that this process, or the launcher on another host, has received.
    fn signal(&self) -> Option<String> {
        let mine = signals::last_signal().map(str::to_owned);
        mine.or_else(|| fs::read_to_string(self.rendezvous.join(SIGNAL_FILE)).ok())
    }
}

/// The processes of an elastic job on this host.
struct Running {
    launch: ElasticRanks,
    /// Those that run.
    job: Job,
    /// The times at which processes that join are started.
    starts: Vec<Instant>,
    /// The last membership whose lost ranks were ended.
    seen: u64,
    /// The first exit code of a process that has failed.
    failed: Option<i32>,
    /// The exit code of the last process that was lost.
    lost: Option<i32>,
    has_succeeded: bool,
    /// The last loss, and the time after which a process was started for it.
    last_loss: Option<Instant>,
    delay: Duration,
}

impl Running {
    /// Waits for all processes, and starts one for each that is lost. Returns the exit code.
    fn wait(mut self) -> i32 {
        let mut forwarded = None;
        let mut over_since: Option<Instant> = None;
        loop {
            std::thread::sleep(POLL_INTERVAL);
            let signal = self.launch.signal();
            if signal != forwarded {
                forward(signal.as_deref(), self.job.ranks.iter());
                forwarded.clone_from(&signal);
            }
            self.reap(signal.is_some());
            self.end_expelled();
            if self.failed.is_some() || self.has_succeeded {
                over_since.get_or_insert_with(Instant::now);
            }
            // A process may have been stopped.
            if over_since.is_some_and(|since| since.elapsed() > TIMEOUT) {
                break;
            }
            if signal.is_some() || self.failed.is_some() || self.has_succeeded {
                self.starts.clear();
            }
            let can_join = self.launch.has_other_hosts || !self.job.ranks.is_empty();
            if !can_join || self.job.ranks.is_empty() && self.starts.is_empty() {
                break;
            }
            self.start_due();
        }
        match (self.failed, self.has_succeeded, self.lost) {
            (Some(code), _, _) => code,
            (None, false, Some(code)) => code,
            _ => 0,
        }
    }

    /// Removes the processes that have ended.
    fn reap(&mut self, is_asked: bool) {
        let mut running = Vec::with_capacity(self.job.ranks.len());
        for mut child in std::mem::take(&mut self.job.ranks) {
            let Some(status) = child.try_wait().ok().flatten() else {
                running.push(child);
                continue;
            };
            let code = exit_code(status);
            match RankEnd::new(status, is_asked) {
                RankEnd::Finished => self.has_succeeded = true,
                RankEnd::Unneeded => {
                    self.lost.get_or_insert(code);
                }
                RankEnd::Failed => {
                    self.failed.get_or_insert(code);
                }
                RankEnd::Lost => {
                    if let Some(signal) = status.signal() {
                        log::warn!("process {} was ended by signal {signal}", child.id());
                    }
                    self.lost = Some(code);
                    if self.launch.rejoin {
                        let delay = self.next_delay();
                        self.starts.push(Instant::now() + delay);
                    }
                }
            }
        }
        self.job.ranks = running;
    }

    /// Returns the time after which a process is started for a rank that was lost: twice as long as
    /// the last time if ranks are lost again and again.
    fn next_delay(&mut self) -> Duration {
        let is_again = self.last_loss.is_some_and(|at| at.elapsed() < 4 * self.delay + STABLE_TIME);
        self.delay = if is_again { (2 * self.delay).min(MAX_REJOIN_DELAY) } else { REJOIN_DELAY };
        self.last_loss = Some(Instant::now());
        self.delay
    }

    /// Kills the processes that the others have gone on without: they do not answer.
    fn end_expelled(&mut self) {
        let Some(run) = self.launch.run() else { return };
        let memberships = MembershipDirectory::of_run(&run);
        let newest = memberships.newest_number().unwrap_or(0);
        if newest == self.seen {
            return;
        }
        let host = host_name();
        for number in self.seen + 1..=newest {
            // Those of earlier jobs may be removed.
            let Ok(membership) = memberships.read(number) else { continue };
            for child in &mut self.job.ranks {
                if membership.lost.iter().any(|lost| lost.host == host && lost.pid == child.id()) {
                    // This fails for a process that has ended.
                    let _ = child.kill();
                }
            }
        }
        self.seen = newest;
    }

    /// Starts the processes that are due.
    fn start_due(&mut self) {
        let due = self.starts.iter().filter(|time| **time <= Instant::now()).count();
        // Without a run there is nothing to join.
        if due == 0 || self.launch.run().is_none() {
            return;
        }
        self.starts.drain(..due);
        for _ in 0..due {
            match self.launch.join() {
                Ok(child) => self.job.ranks.push(child),
                Err(e) => {
                    let error = Error::io("start", self.launch.program.as_ref(), e);
                    log::warn!("a lost rank is not replaced: {}", error.message());
                }
            }
        }
    }
}
