//! Operations and bytes of every kernel, from its shape alone: profiles and benchmarks divide them by time.
//!
//! Floating-point operations are those of products and attention; kernels that only move memory have none. Bytes are
//! those of every operand once (twice, where it is changed in place), as if nothing were in a cache; indices are not
//! counted.

use super::{
    Activation, Attention, Channels, Columns, Convolution, CrossEntropy, Elements, Gemm, Linear, Norm, Pairs,
    Regression, Window,
};

/// One launch of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Such as `norm, backward`.
    pub kernel: &'static str,
    /// The sizes that its time depends on: rows first; zeros at the end are none.
    pub shape: [usize; 4],
    /// Multiplications and additions.
    pub flops: f64,
    /// Elements of the compute type that are read or written: parameters and activations.
    pub elements: f64,
    /// As `elements`, of those that are f32 for every compute type: statistics, gradients of parameters, masters.
    pub exact: f64,
}

impl Work {
    /// Moves so many elements, which are its whole shape.
    fn moves(kernel: &'static str, elements: usize) -> Self {
        Self { kernel, shape: [elements, 0, 0, 0], flops: 0.0, elements: elements as f64, exact: 0.0 }
    }

    fn on<const N: usize>(self, sizes: [usize; N]) -> Self {
        let mut shape = [0; 4];
        shape[..N].copy_from_slice(&sizes);
        Self { shape, ..self }
    }

    fn exactly(self, exact: usize) -> Self {
        Self { exact: exact as f64, ..self }
    }

    fn computes(self, flops: f64) -> Self {
        Self { flops, ..self }
    }

    /// Bytes, where the compute type takes so many.
    pub fn bytes(&self, width: usize) -> f64 {
        self.elements * width as f64 + self.exact * size_of::<f32>() as f64
    }

    /// A fill with zeros.
    pub fn zero(len: usize) -> Self {
        Self::moves("zero", len).on([len])
    }

    /// A copy.
    pub fn copy(len: usize) -> Self {
        Self::moves("copy", 2 * len).on([len])
    }

    /// A sum in place.
    pub fn add(len: usize) -> Self {
        Self::moves("add", 3 * len).on([len])
    }

    /// A sum of f32, or of their squares.
    pub fn sum(len: usize) -> Self {
        Self::moves("sum", 0).on([len]).exactly(len)
    }

    /// A product of matrices.
    pub fn gemm(s: Gemm) -> Self {
        let c = s.m * s.n;
        let product = Self::moves("product", s.m * s.k + s.k * s.n + if s.acc { 0 } else { c }).on([s.m, s.k, s.n]);
        product.exactly(if s.acc { 2 * c } else { 0 }).computes(flops(s.m, s.n, s.k))
    }

    /// An affine map, with a bias or without.
    pub fn linear(s: Linear, bias: usize) -> Self {
        let moved = s.rows * s.inputs + s.inputs * s.outputs + bias + s.rows * s.outputs;
        Self::moves("linear", moved).on([s.rows, s.inputs, s.outputs]).computes(flops(s.rows, s.inputs, s.outputs))
    }

    /// An affine map and its GELU, of which both are written.
    pub fn linear_gelu(s: Linear, bias: usize) -> Self {
        let linear = Self::linear(s, bias);
        Self { kernel: "linear and gelu", elements: linear.elements + (s.rows * s.outputs) as f64, ..linear }
    }

    /// The gradient of an affine map's input.
    pub fn linear_backward_input(s: Linear) -> Self {
        Self { kernel: "linear, input's gradient", ..Self::linear(s, 0) }
    }

    /// The same, back through the GELU before the map.
    pub fn linear_gelu_backward_input(s: Linear) -> Self {
        let linear = Self::linear(s, 0);
        Self {
            kernel: "linear and gelu, input's gradient",
            elements: linear.elements + (s.rows * s.inputs) as f64,
            ..linear
        }
    }

