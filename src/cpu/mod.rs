//! The CPU backend: host memory, vectorised kernels, and a thread pool.
//!
//! Vectorised kernels are safe code: plain loops, or code that is generic over the vector type of
//! the crate `pulp`. It is compiled for several vector extensions, of which one is selected at run
//! time, so one program serves all nodes.

mod activation;
mod attention;
#[cfg(any(test, not(target_arch = "x86_64")))]
mod avx512_order;
#[cfg(target_arch = "x86_64")]
mod bf16;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_bf16.rs"]
mod bf16;
mod channel_norm;
mod checksum;
mod contrastive;
mod convolution;
mod cross_entropy;
mod dot_interaction;
mod dropout;
mod elementwise;
mod embedding;
mod gemm;
mod gemm_blocking;
mod im2col_pool;
mod linear;
mod math;
mod matrix;
mod memory;
mod nontemporal;
mod norm;
mod onednn;
mod optimizer;
mod output_init;
mod packed_cache;
mod packed_matrix;
mod peak;
mod recorded_peak;
mod regression_loss;
mod rotary;
#[cfg(test)]
mod same_bits;
mod sgemm;
mod small_gemm;
mod softmax;
mod strided_copy;
#[cfg(test)]
mod suite;
mod swiglu;
mod threads;
mod transpose;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{
    Backend, CommBuffer, DeviceEvent, Element, Gemm, KernelCost, Kernels, Launch, MemoryKind,
    MemoryStats, Profile,
};

pub use elementwise::add_serial;
pub use memory::{CpuBuf, CpuInts};
pub use nontemporal::copy_for_another_core;
pub use threads::Threads;

use output_init::OutputInit;

/// Peak rates of the host, per second.
#[derive(Debug, Clone, Copy)]
pub struct Peak {
    /// FLOP/s of fused multiply-adds on registers.
    pub flops: f64,
    /// Bytes per second of a STREAM triad.
    pub bandwidth: f64,
}

/// The matmul implementation, used for matmuls, linear layers and convolutions with a whole im2col
/// buffer. Attention and tiled convolutions have separate small matmuls, in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatmulBackend {
    /// The built-in kernels, in f32.
    Builtin,
    /// The built-in kernels with operands rounded to bf16 and sums in f32.
    BuiltinBf16,
    /// oneDNN, in f32.
    OneDnn,
    /// oneDNN, with operands rounded to bf16 and sums in f32.
    OneDnnBf16,
}

impl MatmulBackend {
    /// Returns the bf16 implementation for this machine: oneDNN if it is installed and the CPU has
    /// AMX, which the built-in kernels do not use.
    pub fn bf16() -> Self {
        if has_amx() && onednn::find().is_ok() {
            MatmulBackend::OneDnnBf16
        } else {
            MatmulBackend::BuiltinBf16
        }
    }

    /// Returns oneDNN's implementation in bf16 or f32.
    pub fn onednn(is_bf16: bool) -> Self {
        if is_bf16 { MatmulBackend::OneDnnBf16 } else { MatmulBackend::OneDnn }
    }

    /// Checks that this machine can run it.
    ///
    /// # Errors
    /// Returns an error if it needs bf16 instructions that the CPU lacks, or if oneDNN is not
    /// found.
    pub fn check(self) -> Result<()> {
        if matches!(self, MatmulBackend::BuiltinBf16 | MatmulBackend::OneDnnBf16)
            && !bf16::is_supported()
        {
            return Err(Error::input(
                "precision.dtype = bf16 needs a GPU, or a CPU with avx512_bf16 among its flags",
            )
            .hint(
                "remove the setting: CPUs without this flag compute in f32 (see /proc/cpuinfo)",
            ));
        }
        match self {
            MatmulBackend::Builtin | MatmulBackend::BuiltinBf16 => Ok(()),
            MatmulBackend::OneDnn | MatmulBackend::OneDnnBf16 => onednn::find(),
        }
    }
}

/// The CPU backend of one rank. Clones share the memory pool and the threads.
#[derive(Clone)]
pub struct Cpu {
    pool: Arc<memory::HostPool>,
    threads: Arc<Threads>,
    profile: Profile,
    matmul_backend: MatmulBackend,
    packed_weights: Arc<packed_cache::PackedCache>,
}

impl Cpu {
    /// Creates a backend that computes on `threads` threads, including the caller's.
    pub fn new(threads: usize) -> Self {
        Self::with_profile(threads, Profile::default())
    }

    /// Creates a backend whose kernels are counted in the profile of another backend.
    pub fn with_profile(threads: usize, profile: Profile) -> Self {
        gemm::configure();
        let threads = Arc::new(Threads::new(threads));
        Self {
            pool: Arc::default(),
            threads,
            profile,
            matmul_backend: MatmulBackend::Builtin,
            packed_weights: Arc::default(),
        }
    }

