//! The end of a network in pieces: the last block and the loss of some rows at a time, so that not
//! all logits are in memory at once (`parallel.loss_chunk_tokens`). A piece's backward follows its
//! loss, and gradients of parameters add up over the pieces, as in Hsu et al., "Liger kernel",
//! 2024.

use std::ops::Range;
use std::sync::Arc;

use hpctrain_base::error::Result;
use hpctrain_base::spans::{Doing, span};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::loss::Objective;
use hpctrain_nn::{Block, Context, Grads, MicroBatch, Params};

/// Some rows of a micro-batch, and the last block's input for them.
pub struct RowChunk<B: Kernels> {
    /// The rows.
    pub micro: MicroBatch<B>,
    /// Rows × width.
    pub x: B::Buf,
}

impl<B: Kernels> RowChunk<B> {
    /// Rows `rows` of a micro-batch whose rows have the input `x`.
    pub fn cut(backend: &B, micro: &MicroBatch<B>, x: &B::Buf, rows: Range<usize>) -> Result<Self> {
        let at = elements::<B>(x, micro.rows(), &rows);
        let mut part = backend.alloc(MemoryKind::Activations, at.len())?;
        backend.copy(B::view(x, at), B::all_mut(&mut part))?;
        Ok(Self { micro: micro.of_rows(backend, rows)?, x: part })
    }
}

/// A piece whose forward is done.
pub struct ChunkForward<B: Kernels> {
    /// Its rows.
    pub piece: RowChunk<B>,
    /// The activations that the block's forward saved.
    pub saved: Vec<B::Buf>,
    /// The gradient of its output.
    pub dy: B::Buf,
}

/// `rows` rows in pieces of `at_once`; 0 takes all at once.
pub fn pieces(rows: usize, at_once: usize) -> impl Iterator<Item = Range<usize>> {
    let step = if at_once == 0 { rows } else { at_once };
    (0..rows).step_by(step.max(1)).map(move |from| from..(from + step).min(rows))
}

/// The last block, and the loss of its output.
pub struct ChunkedHead<'a, B: Kernels> {
    /// The block.
    pub block: &'a dyn Block<B>,
    /// Its name, for measurements.
    pub name: &'a Arc<str>,
    /// The loss.
    pub objective: &'a Objective<B>,
    /// The factor of its gradient.
    pub scale: f32,
    /// Rows of a piece.
    pub at_once: usize,
}

impl<B: Kernels> ChunkedHead<'_, B> {
    /// The backward of the first piece, then forward, loss and backward of the others: the gradient
    /// of the whole input `x`. Losses of the others go to `losses`.
    ///
    /// # Errors
    /// The device, or a message between ranks, failed.
    pub fn backward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        mut grads: Grads<'_, B>,
        x: &B::Buf,
        first: ChunkForward<B>,
        losses: &mut Vec<B::Scalar>,
    ) -> Result<B::Buf> {
        let rows = cx.micro.rows();
        let mut dx = cx.backend.alloc(MemoryKind::Activations, B::len(x))?;
        let mut begun = Some(first);
        for of_piece in pieces(rows, self.at_once) {
            let at = elements::<B>(x, rows, &of_piece);
            let ChunkForward { piece, saved, dy } = match begun.take() {
                Some(first) => first,
                None => self.begin(
                    cx,
                    params,
                    RowChunk::cut(cx.backend, cx.micro, x, of_piece)?,
                    losses,
                )?,
            };
            let part = self.block.backward(
                &cx.of(&piece.micro),
                params,
                grads.again(),
                &piece.x,
                saved,
                dy,
            )?;
            cx.backend.copy(B::all(&part), B::view_mut(&mut dx, at))?;
            (grads.first, grads.lent_first) = (false, false);
        }
        Ok(dx)
    }

    /// Forward and loss of a piece.
    fn begin(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        piece: RowChunk<B>,
        losses: &mut Vec<B::Scalar>,
    ) -> Result<ChunkForward<B>> {
        let (mut y, saved) = {
            let _span = span(Doing::Forward, Some(self.name));
            self.block.forward(&cx.of(&piece.micro), params, &piece.x)?
        };
        let _span = span(Doing::Loss, None);
        losses.push(self.objective.train(
            cx.backend,
            cx.tensor,
            &piece.micro,
            &mut y,
            self.scale,
        )?);
        Ok(ChunkForward { piece, saved, dy: y })
    }
}

/// The elements of some of `rows` rows.
fn elements<B: Kernels>(x: &B::Buf, rows: usize, some: &Range<usize>) -> Range<usize> {
    let width = B::len(x) / rows.max(1);
    some.start * width..some.end * width
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut() {
        let cut = |rows, at_once| pieces(rows, at_once).collect::<Vec<_>>();
        assert_eq!(cut(5, 2), [0..2, 2..4, 4..5]);
        assert_eq!(cut(4, 2), [0..2, 2..4]);
        for at_once in [0, 4, 5, usize::MAX] {
            assert_eq!((cut(4, at_once).len(), cut(4, at_once)[0].clone()), (1, 0..4));
        }
        assert!(cut(0, 0).is_empty() && cut(0, 3).is_empty());
    }
}
