//! Leases: files by which a process declares that it reads or evaluates a checkpoint, or trains in
//! a run's directory.
//!
//! Each lease is a file that only one process can create. Its holder rewrites it every five seconds
//! with an increasing count (the heartbeat), and keeps it locked where the file system supports
//! locks. A lease is dead when its holder is provably gone, or when an observer has seen the same
//! bytes for long enough *by its own clock*. Clocks of other nodes and file times are never used. A
//! lease that cannot be read counts neither as free nor as dead: it is an error.
//!
//! # Stale views
//!
//! On NFS, names, listings and attributes may be up to a minute old (nfs(5): `acregmax`,
//! `acdirmax`), while creating, linking and renaming happen once, on the server. Each holder
//! records in its lease how old its view may be: `S` is one minute on NFS and on unknown file
//! systems, and zero where clients are coherent. The delays follow from it:
//!
//! - An observer calls a lease dead after 60 s + `S` without a change: then at least 60 s have
//!   passed without a heartbeat.
//! - A process that has taken a lease from a holder that is not provably gone changes nothing for 2
//!   `S` + 5 s, and then checks that the lease is still its own. In the meantime the old holder,
//!   which checks its lease before each change, has seen that it lost it; and if two processes took
//!   it at once, one has seen the other. The lease records that this delay is not over, so that a
//!   process that takes it over in turn waits as well.
//! - A process that found a holder provably gone does not wait: it reads the file that it renamed
//!   away, and restores it if it was not the dead lease.
//! - A checkpoint is removed in two steps, 2 `S` + 5 s apart: it is renamed away, and then removed
//!   if there is no lease on it. A reader creates its lease first and then looks for the
//!   checkpoint: if it still finds the checkpoint, its lease is seen before the removal.
//!
//! On coherent file systems `S` is zero: a dead lease is taken over after 60 s and removals follow
//! at once.

mod fs_clock;
mod guard;
mod owner;
mod record;
#[cfg(test)]
mod simulation;

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use fs_clock::{LeaseFile, System, TURN_FILE, TurnLock};
use owner::{Liveness, host};

use hpctrain_base::error::{Error, Result};

pub use guard::LeaseGuard;
pub use owner::{LeaseOwner, declare_gone};
pub use record::LeaseRecord;

/// The interval at which a holder rewrites its lease, and the time without a rewrite after which a
/// lease is dead on a coherent file system.
#[derive(Debug, Clone, Copy)]
struct Times {
    beat: Duration,
    dead: Duration,
}

const TIMES: Times = Times { beat: Duration::from_secs(5), dead: Duration::from_secs(60) };

/// Safety margin added to the delays for stale views.
const MARGIN: Duration = Duration::from_secs(5);

/// Returns how long to wait after a change on the server until neither of two nodes acts on its
/// view from before; zero on coherent file systems.
fn settled_after(mine: Duration, other: Duration) -> Duration {
    match mine.max(other) {
        Duration::ZERO => Duration::ZERO,
        stale => 2 * stale + MARGIN,
    }
}

/// Prefix of the lease names of evaluators that evaluate every checkpoint.
const QUEUE: &str = "queue-";

/// Prefix of the lease names of iterators over checkpoints; the step up to which they are done
/// follows.
const ITERATOR: &str = "iterator-";

/// The number of leases that this process has shared, by which their names differ.
static SHARED: AtomicU64 = AtomicU64::new(0);

/// Suffix of the names of lease files.
const EXTENSION: &str = ".lease";

/// The leases in one directory.
#[derive(Debug, Clone)]
pub struct Leases {
    root: PathBuf,
    times: Times,
    system: Arc<dyn System>,
    /// The maximal age of this node's view of the directory.
    stale: Duration,
}

/// The outcome of a [claim](Leases::claim).
#[derive(Debug)]
pub enum Claimed {
    /// This process holds the lease.
    Taken(LeaseGuard),
    /// Another process holds it; `None` if the lease does not name its holder.
    HeldBy(Option<LeaseRecord>),
}

/// Whether a directory in the trash may be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrashStatus {
    /// Not yet: a lease on it may not be visible here.
    Pending,
    /// It stays: a process holds a lease on it.
    Leased,
    /// It may be removed.
    Free,
}

