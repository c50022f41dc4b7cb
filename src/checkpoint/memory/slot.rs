//! Slots: each is a file with one rank's parameters and optimizer state of one step.
//!
//! ```text
//! magic "HPCTMEM\n", u32 version, u32 length of the header
//! the header in JSON, zeros up to a multiple of 4096 bytes
//! the elements of every array of the header, one array after the other, as f32
//! u64 step, u64 updates, u64 position
//! u32 CRC-32 of everything before the elements
//! u32 CRC-32 of every block of 2^15 elements; the last block of an array may be shorter
//! u32 CRC-32 of the fields above, from the step on
//! the mark "WRITTEN\n"
//! ```
//!
//! Numbers are little-endian. The mark is erased before a slot is written again, and is written
//! last, so a slot whose writer was killed has none. All but the elements of a slot in tmpfs
//! (`slot_memory`) is written and read like any file: where memory is short, a write returns an
//! error, but an access to a mapping would kill the process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};

use super::slot_memory::SlotMemory;
use crate::Progress;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};
use hpctrain_cpu::copy_for_another_core;

/// The first bytes of a slot.
const MAGIC: [u8; 8] = *b"HPCTMEM\n";

/// The version of the format.
const VERSION: u32 = 1;

/// The last bytes of a whole slot.
const MARK: [u8; 8] = *b"WRITTEN\n";

/// The elements begin at a multiple of this number of bytes.
const ALIGNMENT: u64 = 4096;

/// The reason to pass over a slot whose writer was killed.
pub const UNFINISHED: &str = "it is incomplete, because the rank was killed while it wrote it";

/// Bytes before the header.
const PREFIX: usize = 16;

/// Bytes of step, updates and position.
const PROGRESS: usize = 24;

/// The number of elements under one checksum. A block fits into a core's cache, so its copy and its
/// checksum read it from memory once; the copies of larger ones bypass the cache.
pub const BLOCK: usize = 1 << 15;

/// The part of a slot that does not change from step to step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The id of the run.
    pub run: String,
    /// The id of the job that writes it.
    pub job: String,
    /// The rank whose state it is.
    pub rank: usize,
    /// The number of ranks of the job.
    pub ranks: usize,
    /// CRC-32 of the job's outline, which is a file beside the slots.
    pub outline_crc32: u32,
    /// The names of the optimizer's state buffers.
    pub state: Vec<String>,
    /// The number of elements of each array.
    pub arrays: Vec<usize>,
    /// The parts of tensors in the arrays.
    pub pieces: Vec<SlotPiece>,
}

/// A range of a tensor, or of some columns of a matrix, in a slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotPiece {
    /// The name of the tensor.
    pub tensor: String,
    /// The shape of the tensor.
    pub shape: Vec<usize>,
    /// The columns of a matrix in which `start` and `len` count elements; `None` if they count those
    /// of the whole tensor.
    pub columns: Option<Range<usize>>,
    /// The first row-major element of the tensor, or of the matrix `tensor[:, columns]`.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
    /// The first element of the parameters and of each state buffer, counted over all arrays.
    pub parts: Vec<usize>,
}

/// The places of the sections of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sections {
    /// The offset of the first element.
    elements: u64,
    /// The offset of the progress.
    trailer: u64,
    /// The number of blocks.
    blocks: usize,
}

impl Sections {
    /// Returns the places for a header of `header` bytes, or `None` if the numbers are too large.
    fn new(header: u64, arrays: &[usize]) -> Option<Self> {
        let elements = header.checked_add(PREFIX as u64)?.checked_next_multiple_of(ALIGNMENT)?;
        let all = arrays.iter().try_fold(0_usize, |sum, array| sum.checked_add(*array))?;
        let trailer = (all as u64).checked_mul(size_of::<f32>() as u64)?.checked_add(elements)?;
        let blocks = arrays.iter().map(|array| array.div_ceil(BLOCK)).sum();
        Some(Self { elements, trailer, blocks })
    }

    /// Returns the offset of the mark.
    fn mark(self) -> u64 {
        // Checksums of the header, of the blocks, and of the trailer.
        self.trailer + (PROGRESS + (self.blocks + 2) * size_of::<u32>()) as u64
    }

