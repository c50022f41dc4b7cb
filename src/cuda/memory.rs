//! Buffers on the device and views into them.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::device_memcpy::CopyStreams;
use super::pool::PoolAllocation;
use hpctrain_base::error::{Error, Result};
pub use hpctrain_device::Element;
use hpctrain_device::{CommBuffer, DeviceEvent, DeviceSpan};

/// A flat buffer on the device.
pub struct CudaBuf {
    piece: PoolAllocation,
    len: usize,
    element: Element,
    lines: Arc<CopyStreams>,
    /// The offset in its allocation, in elements: tests use unaligned buffers.
    #[cfg(test)]
    lead: usize,
}

/// The offset of all buffers of parameters and gradients that this thread allocates next.
#[cfg(test)]
pub mod lead {
    use std::cell::Cell;

    use hpctrain_device::MemoryKind;

    thread_local! {
        static LEAD: Cell<usize> = const { Cell::new(0) };
    }

    /// Sets the offset, in elements.
    pub fn set(elements: usize) {
        LEAD.set(elements);
    }

    /// Returns the offset for a kind of memory, which is 0 for kinds that kernels use as scratch.
    pub fn elements(what: MemoryKind) -> usize {
        if matches!(what, MemoryKind::Parameters | MemoryKind::Gradients) { LEAD.get() } else { 0 }
    }
}

impl CudaBuf {
    /// Sets the offset in the allocation.
    #[cfg(test)]
    pub(super) fn after(self, lead: usize) -> Self {
        Self { lead, ..self }
    }

    /// Creates a buffer of `len` elements in `piece`. `lines` are the streams for messages.
    pub(super) fn new(
        piece: PoolAllocation,
        len: usize,
        element: Element,
        lines: &Arc<CopyStreams>,
    ) -> Self {
        Self {
            piece,
            len,
            element,
            lines: lines.clone(),
            #[cfg(test)]
            lead: 0,
        }
    }

    /// Returns the elements `range` for messages, and selects the device for the calling thread,
    /// since MPI may query it.
    ///
    /// # Errors
    /// Returns an error if the range splits a word of four bytes, or if the device fails.
    pub(super) fn comm_buffer(&mut self, range: Range<usize>) -> Result<CommBuffer<'_>> {
        let to_words =
            |elements: usize| (elements * self.element.size()).div_ceil(size_of::<f32>());
        let is_whole = |at: usize| {
            at == self.len || (at * self.element.size()).is_multiple_of(size_of::<f32>())
        };
        if !is_whole(range.start) || !is_whole(range.end) {
            return Err(Error::internal(format!(
                "a message of elements {range:?} splits a word of 4 bytes"
            )));
        }
        let words = to_words(range.end) - to_words(range.start);
        let address = self.pointer() as usize + to_words(range.start) * size_of::<f32>();
        // SAFETY: the words lie in the allocation, which begins and ends at multiples of 256 bytes
        // and lives as long as the borrow; it is not from the stream-ordered allocator, so MPI may
        // open it.
        let span = unsafe { DeviceSpan::new(address, words) };
        self.lines.bind()?;
        Ok(CommBuffer::Device(span, self.lines.copies()))
    }

    /// Returns an event that completes when the kernels queued so far are done.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn record_event(&self) -> Result<Box<dyn DeviceEvent>> {
        self.lines.record_event()
    }

    /// Returns the format of the elements.
    pub(super) fn element(&self) -> Element {
        self.element
    }

    /// Returns the number of elements.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the first element.
    fn pointer(&self) -> u64 {
        #[cfg(test)]
        return self.piece.pointer() + (self.lead * self.element.size()) as u64;
        #[cfg(not(test))]
        self.piece.pointer()
    }

    /// Returns a view of the elements `range`.
    pub fn view(&self, range: Range<usize>) -> View<'_> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of a buffer of {}",
            self.len
        );
        let pointer = self.pointer() + (range.start * self.element.size()) as u64;
        View { pointer, len: range.len(), element: self.element, life: PhantomData }
    }

    /// Returns a mutable view of the elements `range`.
    pub fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        let View { pointer, len, element, .. } = self.view(range);
        ViewMut { pointer, len, element, life: PhantomData }
    }
}

/// A read-only view.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The address on the device.
    pub pointer: u64,
    /// The number of elements.
    pub len: usize,
    /// The element type.
    pub element: Element,
    life: PhantomData<&'a ()>,
}

impl View<'_> {
    /// Splits the view at element `at`.
    pub fn split_at(self, at: usize) -> (Self, Self) {
        assert!(at <= self.len, "a cut at {at} of {}", self.len);
        let pointer = self.pointer + (at * self.element.size()) as u64;
        (Self { len: at, ..self }, Self { pointer, len: self.len - at, ..self })
    }

    /// Returns the address, or null if the view is empty: kernels take null for an omitted operand.
    pub fn pointer_or_null(self) -> u64 {
        if self.len == 0 { 0 } else { self.pointer }
    }
}

/// A mutable view.
#[derive(Debug)]
pub struct ViewMut<'a> {
    /// The address on the device.
    pub pointer: u64,
    /// The number of elements.
    pub len: usize,
    /// The element type.
    pub element: Element,
    life: PhantomData<&'a mut ()>,
}

impl ViewMut<'_> {
    /// Returns the same view, read-only.
    pub fn shared(&self) -> View<'_> {
        View { pointer: self.pointer, len: self.len, element: self.element, life: PhantomData }
    }

    /// Reborrows the view.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { pointer: self.pointer, len: self.len, element: self.element, life: PhantomData }
    }

    /// Splits the view at element `at`.
    pub fn split_at(self, at: usize) -> (Self, Self) {
        assert!(at <= self.len, "a cut at {at} of {}", self.len);
        let pointer = self.pointer + (at * self.element.size()) as u64;
        let element = self.element;
        let life = PhantomData;
        let tail = Self { pointer, len: self.len - at, element, life };
        (Self { len: at, ..self }, tail)
    }
}
