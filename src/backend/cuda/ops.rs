//! Operations as launches of kernels and products.

use super::launch::{Arg, Grid};
use super::matmul::{Epilogue, Matrix, Product};
use super::memory::{Element, View, ViewMut};
use super::{Cuda, CudaBuf, CudaInts, Scalar};
use crate::backend::{
    Activation, AdamW, Attention, Backend, Channels, Columns, CrossEntropy, Deviation, Dropout, Elements, Elementwise,
    Gemm, Kernels, Linear, LossWeights, MemoryKind, Norm, Pairs, Regression, Rotary, Sgd, Window, Work,
};
use crate::error::{Error, Result};

/// Rows that are added before the sums of chunks are: the order depends on nothing else.
const CHUNK_ROWS: usize = 128;

/// The kernels that take a norm back in one pass, with the packs of a row that a lane has in each.
const IN_ONE: [(usize, &str); 4] =
    [(1, "norm_backward_1"), (2, "norm_backward_2"), (3, "norm_backward_3"), (4, "norm_backward_4")];

/// Elements that one block of `sum.cuh` adds.
const SUM_CHUNK: usize = 16_384;

/// Bytes of logits that a block of `cross_entropy.cu` keeps in shared memory at most: two blocks fit a multiprocessor of 228 KiB,
/// one those of 100 KiB and more.
const KEPT_ROW: usize = 99 << 10;

/// Whether a product can keep the input of its GELU there: cuBLASLt does so in bf16, in rows that are aligned.
fn keeps_gelu(width: usize, kept: View<'_>) -> bool {
    kept.element == Element::Bf16 && width.is_multiple_of(8) && kept.pointer.is_multiple_of(16)
}

fn matrix(view: View<'_>) -> Matrix {
    Matrix { pointer: view.pointer, element: view.element }
}

/// The names of a function's kernel and of its backward's.
fn activation(f: Activation) -> (&'static str, &'static str) {
    match f {
        Activation::Relu => ("relu", "relu_backward"),
        Activation::Gelu => ("gelu", "gelu_backward"),
        Activation::Silu => ("silu", "silu_backward"),
        Activation::Tanh => ("hyperbolic", "hyperbolic_backward"),
        Activation::Sigmoid => ("sigmoid", "sigmoid_backward"),
    }
}

/// A window as the kernels take it.
fn numbers(w: Window) -> [Arg; 12] {
    let [high, wide] = w.places();
    let Window { batch, height, width, channels, size, stride, padding } = w;
    let pairs = [size, stride, padding].concat();
    let all = [batch, height, width, channels, pairs[0], pairs[1], pairs[2], pairs[3], pairs[4], pairs[5], high, wide];
    all.map(Arg::from)
}

/// Channels as the kernels take them.
fn channels(s: Channels) -> [Arg; 4] {
    [s.samples, s.places, s.channels, s.groups].map(Arg::from)
}

fn long(len: usize) -> Arg {
    Arg::Long(len as i64)
}

impl Cuda {
    fn product(&self, shape: Gemm, a: View<'_>, b: View<'_>, c: &ViewMut<'_>, epilogue: Epilogue) -> Result<()> {
        assert!(a.len == shape.m * shape.k && b.len == shape.k * shape.n && c.len == shape.m * shape.n, "{shape:?}");
        self.0.journal.product(shape);
        let product = Product { shape, a: matrix(a), b: matrix(b), c: matrix(c.shared()), epilogue };
        self.0.matmul.run(&product, self.0.workspace.pointer(), self.0.compute.cu_stream().cast())
    }

    /// `out += Σ` over rows of `x`.
    fn add_columns(&self, x: View<'_>, rows: usize, out: &ViewMut<'_>) -> Result<()> {
        let width = out.len;
        let chunks = rows.div_ceil(CHUNK_ROWS);
        let partial = self.alloc_f32(MemoryKind::Activations, chunks * width)?;
        let partial = Self::all(&partial);
        let args = [x.into(), partial.into(), rows.into(), width.into()];
        self.launch("column_sum.cu", "column_partial", self.row_chunks(chunks, width), &args)?;
        self.finish_columns(partial, out, chunks, width)
    }

