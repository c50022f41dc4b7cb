//! Reading of rows of a dataset: single elements if it has one dimension, otherwise whole slices
//! along the first one.
//!
//! Contiguous elements that are stored as they are in memory are read with plain positional reads,
//! without HDF5 and its lock; short rows and tokens in blocks that are cached if all fit.
//! Everything else goes through the library: chunked data by whole chunks, some of which are
//! cached.
//!
//! A data set caches up to 128 MiB of blocks and chunks together, which memory estimates and
//! statistics count as data. Elements are returned as they are stored; `element_convert` converts
//! them to ids or numbers. Samples of a batch that are adjacent in the file are read in one call.
//! Batches are not sorted: among 128 of 60,000 shuffled samples, one in 500 has its neighbour in
//! the batch.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::block_checksums::{Compared, ReadError, Seen};
use super::element_convert::ElementType;
use super::h5::SlabReader;
use super::packing::Packing;

type Result<T> = std::result::Result<T, ReadError>;

/// A dataset open for reading.
pub(super) struct RowReader {
    source: RowSource,
    /// The checksums to compare with, if reads are verified.
    compared: Option<Compared>,
    stored: ElementType,
    /// How numbers are packed, and which elements are missing.
    packing: Option<Packing>,
    row_len: usize,
    rows: u64,
    blocks: Blocks,
    /// A buffer for rows as they are stored.
    raw: Vec<u8>,
    /// The buffer of [`RowReader::read_bytes`].
    bytes: Vec<u8>,
}

/// Where rows are read from.
pub(super) enum RowSource {
    /// Contiguous bytes in a file, the first at this offset.
    File(Arc<File>, u64),
    /// The HDF5 library.
    Library(SlabReader),
}

impl RowSource {
    /// Overwrites `out` with the bytes of rows from `first` on, of `row_bytes` each.
    fn read(&mut self, first: u64, row_bytes: usize, out: &mut [u8]) -> Result<()> {
        match self {
            Self::File(file, offset) => file
                .read_exact_at(out, *offset + first * row_bytes as u64)
                .map_err(|e| e.to_string().into()),
            Self::Library(slab) => Ok(slab.read(first, out)?),
        }
    }
}

/// A cache of blocks of rows.
struct Blocks {
    /// The number of rows of a block; 0 caches none.
    rows: u64,
    /// The largest number of bytes that are cached; a single block is always allowed.
    limit: usize,
    held: HashMap<u64, Block>,
    bytes: usize,
    /// The number of uses so far; orders [`Block::last_use`].
    clock: u64,
}

struct Block {
    bytes: Vec<u8>,
    last_use: u64,
}

impl RowReader {
    /// Creates a reader of `rows` rows of `row_len` elements. Blocks of `block` rows are read at
    /// once and cached up to `limit` bytes; 0 caches none.
    pub(super) fn new(
        source: RowSource,
        stored: ElementType,
        rows: u64,
        row_len: usize,
        block: u64,
        limit: usize,
    ) -> Self {
        let blocks = Blocks { rows: block, limit, held: HashMap::new(), bytes: 0, clock: 0 };
        Self {
            source,
            compared: None,
            stored,
            packing: None,
            row_len,
            rows,
            blocks,
            raw: Vec::new(),
            bytes: Vec::new(),
        }
    }

    /// Makes reads unpack numbers, and return an error for missing elements.
    pub(super) fn unpack(mut self, packing: Option<Packing>) -> Self {
        self.packing = packing;
        self
    }

    /// Makes reads compare rows with checksums.
    pub(super) fn compare(mut self, compared: Option<Compared>) -> Self {
        self.compared = compared;
        self
    }

    /// Restores the set of blocks that were compared while the file was open before.
    pub(super) fn resume(&mut self, seen: Seen) {
        if let Some(compared) = &mut self.compared {
            compared.resume(seen);
        }
    }

    /// Returns the set of blocks that were compared.
    pub(super) fn into_seen(self) -> Seen {
        self.compared.map_or(vec![], Compared::into_seen)
    }

