//! Verification of rows against their checksums as they are read for training.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::format::BlockSums;
use super::h5::one_line;
use super::packing::MissingElement;
use super::spec::Verify;

/// A failure to read rows.
#[derive(Debug)]
pub(super) enum ReadError {
    /// HDF5 or the operating system returned an error.
    Refused(hdf5::Error),
    /// The checksum of a block of rows differs from the one that was written.
    Damaged { rows: Range<u64>, found: u32, written: u32 },
    /// An element, counted from the first of the dataset, is missing.
    Missing { element: u64, missing: MissingElement },
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => f.write_str(&one_line(error)),
            Self::Damaged { rows: Range { start, end }, found, written } => {
                write!(
                    f,
                    "[{start}..{end}] has checksum {found:08x}, but {written:08x} was written"
                )
            }
            Self::Missing { element, missing } => write!(f, "element {element} {missing}"),
        }
    }
}

impl From<hdf5::Error> for ReadError {
    fn from(error: hdf5::Error) -> Self {
        Self::Refused(error)
    }
}

impl From<String> for ReadError {
    fn from(why: String) -> Self {
        Self::Refused(why.into())
    }
}

/// A buffer for blocks that are read to compare their checksums, shared by all readers of a data
/// set, which take turns.
pub(super) type Scratch = Arc<Mutex<Vec<u8>>>;

/// A bit set of the blocks of a dataset that were already compared.
pub(super) type Seen = Vec<u64>;

/// The checksums of a dataset that is being read, and the blocks already compared.
pub(super) struct Compared {
    sums: BlockSums,
    seen: Seen,
    always: bool,
    scratch: Scratch,
}

impl Compared {
    /// Starts with no block compared. Returns `None` if `verify` compares none.
    pub(super) fn new(sums: BlockSums, verify: Verify, scratch: Scratch) -> Option<Self> {
        let seen = vec![0; sums.crc32.len().div_ceil(64)];
        (verify != Verify::Off).then(|| Self {
            sums,
            seen,
            always: verify == Verify::Always,
            scratch,
        })
    }

    /// Restores the set of blocks that were compared while the file was open before.
    pub(super) fn resume(&mut self, seen: Seen) {
        self.seen = seen;
    }

    /// Returns the state for [`Compared::resume`].
    pub(super) fn into_seen(self) -> Seen {
        self.seen
    }

    fn is_due(&self, block: u64) -> bool {
        self.always || self.seen[block as usize / 64] >> (block % 64) & 1 == 0
    }

    /// Overwrites `out` with rows of `row_bytes` from `first` on, out of `all`. `read` overwrites
    /// its second argument with rows starting at its first. If any row of a block that is to be
    /// compared is requested, the whole block is read.
    pub(super) fn read(
        &mut self,
        first: u64,
        all: u64,
        row_bytes: usize,
        out: &mut [u8],
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let block = self.sums.block as u64;
        let end = first + (out.len() / row_bytes.max(1)) as u64;
        let mut row = first;
        let mut rest = out;
        while row < end {
            let number = row / block;
            let start = number * block;
            let stop = (number + 1).saturating_mul(block).min(all);
            let due = self.is_due(number);
            let mut until = stop;
            // Blocks that need no comparison are read in one call.
            while !due && until < end && !self.is_due(until / block) {
                until = until.saturating_add(block);
            }
            let until = until.min(end);
            let (now, later) =
                std::mem::take(&mut rest).split_at_mut((until - row) as usize * row_bytes);
            if !due {
                read(row, now)?;
            } else if (row, until) == (start, stop) {
                read(row, now)?;
                self.compare(number, start..stop, now)?;
            } else {
                let scratch = self.scratch.clone();
                let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
                scratch.resize((stop - start) as usize * row_bytes, 0);
                read(start, &mut scratch)?;
                self.compare(number, start..stop, &scratch)?;
                now.copy_from_slice(&scratch[(row - start) as usize * row_bytes..][..now.len()]);
            }
            (row, rest) = (until, later);
        }
        Ok(())
    }