    /// Returns the length of the file.
    fn length(self) -> u64 {
        self.mark() + MARK.len() as u64
    }
}

/// A slot that is being written, step after step.
pub struct SlotWriter {
    path: PathBuf,
    file: File,
    sections: Sections,
    memory: SlotMemory,
    header_crc32: u32,
    /// The checksums of the blocks of this step so far.
    blocks: Vec<u32>,
    /// The offset of the next block.
    offset: u64,
}

impl SlotWriter {
    /// Creates a slot at `path`, which has no step yet, and allocates its memory.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, such as when memory is short.
    pub fn create(path: &Path, header: &Header) -> Result<Self> {
        // A process that still maps a file with this name would be killed if it became shorter.
        let _ = std::fs::remove_file(path);
        let too_large = || Error::internal("an in-memory checkpoint is too large");
        let json = serde_json::to_vec(header).map_err(|e| Error::internal(e.to_string()))?;
        let length = u32::try_from(json.len()).map_err(|_| too_large())?;
        let sections = Sections::new(u64::from(length), &header.arrays).ok_or_else(too_large)?;
        let mut first = [&MAGIC[..], &VERSION.to_le_bytes(), &length.to_le_bytes(), &json].concat();
        first.resize(sections.elements as usize, 0);
        let written = allocated(path, sections.length())
            .and_then(|file| file.write_all_at(&first, 0).map(|()| file));
        let file = written.map_err(|e| {
            // The memory is needed elsewhere.
            let _ = std::fs::remove_file(path);
            refused(path, e)
        })?;
        Ok(Self {
            path: path.to_path_buf(),
            memory: SlotMemory::new(&file, sections.elements..sections.trailer),
            file,
            sections,
            header_crc32: crc32fast::hash(&first),
            blocks: Vec::with_capacity(sections.blocks),
            offset: sections.elements,
        })
    }

    /// Begins another step; the one before is lost.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn begin(&mut self) -> Result<()> {
        self.blocks.clear();
        self.offset = self.sections.elements;
        self.write(&[0; MARK.len()], self.sections.mark())
    }

    /// Returns the place of the next `len` elements, which [`SlotWriter::append`] appends: whole
    /// blocks, or the last elements of an array.
    pub fn next(&mut self, len: usize) -> &mut [f32] {
        self.memory.elements(self.first(), len)
    }

    /// Appends the elements that [`SlotWriter::next`] has returned for the same `len`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn append(&mut self, len: usize) -> Result<()> {
        let first = self.first();
        let is_staged = self.memory.is_staged();
        let elements = self.memory.elements(first, len);
        self.blocks.extend(checksums(elements));
        if is_staged {
            let written = self.file.write_all_at(bytemuck::cast_slice(elements), self.offset);
            written.map_err(|e| refused(&self.path, e))?;
        }
        self.offset += (len * size_of::<f32>()) as u64;
        Ok(())
    }

    /// Appends elements that are in memory: whole blocks, or the last elements of an array.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn append_from(&mut self, elements: &[f32]) -> Result<()> {
        // They are in the cache, since they have just been updated. The copy is not: it is read only
        // after a failure.
        self.blocks.extend(checksums(elements));
        if self.memory.is_staged() {
            let written = self.file.write_all_at(bytemuck::cast_slice(elements), self.offset);
            written.map_err(|e| refused(&self.path, e))?;
        } else {
            let first = self.first();
            copy_for_another_core(elements, self.memory.elements(first, elements.len()));
        }
        self.offset += size_of_val(elements) as u64;
        Ok(())
    }

    /// Returns the number of elements of this step so far.
    fn first(&self) -> usize {
        (self.offset - self.sections.elements) as usize / size_of::<f32>()
    }

    /// Completes the step.
    ///
    /// # Errors
    /// Returns an error if blocks are missing, or the file cannot be written.
    pub fn finish(&mut self, progress: Progress) -> Result<()> {
        let is_complete =
            self.blocks.len() == self.sections.blocks && self.offset == self.sections.trailer;
        if !is_complete {
            return Err(Error::internal("blocks of an in-memory checkpoint are missing"));
        }
        let Progress { step, updates, position } = progress;
        let numbers = [step, updates, position].map(u64::to_le_bytes).concat();
        let sums = std::iter::once(&self.header_crc32).chain(&self.blocks);
        let mut trailer = [numbers, sums.flat_map(|sum| sum.to_le_bytes()).collect()].concat();
        trailer.extend(crc32fast::hash(&trailer).to_le_bytes());
        self.write(&trailer, self.sections.trailer)?;
        self.write(&MARK, self.sections.mark())
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the length of the file in units of four bytes, which is the size of an element.
    pub fn elements(&self) -> usize {
        // Every section is a multiple of that.
        self.sections.length() as usize / size_of::<f32>()
    }

    /// Reads the file from its element `first` on, as bytes in the form of elements.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn read(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let offset = (first * size_of::<f32>()) as u64;
        self.file
            .read_exact_at(bytemuck::cast_slice_mut(out), offset)
            .map_err(|e| Error::unreadable("read", &self.path, &e))
    }

    fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|e| refused(&self.path, e))
    }
}