    /// Overwrites `ids` with the rows from `first` on, as many as fill it exactly.
    pub(super) fn read(&mut self, first: u64, ids: &mut [u32]) -> Result<()> {
        self.read_as(first, ids, |stored, _, bytes, out| stored.to_ids(bytes, out))
    }

    /// Overwrites `ids` with the elements from `first` on, and `next` with as many from `first` + 1
    /// on. Rows must have one element.
    pub(super) fn read_shifted(
        &mut self,
        first: u64,
        ids: &mut [u32],
        next: &mut [u32],
    ) -> Result<()> {
        let count = ids.len();
        let width = self.stored.width();
        let end = first.checked_add(count as u64).filter(|end| *end < self.rows);
        let end = end.ok_or_else(|| {
            format!("rows {first} to {first} + {count} of {} asked for", self.rows)
        })?;
        if self.row_len != 1 || next.len() != count || count == 0 {
            let next = next.len();
            return Err(format!(
                "{count} and {next} elements of rows of {} asked for",
                self.row_len
            )
            .into());
        }
        if self.blocks.rows == 0 {
            self.raw.resize((count + 1) * width, 0);
            let Self { source, compared, rows, raw, .. } = &mut *self;
            fetch(source, compared.as_mut(), *rows, first, width, raw)?;
            check_present(self.packing.as_ref(), self.stored, &self.raw, first)?;
            self.stored.to_ids(&self.raw[..count * width], ids);
            self.stored.to_ids(&self.raw[width..], next);
            return Ok(());
        }
        self.read(first, ids)?;
        next[..count - 1].copy_from_slice(&ids[1..]);
        self.read(end, &mut next[count - 1..])
    }

    /// Overwrites `numbers` with the rows from `first` on, like [`RowReader::read`].
    pub(super) fn read_numbers(&mut self, first: u64, numbers: &mut [f32]) -> Result<()> {
        self.read_as(first, numbers, |stored, packing, bytes, out| match packing {
            Some(packing) => packing.unpack_all(stored, bytes, out),
            None => stored.to_numbers(bytes, out),
        })
    }

    /// Returns whether numbers may be NaN or infinite.
    pub(super) fn is_float(&self) -> bool {
        self.stored.is_float()
    }

    /// Returns the bytes of the blocks that are cached.
    pub(super) fn cached_bytes(&self) -> usize {
        self.blocks.bytes
    }

    /// Returns the bytes of `rows` rows from `first` on as they are in memory, before they become
    /// ids or numbers, and their element type.
    pub(super) fn read_bytes(&mut self, first: u64, rows: usize) -> Result<(ElementType, &[u8])> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let read = self.pieces(first, rows as u64, |_, piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        });
        self.bytes = bytes;
        read.map(|()| (self.stored, &self.bytes[..]))
    }

    fn read_as<T>(
        &mut self,
        first: u64,
        out: &mut [T],
        convert: fn(ElementType, Option<&Packing>, &[u8], &mut [T]),
    ) -> Result<()> {
        let rows = (out.len() / self.row_len.max(1)) as u64;
        if rows * self.row_len as u64 != out.len() as u64 {
            return Err(format!(
                "{} elements are not a whole number of rows of {}",
                out.len(),
                self.row_len
            )
            .into());
        }
        let mut rest = out;
        let mut element = first * self.row_len as u64;
        let packing = self.packing.take();
        let read = self.pieces(first, rows, |stored, piece| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len() / stored.width());
            check_present(packing.as_ref(), stored, piece, element)?;
            element += now.len() as u64;
            convert(stored, packing.as_ref(), piece, now);
            rest = later;
            Ok(())
        });
        self.packing = packing;
        read
    }

    /// Passes the bytes of `rows` rows from `first` on to `take`, in pieces of whole rows.
    fn pieces(
        &mut self,
        first: u64,
        rows: u64,
        mut take: impl FnMut(ElementType, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let end = first.checked_add(rows).filter(|end| *end <= self.rows);
        let end = end.ok_or_else(|| {
            format!("rows {first} to {first} + {rows} of {} asked for", self.rows)
        })?;
        let row_bytes = self.row_len * self.stored.width();
        if self.blocks.rows == 0 {
            self.raw.resize(rows as usize * row_bytes, 0);
            let Self { source, compared, rows, raw, .. } = &mut *self;
            fetch(source, compared.as_mut(), *rows, first, row_bytes, raw)?;
            return take(self.stored, &self.raw);
        }
        let mut row = first;
        while row < end {
            let number = row / self.blocks.rows;
            let start = number * self.blocks.rows;
            let stop = (start + self.blocks.rows).min(self.rows);
            let Self { source, compared, rows, blocks, stored, .. } = &mut *self;
            let block = blocks.get(number, (stop - start) as usize * row_bytes, |bytes| {
                fetch(source, compared.as_mut(), *rows, start, row_bytes, bytes)
            })?;
            let here = (stop.min(end) - row) as usize;
            let from = (row - start) as usize * row_bytes;
            take(*stored, &block[from..from + here * row_bytes])?;
            row += here as u64;
        }
        Ok(())
    }
}

