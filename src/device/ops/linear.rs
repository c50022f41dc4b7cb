//! Products of matrices, and affine maps of rows.

use crate::kernel_cost::flops;
use crate::{Activation, ActivationOps, ElementwiseOps, KernelCost};
use hpctrain_base::error::Result;

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
    /// Elements from a row of `y` to the next: its columns, or as many as
    /// [`Backend::row_stride`](crate::Backend::row_stride) has for them, with padding behind each
    /// row, the last too. Padding is neither read nor written.
    pub stride: usize,
}

impl Linear {
    /// A map whose results lie row after row.
    pub fn new(rows: usize, inputs: usize, outputs: usize) -> Self {
        Self { rows, inputs, outputs, stride: outputs }
    }
}

/// Products of matrices, and affine maps of rows.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait LinearOps: ActivationOps + ElementwiseOps {
    /// The matrix product described by `shape`.
    fn gemm(
        &self,
        shape: Gemm,
        a: Self::View<'_>,
        b: Self::View<'_>,
        c: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// `y = x·Wᵀ + bias`; overwrites. This map and both its gradients, without a bias, take rows of
    /// `y` and `dy` that are padded.
    fn linear(
        &self,
        shape: Linear,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// A linear map and a sum: `y = x·Wᵀ + bias + more`, where `more` is as large as `y`;
    /// overwrites.
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
    /// Whether [`LinearOps::linear_add`] adds before it writes, and rounds once. It then saves a
    /// pass over `y`, or two.
    fn adds_in_products(&self) -> bool {
        false
    }
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
    /// `dbias += Σ_rows dy`, of so many rows.
    fn linear_backward_bias(
        &self,
        rows: usize,
        dy: Self::View<'_>,
        dbias: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// A product of matrices.
    pub fn gemm(s: Gemm) -> Self {
        let c = s.m * s.n;
        let product = Self::moves("product", s.m * s.k + s.k * s.n + if s.acc { 0 } else { c })
            .on([s.m, s.k, s.n]);
        product.exactly(if s.acc { 2 * c } else { 0 }).computes(flops(s.m, s.n, s.k))
    }

    /// An affine map, with a bias or without.
    pub fn linear(s: Linear, bias: usize) -> Self {
        let moved = s.rows * s.inputs + s.inputs * s.outputs + bias + s.rows * s.outputs;
        Self::moves("linear", moved)
            .on([s.rows, s.inputs, s.outputs])
            .computes(flops(s.rows, s.inputs, s.outputs))
    }

    /// An affine map and a sum.
    pub fn linear_add(s: Linear, bias: usize) -> Self {
        let linear = Self::linear(s, bias);
        Self {
            kernel: "linear and sum",
            elements: linear.elements + (s.rows * s.outputs) as f64,
            ..linear
        }
    }

    /// An affine map and its GELU, of which both are written.
    pub fn linear_gelu(s: Linear, bias: usize) -> Self {
        let linear = Self::linear(s, bias);
        Self {
            kernel: "linear and gelu",
            elements: linear.elements + (s.rows * s.outputs) as f64,
            ..linear
        }
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
        let kernel =
            Self::moves("linear, weight's gradient", moved).on([s.rows, s.inputs, s.outputs]);
        let touched = (1 + usize::from(add)) * s.inputs * s.outputs + 2 * bias;
        kernel.exactly(touched).computes(flops(s.rows, s.inputs, s.outputs))
    }

    /// The gradient of a bias alone.
    pub fn linear_backward_bias(rows: usize, outputs: usize) -> Self {
        Self::moves("linear, bias's gradient", rows * outputs)
            .on([rows, outputs])
            .exactly(2 * outputs)
    }
}
