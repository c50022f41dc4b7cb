//! Memory and operations of a device. Everything above is generic over these two traits.
//!
//! [`Backend`] is memory: buffers of f32 (or the device's compute type), views into them, and
//! transfers. [`Kernels`] is arithmetic. Both are implemented once per device.

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

use hpctrain_base::error::Result;

pub use device_memcpy::{
    AllocatedOn, CommBuffer, CommId, ComputeOrderedCopies, DeviceCollective, DeviceComm,
    DeviceCopies, DeviceEvent, DeviceSpan, FOLDED, OrderedSum, Pinned, Scratch, Slot,
};
pub use kernel_cost::KernelCost;
pub use matmul_algo::{Algorithm, Chosen, ProductAlgorithms, ProductKind};
pub use memory::{MemoryKind, MemoryStats, readable};
pub use ops::{
    Activation, ActivationOps, AdamW, Attention, AttentionOps, Audit, ChannelNormShape, ChannelOps,
    ClassifierOps, ColumnsOps, Convolution, ConvolutionOps, CrossEntropy, CrossEntropyPart,
    Deviation, DigestOps, DotInteraction, Dropout, DropoutOps, Elementwise, ElementwiseOps,
    ElementwiseUpdate, EmbeddingOps, Gemm, Im2colShape, Kernels, Linear, LinearOps, LogitsPart,
    LossWeights, Norm, NormOps, OptimizerOps, PairsOps, Regression, RegressionOps, Rotary,
    RotaryOps, Sgd, SoftmaxOps, StridedCopy, SwigluOps, WindowOps,
};
pub use profile::{KernelStats, Launch, Profile, Tallies};

