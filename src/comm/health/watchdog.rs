//! Ends a job that stands still, and says where each rank is.
//!
//! A thread of every rank writes a heartbeat into a directory from time to time. The file system is
//! the way because it needs no answer: a rank that is stopped, or stuck in a system call, has left
//! its last heartbeat, and the calls of MPI belong to a thread that may be inside one. The first
//! rank that waits for longer than the timeout leaves a marker there, and a moment later reports
//! and aborts the job. Every rank that sees the marker leaves its ledger.
//!
//! 1. Every tenth of `comm.timeout` (0.1 to 10 s) a rank writes its heartbeat: process, phase, last
//!    finished and current collective.
//! 2. A rank that was in one collective, or waited for data, for longer than the timeout writes its
//!    ledger and creates the marker.
//! 3. Two and a half intervals and half a second later the creator reads the files of all ranks. A
//!    rank whose heartbeat has not changed is reported as unresponsive; clocks are not compared.
//!    The module `stall` words the report, and the job is aborted.
//! 4. If the creator is stopped itself, or the end of the job does not reach them, the other
//!    waiting ranks end it five seconds later, with the creator's report where it has left one.
//!
//! Time in which the whole job was suspended does not count. The watch over a command begins with
//! its process (`Comm::wait_at_most`) and ends after `MPI_Finalize`, which counts as a collective
//! called `leave`. Before the ranks have met in a directory (`Comm::watch`) a report tells of one
//! rank's place only. The watch cannot detect a rank that computes for ever while no other rank
//! waits for it.
//!
//! Where some ranks of a job train and others evaluate or serve, one side may end long before the
//! other: there a rank waits in `leave` as long as the others' heartbeats go on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::flight_recorder::{LEAVE, RECV};
use super::hang_report::{RankState, report};
use super::heartbeat::{Exchange, Files, Heartbeat, LedgerFile, PeerHeartbeat, Pulse, seconds};
use crate::exit::Exit;
use crate::shared::Shared;
use crate::transport::World;
use hpctrain_base::error::Result;
use hpctrain_base::own_files;
use hpctrain_base::spans;
use hpctrain_base::spans::Doing;
use hpctrain_base::spawn::spawn;

/// Exit code of a job that was ended.
pub const CODE: i32 = 1;

/// Delay after which a rank ends the job itself if the report was another's task.
const LAST_RESORT: Duration = Duration::from_secs(5);

/// The advice to those who find a timeout too short.
const HINT: &str = "must be longer than the longest evaluation or checkpoint";

/// The thread that watches over a rank; ends when it is dropped.
pub struct Guard {
    settings: Arc<Mutex<Settings>>,
    beats: Arc<AtomicU64>,
    /// None only while dropping. A message makes the thread look at its settings.
    tell: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The settings of a watch, which change while it goes on.
#[derive(Default, Clone)]
pub struct Settings {
    /// Zero waits for ever.
    pub timeout: Duration,
    pub place: Option<WatchdogDirectory>,
}

impl Settings {
    fn interval(&self) -> Duration {
        match self.timeout {
            Duration::ZERO => Duration::from_secs(10),
            timeout => (timeout / 10).clamp(Duration::from_millis(100), Duration::from_secs(10)),
        }
    }
}

/// The directory in which the ranks meet.
#[derive(Clone)]
pub struct WatchdogDirectory {
    pub files: Files,
    pub pulse: Pulse,
    /// Whether it goes with the watch.
    pub is_own: bool,
}

impl WatchdogDirectory {
    /// The heartbeat of a rank that left in good order says nothing.
    fn leave(&self) {
        self.pulse.leave();
        if self.is_own {
            // It goes with its last rank; those of others are still there.
            let _ = std::fs::remove_dir(self.files.folder());
        }
    }
}

impl Guard {
    pub fn start(seat: WatchdogContext) -> Result<Self> {
        let settings = Arc::<Mutex<Settings>>::default();
        let beats = Arc::<AtomicU64>::default();
        let patience = Patience { stuck: None, waited: Duration::ZERO };
        let watchdog = Watchdog {
            seat,
            settings: settings.clone(),
            beats: beats.clone(),
            patience,
            at_end: HashMap::new(),
            alarm: None,
            told: false,
            failed: false,
        };
        let (tell, told) = channel();
        let thread = spawn("watchdog", move || watchdog.run(&told))?;
        Ok(Self { settings, beats, tell: Some(tell), thread: Some(thread) })
    }

