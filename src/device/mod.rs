//! Memory and operations of a device. Everything above is generic over these two traits.
//!
//! [`Backend`] is memory: buffers of f32 (or of the device's compute type), views into them, and
//! transfers. [`Kernels`] is arithmetic. Each device implements both once.

mod device_memcpy;
#[doc(hidden)]
pub mod library;
pub mod matmul_algo;
mod memory;
pub mod ops;
mod profile;

mod kernel_cost;

use std::ops::Range;
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};

pub use device_memcpy::{
    CommBuffer, CommId, ComputeOrderedCopies, DeviceCollective, DeviceComm, DeviceCopies,
    DeviceEvent, DeviceOperation, DeviceSpan, DeviceTimer, Element, ExportedMemory, MAX_SUM_TERMS,
    OrderedSum, Pinned, Scratch, Slot, SpanAtOffset,
};
pub use kernel_cost::KernelCost;
pub use matmul_algo::{ChosenAlgorithm, MatmulAlgorithm, MatmulAlgorithms, MatmulKey};
pub use memory::{MemoryKind, MemoryStats, format_bytes};
pub use ops::{
    Activation, ActivationOps, AdamW, Attention, AttentionOps, ChannelNormShape, ChannelOps,
    ClassifierOps, ColumnsOps, Contrastive, ContrastiveOps, Convolution, ConvolutionOps,
    CrossEntropy, CrossEntropyPart, DigestOps, DotInteraction, DotInteractionOps, Dropout,
    DropoutOps, Elementwise, ElementwiseOps, ElementwiseUpdate, EmbeddingOps, Gemm, Im2colShape,
    Kernels, Linear, LinearOps, LogitsPart, LossWeights, Norm, NormOps, OptimizerOps, Regression,
    RegressionLoss, RegressionOps, Rotary, RotaryOps, Sgd, SoftmaxOps, StridedCopy, SwigluOps,
    UpdateChecksums, WindowOps,
};
pub use profile::{KernelStats, KernelTotals, Launch, Profile};

/// Counters of the work that the host has requested of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Kernels, matmuls, and copies and fills within the device.
    pub launches: u64,
    /// Waits of the host for kernels of the device.
    pub host_waits: u64,
}

