//! The holder's side of a lease: it beats, and its holder learns when it was taken away.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::{Held, Leases, Times};
use crate::error::{Error, Result};

/// A lease that this process holds, until it is dropped.
#[derive(Debug)]
pub struct Lease {
    grip: Arc<Grip>,
    /// The directory that is removed with its last lease.
    clears: Option<Leases>,
    /// None only while dropping.
    stop: Option<Sender<()>>,
    beats: Option<JoinHandle<()>>,
}

/// The holder's knowledge of its lease.
#[derive(Debug)]
struct Grip {
    path: PathBuf,
    token: String,
    times: Times,
    /// Time at which the lease was last known to be held.
    known: Mutex<Instant>,
    /// The error, once the lease is lost.
    lost: Mutex<Option<Error>>,
}

impl Grip {
    /// Finds out whether the lease is still held.
    fn check(&self) -> Result<()> {
        if let Some(lost) = self.lost() {
            return Err(lost);
        }
        let mut attempts = 0;
        let lost = loop {
            attempts += 1;
            match fs::read(&self.path) {
                Ok(bytes) => match serde_json::from_slice::<Held>(&bytes) {
                    Ok(held) if held.token == self.token => {
                        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
                        return Ok(());
                    }
                    Ok(held) => break self.taken(&held.holder.to_string()),
                    // It is being written.
                    Err(_) if attempts < ATTEMPTS => {}
                    Err(_) => break self.taken("an unknown process"),
                },
                // For a moment, another process may have it under another name.
                Err(_) if attempts < ATTEMPTS => {}
                Err(e) if e.kind() == ErrorKind::NotFound => break self.taken("somebody who removed it"),
                // The holder is not known: that is no proof of another one.
                Err(e) => return Err(Error::io("read the lease", &self.path, e).hint("see whether its disk works")),
            }
            std::thread::sleep(self.times.beat / 50);
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
}

/// Attempts to read a lease before the check gives up.
const ATTEMPTS: usize = 5;

impl Lease {
    /// Rewrites a lease, which `file` is, until it is dropped.
    pub(super) fn hold(path: PathBuf, mut held: Held, file: File, times: Times) -> Result<Self> {
        let grip = Grip { path, token: held.token.clone(), times, known: Instant::now().into(), lost: None.into() };
        let grip = Arc::new(grip);
        let (stop, stopped) = channel();
        let mine = grip.clone();
        let beat = move || {
            // Here, because a disk takes its time, and a holder that dies meanwhile holds nothing.
            let mut written = file.sync_all();
            loop {
                if let Err(e) = written {
                    log::warn!("cannot touch {}: {e}", mine.path.display());
                }
                if stopped.recv_timeout(times.beat) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                if let Err(e) = mine.check() {
                    log::warn!("{}", e.message());
                    if mine.lost().is_some() {
                        return;
                    }
                }
                held.beats += 1;
                // A write, because it is the file system's clock that has to tell the time. It never gets shorter.
                let rewritten = held.text().and_then(|text| file.write_all_at(text.as_bytes(), 0));
                written = rewritten.and_then(|()| file.sync_data());
            }
        };
        let beats = std::thread::Builder::new().name("lease".into()).spawn(beat);
        let beats = beats.map_err(|e| Error::internal(format!("cannot start a lease's thread: {e}")))?;
        Ok(Self { grip, clears: None, stop: Some(stop), beats: Some(beats) })
    }

    /// The same, and nothing is left behind in the directory once it is dropped.
    pub(super) fn clearing(mut self, leases: Leases) -> Self {
        self.clears = Some(leases);
        self
    }

    /// Looks whether this process still holds it: before anything is changed that only the holder may change.
    ///
    /// # Errors
    /// Another process holds it, or it cannot be read.
    pub fn check(&self) -> Result<()> {
        self.grip.check()
    }

    /// As [`Lease::check`], but looks at the file only if that was not done for a while: for every step.
    ///
    /// # Errors
    /// Another process holds it.
    pub fn check_often(&self) -> Result<()> {
        if let Some(lost) = self.grip.lost() {
            return Err(lost);
        }
        let known = *self.grip.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.elapsed() < self.grip.times.dead / 2 {
            return Ok(());
        }
        // This process stood still. While the file cannot be read, nobody else can read it either.
        self.grip.check().or_else(|e| self.grip.lost().map_or(Ok(()), |_| Err(e)))
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
        match self.grip.check().and_then(|()| {
            let path = &self.grip.path;
            fs::remove_file(path).map_err(|e| Error::io("remove", path, e))
        }) {
            Ok(()) => self.clears.iter().for_each(Leases::clear),
            Err(e) => log::warn!("{}", e.message()),
        }
    }
}
