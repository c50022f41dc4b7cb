//! The CPU: host memory, vectorised kernels, a pool of threads.

mod activation;
mod attention;
mod channel;
mod classifier;
mod convolution;
mod dropout;
mod elementwise;
mod embedding;
mod kept;
mod linear;
mod math;
mod matrix;
mod memory;
mod norm;
mod onednn;
mod optimizer;
mod pairs;
mod panels;
mod peak;
mod product;
mod regression;
mod rotary;
mod softmax;
mod stream;
mod swiglu;
mod threads;
mod transpose;
mod window;

use std::ops::Range;
use std::sync::Arc;

use super::unfolded;
use super::{
    Activation, AdamW, Attention, Backend, Channels, Columns, Convolution, CrossEntropy, Dropout, Elements, Event,
    Gemm, Kernels, Launch, Ledger, Linear, LossWeights, MemoryKind, Norm, Pairs, Profile, Reach, Regression, Rotary,
    Sgd, Window, Work,
};
use crate::error::{Error, Result};

pub use elementwise::add_serial;
pub use memory::{CpuBuf, CpuInts};
pub use threads::Threads;

/// Peak rates of a machine, per second.
#[derive(Debug, Clone, Copy)]
pub struct Peak {
    /// Operations of fused multiply-adds on registers.
    pub flops: f64,
    /// Bytes of a triad over memory.
    pub bandwidth: f64,
}

/// The implementation of matrix multiplication: for products, affine maps and convolutions that are unfolded whole.
/// Attention and convolutions by tiles have small products of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// This program's kernels, in f32.
    Own,
    /// oneDNN, in f32.
    OneDnn,
    /// oneDNN, operands rounded to bf16, sums in f32.
    Bf16,
}

impl Products {
    /// Whether this machine can.
    ///
    /// # Errors
    /// The CPU does not multiply bf16, or the library is not there.
    pub fn check(self) -> Result<()> {
        if self == Products::Bf16 && !multiplies_bf16() {
            return Err(Error::input(
                "precision.compute = bf16 needs a GPU, or a CPU with avx512_bf16 among its flags",
            )
            .hint("leave it out: CPUs without it compute in f32 (/proc/cpuinfo has the flags)"));
        }
        if self == Products::Own { Ok(()) } else { onednn::find() }
    }
}

/// The CPU backend of one rank. Clones share memory pool and threads.
#[derive(Clone)]
pub struct Cpu {
    pool: Arc<memory::Pool>,
    threads: Arc<Threads>,
    profile: Profile,
    products: Products,
    kept: Arc<kept::Kept>,
}

impl Cpu {
    /// A backend that computes on `threads` threads, the caller's included.
    pub fn new(threads: usize) -> Self {
        Self::profiled(threads, Profile::default())
    }

