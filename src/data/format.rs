//! The formats of shards: HDF5 files that any HDF5 tool can read.
//!
//! | object of a token shard, version 1 | holds |
//! |---|---|
//! | `/tokens` | all ids of the shard: u8, u16 or u32, whichever fits the vocabulary |
//! | `/checksums` | CRC-32 of each block of ids as little-endian bytes; attribute `checksum_block` is the number of ids a block |
//! | `/tokenizer` | the tokenizer as JSON, if it is known |
//! | attributes of `/` | the fields of [`Header`] and `format` |
//!
//! | object of a shard of rows, version 2 | holds |
//! |---|---|
//! | `/inputs`, `/categories`, `/targets`, `/weights` | a row for each sample, those that there are |
//! | `/columns` | the columns of a table as JSON |
//! | `/tokenizer` | the tokenizer as JSON, if inputs are the ids of texts |
//! | `/checksums/inputs`, … | of each of them CRC-32 of each block of rows as little-endian bytes; attribute `checksum_block` is the number of rows a block |
//! | attributes of `/` | the fields of [`Header`] and `format` |
//!
//! Shards of rows of version 1 have neither checksums nor the number of the import's shards.

use std::collections::BTreeMap;
use std::path::Path;

use hdf5::types::{IntSize, TypeDescriptor, VarLenUnicode};
use hdf5::{Dataset, File, H5Type, Hyperslab, SliceOrIndex};
use serde::{Deserialize, Serialize};

use super::h5::{one_line, read_all, var_len};
use super::spec::Split;
use super::tokenizer::Tokenizer;
use crate::hdf5_open;
use hpctrain_base::error::{Error, Result};

/// Ids per checksum, and per chunk of compressed shards, so that damage stays within one chunk.
const BLOCK: usize = 1 << 16;
/// Bytes of rows per checksum, or one row if that is more: random reads are not much smaller.
const ROW_BLOCK_BYTES: usize = 16 << 10;
/// Blocks of rows that are written at once.
const BLOCKS: usize = 256;

const TOKENS: &str = "/tokens";
pub(super) const CHECKSUMS: &str = "/checksums";
pub(super) const TOKENIZER: &str = "/tokenizer";
/// Attribute of shards of rows: the number of rows that the import has skipped.
pub(super) const SKIPPED_ROWS: &str = "skipped_rows";
/// Attribute of shards of rows: identifies their import.
pub(super) const IMPORT: &str = "import";
const CHECKSUM_BLOCK: &str = "checksum_block";

/// The kind of content of a file that this crate wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Format {
    /// A stream of ids.
    Tokens,
    /// Rows with targets.
    Rows,
}

impl Format {
    const ALL: [Self; 2] = [Self::Tokens, Self::Rows];

    /// Returns the value of the attribute `format`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tokens => "hpctrain-tokens",
            Self::Rows => "hpctrain-samples",
        }
    }

    /// Returns the version that is written, which is the newest that can be read.
    pub(super) fn version(self) -> u32 {
        match self {
            Self::Tokens => 1,
            Self::Rows => 2,
        }
    }

    /// Returns the first version that has checksums.
    fn first_with_checksums(self) -> u32 {
        match self {
            Self::Tokens => 1,
            Self::Rows => 2,
        }
    }
}

/// The attributes of a file that this crate wrote; `None` for those that a file lacks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    /// Format and version; `None` for a file that was not written by this crate.
    pub format: Option<(Format, u32)>,
    pub tokenizer: Option<Tokenizer>,
    pub vocabulary_size: Option<u64>,
    /// The imported file's name, without its directory.
    pub source: Option<String>,
    pub source_sha256: Option<String>,
    /// Identifies the import of a shard of rows.
    pub import: Option<String>,
    pub split: Option<String>,
    /// The shard's number among those of its split, counted from 0.
    pub shard: Option<u64>,
    /// The number of shards of the split.
    pub num_shards: Option<u64>,
    /// The rows of the imported file that are in no shard.
    pub skipped_rows: Option<u64>,
}