    /// `out += Σ` over chunks, each `stride` apart, of `partial`.
    fn finish_columns(&self, partial: View<'_>, out: &ViewMut<'_>, chunks: usize, stride: usize) -> Result<()> {
        let args = [partial.into(), out.into(), chunks.into(), out.len.into(), stride.into()];
        self.launch("column_sum.cu", "column_finish", Grid::plane(out.len.div_ceil(32), 1, (32, 8, 1)), &args)
    }

    /// The grid of `sum_rows` of `rows.cuh`.
    fn row_chunks(&self, chunks: usize, width: usize) -> Grid {
        Grid::plane(chunks, width.div_ceil(32 * self.pack()), (32, 8, 1))
    }

    /// Elements of activations that a thread moves at a time: `Pack<elem>::SIZE` of `vector.cuh`.
    fn pack(&self) -> usize {
        16 / self.element().size()
    }

    fn sum_of(&self, x: View<'_>, squares: bool) -> Result<Scalar> {
        assert_eq!(x.element, Element::F32, "sums are of f32");
        self.sum_chunks(x.len, |grid, partial| {
            let args = [x.into(), partial, long(x.len), Arg::Int(i32::from(squares))];
            self.launch("sum.cu", "sum_partial", grid, &args)
        })
    }

    /// The sum of the numbers that `of_chunks(grid, partial)` writes: an f64 for every chunk of `len` elements.
    fn sum_chunks(&self, len: usize, of_chunks: impl FnOnce(Grid, Arg) -> Result<()>) -> Result<Scalar> {
        let scalar = self.0.scalars.begin()?;
        let blocks = len.div_ceil(SUM_CHUNK).max(1);
        // An f64 takes the place of two elements.
        let partial = self.alloc_f32(MemoryKind::Activations, 2 * blocks)?;
        let partial = Arg::from(Self::all(&partial));
        of_chunks(Grid::new(blocks, 256), partial)?;
        let args = [partial, Arg::Pointer(scalar.pointer()), blocks.into()];
        self.launch("sum.cu", "sum_finish", Grid::new(1, 256), &args)?;
        Ok(scalar)
    }

    /// Sums of channels over places: `of_chunks(grid, partial)` writes pairs for chunks of places, and `first` is where the
    /// first place's channels are, if they go before the sums.
    fn sum_places(
        &self,
        s: Channels,
        first: Option<View<'_>>,
        out: &ViewMut<'_>,
        of_chunks: impl FnOnce(Grid, Arg) -> Result<()>,
    ) -> Result<()> {
        let chunks = s.places.div_ceil(CHUNK_ROWS);
        let partial = self.alloc_f32(MemoryKind::Activations, s.samples * chunks * 2 * s.channels)?;
        let partial = Arg::from(Self::all(&partial));
        let plane = Grid::plane(s.channels.div_ceil(32), chunks, (32, 8, 1));
        of_chunks(Grid { blocks: (plane.blocks.0, plane.blocks.1, s.samples as u32), ..plane }, partial)?;
        let first = first.map_or(Arg::Pointer(0), Arg::from);
        let args = [first, partial, out.into(), chunks.into()];
        self.launch("channel.cu", "finish", Grid::over(out.len), &[&args[..], &channels(s)].concat())
    }

    /// A copy between the two types, or within one.
    fn convert(&self, x: View<'_>, y: &ViewMut<'_>) -> Result<()> {
        assert_eq!(x.len, y.len, "a copy");
        let name = match (x.element, y.element) {
            (from, to) if from == to => return self.move_within(x, y),
            (Element::F32, _) => "narrow",
            (Element::Bf16, _) => "widen",
        };
        self.launch("convert.cu", name, Grid::over(x.len.div_ceil(8)), &[x.into(), y.into(), long(x.len)])
    }
}