/// The memory of one device.
///
/// A buffer is one flat allocation that moves between owners and returns to a pool when dropped.
/// Its category ([`MemoryKind`]) is stated at allocation: it is counted there, and a device that
/// computes in another precision than it accumulates in chooses the element type by it.
pub trait Backend: Clone + Send + Sync + 'static {
    /// Whether buffers are host memory, which messages take as it is.
    const ON_HOST: bool;
    /// Bytes of scratch that a rank's libraries take on the device.
    const WORKSPACE: usize;

    /// An owned, flat buffer.
    type Buf: Send + Sync + 'static;
    /// Token ids, class labels: indices on the device.
    type IndexBuf: Send + Sync + 'static;
    /// A number that the device computes, to be read later: asking for it at once would stop the
    /// device.
    type Scalar: Send + Sync + 'static;
    /// A shared window into a buffer.
    type View<'a>: Copy + Send;
    /// An exclusive window into a buffer.
    type ViewMut<'a>: Send;

    /// A buffer of `len` elements with unspecified contents.
    ///
    /// # Errors
    /// Out of memory, with the category and the bytes already taken.
    fn alloc(&self, what: MemoryKind, len: usize) -> Result<Self::Buf>;

    /// As [`Backend::alloc`], in f32 for every compute type: masters, statistics, losses.
    ///
    /// # Errors
    /// As [`Backend::alloc`].
    fn alloc_f32(&self, what: MemoryKind, len: usize) -> Result<Self::Buf>;

    /// Whether parameters are kept in a narrower type than f32, so that updates need f32 masters
    /// besides.
    fn has_master_weights(&self) -> bool;

    /// Copies `host` into a window of its length, rounded to the window's type.
    ///
    /// # Errors
    /// The device failed.
    fn write(&self, host: &[f32], to: Self::ViewMut<'_>) -> Result<()>;

    /// A buffer that holds `host`.
    ///
    /// # Errors
    /// As [`Backend::alloc`].
    fn upload(&self, what: MemoryKind, host: &[f32]) -> Result<Self::Buf> {
        let mut buf = self.alloc(what, host.len())?;
        self.write(host, Self::all_mut(&mut buf))?;
        Ok(buf)
    }

    /// As [`Backend::upload`], in f32.
    ///
    /// # Errors
    /// As [`Backend::alloc`].
    fn upload_f32(&self, what: MemoryKind, host: &[f32]) -> Result<Self::Buf> {
        let mut buf = self.alloc_f32(what, host.len())?;
        self.write(host, Self::all_mut(&mut buf))?;
        Ok(buf)
    }

    /// Copies a window to the host; `host` has the window's length.
    ///
    /// # Errors
    /// The device failed.
    fn download(&self, from: Self::View<'_>, host: &mut [f32]) -> Result<()>;

    /// The value of a number, waiting until the device has computed it.
    ///
    /// # Errors
    /// The device failed.
    fn read(&self, scalar: Self::Scalar) -> Result<f64>;

    /// Copies indices to the device.
    ///
    /// # Errors
    /// As [`Backend::alloc`].
    fn upload_ints(&self, host: &[u32]) -> Result<Self::IndexBuf>;

    /// Indices in `ints`.
    fn ints_len(ints: &Self::IndexBuf) -> usize;

    /// The indices `range` of `ints`, in the same memory.
    fn slice_indices(ints: &Self::IndexBuf, range: Range<usize>) -> Self::IndexBuf;

    /// The window `range` of `buf`.
    fn view(buf: &Self::Buf, range: Range<usize>) -> Self::View<'_>;

    /// The exclusive window `range` of `buf`.
    fn view_mut(buf: &mut Self::Buf, range: Range<usize>) -> Self::ViewMut<'_>;

    /// The same window, to read.
    fn shared<'a>(view: &'a Self::ViewMut<'_>) -> Self::View<'a>;

    /// The same window, for a while.
    fn reborrow<'a>(view: &'a mut Self::ViewMut<'_>) -> Self::ViewMut<'a>;

    /// Elements in `buf`.
    fn len(buf: &Self::Buf) -> usize;

    /// Splits a window in two at element `at`.
    fn split_at(view: Self::View<'_>, at: usize) -> (Self::View<'_>, Self::View<'_>);

    /// Splits an exclusive window in two at element `at`.
    fn cut_mut(view: Self::ViewMut<'_>, at: usize) -> (Self::ViewMut<'_>, Self::ViewMut<'_>);

    /// The elements `range` of a buffer, as messages reach them. On a device with several elements
    /// in a word the range is one of whole words, except at the end of the buffer: the padding of
    /// its last word travels along.
    ///
    /// # Errors
    /// The range cuts a word.
    fn comm_buffer(buf: &mut Self::Buf, range: Range<usize>) -> Result<CommBuffer<'_>>;

    /// An event that is done when all work on `buf` that compute has requested so far is: the
    /// communication thread waits for it before it reaches the buffer. None if all is done already.
    /// When a message is done with the buffer, any stream may use it.
    ///
    /// # Errors
    /// The device failed.
    fn record_event(buf: &Self::Buf) -> Result<Option<Box<dyn DeviceEvent>>>;

    /// The copies between the device and the host beside compute; none where buffers are host
    /// memory.
    ///
    /// # Errors
    /// The device failed.
    fn copies(&self) -> Result<Option<Arc<dyn ComputeOrderedCopies>>> {
        Ok(None)
    }

    /// The library by which the devices of ranks can exchange memory as [`DeviceComm`], and its
    /// version.
    ///
    /// # Errors
    /// There is none.
    fn device_comm_library() -> Result<String> {
        Err(device_memcpy::no_device_comm())
    }

    /// Announces that these parameters stay as they are until [`Backend::end_weight_reuse`] and
    /// will be multiplied several times: a backend may also keep forms of them that multiply
    /// faster. Announced again, they are as before.
    fn begin_weight_reuse(&self, _parameters: Self::View<'_>) {}

    /// Parameters may change from here on.
    fn end_weight_reuse(&self) {}

    /// Bytes that [`Backend::begin_weight_reuse`] may take, for so many elements of parameters and
    /// rows of a micro-batch.
    fn reuse_bytes(_elements: usize, _rows: usize) -> usize {
        0
    }

    /// Elements from one row to the next in a matrix of so many columns that products and kernels
    /// of classes alone read: no fewer than its columns, and more where products are faster in
    /// aligned rows.
    fn row_stride(columns: usize) -> usize {
        columns
    }

    /// The choice among algorithms of matrix products, where the device has one.
    fn product_algorithms(&self) -> Option<&dyn ProductAlgorithms> {
        None
    }

    /// Gives memory that waits for reuse back to the system: shapes are about to change.
    fn trim(&self);

    /// The count of allocated bytes, by category.
    fn ledger(&self) -> &MemoryStats;

    /// The times of its kernels.
    fn profile(&self) -> &Profile;

    /// The most bytes of a memory of its own that were taken at once; none where buffers are host
    /// memory.
    fn device_peak(&self) -> Option<usize> {
        None
    }

    /// Peak FLOP/s of a rank's device in the number format of its matmuls, dense; none if it is
    /// unknown.
    fn peak_flops(&self) -> Option<f64> {
        None
    }

    /// The whole of `buf`.
    fn all(buf: &Self::Buf) -> Self::View<'_> {
        Self::view(buf, 0..Self::len(buf))
    }

    /// The whole of `buf`, exclusively.
    fn all_mut(buf: &mut Self::Buf) -> Self::ViewMut<'_> {
        let len = Self::len(buf);
        Self::view_mut(buf, 0..len)
    }
}

/// Cuts a window into consecutive parts of the given lengths; the rest is padding.
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

/// As [`split`], for an exclusive window.
pub fn split_mut<'a, B: Backend, const N: usize>(
    view: B::ViewMut<'a>,
    lens: [usize; N],
) -> [B::ViewMut<'a>; N] {
    let mut rest = Some(view);
    lens.map(|len| {
        // `rest` is always refilled below; the option only lets the exclusive window move.
        let (head, tail) = B::cut_mut(rest.take().expect("refilled"), len);
        rest = Some(tail);
        head
    })
}
