//! Access to the memory of a device for communication.
//!
//! The communication thread does not depend on a kind of device.
//! [`Backend::comm_buffer`](super::Backend::comm_buffer) gives it a buffer as a [`DeviceSpan`],
//! whose contents it cannot access, and the [`DeviceCopies`] that copies and adds spans on a stream
//! of the device that compute does not use. Memory is counted in **words** of four bytes: a pair of
//! bf16 is sent as one word, and only f32 is ever added.
//!
//! All operations are asynchronous. A caller that needs a result waits for a [`DeviceEvent`]. The
//! memory of a [`Slot`] cannot be accessed before its copy is done, which keeps the `unsafe` code
//! sound.

use std::any::Any;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};

/// A part of a buffer that is sent or received.
pub enum CommBuffer<'a> {
    /// Host memory.
    Host(&'a mut [f32]),
    /// Device memory, and the copies that access it.
    Device(DeviceSpan<'a>, Arc<dyn DeviceCopies>),
}

/// An event in the work of a device.
pub trait DeviceEvent: Send + Any {
    /// Returns whether the device has reached the event. Does not block.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn is_done(&self) -> Result<bool>;

    /// Blocks until the device has reached the event.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn wait(&self) -> Result<()>;
}

/// An operation of a [`DeviceComm`] that the device runs in order with compute: the host starts it
/// and continues.
pub trait DeviceOperation: Send + Sync {
    /// Returns whether the operation has finished. Does not block.
    ///
    /// # Errors
    /// Returns an error if the device or the library fails; its cause may be another rank.
    fn is_done(&self) -> Result<bool>;

    /// Orders work that compute requests from now on after the operation. Returns the timer of the
    /// time for which compute is idle because of it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn before_compute(&self) -> Result<Box<dyn DeviceTimer>>;

    /// Returns the seconds from the start of a finished operation to its end, including waits for
    /// other ranks.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn seconds(&self) -> Result<f64>;
}

/// A duration that the device measures.
pub trait DeviceTimer: Send {
    /// Returns the seconds, or `None` if the device has not reached the end yet.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn seconds(&self) -> Result<Option<f64>>;
}

/// Words of device memory that live for `'a`. The host cannot access them: copying a span copies
/// its address.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSpan<'a> {
    address: usize,
    words: usize,
    memory: PhantomData<&'a mut [f32]>,
}

impl<'a> DeviceSpan<'a> {
    /// Creates a span of the words at an address.
    ///
    /// # Safety
    /// The words must be device memory, aligned to words, and live for `'a`. The address may be
    /// passed to MPI.
    pub unsafe fn new(address: usize, words: usize) -> Self {
        Self { address, words, memory: PhantomData }
    }

    /// Returns the address on the device, for libraries that take it.
    pub fn address(self) -> usize {
        self.address
    }

    /// Returns the number of words.
    pub fn words(self) -> usize {
        self.words
    }

    /// Returns the words of `range`; panics if it is not within the span.
    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.words,
            "{range:?} of {} words",
            self.words
        );
        Self {
            address: self.address + range.start * size_of::<f32>(),
            words: range.len(),
            memory: PhantomData,
        }
    }
}

/// Treats host memory as that of a device which shares it.
impl<'a> From<&'a mut [f32]> for DeviceSpan<'a> {
    fn from(words: &'a mut [f32]) -> Self {
        Self {
            address: words.as_mut_ptr().expose_provenance(),
            words: words.len(),
            memory: PhantomData,
        }
    }
}

/// Pinned host memory, which the device copies to and from asynchronously.
pub trait Pinned: Send {
    /// Returns the words. Their address never changes.
    fn words(&mut self) -> &mut [f32];
}

/// Device memory that belongs to the communication thread.
pub trait Scratch: Send {
    /// Returns all of it.
    fn span(&self) -> DeviceSpan<'_>;
}

/// An in-place collective of the vendor's library.
#[derive(Debug, Clone, Copy)]
pub enum DeviceCollective {
    /// Sums over all ranks.
    AllReduce,
    /// Sums over all ranks; the first rank receives the sum.
    Reduce,
    /// Sums over all ranks; this rank's part of the memory receives its part of the sum.
    ReduceScatter,
    /// Gathers every rank's part of the memory on all ranks.
    AllGather,
    /// Copies the memory of one rank to all.
    Broadcast {
        /// The rank that is copied from.
        root: usize,
    },
}

