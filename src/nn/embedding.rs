//! The first block of language models: a row of the token table for each token, and of learned positions where there are
//! any.

use super::dropout::StreamDropout;
use super::{Block, Context, Grads, INIT, Params};
use crate::backend::{Backend, Kernels, MemoryKind, split, split_mut};
use crate::error::Result;
use crate::layout::{Init, Tensor};

/// Token table, and position table if the network learns positions.
pub struct Embedding {
    /// Name of the token table.
    pub words: &'static str,
    /// Name of the position table and its rows.
    pub places: Option<(&'static str, usize)>,
    /// Token ids.
    pub vocabulary: usize,
    /// After it; site 0 of the network.
    pub dropout: StreamDropout,
}

impl Embedding {
    fn width(&self) -> usize {
        self.dropout.width
    }

    fn lens(&self) -> [usize; 2] {
        [self.vocabulary * self.width(), self.places.map_or(0, |(_, context)| context * self.width())]
    }

    /// Elements of the positions of a sequence, which may be shorter than the context.
    fn used<B: Backend>(&self, cx: &Context<'_, B>) -> usize {
        if self.places.is_some() { cx.micro.time * self.width() } else { 0 }
    }
}

impl<B: Kernels> Block<B> for Embedding {
    fn name(&self) -> String {
        "embedding".into()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let words = Tensor::new(self.words, &[self.vocabulary, self.width()], Init::Normal(INIT));
        let places = self.places.map(|(name, context)| Tensor::new(name, &[context, self.width()], Init::Normal(INIT)));
        std::iter::once(words).chain(places).collect()
    }

    fn input_per_row(&self) -> usize {
        0
    }

    fn saved_per_row(&self) -> usize {
        0
    }

    fn exact_per_row(&self) -> usize {
        0
    }

    fn scratch_per_row(&self) -> usize {
        self.width()
    }

    fn forward(&self, cx: &Context<'_, B>, params: Params<'_, B>, _: &B::Buf) -> Result<(B::Buf, Vec<B::Buf>)> {
        let [words, places] = split::<B, 2>(params.own, self.lens());
        let (places, _) = B::cut(places, self.used(cx));
        let mut y = cx.backend.alloc(MemoryKind::Activations, cx.micro.rows() * self.width())?;
        cx.backend.embedding(&cx.micro.parts.ids, words, places, B::all_mut(&mut y))?;
        self.dropout.apply(cx, 0, B::all_mut(&mut y))?;
        Ok((y, vec![]))
    }

    fn backward(
        &self,
        cx: &Context<'_, B>,
        _: Params<'_, B>,
        grads: Grads<'_, B>,
        _: &B::Buf,
        _: Vec<B::Buf>,
        mut dy: B::Buf,
    ) -> Result<B::Buf> {
        self.dropout.apply(cx, 0, B::all_mut(&mut dy))?;
        let [dwords, dplaces] = split_mut::<B, 2>(grads.own, self.lens());
        let (dplaces, _) = B::cut_mut(dplaces, self.used(cx));
        cx.backend.embedding_backward(&cx.micro.parts.ids, B::all(&dy), dwords, dplaces)?;
        cx.backend.alloc(MemoryKind::Activations, 0)
    }
}
