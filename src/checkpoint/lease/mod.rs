//! Leases: files that say that somebody needs a checkpoint, is evaluating it, or trains in a run's
//! directory.
//!
//! A lease is a file of its own that only one process can create. Its holder rewrites it every five
//! seconds, with a count, and keeps it locked where the file system has locks. A lease is dead when
//! its holder is provably gone, or when an observer has looked at it for a while *by its own clock*
//! and found the same bytes. Clocks of nodes and times of files say nothing here. A lease that
//! cannot be read is neither free nor dead: that is an error.
//!
//! # Views that are old
//!
//! On NFS, names, listings and attributes may be as they were up to a minute ago (nfs(5):
//! `acregmax`, `acdirmax`), while creating, linking and renaming happen at the server, once. Each
//! holder notes in its lease how old its view may be: `S`, a minute on NFS and on file systems that
//! are not known, nothing where clients are coherent. From that follow the delays:
//!
//! - An observer calls a lease dead after 60 s + `S` without a change: then at least 60 s have
//!   passed without a beat.
//! - A process that has taken a lease from a holder that is not provably gone changes nothing for 2
//!   `S` + 5 s, and looks then whether the lease is still its own. Meanwhile the old holder, which
//!   looks at its lease before each change, has seen that it lost it; and of two that took it at
//!   once, one has seen the other. A lease says that this delay is not over, so that the next one
//!   waits in its place should it be taken in turn.
//! - A process that found a holder provably gone waits for nothing: it reads what it renamed away,
//!   and restores what was not the dead lease.
//! - A checkpoint is removed in two steps, 2 `S` + 5 s apart: it is renamed away, and removed if
//!   there is no lease on it then. A reader makes its lease first and looks for the checkpoint
//!   then: if it still sees it under its name, its lease is seen before the removal.
//!
//! On coherent file systems `S` is zero, a dead lease is taken over after 60 s and removals follow
//! at once.

mod fs_clock;
mod guard;
mod owner;
mod record;
#[cfg(test)]
mod simulation;

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use fs_clock::{Open, System, TURN_FILE, Turn};
use owner::{Liveness, host};

use hpctrain_base::error::{Error, Result};

pub use guard::LeaseGuard;
pub use owner::LeaseOwner;
pub use record::LeaseRecord;

/// Interval at which a holder rewrites its lease, and time without a rewrite after which a lease is
/// dead where views are not old.
#[derive(Debug, Clone, Copy)]
struct Times {
    beat: Duration,
    dead: Duration,
}

const TIMES: Times = Times { beat: Duration::from_secs(5), dead: Duration::from_secs(60) };

/// Time beyond what old views need.
const MARGIN: Duration = Duration::from_secs(5);

/// Time after a change at the server in which neither of two nodes acts on its view of before: none
/// where views are not old.
fn settled_after(mine: Duration, other: Duration) -> Duration {
    match mine.max(other) {
        Duration::ZERO => Duration::ZERO,
        stale => 2 * stale + MARGIN,
    }
}

/// Prefix of the name of the lease of an evaluator that evaluates every checkpoint.
const QUEUE: &str = "queue-";

/// Suffix of the names of lease files.
const EXTENSION: &str = ".lease";

/// File that earlier versions wrote to learn the file system's time.
const OLD_CLOCK: &str = ".clock";

/// The leases in one directory.
#[derive(Debug, Clone)]
pub struct Leases {
    root: PathBuf,
    times: Times,
    system: Arc<dyn System>,
    /// How old this node's view of the directory may be.
    stale: Duration,
}

/// The outcome of a [claim](Leases::claim).
#[derive(Debug)]
pub enum Claimed {
    /// This process holds the lease.
    Taken(LeaseGuard),
    /// Another one does; none if the lease does not tell which.
    By(Option<LeaseRecord>),
}

/// The fate of a directory in the trash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrashStatus {
    /// Nothing yet: a lease on it may not show.
    Waits,
    /// It stays: somebody holds it.
    Held,
    /// It may be removed.
    Free,
}

