//! Elements of an import that are kept in an unnamed temporary file, so that they need no memory.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytemuck::Pod;

use hpctrain_base::error::{Error, Result};

/// The number of elements that are read at once.
const BLOCK: usize = 1 << 16;

/// Elements in the order in which they were appended, in memory or in a file.
pub(super) enum Elements<T> {
    Memory(Vec<T>),
    Spooled(Spool<T>),
}

/// Elements in a file, which is mostly read in ascending order.
pub(super) struct Spool<T> {
    file: File,
    /// The action that failed and the path of the file, for messages.
    named: (&'static str, PathBuf),
    /// The number of bytes before the first element.
    start: u64,
    len: usize,
    /// The index of the first of the elements that were read last, and these elements.
    block: RefCell<(usize, Vec<T>)>,
}

/// A temporary file that elements are appended to.
pub(super) struct Spooler<T> {
    file: BufWriter<File>,
    folder: PathBuf,
    len: usize,
    kind: std::marker::PhantomData<T>,
}

impl<T: Pod> Elements<T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Memory(all) => all.len(),
            Self::Spooled(spool) => spool.len,
        }
    }

    /// Appends `count` elements from `first` on to `to`.
    pub fn append(&self, first: usize, count: usize, to: &mut Vec<T>) -> Result<()> {
        match self {
            Self::Memory(all) => to.extend_from_slice(&all[first..first + count]),
            Self::Spooled(spool) => spool.append(first, count, to)?,
        }
        Ok(())
    }

    /// Returns `count` elements from `first` on.
    pub fn get(&self, first: usize, count: usize) -> Result<Vec<T>> {
        let mut found = Vec::with_capacity(count);
        self.append(first, count, &mut found).map(|()| found)
    }

    /// Overwrites `to` with the elements from `first` on; nothing is read ahead.
    pub fn read(&self, first: usize, to: &mut [T]) -> Result<()> {
        match self {
            Self::Memory(all) => to.copy_from_slice(&all[first..first + to.len()]),
            Self::Spooled(spool) => spool.read(first, to)?,
        }
        Ok(())
    }

    /// Calls `each` with all elements, a block at a time.
    pub fn blocks(&self, mut each: impl FnMut(&[T])) -> Result<()> {
        (0..self.len()).step_by(BLOCK).try_for_each(|first| {
            each(&self.get(first, BLOCK.min(self.len() - first))?);
            Ok(())
        })
    }

    /// Returns what `map` makes of the elements in order, in an unnamed file in `out`.
    pub fn map<U: Pod>(&self, out: &Path, mut map: impl FnMut(T) -> U) -> Result<Elements<U>> {
        let mut to = Spooler::create(out)?;
        for first in (0..self.len()).step_by(BLOCK) {
            let some = self.get(first, BLOCK.min(self.len() - first))?;
            let mapped: Vec<U> = some.into_iter().map(&mut map).collect();
            to.push(&mapped)?;
        }
        to.finish()
    }
}

impl Elements<u8> {
    /// Returns the `len` bytes of a file from `start` on, which are not copied.
    pub fn of_file(file: File, path: &Path, start: u64, len: usize) -> Self {
        Self::Spooled(Spool {
            file,
            named: ("read", path.to_owned()),
            start,
            len,
            block: RefCell::default(),
        })
    }
}

impl<T: Pod> Spool<T> {
    fn append(&self, first: usize, count: usize, to: &mut Vec<T>) -> Result<()> {
        let mut block = self.block.borrow_mut();
        let (start, held) = &mut *block;
        if first < *start || first + count > *start + held.len() {
            let wanted = count.max(BLOCK).min(self.len.saturating_sub(first));
            held.resize(wanted, T::zeroed());
            let read = self.read(first, held);
            *start = first;
            if read.is_err() {
                held.clear();
            }
            read?;
        }
        to.extend_from_slice(&held[first - *start..][..count]);
        Ok(())
    }

    fn read(&self, first: usize, to: &mut [T]) -> Result<()> {
        let from = self.start + (first * size_of::<T>()) as u64;
        let (action, path) = &self.named;
        self.file
            .read_exact_at(bytemuck::cast_slice_mut(to), from)
            .map_err(|e| Error::io(action, path, e))
    }
}

impl<T: Pod> Spooler<T> {
    /// Creates an unnamed file in `out`, or in its closest existing parent directory.
    pub fn create(out: &Path) -> Result<Self> {
        let out = std::path::absolute(out).map_err(|e| Error::io("find", out, e))?;
        let folder = out.ancestors().find(|folder| folder.is_dir()).unwrap_or(&out).to_path_buf();
        let file = tempfile::tempfile_in(&folder)
            .map_err(|e| Error::io("create a temporary file in", &folder, e))?;
        Ok(Self { file: BufWriter::new(file), folder, len: 0, kind: std::marker::PhantomData })
    }

    /// Appends elements.
    pub fn push(&mut self, elements: &[T]) -> Result<()> {
        self.len += elements.len();
        let written = self.file.write_all(bytemuck::cast_slice(elements));
        written.map_err(|e| {
            Error::io("write a temporary file in", &self.folder, e)
                .hint("an import needs room there for what it writes, twice")
        })
    }

    /// Returns all elements that were appended.
    pub fn finish(self) -> Result<Elements<T>> {
        let Self { file, folder, len, .. } = self;
        let file = file
            .into_inner()
            .map_err(|e| Error::io("write a temporary file in", &folder, e.error()))?;
        let named = ("read a temporary file in", folder);
        Ok(Elements::Spooled(Spool { file, named, start: 0, len, block: RefCell::default() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<u32> = (0..3 * BLOCK as u32 + 5).collect();
        let mut spooler = Spooler::create(&folder.path().join("not/yet")).unwrap();
        all.chunks(1000).for_each(|some| spooler.push(some).unwrap());
        let spooled = spooler.finish().unwrap();
        for elements in [&spooled, &Elements::Memory(all.clone())] {
            assert_eq!(elements.len(), all.len());
            for (first, count) in
                [(0, 1), (BLOCK - 1, 3), (5, 2 * BLOCK), (all.len() - 2, 2), (7, 0), (0, all.len())]
            {
                assert_eq!(elements.get(first, count).unwrap(), all[first..first + count]);
                let mut found = vec![0; count];
                elements.read(first, &mut found).unwrap();
                assert_eq!(found, all[first..first + count]);
            }
            let mut found = Vec::new();
            elements.blocks(|some| found.extend_from_slice(some)).unwrap();
            assert_eq!(found, all);
            let halves = elements.map(folder.path(), |id| f64::from(id) / 2.0).unwrap();
            assert_eq!(
                (halves.len(), halves.get(all.len() - 1, 1).unwrap()[0]),
                (all.len(), f64::from(all.len() as u32 - 1) / 2.0)
            );
        }
        // No file is left behind.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