impl Header {
    pub(super) fn read(file: &File) -> Result<Self> {
        let named = attribute::<VarLenUnicode>(file, "format")?;
        let format = Format::ALL
            .into_iter()
            .find(|format| named.as_ref().is_some_and(|name| name.as_str() == format.name()));
        let version = attribute::<u32>(file, "format_version")?;
        let format = match (format, version) {
            (None, _) => None,
            (Some(_), None) => {
                return Err(
                    Error::input("attribute format_version is missing").hint("import it again")
                );
            }
            (Some(format), Some(version)) if version > format.version() => {
                let message = format!(
                    "format_version is {version}, but this program reads up to {}",
                    format.version()
                );
                return Err(Error::input(message)
                    .hint("use a newer hpctrain, or import the data with this one"));
            }
            (Some(format), Some(version)) => Some((format, version)),
        };
        let text = |name| Ok(attribute::<VarLenUnicode>(file, name)?.map(|text| text.to_string()));
        let header = Self {
            format,
            tokenizer: if format.is_some() { read_tokenizer(file)? } else { None },
            vocabulary_size: attribute(file, "vocabulary_size")?,
            source: text("source")?,
            source_sha256: text("source_sha256")?,
            import: text(IMPORT)?,
            split: text("split")?,
            shard: attribute(file, "shard")?,
            num_shards: attribute(file, "num_shards")?,
            skipped_rows: attribute(file, SKIPPED_ROWS)?,
        };
        if let (Some(tokenizer), Some(size)) = (&header.tokenizer, header.vocabulary_size)
            && tokenizer.vocabulary() as u64 != size
        {
            let name = tokenizer.name();
            let has = tokenizer.vocabulary();
            return Err(Error::input(format!(
                "vocabulary_size is {size}, but its {name} tokenizer has {has} ids"
            ))
            .hint("import it again"));
        }
        Ok(header)
    }

    /// Returns whether files of this format and version have checksums.
    pub(super) fn has_checksums(&self) -> bool {
        self.format.is_some_and(|(format, version)| version >= format.first_with_checksums())
    }
}

/// Returns an attribute of the root group, or `None` if there is none of this name.
fn attribute<T: H5Type>(file: &File, name: &str) -> Result<Option<T>> {
    let unreadable = |e| Error::input(format!("attribute {name} cannot be read: {}", one_line(&e)));
    if !file.attr_names().map_err(unreadable)?.iter().any(|existing| existing == name) {
        return Ok(None);
    }
    file.attr(name).and_then(|attribute| attribute.read_scalar()).map(Some).map_err(unreadable)
}

fn read_tokenizer(file: &File) -> Result<Option<Tokenizer>> {
    if !file.link_exists(TOKENIZER) {
        return Ok(None);
    }
    let json: VarLenUnicode =
        file.dataset(TOKENIZER).and_then(|dataset| dataset.read_scalar()).map_err(|e| {
            Error::input(format!("dataset {TOKENIZER} cannot be read: {}", one_line(&e)))
        })?;
    Tokenizer::from_json(&json).map(Some).map_err(|e| e.at(TOKENIZER))
}

/// The checksums of a shard, by the names of its datasets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Checksums(BTreeMap<String, BlockSums>);

/// The checksums of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BlockSums {
    /// Rows of a block, or ids of a token stream; the last block may have fewer.
    pub block: usize,
    /// CRC-32 of the little-endian bytes of each block.
    pub crc32: Vec<u32>,
}

impl Checksums {
    /// Reads the checksums of a file, or returns `None` if it has none.
    pub(super) fn read(file: &File) -> Result<Option<Self>> {
        if !file.link_exists(CHECKSUMS) {
            return Ok(None);
        }
        let all = Self::read_existing(file).map_err(|e| {
            Error::input(format!("{CHECKSUMS} cannot be read: {}", one_line(&e)))
                .hint("copy or import it again")
        })?;
        match all.0.iter().find(|(_, sums)| sums.block == 0) {
            Some((name, _)) => {
                Err(Error::input(format!("{CHECKSUMS} of {name} has {CHECKSUM_BLOCK} = 0"))
                    .hint("copy or import it again"))
            }
            None => Ok(Some(all)),
        }
    }

    /// Returns the checksums of a file that has some.
    fn read_existing(file: &File) -> hdf5::Result<Self> {
        if let Ok(dataset) = file.dataset(CHECKSUMS) {
            return Ok(Self([(TOKENS.to_owned(), BlockSums::read(&dataset)?)].into()));
        }
        let all = file.group(CHECKSUMS)?.datasets()?.into_iter().map(|dataset| {
            let name = dataset.name();
            Ok((
                name.strip_prefix(CHECKSUMS).unwrap_or(&name).to_owned(),
                BlockSums::read(&dataset)?,
            ))
        });
        Ok(Self(all.collect::<hdf5::Result<_>>()?))
    }

