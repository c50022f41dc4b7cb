//! Inputs of blocks on the host, between the forward of a micro-batch and its backward
//! (`offload.activations`).
//!
//! With recomputation a tape has little but the input of each block. Here that goes to page-locked
//! memory while its block computes the forward from it, and the device frees it when both are done;
//! in the backward it comes back while the block behind computes. So the device has the input of
//! one block at a time, in the backward of two. The device itself orders copies and compute: the
//! host waits for neither. The words are copied as they are, so no bit depends on it.
//!
//! Memory that a tape has left waits for the next one: locking pages is slow.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, CommBuffer, ComputeOrderedCopies, MemoryKind, Slot};

/// The memory of the host for inputs, and the copies between it and the device.
pub struct ActivationOffload<B: Backend> {
    backend: B,
    /// None where the device's buffers are host memory.
    copies: Option<Arc<dyn ComputeOrderedCopies>>,
    /// By words, those first that have waited longest: their copies are done.
    spare: BTreeMap<usize, VecDeque<Slot>>,
    /// Bytes taken, as they are counted.
    bytes: usize,
}

/// An input on the host.
pub struct OffloadedActivation {
    slot: Slot,
    words: usize,
    /// Elements of the buffer.
    len: usize,
}

impl<B: Backend> ActivationOffload<B> {
    /// No memory yet.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(backend: &B) -> Result<Self> {
        Ok(Self {
            copies: backend.copies()?,
            backend: backend.clone(),
            spare: BTreeMap::new(),
            bytes: 0,
        })
    }

    fn copies(&self) -> Result<&dyn ComputeOrderedCopies> {
        self.copies.as_deref().ok_or_else(|| Error::internal("a device that nothing copies to"))
    }

    fn slot(&mut self, words: usize) -> Result<Slot> {
        if let Some(slot) = self.spare.get_mut(&words).and_then(VecDeque::pop_front) {
            return Ok(slot);
        }
        let slot = match &self.copies {
            Some(copies) => Slot::new(&**copies, words)?,
            None => Slot::of(Box::new(vec![0.0; words])),
        };
        let bytes = words * size_of::<f32>();
        self.bytes += bytes;
        self.backend.ledger().take(MemoryKind::Offloaded, bytes);
        Ok(slot)
    }

    /// Starts to copy an input, as compute has left it, to the host. It may be read but not freed
    /// before [`ActivationOffload::sent`].
    ///
    /// # Errors
    /// Out of memory, or the device failed.
    pub fn send(&mut self, input: &mut B::Buf) -> Result<OffloadedActivation> {
        let len = B::len(input);
        match B::comm_buffer(input, 0..len)? {
            CommBuffer::Host(values) => {
                let words = values.len();
                let mut slot = self.slot(values.len())?;
                slot.memory()?.copy_from_slice(values);
                Ok(OffloadedActivation { slot, words, len })
            }
            CommBuffer::Device(memory, _) => {
                let (words, mut slot) = (memory.words(), self.slot(memory.words())?);
                let copies = self.copies()?;
                copies.after_compute()?;
                slot.download(copies, &[(memory, 0)])?;
                Ok(OffloadedActivation { slot, words, len })
            }
        }
    }

    /// The inputs that were sent may be freed: all that compute requests from now on comes after
    /// their copies.
    ///
    /// # Errors
    /// The device failed.
    pub fn sent(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.after_downloads())
    }

    /// Starts to bring an input back. It may be read after [`ActivationOffload::arrived`].
    ///
    /// # Errors
    /// Out of memory, or the device failed.
    pub fn fetch(&mut self, away: OffloadedActivation) -> Result<B::Buf> {
        let OffloadedActivation { mut slot, words, len } = away;
        let mut input = self.backend.alloc(MemoryKind::Activations, len)?;
        match B::comm_buffer(&mut input, 0..len)? {
            CommBuffer::Host(values) => values.copy_from_slice(slot.memory()?),
            CommBuffer::Device(memory, _) => {
                let copies = self.copies()?;
                // Its memory may have been another buffer's, which kernels still use.
                copies.after_compute()?;
                slot.upload(copies, &[(memory, 0)])?;
            }
        }
        self.spare.entry(words).or_default().push_back(slot);
        Ok(input)
    }

    /// All that compute requests from now on finds the inputs that were fetched.
    ///
    /// # Errors
    /// The device failed.
    pub fn arrived(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.before_compute())
    }
}

impl<B: Backend> Drop for ActivationOffload<B> {
    fn drop(&mut self) {
        self.backend.ledger().give(MemoryKind::Offloaded, self.bytes);
    }
}
