//! Ends a job that stands still, and says where each rank is.
//!
//! A thread of every rank writes a heartbeat into the run directory from time to time. The file system is the way
//! because it needs no answer: a rank that is stopped, or stuck in a system call, has left its last heartbeat, and the
//! calls of MPI belong to a thread that may be inside one. The first rank that waits for longer than the timeout
//! leaves a marker there, and a moment later reports and aborts the job. Every rank that sees the marker leaves its
//! ledger.
//!
//! 1. Every tenth of `comm.timeout` (0.1 to 10 s) a rank writes its heartbeat: process, phase, last finished and
//!    current collective.
//! 2. A rank that was in one collective, or waited for data, for longer than the timeout writes its ledger and creates
//!    the marker.
//! 3. Two and a half intervals and half a second later the creator reads the files of all ranks. A rank whose heartbeat
//!    has not changed is reported as unresponsive; clocks are not compared. The module `stall` words the report, and the
//!    job is aborted.
//! 4. If the creator is stopped itself, or the end of the job does not reach them, the other waiting ranks end it five
//!    seconds later, with the creator's report where it has left one.
//!
//! Time in which the whole job was suspended does not count. The watch begins when the run directory is known. It
//! cannot detect a rank that computes for ever while no other rank waits for it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::heartbeat::{self, Exchange, Files, Heartbeat, LedgerFile, Told, seconds};
use super::ledger::{Entry, RECV};
use super::stall::{Sighting, report};
use crate::activity::{self, Doing};
use crate::backend::Backend;
use crate::comm::communicator::{Comm, Inner};
use crate::comm::wire::Members;
use crate::error::{Error, Result};

/// Exit code of a job that was ended.
const CODE: i32 = 1;

/// Delay after which a rank ends the job itself if the report was another's task.
const LAST_RESORT: Duration = Duration::from_secs(5);

/// The watch over this rank; ends when it is dropped.
pub struct Watch {
    /// None only while dropping.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: Backend> Comm<B> {
    /// Collective over the world: watches over this rank until the watch is dropped. Heartbeats and ledgers go to
    /// `folder`, which all ranks share. When a rank waits for longer than `timeout` in a collective or for data, the
    /// job ends with a report of where each rank is, and exit code 1. A world of one rank needs no watch.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn watch(&self, folder: &Path, timeout: Duration) -> Result<Option<Watch>> {
        if self.size() == 1 {
            return Ok(None);
        }
        let world = self.world();
        // No rank may take files of an earlier job for this job's.
        world.agree(if self.rank() == 0 { Files::new(folder).clear() } else { Ok(()) })?;
        world.agree(Watch::start(self.inner.clone(), self.home.clone(), folder, timeout)).map(Some)
    }
}

impl Watch {
    /// Starts the thread. The files of earlier jobs are gone.
    fn start(inner: Arc<Inner>, home: Members, folder: &Path, timeout: Duration) -> Result<Self> {
        let files = Files::new(folder);
        let heartbeat = files.open(home.rank)?;
        let interval = (timeout / 10).clamp(Duration::from_millis(100), Duration::from_secs(10));
        let patience = Patience { timeout, stuck: None, waited: Duration::ZERO };
        let mut watchdog = Watchdog {
            inner,
            home,
            files,
            heartbeat,
            interval,
            patience,
            beat: 0,
            alarm: None,
            told: false,
            failed: false,
        };
        watchdog.look(Duration::ZERO);
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || watchdog.run(&stopped))
            .map_err(|e| Error::internal(format!("cannot start the watchdog's thread: {e}")))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has ended the job.
            let _ = thread.join();
        }
    }
}

/// An operation that a rank may be stuck in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stuck {
    /// The collective of this number.
    Collective(u64),
    /// A wait for data that began at this time.
    Loading(u64),
}

/// Duration for which the rank has been stuck in the same operation.
struct Patience {
    timeout: Duration,
    stuck: Option<Stuck>,
    waited: Duration,
}

