//! Dense (linear) layers on the last axis.

use super::init::he;
use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Init, Tensor};
use hpctrain_device::{Backend, Kernels, Linear, MemoryKind};

/// `y = x·Wᵀ + b` for every row of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense {
    /// The name before `.weight` and `.bias`.
    pub name: String,
    /// The number of rows per sample.
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub bias: bool,
}

impl Dense {
    fn shape<B: Backend>(&self, cx: &Context<'_, B>) -> Linear {
        Linear::new(cx.micro.samples * self.rows, self.inputs, self.outputs)
    }
}

impl Op for Dense {
    fn tensors(&self) -> Vec<Tensor> {
        let weight = Tensor::new(
            format!("{}.weight", self.name),
            &[self.outputs, self.inputs],
            he(self.inputs),
        )
        .overwritten();
        let bias = self
            .bias
            .then(|| Tensor::new(format!("{}.bias", self.name), &[self.outputs], Init::Zeros));
        std::iter::once(weight).chain(bias).collect()
    }

    fn sizes(&self) -> LayerSizes {
        LayerSizes {
            input: self.rows * self.inputs,
            output: self.rows * self.outputs,
            ..LayerSizes::default()
        }
    }

    fn flops(&self) -> u64 {
        2 * (self.rows * self.inputs * self.outputs) as u64
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let shape = self.shape(cx);
        let mut y = cx.backend.alloc(MemoryKind::Activations, shape.rows * shape.outputs)?;
        let bias = params.get(1).copied().unwrap_or(B::split_at(params[0], 0).0);
        cx.backend.linear(shape, B::all(x), params[0], bias, B::all_mut(&mut y))?;
        Ok((y, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let shape = self.shape(cx);
        let BackwardArgs { params, grads, first, x, dy, needs_input_grad: wants_input, .. } = back;
        let mut none = b.alloc_f32(MemoryKind::Activations, 0)?;
        let (weight, bias) = grads.split_at_mut(1);
        let bias = bias.first_mut().map_or_else(|| B::all_mut(&mut none), |bias| B::reborrow(bias));
        b.linear_backward_weight(
            shape,
            B::all(&dy),
            B::all(x),
            B::reborrow(&mut weight[0]),
            bias,
            !first,
        )?;
        if !wants_input {
            return Ok(dy);
        }
        let mut dx = b.alloc(MemoryKind::Activations, shape.rows * shape.inputs)?;
        b.linear_backward_input(shape, B::all(&dy), params[0], B::all_mut(&mut dx))?;
        Ok(dx)
    }
}
