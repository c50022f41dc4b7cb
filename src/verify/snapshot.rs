//! A file with all elements of all tensors of one rank, with which the ranks of other layouts
//! compare theirs.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::tensor_entry::TensorRecord;
use crate::error::{Error, Result};

/// The file: the elements of the entries one after another, as they are in memory.
pub struct Snapshot {
    path: PathBuf,
    file: File,
    /// The first element of every entry.
    starts: Vec<usize>,
    /// Buffer for reading.
    buffer: Vec<f32>,
}

/// The number of elements read at a time.
const CHUNK: usize = 1 << 16;

/// An element with two values, as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Element {
    /// The index in the tensor.
    pub index: usize,
    /// The value in this layout.
    pub here: u32,
    /// The value on one rank.
    pub reference: u32,
}

impl Element {
    /// Returns the absolute difference of the values, or `f64::MAX` if it is NaN.
    pub fn distance(&self) -> f64 {
        let distance = (f64::from(f32::from_bits(self.here))
            - f64::from(f32::from_bits(self.reference)))
        .abs();
        if distance.is_nan() { f64::MAX } else { distance }
    }
}

/// The difference of a tensor from that of one rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TensorDifference {
    /// The number of elements whose bits differ.
    pub elements: u64,
    /// The different element with the lowest index.
    pub first: Option<Element>,
    /// The element with the largest difference.
    pub worst: Option<Element>,
    /// The sum of the squares of the differences.
    pub squares: f64,
    /// The sum of the squares of the values on one rank.
    pub reference_squares: f64,
}

impl TensorDifference {
    /// Compares runs of elements, the first of which has index `start`.
    pub fn add(&mut self, start: usize, here: &[f32], reference: &[f32]) {
        for (index, (here, reference)) in (start..).zip(here.iter().zip(reference)) {
            self.reference_squares += f64::from(*reference).powi(2);
            let here = here.to_bits();
            let reference = reference.to_bits();
            if here != reference {
                let element = Element { index, here, reference };
                // A difference that is not finite counts as a very large one, so that it can be
                // written as JSON.
                self.squares += element.distance().min(1e100).powi(2);
                self.record(1, element, element);
            }
        }
    }

    /// Merges the difference that another rank found in other elements.
    pub fn merge(&mut self, other: Self) {
        self.squares += other.squares;
        self.reference_squares += other.reference_squares;
        if let (Some(first), Some(worst)) = (other.first, other.worst) {
            self.record(other.elements, first, worst);
        }
    }

    fn record(&mut self, elements: u64, first: Element, worst: Element) {
        self.elements += elements;
        if self.first.is_none_or(|old| first.index < old.index) {
            self.first = Some(first);
        }
        if self.worst.is_none_or(|old| worst.distance() > old.distance()) {
            self.worst = Some(worst);
        }
    }
}

impl Snapshot {
    fn new(path: &Path, file: File, entries: &[TensorRecord]) -> Self {
        let ends = entries.iter().scan(0, |end, entry| {
            let start = *end;
            *end += entry.len;
            Some(start)
        });
        Self { path: path.to_path_buf(), file, starts: ends.collect(), buffer: Vec::new() }
    }

    /// Creates a file to fill.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn create(path: &Path, entries: &[TensorRecord]) -> Result<Self> {
        let file = File::create(path).map_err(|e| {
            Error::io("create", path, e)
                .hint("set TMPDIR to a directory with space for parameters and optimizer state")
        })?;
        Ok(Self::new(path, file, entries))
    }

    /// Opens a file to compare with.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn open(path: &Path, entries: &[TensorRecord]) -> Result<Self> {
        let file = File::open(path).map_err(|e| {
            Error::io("open", path, e)
                .hint("with --mpi, set TMPDIR to a directory that all nodes share")
        })?;
        Ok(Self::new(path, file, entries))
    }

    /// Writes elements of an entry from index `start` on.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&mut self, entry: usize, start: usize, values: &[f32]) -> Result<()> {
        let at = (self.starts[entry] + start) * size_of::<f32>();
        self.file
            .write_all_at(bytemuck::cast_slice(values), at as u64)
            .map_err(|e| Error::io("write", &self.path, e))
    }

    /// Compares elements of an entry from index `start` on.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn compare(
        &mut self,
        entry: usize,
        start: usize,
        values: &[f32],
        into: &mut TensorDifference,
    ) -> Result<()> {
        for (chunk, values) in values.chunks(CHUNK).enumerate() {
            let start = start + chunk * CHUNK;
            self.buffer.resize(values.len(), 0.0);
            let at = (self.starts[entry] + start) * size_of::<f32>();
            self.file
                .read_exact_at(bytemuck::cast_slice_mut(&mut self.buffer), at as u64)
                .map_err(|e| Error::io("read", &self.path, e))?;
            into.add(start, values, &self.buffer);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_element_is_found_on_any_rank() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all");
        let entry =
            |len| TensorRecord { unit: "u".into(), tensor: "t".into(), state: String::new(), len };
        let entries = [entry(3), entry(CHUNK + 10)];
        let values: Vec<f32> = (0..CHUNK + 10).map(|i| i as f32 * 0.5).collect();
        let mut snapshot = Snapshot::create(&path, &entries).unwrap();
        snapshot.write(0, 0, &[7.0; 3]).unwrap();
        snapshot.write(1, 0, &values).unwrap();

        let mut here = values.clone();
        (here[5], here[CHUNK + 3]) = (2.75, f32::NAN);
        let mut snapshot = Snapshot::open(&path, &entries).unwrap();
        let mut parts = [TensorDifference::default(), TensorDifference::default()];
        snapshot.compare(1, 0, &here[..1000], &mut parts[0]).unwrap();
        snapshot.compare(1, 1000, &here[1000..], &mut parts[1]).unwrap();
        let [mut low, high] = parts.clone();
        low.merge(high);
        let [low_part, mut other_order] = parts;
        other_order.merge(low_part);
        for all in [low, other_order] {
            let first = all.first.unwrap();
            assert_eq!((all.elements, first.index), (2, 5));
            assert_eq!((f32::from_bits(first.here), f32::from_bits(first.reference)), (2.75, 2.5));
            assert_eq!(all.worst.unwrap().index, CHUNK + 3);
            assert!(all.squares.is_finite());
        }
        let mut none = TensorDifference::default();
        snapshot.compare(0, 1, &[7.0; 2], &mut none).unwrap();
        assert_eq!((none.elements, none.reference_squares), (0, 98.0));
    }
}