/// The state of a lease.
enum LeaseStatus {
    /// The lease does not exist.
    Free,
    /// Its holder is provably gone.
    Dead(Found),
    /// Its holder provably exists.
    Alive(Found),
    /// Unknown until the next heartbeat arrives or the lease times out.
    Silent(Found),
}

/// The bytes of a lease, and the record they encode unless it is being written.
struct Found {
    bytes: Vec<u8>,
    held: Option<LeaseRecord>,
}

impl Found {
    fn who(&self) -> String {
        self.held
            .as_ref()
            .map_or_else(|| "an unknown process".into(), |held| held.holder.to_string())
    }

    /// Returns the maximal age of the holder's view.
    fn stale(&self) -> Duration {
        self.held.as_ref().map_or(fs_clock::STALE, LeaseRecord::stale)
    }
}

impl Leases {
    /// Creates a handle to the leases in the directory `root`, which need not exist.
    pub fn new(root: PathBuf) -> Self {
        Self::with_system(fs_clock::system(), root)
    }

    fn with_system(system: Arc<dyn System>, root: PathBuf) -> Self {
        let stale = system.staleness(&root);
        Self { root, times: TIMES, system, stale }
    }

    /// Takes the lease called `name`, which begins with the name of a checkpoint. Returns `None` if
    /// another process holds it.
    ///
    /// # Errors
    /// Returns an error if the directory or the lease cannot be created, or an existing lease
    /// cannot be read.
    pub fn take(&self, name: &str) -> Result<Option<LeaseGuard>> {
        let path = self.path(name);
        self.system.create_dir(&self.root).map_err(|e| Error::io("create", &self.root, e))?;
        let _turn = self.turn();
        if self.is_held(&path)? {
            return Ok(None);
        }
        self.create(&path, false)
    }

    /// Takes the lease called `name` unless its holder is alive. If the holder's state is unknown
    /// and `waits` is set, this watches for a heartbeat until the lease is dead; without `waits`
    /// the holder counts as alive. A lease taken over after such a wait is returned only once no
    /// other node can act on a stale view of it.
    ///
    /// # Errors
    /// Returns an error if the file system fails, or a signal asks this process to end while it
    /// waits.
    pub fn claim(&self, name: &str, waits: bool) -> Result<Claimed> {
        let path = self.path(name);
        let mut silent: Option<Vec<u8>> = None;
        let mut seen_alive: bool = false;
        let mut refused = Duration::ZERO;
        loop {
            self.system.create_dir(&self.root).map_err(|e| Error::io("create", &self.root, e))?;
            let turn = self.turn();
            // Time in which the previous holder may still believe that it holds the lease.
            let settles = match self.look(&path)? {
                LeaseStatus::Free => Duration::ZERO,
                LeaseStatus::Dead(found) => {
                    self.remove_dead(&path, &found);
                    let was_settling = found.held.as_ref().is_some_and(|held| held.settling);
                    if was_settling {
                        settled_after(self.stale, found.stale())
                    } else {
                        Duration::ZERO
                    }
                }
                LeaseStatus::Silent(found) if silent.as_ref() == Some(&found.bytes) => {
                    self.remove_dead(&path, &found);
                    settled_after(self.stale, found.stale())
                }
                LeaseStatus::Silent(found) if waits && silent.is_none() => {
                    drop(turn);
                    if self.saw_heartbeat(&path, &found)? {
                        return Ok(Claimed::HeldBy(found.held));
                    }
                    silent = Some(found.bytes);
                    continue;
                }
                // A holder that was killed a moment ago may not be gone yet.
                LeaseStatus::Alive(_) if waits && !seen_alive => {
                    drop(turn);
                    self.wait(&path, self.times.beat / 25)?;
                    seen_alive = true;
                    continue;
                }
                LeaseStatus::Alive(found) | LeaseStatus::Silent(found) => {
                    return Ok(Claimed::HeldBy(found.held));
                }
            };
            let created = self.create(&path, !settles.is_zero())?;
            drop(turn);
            match created {
                Some(lease) => {
                    return self.wait_until_settled(
                        &path,
                        lease.with_cleanup(self.clone()),
                        settles,
                    );
                }
                // Another process was faster, or the last holder has just removed the directory; a
                // stale view may hide the new holder for a while.
                None if refused > self.stale + MARGIN => return Ok(Claimed::HeldBy(None)),
                None => {
                    self.wait(&path, self.times.beat / 25)?;
                    refused += self.times.beat / 25;
                }
            }
        }
    }

