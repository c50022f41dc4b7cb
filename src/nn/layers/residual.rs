//! Residual connections (He et al., "Deep residual learning", 2016).

use super::layer::{BackwardArgs, LayerSizes, Op, Slice};
use super::sequential::Sequence;
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::Tensor;
use hpctrain_device::{Kernels, MemoryKind};

/// `shortcut(x) + body(x)`, or `x + body(x)` without a shortcut.
#[derive(Debug, Clone, PartialEq)]
pub struct Residual {
    pub body: Sequence,
    pub shortcut: Option<Sequence>,
}

impl Residual {
    /// Returns the number of parameter slices of the body, which come before the shortcut's.
    fn of_body(&self) -> usize {
        self.body.slices().len()
    }
}

impl Op for Residual {
    fn tensors(&self) -> Vec<Tensor> {
        let around = self.shortcut.as_ref().map_or(vec![], Sequence::tensors);
        self.body.tensors().into_iter().chain(around).collect()
    }

    fn slices(&self) -> Vec<Slice> {
        let around = self.shortcut.as_ref().map_or(vec![], Sequence::slices);
        self.body.slices().into_iter().chain(around).collect()
    }

    fn saved_buffers(&self) -> usize {
        self.body.saved_buffers() + self.shortcut.as_ref().map_or(0, Sequence::saved_buffers)
    }

    fn sizes(&self) -> LayerSizes {
        let body = self.body.sizes();
        let around = self.shortcut.as_ref().map_or(LayerSizes::default(), Sequence::sizes);
        LayerSizes {
            kept: body.kept + around.kept,
            saved_f32: body.saved_f32 + around.saved_f32,
            // The gradient of one path waits for that of the other.
            scratch: body.scratch.max(around.scratch) + body.output + body.input,
            ..body
        }
    }

    fn flops(&self) -> u64 {
        self.body.flops() + self.shortcut.as_ref().map_or(0, Sequence::flops)
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let (own, around) = params.split_at(self.of_body());
        let (mut y, mut kept) = self.body.forward(cx, own, x)?;
        match &self.shortcut {
            Some(shortcut) => {
                let (other, of_shortcut) = shortcut.forward(cx, around, x)?;
                cx.backend.add(B::all(&other), B::all_mut(&mut y))?;
                kept.extend(of_shortcut);
            }
            None => cx.backend.add(B::all(x), B::all_mut(&mut y))?,
        }
        Ok((y, kept))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let BackwardArgs { params, grads, first, x, mut kept, dy, .. } = back;
        let (own_params, around_params) = params.split_at(self.of_body());
        let (own_grads, around_grads) = grads.split_at_mut(self.of_body());
        let of_shortcut = kept.split_off(self.body.saved_buffers());
        let mut copy = cx.backend.alloc(MemoryKind::Activations, B::len(&dy))?;
        cx.backend.copy(B::all(&dy), B::all_mut(&mut copy))?;
        let of_body = BackwardArgs {
            params: own_params,
            grads: own_grads,
            first,
            x,
            kept,
            dy: copy,
            needs_input_grad: true,
        };
        let mut dx = self.body.backward(cx, of_body)?;
        let around = match &self.shortcut {
            Some(shortcut) => {
                let params = around_params;
                let grads = around_grads;
                shortcut.backward(
                    cx,
                    BackwardArgs {
                        params,
                        grads,
                        first,
                        x,
                        kept: of_shortcut,
                        dy,
                        needs_input_grad: true,
                    },
                )?
            }
            None => dy,
        };
        cx.backend.add(B::all(&around), B::all_mut(&mut dx))?;
        Ok(dx)
    }
}