/// The identifier of a communicator: one rank creates it, and all ranks need it to create their
/// [`DeviceComm`].
pub type CommId = [u8; 128];

/// The number format of the elements of a device buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// bfloat16: the upper half of an f32.
    Bf16,
}

impl Element {
    /// Returns the bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 => 2,
        }
    }

    /// Returns the format whose elements have `bytes` bytes.
    pub fn with_size(bytes: usize) -> Self {
        if bytes == Element::Bf16.size() { Element::Bf16 } else { Element::F32 }
    }
}

/// The most terms that an [`OrderedSum`] adds.
pub const MAX_SUM_TERMS: usize = 255;

/// A sum of terms in f32 in a fixed binary tree: term 2k + 1 is added to term 2k, then each second
/// sum to the one before it, and so on. Each addition is rounded as in [`DeviceCopies::add`]. Terms
/// in bf16 are converted to f32 first, and their sum is rounded to bf16 at the end.
#[derive(Debug, Clone, Copy)]
pub struct OrderedSum<'a> {
    /// The format of the elements. A word has two in bf16.
    pub element: Element,
    /// This rank's term, which is overwritten by the sum.
    pub own: DeviceSpan<'a>,
    /// The index of `own` among the terms.
    pub number: usize,
    /// The other terms one after the other, each as long as `own`, in the order of their indices.
    pub others: DeviceSpan<'a>,
}

/// A communicator of ranks with devices, which communicate by a library of the device's vendor
/// (NCCL), or write to each other's memory ([`ExportedMemory`]).
///
/// Operations are started one at a time: the device runs all but folds in the order in which they
/// were started, and the caller waits for [`queued`](DeviceComm::queued) of each before it starts
/// the next. All communicators of a device share this order. An operation may wait for the other
/// ranks to start theirs. Dropping a communicator without [`part`](DeviceComm::part) aborts it.
pub trait DeviceComm: Send {
    /// Begins an operation of one or more messages, collectives and sums: orders those that are
    /// started from now on after `ready`, an event of compute.
    ///
    /// # Errors
    /// Returns an error if the device fails, or the event is not of this kind of device.
    fn begin(&self, ready: Option<&dyn DeviceEvent>) -> Result<()>;

    /// Ends the operation that was begun last. All of it must be [queued](DeviceComm::queued).
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn end(&self) -> Result<Arc<dyn DeviceOperation>>;