    /// Waits until the previous holder, and others that took the lease at the same time, have seen
    /// the new holder.
    fn wait_until_settled(
        &self,
        path: &Path,
        lease: LeaseGuard,
        settles: Duration,
    ) -> Result<Claimed> {
        if settles.is_zero() {
            return Ok(Claimed::Taken(lease));
        }
        let span = settles.as_secs();
        log::warn!(
            "{}: taken over; waiting {span} s until all nodes see the new holder",
            path.display()
        );
        let until = self.system.now() + settles;
        while self.system.now() < until {
            self.wait(path, self.times.beat.min(until.saturating_sub(self.system.now())))?;
            if lease.write_heartbeat().is_err() {
                return Ok(Claimed::HeldBy(None));
            }
        }
        match lease.mark_settled() {
            Ok(()) => Ok(Claimed::Taken(lease)),
            Err(e) => {
                log::warn!("{}", e.message());
                Ok(Claimed::HeldBy(None))
            }
        }
    }

    /// Pauses in the wait for a lease.
    ///
    /// # Errors
    /// Returns an error if a signal asked this process to end.
    fn wait(&self, path: &Path, time: Duration) -> Result<()> {
        let Some(signal) = self.system.pause(time) else { return Ok(()) };
        let why = format!("{}: {signal} came during the wait for this lease", path.display());
        Err(Error::interrupted(why).hint("nothing was changed: start again, with --resume auto"))
    }

    /// Watches a lease whose holder's state is unknown. Returns true as soon as the lease is
    /// rewritten, and false once it is dead.
    fn saw_heartbeat(&self, path: &Path, found: &Found) -> Result<bool> {
        let Times { beat, .. } = self.times;
        let begun = self.system.now();
        let mut warned = false;
        while !self.is_old(path, &found.bytes) {
            self.wait(path, beat / 20)?;
            match self.look(path)? {
                LeaseStatus::Free | LeaseStatus::Dead(_) => return Ok(false),
                LeaseStatus::Silent(now) if now.bytes == found.bytes => {}
                LeaseStatus::Alive(_) | LeaseStatus::Silent(_) => return Ok(true),
            }
            if !warned && self.system.now() - begun > beat / 5 {
                let left = self.dead().as_secs_f64().ceil();
                log::warn!(
                    "{}: waiting up to {left} s for a heartbeat of {}",
                    path.display(),
                    found.who()
                );
                warned = true;
            }
        }
        Ok(false)
    }

    /// Returns the time without a change after which a lease is dead.
    fn dead(&self) -> Duration {
        self.times.dead + self.stale
    }

    /// Returns true if this process has seen the same bytes under a path for long enough that the
    /// lease is dead. Starts observing the path if it was not observed.
    fn is_old(&self, path: &Path, bytes: &[u8]) -> bool {
        self.unchanged(path, bytes) >= self.dead()
    }

    /// Returns how long this process has seen the same bytes under a path.
    fn unchanged(&self, path: &Path, bytes: &[u8]) -> Duration {
        let now = self.system.now();
        let mut seen = self.system.seen().lock().unwrap_or_else(PoisonError::into_inner);
        match seen.get(path) {
            Some((before, since)) if before == bytes => now - *since,
            _ => {
                seen.insert(path.to_path_buf(), (bytes.to_vec(), now));
                Duration::ZERO
            }
        }
    }

    fn forget(&self, path: &Path) {
        self.system.seen().lock().unwrap_or_else(PoisonError::into_inner).remove(path);
    }

    /// Takes a shared lease on a checkpoint. A process may hold several on the same checkpoint.
    ///
    /// # Errors
    /// Returns an error if the lease cannot be created.
    pub fn share(&self, checkpoint: &str) -> Result<Option<LeaseGuard>> {
        self.take(&format!("{checkpoint}.{}", self.unique()))
    }

