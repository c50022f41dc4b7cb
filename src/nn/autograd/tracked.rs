//! Buffers whose lifetimes are counted, also where there is no device to hold them.

use std::cell::Cell;
use std::rc::Rc;

use hpctrain_device::Backend;

/// Counts the elements of the buffers that are alive.
#[derive(Debug, Default)]
pub struct Meter {
    now: Cell<usize>,
    peak: Cell<usize>,
}

impl Meter {
    fn add(&self, elements: usize) {
        self.now.set(self.now.get() + elements);
        self.peak.set(self.peak.get().max(self.now.get()));
    }

    /// Returns the elements that are alive now.
    pub fn now(&self) -> usize {
        self.now.get()
    }

    /// Returns the most elements that were alive at once.
    pub fn peak(&self) -> usize {
        self.peak.get()
    }
}

/// A buffer, or in a run on shapes its size alone.
pub struct Tracked<B: Backend> {
    /// The buffer; `None` in a run on shapes.
    pub buf: Option<B::Buf>,
    /// The elements of the compute type that the meter counts.
    counted: usize,
    meter: Option<Rc<Meter>>,
}

impl<B: Backend> Tracked<B> {
    /// Creates a buffer that counts as `counted` elements.
    pub fn new(buf: Option<B::Buf>, counted: usize, meter: &Rc<Meter>) -> Self {
        meter.add(counted);
        Self { buf, counted, meter: Some(meter.clone()) }
    }

    /// Creates a buffer that belongs to somebody else's count.
    pub fn uncounted(buf: Option<B::Buf>) -> Self {
        Self { buf, counted: 0, meter: None }
    }

    /// Takes the buffer out, which ends its count.
    pub fn into_buf(mut self) -> Option<B::Buf> {
        self.buf.take()
    }
}

impl<B: Backend> Drop for Tracked<B> {
    fn drop(&mut self) {
        if let Some(meter) = &self.meter {
            meter.now.set(meter.now.get() - self.counted);
        }
    }
}
