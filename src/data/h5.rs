//! Additions to the HDF5 binding (`hdf5-metno`, the maintained continuation of the crate `hdf5`):
//! reads of rows directly into a buffer that the caller keeps, caches and buffers sized for random
//! reads, properties of types, filters and virtual data sets, and error messages of one line.
//!
//! The `unsafe` code calls functions that the binding lacks, such as a read of a part of a dataset
//! into the caller's buffer. Plain positional reads (`rows.rs`) are safe code.

use std::ffi::{CStr, c_char};
use std::io::ErrorKind;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use hdf5::plist::DatasetCreate;
use hdf5::types::VarLenUnicode;
use hdf5::{Dataspace, Datatype, File, H5Type};
use hdf5_sys::h5d::H5Dread;
use hdf5_sys::h5i::hid_t;
use hdf5_sys::h5p::{
    H5Pclose, H5Pcreate, H5Pget_filter2, H5Pget_nfilters, H5Pget_virtual_count,
    H5Pget_virtual_dsetname, H5Pget_virtual_filename, H5Pget_virtual_srcspace,
    H5Pget_virtual_vspace, H5Pset_buffer,
};
use hdf5_sys::h5s::{
    H5S_SELECT_SET, H5Sclose, H5Sget_select_bounds, H5Sget_select_npoints,
    H5Sget_simple_extent_ndims, H5Sselect_hyperslab,
};
use hdf5_sys::h5t::{
    H5T_class_t, H5T_sign_t, H5Tget_class, H5Tget_ebias, H5Tget_fields, H5Tget_member_name,
    H5Tget_nmembers, H5Tget_precision, H5Tget_sign, H5Tget_size, H5Tis_variable_str,
};
use hdf5_sys::h5z::H5Zfilter_avail;

use super::element_convert::ElementType;
use super::{decompression_limit, external_links};
use crate::hdf5_open;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// The first bytes of an HDF5 file.
const SIGNATURE: &[u8] = b"\x89HDF\r\n\x1a\n";

/// The size of the chunk cache of an open file.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkCache {
    /// Decompressed bytes kept for each dataset.
    pub bytes: usize,
    /// The size of the chunks, 0 when nothing is chunked.
    pub chunk_bytes: usize,
}

/// The number of retries of a file that another process has locked, and the pause before each. A
/// child process that was started while a file was written holds the writer's lock until it calls
/// exec.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The system's message for a lock that another process holds (EAGAIN).
const IN_USE: &str = "temporarily unavailable";

/// Opens a file for reading only, which takes no exclusive lock.
pub(super) fn open_file(path: &Path, cache: Option<ChunkCache>) -> Result<File> {
    let mut options = File::with_options();
    if let Some(ChunkCache { bytes, chunk_bytes }) = cache {
        // HDF5 keeps one chunk a slot: too few slots and chunks evict each other early. Random
        // windows never finish with a chunk, so plain least-recently-used (0.0) is right.
        let slots = (10 * bytes / chunk_bytes.max(1)).clamp(521, 1 << 16) | 1;
        options.with_fapl(|fapl| fapl.chunk_cache(slots, bytes, 0.0));
    }
    // HDF5 would block on a pipe.
    safe_open::check(path).map_err(|e| match e.kind() {
        ErrorKind::InvalidData => {
            Error::input(format!("{} is not an HDF5 file: {e}", path.display()))
                .hint("name HDF5 files, or move it to another directory")
        }
        _ => Error::io("read", path, e),
    })?;
    let mut opened = hdf5_open::open_with(&options, path);
    for _ in 0..LOCK_TRIES {
        match &opened {
            Err(e) if e.to_string().contains(IN_USE) => std::thread::sleep(LOCK_PAUSE),
            _ => break,
        }
        opened = hdf5_open::open_with(&options, path);
    }
    let file = opened.map_err(|e| cannot_open(path, &e))?;
    external_links::check(&file, path).map(|()| file)
}