    /// The number of the next heartbeat.
    pub fn next_beat(&self) -> u64 {
        self.beats.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Changes the settings. Signs of life in a directory before are removed.
    pub fn set(&self, change: impl FnOnce(&mut Settings)) -> Result<()> {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let before = settings.place.clone();
        change(&mut settings);
        let path = |place: &Option<WatchdogDirectory>| {
            place.as_ref().map(|place| place.pulse.path.clone())
        };
        if let Some(before) = before.as_ref().filter(|_| path(&before) != path(&settings.place)) {
            before.leave();
        }
        drop(settings);
        // The thread ends only after this handle.
        let _ = self.tell.as_ref().map(|tell| tell.send(()));
        Ok(())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.tell = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has ended the job.
            let _ = thread.join();
        }
    }
}

/// An operation that a rank may be stuck in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stuck {
    /// The collective of this number.
    Collective(u64),
    /// A wait for data that began at this time.
    Loading(u64),
}

/// Duration for which the rank has been stuck in the same operation.
struct Patience {
    stuck: Option<Stuck>,
    waited: Duration,
}

impl Patience {
    /// The rank is stuck in this, `passed` after it was looked at before. Whether that is longer
    /// than `timeout`.
    fn over(&mut self, timeout: Duration, stuck: Option<Stuck>, passed: Duration) -> bool {
        self.waited = if stuck.is_some() && stuck == self.stuck {
            self.waited + passed
        } else {
            Duration::ZERO
        };
        self.stuck = stuck;
        !timeout.is_zero() && self.waited > timeout
    }
}

/// This rank waits for too long.
struct Alarm {
    raised: Instant,
    /// If the report is this rank's task, the heartbeat counts of all ranks at that moment.
    beats: Option<Vec<Option<u64>>>,
}

/// A rank as its watch sees it.
#[derive(Clone)]
pub struct WatchdogContext {
    pub shared: Arc<Shared>,
    pub world: World,
    pub exit: Exit,
    /// Whether ranks of the job have other work than this one.
    pub has_roles: Arc<AtomicBool>,
}

impl WatchdogContext {
    /// The heartbeat of this moment, and the operation that the rank may be stuck in.
    pub fn heartbeat(&self, beat: u64) -> (Heartbeat, Option<Stuck>) {
        let (phase, since) = self.shared.activity.phase();
        let (finished, current) = self.place();
        let stuck = match &current {
            Some(told) => Some(Stuck::Collective(told.number)),
            None => (phase == Doing::Loading).then_some(Stuck::Loading(since)),
        };
        let heartbeat = Heartbeat {
            rank: self.world.rank,
            pid: std::process::id(),
            host: self.world.node.host.clone(),
            beat,
            time: seconds(spans::now()),
            phase: phase.name().into(),
            phase_since: seconds(since),
            waits: self.shared.has_waiters(),
            finished,
            exchange: current.as_ref().and_then(|_| self.exchange()),
            current,
        };
        (heartbeat, stuck)
    }

    /// The last collective that was finished, and the one under way.
    fn place(&self) -> (Option<PeerHeartbeat>, Option<PeerHeartbeat>) {
        let ledger = self.shared.ledger();
        let (finished, current) = ledger.place();
        // A message that was posted ahead is waited for only once compute needs it.
        let current = current.filter(|entry| entry.label.op != RECV || self.shared.has_waiters());
        (finished.map(PeerHeartbeat::from), current.map(PeerHeartbeat::from))
    }

    /// The exchange under way.
    fn exchange(&self) -> Option<Exchange> {
        let (with, number) = self.shared.partners.now()?;
        Some(Exchange { with, number })
    }
}

