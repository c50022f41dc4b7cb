//! Host buffers: aligned to cache lines, recycled through a pool, counted by category.
//!
//! After some steps the pool has every size that a step needs and requests no more from the system;
//! `tests/steady.rs` tests that. A failed allocation is an error with its size, its category and
//! the bytes allocated so far.

use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{MemoryKind, MemoryStats, format_bytes};

/// A cache line, to which every buffer is aligned.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Line([f32; LINE]);

/// f32 elements in a cache line.
const LINE: usize = 16;

/// A pool of free buffers, and the count of the live ones.
#[derive(Default)]
pub struct HostPool {
    free: Mutex<Vec<Vec<Line>>>,
    pub(super) stats: MemoryStats,
}

impl HostPool {
    /// Allocates a buffer with unspecified contents: NaN in debug builds, to expose reads.
    ///
    /// # Errors
    /// Returns an error if the system cannot allocate the memory.
    pub fn take(self: &Arc<Self>, what: MemoryKind, len: usize) -> Result<CpuBuf> {
        let lines = len.div_ceil(LINE);
        let recycled = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            // Best fit. A buffer more than a quarter too large would exceed the memory that the
            // startup summary printed.
            let best = (0..free.len())
                .filter(|&i| (lines..=lines + lines / 4).contains(&free[i].len()))
                .min_by_key(|&i| free[i].len());
            best.map(|i| free.swap_remove(i))
        };
        let mut lines = recycled.map_or_else(|| self.allocate(what, lines), Ok)?;
        if cfg!(debug_assertions) {
            lines.fill(Line([f32::NAN; LINE]));
        }
        self.stats.record_alloc(what, size_of_val(lines.as_slice()));
        Ok(CpuBuf { lines, len, what, pool: self.clone() })
    }

    /// Allocates memory from the system.
    fn allocate(&self, what: MemoryKind, len: usize) -> Result<Vec<Line>> {
        let mut lines = Vec::new();
        lines.try_reserve_exact(len).map_err(|_| {
            let size = format_bytes(len.saturating_mul(size_of::<Line>()));
            let taken = self.stats.live_by_category();
            Error::input(format!(
                "out of memory: cannot allocate {size} for {}; this rank has allocated {taken}",
                what.name()
            ))
            .hint(
                "lower batch.micro, set parallel.recompute=true or raise parallel.zero; \
                 run.memory_limit refuses such a run at startup",
            )
        })?;
        lines.resize(len, Line::zeroed());
        if len > 0 {
            self.stats.record_system_alloc();
        }
        Ok(lines)
    }

    /// Frees all cached free buffers.
    pub fn trim(&self) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A flat buffer of f32 in host memory, which returns to the pool when it is dropped.
pub struct CpuBuf {
    lines: Vec<Line>,
    len: usize,
    what: MemoryKind,
    pool: Arc<HostPool>,
}

impl CpuBuf {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the elements.
    pub fn as_slice(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// Returns the elements, exclusively.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

impl Drop for CpuBuf {
    fn drop(&mut self) {
        self.pool.stats.record_free(self.what, size_of_val(self.lines.as_slice()));
        if !self.lines.is_empty() {
            let lines = std::mem::take(&mut self.lines);
            self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(lines);
        }
    }
}

/// Indices such as token ids or labels: 32-bit integers stored in a buffer.
pub struct CpuInts {
    buf: Arc<CpuBuf>,
    range: Range<usize>,
}

impl CpuInts {
    /// Copies `host` into a new buffer.
    ///
    /// # Errors
    /// Returns an error if the system cannot allocate the memory.
    pub(super) fn new(pool: &Arc<HostPool>, host: &[u32]) -> Result<Self> {
        let mut buf = pool.take(MemoryKind::Data, host.len())?;
        bytemuck::cast_slice_mut(buf.as_mut_slice()).copy_from_slice(host);
        Ok(Self { buf: Arc::new(buf), range: 0..host.len() })
    }

    /// Returns the indices `range`, in the same memory.
    pub(super) fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.end <= self.range.len(), "the range exceeds the indices");
        Self {
            buf: self.buf.clone(),
            range: self.range.start + range.start..self.range.start + range.end,
        }
    }
}

impl Deref for CpuInts {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &bytemuck::cast_slice(self.buf.as_slice())[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_are_counted() {
        let pool = Arc::new(HostPool::default());
        let first = pool.take(MemoryKind::Gradients, 1000).unwrap();
        assert_eq!(first.as_slice().as_ptr() as usize % 64, 0);
        let address = first.as_slice().as_ptr();
        drop(first);
        assert_eq!(pool.stats.live(MemoryKind::Gradients), 0);
        let second = pool.take(MemoryKind::Activations, 990).unwrap();
        assert_eq!(second.as_slice().as_ptr(), address);
        assert_eq!(second.len(), 990);
        let third = pool.take(MemoryKind::Activations, 990).unwrap();
        assert_ne!(third.as_slice().as_ptr(), address);
        assert!(pool.take(MemoryKind::Data, 0).unwrap().is_empty());
        assert_eq!(pool.stats.system_allocs(), 2);
        pool.trim();
        assert!(pool.free.lock().unwrap().is_empty());
    }
    #[test]
    fn integers_are_data() {
        let pool = Arc::new(HostPool::default());
        let ids = CpuInts::new(&pool, &[7, u32::MAX]).unwrap();
        assert_eq!((&ids[..], pool.stats.live(MemoryKind::Data)), (&[7, u32::MAX][..], 64));
        let all = ids.slice(0..2);
        let part = ids.slice(0..2).slice(1..2);
        drop((ids, all));
        assert_eq!((&part[..], pool.stats.live(MemoryKind::Data)), (&[u32::MAX][..], 64));
    }

    #[test]
    fn no_memory_is_an_error() {
        let pool = Arc::new(HostPool::default());
        let _taken = pool.take(MemoryKind::Parameters, 1 << 18).unwrap();
        let error = pool.take(MemoryKind::Activations, usize::MAX / 8).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(
            text.contains(
                "TiB for activations; this rank has allocated parameters 1.0 MiB\nhint: "
            ),
            "{text}"
        );
    }
}
