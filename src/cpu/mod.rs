//! The CPU: host memory, vectorised kernels, a pool of threads.

mod activation;
mod attention;
mod bf16;
mod channel_norm;
mod checksum;
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
    Backend, CommBuffer, DeviceEvent, Gemm, KernelCost, Kernels, Launch, MemoryKind, MemoryStats,
    Profile,
};

pub use elementwise::add_serial;
pub use memory::{CpuBuf, CpuInts};
pub use nontemporal::copy_for_another_core;
pub use threads::Threads;

use output_init::OutputInit;

/// Peak rates of a machine, per second.
#[derive(Debug, Clone, Copy)]
pub struct Peak {
    /// Operations of fused multiply-adds on registers.
    pub flops: f64,
    /// Bytes of a triad over memory.
    pub bandwidth: f64,
}

/// The implementation of matrix multiplication: for products, affine maps and convolutions that are
/// unfolded whole. Attention and convolutions by tiles have small products of their own, in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// This program's kernels, in f32.
    Own,
    /// This program's kernels, operands rounded to bf16, sums in f32.
    OwnBf16,
    /// oneDNN, in f32.
    OneDnn,
    /// oneDNN, operands rounded to bf16, sums in f32.
    OneDnnBf16,
}

impl Products {
    /// The implementation in bf16 for this machine: oneDNN where the CPU multiplies bf16 by tiles
    /// (AMX), which this program's kernels do not use, and the library is there.
    pub fn bf16() -> Self {
        if has_amx() && onednn::find().is_ok() { Products::OneDnnBf16 } else { Products::OwnBf16 }
    }

    /// Those of oneDNN, in bf16 or f32.
    pub fn onednn(is_bf16: bool) -> Self {
        if is_bf16 { Products::OneDnnBf16 } else { Products::OneDnn }
    }

    /// Whether this machine can.
    ///
    /// # Errors
    /// The CPU does not multiply bf16, or the library is not there.
    pub fn check(self) -> Result<()> {
        if matches!(self, Products::OwnBf16 | Products::OneDnnBf16) && !bf16::is_there() {
            return Err(Error::input(
                "precision.dtype = bf16 needs a GPU, or a CPU with avx512_bf16 among its flags",
            )
            .hint("leave it out: CPUs without it compute in f32 (/proc/cpuinfo has the flags)"));
        }
        match self {
            Products::Own | Products::OwnBf16 => Ok(()),
            Products::OneDnn | Products::OneDnnBf16 => onednn::find(),
        }
    }
}

/// The CPU backend of one rank. Clones share memory pool and threads.
#[derive(Clone)]
pub struct Cpu {
    pool: Arc<memory::HostPool>,
    threads: Arc<Threads>,
    profile: Profile,
    products: Products,
    kept: Arc<packed_cache::PackedCache>,
}

impl Cpu {
    /// A backend that computes on `threads` threads, the caller's included.
    pub fn new(threads: usize) -> Self {
        Self::profiled(threads, Profile::default())
    }

    /// As [`Cpu::new`]; its kernels count in the profile of another backend.
    pub fn profiled(threads: usize, profile: Profile) -> Self {
        gemm::configure();
        let threads = Arc::new(Threads::new(threads));
        Self {
            pool: Arc::default(),
            threads,
            profile,
            products: Products::Own,
            kept: Arc::default(),
        }
    }

    /// The same backend, if it has all its threads.
    ///
    /// # Errors
    /// Returns an error if the system refused one.
    pub fn with_all_threads(self) -> Result<Self> {
        self.threads.check().map(|()| self)
    }

    /// The same backend with other products.
    ///
    /// # Errors
    /// As [`Products::check`].
    pub fn with_products(self, products: Products) -> Result<Self> {
        products.check()?;
        Ok(Self { products, ..self })
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// Floating-point operations that all threads reach in a second, and bytes that they move: the
    /// best of a few tries, which take 192 MiB of memory.
    pub fn peak(&self) -> Peak {
        Peak { flops: peak::flops(&self.threads), bandwidth: peak::bandwidth(&self.threads) }
    }

    /// Measures the FLOP/s that all threads reach in the number format of the matmuls; none where
    /// it cannot be measured: oneDNN's bf16, which may use AMX.
    pub fn measure_peak_flops(&self) -> Option<f64> {
        match self.products {
            Products::Own | Products::OneDnn => Some(peak::flops(&self.threads)),
            Products::OwnBf16 => bf16::peak(&self.threads),
            Products::OneDnnBf16 => None,
        }
    }

    /// Records a measured peak of all threads for later runs on this kind of CPU
    /// ([`Backend::peak_flops`]); returns the file.
    ///
    /// # Errors
    /// Returns an error if no cache directory of the user can be written.
    pub fn record_peak_flops(&self, flops: f64) -> Result<PathBuf> {
        recorded_peak::record(self.number_format(), flops, self.threads())
    }

    fn number_format(&self) -> &'static str {
        match self.products {
            Products::Own | Products::OneDnn => "f32",
            Products::OwnBf16 | Products::OneDnnBf16 => "bf16",
        }
    }

