//! Embedding of ids.

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::{Context, INIT};
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Init, Tensor};
use hpctrain_device::{Kernels, MemoryKind};

/// An embedding table: the first layer if samples are ids.
#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    /// The name before `.weight`.
    pub name: String,
    /// The number of different ids, which is the number of rows of the table.
    pub ids: usize,
    /// The number of ids per sample.
    pub time: usize,
    pub width: usize,
}

impl Op for Embedding {
    fn tensors(&self) -> Vec<Tensor> {
        vec![Tensor::new(
            format!("{}.weight", self.name),
            &[self.ids, self.width],
            Init::Normal(INIT),
        )]
    }

    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: self.time * self.width, ..LayerSizes::default() }
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        _: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let mut y =
            cx.backend.alloc(MemoryKind::Activations, cx.micro.samples * self.time * self.width)?;
        cx.backend.embedding(
            &cx.micro.fields.ids,
            0,
            params[0],
            B::split_at(params[0], 0).0,
            B::all_mut(&mut y),
        )?;
        Ok((y, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let mut none = cx.backend.alloc_f32(MemoryKind::Activations, 0)?;
        let table = B::reborrow(&mut back.grads[0]);
        cx.backend.embedding_backward(
            &cx.micro.fields.ids,
            0,
            B::all(&back.dy),
            table,
            B::all_mut(&mut none),
        )?;
        cx.backend.alloc(MemoryKind::Activations, 0)
    }
}