impl Patience {
    /// The rank is stuck in this, `passed` after it was looked at before. Whether that is too long.
    fn over(&mut self, stuck: Option<Stuck>, passed: Duration) -> bool {
        self.waited = if stuck.is_some() && stuck == self.stuck { self.waited + passed } else { Duration::ZERO };
        self.stuck = stuck;
        self.waited > self.timeout
    }
}

/// This rank waits for too long.
struct Alarm {
    raised: Instant,
    /// If the report is this rank's task, the heartbeats of all ranks at that moment.
    beats: Option<Vec<Option<u64>>>,
}

struct Watchdog {
    inner: Arc<Inner>,
    /// Ranks that are watched together; reports number them from 0.
    home: Members,
    files: Files,
    heartbeat: File,
    interval: Duration,
    patience: Patience,
    beat: u64,
    alarm: Option<Alarm>,
    /// Whether the ledger was written since the marker appeared.
    told: bool,
    /// Whether a heartbeat could not be written; said once.
    failed: bool,
}

impl Watchdog {
    fn run(mut self, stopped: &Receiver<()>) {
        let mut last = Instant::now();
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(self.interval) {
            // A rank that was stopped as a whole has not been waiting meanwhile: neither have the others, perhaps.
            let passed = last.elapsed().min(2 * self.interval);
            last = Instant::now();
            self.look(passed);
        }
        // The heartbeat of a rank that left in good order says nothing.
        let _ = std::fs::remove_file(self.files.heartbeat(self.home.rank));
    }

    fn look(&mut self, passed: Duration) {
        let stuck = self.beat();
        if !self.patience.over(stuck, passed) {
            if let Some(alarm) = self.alarm.take() {
                if alarm.beats.is_some() {
                    self.files.unmark();
                }
                log::warn!("a wait took longer than comm.timeout = {}", self.patience.timeout.as_secs());
            }
            let marked = self.files.marked();
            if marked && !self.told {
                self.write_ledger();
            }
            self.told = marked;
            return;
        }
        let Some(alarm) = &self.alarm else {
            self.write_ledger();
            let beats = self.files.mark().then(|| self.heartbeats().iter().map(|h| Some(h.as_ref()?.beat)).collect());
            self.alarm = Some(Alarm { raised: Instant::now(), beats });
            return;
        };
        // Every rank that can beats twice, and sees the marker.
        let grace = self.interval * 5 / 2 + Duration::from_millis(500);
        match (&alarm.beats, alarm.raised.elapsed()) {
            (Some(beats), waited) if waited >= grace => {
                let report = self.report(beats);
                self.files.tell(&report);
                log::error!("{report}");
                self.inner.end_job(CODE)
            }
            (None, waited) if waited >= grace + LAST_RESORT => {
                log::error!("{}", self.files.told().unwrap_or_else(|| self.own_report()));
                self.inner.end_job(CODE)
            }
            _ => {}
        }
    }

    /// Writes the heartbeat. Returns the operation that the rank may be stuck in.
    fn beat(&mut self) -> Option<Stuck> {
        self.beat += 1;
        let (phase, since) = self.inner.shared.activity.phase();
        let (finished, current) = self.place();
        let stuck = match &current {
            Some(told) => Some(Stuck::Collective(told.number)),
            None => (phase == Doing::Loading).then_some(Stuck::Loading(since)),
        };
        let heartbeat = Heartbeat {
            rank: self.home.rank,
            pid: std::process::id(),
            host: self.inner.world.node.host.clone(),
            beat: self.beat,
            time: seconds(activity::now()),
            phase: phase.name().into(),
            phase_since: seconds(since),
            waits: self.inner.shared.has_waiters(),
            finished,
            exchange: current.as_ref().and_then(|_| self.exchange()),
            current,
        };
        if let Err(error) = heartbeat::write(&self.heartbeat, &heartbeat)
            && !std::mem::replace(&mut self.failed, true)
        {
            log::warn!("cannot write {}: {error}", self.files.heartbeat(self.home.rank).display());
        }
        stuck
    }

