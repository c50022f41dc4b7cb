//! The holder's side of a lease: it beats, and its holder learns when it was taken away.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::fs_clock::{Open, System};
use super::{LeaseRecord, Leases, Times};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn;

/// A lease that this process holds, until it is dropped.
#[derive(Debug)]
pub struct LeaseGuard {
    grip: Arc<LeaseState>,
    /// The directory that is removed with its last lease.
    clears: Option<Leases>,
    /// None only while dropping, and where somebody else beats.
    stop: Option<Sender<()>>,
    beats: Option<JoinHandle<()>>,
}

/// The holder's knowledge of its lease.
#[derive(Debug)]
struct LeaseState {
    path: PathBuf,
    system: Arc<dyn System>,
    token: String,
    times: Times,
    /// The lease as it is written next, and its file.
    file: Mutex<(LeaseRecord, Box<dyn Open>)>,
    /// Time at which the lease was last known to be held.
    known: Mutex<Duration>,
    /// The error, once the lease is lost.
    lost: Mutex<Option<Error>>,
}

impl LeaseState {
    /// Finds out whether the lease is still held.
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
                // For a moment, another process may have it under another name.
                Err(_) if attempts < ATTEMPTS => {}
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    break self.taken("somebody who removed it");
                }
                // The holder is not known: that is no proof of another one.
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
            .hint("this process stood still for too long, or the file was removed: only the new holder may go on")
    }

    /// Writes the lease once more, with what `change` changes. Whether it was lost: then nothing is
    /// written.
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
        // It never gets shorter.
        if let Err(e) = held.text().and_then(|text| open.rewrite(text.as_bytes())) {
            log::warn!("cannot touch {}: {e}", self.path.display());
        }
        Ok(())
    }
}

/// Attempts to read a lease before the check gives up.
const ATTEMPTS: usize = 5;

impl LeaseGuard {
    /// Rewrites a lease until it is dropped.
    pub(super) fn hold(
        path: PathBuf,
        held: LeaseRecord,
        open: Box<dyn Open>,
        of: &Leases,
    ) -> Result<Self> {
        let system = of.system.clone();
        let times = of.times;
        let token = held.token.clone();
        let known = system.now().into();
        let has_thread = system.has_threads();
        let file = (held, open).into();
        let grip =
            Arc::new(LeaseState { path, system, token, times, file, known, lost: None.into() });
        if !has_thread {
            return Ok(Self { grip, clears: None, stop: None, beats: None });
        }
        let (stop, stopped) = channel();
        let mine = grip.clone();
        let beat = move || {
            while stopped.recv_timeout(times.beat) == Err(RecvTimeoutError::Timeout) {
                if mine.beat(|_| {}).is_err() {
                    return;
                }
            }
        };
        let beats = spawn("lease", beat)?;
        Ok(Self { grip, clears: None, stop: Some(stop), beats: Some(beats) })
    }

    /// Beats where no thread does.
    ///
    /// # Errors
    /// The lease was lost.
    pub(super) fn beat_here(&self) -> Result<()> {
        if self.beats.is_some() {
            self.grip.lost().map_or(Ok(()), Err)
        } else {
            self.grip.beat(|_| {})
        }
    }

    /// A lease that was taken over counts as held from now on.
    ///
    /// # Errors
    /// It was lost, or cannot be read.
    pub(super) fn settled(&self) -> Result<()> {
        self.grip.check()?;
        self.grip.beat(|held| held.settling = false)
    }

    /// The same, and nothing is left behind in the directory once it is dropped.
    pub(super) fn clearing(mut self, leases: Leases) -> Self {
        self.clears = Some(leases);
        self
    }

    /// Looks whether this process still holds it: before anything is changed that only the holder
    /// may change.
    ///
    /// # Errors
    /// Another process holds it, or it cannot be read.
    pub fn check(&self) -> Result<()> {
        self.grip.check()
    }

    /// As [`LeaseGuard::check`], but looks at the file only if that was not done for a while: for
    /// every step.
    ///
    /// # Errors
    /// Another process holds it.
    pub fn check_often(&self) -> Result<()> {
        if let Some(lost) = self.grip.lost() {
            return Err(lost);
        }
        let known = *self.grip.known.lock().unwrap_or_else(PoisonError::into_inner);
        if self.grip.system.now() - known < self.grip.times.dead / 2 {
            return Ok(());
        }
        // This process stood still. While the file cannot be read, nobody else can read it either.
        self.grip.check().or_else(|e| self.grip.lost().map_or(Ok(()), |_| Err(e)))
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(beats) = self.beats.take() {
            // It does nothing that could panic.
            let _ = beats.join();
        }
        // A process that stood still for long may find its lease taken by another.
        match self.grip.check().and_then(|()| {
            let path = &self.grip.path;
            self.grip.system.remove(path).map_err(|e| Error::io("remove", path, e))
        }) {
            Ok(()) => self.clears.iter().for_each(Leases::clear),
            Err(e) => log::warn!("{}", e.message()),
        }
    }
}
