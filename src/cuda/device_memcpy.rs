//! Copies of device memory on separate streams: for messages, and for state offloaded to the host.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaStream, result, sys};

use super::comm_queue::CommStreams;
use super::event::Mark;
use super::ipc::{self, IpcExport};
use super::launch_dims::Grid;
use super::libraries::check;
use super::nccl::{self, NcclComm};
use super::nvrtc::{KernelModules, Variant};
use super::ordered_sum::OrderedSumKernel;
use super::pinned;
use super::pool::{DevicePool, PoolAllocation};
use super::streams;
use hpctrain_base::error::Result;
use hpctrain_device::{
    CommId, ComputeOrderedCopies, DeviceComm, DeviceCopies, DeviceEvent, DeviceSpan,
    ExportedMemory, MemoryKind, OrderedSum, Pinned, Scratch, SpanAtOffset,
};

/// The streams that use a buffer: the compute stream and the copy streams.
pub struct CopyStreams {
    compute: Arc<CudaStream>,
    pub(super) copies: Arc<CudaCopies>,
}

impl CopyStreams {
    /// Creates three copy streams besides `compute`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn new(
        pool: &Arc<DevicePool>,
        compute: &Arc<CudaStream>,
        programs: &Arc<KernelModules>,
    ) -> Result<Arc<Self>> {
        let copies = CudaCopies::new(pool, compute, programs)?;
        Ok(Arc::new(Self { compute: compute.clone(), copies: Arc::new(copies) }))
    }

    /// Returns the copy streams.
    pub fn copies(&self) -> Arc<dyn DeviceCopies> {
        self.copies.clone()
    }

    /// Selects the device for the calling thread.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn bind(&self) -> Result<()> {
        self.copies.bind()
    }

    /// Returns an event that completes when the kernels queued so far are done.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn record_event(&self) -> Result<Box<dyn DeviceEvent>> {
        mark(&self.compute)
    }
}

fn mark(stream: &CudaStream) -> Result<Box<dyn DeviceEvent>> {
    Ok(Box::new(Mark(check("record an event", stream.record_event(None))?)))
}

/// Returns an event at the end of the queued work. After a failure, waits until none of it is
/// running.
fn all_or_nothing(stream: &CudaStream, queued: Result<()>) -> Result<Box<dyn DeviceEvent>> {
    queued.and_then(|()| mark(stream)).inspect_err(|_| {
        // If waiting for it fails too, the device has failed.
        let _ = stream.synchronize();
    })
}

impl Pinned for pinned::Pinned<f32> {
    fn words(&mut self) -> &mut [f32] {
        self.as_mut_slice()
    }
}

/// Scratch memory from the rank's pool.
struct CudaScratch {
    piece: PoolAllocation,
    words: usize,
}

impl Scratch for CudaScratch {
    fn span(&self) -> DeviceSpan<'_> {
        // SAFETY: the piece has `words` words and lives as long as the borrow; the pool does not
        // use the stream-ordered allocator.
        unsafe { DeviceSpan::new(self.piece.pointer() as usize, self.words) }
    }
}

/// Three streams with a higher priority than the compute stream.
pub struct CudaCopies {
    pool: Arc<DevicePool>,
    compute: Arc<CudaStream>,
    programs: Arc<KernelModules>,
    /// The stream of additions, ordered sums and copies within the device.
    sums: Arc<CudaStream>,
    /// The stream of copies to the host.
    out: Arc<CudaStream>,
    /// The stream of copies from the host.
    back: Arc<CudaStream>,
    /// The streams of communicators, once one is created.
    comm_streams: OnceLock<Arc<CommStreams>>,
}

impl CudaCopies {
    /// Creates the streams.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn new(
        pool: &Arc<DevicePool>,
        compute: &Arc<CudaStream>,
        programs: &Arc<KernelModules>,
    ) -> Result<Self> {
        let stream = || streams::high_priority(compute.context());
        Ok(Self {
            pool: pool.clone(),
            compute: compute.clone(),
            programs: programs.clone(),
            sums: stream()?,
            out: stream()?,
            back: stream()?,
            comm_streams: OnceLock::new(),
        })
    }

    /// Returns the streams of communicators.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn comm_streams(&self) -> Result<Arc<CommStreams>> {
        if let Some(streams) = self.comm_streams.get() {
            return Ok(streams.clone());
        }
        let streams = Arc::new(CommStreams::new(&self.compute)?);
        Ok(self.comm_streams.get_or_init(|| streams).clone())
    }

    /// Returns the three streams.
    pub(super) fn streams(&self) -> [&Arc<CudaStream>; 3] {
        [&self.sums, &self.out, &self.back]
    }

    fn bind(&self) -> Result<()> {
        check("be chosen", self.compute.context().bind_to_thread())
    }
}

impl DeviceCopies for CudaCopies {
    fn pinned(&self, words: usize) -> Result<Box<dyn Pinned>> {
        Ok(Box::new(pinned::Pinned::new(self.compute.context(), words)?))
    }