    /// Starts point-to-point sends to some ranks and receives from some as one group. A send may
    /// wait for its receive. Messages between two ranks arrive in the order of the slices.
    ///
    /// # Errors
    /// Returns an error if the library fails.
    fn exchange(
        &self,
        sends: &[(usize, DeviceSpan<'_>)],
        receives: &[(usize, DeviceSpan<'_>)],
    ) -> Result<()>;

    /// Starts sums, if there are any, ordered after all messages started before and concurrent with
    /// those started later.
    ///
    /// # Errors
    /// Returns an error if the device fails, or a sum has more than [`MAX_SUM_TERMS`] terms.
    fn sum_in_order(&self, folds: &[OrderedSum<'_>]) -> Result<()>;

    /// Orders messages that are started from now on after the sums of all calls of
    /// [`fold`](DeviceComm::sum_in_order) except the last `but` calls.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn wait_for_sums(&self, but: usize) -> Result<()>;

    /// Starts a collective of the vendor's library.
    ///
    /// # Errors
    /// Returns an error if the library fails, or there is none.
    fn collective(&self, call: DeviceCollective, memory: DeviceSpan<'_>) -> Result<()>;

    /// Starts an orderly shutdown, after which nothing else is started.
    ///
    /// # Errors
    /// Returns an error if the library fails.
    fn part(&self) -> Result<()>;

    /// Records an event that completes when all operations started so far have. Its error may come
    /// from another rank.
    ///
    /// # Errors
    /// Returns an error if the library fails.
    fn mark(&self) -> Result<Box<dyn DeviceEvent>>;

    /// Returns an event that completes when the operation started last is in the device's queue; it
    /// need not have begun.
    fn queued(&self) -> Box<dyn DeviceEvent>;

    /// Aborts this rank's running operations at once. Nothing more can be started; the other ranks
    /// may wait forever.
    fn abort(&self);

    /// Blocks until this rank's operations, of all communicators, use no memory any more. Abort the
    /// communicators first.
    fn synchronize(&self);
}

/// Device memory that ranks of the same node can open.
pub trait ExportedMemory {
    /// Returns the bytes by which other ranks open it.
    fn handle(&self) -> Vec<u8>;

    /// Creates a communicator of the ranks with these handles, as rank `rank` of it, in which each
    /// writes to the memory of the others.
    ///
    /// # Errors
    /// Returns an error if the device cannot open the memory of a rank.
    fn open_peers(self: Box<Self>, handles: &[Vec<u8>], rank: usize)
    -> Result<Box<dyn DeviceComm>>;
}

/// Returns the error of a device whose vendor has no such library.
pub(super) fn no_device_comm() -> Error {
    Error::input("there is no collective library (such as NCCL) for this kind of device")
}

/// Words of device memory, and the offset of the first one in a block of host memory.
pub type SpanAtOffset<'a> = (DeviceSpan<'a>, usize);

/// The communication thread's access to a device. Operations run in the order in which they were
/// started, independently of compute, except that copies in one direction may run concurrently with
/// everything else. A call that returns an error leaves nothing running.
pub trait DeviceCopies: Send + Sync {
    /// Allocates `words` words of pinned host memory with unspecified contents. The caller accounts
    /// for them.
    ///
    /// # Errors
    /// Returns an error if the system cannot allocate the memory.
    fn pinned(&self, words: usize) -> Result<Box<dyn Pinned>>;

    /// Allocates `words` words of device memory with unspecified contents. The caller accounts for
    /// them.
    ///
    /// # Errors
    /// Returns an error if the device cannot allocate the memory.
    fn scratch(&self, words: usize) -> Result<Box<dyn Scratch>>;

    /// Starts copies from the device to the host memory that begins at `host`.
    ///
    /// # Safety
    /// Every piece must lie in pinned memory that nothing reads or writes and that lives until the
    /// event completes.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    unsafe fn download(
        &self,
        pieces: &[SpanAtOffset<'_>],
        host: *mut f32,
    ) -> Result<Box<dyn DeviceEvent>>;

    /// Starts copies to the device from the host memory that begins at `host`.
    ///
    /// # Safety
    /// Every piece must lie in pinned memory that nothing writes and that lives until the event
    /// completes.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    unsafe fn upload(
        &self,
        host: *const f32,
        pieces: &[SpanAtOffset<'_>],
    ) -> Result<Box<dyn DeviceEvent>>;

    /// Starts `to += from` in f32, each element rounded once and denormals kept, so that the bits
    /// are those of the CPU.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn add(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()>;

    /// Starts sums, in order with [`DeviceCopies::add`]. Returns the event of their end.
    ///
    /// # Errors
    /// Returns an error if the device fails, or a sum has more than [`MAX_SUM_TERMS`] terms.
    fn sum_in_order(&self, sums: &[OrderedSum<'_>]) -> Result<Box<dyn DeviceEvent>>;

    /// Starts a copy within the device, in order with [`DeviceCopies::add`].
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn copy(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()>;

    /// Records an event that completes when every addition, sum and copy within the device started
    /// so far has.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn mark(&self) -> Result<Box<dyn DeviceEvent>>;

    /// Creates the identifier of a new communicator.
    ///
    /// # Errors
    /// Returns an error if the device has no collective library, or the library fails.
    fn comm_id(&self) -> Result<CommId> {
        Err(no_device_comm())
    }

    /// Starts to create the communicator of the `size` ranks that have the same identifier, as rank
    /// `rank` of it. It is complete when the first [`mark`](DeviceComm::mark) is.
    ///
    /// # Errors
    /// Returns an error if the device has no collective library, or the library fails.
    fn init_rank(&self, _id: &CommId, _rank: usize, _size: usize) -> Result<Box<dyn DeviceComm>> {
        Err(no_device_comm())
    }

    /// Exports the memory of this rank's buffers to the `ranks` ranks of a group, this one included.
    /// No communicator may have work in flight.
    ///
    /// # Errors
    /// Returns an error if other ranks cannot open memory of this kind of device.
    fn export_memory(&self, _ranks: usize) -> Result<Box<dyn ExportedMemory>> {
        Err(Error::input("memory of this kind of device cannot be opened by other ranks"))
    }

    /// Returns the bytes of free device memory.
    ///
    /// # Errors
    /// Returns an error if the device fails, or does not report them.
    fn free_memory(&self) -> Result<usize> {
        Err(Error::input("this kind of device does not report its free memory"))
    }
}

/// Copies that the device orders with compute: the host need not wait before it starts them.
/// Messages use other streams.
pub trait ComputeOrderedCopies: DeviceCopies {
    /// Orders copies that are started from now on after all work that compute has requested so far.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn after_compute(&self) -> Result<()>;

    /// Orders work that compute requests from now on after all copies to the device started so far.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn before_compute(&self) -> Result<()>;

    /// Orders work that compute requests from now on after all copies to the host started so far:
    /// it may overwrite the memory that they read.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn after_downloads(&self) -> Result<()>;
}

/// Any memory is suitable if no copies are asynchronous.
impl Pinned for Vec<f32> {
    fn words(&mut self) -> &mut [f32] {
        self
    }
}

/// A pinned buffer for copies to or from the device, and the copy that is using it.
///
/// It gives no access to the memory while a copy is running, and waits for the copy before it frees
/// the memory.
pub struct Slot {
    /// `None` only while it is dropped.
    memory: Option<Box<dyn Pinned>>,
    copy: Option<Box<dyn DeviceEvent>>,
}

impl Slot {
    /// Allocates a slot of `words` words.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`DeviceCopies::pinned`].
    pub fn new(copies: &dyn DeviceCopies, words: usize) -> Result<Self> {
        Ok(Self::from_pinned(copies.pinned(words)?))
    }

    /// Creates a slot of this memory.
    pub fn from_pinned(memory: Box<dyn Pinned>) -> Self {
        Self { memory: Some(memory), copy: None }
    }

    /// Returns the running copy, if there is one.
    pub fn copy(&self) -> Option<&dyn DeviceEvent> {
        self.copy.as_deref()
    }

    /// Waits for the running copy, if there is one, and returns the words.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn memory(&mut self) -> Result<&mut [f32]> {
        if let Some(copy) = &self.copy {
            copy.wait()?;
        }
        self.copy = None;
        self.memory
            .as_mut()
            .map(|memory| memory.words())
            .ok_or_else(|| Error::internal("a pinned slot has no memory"))
    }

    /// Starts a copy from the device into the slot.
    ///
    /// # Errors
    /// Returns an error if the device fails, or the pieces do not fit in the slot.
    pub fn download(
        &mut self,
        copies: &dyn DeviceCopies,
        pieces: &[SpanAtOffset<'_>],
    ) -> Result<()> {
        let memory = self.holding(pieces)?;
        // SAFETY: all pieces fit in the memory, as `holding` has checked; `copy` denies access to
        // it until it completes.
        self.copy = Some(unsafe { copies.download(pieces, memory)? });
        Ok(())
    }

    /// Starts a copy from the slot to the device.
    ///
    /// # Errors
    /// Returns an error if the device fails, or the pieces do not fit in the slot.
    pub fn upload(&mut self, copies: &dyn DeviceCopies, pieces: &[SpanAtOffset<'_>]) -> Result<()> {
        let memory = self.holding(pieces)?;
        // SAFETY: as in `download`.
        self.copy = Some(unsafe { copies.upload(memory, pieces)? });
        Ok(())
    }

    /// Waits for the running copy and returns the memory, after checking that all pieces fit in it.
    fn holding(&mut self, pieces: &[SpanAtOffset<'_>]) -> Result<*mut f32> {
        let memory = self.memory()?;
        let end = pieces.iter().map(|(span, at)| at + span.words()).max().unwrap_or(0);
        if end > memory.len() {
            return Err(Error::internal(format!(
                "a copy of {end} words in a pinned slot of {}",
                memory.len()
            )));
        }
        Ok(memory.as_mut_ptr())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(copy) = &self.copy
            && copy.wait().is_err()
        {
            // The device may still be using the memory, so it is leaked.
            std::mem::forget(self.memory.take());
        }
    }
}
