//! Leases: files that say that somebody needs a checkpoint, or is evaluating it.
//!
//! A lease is a file of its own that only one process can create. Its holder touches it from time to time; a lease that
//! nobody has touched for a while, or whose process is gone from this node, is dead, and whoever meets it removes it. Ages
//! are differences of times that the file system itself wrote, so the clocks of nodes need not agree.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How often a holder touches its lease.
const BEAT: Duration = Duration::from_secs(5);

/// How long nobody has touched a lease that is dead.
const DEAD: Duration = Duration::from_secs(60);

/// How the name of the lease of an evaluator begins that evaluates every checkpoint.
const QUEUE: &str = "queue-";

/// What a lease says of its holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Name of its node.
    pub host: String,
    /// The node's start and the numbering of processes there: containers of one node may have their own.
    #[serde(default)]
    space: String,
    /// Its process there.
    pub pid: u32,
    /// When the process started, in ticks since the node did: numbers of processes are used again.
    started: u64,
}

impl Holder {
    /// This process.
    pub fn here() -> Self {
        let pid = std::process::id();
        Self { host: host(), space: space(), pid, started: started(pid).unwrap_or(0) }
    }

    /// Whether this is a process of this node that does not exist any more.
    fn is_gone(&self) -> bool {
        let here = self.host == host() && (self.space.is_empty() || self.space == space());
        here && started(self.pid) != Some(self.started)
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} on {}", self.pid, self.host)
    }
}

/// The name of this node.
fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").map_or_else(|_| "localhost".into(), |name| name.trim().into())
}

/// What names the space in which numbers of processes mean something.
fn space() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let pids = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), pids.display())
}

/// When a process of this node started, in ticks.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the start is the 20th word after it.
    let after = stat.rsplit_once(')')?.1;
    let mut words = after.split_whitespace();
    // A process that has ended but was not waited for holds nothing.
    (words.next()? != "Z").then(|| words.nth(18)?.parse().ok())?
}

/// The leases on the checkpoints of a run.
#[derive(Debug, Clone)]
pub struct Leases {
    root: PathBuf,
}

/// A lease that this process holds, until it is dropped.
#[derive(Debug)]
pub struct Lease {
    path: PathBuf,
    /// What is in the file.
    text: String,
    /// None only while dropping.
    stop: Option<Sender<()>>,
    beats: Option<JoinHandle<()>>,
}

impl Leases {
    /// Those in the directory `root`, which need not exist.
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Takes the lease called `name`, which begins with the name of a checkpoint; none if somebody holds it.
    ///
    /// # Errors
    /// The file system refused.
    pub fn take(&self, name: &str) -> Result<Option<Lease>> {
        let path = self.path(name);
        fs::create_dir_all(&self.root).map_err(|e| Error::io("create", &self.root, e))?;
        if self.alive(&path) {
            return Ok(None);
        }
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => Lease::hold(path, file).map(Some),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(None),
            Err(e) => Err(Error::io("create", &path, e)),
        }
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
    pub fn queue_is_watched(&self) -> bool {
        self.any(|name| name.starts_with(QUEUE))
    }

