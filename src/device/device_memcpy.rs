//! Access of messages to the memory of a device.
//!
//! The communication thread knows nothing of devices.
//! [`Backend::comm_buffer`](super::Backend::comm_buffer) gives it a buffer as a [`DeviceSpan`], which it
//! cannot look into, and the [`DeviceCopies`] that copies and adds spans: a stream of the device
//! that compute does not use. Memory is counted in **words** of four bytes: a pair of bf16 travels
//! as one word, and only f32 is ever added.
//!
//! All of it is asynchronous. A caller that needs a result waits for a [`DeviceEvent`].

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};

/// A part of a buffer, as messages reach it.
pub enum CommBuffer<'a> {
    /// Host memory.
    Host(&'a mut [f32]),
    /// Device memory, and the copies that move it.
    Device(DeviceSpan<'a>, Arc<dyn DeviceCopies>),
}

/// A point in the work of a device.
pub trait DeviceEvent: Send {
    /// Whether the device has passed it. Does not block.
    ///
    /// # Errors
    /// The device failed.
    fn is_done(&self) -> Result<bool>;

    /// Blocks until the device has passed it.
    ///
    /// # Errors
    /// The device failed.
    fn wait(&self) -> Result<()>;
}

/// Words of device memory that live for `'a`. The host cannot look into them: copies of a span are
/// addresses.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSpan<'a> {
    address: usize,
    words: usize,
    memory: PhantomData<&'a mut [f32]>,
}

impl<'a> DeviceSpan<'a> {
    /// The words at an address.
    ///
    /// # Safety
    /// They are memory of a device, aligned to words, and live for `'a`. MPI may be given the
    /// address.
    pub unsafe fn new(address: usize, words: usize) -> Self {
        Self { address, words, memory: PhantomData }
    }

    /// The address on the device, for libraries that take it.
    pub fn address(self) -> usize {
        self.address
    }

    /// Words.
    pub fn words(self) -> usize {
        self.words
    }

    /// The words of a range, which lies within.
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

/// Page-locked host memory, which the device copies to and from by itself.
pub trait Pinned: Send {
    /// The words. Their address never changes.
    fn words(&mut self) -> &mut [f32];
}

/// Device memory that belongs to the communication thread.
pub trait Scratch: Send {
    /// All of it.
    fn span(&self) -> DeviceSpan<'_>;
}

/// A collective that a library has of its own, in place.
#[derive(Debug, Clone, Copy)]
pub enum DeviceCollective {
    /// The sum over all ranks.
    AllReduce,
    /// The sum over all ranks, on the first one.
    Reduce,
    /// My part of the memory holds the sum afterwards.
    ReduceScatter,
    /// My part of the memory is contributed.
    AllGather,
    /// The memory of one rank.
    Broadcast {
        /// Its number.
        root: usize,
    },
}

/// The identifier of a communicator: one rank makes it, and all of them need it to create their
/// [`DeviceComm`].
pub type CommId = [u8; 128];

/// The most terms that a [`OrderedSum`] adds.
pub const FOLDED: usize = 255;

/// A sum of terms in f32, each addition rounded as in [`DeviceCopies::add`]: of term 2k + 1 to term
/// 2k, then of each second sum to the one before it, and so on.
#[derive(Debug, Clone, Copy)]
pub struct OrderedSum<'a> {
    /// One term, which becomes the sum.
    pub own: DeviceSpan<'a>,
    /// Its number among the terms.
    pub number: usize,
    /// The others one after the other, each as long as `own`, in the order of their numbers.
    pub others: DeviceSpan<'a>,
}

