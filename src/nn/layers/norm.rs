//! Layer normalisation of the last axis.

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::{Init, Tensor};
use hpctrain_device::{Backend, Kernels, MemoryKind, Norm};

/// Layer normalisation of every row of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerNorm {
    /// The name before `.weight` and `.bias`.
    pub name: String,
    /// The number of rows per sample.
    pub rows: usize,
    pub width: usize,
    pub epsilon: f32,
}

impl LayerNorm {
    fn shape<B: Backend>(&self, cx: &Context<'_, B>) -> Norm {
        Norm {
            rows: cx.micro.samples * self.rows,
            width: self.width,
            epsilon: self.epsilon,
            centred: true,
        }
    }
}

impl Op for LayerNorm {
    fn tensors(&self) -> Vec<Tensor> {
        let tensor =
            |end: &str, init| Tensor::new(format!("{}.{end}", self.name), &[self.width], init);
        vec![tensor("weight", Init::Ones), tensor("bias", Init::Zeros)]
    }

    fn saved_buffers(&self) -> usize {
        1
    }

    fn sizes(&self) -> LayerSizes {
        let elements = self.rows * self.width;
        LayerSizes {
            input: elements,
            output: elements,
            saved_f32: 2 * self.rows,
            ..LayerSizes::default()
        }
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let shape = self.shape(cx);
        let mut y = b.alloc(MemoryKind::Activations, shape.rows * shape.width)?;
        let mut stats = b.alloc_f32(MemoryKind::Activations, shape.rows * 2)?;
        b.norm(shape, B::all(x), params[0], params[1], B::all_mut(&mut y), B::all_mut(&mut stats))?;
        Ok((y, vec![stats]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let shape = self.shape(cx);
        let BackwardArgs { params, grads, x, kept, dy, .. } = back;
        let [stats] = crate::unpack(kept)?;
        let [dweight, dbias] = grads else {
            return Err(Error::internal("a norm has two parameters"));
        };
        let mut dx = b.alloc(MemoryKind::Activations, shape.rows * shape.width)?;
        b.zero(B::all_mut(&mut dx))?;
        let g = B::all(&dy);
        let dweight = B::reborrow(dweight);
        let dbias = B::reborrow(dbias);
        b.norm_backward(
            shape,
            g,
            B::all(x),
            params[0],
            B::all(&stats),
            B::all_mut(&mut dx),
            dweight,
            dbias,
        )?;
        Ok(dx)
    }
}
