//! The watchdog: ends a job that hangs, and reports where each rank is.
//!
//! A thread of every rank periodically writes a heartbeat to a directory. The file system is used
//! because it needs no answer: a rank that is stopped, or stuck in a system call, has left its last
//! heartbeat, and MPI calls belong to a thread that may itself be blocked. The first rank that
//! waits for longer than the timeout creates a marker there, and soon after reports and aborts the
//! job. Every rank that sees the marker writes its flight recorder.
//!
//! 1. Every tenth of `comm.timeout` (0.1 to 10 s) a rank writes its heartbeat: process, phase, last
//!    finished and current collective.
//! 2. A rank that was in one collective, or waited for data, for longer than the timeout writes its
//!    flight recorder and creates the marker.
//! 3. Two and a half intervals and half a second later the creator reads the files of all ranks. A
//!    rank whose heartbeat has not changed is reported as unresponsive; clocks are not compared.
//!    The module `hang_report` formats the report, and the job is aborted.
//! 4. If the creator is stopped itself, or the abort does not reach them, the other waiting ranks
//!    abort five seconds later, with the creator's report if it has written one.
//!
//! Time in which the whole job was suspended does not count. The watchdog of a command starts with
//! its process (`Comm::set_watchdog_timeout`) and stops after `MPI_Finalize`, which counts as a collective
//! named `leave`. Before the ranks share a directory (`Comm::watch`), a report covers one rank
//! only. The watchdog cannot detect a rank that computes for ever while no other rank waits for it.
//!
//! Where some ranks of a job train and others evaluate or serve, one side may end long before the
//! other. Then a rank may wait in `leave` as long as the others' heartbeats continue.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::flight_recorder::{LEAVE, RECV};
use super::hang_report::{RankState, report};
use super::heartbeat::{
    CollectiveState, Exchange, FlightRecorderFile, Heartbeat, HeartbeatSlot, WatchdogFiles, seconds,
};
use crate::exit::Exit;
use crate::shared::Shared;
use crate::transport::World;
use hpctrain_base::error::Result;
use hpctrain_base::own_files;
use hpctrain_base::spans;
use hpctrain_base::spans::ActivityKind;
use hpctrain_base::spawn::spawn;

/// Exit code of a job that the watchdog ends.
pub const CODE: i32 = 1;

/// Additional delay after which a rank aborts the job itself if another rank should have reported.
const FALLBACK_DELAY: Duration = Duration::from_secs(5);

/// The hint for a timeout that is too short.
const HINT: &str = "must be longer than the longest evaluation or checkpoint";

/// A handle to the watchdog's thread, which ends when the handle is dropped.
pub struct Guard {
    settings: Arc<Mutex<Settings>>,
    beats: Arc<AtomicU64>,
    /// Wakes the thread to apply new settings; `None` only while dropping.
    wake: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The settings of a watchdog, which may change while it runs.
#[derive(Default, Clone)]
pub struct Settings {
    /// The longest wait; zero waits for ever.
    pub timeout: Duration,
    pub directory: Option<WatchdogDirectory>,
}

impl Settings {
    fn interval(&self) -> Duration {
        match self.timeout {
            Duration::ZERO => Duration::from_secs(10),
            timeout => (timeout / 10).clamp(Duration::from_millis(100), Duration::from_secs(10)),
        }
    }
}

/// The directory of the ranks' heartbeats.
#[derive(Clone)]
pub struct WatchdogDirectory {
    pub files: WatchdogFiles,
    pub slot: HeartbeatSlot,
    /// Whether the directory is removed with the watchdog.
    pub is_own: bool,
}

impl WatchdogDirectory {
    /// Erases this rank's heartbeat, which would be misleading after an orderly exit.
    fn leave(&self) {
        self.slot.leave();
        if self.is_own {
            // This fails while other ranks have files there; the last one removes it.
            let _ = std::fs::remove_dir(self.files.folder());
        }
    }
}

impl Guard {
    pub fn start(seat: WatchdogContext) -> Result<Self> {
        let settings = Arc::<Mutex<Settings>>::default();
        let beats = Arc::<AtomicU64>::default();
        let stall_timer = StallTimer { stuck: None, waited: Duration::ZERO };
        let watchdog = Watchdog {
            context: seat,
            settings: settings.clone(),
            beats: beats.clone(),
            stall_timer,
            at_end: HashMap::new(),
            alarm: None,
            recorder_written: false,
            failed: false,
        };
        let (wake, woken) = channel();
        let thread = spawn("watchdog", move || watchdog.run(&woken))?;
        Ok(Self { settings, beats, wake: Some(wake), thread: Some(thread) })
    }

