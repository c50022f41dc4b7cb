//! Starts the watchdog of a rank and chooses the directory of its files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::heartbeat::WatchdogFiles;
use super::watchdog::WatchdogDirectory;
use crate::communicator::{Comm, Inner};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans;
use hpctrain_device::Backend;

/// Keeps the watchdog that [`Comm::watch`] has started. Dropping it stops the watchdog, unless that
/// was already running before.
pub struct WatchdogGuard {
    inner: Arc<Inner>,
    began: bool,
}

impl Drop for WatchdogGuard {
    fn drop(&mut self) {
        if self.began {
            self.inner.end_watch();
        }
    }
}

impl<B: Backend> Comm<B> {
    /// Starts the watchdog, or changes its timeout: this rank aborts the job when it waits for
    /// longer than `timeout` in a collective or for data; zero waits for ever. A world of one rank
    /// needs no watchdog.
    ///
    /// # Errors
    /// Returns an error if the watchdog's thread cannot be started.
    pub fn set_watchdog_timeout(&self, timeout: Duration) -> Result<()> {
        if self.inner.world.nodes.len() == 1 {
            return Ok(());
        }
        self.inner.watched(|guard| guard.set(|settings| settings.timeout = timeout))
    }

    /// Runs the watchdog of this rank until the guard is dropped. Heartbeats and flight recorders
    /// are written to `folder`, which all ranks share. When a rank waits for longer than `timeout`
    /// in a collective or for data, the job ends with a report of where each rank is, and exit code
    /// 1. A world of one rank needs no watchdog. Collective over the world.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written, or the watchdog's thread cannot be
    /// started.
    pub fn watch(&self, folder: &Path, timeout: Duration) -> Result<Option<WatchdogGuard>> {
        if self.inner.world.nodes.len() == 1 {
            return Ok(None);
        }
        let world = self.world();
        // No rank may mistake files of an earlier job for this job's.
        let files = WatchdogFiles::new(folder, self.inner.world.nodes.clone());
        world.all_ok(if self.rank() == 0 { files.clear() } else { Ok(()) })?;
        let began = !self.inner.is_watched();
        world.all_ok(self.attend(files, Some(timeout), false))?;
        Ok(Some(WatchdogGuard { inner: self.inner.clone(), began }))
    }

    /// Moves the running watchdog of this rank to `folder`, where the job's other ranks already
    /// have theirs. Not collective; without a running watchdog it does nothing.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written.
    pub fn watch_in(&self, folder: &Path) -> Result<()> {
        if self.inner.world.nodes.len() == 1 || !self.inner.is_watched() {
            return Ok(());
        }
        self.attend(WatchdogFiles::new(folder, self.inner.world.nodes.clone()), None, false)
    }

    /// Moves the running watchdog to a new directory in the first of `places` that rank 0 can
    /// write. If other nodes do not share it, as with `/tmp`, a report covers the ranks of one
    /// node. Without a running watchdog it does nothing. Collective over the world.
    ///
    /// # Errors
    /// Returns an error if none of `places` can be written, or a message failed.
    pub fn watch_in_own_directory(&self, places: &[PathBuf]) -> Result<()> {
        if self.size() == 1 || !self.inner.is_watched() {
            return Ok(());
        }
        let world = self.world();
        let name = format!("watchdog-{}-{:x}", std::process::id(), spans::now());
        let created =
            if self.rank() == 0 { create_in_first(places, &name).map(Some) } else { Ok(None) };
        let folder = world.all_ok(created)?;
        let mine = folder
            .map(|folder| folder.to_string_lossy().into_owned().into_bytes())
            .unwrap_or_default();
        let paths = world.gather_bytes(mine).wait()?;
        let folder = PathBuf::from(String::from_utf8_lossy(&paths[0]).into_owned());
        // Another node may have its own directory by this name.
        let created = std::fs::create_dir_all(&folder).map_err(|e| Error::io("create", &folder, e));
        world.all_ok(created.and_then(|()| {
            self.attend(WatchdogFiles::new(&folder, self.inner.world.nodes.clone()), None, true)
        }))
    }

    /// Writes heartbeats to a directory from now on.
    ///
    /// # Errors
    /// Returns an error if the first heartbeat cannot be written.
    fn attend(&self, files: WatchdogFiles, timeout: Option<Duration>, is_own: bool) -> Result<()> {
        let pulse = files.heartbeat_slot(self.inner.world.rank);
        let place = WatchdogDirectory { files, slot: pulse, is_own };
        let context = self.inner.watchdog_context();
        let path = place.slot.path.clone();
        self.inner.watched(|guard| {
            // The first write shows whether the directory can be written.
            let written = place.slot.write(&context.heartbeat(guard.next_beat()).0);
            written.map_err(|e| {
                Error::io("write", &path, e)
                    .hint("set comm.timeout = 0 to run without the watchdog")
            })?;
            guard.set(|settings| {
                settings.timeout = timeout.unwrap_or(settings.timeout);
                settings.directory = Some(place);
            })
        })
    }
}

/// Creates the directory `name` in the first of `places` that can be written, and returns its path.
fn create_in_first(places: &[PathBuf], name: &str) -> Result<PathBuf> {
    let mut error = Error::internal("no directory was given for the watchdog");
    for place in places {
        let folder = place.join(name);
        match std::fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(e) => {
                error = Error::io("create", &folder, e)
                    .hint("set comm.timeout=0 to run without the watchdog")
            }
        }
    }
    Err(error)
}