/// Returns an error that distinguishes the causes that the user can fix: no permission, not HDF5 at
/// all, a newer format, one of several files, damaged, not lockable.
fn cannot_open(path: &Path, error: &hdf5::Error) -> Error {
    let start = match read_start(path) {
        Ok(start) => start,
        Err(e) => return Error::io("read", path, e),
    };
    let name = path.display();
    let detail = one_line(error);
    let has = |bytes: &[u8]| start.windows(bytes.len()).any(|window| window == bytes);
    // A user block may precede it: 512 bytes, or twice as many, and so on.
    let blocks = std::iter::successors(Some(512), |at| Some(2 * at)).take_while(|at| *at < START);
    let is_hdf5 = std::iter::once(0)
        .chain(blocks)
        .any(|at| start.get(at..).is_some_and(|s| s.starts_with(SIGNATURE)));
    if !is_hdf5 {
        Error::input(format!("{name} is not an HDF5 file"))
            .hint("import the data with `hpctrain data import`")
    } else if is_newer(error) {
        newer(&name.to_string(), error)
    } else if detail.contains("already open for write") {
        Error::input(format!("{name} is open for writing, or its writer ended without closing it"))
            .hint(format!(
                "wait for the writer; if there is none any more, remove the mark: h5clear -s {name}"
            ))
    } else if has(b"NCSAfami") {
        Error::input(format!("{name} is one of several files of HDF5's family driver"))
            .hint("make them one file: h5repart -family_to_sec2 NAME%d.h5 out.h5")
    } else if has(b"NCSAmult") {
        Error::input(format!("{name} is one of several files of HDF5's multi or split driver"))
            .hint("copy the data into one file with a program that opens them")
    } else if detail.contains("unable to lock") && detail.contains(IN_USE) {
        Error::input(format!("{name} is open for writing in another process, which holds its lock"))
            .hint("wait until the writer has closed it: what it has written so far may be half of the data")
    } else if detail.contains("unable to lock") {
        Error::input(format!("{name} cannot be locked: {detail}"))
            .hint("set HDF5_USE_FILE_LOCKING=FALSE in the environment; shards are only read")
    } else {
        Error::input(format!("{name} is a damaged or truncated HDF5 file: {detail}"))
            .hint("copy or import it again; it may still be in transfer")
    }
}

/// The bytes in which the signature is looked for: larger user blocks are not used in practice.
const START: usize = 1 << 20;

fn read_start(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut start = Vec::new();
    std::fs::File::open(path)?.take(START as u64).read_to_end(&mut start)?;
    Ok(start)
}

/// Returns whether the library rejected a part of a file because it does not know its version.
pub(super) fn is_newer(error: &hdf5::Error) -> bool {
    let Some(stack) = error.stack() else { return false };
    stack.iter().any(|frame| {
        let text = frame.desc();
        text.contains("version")
            && ["bad", "wrong", "unknown", "unsupported"].iter().any(|word| text.contains(word))
    })
}

/// Returns the error of a file, or an object of a file, that has a newer format than the library
/// reads.
pub(super) fn newer(name: &str, error: &hdf5::Error) -> Error {
    let ((major, minor, release), detail) = (hdf5::library_version(), one_line(error));
    let message = format!(
        "{name} is of a newer version of the HDF5 format than libhdf5 {major}.{minor}.{release} reads"
    );
    Error::input(format!("{message}: {detail}")).hint(
        "where it was written: h5repack --low=0 --high=2 in.h5 out.h5, or in h5py: libver = (\"earliest\", \"v110\")",
    )
}

/// Returns the top and the bottom of HDF5's error stack in one line, with the system's reason if it
/// failed to read or write.
pub fn one_line(error: &hdf5::Error) -> String {
    let text = match error.stack() {
        Some(stack) => stack.description().to_owned(),
        None => error.to_string(),
    };
    // "… file write failed: time = …", a line break, ", filename = …, error message = 'No space
    // left on device', …"
    let first = text.lines().next().unwrap_or_default();
    let what = first.split_once(": time = ").map_or(first, |(what, _)| what);
    match text.split_once("error message = '").and_then(|(_, rest)| rest.split_once('\'')) {
        Some((reason, _)) => format!("{what}: {reason}"),
        None => what.to_owned(),
    }
}

/// Reads all elements of a dataset of metadata, if they are not more than its stored bytes can
/// hold.
pub(super) fn read_all<T: H5Type>(dataset: &hdf5::Dataset) -> hdf5::Result<Vec<T>> {
    let elements = decompression_limit::extent(&dataset.get_shape()?)
        .ok_or("its shape is larger than any memory")?;
    decompression_limit::check(
        (elements as u64).saturating_mul(size_of::<T>() as u64),
        dataset.storage_size(),
    )?;
    dataset.read_raw()
}

/// Returns a string as HDF5 stores it.
pub(crate) fn var_len(text: &str) -> Result<VarLenUnicode> {
    text.parse().map_err(|e| Error::input(format!("{text:?} cannot be stored in HDF5: {e}")))
}