    /// The gradients of an affine map's weight and bias.
    pub fn linear_backward_weight(s: Linear, bias: usize, add: bool) -> Self {
        let moved = s.rows * s.inputs + s.rows * s.outputs;
        let kernel = Self::moves("linear, weight's gradient", moved).on([s.rows, s.inputs, s.outputs]);
        let touched = (1 + usize::from(add)) * s.inputs * s.outputs + 2 * bias;
        kernel.exactly(touched).computes(flops(s.rows, s.inputs, s.outputs))
    }

    /// Rows of a table and of positions (of so many elements in all), added.
    pub fn embedding(y: usize, places: usize) -> Self {
        Self::moves("embedding", 2 * y + places).on([y])
    }

    /// The gradients of both tables.
    pub fn embedding_backward(dy: usize, places: usize) -> Self {
        Self::moves("embedding, backward", dy).on([dy]).exactly(2 * (dy + places))
    }

    /// A norm of every row, with a bias or without.
    pub fn norm(s: Norm, bias: usize) -> Self {
        Self::moves("norm", 2 * s.rows * s.width + s.width + bias).on([s.rows, s.width]).exactly(2 * s.rows)
    }

    /// The same after a sum in place.
    pub fn add_norm(s: Norm, bias: usize) -> Self {
        let norm = Self::norm(s, bias);
        Self { kernel: "add and norm", elements: norm.elements + (2 * s.rows * s.width) as f64, ..norm }
    }

    /// The gradients of a norm's input, weight and bias.
    pub fn norm_backward(s: Norm, bias: usize) -> Self {
        Self::moves("norm, backward", 4 * s.rows * s.width + s.width)
            .on([s.rows, s.width])
            .exactly(2 * s.rows + 2 * (s.width + bias))
    }

    /// Two products over half a square of scores.
    pub fn attention(s: Attention) -> Self {
        let rows = s.batch * s.time;
        let moved = rows * (s.packed_width() + s.heads * s.head_width);
        Self::moves("attention", moved)
            .on([s.batch, s.time, s.heads, s.head_width])
            .exactly(rows * s.heads)
            .computes(2.0 * scores(s))
    }

    /// Five products over half a square of scores.
    pub fn attention_backward(s: Attention) -> Self {
        let rows = s.batch * s.time;
        let moved = 2 * rows * (s.packed_width() + s.heads * s.head_width);
        Self::moves("attention, backward", moved)
            .on([s.batch, s.time, s.heads, s.head_width])
            .exactly(rows * s.heads)
            .computes(5.0 * scores(s))
    }

    /// A turn of so many elements in place.
    pub fn rotary(len: usize) -> Self {
        Self::moves("rotary", 2 * len).on([len])
    }

    /// So many gated elements.
    pub fn swiglu(len: usize) -> Self {
        Self::moves("swiglu", 3 * len).on([len])
    }

    /// Their gradients in place of gates and ups.
    pub fn swiglu_backward(len: usize) -> Self {
        Self::moves("swiglu, backward", 5 * len).on([len])
    }

    /// A function of every element.
    pub fn activation(f: Activation, len: usize) -> Self {
        let kernel = match f {
            Activation::Relu => "relu",
            Activation::Gelu => "gelu",
            Activation::Silu => "silu",
            Activation::Tanh => "tanh",
            Activation::Sigmoid => "sigmoid",
        };
        Self::moves(kernel, 2 * len).on([len])
    }

    /// Its gradient in place.
    pub fn activation_backward(f: Activation, len: usize) -> Self {
        let kernel = match f {
            Activation::Relu => "relu, backward",
            Activation::Gelu => "gelu, backward",
            Activation::Silu => "silu, backward",
            Activation::Tanh => "tanh, backward",
            Activation::Sigmoid => "sigmoid, backward",
        };
        Self::moves(kernel, 3 * len).on([len])
    }

    /// A softmax of rows.
    pub fn softmax(len: usize) -> Self {
        Self::moves("softmax", 2 * len).on([len])
    }

