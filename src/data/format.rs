//! The token shard, version 1: an HDF5 file that any HDF5 tool can read.
//!
//! | object | holds |
//! |---|---|
//! | `/tokens` | all ids of the shard: u8, u16 or u32, whichever fits the vocabulary |
//! | `/checksums` | CRC-32 of each block of ids as little-endian bytes; attribute `checksum_block` is the number of ids a block |
//! | `/tokenizer` | the tokenizer as JSON |
//! | attributes of `/` | the fields of [`Header`] and `format` |

use std::path::Path;

use hdf5::types::{IntSize, TypeDescriptor, VarLenUnicode};
use hdf5::{File, H5Type};

use super::Split;
use super::h5::{one_line, var_len};
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

const FORMAT: &str = "hpctrain-tokens";
const FORMAT_VERSION: u32 = 1;
/// Ids between two checksums; also the chunk of compressed shards, so that damage stays in one.
const BLOCK: usize = 1 << 16;

const TOKENS: &str = "/tokens";
pub(super) const CHECKSUMS: &str = "/checksums";
pub(super) const TOKENIZER: &str = "/tokenizer";
/// Of rows: how many the import has left out.
pub(super) const SKIPPED_ROWS: &str = "skipped_rows";
const CHECKSUM_BLOCK: &str = "checksum_block";

/// What a file says about itself; a file of foreign make says nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Header {
    /// `None` for a file that was not written by this crate.
    pub format_version: Option<u32>,
    pub tokenizer: Option<Tokenizer>,
    pub vocabulary_size: Option<u64>,
    /// The imported file's name, without its directory.
    pub source: Option<String>,
    pub source_sha256: Option<String>,
    pub split: Option<String>,
    pub shard: Option<u64>,
    pub num_shards: Option<u64>,
    /// Rows of the imported file that are in no shard.
    pub skipped_rows: Option<u64>,
}

impl Header {
    pub(super) fn read(file: &File) -> Result<Self> {
        let ours = attribute::<VarLenUnicode>(file, "format")?.is_some_and(|format| format.as_str() == FORMAT);
        let format_version = attribute(file, "format_version")?.filter(|_| ours);
        match format_version {
            None if ours => return Err(Error::input("attribute format_version is missing").hint("import it again")),
            Some(version) if version > FORMAT_VERSION => {
                let message = format!("format_version is {version}, but this program knows up to {FORMAT_VERSION}");
                return Err(Error::input(message).hint("use a newer hpctrain, or import the data with this one"));
            }
            _ => {}
        }
        let text = |name| Ok(attribute::<VarLenUnicode>(file, name)?.map(|text| text.to_string()));
        let header = Self {
            format_version,
            tokenizer: if ours { read_tokenizer(file)? } else { None },
            vocabulary_size: attribute(file, "vocabulary_size")?,
            source: text("source")?,
            source_sha256: text("source_sha256")?,
            split: text("split")?,
            shard: attribute(file, "shard")?,
            num_shards: attribute(file, "num_shards")?,
            skipped_rows: attribute(file, SKIPPED_ROWS)?,
        };
        if let (Some(tokenizer), Some(size)) = (&header.tokenizer, header.vocabulary_size)
            && tokenizer.vocabulary() as u64 != size
        {
            let (name, has) = (tokenizer.name(), tokenizer.vocabulary());
            return Err(Error::input(format!("vocabulary_size is {size}, but its {name} tokenizer has {has} ids"))
                .hint("import it again"));
        }
        Ok(header)
    }
}

/// An attribute of the root group, `None` if there is none of this name.
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
    let json: VarLenUnicode = file
        .dataset(TOKENIZER)
        .and_then(|dataset| dataset.read_scalar())
        .map_err(|e| Error::input(format!("dataset {TOKENIZER} cannot be read: {}", one_line(&e))))?;
    Tokenizer::from_json(&json).map(Some).map_err(|e| e.at(TOKENIZER))
}

/// The checksums of a shard, to compare with [`checksum`] of each block.
pub(super) struct Checksums {
    /// How many ids a block has; the last one may have fewer.
    pub block: usize,
    pub crc32: Vec<u32>,
}

impl Checksums {
    /// `None` if the file has none.
    pub(super) fn read(file: &File) -> Result<Option<Self>> {
        if !file.link_exists(CHECKSUMS) {
            return Ok(None);
        }
        let read = || -> hdf5::Result<(u64, Vec<u32>)> {
            let dataset = file.dataset(CHECKSUMS)?;
            Ok((dataset.attr(CHECKSUM_BLOCK)?.read_scalar()?, dataset.read_raw()?))
        };
        let (block, crc32) =
            read().map_err(|e| Error::input(format!("dataset {CHECKSUMS} cannot be read: {}", one_line(&e))))?;
        match usize::try_from(block) {
            Ok(block) if block > 0 => Ok(Some(Self { block, crc32 })),
            _ => Err(Error::input(format!("{CHECKSUMS} has {CHECKSUM_BLOCK} = {block}"))),
        }
    }
}