impl Kernels for Cuda {
    fn zero(&self, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::zero(y.len));
        self.clear(&y)
    }

    fn copy(&self, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::copy(x.len));
        self.convert(x, &y)
    }

    fn add(&self, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::add(x.len));
        assert!(x.len == y.len && x.element == y.element, "a sum");
        let name = if x.element == Element::F32 { "add_f32" } else { "add" };
        self.launch("add.cu", name, Grid::over(x.len.div_ceil(8)), &[x.into(), (&y).into(), long(x.len)])
    }

    fn sum(&self, x: View<'_>) -> Result<Scalar> {
        let _launch = self.launched(Work::sum(x.len));
        self.sum_of(x, false)
    }

    fn sum_squares(&self, x: View<'_>) -> Result<Scalar> {
        let _launch = self.launched(Work::sum(x.len));
        self.sum_of(x, true)
    }

    fn gemm(&self, shape: Gemm, a: View<'_>, b: View<'_>, c: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::gemm(shape));
        self.product(shape, a, b, &c, Epilogue::None)
    }

    fn linear(&self, shape: Linear, x: View<'_>, weight: View<'_>, bias: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::linear(shape, bias.len));
        let Linear { rows, inputs, outputs } = shape;
        let gemm = Gemm { m: rows, n: outputs, k: inputs, ta: false, tb: true, acc: false };
        let epilogue = if bias.len == 0 { Epilogue::None } else { Epilogue::Bias(bias.pointer) };
        self.product(gemm, x, weight, &y, epilogue)
    }

    fn linear_gelu(
        &self,
        shape: Linear,
        x: View<'_>,
        weight: View<'_>,
        bias: View<'_>,
        mut h: ViewMut<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        let Linear { rows, inputs, outputs } = shape;
        if !keeps_gelu(outputs, h.shared()) {
            self.linear(shape, x, weight, bias, h.reborrow())?;
            return self.activation(Activation::Gelu, h.shared(), y);
        }
        let _launch = self.launched(Work::linear_gelu(shape, bias.len));
        let gemm = Gemm { m: rows, n: outputs, k: inputs, ta: false, tb: true, acc: false };
        let epilogue = Epilogue::Gelu { bias: bias.pointer_or_null(), kept: h.pointer };
        self.product(gemm, x, weight, &y, epilogue)
    }

    fn linear_gelu_backward_input(
        &self,
        shape: Linear,
        dy: View<'_>,
        weight: View<'_>,
        h: View<'_>,
        mut dh: ViewMut<'_>,
    ) -> Result<()> {
        let Linear { rows, inputs, outputs } = shape;
        if !keeps_gelu(inputs, h) {
            self.linear_backward_input(shape, dy, weight, dh.reborrow())?;
            return self.activation_backward(Activation::Gelu, h, dh);
        }
        let _launch = self.launched(Work::linear_gelu_backward_input(shape));
        let gemm = Gemm { m: rows, n: inputs, k: outputs, ta: false, tb: false, acc: false };
        self.product(gemm, dy, weight, &dh, Epilogue::GeluBackward { kept: h.pointer })
    }

    fn linear_backward_input(&self, shape: Linear, dy: View<'_>, weight: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::linear_backward_input(shape));
        let Linear { rows, inputs, outputs } = shape;
        let gemm = Gemm { m: rows, n: inputs, k: outputs, ta: false, tb: false, acc: false };
        self.product(gemm, dy, weight, &dx, Epilogue::None)
    }

    fn linear_backward_weight(
        &self,
        shape: Linear,
        dy: View<'_>,
        x: View<'_>,
        dweight: ViewMut<'_>,
        dbias: ViewMut<'_>,
        add: bool,
    ) -> Result<()> {
        let _launch = self.launched(Work::linear_backward_weight(shape, dbias.len, add));
        let Linear { rows, inputs, outputs } = shape;
        let gemm = Gemm { m: outputs, n: inputs, k: rows, ta: true, tb: false, acc: add };
        self.product(gemm, dy, x, &dweight, Epilogue::None)?;
        if dbias.len == 0 {
            return Ok(());
        }
        self.add_columns(dy, rows, &dbias)
    }

    fn embedding(
        &self,
        tokens: &CudaInts,
        token_table: View<'_>,
        position_table: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::embedding(y.len, position_table.len));
        let rows = tokens.len();
        let width = y.len / rows.max(1);
        let time = position_table.len / width.max(1);
        assert!(rows * width == y.len && time * width == position_table.len, "an embedding of {rows} rows");
        let args = [tokens.into(), token_table.into(), position_table.into(), (&y).into()];
        let sizes = [rows.into(), time.into(), width.into()];
        self.launch("embedding.cu", "embedding", Grid::over(y.len.div_ceil(8)), &[&args[..], &sizes].concat())
    }

    fn embedding_backward(
        &self,
        tokens: &CudaInts,
        dy: View<'_>,
        dtoken_table: ViewMut<'_>,
        dposition_table: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::embedding_backward(dy.len, dposition_table.len));
        let rows = tokens.len();
        let width = dy.len / rows.max(1);
        let time = dposition_table.len / width.max(1);
        let order = self.upload_ints(&tokens.order())?;
        let grid = Grid::plane(rows, width.div_ceil(128 * self.pack()), (128, 4, 1));
        let args = [tokens.into(), (&order).into(), dy.into(), (&dtoken_table).into(), rows.into(), width.into()];
        self.launch("embedding_backward.cu", "embedding_backward_tokens", grid, &args)?;
        if dposition_table.len == 0 {
            return Ok(());
        }
        let args = [dy.into(), (&dposition_table).into(), rows.into(), time.into(), width.into()];
        let grid = Grid::over(dposition_table.len.div_ceil(self.pack()));
        self.launch("embedding_backward.cu", "embedding_backward_positions", grid, &args)
    }

    fn norm(
        &self,
        shape: Norm,
        x: View<'_>,
        weight: View<'_>,
        bias: View<'_>,
        y: ViewMut<'_>,
        stats: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::norm(shape, bias.len));
        let args = [x.into(), weight.into(), bias.into(), (&y).into(), (&stats).into()];
        let sizes = [shape.rows.into(), shape.width.into(), shape.epsilon.into()];
        let grid = Grid::new(shape.rows.div_ceil(4), 128);
        let name = if shape.centred { "layer_norm" } else { "rms_norm" };
        self.launch("norm.cu", name, grid, &[&args[..], &sizes].concat())
    }

    fn add_norm(
        &self,
        shape: Norm,
        x: View<'_>,
        stream: ViewMut<'_>,
        weight: View<'_>,
        bias: View<'_>,
        y: ViewMut<'_>,
        stats: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::add_norm(shape, bias.len));
        let args = [x.into(), (&stream).into(), weight.into(), bias.into(), (&y).into(), (&stats).into()];
        let sizes = [shape.rows.into(), shape.width.into(), shape.epsilon.into()];
        let grid = Grid::new(shape.rows.div_ceil(4), 128);
        let name = if shape.centred { "add_layer_norm" } else { "add_rms_norm" };
        self.launch("norm.cu", name, grid, &[&args[..], &sizes].concat())
    }

    fn norm_backward(
        &self,
        shape: Norm,
        dy: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        stats: View<'_>,
        dx: ViewMut<'_>,
        dweight: ViewMut<'_>,
        dbias: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::norm_backward(shape, dbias.len));
        let Norm { rows, width, centred, .. } = shape;
        let chunks = rows.div_ceil(CHUNK_ROWS);
        let partial: CudaBuf = self.alloc_f32(MemoryKind::Activations, chunks * 2 * width)?;
        let partial = Self::all(&partial);
        let aligned = [dy.pointer, x.pointer, weight.pointer, dx.pointer].iter().all(|at| at.is_multiple_of(16));
        let in_one = IN_ONE.iter().find(|(packs, _)| aligned && packs * 32 * self.pack() == width);
        if let Some((_, name)) = in_one {
            let args = [dy.into(), x.into(), weight.into(), stats.into(), (&dx).into(), partial.into(), rows.into()];
            let centred = Arg::Int(i32::from(centred));
            let grid = Grid::plane(chunks, 1, (32, 8, 1));
            self.launch("norm_backward.cu", name, grid, &[&args[..], &[centred]].concat())?;
        } else {
            let args = [dy.into(), x.into(), weight.into(), stats.into(), (&dx).into(), rows.into(), width.into()];
            let grid = Grid::new(rows.div_ceil(4), 128);
            let name = if centred { "layer_norm_backward" } else { "rms_norm_backward" };
            self.launch("norm_backward.cu", name, grid, &args)?;
            let args = [dy.into(), x.into(), stats.into(), partial.into(), rows.into(), width.into()];
            self.launch("norm_backward.cu", "norm_partial", self.row_chunks(chunks, width), &args)?;
        }
        self.finish_columns(partial, &dweight, chunks, 2 * width)?;
        if dbias.len == 0 {
            return Ok(());
        }
        self.finish_columns(partial.cut(width).1, &dbias, chunks, 2 * width)
    }

    fn attention(&self, shape: Attention, qkv: View<'_>, y: ViewMut<'_>, lse: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::attention(shape));
        self.attend(shape, qkv, &y, &lse)
    }

    fn attention_backward(
        &self,
        shape: Attention,
        qkv: View<'_>,
        y: View<'_>,
        lse: View<'_>,
        dy: View<'_>,
        dqkv: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::attention_backward(shape));
        self.attend_backward(shape, qkv, y, lse, dy, &dqkv)
    }

    fn rotary(&self, shape: Rotary, table: View<'_>, x: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::rotary(shape.batch * shape.time * shape.heads * shape.head_width));
        let Rotary { batch, time, heads, head_width, width, back } = shape;
        let (rows, half) = (batch * time, head_width / 2);
        let args = [table.into(), (&x).into(), rows.into(), time.into(), heads.into(), half.into(), width.into()];
        let args = [&args[..], &[Arg::Int(i32::from(back))]].concat();
        self.launch("rotary.cu", "rotary", Grid::over(rows * heads * half), &args)
    }

    fn swiglu(&self, width: usize, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::swiglu(y.len));
        let args = [x.into(), (&y).into(), (y.len / width).into(), width.into()];
        self.launch("swiglu.cu", "swiglu", Grid::over(y.len.div_ceil(8)), &args)
    }

    fn swiglu_backward(&self, width: usize, x: ViewMut<'_>, dy: View<'_>) -> Result<()> {
        let _launch = self.launched(Work::swiglu_backward(dy.len));
        let args = [(&x).into(), dy.into(), (dy.len / width).into(), width.into()];
        self.launch("swiglu.cu", "swiglu_backward", Grid::over(dy.len.div_ceil(8)), &args)
    }

    fn activation(&self, f: Activation, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::activation(f, x.len));
        let (name, _) = activation(f);
        self.launch("activation.cu", name, Grid::over(x.len.div_ceil(8)), &[x.into(), (&y).into(), long(x.len)])
    }

    fn activation_backward(&self, f: Activation, x: View<'_>, dy: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::activation_backward(f, x.len));
        let (_, name) = activation(f);
        self.launch("activation.cu", name, Grid::over(x.len.div_ceil(8)), &[x.into(), (&dy).into(), long(x.len)])
    }

    fn softmax(&self, width: usize, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::softmax(x.len));
        let rows = x.len / width;
        let args = [x.into(), (&y).into(), rows.into(), width.into()];
        self.launch("softmax.cu", "softmax", Grid::new(rows.div_ceil(4), 128), &args)
    }

    fn softmax_backward(&self, width: usize, y: View<'_>, dy: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::softmax_backward(y.len));
        let rows = y.len / width;
        let args = [y.into(), (&dy).into(), rows.into(), width.into()];
        self.launch("softmax.cu", "softmax_backward", Grid::new(rows.div_ceil(4), 128), &args)
    }

    fn unfold(&self, window: Window, first: usize, channels: usize, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::unfold(window, channels));
        let args = [&[x.into(), (&y).into(), first.into(), channels.into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "unfold", Grid::over(y.len), &args)
    }

    fn fold(&self, window: Window, first: usize, channels: usize, dy: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::fold(window, channels));
        let args = [&[dy.into(), (&dx).into(), first.into(), channels.into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "fold", Grid::over(dx.len / window.channels * channels), &args)
    }

    fn max_pool(&self, window: Window, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::pool("max pool", window));
        let args = [&[x.into(), (&y).into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "max_pool", Grid::over(y.len), &args)
    }

    fn max_pool_backward(&self, window: Window, x: View<'_>, dy: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::max_pool_backward(window));
        let args = [&[x.into(), dy.into(), (&dx).into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "max_pool_backward", Grid::over(dx.len), &args)
    }

    fn average_pool(&self, window: Window, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::pool("average pool", window));
        let args = [&[x.into(), (&y).into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "average_pool", Grid::over(y.len), &args)
    }

    fn average_pool_backward(&self, window: Window, dy: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::pool("average pool, backward", window));
        let args = [&[dy.into(), (&dx).into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "average_pool_backward", Grid::over(dx.len), &args)
    }

    fn copy_columns(&self, shape: Columns, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::copy_columns(shape));
        let Columns { rows, count, from, to } = shape;
        assert!(x.len == rows * from[0] && y.len == rows * to[0] && x.element == y.element, "{shape:?}");
        let sizes = [rows, count, from[0], from[1], to[0], to[1]].map(Arg::from);
        let args = [&[x.into(), (&y).into()], &sizes[..]].concat();
        self.launch("columns.cu", "copy_columns", Grid::over(rows * count), &args)
    }

    fn pair_products(&self, s: Pairs, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::pair_products(s));
        let outputs = s.samples * s.outputs();
        assert!(x.len == s.samples * s.rows * s.width && y.len == outputs && x.element == y.element, "{s:?}");
        let args = [x.into(), (&y).into(), s.samples.into(), s.rows.into(), s.width.into()];
        self.launch("pairs.cu", "pair_products", Grid::over(outputs), &args)
    }

    fn pair_products_backward(&self, s: Pairs, x: View<'_>, dy: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::pair_products_backward(s));
        assert!(
            x.len == dx.len && dx.len == s.samples * s.rows * s.width && dy.len == s.samples * s.outputs(),
            "{s:?}"
        );
        let args = [x.into(), dy.into(), (&dx).into(), s.samples.into(), s.rows.into(), s.width.into()];
        self.launch("pairs.cu", "pair_products_backward", Grid::over(dx.len), &args)
    }

    fn channel_moments(&self, s: Channels, x: View<'_>, moments: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::channel_sums("channels, sums", s, 1));
        self.sum_places(s, Some(x), &moments, |grid, partial| {
            let args = [x.into(), partial, CHUNK_ROWS.into()];
            self.launch("channel.cu", "moments_partial", grid, &[&args[..], &channels(s)].concat())
        })
    }

    fn channel_norm(
        &self,
        s: Channels,
        x: View<'_>,
        stats: View<'_>,
        weight: View<'_>,
        bias: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::channel_norm("channels, norm", s, 2));
        let args = [x.into(), stats.into(), weight.into(), bias.into(), (&y).into()];
        self.launch("channel.cu", "channel_norm", Grid::over(y.len), &[&args[..], &channels(s)].concat())
    }

    fn channel_norm_sums(
        &self,
        s: Channels,
        x: View<'_>,
        dy: View<'_>,
        stats: View<'_>,
        sums: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::channel_sums("channels, gradient's sums", s, 2));
        self.sum_places(s, None, &sums, |grid, partial| {
            let args = [x.into(), dy.into(), stats.into(), partial, CHUNK_ROWS.into()];
            self.launch("channel.cu", "backward_partial", grid, &[&args[..], &channels(s)].concat())
        })
    }

    fn channel_norm_backward(
        &self,
        s: Channels,
        x: View<'_>,
        dy: View<'_>,
        stats: View<'_>,
        weight: View<'_>,
        means: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::channel_norm("channels, norm backward", s, 3));
        let args = [x.into(), dy.into(), stats.into(), weight.into(), means.into(), (&dx).into()];
        self.launch("channel.cu", "channel_norm_backward", Grid::over(dx.len), &[&args[..], &channels(s)].concat())
    }

    fn dropout(&self, mask: Dropout, x: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::dropout(x.len));
        if mask.rate == 0.0 {
            return Ok(());
        }
        let dropped_below = (f64::from(mask.rate) * 4_294_967_296.0) as u32;
        let kept = 1.0 / (1.0 - mask.rate);
        let [offset, key] = [mask.offset, mask.key].map(Arg::UnsignedLong);
        let args = [(&x).into(), long(x.len), offset, key, Arg::Unsigned(dropped_below), kept.into()];
        self.launch("dropout.cu", "dropout", Grid::over(x.len.div_ceil(4)), &args)
    }

    fn cross_entropy(
        &self,
        shape: CrossEntropy,
        logits: ViewMut<'_>,
        targets: &CudaInts,
        weights: LossWeights<View<'_>>,
        losses: ViewMut<'_>,
    ) -> Result<()> {
        let LossWeights { classes: of_classes, rows: of_rows } = weights;
        let _launch = self.launched(Work::cross_entropy(shape, of_classes.len + of_rows.len));
        let CrossEntropy { rows, classes, scale, gradient, smoothing } = shape;
        if rows != targets.len() || rows * classes != logits.len {
            return Err(Error::internal(format!("{rows} × {classes} logits for {} targets", targets.len())));
        }
        for (weights, len) in [(of_classes, classes), (of_rows, rows)] {
            assert!(weights.len == 0 || weights.len == len && weights.element == Element::F32, "{len} weights");
        }
        let args = [(&logits).into(), targets.into(), of_classes.into(), of_rows.into(), (&losses).into()];
        let row = (classes + self.pack()) * self.element().size();
        let keep = gradient && row <= KEPT_ROW;
        let sizes = [classes.into(), scale.into(), smoothing.into()];
        let flags = [gradient, keep].map(|flag| Arg::Int(i32::from(flag)));
        let grid = Grid { shared: if keep { row as u32 } else { 0 }, ..Grid::new(rows, 512) };
        self.launch("cross_entropy.cu", "cross_entropy", grid, &[&args[..], &sizes, &flags].concat())
    }

    fn hits(&self, classes: usize, k: usize, logits: View<'_>, targets: &CudaInts, hits: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::hits(logits.len, hits.len));
        let rows = targets.len();
        assert!(logits.len == rows * classes && hits.len == rows, "{rows} × {classes} logits");
        let args = [logits.into(), targets.into(), (&hits).into(), rows.into(), classes.into(), k.into()];
        self.launch("cross_entropy.cu", "hits", Grid::new(rows.div_ceil(4), 128), &args)
    }

    fn regression(
        &self,
        shape: Regression,
        predictions: ViewMut<'_>,
        targets: View<'_>,
        weights: View<'_>,
        losses: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::regression(shape, weights.len));
        let Regression { rows, width, by, scale, gradient } = shape;
        assert!(targets.element == Element::F32 && targets.len == rows * width && predictions.len == rows * width);
        assert!(weights.len == 0 || weights.len == rows && weights.element == Element::F32, "{rows} weights");
        // In the order of the kernel's own list.
        let (by, reach) = match by {
            Deviation::Squared => (0, 0.0),
            Deviation::Absolute => (1, 0.0),
            Deviation::Huber(reach) => (2, reach),
            Deviation::Binary => (3, 0.0),
            Deviation::Agreement => (4, 0.0),
        };
        let args = [(&predictions).into(), targets.into(), weights.into(), (&losses).into()];
        let rest = [rows.into(), width.into(), Arg::Int(by), reach.into(), scale.into(), Arg::Int(i32::from(gradient))];
        self.launch("regression.cu", "regression", Grid::new(rows.div_ceil(4), 128), &[&args[..], &rest].concat())
    }

    fn adamw(
        &self,
        u: AdamW,
        grad: View<'_>,
        m: ViewMut<'_>,
        v: ViewMut<'_>,
        p: ViewMut<'_>,
        copy: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let _launch = self.launched(Work::adamw(grad.len, copy.as_ref().map_or(0, |copy| copy.len)));
        let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
        let rate = (f64::from(u.lr) / correct(u.beta1)) as f32;
        let root = (1.0 / correct(u.beta2).sqrt()) as f32;
        let decay = 1.0 - u.lr * u.weight_decay;
        let to = copy.as_ref().map_or(Arg::Pointer(0), Arg::from);
        let args = [grad.into(), (&m).into(), (&v).into(), (&p).into(), to, long(grad.len)];
        let constants = [rate, root, decay, u.beta1, u.beta2, u.eps, u.grad_scale].map(Arg::Float);
        self.launch("adamw.cu", "adamw", Grid::over(grad.len.div_ceil(8)), &[&args[..], &constants].concat())
    }

    fn adamw_step_squares(&self, u: AdamW, grad: View<'_>, m: View<'_>, v: View<'_>, p: View<'_>) -> Result<Scalar> {
        let _launch = self.launched(Work::adamw_step_squares(grad.len));
        let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
        let (rate, root) = ((1.0 / correct(u.beta1)) as f32, (1.0 / correct(u.beta2).sqrt()) as f32);
        self.sum_chunks(p.len, |grid, partial| {
            let args = [grad.into(), m.into(), v.into(), p.into(), partial, long(p.len)];
            let constants = [rate, root, u.weight_decay, u.beta1, u.beta2, u.eps, u.grad_scale].map(Arg::Float);
            self.launch("lamb.cu", "step_squares", grid, &[&args[..], &constants].concat())
        })
    }

    fn sgd(&self, u: Sgd, grad: View<'_>, m: ViewMut<'_>, p: ViewMut<'_>, copy: Option<ViewMut<'_>>) -> Result<()> {
        let _launch = self.launched(Work::sgd(grad.len, copy.as_ref().map_or(0, |copy| copy.len)));
        let to = copy.as_ref().map_or(Arg::Pointer(0), Arg::from);
        let args = [grad.into(), (&m).into(), (&p).into(), to, long(grad.len)];
        let nesterov = Arg::Int(i32::from(u.nesterov));
        let constants = [u.lr.into(), u.momentum.into(), nesterov, u.weight_decay.into(), u.grad_scale.into()];
        self.launch("sgd.cu", "sgd", Grid::over(grad.len), &[&args[..], &constants].concat())
    }

    fn approach(&self, rate: f32, x: View<'_>, y: ViewMut<'_>, copy: Option<ViewMut<'_>>) -> Result<()> {
        let _launch = self.launched(Work::approach(x.len, copy.as_ref().map_or(0, |copy| copy.len)));
        assert!(x.len == y.len && x.element == Element::F32 && y.element == Element::F32, "an average");
        let to = copy.as_ref().map_or(Arg::Pointer(0), Arg::from);
        let args = [x.into(), (&y).into(), to, long(x.len), rate.into()];
        self.launch("approach.cu", "approach", Grid::over(x.len), &args)
    }

    fn elements(
        &self,
        u: Elements,
        grad: View<'_>,
        first: ViewMut<'_>,
        second: ViewMut<'_>,
        p: ViewMut<'_>,
        copy: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let _launch = self.launched(Work::elements(u, grad.len, copy.as_ref().map_or(0, |copy| copy.len)));
        let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
        // In the order of the kernel's own list: rule, rate, root, decay, a, b, eps.
        let (rule, [rate, root, decay, a, b, eps]) = match u.rule {
            Elementwise::Adam { beta1, beta2, eps } => {
                let rate = (f64::from(u.lr) / correct(beta1)) as f32;
                (0, [rate, (1.0 / correct(beta2).sqrt()) as f32, u.weight_decay, beta1, beta2, eps])
            }
            Elementwise::Adagrad { eps } => (1, [u.lr, 0.0, u.weight_decay, 0.0, 0.0, eps]),
            Elementwise::RmsProp { alpha, eps, momentum } => (2, [u.lr, 0.0, u.weight_decay, alpha, momentum, eps]),
            Elementwise::Lion { beta1, beta2 } => (3, [u.lr, 0.0, 1.0 - u.lr * u.weight_decay, beta1, beta2, 0.0]),
        };
        let to = copy.as_ref().map_or(Arg::Pointer(0), Arg::from);
        let args = [grad.into(), (&first).into(), (&second).into(), (&p).into(), to, long(grad.len), Arg::Int(rule)];
        let constants = [rate, root, decay, a, b, eps, u.grad_scale].map(Arg::Float);
        self.launch("elements.cu", "elements", Grid::over(grad.len), &[&args[..], &constants].concat())
    }
}
