//! Softmax of the last axis.

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_device::{Kernels, MemoryKind};

/// Softmax of every row.
#[derive(Debug, Clone, PartialEq)]
pub struct Softmax {
    /// Of a row.
    pub width: usize,
    /// Of a sample.
    pub elements: usize,
}

impl Softmax {
    fn of<B: Kernels>(&self, cx: &Context<'_, B>, x: &B::Buf) -> Result<B::Buf> {
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
        Ok((self.of(cx, x)?, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        // Computed again rather than kept.
        let y = self.of(cx, back.x)?;
        let mut dy = back.dy;
        cx.backend.softmax_backward(self.width, B::all(&y), B::all_mut(&mut dy))?;
        Ok(dy)
    }
}
