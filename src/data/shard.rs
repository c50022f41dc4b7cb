//! One shard: the description of a file, and the checks before it is trained on.
//!
//! A shard is described once, when a data set is opened; the description keeps no handle.
//!
//! A shard records its import and its number there, so that a missing shard is noticed
//! (`shard_set_check`). Reads are compared with the checksums at the lowest level, where bytes come
//! from the file (`block_checksums`). Checksums, or hashes of blocks of files without them,
//! distinguish data sets (`fingerprint`).

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdf5::File;
use serde::{Deserialize, Serialize};

use super::block_checksums::{Compared, ReadError, Scratch};
use super::columns::Columns;
use super::fingerprint::ShardFingerprint;
use super::format::{BlockSums, Checksums, Header};
use super::h5::{self, ChunkCache, SlabReader, shape};
use super::import::{CLASSES, class_names, is_of_samples};
use super::preprocessing::{DescribedPreprocessing, Scale, tokenizer_names};
use super::raw_path;
use super::rows::{RowReader, RowSource};
use super::shard_schema::{Field, MAX_VOCABULARY, Place, ShardSchema};
use super::spec::{DataSpec, Verify};
use super::storage;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::simd::simd;

/// The description of one file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Shard {
    #[serde(with = "raw_path")]
    pub path: PathBuf,
    pub header: Header,
    pub content: ShardSchema,
    /// The fingerprint, which distinguishes the shard from others.
    pub print: ShardFingerprint,
    /// The length of the file in bytes.
    pub bytes: u64,
    /// The inode of the file, and the second and nanosecond of its last change.
    identity: (u64, i64, i64),
    /// The preprocessing that the file describes, except for the tokenizer.
    #[serde(skip)]
    pub preprocessing: Arc<DescribedPreprocessing>,
}

/// Returns the numbers that distinguish a file from others of its file system, and from itself
/// before a change.
fn identity(metadata: &Metadata) -> (u64, i64, i64) {
    (metadata.ino(), metadata.mtime(), metadata.mtime_nsec())
}

/// The least number of bytes in a block of rows, unless chunks are larger: smaller blocks are not
/// worth caching.
const BLOCK_BYTES: usize = 16 << 10;
/// Rows of fewer bytes are not worth a system call each.
const SMALL_ROW: usize = 64;

impl Shard {
    /// Describes the file at `path`, whose datasets have the names that `spec` gives.
    pub(super) fn open(path: &Path, spec: &DataSpec) -> Result<Self> {
        let file = h5::open_file(path, None)?;
        Self::describe(&file, path, spec).map_err(|e| e.at(path.display()))
    }

    /// Returns the description of an open file.
    fn describe(file: &File, path: &Path, spec: &DataSpec) -> Result<Self> {
        let header = Header::read(file)?;
        let place = Place { file, path, external_files: spec.external_files };
        let content = ShardSchema::find(place, spec)?;
        let print = ShardFingerprint::for_file(file, path, &header, &content)?;
        let preprocessing = read_preprocessing(file, &content)?.into();
        let metadata = std::fs::metadata(path).map_err(|e| Error::io("read", path, e))?;
        let bytes = metadata.len();
        let identity = identity(&metadata);
        Ok(Self { path: path.to_owned(), header, content, print, bytes, identity, preprocessing })
    }

    /// Checks that the file at the same path of this node is the one that another node has
    /// described: the same file of a file system that both see, or one with the same content.
    pub(super) fn check_here(&self, spec: &DataSpec) -> Result<()> {
        let metadata =
            std::fs::metadata(&self.path).map_err(|e| Error::io("read", &self.path, e))?;
        if identity(&metadata) == self.identity {
            return Ok(());
        }
        let here = Self::open(&self.path, spec)?.print;
        if here == self.print {
            return Ok(());
        }
        Err(Error::input(format!(
            "{} on {} has other content than on the node of rank 0",
            self.path.display(),
            rustix::system::uname().nodename().to_string_lossy()
        ))
        .hint(
            "copy the same files to every node, or keep them on a file system that all nodes share",
        ))
    }

