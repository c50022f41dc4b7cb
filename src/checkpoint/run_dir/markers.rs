//! Marker files of a run's directory by which trainer and evaluators signal each other that they
//! are done.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};

/// The status of a trainer at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunStatus {
    /// All steps are done, or an evaluator asked it to stop: there will be no more checkpoints.
    Finished,
    /// It saved a checkpoint and will be resumed.
    Preempted,
    /// It failed.
    Failed,
}

/// The content of the END marker: how the trainer ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// The number of finished steps.
    pub step: u64,
    /// The status of the trainer.
    pub status: RunStatus,
    /// The reason, unless all steps are done.
    pub reason: Option<String>,
}

/// The marker files of a run.
#[derive(Debug, Clone)]
pub struct Markers {
    run: PathBuf,
    /// Whether an unreadable marker was reported.
    is_reported: Arc<AtomicBool>,
}

impl Markers {
    /// Creates a handle to the markers in the directory of a run.
    pub fn new(run: &Path) -> Self {
        Self { run: run.to_path_buf(), is_reported: Arc::default() }
    }

    fn end_path(&self) -> PathBuf {
        self.run.join("END")
    }

    fn stop_path(&self) -> PathBuf {
        self.run.join("STOP")
    }

    /// Records that the trainer begins: removes an earlier END marker, which is returned, and
    /// earlier stop requests.
    ///
    /// # Errors
    /// Returns an error if a marker cannot be removed.
    pub fn begin(&self) -> Result<Option<End>> {
        let ended = self.ended();
        for path in [self.stop_path(), self.end_path()] {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != ErrorKind::NotFound => {
                    return Err(Error::io("remove", &path, e));
                }
                _ => {}
            }
        }
        Ok(ended)
    }

    /// Records that the trainer has ended.
    ///
    /// # Errors
    /// Returns an error if the marker cannot be written.
    pub fn end(&self, end: &End) -> Result<()> {
        let text = serde_json::to_string(end).map_err(|e| Error::internal(format!("END: {e}")))?;
        replace(&self.end_path(), &text)
    }

    /// Returns how the trainer ended, if it has ended.
    pub fn ended(&self) -> Option<End> {
        let path = self.end_path();
        let end = self.content(&path)?;
        serde_json::from_slice(&end).inspect_err(|e| self.report(&path, e)).ok()
    }

    /// Asks the trainer to stop, on behalf of an evaluator.
    ///
    /// # Errors
    /// Returns an error if the marker cannot be written.
    pub fn ask_to_stop(&self, why: &str) -> Result<()> {
        replace(&self.stop_path(), why)
    }

    /// Returns the reason why an evaluator asks the trainer to stop, if one does.
    pub fn asked_to_stop(&self) -> Option<String> {
        let why = self.content(&self.stop_path())?;
        Some(String::from_utf8_lossy(&why).into_owned())
    }

    /// Returns the content of a marker, if it exists. An unreadable one is reported, and tried
    /// again the next time.
    fn content(&self, path: &Path) -> Option<Vec<u8>> {
        match safe_open::read(path) {
            Ok(content) => Some(content),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => {
                self.report(path, &e);
                None
            }
        }
    }

    /// Warns about an unreadable marker, only once, since markers are polled.
    fn report(&self, path: &Path, why: &dyn std::fmt::Display) {
        if !self.is_reported.swap(true, Ordering::Relaxed) {
            log::warn!("{} counts as missing while it cannot be read: {why}", path.display());
        }
    }
}

fn replace(path: &Path, line: &str) -> Result<()> {
    own_files::replace(path, format!("{line}\n")).map_err(|e| Error::io("write", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_that_cannot_be_read_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let marks = Markers::new(dir.path());
        assert!(marks.ended().is_none() && !marks.is_reported.load(Ordering::Relaxed));
        fs::write(dir.path().join("END"), "{").unwrap();
        assert!(marks.ended().is_none() && marks.is_reported.load(Ordering::Relaxed));
        // A stop request counts even if its reason is not valid UTF-8.
        fs::write(dir.path().join("STOP"), b"no better\xff").unwrap();
        assert_eq!(marks.asked_to_stop().unwrap(), "no better\u{fffd}");
        let marks = Markers::new(dir.path());
        fs::remove_file(dir.path().join("STOP")).unwrap();
        fs::create_dir(dir.path().join("STOP")).unwrap();
        assert!(marks.asked_to_stop().is_none() && marks.is_reported.load(Ordering::Relaxed));
    }

    #[test]
    fn a_beginning_forgets_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let marks = Markers::new(dir.path());
        assert_eq!(marks.begin().unwrap(), None);
        assert!(marks.ended().is_none() && marks.asked_to_stop().is_none());
        let end = End { step: 5, status: RunStatus::Preempted, reason: Some("SIGTERM".into()) };
        marks.end(&end).unwrap();
        marks.ask_to_stop("no better for 3 evaluations").unwrap();
        assert_eq!(
            (marks.ended(), marks.asked_to_stop().as_deref()),
            (Some(end.clone()), Some("no better for 3 evaluations\n"))
        );
        assert_eq!(marks.begin().unwrap(), Some(end));
        assert!(marks.ended().is_none() && marks.asked_to_stop().is_none());
    }
}