    /// Its gradient in place.
    pub fn softmax_backward(len: usize) -> Self {
        Self::moves("softmax, backward", 3 * len).on([len])
    }

    /// The unfolding of windows over so many channels.
    pub fn unfold(w: Window, channels: usize) -> Self {
        let seen = w.rows() * w.size[0] * w.size[1] * channels;
        Self::moves("unfold", w.elements() / w.channels.max(1) * channels + seen)
            .on([w.rows(), w.size[0] * w.size[1] * channels])
    }

    /// Its gradient, added.
    pub fn fold(w: Window, channels: usize) -> Self {
        let seen = w.rows() * w.size[0] * w.size[1] * channels;
        Self::moves("fold", 2 * (w.elements() / w.channels.max(1) * channels) + seen)
            .on([w.rows(), w.size[0] * w.size[1] * channels])
    }

    /// A convolution that unfolds nothing in memory.
    pub fn convolve(s: Convolution, bias: usize) -> Self {
        let product = s.product();
        let filters = product.inputs * product.outputs + bias;
        let moved = s.window.elements() / s.window.channels.max(1) * s.channels + product.rows * product.outputs;
        Self::moves("convolution", moved + filters).on([product.rows, product.inputs, product.outputs]).computes(flops(
            product.rows,
            product.inputs,
            product.outputs,
        ))
    }

    /// The gradients of its filters and bias.
    pub fn convolve_backward_weight(s: Convolution, bias: usize) -> Self {
        let (forward, filters) = (Self::convolve(s, 0), s.seen() * s.filters);
        let kernel = Self { kernel: "convolution, weight's gradient", ..forward };
        Self { elements: forward.elements - filters as f64, ..kernel }.exactly(2 * (filters + bias))
    }

    /// The gradient of its input, added.
    pub fn convolve_backward_input(s: Convolution) -> Self {
        let forward = Self::convolve(s, 0);
        let seen = s.window.elements() / s.window.channels.max(1) * s.channels;
        Self { kernel: "convolution, input's gradient", elements: forward.elements + seen as f64, ..forward }
    }

    /// A pooling of images.
    pub fn pool(kernel: &'static str, w: Window) -> Self {
        Self::moves(kernel, w.elements() + w.rows() * w.channels).on([w.rows(), w.channels])
    }

    /// The gradient of the largest.
    pub fn max_pool_backward(w: Window) -> Self {
        Self::moves("max pool, backward", 2 * w.elements() + w.rows() * w.channels).on([w.rows(), w.channels])
    }

    /// A copy of columns.
    pub fn copy_columns(s: Columns) -> Self {
        Self::moves("copy of columns", 2 * s.rows * s.count).on([s.rows, s.count])
    }

    /// Products of rows in pairs.
    pub fn pair_products(s: Pairs) -> Self {
        let multiplied = (s.samples * (s.outputs() - s.width) * 2 * s.width) as f64;
        let kernel = Self::moves("pairs of rows", s.samples * (s.rows * s.width + s.outputs()));
        kernel.on([s.samples, s.rows, s.width]).computes(multiplied)
    }

    /// The gradient of the rows.
    pub fn pair_products_backward(s: Pairs) -> Self {
        let forward = Self::pair_products(s);
        let kernel = Self::moves("pairs of rows, backward", s.samples * (2 * s.rows * s.width + s.outputs()));
        kernel.on([s.samples, s.rows, s.width]).computes(2.0 * forward.flops)
    }

    /// Sums of channels over places for their statistics, or for a gradient's: `reads` arrays are read.
    pub fn channel_sums(kernel: &'static str, s: Channels, reads: usize) -> Self {
        Self::moves(kernel, reads * s.elements())
            .on([s.samples, s.places, s.channels])
            .exactly(3 * s.samples * s.channels)
    }

