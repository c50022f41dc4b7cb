//! Leases on several nodes of a simulated network file system, which shows each node names,
//! listings and contents that are up to a minute old. The clock is simulated and one process runs
//! at a time, so the tests take no real time and do not depend on it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::fs_clock::{LeaseFile, STALE, Seen, System, TurnLock};
use super::owner::{LeaseOwner, Liveness};
use super::{Claimed, LeaseRecord, Leases, TrashStatus};

/// The server, the clock, and the processes that run in turn.
#[derive(Debug, Default)]
struct World {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    now: Duration,
    running: Option<usize>,
    /// The sleeping processes, by the time at which they wake.
    sleepers: BTreeSet<(Duration, usize)>,
    /// The file that each name stood for, and since when.
    names: HashMap<PathBuf, Vec<(Duration, Option<usize>)>>,
    /// The contents of each file, and since when.
    files: Vec<Vec<(Duration, Vec<u8>)>>,
    gone: HashSet<(String, u32)>,
    random: u64,
}

/// Returns the value at a time.
fn at<T: Clone>(history: &[(Duration, T)], time: Duration) -> Option<T> {
    history.iter().rev().find(|(since, _)| *since <= time).map(|(_, value)| value.clone())
}

impl State {
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// Returns the file that a name has on the server.
    fn file(&self, path: &Path) -> Option<usize> {
        self.names.get(path).and_then(|history| at(history, self.now)).flatten()
    }

    fn name(&mut self, path: &Path, file: Option<usize>) {
        let now = self.now;
        self.names.entry(path.into()).or_default().push((now, file));
    }

    fn exists(&self, file: usize) -> bool {
        self.names.keys().any(|path| self.file(path) == Some(file))
    }

    /// Lets the next process run.
    fn hand_over(&mut self) {
        self.running = self.sleepers.pop_first().map(|(time, process)| {
            self.now = self.now.max(time);
            process
        });
    }
}

