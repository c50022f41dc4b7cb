//! The coordinator's write-ahead log: the last committed step and its update. A restarted
//! coordinator applies that update again, which is a no-op on servers that have applied it, and
//! continues from there.
//!
//! The log consists of two files in the directory `servers` of the run: `terms.json`, written when
//! servers are assigned their ranges, and `journal.json`, to which a line is appended before each
//! update. They survive a crash of the process but not necessarily of the host: without them, or if
//! servers have lost their ranges, the run resumes from its last checkpoint.
//!
//! Every step is written. In synchronous training servers accept only the last step, and in
//! asynchronous training every batch that finished after the last line is recomputed. Only the last
//! line counts, so the file is replaced by that line when it gets large.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
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

/// The size in bytes at which the journal is replaced by its last line.
const COMPACTED_AT: usize = 1 << 20;

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
    /// The time from the record of the previous step to the commit of this one, in seconds, without
    /// evaluations.
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

    /// Returns a writer of committed steps.
    pub fn writer(&self) -> WalWriter {
        WalWriter { log: self.clone(), file: None, bytes: 0 }
    }

    /// Returns the last committed step, if there is one.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn read(&self) -> Result<Option<(WalHeader, WalEntry)>> {
        let grounds: Option<WalHeader> = self.parse("terms.json", |text| text)?;
        let found = grounds.zip(self.parse::<WalEntry>("journal.json", last_line)?);
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
        self.write(name, &json_line(value)?)
    }

    /// Replaces a file by this text.
    fn write(&self, name: &str, text: &[u8]) -> Result<()> {
        let path = self.path(name);
        let new = self.path(&format!("{name}.new"));
        own_files::write(&new, text)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|e| Error::io("write", &path, e))
    }

    /// Returns the content of the part of a file that `part` selects, or none if the file does not
    /// exist or, with a warning, if it is truncated or of another version.
    fn parse<T: DeserializeOwned>(
        &self,
        name: &str,
        part: fn(&[u8]) -> &[u8],
    ) -> Result<Option<T>> {
        let path = self.path(name);
        let text = match safe_open::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => {
                let hint = "check why it cannot be read; without it, the run resumes from its last checkpoint";
                return Err(Error::io("read", &path, e).hint(hint));
            }
        };
        Ok(serde_json::from_slice(part(&text))
            .inspect_err(|e| log::warn!("{}: {e}", path.display()))
            .ok())
    }
}

/// Appends committed steps to the log of a run.
#[derive(Debug)]
pub struct WalWriter {
    log: WriteAheadLog,
    /// The journal, open to append, once a step was written.
    file: Option<File>,
    /// The size of the journal in bytes.
    bytes: usize,
}

impl WalWriter {
    /// Appends a committed step. The first one replaces the journal of a previous coordinator.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn append(&mut self, entry: &WalEntry) -> Result<()> {
        let line = json_line(entry)?;
        let path = self.log.path("journal.json");
        if let Some(file) = &mut self.file
            && self.bytes + line.len() <= COMPACTED_AT
        {
            self.bytes += line.len();
            return file.write_all(&line).map_err(|e| Error::io("write", &path, e));
        }
        self.file = None;
        self.log.write("journal.json", &line)?;
        let file = own_files::append(&path).map_err(|e| Error::io("write", &path, e))?;
        self.file = Some(file);
        self.bytes = line.len();
        Ok(())
    }

    /// Removes the committed steps, so that they are not resumed from.
    ///
    /// # Errors
    /// Returns an error if the file cannot be removed.
    pub fn clear(&mut self) -> Result<()> {
        self.file = None;
        self.log.clear()
    }
}

/// Returns a value as a line of JSON.
fn json_line(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut line =
        serde_json::to_vec(value).map_err(|e| Error::internal(format!("the journal: {e}")))?;
    line.push(b'\n');
    Ok(line)
}

/// Returns the last complete line of a text. A line without its end was being written when the
/// coordinator died, before the update that it announces was sent.
fn last_line(text: &[u8]) -> &[u8] {
    let Some(end) = text.iter().rposition(|byte| *byte == b'\n') else { return &[] };
    let first = text[..end].iter().rposition(|byte| *byte == b'\n').map_or(0, |before| before + 1);
    &text[first..end]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::MetadataExt as _;

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
                ahead: BTreeMap::from([(5, 7), (9, 10)]),
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
            network: None,
            workers: 2,
            vocabulary: Some(65),
            preprocessing: None,
            start: Progress::default(),
            pieces: vec![],
            row_width: None,
            addresses: vec!["host:1".into()],
            trace: false,
            metrics: vec![],
        };
        let grounds = WalHeader { terms, trained_on: None };
        journal.begin(&grounds).unwrap();
        assert_eq!(journal.read().unwrap(), None);
        let path = dir.path().join("journal.json");
        let mut writer = journal.writer();
        for step in [3, 4] {
            writer.append(&entry(7, step)).unwrap();
            assert_eq!(journal.read().unwrap(), Some((grounds.clone(), entry(7, step))));
        }
        // The update of a step that was not written to its end was not sent.
        let mut file = own_files::append(&path).unwrap();
        file.write_all(b"{\"generation\":7,\"before\"").unwrap();
        assert_eq!(journal.read().unwrap(), Some((grounds.clone(), entry(7, 4))));
        // The next coordinator starts the file anew.
        let mut writer = journal.writer();
        writer.append(&entry(7, 5)).unwrap();
        assert_eq!(journal.read().unwrap(), Some((grounds.clone(), entry(7, 5))));
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 1);
        // An entry of an earlier generation is ignored.
        writer.append(&entry(6, 4)).unwrap();
        assert_eq!(journal.read().unwrap(), None);
        fs::write(&path, "{\"generation\": 7,\n").unwrap();
        assert_eq!(journal.read().unwrap(), None);
        writer.clear().unwrap();
        writer.clear().unwrap();
        assert_eq!(journal.read().unwrap(), None);
        writer.append(&entry(7, 6)).unwrap();
        assert_eq!(journal.read().unwrap(), Some((grounds, entry(7, 6))));
        writer.clear().unwrap();
        // A file that cannot be read is an error, because it may have a step.
        fs::create_dir(&path).unwrap();
        let error = journal.read().unwrap_err().to_string();
        assert!(
            error.contains("journal.json") && error.contains("hint: check why it cannot be read"),
            "{error}"
        );
        fs::remove_dir(&path).unwrap();
    }

    #[test]
    fn steps_are_appended_until_the_journal_is_large() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        let mut writer = WriteAheadLog::at(dir.path()).writer();
        let line = json_line(&entry(7, 1000)).unwrap().len();
        let mut file_changes = 0;
        let mut before = None;
        for step in 1000..4000 {
            writer.append(&entry(7, step)).unwrap();
            let metadata = fs::metadata(&path).unwrap();
            assert!(metadata.len() as usize <= COMPACTED_AT, "step {step}: {}", metadata.len());
            file_changes += usize::from(before.replace(metadata.ino()) != Some(metadata.ino()));
        }
        // The file is created, and then replaced each time that it is full.
        assert_eq!(file_changes, (3000 * line).div_ceil(COMPACTED_AT / line * line), "{line}");
    }
}
