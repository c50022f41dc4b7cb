//! Excerpts of a manifest. A manifest grows with the number of ranks that wrote the checkpoint, so
//! only rank 0 reads and parses it. The others receive its outline, which has no pieces and no
//! files, and then the entries that they need.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

use super::manifest::{FileEntry, Manifest, Origin, ShardSlice, TensorEntry};
use hpctrain_base::layout::TensorRange;

/// The largest number of manifest bytes that a rank has received for one checkpoint.
static LARGEST: AtomicU64 = AtomicU64::new(0);

/// Returns the largest number of manifest bytes that a rank other than 0 has received for one
/// checkpoint since the last call, for tests of scale.
#[doc(hidden)]
pub fn most_received() -> u64 {
    LARGEST.swap(0, Relaxed)
}

/// Records the number of bytes that a rank has received.
pub(super) fn record_received(bytes: usize) {
    LARGEST.fetch_max(bytes as u64, Relaxed);
}

/// The entries of a manifest that a rank needs.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Excerpt {
    /// The pieces that it reads, and those in files that it checks, by tensor.
    pub pieces: BTreeMap<String, Vec<ShardSlice>>,
    /// The files of these pieces, and the files that it checks.
    pub files: BTreeMap<String, FileEntry>,
    /// The names of the files that it checks.
    pub checked: Vec<String>,
}

impl Excerpt {
    /// Adds the entries to the outline of the manifest.
    pub fn enter(self, outline: &mut Manifest) {
        outline.files.extend(self.files);
        for (tensor, pieces) in self.pieces {
            outline.tensors.entry(tensor).and_modify(|entry| entry.pieces = pieces);
        }
    }
}

/// Returns the manifest without pieces, files and hosts.
pub(super) fn outline(manifest: &Manifest) -> Manifest {
    Manifest {
        version: manifest.version,
        id: manifest.id.clone(),
        step: manifest.step,
        updates: manifest.updates,
        position: manifest.position,
        seed: manifest.seed,
        config: manifest.config.clone(),
        tokenizer: manifest.tokenizer.clone(),
        data: manifest.data.clone(),
        preprocessing: manifest.preprocessing.clone(),
        origin: Origin { hosts: vec![], ..manifest.origin.clone() },
        state: manifest.state.clone(),
        files: BTreeMap::new(),
        tensors: manifest
            .tensors
            .iter()
            .map(|(name, entry)| {
                (name.clone(), TensorEntry { shape: entry.shape.clone(), pieces: vec![] })
            })
            .collect(),
    }
}

/// A manifest with indices for finding the entries of many ranks.
pub(super) struct Index<'a> {
    manifest: &'a Manifest,
    /// The pieces in every file, as the tensor and the number of the piece.
    of_files: HashMap<&'a str, Vec<(&'a str, usize)>>,
    /// For every tensor, the runs of pieces with the same columns.
    slices: HashMap<&'a str, Vec<Range<usize>>>,
}

impl<'a> Index<'a> {
    pub fn new(manifest: &'a Manifest) -> Self {
        let mut index = Self { manifest, of_files: HashMap::new(), slices: HashMap::new() };
        for (name, entry) in &manifest.tensors {
            let mut start = 0;
            for slice in entry.pieces.chunk_by(|a, b| a.columns == b.columns) {
                index.slices.entry(name).or_default().push(start..start + slice.len());
                start += slice.len();
            }
            for (number, piece) in entry.pieces.iter().enumerate() {
                index.of_files.entry(&piece.file).or_default().push((name, number));
            }
        }
        index
    }

    /// Returns the entries for the ranges that rank `rank` of `ranks` reads, and for the files that
    /// it checks.
    pub fn excerpt(&self, wanted: &[TensorRange], rank: usize, ranks: usize) -> Excerpt {
        let checked: Vec<&str> =
            self.manifest.files.keys().skip(rank).step_by(ranks).map(String::as_str).collect();
        let of_checked =
            checked.iter().filter_map(|file| self.of_files.get(file)).flatten().copied();
        let mut found: BTreeSet<(&str, usize)> = of_checked.collect();
        for range in wanted {
            let Some((name, entry)) = self.manifest.tensors.get_key_value(&range.tensor) else {
                continue;
            };
            for piece in self.overlapping(name, entry, range) {
                // A dataset is numbered among those of its tensor in the file, so all of them are
                // needed.
                let neighbours =
                    self.of_files[&piece.file[..]].iter().filter(|(tensor, _)| tensor == name);
                found.extend(neighbours);
            }
        }
        let mut excerpt = Excerpt::default();
        let mut enter = |file: &str| {
            excerpt.files.insert(file.to_string(), self.manifest.files[file].clone());
        };
        checked.iter().for_each(|file| enter(file));
        for (tensor, number) in found {
            let piece = self.manifest.tensors[tensor].pieces[number].clone();
            enter(&piece.file);
            excerpt.pieces.entry(tensor.to_string()).or_default().push(piece);
        }
        excerpt.checked = checked.into_iter().map(String::from).collect();
        excerpt
    }

    /// Returns the pieces of a tensor that may contain elements of a range.
    fn overlapping(
        &self,
        name: &str,
        entry: &'a TensorEntry,
        range: &TensorRange,
    ) -> Vec<&'a ShardSlice> {
        let all = 0..entry.shape.last().copied().unwrap_or(1);
        let wanted = range.columns.as_ref().unwrap_or(&all);
        let mut found = Vec::new();
        for slice in self.slices.get(name).into_iter().flatten() {
            let pieces = &entry.pieces[slice.clone()];
            let stored = pieces[0].columns.as_ref().unwrap_or(&all);
            let elements = match stored == wanted {
                true => range.range.clone(),
                false if wanted.start.max(stored.start) >= wanted.end.min(stored.end) => continue,
                false => {
                    let rows =
                        range.range.start / wanted.len()..range.range.end.div_ceil(wanted.len());
                    rows.start * stored.len()..rows.end * stored.len()
                }
            };
            let first = pieces.partition_point(|piece| piece.start + piece.len <= elements.start);
            found.extend(pieces[first..].iter().take_while(|piece| piece.start < elements.end));
        }
        found
    }
}
