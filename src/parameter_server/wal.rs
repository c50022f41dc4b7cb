//! The coordinator's journal: the step that it has decided on last, and its update. A coordinator
//! that is started again makes that update once more, which changes nothing on servers that have
//! made it, and goes on from there.
//!
//! Two files in the directory `servers` of the run: `terms.json`, written when servers take their
//! ranges, and `journal.json`, written before each update. They outlive a process and need not
//! outlive a host: without them, or on servers that have lost their ranges, the run goes on from
//! its last checkpoint.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::protocol::{Constants, bits};
use super::run_spec::RunSpec;
use super::scheduler::Done;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};
use hpctrain_checkpoint::Progress;
use hpctrain_data::TrainedOn;

/// The part that does not change while servers have their ranges.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WalHeader {
    /// The terms.
    pub terms: RunSpec,
    /// The data of the run so far.
    pub trained_on: Option<TrainedOn>,
}

/// A step whose results are known, and whose update is under way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WalEntry {
    /// The start of the servers that it belongs to.
    pub generation: u64,
    /// Progress before it.
    pub before: Progress,
    /// The step.
    pub decided: CommittedStep,
    /// Batches of workers' own that are done, where they train so.
    pub batches: Option<Done>,
}

/// The results of a step, and all that its update needs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CommittedStep {
    /// Mean loss.
    #[serde(with = "bits")]
    pub loss: f64,
    /// Norm of the gradient, before clipping.
    #[serde(with = "bits")]
    pub norm: f64,
    /// Learning rate.
    #[serde(with = "bits")]
    pub lr: f64,
    /// Whether it is left out, in whole or in part.
    pub skipped: bool,
    /// Seconds of the slowest worker, or the mean of workers that do not wait.
    #[serde(with = "bits")]
    pub compute: f64,
    /// Seconds from the step before to the decision.
    #[serde(with = "bits")]
    pub seconds: f64,
    /// Samples of the run before the first that is not trained on.
    pub position: u64,
    /// The update that all servers make; none where they apply each gradient as it comes.
    pub update: Option<Update>,
}

/// An update that all servers make.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// Its constants; none leaves the step out.
    pub hyper: Option<Constants>,
    /// Factors of tensors by unit, as bits.
    pub trust: Vec<Vec<u32>>,
}

/// The journal of a run.
#[derive(Debug, Clone)]
pub struct Journal {
    dir: PathBuf,
}

impl Journal {
    /// That in the directory `dir`.
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.into() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Servers have taken their ranges.
    ///
    /// # Errors
    /// The file system refused.
    pub fn begin(&self, grounds: &WalHeader) -> Result<()> {
        self.clear()?;
        self.replace("terms.json", grounds)
    }

    /// A step is decided on.
    ///
    /// # Errors
    /// The file system refused.
    pub fn decide(&self, entry: &WalEntry) -> Result<()> {
        self.replace("journal.json", entry)
    }

    /// The last step that was decided on, if one was.
    ///
    /// # Errors
    /// Returns an error if the file system does not give the files.
    pub fn read(&self) -> Result<Option<(WalHeader, WalEntry)>> {
        let grounds: Option<WalHeader> = self.parse("terms.json")?;
        let found = grounds.zip(self.parse::<WalEntry>("journal.json")?);
        Ok(found.filter(|(grounds, entry)| grounds.terms.generation == entry.generation))
    }

    /// Nothing is to be gone on with.
    ///
    /// # Errors
    /// The file system refused.
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

    /// The content of a file. None if there is no such file, or, with a warning, if it is torn or
    /// of another version.
    fn parse<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let path = self.path(name);
        let text = match safe_open::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => {
                let hint = "see why it cannot be read; without it, the run goes on from its last checkpoint";
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
    use crate::scheduler::Batch;
    use hpctrain_config::Config;

    #[test]
    fn the_last_step_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::at(dir.path());
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
        let batch = Batch { loss: f64::INFINITY, norm: 1.0, staleness: None, compute: 0.1 };
        let entry = |generation, step| WalEntry {
            generation,
            before: Progress { step, ..Progress::default() },
            decided: CommittedStep {
                loss: 0.1 + 0.2,
                norm: f64::NEG_INFINITY,
                update: Some(Update { hyper: None, trust: vec![vec![1], vec![]] }),
                ..CommittedStep::default()
            },
            batches: Some(Done {
                low: 3,
                ahead: BTreeSet::from([5, 9]),
                untaken: vec![batch],
                histogram: BTreeMap::from([(2, 7)]),
            }),
        };
        for step in [3, 4] {
            journal.decide(&entry(7, step)).unwrap();
            assert_eq!(journal.read().unwrap(), Some((grounds.clone(), entry(7, step))));
        }
        // One of servers that began before.
        journal.decide(&entry(6, 4)).unwrap();
        assert_eq!(journal.read().unwrap(), None);
        fs::write(dir.path().join("journal.json"), "{\"generation\": 7,").unwrap();
        assert_eq!(journal.read().unwrap(), None);
        journal.clear().unwrap();
        journal.clear().unwrap();
        // One that cannot be read may name a step.
        let path = dir.path().join("journal.json");
        fs::create_dir(&path).unwrap();
        let error = journal.read().unwrap_err().to_string();
        assert!(
            error.contains("journal.json") && error.contains("hint: see why it cannot be read"),
            "{error}"
        );
        fs::remove_dir(&path).unwrap();
    }
}
