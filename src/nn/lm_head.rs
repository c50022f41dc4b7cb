//! The LM head, the last block of language models: a norm, then the logits, by a weight of its own
//! or by the tied token embedding.

use std::ops::Range;
use std::sync::Arc;

use super::tensor_parallel::{ColumnLinear, NormGradRanges, TensorParallel};
use super::wgrad::GradRange;
use super::{Block, Context, Grads, INIT, KvCache, Params, TiedParam, unpack};
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Cut, Init, Tensor, TensorShards};
use hpctrain_device::{Backend, Kernels, Linear, MemoryKind, Norm};

/// The unit of the token embedding, whose weight a tied head uses.
const EMBEDDING_UNIT: usize = 0;

/// The weight of the logits, vocabulary × width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// The token embedding, a tied weight of the first unit.
    Tied,
    /// A tensor of the head, with this name.
    Own(&'static str),
}

/// The final norm and the logits.
pub struct Head {
    /// The name of the norm, before `.weight` and `.bias`.
    pub norm: &'static str,
    /// Whether the norm has a bias.
    pub bias: bool,
    /// Whether the norm subtracts the mean.
    pub centred: bool,
    /// The constant added to the variance.
    pub epsilon: f32,
    /// The width of the residual stream.
    pub width: usize,
    /// The number of token ids.
    pub vocabulary: usize,
    /// The weight of the logits.
    pub table: Table,
    /// The virtual tensor ranks of this rank, each of which has a range of token ids.
    pub slices: TensorShards,
}

impl Head {
    fn shape(&self, rows: usize) -> Norm {
        Norm { rows, width: self.width, epsilon: self.epsilon, centred: self.centred }
    }

    /// Returns the linear layer to a virtual rank's logits. Rows of logits are padded, since a
    /// vocabulary may have any size and matmuls are fast on aligned rows.
    fn logits<B: Backend>(&self, rows: usize, virtual_rank: usize) -> Linear {
        let classes = self.classes(virtual_rank);
        Linear { stride: B::row_stride(classes), ..Linear::new(rows, self.width, classes) }
    }

    /// Returns the elements of a row of logits in all virtual ranks of this rank, with padding.
    fn logits_per_row<B: Backend>(&self) -> usize {
        self.slices.held.clone().map(|virtual_rank| B::row_stride(self.classes(virtual_rank))).sum()
    }

    /// Returns the number of token ids of a virtual rank.
    fn classes(&self, virtual_rank: usize) -> usize {
        self.slices.share(self.vocabulary, virtual_rank).len()
    }

    /// Returns an upper bound of the number of token ids of all virtual ranks of this rank.
    fn all_classes(&self) -> usize {
        self.slices.held.len() * self.classes(0)
    }

    /// Returns the lengths of the tensors in a virtual rank's section: table, norm weight, norm
    /// bias.
    fn lens(&self, virtual_rank: usize) -> [usize; 3] {
        let own =
            if self.table == Table::Tied { 0 } else { self.classes(virtual_rank) * self.width };
        [own, self.width, if self.bias { self.width } else { 0 }]
    }

    /// Returns the table of each virtual rank.
    fn tables<'p, B: Kernels>(
        &self,
        params: &Params<'p, B>,
        own: Vec<B::View<'p>>,
    ) -> Result<Vec<B::View<'p>>> {
        match self.table {
            Table::Own(_) => Ok(own),
            Table::Tied => {
                let virtual_ranks = self.slices.held.clone().enumerate();
                virtual_ranks
                    .map(|(k, virtual_rank)| {
                        let from: B::View<'p> = params.tied_virtual_rank(k)?;
                        Ok(B::split_at(from, self.classes(virtual_rank) * self.width).0)
                    })
                    .collect()
            }
        }
    }

    /// Returns where the gradient of each virtual rank's table is.
    fn places(&self, own: Vec<Range<usize>>) -> Vec<GradRange> {
        match self.table {
            Table::Own(_) => GradRange::own(own),
            Table::Tied => {
                let stride = self.classes(0) * self.width;
                let virtual_ranks = self.slices.held.clone().enumerate();
                virtual_ranks
                    .map(|(k, virtual_rank)| {
                        GradRange::Tied(
                            k * stride..k * stride + self.classes(virtual_rank) * self.width,
                        )
                    })
                    .collect()
            }
        }
    }
}

impl<B: Kernels> Block<B> for Head {
    fn name(&self) -> String {
        "head".into()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let table = match self.table {
            Table::Tied => None,
            Table::Own(name) => {
                let table = Tensor::new(name, &[self.vocabulary, self.width], Init::Normal(INIT));
                Some(table.overwritten().cut(Cut::Rows { segments: 1 }))
            }
        };
        let weight = Tensor::new(format!("{}.weight", self.norm), &[self.width], Init::Ones);
        let bias = self
            .bias
            .then(|| Tensor::new(format!("{}.bias", self.norm), &[self.width], Init::Zeros));
        table.into_iter().chain([weight]).chain(bias).collect()
    }

