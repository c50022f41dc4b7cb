//! One rank's file: HDF5 lays it out, plain writes fill it.
//!
//! HDF5 locks its library while it works, and the loader reads with it: a thread that wrote a checkpoint through it would
//! stop the training's data. So HDF5 only reserves the place of every dataset.
//!
//! Each block is handed to the disk as soon as it is written, and the copy bypasses the caches, so a save runs at the
//! disk's speed.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use hdf5::plist::dataset_create::{AllocTime, FillTime};

use super::manifest::{BLOCK, FileEntry, Piece, Stored, Written, dataset, place};
use super::{PARAMS, refused, writeback};
use crate::data::one_line;
use crate::error::{Error, Result};
use crate::hdf5_files;

/// The action that errors of a file name.
const WRITE: &str = "write the checkpoint";

/// A range of a tensor, or of some columns of a matrix, that a rank writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Name of the tensor.
    pub tensor: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The columns of a matrix whose elements `range` counts; none if it counts those of the whole tensor.
    pub columns: Option<Range<usize>>,
    /// The range, in flat elements of the tensor, or of the matrix `tensor[:, columns]`, which is row-major, too.
    pub range: Range<usize>,
}

/// A file that is being written.
pub struct ShardWriter {
    path: PathBuf,
    file: File,
    written: Written,
}

/// The name of a rank's file.
pub fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.h5")
}

/// Bytes of so many elements.
fn bytes(elements: usize) -> u64 {
    (elements * size_of::<f32>()) as u64
}

impl ShardWriter {
    /// Creates the file `name` in `dir` with a dataset for each extent: of the parameters and of each buffer of
    /// `state`.
    ///
    /// # Errors
    /// The file system refused.
    pub fn create(dir: &Path, name: &str, state: &[&str], extents: &[Extent]) -> Result<Self> {
        let path = dir.join(name);
        let offsets = lay_out(&path, state, extents).map_err(|e| refused(WRITE, &path, one_line(&e)))?;
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(|e| refused(WRITE, &path, e))?;
        let ranges = extents.iter().zip(offsets).map(|(extent, offsets)| {
            let parts = offsets.into_iter().map(|offset| Stored { offset, crc32: vec![] }).collect();
            let Extent { tensor, shape, columns, range } = extent.clone();
            (tensor, shape, Piece { file: name.to_string(), columns, start: range.start, len: range.len(), parts })
        });
        let entry = FileEntry { bytes: 0, rest_crc32: 0 };
        Ok(Self { written: Written { file: name.to_string(), entry, ranges: ranges.collect() }, path, file })
    }

    /// Writes one part of an extent.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write(&mut self, extent: usize, part: usize, values: &[f32]) -> Result<()> {
        let stored = &mut self.written.ranges[extent].2.parts[part];
        let mut offset = stored.offset;
        for block in values.chunks(BLOCK) {
            let block: &[u8] = bytemuck::cast_slice(block);
            stored.crc32.push(crc32fast::hash(block));
            self.file.write_all_at(block, offset).map_err(|e| refused(WRITE, &self.path, e))?;
            writeback::start(&self.file, offset, block.len() as u64);
            offset += block.len() as u64;
        }
        Ok(())
    }

    /// Makes the file durable.
    ///
    /// # Errors
    /// The file system refused.
    pub fn finish(self) -> Result<ShardFile> {
        let Self { path, file, mut written } = self;
        file.sync_all().map_err(|e| refused(WRITE, &path, e))?;
        let length = file.metadata().map_err(|e| Error::io("read", &path, e))?.len();
        let pieces: Vec<&Piece> = written.ranges.iter().map(|(_, _, piece)| piece).collect();
        let rest_crc32 = rest_crc32(&file, length, &pieces).map_err(|e| Error::io("read back", &path, e))?;
        written.entry = FileEntry { bytes: length, rest_crc32 };
        Ok(ShardFile { path, file, written })
    }
}

/// A file that is written.
pub struct ShardFile {
    path: PathBuf,
    /// Still open: its directory is renamed.
    file: File,
    written: Written,
}

