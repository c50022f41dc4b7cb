//! Leases: files that say that somebody needs a checkpoint, is evaluating it, or trains in a run's directory.
//!
//! A lease is a file of its own that only one process can create. Its holder rewrites it from time to time, with a count,
//! and keeps it locked where the file system has locks. A lease is dead when its holder is provably gone, or when it has
//! not been rewritten for a while; any process that meets a dead one removes it. Ages are differences of times that the
//! file system itself wrote; a [claim](Leases::claim) also watches the count for a while by its own clock, so that
//! clocks of nodes need not agree. A lease that cannot be read is neither free nor dead: that is an error.
//!
//! Retention renames a checkpoint away, looks for leases once more, and renames it back if there is one; a reader makes
//! its lease first and looks for the checkpoint then. Either sees the other.

mod grip;
mod held;
mod holder;

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use held::{create_new, is_locked, write};
use holder::{Life, host};

use crate::error::{Error, Result};

pub use grip::Lease;
pub use held::Held;
pub use holder::Holder;

/// Interval at which a holder rewrites its lease, and time without a rewrite after which a lease is dead.
#[derive(Debug, Clone, Copy)]
struct Times {
    beat: Duration,
    dead: Duration,
}

const TIMES: Times = Times { beat: Duration::from_secs(5), dead: Duration::from_secs(60) };

/// Prefix of the name of the lease of an evaluator that evaluates every checkpoint.
const QUEUE: &str = "queue-";

/// Suffix of the names of lease files.
const EXTENSION: &str = ".lease";

/// Longest wait for another process that takes or removes a lease at this moment.
const TURN: Duration = Duration::from_secs(2);

/// The leases in one directory.
#[derive(Debug, Clone)]
pub struct Leases {
    root: PathBuf,
    times: Times,
}

/// The outcome of a [claim](Leases::claim).
#[derive(Debug)]
pub enum Claimed {
    /// This process holds the lease.
    Taken(Lease),
    /// Another one does; none if the lease does not tell which.
    By(Option<Held>),
}

/// The state of a lease.
enum Look {
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
    held: Option<Held>,
}

impl Found {
    fn who(&self) -> String {
        self.held.as_ref().map_or_else(|| "an unknown process".into(), |held| held.holder.to_string())
    }
}

impl Leases {
    /// The leases in the directory `root`, which need not exist.
    pub fn new(root: PathBuf) -> Self {
        Self { root, times: TIMES }
    }

    /// Takes the lease called `name`, which begins with the name of a checkpoint; none if somebody holds it.
    ///
    /// # Errors
    /// The file system refused.
    pub fn take(&self, name: &str) -> Result<Option<Lease>> {
        let path = self.path(name);
        fs::create_dir_all(&self.root).map_err(|e| Error::io("create", &self.root, e))?;
        let _turn = self.turn();
        if self.is_held(&path)? {
            return Ok(None);
        }
        self.create(&path)
    }

    /// Takes the lease called `name` from all but a live holder. Where only time can tell, and `waits`, this watches for
    /// the holder's next beat until the lease is dead; else the holder counts as alive.
    ///
    /// # Errors
    /// The file system refused.
    pub fn claim(&self, name: &str, waits: bool) -> Result<Claimed> {
        let path = self.path(name);
        let (mut silent, mut seen_alive): (Option<Vec<u8>>, bool) = (None, false);
        loop {
            fs::create_dir_all(&self.root).map_err(|e| Error::io("create", &self.root, e))?;
            let turn = self.turn();
            match self.look(&path)? {
                Look::Free => {}
                Look::Dead(found) => self.bury(&path, &found),
                Look::Silent(found) if silent.as_ref() == Some(&found.bytes) => self.bury(&path, &found),
                Look::Silent(found) if waits && silent.is_none() => {
                    drop(turn);
                    if self.beats(&path, &found)? {
                        return Ok(Claimed::By(found.held));
                    }
                    silent = Some(found.bytes);
                    continue;
                }
                // One that was killed a moment ago may not know it yet.
                Look::Alive(_) if waits && !seen_alive => {
                    drop(turn);
                    std::thread::sleep(self.times.beat / 25);
                    seen_alive = true;
                    continue;
                }
                Look::Alive(found) | Look::Silent(found) => return Ok(Claimed::By(found.held)),
            }
            if let Some(lease) = self.create(&path)? {
                return Ok(Claimed::Taken(lease.clearing(self.clone())));
            }
            // Another process was faster, or the last holder has removed the directory in this moment.
        }
    }