    /// Returns the number of the next heartbeat.
    pub fn next_beat(&self) -> u64 {
        self.beats.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Changes the settings. If the directory changes, the heartbeat in the old one is erased.
    pub fn set(&self, change: impl FnOnce(&mut Settings)) -> Result<()> {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let before = settings.directory.clone();
        change(&mut settings);
        let path =
            |place: &Option<WatchdogDirectory>| place.as_ref().map(|place| place.slot.path.clone());
        if let Some(before) = before.as_ref().filter(|_| path(&before) != path(&settings.directory))
        {
            before.leave();
        }
        drop(settings);
        // The thread ends only after this handle.
        let _ = self.wake.as_ref().map(|wake| wake.send(()));
        Ok(())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has aborted the job.
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

/// Measures how long the rank has been stuck in the same operation.
struct StallTimer {
    stuck: Option<Stuck>,
    waited: Duration,
}

impl StallTimer {
    /// Records that the rank is in the operation `stuck`, `passed` after the last check. Returns
    /// true if it has been there for longer than `timeout`.
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

/// The state of a rank that has waited for longer than the timeout.
struct Alarm {
    raised: Instant,
    /// The heartbeat numbers of all ranks at that moment, if this rank has to report.
    beats: Option<Vec<Option<u64>>>,
}

/// The facts about its rank that the watchdog needs.
#[derive(Clone)]
pub struct WatchdogContext {
    pub shared: Arc<Shared>,
    pub world: World,
    pub exit: Exit,
    /// Whether the ranks of the job have different roles.
    pub has_roles: Arc<AtomicBool>,
}

impl WatchdogContext {
    /// Returns the present heartbeat, and the operation that the rank may be stuck in.
    pub fn heartbeat(&self, beat: u64) -> (Heartbeat, Option<Stuck>) {
        let (phase, since) = self.shared.activity.phase();
        let (finished, current) = self.place();
        let stuck = match &current {
            Some(collective) => Some(Stuck::Collective(collective.number)),
            None => (phase == ActivityKind::Loading).then_some(Stuck::Loading(since)),
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

    /// Returns the last collective that finished, and the one in flight.
    fn place(&self) -> (Option<CollectiveState>, Option<CollectiveState>) {
        let recorder = self.shared.flight_recorder();
        let (finished, current) = recorder.place();
        // A receive that was posted early counts only once compute waits for it.
        let current = current.filter(|entry| entry.label.op != RECV || self.shared.has_waiters());
        (finished.map(CollectiveState::from), current.map(CollectiveState::from))
    }

    /// Returns the exchange in flight.
    fn exchange(&self) -> Option<Exchange> {
        let (with, number) = self.shared.partners.now()?;
        Some(Exchange { with, number })
    }
}

struct Watchdog {
    context: WatchdogContext,
    settings: Arc<Mutex<Settings>>,
    beats: Arc<AtomicU64>,
    stall_timer: StallTimer,
    /// The heartbeat numbers of ranks that had not left when this one last waited for them.
    at_end: HashMap<usize, u64>,
    alarm: Option<Alarm>,
    /// Whether the flight recorder was written since the marker appeared.
    recorder_written: bool,
    /// Whether a failure to write a heartbeat was logged, which happens once.
    failed: bool,
}

impl Watchdog {
    fn settings(&self) -> Settings {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn run(mut self, woken: &Receiver<()>) {
        let mut last = Instant::now();
        let mut settings = self.settings();
        while woken.recv_timeout(settings.interval()) != Err(RecvTimeoutError::Disconnected) {
            // While the process was stopped it was not waiting, and the other ranks may have been
            // stopped as well.
            let passed = last.elapsed().min(2 * settings.interval());
            last = Instant::now();
            settings = self.settings();
            self.check(&settings, passed);
        }
        self.settings().directory.iter().for_each(WatchdogDirectory::leave);
    }

    fn check(&mut self, settings: &Settings, passed: Duration) {
        let stuck = self.beat(settings.directory.as_ref());
        let Some(place) = &settings.directory else {
            return self.check_without_directory(settings, stuck, passed);
        };
        if !self.stall_timer.over(settings.timeout, stuck, passed)
            || self.others_have_work(&place.files)
        {
            if let Some(alarm) = self.alarm.take() {
                if alarm.beats.is_some() {
                    place.files.clear_hang_mark();
                }
                log::warn!("a wait took longer than comm.timeout = {}", settings.timeout.as_secs());
            }
            let marked = place.files.is_hang_marked();
            if marked && !self.recorder_written {
                self.write_recorder(&place.files);
            }
            self.recorder_written = marked;
            return;
        }
        let Some(alarm) = &self.alarm else {
            self.write_recorder(&place.files);
            let beats = place
                .files
                .mark_hang()
                .then(|| place.files.read().iter().map(|h| Some(h.as_ref()?.beat)).collect());
            self.alarm = Some(Alarm { raised: Instant::now(), beats });
            return;
        };
        // In this time every rank that responds writes two heartbeats and sees the marker.
        let grace = settings.interval() * 5 / 2 + Duration::from_millis(500);
        match (&alarm.beats, alarm.raised.elapsed()) {
            (Some(beats), waited) if waited >= grace => {
                let report = self.report(settings, &place.files, beats);
                place.files.write_report(&report);
                log::error!("{report}");
                self.context.exit.end_job(CODE)
            }
            (None, waited) if waited >= grace + FALLBACK_DELAY => {
                log::error!(
                    "{}",
                    place.files.read_report().unwrap_or_else(|| self.report_this_rank())
                );
                self.context.exit.end_job(CODE)
            }
            _ => {}
        }
    }

    /// Checks this rank while the ranks do not share a directory yet.
    fn check_without_directory(
        &mut self,
        settings: &Settings,
        stuck: Option<Stuck>,
        passed: Duration,
    ) {
        let current = self.context.place().1;
        let is_of_all =
            current.as_ref().is_some_and(|it| it.members.len() == self.context.world.nodes.len());
        let over = self.stall_timer.over(settings.timeout, stuck, passed);
        // Ranks of another role may work for long before or after they meet this one; their own
        // watchdogs check them.
        if !over || is_of_all && self.context.has_roles.load(Ordering::Relaxed) {
            return;
        }
        let waits =
            current.map_or("waits for data".into(), |current| format!("waits in {current}"));
        log::error!(
            "the job hangs: this rank {waits} since {:.1} s; the states of the other ranks are unknown, because the ranks do \
             not share a watchdog directory yet\nhint: comm.timeout = {} seconds {HINT}",
            self.stall_timer.waited.as_secs_f64(),
            settings.timeout.as_secs()
        );
        self.context.exit.end_job(CODE)
    }

    /// Returns true if this rank has nothing left to do, and every rank that has not left still
    /// writes heartbeats.
    fn others_have_work(&mut self, files: &WatchdogFiles) -> bool {
        let is_leaving = self.context.place().1.is_some_and(|current| current.op == LEAVE);
        if !self.context.has_roles.load(Ordering::Relaxed) || !is_leaving {
            return false;
        }
        let has_left =
            |one: &Heartbeat| one.current.as_ref().is_some_and(|current| current.op == LEAVE);
        let all = files.read();
        // Some never write heartbeats here, such as parameter servers.
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
        // Wait for them for another timeout.
        self.at_end = others;
        self.stall_timer.waited = Duration::ZERO;
        true
    }

    /// Writes the heartbeat. Returns the operation that the rank may be stuck in.
    fn beat(&mut self, place: Option<&WatchdogDirectory>) -> Option<Stuck> {
        let beat = self.beats.fetch_add(1, Ordering::Relaxed) + 1;
        let (heartbeat, stuck) = self.context.heartbeat(beat);
        let Some(place) = place else { return stuck };
        match place.slot.write(&heartbeat) {
            // The directory was removed with its run, which did not start.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
                settings.directory =
                    settings.directory.take().filter(|now| now.slot.path != place.slot.path);
            }
            Err(e) if !std::mem::replace(&mut self.failed, true) => {
                log::warn!("cannot write {}: {e}", place.slot.path.display());
            }
            _ => {}
        }
        stuck
    }

    fn write_recorder(&self, files: &WatchdogFiles) {
        let recorder = FlightRecorderFile {
            rank: self.context.world.rank,
            pid: std::process::id(),
            host: self.context.world.node.host.clone(),
            time: seconds(spans::now()),
            collectives: self
                .context
                .shared
                .flight_recorder()
                .entries()
                .map(CollectiveState::from)
                .collect(),
        };
        let path = files.recorder_path(self.context.world.rank);
        let text = serde_json::to_string_pretty(&recorder).map_err(std::io::Error::from);
        if let Err(error) = text.and_then(|text| own_files::write(&path, text + "\n")) {
            log::warn!("cannot write {}: {error}", path.display());
        }
    }

    /// Reports the state of this rank alone.
    fn report_this_rank(&self) -> String {
        let current = self.context.place().1.map(|current| current.to_string()).unwrap_or_default();
        format!(
            "the job hangs: this rank waits in {current}, and no other rank has aborted the job"
        )
    }

    /// Reports the state of each rank. `beats` are their heartbeat numbers when the alarm was
    /// raised.
    fn report(&self, settings: &Settings, files: &WatchdogFiles, beats: &[Option<u64>]) -> String {
        let moved =
            |heartbeat: &Option<Heartbeat>, before| heartbeat.as_ref().map(|h| h.beat) != before;
        let states =
            files.read().into_iter().zip(beats).enumerate().map(|(rank, (heartbeat, before))| {
                let answers = rank == self.context.world.rank || moved(&heartbeat, *before);
                RankState { heartbeat, answers }
            });
        let states: Vec<_> = states.collect();
        let recorders: Vec<_> =
            (0..states.len()).filter_map(|rank| files.read_recorder(rank)).collect();
        let text = report(&states, &recorders, seconds(spans::now()));
        format!(
            "{text}\nhint: {} holds the last collectives of each rank that could write them; comm.timeout = {} seconds {HINT}",
            files.folder().join("flight-recorder-rank-*.json").display(),
            settings.timeout.as_secs()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_resets_the_stall_timer() {
        let second = Duration::from_secs(1);
        let mut stall_timer = StallTimer { stuck: None, waited: Duration::ZERO };
        let mut over = |stuck, times| {
            (0..times).map(|_| stall_timer.over(3 * second, stuck, second)).collect::<Vec<_>>()
        };
        let first = Some(Stuck::Collective(1));
        assert_eq!(over(first, 5), [false, false, false, false, true]);
        assert_eq!(over(Some(Stuck::Collective(2)), 4), [false; 4]);
        assert_eq!(over(None, 9), [false; 9]);
        assert_eq!(over(Some(Stuck::Loading(7)), 5), [false, false, false, false, true]);
        let mut endless = StallTimer { stuck: None, waited: Duration::ZERO };
        assert!((0..99).all(|_| !endless.over(Duration::ZERO, first, second)));
    }
}
