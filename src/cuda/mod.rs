//! The CUDA backend: kernels compiled at run time, matmuls by cuBLASLt, one memory pool.
//!
//! Building needs no CUDA; [`libraries`] detects a machine without the libraries. One stream
//! computes, another one uploads batches, and others carry messages, with a higher priority
//! (`streams.rs`). Nothing within a step synchronises the whole device.
//!
//! The libraries are loaded at run time: one program serves nodes with and without GPUs.
//!
//! - Kernels are CUDA C++ without CUDA's headers, in `kernels/<operation>.cu`; inline PTX is in
//!   `ptx.cuh` alone.
//! - With bf16, parameters, activations and gradients of activations are bf16; gradients of
//!   parameters, statistics, losses, fp32 master weights and optimizer state are f32.
//!   `Backend::alloc` chooses by category, `alloc_f32` is for the exceptions. The owner of a range
//!   updates its fp32 master weights, and the same kernel writes the bf16 copy.
//! - No sum depends on the order in which thread blocks run: partial sums of fixed chunks of rows
//!   are added in order; rows are sorted by token on the host, without atomics; in-place reductions
//!   of cuBLASLt are excluded. Two runs give the same bits.
//! - The host reads losses and norms later (`Backend::Scalar`): within a step it does not wait for
//!   the device until the gradients are reduced.
//! - Tensors are stored in their units without gaps, so operands may have any alignment. Kernels
//!   check addresses before they move 16 bytes at a time, cuBLASLt is given the alignment of each
//!   operand, and a bias that it could not read is copied first.
//! - Attention never stores a time × time matrix (Dao, 2023). It uses tensor cores in bf16, and
//!   plain arithmetic in f32.
//!
//! `tests/cudasim/` simulates the libraries, NCCL included: it runs kernels on the CPU and detects
//! races, overruns and missing waits. `tests/gpu/nvrtc.rs` compiles every kernel with NVIDIA's own
//! compiler. Results from hardware are in `docs/gpu-verification.md`.
//!
//! `unsafe` code calls NVIDIA's libraries, which are C, and passes addresses to kernels. Views
//! carry the lifetime of their buffer, buffers hold their pool, and events order work on other
//! streams.

mod activation;
mod attention;
mod channel_norm;
mod checksum;
mod comm_queue;
mod contrastive;
mod convolution;
mod counters;
mod cross_entropy;
mod device;
mod device_memcpy;
mod dot_interaction;
mod dropout;
mod elementwise;
mod embedding;
mod event;
mod im2col_pool;
mod index_upload;
mod ipc;
mod launch;
mod launch_dims;
pub mod libraries;
mod library_versions;
mod linear;
mod matmul;
mod matmul_desc;
mod matmul_tuning;
mod memory;
pub mod nccl;
mod norm;
pub mod nvrtc;
mod optimizer;
mod ordered_sum;
mod peak;
mod pinned;
mod placement_log;
mod pool;
mod python_packages;
mod reduce;
mod regression_loss;
mod rotary;
mod scalar;
mod softmax;
mod streams;
mod strided_copy;
#[cfg(test)]
mod suite;
mod swiglu;
mod upload_staging;

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use half::bf16;
use half::slice::HalfFloatSliceExt;

use counters::Counters;
use hpctrain_base::error::Result;
use hpctrain_device::{
    Backend, CommBuffer, ComputeOrderedCopies, DeviceCounters, DeviceEvent, KernelCost, Kernels,
    Launch, MatmulAlgorithms, MemoryKind, MemoryStats, Profile,
};
use libraries::check;
use matmul::Matmul;
use memory::Element;
use nvrtc::KernelModules;
use placement_log::PlacementLog;
use pool::{DevicePool, PoolAllocation};
use upload_staging::UploadStaging;

pub use device::{Device, devices};
pub use index_upload::CudaInts;
pub use matmul::Arithmetic;
#[cfg(test)]
pub use memory::lead;
pub use memory::{CudaBuf, View, ViewMut};
pub use pool::PoolBudget;
pub use scalar::Scalar;

/// The number formats that a rank computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// f32 everywhere.
    F32(Arithmetic),
    /// Parameters and activations are bf16; sums and master weights are f32.
    Bf16,
}

/// One rank on its GPU. Clones share memory and streams.
#[derive(Clone)]
pub struct Cuda(Arc<Inner>);

