//! Identity of a run's training data: enough of every shard to distinguish it from another without
//! reading all of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hdf5::dataset::Layout;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::excluded_samples::ExcludedSummary;
use super::format::{BlockSums, Checksums, Header};
use super::h5;
use super::import::hex;
use super::shard_schema::{Field, ShardSchema};
use hpctrain_base::error::{Error, Result};

/// Bytes of a hash: 64 bits protect against chance, not against malice.
const HASH: usize = 8;
/// For datasets without checksums: number of pieces to read, evenly spread, and bytes of each.
const PIECES: u64 = 8;
const PIECE: u64 = 4 << 10;

/// The samples of a run, as far as they determine its results: their number, and their shards in
/// the order of the samples. It does not depend on the directory, on `data.local_cache`, or on the
/// number of ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// The number of samples.
    pub samples: u64,
    /// The fraction of the stored samples that is kept for validation (`data.val_fraction`), in
    /// millionths, if there are no validation shards.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub held_out: u64,
    /// The shards of all data sets, one data set after the other; empty for samples that a program
    /// generates.
    pub shards: Vec<ShardFingerprint>,
}

/// One shard of a [`Fingerprint`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFingerprint {
    /// File name without its directory.
    pub file: String,
    /// The number of rows; of ids for a token stream.
    pub rows: u64,
    /// Sixteen hexadecimal digits: the hash of the checksums of a shard, or, if it has none, of the
    /// types, the shapes and some blocks of the elements. Tokenizer, vocabulary and scale of the
    /// inputs are included.
    pub hash: String,
}

impl Fingerprint {
    /// Creates the fingerprint of samples that do not come from files: it has their number only.
    pub fn of_samples(samples: u64) -> Self {
        Self { samples, held_out: 0, shards: vec![] }
    }

    /// Creates the fingerprint of samples that are in memory under a name, by the hash of their
    /// elements.
    pub(super) fn of_content(samples: u64, name: &str, content: Sha256) -> Self {
        let shard = ShardFingerprint { file: name.to_owned(), rows: samples, hash: short(content) };
        Self { samples, held_out: 0, shards: vec![shard] }
    }

    /// Returns sixteen hexadecimal digits that identify the fingerprint in records. They do not
    /// depend on the names of files.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.samples.to_le_bytes());
        if self.held_out > 0 {
            hash.update(self.held_out.to_le_bytes());
        }
        for ShardFingerprint { rows, hash: of_shard, .. } in &self.shards {
            hash.update(rows.to_le_bytes());
            hash.update(of_shard);
        }
        short(hash)
    }

    /// Returns the first difference from the data `before`; `None` if the samples are the same,
    /// even under other file names.
    ///
    /// ```
    /// use hpctrain_data::Fingerprint;
    ///
    /// let now = Fingerprint::of_samples(90);
    /// let before = Fingerprint::of_samples(100);
    /// assert_eq!(now.difference(&before).as_deref(), Some("90 samples, trained on 100"));
    /// assert_eq!(now.difference(&now), None);
    /// ```
    pub fn difference(&self, before: &Self) -> Option<String> {
        let own = &self.shards;
        let other = &before.shards;
        if own.len() != other.len() {
            let counts = format!("{} shards, trained on {}", own.len(), other.len());
            let (more, fewer, verb) =
                if own.len() < other.len() { (other, own, "missing") } else { (own, other, "new") };
            let first = more.iter().find(|shard| fewer.iter().all(|one| one.hash != shard.hash));
            return Some(
                first.map_or(counts.clone(), |first| format!("{counts}: {} is {verb}", first.file)),
            );
        }
        let mut pairs = own.iter().zip(other);
        let differing =
            pairs.find(|(own, other)| (own.rows, &own.hash) != (other.rows, &other.hash));
        match differing {
            Some((own, other)) if own.file != other.file => {
                Some(format!("{} instead of {}", own.file, other.file))
            }
            Some((own, other)) if own.rows != other.rows => {
                Some(format!("{} has {} rows, trained on {}", own.file, own.rows, other.rows))
            }
            Some((own, _)) => Some(format!("{} has other content", own.file)),
            None if self.held_out != before.held_out => {
                let [now, then] = [self, before].map(|data| data.held_out as f64 / 1e6);
                Some(format!("data.val_fraction = {now}, trained with {then}"))
            }
            None if self.samples != before.samples => {
                Some(format!("{} samples, trained on {}", self.samples, before.samples))
            }
            None => None,
        }
    }
}

/// The training data of a run: the data of its last start, and earlier changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainedOn {
    /// The data of the last start.
    #[serde(flatten)]
    pub fingerprint: Fingerprint,
    /// The samples that the last start does not read (`data.exclude`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excluded: Option<ExcludedSummary>,
    /// Changes of the data during the run, in the order of their steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<DataChange>,
}

/// A change of a run's training data, or of the samples that it does not read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataChange {
    /// The steps finished with the previous data.
    pub step: u64,
    /// The digest of the previous data.
    pub before: String,
    /// The first difference, as [`Fingerprint::difference`] or [`ExcludedSummary::difference`]
    /// describes it.
    pub what: String,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Returns the first digits of a hash.
fn short(hash: Sha256) -> String {
    hex(&hash.finalize()[..HASH])
}

