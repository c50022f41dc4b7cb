//! Import of token ids that another program has made into token shards, from a NumPy array or a
//! dataset of an HDF5 file.

use std::fs::File;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::ids::IdSpooler;
use super::npy::Array;
use super::stream::{Imported, Stream, StreamShards};
use super::{hex, missing};
use crate::block_checksums::Scratch;
use crate::sandbox::Sandbox;
use crate::shard::first_invalid;
use crate::shard_schema::{MAX_VOCABULARY, ShardSchema};
use crate::spec::{DataSpec, Verify};
use crate::{Tokenizer, TokenizerKind};
use hpctrain_base::error::{Error, Result};

/// The input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportIds {
    /// An `.npy` file, or an HDF5 file: ids in one dimension, or documents × ids.
    pub input: PathBuf,
    /// The name of the dataset in an HDF5 file.
    pub dataset: String,
    /// The vocabulary of the ids.
    pub vocabulary: IdVocabulary,
    /// The padding id: occurrences at the end of each document are removed.
    pub pad: Option<u32>,
    /// The validation split, the shards and the destination.
    pub to: StreamShards,
}

/// The vocabulary of token ids.
#[derive(Debug, Clone)]
pub enum IdVocabulary {
    /// The vocabulary of a tokenizer that made the ids.
    Tokenizer(TokenizerKind),
    /// A number of ids, if the tokenizer is not known.
    Below(usize),
}

/// The number of bytes of a file that are hashed at once, and of ids that are read at once.
const BLOCK: usize = 1 << 16;

/// Imports the ids of all documents as one stream.
///
/// # Errors
/// Returns an error if the file is missing or malformed, an id is not below the vocabulary, or the
/// shards cannot be written.
pub fn import_ids(import: &ImportIds) -> Result<Imported> {
    import.to.check()?;
    let tokenizer = match &import.vocabulary {
        IdVocabulary::Tokenizer(kind) => Some(Tokenizer::for_text(kind, "")?),
        IdVocabulary::Below(_) => None,
    };
    let vocabulary = match (&import.vocabulary, &tokenizer) {
        (IdVocabulary::Below(vocabulary), _) => *vocabulary,
        (_, tokenizer) => tokenizer.as_ref().map_or(0, Tokenizer::vocabulary),
    };
    if !(1..=MAX_VOCABULARY).contains(&vocabulary) {
        return Err(Error::input(format!(
            "a vocabulary of {vocabulary} ids is outside 1..={MAX_VOCABULARY}"
        ))
        .hint("give the number of ids with --vocabulary, or their tokenizer with --tokenizer"));
    }
    let place = import.input.display();
    let mut spooler = IdSpooler::create(&import.to.out)?;
    let mut push = |document: Option<usize>, first: usize, ids: &[u32]| {
        check_ids(import, vocabulary, document, first, ids)?;
        spooler.push(ids)
    };
    let trimmed = |ids: &[u32]| {
        ids.len() - ids.iter().rev().take_while(|id| Some(**id) == import.pad).count()
    };
    let is_numpy = import.input.extension().is_some_and(|extension| extension == "npy");
    match is_numpy {
        true => of_numpy(import, &trimmed, &mut push)?,
        false => of_hdf5(import, &trimmed, &mut push)?,
    }
    let ids = spooler.finish()?;
    if ids.len() == 0 {
        return Err(Error::input(format!("{place} has no ids")).hint("give a file that has some"));
    }
    let source = import.input.file_name().unwrap_or_default().to_string_lossy();
    let of = Stream {
        count: ids.len(),
        tokenizer: tokenizer.as_ref(),
        vocabulary,
        source: &source,
        source_sha256: sha256(&import.input)?,
    };
    import.to.write(of, |first, count| ids.get(first, count))
}