/// The CRC-32 of `ids` as little-endian integers of `width` bytes.
pub(super) fn checksum(ids: &[u32], width: usize) -> u32 {
    let mut bytes = Vec::with_capacity(ids.len() * width);
    for &id in ids {
        bytes.extend_from_slice(&u64::from(id).to_le_bytes()[..width]);
    }
    crc32fast::hash(&bytes)
}

/// One shard about to be written.
pub(super) struct TokenShard<'a> {
    pub ids: &'a [u32],
    pub tokenizer: &'a Tokenizer,
    /// The imported file's name, without its directory.
    pub source: &'a str,
    pub source_sha256: &'a str,
    pub split: Split,
    pub shard: usize,
    pub num_shards: usize,
    /// Deflate level; `None` stores the ids as they are.
    pub compress: Option<u8>,
}

impl TokenShard<'_> {
    /// Writes the shard to `path`, byte for byte the same each time.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let (json, source) = (var_len(&self.tokenizer.to_json()?)?, var_len(self.source)?);
        let texts = [
            ("format", var_len(FORMAT)?),
            ("tokenizer", var_len(self.tokenizer.name())?),
            ("source", source),
            ("source_sha256", var_len(self.source_sha256)?),
            ("split", var_len(self.split.name())?),
        ];
        self.write_objects(path, &json, &texts).map_err(|e| Error::io("write", path, one_line(&e)))?;
        // The name must never outlive the content.
        std::fs::File::open(path).and_then(|file| file.sync_all()).map_err(|e| Error::io("write", path, e))
    }

    fn write_objects(&self, path: &Path, json: &VarLenUnicode, texts: &[(&str, VarLenUnicode)]) -> hdf5::Result<()> {
        let width = self.id_width();
        let file = File::create(path)?;
        for (name, text) in texts {
            file.new_attr::<VarLenUnicode>().create(*name)?.write_scalar(text)?;
        }
        file.new_attr::<u32>().create("format_version")?.write_scalar(&FORMAT_VERSION)?;
        let vocabulary_size = self.tokenizer.vocabulary();
        for (name, n) in [("vocabulary_size", vocabulary_size), ("shard", self.shard), ("num_shards", self.num_shards)]
        {
            file.new_attr::<u64>().create(name)?.write_scalar(&(n as u64))?;
        }
        file.new_dataset::<VarLenUnicode>().create(TOKENIZER)?.write_scalar(json)?;

        let crc32: Vec<u32> = self.ids.chunks(BLOCK).map(|block| checksum(block, width as usize)).collect();
        let checksums = file.new_dataset::<u32>().shape(crc32.len()).create(CHECKSUMS)?;
        checksums.write_raw(&crc32)?;
        checksums.new_attr::<u64>().create(CHECKSUM_BLOCK)?.write_scalar(&(BLOCK as u64))?;

        // HDF5 narrows the ids on the way to the file.
        let mut builder = file.new_dataset_builder().empty_as(TypeDescriptor::Unsigned(width)).shape(self.ids.len());
        if let Some(level) = self.compress {
            builder = builder.chunk(BLOCK.min(self.ids.len()));
            if width != IntSize::U1 {
                builder = builder.shuffle();
            }
            builder = builder.deflate(level);
        }
        builder.create(TOKENS)?.write_raw(self.ids)?;
        file.close()
    }

    /// The narrowest integer that holds every id of the vocabulary.
    fn id_width(&self) -> IntSize {
        match self.tokenizer.vocabulary() {
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
        TokenShard { ids, tokenizer, source: "a.txt", source_sha256: "00", split, shard: 1, num_shards: 3, compress }
    }

    #[test]
    fn header_and_checksums_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.h5");
        let ids: Vec<u32> = (0..BLOCK as u32 + 5).map(|i| i % 256).collect();
        shard(&ids, &Tokenizer::Byte, None).write(&path).unwrap();
        let file = File::open(&path).unwrap();
        let expected = Header {
            format_version: Some(1),
            tokenizer: Some(Tokenizer::Byte),
            vocabulary_size: Some(256),
            source: Some("a.txt".into()),
            source_sha256: Some("00".into()),
            split: Some("train".into()),
            shard: Some(1),
            num_shards: Some(3),
            skipped_rows: None,
        };
        assert_eq!(Header::read(&file).unwrap(), expected);
        let checksums = Checksums::read(&file).unwrap().unwrap();
        assert_eq!(checksums.block, BLOCK);
        assert_eq!(checksums.crc32[1], crc32fast::hash(&[0, 1, 2, 3, 4]));
        assert_eq!(checksums.crc32.len(), 2);
    }

    #[test]
    fn checksum_is_over_little_endian_bytes() {
        assert_eq!(checksum(&[0x0102, 3], 2), crc32fast::hash(&[2, 1, 3, 0]));
    }

    #[test]
    fn width_follows_the_vocabulary() {
        let chars = |n| Tokenizer::Char { chars: ('\0'..).take(n).collect() };
        for (vocabulary, width) in [(1, IntSize::U1), (256, IntSize::U1), (257, IntSize::U2), (0x1_0000, IntSize::U2)] {
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
