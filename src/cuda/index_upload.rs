//! Uploads of indices from pinned host memory, on a separate stream while kernels run.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, result};

use super::libraries::check;
use super::pinned::Pinned;
use super::pool::{DevicePool, PoolAllocation};
use hpctrain_base::error::Result;
use hpctrain_device::MemoryKind;

/// Uploads indices, with a pool of buffers for reuse.
pub struct IndexUploader {
    pool: Arc<DevicePool>,
    pub(super) copy: Arc<CudaStream>,
    compute: Arc<CudaStream>,
    free: Mutex<Vec<Slot>>,
}

/// A host and a device buffer for indices.
struct Slot {
    host: Pinned<u32>,
    device: PoolAllocation,
    /// Recorded after the last copy.
    copied: CudaEvent,
    /// Recorded after the kernels that read the last copy.
    used: CudaEvent,
}

/// Indices on the device: a range of one upload.
pub struct CudaInts {
    copied: Arc<Copied>,
    range: Range<usize>,
}

/// The indices of one upload.
struct Copied {
    home: Arc<IndexUploader>,
    /// Always present until the drop.
    slot: Option<Slot>,
}

impl IndexUploader {
    /// Creates an uploader that copies on the stream `copy` for kernels on `compute`.
    pub fn new(
        pool: &Arc<DevicePool>,
        copy: Arc<CudaStream>,
        compute: Arc<CudaStream>,
    ) -> Arc<Self> {
        Arc::new(Self { pool: pool.clone(), copy, compute, free: Mutex::default() })
    }

    /// Starts an upload of `host`. Kernels queued later see the indices.
    ///
    /// # Errors
    /// Returns an error if the device is out of memory or fails.
    pub fn upload(self: &Arc<Self>, host: &[u32]) -> Result<CudaInts> {
        let known = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let smallest = (0..free.len())
                .filter(|&i| free[i].host.as_slice().len() >= host.len())
                .min_by_key(|&i| free[i].host.as_slice().len());
            smallest.map(|i| free.swap_remove(i))
        };
        let mut slot = known.map_or_else(|| self.slot(host.len()), Ok)?;
        check("finish a copy", slot.copied.synchronize())?;
        slot.host.as_mut_slice()[..host.len()].copy_from_slice(host);
        check("wait for kernels", self.copy.wait(&slot.used))?;
        let from = &slot.host.as_slice()[..host.len()];
        // SAFETY: the device's memory is as long; neither side is touched before the events say so.
        let queued = unsafe {
            result::memcpy_htod_async(slot.device.pointer(), from, self.copy.cu_stream())
        };
        check("copy indices", queued)?;
        check("record a copy", slot.copied.record(&self.copy))?;
        check("wait for a copy", self.compute.wait(&slot.copied))?;
        let copied = Arc::new(Copied { home: self.clone(), slot: Some(slot) });
        Ok(CudaInts { copied, range: 0..host.len() })
    }

    /// Allocates a slot for `len` indices.
    fn slot(&self, len: usize) -> Result<Slot> {
        let context = self.copy.context();
        let event = || check("make an event", context.new_event(None));
        let host = Pinned::new(context, len)?;
        let device = self.pool.allocate(MemoryKind::Data, len * size_of::<u32>())?;
        let slot = Slot { host, device, copied: event()?, used: event()? };
        // Kernels may still use the memory for an earlier buffer.
        check("record the end of kernels", slot.used.record(&self.compute))?;
        Ok(slot)
    }

    /// Frees the slots that are not in use.
    pub fn trim(&self) {
        let slots = std::mem::take(&mut *self.free.lock().unwrap_or_else(PoisonError::into_inner));
        // Their memory may be used by another stream next.
        for slot in &slots {
            let _ = slot.copied.synchronize();
        }
    }
}

impl CudaInts {
    /// Returns the number of elements.
    pub(super) fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns the elements `range`, in the same memory.
    pub(super) fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.end <= self.len(), "a part of indices");
        Self {
            copied: self.copied.clone(),
            range: self.range.start + range.start..self.range.start + range.end,
        }
    }

    /// Returns the positions of the elements sorted by value (stable).
    pub(super) fn sorted_positions(&self) -> Vec<u32> {
        let values = self
            .copied
            .slot
            .as_ref()
            .map_or(&[][..], |slot| &slot.host.as_slice()[self.range.clone()]);
        counting_order(values)
    }

    /// Returns the address on the device.
    pub fn pointer(&self) -> u64 {
        let first = (self.range.start * size_of::<u32>()) as u64;
        self.copied.slot.as_ref().map_or(0, |slot| slot.device.pointer() + first)
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take()
            && slot.used.record(&self.home.compute).is_ok()
        {
            self.home.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        }
    }
}

/// Returns the positions of `values` sorted by value (stable), by a counting sort, since values are
/// less than the vocabulary size.
fn counting_order(values: &[u32]) -> Vec<u32> {
    let mut starts = vec![0u32; values.iter().max().map_or(0, |&most| most as usize + 1)];
    for &value in values {
        starts[value as usize] += 1;
    }
    let mut sum = 0;
    for start in &mut starts {
        sum += std::mem::replace(start, sum);
    }
    let mut order = vec![0; values.len()];
    for (place, &value) in (0u32..).zip(values) {
        let at = &mut starts[value as usize];
        order[*at as usize] = place;
        *at += 1;
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_keep_their_order() {
        assert_eq!(counting_order(&[3, 0, 3, 1, 0, 3]), [1, 4, 3, 0, 2, 5]);
        assert_eq!(counting_order(&[]), [0u32; 0]);
    }
}