    /// Returns a name that no other lease of this or another process has.
    fn unique(&self) -> String {
        let LeaseOwner { host, pid, .. } = self.system.holder();
        format!("{host}-{pid}-{}", SHARED.fetch_add(1, Ordering::Relaxed))
    }

    /// Declares that this process goes through every checkpoint and has done those up to `step`:
    /// none after it is removed.
    ///
    /// # Errors
    /// Returns an error if the lease cannot be created.
    pub fn watch_after(&self, step: u64) -> Result<Option<LeaseGuard>> {
        self.take(&format!("{ITERATOR}{step}-{}", self.unique()))
    }

    /// Returns the step after which no checkpoint may be removed because of
    /// [`Leases::watch_after`], if there is one.
    ///
    /// # Errors
    /// Returns an error if a lease cannot be read: its holder is then unknown.
    pub fn watched_after(&self) -> Result<Option<u64>> {
        let names = self.live(|name| name.starts_with(ITERATOR))?;
        let step = |name: &String| name.strip_prefix(ITERATOR)?.split('-').next()?.parse().ok();
        // A name that cannot be read protects all.
        Ok(names.iter().map(|name| step(name).unwrap_or(0)).min())
    }

    /// Declares that this process evaluates every checkpoint: none is removed before it was
    /// evaluated.
    ///
    /// # Errors
    /// Returns an error if the lease cannot be created.
    pub fn watch_queue(&self) -> Result<Option<LeaseGuard>> {
        self.take(&format!("{QUEUE}{}-{}", host(), std::process::id()))
    }

    /// Returns true if a process evaluates every checkpoint.
    ///
    /// # Errors
    /// Returns an error if a lease cannot be read: its holder is then unknown.
    pub fn queue_is_watched(&self) -> Result<bool> {
        self.any(|name| name.starts_with(QUEUE))
    }

    /// Returns true if a process holds a lease on the checkpoint called `name`. Removes dead leases
    /// on it.
    ///
    /// # Errors
    /// Returns an error if a lease cannot be read: its holder is then unknown.
    pub fn holds(&self, name: &str) -> Result<bool> {
        self.any(|lease| lease.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')))
    }

    /// Returns true if, as far as is visible here, a process holds the lease called `name`. A dead
    /// lease is left for the processes that claim it.
    ///
    /// # Errors
    /// Returns an error if the lease cannot be read.
    pub fn is_live(&self, name: &str) -> Result<bool> {
        let path = self.path(name);
        Ok(match self.look(&path)? {
            LeaseStatus::Free | LeaseStatus::Dead(_) => false,
            LeaseStatus::Alive(_) => true,
            LeaseStatus::Silent(found) => !self.is_old(&path, &found.bytes),
        })
    }

    /// Returns whether a directory in the trash may be removed, on which leases may exist under the
    /// checkpoint's name `name`.
    ///
    /// # Errors
    /// Returns an error if a lease cannot be read: its holder is then unknown.
    pub(super) fn trash_status(&self, trash: &Path, name: &str) -> Result<TrashStatus> {
        Ok(match self.is_settled(trash) {
            false => TrashStatus::Pending,
            true if self.holds(name)? => TrashStatus::Leased,
            true => TrashStatus::Free,
        })
    }

    /// Returns the time that a directory spends in the trash.
    pub(super) fn trash_delay(&self) -> Duration {
        settled_after(self.stale, self.stale)
    }

    /// Renames a directory into the trash, to be removed later. Leases may exist on it under the
    /// name of a checkpoint.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be renamed.
    pub(super) fn move_to_trash(&self, path: &Path, trash: &Path) -> io::Result<()> {
        self.system.rename(path, trash)?;
        // The time counts from here, even if this name was observed before.
        self.forget(trash);
        self.unchanged(trash, RETIRED);
        Ok(())
    }

    /// Returns true if a directory has been in the trash long enough that every lease on it is
    /// visible, including those of readers that still found it under its name. For one that another
    /// process moved there, the time counts from now.
    fn is_settled(&self, trash: &Path) -> bool {
        self.unchanged(trash, RETIRED) >= self.trash_delay()
    }

    /// Removes a directory that was moved to the trash.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be removed.
    pub(super) fn remove_retired(&self, trash: &Path) -> io::Result<()> {
        self.forget(trash);
        self.system.remove_all(trash)
    }

    fn any(&self, wanted: impl Fn(&str) -> bool) -> Result<bool> {
        self.live(wanted).map(|names| !names.is_empty())
    }

    /// Returns the names of files of the wanted leases that are held. Removes dead ones among them.
    fn live(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let names = match self.system.list(&self.root) {
            Ok(names) => names,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("list the leases in", &self.root, e)),
        };
        let mut held = Vec::new();
        for name in names {
            if let Some(name) =
                name.to_str().filter(|name| name.ends_with(EXTENSION) && wanted(name))
                && self.is_held(&self.root.join(name))?
            {
                held.push(name.to_owned());
            }
        }
        Ok(held)
    }