    /// Returns an error if a shard does not match the `first` one of its data set.
    pub(super) fn check_sibling(&self, first: &Self) -> Result<()> {
        self.check(
            first,
            &["set of datasets", "dtype", "sample shape", "scale of inputs", "vocabulary_size"],
        )
    }

    /// Returns an error if the samples of a shard are not of the same kind as those of the `first`
    /// one, which belongs to another data set. Types and scales may differ: reads convert types and
    /// apply scales.
    pub(super) fn check_mixable(&self, first: &Self) -> Result<()> {
        self.check(first, &["set of datasets", "sample shape", "vocabulary_size"])
    }

    /// Returns an error if a shard has weights and the `first` one does not, or vice versa.
    pub(super) fn check_weights(&self, first: &Self) -> Result<()> {
        let weights = |shard: &Self| {
            shard.content.weights().map_or("none".to_owned(), |field| field.name.clone())
        };
        let own = weights(self);
        let expected = weights(first);
        if own == expected {
            return Ok(());
        }
        Err(self
            .differs(first, "set of weights", &own, &expected)
            .hint("give every training shard weights, or leave them unread: data.weights = \"\""))
    }

    fn check(&self, first: &Self, checked: &[&str]) -> Result<()> {
        for ((aspect, own), (_, expected)) in self.aspects().into_iter().zip(first.aspects()) {
            if checked.contains(&aspect) && own != expected {
                return Err(self.differs(first, aspect, &own, &expected));
            }
        }
        if self.header.tokenizer != first.header.tokenizer {
            let [own, expected] =
                tokenizer_names(self.header.tokenizer.as_ref(), first.header.tokenizer.as_ref());
            return Err(self.differs(first, "tokenizer", &own, &expected));
        }
        Ok(())
    }