struct Watchdog {
    seat: WatchdogContext,
    settings: Arc<Mutex<Settings>>,
    beats: Arc<AtomicU64>,
    patience: Patience,
    /// Heartbeat counts of ranks that had not left when this one last waited for them.
    at_end: HashMap<usize, u64>,
    alarm: Option<Alarm>,
    /// Whether the ledger was written since the marker appeared.
    told: bool,
    /// Whether a heartbeat could not be written; said once.
    failed: bool,
}

impl Watchdog {
    fn settings(&self) -> Settings {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn run(mut self, told: &Receiver<()>) {
        let mut last = Instant::now();
        let mut settings = self.settings();
        while told.recv_timeout(settings.interval()) != Err(RecvTimeoutError::Disconnected) {
            // A rank that was stopped as a whole has not been waiting meanwhile: neither have the
            // others, perhaps.
            let passed = last.elapsed().min(2 * settings.interval());
            last = Instant::now();
            settings = self.settings();
            self.look(&settings, passed);
        }
        self.settings().place.iter().for_each(WatchdogDirectory::leave);
    }

    fn look(&mut self, settings: &Settings, passed: Duration) {
        let stuck = self.beat(settings.place.as_ref());
        let Some(place) = &settings.place else { return self.look_alone(settings, stuck, passed) };
        if !self.patience.over(settings.timeout, stuck, passed)
            || self.others_have_work(&place.files)
        {
            if let Some(alarm) = self.alarm.take() {
                if alarm.beats.is_some() {
                    place.files.unmark();
                }
                log::warn!("a wait took longer than comm.timeout = {}", settings.timeout.as_secs());
            }
            let marked = place.files.marked();
            if marked && !self.told {
                self.write_ledger(&place.files);
            }
            self.told = marked;
            return;
        }
        let Some(alarm) = &self.alarm else {
            self.write_ledger(&place.files);
            let beats = place
                .files
                .mark()
                .then(|| place.files.read().iter().map(|h| Some(h.as_ref()?.beat)).collect());
            self.alarm = Some(Alarm { raised: Instant::now(), beats });
            return;
        };
        // Every rank that can beats twice, and sees the marker.
        let grace = settings.interval() * 5 / 2 + Duration::from_millis(500);
        match (&alarm.beats, alarm.raised.elapsed()) {
            (Some(beats), waited) if waited >= grace => {
                let report = self.report(settings, &place.files, beats);
                place.files.tell(&report);
                log::error!("{report}");
                self.seat.exit.end_job(CODE)
            }
            (None, waited) if waited >= grace + LAST_RESORT => {
                log::error!("{}", place.files.told().unwrap_or_else(|| self.own_report()));
                self.seat.exit.end_job(CODE)
            }
            _ => {}
        }
    }

    /// As [`Watchdog::look`], before the ranks have met in a directory.
    fn look_alone(&mut self, settings: &Settings, stuck: Option<Stuck>, passed: Duration) {
        let current = self.seat.place().1;
        let is_of_all =
            current.as_ref().is_some_and(|told| told.members.len() == self.seat.world.nodes.len());
        let over = self.patience.over(settings.timeout, stuck, passed);
        // Those of another role may have much to do before they meet this one, or after; they are
        // watched by themselves.
        if !over || is_of_all && self.seat.has_roles.load(Ordering::Relaxed) {
            return;
        }
        let waits = current.map_or("waits for data".into(), |told| format!("waits in {told}"));
        log::error!(
            "the job stands still: this rank {waits} since {:.1} s, and the ranks have not met in a directory that would tell \
             of the others\nhint: comm.timeout = {} seconds {HINT}",
            self.patience.waited.as_secs_f64(),
            settings.timeout.as_secs()
        );
        self.seat.exit.end_job(CODE)
    }

    /// Whether this rank has nothing left to do and others have: each that has not left still shows
    /// signs of life.
    fn others_have_work(&mut self, files: &Files) -> bool {
        let is_leaving = self.seat.place().1.is_some_and(|told| told.op == LEAVE);
        if !self.seat.has_roles.load(Ordering::Relaxed) || !is_leaving {
            return false;
        }
        let has_left = |one: &Heartbeat| one.current.as_ref().is_some_and(|told| told.op == LEAVE);
        let all = files.read();
        // Some may never have met here, such as parameter servers.
        let are_known = all.iter().all(Option::is_some);
        let others: HashMap<usize, u64> = all
            .into_iter()
            .flatten()
            .filter(|one| !has_left(one))
            .map(|one| (one.rank, one.beat))
            .collect();
        if are_known && others.is_empty()
            || others.iter().any(|(rank, beat)| self.at_end.get(rank) == Some(beat))
        {
            return false;
        }
        // Another timeout for them.
        self.at_end = others;
        self.patience.waited = Duration::ZERO;
        true
    }

    /// Writes the heartbeat. Returns the operation that the rank may be stuck in.
    fn beat(&mut self, place: Option<&WatchdogDirectory>) -> Option<Stuck> {
        let beat = self.beats.fetch_add(1, Ordering::Relaxed) + 1;
        let (heartbeat, stuck) = self.seat.heartbeat(beat);
        let Some(place) = place else { return stuck };
        match place.pulse.write(&heartbeat) {
            // The directory was removed with its run, which did not begin.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
                settings.place =
                    settings.place.take().filter(|now| now.pulse.path != place.pulse.path);
            }
            Err(e) if !std::mem::replace(&mut self.failed, true) => {
                log::warn!("cannot write {}: {e}", place.pulse.path.display());
            }
            _ => {}
        }
        stuck
    }

