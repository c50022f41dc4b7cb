//! Activation offload: keeps the inputs of blocks on the host between the forward of a micro-batch
//! and its backward (`offload.activations`).
//!
//! With recomputation, little but the input of each block is saved. It is copied to pinned memory
//! while the block computes its forward, and the device frees it when both are done; in the
//! backward it is copied back while the next block computes. So the device stores the input of one
//! block at a time, and of two in the backward. The device orders copies and compute, and the host
//! waits for neither. Words are copied unchanged, so results do not depend on offloading.
//!
//! Pinned memory is reused for later micro-batches, since allocating it is slow.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, CommBuffer, ComputeOrderedCopies, MemoryKind, Slot};

/// Host memory for inputs of blocks, and the copies between it and the device.
pub struct ActivationOffload<B: Backend> {
    backend: B,
    /// `None` if the device's buffers are host memory.
    copies: Option<Arc<dyn ComputeOrderedCopies>>,
    /// Free slots by size in words, the ones free for longest first, since their copies are done.
    spare: BTreeMap<usize, VecDeque<Slot>>,
    /// Bytes entered in the memory statistics.
    bytes: usize,
}

/// An input on the host.
pub struct OffloadedActivation {
    slot: Slot,
    words: usize,
    /// Number of elements in the buffer.
    len: usize,
}

impl<B: Backend> ActivationOffload<B> {
    /// Creates an offload without memory.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn new(backend: &B) -> Result<Self> {
        Ok(Self {
            copies: backend.copy_streams()?,
            backend: backend.clone(),
            spare: BTreeMap::new(),
            bytes: 0,
        })
    }

    fn copies(&self) -> Result<&dyn ComputeOrderedCopies> {
        self.copies.as_deref().ok_or_else(|| Error::internal("the device has no copies"))
    }

    fn slot(&mut self, words: usize) -> Result<Slot> {
        if let Some(slot) = self.spare.get_mut(&words).and_then(VecDeque::pop_front) {
            return Ok(slot);
        }
        let slot = match &self.copies {
            Some(copies) => Slot::new(&**copies, words)?,
            None => Slot::from_pinned(Box::new(vec![0.0; words])),
        };
        let bytes = words * size_of::<f32>();
        self.bytes += bytes;
        self.backend.memory_stats().record_alloc(MemoryKind::Offloaded, bytes);
        Ok(slot)
    }

    /// Starts to copy an input to the host, after the work submitted so far. The input may be read,
    /// but must not be freed before [`ActivationOffload::sent`].
    ///
    /// # Errors
    /// Returns an error if memory runs out, or if the device fails.
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

    /// Orders all work submitted from now on after the copies to the host, so that the inputs that
    /// were sent may be freed.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn sent(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.after_downloads())
    }

    /// Starts to copy an input back. It may be read after [`ActivationOffload::arrived`].
    ///
    /// # Errors
    /// Returns an error if memory runs out, or if the device fails.
    pub fn fetch(&mut self, offloaded: OffloadedActivation) -> Result<B::Buf> {
        let OffloadedActivation { mut slot, words, len } = offloaded;
        let mut input = self.backend.alloc(MemoryKind::Activations, len)?;
        match B::comm_buffer(&mut input, 0..len)? {
            CommBuffer::Host(values) => values.copy_from_slice(slot.memory()?),
            CommBuffer::Device(memory, _) => {
                let copies = self.copies()?;
                // The buffer may reuse memory that earlier kernels still read.
                copies.after_compute()?;
                slot.upload(copies, &[(memory, 0)])?;
            }
        }
        self.spare.entry(words).or_default().push_back(slot);
        Ok(input)
    }

    /// Orders all work submitted from now on after the copies of inputs that were fetched.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn arrived(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.before_compute())
    }
}

impl<B: Backend> Drop for ActivationOffload<B> {
    fn drop(&mut self) {
        self.backend.memory_stats().record_free(MemoryKind::Offloaded, self.bytes);
    }
}
