//! Categories and numbers of a sample as rows of one width.

use super::dense_features::Numbers;
use super::layer::{BackwardArgs, LayerSizes, Op, Slice};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Init, Tensor};
use hpctrain_device::{Kernels, MemoryKind};

/// The first layer, where samples have an id of each category: a row of the category's own table
/// for each, and before them a row that layers make of the sample's numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Tables {
    /// Before `.tables.0.weight` and so on.
    pub name: String,
    /// Rows of each table.
    pub ids: Vec<usize>,
    pub width: usize,
    /// The row of the numbers, if samples have some.
    pub numbers: Option<Numbers>,
}

impl Tables {
    /// The tables alone, and the row of the numbers.
    pub fn apart(&self) -> (Self, Option<Numbers>) {
        (Self { numbers: None, ..self.clone() }, self.numbers.clone())
    }
}

impl Op for Tables {
    fn tensors(&self) -> Vec<Tensor> {
        // As the tables of the paper's reference, but normal: of the variance of its uniform
        // numbers.
        let table = |(i, &ids): (usize, &usize)| {
            let init = Init::Normal((1.0 / (3.0 * ids as f32)).sqrt());
            Tensor::new(format!("{}.tables.{i}.weight", self.name), &[ids, self.width], init)
        };
        let numbers = self.numbers.as_ref().map_or(vec![], Numbers::tensors);
        self.ids.iter().enumerate().map(table).chain(numbers).collect()
    }

    /// All tables as one: they stand one after the other, and so do their ids.
    fn slices(&self) -> Vec<Slice> {
        let tables = (0, self.ids.iter().sum::<usize>() * self.width);
        std::iter::once(tables)
            .chain(self.numbers.as_ref().map_or(vec![], Numbers::slices))
            .collect()
    }

    fn kept(&self) -> usize {
        self.numbers.as_ref().map_or(0, Numbers::kept)
    }

    fn sizes(&self) -> LayerSizes {
        let of_tables = self.ids.len() * self.width;
        match &self.numbers {
            None => LayerSizes { output: of_tables, scratch: of_tables, ..LayerSizes::default() },
            Some(numbers) => {
                let sizes = numbers.sizes();
                LayerSizes { input: numbers.features, scratch: sizes.scratch + of_tables, ..sizes }
            }
        }
    }

    fn flops(&self) -> u64 {
        self.numbers.as_ref().map_or(0, Numbers::flops)
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        _: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let samples = cx.micro.samples;
        let mut rows = b.alloc(MemoryKind::Activations, samples * self.ids.len() * self.width)?;
        b.embedding(
            &cx.micro.parts.ids,
            0,
            params[0],
            B::split_at(params[0], 0).0,
            B::all_mut(&mut rows),
        )?;
        match &self.numbers {
            None => Ok((rows, vec![])),
            Some(numbers) => numbers.forward(cx, &params[1..], &rows),
        }
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let BackwardArgs { params, grads, first, x, kept, dy, .. } = back;
        let (table, grads) = grads.split_at_mut(1);
        let rows = match &self.numbers {
            None => dy,
            Some(numbers) => {
                let params = &params[1..];
                numbers.backward(
                    cx,
                    BackwardArgs { params, grads, first, x, kept, dy, wants_input: true },
                )?
            }
        };
        let mut none = b.alloc_f32(MemoryKind::Activations, 0)?;
        b.embedding_backward(
            &cx.micro.parts.ids,
            0,
            B::all(&rows),
            B::reborrow(&mut table[0]),
            B::all_mut(&mut none),
        )?;
        b.alloc(MemoryKind::Activations, 0)
    }
}