/// Returns the checksum of each block of these elements.
fn checksums(elements: &[f32]) -> impl Iterator<Item = u32> {
    elements.chunks(BLOCK).map(|block| crc32fast::hash(bytemuck::cast_slice(block)))
}

/// A copy of another rank's slot, as it is received.
pub struct ForeignSlot {
    path: PathBuf,
    file: File,
    length: u64,
    offset: u64,
}

impl ForeignSlot {
    /// Creates the copy of a slot of `len` elements at `path`, and allocates its memory.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn create(path: &Path, len: usize) -> Result<Self> {
        let length = (len * size_of::<f32>()) as u64;
        let file = allocated(path, length).map_err(|e| refused(path, e))?;
        Ok(Self { path: path.to_path_buf(), file, length, offset: 0 })
    }

    /// Begins another step; the one before is lost.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn begin(&mut self) -> Result<()> {
        self.offset = 0;
        let mark = self.length - MARK.len() as u64;
        self.file.write_all_at(&[0; MARK.len()], mark).map_err(|e| refused(&self.path, e))
    }

    /// Appends elements of the file. The mark is in the last ones.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn append(&mut self, elements: &[f32]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        let (first, mark) = bytes.split_at(bytes.len().saturating_sub(MARK.len()));
        let written = self
            .file
            .write_all_at(first, self.offset)
            .and_then(|()| self.file.write_all_at(mark, self.offset + first.len() as u64));
        self.offset += bytes.len() as u64;
        written.map_err(|e| refused(&self.path, e))
    }
}

/// Creates a file with allocated memory.
fn allocated(path: &Path, length: u64) -> io::Result<File> {
    let file = own_files::update(path)?;
    file.set_len(0)?;
    match fallocate(&file, FallocateFlags::empty(), 0, length) {
        // Some file systems cannot allocate ahead.
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(length)?,
        allocated => allocated?,
    }
    Ok(file)
}

/// Returns the error for a slot that cannot be written.
fn refused(path: &Path, e: io::Error) -> Error {
    Error::io("write the in-memory checkpoint", path, e).hint(
        "free memory there (df), or set memory_checkpoint.dir to another file system, or remove \
         [memory_checkpoint]",
    )
}

/// A slot whose content was verified.
#[derive(Debug)]
pub struct Slot {
    path: PathBuf,
    file: File,
    sections: Sections,
    /// The part that does not change from step to step.
    pub header: Header,
    /// The progress of the run at its step.
    pub progress: Progress,
}

impl Slot {
    /// Opens the slot at `path` and verifies all of it.
    ///
    /// # Errors
    /// Returns an error that names the file and the reason if it is not a whole slot of this
    /// version.
    pub fn open(path: &Path) -> Result<Self> {
        let slot = Self::open_header(path)?;
        slot.verify()?;
        Ok(slot)
    }