    /// Compares a whole block with its checksum.
    fn compare(&mut self, number: u64, rows: Range<u64>, bytes: &[u8]) -> Result<(), ReadError> {
        let found = crc32fast::hash(bytes);
        let written = self.sums.crc32[number as usize];
        if found != written {
            return Err(ReadError::Damaged { rows, found, written });
        }
        self.seen[number as usize / 64] |= 1 << (number % 64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns 23 rows of 2 bytes in blocks of 5, with their checksums.
    fn data() -> (Vec<u8>, BlockSums) {
        let bytes: Vec<u8> = (0..46).collect();
        let sums = BlockSums { block: 5, crc32: bytes.chunks(10).map(crc32fast::hash).collect() };
        (bytes, sums)
    }

    fn compared(sums: &BlockSums, verify: Verify) -> Compared {
        Compared::new(sums.clone(), verify, Scratch::default()).unwrap()
    }

    /// Reads rows, and returns the ranges that were requested from the file.
    fn read(
        compared: &mut Compared,
        bytes: &[u8],
        rows: Range<u64>,
    ) -> Result<Vec<(u64, usize)>, ReadError> {
        let mut asked = Vec::new();
        let mut out = vec![0; 2 * (rows.end - rows.start) as usize];
        compared.read(rows.start, 23, 2, &mut out, |first, into| {
            asked.push((first, into.len() / 2));
            into.copy_from_slice(&bytes[2 * first as usize..][..into.len()]);
            Ok(())
        })?;
        assert_eq!(out, &bytes[2 * rows.start as usize..2 * rows.end as usize]);
        Ok(asked)
    }

    #[test]
    fn blocks_are_read_whole_until_they_were_compared() {
        let (bytes, sums) = data();
        let mut once = compared(&sums, Verify::FirstPass);
        assert_eq!(read(&mut once, &bytes, 7..8).unwrap(), [(5, 5)]);
        assert_eq!(read(&mut once, &bytes, 7..9).unwrap(), [(7, 2)]);
        // A part of the first, the second is known, all of the third, a part of the fourth.
        assert_eq!(read(&mut once, &bytes, 3..16).unwrap(), [(0, 5), (5, 5), (10, 5), (15, 5)]);
        assert_eq!(read(&mut once, &bytes, 1..23).unwrap(), [(1, 19), (20, 3)]);
        assert_eq!(read(&mut once, &bytes, 0..23).unwrap(), [(0, 23)]);
        assert_eq!(read(&mut once, &bytes, 4..4).unwrap(), []);
        // The file was closed in between.
        let mut again = compared(&sums, Verify::FirstPass);
        again.resume(once.into_seen());
        assert_eq!(read(&mut again, &bytes, 2..3).unwrap(), [(2, 1)]);
        let mut always = compared(&sums, Verify::Always);
        for _ in 0..2 {
            assert_eq!(
                read(&mut always, &bytes, 4..23).unwrap(),
                [(0, 5), (5, 5), (10, 5), (15, 5), (20, 3)]
            );
        }
        assert!(Compared::new(sums, Verify::Off, Scratch::default()).is_none());
    }

    #[test]
    fn damage_is_found_by_the_first_row_of_its_block_that_is_read() {
        let (mut bytes, sums) = data();
        bytes[44] ^= 1;
        let mut compared = compared(&sums, Verify::FirstPass);
        assert!(read(&mut compared, &bytes, 0..20).is_ok());
        for rows in [20..21, 20..23, 18..21] {
            match read(&mut compared, &bytes, rows).unwrap_err() {
                ReadError::Damaged { rows, found, written } => {
                    assert!(rows == (20..23) && found != written)
                }
                other => panic!("{other}"),
            }
        }
    }
}
