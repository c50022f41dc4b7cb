//! The memory in which a slot's elements are put together.
//!
//! A file in tmpfs is memory already, so a mapping of it takes one copy and no system call. A write
//! would look up, lock and unlock every page of 4 KiB, which takes longer than to copy it: the
//! kernel's records of these pages are out of the cache by the next step.
//!
//! A mapping is `unsafe`: an access beyond the end of the file, or without memory for a page, kills
//! the process. The file has its length and its memory before it is mapped, and no process makes it
//! shorter: only its writer opens it to write, and later files with its name are new ones.

use std::fs::File;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};

use rustix::fs::fstatfs;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::node_directory::TMPFS;

/// The memory in which elements are put together.
pub enum SlotMemory {
    /// The file's memory.
    Mapped(Mapping),
    /// A buffer on the way to the file.
    Staged(Vec<f32>),
}

impl SlotMemory {
    /// Maps the elements at `bytes` of `file`, which has allocated memory of its own if it is in
    /// tmpfs. The first byte is at a multiple of an element's size.
    pub fn new(file: &File, bytes: Range<u64>) -> Self {
        let is_memory = fstatfs(file).is_ok_and(|found| found.f_type as u64 == TMPFS);
        let mapping = is_memory.then(|| Mapping::new(file, bytes)).flatten();
        mapping.map_or(Self::Staged(vec![]), Self::Mapped)
    }

    /// Returns the place of `len` elements, which are those from element `first` on.
    pub fn elements(&mut self, first: usize, len: usize) -> &mut [f32] {
        match self {
            Self::Mapped(mapping) => &mut mapping.elements()[first..first + len],
            Self::Staged(buffer) => {
                buffer.resize(len, 0.0);
                buffer
            }
        }
    }

    /// Returns true if elements must be written to the file.
    pub fn is_staged(&self) -> bool {
        matches!(self, Self::Staged(_))
    }
}

/// A mapping of the first bytes of a file.
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// The first byte of the elements.
    first: usize,
}

impl Mapping {
    /// Maps the file up to the end of `bytes`; `None` if the system refuses.
    fn new(file: &File, bytes: Range<u64>) -> Option<Self> {
        let first = usize::try_from(bytes.start).ok()?;
        let end = usize::try_from(bytes.end).ok()?;
        assert!(first <= end && first.is_multiple_of(align_of::<f32>()), "elements at {bytes:?}");
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // The first steps would wait for page faults otherwise.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, of a file that has this length and that no process makes shorter.
        let base = unsafe { mmap(null_mut(), end, access, flags, file, 0) };
        let base = base.inspect_err(|e| log::debug!("an in-memory checkpoint is not mapped: {e}"));
        Some(Self { base: NonNull::new(base.ok()?.cast())?, bytes: end, first })
    }

    fn elements(&mut self) -> &mut [f32] {
        let len = (self.bytes - self.first) / size_of::<f32>();
        let elements = self.base.as_ptr().wrapping_add(self.first).cast();
        // SAFETY: the elements lie in the mapping, which is aligned to pages, and any bits are an
        // f32. No thread or process changes them otherwise: others read the file, and only once a
        // step is complete.
        unsafe { std::slice::from_raw_parts_mut(elements, len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: every access goes through `self`.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        // The process's end unmaps the memory at the latest.
        unmapped.unwrap_or_else(|e| log::debug!("an in-memory checkpoint stays mapped: {e}"));
    }
}
