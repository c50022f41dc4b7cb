//! What the HDF5 binding lacks: rows read straight into a buffer that the caller keeps, caches and buffers sized for
//! random reads, and failures told in one line.

use std::path::Path;
use std::time::Duration;

use hdf5::types::VarLenUnicode;
use hdf5::{Dataspace, Datatype, File, Group};
use hdf5_sys::h5d::H5Dread;
use hdf5_sys::h5i::hid_t;
use hdf5_sys::h5p::{H5Pclose, H5Pcreate, H5Pset_buffer};
use hdf5_sys::h5s::{H5S_SELECT_SET, H5Sselect_hyperslab};

use super::stored::Stored;
use crate::error::{Error, Result};

/// The first bytes of an HDF5 file.
const SIGNATURE: &[u8] = b"\x89HDF\r\n\x1a\n";

/// How much an open file keeps of what it reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkCache {
    /// Decompressed bytes kept for each dataset.
    pub bytes: usize,
    /// The size of the chunks, 0 when nothing is chunked.
    pub chunk_bytes: usize,
}

/// How often a file is tried again that somebody else has locked, and how long after. HDF5 lets child processes inherit its
/// files: one that was started while a file was written holds the writer's lock until it executes its own program.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Opens a file for reading only, which takes no exclusive lock.
pub(super) fn open_file(path: &Path, cache: Option<ChunkCache>) -> Result<File> {
    let mut options = File::with_options();
    if let Some(ChunkCache { bytes, chunk_bytes }) = cache {
        // HDF5 keeps one chunk a slot: too few slots and chunks evict each other early. Random
        // windows never finish with a chunk, so plain least-recently-used (0.0) is right.
        let slots = (10 * bytes / chunk_bytes.max(1)).clamp(521, 1 << 16) | 1;
        options.with_fapl(|fapl| fapl.chunk_cache(slots, bytes, 0.0));
    }
    let mut opened = options.open(path);
    for _ in 0..LOCK_TRIES {
        match &opened {
            Err(e) if e.to_string().contains("temporarily unavailable") => std::thread::sleep(LOCK_PAUSE),
            _ => break,
        }
        opened = options.open(path);
    }
    opened.map_err(|e| cannot_open(path, &e))
}

/// Tells apart what the user can mend: no permission, not HDF5 at all, damaged, not lockable.
fn cannot_open(path: &Path, error: &hdf5::Error) -> Error {
    let start = match read_start(path) {
        Ok(start) => start,
        Err(e) => return Error::io("read", path, e),
    };
    let name = path.display();
    let detail = one_line(error);
    if start != SIGNATURE {
        Error::input(format!("{name} is not an HDF5 file")).hint("import the data with `hpctrain data import`")
    } else if detail.contains("unable to lock") {
        Error::input(format!("{name} cannot be locked: {detail}"))
            .hint("set HDF5_USE_FILE_LOCKING=FALSE in the environment; shards are only read")
    } else {
        Error::input(format!("{name} is a damaged or truncated HDF5 file: {detail}"))
            .hint("copy or import it again; it may still be in transfer")
    }
}

fn read_start(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut start = Vec::new();
    std::fs::File::open(path)?.take(SIGNATURE.len() as u64).read_to_end(&mut start)?;
    Ok(start)
}

/// The top and the bottom of HDF5's error stack, with the system's reason if it refused to read or write.
pub(crate) fn one_line(error: &hdf5::Error) -> String {
    let text = match error.stack() {
        Some(stack) => stack.description().to_owned(),
        None => error.to_string(),
    };
    // "… file write failed: time = …", a line break, ", filename = …, error message = 'No space left on device', …"
    let first = text.lines().next().unwrap_or_default();
    let what = first.split_once(": time = ").map_or(first, |(what, _)| what);
    match text.split_once("error message = '").and_then(|(_, rest)| rest.split_once('\'')) {
        Some((reason, _)) => format!("{what}: {reason}"),
        None => what.to_owned(),
    }
}

/// The full names of all datasets, groups included, sorted.
pub(super) fn dataset_names(group: &Group) -> hdf5::Result<Vec<String>> {
    let mut names: Vec<String> = group.datasets()?.iter().map(|dataset| dataset.name()).collect();
    for child in group.groups()? {
        names.extend(dataset_names(&child)?);
    }
    names.sort();
    Ok(names)
}