    /// The last collective that was finished, and the one under way.
    fn place(&self) -> (Option<Told>, Option<Told>) {
        let ledger = self.inner.shared.ledger();
        let (finished, current) = ledger.place();
        // A message that was posted ahead is waited for only once compute needs it.
        let current = current.filter(|entry| entry.label.op != RECV || self.inner.shared.has_waiters());
        (finished.map(|entry| self.told_of(entry)), current.map(|entry| self.told_of(entry)))
    }

    /// A collective as reports describe it, with its ranks as they are numbered there.
    fn told_of(&self, entry: &Entry) -> Told {
        Told { members: self.numbers(&entry.members), ..Told::from(entry) }
    }

    /// Ranks of the world as reports number them.
    fn numbers(&self, ranks: &[usize]) -> Vec<usize> {
        ranks.iter().map(|rank| self.home.ranks.binary_search(rank).unwrap_or(*rank)).collect()
    }

    fn exchange(&self) -> Option<Exchange> {
        let (ranks, number) = self.inner.shared.partners.now()?;
        Some(Exchange { with: self.numbers(&ranks), number })
    }

    fn write_ledger(&self) {
        let ledger = LedgerFile {
            rank: self.home.rank,
            pid: std::process::id(),
            host: self.inner.world.node.host.clone(),
            time: seconds(activity::now()),
            collectives: self.inner.shared.ledger().entries().map(|entry| self.told_of(entry)).collect(),
        };
        let path = self.files.ledger(self.home.rank);
        let text = serde_json::to_string_pretty(&ledger).map_err(std::io::Error::from);
        if let Err(error) = text.and_then(|text| std::fs::write(&path, text + "\n")) {
            log::warn!("cannot write {}: {error}", path.display());
        }
    }

    /// The report of a rank that knows of itself alone.
    fn own_report(&self) -> String {
        let told = self.place().1.map(|told| told.to_string()).unwrap_or_default();
        format!("the job stands still: this rank waits in {told}, and no other rank has ended the job")
    }

    fn heartbeats(&self) -> Vec<Option<Heartbeat>> {
        (0..self.home.size()).map(|rank| self.files.read(rank)).collect()
    }

    /// Reports the state of each rank; `beats` are their heartbeat counts when the alarm was raised.
    fn report(&self, beats: &[Option<u64>]) -> String {
        let moved = |heartbeat: &Option<Heartbeat>, before| heartbeat.as_ref().map(|h| h.beat) != before;
        let sightings = self.heartbeats().into_iter().zip(beats).enumerate().map(|(rank, (heartbeat, before))| {
            let answers = rank == self.home.rank || moved(&heartbeat, *before);
            Sighting { heartbeat, answers }
        });
        let sightings: Vec<_> = sightings.collect();
        let ledgers: Vec<_> = (0..self.home.size()).filter_map(|rank| self.files.read_ledger(rank)).collect();
        let text = report(&sightings, &ledgers, seconds(activity::now()));
        format!(
            "{text}\nhint: {} holds the last collectives of each rank that could write them; comm.timeout = {} seconds \
             must be longer than the longest evaluation or checkpoint",
            self.files.folder().join("ledger-rank-*.json").display(),
            self.patience.timeout.as_secs()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends_with_progress() {
        let second = Duration::from_secs(1);
        let mut patience = Patience { timeout: 3 * second, stuck: None, waited: Duration::ZERO };
        let mut over = |stuck, times| (0..times).map(|_| patience.over(stuck, second)).collect::<Vec<_>>();
        let first = Some(Stuck::Collective(1));
        assert_eq!(over(first, 5), [false, false, false, false, true]);
        assert_eq!(over(Some(Stuck::Collective(2)), 4), [false; 4]);
        assert_eq!(over(None, 9), [false; 9]);
        assert_eq!(over(Some(Stuck::Loading(7)), 5), [false, false, false, false, true]);
    }
}
