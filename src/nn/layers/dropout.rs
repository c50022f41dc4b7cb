//! Dropout (Hinton et al., 2012).

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use crate::dropout::ResidualDropout;
use hpctrain_base::error::Result;
use hpctrain_device::{Kernels, MemoryKind};

/// Dropout of all elements of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct DropoutLayer {
    /// Its dropout site in the network.
    pub site: usize,
    pub rate: f32,
    pub elements: usize,
}

impl DropoutLayer {
    fn dropout(&self) -> ResidualDropout {
        ResidualDropout { rate: self.rate, width: self.elements }
    }
}

impl Op for DropoutLayer {
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
        cx.backend.copy(B::all(x), B::all_mut(&mut y))?;
        self.dropout().apply(cx, self.site, 0, B::all_mut(&mut y))?;
        Ok((y, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let mut dy = back.dy;
        self.dropout().apply(cx, self.site, 0, B::all_mut(&mut dy))?;
        Ok(dy)
    }
}