impl ShardFile {
    /// The table of its content.
    pub fn written(&self) -> &Written {
        &self.written
    }

    /// Reads all numbers again: older checkpoints are removed only once this one gives back the numbers written.
    ///
    /// # Errors
    /// The file system gave back something else.
    pub fn read_back(&self) -> Result<()> {
        let mut block = Vec::new();
        for (tensor, _, piece) in &self.written.ranges {
            for stored in &piece.parts {
                for (index, crc32) in stored.crc32.iter().enumerate() {
                    block.resize(bytes(BLOCK.min(piece.len - index * BLOCK)) as usize, 0);
                    let offset = stored.offset + bytes(index * BLOCK);
                    self.file.read_exact_at(&mut block, offset).map_err(|e| Error::io("read back", &self.path, e))?;
                    if crc32fast::hash(&block) != *crc32 {
                        let what = format!("{tensor} reads back otherwise than it was written");
                        return Err(Error::io("trust", &self.path, what)
                            .hint("older checkpoints are kept; check the disk and the memory of the node"));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Creates the file; returns the place of every part of every extent.
fn lay_out(path: &Path, state: &[&str], extents: &[Extent]) -> hdf5::Result<Vec<Vec<u64>>> {
    let file = hdf5_files::create(path)?;
    let names = datasets(extents);
    let mut offsets = vec![Vec::new(); extents.len()];
    for part in std::iter::once(&PARAMS).chain(state) {
        let group = file.create_group(part)?;
        for ((extent, name), offsets) in extents.iter().zip(&names).zip(&mut offsets) {
            let dataset = group
                .new_dataset_builder()
                .with_dcpl(|dcpl| dcpl.alloc_time(Some(AllocTime::Early)).fill_time(FillTime::Never))
                .empty::<f32>()
                .shape(extent.range.len())
                .create(name.as_str())?;
            dataset.new_attr::<u64>().create("start")?.write_scalar(&(extent.range.start as u64))?;
            if let Some(columns) = &extent.columns {
                let columns = [columns.start as u64, columns.end as u64];
                dataset.new_attr::<u64>().shape(2).create("columns")?.write_raw(&columns)?;
            }
            offsets.push(dataset.offset().ok_or("a dataset has no place in the file")?);
        }
    }
    file.close()?;
    Ok(offsets)
}

/// The datasets of the extents: those of one tensor are counted in the order that their pieces have in the manifest.
fn datasets(extents: &[Extent]) -> Vec<String> {
    let mut order: Vec<usize> = (0..extents.len()).collect();
    let place = |extent: &Extent| place(extent.columns.as_ref(), extent.range.start);
    order.sort_by_key(|&i| (&extents[i].tensor, place(&extents[i])));
    let mut names = vec![String::new(); extents.len()];
    for of_tensor in order.chunk_by(|&a, &b| extents[a].tensor == extents[b].tensor) {
        for (before, &i) in of_tensor.iter().enumerate() {
            names[i] = dataset(&extents[i].tensor, before);
        }
    }
    names
}

/// CRC-32 of the bytes of a file of `length` bytes that lie in none of `pieces`, in order.
///
/// # Errors
/// The file could not be read.
pub fn rest_crc32(file: &File, length: u64, pieces: &[&Piece]) -> std::io::Result<u32> {
    let ranges = pieces.iter().flat_map(|piece| {
        let len = bytes(piece.len);
        piece.parts.iter().map(move |part| part.offset..part.offset + len)
    });
    let mut ranges: Vec<Range<u64>> = ranges.collect();
    ranges.sort_by_key(|range| range.start);
    ranges.push(length..length);
    let (mut hasher, mut at, mut buffer) = (crc32fast::Hasher::new(), 0, vec![0; 1 << 16]);
    for range in ranges {
        while at < range.start {
            let take = buffer.len().min((range.start - at) as usize);
            file.read_exact_at(&mut buffer[..take], at)?;
            hasher.update(&buffer[..take]);
            at += take as u64;
        }
        at = at.max(range.end);
    }
    Ok(hasher.finalize())
}
