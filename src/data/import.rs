//! From a text file to token shards.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::dataset::file_names;
use super::format::TokenShard;
use super::{Split, Tokenizer, TokenizerKind};
use crate::error::{Error, Result};

/// What to import, and how.
#[derive(Debug, Clone)]
pub struct ImportText {
    /// The text file, which is held in memory.
    pub input: PathBuf,
    /// How the text becomes ids.
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

/// What an import has written.
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
    let text = std::fs::read(&import.input).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            Error::input(format!("{} does not exist", import.input.display())).hint("give the path of a text file")
        }
        _ => Error::io("read", &import.input, e),
    })?;
    let (tokenizer, ids) = tokenize(import.tokenizer, &text).map_err(|e| e.at(import.input.display()))?;
    let source_sha256 = hex(&Sha256::digest(&text));
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
        let (prefix, num_shards) = match split {
            Split::Train => ("train", import.shards),
            Split::Validation => ("val", 1),
        };
        let path = import.out.join(format!("{prefix}-{shard:05}.h5"));
        shards.push((path.clone(), range.len()));
        TokenShard {
            ids: &ids[range],
            tokenizer: &tokenizer,
            source: &source,
            source_sha256: &source_sha256,
            split,
            shard,
            num_shards,
            compress: import.compress,
        }
        .write(staged.add(path))?;
    }
    staged.publish()?;
    Ok(Imported { shards, vocabulary: tokenizer.vocabulary(), source_sha256 })
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
        if !self.out.exists() {
            return Ok(());
        }
        if let Some(shard) = file_names(&self.out)?.iter().find(|name| name.ends_with(".h5")) {
            return Err(Error::input(format!("{} holds shards already, such as {shard}", self.out.display()))
                .hint("choose another directory, or remove the shards first"));
        }
        Ok(())
    }
}

fn tokenize(kind: TokenizerKind, text: &[u8]) -> Result<(Tokenizer, Vec<u32>)> {
    if text.is_empty() {
        return Err(Error::input("the text is empty").hint("give a file with some text"));
    }
    if kind == TokenizerKind::Byte {
        return Ok((Tokenizer::Byte, text.iter().map(|&byte| u32::from(byte)).collect()));
    }
    let text = std::str::from_utf8(text).map_err(|e| {
        Error::input(format!("byte {} is not UTF-8", e.valid_up_to()))
            .hint("convert the text to UTF-8, or use the tokenizer byte")
    })?;
    let tokenizer = Tokenizer::for_text(kind, text);
    let ids = tokenizer.encode(text)?;
    Ok((tokenizer, ids))
}

/// The `index`-th of `parts` ranges over `0..len`, whose lengths differ by one at most.
fn part(len: usize, parts: usize, index: usize) -> Range<usize> {
    let (share, rest) = (len / parts, len % parts);
    let start = index * share + index.min(rest);
    start..start + share + usize::from(index < rest)
}

/// Lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Files under temporary names, removed unless published.
#[derive(Default)]
struct Staged {
    /// Temporary and final names.
    files: Vec<(PathBuf, PathBuf)>,
}

impl Staged {
    /// The temporary name for `path`, hidden and in the same directory.
    fn add(&mut self, path: PathBuf) -> &Path {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        self.files.push((temporary, path));
        &self.files[self.files.len() - 1].0
    }

    fn publish(&self) -> Result<()> {
        for (temporary, path) in &self.files {
            std::fs::rename(temporary, path).map_err(|e| Error::io("write", path, e))?;
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        for (temporary, _) in &self.files {
            // Gone already when published; otherwise nothing better can be done.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_nearly_equally() {
        for (len, parts) in [(10, 3), (9, 3), (3, 3), (1000, 7)] {
            let ranges: Vec<_> = (0..parts).map(|index| part(len, parts, index)).collect();
            assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, len));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(ranges.iter().all(|range| range.len() - len / parts <= 1));
        }
    }

    #[test]
    fn failed_imports_leave_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let mut staged = Staged::default();
        std::fs::write(staged.add(dir.path().join("a.h5")), "half").unwrap();
        drop(staged);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