/// Reads rows of a dataset through the library: single elements if it has one dimension, otherwise
/// whole slices along the first one.
pub(super) struct SlabReader {
    dataset: hdf5::Dataset,
    /// Elements of a row; bytes of an element in memory.
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
    /// Creates a reader that converts elements of any type in the file to `stored`; HDF5 clamps
    /// integers that do not fit.
    pub(super) fn new(dataset: hdf5::Dataset, stored: ElementType) -> hdf5::Result<Self> {
        let shape = dataset.get_shape()?;
        if shape.is_empty() {
            return Err("a scalar has no rows".into());
        }
        Ok(Self {
            row_len: decompression_limit::extent(&shape[1..])
                .ok_or("a row is larger than any memory")?,
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
            return Err(format!(
                "{} bytes are not a whole number of rows of {}",
                out.len(),
                self.row_len
            )
            .into());
        }
        (self.start[0], self.count[0]) = (first, rows as u64);
        if self.mem_space.size() != elements {
            // Of the same rank as the dataset: between spaces of different ranks HDF5 maps element
            // by element.
            self.mem_space =
                Dataspace::try_new(self.count.iter().map(|&n| n as usize).collect::<Vec<_>>())?;
        }
        hdf5::sync::sync(|| {
            // SAFETY: `start` and `count` have one element for each dimension of `file_space`;
            // the null stride and block mean 1.
            let selected = unsafe {
                H5Sselect_hyperslab(
                    self.file_space.id(),
                    H5S_SELECT_SET,
                    self.start.as_ptr(),
                    ptr::null(),
                    self.count.as_ptr(),
                    ptr::null(),
                )
            };
            hdf5::h5check(selected)?;
            // SAFETY: HDF5 writes one `mem_type` of `width` bytes for each element of `mem_space`,
            // which is as many bytes as `out` has, and fails if the selection in the file is
            // outside the dataset or of another size. All ids are open as long as `self`.
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
            hdf5::h5check(unsafe {
                H5Pset_buffer(list.0, Self::BUFFER, ptr::null_mut(), ptr::null_mut())
            })?;
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

/// The properties of a type by which it is named.
#[derive(Debug, Clone, Copy)]
pub(super) struct TypeFacts {
    pub class: H5T_class_t,
    /// Bytes of an element.
    pub size: usize,
    /// Significant bits of a number.
    pub precision: usize,
    pub is_signed: bool,
    /// An enumeration of FALSE and TRUE.
    pub is_bool: bool,
    /// Strings of any length.
    pub is_variable: bool,
    /// Bits of a float's exponent and mantissa, and the exponent's bias.
    pub float: [usize; 3],
}

/// Returns the properties of a type.
pub(super) fn type_facts(dtype: &Datatype) -> hdf5::Result<TypeFacts> {
    let id = dtype.id();
    hdf5::sync::sync(|| {
        // SAFETY: the type is open as long as `dtype`; none of these modifies it.
        let (class, size, precision) =
            unsafe { (H5Tget_class(id), H5Tget_size(id), H5Tget_precision(id)) };
        // SAFETY: as above; for other classes this returns an error code, which is not a sign.
        let is_signed = unsafe { H5Tget_sign(id) } == H5T_sign_t::H5T_SGN_2;
        // SAFETY: as above.
        let is_variable = class == H5T_class_t::H5T_STRING && unsafe { H5Tis_variable_str(id) } > 0;
        let is_bool =
            class == H5T_class_t::H5T_ENUM && size == 1 && members(id) == ["FALSE", "TRUE"];
        let mut float = [0; 3];
        if class == H5T_class_t::H5T_FLOAT {
            let [exponent, mantissa, bias] = &mut float;
            let mut sign_at = 0;
            let mut exponent_at = 0;
            let mut mantissa_at = 0;
            // SAFETY: the type is a float, and all pointers are to local variables.
            let got = unsafe {
                H5Tget_fields(
                    id,
                    &mut sign_at,
                    &mut exponent_at,
                    exponent,
                    &mut mantissa_at,
                    mantissa,
                )
            };
            hdf5::h5check(got)?;
            // SAFETY: the type is a float.
            *bias = unsafe { H5Tget_ebias(id) };
        }
        Ok(TypeFacts { class, size, precision, is_signed, is_bool, is_variable, float })
    })
}

/// Returns the names of the first members of an enumeration.
fn members(id: hid_t) -> Vec<String> {
    // SAFETY: the caller holds an open enumeration.
    let count = unsafe { H5Tget_nmembers(id) }.clamp(0, 3);
    (0..count as u32).map(|number| member_name(id, number)).collect()
}

/// Returns the name of a member of an open enumeration; empty if HDF5 returns none.
fn member_name(id: hid_t, number: u32) -> String {
    // SAFETY: the enumeration has a member of this number; the result is null or a string that is
    // ours to free.
    unsafe {
        let name = H5Tget_member_name(id, number);
        if name.is_null() {
            return String::new();
        }
        let text = CStr::from_ptr(name).to_string_lossy().into_owned();
        hdf5_sys::h5::H5free_memory(name.cast());
        text
    }
}

/// Returns the numbers of the filters of a dataset that this library lacks.
pub(super) fn missing_filters(properties: &DatasetCreate) -> hdf5::Result<Vec<i32>> {
    let id = properties.id();
    hdf5::sync::sync(|| {
        // SAFETY: the list is open as long as `properties`.
        let count = hdf5::h5check(unsafe { H5Pget_nfilters(id) })?;
        let numbers: Vec<i32> =
            (0..count as u32).map(|index| filter_number(id, index)).collect::<hdf5::Result<_>>()?;
        // SAFETY: any number may be passed. A filter that cannot be looked up is not available.
        Ok(numbers.into_iter().filter(|number| unsafe { H5Zfilter_avail(*number) } <= 0).collect())
    })
}

/// Returns the number of the filter at an index of an open list of properties.
fn filter_number(id: hid_t, index: u32) -> hdf5::Result<i32> {
    let mut flags = 0;
    let mut values = 0;
    // SAFETY: there is a filter at this index; no buffers are passed for its parameters and its
    // name.
    hdf5::h5check(unsafe {
        H5Pget_filter2(
            id,
            index,
            &mut flags,
            &mut values,
            ptr::null_mut(),
            0,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    })
}

/// A source of a virtual data set.
#[derive(Debug, Clone)]
pub(super) struct VirtualSource {
    /// The file that has the source; `.` for the same one.
    pub file: String,
    pub dataset: String,
    /// The number of elements of the virtual data set that the source provides; `None` if
    /// unlimited.
    pub gives: Option<u64>,
    /// The required extents of the source; `None` if any are allowed.
    pub extents: Option<Vec<usize>>,
}

/// Returns the sources of a virtual data set; none for any other.
pub(super) fn sources(properties: &DatasetCreate) -> hdf5::Result<Vec<VirtualSource>> {
    let id = properties.id();
    hdf5::sync::sync(|| {
        let mut count = 0;
        // SAFETY: the list is open as long as `properties`, and that of a virtual data set.
        hdf5::h5check(unsafe { H5Pget_virtual_count(id, &mut count) })?;
        (0..count).map(|number| virtual_source(id, number)).collect()
    })
}

/// Returns a source of a virtual data set, whose list of properties is open.
fn virtual_source(id: hid_t, number: usize) -> hdf5::Result<VirtualSource> {
    // SAFETY: there is a source of this number; HDF5 writes at most the number of bytes
    // that it is given, a final zero included.
    let file = text(|room, bytes| unsafe { H5Pget_virtual_filename(id, number, room, bytes) })?;
    // SAFETY: as above.
    let dataset = text(|room, bytes| unsafe { H5Pget_virtual_dsetname(id, number, room, bytes) })?;
    // SAFETY: there is a source of this number.
    let space = Selection(hdf5::h5check(unsafe { H5Pget_virtual_vspace(id, number) })?);
    // SAFETY: the space is open; for an unlimited selection the result is negative.
    let gives = u64::try_from(unsafe { H5Sget_select_npoints(space.0) }).ok();
    // SAFETY: there is a source of this number.
    let space = Selection(hdf5::h5check(unsafe { H5Pget_virtual_srcspace(id, number) })?);
    // SAFETY: the space is open.
    let rank = hdf5::h5check(unsafe { H5Sget_simple_extent_ndims(space.0) })? as usize;
    let mut first = vec![0; rank];
    let mut last = vec![0; rank];
    // SAFETY: both vectors have a number for each dimension; for an unlimited selection
    // this returns an error, or ends at the largest number.
    let bounded =
        unsafe { H5Sget_select_bounds(space.0, first.as_mut_ptr(), last.as_mut_ptr()) } >= 0;
    let extents = last.iter().map(|last| usize::try_from(last.checked_add(1)?).ok()).collect();
    Ok(VirtualSource {
        file,
        dataset,
        gives,
        extents: Some(extents).filter(|_| bounded && gives.is_some()).flatten(),
    })
}

/// A data space that is closed on drop.
struct Selection(hid_t);

impl Drop for Selection {
    fn drop(&mut self) {
        // SAFETY: the space is open, and this is its only owner.
        hdf5::sync::sync(|| unsafe { H5Sclose(self.0) });
    }
}

/// Reads a text whose length HDF5 returns first.
fn text(get: impl Fn(*mut c_char, usize) -> isize) -> hdf5::Result<String> {
    let length = usize::try_from(get(ptr::null_mut(), 0))
        .map_err(|_| hdf5::Error::from("a name cannot be read"))?;
    let mut bytes = vec![0u8; length + 1];
    if get(bytes.as_mut_ptr().cast(), bytes.len()) < 0 {
        return Err("a name cannot be read".into());
    }
    bytes.truncate(length);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Formats a shape as `100 x 64`; as a single number for one dimension.
pub(super) fn shape(dims: &[usize]) -> String {
    if dims.is_empty() {
        return "scalar".to_owned();
    }
    let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
    dims.join(" x ")
}