/// Ranks with a device each, which exchange memory by a library of the device's vendor.
///
/// One thing is started at a time: the device runs all in this order but for folds, and the
/// [`queued`](DeviceComm::queued) of one is done before the next. It may wait for the other ranks
/// to start theirs. Dropping one without [`part`](DeviceComm::part) aborts the communicator.
pub trait DeviceComm: Send {
    /// Starts to send to some ranks and to receive from some at once. A sender may wait for its
    /// receiver. Messages between two ranks arrive in the order of the slices.
    ///
    /// # Errors
    /// The library failed.
    fn exchange(
        &self,
        sends: &[(usize, DeviceSpan<'_>)],
        receives: &[(usize, DeviceSpan<'_>)],
    ) -> Result<()>;

    /// Starts sums, if there are any, behind all messages that were started, and beside those that
    /// will be.
    ///
    /// # Errors
    /// The device failed, or one has more than [`FOLDED`] terms.
    fn fold(&self, folds: &[OrderedSum<'_>]) -> Result<()>;

    /// Messages that are started from now on come behind the sums of all calls of
    /// [`fold`](DeviceComm::fold) but the last `but`.
    ///
    /// # Errors
    /// The device failed.
    fn after_folds(&self, but: usize) -> Result<()>;

    /// Starts a collective of the library.
    ///
    /// # Errors
    /// The library failed.
    fn vendor(&self, call: DeviceCollective, memory: DeviceSpan<'_>) -> Result<()>;

    /// Starts a good end, after which nothing else is started.
    ///
    /// # Errors
    /// The library failed.
    fn part(&self) -> Result<()>;

    /// An event that is done when all that was started is. Its error may come from another rank.
    ///
    /// # Errors
    /// The library failed.
    fn mark(&self) -> Result<Box<dyn DeviceEvent>>;

    /// An event that is done when the device has the operation started last among its work, which
    /// it need not have begun.
    fn queued(&self) -> Box<dyn DeviceEvent>;

    /// Stops the operations under way here, at once. Nothing more can be started; the other ranks
    /// may wait for ever.
    fn tear(&self);
}

/// The error of a device whose vendor has no such library.
pub(super) fn no_device_comm() -> Error {
    Error::input("there is no library by which devices of this kind exchange memory")
}

/// Device words, and the place of their first one in a piece of host memory.
pub type AllocatedOn<'a> = (DeviceSpan<'a>, usize);

/// The communication thread's access to a device. Operations run in the order they were started,
/// apart from compute, save that copies in one direction may run beside all else. A call that
/// returns an error has nothing left running.
pub trait DeviceCopies: Send + Sync {
    /// So many words of page-locked memory, with unspecified contents. The caller counts them.
    ///
    /// # Errors
    /// The system has no such memory.
    fn pinned(&self, words: usize) -> Result<Box<dyn Pinned>>;

    /// So many words of device memory, with unspecified contents. The caller counts them.
    ///
    /// # Errors
    /// The device has no such memory.
    fn scratch(&self, words: usize) -> Result<Box<dyn Scratch>>;

    /// Starts copies from the device to the host memory that begins at `host`.
    ///
    /// # Safety
    /// Every piece has its place in page-locked memory that nobody touches and that lives until the
    /// event is done.
    ///
    /// # Errors
    /// The device failed.
    unsafe fn download(
        &self,
        pieces: &[AllocatedOn<'_>],
        host: *mut f32,
    ) -> Result<Box<dyn DeviceEvent>>;

    /// Starts copies to the device from the host memory that begins at `host`.
    ///
    /// # Safety
    /// Every piece has its place in page-locked memory that nobody writes and that lives until the
    /// event is done.
    ///
    /// # Errors
    /// The device failed.
    unsafe fn upload(
        &self,
        host: *const f32,
        pieces: &[AllocatedOn<'_>],
    ) -> Result<Box<dyn DeviceEvent>>;

    /// Starts `to += from`, in f32, each element rounded once and as it is, denormal or not: the
    /// sums of the CPU.
    ///
    /// # Errors
    /// The device failed.
    fn add(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()>;

    /// Starts a copy within the device, in order with [`DeviceCopies::add`].
    ///
    /// # Errors
    /// The device failed.
    fn copy(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()>;

    /// An event that is done when every addition and copy within the device that was started before
    /// is.
    ///
    /// # Errors
    /// The device failed.
    fn mark(&self) -> Result<Box<dyn DeviceEvent>>;

    /// Makes the identifier of a new communicator.
    ///
    /// # Errors
    /// There is no library for it, or it failed.
    fn comm_id(&self) -> Result<CommId> {
        Err(no_device_comm())
    }

    /// Starts to create the communicator of the `size` ranks that have the same identifier, as
    /// number `rank` of them. It is there when the first mark is done.
    ///
    /// # Errors
    /// There is no library for it, or it failed.
    fn init_rank(&self, _id: &CommId, _rank: usize, _size: usize) -> Result<Box<dyn DeviceComm>> {
        Err(no_device_comm())
    }
}

/// Copies in an order with compute that the device keeps: the host does not wait to start them.
/// Messages use other streams.
pub trait ComputeOrderedCopies: DeviceCopies {
    /// Copies started from now on run after all work that compute has requested so far.
    ///
    /// # Errors
    /// The device failed.
    fn after_compute(&self) -> Result<()>;

    /// Work that compute requests from now on runs after all copies to the device that were started
    /// so far.
    ///
    /// # Errors
    /// The device failed.
    fn before_compute(&self) -> Result<()>;

    /// The same after all copies to the host: the memory that they read may have another use.
    ///
    /// # Errors
    /// The device failed.
    fn after_downloads(&self) -> Result<()>;
}

/// Any memory will do if no copies are asynchronous.
impl Pinned for Vec<f32> {
    fn words(&mut self) -> &mut [f32] {
        self
    }
}

/// Page-locked memory that goes to the device or comes from it, and the copy that uses it.
///
/// It gives no access while a copy is under way, and waits for the copy before it gives the memory
/// back.
pub struct Slot {
    /// Taken on drop only.
    memory: Option<Box<dyn Pinned>>,
    copy: Option<Box<dyn DeviceEvent>>,
}

impl Slot {
    /// A slot of so many words.
    ///
    /// # Errors
    /// As [`DeviceCopies::pinned`].
    pub fn new(copies: &dyn DeviceCopies, words: usize) -> Result<Self> {
        Ok(Self::of(copies.pinned(words)?))
    }

    /// A slot of this memory.
    pub fn of(memory: Box<dyn Pinned>) -> Self {
        Self { memory: Some(memory), copy: None }
    }

    /// The copy under way, if one is.
    pub fn copy(&self) -> Option<&dyn DeviceEvent> {
        self.copy.as_deref()
    }

    /// The words, once no copy uses them.
    ///
    /// # Errors
    /// The device failed.
    pub fn memory(&mut self) -> Result<&mut [f32]> {
        if let Some(copy) = &self.copy {
            copy.wait()?;
        }
        self.copy = None;
        self.memory
            .as_mut()
            .map(|memory| memory.words())
            .ok_or_else(|| Error::internal("a slot without memory"))
    }

    /// Starts to fill the slot from the device.
    ///
    /// # Errors
    /// The device failed.
    pub fn download(
        &mut self,
        copies: &dyn DeviceCopies,
        pieces: &[AllocatedOn<'_>],
    ) -> Result<()> {
        let memory = self.holding(pieces)?;
        // SAFETY: all pieces lie in the memory, as `holding` has checked; `copy` keeps everyone
        // away until it is done.
        self.copy = Some(unsafe { copies.download(pieces, memory)? });
        Ok(())
    }

    /// Starts to empty the slot to the device.
    ///
    /// # Errors
    /// The device failed.
    pub fn upload(&mut self, copies: &dyn DeviceCopies, pieces: &[AllocatedOn<'_>]) -> Result<()> {
        let memory = self.holding(pieces)?;
        // SAFETY: as above.
        self.copy = Some(unsafe { copies.upload(memory, pieces)? });
        Ok(())
    }

    /// The memory, which has the places of all pieces.
    fn holding(&mut self, pieces: &[AllocatedOn<'_>]) -> Result<*mut f32> {
        let memory = self.memory()?;
        let end = pieces.iter().map(|(span, at)| at + span.words()).max().unwrap_or(0);
        if end > memory.len() {
            return Err(Error::internal(format!("{end} words in a slot of {}", memory.len())));
        }
        Ok(memory.as_mut_ptr())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(copy) = &self.copy
            && copy.wait().is_err()
        {
            // The device may still use the memory.
            std::mem::forget(self.memory.take());
        }
    }
}