    fn tied_to(&self) -> Option<TiedParam> {
        (self.table == Table::Tied)
            .then_some(TiedParam { unit: EMBEDDING_UNIT, len: self.all_classes() * self.width })
    }

    fn input_per_row(&self) -> usize {
        self.width
    }

    fn saved_elems_per_row(&self) -> usize {
        self.slices.own(self.width)
    }

    fn saved_f32_per_row(&self) -> usize {
        self.slices.own(2)
    }

    fn forward_scratch_per_row(&self) -> usize {
        self.slices.gathered(self.width)
    }

    fn scratch_per_row(&self) -> usize {
        // The gradient of the logits, then that of the input.
        (self.logits_per_row::<B>() + self.slices.sums(self.width)).max(self.slices.own(self.width))
    }

    fn deferred_per_row(&self) -> usize {
        // The gradient of the logits, and the norm.
        self.logits_per_row::<B>() + self.width
    }

    fn deferred_scratch_per_row(&self) -> usize {
        // The gradients of the logits, the norm and the input.
        self.logits_per_row::<B>() + 2 * self.width + self.slices.sums(self.width)
    }

    fn pads_output(&self) -> bool {
        true
    }

    fn is_row_by_row(&self) -> bool {
        // With sequence parallelism the rows of other ranks are all-gathered for the matmul.
        !(self.slices.sequence && self.slices.ranks() > 1)
    }

    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let rows = cx.micro.rows();
        let virtual_ranks = TensorParallel::new(cx, &self.slices);
        let [own, weight, bias] =
            virtual_ranks.parameters(&params, |virtual_rank| self.lens(virtual_rank));
        let tables = self.tables(&params, own)?;
        let (no_bias, _) = B::split_at(params.own, 0);
        let (norm, stats) = virtual_ranks.norm(self.shape(rows), x, weight[0], bias[0])?;
        let all_rows = virtual_ranks.gather(&norm, self.width)?;
        let of_virtual_ranks = self.slices.of_virtual_ranks(rows, self.vocabulary, B::row_stride);
        let mut logits =
            b.alloc(MemoryKind::Activations, of_virtual_ranks.last().map_or(0, |last| last.end))?;
        for ((virtual_rank, at), table) in
            self.slices.held.clone().zip(of_virtual_ranks).zip(tables)
        {
            let x = B::all(all_rows.as_ref().unwrap_or(&norm));
            b.linear(
                self.logits::<B>(rows, virtual_rank),
                x,
                table,
                no_bias,
                B::view_mut(&mut logits, at),
            )?;
        }
        Ok((logits, vec![norm, stats]))
    }

    fn supports_kv_cache(&self) -> bool {
        true
    }

    /// Computes each row independently.
    fn forward_cached(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
        past: &mut KvCache<B>,
    ) -> Result<B::Buf> {
        past.advance(cx.micro.rows())?;
        self.forward(cx, params, x).map(|(logits, _)| logits)
    }

    fn backward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        mut grads: Grads<'_, B>,
        x: &B::Buf,
        saved: Vec<B::Buf>,
        dlogits: B::Buf,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let rows = cx.micro.rows();
        let virtual_ranks = TensorParallel::new(cx, &self.slices);
        let [own, weight, _] =
            virtual_ranks.parameters(&params, |virtual_rank| self.lens(virtual_rank));
        let [a_table, a_weight, a_bias] =
            virtual_ranks.places(params.section, |virtual_rank| self.lens(virtual_rank));
        let [norm, stats] = unpack(saved)?;
        let map = ColumnLinear {
            shapes: self
                .slices
                .held
                .clone()
                .map(|virtual_rank| self.logits::<B>(rows, virtual_rank))
                .collect(),
            weights: self.tables(&params, own)?,
            places: self.places(a_table),
            biases: vec![0..0; self.slices.held.len()],
        };
        let dlogits = Arc::new(dlogits);
        let of_virtual_ranks = self.slices.of_virtual_ranks(rows, self.vocabulary, B::row_stride);
        let of_virtual_ranks =
            of_virtual_ranks.into_iter().map(|at| (dlogits.clone(), at)).collect();
        drop(dlogits);
        let dnorm = virtual_ranks.column_backward(
            &map,
            &mut grads,
            of_virtual_ranks,
            virtual_ranks.gathered(norm, self.width)?,
        )?;
        let mut dx =
            b.alloc(MemoryKind::Activations, virtual_ranks.own_rows().len() * self.width)?;
        // The norm adds to these zeros. To overwrite instead would change bits: a gradient of -0
        // would keep its sign, but 0 + -0 is 0.
        b.zero(B::all_mut(&mut dx))?;
        let places = NormGradRanges { weights: &a_weight, biases: &a_bias };
        virtual_ranks.norm_backward(
            self.shape(rows),
            &dnorm,
            x,
            weight[0],
            &stats,
            &mut dx,
            &mut grads,
            places,
        )?;
        Ok(dx)
    }
}
