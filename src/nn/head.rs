//! The last block of language models: a norm, then logits against a table of its own or the token table.

use std::sync::Arc;

use super::gradients::{At, OutputGradient, ranges};
use super::{Block, Context, Grads, INIT, Loan, Params, lent, unpack};
use crate::backend::{Kernels, Linear, MemoryKind, Norm, split};
use crate::error::Result;
use crate::layout::{Init, Tensor};

/// The unit of the token table, which a tied head borrows.
const EMBEDDING_UNIT: usize = 0;

/// The matrix that logits are computed with, vocabulary × width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// The token table, borrowed from the first unit.
    Tied,
    /// A tensor of the head's own, of this name.
    Own(&'static str),
}

/// Final norm and logits.
pub struct Head {
    /// Name of the norm, before `.weight` and `.bias`.
    pub norm: &'static str,
    /// Whether the norm has a bias.
    pub bias: bool,
    /// Whether the norm subtracts the mean.
    pub centred: bool,
    /// Added to the variance.
    pub epsilon: f32,
    /// Width of the stream.
    pub width: usize,
    /// Token ids.
    pub vocabulary: usize,
    /// The matrix of the logits.
    pub table: Table,
}

impl Head {
    fn shape(&self, rows: usize) -> Norm {
        Norm { rows, width: self.width, epsilon: self.epsilon, centred: self.centred }
    }

    fn logits(&self, rows: usize) -> Linear {
        Linear { rows, inputs: self.width, outputs: self.vocabulary }
    }

    /// Elements of the table.
    fn table_len(&self) -> usize {
        self.vocabulary * self.width
    }

    /// Lengths of the unit's tensors: table, norm's weight and bias.
    fn lens(&self) -> [usize; 3] {
        let own = if self.table == Table::Tied { 0 } else { self.table_len() };
        [own, self.width, if self.bias { self.width } else { 0 }]
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
                Some(Tensor::new(name, &[self.vocabulary, self.width], Init::Normal(INIT)).overwritten())
            }
        };
        let weight = Tensor::new(format!("{}.weight", self.norm), &[self.width], Init::Ones);
        let bias = self.bias.then(|| Tensor::new(format!("{}.bias", self.norm), &[self.width], Init::Zeros));
        table.into_iter().chain([weight]).chain(bias).collect()
    }

    fn borrows(&self) -> Option<Loan> {
        (self.table == Table::Tied).then_some(Loan { unit: EMBEDDING_UNIT, len: self.table_len() })
    }

    fn input_per_row(&self) -> usize {
        self.width
    }

    fn saved_per_row(&self) -> usize {
        self.width
    }

    fn exact_per_row(&self) -> usize {
        2
    }

    fn scratch_per_row(&self) -> usize {
        // The logits' gradient, then the input's.
        self.vocabulary.max(self.width)
    }

    fn deferred_per_row(&self) -> usize {
        // The logits' gradient, and the norm.
        self.vocabulary + self.width
    }

    fn deferring_scratch_per_row(&self) -> usize {
        // The logits' gradient, the norm's and the input's.
        self.vocabulary + 2 * self.width
    }

    fn forward(&self, cx: &Context<'_, B>, params: Params<'_, B>, x: &B::Buf) -> Result<(B::Buf, Vec<B::Buf>)> {
        let (b, rows) = (cx.backend, cx.micro.rows());
        let [own, weight, bias] = split::<B, 3>(params.own, self.lens());
        let table = match self.table {
            Table::Tied => B::cut(lent(params.lent)?, self.table_len()).0,
            Table::Own(_) => own,
        };
        let (no_bias, _) = B::cut(params.own, 0);
        let mut norm = b.alloc(MemoryKind::Activations, rows * self.width)?;
        let mut stats = b.alloc_f32(MemoryKind::Activations, rows * 2)?;
        b.norm(self.shape(rows), B::all(x), weight, bias, B::all_mut(&mut norm), B::all_mut(&mut stats))?;
        let mut logits = b.alloc(MemoryKind::Activations, rows * self.vocabulary)?;
        b.linear(self.logits(rows), B::all(&norm), table, no_bias, B::all_mut(&mut logits))?;
        Ok((logits, vec![norm, stats]))
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
        let (b, rows) = (cx.backend, cx.micro.rows());
        let [own, weight, _] = split::<B, 3>(params.own, self.lens());
        let [a_table, a_weight, a_bias] = ranges(self.lens());
        let (table, a_table) = match self.table {
            Table::Tied => (B::cut(lent(params.lent)?, self.table_len()).0, At::Lent),
            Table::Own(_) => (own, At::Own(a_table)),
        };
        let [norm, stats] = unpack(saved)?;
        let dlogits = Arc::new(dlogits);
        let spare = grads.linear(b, self.logits(rows), OutputGradient::Kept(&dlogits), norm, a_table, 0..0)?;
        let mut dnorm = spare.map_or_else(|| b.alloc(MemoryKind::Activations, rows * self.width), Ok)?;
        b.linear_backward_input(self.logits(rows), B::all(&dlogits), table, B::all_mut(&mut dnorm))?;
        drop(dlogits);
        let mut dx = b.alloc(MemoryKind::Activations, rows * self.width)?;
        b.zero(B::all_mut(&mut dx))?;
        let (g, x, stats) = (B::all(&dnorm), B::all(x), B::all(&stats));
        let (dweight, dbias) = grads.pair(&a_weight, &a_bias);
        b.norm_backward(self.shape(rows), g, x, weight, stats, B::all_mut(&mut dx), dweight, dbias)?;
        Ok(dx)
    }
}
