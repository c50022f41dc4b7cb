//! Token and position embedding tables.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Token and position embedding tables.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait EmbeddingOps: Backend {
    /// Computes `y[b,t] = token_table[tokens[b,t] - first] + position_table[t]`; overwrites.
    /// Shapes: tokens b·t, y b·t·d, position table t·d, or empty if there are no positions.
    ///
    /// The token table has the rows of consecutive tokens from `first` on, all or a shard of them:
    /// tokens without a row there contribute zeros.
    fn embedding(
        &self,
        tokens: &Self::IndexBuf,
        first: usize,
        token_table: Self::View<'_>,
        position_table: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Adds `dy` to the rows of both tables that it came from; for tokens without a row in the
    /// token table only to the positions.
    fn embedding_backward(
        &self,
        tokens: &Self::IndexBuf,
        first: usize,
        dy: Self::View<'_>,
        dtoken_table: Self::ViewMut<'_>,
        dposition_table: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of an embedding of `y` elements, where the position table has `places`.
    pub fn embedding(y: usize, places: usize) -> Self {
        Self::new("embedding", 2 * y + places).with_shape([y])
    }

    /// Returns the cost of the gradients of both tables.
    pub fn embedding_backward(dy: usize, places: usize) -> Self {
        Self::new("embedding, backward", dy).with_shape([dy]).with_f32_elements(2 * (dy + places))
    }
}
