//! Chunked cross-entropy: computes the last block and the loss for some rows at a time, so that not
//! all logits are in memory at once (`parallel.loss_chunk_tokens`). The backward of a chunk follows
//! its loss, and gradients of parameters are accumulated over the chunks, as in Hsu et al., "Liger
//! kernel", 2024.

use std::ops::Range;
use std::sync::Arc;

use hpctrain_base::error::Result;
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::loss::Objective;
use hpctrain_nn::{Block, Context, Grads, MicroBatch, Params};

/// Some rows of a micro-batch, and the last block's input for them.
pub struct RowChunk<B: Kernels> {
    /// The rows.
    pub micro: MicroBatch<B>,
    /// The last block's input for them, rows × width.
    pub x: B::Buf,
}

impl<B: Kernels> RowChunk<B> {
    /// Copies rows `rows` of a micro-batch whose rows have the input `x`.
    pub fn copy_rows(
        backend: &B,
        micro: &MicroBatch<B>,
        x: &B::Buf,
        rows: Range<usize>,
    ) -> Result<Self> {
        let at = elements::<B>(x, micro.rows(), &rows);
        let mut part = backend.alloc(MemoryKind::Activations, at.len())?;
        backend.copy(B::view(x, at), B::all_mut(&mut part))?;
        Ok(Self { micro: micro.slice_rows(backend, rows)?, x: part })
    }
}

/// A chunk whose forward is done.
pub struct ChunkForward<B: Kernels> {
    /// The rows of the chunk.
    pub chunk: RowChunk<B>,
    /// The activations that the block's forward saved.
    pub saved: Vec<B::Buf>,
    /// The gradient of the block's output.
    pub dy: B::Buf,
}

/// Cuts `rows` rows into chunks of `at_once` rows; 0 means all at once.
pub fn chunks(rows: usize, at_once: usize) -> impl Iterator<Item = Range<usize>> {
    let step = if at_once == 0 { rows } else { at_once };
    (0..rows).step_by(step.max(1)).map(move |from| from..(from + step).min(rows))
}

/// The last block, with the loss of its output.
pub struct ChunkedHead<'a, B: Kernels> {
    /// The block.
    pub block: &'a dyn Block<B>,
    /// The name of the block, for profiles.
    pub name: &'a Arc<str>,
    /// The loss.
    pub objective: &'a Objective<B>,
    /// The factor of the loss's gradient.
    pub scale: f32,
    /// The number of rows in a chunk.
    pub chunk_rows: usize,
}

impl<B: Kernels> ChunkedHead<'_, B> {
    /// Computes the backward of the first chunk, then forward, loss and backward of the others.
    /// Returns the gradient of the whole input `x`. The losses of the other chunks go to `losses`.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
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
        let mut first = Some(first);
        for chunk_rows in chunks(rows, self.chunk_rows) {
            let at = elements::<B>(x, rows, &chunk_rows);
            let ChunkForward { chunk: piece, saved, dy } = match first.take() {
                Some(first) => first,
                None => self.forward(
                    cx,
                    params,
                    RowChunk::copy_rows(cx.backend, cx.micro, x, chunk_rows)?,
                    losses,
                )?,
            };
            let part = self.block.backward(
                &cx.with_micro_batch(&piece.micro),
                params,
                grads.reborrow(),
                &piece.x,
                saved,
                dy,
            )?;
            cx.backend.copy(B::all(&part), B::view_mut(&mut dx, at))?;
            (grads.first, grads.tied_first) = (false, false);
        }
        Ok(dx)
    }

    /// Computes the forward and the loss of a chunk.
    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        piece: RowChunk<B>,
        losses: &mut Vec<B::Scalar>,
    ) -> Result<ChunkForward<B>> {
        let (mut y, saved) = {
            let _span = span(ActivityKind::Forward, Some(self.name));
            self.block.forward(&cx.with_micro_batch(&piece.micro), params, &piece.x)?
        };
        let _span = span(ActivityKind::Loss, None);
        losses.push(self.objective.train(
            cx.backend,
            cx.tensor,
            &piece.micro,
            &mut y,
            self.scale,
        )?);
        Ok(ChunkForward { chunk: piece, saved, dy: y })
    }
}

/// Returns the elements of some of the `rows` rows of a buffer.
fn elements<B: Kernels>(x: &B::Buf, rows: usize, some: &Range<usize>) -> Range<usize> {
    let width = B::len(x) / rows.max(1);
    some.start * width..some.end * width
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut() {
        let cut = |rows, at_once| chunks(rows, at_once).collect::<Vec<_>>();
        assert_eq!(cut(5, 2), [0..2, 2..4, 4..5]);
        assert_eq!(cut(4, 2), [0..2, 2..4]);
        for at_once in [0, 4, 5, usize::MAX] {
            assert_eq!((cut(4, at_once).len(), cut(4, at_once)[0].clone()), (1, 0..4));
        }
        assert!(cut(0, 0).is_empty() && cut(0, 3).is_empty());
    }
}