    /// Watches a lease that was found silent until it is dead; true as soon as somebody rewrites it.
    fn beats(&self, path: &Path, found: &Found) -> Result<bool> {
        let Times { beat, dead } = self.times;
        // Clocks of nodes may not agree: some time is watched by this one's in any case.
        let left = self.age(path).map_or(dead, |age| dead.saturating_sub(age)).max(2 * beat + beat / 2);
        let (begun, mut told) = (Instant::now(), false);
        while begun.elapsed() < left {
            std::thread::sleep(beat / 100);
            match self.look(path)? {
                Look::Free | Look::Dead(_) => return Ok(false),
                Look::Silent(now) if now.bytes == found.bytes => {}
                Look::Alive(_) | Look::Silent(_) => return Ok(true),
            }
            if !told && begun.elapsed() > beat / 5 {
                let left = left.as_secs_f64().ceil();
                log::warn!("{}: waiting up to {left} s for a sign of life of {}", path.display(), found.who());
                told = true;
            }
        }
        Ok(false)
    }

    /// Takes a lease on a checkpoint that others may share.
    ///
    /// # Errors
    /// The file system refused.
    pub fn share(&self, checkpoint: &str) -> Result<Option<Lease>> {
        self.take(&format!("{checkpoint}.{}-{}", host(), std::process::id()))
    }

    /// Says that somebody evaluates every checkpoint: none is removed before.
    ///
    /// # Errors
    /// The file system refused.
    pub fn watch_queue(&self) -> Result<Option<Lease>> {
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

    fn any(&self, wanted: impl Fn(&str) -> bool) -> Result<bool> {
        let unreadable = |e| Error::io("list the leases in", &self.root, e);
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(unreadable(e)),
        };
        let mut held = false;
        for entry in entries {
            let name = entry.map_err(unreadable)?.file_name();
            if let Some(name) = name.to_str().filter(|name| name.ends_with(EXTENSION) && wanted(name)) {
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

    /// Removes the directory if nobody holds a lease in it, nor takes one at this moment.
    fn clear(&self) {
        let turn = self.turn();
        let ours = |name: &std::ffi::OsStr| [TURN_FILE, CLOCK_FILE].iter().any(|file| name == *file);
        let Ok(mut entries) = fs::read_dir(&self.root) else { return };
        if !entries.all(|entry| entry.is_ok_and(|entry| ours(&entry.file_name()))) {
            return;
        }
        for file in [CLOCK_FILE, TURN_FILE] {
            // It may not exist.
            let _ = fs::remove_file(self.root.join(file));
        }
        let _ = fs::remove_dir(&self.root);
        drop(turn);
    }

    /// Reads the state of the lease at `path`.
    fn look(&self, path: &Path) -> Result<Look> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Look::Free),
            Err(e) => return Err(Error::io("read the lease", path, e)),
        };
        let held: Option<Held> = serde_json::from_slice(&bytes).ok();
        let found = Found { bytes, held };
        let Some(held) = &found.held else { return Ok(Look::Silent(found)) };
        // A lock also tells of a process in another container.
        let locked = || if held.locked && held.holder.is_of_this_boot() { is_locked(path) } else { None };
        Ok(match (held.holder.life(), locked) {
            (Life::Gone, _) => Look::Dead(found),
            (Life::Ends, _) => Look::Silent(found),
            (Life::Exists, _) => Look::Alive(found),
            (Life::Unknown, locked) => match locked() {
                Some(true) => Look::Alive(found),
                Some(false) => Look::Dead(found),
                None => Look::Silent(found),
            },
        })
    }

    /// Whether there is a lease at `path` whose holder lives; removes a dead one.
    fn is_held(&self, path: &Path) -> Result<bool> {
        let found = match self.look(path)? {
            Look::Free => return Ok(false),
            Look::Alive(_) => return Ok(true),
            Look::Silent(_) if self.age(path).is_none_or(|age| age < self.times.dead) => return Ok(true),
            Look::Dead(found) | Look::Silent(found) => found,
        };
        self.bury(path, &found);
        Ok(false)
    }

    /// Removes a dead lease, unless another process did and took a new one meanwhile.
    fn bury(&self, path: &Path, dead: &Found) {
        log::warn!("{}: lease of {}, which is gone: removed", path.display(), dead.who());
        let grave = path.with_extension(format!("dead-{}", std::process::id()));
        if fs::rename(path, &grave).is_err() {
            return;
        }
        if fs::read(&grave).is_ok_and(|bytes| bytes != dead.bytes) {
            // Without locks two processes can have found the same lease dead, and one of them has taken a new one. Where
            // a third takes it in this moment, the holder finds out before it changes anything.
            let _ = fs::hard_link(&grave, path);
        }
        let _ = fs::remove_file(&grave);
    }