struct Inner {
    device: Device,
    placement_log: PlacementLog,
    precision: Precision,
    /// The stream of the kernels.
    compute: Arc<CudaStream>,
    pool: Arc<DevicePool>,
    kernel_modules: Arc<KernelModules>,
    copy_streams: Arc<device_memcpy::CopyStreams>,
    matmul: Matmul,
    /// The cuBLASLt workspace.
    workspace: PoolAllocation,
    scalars: Arc<scalar::Scalars>,
    counters: Arc<Counters>,
    index_uploader: Arc<index_upload::IndexUploader>,
    uploads: UploadStaging,
    profile: Profile,
}

impl Cuda {
    /// Creates a backend on `device` with `bytes` of its memory.
    ///
    /// # Errors
    /// Returns an error if a library is missing, or if the device is older than the Ampere
    /// generation or has less memory.
    pub fn new(device: &Device, bytes: usize, precision: Precision) -> Result<Self> {
        Self::with_options(device, PoolBudget { bytes, grows: false }, precision, false)
    }

    /// Creates a backend, optionally with a growing memory pool. With `placement`, each kind of
    /// buffer, kernel and matmul on the device is logged once.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Cuda::new`].
    pub fn with_options(
        device: &Device,
        memory: PoolBudget,
        precision: Precision,
        placement: bool,
    ) -> Result<Self> {
        device.check_capability()?;
        let context = device.context()?;
        // SAFETY: buffers here are never cudarc's slices, whose reuse the events would guard.
        unsafe { context.disable_event_tracking() };
        let compute = streams::low_priority(context)?;
        let copy = streams::high_priority(context)?;
        let arithmetic = match precision {
            Precision::F32(arithmetic) => arithmetic,
            Precision::Bf16 => Arithmetic::Full,
        };
        let programs = Arc::new(KernelModules::new(context, device.architecture())?);
        let matmul = Matmul::new(context, arithmetic)?;
        let pool = DevicePool::new(context, memory)?;
        let counters = Arc::<Counters>::default();
        Ok(Self(Arc::new(Inner {
            device: device.clone(),
            placement_log: PlacementLog::new(
                format!("{} at {}", device.name, device.pci),
                placement,
            ),
            precision,
            copy_streams: device_memcpy::CopyStreams::new(&pool, &compute, &programs)?,
            kernel_modules: programs,
            matmul,
            workspace: pool.allocate(MemoryKind::Workspace, matmul::WORKSPACE)?,
            scalars: scalar::Scalars::new(&pool, &compute, counters.clone())?,
            counters,
            index_uploader: index_upload::IndexUploader::new(&pool, copy, compute.clone()),
            uploads: UploadStaging::new(context),
            compute,
            pool,
            profile: Profile::default(),
        })))
    }

    /// Returns the GPU.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns the bytes of device memory of this rank, or their limit if the pool grows.
    pub fn memory(&self) -> usize {
        self.0.pool.bytes()
    }

    /// Returns the priority of the compute stream, and those of all other streams, including that of
    /// the messages of communicators.
    #[cfg(test)]
    pub fn priorities(&self) -> Result<(i32, Vec<i32>)> {
        let comm = self.0.copy_streams.copies.comm_streams()?;
        let copies = self.0.copy_streams.copies.streams();
        let others = copies.into_iter().chain([&self.0.index_uploader.copy, &comm.messages]);
        let others = others.map(|stream| streams::priority(stream)).collect::<Result<_>>()?;
        Ok((streams::priority(&self.0.compute)?, others))
    }

    /// Returns the type of parameters and activations.
    fn element(&self) -> Element {
        match self.0.precision {
            Precision::F32(_) => Element::F32,
            Precision::Bf16 => Element::Bf16,
        }
    }

    fn take(&self, what: MemoryKind, len: usize, element: Element) -> Result<CudaBuf> {
        self.0.placement_log.buffer(what, len * element.size());
        #[cfg(test)]
        if let lead @ 1.. = lead::elements(what) {
            let piece = self.0.pool.allocate(what, (lead + len) * element.size())?;
            return Ok(CudaBuf::new(piece, len, element, &self.0.copy_streams).after(lead));
        }
        Ok(CudaBuf::new(
            self.0.pool.allocate(what, len * element.size())?,
            len,
            element,
            &self.0.copy_streams,
        ))
    }

