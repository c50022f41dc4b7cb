//! One rank's file: HDF5 lays it out, plain writes fill it.
//!
//! HDF5 holds a global lock while it works, and the data loader reads through it: writing a
//! checkpoint through HDF5 would stall the loader. So HDF5 only allocates the datasets.
//!
//! Each block is handed to the disk as soon as it is written, so a save runs at the speed of the
//! disk.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use hdf5::plist::dataset_create::{AllocTime, FillTime};

use super::manifest::{BLOCK, FileEntry, ShardFileInfo, ShardSlice, StoredPart, dataset, place};
use super::{PARAMS, refused, writeback};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;
use hpctrain_data::hdf5_open;
use hpctrain_data::one_line;

/// The action named in error messages.
const WRITE: &str = "write the checkpoint";

/// A range of a tensor, or of some columns of a matrix, that a rank writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// The name of the tensor.
    pub tensor: String,
    /// The shape of the tensor.
    pub shape: Vec<usize>,
    /// The columns of a matrix in which `range` counts elements; `None` if it counts those of the
    /// whole tensor.
    pub columns: Option<Range<usize>>,
    /// The range of row-major elements of the tensor, or of the matrix `tensor[:, columns]`.
    pub range: Range<usize>,
}

/// A file that is being written.
pub struct ShardWriter {
    path: PathBuf,
    file: File,
    written: ShardFileInfo,
}

/// Returns the name of a rank's file.
pub fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.h5")
}

/// Returns the size of this many elements in bytes.
fn bytes(elements: usize) -> u64 {
    (elements * size_of::<f32>()) as u64
}

impl ShardWriter {
    /// Creates the file `name` in `dir`, with datasets for each extent of the parameters and of
    /// each buffer of `state`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created or laid out.
    pub fn create(dir: &Path, name: &str, state: &[&str], extents: &[Extent]) -> Result<Self> {
        let path = dir.join(name);
        let file = own_files::update(&path).map_err(|e| refused(WRITE, &path, e))?;
        // HDF5 follows links, so it gets the open file instead of the name.
        let opened = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let offsets =
            lay_out(&opened, state, extents).map_err(|e| refused(WRITE, &path, one_line(&e)))?;
        let ranges = extents.iter().zip(offsets).map(|(extent, offsets)| {
            let parts =
                offsets.into_iter().map(|offset| StoredPart { offset, crc32: vec![] }).collect();
            let Extent { tensor, shape, columns, range } = extent.clone();
            (
                tensor,
                shape,
                ShardSlice {
                    file: name.to_string(),
                    columns,
                    start: range.start,
                    len: range.len(),
                    parts,
                },
            )
        });
        let entry = FileEntry { bytes: 0, rest_crc32: 0 };
        Ok(Self {
            written: ShardFileInfo { file: name.to_string(), entry, ranges: ranges.collect() },
            path,
            file,
        })
    }

    /// Writes one part of an extent.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
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

    /// Syncs the file to disk.
    ///
    /// # Errors
    /// Returns an error if the file cannot be synced or read.
    pub fn finish(self) -> Result<ShardFile> {
        let Self { path, file, mut written } = self;
        file.sync_all().map_err(|e| refused(WRITE, &path, e))?;
        let length = file.metadata().map_err(|e| Error::io("read", &path, e))?.len();
        let pieces: Vec<&ShardSlice> = written.ranges.iter().map(|(_, _, piece)| piece).collect();
        let rest_crc32 =
            rest_crc32(&file, length, &pieces).map_err(|e| Error::io("read back", &path, e))?;
        written.entry = FileEntry { bytes: length, rest_crc32 };
        Ok(ShardFile { path, file, written })
    }
}

/// A complete file.
pub struct ShardFile {
    path: PathBuf,
    /// Kept open because its directory is renamed.
    file: File,
    written: ShardFileInfo,
}

impl ShardFile {
    /// Returns the table of its content.
    pub fn written(&self) -> &ShardFileInfo {
        &self.written
    }

    /// Encodes the table of its content as a message.
    ///
    /// # Errors
    /// Returns an error if it cannot be encoded.
    pub fn table(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(&self.written).map_err(|e| Error::internal(e.to_string()))
    }

    /// Reads all of the file back, bypassing the page cache: older checkpoints are removed only
    /// once the file system returns the written bytes.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or returns other bytes.
    pub fn read_back(&self) -> Result<()> {
        writeback::forget(&self.file, &self.path);
        let otherwise = |what: &str| {
            let what = format!("{what} reads back differently than it was written");
            Err(Error::io("trust", &self.path, what)
                .hint("older checkpoints are kept; check the disk and the memory of the node"))
        };
        let mut block = Vec::new();
        for (tensor, _, piece) in &self.written.ranges {
            for stored in &piece.parts {
                for (index, crc32) in stored.crc32.iter().enumerate() {
                    block.resize(bytes(BLOCK.min(piece.len - index * BLOCK)) as usize, 0);
                    let offset = stored.offset + bytes(index * BLOCK);
                    self.file
                        .read_exact_at(&mut block, offset)
                        .map_err(|e| Error::io("read back", &self.path, e))?;
                    if crc32fast::hash(&block) != *crc32 {
                        return otherwise(tensor);
                    }
                }
            }
        }
        let FileEntry { bytes, rest_crc32: known } = self.written.entry;
        let pieces: Vec<&ShardSlice> =
            self.written.ranges.iter().map(|(_, _, piece)| piece).collect();
        let rest = rest_crc32(&self.file, bytes, &pieces)
            .map_err(|e| Error::io("read back", &self.path, e))?;
        if rest == known { Ok(()) } else { otherwise("its HDF5 structure") }
    }
}

