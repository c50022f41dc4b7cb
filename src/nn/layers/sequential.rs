//! Sequences of layers.

use super::layer::{BackwardArgs, LayerOp, LayerSizes, Op, Slice};
use crate::Context;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_device::Kernels;

/// One or more layers, computed one after the other.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence(pub Vec<LayerOp>);

impl Op for Sequence {
    fn tensors(&self) -> Vec<Tensor> {
        self.0.iter().flat_map(LayerOp::tensors).collect()
    }

    fn slices(&self) -> Vec<Slice> {
        self.0.iter().flat_map(LayerOp::slices).collect()
    }

    /// Returns the number of saved buffers of all layers, including the inputs of all but the
    /// first.
    fn saved_buffers(&self) -> usize {
        self.0.iter().map(LayerOp::saved_buffers).sum::<usize>() + self.0.len() - 1
    }

    fn sizes(&self) -> LayerSizes {
        let all: Vec<LayerSizes> = self.0.iter().map(LayerOp::sizes).collect();
        let between: usize = all[1..].iter().map(|sizes| sizes.input).sum();
        LayerSizes {
            input: all[0].input,
            output: all[all.len() - 1].output,
            kept: all.iter().map(|sizes| sizes.kept).sum::<usize>() + between,
            saved_f32: all.iter().map(|sizes| sizes.saved_f32).sum(),
            // A backward holds the gradients of its output and its input.
            scratch: all
                .iter()
                .map(|sizes| sizes.scratch + sizes.input + sizes.output)
                .max()
                .unwrap_or(0),
        }
    }

    fn flops(&self) -> u64 {
        self.0.iter().map(LayerOp::flops).sum()
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let mut kept = Vec::with_capacity(self.saved_buffers());
        let mut rest = params;
        let mut last: Option<B::Buf> = None;
        for step in &self.0 {
            let (own, others) = rest.split_at(step.slices().len());
            rest = others;
            let (y, of_step) = step.forward(cx, own, last.as_ref().unwrap_or(x))?;
            kept.extend(of_step);
            kept.extend(last.replace(y));
        }
        Ok((last.ok_or_else(|| Error::internal("a sequence without layers"))?, kept))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let BackwardArgs {
            mut params,
            mut grads,
            first,
            x,
            mut kept,
            mut dy,
            needs_input_grad: wants_input,
        } = back;
        for (i, step) in self.0.iter().enumerate().rev() {
            // The forward pushed the layer's saved buffers, then its input.
            let input = if i > 0 { kept.pop() } else { None };
            let of_step = kept.split_off(kept.len() - step.saved_buffers());
            let own = params.len() - step.slices().len();
            let (params_before, own_params) = params.split_at(own);
            let (grads_before, own_grads) = grads.split_at_mut(own);
            (params, grads) = (params_before, grads_before);
            dy = step.backward(
                cx,
                BackwardArgs {
                    params: own_params,
                    grads: own_grads,
                    first,
                    x: input.as_ref().unwrap_or(x),
                    kept: of_step,
                    dy,
                    needs_input_grad: wants_input || i > 0,
                },
            )?;
        }
        Ok(dy)
    }
}
