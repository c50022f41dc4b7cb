//! From a text file to token shards.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use super::pieces::{PIECE, Pieces};
use super::spool::{Elements, Spooler};
use super::{Staged, hex, part, refuse_shards, shard_name};
use crate::data::format::TokenShard;
use crate::data::{Split, Tokenizer, TokenizerKind};
use crate::error::{Error, Result};

/// Input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportText {
    /// The text file, which may be larger than memory.
    pub input: PathBuf,
    /// Tokenizer of the text.
    pub tokenizer: TokenizerKind,
    /// The number of training shards.
    pub shards: usize,
    /// The share of the ids, from the end of the text, that goes to the validation shard.
    pub val_fraction: f64,
    /// The directory to write into; it is made if missing and may hold no shards yet.
    pub out: PathBuf,
    /// Deflate level from 0 to 9; `None` stores the ids as they are.
    pub compress: Option<u8>,
}

/// Result of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The shards with their numbers of tokens, training first.
    pub shards: Vec<(PathBuf, usize)>,
    /// The number of ids.
    pub vocabulary: usize,
    /// The SHA-256 of the text file, in hexadecimal.
    pub source_sha256: String,
}

impl fmt::Display for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, tokens) in &self.shards {
            writeln!(f, "{}: {tokens} tokens", path.display())?;
        }
        let tokens: usize = self.shards.iter().map(|(_, tokens)| tokens).sum();
        write!(f, "{tokens} tokens, vocabulary {}, source sha256 {}", self.vocabulary, self.source_sha256)
    }
}

/// Writes `train-00000.h5` … and, if the fraction leaves anything to it, `val-00000.h5`.
///
/// Shards get their names only after all of them are written.
pub fn import_text(import: &ImportText) -> Result<Imported> {
    import.check()?;
    let tokenized = tokenize(import)?;
    let Tokenized { tokenizer, ids, source_sha256 } = &tokenized;
    let source = import.input.file_name().unwrap_or_default().to_string_lossy();

    let num_train = ((1.0 - import.val_fraction) * ids.len() as f64) as usize;
    if import.shards > num_train {
        return Err(Error::input(format!("{num_train} training tokens do not fill {} shards", import.shards))
            .hint("ask for fewer shards or a smaller validation fraction"));
    }
    let train = (0..import.shards).map(|shard| (Split::Train, shard, part(num_train, import.shards, shard)));
    let validation = (num_train < ids.len()).then_some((Split::Validation, 0, num_train..ids.len()));

    std::fs::create_dir_all(&import.out).map_err(|e| Error::io("create", &import.out, e))?;
    let mut staged = Staged::default();
    let mut shards = Vec::new();
    for (split, shard, range) in train.chain(validation) {
        let num_shards = if split == Split::Train { import.shards } else { 1 };
        let path = import.out.join(shard_name(split, shard as u64));
        shards.push((path.clone(), range.len()));
        let mut at = range.start;
        let mut next = |count: usize| {
            at += count;
            tokenized.get(at - count, count)
        };
        TokenShard {
            ids: &[],
            tokenizer,
            source: &source,
            source_sha256,
            split,
            shard,
            num_shards,
            compress: import.compress,
        }
        .write_by(staged.add(path), range.len(), &mut next)?;
    }
    staged.publish()?;
    Ok(Imported { shards, vocabulary: tokenizer.vocabulary(), source_sha256: source_sha256.clone() })
}

impl ImportText {
    fn check(&self) -> Result<()> {
        if self.shards == 0 {
            return Err(Error::input("0 shards hold nothing").hint("ask for 1 shard or more"));
        }
        if !(0.0..1.0).contains(&self.val_fraction) {
            return Err(Error::input(format!("validation fraction {} is outside 0..1", self.val_fraction))
                .hint("0.1 keeps the last tenth of the text for validation, 0 keeps nothing"));
        }
        if let Some(level) = self.compress.filter(|&level| level > 9) {
            return Err(Error::input(format!("compression level {level} is outside 0..=9")).hint("6 is a good choice"));
        }
        refuse_shards(&self.out)
    }
}

/// A text as ids.
struct Tokenized {
    tokenizer: Tokenizer,
    ids: Elements<u32>,
    source_sha256: String,
}

/// Reads the text once, a piece at a time. Its ids wait in a file, or its characters where the ids are not known before
/// the end.
fn tokenize(import: &ImportText) -> Result<Tokenized> {
    let at = || import.input.display();
    let (mut hash, mut chars) = (Sha256::new(), BTreeSet::new());
    let mut ids = Spooler::create(&import.out)?;
    let mut pieces = Pieces::open(&import.input, import.tokenizer, PIECE)?;
    while let Some(piece) = pieces.next()? {
        hash.update(&piece);
        let some: Vec<u32> = match import.tokenizer {
            TokenizerKind::Byte => piece.iter().map(|&byte| u32::from(byte)).collect(),
            TokenizerKind::Gpt2 => Tokenizer::Gpt2.encode(text(&piece)?).map_err(|e| e.at(at()))?,
            TokenizerKind::Char => {
                let text = text(&piece)?;
                chars.extend(text.chars());
                text.chars().map(u32::from).collect()
            }
        };
        ids.push(&some)?;
    }
    if ids.len() == 0 {
        return Err(Error::input("the text is empty").hint("give a file with some text").at(at()));
    }
    let tokenizer = match import.tokenizer {
        TokenizerKind::Char => Tokenizer::Char { chars: chars.into_iter().collect() },
        TokenizerKind::Byte => Tokenizer::Byte,
        TokenizerKind::Gpt2 => Tokenizer::Gpt2,
    };
    Ok(Tokenized { tokenizer, ids: ids.finish()?, source_sha256: hex(&hash.finalize()) })
}

impl Tokenized {
    /// Ids from `first` on.
    fn get(&self, first: usize, count: usize) -> Result<Vec<u32>> {
        let mut found = self.ids.get(first, count)?;
        if let Tokenizer::Char { chars } = &self.tokenizer {
            for id in &mut found {
                // Every one of them is there.
                *id = chars.partition_point(|c| u32::from(*c) < *id) as u32;
            }
        }
        Ok(found)
    }
}

/// A piece as text, which it is.
fn text(piece: &[u8]) -> Result<&str> {
    str::from_utf8(piece).map_err(|e| Error::internal(format!("a piece of text is none: {e}")))
}