/// A string as HDF5 stores it.
pub(in crate::data) fn var_len(text: &str) -> Result<VarLenUnicode> {
    text.parse().map_err(|e| Error::input(format!("{text:?} cannot be stored in HDF5: {e}")))
}

/// Reads rows of a dataset through the library: single elements if it has one dimension, else whole slices along the first one.
pub(super) struct SlabReader {
    dataset: hdf5::Dataset,
    /// Elements of a row, and bytes of an element in memory.
    row_len: usize,
    width: usize,
    file_space: Dataspace,
    mem_space: Dataspace,
    mem_type: Datatype,
    transfer: SmallTransfer,
    start: Vec<u64>,
    count: Vec<u64>,
}

impl SlabReader {
    /// Elements arrive as `stored`, whatever the file has: integers that do not fit are clamped by HDF5.
    pub(super) fn new(dataset: hdf5::Dataset, stored: Stored) -> hdf5::Result<Self> {
        let shape = dataset.get_shape()?;
        if shape.is_empty() {
            return Err("a scalar has no rows".into());
        }
        Ok(Self {
            row_len: shape[1..].iter().product(),
            width: stored.width(),
            file_space: dataset.space()?,
            mem_space: Dataspace::try_new(0)?,
            mem_type: stored.datatype()?,
            transfer: SmallTransfer::new()?,
            start: vec![0; shape.len()],
            count: shape.iter().map(|&n| n as u64).collect(),
            dataset,
        })
    }

    /// Overwrites `out` with the rows from `first` on, as many as fill it exactly.
    pub(super) fn read(&mut self, first: u64, out: &mut [u8]) -> hdf5::Result<()> {
        let elements = out.len() / self.width;
        let rows = elements / self.row_len.max(1);
        if rows * self.row_len * self.width != out.len() {
            return Err(format!("{} bytes are no whole number of rows of {}", out.len(), self.row_len).into());
        }
        (self.start[0], self.count[0]) = (first, rows as u64);
        if self.mem_space.size() != elements {
            // Of the same rank as the dataset: between spaces of different ranks HDF5 maps element by element.
            self.mem_space = Dataspace::try_new(self.count.iter().map(|&n| n as usize).collect::<Vec<_>>())?;
        }
        hdf5::sync::sync(|| {
            // SAFETY: `start` and `count` have one element for each dimension of `file_space`;
            // the null stride and block mean 1.
            let selected = unsafe {
                H5Sselect_hyperslab(
                    self.file_space.id(),
                    H5S_SELECT_SET,
                    self.start.as_ptr(),
                    std::ptr::null(),
                    self.count.as_ptr(),
                    std::ptr::null(),
                )
            };
            hdf5::h5check(selected)?;
            // SAFETY: HDF5 writes one `mem_type` of `width` bytes for each element of `mem_space`, which is as many bytes
            // as `out` has, and fails if the selection in the file is outside the dataset or of another size. All ids
            // are open as long as `self`.
            let read = unsafe {
                H5Dread(
                    self.dataset.id(),
                    self.mem_type.id(),
                    self.mem_space.id(),
                    self.file_space.id(),
                    self.transfer.0,
                    out.as_mut_ptr().cast(),
                )
            };
            hdf5::h5check(read).map(|_| ())
        })
    }
}

/// A transfer property list with a small conversion buffer. HDF5 allocates and clears that buffer
/// in each read, and its default of 1 MiB takes five times as long as reading a window of 65 ids.
struct SmallTransfer(hid_t);

impl SmallTransfer {
    const BUFFER: usize = 16 << 10;

    fn new() -> hdf5::Result<Self> {
        hdf5::sync::sync(|| {
            // SAFETY: the class is one of HDF5's own.
            let list = Self(hdf5::h5check(unsafe { H5Pcreate(*hdf5::globals::H5P_DATASET_XFER) })?);
            // SAFETY: null buffers leave the allocation to HDF5.
            hdf5::h5check(unsafe { H5Pset_buffer(list.0, Self::BUFFER, std::ptr::null_mut(), std::ptr::null_mut()) })?;
            Ok(list)
        })
    }
}

impl Drop for SmallTransfer {
    fn drop(&mut self) {
        // SAFETY: the list is open, and this is its only owner.
        hdf5::sync::sync(|| unsafe { H5Pclose(self.0) });
    }
}
