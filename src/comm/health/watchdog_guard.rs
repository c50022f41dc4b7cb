//! The beginning of the watch over a rank, and the directories in which ranks meet.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::heartbeat::Files;
use super::watchdog::WatchdogDirectory;
use crate::communicator::{Comm, Inner};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans;
use hpctrain_device::Backend;

/// The watch over this rank by [`Comm::watch`], until it is dropped; but a watch that began before
/// goes on.
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
    /// From now on this rank ends the job when it waits for longer than `timeout` in a collective
    /// or for data; zero waits for ever. A world of one rank needs no watch.
    ///
    /// # Errors
    /// The system refused a thread.
    pub fn wait_at_most(&self, timeout: Duration) -> Result<()> {
        if self.inner.world.nodes.len() == 1 {
            return Ok(());
        }
        self.inner.watched(|guard| guard.set(|settings| settings.timeout = timeout))
    }

    /// Collective over the world: watches over this rank until the watch is dropped. Heartbeats and
    /// ledgers go to `folder`, which all ranks share. When a rank waits for longer than `timeout`
    /// in a collective or for data, the job ends with a report of where each rank is, and exit code
    /// 1. A world of one rank needs no watch.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn watch(&self, folder: &Path, timeout: Duration) -> Result<Option<WatchdogGuard>> {
        if self.inner.world.nodes.len() == 1 {
            return Ok(None);
        }
        let world = self.world();
        // No rank may take files of an earlier job for this job's.
        let files = Files::new(folder, self.inner.world.nodes.clone());
        world.all_ok(if self.rank() == 0 { files.clear() } else { Ok(()) })?;
        let began = !self.inner.is_watched();
        world.all_ok(self.attend(files, Some(timeout), false))?;
        Ok(Some(WatchdogGuard { inner: self.inner.clone(), began }))
    }

    /// As [`Comm::watch`], by a rank of a job whose other ranks have met in `folder`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn watch_beside(&self, folder: &Path) -> Result<()> {
        if self.inner.world.nodes.len() == 1 || !self.inner.is_watched() {
            return Ok(());
        }
        self.attend(Files::new(folder, self.inner.world.nodes.clone()), None, false)
    }

    /// Collective over the world: a watch that began before goes on in a directory of its own, in
    /// the first of `places` that can be written on rank 0. In one that other nodes do not share,
    /// such as `/tmp`, a report tells of the ranks of one node.
    ///
    /// # Errors
    /// None of them can be written, or the message failed.
    pub fn watch_apart(&self, places: &[PathBuf]) -> Result<()> {
        if self.size() == 1 || !self.inner.is_watched() {
            return Ok(());
        }
        let world = self.world();
        let name = format!("watch-{}-{:x}", std::process::id(), spans::now());
        let create = || {
            let mut refused = Error::internal("no place for the watch");
            for place in places {
                let folder = place.join(&name);
                match std::fs::create_dir(&folder) {
                    Ok(()) => return Ok(folder),
                    Err(e) => {
                        refused = Error::io("create", &folder, e)
                            .hint("--set comm.timeout=0 does without")
                    }
                }
            }
            Err(refused)
        };
        let folder = world.all_ok(if self.rank() == 0 { create().map(Some) } else { Ok(None) })?;
        let told = folder
            .map(|folder| folder.to_string_lossy().into_owned().into_bytes())
            .unwrap_or_default();
        let told = world.gather_bytes(told).wait()?;
        let folder = PathBuf::from(String::from_utf8_lossy(&told[0]).into_owned());
        let attended = || {
            // Another node may have one of its own by this name.
            std::fs::create_dir_all(&folder).map_err(|e| Error::io("create", &folder, e))?;
            self.attend(Files::new(&folder, self.inner.world.nodes.clone()), None, true)
        };
        world.all_ok(attended())
    }

    /// Leaves signs of life in a directory from now on.
    fn attend(&self, files: Files, timeout: Option<Duration>, is_own: bool) -> Result<()> {
        let pulse = files.pulse(self.inner.world.rank);
        let place = WatchdogDirectory { files, pulse, is_own };
        let seat = self.inner.seat();
        let path = place.pulse.path.clone();
        self.inner.watched(|guard| {
            // One that cannot be written says so here.
            let written = place.pulse.write(&seat.heartbeat(guard.next_beat()).0);
            written
                .map_err(|e| Error::io("write", &path, e).hint("comm.timeout = 0 does without"))?;
            guard.set(|settings| {
                settings.timeout = timeout.unwrap_or(settings.timeout);
                settings.place = Some(place);
            })
        })
    }
}