    /// As [`Cpu::new`]; its kernels count in the profile of another backend.
    pub fn profiled(threads: usize, profile: Profile) -> Self {
        product::configure();
        let threads = Arc::new(Threads::new(threads));
        Self { pool: Arc::default(), threads, profile, products: Products::Own, kept: Arc::default() }
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

    /// Floating-point operations that all threads reach in a second, and bytes that they move: the best of a few tries,
    /// which take 192 MiB of memory.
    pub fn peak(&self) -> Peak {
        Peak { flops: peak::flops(&self.threads), bandwidth: peak::bandwidth(&self.threads) }
    }

    /// Rounds to bf16, two to a word, as a GPU would: for memory that goes there. Words that are left over stay as they
    /// are.
    pub fn narrow(&self, x: &[f32], words: &mut [f32]) {
        elementwise::narrow(&self.threads, x, &mut bytemuck::cast_slice_mut(words)[..x.len()]);
    }

    fn product(&self, s: Gemm, a: &[f32], b: &[f32], c: &mut [f32]) -> Result<()> {
        let threads = &self.threads;
        match self.products {
            Products::Own => {
                linear::gemm(threads, s, a, b, c);
                Ok(())
            }
            Products::OneDnn => onednn::multiply(threads, s, a, b, c),
            Products::Bf16 => {
                let (a_words, b_words) = (self.narrowed(a)?, self.narrowed(b)?);
                let [a, b] = [(&a_words, a), (&b_words, b)]
                    .map(|(words, x)| &bytemuck::cast_slice::<f32, u16>(words.as_slice())[..x.len()]);
                onednn::multiply(threads, s, a, b, c)
            }
        }
    }

    /// As [`Cpu::product`], of a weight, which may be there in panels.
    fn weighed(&self, s: Gemm, x: &[f32], weight: &[f32], y: &mut [f32]) -> Result<()> {
        let panels = match self.products {
            Products::Own => self.kept.panels(&self.pool, &self.threads, s, weight)?,
            Products::OneDnn | Products::Bf16 => None,
        };
        match panels {
            Some(panels) => {
                panels.multiply(&self.threads, matrix::left(s, x), matrix::matrix_mut(y, s.m, s.n), s.acc);
                Ok(())
            }
            None => self.product(s, x, weight, y),
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
    fn launched(&self, work: Work) -> Launch<'_, impl Fn()> {
        self.profile.launch(size_of::<f32>(), || (), work)
    }
}

/// Whether the CPU has instructions for sums of products of bf16.
fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

impl Backend for Cpu {
    const ON_HOST: bool = true;
    const WORKSPACE: usize = 0;

    type Buf = CpuBuf;
    type Ints = CpuInts;
    type Scalar = f64;
    type View<'a> = &'a [f32];
    type ViewMut<'a> = &'a mut [f32];

    fn alloc(&self, what: MemoryKind, len: usize) -> Result<CpuBuf> {
        self.pool.take(what, len)
    }

    fn alloc_f32(&self, what: MemoryKind, len: usize) -> Result<CpuBuf> {
        self.pool.take(what, len)
    }

    fn computes_narrow(&self) -> bool {
        false
    }

    fn write(&self, host: &[f32], to: &mut [f32]) -> Result<()> {
        to.copy_from_slice(host);
        Ok(())
    }

    fn download(&self, from: &[f32], host: &mut [f32]) -> Result<()> {
        stream::copy(from, host);
        Ok(())
    }

    fn read(&self, scalar: f64) -> Result<f64> {
        Ok(scalar)
    }

    fn upload_ints(&self, host: &[u32]) -> Result<CpuInts> {
        CpuInts::new(&self.pool, host)
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

    fn cut(view: Self::View<'_>, at: usize) -> (Self::View<'_>, Self::View<'_>) {
        view.split_at(at)
    }

    fn cut_mut(view: Self::ViewMut<'_>, at: usize) -> (Self::ViewMut<'_>, Self::ViewMut<'_>) {
        view.split_at_mut(at)
    }

    fn reach(buf: &mut CpuBuf, range: Range<usize>) -> Result<Reach<'_>> {
        Ok(Reach::Host(&mut buf.as_mut_slice()[range]))
    }

    fn stamp(_: &CpuBuf) -> Result<Option<Box<dyn Event>>> {
        Ok(None)
    }

    fn reuse(&self, parameters: &[f32]) {
        self.kept.announce(parameters);
    }

    fn end_reuse(&self) {
        self.kept.clear();
    }

    fn reuse_bytes(elements: usize, rows: usize) -> usize {
        kept::bytes(elements, rows)
    }

    fn trim(&self) {
        self.pool.trim();
    }

    fn ledger(&self) -> &Ledger {
        &self.pool.ledger
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }
}

impl Kernels for Cpu {
    fn zero(&self, y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::zero(y.len()));
        elementwise::zero(&self.threads, y);
        Ok(())
    }

    fn copy(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::copy(x.len()));
        elementwise::copy(&self.threads, x, y);
        Ok(())
    }