    /// Returns the path of the lease called `name`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(format!("{name}{EXTENSION}"))
    }

    fn turn(&self) -> TurnLock {
        self.system.turn(&self.root)
    }

    /// Removes the directory if no lease is held in it and none is being taken.
    fn clear(&self) {
        let turn = self.turn();
        let Ok(names) = self.system.list(&self.root) else { return };
        if !names.iter().all(|name| name == TURN_FILE) {
            return;
        }
        // It may not exist.
        let _ = self.system.remove(&self.root.join(TURN_FILE));
        // Not recursively: a stale listing may hide a new lease.
        let _ = std::fs::remove_dir(&self.root);
        drop(turn);
    }

    /// Reads the state of the lease at `path`.
    fn look(&self, path: &Path) -> Result<LeaseStatus> {
        let bytes = match self.system.read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(LeaseStatus::Free),
            Err(e) => return Err(Error::io("read the lease", path, e)),
        };
        let held: Option<LeaseRecord> = serde_json::from_slice(&bytes).ok();
        let found = Found { bytes, held };
        let Some(held) = &found.held else { return Ok(LeaseStatus::Silent(found)) };
        Ok(match self.system.liveness(&held.holder) {
            Liveness::Gone => LeaseStatus::Dead(found),
            Liveness::Exiting => LeaseStatus::Silent(found),
            Liveness::Exists => LeaseStatus::Alive(found),
            Liveness::Unknown => match self.is_locked(path, held) {
                Some(true) => LeaseStatus::Alive(found),
                Some(false) => LeaseStatus::Dead(found),
                None => LeaseStatus::Silent(found),
            },
        })
    }

    /// Returns whether the holder of the lease at `path` has locked it, which also reveals a
    /// process in another container; `None` if that is unknown.
    fn is_locked(&self, path: &Path, held: &LeaseRecord) -> Option<bool> {
        let is_known = held.locked && held.holder.is_of_this_boot();
        if is_known { self.system.is_locked(path) } else { None }
    }

    /// Returns true if there is a lease at `path` whose holder lives; removes a dead one.
    fn is_held(&self, path: &Path) -> Result<bool> {
        let found = match self.look(path)? {
            LeaseStatus::Free => return Ok(false),
            LeaseStatus::Alive(_) => return Ok(true),
            LeaseStatus::Silent(found) if !self.is_old(path, &found.bytes) => return Ok(true),
            LeaseStatus::Dead(found) | LeaseStatus::Silent(found) => found,
        };
        self.remove_dead(path, &found);
        Ok(false)
    }

    /// Removes a dead lease, unless another process did so and has taken a new one in the meantime.
    fn remove_dead(&self, path: &Path, dead: &Found) {
        log::warn!("{}: lease of {}, which is gone: removed", path.display(), dead.who());
        let renamed = path.with_extension(format!("dead-{}", self.system.holder().nonce()));
        self.forget(path);
        if self.system.rename(path, &renamed).is_err() {
            return;
        }
        if self.system.read(&renamed).is_ok_and(|bytes| bytes != dead.bytes) {
            // Two processes can have found the same lease dead, and one of them has taken a new
            // one. If a third takes it at this moment, the holder notices before it changes
            // anything.
            let _ = self.system.link(&renamed, path);
        }
        let _ = self.system.remove(&renamed);
    }

    /// Creates the lease at `path`. Returns `None` if one exists, or if the directory was removed
    /// in the meantime.
    fn create(&self, path: &Path, settling: bool) -> Result<Option<LeaseGuard>> {
        let mut held =
            LeaseRecord { settling, ..LeaseRecord::now(self.system.holder(), self.stale) };
        let temporary = path.with_extension(format!("{}.tmp", held.token));
        let written = match self.write(&temporary, &mut held) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            written => written,
        };
        let created = written.and_then(|open| {
            // The link publishes the complete lease: a holder that is killed now does not leave a
            // lease without a holder.
            match self.system.link(&temporary, path) {
                Ok(()) => Ok(Some(open)),
                // NFS may report an error for a repeated request whose first attempt succeeded.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                    Ok(self.is_mine(path, &held).then_some(open))
                }
                // Some file systems have no hard links.
                Err(_) => match self.write(path, &mut held) {
                    Ok(open) => Ok(Some(open)),
                    Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(None),
                    Err(e) => Err(e),
                },
            }
        });
        let removed = self.system.remove(&temporary);
        let open = created
            .and_then(|open| removed.map(|()| open))
            .map_err(|e| Error::io("create", path, e))?;
        open.map(|open| LeaseGuard::hold(path.to_path_buf(), held, open, self)).transpose()
    }

    fn is_mine(&self, path: &Path, held: &LeaseRecord) -> bool {
        let there = self
            .system
            .read(path)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<LeaseRecord>(&bytes).ok());
        there.is_some_and(|there| there.token == held.token)
    }

    /// Writes a new lease and locks it if the file system supports locks.
    fn write(&self, path: &Path, held: &mut LeaseRecord) -> io::Result<Box<dyn LeaseFile>> {
        let open = self.system.create(path)?;
        held.locked = open.is_locked();
        open.rewrite(held.text()?.as_bytes())?;
        Ok(open)
    }
}