    /// Opens the slot at `path`, and verifies everything but its elements.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Slot::open`].
    pub fn open_header(path: &Path) -> Result<Self> {
        let unread = |e: &io::Error| Error::unreadable("read", path, e);
        let damaged = |what: &str| Err(Error::damaged(format!("{}: {what}", path.display())));
        let file = safe_open::open(path).map_err(|e| unread(&e))?;
        let length = file.metadata().map_err(|e| unread(&e))?.len();
        let read = |offset: u64, bytes: usize| {
            let mut read = vec![0; bytes];
            file.read_exact_at(&mut read, offset).map(|()| read).map_err(|e| unread(&e))
        };
        if length < PREFIX as u64 {
            return damaged("it is too short for an in-memory checkpoint");
        }
        let prefix = read(0, PREFIX)?;
        if prefix[..8] != MAGIC {
            return damaged("it is not an in-memory checkpoint");
        }
        if number(&prefix[8..]) != VERSION {
            let version = number(&prefix[8..]);
            return damaged(&format!("format version {version}, this program has {VERSION}"));
        }
        let of_header = number(&prefix[12..]) as usize;
        if length < (PREFIX + of_header) as u64 {
            return damaged("it is too short for its header");
        }
        let header: Header = match serde_json::from_slice(&read(PREFIX as u64, of_header)?) {
            Ok(header) => header,
            Err(e) => return damaged(&format!("malformed header: {e}")),
        };
        let sections = match Sections::new(of_header as u64, &header.arrays) {
            Some(sections) if sections.length() == length => sections,
            _ => return damaged("its length is not that of its arrays"),
        };
        if let Err(what) = header.check() {
            return damaged(&what);
        }
        let trailer = read(sections.trailer, (length - sections.trailer) as usize)?;
        let (trailer, mark) = trailer.split_at(trailer.len() - MARK.len());
        if *mark != MARK {
            return damaged(UNFINISHED);
        }
        let (trailer, sum) = trailer.split_at(trailer.len() - size_of::<u32>());
        if crc32fast::hash(trailer) != number(sum) {
            return damaged("the checksum of its progress is wrong");
        }
        if crc32fast::hash(&read(0, sections.elements as usize)?) != number(&trailer[PROGRESS..]) {
            return damaged("the checksum of its header is wrong");
        }
        let [step, updates, position] = [0, 8, 16]
            .map(|at| trailer[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)));
        let progress = Progress { step, updates, position };
        Ok(Self { path: path.to_path_buf(), file, sections, header, progress })
    }

    /// Verifies the elements.
    fn verify(&self) -> Result<()> {
        let unread = |e: &io::Error| Error::unreadable("read", &self.path, e);
        let mut sums = vec![0; self.sections.blocks * size_of::<u32>()];
        let first = self.sections.trailer + (PROGRESS + size_of::<u32>()) as u64;
        self.file.read_exact_at(&mut sums, first).map_err(|e| unread(&e))?;
        let mut sums = sums.chunks_exact(size_of::<u32>()).map(number);
        let mut offset = self.sections.elements;
        let longest = self.header.arrays.iter().copied().max().unwrap_or(0).min(BLOCK);
        let mut block = vec![0; longest * size_of::<f32>()];
        for array in &self.header.arrays {
            for first in (0..*array).step_by(BLOCK) {
                let block = &mut block[..BLOCK.min(array - first) * size_of::<f32>()];
                self.file.read_exact_at(block, offset).map_err(|e| unread(&e))?;
                if sums.next() != Some(crc32fast::hash(block)) {
                    return Err(Error::damaged(format!(
                        "{}: the checksum of a block is wrong",
                        self.path.display()
                    )));
                }
                offset += block.len() as u64;
            }
        }
        Ok(())
    }

    /// Reads elements of a part of a piece, from its element `first` on.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or the piece has no such elements.
    pub fn read(
        &self,
        piece: &SlotPiece,
        part: usize,
        first: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let there = piece.parts.get(part).filter(|_| first + out.len() <= piece.len);
        let there = there.ok_or_else(|| {
            Error::internal(format!("{}: no part {part} of {}", self.path.display(), piece.tensor))
        })?;
        let offset = self.sections.elements + ((there + first) * size_of::<f32>()) as u64;
        self.file
            .read_exact_at(bytemuck::cast_slice_mut(out), offset)
            .map_err(|e| Error::unreadable("read", &self.path, &e))
    }
}

