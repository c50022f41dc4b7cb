//! The content of a lease, and the file that holds it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::holder::Holder;
use crate::telemetry::unix_time;

/// The content of a lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// The holder.
    #[serde(flatten)]
    pub holder: Holder,
    /// Names the taking: a process may take leases one after the other.
    #[serde(default)]
    pub(super) token: String,
    /// Time at which it was taken, in seconds since 1970, by the holder's clock.
    #[serde(default)]
    pub(super) since: f64,
    /// Whether the holder has locked the file.
    #[serde(default)]
    pub(super) locked: bool,
    /// Number of times it was rewritten.
    #[serde(default)]
    pub(super) beats: u64,
}

impl Held {
    /// This process takes a lease now.
    pub(super) fn now() -> Self {
        static TAKEN: AtomicU64 = AtomicU64::new(0);
        let (holder, since) = (Holder::here(), unix_time());
        let token = format!("{}-{}-{since}-{}", holder.host, holder.pid, TAKEN.fetch_add(1, Ordering::Relaxed));
        Self { holder, token, since, locked: false, beats: 0 }
    }

    pub(super) fn text(&self) -> io::Result<String> {
        serde_json::to_string(self).map_err(io::Error::other)
    }

    /// Time since it was taken, by this node's clock.
    pub fn age(&self) -> Option<Duration> {
        // Leases of older versions do not tell.
        let age = (self.since > 0.0).then(|| (unix_time() - self.since).max(0.0));
        Duration::try_from_secs_f64(age?.round()).ok()
    }
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.holder)?;
        self.age().map_or(Ok(()), |age| write!(f, ", since {}", humantime::format_duration(age)))
    }
}

/// Writes a lease and locks it, where that can be done.
pub(super) fn write(path: &Path, held: &mut Held) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    fill(file, held)
}

/// As [`write`], if there is none.
pub(super) fn create_new(path: &Path, held: &mut Held) -> io::Result<Option<File>> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(file) => fill(file, held).map(Some),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(None),
        Err(e) => Err(e),
    }
}

fn fill(file: File, held: &mut Held) -> io::Result<File> {
    held.locked = file.try_lock().is_ok();
    file.write_all_at(held.text()?.as_bytes(), 0)?;
    Ok(file)
}

/// Whether another process has locked the file; none where there are no locks.
pub(super) fn is_locked(path: &Path) -> Option<bool> {
    // Shared: two processes that look at the same time do not take each other for the holder.
    match File::open(path).ok()?.try_lock_shared() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}