/// Marks a directory in the trash among the observed contents.
const RETIRED: &[u8] = b"retired";

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::time::{Instant, SystemTime};

    use super::owner::tests::{far, gone, in_other_container};
    use super::*;

    fn leases() -> (tempfile::TempDir, Leases) {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::new(dir.path().join(".leases"));
        (dir, leases)
    }

    fn now() -> LeaseRecord {
        LeaseRecord::now(LeaseOwner::here(), Duration::ZERO)
    }

    /// Writes a lease of another holder.
    fn put(leases: &Leases, name: &str, holder: LeaseOwner) -> PathBuf {
        fs::create_dir_all(&leases.root).unwrap();
        let path = leases.path(name);
        fs::write(&path, LeaseRecord { holder, ..now() }.text().unwrap()).unwrap();
        path
    }

    #[test]
    fn a_pipe_in_the_place_of_a_lease_is_told() {
        let (_dir, leases) = leases();
        let path = put(&leases, "step-1", far());
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        // Opening a pipe would block until its other end is opened.
        let error = leases.is_held(&path).unwrap_err().to_string();
        assert!(error.contains("it is a pipe, a socket or a device"), "{error}");
    }

    /// Sets the modification time of a file back by `age`.
    fn grow_old(path: &Path, age: Duration) {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    #[track_caller]
    fn taken(claimed: Result<Claimed>) -> LeaseGuard {
        match claimed.unwrap() {
            Claimed::Taken(lease) => lease,
            Claimed::HeldBy(other) => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn refused(claimed: Result<Claimed>) -> Option<LeaseRecord> {
        match claimed.unwrap() {
            Claimed::Taken(_) => panic!("taken"),
            Claimed::HeldBy(other) => other,
        }
    }

    #[test]
    fn a_lease_is_held_by_one_until_it_is_dropped() {
        let (_dir, leases) = leases();
        assert!(!leases.holds("step-00000001").unwrap());
        let lease = leases.take("step-00000001.evaluate").unwrap().unwrap();
        assert!(leases.take("step-00000001.evaluate").unwrap().is_none());
        assert!(leases.holds("step-00000001").unwrap() && !leases.holds("step-00000010").unwrap());
        assert!(!leases.queue_is_watched().unwrap());
        let other = leases.share("step-00000001").unwrap().unwrap();
        lease.check().unwrap();
        drop(lease);
        assert!(leases.holds("step-00000001").unwrap());
        drop(other);
        assert!(!leases.holds("step-00000001").unwrap());
        // A process may read a checkpoint in several places.
        let both = [1, 2].map(|_| leases.share("step-00000001").unwrap().unwrap());
        let [one, _other] = both;
        drop(one);
        assert!(leases.holds("step-00000001").unwrap());
        drop(_other);
        assert_eq!(leases.watched_after().unwrap(), None);
        let iterators = [12, 7].map(|step| leases.watch_after(step).unwrap().unwrap());
        assert_eq!(leases.watched_after().unwrap(), Some(7));
        let [first, second] = iterators;
        drop(second);
        assert_eq!(leases.watched_after().unwrap(), Some(12));
        drop(first);
        assert!(leases.watched_after().unwrap().is_none() && !leases.queue_is_watched().unwrap());
        let queue = leases.watch_queue().unwrap();
        assert!(leases.queue_is_watched().unwrap());
        drop(queue);
        assert!(!leases.queue_is_watched().unwrap());
        leases.clear();
        assert!(!leases.root.exists());
    }

    #[test]
    fn the_dead_hold_nothing() {
        let (_dir, leases) = leases();
        put(&leases, "step-00000001.evaluate", gone());
        assert!(!leases.holds("step-00000001").unwrap());
        assert!(leases.take("step-00000001.evaluate").unwrap().is_some());
        // A process of another node counts as alive until its lease has been unchanged for a while
        // by the local clock, however old the file looks.
        let leases = Leases { times: SHORT, ..leases };
        let path = put(&leases, "step-00000002.evaluate", far());
        grow_old(&path, Duration::from_secs(3600));
        assert!(leases.holds("step-00000002").unwrap());
        assert!(leases.take("step-00000002.evaluate").unwrap().is_none());
        assert!(leases.is_live("step-00000002.evaluate").unwrap());
        std::thread::sleep(SHORT.dead);
        assert!(!leases.is_live("step-00000002.evaluate").unwrap() && path.exists());
        let lease = leases.take("step-00000002.evaluate").unwrap().unwrap();
        // Another process takes it because this one was suspended: this one must not remove it.
        put(&leases, "step-00000002.evaluate", far());
        drop(lease);
        assert!(leases.holds("step-00000002").unwrap());
    }

    /// Root may read everything, but neither a directory as a file nor a link to itself.
    #[test]
    fn what_cannot_be_read_is_not_free() {
        let (_dir, leases) = leases();
        fs::create_dir_all(&leases.root).unwrap();
        let path = leases.path("step-00000001.evaluate");
        std::os::unix::fs::symlink(&path, &path).unwrap();
        for error in [
            leases.holds("step-00000001").map(drop),
            leases.take("step-00000001.evaluate").map(drop),
            leases.claim("step-00000001.evaluate", false).map(drop),
        ] {
            assert!(error.unwrap_err().to_string().contains("cannot read the lease"));
        }
        assert!(path.is_symlink());
        let looped = leases.root.join("loop");
        std::os::unix::fs::symlink(&looped, &looped).unwrap();
        assert!(Leases::new(looped).queue_is_watched().is_err());
    }

    #[test]
    fn a_claim_names_the_holder_and_takes_over_from_the_dead() {
        let (_dir, leases) = leases();
        let lease = taken(leases.claim("trainer", true));
        // The same process cannot hold it twice.
        let other = refused(leases.claim("trainer", true)).unwrap();
        assert_eq!(other.holder, LeaseOwner::here());
        assert!(
            other.to_string().starts_with(&format!("process {} on ", std::process::id())),
            "{other}"
        );
        assert!(other.to_string().ends_with(", since 0s"), "{other}");
        drop(lease);
        // Nothing is left behind.
        assert!(!leases.root.exists());
        put(&leases, "trainer", gone());
        drop(taken(leases.claim("trainer", false)));
        // A lease torn by a kill names no holder.
        fs::create_dir(&leases.root).unwrap();
        fs::write(leases.path("trainer"), "{\"ho").unwrap();
        assert!(refused(leases.claim("trainer", false)).is_none());
    }

    const SHORT: Times =
        Times { beat: Duration::from_millis(40), dead: Duration::from_millis(400) };

    /// Returns leases with short times, one of which a process on another node holds.
    fn watched() -> (tempfile::TempDir, Leases, PathBuf) {
        let (dir, leases) = leases();
        let leases = Leases { times: SHORT, stale: Duration::ZERO, ..leases };
        let path = put(&leases, "trainer", far());
        (dir, leases, path)
    }

    #[test]
    fn a_claim_waits_for_a_sign_of_life() {
        let (_dir, leases, path) = watched();
        assert!(refused(leases.claim("trainer", false)).is_some());
        // No heartbeat comes, whatever the file's time.
        let begun = Instant::now();
        let lease = taken(leases.claim("trainer", true));
        assert!(begun.elapsed() >= leases.times.dead * 3 / 4);
        drop(lease);

        // A heartbeat comes, although the file's time is long ago.
        put(&leases, "trainer", far());
        grow_old(&path, Duration::from_secs(3600));
        let beating = std::thread::spawn({
            let leases = leases.clone();
            let path = path.clone();
            move || {
                std::thread::sleep(leases.times.beat / 2);
                fs::write(path, LeaseRecord { holder: far(), beats: 1, ..now() }.text().unwrap())
                    .unwrap();
            }
        });
        assert_eq!(refused(leases.claim("trainer", true)).unwrap().holder, far());
        beating.join().unwrap();
    }

    /// From another container of this node the process is not visible, but its lock is.
    #[test]
    fn a_lock_tells_of_other_containers() {
        let (_dir, leases) = leases();
        fs::create_dir_all(&leases.root).unwrap();
        let path = leases.path("trainer");
        let mut held = LeaseRecord { holder: in_other_container(), ..now() };
        let file = leases.write(&path, &mut held).unwrap();
        if !held.locked {
            println!("skipped: no file locks here");
            return;
        }
        grow_old(&path, Duration::from_secs(3600));
        assert_eq!(refused(leases.claim("trainer", true)), Some(held));
        assert!(leases.is_held(&path).unwrap());
        drop(file);
        // A program that another test starts at this moment keeps the file open until it calls
        // exec.
        while let Claimed::HeldBy(other) = leases.claim("trainer", false).unwrap() {
            assert!(other.is_some());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_holder_learns_that_its_lease_was_taken() {
        let (_dir, leases, path) = watched();
        fs::remove_file(&path).unwrap();
        let lease = taken(leases.claim("trainer", true));
        lease.check().unwrap();
        lease.check_often().unwrap();
        // It sends heartbeats.
        let first = fs::read(&path).unwrap();
        while fs::read(&path).unwrap() == first {
            std::thread::yield_now();
        }
        lease.check().unwrap();
        // Another process takes it for dead.
        fs::remove_file(&path).unwrap();
        put(&leases, "trainer", far());
        let taken_by = fs::read(&path).unwrap();
        let error = lease.check().unwrap_err();
        assert!(
            error.message().contains("was taken by process")
                && error.message().contains("on elsewhere"),
            "{error}"
        );
        assert_eq!(lease.check_often().unwrap_err(), error);
        drop(lease);
        assert_eq!(fs::read(&path).unwrap(), taken_by);
    }

    #[test]
    fn a_lease_is_taken_by_one_of_many() {
        let (_dir, leases) = leases();
        put(&leases, "trainer", gone());
        let claim = || leases.claim("trainer", true).unwrap();
        let claimed: Vec<Claimed> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(claim)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let taken: Vec<&LeaseGuard> = claimed
            .iter()
            .filter_map(|one| if let Claimed::Taken(lease) = one { Some(lease) } else { None })
            .collect();
        assert_eq!(taken.len(), 1, "{claimed:?}");
        taken[0].check().unwrap();
    }
}