    /// Selects the device for the calling thread, whose first driver call this may be.
    fn bind(&self) -> Result<()> {
        check("be chosen", self.0.compute.context().bind_to_thread())
    }

    /// Copies within the device.
    fn copy_within(&self, x: View<'_>, y: &ViewMut<'_>) -> Result<()> {
        self.bind()?;
        self.0.counters.add_launch();
        let bytes = x.len * x.element.size();
        let stream = self.0.compute.cu_stream();
        // SAFETY: both views have `bytes` bytes, and do not overlap, since one is exclusive.
        check("copy within it", unsafe {
            result::memcpy_dtod_async(y.pointer, x.pointer, bytes, stream)
        })
    }

    /// Sets all bits to zero.
    fn zero_view(&self, y: &ViewMut<'_>) -> Result<()> {
        self.bind()?;
        self.0.counters.add_launch();
        let bytes = y.len * y.element.size();
        let stream = self.0.compute.cu_stream();
        // SAFETY: the view has `bytes` bytes.
        check("clear memory", unsafe { result::memset_d8_async(y.pointer, 0, bytes, stream) })
    }

    /// Copies bytes of the host to a view that begins at `to` and has as many.
    fn write_bytes(&self, bytes: &[u8], to: u64) -> Result<()> {
        self.bind()?;
        self.0.counters.add_launch();
        if self.0.uploads.upload(bytes, to, &self.0.compute)? {
            return Ok(());
        }
        // SAFETY: the view is as long as `bytes`, which live until the stream has finished.
        check("copy from the host", unsafe {
            result::memcpy_htod_async(to, bytes, self.0.compute.cu_stream())
        })?;
        self.synchronize()
    }

    /// Blocks until all work in the compute stream is done.
    fn synchronize(&self) -> Result<()> {
        self.0.counters.add_host_wait();
        check("finish its work", self.0.compute.synchronize())
    }

    /// Starts the profile of a kernel, which ends when the returned value is dropped.
    fn profile_launch(&self, work: KernelCost) -> Launch<'_, impl Fn()> {
        // A failure of the synchronization makes the next kernel fail too.
        self.0.profile.launch(self.element().size(), || drop(self.synchronize()), work)
    }
}

impl Kernels for Cuda {}

impl Backend for Cuda {
    const ON_HOST: bool = false;
    const WORKSPACE: usize = matmul::WORKSPACE + scalar::BYTES;

    type Buf = CudaBuf;
    type IndexBuf = CudaInts;
    type Scalar = Scalar;
    type View<'a> = View<'a>;
    type ViewMut<'a> = ViewMut<'a>;

    fn alloc(&self, what: MemoryKind, len: usize) -> Result<CudaBuf> {
        let element = match what {
            MemoryKind::Parameters | MemoryKind::Activations => self.element(),
            _ => Element::F32,
        };
        self.take(what, len, element)
    }

    fn alloc_f32(&self, what: MemoryKind, len: usize) -> Result<CudaBuf> {
        self.take(what, len, Element::F32)
    }

    fn alloc_bf16(&self, what: MemoryKind, len: usize) -> Result<CudaBuf> {
        self.take(what, len, Element::Bf16)
    }

    fn has_master_weights(&self) -> bool {
        self.element() == Element::Bf16
    }

    fn write(&self, host: &[f32], to: ViewMut<'_>) -> Result<()> {
        assert_eq!(host.len(), to.len, "values for a window");
        if host.is_empty() {
            // Language models have no features: the host need not wait for kernels.
            return Ok(());
        }
        match to.element {
            Element::F32 => self.write_bytes(bytemuck::cast_slice(host), to.pointer),
            Element::Bf16 => {
                let mut narrow = vec![bf16::ZERO; host.len()];
                narrow.convert_from_f32_slice(host);
                let words: &[u16] = narrow.reinterpret_cast();
                self.write_bytes(bytemuck::cast_slice(words), to.pointer)
            }
        }
    }

    fn download(&self, from: View<'_>, host: &mut [f32]) -> Result<()> {
        assert_eq!(host.len(), from.len, "room for a window");
        self.bind()?;
        let stream = self.0.compute.cu_stream();
        match from.element {
            Element::F32 => {
                // SAFETY: the view is as long as `host`, which is not used before the stream has
                // finished.
                check("copy to the host", unsafe {
                    result::memcpy_dtoh_async(host, from.pointer, stream)
                })?;
                self.synchronize()
            }
            Element::Bf16 => {
                let mut narrow = vec![bf16::ZERO; host.len()];
                // SAFETY: as above.
                check("copy to the host", unsafe {
                    result::memcpy_dtoh_async(&mut narrow, from.pointer, stream)
                })?;
                self.synchronize()?;
                narrow.convert_to_f32_slice(host);
                Ok(())
            }
        }
    }

