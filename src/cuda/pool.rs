//! The device memory pool: large blocks of memory, from which buffers are allocated. Usually there
//! are two: a small one, allocated at the start, and one with the rest, once other users of the
//! device, such as NCCL, have taken what they need ([`DevicePool::reserve`]), or once a buffer needs
//! it. A growing pool allocates another block if none has room for a buffer. All blocks are kept
//! until the end of the pool.
//!
//! A dropped buffer is free at once, even if kernels that use it are still queued: its next user is
//! queued behind them on the same stream. Work on other streams waits for events.
//!
//! Batches are uploaded on a separate stream (`index_upload.rs`), and messages have three
//! (`device_memcpy.rs`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError, result};

use super::libraries::check;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{MemoryKind, MemoryStats, format_bytes};

/// The alignment of buffers in bytes, as in the driver's own allocations.
const ALIGNMENT: usize = 256;

/// The least bytes of a block of a growing pool.
const BLOCK: usize = 64 << 20;

/// A new block has at least the bytes of the pool divided by this, so that there are few blocks.
const GROWTH: usize = 8;

/// The device memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolBudget {
    /// The bytes, or their limit if the pool grows.
    pub bytes: usize,
    /// Whether blocks are allocated on demand rather than all at once.
    pub grows: bool,
}

/// The memory pool of one rank on its device.
pub struct DevicePool {
    context: Arc<CudaContext>,
    grows: bool,
    blocks: Mutex<Blocks>,
    /// The statistics of allocated bytes, by category.
    pub stats: MemoryStats,
}

/// An allocation from the pool, freed when dropped.
pub struct PoolAllocation {
    pool: Arc<DevicePool>,
    place: Place,
    pointer: u64,
    bytes: usize,
    /// The category that counts it, or `None` if the caller counts it.
    what: Option<MemoryKind>,
}

impl DevicePool {
    /// Allocates the first block of the memory.
    ///
    /// # Errors
    /// Returns an error if the device has less free memory.
    pub fn new(
        context: &Arc<CudaContext>,
        PoolBudget { bytes, grows }: PoolBudget,
    ) -> Result<Arc<Self>> {
        let limit = bytes / ALIGNMENT * ALIGNMENT;
        let blocks = Mutex::new(Blocks { limit, ..Blocks::default() });
        let pool = Self { context: context.clone(), grows, blocks, stats: MemoryStats::default() };
        pool.allocate_or_fail(&mut pool.lock(), limit.min(BLOCK))?;
        Ok(Arc::new(pool))
    }

    /// Allocates the rest of the memory, unless the pool grows. The pool has `taken` bytes less than
    /// before: other users of the device have taken them.
    ///
    /// # Errors
    /// Returns an error if the device has less free memory.
    pub fn reserve(&self, taken: usize) -> Result<()> {
        let mut blocks = self.lock();
        let left = blocks.limit.saturating_sub(taken) / ALIGNMENT * ALIGNMENT;
        blocks.limit = left.max(blocks.bytes());
        let rest = blocks.limit - blocks.bytes();
        if self.grows || rest == 0 {
            return Ok(());
        }
        self.allocate_or_fail(&mut blocks, rest)
    }