    /// Returns the checksums of the dataset `name`, if it has any.
    pub(super) fn get(&self, name: &str) -> Option<&BlockSums> {
        self.0
            .iter()
            .find(|(own, _)| own.trim_start_matches('/') == name.trim_start_matches('/'))
            .map(|(_, sums)| sums)
    }

    /// Returns all checksums, sorted by the names of the datasets.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &BlockSums)> {
        self.0.iter().map(|(name, sums)| (&name[..], sums))
    }
}

impl BlockSums {
    fn read(dataset: &Dataset) -> hdf5::Result<Self> {
        let block: u64 = dataset.attr(CHECKSUM_BLOCK)?.read_scalar()?;
        Ok(Self { block: usize::try_from(block).unwrap_or(0), crc32: read_all(dataset)? })
    }

    /// Computes the checksums of a whole dataset, in blocks of `block` rows of `row_bytes`.
    fn compute(bytes: &[u8], block: usize, row_bytes: usize) -> Self {
        Self {
            block,
            crc32: bytes.chunks((block * row_bytes).max(1)).map(crc32fast::hash).collect(),
        }
    }

    /// Returns the number of blocks of a dataset of `rows` rows.
    pub(super) fn needed(&self, rows: usize) -> usize {
        rows.div_ceil(self.block)
    }

    fn write(&self, file: &File, name: &str) -> hdf5::Result<()> {
        let dataset = file.new_dataset::<u32>().shape(self.crc32.len()).create(name)?;
        dataset.write_raw(&self.crc32)?;
        dataset.new_attr::<u64>().create(CHECKSUM_BLOCK)?.write_scalar(&(self.block as u64))
    }
}

/// Writes a dataset of rows with its checksums.
pub(super) fn write_rows<T: H5Type + bytemuck::NoUninit>(
    file: &File,
    name: &str,
    shape: &[usize],
    elements: &[T],
) -> hdf5::Result<Dataset> {
    let row = shape[1..].iter().product::<usize>();
    write_rows_by(file, name, shape, 0..shape[0], |at, to| {
        to.extend_from_slice(&elements[at * row..][..row]);
        Ok(())
    })
}

/// Writes a dataset like [`write_rows`], from rows whose elements `of_row` appends, so that only a
/// few rows are in memory at once. `rows` has as many as the shape.
pub(super) fn write_rows_by<T: H5Type + bytemuck::NoUninit>(
    file: &File,
    name: &str,
    shape: &[usize],
    mut rows: impl Iterator<Item = usize>,
    mut of_row: impl FnMut(usize, &mut Vec<T>) -> hdf5::Result<()>,
) -> hdf5::Result<Dataset> {
    let row_bytes = shape[1..].iter().product::<usize>() * size_of::<T>();
    let block = ROW_BLOCK_BYTES.div_ceil(row_bytes.max(1));
    let dataset = file.new_dataset::<T>().shape(shape).create(name)?;
    let mut sums = BlockSums { block, crc32: Vec::with_capacity(shape[0].div_ceil(block)) };
    let mut first = 0;
    let mut elements = Vec::new();
    while first < shape[0] {
        let count = (BLOCKS * block).min(shape[0] - first);
        elements.clear();
        rows.by_ref().take(count).try_for_each(|row| of_row(row, &mut elements))?;
        // HDF5 stores little-endian elements, the byte order of every machine that this runs on.
        sums.crc32
            .extend(BlockSums::compute(bytemuck::cast_slice(&elements), block, row_bytes).crc32);
        let dims: Vec<usize> = std::iter::once(count).chain(shape[1..].iter().copied()).collect();
        let some = ndarray::ArrayViewD::from_shape(dims, &elements)
            .map_err(|e| hdf5::Error::from(e.to_string()))?;
        let axes = (1..shape.len()).map(|_| SliceOrIndex::from(..));
        let place: Vec<SliceOrIndex> =
            std::iter::once(SliceOrIndex::from(first..first + count)).chain(axes).collect();
        dataset.write_slice(some, Hyperslab::from(place))?;
        first += count;
    }
    if !file.link_exists(CHECKSUMS) {
        hdf5_open::create_group(file, CHECKSUMS)?;
    }
    sums.write(file, &format!("{CHECKSUMS}{name}"))?;
    Ok(dataset)
}

