//! Buffers on the device and windows into them.

use std::marker::PhantomData;
use std::ops::Range;

use super::pool::Piece;

/// What a buffer is made of.
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
}

impl CudaBuf {
    /// A buffer of `len` elements in `piece`.
    pub fn new(piece: Piece, len: usize, element: Element) -> Self {
        Self { piece, len, element }
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
    /// Where it begins on the device.
    pub pointer: u64,
    /// Elements.
    pub len: usize,
    /// What it is made of.
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

    /// Its address, or null where there is nothing: how kernels are told of an operand that is left out.
    pub fn pointer_or_null(self) -> u64 {
        if self.len == 0 { 0 } else { self.pointer }
    }
}

/// A window to write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    /// Where it begins on the device.
    pub pointer: u64,
    /// Elements.
    pub len: usize,
    /// What it is made of.
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
