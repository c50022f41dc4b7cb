//! Tables of tokens and positions.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Tables of tokens and positions.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait EmbeddingOps: Backend {
    /// `y[b,t] = token_table[tokens[b,t] - first] + position_table[t]`; overwrites. Shapes: tokens
    /// b·t, y b·t·d, position table t·d, or empty where there are no positions.
    ///
    /// The token table has the rows of consecutive tokens from `first` on, all or some of them:
    /// tokens without a row there take zeros in its place.
    fn embedding(
        &self,
        tokens: &Self::IndexBuf,
        first: usize,
        token_table: Self::View<'_>,
        position_table: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Adds `dy` to the rows of both tables that made it; of tokens without a row in the token
    /// table only to the positions.
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
    /// Rows of a table and of positions (of so many elements in all), added.
    pub fn embedding(y: usize, places: usize) -> Self {
        Self::moves("embedding", 2 * y + places).on([y])
    }

    /// The gradients of both tables.
    pub fn embedding_backward(dy: usize, places: usize) -> Self {
        Self::moves("embedding, backward", dy).on([dy]).exactly(2 * (dy + places))
    }
}