impl World {
    fn new(seed: u64) -> Arc<Self> {
        let world = Self::default();
        world.state().random = seed * 0x9e37_79b9 + 1;
        Arc::new(world)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Runs each process to its end on the node with its number. Processes may share a node.
    fn run(self: &Arc<Self>, processes: Vec<(usize, Work<'_>)>) {
        {
            let mut state = self.state();
            state.sleepers.extend((0..processes.len()).map(|process| (Duration::ZERO, process)));
            state.hand_over();
        }
        std::thread::scope(|scope| {
            for (number, (node, work)) in processes.into_iter().enumerate() {
                let process = Arc::new(Process {
                    world: self.clone(),
                    number,
                    host: format!("node{node}"),
                    pid: Mutex::new(100 * (number as u32 + 1)),
                    floors: Mutex::default(),
                    seen: Seen::default(),
                });
                scope.spawn(move || {
                    let _end = End(process.clone());
                    process.await_turn();
                    work(&process);
                });
            }
        });
    }
}

/// The function that a process runs.
type Work<'a> = Box<dyn FnOnce(&Arc<Process>) + Send + 'a>;

/// Lets the other processes run when a process ends, even by a panic.
struct End(Arc<Process>);

impl Drop for End {
    fn drop(&mut self) {
        let mut state =
            self.0.world.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.hand_over();
        self.0.world.changed.notify_all();
    }
}

/// The latest times that a client has seen: it sees nothing older afterwards.
#[derive(Debug, Default)]
struct Floors {
    names: HashMap<PathBuf, Duration>,
    files: HashMap<usize, Duration>,
    lists: HashMap<PathBuf, Duration>,
}

#[derive(Debug)]
struct Process {
    world: Arc<World>,
    number: usize,
    host: String,
    pid: Mutex<u32>,
    floors: Mutex<Floors>,
    seen: Seen,
}

impl Process {
    fn await_turn(&self) {
        let state = self.world.state();
        drop(
            self.world
                .changed
                .wait_while(state, |state| state.running != Some(self.number))
                .unwrap(),
        );
    }

    fn random(&self, below: u64) -> u64 {
        self.world.state().random(below)
    }

    /// Dies without releasing anything; the process continues under a new process id.
    fn dies(&self) {
        let mut pid = self.pid.lock().unwrap();
        self.world.state().gone.insert((self.host.clone(), *pid));
        *pid += 1;
    }

    /// Simulates the latency of a call to the server, in which other processes run.
    fn call(&self) {
        let time = Duration::from_millis(self.random(30));
        self.sleep(time);
    }

    /// Returns the time as of which this client sees something, not before `floor`.
    fn view(&self, state: &mut State, floor: Duration) -> Duration {
        let lag = match state.random(3) {
            0 => Duration::ZERO,
            1 => STALE,
            _ => Duration::from_millis(state.random(STALE.as_millis() as u64)),
        };
        state.now.saturating_sub(lag).max(floor)
    }

    /// Returns the file that this client finds under a name.
    fn find(&self, path: &Path) -> io::Result<usize> {
        let mut state = self.world.state();
        let mut floors = self.floors.lock().unwrap();
        let floor = floors.names.get(path).copied().unwrap_or_default();
        let view = self.view(&mut state, floor);
        floors.names.insert(path.into(), view);
        let seen = state.names.get(path).and_then(|history| at(history, view)).flatten();
        seen.ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// Like [`Process::find`], for a directory that is then used: the server rejects the handle of
    /// one that is gone.
    fn open(&self, path: &Path) -> io::Result<usize> {
        let file = self.find(path)?;
        if self.world.state().exists(file) { Ok(file) } else { Err(ErrorKind::NotFound.into()) }
    }

    /// Records that this client sees names that it has changed as they are now; its views of others
    /// stay as they were.
    fn changed(&self, paths: &[&Path]) {
        let now = self.world.state().now;
        let names = &mut self.floors.lock().unwrap().names;
        names.extend(paths.iter().map(|path| (path.to_path_buf(), now)));
    }
}

impl System for Process {
    fn now(&self) -> Duration {
        self.world.state().now
    }

    fn pause(&self, time: Duration) -> Option<&'static str> {
        self.sleep(time);
        None
    }

    fn sleep(&self, time: Duration) {
        {
            let mut state = self.world.state();
            let until = state.now + time;
            state.sleepers.insert((until, self.number));
            state.hand_over();
            self.world.changed.notify_all();
        }
        self.await_turn();
    }

    fn staleness(&self, _dir: &Path) -> Duration {
        STALE
    }

    fn holder(&self) -> LeaseOwner {
        LeaseOwner::of_node(&self.host, *self.pid.lock().unwrap())
    }

    fn liveness(&self, owner: &LeaseOwner) -> Liveness {
        match owner.host == self.host {
            false => Liveness::Unknown,
            true if self.world.state().gone.contains(&(owner.host.clone(), owner.pid)) => {
                Liveness::Gone
            }
            true => Liveness::Exists,
        }
    }

    fn create_dir(&self, _dir: &Path) -> io::Result<()> {
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.call();
        let mut state = self.world.state();
        let mut floors = self.floors.lock().unwrap();
        let floor = floors.lists.get(dir).copied().unwrap_or_default();
        let view = self.view(&mut state, floor);
        floors.lists.insert(dir.into(), view);
        let there = state.names.iter().filter(|(path, history)| {
            path.parent() == Some(dir) && at(history, view).flatten().is_some()
        });
        Ok(there.map(|(path, _)| path.file_name().unwrap().to_owned()).collect())
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.call();
        let file = self.find(path)?;
        let mut state = self.world.state();
        let mut floors = self.floors.lock().unwrap();
        let floor = floors.files.get(&file).copied().unwrap_or_default();
        let view = self.view(&mut state, floor);
        // A file is never shown before its first content.
        let view = view.max(state.files[file].first().unwrap().0);
        floors.files.insert(file, view);
        Ok(at(&state.files[file], view).unwrap())
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn LeaseFile>> {
        self.call();
        let file = {
            let mut state = self.world.state();
            if state.file(path).is_some() {
                return Err(ErrorKind::AlreadyExists.into());
            }
            let now = state.now;
            let file = state.files.len();
            state.files.push(vec![(now, Vec::new())]);
            state.name(path, Some(file));
            file
        };
        self.changed(&[path]);
        Ok(Box::new(Handle { world: self.world.clone(), file }))
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call();
        let file = self.find(from)?;
        let linked = {
            let mut state = self.world.state();
            match state.file(to) {
                Some(_) => Err(ErrorKind::AlreadyExists.into()),
                None => {
                    state.name(to, Some(file));
                    Ok(())
                }
            }
        };
        self.changed(&[to]);
        linked
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call();
        let renamed = {
            let mut state = self.world.state();
            let file = state.file(from);
            if file.is_some() {
                state.name(from, None);
                state.name(to, file);
            }
            file.map(drop).ok_or_else(|| ErrorKind::NotFound.into())
        };
        self.changed(&[from, to]);
        renamed
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.call();
        let removed = {
            let mut state = self.world.state();
            let file = state.file(path);
            state.name(path, None);
            file.map(drop).ok_or_else(|| ErrorKind::NotFound.into())
        };
        self.changed(&[path]);
        removed
    }

    fn remove_all(&self, path: &Path) -> io::Result<()> {
        self.remove(path)
    }

    fn is_locked(&self, _path: &Path) -> Option<bool> {
        None
    }

    fn turn(&self, _dir: &Path) -> TurnLock {
        None
    }

    fn has_threads(&self) -> bool {
        false
    }

    fn seen(&self) -> &Seen {
        &self.seen
    }
}

#[derive(Debug)]
struct Handle {
    world: Arc<World>,
    file: usize,
}

impl LeaseFile for Handle {
    fn is_locked(&self) -> bool {
        false
    }

    fn rewrite(&self, text: &[u8]) -> io::Result<()> {
        let mut state = self.world.state();
        let now = state.now;
        // The first content is written before the file gets its name.
        if state.files[self.file].len() == 1 && state.files[self.file][0].1.is_empty() {
            state.files[self.file].clear();
        }
        state.files[self.file].push((now, text.to_vec()));
        Ok(())
    }
}

/// The number of simulations of each kind.
const SEEDS: u64 = 20;

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The actions of the trainers of a simulation.
#[derive(Default)]
struct Log {
    /// Each change to the run, with the number of the acquisition under which it was made.
    acts: Vec<usize>,
    takings: usize,
    /// Acquisitions from holders that were not provably gone, and holders that noticed their loss.
    waited: usize,
    lost: usize,
}

/// Trains for a while whenever it gets the lease; is suspended now and then, and dies now and then.
fn trains(me: &Arc<Process>, log: &Mutex<Log>) {
    while me.now() < seconds(4000) {
        let begun = me.now();
        let leases = Leases::with_system(me.clone(), "/run/.leases".into());
        let Claimed::Taken(lease) = leases.claim("trainer", true).unwrap() else {
            me.sleep(seconds(1 + me.random(60)));
            continue;
        };
        let mine = {
            let mut log = log.lock().unwrap();
            log.takings += 1;
            log.waited += usize::from(me.now() - begun > super::settled_after(STALE, STALE));
            log.takings
        };
        let mut rounds = 1 + me.random(40);
        let ended = loop {
            // Every trainer checks before each change.
            if lease.check().is_err() {
                break false;
            }
            log.lock().unwrap().acts.push(mine);
            let pause =
                if me.random(8) == 0 { seconds(me.random(500)) } else { HEARTBEAT_INTERVAL };
            me.sleep(pause);
            if pause == HEARTBEAT_INTERVAL && lease.write_heartbeat().is_err() {
                break false;
            }
            rounds -= 1;
            if rounds == 0 {
                break true;
            }
        };
        match ended {
            true if me.random(2) == 0 => {
                // The process is gone: nothing is released.
                std::mem::forget(lease);
                me.dies();
                me.sleep(seconds(me.random(30)));
            }
            true => drop(lease),
            false => {
                log.lock().unwrap().lost += 1;
                // The file belongs to another process.
                drop(lease);
            }
        }
    }
}

/// However stale the views of the nodes, only one process at a time changes the run.
#[test]
fn two_trainers_never_both_hold_a_run() {
    let mut waited = 0;
    let mut lost = 0;
    for seed in 1..=SEEDS {
        let world = World::new(seed);
        let log = Mutex::new(Log::default());
        // Two of them share a node, where the kernel proves that a process is gone.
        let trainer = |node| (node, Box::new(|me: &Arc<Process>| trains(me, &log)) as Work<'_>);
        world.run(vec![trainer(0), trainer(1), trainer(2), trainer(0)]);
        let log = log.into_inner().unwrap();
        let mut last = 0;
        for act in &log.acts {
            assert!(*act >= last, "seed {seed}: taking {act} acts after taking {last}");
            last = *act;
        }
        assert!(log.takings >= 2, "seed {seed}");
        waited += log.waited;
        lost += log.lost;
    }
    // Both must happen often for the test to mean something.
    assert!(waited > 50 && lost > 20, "{waited} takings from the silent, {lost} losses");
}

/// Saves checkpoints, and keeps the newest two.
fn saves(me: &Arc<Process>, counts: &Mutex<[usize; 3]>) {
    let leases = || Leases::with_system(me.clone(), "/run/checkpoints/.leases".into());
    let path = |step: u64| PathBuf::from(format!("/run/checkpoints/step-{step:08}"));
    let trash = |step: u64| PathBuf::from(format!("/run/checkpoints/.trash-step-{step:08}"));
    let mut kept: Vec<u64> = Vec::new();
    let mut begun: Vec<u64> = Vec::new();
    for step in 1..=60 {
        me.create(&path(step)).unwrap().rewrite(b"whole").unwrap();
        kept.push(step);
        for step in kept.drain(..kept.len().saturating_sub(2)).collect::<Vec<_>>() {
            leases().move_to_trash(&path(step), &trash(step)).unwrap();
            begun.push(step);
        }
        for step in std::mem::take(&mut begun) {
            match leases().trash_status(&trash(step), &format!("step-{step:08}")).unwrap() {
                TrashStatus::Pending => begun.push(step),
                TrashStatus::Free => {
                    leases().remove_retired(&trash(step)).unwrap();
                    counts.lock().unwrap()[0] += 1;
                }
                TrashStatus::Leased => {
                    me.rename(&trash(step), &path(step)).unwrap();
                    kept.insert(0, step);
                    counts.lock().unwrap()[1] += 1;
                }
            }
        }
        me.sleep(seconds(10 + me.random(40)));
    }
}

/// Reads checkpoints, each for a while.
fn reads(me: &Arc<Process>, counts: &Mutex<[usize; 3]>, seed: u64) {
    while me.now() < seconds(1500) {
        me.sleep(seconds(me.random(20)));
        let names = me.list(Path::new("/run/checkpoints")).unwrap();
        let mut names: Vec<_> = names
            .iter()
            .filter_map(|name| name.to_str())
            .filter(|name| name.starts_with("step-"))
            .collect();
        names.sort_unstable();
        let Some(name) = names.first() else { continue };
        // First the lease, then the checkpoint.
        let leases = Leases::with_system(me.clone(), "/run/checkpoints/.leases".into());
        let Some(lease) = leases.share(name).unwrap() else { continue };
        let Ok(file) = me.open(&Path::new("/run/checkpoints").join(name)) else { continue };
        counts.lock().unwrap()[2] += 1;
        for _ in 0..me.random(50) {
            me.sleep(HEARTBEAT_INTERVAL);
            lease.write_heartbeat().unwrap();
            assert!(
                me.world.state().exists(file),
                "seed {seed}: {name} was removed under a reader"
            );
        }
    }
}

#[test]
fn a_checkpoint_is_never_removed_under_a_reader_of_another_node() {
    let counts = Mutex::new([0; 3]);
    for seed in 1..=2 * SEEDS {
        let world = World::new(seed);
        world.run(vec![
            (0, Box::new(|me: &Arc<Process>| saves(me, &counts))),
            (1, Box::new(|me: &Arc<Process>| reads(me, &counts, seed))),
            (2, Box::new(|me: &Arc<Process>| reads(me, &counts, seed))),
        ]);
    }
    let [removed, held, read] = *counts.lock().unwrap();
    assert!(
        removed > 500 && held > 50 && read > 300,
        "{removed} removed, {held} held, {read} read"
    );
}

/// A reader that died on another node keeps its checkpoint for two minutes by the observer's clock.
#[test]
fn a_dead_reader_of_another_node_holds_nothing_after_a_while() {
    let world = World::new(7);
    world.run(vec![
        (
            0,
            Box::new(|me: &Arc<Process>| {
                let lease = Leases::with_system(me.clone(), "/run/.leases".into())
                    .share("step-00000001")
                    .unwrap()
                    .unwrap();
                for _ in 0..100 {
                    me.sleep(HEARTBEAT_INTERVAL);
                    lease.write_heartbeat().unwrap();
                }
                std::mem::forget(lease);
            }),
        ),
        (
            1,
            Box::new(|me: &Arc<Process>| {
                let leases = || Leases::with_system(me.clone(), "/run/.leases".into());
                me.sleep(seconds(100));
                while leases().holds("step-00000001").unwrap() {
                    me.sleep(seconds(1));
                }
                // Its last heartbeat was at 500 s.
                let ended = me.now();
                assert!((seconds(560)..seconds(700)).contains(&ended), "{ended:?}");
            }),
        ),
    ]);
}

/// If a process took a lease over and died before others had seen it, the next one waits in turn,
/// even if the kernel proves at once that it is gone.
#[test]
fn a_wait_that_was_not_over_is_inherited() {
    for settling in [false, true] {
        let world = World::new(3);
        world.run(vec![(
            0,
            Box::new(|me: &Arc<Process>| {
                let leases = Leases::with_system(me.clone(), "/run/.leases".into());
                let held = LeaseRecord { settling, ..LeaseRecord::now(me.holder(), STALE) };
                me.create(&leases.path("trainer"))
                    .unwrap()
                    .rewrite(held.text().unwrap().as_bytes())
                    .unwrap();
                me.dies();
                let begun = me.now();
                let Claimed::Taken(lease) = leases.claim("trainer", true).unwrap() else {
                    panic!()
                };
                let waited = me.now() - begun >= 2 * STALE;
                assert_eq!(waited, settling);
                lease.check().unwrap();
            }),
        )]);
    }
}