    /// Creates the lease at `path`; none if there is one, or if the directory was removed meanwhile.
    fn create(&self, path: &Path) -> Result<Option<Lease>> {
        let mut held = Held::now();
        let temporary = path.with_extension(format!("{}.tmp", held.token));
        let written = match write(&temporary, &mut held) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            written => written,
        };
        let created = written.and_then(|file| {
            // It appears with all that it says: a holder that is killed now leaves no lease that names nobody.
            match fs::hard_link(&temporary, path) {
                Ok(()) => Ok(Some(file)),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(None),
                // Some file systems have no second names.
                Err(_) => create_new(path, &mut held),
            }
        });
        let removed = fs::remove_file(&temporary);
        let file = created.and_then(|file| removed.map(|()| file)).map_err(|e| Error::io("create", path, e))?;
        file.map(|file| Lease::hold(path.to_path_buf(), held, file, self.times)).transpose()
    }

    /// Time since a file was last modified, by the file system's clock.
    fn age(&self, path: &Path) -> Option<Duration> {
        let clock = self.root.join(CLOCK_FILE);
        fs::write(&clock, b".").ok()?;
        let now = fs::metadata(&clock).ok()?.modified().ok()?;
        let then = fs::metadata(path).ok()?.modified().ok()?;
        Some(now.duration_since(then).unwrap_or_default())
    }

    /// One process at a time takes or removes leases here, where the file system has locks; but none waits for long.
    fn turn(&self) -> Option<File> {
        let path = self.root.join(TURN_FILE);
        let begun = Instant::now();
        let mut file = File::create(&path).ok()?;
        loop {
            match file.try_lock() {
                Ok(()) if is_at(&file, &path) => return Some(file),
                // The one before has removed it.
                Ok(()) => file = File::create(&path).ok()?,
                Err(TryLockError::WouldBlock) if begun.elapsed() < TURN => std::thread::sleep(TURN / 400),
                Err(_) => return None,
            }
        }
    }
}

/// Whether an open file still has this name.
fn is_at(file: &File, path: &Path) -> bool {
    let inode = |of: io::Result<fs::Metadata>| of.map(|of| (of.dev(), of.ino())).ok();
    inode(file.metadata()) == inode(fs::metadata(path))
}

/// File that a process locks while it takes or removes a lease.
const TURN_FILE: &str = ".turn";

/// File that is written to learn the file system's time.
const CLOCK_FILE: &str = ".clock";

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::time::SystemTime;

    use super::holder::tests::{beside, far, gone};
    use super::*;

    fn leases() -> (tempfile::TempDir, Leases) {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::new(dir.path().join(".leases"));
        (dir, leases)
    }

    /// Writes a lease of somebody else.
    fn put(leases: &Leases, name: &str, holder: Holder) -> PathBuf {
        fs::create_dir_all(&leases.root).unwrap();
        let path = leases.path(name);
        fs::write(&path, Held { holder, ..Held::now() }.text().unwrap()).unwrap();
        path
    }

    /// Makes a file look as if nobody had touched it for so long.
    fn grow_old(path: &Path, age: Duration) {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    #[track_caller]
    fn taken(claimed: Result<Claimed>) -> Lease {
        match claimed.unwrap() {
            Claimed::Taken(lease) => lease,
            Claimed::By(other) => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn refused(claimed: Result<Claimed>) -> Option<Held> {
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
        // A process of another node counts as long as it touches its lease.
        let path = put(&leases, "step-00000002.evaluate", far());
        assert!(leases.holds("step-00000002").unwrap());
        assert!(leases.take("step-00000002.evaluate").unwrap().is_none());
        grow_old(&path, Duration::from_secs(61));
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
        assert_eq!(other.holder, Holder::here());
        assert!(other.to_string().starts_with(&format!("process {} on ", std::process::id())), "{other}");
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

    /// Short times, and a holder far away.
    fn watched() -> (tempfile::TempDir, Leases, PathBuf) {
        let (dir, leases) = leases();
        let times = Times { beat: Duration::from_millis(40), dead: Duration::from_millis(400) };
        let leases = Leases { times, ..leases };
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
            let (leases, path) = (leases.clone(), path.clone());
            move || {
                std::thread::sleep(leases.times.beat / 2);
                fs::write(path, Held { holder: far(), beats: 1, ..Held::now() }.text().unwrap()).unwrap();
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
        let mut held = Held { holder: beside(), ..Held::now() };
        let file = write(&path, &mut held).unwrap();
        if !held.locked {
            println!("skipped: no file locks here");
            return;
        }
        grow_old(&path, Duration::from_secs(3600));
        assert_eq!(refused(leases.claim("trainer", true)), Some(held));
        assert!(leases.is_held(&path).unwrap());
        drop(file);
        drop(taken(leases.claim("trainer", false)));
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
            error.message().contains("was taken by process") && error.message().contains("on elsewhere"),
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
        let taken: Vec<&Lease> =
            claimed.iter().filter_map(|one| if let Claimed::Taken(lease) = one { Some(lease) } else { None }).collect();
        assert_eq!(taken.len(), 1, "{claimed:?}");
        taken[0].check().unwrap();
    }
}