    /// Returns the aspects in which shards of one data set must agree, each with its description.
    fn aspects(&self) -> [(&'static str, String); 5] {
        let vocabulary_size = self.header.vocabulary_size;
        [
            ("set of datasets", self.join_fields(|field| field.name.clone())),
            ("dtype", self.join_fields(|field| format!("{} {}", field.name, field.dtype))),
            (
                "sample shape",
                self.join_fields(|field| format!("{} {}", field.name, shape(&field.shape[1..]))),
            ),
            ("scale of inputs", format!("{:?}", self.content.standard())),
            ("vocabulary_size", vocabulary_size.map_or("none".to_owned(), |size| size.to_string())),
        ]
    }

    /// Returns the descriptions of all datasets except weights, which validation shards do not
    /// need.
    fn join_fields(&self, describe: impl Fn(&Field) -> String) -> String {
        let mut fields = self.content.datasets();
        fields.truncate(fields.len() - self.content.weights().iter().len());
        let all: Vec<String> = fields.into_iter().map(describe).collect();
        all.join(", ")
    }

    fn differs(&self, first: &Self, aspect: &str, own: &str, expected: &str) -> Error {
        let path = self.path.display();
        let first = first.path.display();
        Error::input(format!("{aspect} differs: {path} has {own}, {first} has {expected}"))
            .hint("the shards of one data set must agree: import them in one go; those of data.mix must hold samples of one kind")
    }

    /// Returns an error if datasets were created and never written.
    pub(super) fn check_written(&self) -> Result<()> {
        match self.content.datasets().into_iter().find(|field| field.is_unwritten) {
            Some(field) => Err(storage::unwritten(&field.name).at(self.path.display())),
            None => Ok(()),
        }
    }

    /// Returns the number of samples of `context` ids; at least one.
    pub(super) fn samples(&self, context: usize) -> Result<u64> {
        let at = self.path.display();
        match &self.content {
            ShardSchema::Tokens(tokens) => match (
                tokens.document().saturating_sub(1) / context,
                &tokens.shape[..],
            ) {
                (0, [_]) => Err(Error::input(format!(
                    "{} has {} tokens, but one sample takes {context} + 1",
                    tokens.name,
                    tokens.rows()
                ))
                .hint("use a smaller context or fewer, larger shards")
                .at(at)),
                (0, _) => Err(Error::input(format!(
                    "{} has documents of {} ids, but one sample takes {context} + 1",
                    tokens.name,
                    tokens.document()
                ))
                .hint("use a smaller context, or make one stream of them: hpctrain data import ids")
                .at(at)),
                (_, [0, ..]) => Err(no_samples(tokens).at(at)),
                (windows, [documents, _]) => Ok((windows * documents) as u64),
                (windows, _) => Ok(windows as u64),
            },
            ShardSchema::Rows(_) => {
                let first = self.content.datasets()[0];
                match first.rows() {
                    0 => Err(no_samples(first).at(at)),
                    rows => Ok(rows as u64),
                }
            }
            ShardSchema::Samples { inputs, .. } => {
                if inputs.row_len() != context {
                    let message =
                        format!("{} has samples of {} ids", inputs.name, inputs.row_len());
                    return Err(Error::input(format!(
                        "{message}, but the model's context is {context}"
                    ))
                    .hint(format!("set the context to {}", inputs.row_len()))
                    .at(at));
                }
                match inputs.rows() {
                    0 => Err(no_samples(inputs).at(at)),
                    rows => Ok(rows as u64),
                }
            }
        }
    }

    /// Returns the number of ids that a model must have: the shard's, or a larger one from the
    /// configuration.
    pub(super) fn vocabulary(&self, configured: Option<usize>) -> Result<usize> {
        let at = self.path.display();
        let own = self.header.vocabulary_size.map(|size| size.try_into().unwrap_or(usize::MAX));
        let vocabulary = match (configured, own) {
            (None, None) => {
                return Err(Error::input(
                    "the size of the vocabulary is unknown: no attribute vocabulary_size",
                )
                .hint("set model.vocabulary to the number of ids")
                .at(at));
            }
            (Some(configured), Some(own)) if configured < own => {
                return Err(Error::input(format!(
                    "vocabulary_size is {own}, but model.vocabulary is {configured}"
                ))
                .hint(format!("set model.vocabulary to {own} or more, or omit it"))
                .at(at));
            }
            (Some(configured), _) => configured,
            (None, Some(own)) => own,
        };
        match vocabulary {
            1..=MAX_VOCABULARY => Ok(vocabulary),
            _ => Err(Error::input(format!(
                "a vocabulary of {vocabulary} ids is outside 1..={MAX_VOCABULARY}"
            ))
            .at(at)),
        }
    }

    /// Opens the file again and returns a reader for each dataset of its content. Up to
    /// `cache_bytes` of each are cached, or more if a chunk is larger, since each read would
    /// decompress it again otherwise. Reads are compared with checksums as `verify` specifies.
    pub(super) fn readers(
        &self,
        cache_bytes: usize,
        verify: Verify,
        scratch: &Scratch,
    ) -> Result<Vec<RowReader>> {
        let datasets = self.content.datasets();
        // HDF5 need not cache data whose blocks are cached by its reader.
        let chunk_bytes = |field: &&Field| {
            field.chunk_bytes().filter(|_| self.block(field, cache_bytes, verify) == 0)
        };
        let chunk_bytes = datasets.iter().filter_map(chunk_bytes).max();
        let bytes = chunk_bytes.map_or(0, |chunk_bytes| cache_bytes.max(chunk_bytes));
        let file = h5::open_file(
            &self.path,
            Some(ChunkCache { bytes, chunk_bytes: chunk_bytes.unwrap_or(0) }),
        )?;
        let plain =
            std::fs::File::open(&self.path).map_err(|e| Error::io("read", &self.path, e))?;
        let bytes = plain.metadata().map_err(|e| Error::io("read", &self.path, e))?.len();
        if bytes != self.bytes {
            let message = format!(
                "{} has {bytes} bytes, but {} when it was described",
                self.path.display(),
                self.bytes
            );
            return Err(Error::input(message)
                .hint("the files of a data set must not change during a run, and must be the same on every node"));
        }
        let plain = Arc::new(plain);
        let checksums = if verify != Verify::Off && self.header.has_checksums() {
            let checksums = Checksums::read(&file).map_err(|e| e.at(self.path.display()))?;
            Some(checksums.ok_or_else(|| self.without_checksums("the shard"))?)
        } else {
            None
        };
        let mut readers = Vec::with_capacity(datasets.len());
        for field in datasets {
            let source = self.row_source(field, &file, &plain)?;
            let rows = field.rows() as u64;
            let block = self.block(field, cache_bytes, verify) as u64;
            let sums = match &checksums {
                Some(checksums) => self.sums(checksums, field)?,
                None => None,
            };
            let compared = sums.and_then(|sums| Compared::new(sums, verify, scratch.clone()));
            let reader =
                RowReader::new(source, field.stored, rows, field.row_len(), block, cache_bytes);
            readers.push(reader.compare(compared).unpack(field.packing.clone()));
        }
        Ok(readers)
    }

    /// Returns the source of the rows of a dataset: the file itself if they are at an offset of it.
    fn row_source(
        &self,
        field: &Field,
        file: &File,
        plain: &Arc<std::fs::File>,
    ) -> Result<RowSource> {
        if let Some(offset) = field.offset {
            return Ok(RowSource::File(plain.clone(), offset));
        }
        file.dataset(&field.name)
            .and_then(|dataset| SlabReader::new(dataset, field.stored))
            .map(RowSource::Library)
            .map_err(|e| self.unreadable(field, e.into()))
    }

    /// Returns the checksums of a dataset; `None` if its elements are converted when they are read.
    fn sums(&self, checksums: &Checksums, field: &Field) -> Result<Option<BlockSums>> {
        if !field.is_native {
            return Ok(None);
        }
        let sums = checksums.get(&field.name).ok_or_else(|| self.without_checksums(&field.name))?;
        let has = sums.crc32.len();
        let needs = sums.needed(field.rows());
        if has == needs {
            return Ok(Some(sums.clone()));
        }
        Err(Error::input(format!("{} has {has} checksums for {needs} blocks", field.name))
            .hint("copy or import it again")
            .at(self.path.display()))
    }

    fn without_checksums(&self, what: &str) -> Error {
        Error::input(format!("{what} has no checksums, although its format has"))
            .hint("copy or import it again, or read it without comparing: data.verify = \"off\"")
            .at(self.path.display())
    }

    /// Returns the largest number of bytes that the readers of all its datasets cache together, if
    /// up to `cache_bytes` of each may be cached.
    pub(super) fn cache_limit(&self, cache_bytes: usize, verify: Verify) -> usize {
        let datasets = self.content.datasets().into_iter();
        datasets.map(|field| self.field_cache_limit(field, cache_bytes, verify)).sum()
    }

    /// Returns the largest number of bytes that the reader of one dataset caches.
    fn field_cache_limit(&self, field: &Field, cache_bytes: usize, verify: Verify) -> usize {
        let block = self.block(field, cache_bytes, verify) * field.row_bytes();
        match (block, field.chunk_bytes()) {
            (0, Some(chunk_bytes)) => cache_bytes.max(chunk_bytes),
            (0, None) => 0,
            (block, _) => block.max(cache_bytes).min(field.rows() * field.row_bytes()),
        }
    }

    /// Returns the number of rows of a dataset that are read at once and cached, if up to
    /// `cache_bytes` may be; 0 reads only the requested rows and caches nothing.
    fn block(&self, field: &Field, cache_bytes: usize, verify: Verify) -> usize {
        let is_tokens = matches!(self.content, ShardSchema::Tokens(_));
        let row_bytes = field.row_bytes().max(1);
        let fits = field.rows() * row_bytes <= cache_bytes;
        let enough_rows = BLOCK_BYTES.div_ceil(row_bytes);
        match &field.chunk {
            // Targets, which take less space than a few samples, and tokens: copying a window from
            // memory costs less than a system call. If every read is compared, the file is read
            // every time.
            None if fits && row_bytes < SMALL_ROW && !(is_tokens && verify == Verify::Always) => {
                enough_rows
            }
            None => 0,
            Some(chunk) if fits => enough_rows.next_multiple_of(chunk[0].max(1)),
            Some(chunk) => {
                let chunk_bytes = chunk[0] * row_bytes;
                let is_whole = chunk[1..] == field.shape[1..];
                // Uncompressed data: HDF5 reads only the requested rows.
                let pays = field.is_filtered
                    && chunk_bytes >= BLOCK_BYTES
                    && (is_whole || chunk_bytes <= cache_bytes);
                if pays { chunk[0] } else { 0 }
            }
        }
    }

    /// Returns the error of a failed read of `field`.
    pub(super) fn unreadable(&self, field: &Field, error: ReadError) -> Error {
        match error {
            ReadError::Refused(error) if h5::is_newer(&error) => {
                h5::newer(&field.name, &error).at(self.path.display())
            }
            ReadError::Refused(error) => {
                let place = PathBuf::from(format!("{}:{}", self.path.display(), field.name));
                Error::io("read", &place, h5::one_line(&error))
                    .hint("check it with `hpctrain data verify`; import or copy it again if it is damaged")
            }
            ReadError::Missing { element, missing } => {
                Error::input(format!("{} {missing}", field.element(element as usize)))
                    .hint("replace it, or remove its row: networks take numbers only")
                    .at(self.path.display())
            }
            damaged @ ReadError::Damaged { .. } => Error::input(format!("{}{damaged}", field.name))
                .hint(
                    "copy or import the shard again; `hpctrain data verify` finds all such places",
                )
                .at(self.path.display()),
        }
    }
}

/// Reads the preprocessing that a file describes.
fn read_preprocessing(file: &File, content: &ShardSchema) -> Result<DescribedPreprocessing> {
    let ShardSchema::Rows(rows) = content else { return Ok(DescribedPreprocessing::default()) };
    let scale = rows.standard.as_ref().map(Scale::from);
    // In files of other programs, datasets of these names may be anything.
    if !is_of_samples(file) {
        return Ok(DescribedPreprocessing { scale, ..DescribedPreprocessing::default() });
    }
    let unreadable =
        |e| Error::input(format!("dataset {CLASSES} cannot be read: {}", h5::one_line(&e)));
    let classes = class_names(file).map_err(unreadable)?.unwrap_or_default();
    Ok(DescribedPreprocessing { scale, columns: Columns::read(file)?.map(Arc::new), classes })
}

fn no_samples(field: &Field) -> Error {
    Error::input(format!("{} has no samples", field.name)).hint("write some, or remove the file")
}

/// Returns the index of the first id outside the vocabulary.
pub(super) fn first_invalid(ids: &[u32], vocabulary: usize) -> Option<usize> {
    // Nearly always there is none, which a vectorised maximum detects faster than a search.
    let largest = simd(
        #[inline(always)]
        || ids.iter().fold(0, |largest, id| largest.max(*id)),
    );
    if (largest as usize) < vocabulary {
        return None;
    }
    ids.iter().position(|&id| id as usize >= vocabulary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_outside_the_vocabulary_are_found() {
        assert_eq!(first_invalid(&[0, 4, 5, 9], 5), Some(2));
        assert_eq!(first_invalid(&[0, 4], 5), None);
        assert_eq!(first_invalid(&[-1i32 as u32], i32::MAX as usize), Some(0));
    }
}