/// The memory of one device.
///
/// A buffer is one flat allocation that moves between owners and returns to a pool when dropped.
/// Its category ([`MemoryKind`]) is given at allocation: it is counted there, and a device that
/// computes in another precision than it accumulates in derives the element type from it.
pub trait Backend: Clone + Send + Sync + 'static {
    /// Whether buffers are host memory, which messages can use directly.
    const ON_HOST: bool;
    /// Bytes of workspace that a rank's libraries allocate on the device.
    const WORKSPACE: usize;

    /// An owned, flat buffer.
    type Buf: Send + Sync + 'static;
    /// Indices on the device, such as token ids or class labels.
    type IndexBuf: Send + Sync + 'static;
    /// A number that the device computes and that is read later: reading it at once would stall the
    /// device.
    type Scalar: Send + Sync + 'static;
    /// A shared window into a buffer.
    type View<'a>: Copy + Send;
    /// An exclusive window into a buffer.
    type ViewMut<'a>: Send;

    /// Allocates a buffer of `len` elements with unspecified contents.
    ///
    /// # Errors
    /// Returns an error with the category and the bytes already allocated if memory runs out.
    fn alloc(&self, what: MemoryKind, len: usize) -> Result<Self::Buf>;

    /// Allocates a buffer in f32, whatever the compute type: for fp32 master weights, statistics
    /// and losses.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Backend::alloc`].
    fn alloc_f32(&self, what: MemoryKind, len: usize) -> Result<Self::Buf>;

    /// Allocates `len` elements in bf16 with unspecified contents, whatever the format of
    /// parameters is.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice, or if buffers of this kind of device are in
    /// f32 only.
    fn alloc_bf16(&self, _what: MemoryKind, _len: usize) -> Result<Self::Buf> {
        Err(Error::internal("a buffer in bf16 on a device that has none"))
    }

    /// Whether parameters are stored in a narrower type than f32, so that updates also need fp32
    /// master weights.
    fn has_master_weights(&self) -> bool;

    /// Copies `host` into a window of the same length, rounded to the window's type.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn write(&self, host: &[f32], to: Self::ViewMut<'_>) -> Result<()>;

    /// Copies `host` into a new buffer.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Backend::alloc`], or if the copy fails.
    fn upload(&self, what: MemoryKind, host: &[f32]) -> Result<Self::Buf> {
        let mut buf = self.alloc(what, host.len())?;
        self.write(host, Self::all_mut(&mut buf))?;
        Ok(buf)
    }

    /// Copies `host` into a new buffer in f32.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Backend::upload`].
    fn upload_f32(&self, what: MemoryKind, host: &[f32]) -> Result<Self::Buf> {
        let mut buf = self.alloc_f32(what, host.len())?;
        self.write(host, Self::all_mut(&mut buf))?;
        Ok(buf)
    }

    /// Copies a window to the host; `host` has the window's length.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn download(&self, from: Self::View<'_>, host: &mut [f32]) -> Result<()>;

    /// Returns the elements of a window in host memory; `None` if the window is not there, or not in
    /// f32.
    fn on_host<'a>(_window: Self::View<'a>) -> Option<&'a [f32]> {
        None
    }

    /// Returns the elements of a window in host memory, to be replaced; `None` if the window is not
    /// there, or not in f32.
    fn on_host_mut<'a>(_window: Self::ViewMut<'a>) -> Option<&'a mut [f32]> {
        None
    }

    /// Returns the value of a scalar, blocking until the device has computed it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn read(&self, scalar: Self::Scalar) -> Result<f64>;

    /// Returns the value of a scalar like [`Backend::read`], and leaves the scalar to be read again.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn peek(&self, scalar: &Self::Scalar) -> Result<f64>;

    /// Copies indices to a new buffer on the device.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Backend::upload`].
    fn upload_indices(&self, host: &[u32]) -> Result<Self::IndexBuf>;

    /// Copies indices to the host; `host` has their length.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn download_indices(&self, ints: &Self::IndexBuf, host: &mut [u32]) -> Result<()>;

    /// Returns the number of indices in `ints`.
    fn indices_len(ints: &Self::IndexBuf) -> usize;

    /// Returns the indices `range` of `ints`, in the same memory.
    fn slice_indices(ints: &Self::IndexBuf, range: Range<usize>) -> Self::IndexBuf;

    /// Returns the window `range` of `buf`.
    fn view(buf: &Self::Buf, range: Range<usize>) -> Self::View<'_>;

    /// Returns the exclusive window `range` of `buf`.
    fn view_mut(buf: &mut Self::Buf, range: Range<usize>) -> Self::ViewMut<'_>;

    /// Returns the same window, read-only.
    fn shared<'a>(view: &'a Self::ViewMut<'_>) -> Self::View<'a>;

    /// Returns the same shared window with a shorter lifetime.
    fn shorten<'short, 'long: 'short>(view: Self::View<'long>) -> Self::View<'short>;

    /// Returns the same window with a shorter lifetime.
    fn reborrow<'a>(view: &'a mut Self::ViewMut<'_>) -> Self::ViewMut<'a>;

    /// Returns the number of elements in `buf`.
    fn len(buf: &Self::Buf) -> usize;

    /// Returns the format of the elements of `buf`.
    fn element_of(buf: &Self::Buf) -> Element;

    /// Splits a window in two at element `at`.
    fn split_at(view: Self::View<'_>, at: usize) -> (Self::View<'_>, Self::View<'_>);

    /// Splits an exclusive window in two at element `at`.
    fn split_at_mut(view: Self::ViewMut<'_>, at: usize) -> (Self::ViewMut<'_>, Self::ViewMut<'_>);

    /// Returns the elements `range` of a buffer for communication. On a device with several
    /// elements in a word the range must consist of whole words, except at the end of the buffer,
    /// whose padding is sent too.
    ///
    /// # Errors
    /// Returns an error if the range does not begin and end at a word boundary.
    fn comm_buffer(buf: &mut Self::Buf, range: Range<usize>) -> Result<CommBuffer<'_>>;

    /// Records an event that completes when all work on `buf` that compute has requested so far
    /// has: the communication thread waits for it before it accesses the buffer. Returns `None` if
    /// all of it has completed already. Once a message has finished with the buffer, any stream may
    /// use it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn record_event(buf: &Self::Buf) -> Result<Option<Box<dyn DeviceEvent>>>;

    /// Returns the counters of the work that the host has requested of the device; zeros where
    /// buffers are host memory.
    fn device_counters(&self) -> DeviceCounters {
        DeviceCounters::default()
    }

    /// Returns the bytes of the device's memory that are in use, by this process and by others; 0
    /// where buffers are host memory.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn used_memory(&self) -> Result<usize> {
        Ok(0)
    }

    /// Allocates the memory of this rank, unless it is allocated as it is needed, less `taken` bytes
    /// that other users of the device have taken since the backend was created. Without this call,
    /// the first buffer that needs it allocates the memory.
    ///
    /// # Errors
    /// Returns an error if the device has less free memory.
    fn reserve_memory(&self, _taken: usize) -> Result<()> {
        Ok(())
    }

    /// Returns the streams that copy between the device and the host concurrently with compute, or
    /// `None` where buffers are host memory.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn copy_streams(&self) -> Result<Option<Arc<dyn ComputeOrderedCopies>>> {
        Ok(None)
    }

    /// Returns the name and version of the library by which the devices of ranks can communicate
    /// directly ([`DeviceComm`]), such as NCCL.
    ///
    /// # Errors
    /// Returns an error if the library is missing.
    fn device_comm_library() -> Result<String> {
        Err(device_memcpy::no_device_comm())
    }

    /// Announces that these parameters do not change until [`Backend::end_weight_reuse`] and that
    /// several matmuls will read them: a backend may also cache them in a packed layout that
    /// multiplies faster. Announcing them again changes nothing.
    fn begin_weight_reuse(&self, _parameters: Self::View<'_>) {}

    /// Ends the reuse: parameters may change from here on.
    fn end_weight_reuse(&self) {}

    /// Returns the bytes that [`Backend::begin_weight_reuse`] may allocate, given the number of
    /// elements of the parameters and of rows of a micro-batch.
    fn reuse_bytes(_elements: usize, _rows: usize) -> usize {
        0
    }

    /// Returns the leading dimension (elements from one row to the next) of a matrix of `columns`
    /// columns that only matmuls and classifier kernels read: at least `columns`, and more where
    /// matmuls are faster with aligned rows.
    fn row_stride(columns: usize) -> usize {
        columns
    }

    /// Returns the interface for choosing among matmul algorithms, if the device has one.
    fn matmul_algorithms(&self) -> Option<&dyn MatmulAlgorithms> {
        None
    }

    /// Returns cached free memory to the system, because shapes are about to change.
    fn trim(&self);

    /// Returns the counts of allocated bytes by category.
    fn memory_stats(&self) -> &MemoryStats;

    /// Returns the profile of this device's kernels.
    fn profile(&self) -> &Profile;

    /// Returns the most bytes of the device's own memory that were allocated at once, or `None`
    /// where buffers are host memory.
    fn peak_device_bytes(&self) -> Option<usize> {
        None
    }

    /// Returns the peak dense FLOP/s of a rank's device in the number format of its matmuls, or
    /// `None` if it is unknown.
    fn peak_flops(&self) -> Option<f64> {
        None
    }

    /// Returns the whole of `buf` as a window.
    fn all(buf: &Self::Buf) -> Self::View<'_> {
        Self::view(buf, 0..Self::len(buf))
    }

    /// Returns the whole of `buf` as an exclusive window.
    fn all_mut(buf: &mut Self::Buf) -> Self::ViewMut<'_> {
        let len = Self::len(buf);
        Self::view_mut(buf, 0..len)
    }
}

/// Splits a window into consecutive parts of the given lengths; the rest is padding.
pub fn split<'a, B: Backend, const N: usize>(
    mut view: B::View<'a>,
    lens: [usize; N],
) -> [B::View<'a>; N] {
    lens.map(|len| {
        let (head, rest) = B::split_at(view, len);
        view = rest;
        head
    })
}

/// Splits an exclusive window into consecutive parts of the given lengths; the rest is padding.
pub fn split_mut<'a, B: Backend, const N: usize>(
    view: B::ViewMut<'a>,
    lens: [usize; N],
) -> [B::ViewMut<'a>; N] {
    let mut rest = Some(view);
    lens.map(|len| {
        // `rest` is always refilled below; the option only lets the exclusive window move.
        let (head, tail) = B::split_at_mut(rest.take().expect("refilled"), len);
        rest = Some(tail);
        head
    })
}
