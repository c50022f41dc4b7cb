//! Access to device memory beside compute: separate streams for messages, and for state kept on the
//! host.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::event::passed;
use super::launch_dims::Grid;
use super::libraries::check;
use super::nccl::{self, NcclComm};
use super::nvrtc::{KernelModules, Variant};
use super::pinned;
use super::pool::{DevicePool, Piece};
use super::streams;
use hpctrain_base::error::Result;
use hpctrain_device::{
    AllocatedOn, CommId, ComputeOrderedCopies, DeviceComm, DeviceCopies, DeviceEvent, DeviceSpan,
    MemoryKind, Pinned, Scratch,
};

/// The streams that work on a buffer: the one of compute, and those of the copies.
pub struct CopyStreams {
    compute: Arc<CudaStream>,
    pub(super) copies: Arc<CudaCopies>,
}

impl CopyStreams {
    /// Three streams beside `compute`.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(
        pool: &Arc<DevicePool>,
        compute: &Arc<CudaStream>,
        programs: &Arc<KernelModules>,
    ) -> Result<Arc<Self>> {
        let copies = CudaCopies::new(pool, compute, programs)?;
        Ok(Arc::new(Self { compute: compute.clone(), copies: Arc::new(copies) }))
    }

    /// The copies of messages.
    pub fn copies(&self) -> Arc<dyn DeviceCopies> {
        self.copies.clone()
    }

    /// Chooses the device for the calling thread.
    ///
    /// # Errors
    /// The device failed.
    pub fn bind(&self) -> Result<()> {
        self.copies.bind()
    }

    /// Done when the kernels queued so far are.
    ///
    /// # Errors
    /// The device failed.
    pub fn stamp(&self) -> Result<Box<dyn DeviceEvent>> {
        mark(&self.compute)
    }
}

/// A point in a stream.
struct Mark(CudaEvent);

impl DeviceEvent for Mark {
    fn is_done(&self) -> Result<bool> {
        passed(&self.0)
    }

    fn wait(&self) -> Result<()> {
        check("finish its work", self.0.synchronize())
    }
}

fn mark(stream: &CudaStream) -> Result<Box<dyn DeviceEvent>> {
    Ok(Box::new(Mark(check("mark a point in its work", stream.record_event(None))?)))
}

/// The end of the queued work; after a failure, none of it is left running.
fn all_or_nothing(stream: &CudaStream, queued: Result<()>) -> Result<Box<dyn DeviceEvent>> {
    queued.and_then(|()| mark(stream)).inspect_err(|_| {
        // If it cannot be waited for either, the device has ended.
        let _ = stream.synchronize();
    })
}

impl Pinned for pinned::Pinned<f32> {
    fn words(&mut self) -> &mut [f32] {
        self.as_mut_slice()
    }
}

/// A piece of the rank's pool.
struct CudaScratch {
    piece: Piece,
    words: usize,
}

impl Scratch for CudaScratch {
    fn span(&self) -> DeviceSpan<'_> {
        // SAFETY: the piece has so many words and lives as long as the borrow; the pool is not of
        // the stream-ordered allocator.
        unsafe { DeviceSpan::new(self.piece.pointer() as usize, self.words) }
    }
}

/// Three streams beside the one that computes, more urgent than that.
pub struct CudaCopies {
    pool: Arc<DevicePool>,
    compute: Arc<CudaStream>,
    programs: Arc<KernelModules>,
    /// Additions, and copies within the device.
    sums: Arc<CudaStream>,
    /// Copies to the host.
    out: Arc<CudaStream>,
    /// Copies from the host.
    back: Arc<CudaStream>,
}

impl CudaCopies {
    /// Streams beside `compute`.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(
        pool: &Arc<DevicePool>,
        compute: &Arc<CudaStream>,
        programs: &Arc<KernelModules>,
    ) -> Result<Self> {
        let stream = || streams::urgent(compute.context());
        Ok(Self {
            pool: pool.clone(),
            compute: compute.clone(),
            programs: programs.clone(),
            sums: stream()?,
            out: stream()?,
            back: stream()?,
        })
    }

    /// Its own streams.
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
            self.pool.take_uncounted(MemoryKind::Communication, words * size_of::<f32>())?;
        // The piece may have been a buffer that queued kernels still use.
        check("finish its work", self.compute.synchronize())?;
        Ok(Box::new(CudaScratch { piece, words }))
    }

    unsafe fn download(
        &self,
        pieces: &[AllocatedOn<'_>],
        host: *mut f32,
    ) -> Result<Box<dyn DeviceEvent>> {
        self.bind()?;
        let queue = |(span, at): &AllocatedOn<'_>| {
            // SAFETY: the caller's pieces have their places in the host memory, untouched until the
            // event.
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
        pieces: &[AllocatedOn<'_>],
    ) -> Result<Box<dyn DeviceEvent>> {
        self.bind()?;
        let queue = |(span, at): &AllocatedOn<'_>| {
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

    fn copy(&self, from: DeviceSpan<'_>, to: DeviceSpan<'_>) -> Result<()> {
        assert_eq!(from.words(), to.words(), "a copy");
        self.bind()?;
        let bytes = from.words() * size_of::<f32>();
        let stream: sys::CUstream = self.sums.cu_stream();
        // SAFETY: both spans have so many bytes.
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
            self.compute.context(),
            &self.programs,
            comm_id,
            rank,
            size,
        )?))
    }
}

impl ComputeOrderedCopies for CudaCopies {
    fn after_compute(&self) -> Result<()> {
        self.bind()?;
        let here = check("mark a point in its work", self.compute.record_event(None))?;
        for stream in self.streams() {
            check("wait for itself", stream.wait(&here))?;
        }
        Ok(())
    }

    fn before_compute(&self) -> Result<()> {
        self.bind()?;
        check("wait for itself", self.compute.join(&self.back))
    }

    fn after_downloads(&self) -> Result<()> {
        self.bind()?;
        check("wait for itself", self.compute.join(&self.out))
    }
}
