//! The ids of an import in an unnamed temporary file, each in as few bytes as the largest so far
//! needs.

use std::path::Path;

use super::spool::{Elements, Spooler};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::simd::simd;

/// A temporary file that ids are appended to.
pub(super) struct IdSpooler {
    bytes: Spooler<u8>,
    /// The bytes per id and the number of ids of each part of the file.
    parts: Vec<(usize, usize)>,
    narrow: Vec<u8>,
}

/// The ids in the order in which they were appended.
pub(super) struct Ids {
    bytes: Elements<u8>,
    parts: Vec<(usize, usize)>,
}

impl IdSpooler {
    /// Creates an unnamed file in `out`, or in its closest existing parent directory.
    pub fn create(out: &Path) -> Result<Self> {
        Ok(Self { bytes: Spooler::create(out)?, parts: vec![(1, 0)], narrow: Vec::new() })
    }

    /// Appends ids.
    pub fn push(&mut self, ids: &[u32]) -> Result<()> {
        let largest = simd(
            #[inline(always)]
            || ids.iter().fold(0, |largest, id| largest.max(*id)),
        );
        let needed = match largest {
            0..=0xff => 1,
            0x100..=0xffff => 2,
            _ => 4,
        };
        let last = self.parts.len() - 1;
        if needed > self.parts[last].0 {
            self.parts.push((needed, 0));
        }
        let last = self.parts.len() - 1;
        let (width, count) = &mut self.parts[last];
        *count += ids.len();
        self.narrow.resize(ids.len() * *width, 0);
        narrow(ids, *width, &mut self.narrow);
        self.bytes.push(&self.narrow)
    }

    /// Returns all ids that were appended.
    pub fn finish(self) -> Result<Ids> {
        Ok(Ids { bytes: self.bytes.finish()?, parts: self.parts })
    }
}

impl Ids {
    /// Returns the number of ids.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|(_, count)| count).sum()
    }

    /// Returns `count` ids from `first` on.
    pub fn get(&self, first: usize, count: usize) -> Result<Vec<u32>> {
        let mut found = Vec::with_capacity(count);
        let mut bytes = Vec::new();
        let mut before = 0;
        let mut bytes_before = 0;
        for &(width, len) in &self.parts {
            let start = first.max(before);
            let end = (first + count).min(before + len);
            if start < end {
                bytes.clear();
                self.bytes.append(
                    bytes_before + (start - before) * width,
                    (end - start) * width,
                    &mut bytes,
                )?;
                widen(&bytes, width, &mut found);
            }
            before += len;
            bytes_before += len * width;
        }
        match found.len() == count {
            true => Ok(found),
            false => Err(Error::internal(format!(
                "ids {first} to {first} + {count} of {before} asked for"
            ))),
        }
    }
}

/// Writes ids as little-endian integers of `width` bytes, which must be wide enough.
fn narrow(ids: &[u32], width: usize, to: &mut [u8]) {
    simd(
        #[inline(always)]
        || match width {
            1 => ids.iter().zip(to).for_each(|(id, to)| *to = *id as u8),
            2 => ids
                .iter()
                .zip(to.as_chunks_mut().0)
                .for_each(|(id, to)| *to = (*id as u16).to_le_bytes()),
            _ => ids.iter().zip(to.as_chunks_mut().0).for_each(|(id, to)| *to = id.to_le_bytes()),
        },
    );
}

/// Reverses [`narrow`], and appends the ids to `to`.
fn widen(bytes: &[u8], width: usize, to: &mut Vec<u32>) {
    match width {
        1 => to.extend(bytes.iter().map(|byte| u32::from(*byte))),
        2 => {
            to.extend(bytes.as_chunks().0.iter().map(|bytes| u32::from(u16::from_le_bytes(*bytes))))
        }
        _ => to.extend(bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_growing_width_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut spooler = IdSpooler::create(folder.path()).unwrap();
        let all: Vec<u32> =
            (0..700).chain((0..70_000).step_by(7)).chain([3, u32::MAX, 0]).collect();
        all.chunks(90).for_each(|some| spooler.push(some).unwrap());
        assert_eq!(spooler.parts.iter().map(|(width, _)| *width).collect::<Vec<_>>(), [1, 2, 4]);
        let ids = spooler.finish().unwrap();
        assert_eq!(ids.len(), all.len());
        for (first, count) in
            [(0, all.len()), (100, 300), (0, 1), (all.len() - 5, 5), (7, 0), (250, 9000)]
        {
            assert_eq!(
                ids.get(first, count).unwrap(),
                all[first..first + count],
                "{first}, {count}"
            );
        }
        assert!(ids.get(all.len(), 1).is_err());
    }
}
