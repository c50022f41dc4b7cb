//! Descriptions of the files of data sets: looked up once in a job, and sent to its other ranks.
//!
//! The rank that looks keeps its answers in their order. All ranks open the same data by the same
//! configuration, so another one asks the same questions, and the answers that it is sent fit.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::Split;
use super::brief::{Before, Brief};
use super::sandbox::Sandbox;
use super::shard::Shard;
use super::spec::{DataSpec, Held};
use hpctrain_base::error::{Error, Result};

/// Shards that this process has opened to describe them.
static DESCRIBED: AtomicU64 = AtomicU64::new(0);

/// Number of shards that this process has opened to describe them, for tests of scale.
#[doc(hidden)]
pub fn described() -> u64 {
    DESCRIBED.load(Ordering::Relaxed)
}

/// Answers about files.
#[derive(Debug)]
pub struct ShardIndex(Source);

#[derive(Debug)]
enum Source {
    /// The files themselves.
    Files { sandbox: Sandbox, kept: Option<Kept> },
    /// The answers of another rank that are left.
    Told {
        left: VecDeque<Answer>,
        before: Before,
        /// Whether the files here are compared with the answers.
        compares: bool,
    },
}

/// Answers so far, to be sent.
#[derive(Debug, Default)]
struct Kept {
    answers: Vec<Answer>,
    before: Before,
}

/// An answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Answer {
    Held(Held),
    Files(Vec<PathBuf>),
    Shard(Brief),
}

impl ShardIndex {
    /// Looks at the files.
    pub(super) fn of_files() -> Self {
        Self(Source::Files { sandbox: Sandbox::default(), kept: None })
    }

    /// Looks at the files, and keeps the answers for [`ShardIndex::tell`].
    pub fn to_be_told() -> Self {
        Self(Source::Files { sandbox: Sandbox::default(), kept: Some(Kept::default()) })
    }

    /// Repeats the answers of another rank. `compares` them with the files that this rank sees: on
    /// one rank of each node, since nodes may have copies of their own.
    ///
    /// # Errors
    /// Returns an error if they are malformed.
    pub fn told(bytes: &[u8], compares: bool) -> Result<Self> {
        let left = serde_json::from_slice(bytes).map_err(|e| {
            Error::comm(format!("another rank sent malformed descriptions of data: {e}"))
        })?;
        Ok(Self(Source::Told { left, before: Before::default(), compares }))
    }

    /// The answers so far, for other ranks.
    ///
    /// # Errors
    /// Returns an error if they cannot be written.
    pub fn tell(self) -> Result<Vec<u8>> {
        let answers = match self.0 {
            Source::Files { kept, .. } => kept.unwrap_or_default().answers,
            Source::Told { .. } => {
                return Err(Error::internal("descriptions of another rank are sent again"));
            }
        };
        serde_json::to_vec(&answers)
            .map_err(|e| Error::internal(format!("descriptions of data: {e}")))
    }

    /// Location of the validation samples of a data set.
    ///
    /// # Errors
    /// As [`DataSpec::held`].
    pub fn held(&mut self, spec: &DataSpec) -> Result<Held> {
        match &mut self.0 {
            Source::Files { kept, .. } => {
                let held = spec.held()?;
                kept.iter_mut().for_each(|kept| kept.answers.push(Answer::Held(held)));
                Ok(held)
            }
            Source::Told { left, .. } => match left.pop_front() {
                Some(Answer::Held(held)) => Ok(held),
                _ => Err(other_question(&spec.path)),
            },
        }
    }

    /// The shards of a part of a data set.
    pub(super) fn files(&mut self, spec: &DataSpec, split: Split) -> Result<Vec<PathBuf>> {
        match &mut self.0 {
            Source::Files { kept, .. } => {
                let files = spec.files(split)?;
                kept.iter_mut().for_each(|kept| kept.answers.push(Answer::Files(files.clone())));
                Ok(files)
            }
            Source::Told { left, .. } => match left.pop_front() {
                Some(Answer::Files(files)) => Ok(files),
                _ => Err(other_question(&spec.path)),
            },
        }
    }

    /// The shard at `path`.
    pub(super) fn shard(&mut self, path: &Path, spec: &DataSpec) -> Result<Shard> {
        match &mut self.0 {
            Source::Files { sandbox, kept } => {
                DESCRIBED.fetch_add(1, Ordering::Relaxed);
                let mut shard = sandbox.shard(path, spec)?;
                if let Some(kept) = kept {
                    let brief = kept.before.shorten(&mut shard);
                    kept.answers.push(Answer::Shard(brief));
                }
                Ok(shard)
            }
            Source::Told { left, before, compares } => match left.pop_front() {
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