    /// Whether anybody holds the checkpoint called `name`. Removes dead leases on it.
    pub fn holds(&self, name: &str) -> bool {
        self.any(|lease| lease.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')))
    }

    /// Who holds the lease called `name`, dead or alive.
    pub fn holder(&self, name: &str) -> Option<Holder> {
        serde_json::from_str(&fs::read_to_string(self.path(name)).ok()?).ok()
    }

    fn any(&self, wanted: impl Fn(&str) -> bool) -> bool {
        let Ok(entries) = fs::read_dir(&self.root) else { return false };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let leases = names.filter(|name| name.ends_with(EXTENSION) && wanted(name));
        // All of them, so that dead ones go.
        leases.filter(|name| self.alive(&self.root.join(name))).count() > 0
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(format!("{name}{EXTENSION}"))
    }

    /// Whether there is a lease at `path` whose holder lives; removes a dead one.
    fn alive(&self, path: &Path) -> bool {
        let Ok(text) = fs::read_to_string(path) else { return false };
        let holder: Option<Holder> = serde_json::from_str(&text).ok();
        let gone = holder.as_ref().is_some_and(Holder::is_gone);
        if !gone && self.age(path).is_none_or(|age| age < DEAD) {
            return true;
        }
        let who = holder.map_or_else(|| "an unknown process".into(), |holder| holder.to_string());
        log::warn!("{}: lease of {who}, which is gone: removed", path.display());
        self.bury(path, &text);
        false
    }

    /// Removes a dead lease, unless another process did and took a new one meanwhile.
    fn bury(&self, path: &Path, seen: &str) {
        let grave = path.with_extension(format!("dead-{}", std::process::id()));
        if fs::rename(path, &grave).is_err() {
            return;
        }
        if fs::read_to_string(&grave).is_ok_and(|text| text != seen) {
            // Nobody can have taken it in between: it was not free to take. A failure leaves a lease too few, whose
            // holder finds out by its next beat.
            let _ = fs::hard_link(&grave, path);
        }
        let _ = fs::remove_file(&grave);
    }

    /// How long ago a file was touched, by the file system's clock.
    fn age(&self, path: &Path) -> Option<Duration> {
        let clock = self.root.join(".clock");
        fs::write(&clock, b".").ok()?;
        let now = fs::metadata(&clock).ok()?.modified().ok()?;
        let then: SystemTime = fs::metadata(path).ok()?.modified().ok()?;
        Some(now.duration_since(then).unwrap_or_default())
    }
}

/// How the names of leases end.
const EXTENSION: &str = ".lease";

impl Lease {
    /// Writes who holds the lease, and touches it until it is dropped.
    fn hold(path: PathBuf, mut file: File) -> Result<Self> {
        let text = serde_json::to_string(&Holder::here()).map_err(|e| Error::internal(format!("lease: {e}")))?;
        file.write_all(text.as_bytes()).map_err(|e| Error::io("write", &path, e))?;
        let (stop, stopped) = channel();
        let (touched, told) = (path.clone(), text.clone());
        let beat = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(BEAT) {
                // A write, because it is the file system's clock that has to tell the time.
                if let Err(e) = file.write_all_at(told.as_bytes(), 0).and_then(|()| file.sync_data()) {
                    log::warn!("cannot touch {}: {e}", touched.display());
                }
            }
        };
        let beats = std::thread::Builder::new().name("lease".into()).spawn(beat);
        let beats = beats.map_err(|e| Error::internal(format!("cannot start a lease's thread: {e}")))?;
        Ok(Self { path, text, stop: Some(stop), beats: Some(beats) })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(beats) = self.beats.take() {
            // It does nothing that could panic.
            let _ = beats.join();
        }
        // A process that stood still for long may find its lease taken by another.
        if fs::read_to_string(&self.path).is_ok_and(|text| text != self.text) {
            log::warn!("{} was taken over", self.path.display());
        } else if let Err(e) = fs::remove_file(&self.path) {
            log::warn!("cannot remove {}: {e}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leases() -> (tempfile::TempDir, Leases) {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::new(dir.path().join(".leases"));
        (dir, leases)
    }

    #[test]
    fn a_lease_is_held_by_one_until_it_is_dropped() {
        let (_dir, leases) = leases();
        assert!(!leases.holds("step-00000001"));
        let lease = leases.take("step-00000001.evaluate").unwrap().unwrap();
        assert!(leases.take("step-00000001.evaluate").unwrap().is_none());
        assert!(leases.holds("step-00000001") && !leases.holds("step-00000010") && !leases.queue_is_watched());
        assert_eq!(leases.holder("step-00000001.evaluate"), Some(Holder::here()));
        let other = leases.share("step-00000001").unwrap().unwrap();
        drop(lease);
        assert!(leases.holds("step-00000001"));
        drop(other);
        assert!(!leases.holds("step-00000001"));
        let queue = leases.watch_queue().unwrap();
        assert!(leases.queue_is_watched());
        drop(queue);
        assert!(!leases.queue_is_watched());
    }

    #[test]
    fn the_dead_hold_nothing() {
        let (_dir, leases) = leases();
        drop(leases.take("a").unwrap());
        // A process of this node with another start than any has.
        let gone = Holder { started: u64::MAX, ..Holder::here() };
        fs::write(leases.path("step-00000001.evaluate"), serde_json::to_string(&gone).unwrap()).unwrap();
        assert!(!leases.holds("step-00000001"));
        assert!(leases.take("step-00000001.evaluate").unwrap().is_some());
        // A process of another node counts as long as it touches its lease.
        let far = Holder { host: "elsewhere".into(), ..gone };
        let path = leases.path("step-00000002.evaluate");
        fs::write(&path, serde_json::to_string(&far).unwrap()).unwrap();
        assert!(leases.holds("step-00000002") && leases.take("step-00000002.evaluate").unwrap().is_none());
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(61)).unwrap();
        let lease = leases.take("step-00000002.evaluate").unwrap().unwrap();
        // Another takes it, because this process stood still: it is not ours to give up.
        fs::write(&path, serde_json::to_string(&far).unwrap()).unwrap();
        drop(lease);
        assert!(leases.holds("step-00000002"));
    }
}