    /// Allocates a block.
    ///
    /// # Errors
    /// Returns an error if the device has less free memory.
    fn allocate_or_fail(&self, blocks: &mut Blocks, bytes: usize) -> Result<()> {
        if !self.allocate_block(blocks, bytes)? {
            let wanted = format_bytes(bytes);
            let free = self.free()?;
            return Err(Error::input(format!(
                "out of GPU memory: {wanted} requested, {free} free"
            ))
            .hint(
                "reduce device.memory or device.memory_limit, or end other processes on this GPU",
            ));
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of the pool, or their limit if it grows.
    pub fn bytes(&self) -> usize {
        self.lock().limit
    }

    /// Returns the address and the bytes of each block of a pool that does not grow, after all its
    /// memory is allocated.
    ///
    /// # Errors
    /// Returns an error if the pool grows, or the device has less free memory.
    pub fn all_blocks(&self) -> Result<Vec<(u64, usize)>> {
        if self.grows {
            return Err(Error::input(
                "CUDA IPC requires a memory pool of fixed size, but it grows",
            )
            .hint("set device.memory to a part such as 0.9, or comm.transport to another"));
        }
        self.reserve(0)?;
        Ok(self.lock().blocks.iter().map(|block| (block.base, block.bytes)).collect())
    }

    /// Returns the peak of allocated bytes, including uncounted allocations.
    pub fn peak(&self) -> usize {
        self.lock().most_taken
    }

    /// Allocates at least `bytes` bytes.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory.
    pub fn allocate(self: &Arc<Self>, what: MemoryKind, bytes: usize) -> Result<PoolAllocation> {
        let mut piece = self.piece(what, bytes)?;
        self.stats.record_alloc(what, piece.bytes);
        piece.what = Some(what);
        Ok(piece)
    }

    /// Allocates memory without counting it in the statistics.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`DevicePool::take`].
    pub fn allocate_uncounted(
        self: &Arc<Self>,
        what: MemoryKind,
        bytes: usize,
    ) -> Result<PoolAllocation> {
        self.piece(what, bytes)
    }

    fn piece(self: &Arc<Self>, what: MemoryKind, bytes: usize) -> Result<PoolAllocation> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let end = if what == MemoryKind::Activations { End::Low } else { End::High };
        let mut blocks = self.lock();
        let place = match blocks.allocate(bytes, end) {
            Some(place) => place,
            None => {
                self.grow(&mut blocks, what, bytes)?;
                let none =
                    || Error::internal(format!("a new block has no {}", format_bytes(bytes)));
                blocks.allocate(bytes, end).ok_or_else(none)?
            }
        };
        let pointer = blocks.address(place);
        Ok(PoolAllocation { pool: self.clone(), place, pointer, bytes, what: None })
    }

    /// Allocates another block for an allocation of `bytes`: the rest of the memory, or as the pool
    /// grows.
    ///
    /// # Errors
    /// Returns an error if the pool has not that much left, or if the device is out of memory.
    fn grow(&self, blocks: &mut Blocks, what: MemoryKind, bytes: usize) -> Result<()> {
        let (most, grows) = (blocks.limit, self.grows);
        let wanted = format_bytes(bytes);
        let taken = self.stats.live_by_category();
        let hint = "set batch.micro lower, parallel.recompute=true, offload.optimizer=true or parallel.zero higher";
        if most - blocks.bytes() < bytes {
            let whose = if grows { "limit of this rank" } else { "pool of this rank" };
            return Err(Error::input(format!(
                "out of GPU memory: {wanted} for {} do not fit into the {} {whose}; in use: \
                 {taken}; largest free range: {}",
                what.name(),
                format_bytes(most),
                format_bytes(blocks.largest())
            ))
            .hint(format!("{hint}, or device.memory or device.memory_limit higher")));
        }
        if !grows {
            return self.allocate_or_fail(blocks, most - blocks.bytes());
        }
        let ample = bytes.max(BLOCK).max(blocks.bytes() / GROWTH).min(most - blocks.bytes())
            / ALIGNMENT
            * ALIGNMENT;
        // If the device does not have an ample block, one that is just large enough may do.
        if self.allocate_block(blocks, ample)? || self.allocate_block(blocks, bytes)? {
            return Ok(());
        }
        let free = self.free()?;
        let had = format_bytes(blocks.bytes());
        let message = format!(
            "out of GPU memory: {wanted} for {} requested, {free} of the GPU free; this rank has {had}, \
             in use: {taken}",
            what.name(),
        );
        Err(Error::input(message).hint(format!("{hint}, or end other processes on this GPU")))
    }

    /// Returns the free bytes of the device, formatted for display.
    fn free(&self) -> Result<String> {
        Ok(format_bytes(check("report its free memory", self.context.mem_get_info())?.0))
    }

    /// Allocates a block. Returns false if the device does not have that much memory.
    ///
    /// # Errors
    /// Returns an error if the device has failed.
    fn allocate_block(&self, blocks: &mut Blocks, bytes: usize) -> Result<bool> {
        check("be chosen", self.context.bind_to_thread())?;
        // SAFETY: the context is bound; the memory is freed in `drop`. It does not come from the
        // stream-ordered allocator, whose memory other processes cannot open.
        match unsafe { result::malloc_sync(bytes) } {
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(false),
            base => {
                blocks.add(check("allocate memory", base)?, bytes);
                Ok(true)
            }
        }
    }
}

impl Drop for DevicePool {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            for block in &self.lock().blocks {
                // SAFETY: every allocation holds the pool, so none is left. Failures here have no
                // consequence.
                let _ = unsafe { result::free_sync(block.base) };
            }
        }
    }
}

impl PoolAllocation {
    /// Returns the address on the device.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }
}

impl Drop for PoolAllocation {
    fn drop(&mut self) {
        if let Some(what) = self.what {
            self.pool.stats.record_free(what, self.bytes);
        }
        self.pool.lock().give(self.place, self.bytes);
    }
}

/// The end of a free range from which memory is allocated. Short-lived allocations use the other
/// end than long-lived ones, which reduces fragmentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Low,
    High,
}

