//! The operations a device must know: the only trait with arithmetic in it.
//!
//! Shape letters: b batch, t time (context), h heads, d width, v vocabulary; *rows* are b·t.
//! "Adds" means the result is accumulated into the output, "overwrites" that it replaces it.

use super::{Backend, unfolded};
use crate::error::Result;

/// A matrix product `c = op(a)·op(b) (+ c)`, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Gemm {
    /// Rows of `c`.
    pub m: usize,
    /// Columns of `c`.
    pub n: usize,
    /// The summed dimension.
    pub k: usize,
    /// `a` is stored k×m instead of m×k.
    pub ta: bool,
    /// `b` is stored n×k instead of k×n.
    pub tb: bool,
    /// Add to `c` instead of overwriting it.
    pub acc: bool,
}

/// An affine map of every row: `y = x·Wᵀ + bias`, W stored outputs×inputs.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// Rows of `x` and `y`.
    pub rows: usize,
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
}

/// Normalisation of every row.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// Rows.
    pub rows: usize,
    /// Columns, over which the statistics are taken.
    pub width: usize,
    /// Added to the variance, or to the mean square.
    pub epsilon: f32,
    /// Subtract the mean first: layer normalisation (Ba, Kiros and Hinton, 2016). Without, RMS normalisation (Zhang and
    /// Sennrich, 2019), where the mean counts as zero.
    pub centred: bool,
}

