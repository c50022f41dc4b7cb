//! Linear layers, and the two matmuls of their backward.

use super::bf16::{self, Operand};
use super::gemm::{multiply_parallel, multiply_transposed};
use super::matrix::{add_rows, left, matrix, matrix_mut, right};
use super::output_init::OutputInit;
use super::threads::Threads;
use super::{Cpu, MatmulBackend};
use hpctrain_base::error::Result;
use hpctrain_device::{Gemm, KernelCost, Linear, LinearOps};

/// Computes a matmul and adds the bias, if there is one.
pub fn gemm(threads: &Threads, s: Gemm, a: &[f32], b: &[f32], c: &mut [f32], bias: &[f32]) {
    let c = matrix_mut(c, s.m, s.n);
    let start = OutputInit::new(s.acc, bias);
    if s.ta {
        assert_eq!(a.len(), s.k * s.m);
        multiply_transposed(threads, a, s.m, right(s, b), c, start, &mut []);
    } else {
        multiply_parallel(threads, left(s, a), right(s, b), c, start);
    }
}

/// Computes [`gemm`] with operands rounded to bf16. A bias replaces the previous result; the sums
/// of the rows of a transposed left operand are added to `sums`, unless it is empty.
pub fn gemm_bf16(
    threads: &Threads,
    s: Gemm,
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    bias: &[f32],
    sums: &mut [f32],
) {
    let left = Operand::new(a, s.m, s.k, s.ta);
    let right = Operand::new(b, s.n, s.k, !s.tb);
    bf16::multiply(threads, left, right, c, OutputInit::new(s.acc, bias), sums);
}

/// Returns the matmul of [`hpctrain_device::LinearOps::linear`].
pub fn forward(s: Linear) -> Gemm {
    assert_eq!(s.stride, s.outputs, "padded rows");
    Gemm { m: s.rows, n: s.outputs, k: s.inputs, ta: false, tb: true, acc: false }
}

/// Returns the matmul of [`hpctrain_device::LinearOps::linear_backward_input`].
pub fn backward_input(s: Linear) -> Gemm {
    assert_eq!(s.stride, s.outputs, "padded rows");
    Gemm { m: s.rows, n: s.inputs, k: s.outputs, ta: false, tb: false, acc: false }
}

/// Returns the matmul of [`hpctrain_device::LinearOps::linear_backward_weight`].
pub fn weight_gradient(s: Linear, add: bool) -> Gemm {
    assert_eq!(s.stride, s.outputs, "padded rows");
    Gemm { m: s.outputs, n: s.inputs, k: s.rows, ta: true, tb: false, acc: add }
}

pub fn backward_weight(
    threads: &Threads,
    s: Linear,
    dy: &[f32],
    x: &[f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
    add: bool,
) {
    assert_eq!(dy.len(), s.rows * s.outputs);
    let x = matrix(x, s.rows, s.inputs);
    let dweight = matrix_mut(dweight, s.outputs, s.inputs);
    multiply_transposed(threads, dy, s.outputs, x, dweight, OutputInit::new(add, &[]), dbias);
}

impl LinearOps for Cpu {
    fn gemm(&self, shape: Gemm, a: &[f32], b: &[f32], c: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::gemm(shape));
        self.matmul(shape, a, b, c, &[])
    }

    fn linear(
        &self,
        shape: Linear,
        x: &[f32],
        weight: &[f32],
        bias: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::linear(shape, bias.len()));
        self.weight_matmul(forward(shape), x, weight, y, bias)
    }

    fn linear_backward_input(
        &self,
        shape: Linear,
        dy: &[f32],
        weight: &[f32],
        dx: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::linear_backward_input(shape));
        self.weight_matmul(backward_input(shape), dy, weight, dx, &[])
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
        let _launch =
            self.start_kernel(KernelCost::linear_backward_weight(shape, dbias.len(), add));
        match self.matmul_backend {
            MatmulBackend::Builtin => {
                backward_weight(&self.threads, shape, dy, x, dweight, dbias, add)
            }
            MatmulBackend::BuiltinBf16 => {
                gemm_bf16(&self.threads, weight_gradient(shape, add), dy, x, dweight, &[], dbias);
            }
            MatmulBackend::OneDnn | MatmulBackend::OneDnnBf16 => {
                self.matmul(weight_gradient(shape, add), dy, x, dweight, &[])?;
                add_rows(&self.threads, dy, shape.outputs, dbias);
            }
        }
        Ok(())
    }

    fn linear_backward_bias(&self, rows: usize, dy: &[f32], dbias: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::linear_backward_bias(rows, dbias.len()));
        add_rows(&self.threads, dy, dbias.len(), dbias);
        Ok(())
    }
}