    /// Returns the backend if all its threads could be started.
    ///
    /// # Errors
    /// Returns an error if the system refused to start a thread.
    pub fn with_all_threads(self) -> Result<Self> {
        self.threads.check().map(|()| self)
    }

    /// Returns the backend with another matmul implementation.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`MatmulBackend::check`].
    pub fn with_matmul_backend(self, products: MatmulBackend) -> Result<Self> {
        products.check()?;
        Ok(Self { matmul_backend: products, ..self })
    }

    /// Returns the number of threads that compute.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// Measures the FLOP/s and the memory bandwidth of all threads: the best of several tries,
    /// which allocate 192 MiB.
    pub fn peak(&self) -> Peak {
        Peak { flops: peak::flops(&self.threads), bandwidth: peak::bandwidth(&self.threads) }
    }

    /// Measures the FLOP/s that all threads reach in the number format of the matmuls, or returns
    /// `None` if it cannot be measured: oneDNN's bf16 may use AMX.
    pub fn measure_peak_flops(&self) -> Option<f64> {
        match self.matmul_backend {
            MatmulBackend::Builtin | MatmulBackend::OneDnn => Some(peak::flops(&self.threads)),
            MatmulBackend::BuiltinBf16 => bf16::peak(&self.threads),
            MatmulBackend::OneDnnBf16 => None,
        }
    }

    /// Records a measured peak of all threads for later runs on this kind of CPU
    /// ([`Backend::peak_flops`]) and returns the file.
    ///
    /// # Errors
    /// Returns an error if no cache directory of the user is writable.
    pub fn record_peak_flops(&self, flops: f64) -> Result<PathBuf> {
        recorded_peak::record(self.number_format(), flops, self.threads())
    }

    fn number_format(&self) -> &'static str {
        match self.matmul_backend {
            MatmulBackend::Builtin | MatmulBackend::OneDnn => "f32",
            MatmulBackend::BuiltinBf16 | MatmulBackend::OneDnnBf16 => "bf16",
        }
    }

    /// Rounds `x` to bf16, two to a word, as a GPU stores it, for memory that is copied to a GPU.
    /// The rest of `words` is unchanged.
    pub fn round_to_bf16(&self, x: &[f32], words: &mut [f32]) {
        elementwise::round_to_bf16(
            &self.threads,
            x,
            &mut bytemuck::cast_slice_mut(words)[..x.len()],
        );
    }

    /// Computes a matmul and adds the bias, if there is one.
    fn matmul(&self, s: Gemm, a: &[f32], b: &[f32], c: &mut [f32], bias: &[f32]) -> Result<()> {
        let threads = &self.threads;
        match self.matmul_backend {
            MatmulBackend::Builtin => {
                linear::gemm(threads, s, a, b, c, bias);
                Ok(())
            }
            MatmulBackend::BuiltinBf16 => {
                linear::gemm_bf16(threads, s, a, b, c, bias, &mut []);
                Ok(())
            }
            MatmulBackend::OneDnn => onednn::multiply(threads, s, a, b, c, bias),
            MatmulBackend::OneDnnBf16 => {
                let a_words = self.to_bf16_copy(a)?;
                let b_words = self.to_bf16_copy(b)?;
                let [a, b] = [(&a_words, a), (&b_words, b)].map(|(words, x)| {
                    &bytemuck::cast_slice::<f32, u16>(words.as_slice())[..x.len()]
                });
                onednn::multiply(threads, s, a, b, c, bias)
            }
        }
    }

    /// Computes a matmul with a weight, from its packed panels if they are cached.
    fn weight_matmul(
        &self,
        s: Gemm,
        x: &[f32],
        weight: &[f32],
        y: &mut [f32],
        bias: &[f32],
    ) -> Result<()> {
        let panels = match self.matmul_backend {
            MatmulBackend::Builtin => {
                self.packed_weights.panels(&self.pool, &self.threads, s, weight)?
            }
            MatmulBackend::BuiltinBf16 | MatmulBackend::OneDnn | MatmulBackend::OneDnnBf16 => None,
        };
        match panels {
            Some(panels) => {
                let y = matrix::matrix_mut(y, s.m, s.n);
                let start = OutputInit::new(s.acc, bias);
                panels.multiply(&self.threads, matrix::left(s, x), y, start);
                Ok(())
            }
            None => self.matmul(s, x, weight, y, bias),
        }
    }

    /// Returns a copy in bf16, two to a word.
    fn to_bf16_copy(&self, x: &[f32]) -> Result<CpuBuf> {
        let mut words = self.pool.take(MemoryKind::Workspace, x.len().div_ceil(2))?;
        self.round_to_bf16(x, words.as_mut_slice());
        Ok(words)
    }

    /// Copies updated parameters to `copy`, if it is given.
    fn write_copy(&self, p: &[f32], copy: Option<&mut [f32]>) {
        if let Some(copy) = copy {
            elementwise::copy(&self.threads, p, copy);
        }
    }

    /// Starts the measurement of a kernel, which ends when the returned guard is dropped.
    fn start_kernel(&self, work: KernelCost) -> Launch<'_, impl Fn()> {
        self.profile.launch(size_of::<f32>(), || (), work)
    }
}