/// A place in a pool: the index of a block, and an offset in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    block: usize,
    offset: usize,
}

/// The blocks of a pool, and the bytes allocated.
#[derive(Default)]
struct Blocks {
    blocks: Vec<Block>,
    /// The most bytes that the blocks may have.
    limit: usize,
    taken: usize,
    most_taken: usize,
}

/// A block of device memory.
struct Block {
    base: u64,
    bytes: usize,
    /// The free ranges: offset and length. Adjacent ranges are merged.
    free: BTreeMap<usize, usize>,
}

impl Blocks {
    fn add(&mut self, base: u64, bytes: usize) {
        self.blocks.push(Block { base, bytes, free: BTreeMap::from([(0, bytes)]) });
    }

    fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.bytes).sum()
    }

    fn address(&self, Place { block, offset }: Place) -> u64 {
        self.blocks[block].base + offset as u64
    }

    /// Allocates `bytes` at an end of the smallest range that holds them.
    fn allocate(&mut self, bytes: usize, end: End) -> Option<Place> {
        if bytes == 0 {
            return Some(Place { block: 0, offset: 0 });
        }
        let ranges = self.blocks.iter().enumerate();
        let ranges = ranges.flat_map(|(block, data)| {
            data.free.iter().map(move |(offset, have)| (block, *offset, *have))
        });
        let (block, offset, have) =
            ranges.filter(|(.., have)| *have >= bytes).min_by_key(|(.., have)| *have)?;
        let rest = have - bytes;
        let (taken, rest_at) = match end {
            End::Low => (offset, offset + bytes),
            End::High => (offset + rest, offset),
        };
        let free = &mut self.blocks[block].free;
        free.remove(&offset);
        if rest > 0 {
            free.insert(rest_at, rest);
        }
        self.taken += bytes;
        self.most_taken = self.most_taken.max(self.taken);
        Some(Place { block, offset: taken })
    }

    fn give(&mut self, Place { block, mut offset }: Place, mut bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.taken -= bytes;
        let free = &mut self.blocks[block].free;
        if let Some(after) = free.remove(&(offset + bytes)) {
            bytes += after;
        }
        if let Some((&before, &have)) = free.range(..offset).next_back()
            && before + have == offset
        {
            free.remove(&before);
            (offset, bytes) = (before, have + bytes);
        }
        free.insert(offset, bytes);
    }

    fn largest(&self) -> usize {
        self.blocks.iter().flat_map(|block| block.free.values()).copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(sizes: &[usize]) -> Blocks {
        let mut blocks = Blocks::default();
        sizes.iter().for_each(|bytes| blocks.add(0, *bytes));
        blocks
    }

    fn at(block: usize, offset: usize) -> Place {
        Place { block, offset }
    }

    #[test]
    fn neighbours_become_one_again() {
        let mut free = blocks(&[1000]);
        let [a, b, c] = [300, 300, 300].map(|bytes| free.allocate(bytes, End::Low).unwrap());
        assert_eq!((a, b, c, free.largest()), (at(0, 0), at(0, 300), at(0, 600), 100));
        assert!(free.allocate(200, End::Low).is_none());
        free.give(b, 300);
        assert_eq!(free.allocate(100, End::Low), Some(at(0, 900)));
        assert_eq!(
            (free.allocate(100, End::High), free.allocate(100, End::High)),
            (Some(at(0, 500)), Some(at(0, 400)))
        );
        free.give(at(0, 400), 100);
        free.give(at(0, 500), 100);
        free.give(at(0, 900), 100);
        free.give(a, 300);
        free.give(c, 300);
        assert_eq!(free.blocks[0].free, BTreeMap::from([(0, 1000)]));
        assert_eq!(free.allocate(0, End::High), Some(at(0, 0)));
        assert_eq!((free.taken, free.most_taken), (0, 900));
    }

    #[test]
    fn a_piece_lies_in_one_block() {
        let mut free = blocks(&[100, 100]);
        assert!(free.allocate(150, End::Low).is_none());
        let a = free.allocate(60, End::Low).unwrap();
        let b = free.allocate(100, End::Low).unwrap();
        assert_eq!((a, b, free.allocate(60, End::Low)), (at(0, 0), at(1, 0), None));
        free.add(1 << 20, 60);
        let c = free.allocate(60, End::High).unwrap();
        assert_eq!((c, free.address(c), free.bytes(), free.taken), (at(2, 0), 1 << 20, 260, 220));
        // The end of a block and the beginning of the next are not adjacent, whatever their
        // addresses.
        free.give(a, 60);
        free.give(b, 100);
        assert_eq!((free.largest(), free.allocate(101, End::Low)), (100, None));
    }
}