/// Creates the file, and returns the offset of every part of every extent.
fn lay_out(path: &Path, state: &[&str], extents: &[Extent]) -> hdf5::Result<Vec<Vec<u64>>> {
    let file = hdf5_open::create(path)?;
    let names = datasets(extents);
    let mut offsets = vec![Vec::new(); extents.len()];
    for part in std::iter::once(&PARAMS).chain(state) {
        let group = hdf5_open::create_group(&file, part)?;
        for ((extent, name), offsets) in extents.iter().zip(&names).zip(&mut offsets) {
            let dataset = group
                .new_dataset_builder()
                .with_dcpl(|dcpl| {
                    dcpl.alloc_time(Some(AllocTime::Early)).fill_time(FillTime::Never)
                })
                .empty::<f32>()
                .shape(extent.range.len())
                .create(name.as_str())?;
            dataset
                .new_attr::<u64>()
                .create("start")?
                .write_scalar(&(extent.range.start as u64))?;
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

/// Returns the dataset names of the extents: those of one tensor are numbered in the order of their
/// pieces in the manifest.
fn datasets(extents: &[Extent]) -> Vec<String> {
    let mut order: Vec<usize> = (0..extents.len()).collect();
    order.sort_by_key(|&i| {
        let Extent { tensor, columns, range, .. } = &extents[i];
        (tensor, place(columns.as_ref(), range.start))
    });
    let mut names = vec![String::new(); extents.len()];
    for of_tensor in order.chunk_by(|&a, &b| extents[a].tensor == extents[b].tensor) {
        for (before, &i) in of_tensor.iter().enumerate() {
            names[i] = dataset(&extents[i].tensor, before);
        }
    }
    names
}

/// Returns the CRC-32 of the bytes of a file of `length` bytes outside of `pieces`, in order.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn rest_crc32(file: &File, length: u64, pieces: &[&ShardSlice]) -> std::io::Result<u32> {
    let ranges = pieces.iter().flat_map(|piece| {
        let len = bytes(piece.len);
        piece.parts.iter().map(move |part| part.offset..part.offset + len)
    });
    let mut ranges: Vec<Range<u64>> = ranges.collect();
    ranges.sort_by_key(|range| range.start);
    ranges.push(length..length);
    let mut hasher = crc32fast::Hasher::new();
    let mut at = 0;
    let mut buffer = vec![0; 1 << 16];
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the extent of a whole vector of `len` elements.
    fn extent(tensor: &str, len: usize) -> Extent {
        Extent { tensor: tensor.into(), shape: vec![len], columns: None, range: 0..len }
    }

    /// Writes a file of 6 MiB, with three blocks in two tensors.
    fn written(dir: &Path) -> ShardFile {
        let extents = [extent("a", BLOCK + 7), extent("b", BLOCK / 2)];
        let mut writer = ShardWriter::create(dir, "x.h5", &[], &extents).unwrap();
        for (number, extent) in extents.iter().enumerate() {
            let values: Vec<f32> = extent.range.clone().map(|i| (i * 7 + number) as f32).collect();
            writer.write(number, 0, &values).unwrap();
        }
        writer.finish().unwrap()
    }

    #[test]
    fn bytes_that_changed_since_the_write_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = written(dir.path());
        file.read_back().unwrap();
        let piece = &file.written.ranges[1].2;
        for (offset, message) in
            [(piece.parts[0].offset + 9, "b reads back"), (30, "its HDF5 structure reads back")]
        {
            let mut byte = [0];
            file.file.read_exact_at(&mut byte, offset).unwrap();
            file.file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
            let error = file.read_back().unwrap_err().to_string();
            assert!(
                error.contains(message) && error.contains("hint: older checkpoints are kept"),
                "{error}"
            );
            file.file.write_all_at(&byte, offset).unwrap();
        }
        file.read_back().unwrap();
    }

    /// Returns the bytes that the kernel has read from disks for this thread; `None` if it does not
    /// count them.
    fn fetched() -> Option<u64> {
        let io = std::fs::read_to_string("/proc/thread-self/io").ok()?;
        io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
    }

    #[test]
    fn reading_back_goes_past_the_kernels_copy() {
        // File systems on a local disk, whose reads the kernel counts.
        const ON_DISK: [u32; 3] = [0xef53, 0x5846_5342, 0x9123_683e];
        let dir = tempfile::tempdir().unwrap();
        let kind = rustix::fs::statfs(dir.path()).unwrap().f_type as u32;
        let Some(before) = fetched().filter(|_| ON_DISK.contains(&kind)) else {
            return println!(
                "SKIPPED: the kernel does not count reads of file systems of type {kind:#x}"
            );
        };
        let file = written(dir.path());
        assert!(fetched().unwrap() - before < 1 << 20, "written bytes are in the kernel's copy");
        // Repeated, because the first reading must not fill the cache for the second.
        for _ in 0..2 {
            let before = fetched().unwrap();
            file.read_back().unwrap();
            let fetched = fetched().unwrap() - before;
            assert!(
                fetched >= file.written.entry.bytes,
                "{fetched} bytes of {:?}",
                file.written.entry
            );
        }
    }
}