/// Ids in the width in which a shard stores them.
enum Narrow {
    U8(Vec<u8>),
    U16(Vec<u16>),
    U32(Vec<u32>),
}

impl Narrow {
    /// Converts ids, which must fit, to `width`.
    fn new(ids: Vec<u32>, width: IntSize) -> Self {
        match width {
            IntSize::U1 => Self::U8(ids.iter().map(|&id| id as u8).collect()),
            IntSize::U2 => Self::U16(ids.iter().map(|&id| id as u16).collect()),
            _ => Self::U32(ids),
        }
    }

    /// Returns the CRC-32 of the little-endian integers.
    fn checksum(&self) -> u32 {
        // Every machine that this runs on is little-endian.
        crc32fast::hash(match self {
            Self::U8(ids) => ids,
            Self::U16(ids) => bytemuck::cast_slice(ids),
            Self::U32(ids) => bytemuck::cast_slice(ids),
        })
    }

    fn write(&self, to: &Dataset, place: std::ops::Range<usize>) -> hdf5::Result<()> {
        match self {
            Self::U8(ids) => to.write_slice(ids, place),
            Self::U16(ids) => to.write_slice(ids, place),
            Self::U32(ids) => to.write_slice(ids, place),
        }
    }
}

/// A token shard to be written.
pub(super) struct TokenShard<'a> {
    pub ids: &'a [u32],
    /// `None` if only the number of ids is known.
    pub tokenizer: Option<&'a Tokenizer>,
    /// The number of ids.
    pub vocabulary: usize,
    /// The imported file's name, without its directory.
    pub source: &'a str,
    pub source_sha256: &'a str,
    pub split: Split,
    pub shard: usize,
    pub num_shards: usize,
    /// The deflate level; `None` does not compress.
    pub compress: Option<u8>,
}