/// Returns an error if an id is not below the vocabulary; `first` is the index of the first one in
/// the document.
fn check_ids(
    import: &ImportIds,
    vocabulary: usize,
    document: Option<usize>,
    first: usize,
    ids: &[u32],
) -> Result<()> {
    let Some(at) = first_invalid(ids, vocabulary) else { return Ok(()) };
    let document = document.map_or(String::new(), |document| format!(" of document {document}"));
    let message = format!(
        "element {}{document} is {}, but there are {vocabulary} ids",
        first + at,
        ids[at] as i32
    );
    Err(Error::input(format!("{}: {message}", import.input.display())).hint(
        "give the tokenizer that made them, or the number of ids with --vocabulary; --pad removes a padding id",
    ))
}

/// Receives ids: the number of their document, if there are several, and the index of the first one
/// in it.
type Push<'a> = &'a mut dyn FnMut(Option<usize>, usize, &[u32]) -> Result<()>;

fn of_numpy(import: &ImportIds, trimmed: &dyn Fn(&[u32]) -> usize, push: Push<'_>) -> Result<()> {
    let array = Array::open(&import.input)?;
    let (documents, len, is_stream) = match array.shape[..] {
        [ids] => (ids.div_ceil(BLOCK), BLOCK, true),
        [documents, ids] => (documents, ids, false),
        _ => return Err(other_shape(import, &format!("the array has shape {:?}", array.shape))),
    };
    let numbers = array.numbers(&import.to.out, |x| x)?;
    let mut ids = Vec::with_capacity(len);
    for document in 0..documents {
        let first = document * len;
        ids.clear();
        for value in numbers.get(first, len.min(numbers.len() - first))? {
            if value.fract() != 0.0 {
                return Err(Error::input(format!(
                    "{}: {value} is not an id",
                    import.input.display()
                ))
                .hint("store integers"));
            }
            // One that is too large or negative is reported as such.
            ids.push(if value < 0.0 {
                value as i32 as u32
            } else {
                (value as u32).min(MAX_VOCABULARY as u32)
            });
        }
        match is_stream {
            true => push(None, first, &ids)?,
            false => push(Some(document), 0, &ids[..trimmed(&ids)])?,
        }
    }
    Ok(())
}

fn of_hdf5(import: &ImportIds, trimmed: &dyn Fn(&[u32]) -> usize, push: Push<'_>) -> Result<()> {
    std::fs::metadata(&import.input).map_err(|e| {
        missing(&import.input, &e, "give the path of an HDF5 file or an array (.npy)")
    })?;
    let mut spec = DataSpec::new(&import.input);
    spec.tokens.clone_from(&import.dataset);
    let shard = Sandbox::default().shard(&import.input, &spec)?;
    let ShardSchema::Tokens(field) = &shard.content else {
        return Err(other_shape(import, &format!("there is no dataset {}", import.dataset)));
    };
    shard.check_written()?;
    let mut readers = shard.readers(0, Verify::FirstPass, &Scratch::default())?;
    let rows = field.rows();
    let len = field.document();
    let is_stream = field.shape.len() == 1;
    // A stream is read in blocks: the end of a block is not that of a document.
    let step = if is_stream { BLOCK } else { 1 };
    let mut ids = Vec::new();
    for first in (0..rows).step_by(step) {
        ids.resize(if is_stream { step.min(rows - first) } else { len }, 0);
        readers[0].read(first as u64, &mut ids).map_err(|e| shard.unreadable(field, e))?;
        let kept = if is_stream { ids.len() } else { trimmed(&ids) };
        match is_stream {
            true => push(None, first, &ids[..kept])?,
            false => push(Some(first), 0, &ids[..kept])?,
        }
    }
    Ok(())
}

fn other_shape(import: &ImportIds, what: &str) -> Error {
    Error::input(format!("{}: {what}", import.input.display())).hint(
        "give ids in one dimension, or documents x ids; --dataset names a dataset of an HDF5 file",
    )
}

/// Returns the SHA-256 of a file.
fn sha256(path: &Path) -> Result<String> {
    let failed = |e| Error::io("read", path, e);
    let mut file = File::open(path).map_err(failed)?;
    let mut hash = Sha256::new();
    let mut block = vec![0; BLOCK];
    loop {
        match std::io::Read::read(&mut file, &mut block).map_err(failed)? {
            0 => return Ok(hex(&hash.finalize())),
            read => hash.update(&block[..read]),
        }
    }
}