/// Returns an error if a stored element in `bytes` is missing; the first one is number `first` of
/// the dataset.
fn check_present(
    packing: Option<&Packing>,
    stored: ElementType,
    bytes: &[u8],
    first: u64,
) -> Result<()> {
    match packing.and_then(|packing| packing.first_missing(stored.doubles(bytes))) {
        None => Ok(()),
        Some((place, missing)) => {
            Err(ReadError::Missing { element: first + place as u64, missing })
        }
    }
}

/// Overwrites `out` with the bytes of rows of `row_bytes` from `first` on, out of `all`, compared
/// with their checksums if necessary.
fn fetch(
    source: &mut RowSource,
    compared: Option<&mut Compared>,
    all: u64,
    first: u64,
    row_bytes: usize,
    out: &mut [u8],
) -> Result<()> {
    match compared {
        None => source.read(first, row_bytes, out),
        Some(compared) => compared
            .read(first, all, row_bytes, out, |first, out| source.read(first, row_bytes, out)),
    }
}

impl Blocks {
    /// Returns a block of `bytes` bytes, which `read` fills if it is not cached.
    fn get(
        &mut self,
        number: u64,
        bytes: usize,
        read: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<&[u8]> {
        self.clock += 1;
        let clock = self.clock;
        if !self.held.contains_key(&number) {
            let mut buffer = Vec::new();
            while self.bytes > 0 && self.bytes + bytes > self.limit {
                let oldest = self
                    .held
                    .iter()
                    .min_by_key(|(_, block)| block.last_use)
                    .map(|(number, _)| *number);
                let Some(block) = oldest.and_then(|oldest| self.held.remove(&oldest)) else {
                    break;
                };
                self.bytes -= block.bytes.len();
                buffer = block.bytes;
            }
            buffer.resize(bytes, 0);
            read(&mut buffer)?;
            self.bytes += bytes;
            self.held.insert(number, Block { bytes: buffer, last_use: clock });
        }
        match self.held.get_mut(&number) {
            Some(block) => {
                block.last_use = clock;
                Ok(&block.bytes)
            }
            None => Err("a block that was read is not there".to_owned().into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_so_many_blocks_are_kept() {
        let mut blocks = Blocks { rows: 1, limit: 20, held: HashMap::new(), bytes: 0, clock: 0 };
        let mut reads = Vec::new();
        for number in [0, 1, 0, 2, 0, 1, 3] {
            let fill = |bytes: &mut [u8]| {
                reads.push(number);
                bytes.fill(number as u8);
                Ok(())
            };
            assert_eq!(blocks.get(number, 10, fill).unwrap(), [number as u8; 10]);
            assert!(blocks.bytes <= 20);
        }
        assert_eq!(reads, [0, 1, 2, 1, 3]);
        // A block that is larger than the limit.
        assert_eq!(blocks.get(9, 50, |_| Ok(())).unwrap().len(), 50);
        assert_eq!((blocks.bytes, blocks.held.len()), (50, 1));
        assert!(blocks.get(7, 10, |_| Err("broken".to_owned().into())).is_err());
        assert_eq!(blocks.get(7, 10, |_| Ok(())).unwrap().len(), 10);
    }
}