    fn add(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::add(x.len()));
        elementwise::add(&self.threads, x, y);
        Ok(())
    }

    fn sum(&self, x: &[f32]) -> Result<f64> {
        let _launch = self.launched(Work::sum(x.len()));
        Ok(x.iter().copied().map(f64::from).sum())
    }

    fn sum_squares(&self, x: &[f32]) -> Result<f64> {
        let _launch = self.launched(Work::sum(x.len()));
        Ok(elementwise::sum_squares(&self.threads, x))
    }

    fn gemm(&self, shape: Gemm, a: &[f32], b: &[f32], c: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::gemm(shape));
        self.product(shape, a, b, c)
    }

    fn linear(&self, shape: Linear, x: &[f32], weight: &[f32], bias: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::linear(shape, bias.len()));
        linear::spread(&self.threads, bias, y);
        self.weighed(linear::forward(shape, bias), x, weight, y)
    }

    fn linear_backward_input(&self, shape: Linear, dy: &[f32], weight: &[f32], dx: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::linear_backward_input(shape));
        self.weighed(linear::backward_input(shape), dy, weight, dx)
    }

    fn linear_backward_weight(
        &self,
        shape: Linear,
        dy: &[f32],
        x: &[f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
        add: bool,
    ) -> Result<()> {
        let _launch = self.launched(Work::linear_backward_weight(shape, dbias.len(), add));
        if self.products == Products::Own {
            linear::backward_weight(&self.threads, shape, dy, x, dweight, dbias, add);
            return Ok(());
        }
        self.product(linear::weight_gradient(shape, add), dy, x, dweight)?;
        matrix::add_rows(&self.threads, dy, shape.outputs, dbias);
        Ok(())
    }

    fn embedding(&self, tokens: &CpuInts, token_table: &[f32], position_table: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::embedding(y.len(), position_table.len()));
        embedding::forward(&self.threads, tokens, token_table, position_table, y);
        Ok(())
    }

    fn embedding_backward(
        &self,
        tokens: &CpuInts,
        dy: &[f32],
        dtoken_table: &mut [f32],
        dposition_table: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::embedding_backward(dy.len(), dposition_table.len()));
        embedding::backward(&self.threads, tokens, dy, dtoken_table, dposition_table);
        Ok(())
    }

    fn norm(
        &self,
        shape: Norm,
        x: &[f32],
        weight: &[f32],
        bias: &[f32],
        y: &mut [f32],
        stats: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::norm(shape, bias.len()));
        norm::forward(&self.threads, shape, x, weight, bias, y, stats);
        Ok(())
    }

    fn add_norm(
        &self,
        shape: Norm,
        x: &[f32],
        stream: &mut [f32],
        weight: &[f32],
        bias: &[f32],
        y: &mut [f32],
        stats: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::add_norm(shape, bias.len()));
        norm::add_forward(&self.threads, shape, x, stream, weight, bias, y, stats);
        Ok(())
    }

    fn norm_backward(
        &self,
        shape: Norm,
        dy: &[f32],
        x: &[f32],
        weight: &[f32],
        stats: &[f32],
        dx: &mut [f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::norm_backward(shape, dbias.len()));
        norm::backward(&self.threads, shape, dy, x, weight, stats, dx, dweight, dbias);
        Ok(())
    }

    fn attention(&self, shape: Attention, qkv: &[f32], y: &mut [f32], lse: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::attention(shape));
        attention::forward(&self.threads, shape, qkv, y, lse);
        Ok(())
    }

    fn attention_backward(
        &self,
        shape: Attention,
        qkv: &[f32],
        y: &[f32],
        lse: &[f32],
        dy: &[f32],
        dqkv: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::attention_backward(shape));
        attention::backward(&self.threads, shape, qkv, y, lse, dy, dqkv);
        Ok(())
    }

    fn rotary(&self, shape: Rotary, table: &[f32], x: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::rotary(shape.batch * shape.time * shape.heads * shape.head_width));
        rotary::rotary(&self.threads, shape, table, x);
        Ok(())
    }

    fn swiglu(&self, width: usize, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::swiglu(y.len()));
        swiglu::forward(&self.threads, width, x, y);
        Ok(())
    }

    fn swiglu_backward(&self, width: usize, x: &mut [f32], dy: &[f32]) -> Result<()> {
        let _launch = self.launched(Work::swiglu_backward(dy.len()));
        swiglu::backward(&self.threads, width, x, dy);
        Ok(())
    }

    fn activation(&self, f: Activation, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::activation(f, x.len()));
        activation::forward(&self.threads, f, x, y);
        Ok(())
    }

    fn activation_backward(&self, f: Activation, x: &[f32], dy: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::activation_backward(f, x.len()));
        activation::backward(&self.threads, f, x, dy);
        Ok(())
    }

    fn softmax(&self, width: usize, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::softmax(x.len()));
        softmax::forward(&self.threads, width, x, y);
        Ok(())
    }

    fn softmax_backward(&self, width: usize, y: &[f32], dy: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::softmax_backward(y.len()));
        softmax::backward(&self.threads, width, y, dy);
        Ok(())
    }

    fn unfold(&self, window: Window, first: usize, channels: usize, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::unfold(window, channels));
        window::unfold(&self.threads, window, first, channels, x, y);
        Ok(())
    }

    fn fold(&self, window: Window, first: usize, channels: usize, dy: &[f32], dx: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::fold(window, channels));
        window::fold(&self.threads, window, first, channels, dy, dx);
        Ok(())
    }

    fn convolve(&self, shape: Convolution, x: &[f32], weight: &[f32], bias: &[f32], y: &mut [f32]) -> Result<()> {
        if !convolution::suits(shape) {
            return unfolded::forward(self, shape, x, weight, bias, y);
        }
        let _launch = self.launched(Work::convolve(shape, bias.len()));
        convolution::forward(&self.threads, shape, x, weight, bias, y);
        Ok(())
    }

    fn convolve_backward_weight(
        &self,
        shape: Convolution,
        dy: &[f32],
        x: &[f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
    ) -> Result<()> {
        if !convolution::suits(shape) {
            return unfolded::backward_weight(self, shape, dy, x, dweight, dbias);
        }
        let _launch = self.launched(Work::convolve_backward_weight(shape, dbias.len()));
        let mut partial = self.alloc(MemoryKind::Activations, convolution::partial(shape))?;
        convolution::backward_weight(&self.threads, shape, dy, x, partial.as_mut_slice(), dweight, dbias);
        Ok(())
    }

    fn convolve_backward_input(&self, shape: Convolution, dy: &[f32], weight: &[f32], dx: &mut [f32]) -> Result<()> {
        if !convolution::suits(shape) {
            return unfolded::backward_input(self, shape, dy, weight, dx);
        }
        let _launch = self.launched(Work::convolve_backward_input(shape));
        convolution::backward_input(&self.threads, shape, dy, weight, dx);
        Ok(())
    }

    fn max_pool(&self, window: Window, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::pool("max pool", window));
        window::max_pool(&self.threads, window, x, y);
        Ok(())
    }

    fn max_pool_backward(&self, window: Window, x: &[f32], dy: &[f32], dx: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::max_pool_backward(window));
        window::max_pool_backward(&self.threads, window, x, dy, dx);
        Ok(())
    }

    fn average_pool(&self, window: Window, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::pool("average pool", window));
        window::average_pool(&self.threads, window, x, y);
        Ok(())
    }

    fn average_pool_backward(&self, window: Window, dy: &[f32], dx: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::pool("average pool, backward", window));
        window::average_pool_backward(&self.threads, window, dy, dx);
        Ok(())
    }

    fn copy_columns(&self, shape: Columns, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::copy_columns(shape));
        elementwise::copy_columns(&self.threads, shape, x, y);
        Ok(())
    }

    fn pair_products(&self, shape: Pairs, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::pair_products(shape));
        pairs::forward(&self.threads, shape, x, y);
        Ok(())
    }

    fn pair_products_backward(&self, shape: Pairs, x: &[f32], dy: &[f32], dx: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::pair_products_backward(shape));
        pairs::backward(&self.threads, shape, x, dy, dx);
        Ok(())
    }

    fn channel_moments(&self, shape: Channels, x: &[f32], moments: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::channel_sums("channels, sums", shape, 1));
        channel::moments(&self.threads, shape, x, moments);
        Ok(())
    }

    fn channel_norm(
        &self,
        shape: Channels,
        x: &[f32],
        stats: &[f32],
        weight: &[f32],
        bias: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::channel_norm("channels, norm", shape, 2));
        channel::normalise(&self.threads, shape, x, stats, weight, bias, y);
        Ok(())
    }

    fn channel_norm_sums(&self, shape: Channels, x: &[f32], dy: &[f32], stats: &[f32], sums: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::channel_sums("channels, gradient's sums", shape, 2));
        channel::backward_sums(&self.threads, shape, x, dy, stats, sums);
        Ok(())
    }

    fn channel_norm_backward(
        &self,
        shape: Channels,
        x: &[f32],
        dy: &[f32],
        stats: &[f32],
        weight: &[f32],
        means: &[f32],
        dx: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::channel_norm("channels, norm backward", shape, 3));
        channel::backward(&self.threads, shape, x, dy, stats, weight, means, dx);
        Ok(())
    }

    fn dropout(&self, mask: Dropout, x: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::dropout(x.len()));
        dropout::dropout(&self.threads, mask, x);
        Ok(())
    }

    fn cross_entropy(
        &self,
        shape: CrossEntropy,
        logits: &mut [f32],
        targets: &CpuInts,
        weights: LossWeights<&[f32]>,
        losses: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::cross_entropy(shape, weights.classes.len() + weights.rows.len()));
        classifier::cross_entropy(&self.threads, shape, logits, targets, weights, losses);
        Ok(())
    }

    fn hits(&self, classes: usize, k: usize, logits: &[f32], targets: &CpuInts, hits: &mut [f32]) -> Result<()> {
        let _launch = self.launched(Work::hits(logits.len(), hits.len()));
        classifier::hits(&self.threads, classes, k, logits, targets, hits);
        Ok(())
    }

    fn regression(
        &self,
        shape: Regression,
        predictions: &mut [f32],
        targets: &[f32],
        weights: &[f32],
        losses: &mut [f32],
    ) -> Result<()> {
        let _launch = self.launched(Work::regression(shape, weights.len()));
        regression::regression(&self.threads, shape, predictions, targets, weights, losses);
        Ok(())
    }

    fn adamw(
        &self,
        update: AdamW,
        grad: &[f32],
        m: &mut [f32],
        v: &mut [f32],
        p: &mut [f32],
        copy: Option<&mut [f32]>,
    ) -> Result<()> {
        let _launch = self.launched(Work::adamw(grad.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        optimizer::adamw(&self.threads, update, grad, m, v, p);
        self.copied(p, copy);
        Ok(())
    }

    fn adamw_step_squares(&self, update: AdamW, grad: &[f32], m: &[f32], v: &[f32], p: &[f32]) -> Result<f64> {
        let _launch = self.launched(Work::adamw_step_squares(grad.len()));
        Ok(optimizer::adamw_step_squares(&self.threads, update, grad, m, v, p))
    }

    fn sgd(&self, update: Sgd, grad: &[f32], m: &mut [f32], p: &mut [f32], copy: Option<&mut [f32]>) -> Result<()> {
        let _launch = self.launched(Work::sgd(grad.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        optimizer::sgd(&self.threads, update, grad, m, p);
        self.copied(p, copy);
        Ok(())
    }

    fn approach(&self, rate: f32, x: &[f32], y: &mut [f32], copy: Option<&mut [f32]>) -> Result<()> {
        let _launch = self.launched(Work::approach(x.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        optimizer::approach(&self.threads, rate, x, y);
        self.copied(y, copy);
        Ok(())
    }

    fn elements(
        &self,
        update: Elements,
        grad: &[f32],
        first: &mut [f32],
        second: &mut [f32],
        p: &mut [f32],
        copy: Option<&mut [f32]>,
    ) -> Result<()> {
        let _launch = self.launched(Work::elements(update, grad.len(), copy.as_ref().map_or(0, |copy| copy.len())));
        optimizer::elements(&self.threads, update, grad, first, second, p);
        self.copied(p, copy);
        Ok(())
    }
}
