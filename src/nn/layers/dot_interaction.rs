//! The dot interaction of recommendation models.

use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_device::{DotInteraction, Kernels, MemoryKind};

/// The first row of a sample, followed by the dot products of all pairs of its rows (Naumov et al.,
/// "Deep learning recommendation model", 2019).
#[derive(Debug, Clone, PartialEq)]
pub struct Interaction {
    /// The number of rows per sample.
    pub rows: usize,
    pub width: usize,
}

impl Interaction {
    fn pairs(&self, samples: usize) -> DotInteraction {
        DotInteraction { samples, rows: self.rows, width: self.width }
    }
}

impl Op for Interaction {
    fn sizes(&self) -> LayerSizes {
        let pairs = self.pairs(1);
        LayerSizes {
            input: self.rows * self.width,
            output: pairs.outputs(),
            ..LayerSizes::default()
        }
    }

    fn flops(&self) -> u64 {
        2 * (self.rows * (self.rows - 1) / 2 * self.width) as u64
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        _: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let pairs = self.pairs(cx.micro.samples);
        let mut y = cx.backend.alloc(MemoryKind::Activations, pairs.samples * pairs.outputs())?;
        cx.backend.dot_interaction(pairs, B::all(x), B::all_mut(&mut y))?;
        Ok((y, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let mut dx = cx.backend.alloc(MemoryKind::Activations, B::len(back.x))?;
        cx.backend.dot_interaction_backward(
            self.pairs(cx.micro.samples),
            B::all(back.x),
            B::all(&back.dy),
            B::all_mut(&mut dx),
        )?;
        Ok(dx)
    }
}