/// The state of a lease.
enum LeaseStatus {
    /// There is none.
    Free,
    /// Its holder is provably gone.
    Dead(Found),
    /// Its holder provably exists.
    Alive(Found),
    /// Nobody can tell but by waiting: for its next beat, or for its end.
    Silent(Found),
}

/// The bytes of a lease, and their meaning unless they are being written.
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

    /// How old the holder's view may be.
    fn stale(&self) -> Duration {
        self.held.as_ref().map_or(fs_clock::STALE, LeaseRecord::stale)
    }
}

impl Leases {
    /// The leases in the directory `root`, which need not exist.
    pub fn new(root: PathBuf) -> Self {
        Self::by(fs_clock::system(), root)
    }

    fn by(system: Arc<dyn System>, root: PathBuf) -> Self {
        let stale = system.staleness(&root);
        Self { root, times: TIMES, system, stale }
    }

    /// Takes the lease called `name`, which begins with the name of a checkpoint; none if somebody
    /// holds it.
    ///
    /// # Errors
    /// The file system refused.
    pub fn take(&self, name: &str) -> Result<Option<LeaseGuard>> {
        let path = self.path(name);
        self.system.create_dir(&self.root).map_err(|e| Error::io("create", &self.root, e))?;
        let _turn = self.turn();
        if self.is_held(&path)? {
            return Ok(None);
        }
        self.create(&path, false)
    }

