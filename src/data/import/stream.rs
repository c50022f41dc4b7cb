//! Writing of a stream of ids to token shards.

use std::fmt;
use std::path::PathBuf;

use super::{Staged, part, refuse_shards, shard_name};
use crate::format::TokenShard;
use crate::{Split, Tokenizer};
use hpctrain_base::error::{Error, Result};

/// The validation split, the shards and the destination of the ids.
#[derive(Debug, Clone)]
pub struct StreamShards {
    /// The number of training shards.
    pub shards: usize,
    /// The fraction of the ids, from the end, that goes to the validation shard.
    pub val_fraction: f64,
    /// The directory to write into, which is created if missing and must not hold shards.
    pub out: PathBuf,
    /// The deflate level from 0 to 9; `None` does not compress.
    pub compress: Option<u8>,
}

/// The result of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The shards with their numbers of tokens, training first.
    pub shards: Vec<(PathBuf, usize)>,
    /// The number of ids.
    pub vocabulary: usize,
    /// The SHA-256 of the imported bytes, in hexadecimal.
    pub source_sha256: String,
}

impl fmt::Display for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, tokens) in &self.shards {
            writeln!(f, "{}: {tokens} tokens", path.display())?;
        }
        let tokens: usize = self.shards.iter().map(|(_, tokens)| tokens).sum();
        write!(
            f,
            "{tokens} tokens, vocabulary {}, source sha256 {}",
            self.vocabulary, self.source_sha256
        )
    }
}

/// The properties of a stream of ids to be written.
pub(super) struct Stream<'a> {
    /// The number of ids in the stream.
    pub count: usize,
    /// The tokenizer; `None` if only the number of ids is known.
    pub tokenizer: Option<&'a Tokenizer>,
    /// The number of different ids.
    pub vocabulary: usize,
    /// The imported file's name, without its directory.
    pub source: &'a str,
    pub source_sha256: String,
}

impl StreamShards {
    /// Creates the default options: one shard, with the last tenth of the ids for validation, not
    /// compressed.
    pub fn new(out: impl Into<PathBuf>) -> Self {
        Self { shards: 1, val_fraction: 0.1, out: out.into(), compress: None }
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.shards == 0 {
            return Err(Error::input("0 shards hold nothing").hint("ask for 1 shard or more"));
        }
        if !(0.0..1.0).contains(&self.val_fraction) {
            return Err(Error::input(format!(
                "validation fraction {} is outside 0..1",
                self.val_fraction
            ))
            .hint("0.1 keeps the last tenth of the text for validation, 0 keeps nothing"));
        }
        if let Some(level) = self.compress.filter(|&level| level > 9) {
            return Err(Error::input(format!("compression level {level} is outside 0..=9"))
                .hint("6 is a good choice"));
        }
        refuse_shards(&self.out)
    }

    /// Writes `train-00000.h5` … and, if the fraction leaves anything to it, `val-00000.h5`;
    /// `ids(first, count)` gives the ids.
    ///
    /// Shards get their names only after all of them are written.
    pub(super) fn write(
        &self,
        of: Stream<'_>,
        ids: impl Fn(usize, usize) -> Result<Vec<u32>>,
    ) -> Result<Imported> {
        let Stream { count, tokenizer, vocabulary, source, source_sha256 } = of;
        let num_train = ((1.0 - self.val_fraction) * count as f64) as usize;
        if self.shards > num_train {
            return Err(Error::input(format!(
                "{num_train} training tokens do not fill {} shards",
                self.shards
            ))
            .hint("ask for fewer shards or a smaller validation fraction"));
        }
        let train = (0..self.shards)
            .map(|shard| (Split::Train, shard, part(num_train, self.shards, shard)));
        let validation = (num_train < count).then_some((Split::Validation, 0, num_train..count));

        std::fs::create_dir_all(&self.out).map_err(|e| Error::io("create", &self.out, e))?;
        let mut staged = Staged::default();
        let mut shards = Vec::new();
        for (split, shard, range) in train.chain(validation) {
            let num_shards = if split == Split::Train { self.shards } else { 1 };
            let path = self.out.join(shard_name(split, shard as u64));
            shards.push((path.clone(), range.len()));
            let mut at = range.start;
            TokenShard {
                ids: &[],
                tokenizer,
                vocabulary,
                source,
                source_sha256: &source_sha256,
                split,
                shard,
                num_shards,
                compress: self.compress,
            }
            .write_by(staged.add(path), range.len(), &mut |count: usize| {
                at += count;
                ids(at - count, count)
            })?;
        }
        staged.publish()?;
        Ok(Imported { shards, vocabulary, source_sha256 })
    }
}