/// Causal multi-head attention over packed queries, keys and values; with fewer heads of keys and values than of
/// queries, grouped-query attention (Ainslie et al., 2023).
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Positions a sequence.
    pub time: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`: as many neighbouring heads of queries share one.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_width: usize,
}

impl Attention {
    /// Columns of a row of queries, keys and values.
    pub fn packed_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_width
    }

    /// Heads of queries that share one of keys and values.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Rotary positions (Su et al., "RoFormer", 2021) of the first heads of every row: elements i and i + `head_width`/2 of a
/// head turn by angle i of the position.
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    /// Sequences.
    pub batch: usize,
    /// Positions a sequence.
    pub time: usize,
    /// Heads that turn.
    pub heads: usize,
    /// Width of one head; even.
    pub head_width: usize,
    /// Columns of a row.
    pub width: usize,
    /// Turn back: the backward.
    pub back: bool,
}

/// Source of a dropout mask: a counter, never a state.
///
/// Element `i` of the window is kept or dropped by a hash of (`key`, `offset + i`), so the mask is the
/// same in a recomputation and on any number of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// Chance to drop an element; kept ones are scaled by `1 / (1 - rate)`.
    pub rate: f32,
    /// Names the stream: run seed, step and layer.
    pub key: u64,
    /// Index of the window's first element in the global batch.
    pub offset: u64,
}

/// A function of every element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// max(x, 0).
    Relu,
    /// x·Φ(x) in its tanh form (Hendrycks and Gimpel, 2016).
    Gelu,
    /// x·σ(x).
    Silu,
    /// The hyperbolic tangent.
    Tanh,
    /// σ(x) = 1 / (1 + e⁻ˣ).
    Sigmoid,
}

/// A window that moves over images: b × `height` × `width` × `channels`, channels last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Images.
    pub batch: usize,
    /// Rows of an image.
    pub height: usize,
    /// Columns of an image.
    pub width: usize,
    /// Channels of an image.
    pub channels: usize,
    /// Rows and columns of the window.
    pub size: [usize; 2],
    /// Rows and columns from one place to the next.
    pub stride: [usize; 2],
    /// Rows and columns beyond each edge where the window begins; less than its size.
    pub padding: [usize; 2],
}

impl Window {
    /// Rows and columns of places.
    pub fn places(&self) -> [usize; 2] {
        let along = |axis: usize, len: usize| {
            (len + 2 * self.padding[axis]).checked_sub(self.size[axis]).map_or(0, |rest| rest / self.stride[axis] + 1)
        };
        [along(0, self.height), along(1, self.width)]
    }

    /// Places in all images: rows of the output.
    pub fn rows(&self) -> usize {
        let [high, wide] = self.places();
        self.batch * high * wide
    }

    /// Elements of all images.
    pub fn elements(&self) -> usize {
        self.batch * self.height * self.width * self.channels
    }
}

/// Samples of `places` × `channels` elements, channels last, whose channels are normalised in groups of neighbours: over all
/// places of a sample. A whole batch may count as one sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channels {
    /// Samples.
    pub samples: usize,
    /// Places of a sample: pixels of an image.
    pub places: usize,
    /// Channels of a place.
    pub channels: usize,
    /// Groups of channels, a divisor of `channels`.
    pub groups: usize,
}

impl Channels {
    /// Elements of all samples.
    pub fn elements(&self) -> usize {
        self.samples * self.places * self.channels
    }

    /// Channels of one group.
    pub fn of_group(&self) -> usize {
        self.channels / self.groups
    }
}

/// A convolution of images: filters on the elements that a window sees of some neighbouring channels. Filters are
/// stored one after the other, each as window rows × window columns × channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    /// On all images.
    pub window: Window,
    /// The first channel that filters see.
    pub first: usize,
    /// Channels that filters see.
    pub channels: usize,
    /// Channels of the output.
    pub filters: usize,
}

impl Convolution {
    /// Elements that a filter sees.
    pub fn seen(&self) -> usize {
        self.window.size[0] * self.window.size[1] * self.channels
    }

    /// The product that it is of unfolded windows.
    pub fn product(&self) -> Linear {
        Linear { rows: self.window.rows(), inputs: self.seen(), outputs: self.filters }
    }
}

/// Measure that compares rows of predictions with rows of targets; the mean over a row's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Deviation {
    /// (p - t)².
    Squared,
    /// |p - t|.
    Absolute,
    /// ½(p - t)² up to this distance, linear beyond (Huber, 1964).
    Huber(f32),
    /// -t·ln σ(p) - (1 - t)·ln(1 - σ(p)): binary cross-entropy of logits.
    Binary,
    /// 1 where a logit and its target are on the same side, of 0 and of ½, else 0; without a slope.
    Agreement,
}

/// Rows of predictions and of targets.
#[derive(Debug, Clone, Copy)]
pub struct Regression {
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Measure of the comparison.
    pub by: Deviation,
    /// Factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Replace the predictions by their gradient; without it they are left alone.
    pub gradient: bool,
}

/// Columns of rows that are copied from one matrix to another.
#[derive(Debug, Clone, Copy)]
pub struct Columns {
    /// Rows of both.
    pub rows: usize,
    /// Columns copied.
    pub count: usize,
    /// Columns of a source row, and the first one copied.
    pub from: [usize; 2],
    /// Columns of a target row, and where the first one goes.
    pub to: [usize; 2],
}

/// Samples of `rows` × `width` elements, whose rows are multiplied in pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pairs {
    /// Samples.
    pub samples: usize,
    /// Rows of a sample.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

impl Pairs {
    /// Elements of a sample's output: the first row, then a product for each pair.
    pub fn outputs(&self) -> usize {
        self.width + self.rows * self.rows.saturating_sub(1) / 2
    }
}

/// Softmax cross-entropy over rows of logits.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy {
    /// Rows of logits.
    pub rows: usize,
    /// Classes a row.
    pub classes: usize,
    /// Factor of the gradient: 1 / (rows in the global batch).
    pub scale: f32,
    /// Replace the logits by their gradient; without it they are left alone.
    pub gradient: bool,
    /// Part of the target that is spread evenly over all classes (Szegedy et al., 2016); 0 is none.
    pub smoothing: f32,
}

/// Factors of the losses of a [`CrossEntropy`] and of their gradients, windows of f32; an empty one is none.
#[derive(Debug, Clone, Copy)]
pub struct LossWeights<V> {
    /// One for each class.
    pub classes: V,
    /// One for each row.
    pub rows: V,
}

/// One AdamW update (Loshchilov and Hutter, 2019): decoupled weight decay, bias-corrected moments.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Number of this update, from 1: for the bias correction.
    pub step: u64,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
}

/// One SGD update with momentum, optionally Nesterov's, and coupled (L2) weight decay.
#[derive(Debug, Clone, Copy)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the momentum buffer; 0 is plain SGD.
    pub momentum: f32,
    /// Look ahead along the momentum.
    pub nesterov: bool,
    /// L2 weight decay, added to the gradient.
    pub weight_decay: f32,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
}

/// Update rules that look at one element at a time, with one state buffer or two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Elementwise {
    /// Adam (Kingma and Ba, 2015) with coupled (L2) weight decay; both moments are its state.
    Adam {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
    },
    /// Adagrad (Duchi, Hazan and Singer, 2011); the sum of squares is its state.
    Adagrad {
        /// Added to the root of the sum.
        eps: f32,
    },
    /// RMSProp (Tieleman and Hinton, 2012) with momentum; mean square and momentum are its state.
    RmsProp {
        /// Decay of the mean square.
        alpha: f32,
        /// Added to its root.
        eps: f32,
        /// Decay of the momentum; 0 is none.
        momentum: f32,
    },
    /// Lion (Chen et al., 2023) with decoupled weight decay; the moment is its state.
    Lion {
        /// Weight of the moment in the step.
        beta1: f32,
        /// Decay of the moment.
        beta2: f32,
    },
}

impl Elementwise {
    /// State buffers.
    pub fn states(self) -> usize {
        match self {
            Elementwise::Adam { .. } | Elementwise::RmsProp { .. } => 2,
            Elementwise::Adagrad { .. } | Elementwise::Lion { .. } => 1,
        }
    }
}

/// One update by such a rule.
#[derive(Debug, Clone, Copy)]
pub struct Elements {
    /// The rule.
    pub rule: Elementwise,
    /// Learning rate of this step.
    pub lr: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Number of this update, from 1: for Adam's bias correction.
    pub step: u64,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
}

/// Arithmetic on a device's buffers.
///
/// All results are a function of shapes and values alone: never of the number of threads or of launch order.
/// Lengths of windows must match the shapes; a mismatch is a bug and panics. A bias window of length
/// zero means "no bias".
pub trait Kernels: Backend {
    /// `y = 0`.
    fn zero(&self, y: Self::ViewMut<'_>) -> Result<()>;
    /// `y = x`.
    fn copy(&self, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// `y += x`.
    fn add(&self, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// `Σ x` in f64, in a fixed order.
    fn sum(&self, x: Self::View<'_>) -> Result<Self::Scalar>;
    /// `Σ x²` in f64, summed in fixed chunks.
    fn sum_squares(&self, x: Self::View<'_>) -> Result<Self::Scalar>;

    /// The matrix product described by `shape`.
    fn gemm(&self, shape: Gemm, a: Self::View<'_>, b: Self::View<'_>, c: Self::ViewMut<'_>) -> Result<()>;
    /// `y = x·Wᵀ + bias`; overwrites.
    fn linear(
        &self,
        shape: Linear,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// `dx = dy·W`; overwrites.
    fn linear_backward_input(
        &self,
        shape: Linear,
        dy: Self::View<'_>,
        weight: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// A linear map and its GELU: `h = x·Wᵀ + bias`, `y = gelu(h)`; overwrites both.
    fn linear_gelu(
        &self,
        shape: Linear,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        mut h: Self::ViewMut<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()> {
        self.linear(shape, x, weight, bias, Self::reborrow(&mut h))?;
        self.activation(Activation::Gelu, Self::shared(&h), y)
    }
    /// Back through a linear map and the GELU before it: `dh = (dy·W)·gelu'(h)`; overwrites.
    fn linear_gelu_backward_input(
        &self,
        shape: Linear,
        dy: Self::View<'_>,
        weight: Self::View<'_>,
        h: Self::View<'_>,
        mut dh: Self::ViewMut<'_>,
    ) -> Result<()> {
        self.linear_backward_input(shape, dy, weight, Self::reborrow(&mut dh))?;
        self.activation_backward(Activation::Gelu, h, dh)
    }
    /// `dW = dyᵀ·x`, or `dW += dyᵀ·x` with `add`; `dbias += Σ_rows dy`.
    fn linear_backward_weight(
        &self,
        shape: Linear,
        dy: Self::View<'_>,
        x: Self::View<'_>,
        dweight: Self::ViewMut<'_>,
        dbias: Self::ViewMut<'_>,
        add: bool,
    ) -> Result<()>;

    /// `y[b,t] = token_table[tokens[b,t]] + position_table[t]`; overwrites. Shapes: tokens b·t, y b·t·d,
    /// position table t·d, or empty where there are no positions.
    fn embedding(
        &self,
        tokens: &Self::Ints,
        token_table: Self::View<'_>,
        position_table: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Adds `dy` to the rows of both tables that made it.
    fn embedding_backward(
        &self,
        tokens: &Self::Ints,
        dy: Self::View<'_>,
        dtoken_table: Self::ViewMut<'_>,
        dposition_table: Self::ViewMut<'_>,
    ) -> Result<()>;

    /// `y = (x - mean)·rstd·weight + bias` for every row, where rstd is 1 / √(mean of (x - mean)² + ε); overwrites `y` and
    /// `stats` (mean and rstd, 2·rows).
    fn norm(
        &self,
        shape: Norm,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
        stats: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The end of a residual branch and the norm after it: `stream += x`, then [`Kernels::norm`] of the stream.
    #[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
    fn add_norm(
        &self,
        shape: Norm,
        x: Self::View<'_>,
        stream: Self::ViewMut<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
        stats: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Adds to `dx` (which holds the residual path's gradient), `dweight` and `dbias`.
    #[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
    fn norm_backward(
        &self,
        shape: Norm,
        dy: Self::View<'_>,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        stats: Self::View<'_>,
        dx: Self::ViewMut<'_>,
        dweight: Self::ViewMut<'_>,
        dbias: Self::ViewMut<'_>,
    ) -> Result<()>;

    /// Attention over `qkv` (rows × [`Attention::packed_width`]: queries, keys, values) into `y` (rows × d); overwrites `y`
    /// and `lse` (b·h·t: log of the softmax's denominator, all that the backward needs of the probabilities).
    fn attention(
        &self,
        shape: Attention,
        qkv: Self::View<'_>,
        y: Self::ViewMut<'_>,
        lse: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Overwrites `dqkv`.
    fn attention_backward(
        &self,
        shape: Attention,
        qkv: Self::View<'_>,
        y: Self::View<'_>,
        lse: Self::View<'_>,
        dy: Self::View<'_>,
        dqkv: Self::ViewMut<'_>,
    ) -> Result<()>;

    /// Turns heads of `x` in place, by angles whose cosines and sines are the rows of `table` (t × head width: one half
    /// each, in f32).
    fn rotary(&self, shape: Rotary, table: Self::View<'_>, x: Self::ViewMut<'_>) -> Result<()>;

    /// SwiGLU (Shazeer, "GLU variants improve transformer", 2020): `y = silu(gate)·up`, where a row of `x` (2·`width`) is
    /// the gates, then the ups; overwrites `y`.
    fn swiglu(&self, width: usize, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Replaces the gates and ups of `x` by their gradients.
    fn swiglu_backward(&self, width: usize, x: Self::ViewMut<'_>, dy: Self::View<'_>) -> Result<()>;

    /// `y = f(x)`; overwrites.
    fn activation(&self, f: Activation, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// `dy *= f'(x)`, in place.
    fn activation_backward(&self, f: Activation, x: Self::View<'_>, dy: Self::ViewMut<'_>) -> Result<()>;

    /// `y = softmax(x)` of rows of `width` elements; overwrites.
    fn softmax(&self, width: usize, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Replaces the gradient of `y = softmax(x)` by that of `x`.
    fn softmax_backward(&self, width: usize, y: Self::View<'_>, dy: Self::ViewMut<'_>) -> Result<()>;

    /// The operand of a convolution's product: for each place of the window a row of `y` with the elements that it sees
    /// of `channels` neighbouring channels from `first` on (window rows × window columns × `channels`), zero beyond the
    /// edges; overwrites.
    fn unfold(
        &self,
        window: Window,
        first: usize,
        channels: usize,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The backward of [`Kernels::unfold`]: adds every element of `dy` to the one of `dx` that it was copied from.
    fn fold(
        &self,
        window: Window,
        first: usize,
        channels: usize,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Every filter's product with the elements that the window sees at each place, and a bias for each filter;
    /// overwrites `y` (places × filters).
    fn convolve(
        &self,
        shape: Convolution,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()> {
        unfolded::forward(self, shape, x, weight, bias, y)
    }
    /// Adds to the gradients of filters and bias.
    fn convolve_backward_weight(
        &self,
        shape: Convolution,
        dy: Self::View<'_>,
        x: Self::View<'_>,
        dweight: Self::ViewMut<'_>,
        dbias: Self::ViewMut<'_>,
    ) -> Result<()> {
        unfolded::backward_weight(self, shape, dy, x, dweight, dbias)
    }
    /// Adds to the channels of `dx` that filters see.
    fn convolve_backward_input(
        &self,
        shape: Convolution,
        dy: Self::View<'_>,
        weight: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()> {
        unfolded::backward_input(self, shape, dy, weight, dx)
    }
    /// The largest element that the window sees at each place, channel by channel; overwrites.
    fn max_pool(&self, window: Window, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Gives the gradient of each place to the first of its largest elements; overwrites `dx`.
    fn max_pool_backward(
        &self,
        window: Window,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The mean of the elements that the window sees at each place, channel by channel, edges not counted; overwrites.
    fn average_pool(&self, window: Window, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Overwrites `dx`.
    fn average_pool_backward(&self, window: Window, dy: Self::View<'_>, dx: Self::ViewMut<'_>) -> Result<()>;
    /// Copies columns of rows; those of `y` between them are left alone.
    fn copy_columns(&self, shape: Columns, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// The first row of every sample, then the scalar products of its rows in pairs: of the second with the first, of the third
    /// with the first and the second, and so on (Naumov et al., 2019); overwrites `y` (samples × [`Pairs::outputs`]).
    fn pair_products(&self, shape: Pairs, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Overwrites `dx`.
    fn pair_products_backward(
        &self,
        shape: Pairs,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;

    /// Sums over the places of every sample for its statistics, in f32 and in chunks that depend on the shape alone: for each
    /// sample the first place's channels `s`, then Σ (x - s), then Σ (x - s)² of every channel; overwrites.
    fn channel_moments(&self, shape: Channels, x: Self::View<'_>, moments: Self::ViewMut<'_>) -> Result<()>;
    /// `y = (x - mean)·rstd·weight + bias`, where `stats` (f32) has mean and rstd of every group of every sample, weight and
    /// bias are of a channel; overwrites.
    fn channel_norm(
        &self,
        shape: Channels,
        x: Self::View<'_>,
        stats: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Sums for the backward, as [`Kernels::channel_moments`] has them: for each sample Σ dy, then Σ dy·(x - mean)·rstd of
    /// every channel; overwrites.
    fn channel_norm_sums(
        &self,
        shape: Channels,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        stats: Self::View<'_>,
        sums: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// `dx = rstd·(dy·weight - a - (x - mean)·rstd·b)`, where `means` (f32) has a and b of every group of every sample: the
    /// means of dy·weight and of dy·weight·(x - mean)·rstd; overwrites.
    #[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
    fn channel_norm_backward(
        &self,
        shape: Channels,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        stats: Self::View<'_>,
        weight: Self::View<'_>,
        means: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;

    /// Drops and scales in place; the backward is the same call on the gradient.
    fn dropout(&self, mask: Dropout, x: Self::ViewMut<'_>) -> Result<()>;

    /// Writes the loss of every row (`-log softmax(logits)[target]`, unscaled) to `losses`;
    /// with [`CrossEntropy::gradient`], overwrites the logits by their scaled gradient. Both times `weights`.
    fn cross_entropy(
        &self,
        shape: CrossEntropy,
        logits: Self::ViewMut<'_>,
        targets: &Self::Ints,
        weights: LossWeights<Self::View<'_>>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Writes to `hits` (f32) 1 for every row of logits whose target is among its `k` largest, else 0. Of equal logits the
    /// first is the larger.
    fn hits(
        &self,
        classes: usize,
        k: usize,
        logits: Self::View<'_>,
        targets: &Self::Ints,
        hits: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Writes every row's mean deviation from its targets (f32) to `losses` (f32), unscaled; with
    /// [`Regression::gradient`], overwrites the predictions by their scaled gradient. `weights` (f32) has a factor of loss and
    /// gradient for every row, or is empty.
    fn regression(
        &self,
        shape: Regression,
        predictions: Self::ViewMut<'_>,
        targets: Self::View<'_>,
        weights: Self::View<'_>,
        losses: Self::ViewMut<'_>,
    ) -> Result<()>;

    /// Updates `p`, `m` and `v` of a contiguous range from its gradient; writes the new `p` to `copy` as well, if given,
    /// rounded to its type.
    fn adamw(
        &self,
        update: AdamW,
        grad: Self::View<'_>,
        m: Self::ViewMut<'_>,
        v: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
    ) -> Result<()>;
    /// `Σ u²` in f64, summed in fixed chunks, where `u` is the step that [`Kernels::adamw`] would subtract from every
    /// parameter at a learning rate of one. Changes nothing.
    fn adamw_step_squares(
        &self,
        update: AdamW,
        grad: Self::View<'_>,
        m: Self::View<'_>,
        v: Self::View<'_>,
        p: Self::View<'_>,
    ) -> Result<Self::Scalar>;
    /// Updates `p` and `m` of a contiguous range from its gradient; `copy` as in [`Kernels::adamw`].
    fn sgd(
        &self,
        update: Sgd,
        grad: Self::View<'_>,
        m: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
    ) -> Result<()>;
    /// Moves every element of `y` by `rate` of the way to that of `x`: `y += rate·(x - y)`, both f32; `copy` as in
    /// [`Kernels::adamw`].
    fn approach(
        &self,
        rate: f32,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
    ) -> Result<()>;
    /// Updates `p` and the state of a contiguous range from its gradient; `second` is empty where the rule has one state
    /// buffer. `copy` as in [`Kernels::adamw`].
    fn elements(
        &self,
        update: Elements,
        grad: Self::View<'_>,
        first: Self::ViewMut<'_>,
        second: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
    ) -> Result<()>;
}