    /// Takes the lease called `name` from all but a live holder. Where only time can tell, and
    /// `waits`, this watches for the holder's next beat until the lease is dead; else the holder
    /// counts as alive. A lease that was taken over so is handed out only when nobody can act on an
    /// old view any more.
    ///
    /// # Errors
    /// Returns an error if the file system refused, or a signal asked this process to end while it
    /// waited.
    pub fn claim(&self, name: &str, waits: bool) -> Result<Claimed> {
        let path = self.path(name);
        let mut silent: Option<Vec<u8>> = None;
        let mut seen_alive: bool = false;
        let mut refused = Duration::ZERO;
        loop {
            self.system.create_dir(&self.root).map_err(|e| Error::io("create", &self.root, e))?;
            let turn = self.turn();
            // Time in which the holder before may take the lease for its own.
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
                        return Ok(Claimed::By(found.held));
                    }
                    silent = Some(found.bytes);
                    continue;
                }
                // One that was killed a moment ago may not know it yet.
                LeaseStatus::Alive(_) if waits && !seen_alive => {
                    drop(turn);
                    self.wait(&path, self.times.beat / 25)?;
                    seen_alive = true;
                    continue;
                }
                LeaseStatus::Alive(found) | LeaseStatus::Silent(found) => {
                    return Ok(Claimed::By(found.held));
                }
            };
            let created = self.create(&path, !settles.is_zero())?;
            drop(turn);
            match created {
                Some(lease) => {
                    return self.wait_until_settled(&path, lease.clearing(self.clone()), settles);
                }
                // Another process was faster, or the last holder has removed the directory in this
                // moment; an old view may hide the other for a while.
                None if refused > self.stale + MARGIN => return Ok(Claimed::By(None)),
                None => {
                    self.wait(&path, self.times.beat / 25)?;
                    refused += self.times.beat / 25;
                }
            }
        }
    }

    /// Waits until the holder before, and others that took the lease at the same time, have seen
    /// whose it is.
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
            "{}: taken over; waiting {span} s until other nodes cannot take it for theirs",
            path.display()
        );
        let until = self.system.now() + settles;
        while self.system.now() < until {
            self.wait(path, self.times.beat.min(until.saturating_sub(self.system.now())))?;
            if lease.beat_here().is_err() {
                return Ok(Claimed::By(None));
            }
        }
        match lease.settled() {
            Ok(()) => Ok(Claimed::Taken(lease)),
            Err(e) => {
                log::warn!("{}", e.message());
                Ok(Claimed::By(None))
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

    /// Watches a lease that was found silent until it is dead; true as soon as somebody rewrites
    /// it.
    fn saw_heartbeat(&self, path: &Path, found: &Found) -> Result<bool> {
        let Times { beat, .. } = self.times;
        let begun = self.system.now();
        let mut told = false;
        while !self.is_old(path, &found.bytes) {
            self.wait(path, beat / 20)?;
            match self.look(path)? {
                LeaseStatus::Free | LeaseStatus::Dead(_) => return Ok(false),
                LeaseStatus::Silent(now) if now.bytes == found.bytes => {}
                LeaseStatus::Alive(_) | LeaseStatus::Silent(_) => return Ok(true),
            }
            if !told && self.system.now() - begun > beat / 5 {
                let left = self.dead().as_secs_f64().ceil();
                log::warn!(
                    "{}: waiting up to {left} s for a sign of life of {}",
                    path.display(),
                    found.who()
                );
                told = true;
            }
        }
        Ok(false)
    }

    /// Time without a change after which a lease is dead.
    fn dead(&self) -> Duration {
        self.times.dead + self.stale
    }

    /// Whether this process has found the same bytes under a path for so long that a lease is dead.
    /// It looks from now on.
    fn is_old(&self, path: &Path, bytes: &[u8]) -> bool {
        self.unchanged(path, bytes) >= self.dead()
    }

    /// Time for which this process has found the same bytes under a path, when it looked.
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

    /// Takes a lease on a checkpoint that others may share.
    ///
    /// # Errors
    /// The file system refused.
    pub fn share(&self, checkpoint: &str) -> Result<Option<LeaseGuard>> {
        self.take(&format!(
            "{checkpoint}.{}-{}",
            self.system.holder().host,
            self.system.holder().pid
        ))
    }

    /// Says that somebody evaluates every checkpoint: none is removed before.
    ///
    /// # Errors
    /// The file system refused.
    pub fn watch_queue(&self) -> Result<Option<LeaseGuard>> {
        self.take(&format!("{QUEUE}{}-{}", host(), std::process::id()))
    }

    /// Whether somebody evaluates every checkpoint.
    ///
    /// # Errors
    /// A lease cannot be read: its holder is not known.
    pub fn queue_is_watched(&self) -> Result<bool> {
        self.any(|name| name.starts_with(QUEUE))
    }

    /// Whether anybody holds the checkpoint called `name`. Removes dead leases on it.
    ///
    /// # Errors
    /// A lease cannot be read: its holder is not known.
    pub fn holds(&self, name: &str) -> Result<bool> {
        self.any(|lease| lease.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')))
    }

    /// Whether somebody holds the lease called `name`, as far as it shows; a dead one stays for
    /// those who claim it.
    ///
    /// # Errors
    /// The lease cannot be read.
    pub fn is_live(&self, name: &str) -> Result<bool> {
        let path = self.path(name);
        Ok(match self.look(&path)? {
            LeaseStatus::Free | LeaseStatus::Dead(_) => false,
            LeaseStatus::Alive(_) => true,
            LeaseStatus::Silent(found) => !self.is_old(&path, &found.bytes),
        })
    }

    /// The fate of a directory in the trash that somebody may hold by the name of the checkpoint
    /// `name`.
    ///
    /// # Errors
    /// A lease cannot be read: its holder is not known.
    pub(super) fn trash_status(&self, trash: &Path, name: &str) -> Result<TrashStatus> {
        Ok(match self.is_settled(trash) {
            false => TrashStatus::Waits,
            true if self.holds(name)? => TrashStatus::Held,
            true => TrashStatus::Free,
        })
    }

    /// Time that a directory spends in the trash.
    pub(super) fn settles_after(&self) -> Duration {
        settled_after(self.stale, self.stale)
    }

    /// Renames a directory that somebody may hold by the name of a checkpoint out of the way, to be
    /// removed later.
    ///
    /// # Errors
    /// The file system refused.
    pub(super) fn move_to_trash(&self, path: &Path, trash: &Path) -> io::Result<()> {
        self.system.rename(path, trash)?;
        // It counts from here, even if something was seen under this name before.
        self.forget(trash);
        self.unchanged(trash, RETIRED);
        Ok(())
    }

    /// Whether a directory was retired for so long that every lease on it shows, of readers that
    /// still found it under its name. One that another process retired counts from now.
    fn is_settled(&self, trash: &Path) -> bool {
        self.unchanged(trash, RETIRED) >= self.settles_after()
    }

    /// Removes a directory that was retired.
    ///
    /// # Errors
    /// The file system refused.
    pub(super) fn remove_retired(&self, trash: &Path) -> io::Result<()> {
        self.forget(trash);
        self.system.remove_all(trash)
    }

    fn any(&self, wanted: impl Fn(&str) -> bool) -> Result<bool> {
        let names = match self.system.list(&self.root) {
            Ok(names) => names,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(Error::io("list the leases in", &self.root, e)),
        };
        let mut held = false;
        for name in names {
            if let Some(name) =
                name.to_str().filter(|name| name.ends_with(EXTENSION) && wanted(name))
            {
                // All of them, so that dead ones go.
                held |= self.is_held(&self.root.join(name))?;
            }
        }
        Ok(held)
    }

    /// Path of the lease called `name`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(format!("{name}{EXTENSION}"))
    }

    fn turn(&self) -> Turn {
        self.system.turn(&self.root)
    }

    /// Removes the directory if nobody holds a lease in it, nor takes one at this moment.
    fn clear(&self) {
        let turn = self.turn();
        let ours = |name: &std::ffi::OsStr| [TURN_FILE, OLD_CLOCK].iter().any(|file| name == *file);
        let Ok(names) = self.system.list(&self.root) else { return };
        if !names.iter().all(|name| ours(name)) {
            return;
        }
        for file in [OLD_CLOCK, TURN_FILE] {
            // It may not exist.
            let _ = self.system.remove(&self.root.join(file));
        }
        // Not with all in it: an old listing may hide a new lease.
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
        // A lock also tells of a process in another container.
        let locked = || {
            if held.locked && held.holder.is_of_this_boot() {
                self.system.is_locked(path)
            } else {
                None
            }
        };
        Ok(match (self.system.life(&held.holder), locked) {
            (Liveness::Gone, _) => LeaseStatus::Dead(found),
            (Liveness::Ends, _) => LeaseStatus::Silent(found),
            (Liveness::Exists, _) => LeaseStatus::Alive(found),
            (Liveness::Unknown, locked) => match locked() {
                Some(true) => LeaseStatus::Alive(found),
                Some(false) => LeaseStatus::Dead(found),
                None => LeaseStatus::Silent(found),
            },
        })
    }

    /// Whether there is a lease at `path` whose holder lives; removes a dead one.
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

    /// Removes a dead lease, unless another process did and took a new one meanwhile.
    fn remove_dead(&self, path: &Path, dead: &Found) {
        log::warn!("{}: lease of {}, which is gone: removed", path.display(), dead.who());
        let grave = path.with_extension(format!("dead-{}", self.system.holder().nonce()));
        self.forget(path);
        if self.system.rename(path, &grave).is_err() {
            return;
        }
        if self.system.read(&grave).is_ok_and(|bytes| bytes != dead.bytes) {
            // Two processes can have found the same lease dead, and one of them has taken a new
            // one. Where a third takes it in this moment, the holder finds out before it changes
            // anything.
            let _ = self.system.link(&grave, path);
        }
        let _ = self.system.remove(&grave);
    }

    /// Creates the lease at `path`; none if there is one, or if the directory was removed
    /// meanwhile.
    fn create(&self, path: &Path, settling: bool) -> Result<Option<LeaseGuard>> {
        let mut held =
            LeaseRecord { settling, ..LeaseRecord::now(self.system.holder(), self.stale) };
        let temporary = path.with_extension(format!("{}.tmp", held.token));
        let written = match self.write(&temporary, &mut held) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            written => written,
        };
        let created = written.and_then(|open| {
            // It appears with all that it says: a holder that is killed now leaves no lease that
            // names nobody.
            match self.system.link(&temporary, path) {
                Ok(()) => Ok(Some(open)),
                // NFS may answer a request that was sent twice with the success of the first.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                    Ok(self.is_mine(path, &held).then_some(open))
                }
                // Some file systems have no second names.
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

    /// Writes a new lease and locks it, where that can be done.
    fn write(&self, path: &Path, held: &mut LeaseRecord) -> io::Result<Box<dyn Open>> {
        let open = self.system.create(path)?;
        held.locked = open.is_locked();
        open.rewrite(held.text()?.as_bytes())?;
        Ok(open)
    }
}

/// Stands for a directory among the things that were seen.
const RETIRED: &[u8] = b"retired";

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::time::{Instant, SystemTime};

    use super::owner::tests::{beside, far, gone};
    use super::*;

    fn leases() -> (tempfile::TempDir, Leases) {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::new(dir.path().join(".leases"));
        (dir, leases)
    }

    fn now() -> LeaseRecord {
        LeaseRecord::now(LeaseOwner::here(), Duration::ZERO)
    }

    /// Writes a lease of somebody else.
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
        // The open of a pipe would wait for its other end.
        let error = leases.is_held(&path).unwrap_err().to_string();
        assert!(error.contains("it is a pipe, a socket or a device"), "{error}");
    }

    /// Makes a file look as if nobody had touched it for so long.
    fn grow_old(path: &Path, age: Duration) {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    #[track_caller]
    fn taken(claimed: Result<Claimed>) -> LeaseGuard {
        match claimed.unwrap() {
            Claimed::Taken(lease) => lease,
            Claimed::By(other) => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn refused(claimed: Result<Claimed>) -> Option<LeaseRecord> {
        match claimed.unwrap() {
            Claimed::Taken(_) => panic!("taken"),
            Claimed::By(other) => other,
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
        // A process of another node counts until its lease has stayed the same for a while by the
        // clock here, however old the file looks.
        let leases = Leases { times: SHORT, ..leases };
        let path = put(&leases, "step-00000002.evaluate", far());
        grow_old(&path, Duration::from_secs(3600));
        assert!(leases.holds("step-00000002").unwrap());
        assert!(leases.take("step-00000002.evaluate").unwrap().is_none());
        assert!(leases.is_live("step-00000002.evaluate").unwrap());
        std::thread::sleep(SHORT.dead);
        assert!(!leases.is_live("step-00000002.evaluate").unwrap() && path.exists());
        let lease = leases.take("step-00000002.evaluate").unwrap().unwrap();
        // Another takes it, because this process stood still: it is not ours to give up.
        put(&leases, "step-00000002.evaluate", far());
        drop(lease);
        assert!(leases.holds("step-00000002").unwrap());
    }

    /// Root may read everything, but not a directory as a file, nor a link to itself.
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
        // The same process cannot hold it twice either.
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
        // A lease that a kill has torn names no holder.
        fs::create_dir(&leases.root).unwrap();
        fs::write(leases.path("trainer"), "{\"ho").unwrap();
        assert!(refused(leases.claim("trainer", false)).is_none());
    }

    const SHORT: Times =
        Times { beat: Duration::from_millis(40), dead: Duration::from_millis(400) };

    /// Short times, and a holder far away.
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
        // None comes, however the file's time looks.
        let begun = Instant::now();
        let lease = taken(leases.claim("trainer", true));
        assert!(begun.elapsed() >= leases.times.dead * 3 / 4);
        drop(lease);

        // One comes, though the clocks say that it is long ago.
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

    /// In another container of this node nothing is known of the process; but its lock is.
    #[test]
    fn a_lock_tells_of_other_containers() {
        let (_dir, leases) = leases();
        fs::create_dir_all(&leases.root).unwrap();
        let path = leases.path("trainer");
        let mut held = LeaseRecord { holder: beside(), ..now() };
        let file = leases.write(&path, &mut held).unwrap();
        if !held.locked {
            println!("skipped: no file locks here");
            return;
        }
        grow_old(&path, Duration::from_secs(3600));
        assert_eq!(refused(leases.claim("trainer", true)), Some(held));
        assert!(leases.is_held(&path).unwrap());
        drop(file);
        // A program that another test starts at this moment has the file open until it begins.
        while let Claimed::By(other) = leases.claim("trainer", false).unwrap() {
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
        // It beats.
        let first = fs::read(&path).unwrap();
        while fs::read(&path).unwrap() == first {
            std::thread::yield_now();
        }
        lease.check().unwrap();
        // Another process has found it dead.
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
