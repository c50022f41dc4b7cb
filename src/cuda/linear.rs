//! GEMMs and linear layers.

use super::matmul_desc::{BIAS_ALIGNMENT, Epilogue, MatmulDesc, Matrix};
use super::memory::{Element, View, ViewMut};
use super::{Cuda, CudaBuf};
use hpctrain_base::error::Result;
use hpctrain_device::{
    Activation, ActivationOps, ElementwiseOps, Gemm, KernelCost, Linear, LinearOps, MemoryKind,
};

/// Returns true if a fused matmul can store the input of its GELU in `kept`: cuBLASLt does so for
/// bf16 and aligned rows.
fn keeps_gelu(width: usize, kept: View<'_>) -> bool {
    kept.element == Element::Bf16 && width.is_multiple_of(8) && kept.pointer.is_multiple_of(16)
}

fn matrix(view: View<'_>) -> Matrix {
    Matrix { pointer: view.pointer, element: view.element }
}

/// Returns the strides of matrices without padding.
fn packed(shape: Gemm) -> [usize; 3] {
    let Gemm { m, n, k, ta, tb, .. } = shape;
    [if ta { m } else { k }, if tb { k } else { n }, n]
}

/// Creates a matmul of these operands with these row strides.
fn strided(
    shape: Gemm,
    strides: [usize; 3],
    a: View<'_>,
    b: View<'_>,
    c: &ViewMut<'_>,
    epilogue: Epilogue,
) -> MatmulDesc {
    let Gemm { m, n, k, ta, tb, .. } = shape;
    let rows = [if ta { k } else { m }, if tb { n } else { k }, m];
    let is_long = strides.iter().zip(packed(shape)).all(|(stride, columns)| *stride >= columns);
    let fit = [a.len, b.len, c.len]
        .iter()
        .zip(rows)
        .zip(strides)
        .all(|((len, rows), stride)| *len == rows * stride);
    assert!(is_long && fit, "{shape:?} in rows of {strides:?}");
    MatmulDesc {
        shape,
        strides,
        a: matrix(a),
        b: matrix(b),
        c: matrix(c.shared()),
        from: c.shared().pointer,
        epilogue,
    }
}

/// Creates a matmul of these operands without padding.
fn product(
    shape: Gemm,
    a: View<'_>,
    b: View<'_>,
    c: &ViewMut<'_>,
    epilogue: Epilogue,
) -> MatmulDesc {
    strided(shape, packed(shape), a, b, c, epilogue)
}

/// A bias that is aligned for cuBLASLt.
struct Bias {
    /// The address, or null if there is no bias.
    pointer: u64,
    /// Keeps a copy alive until the matmul is queued: memory is reused in stream order.
    _copy: Option<CudaBuf>,
}

impl Cuda {
    fn run(&self, product: &MatmulDesc) -> Result<()> {
        self.0.placement_log.product(product.shape);
        self.0.counters.add_launch();
        self.0.matmul.run(product, self.0.workspace.pointer(), self.0.compute.cu_stream().cast())
    }

    /// Queues a matmul. Returns false, with nothing queued, if cuBLASLt does not support it.
    fn run_if_supported(&self, product: &MatmulDesc) -> Result<bool> {
        self.0.placement_log.product(product.shape);
        self.0.counters.add_launch();
        self.0.matmul.run_if_supported(
            product,
            self.0.workspace.pointer(),
            self.0.compute.cu_stream().cast(),
        )
    }

    /// Returns the bias, or a copy of it if its address is not a multiple of [`BIAS_ALIGNMENT`].
    fn bias(&self, bias: View<'_>) -> Result<Bias> {
        let pointer = bias.pointer_or_null();
        if pointer.is_multiple_of(BIAS_ALIGNMENT) {
            return Ok(Bias { pointer, _copy: None });
        }
        let mut copy = self.take(MemoryKind::Activations, bias.len, bias.element)?;
        let to = copy.view_mut(0..bias.len);
        self.copy_within(bias, &to)?;
        Ok(Bias { pointer: to.pointer, _copy: Some(copy) })
    }
}

