//! Products of matrices, and affine maps of rows.

use super::Cuda;
use super::matmul::{Epilogue, Matrix, Product};
use super::memory::{Element, View, ViewMut};
use crate::backend::{Activation, ActivationOps, Gemm, Linear, LinearOps, Work};
use crate::error::Result;

/// Whether a product can keep the input of its GELU there: cuBLASLt does so in bf16, in rows that are aligned.
fn keeps_gelu(width: usize, kept: View<'_>) -> bool {
    kept.element == Element::Bf16 && width.is_multiple_of(8) && kept.pointer.is_multiple_of(16)
}

fn matrix(view: View<'_>) -> Matrix {
    Matrix { pointer: view.pointer, element: view.element }
}

impl Cuda {
    fn product(&self, shape: Gemm, a: View<'_>, b: View<'_>, c: &ViewMut<'_>, epilogue: Epilogue) -> Result<()> {
        assert!(a.len == shape.m * shape.k && b.len == shape.k * shape.n && c.len == shape.m * shape.n, "{shape:?}");
        self.0.journal.product(shape);
        let product = Product { shape, a: matrix(a), b: matrix(b), c: matrix(c.shared()), epilogue };
        self.0.matmul.run(&product, self.0.workspace.pointer(), self.0.compute.cu_stream().cast())
    }
}

impl LinearOps for Cuda {
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

    fn linear_backward_input(&self, shape: Linear, dy: View<'_>, weight: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::linear_backward_input(shape));
        let Linear { rows, inputs, outputs } = shape;
        let gemm = Gemm { m: rows, n: inputs, k: outputs, ta: false, tb: false, acc: false };
        self.product(gemm, dy, weight, &dx, Epilogue::None)
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

    fn linear_backward_bias(&self, rows: usize, dy: View<'_>, dbias: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::linear_backward_bias(rows, dbias.len));
        self.add_columns(dy, rows, &dbias)
    }
}