    fn scratch(&self, words: usize) -> Result<Box<dyn Scratch>> {
        let piece =
            self.pool.allocate_uncounted(MemoryKind::Communication, words * size_of::<f32>())?;
        // The piece may have been a buffer that queued kernels still use. An event in a stream is
        // not enough, since MPI writes to the piece without one. The host does not wait for kernels
        // that compute queues meanwhile.
        self.bind()?;
        mark(&self.compute)?.wait()?;
        Ok(Box::new(CudaScratch { piece, words }))
    }

    unsafe fn download(
        &self,
        pieces: &[SpanAtOffset<'_>],
        host: *mut f32,
    ) -> Result<Box<dyn DeviceEvent>> {
        self.bind()?;
        let queue = |(span, at): &SpanAtOffset<'_>| {
            // SAFETY: the caller guarantees that the pieces lie in the host memory, which nothing
            // touches until the event.
            let to = unsafe { std::slice::from_raw_parts_mut(host.add(*at), span.words()) };
            // SAFETY: the span has as many words, which live until the event as the caller
            // promises.
            let queued = unsafe {
                result::memcpy_dtoh_async(to, span.address() as u64, self.out.cu_stream())
            };
            check("copy a message to the host", queued)
        };
        all_or_nothing(&self.out, pieces.iter().try_for_each(queue))
    }

    unsafe fn upload(
        &self,
        host: *const f32,
        pieces: &[SpanAtOffset<'_>],
    ) -> Result<Box<dyn DeviceEvent>> {
        self.bind()?;
        let queue = |(span, at): &SpanAtOffset<'_>| {
            // SAFETY: as in `download`.
            let from = unsafe { std::slice::from_raw_parts(host.add(*at), span.words()) };
            // SAFETY: as in `download`.
            let queued = unsafe {
                result::memcpy_htod_async(span.address() as u64, from, self.back.cu_stream())
            };
            check("copy a message from the host", queued)
        };
        all_or_nothing(&self.back, pieces.iter().try_for_each(queue))
    }

    fn add(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()> {
        assert_eq!(from.words(), to.words(), "a sum");
        self.bind()?;
        let variant = Variant { source: "add.cu", narrow: false, head: None };
        let function = self.programs.function(variant, "add_f32", 0)?;
        let (from, to, count) = (from.address() as u64, to.address() as u64, from.words() as i64);
        let mut args: [*mut c_void; 3] = [
            std::ptr::from_ref(&from).cast_mut().cast(),
            std::ptr::from_ref(&to).cast_mut().cast(),
            std::ptr::from_ref(&count).cast_mut().cast(),
        ];
        let Grid { blocks, threads, shared } = Grid::over(count as usize / 4 + 1);
        let stream = self.sums.cu_stream();
        // SAFETY: the kernel takes two addresses and a count of f32 elements, which both spans
        // have.
        let queued = unsafe {
            result::launch_kernel(
                function.cu_function(),
                blocks,
                threads,
                shared,
                stream,
                &mut args,
            )
        };
        check("add a message", queued)
    }

    fn sum_in_order(&self, sums: &[OrderedSum<'_>]) -> Result<Box<dyn DeviceEvent>> {
        self.bind()?;
        let kernel = OrderedSumKernel::load(&self.programs)?;
        all_or_nothing(&self.sums, sums.iter().try_for_each(|&sum| kernel.launch(&self.sums, sum)))
    }

    fn copy(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()> {
        assert_eq!(from.words(), to.words(), "a copy");
        self.bind()?;
        let bytes = from.words() * size_of::<f32>();
        let stream: sys::CUstream = self.sums.cu_stream();
        // SAFETY: both spans have `bytes` bytes.
        let queued = unsafe {
            result::memcpy_dtod_async(to.address() as u64, from.address() as u64, bytes, stream)
        };
        check("copy a message within it", queued)
    }

    fn mark(&self) -> Result<Box<dyn DeviceEvent>> {
        mark(&self.sums)
    }

    fn comm_id(&self) -> Result<CommId> {
        nccl::comm_id()
    }

    fn init_rank(&self, comm_id: &CommId, rank: usize, size: usize) -> Result<Box<dyn DeviceComm>> {
        Ok(Box::new(NcclComm::init_rank(
            self.comm_streams()?,
            &self.programs,
            comm_id,
            rank,
            size,
        )?))
    }

    fn export_memory(&self, ranks: usize) -> Result<Box<dyn ExportedMemory>> {
        let mailbox = self.scratch(ipc::mailbox_words(ranks))?;
        Ok(Box::new(IpcExport::new(&self.pool, self.comm_streams()?, &self.programs, mailbox)?))
    }

    fn free_memory(&self) -> Result<usize> {
        self.bind()?;
        Ok(check("report its free memory", self.compute.context().mem_get_info())?.0)
    }
}

impl ComputeOrderedCopies for CudaCopies {
    fn after_compute(&self) -> Result<()> {
        self.bind()?;
        let here = check("record an event", self.compute.record_event(None))?;
        for stream in self.streams() {
            check("wait for another stream", stream.wait(&here))?;
        }
        Ok(())
    }

    fn before_compute(&self) -> Result<()> {
        self.bind()?;
        check("wait for another stream", self.compute.join(&self.back))
    }

    fn after_downloads(&self) -> Result<()> {
        self.bind()?;
        check("wait for another stream", self.compute.join(&self.out))
    }
}
