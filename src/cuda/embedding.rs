//! Embeddings of tokens and positions.

use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use super::reduce::pack;
use super::{Cuda, CudaInts};
use hpctrain_base::error::Result;
use hpctrain_device::{Backend, EmbeddingOps, KernelCost};

impl EmbeddingOps for Cuda {
    fn embedding(
        &self,
        tokens: &CudaInts,
        first: usize,
        token_table: View<'_>,
        position_table: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::embedding(y.len, position_table.len));
        let rows = tokens.len();
        let width = y.len / rows.max(1);
        let time = position_table.len / width.max(1);
        let words = token_table.len / width.max(1);
        assert!(
            rows * width == y.len && time * width == position_table.len,
            "an embedding of {rows} rows"
        );
        let args = [tokens.into(), token_table.into(), position_table.into(), (&y).into()];
        let sizes = [rows.into(), time.into(), width.into(), first.into(), words.into()];
        self.launch(
            "embedding.cu",
            "embedding",
            Grid::over(y.len.div_ceil(8)),
            &[&args[..], &sizes].concat(),
        )
    }

    fn embedding_backward(
        &self,
        tokens: &CudaInts,
        first: usize,
        dy: View<'_>,
        dtoken_table: ViewMut<'_>,
        dposition_table: ViewMut<'_>,
    ) -> Result<()> {
        let _launch =
            self.profile_launch(KernelCost::embedding_backward(dy.len, dposition_table.len));
        let rows = tokens.len();
        let width = dy.len / rows.max(1);
        let time = dposition_table.len / width.max(1);
        let order = self.upload_indices(&tokens.sorted_positions())?;
        let grid = Grid::plane(rows, width.div_ceil(128 * pack(self.element())), (128, 4, 1));
        let words = dtoken_table.len / width.max(1);
        let args = [tokens.into(), (&order).into(), dy.into(), (&dtoken_table).into()];
        let sizes = [rows.into(), width.into(), first.into(), words.into()];
        self.launch(
            "embedding_backward.cu",
            "embedding_backward_tokens",
            grid,
            &[&args[..], &sizes].concat(),
        )?;
        if dposition_table.len == 0 {
            return Ok(());
        }
        let args = [dy.into(), (&dposition_table).into(), rows.into(), time.into(), width.into()];
        let grid = Grid::over(dposition_table.len.div_ceil(pack(self.element())));
        self.launch("embedding_backward.cu", "embedding_backward_positions", grid, &args)
    }
}
