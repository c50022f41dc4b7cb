//! The file system and the clock that leases use: those of this process, or simulated ones in
//! tests.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Debug;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use super::owner::{LeaseOwner, Liveness};
use hpctrain_base::{own_files, safe_open, signals};

/// The maximal wait for another process that is taking or removing a lease.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);

/// Name of the file that a process locks while it takes or removes a lease.
pub const TURN_FILE: &str = ".turn";

/// The bytes last seen under each path, and since when by this process's clock.
pub type Seen = Mutex<HashMap<PathBuf, (Vec<u8>, Duration)>>;

/// An open lease file of this process.
pub trait LeaseFile: Debug + Send {
    /// Returns true if the file is locked.
    fn is_locked(&self) -> bool;

    /// Replaces the content, which never gets shorter, so that other nodes see it when they open
    /// the file.
    fn rewrite(&self, text: &[u8]) -> io::Result<()>;
}

/// A lock that lets one process at a time change leases, until it is dropped.
pub type TurnLock = Option<File>;

/// File operations with the semantics of network file systems: creating, linking, renaming and
/// removing happen once, on the server; reading and listing may show names as they were up to
/// [`System::staleness`] ago.
pub trait System: Debug + Send + Sync {
    /// Returns the time of a monotonic clock of this process.
    fn now(&self) -> Duration;

    fn sleep(&self, time: Duration);

    /// Sleeps for `time`, or until a signal asks this process to end, and returns that signal.
    fn pause(&self, time: Duration) -> Option<&'static str>;

    /// Returns the maximal age of what reading and listing below `dir` show.
    fn staleness(&self, dir: &Path) -> Duration;

    /// Returns this process.
    fn holder(&self) -> LeaseOwner;

    /// Returns whether a process exists, as far as it can be proven from here.
    fn liveness(&self, owner: &LeaseOwner) -> Liveness;

    fn create_dir(&self, dir: &Path) -> io::Result<()>;

    /// Returns the names in a directory.
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>>;

    /// Opens a file anew and reads it.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// Creates a file that does not exist, and locks it if the file system supports locks.
    fn create(&self, path: &Path) -> io::Result<Box<dyn LeaseFile>>;

    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Removes a directory and everything below it.
    fn remove_all(&self, path: &Path) -> io::Result<()>;

    /// Returns whether another process has locked the file; `None` if locks are not supported.
    fn is_locked(&self, path: &Path) -> Option<bool>;

    /// Waits for the caller's turn to take or remove leases in `dir`. Returns `None` if the file
    /// system has no locks or the wait takes too long.
    fn turn(&self, dir: &Path) -> TurnLock;

    /// Returns true if a thread writes the heartbeats.
    fn has_threads(&self) -> bool;

    fn seen(&self) -> &Seen;
}

/// Returns the system of this process.
pub fn system() -> Arc<dyn System> {
    static SYSTEM: LazyLock<Arc<Process>> =
        LazyLock::new(|| Arc::new(Process { begun: Instant::now(), seen: Seen::default() }));
    SYSTEM.clone()
}

#[derive(Debug)]
struct Process {
    begun: Instant,
    seen: Seen,
}

impl System for Process {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn pause(&self, time: Duration) -> Option<&'static str> {
        signals::pause(time);
        signals::last_signal()
    }

    fn staleness(&self, dir: &Path) -> Duration {
        // A directory that does not exist yet is below one that does.
        let there = dir.ancestors().find_map(|dir| {
            let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
            rustix::fs::statfs(dir).ok()
        });
        if there.is_some_and(|fs| COHERENT.contains(&(fs.f_type as u64 & 0xffff_ffff))) {
            Duration::ZERO
        } else {
            STALE
        }
    }

    fn holder(&self) -> LeaseOwner {
        LeaseOwner::here()
    }

    fn liveness(&self, owner: &LeaseOwner) -> Liveness {
        owner.liveness()
    }

    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        dir.parent().map_or(Ok(()), fs::create_dir_all)?;
        own_files::create_directory(dir)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        safe_open::read(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn LeaseFile>> {
        let file = own_files::create_new(path)?;
        let is_locked = file.try_lock().is_ok();
        Ok(Box::new(OpenFile { file, is_locked }))
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_all(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn is_locked(&self, path: &Path) -> Option<bool> {
        // Shared: two processes that check at the same time do not see each other's lock.
        match File::open(path).ok()?.try_lock_shared() {
            Ok(()) => Some(false),
            Err(TryLockError::WouldBlock) => Some(true),
            Err(TryLockError::Error(_)) => None,
        }
    }

    fn turn(&self, dir: &Path) -> TurnLock {
        let path = dir.join(TURN_FILE);
        let begun = Instant::now();
        let mut file = own_files::create(&path).ok()?;
        loop {
            match file.try_lock() {
                Ok(()) if is_at(&file, &path) => return Some(file),
                // The previous holder of the lock has removed the file.
                Ok(()) => file = own_files::create(&path).ok()?,
                Err(TryLockError::WouldBlock) if begun.elapsed() < TURN_TIMEOUT => {
                    std::thread::sleep(TURN_TIMEOUT / 400)
                }
                Err(_) => return None,
            }
        }
    }

    fn has_threads(&self) -> bool {
        true
    }

    fn seen(&self) -> &Seen {
        &self.seen
    }
}

/// How long NFS may show old names, listings and attributes by default (nfs(5): `acregmax`,
/// `acdirmax`).
pub const STALE: Duration = Duration::from_secs(60);

/// Magic numbers (`statfs`) of file systems on which all nodes see the same: local ones, and those
/// with coherent client caches. All others may show stale entries, as NFS does.
const COHERENT: [u64; 18] = [
    0xef53,      // ext2 to ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0x2fc1_2fc1, // ZFS
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x3153_464a, // JFS
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x794c_7630, // overlayfs
    0x0102_1997, // 9P, which has no cache unless it is asked for one
    0x0bd0_0bd0, // Lustre
    0x4750_4653, // GPFS
    0x1983_0326, // BeeGFS
    0x00c3_6400, // Ceph
    0x0116_1970, // GFS2
    0x7461_636f, // OCFS2
    0xaad7_aaea, // PanFS
];

#[derive(Debug)]
struct OpenFile {
    file: File,
    is_locked: bool,
}

impl LeaseFile for OpenFile {
    fn is_locked(&self) -> bool {
        self.is_locked
    }

    fn rewrite(&self, text: &[u8]) -> io::Result<()> {
        self.file.write_all_at(text, 0)?;
        // On NFS this makes it visible to other nodes, as a close would.
        self.file.sync_data()
    }
}

/// Returns true if an open file is still found under `path`.
fn is_at(file: &File, path: &Path) -> bool {
    let inode = |file: io::Result<fs::Metadata>| file.map(|file| (file.dev(), file.ino())).ok();
    inode(file.metadata()) == inode(fs::metadata(path))
}
