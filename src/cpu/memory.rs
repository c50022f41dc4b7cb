//! Host buffers: cache-line aligned, recycled through a pool, counted by category.
//!
//! After some steps the pool has every size that a step needs and asks the system for no more;
//! `tests/steady.rs` tests that. A buffer that the system refuses is an error with its size, its
//! category and the bytes taken so far.

use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::{Pod, Zeroable};

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{MemoryKind, MemoryStats, readable};

/// One cache line; makes every buffer aligned to it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Line([f32; LINE]);

/// f32 elements in a cache line.
const LINE: usize = 16;

/// Free buffers, waiting for their next use, and the count of the live ones.
#[derive(Default)]
pub struct HostPool {
    free: Mutex<Vec<Vec<Line>>>,
    pub(super) ledger: MemoryStats,
}

impl HostPool {
    /// A buffer with unspecified contents: NaN in debug builds, so that reading them shows.
    ///
    /// # Errors
    /// The system has no such memory.
    pub fn take(self: &Arc<Self>, what: MemoryKind, len: usize) -> Result<CpuBuf> {
        let lines = len.div_ceil(LINE);
        let recycled = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            // Best fit; a buffer more than a quarter too large would exceed the memory that the
            // banner promised.
            let fits = |have: usize| have >= lines && have <= lines + lines / 4;
            let best =
                (0..free.len()).filter(|&i| fits(free[i].len())).min_by_key(|&i| free[i].len());
            best.map(|i| free.swap_remove(i))
        };
        let mut lines = recycled.map_or_else(|| self.fresh(what, lines), Ok)?;
        if cfg!(debug_assertions) {
            lines.fill(Line([f32::NAN; LINE]));
        }
        self.ledger.take(what, size_of_val(lines.as_slice()));
        Ok(CpuBuf { lines, len, what, pool: self.clone() })
    }

    /// Memory from the system.
    fn fresh(&self, what: MemoryKind, len: usize) -> Result<Vec<Line>> {
        let mut lines = Vec::new();
        lines.try_reserve_exact(len).map_err(|_| {
            let size = readable(len.saturating_mul(size_of::<Line>()));
            let taken = self.ledger.live_by_category();
            Error::input(format!(
                "out of memory: no {size} for {}; this rank has taken {taken}",
                what.name()
            ))
            .hint(
                "set batch.micro lower, parallel.recompute=true or parallel.zero higher; \
                 run.memory_limit refuses such a run at its start",
            )
        })?;
        lines.resize(len, Line::zeroed());
        if len > 0 {
            self.ledger.note_fresh();
        }
        Ok(lines)
    }

    /// Frees all that waits for reuse.
    pub fn trim(&self) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A flat buffer of f32 on the host. Its memory returns to the pool on drop.
pub struct CpuBuf {
    lines: Vec<Line>,
    len: usize,
    what: MemoryKind,
    pool: Arc<HostPool>,
}

impl CpuBuf {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements.
    pub fn as_slice(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

impl Drop for CpuBuf {
    fn drop(&mut self) {
        self.pool.ledger.give(self.what, size_of_val(self.lines.as_slice()));
        if !self.lines.is_empty() {
            let lines = std::mem::take(&mut self.lines);
            self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(lines);
        }
    }
}

/// Token ids or labels: 32-bit integers in the memory of a buffer.
pub struct CpuInts {
    buf: Arc<CpuBuf>,
    range: Range<usize>,
}

impl CpuInts {
    /// A copy of `host`.
    ///
    /// # Errors
    /// The system has no such memory.
    pub(super) fn new(pool: &Arc<HostPool>, host: &[u32]) -> Result<Self> {
        let mut buf = pool.take(MemoryKind::Data, host.len())?;
        bytemuck::cast_slice_mut(buf.as_mut_slice()).copy_from_slice(host);
        Ok(Self { buf: Arc::new(buf), range: 0..host.len() })
    }

    /// Elements `range`, in the same memory.
    pub(super) fn part(&self, range: Range<usize>) -> Self {
        assert!(range.end <= self.range.len(), "a part of indices");
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
        assert_eq!(pool.ledger.live(MemoryKind::Gradients), 0);
        let second = pool.take(MemoryKind::Activations, 990).unwrap();
        assert_eq!(second.as_slice().as_ptr(), address);
        assert_eq!(second.len(), 990);
        let third = pool.take(MemoryKind::Activations, 990).unwrap();
        assert_ne!(third.as_slice().as_ptr(), address);
        assert!(pool.take(MemoryKind::Data, 0).unwrap().is_empty());
        assert_eq!(pool.ledger.fresh(), 2);
        pool.trim();
        assert!(pool.free.lock().unwrap().is_empty());
    }
    #[test]
    fn integers_are_data() {
        let pool = Arc::new(HostPool::default());
        let ids = CpuInts::new(&pool, &[7, u32::MAX]).unwrap();
        assert_eq!((&ids[..], pool.ledger.live(MemoryKind::Data)), (&[7, u32::MAX][..], 64));
        let all = ids.part(0..2);
        let part = ids.part(0..2).part(1..2);
        drop((ids, all));
        assert_eq!((&part[..], pool.ledger.live(MemoryKind::Data)), (&[u32::MAX][..], 64));
    }

    #[test]
    fn no_memory_is_an_error() {
        let pool = Arc::new(HostPool::default());
        let _taken = pool.take(MemoryKind::Parameters, 1 << 18).unwrap();
        let error = pool.take(MemoryKind::Activations, usize::MAX / 8).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(
            text.contains("TiB for activations; this rank has taken parameters 1.0 MiB\nhint: "),
            "{text}"
        );
    }
}
