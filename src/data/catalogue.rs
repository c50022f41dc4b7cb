//! Descriptions of the files of data sets: looked up once in a job, and told to its other ranks.
//!
//! The rank that looks keeps its answers in their order. All ranks open the same data by the same configuration, so
//! another one asks the same questions, and the answers that it is told fit.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::preprocessing::Told;
use super::shard::Shard;
use super::spec::{DataSpec, Held};
use super::{Split, Tokenizer};
use crate::error::{Error, Result};

/// Shards that this process has opened to describe them.
static DESCRIBED: AtomicU64 = AtomicU64::new(0);

/// Number of shards that this process has opened to describe them, for tests of scale.
#[doc(hidden)]
pub fn described() -> u64 {
    DESCRIBED.load(Ordering::Relaxed)
}

/// Answers about files.
#[derive(Debug)]
pub struct Catalogue(Source);

#[derive(Debug)]
enum Source {
    /// The files themselves, with the answers so far if they are to be told.
    Files(Option<Vec<Answer>>),
    /// The answers of another rank that are left.
    Told {
        left: VecDeque<Answer>,
        /// Whether the files here are compared with the answers.
        compares: bool,
    },
}

/// An answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Answer {
    Held(Held),
    Files(Vec<PathBuf>),
    /// A shard, and its preprocessing unless that is the one of the shard before. Its tokenizer is apart.
    Shard(Box<Shard>, Option<Told>, OfText),
}

/// The tokenizer of a shard.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum OfText {
    /// That of the shard before.
    Same,
    Own(Option<Tokenizer>),
}

impl Catalogue {
    /// Looks at the files.
    pub(super) fn of_files() -> Self {
        Self(Source::Files(None))
    }

    /// Looks at the files, and keeps the answers for [`Catalogue::tell`].
    pub fn to_be_told() -> Self {
        Self(Source::Files(Some(Vec::new())))
    }

    /// Repeats the answers of another rank. `compares` them with the files that this rank sees: on one rank of each node, since nodes
    /// may have copies of their own.
    ///
    /// # Errors
    /// They are malformed.
    pub fn told(bytes: &[u8], compares: bool) -> Result<Self> {
        let mut answers: VecDeque<Answer> = serde_json::from_slice(bytes)
            .map_err(|e| Error::comm(format!("another rank sent malformed descriptions of data: {e}")))?;
        let mut last: Option<Arc<Told>> = None;
        let mut tokenizer = None;
        for answer in &mut answers {
            if let Answer::Shard(shard, told, of_text) = answer {
                if let OfText::Own(own) = std::mem::replace(of_text, OfText::Same) {
                    tokenizer = own;
                }
                shard.header.tokenizer.clone_from(&tokenizer);
                let told = told.take().map(Arc::new).or_else(|| last.clone());
                shard.told = told.ok_or_else(|| Error::comm("another rank sent a shard without its preprocessing"))?;
                last = Some(shard.told.clone());
            }
        }
        Ok(Self(Source::Told { left: answers, compares }))
    }

    /// The answers so far, for other ranks.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn tell(self) -> Result<Vec<u8>> {
        let answers = match self.0 {
            Source::Files(kept) => kept.unwrap_or_default(),
            Source::Told { .. } => return Err(Error::internal("what was told is told again")),
        };
        serde_json::to_vec(&answers).map_err(|e| Error::internal(format!("descriptions of data: {e}")))
    }

    /// Location of the validation samples of a data set.
    ///
    /// # Errors
    /// As [`DataSpec::held`].
    pub fn held(&mut self, spec: &DataSpec) -> Result<Held> {
        match &mut self.0 {
            Source::Files(kept) => {
                let held = spec.held()?;
                kept.iter_mut().for_each(|kept| kept.push(Answer::Held(held)));
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
            Source::Files(kept) => {
                let files = spec.files(split)?;
                kept.iter_mut().for_each(|kept| kept.push(Answer::Files(files.clone())));
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
            Source::Files(kept) => {
                DESCRIBED.fetch_add(1, Ordering::Relaxed);
                let mut shard = Shard::open(path, spec)?;
                let Some(kept) = kept else { return Ok(shard) };
                let before = kept.iter().rev().find_map(|answer| match answer {
                    Answer::Shard(before, ..) => Some(&before.told),
                    _ => None,
                });
                let tokenizer = kept.iter().rev().find_map(|answer| match answer {
                    Answer::Shard(.., OfText::Own(tokenizer)) => Some(tokenizer),
                    _ => None,
                });
                let of_text = match tokenizer {
                    Some(tokenizer) if *tokenizer == shard.header.tokenizer => OfText::Same,
                    _ => OfText::Own(shard.header.tokenizer.clone()),
                };
                // Lists of values may be long, and are mostly the same in all shards.
                let told = match before.filter(|before| **before == shard.told) {
                    Some(before) => {
                        shard.told = before.clone();
                        None
                    }
                    None => Some((*shard.told).clone()),
                };
                let mut answer = shard.clone();
                answer.header.tokenizer = None;
                kept.push(Answer::Shard(Box::new(answer), told, of_text));
                Ok(shard)
            }
            Source::Told { left, compares } => match left.pop_front() {
                Some(Answer::Shard(shard, ..)) if shard.path == path => {
                    if *compares {
                        shard.check_here(spec)?;
                    }
                    Ok(*shard)
                }
                _ => Err(other_question(path)),
            },
        }
    }
}

fn other_question(path: &Path) -> Error {
    Error::internal(format!("ranks open different data: rank 0 did not describe {} here", path.display()))
}