impl Header {
    /// Checks that every piece lies in the arrays, and the rank is one of its job.
    fn check(&self) -> Result<(), String> {
        let elements: usize = self.arrays.iter().sum();
        for piece in &self.pieces {
            let fits =
                |first: &usize| first.checked_add(piece.len).is_some_and(|end| end <= elements);
            let is_whole = piece.parts.len() == 1 + self.state.len()
                && piece.parts.iter().all(fits)
                && piece.start.checked_add(piece.len).is_some()
                && piece.columns.as_ref().is_none_or(|columns| columns.start < columns.end);
            if !is_whole {
                return Err(format!("malformed header: a piece of tensor {}", piece.tensor));
            }
        }
        if self.rank >= self.ranks {
            return Err(format!("malformed header: rank {} of {}", self.rank, self.ranks));
        }
        Ok(())
    }
}

/// Returns the first four bytes as a number.
fn number(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::random::Stream;

    const PROGRESS_OF_TEST: Progress = Progress { step: 7, updates: 6, position: 112 };

    /// Returns the header of a slot with two units, of which the first has more than one block.
    fn header() -> Header {
        let arrays = vec![BLOCK + 5, BLOCK + 5, 3, 3];
        let piece = |tensor: &str, first: usize, len: usize, stride: usize| SlotPiece {
            tensor: tensor.into(),
            shape: vec![len],
            columns: None,
            start: 0,
            len,
            parts: vec![first, first + stride],
        };
        Header {
            run: "run".into(),
            job: "job".into(),
            rank: 1,
            ranks: 2,
            outline_crc32: 5,
            state: vec!["m".into()],
            pieces: vec![
                piece("a", 0, BLOCK, BLOCK + 5),
                piece("b", BLOCK, 5, BLOCK + 5),
                piece("c", 2 * (BLOCK + 5), 3, 3),
            ],
            arrays,
        }
    }

    /// Appends elements in one of both ways.
    fn append(slot: &mut SlotWriter, block: &[f32]) {
        if slot.blocks.len().is_multiple_of(2) {
            slot.append_from(block).unwrap();
        } else {
            slot.next(block.len()).copy_from_slice(block);
            slot.append(block.len()).unwrap();
        }
    }

    /// Writes a step, of which element i is i + `base`.
    fn write(slot: &mut SlotWriter, header: &Header, base: f32) {
        slot.begin().unwrap();
        let mut first = 0;
        for array in &header.arrays {
            let values: Vec<f32> = (first..first + array).map(|i| i as f32 + base).collect();
            values.chunks(BLOCK).for_each(|block| append(slot, block));
            first += array;
        }
        slot.finish(PROGRESS_OF_TEST).unwrap();
    }

    /// Returns a whole slot.
    fn whole(dir: &Path) -> PathBuf {
        let path = dir.join("rank-00001.own.0");
        write(&mut SlotWriter::create(&path, &header()).unwrap(), &header(), 0.5);
        path
    }

    #[test]
    fn a_slot_is_read_as_written() {
        check_slot_in(&std::env::temp_dir());
    }

    /// Slots in tmpfs are mapped.
    #[test]
    fn a_slot_in_tmpfs_is_read_as_written() {
        check_slot_in(Path::new("/dev/shm"));
    }

    fn check_slot_in(dir: &Path) {
        let dir = tempfile::tempdir_in(dir).unwrap();
        let path = dir.path().join("slot");
        let mut writer = SlotWriter::create(&path, &header()).unwrap();
        let length = std::fs::metadata(&path).unwrap().len();
        assert!(Slot::open(&path).unwrap_err().to_string().contains("incomplete"));
        for base in [0.5, 0.25] {
            write(&mut writer, &header(), base);
            let slot = Slot::open(&path).unwrap();
            assert_eq!((&slot.header, slot.progress), (&header(), PROGRESS_OF_TEST));
            let mut values = [0.0; 2];
            slot.read(&slot.header.pieces[1], 1, 3, &mut values).unwrap();
            let first = (2 * BLOCK + 8) as f32 + base;
            assert_eq!(values, [first, first + 1.0]);
            assert!(slot.read(&slot.header.pieces[1], 1, 4, &mut values).is_err());
            assert!(slot.read(&slot.header.pieces[1], 2, 0, &mut values).is_err());
        }
        // Another slot with its name leaves it as it is.
        drop(SlotWriter::create(&path, &header()).unwrap());
        write(&mut writer, &header(), 0.5);
        assert!(Slot::open(&path).unwrap_err().to_string().contains("incomplete"));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
        assert!(length > ALIGNMENT && length.is_multiple_of(4));
    }

    #[test]
    fn a_copy_on_another_node_is_the_same_slot() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = SlotWriter::create(&dir.path().join("own"), &header()).unwrap();
        write(&mut writer, &header(), 0.5);
        let path = dir.path().join("copy");
        let mut copy = ForeignSlot::create(&path, writer.elements()).unwrap();
        for _ in 0..2 {
            copy.begin().unwrap();
            assert!(Slot::open(&path).is_err());
            for first in (0..writer.elements()).step_by(1000) {
                let mut elements = vec![0.0; 1000.min(writer.elements() - first)];
                writer.read(first, &mut elements).unwrap();
                copy.append(&elements).unwrap();
            }
            assert_eq!(Slot::open(&path).unwrap().header, header());
        }
        assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(dir.path().join("own")).unwrap());
    }

    #[test]
    fn a_slot_whose_writer_stopped_is_incomplete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slot");
        let mut writer = SlotWriter::create(&path, &header()).unwrap();
        write(&mut writer, &header(), 0.5);
        writer.begin().unwrap();
        assert!(writer.finish(PROGRESS_OF_TEST).is_err());
        append(&mut writer, &[1.0; BLOCK]);
        let error = Slot::open(&path).unwrap_err();
        assert_eq!(error.kind(), hpctrain_base::error::Kind::Damaged);
        assert!(error.message().contains("slot: it is incomplete"), "{error}");
    }

    /// Every damage is found: changed, missing and additional bytes, at places that are drawn over
    /// the sections of the file.
    #[test]
    fn no_damaged_slot_is_taken_for_a_whole_one() {
        let dir = tempfile::tempdir().unwrap();
        let good = std::fs::read(whole(dir.path())).unwrap();
        let path = dir.path().join("damaged");
        let sections = Slot::open(&dir.path().join("rank-00001.own.0")).unwrap().sections;
        for case in 0..200_u64 {
            let (first, end) = match case % 4 {
                0 => (0, 600),
                1 => (sections.trailer, sections.length()),
                2 => (sections.elements, sections.trailer),
                _ => (0, sections.length()),
            };
            let drawn = Stream::new(97).uniform(case) * (end - first) as f64;
            let at = first as usize + drawn as usize;
            let mut bytes = good.clone();
            match case % 5 {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, 0),
                2 => drop(bytes.remove(at)),
                _ => bytes[at] ^= 1 << (case % 8),
            }
            std::fs::write(&path, &bytes).unwrap();
            let error = Slot::open(&path).unwrap_err();
            assert!(error.message().contains("damaged"), "case {case}: {error}");
            assert_eq!(error.kind(), hpctrain_base::error::Kind::Damaged, "case {case}: {error}");
        }
        std::fs::write(&path, &good).unwrap();
        Slot::open(&path).unwrap();
    }

    #[test]
    fn foreign_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("foreign");
        let good = std::fs::read(whole(dir.path())).unwrap();
        let mut newer = good.clone();
        newer[8] = 2;
        for (bytes, what) in [
            (&b""[..], "it is too short for an in-memory checkpoint"),
            (&[7; 5000], "it is not an in-memory checkpoint"),
            (&newer, "format version 2, this program has 1"),
            (&good[..4000], "its length is not that of its arrays"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = Slot::open(&path).unwrap_err().to_string();
            assert!(error.contains("foreign: ") && error.contains(what), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(Slot::open(&path).is_err());
    }
}