    /// A normalisation of channels, or its gradient: `arrays` are read or written.
    pub fn channel_norm(kernel: &'static str, s: Channels, arrays: usize) -> Self {
        let stats = 2 * s.samples * s.groups;
        Self::moves(kernel, arrays * s.elements() + 2 * s.channels).on([s.samples, s.places, s.channels]).exactly(stats)
    }

    /// A mask in place.
    pub fn dropout(len: usize) -> Self {
        Self::moves("dropout", 2 * len).on([len])
    }

    /// Losses of rows, and the gradient of the logits in their place.
    pub fn cross_entropy(s: CrossEntropy, weights: usize) -> Self {
        let passes = if s.gradient { 2 } else { 1 };
        Self::moves("classifier", passes * s.rows * s.classes).on([s.rows, s.classes]).exactly(s.rows + weights)
    }

    /// Whether targets are among the largest.
    pub fn hits(logits: usize, rows: usize) -> Self {
        Self::moves("hits", logits).on([logits]).exactly(rows)
    }

    /// Losses of rows of numbers, and the gradient of the predictions in their place.
    pub fn regression(s: Regression, weights: usize) -> Self {
        let passes = if s.gradient { 2 } else { 1 };
        let exact = s.rows * (s.width + 1) + weights;
        Self::moves("regression", passes * s.rows * s.width).on([s.rows, s.width]).exactly(exact)
    }

    /// `AdamW`'s update; `copy` elements are written besides.
    pub fn adamw(len: usize, copy: usize) -> Self {
        Self::moves("adamw", copy).on([len]).exactly(7 * len)
    }

    /// SGD's update; `copy` elements are written besides.
    pub fn sgd(len: usize, copy: usize) -> Self {
        Self::moves("sgd", copy).on([len]).exactly(5 * len)
    }

    /// The squares of `AdamW`'s step.
    pub fn adamw_step_squares(len: usize) -> Self {
        Self::moves("adamw, step's norm", 0).on([len]).exactly(4 * len)
    }

    /// A running average; `copy` elements are written besides.
    pub fn approach(len: usize, copy: usize) -> Self {
        Self::moves("average", copy).on([len]).exactly(3 * len)
    }

    /// Another rule's update; `copy` elements are written besides.
    pub fn elements(update: Elements, len: usize, copy: usize) -> Self {
        Self::moves("update", copy).on([len]).exactly((3 + 2 * update.rule.states()) * len)
    }
}

fn flops(m: usize, n: usize, k: usize) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

/// Multiplications and additions of half a square of scores, for all heads.
fn scores(s: Attention) -> f64 {
    (s.batch * s.time) as f64 * s.time as f64 * (s.heads * s.head_width) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_follows_from_shapes() {
        let linear = Linear { rows: 10, inputs: 3, outputs: 4 };
        let work = Work::linear(linear, 4);
        assert_eq!((work.flops, work.bytes(4), work.bytes(2)), (240.0, 4.0 * 86.0, 2.0 * 86.0));
        let work = Work::linear_backward_weight(linear, 4, true);
        assert_eq!((work.flops, work.bytes(2)), (240.0, 2.0 * 70.0 + 4.0 * 32.0));
        assert_eq!(Work::linear_backward_weight(linear, 4, false).bytes(2), 2.0 * 70.0 + 4.0 * 20.0);
        let attention = Attention { batch: 2, time: 8, heads: 4, kv_heads: 2, head_width: 16 };
        let work = Work::attention(attention);
        // 8 · 8 / 2 pairs of positions, 16 numbers each, 2 operations, 2 products, 4 heads, 2 sequences.
        assert_eq!(work.flops, 32.0 * 16.0 * 2.0 * 2.0 * 4.0 * 2.0);
        assert_eq!(work.bytes(4), 4.0 * (16.0 * (128.0 + 64.0) + 64.0));
        assert_eq!(Work::attention_backward(attention).flops, 2.5 * work.flops);
        assert_eq!(Work::adamw(100, 100).bytes(2), 3000.0);
    }
}
