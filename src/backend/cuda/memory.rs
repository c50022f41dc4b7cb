//! Buffers on the device and windows into them.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::device_copies::Lines;
use super::pool::Piece;
use crate::backend::{Event, Reach, Span};
use crate::error::{Error, Result};

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
}

/// A flat buffer on the device.
pub struct CudaBuf {
    piece: Piece,
    len: usize,
    element: Element,
    lines: Arc<Lines>,
}

impl CudaBuf {
    /// A buffer of `len` elements in `piece`, which messages reach by `lines`.
    pub(super) fn new(piece: Piece, len: usize, element: Element, lines: &Arc<Lines>) -> Self {
        Self { piece, len, element, lines: lines.clone() }
    }

    /// The elements `range` for messages. The device is that of the calling thread from now on: MPI may look for it.
    ///
    /// # Errors
    /// The range cuts a word of four bytes, or the device failed.
    pub(super) fn reach(&mut self, range: Range<usize>) -> Result<Reach<'_>> {
        let to_words = |elements: usize| (elements * self.element.size()).div_ceil(size_of::<f32>());
        let is_whole = |at: usize| at == self.len || (at * self.element.size()).is_multiple_of(size_of::<f32>());
        if !is_whole(range.start) || !is_whole(range.end) {
            return Err(Error::internal(format!("a message of elements {range:?} cuts a word")));
        }
        let words = to_words(range.end) - to_words(range.start);
        let address = self.piece.pointer() as usize + to_words(range.start) * size_of::<f32>();
        // SAFETY: the words lie in the piece, which begins and ends at multiples of 256 bytes and lives as long as the
        // borrow; it is not of the stream-ordered allocator, so MPI may open it.
        let span = unsafe { Span::new(address, words) };
        self.lines.bind()?;
        Ok(Reach::Device(span, self.lines.copies()))
    }

    /// Done when the kernels queued so far are.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn stamp(&self) -> Result<Box<dyn Event>> {
        self.lines.stamp()
    }

    /// Elements.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The window `range`.
    pub fn view(&self, range: Range<usize>) -> View<'_> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of a buffer of {}", self.len);
        let pointer = self.piece.pointer() + (range.start * self.element.size()) as u64;
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
        let (element, life) = (self.element, PhantomData);
        let tail = Self { pointer, len: self.len - at, element, life };
        (Self { len: at, ..self }, tail)
    }
}
