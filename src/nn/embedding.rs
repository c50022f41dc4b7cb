//! The first block of language models: token embeddings, plus position embeddings if they are
//! learned.

use std::ops::Range;

use super::dropout::ResidualDropout;
use super::tensor_parallel::TensorParallel;
use super::{Block, Context, Grads, INIT, KvCache, Params};
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Cut, Init, Tensor, TensorShards};
use hpctrain_device::{Backend, Kernels, MemoryKind};

/// Token embedding, and position embedding if the network learns positions.
pub struct Embedding {
    /// The name of the token embedding table.
    pub token_table: &'static str,
    /// The name of the position embedding table and its number of rows.
    pub position_table: Option<(&'static str, usize)>,
    /// The number of token ids.
    pub vocabulary: usize,
    /// The dropout after the embedding, which is site 0 of the network.
    pub dropout: ResidualDropout,
    /// The virtual tensor ranks of this rank, each of which has a range of token ids.
    pub slices: TensorShards,
}

impl Embedding {
    fn width(&self) -> usize {
        self.dropout.width
    }

    /// Returns the token ids of a virtual rank.
    fn ids(&self, virtual_rank: usize) -> Range<usize> {
        self.slices.share(self.vocabulary, virtual_rank)
    }

    /// Returns the lengths of the tensors in a virtual rank's section.
    fn lens(&self, virtual_rank: usize) -> [usize; 2] {
        [
            self.ids(virtual_rank).len() * self.width(),
            self.position_table.map_or(0, |(_, context)| context * self.width()),
        ]
    }

    /// Returns the number of elements of the position table that a sequence uses, which may be
    /// shorter than the context.
    fn used<B: Backend>(&self, cx: &Context<'_, B>) -> usize {
        if self.position_table.is_some() { cx.micro.time * self.width() } else { 0 }
    }

    /// Returns the embeddings of the tokens, the first of which is at `position` of its sequence.
    fn rows<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &Params<'_, B>,
        position: usize,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let virtual_ranks = TensorParallel::new(cx, &self.slices);
        let len = cx.micro.rows() * self.width();
        let [words, places] =
            virtual_ranks.parameters(params, |virtual_rank| self.lens(virtual_rank));
        let before = if self.position_table.is_some() { position * self.width() } else { 0 };
        // One virtual rank has the row of a token and the first one has its position: the others
        // add zeros.
        let sum = virtual_ranks.sum(len, None, |k, mut y| {
            let first = self.ids(self.slices.held.start + k).start;
            let (_, places) =
                B::split_at(places[k], if virtual_ranks.is_first(k) { before } else { 0 });
            let (places, _) =
                B::split_at(places, if virtual_ranks.is_first(k) { self.used(cx) } else { 0 });
            virtual_ranks.narrow(len, B::reborrow(&mut y), |y| {
                b.embedding(&cx.micro.fields.ids, first, words[k], places, y)
            })
        })?;
        let mut y = virtual_ranks.wait_sum(virtual_ranks.start_sum(sum), self.width())?;
        self.dropout.apply(cx, 0, virtual_ranks.own_rows().start, B::all_mut(&mut y))?;
        Ok(y)
    }
}

impl<B: Kernels> Block<B> for Embedding {
    fn name(&self) -> String {
        "embedding".into()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let words =
            Tensor::new(self.token_table, &[self.vocabulary, self.width()], Init::Normal(INIT));
        let words = words.cut(Cut::Rows { segments: 1 });
        let places = self
            .position_table
            .map(|(name, context)| Tensor::new(name, &[context, self.width()], Init::Normal(INIT)));
        std::iter::once(words).chain(places).collect()
    }

    fn input_per_row(&self) -> usize {
        0
    }

    fn saved_elems_per_row(&self) -> usize {
        0
    }

    fn saved_f32_per_row(&self) -> usize {
        0
    }

    fn forward_scratch_per_row(&self) -> usize {
        let width = self.width();
        self.slices.sums(width).saturating_sub(self.slices.own(width))
    }

    fn scratch_per_row(&self) -> usize {
        self.slices.own(self.width()) + self.slices.gathered(self.width())
    }

    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        _: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        Ok((self.rows(cx, &params, 0)?, vec![]))
    }

    fn supports_kv_cache(&self) -> bool {
        true
    }

    fn forward_cached(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        _: &B::Buf,
        past: &mut KvCache<B>,
    ) -> Result<B::Buf> {
        let first = past.positions();
        past.advance(cx.micro.rows())?;
        self.rows(cx, &params, first)
    }

    fn backward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        mut grads: Grads<'_, B>,
        _: &B::Buf,
        _: Vec<B::Buf>,
        mut dy: B::Buf,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let virtual_ranks = TensorParallel::new(cx, &self.slices);
        self.dropout.apply(cx, 0, virtual_ranks.own_rows().start, B::all_mut(&mut dy))?;
        let dy = virtual_ranks.gathered(dy, self.width())?;
        let [words, places] =
            virtual_ranks.places(params.section, |virtual_rank| self.lens(virtual_rank));
        for (k, virtual_rank) in self.slices.held.clone().enumerate() {
            let place = places[k].start
                ..places[k].start + if virtual_ranks.is_first(k) { self.used(cx) } else { 0 };
            let (dwords, dplaces) = grads.weight_and_bias(&words[k], &place);
            b.embedding_backward(
                &cx.micro.fields.ids,
                self.ids(virtual_rank).start,
                B::all(&dy),
                dwords,
                dplaces,
            )?;
        }
        b.alloc(MemoryKind::Activations, 0)
    }
}
