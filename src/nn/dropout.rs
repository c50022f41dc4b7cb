//! Dropout on the residual stream (Hinton et al., 2012).

use super::Context;
use hpctrain_base::error::Result;
use hpctrain_base::random;
use hpctrain_device::{Dropout, Kernels, MemoryKind};

/// Dropout of rows of the residual stream, at numbered sites of a network.
#[derive(Debug, Clone, Copy)]
pub struct ResidualDropout {
    /// The probability of dropping an element.
    pub rate: f32,
    /// The width of the residual stream.
    pub width: usize,
}

impl ResidualDropout {
    /// Applies the dropout of a site in place. The backward makes the same call on the gradient.
    /// `x` holds rows of the micro-batch from `first_row` on.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn apply<B: Kernels>(
        self,
        cx: &Context<'_, B>,
        site: usize,
        first_row: usize,
        x: B::ViewMut<'_>,
    ) -> Result<()> {
        let Some(training) = cx.training.as_ref().filter(|_| self.drops(cx)) else { return Ok(()) };
        let key = random::derive(training.dropout, &[site as u64]);
        let offset = (cx.micro.first * cx.micro.time as u64 + first_row as u64) * self.width as u64;
        cx.backend.dropout(Dropout { rate: self.rate, key, offset }, x)
    }

    /// Returns true if anything is dropped.
    pub fn drops<B: Kernels>(self, cx: &Context<'_, B>) -> bool {
        cx.training.is_some() && self.rate > 0.0
    }

    /// Returns a copy of the gradient with the mask of a site applied, or `None` if nothing is
    /// dropped.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn masked<B: Kernels>(
        self,
        cx: &Context<'_, B>,
        site: usize,
        first_row: usize,
        dy: &B::Buf,
    ) -> Result<Option<B::Buf>> {
        if !self.drops(cx) {
            return Ok(None);
        }
        let mut masked = cx.backend.alloc(MemoryKind::Activations, B::len(dy))?;
        cx.backend.copy(B::all(dy), B::all_mut(&mut masked))?;
        self.apply(cx, site, first_row, B::all_mut(&mut masked))?;
        Ok(Some(masked))
    }
}
