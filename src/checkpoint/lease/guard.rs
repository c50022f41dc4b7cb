//! The holder's side of a lease: writes heartbeats, and detects when the lease was lost.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::fs_clock::{LeaseFile, System};
use super::{LeaseRecord, Leases, Times};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn;

/// A lease that this process holds until the guard is dropped.
#[derive(Debug)]
pub struct LeaseGuard {
    state: Arc<LeaseState>,
    /// The leases whose directory is removed with its last lease.
    clears: Option<Leases>,
    /// `None` only while dropping, and without a heartbeat thread.
    stop: Option<Sender<()>>,
    beats: Option<JoinHandle<()>>,
}

/// The holder's view of its lease.
#[derive(Debug)]
struct LeaseState {
    path: PathBuf,
    system: Arc<dyn System>,
    token: String,
    times: Times,
    /// The next record to write, and the file.
    file: Mutex<(LeaseRecord, Box<dyn LeaseFile>)>,
    /// The time at which the lease was last known to be held.
    known: Mutex<Duration>,
    /// The error, once the lease is lost.
    lost: Mutex<Option<Error>>,
}

impl LeaseState {
    /// Checks that the lease is still held.
    fn check(&self) -> Result<()> {
        if let Some(lost) = self.lost() {
            return Err(lost);
        }
        let mut attempts = 0;
        let lost = loop {
            attempts += 1;
            match self.system.read(&self.path) {
                Ok(bytes) => match serde_json::from_slice::<LeaseRecord>(&bytes) {
                    Ok(held) if held.token == self.token => {
                        *self.known.lock().unwrap_or_else(PoisonError::into_inner) =
                            self.system.now();
                        return Ok(());
                    }
                    Ok(held) => break self.taken(&held.holder.to_string()),
                    // It is being written.
                    Err(_) if attempts < ATTEMPTS => {}
                    Err(_) => break self.taken("an unknown process"),
                },
                // Another process may have renamed it for a moment.
                Err(_) if attempts < ATTEMPTS => {}
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    break self.taken("a process that removed the file");
                }
                // The holder is unknown, which does not mean that another process holds it.
                Err(e) => {
                    return Err(Error::io("read the lease", &self.path, e)
                        .hint("see whether its disk works"));
                }
            }
            self.system.sleep(self.times.beat / 50);
        };
        *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(lost.clone());
        Err(lost)
    }

    fn lost(&self) -> Option<Error> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn taken(&self, by: &str) -> Error {
        Error::input(format!("the lease {} was taken by {by}", self.path.display()))
                .hint("this process was suspended for too long, or the file was removed: only the new holder may continue")
    }

    /// Rewrites the lease with the changes of `change`. Returns an error, and writes nothing, if it
    /// was lost.
    fn beat(&self, change: impl FnOnce(&mut LeaseRecord)) -> Result<()> {
        if let Err(e) = self.check() {
            log::warn!("{}", e.message());
            if self.lost().is_some() {
                return Err(e);
            }
        }
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let (held, open) = &mut *file;
        change(held);
        held.beats += 1;
        // The record never gets shorter.
        if let Err(e) = held.text().and_then(|text| open.rewrite(text.as_bytes())) {
            log::warn!("cannot touch {}: {e}", self.path.display());
        }
        Ok(())
    }

    /// Writes heartbeats until the sender of `stopped` is dropped or the lease is lost.
    fn write_heartbeats(&self, stopped: &Receiver<()>) {
        while stopped.recv_timeout(self.times.beat) == Err(RecvTimeoutError::Timeout) {
            if self.beat(|_| {}).is_err() {
                return;
            }
        }
    }
}

/// Attempts to read a lease before a check gives up.
const ATTEMPTS: usize = 5;

impl LeaseGuard {
    /// Creates a guard that rewrites the lease until it is dropped.
    pub(super) fn hold(
        path: PathBuf,
        held: LeaseRecord,
        open: Box<dyn LeaseFile>,
        leases: &Leases,
    ) -> Result<Self> {
        let system = leases.system.clone();
        let times = leases.times;
        let token = held.token.clone();
        let known = system.now().into();
        let has_thread = system.has_threads();
        let file = (held, open).into();
        let state =
            Arc::new(LeaseState { path, system, token, times, file, known, lost: None.into() });
        if !has_thread {
            return Ok(Self { state, clears: None, stop: None, beats: None });
        }
        let (stop, stopped) = channel();
        let mine = state.clone();
        let beats = spawn("lease", move || mine.write_heartbeats(&stopped))?;
        Ok(Self { state, clears: None, stop: Some(stop), beats: Some(beats) })
    }

    /// Writes a heartbeat if no thread does.
    ///
    /// # Errors
    /// Returns an error if the lease was lost.
    pub(super) fn write_heartbeat(&self) -> Result<()> {
        if self.beats.is_some() {
            self.state.lost().map_or(Ok(()), Err)
        } else {
            self.state.beat(|_| {})
        }
    }

    /// Marks a lease that was taken over as settled.
    ///
    /// # Errors
    /// Returns an error if the lease was lost or cannot be read.
    pub(super) fn mark_settled(&self) -> Result<()> {
        self.state.check()?;
        self.state.beat(|held| held.settling = false)
    }

    /// Makes the guard remove the directory, too, if no other lease is left in it when it is
    /// dropped.
    pub(super) fn with_cleanup(mut self, leases: Leases) -> Self {
        self.clears = Some(leases);
        self
    }

    /// Checks that this process still holds the lease. Call it before every change that only the
    /// holder may make.
    ///
    /// # Errors
    /// Returns an error if another process holds the lease, or it cannot be read.
    pub fn check(&self) -> Result<()> {
        self.state.check()
    }

    /// Like [`LeaseGuard::check`], but reads the file only if it was not read for a while: cheap
    /// enough for every step.
    ///
    /// # Errors
    /// Returns an error if another process holds the lease.
    pub fn check_often(&self) -> Result<()> {
        if let Some(lost) = self.state.lost() {
            return Err(lost);
        }
        let known = *self.state.known.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state.system.now() - known < self.state.times.dead / 2 {
            return Ok(());
        }
        // This process was suspended. While the file cannot be read, no other process can read it
        // either.
        self.state.check().or_else(|e| self.state.lost().map_or(Ok(()), |_| Err(e)))
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(beats) = self.beats.take() {
            // The thread does nothing that could panic.
            let _ = beats.join();
        }
        // If this process was suspended for long, another may have taken the lease.
        match self.state.check().and_then(|()| {
            let path = &self.state.path;
            self.state.system.remove(path).map_err(|e| Error::io("remove", path, e))
        }) {
            Ok(()) => self.clears.iter().for_each(Leases::clear),
            Err(e) => log::warn!("{}", e.message()),
        }
    }
}
