//! Pooling of images.

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_device::{Backend, Im2colShape, Kernels, MemoryKind};

/// How the elements in a window are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolReduction {
    Max,
    Mean,
}

/// A pooling layer, which reduces each channel separately.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolLayer {
    /// The window, with a batch of one image.
    pub window: Im2colShape,
    pub reduction: PoolReduction,
}

impl PoolLayer {
    fn on<B: Backend>(&self, cx: &Context<'_, B>) -> Im2colShape {
        Im2colShape { batch: cx.micro.samples, ..self.window }
    }
}

impl Op for PoolLayer {
    fn sizes(&self) -> LayerSizes {
        let output = self.window.rows() * self.window.channels;
        LayerSizes { input: self.window.elements(), output, ..LayerSizes::default() }
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        _: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let window = self.on(cx);
        let mut y = cx.backend.alloc(MemoryKind::Activations, window.rows() * window.channels)?;
        match self.reduction {
            PoolReduction::Max => cx.backend.max_pool(window, B::all(x), B::all_mut(&mut y))?,
            PoolReduction::Mean => {
                cx.backend.average_pool(window, B::all(x), B::all_mut(&mut y))?
            }
        }
        Ok((y, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let window = self.on(cx);
        let mut dx = cx.backend.alloc(MemoryKind::Activations, window.elements())?;
        let x = B::all(back.x);
        let dy = B::all(&back.dy);
        match self.reduction {
            PoolReduction::Max => {
                cx.backend.max_pool_backward(window, x, dy, B::all_mut(&mut dx))?
            }
            PoolReduction::Mean => {
                cx.backend.average_pool_backward(window, dy, B::all_mut(&mut dx))?
            }
        }
        Ok(dx)
    }
}