    fn write_ledger(&self, files: &Files) {
        let ledger = LedgerFile {
            rank: self.seat.world.rank,
            pid: std::process::id(),
            host: self.seat.world.node.host.clone(),
            time: seconds(spans::now()),
            collectives: self.seat.shared.ledger().entries().map(PeerHeartbeat::from).collect(),
        };
        let path = files.ledger(self.seat.world.rank);
        let text = serde_json::to_string_pretty(&ledger).map_err(std::io::Error::from);
        if let Err(error) = text.and_then(|text| own_files::write(&path, text + "\n")) {
            log::warn!("cannot write {}: {error}", path.display());
        }
    }

    /// The report of a rank that knows of itself alone.
    fn own_report(&self) -> String {
        let told = self.seat.place().1.map(|told| told.to_string()).unwrap_or_default();
        format!(
            "the job stands still: this rank waits in {told}, and no other rank has ended the job"
        )
    }

    /// Reports the state of each rank; `beats` are their heartbeat counts when the alarm was
    /// raised.
    fn report(&self, settings: &Settings, files: &Files, beats: &[Option<u64>]) -> String {
        let moved =
            |heartbeat: &Option<Heartbeat>, before| heartbeat.as_ref().map(|h| h.beat) != before;
        let sightings =
            files.read().into_iter().zip(beats).enumerate().map(|(rank, (heartbeat, before))| {
                let answers = rank == self.seat.world.rank || moved(&heartbeat, *before);
                RankState { heartbeat, answers }
            });
        let sightings: Vec<_> = sightings.collect();
        let ledgers: Vec<_> =
            (0..sightings.len()).filter_map(|rank| files.read_ledger(rank)).collect();
        let text = report(&sightings, &ledgers, seconds(spans::now()));
        format!(
            "{text}\nhint: {} holds the last collectives of each rank that could write them; comm.timeout = {} seconds {HINT}",
            files.folder().join("ledger-rank-*.json").display(),
            settings.timeout.as_secs()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends_with_progress() {
        let second = Duration::from_secs(1);
        let mut patience = Patience { stuck: None, waited: Duration::ZERO };
        let mut over = |stuck, times| {
            (0..times).map(|_| patience.over(3 * second, stuck, second)).collect::<Vec<_>>()
        };
        let first = Some(Stuck::Collective(1));
        assert_eq!(over(first, 5), [false, false, false, false, true]);
        assert_eq!(over(Some(Stuck::Collective(2)), 4), [false; 4]);
        assert_eq!(over(None, 9), [false; 9]);
        assert_eq!(over(Some(Stuck::Loading(7)), 5), [false, false, false, false, true]);
        let mut endless = Patience { stuck: None, waited: Duration::ZERO };
        assert!((0..99).all(|_| !endless.over(Duration::ZERO, first, second)));
    }
}
