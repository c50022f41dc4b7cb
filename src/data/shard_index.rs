//! Descriptions of the files of data sets: made once in a job, and sent to its other ranks.
//!
//! The rank that reads the files records its answers in order. All ranks open the same data with
//! the same configuration, so the others ask the same questions, and the recorded answers match.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::Split;
use super::sandbox::Sandbox;
use super::shard::Shard;
use super::shard_delta::{PreviousShard, ShardDelta};
use super::spec::{DataSpec, ValidationSource};
use hpctrain_base::error::{Error, Result};

/// The number of shards that this process has opened to describe them.
static DESCRIBED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of shards that this process has opened to describe them, for tests of scale.
#[doc(hidden)]
pub fn described() -> u64 {
    DESCRIBED.load(Ordering::Relaxed)
}

/// Answers questions about the files of data sets.
#[derive(Debug)]
pub struct ShardIndex(Source);

#[derive(Debug)]
enum Source {
    /// Reads the files, and records the answers if they are to be sent.
    Files { sandbox: Sandbox, recorded: Option<Recorded> },
    /// Repeats the answers of another rank.
    Received {
        left: VecDeque<Answer>,
        before: PreviousShard,
        /// Whether the files on this node are compared with the answers.
        compares: bool,
    },
}

/// The answers so far, to be sent.
#[derive(Debug, Default)]
struct Recorded {
    answers: Vec<Answer>,
    before: PreviousShard,
}

/// An answer to a question about the files.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Answer {
    ValidationSource(ValidationSource),
    Files(Vec<PathBuf>),
    Shard(ShardDelta),
}

impl ShardIndex {
    /// Creates an index that reads the files.
    pub(super) fn of_files() -> Self {
        Self(Source::Files { sandbox: Sandbox::default(), recorded: None })
    }

    /// Creates an index that reads the files, and records the answers for other ranks.
    pub fn recording() -> Self {
        Self(Source::Files { sandbox: Sandbox::default(), recorded: Some(Recorded::default()) })
    }

    /// Creates an index that repeats the answers of another rank, given in `bytes`. If `compares`,
    /// they are compared with the files that this rank sees: one rank of each node does so, since
    /// nodes may have their own copies.
    ///
    /// # Errors
    /// Returns an error if `bytes` are malformed.
    pub fn from_bytes(bytes: &[u8], compares: bool) -> Result<Self> {
        let left = serde_json::from_slice(bytes).map_err(|e| {
            Error::comm(format!("another rank sent malformed descriptions of data: {e}"))
        })?;
        Ok(Self(Source::Received { left, before: PreviousShard::default(), compares }))
    }

    /// Returns the answers so far in the form in which other ranks receive them.
    ///
    /// # Errors
    /// Returns an error if the answers cannot be serialised, or if they came from another rank.
    pub fn into_bytes(self) -> Result<Vec<u8>> {
        let answers = match self.0 {
            Source::Files { recorded, .. } => recorded.unwrap_or_default().answers,
            Source::Received { .. } => {
                return Err(Error::internal("descriptions of another rank are sent again"));
            }
        };
        serde_json::to_vec(&answers)
            .map_err(|e| Error::internal(format!("descriptions of data: {e}")))
    }

    /// Returns where the validation samples of a data set are.
    ///
    /// # Errors
    /// Returns an error if the data does not exist, or if no file matches a name that was given.
    pub fn validation_source(&mut self, spec: &DataSpec) -> Result<ValidationSource> {
        match &mut self.0 {
            Source::Files { recorded, .. } => {
                let source = spec.validation_source()?;
                if let Some(recorded) = recorded {
                    recorded.answers.push(Answer::ValidationSource(source));
                }
                Ok(source)
            }
            Source::Received { left, .. } => match left.pop_front() {
                Some(Answer::ValidationSource(source)) => Ok(source),
                _ => Err(other_question(&spec.path)),
            },
        }
    }

    /// Returns the shards of a split of a data set.
    pub(super) fn files(&mut self, spec: &DataSpec, split: Split) -> Result<Vec<PathBuf>> {
        match &mut self.0 {
            Source::Files { recorded, .. } => {
                let files = spec.files(split)?;
                recorded
                    .iter_mut()
                    .for_each(|recorded| recorded.answers.push(Answer::Files(files.clone())));
                Ok(files)
            }
            Source::Received { left, .. } => match left.pop_front() {
                Some(Answer::Files(files)) => Ok(files),
                _ => Err(other_question(&spec.path)),
            },
        }
    }

    /// Returns the shard at `path`.
    pub(super) fn shard(&mut self, path: &Path, spec: &DataSpec) -> Result<Shard> {
        match &mut self.0 {
            Source::Files { sandbox, recorded } => {
                DESCRIBED.fetch_add(1, Ordering::Relaxed);
                let mut shard = sandbox.shard(path, spec)?;
                if let Some(recorded) = recorded {
                    let brief = recorded.before.shorten(&mut shard);
                    recorded.answers.push(Answer::Shard(brief));
                }
                Ok(shard)
            }
            Source::Received { left, before, compares } => match left.pop_front() {
                Some(Answer::Shard(brief)) => {
                    let shard = before.complete(brief);
                    let shard = shard.ok_or_else(|| {
                        Error::comm("another rank sent a shard without its preprocessing")
                    })?;
                    if shard.path != path {
                        return Err(other_question(path));
                    }
                    if *compares {
                        shard.check_here(spec)?;
                    }
                    Ok(shard)
                }
                _ => Err(other_question(path)),
            },
        }
    }
}

fn other_question(path: &Path) -> Error {
    Error::internal(format!(
        "ranks open different data: rank 0 did not describe {} here",
        path.display()
    ))
}
