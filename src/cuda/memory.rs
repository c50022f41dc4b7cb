//! Buffers on the device and windows into them.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::device_memcpy::CopyStreams;
use super::pool::Piece;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{CommBuffer, DeviceEvent, DeviceSpan};

/// Element type of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// Its upper half.
    Bf16,
}

impl Element {
    /// Bytes of one.
    pub fn size(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 => 2,
        }
    }

    /// That of so many bytes.
    pub fn of(bytes: usize) -> Self {
        if bytes == Element::Bf16.size() { Element::Bf16 } else { Element::F32 }
    }
}

/// A flat buffer on the device.
pub struct CudaBuf {
    piece: Piece,
    len: usize,
    element: Element,
    lines: Arc<CopyStreams>,
    /// Elements that lie before it in its piece: tests look at windows that begin anywhere.
    #[cfg(test)]
    lead: usize,
}

/// Elements before every buffer of parameters and gradients that this thread takes next.
#[cfg(test)]
pub mod lead {
    use std::cell::Cell;

    use hpctrain_device::MemoryKind;

    thread_local! {
        static LEAD: Cell<usize> = const { Cell::new(0) };
    }

    /// Sets their number.
    pub fn set(elements: usize) {
        LEAD.set(elements);
    }

    /// Their number: for kinds of memory that no kernel takes as scratch.
    pub fn of(what: MemoryKind) -> usize {
        if matches!(what, MemoryKind::Parameters | MemoryKind::Gradients) { LEAD.get() } else { 0 }
    }
}

impl CudaBuf {
    /// The same after so many elements of its piece.
    #[cfg(test)]
    pub(super) fn after(self, lead: usize) -> Self {
        Self { lead, ..self }
    }

    /// A buffer of `len` elements in `piece`, which messages reach by `lines`.
    pub(super) fn new(
        piece: Piece,
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

    /// The elements `range` for messages. The device is that of the calling thread from now on: MPI
    /// may look for it.
    ///
    /// # Errors
    /// The range cuts a word of four bytes, or the device failed.
    pub(super) fn reach(&mut self, range: Range<usize>) -> Result<CommBuffer<'_>> {
        let to_words =
            |elements: usize| (elements * self.element.size()).div_ceil(size_of::<f32>());
        let is_whole = |at: usize| {
            at == self.len || (at * self.element.size()).is_multiple_of(size_of::<f32>())
        };
        if !is_whole(range.start) || !is_whole(range.end) {
            return Err(Error::internal(format!("a message of elements {range:?} cuts a word")));
        }
        let words = to_words(range.end) - to_words(range.start);
        let address = self.pointer() as usize + to_words(range.start) * size_of::<f32>();
        // SAFETY: the words lie in the piece, which begins and ends at multiples of 256 bytes and
        // lives as long as the borrow; it is not of the stream-ordered allocator, so MPI may open
        // it.
        let span = unsafe { DeviceSpan::new(address, words) };
        self.lines.bind()?;
        Ok(CommBuffer::Device(span, self.lines.copies()))
    }

    /// Done when the kernels queued so far are.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn stamp(&self) -> Result<Box<dyn DeviceEvent>> {
        self.lines.stamp()
    }

    /// Elements.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address of the first element.
    fn pointer(&self) -> u64 {
        #[cfg(test)]
        return self.piece.pointer() + (self.lead * self.element.size()) as u64;
        #[cfg(not(test))]
        self.piece.pointer()
    }

    /// The window `range`.
    pub fn view(&self, range: Range<usize>) -> View<'_> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of a buffer of {}",
            self.len
        );
        let pointer = self.pointer() + (range.start * self.element.size()) as u64;
        View { pointer, len: range.len(), element: self.element, life: PhantomData }
    }

    /// The exclusive window `range`.
    pub fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        let View { pointer, len, element, .. } = self.view(range);
        ViewMut { pointer, len, element, life: PhantomData }
    }
}

/// A window to read.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Its address on the device.
    pub pointer: u64,
    /// Elements.
    pub len: usize,
    /// Element type.
    pub element: Element,
    life: PhantomData<&'a ()>,
}

impl View<'_> {
    /// The parts before and from element `at`.
    pub fn cut(self, at: usize) -> (Self, Self) {
        assert!(at <= self.len, "a cut at {at} of {}", self.len);
        let pointer = self.pointer + (at * self.element.size()) as u64;
        (Self { len: at, ..self }, Self { pointer, len: self.len - at, ..self })
    }

    /// Its address, or null if it is empty: the kernels' sign of an operand that is left out.
    pub fn pointer_or_null(self) -> u64 {
        if self.len == 0 { 0 } else { self.pointer }
    }
}

/// A window to write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    /// Its address on the device.
    pub pointer: u64,
    /// Elements.
    pub len: usize,
    /// Element type.
    pub element: Element,
    life: PhantomData<&'a mut ()>,
}

impl ViewMut<'_> {
    /// The same window, to read.
    pub fn shared(&self) -> View<'_> {
        View { pointer: self.pointer, len: self.len, element: self.element, life: PhantomData }
    }

    /// The same window, for a while.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { pointer: self.pointer, len: self.len, element: self.element, life: PhantomData }
    }

    /// The parts before and from element `at`.
    pub fn cut(self, at: usize) -> (Self, Self) {
        assert!(at <= self.len, "a cut at {at} of {}", self.len);
        let pointer = self.pointer + (at * self.element.size()) as u64;
        let element = self.element;
        let life = PhantomData;
        let tail = Self { pointer, len: self.len - at, element, life };
        (Self { len: at, ..self }, tail)
    }
}
