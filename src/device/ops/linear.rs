//! Matmuls, and linear layers.

use crate::kernel_cost::matmul_flops;
use crate::{Activation, ActivationOps, ElementwiseOps, KernelCost};
use hpctrain_base::error::Result;

/// A matmul `c = op(a)·op(b) (+ c)`, row-major.
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

/// A linear layer applied to every row: `y = x·Wᵀ + bias`, W stored outputs×inputs.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// Rows of `x` and `y`.
    pub rows: usize,
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
    /// The leading dimension of `y` (elements from one row to the next): its columns, or the padded
    /// [`Backend::row_stride`](crate::Backend::row_stride) of them. Padding follows every row,
    /// including the last, and is neither read nor written.
    pub stride: usize,
}

impl Linear {
    /// Creates the shape of a layer whose output rows are not padded.
    pub fn new(rows: usize, inputs: usize, outputs: usize) -> Self {
        Self { rows, inputs, outputs, stride: outputs }
    }
}

/// Matmuls, and linear layers.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait LinearOps: ActivationOps + ElementwiseOps {
    /// Computes the matmul described by `shape`.
    fn gemm(
        &self,
        shape: Gemm,
        a: Self::View<'_>,
        b: Self::View<'_>,
        c: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes `y = x·Wᵀ + bias`; overwrites. This operation and both its backwards accept padded
    /// rows of `y` and `dy` if there is no bias.
    fn linear(
        &self,
        shape: Linear,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes a linear layer and adds a residual: `y = x·Wᵀ + bias + more`, where `more` is as
    /// large as `y`; overwrites.
    fn linear_add(
        &self,
        shape: Linear,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        more: Self::View<'_>,
        mut y: Self::ViewMut<'_>,
    ) -> Result<()> {
        self.linear(shape, x, weight, bias, Self::reborrow(&mut y))?;
        self.add(more, y)
    }
    /// Returns whether [`LinearOps::linear_add`] is fused: it then adds before it stores, rounds
    /// once, and saves a pass or two over `y`, unless the device's library does not support that.
    fn fuses_add(&self) -> bool {
        false
    }
    /// Computes `dx = dy·W`; overwrites.
    fn linear_backward_input(
        &self,
        shape: Linear,
        dy: Self::View<'_>,
        weight: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes a linear layer and its GELU: `h = x·Wᵀ + bias`, `y = gelu(h)`; overwrites both.
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
    /// Computes the backward of a linear layer's input and of the GELU before it: `dh =
    /// (dy·W)·gelu'(h)`; overwrites.
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
    /// Computes `dW = dyᵀ·x`, or `dW += dyᵀ·x` with `add`; `dbias += Σ_rows dy`.
    fn linear_backward_weight(
        &self,
        shape: Linear,
        dy: Self::View<'_>,
        x: Self::View<'_>,
        dweight: Self::ViewMut<'_>,
        dbias: Self::ViewMut<'_>,
        add: bool,
    ) -> Result<()>;
    /// Computes `dbias += Σ_rows dy` over `rows` rows.
    fn linear_backward_bias(
        &self,
        rows: usize,
        dy: Self::View<'_>,
        dbias: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of a matmul.
    pub fn gemm(s: Gemm) -> Self {
        let c = s.m * s.n;
        let cost = Self::new("matmul", s.m * s.k + s.k * s.n + if s.acc { 0 } else { c })
            .with_shape([s.m, s.k, s.n]);
        cost.with_f32_elements(if s.acc { 2 * c } else { 0 })
            .with_flops(matmul_flops(s.m, s.n, s.k))
    }

    /// Returns the cost of a linear layer, with a bias or without.
    pub fn linear(s: Linear, bias: usize) -> Self {
        let moved = s.rows * s.inputs + s.inputs * s.outputs + bias + s.rows * s.outputs;
        Self::new("linear", moved)
            .with_shape([s.rows, s.inputs, s.outputs])
            .with_flops(matmul_flops(s.rows, s.inputs, s.outputs))
    }

    /// Returns the cost of a linear layer and a sum.
    pub fn linear_add(s: Linear, bias: usize) -> Self {
        let linear = Self::linear(s, bias);
        Self {
            kernel: "linear and sum",
            elements: linear.elements + (s.rows * s.outputs) as f64,
            ..linear
        }
    }

    /// Returns the cost of a linear layer and its GELU, both of which are written.
    pub fn linear_gelu(s: Linear, bias: usize) -> Self {
        let linear = Self::linear(s, bias);
        Self {
            kernel: "linear and gelu",
            elements: linear.elements + (s.rows * s.outputs) as f64,
            ..linear
        }
    }

    /// Returns the cost of the gradient of a linear layer's input.
    pub fn linear_backward_input(s: Linear) -> Self {
        Self { kernel: "linear, input's gradient", ..Self::linear(s, 0) }
    }

    /// Returns the cost of the same gradient, back through the GELU before the layer.
    pub fn linear_gelu_backward_input(s: Linear) -> Self {
        let linear = Self::linear(s, 0);
        Self {
            kernel: "linear and gelu, input's gradient",
            elements: linear.elements + (s.rows * s.inputs) as f64,
            ..linear
        }
    }

    /// Returns the cost of the gradients of a linear layer's weight and bias.
    pub fn linear_backward_weight(s: Linear, bias: usize, add: bool) -> Self {
        let moved = s.rows * s.inputs + s.rows * s.outputs;
        let kernel =
            Self::new("linear, weight's gradient", moved).with_shape([s.rows, s.inputs, s.outputs]);
        let touched = (1 + usize::from(add)) * s.inputs * s.outputs + 2 * bias;
        kernel.with_f32_elements(touched).with_flops(matmul_flops(s.rows, s.inputs, s.outputs))
    }

    /// Returns the cost of the gradient of a bias alone.
    pub fn linear_backward_bias(rows: usize, outputs: usize) -> Self {
        Self::new("linear, bias's gradient", rows * outputs)
            .with_shape([rows, outputs])
            .with_f32_elements(2 * outputs)
    }
}
