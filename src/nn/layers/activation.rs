//! Elementwise activation functions.

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_device::{Activation, Kernels, MemoryKind};

/// An activation function.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivationLayer {
    pub f: Activation,
    /// The number of elements per sample.
    pub elements: usize,
}

impl Op for ActivationLayer {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { input: self.elements, output: self.elements, ..LayerSizes::default() }
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        _: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let mut y = cx.backend.alloc(MemoryKind::Activations, B::len(x))?;
        cx.backend.activation(self.f, B::all(x), B::all_mut(&mut y))?;
        Ok((y, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let mut dy = back.dy;
        cx.backend.activation_backward(self.f, B::all(back.x), B::all_mut(&mut dy))?;
        Ok(dy)
    }
}