impl Kernels for Cpu {}

/// Returns whether the CPU has AMX tiles of bf16.
fn has_amx() -> bool {
    // The standard library does not detect AMX yet; the kernel lists it if programs may use it.
    std::fs::read_to_string("/proc/cpuinfo")
        .is_ok_and(|text| text.split_ascii_whitespace().any(|flag| flag == "amx_bf16"))
}

impl Backend for Cpu {
    const ON_HOST: bool = true;
    const WORKSPACE: usize = 0;

    type Buf = CpuBuf;
    type IndexBuf = CpuInts;
    type Scalar = f64;
    type View<'a> = &'a [f32];
    type ViewMut<'a> = &'a mut [f32];

    fn alloc(&self, what: MemoryKind, len: usize) -> Result<CpuBuf> {
        self.pool.take(what, len)
    }

    fn alloc_f32(&self, what: MemoryKind, len: usize) -> Result<CpuBuf> {
        self.pool.take(what, len)
    }

    fn has_master_weights(&self) -> bool {
        false
    }

    fn write(&self, host: &[f32], to: &mut [f32]) -> Result<()> {
        to.copy_from_slice(host);
        Ok(())
    }

    fn download(&self, from: &[f32], host: &mut [f32]) -> Result<()> {
        nontemporal::copy(from, host);
        Ok(())
    }

    fn on_host<'a>(window: Self::View<'a>) -> Option<&'a [f32]> {
        Some(window)
    }

    fn on_host_mut<'a>(window: Self::ViewMut<'a>) -> Option<&'a mut [f32]> {
        Some(window)
    }

    fn read(&self, scalar: f64) -> Result<f64> {
        Ok(scalar)
    }

    fn peek(&self, scalar: &f64) -> Result<f64> {
        Ok(*scalar)
    }

    fn upload_indices(&self, host: &[u32]) -> Result<CpuInts> {
        CpuInts::new(&self.pool, host)
    }

    fn download_indices(&self, ints: &CpuInts, host: &mut [u32]) -> Result<()> {
        host.copy_from_slice(ints);
        Ok(())
    }

    fn indices_len(ints: &CpuInts) -> usize {
        ints.len()
    }

    fn slice_indices(ints: &CpuInts, range: Range<usize>) -> CpuInts {
        ints.slice(range)
    }

    fn view(buf: &CpuBuf, range: Range<usize>) -> &[f32] {
        &buf.as_slice()[range]
    }

    fn view_mut(buf: &mut CpuBuf, range: Range<usize>) -> &mut [f32] {
        &mut buf.as_mut_slice()[range]
    }

    fn shared<'a>(view: &'a Self::ViewMut<'_>) -> Self::View<'a> {
        view
    }

    fn shorten<'short, 'long: 'short>(view: &'long [f32]) -> &'short [f32] {
        view
    }

    fn reborrow<'a>(view: &'a mut Self::ViewMut<'_>) -> Self::ViewMut<'a> {
        view
    }

    fn len(buf: &CpuBuf) -> usize {
        buf.len()
    }

    fn element_of(_: &CpuBuf) -> Element {
        Element::F32
    }

    fn split_at(view: Self::View<'_>, at: usize) -> (Self::View<'_>, Self::View<'_>) {
        view.split_at(at)
    }

    fn split_at_mut(view: Self::ViewMut<'_>, at: usize) -> (Self::ViewMut<'_>, Self::ViewMut<'_>) {
        view.split_at_mut(at)
    }

    fn comm_buffer(buf: &mut CpuBuf, range: Range<usize>) -> Result<CommBuffer<'_>> {
        Ok(CommBuffer::Host(&mut buf.as_mut_slice()[range]))
    }

    fn record_event(_: &CpuBuf) -> Result<Option<Box<dyn DeviceEvent>>> {
        Ok(None)
    }

    fn begin_weight_reuse(&self, parameters: &[f32]) {
        self.packed_weights.announce(parameters);
    }

    fn end_weight_reuse(&self) {
        self.packed_weights.clear();
    }

    fn reuse_bytes(elements: usize, rows: usize) -> usize {
        packed_cache::cache_bytes(elements, rows)
    }

    fn trim(&self) {
        self.pool.trim();
    }

    fn memory_stats(&self) -> &MemoryStats {
        &self.pool.stats
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn peak_flops(&self) -> Option<f64> {
        recorded_peak::find(self.number_format(), self.threads())
    }
}