impl LinearOps for Cuda {
    fn gemm(&self, shape: Gemm, a: View<'_>, b: View<'_>, c: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::gemm(shape));
        self.run(&product(shape, a, b, &c, Epilogue::None))
    }

    fn linear(
        &self,
        shape: Linear,
        x: View<'_>,
        weight: View<'_>,
        bias: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::linear(shape, bias.len));
        let Linear { rows, inputs, outputs, stride } = shape;
        let gemm = Gemm { m: rows, n: outputs, k: inputs, ta: false, tb: true, acc: false };
        let bias = self.bias(bias)?;
        let epilogue =
            if bias.pointer == 0 { Epilogue::None } else { Epilogue::Bias(bias.pointer) };
        self.run(&strided(gemm, [inputs, inputs, stride], x, weight, &y, epilogue))
    }

    /// Adds before it stores, and rounds once, if cuBLASLt has an algorithm for a bias and a
    /// residual that is not the result. Otherwise two kernels run: the first one rounds the linear
    /// layer, the second one rounds the sum. So last bits may differ between devices that have such
    /// an algorithm and those that do not.
    fn linear_add(
        &self,
        shape: Linear,
        x: View<'_>,
        weight: View<'_>,
        bias: View<'_>,
        more: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let Linear { rows, inputs, outputs, .. } = shape;
        assert!(
            more.len == y.len && more.element == y.element,
            "a sum of {} and {} elements",
            more.len,
            y.len
        );
        let gemm = Gemm { m: rows, n: outputs, k: inputs, ta: false, tb: true, acc: true };
        let own = self.bias(bias)?;
        let epilogue = if own.pointer == 0 { Epilogue::None } else { Epilogue::Bias(own.pointer) };
        let fused = MatmulDesc { from: more.pointer, ..product(gemm, x, weight, &y, epilogue) };
        if self.0.matmul.is_supported(&fused)? {
            let _launch = self.profile_launch(KernelCost::linear_add(shape, bias.len));
            if self.run_if_supported(&fused)? {
                return Ok(());
            }
        }
        self.linear(shape, x, weight, bias, y.reborrow())?;
        self.add(more, y)
    }

    fn fuses_add(&self) -> bool {
        true
    }

    fn linear_backward_input(
        &self,
        shape: Linear,
        dy: View<'_>,
        weight: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::linear_backward_input(shape));
        let Linear { rows, inputs, outputs, stride } = shape;
        let gemm = Gemm { m: rows, n: inputs, k: outputs, ta: false, tb: false, acc: false };
        self.run(&strided(gemm, [stride, inputs, inputs], dy, weight, &dx, Epilogue::None))
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
        let Linear { rows, inputs, outputs, .. } = shape;
        if keeps_gelu(outputs, h.shared()) {
            let own = self.bias(bias)?;
            let gemm = Gemm { m: rows, n: outputs, k: inputs, ta: false, tb: true, acc: false };
            let epilogue = Epilogue::Gelu { bias: own.pointer, gelu_input: h.pointer };
            let fused = product(gemm, x, weight, &y, epilogue);
            if self.0.matmul.is_supported(&fused)? {
                let _launch = self.profile_launch(KernelCost::linear_gelu(shape, bias.len));
                return self.run(&fused);
            }
        }
        self.linear(shape, x, weight, bias, h.reborrow())?;
        self.activation(Activation::Gelu, h.shared(), y)
    }

    fn linear_gelu_backward_input(
        &self,
        shape: Linear,
        dy: View<'_>,
        weight: View<'_>,
        h: View<'_>,
        mut dh: ViewMut<'_>,
    ) -> Result<()> {
        let Linear { rows, inputs, outputs, .. } = shape;
        if keeps_gelu(inputs, h) {
            let gemm = Gemm { m: rows, n: inputs, k: outputs, ta: false, tb: false, acc: false };
            let fused = product(gemm, dy, weight, &dh, Epilogue::GeluBackward { kept: h.pointer });
            if self.0.matmul.is_supported(&fused)? {
                let _launch = self.profile_launch(KernelCost::linear_gelu_backward_input(shape));
                return self.run(&fused);
            }
        }
        self.linear_backward_input(shape, dy, weight, dh.reborrow())?;
        self.activation_backward(Activation::Gelu, h, dh)
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
        let _launch =
            self.profile_launch(KernelCost::linear_backward_weight(shape, dbias.len, add));
        let Linear { rows, inputs, outputs, stride } = shape;
        let gemm = Gemm { m: outputs, n: inputs, k: rows, ta: true, tb: false, acc: add };
        self.run(&strided(gemm, [stride, inputs, inputs], dy, x, &dweight, Epilogue::None))?;
        if dbias.len == 0 {
            return Ok(());
        }
        assert!(stride == outputs, "a bias of padded rows");
        self.add_columns(dy, rows, &dbias)
    }

    fn linear_backward_bias(&self, rows: usize, dy: View<'_>, dbias: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::linear_backward_bias(rows, dbias.len));
        self.add_columns(dy, rows, &dbias)
    }
}