impl ShardFingerprint {
    /// Creates the fingerprint of a file that has just been described.
    pub(super) fn for_file(
        file: &hdf5::File,
        path: &Path,
        header: &Header,
        content: &ShardSchema,
    ) -> Result<Self> {
        let mut hash = Sha256::new();
        let tokenizer =
            header.tokenizer.as_ref().map(|tokenizer| tokenizer.to_json()).transpose()?;
        hash.update(format!("{:?} {tokenizer:?}\n", header.vocabulary_size));
        if let Some(standard) = content.standard() {
            [&standard.mean, &standard.std]
                .iter()
                .for_each(|numbers| numbers.iter().for_each(|x| hash.update(x.to_le_bytes())));
        }
        if let Some(planes) = content.planes() {
            hash.update(format!("{planes:?}\n"));
        }
        let fields = content.datasets();
        // The same bytes stand for other numbers.
        for packing in fields.iter().filter_map(|field| field.packing.as_ref()) {
            hash.update(format!("{packing:?}\n"));
        }
        let checksums = if header.has_checksums() { Checksums::read(file)? } else { None };
        match checksums {
            Some(checksums) => {
                for (name, BlockSums { block, crc32 }) in checksums.iter() {
                    hash.update(format!("{name} {block}\n"));
                    crc32.iter().for_each(|crc32| hash.update(crc32.to_le_bytes()));
                }
            }
            None => {
                for field in &fields {
                    hash.update(format!("{} {}\n", field.dtype, h5::shape(&field.shape)));
                    sample(&mut hash, file, field)?;
                }
            }
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let rows = fields.first().map_or(0, |field| field.rows() as u64);
        Ok(Self { file: name, rows, hash: short(hash) })
    }
}

/// Hashes the parts of a dataset without checksums that are cheap to read: some blocks of
/// contiguous elements; for chunks, their total bytes and blocks of the first one.
fn sample(hash: &mut Sha256, file: &hdf5::File, field: &Field) -> Result<()> {
    let dataset = file
        .dataset(&field.name)
        .map_err(|e| Error::input(format!("{}: {}", field.name, h5::one_line(&e))))?;
    let stored = dataset.storage_size();
    hash.update(stored.to_le_bytes());
    // Nothing was written: there is no first chunk.
    if stored == 0 {
        return Ok(());
    }
    let first = match dataset.layout() {
        Layout::Chunked => dataset.chunk_info(0).map(|chunk| (chunk.addr, chunk.size)),
        _ => dataset.offset().map(|offset| (offset, stored)),
    };
    // Without an offset in the file, or without elements, only type and shape are hashed.
    let Some((start, bytes)) = first.filter(|(start, bytes)| *start < u64::MAX && *bytes > 0)
    else {
        return Ok(());
    };
    // A link may lead into another file.
    let path = PathBuf::from(dataset.filename());
    let plain = File::open(&path).map_err(|e| Error::io("read", &path, e))?;
    let mut piece = vec![0; PIECE.min(bytes) as usize];
    // The first block begins with the first byte, the last one ends near the last.
    let stride = (bytes - piece.len() as u64) / (PIECES - 1);
    for number in 0..PIECES {
        let read = plain
            .read_at(&mut piece, start + number * stride)
            .map_err(|e| Error::io("read", &path, e))?;
        hash.update(&piece[..read]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(samples: u64, shards: &[(&str, u64, &str)]) -> Fingerprint {
        let shards = shards.iter().map(|(file, rows, hash)| ShardFingerprint {
            file: file.to_string(),
            rows: *rows,
            hash: hash.to_string(),
        });
        Fingerprint { samples, held_out: 0, shards: shards.collect() }
    }

    #[test]
    fn the_first_difference_is_told() {
        let before = data(30, &[("a.h5", 10, "0a"), ("b.h5", 10, "0b"), ("c.h5", 10, "0c")]);
        for (samples, shards, expected) in [
            (30, &[("a.h5", 10, "0a"), ("b.h5", 10, "0b"), ("c.h5", 10, "0c")][..], None),
            // Other names of the same content in the same order.
            (30, &[("x.h5", 10, "0a"), ("y.h5", 10, "0b"), ("z.h5", 10, "0c")], None),
            (
                20,
                &[("a.h5", 10, "0a"), ("c.h5", 10, "0c")],
                Some("2 shards, trained on 3: b.h5 is missing"),
            ),
            (
                40,
                &[("a.h5", 10, "0a"), ("b.h5", 10, "0b"), ("bb.h5", 10, "bb"), ("c.h5", 10, "0c")],
                Some("4 shards, trained on 3: bb.h5 is new"),
            ),
            (
                30,
                &[("a.h5", 10, "0a"), ("b.h5", 10, "ff"), ("c.h5", 10, "0c")],
                Some("b.h5 has other content"),
            ),
            (
                29,
                &[("a.h5", 9, "0a"), ("b.h5", 10, "0b"), ("c.h5", 10, "0c")],
                Some("a.h5 has 9 rows, trained on 10"),
            ),
            (
                30,
                &[("a.h5", 10, "0a"), ("d.h5", 10, "0d"), ("c.h5", 10, "0c")],
                Some("d.h5 instead of b.h5"),
            ),
            (
                15,
                &[("a.h5", 10, "0a"), ("b.h5", 10, "0b"), ("c.h5", 10, "0c")],
                Some("15 samples, trained on 30"),
            ),
        ] {
            let now = data(samples, shards);
            assert_eq!(now.difference(&before).as_deref(), expected);
            assert_eq!(now.digest() == before.digest(), expected.is_none(), "{expected:?}");
        }
    }
}
