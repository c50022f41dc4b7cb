//! The coordinator's write-ahead log: the last committed step and its update. A restarted
//! coordinator applies that update again, which is a no-op on servers that have applied it, and
//! continues from there.
//!
//! The log consists of two files in the directory `servers` of the run: `terms.json`, written when
//! servers are assigned their ranges, and `journal.json`, written before each update. They survive
//! a crash of the process but not necessarily of the host: without them, or if servers have lost
//! their ranges, the run resumes from its last checkpoint.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::protocol::{HyperBits, bits};
use super::run_spec::RunSpec;
use super::scheduler::FinishedBatches;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};
use hpctrain_checkpoint::Progress;
use hpctrain_data::TrainedOn;

/// The part of the log that does not change while servers hold their ranges.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WalHeader {
    /// The specification of the run.
    pub terms: RunSpec,
    /// The data that the run has been trained on.
    pub trained_on: Option<TrainedOn>,
}

/// A committed step whose update may not have been applied yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WalEntry {
    /// The generation of the servers.
    pub generation: u64,
    /// The progress before the step.
    pub before: Progress,
    /// The step.
    pub decided: CommittedStep,
    /// The batches that are done, in asynchronous training.
    pub batches: Option<FinishedBatches>,
}

/// The results of a step, and everything that its update needs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CommittedStep {
    /// The mean loss.
    #[serde(with = "bits")]
    pub loss: f64,
    /// The gradient norm before clipping.
    #[serde(with = "bits")]
    pub norm: f64,
    /// The learning rate.
    #[serde(with = "bits")]
    pub lr: f64,
    /// Whether the update is skipped, or in asynchronous training that of some batches.
    pub skipped: bool,
    /// The compute time of the slowest worker in seconds, or in asynchronous training the mean.
    #[serde(with = "bits")]
    pub compute: f64,
    /// The time from the start of the step to its commit, in seconds.
    #[serde(with = "bits")]
    pub seconds: f64,
    /// The number of samples before the first that was not trained on.
    pub position: u64,
    /// The update of all servers; none in asynchronous training.
    pub update: Option<Update>,
}

/// An update of all servers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// The constants; none skips the update.
    pub hyper: Option<HyperBits>,
    /// The trust ratios of tensors by unit, as bits.
    pub trust: Vec<Vec<u32>>,
}

/// The write-ahead log of a run.
#[derive(Debug, Clone)]
pub struct WriteAheadLog {
    dir: PathBuf,
}

impl WriteAheadLog {
    /// Returns the log in the directory `dir`.
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.into() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Starts the log after servers were assigned their ranges.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn begin(&self, grounds: &WalHeader) -> Result<()> {
        self.clear()?;
        self.replace("terms.json", grounds)
    }

    /// Records a committed step.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn append(&self, entry: &WalEntry) -> Result<()> {
        self.replace("journal.json", entry)
    }

    /// Returns the last committed step, if there is one.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn read(&self) -> Result<Option<(WalHeader, WalEntry)>> {
        let grounds: Option<WalHeader> = self.parse("terms.json")?;
        let found = grounds.zip(self.parse::<WalEntry>("journal.json")?);
        Ok(found.filter(|(grounds, entry)| grounds.terms.generation == entry.generation))
    }

    /// Removes the committed step, so that it is not resumed from.
    ///
    /// # Errors
    /// Returns an error if the file cannot be removed.
    pub fn clear(&self) -> Result<()> {
        let path = self.path("journal.json");
        match fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io("remove", &path, e)),
            _ => Ok(()),
        }
    }

    fn replace(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let (path, new) = (self.path(name), self.path(&format!("{name}.new")));
        let text =
            serde_json::to_vec(value).map_err(|e| Error::internal(format!("the journal: {e}")))?;
        own_files::write(&new, text)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|e| Error::io("write", &path, e))
    }

    /// Returns the content of a file, or none if the file does not exist or, with a warning, if it
    /// is truncated or of another version.
    fn parse<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let path = self.path(name);
        let text = match safe_open::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => {
                let hint = "check why it cannot be read; without it, the run resumes from its last checkpoint";
                return Err(Error::io("read", &path, e).hint(hint));
            }
        };
        Ok(serde_json::from_slice(&text)
            .inspect_err(|e| log::warn!("{}: {e}", path.display()))
            .ok())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::scheduler::BatchResult;
    use hpctrain_config::Config;

    /// Returns the entry of a step.
    fn entry(generation: u64, step: u64) -> WalEntry {
        let batch = BatchResult { loss: f64::INFINITY, norm: 1.0, staleness: None, compute: 0.1 };
        WalEntry {
            generation,
            before: Progress { step, ..Progress::default() },
            decided: CommittedStep {
                loss: 0.1 + 0.2,
                norm: f64::NEG_INFINITY,
                update: Some(Update { hyper: None, trust: vec![vec![1], vec![]] }),
                ..CommittedStep::default()
            },
            batches: Some(FinishedBatches {
                low: 3,
                ahead: BTreeSet::from([5, 9]),
                untaken: vec![batch],
                histogram: BTreeMap::from([(2, 7)]),
            }),
        }
    }

    #[test]
    fn the_last_step_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let journal = WriteAheadLog::at(dir.path());
        assert_eq!(journal.read().unwrap(), None);
        let terms = RunSpec {
            generation: 7,
            config: Config::default(),
            workers: 2,
            vocabulary: Some(65),
            preprocessing: None,
            start: Progress::default(),
            pieces: vec![],
            addresses: vec!["host:1".into()],
            trace: false,
        };
        let grounds = WalHeader { terms, trained_on: None };
        journal.begin(&grounds).unwrap();
        assert_eq!(journal.read().unwrap(), None);
        for step in [3, 4] {
            journal.append(&entry(7, step)).unwrap();
            assert_eq!(journal.read().unwrap(), Some((grounds.clone(), entry(7, step))));
        }
        // An entry of an earlier generation is ignored.
        journal.append(&entry(6, 4)).unwrap();
        assert_eq!(journal.read().unwrap(), None);
        fs::write(dir.path().join("journal.json"), "{\"generation\": 7,").unwrap();
        assert_eq!(journal.read().unwrap(), None);
        journal.clear().unwrap();
        journal.clear().unwrap();
        // A file that cannot be read is an error, because it may have a step.
        let path = dir.path().join("journal.json");
        fs::create_dir(&path).unwrap();
        let error = journal.read().unwrap_err().to_string();
        assert!(
            error.contains("journal.json") && error.contains("hint: check why it cannot be read"),
            "{error}"
        );
        fs::remove_dir(&path).unwrap();
    }
}