    /// Rounds to bf16, two to a word, as a GPU would: for memory that goes there. Words that are
    /// left over stay as they are.
    pub fn narrow(&self, x: &[f32], words: &mut [f32]) {
        elementwise::narrow(&self.threads, x, &mut bytemuck::cast_slice_mut(words)[..x.len()]);
    }

    /// Computes a product, and adds it to the bias, if there is one.
    fn product(&self, s: Gemm, a: &[f32], b: &[f32], c: &mut [f32], bias: &[f32]) -> Result<()> {
        let threads = &self.threads;
        match self.products {
            Products::Own => {
                linear::gemm(threads, s, a, b, c, bias);
                Ok(())
            }
            Products::OwnBf16 => {
                linear::gemm_bf16(threads, s, a, b, c, bias, &mut []);
                Ok(())
            }
            Products::OneDnn => onednn::multiply(threads, s, a, b, c, bias),
            Products::OneDnnBf16 => {
                let a_words = self.narrowed(a)?;
                let b_words = self.narrowed(b)?;
                let [a, b] = [(&a_words, a), (&b_words, b)].map(|(words, x)| {
                    &bytemuck::cast_slice::<f32, u16>(words.as_slice())[..x.len()]
                });
                onednn::multiply(threads, s, a, b, c, bias)
            }
        }
    }

    /// As [`Cpu::product`], of a weight, which may be there in panels.
    fn weighed(
        &self,
        s: Gemm,
        x: &[f32],
        weight: &[f32],
        y: &mut [f32],
        bias: &[f32],
    ) -> Result<()> {
        let panels = match self.products {
            Products::Own => self.kept.panels(&self.pool, &self.threads, s, weight)?,
            Products::OwnBf16 | Products::OneDnn | Products::OneDnnBf16 => None,
        };
        match panels {
            Some(panels) => {
                let y = matrix::matrix_mut(y, s.m, s.n);
                let start = OutputInit::new(s.acc, bias);
                panels.multiply(&self.threads, matrix::left(s, x), y, start);
                Ok(())
            }
            None => self.product(s, x, weight, y, bias),
        }
    }

    /// A copy in bf16, two to a word.
    fn narrowed(&self, x: &[f32]) -> Result<CpuBuf> {
        let mut words = self.pool.take(MemoryKind::Workspace, x.len().div_ceil(2))?;
        self.narrow(x, words.as_mut_slice());
        Ok(words)
    }

    /// Updated parameters go to their copy, if there is one.
    fn copied(&self, p: &[f32], copy: Option<&mut [f32]>) {
        if let Some(copy) = copy {
            elementwise::copy(&self.threads, p, copy);
        }
    }

    /// A kernel begins; it ends where the returned value is dropped.
    fn launched(&self, work: KernelCost) -> Launch<'_, impl Fn()> {
        self.profile.launch(size_of::<f32>(), || (), work)
    }
}

impl Kernels for Cpu {}

/// Whether the CPU multiplies tiles of bf16.
fn has_amx() -> bool {
    // The standard library does not tell yet; the kernel does, if it lets programs use them.
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

    fn read(&self, scalar: f64) -> Result<f64> {
        Ok(scalar)
    }

    fn upload_ints(&self, host: &[u32]) -> Result<CpuInts> {
        CpuInts::new(&self.pool, host)
    }

    fn ints_len(ints: &CpuInts) -> usize {
        ints.len()
    }

    fn slice_indices(ints: &CpuInts, range: Range<usize>) -> CpuInts {
        ints.part(range)
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

    fn reborrow<'a>(view: &'a mut Self::ViewMut<'_>) -> Self::ViewMut<'a> {
        view
    }

    fn len(buf: &CpuBuf) -> usize {
        buf.len()
    }

    fn split_at(view: Self::View<'_>, at: usize) -> (Self::View<'_>, Self::View<'_>) {
        view.split_at(at)
    }

    fn cut_mut(view: Self::ViewMut<'_>, at: usize) -> (Self::ViewMut<'_>, Self::ViewMut<'_>) {
        view.split_at_mut(at)
    }

    fn comm_buffer(buf: &mut CpuBuf, range: Range<usize>) -> Result<CommBuffer<'_>> {
        Ok(CommBuffer::Host(&mut buf.as_mut_slice()[range]))
    }

    fn record_event(_: &CpuBuf) -> Result<Option<Box<dyn DeviceEvent>>> {
        Ok(None)
    }

    fn begin_weight_reuse(&self, parameters: &[f32]) {
        self.kept.announce(parameters);
    }

    fn end_weight_reuse(&self) {
        self.kept.clear();
    }

    fn reuse_bytes(elements: usize, rows: usize) -> usize {
        packed_cache::bytes(elements, rows)
    }

    fn trim(&self) {
        self.pool.trim();
    }

    fn ledger(&self) -> &MemoryStats {
        &self.pool.ledger
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn peak_flops(&self) -> Option<f64> {
        recorded_peak::find(self.number_format(), self.threads())
    }
}
