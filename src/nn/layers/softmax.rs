//! Softmax of the last axis.

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_device::{Kernels, MemoryKind};

/// Softmax of every row.
#[derive(Debug, Clone, PartialEq)]
pub struct Softmax {
    /// The number of elements per row.
    pub width: usize,
    /// The number of elements per sample.
    pub elements: usize,
}

impl Softmax {
    fn softmax<B: Kernels>(&self, cx: &Context<'_, B>, x: &B::Buf) -> Result<B::Buf> {
        let mut y = cx.backend.alloc(MemoryKind::Activations, B::len(x))?;
        cx.backend.softmax(self.width, B::all(x), B::all_mut(&mut y))?;
        Ok(y)
    }
}

impl Op for Softmax {
    fn sizes(&self) -> LayerSizes {
        LayerSizes {
            input: self.elements,
            output: self.elements,
            scratch: self.elements,
            ..LayerSizes::default()
        }
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        _: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        Ok((self.softmax(cx, x)?, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        // Recomputed instead of saved.
        let y = self.softmax(cx, back.x)?;
        let mut dy = back.dy;
        cx.backend.softmax_backward(self.width, B::all(&y), B::all_mut(&mut dy))?;
        Ok(dy)
    }
}