impl TokenShard<'_> {
    /// Writes the shard to `path`. The same content always gives the same bytes.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let mut rest = self.ids;
        self.write_by(path, self.ids.len(), &mut |count: usize| {
            let (some, others) = rest.split_at(count);
            rest = others;
            Ok(some.to_vec())
        })
    }

    /// Writes the shard like [`TokenShard::write`], with `count` ids that `next` provides, as many
    /// at a time as it is asked for.
    pub(super) fn write_by(
        &self,
        path: &Path,
        count: usize,
        next: &mut dyn FnMut(usize) -> Result<Vec<u32>>,
    ) -> Result<()> {
        let json = self.tokenizer.map(|tokenizer| var_len(&tokenizer.to_json()?)).transpose()?;
        let texts = [
            ("format", var_len(Format::Tokens.name())?),
            ("tokenizer", var_len(self.tokenizer.map_or("none", Tokenizer::name))?),
            ("source", var_len(self.source)?),
            ("source_sha256", var_len(self.source_sha256)?),
            ("split", var_len(self.split.name())?),
        ];
        let mut refused = None;
        let written =
            self.write_objects(path, json.as_ref(), &texts, count, &mut |count: usize| {
                // HDF5's error type carries no other errors.
                next(count).map_err(|e| {
                    let message = e.message().to_string();
                    refused = Some(e);
                    hdf5::Error::from(message)
                })
            });
        if let Some(e) = refused {
            return Err(e);
        }
        written.map_err(|e| Error::io("write", path, one_line(&e)))?;
        // The file must not get its name before its content is on disk.
        std::fs::File::open(path)
            .and_then(|file| file.sync_all())
            .map_err(|e| Error::io("write", path, e))
    }

    fn write_objects(
        &self,
        path: &Path,
        json: Option<&VarLenUnicode>,
        texts: &[(&str, VarLenUnicode)],
        count: usize,
        next: &mut dyn FnMut(usize) -> hdf5::Result<Vec<u32>>,
    ) -> hdf5::Result<()> {
        let width = self.id_width();
        let file = hdf5_open::create(path)?;
        for (name, text) in texts {
            file.new_attr::<VarLenUnicode>().create(*name)?.write_scalar(text)?;
        }
        file.new_attr::<u32>().create("format_version")?.write_scalar(&Format::Tokens.version())?;
        for (name, n) in [
            ("vocabulary_size", self.vocabulary),
            ("shard", self.shard),
            ("num_shards", self.num_shards),
        ] {
            file.new_attr::<u64>().create(name)?.write_scalar(&(n as u64))?;
        }
        if let Some(json) = json {
            file.new_dataset::<VarLenUnicode>().create(TOKENIZER)?.write_scalar(json)?;
        }

        // The checksums are allocated before the ids, and written after them.
        let mut sums = BlockSums { block: BLOCK, crc32: vec![0; count.div_ceil(BLOCK)] };
        sums.write(&file, CHECKSUMS)?;

        let mut builder =
            file.new_dataset_builder().empty_as(TypeDescriptor::Unsigned(width)).shape(count);
        if let Some(level) = self.compress {
            builder = builder.chunk(BLOCK.min(count));
            if width != IntSize::U1 {
                builder = builder.shuffle();
            }
            builder = builder.deflate(level);
        }
        let tokens = builder.create(TOKENS)?;
        for (block, first) in (0..count).step_by(BLOCK).enumerate() {
            let len = BLOCK.min(count - first);
            let ids = Narrow::new(next(len)?, width);
            sums.crc32[block] = ids.checksum();
            ids.write(&tokens, first..first + len)?;
        }
        file.dataset(CHECKSUMS)?.write_raw(&sums.crc32)?;
        file.close()
    }

    /// Returns the narrowest integer type that holds every id of the vocabulary.
    fn id_width(&self) -> IntSize {
        match self.vocabulary {
            0..=0x100 => IntSize::U1,
            0x101..=0x1_0000 => IntSize::U2,
            _ => IntSize::U4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard<'a>(ids: &'a [u32], tokenizer: &'a Tokenizer, compress: Option<u8>) -> TokenShard<'a> {
        let split = Split::Train;
        let vocabulary = tokenizer.vocabulary();
        TokenShard {
            ids,
            tokenizer: Some(tokenizer),
            vocabulary,
            source: "a.txt",
            source_sha256: "00",
            split,
            shard: 1,
            num_shards: 3,
            compress,
        }
    }

    #[test]
    fn header_and_checksums_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.h5");
        let ids: Vec<u32> = (0..BLOCK as u32 + 5).map(|i| i % 256).collect();
        shard(&ids, &Tokenizer::Byte, None).write(&path).unwrap();
        let file = File::open(&path).unwrap();
        let expected = Header {
            format: Some((Format::Tokens, 1)),
            tokenizer: Some(Tokenizer::Byte),
            vocabulary_size: Some(256),
            source: Some("a.txt".into()),
            source_sha256: Some("00".into()),
            import: None,
            split: Some("train".into()),
            shard: Some(1),
            num_shards: Some(3),
            skipped_rows: None,
        };
        assert_eq!(Header::read(&file).unwrap(), expected);
        let checksums = Checksums::read(&file).unwrap().unwrap();
        let checksums = checksums.get("tokens").unwrap();
        assert_eq!((checksums.block, checksums.needed(ids.len())), (BLOCK, 2));
        assert_eq!(checksums.crc32[1], crc32fast::hash(&[0, 1, 2, 3, 4]));
        assert_eq!(checksums.crc32.len(), 2);
    }

    #[test]
    fn checksum_is_over_little_endian_bytes() {
        assert_eq!(
            Narrow::new(vec![0x0102, 3], IntSize::U2).checksum(),
            crc32fast::hash(&[2, 1, 3, 0])
        );
        assert_eq!(Narrow::new(vec![7, 3], IntSize::U1).checksum(), crc32fast::hash(&[7, 3]));
    }

    #[test]
    fn width_follows_the_vocabulary() {
        let chars = |n| Tokenizer::Char { chars: ('\0'..).take(n).collect() };
        for (vocabulary, width) in
            [(1, IntSize::U1), (256, IntSize::U1), (257, IntSize::U2), (0x1_0000, IntSize::U2)]
        {
            assert_eq!(shard(&[], &chars(vocabulary), None).id_width(), width, "{vocabulary}");
        }
        assert_eq!(shard(&[], &chars(0x1_0001), None).id_width(), IntSize::U4);
    }

    #[test]
    fn same_shard_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<u32> = (0..5000).collect();
        let bytes = |name: &str| {
            let path = dir.path().join(name);
            shard(&ids, &Tokenizer::Gpt2, Some(1)).write(&path).unwrap();
            std::fs::read(path).unwrap()
        };
        let first = bytes("a");
        // HDF5 stamps whole seconds where it stamps at all.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        assert!(first == bytes("b"));
    }
}
