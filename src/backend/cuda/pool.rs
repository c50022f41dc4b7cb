//! Device memory: one allocation at the start, from which buffers are cut.
//!
//! A buffer that is dropped is free at once, though kernels that use it may still be queued: its next user is queued
//! behind them on the same stream. Work on another stream waits for events.
//!
//! Batches come in on a stream of their own (`ints.rs`) and messages have three (`device_copies.rs`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, result};

use super::libraries::check;
use crate::backend::{Ledger, MemoryKind, readable};
use crate::error::{Error, Result};

/// Buffers begin at multiples of this many bytes, as the driver's own do.
const ALIGNMENT: usize = 256;

/// The memory of one rank on its device.
pub struct Pool {
    context: Arc<CudaContext>,
    base: u64,
    bytes: usize,
    free: Mutex<Free>,
    /// The bytes taken, by category.
    pub ledger: Ledger,
}

/// A piece of the pool, given back when dropped.
pub struct Piece {
    pool: Arc<Pool>,
    offset: usize,
    bytes: usize,
    /// None if the caller counts it.
    what: Option<MemoryKind>,
}

impl Pool {
    /// Takes `bytes` of the device.
    ///
    /// # Errors
    /// The device has less.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Arc<Self>> {
        let bytes = bytes / ALIGNMENT * ALIGNMENT;
        check("be chosen", context.bind_to_thread())?;
        // SAFETY: the context is bound; the memory is given back in `drop`. It does not come from the stream-ordered
        // allocator, whose memory other processes cannot open.
        let base = unsafe { result::malloc_sync(bytes) }.map_err(|_| {
            let room = context.mem_get_info().map_or_else(|_| "less".into(), |(free, _)| readable(free));
            Error::input(format!("out of GPU memory: {} were asked for where {room} are free", readable(bytes)))
                .hint("set device.memory_fraction or device.memory_limit lower, or end what else runs on this GPU")
        })?;
        let free = Mutex::new(Free::new(bytes));
        Ok(Arc::new(Self { context: context.clone(), base, bytes, free, ledger: Ledger::default() }))
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The most bytes that were taken at once, by whomever.
    pub fn peak(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).most_taken
    }

    /// A piece of at least `bytes`.
    ///
    /// # Errors
    /// None is left that large.
    pub fn take(self: &Arc<Self>, what: MemoryKind, bytes: usize) -> Result<Piece> {
        let mut piece = self.piece(what, bytes)?;
        self.ledger.take(what, piece.bytes);
        piece.what = Some(what);
        Ok(piece)
    }

    /// As [`Pool::take`], for a caller that counts it.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_uncounted(self: &Arc<Self>, what: MemoryKind, bytes: usize) -> Result<Piece> {
        self.piece(what, bytes)
    }

    fn piece(self: &Arc<Self>, what: MemoryKind, bytes: usize) -> Result<Piece> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let end = if what == MemoryKind::Activations { End::Low } else { End::High };
        let Some(offset) = free.take(bytes, end) else {
            return Err(Error::input(format!(
                "out of GPU memory: no {} for {} in the {} of this rank, which has taken {}; the largest free piece is {}",
                readable(bytes),
                what.name(),
                readable(self.bytes),
                self.ledger.live_by_category(),
                readable(free.largest())
            ))
            .hint(
                "set batch.micro lower, parallel.recompute=true, optimizer.offload=true or parallel.zero higher, \
                 or device.memory_fraction higher",
            ));
        };
        Ok(Piece { pool: self.clone(), offset, bytes, what: None })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: every piece holds the pool, so none is left. Failures are of no use to anybody by now.
            let _ = unsafe { result::free_sync(self.base) };
        }
    }
}

impl Piece {
    /// Its address on the device.
    pub fn pointer(&self) -> u64 {
        self.pool.base + self.offset as u64
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(what) = self.what {
            self.pool.ledger.give(what, self.bytes);
        }
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).give(self.offset, self.bytes);
    }
}

/// The end of a free range that a piece is cut from. Pieces that come and go within a block's turn lie apart from those
/// that live longer, and so leave larger ranges behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Low,
    High,
}

/// The free ranges of a pool, and the bytes taken.
struct Free {
    /// The free ranges, by offset; neighbours are one range.
    ranges: BTreeMap<usize, usize>,
    taken: usize,
    most_taken: usize,
}

impl Free {
    fn new(bytes: usize) -> Self {
        Self { ranges: BTreeMap::from([(0, bytes)]), taken: 0, most_taken: 0 }
    }

    /// Cuts `bytes` off an end of the smallest range that holds them.
    fn take(&mut self, bytes: usize, end: End) -> Option<usize> {
        if bytes == 0 {
            return Some(0);
        }
        let fitting = self.ranges.iter().filter(|(_, have)| **have >= bytes);
        let (&offset, &have) = fitting.min_by_key(|(_, have)| **have)?;
        let rest = have - bytes;
        let (taken, rest_at) = match end {
            End::Low => (offset, offset + bytes),
            End::High => (offset + rest, offset),
        };
        self.ranges.remove(&offset);
        if rest > 0 {
            self.ranges.insert(rest_at, rest);
        }
        self.taken += bytes;
        self.most_taken = self.most_taken.max(self.taken);
        Some(taken)
    }

    fn give(&mut self, mut offset: usize, mut bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.taken -= bytes;
        if let Some(after) = self.ranges.remove(&(offset + bytes)) {
            bytes += after;
        }
        if let Some((&before, &have)) = self.ranges.range(..offset).next_back()
            && before + have == offset
        {
            self.ranges.remove(&before);
            (offset, bytes) = (before, have + bytes);
        }
        self.ranges.insert(offset, bytes);
    }

    fn largest(&self) -> usize {
        self.ranges.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_again() {
        let mut free = Free::new(1000);
        let [a, b, c] = [300, 300, 300].map(|bytes| free.take(bytes, End::Low).unwrap());
        assert_eq!((a, b, c, free.largest()), (0, 300, 600, 100));
        assert!(free.take(200, End::Low).is_none());
        free.give(b, 300);
        assert_eq!(free.take(100, End::Low), Some(900));
        assert_eq!((free.take(100, End::High), free.take(100, End::High)), (Some(500), Some(400)));
        free.give(400, 100);
        free.give(500, 100);
        free.give(900, 100);
        free.give(a, 300);
        free.give(c, 300);
        assert_eq!(free.ranges, BTreeMap::from([(0, 1000)]));
        assert_eq!(free.take(0, End::High), Some(0));
        assert_eq!((free.taken, free.most_taken), (0, 900));
    }
}