    fn read(&self, scalar: Scalar) -> Result<f64> {
        scalar.read(&self.0.compute)
    }

    fn peek(&self, scalar: &Scalar) -> Result<f64> {
        scalar.read(&self.0.compute)
    }

    fn upload_indices(&self, host: &[u32]) -> Result<CudaInts> {
        self.0.index_uploader.upload(host)
    }

    fn download_indices(&self, ints: &CudaInts, host: &mut [u32]) -> Result<()> {
        assert_eq!(host.len(), ints.len(), "room for indices");
        self.bind()?;
        // SAFETY: there are as many indices as `host` has room for, and it is not used before the
        // stream has finished.
        check("copy indices to the host", unsafe {
            result::memcpy_dtoh_async(host, ints.pointer(), self.0.compute.cu_stream())
        })?;
        self.synchronize()
    }

    fn indices_len(ints: &CudaInts) -> usize {
        ints.len()
    }

    fn slice_indices(ints: &CudaInts, range: Range<usize>) -> CudaInts {
        ints.slice(range)
    }

    fn view(buf: &CudaBuf, range: Range<usize>) -> View<'_> {
        buf.view(range)
    }

    fn view_mut(buf: &mut CudaBuf, range: Range<usize>) -> ViewMut<'_> {
        buf.view_mut(range)
    }

    fn shared<'a>(view: &'a Self::ViewMut<'_>) -> Self::View<'a> {
        view.shared()
    }

    fn shorten<'short, 'long: 'short>(view: View<'long>) -> View<'short> {
        view
    }

    fn reborrow<'a>(view: &'a mut Self::ViewMut<'_>) -> Self::ViewMut<'a> {
        view.reborrow()
    }

    fn len(buf: &CudaBuf) -> usize {
        buf.len()
    }

    fn element_of(buf: &CudaBuf) -> Element {
        buf.element()
    }

    fn split_at(view: Self::View<'_>, at: usize) -> (Self::View<'_>, Self::View<'_>) {
        view.split_at(at)
    }

    fn split_at_mut(view: Self::ViewMut<'_>, at: usize) -> (Self::ViewMut<'_>, Self::ViewMut<'_>) {
        view.split_at(at)
    }

    fn comm_buffer(buf: &mut CudaBuf, range: Range<usize>) -> Result<CommBuffer<'_>> {
        buf.comm_buffer(range)
    }

    fn record_event(buf: &CudaBuf) -> Result<Option<Box<dyn DeviceEvent>>> {
        buf.record_event().map(Some)
    }

    fn device_counters(&self) -> DeviceCounters {
        self.0.counters.now()
    }

    fn used_memory(&self) -> Result<usize> {
        let (free, whole) =
            check("report its free memory", self.0.compute.context().mem_get_info())?;
        Ok(whole - free)
    }

    fn reserve_memory(&self, taken: usize) -> Result<()> {
        self.0.pool.reserve(taken)
    }

    fn copy_streams(&self) -> Result<Option<Arc<dyn ComputeOrderedCopies>>> {
        Ok(Some(Arc::new(device_memcpy::CudaCopies::new(
            &self.0.pool,
            &self.0.compute,
            &self.0.kernel_modules,
        )?)))
    }

    fn device_comm_library() -> Result<String> {
        nccl::name()
    }

    fn row_stride(columns: usize) -> usize {
        columns.next_multiple_of(matmul::ROW)
    }

    fn matmul_algorithms(&self) -> Option<&dyn MatmulAlgorithms> {
        Some(self)
    }

    fn trim(&self) {
        self.0.index_uploader.trim();
    }

    fn memory_stats(&self) -> &MemoryStats {
        &self.0.pool.stats
    }

    fn profile(&self) -> &Profile {
        &self.0.profile
    }

    fn peak_device_bytes(&self) -> Option<usize> {
        Some(self.0.pool.peak())
    }

    fn peak_flops(&self) -> Option<f64> {
        peak::flops(&self.0.device.name, self.0.precision)
    }
}
