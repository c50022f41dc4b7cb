//! Categories and numbers of a sample as rows of one width.

use super::op::{Back, Op, Sizes, Slice};
use super::sequence::Sequence;
use crate::backend::{Columns, Kernels, MemoryKind};
use crate::error::Result;
use crate::layout::{Init, Tensor};
use crate::nn::Context;

/// The first layer, where samples have an id of each category: a row of the category's own table for each, and before them
/// a row that layers make of the sample's numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Tables {
    /// Before `.tables.0.weight` and so on.
    pub name: String,
    /// Rows of each table.
    pub ids: Vec<usize>,
    pub width: usize,
    /// Numbers of a sample.
    pub features: usize,
    /// Layers that make a row of the numbers.
    pub dense: Option<Sequence>,
}

impl Tables {
    /// Rows of a sample's output.
    fn rows(&self) -> usize {
        usize::from(self.dense.is_some()) + self.ids.len()
    }

    /// Columns by which the tables' part of a row of the output is copied there, or back.
    fn of_tables(&self, samples: usize) -> Columns {
        let (own, all) = (self.ids.len() * self.width, self.rows() * self.width);
        Columns { rows: samples, count: own, from: [own, 0], to: [all, all - own] }
    }

    /// As [`Tables::of_tables`], of the numbers' row.
    fn of_numbers(&self, samples: usize) -> Columns {
        Columns { rows: samples, count: self.width, from: [self.width, 0], to: [self.rows() * self.width, 0] }
    }
}

/// The way back.
fn reversed(columns: Columns) -> Columns {
    Columns { from: columns.to, to: columns.from, ..columns }
}

impl Op for Tables {
    fn tensors(&self) -> Vec<Tensor> {
        // As the tables of the paper's reference, but normal: of the variance of its uniform numbers.
        let table = |(i, &ids): (usize, &usize)| {
            let init = Init::Normal((1.0 / (3.0 * ids as f32)).sqrt());
            Tensor::new(format!("{}.tables.{i}.weight", self.name), &[ids, self.width], init)
        };
        let dense = self.dense.as_ref().map_or(vec![], Sequence::tensors);
        self.ids.iter().enumerate().map(table).chain(dense).collect()
    }

    /// All tables as one: they stand one after the other, and so do their ids.
    fn slices(&self) -> Vec<Slice> {
        let tables = (0, self.ids.iter().sum::<usize>() * self.width);
        std::iter::once(tables).chain(self.dense.as_ref().map_or(vec![], Sequence::slices)).collect()
    }

    fn kept(&self) -> usize {
        self.dense.as_ref().map_or(0, Sequence::kept)
    }

    fn sizes(&self) -> Sizes {
        let dense = self.dense.as_ref().map_or(Sizes::default(), Sequence::sizes);
        let of_tables = self.ids.len() * self.width;
        Sizes {
            input: self.features,
            output: self.rows() * self.width,
            // Both parts wait beside the whole.
            scratch: dense.scratch + dense.output + of_tables,
            ..dense
        }
    }

    fn flops(&self) -> u64 {
        self.dense.as_ref().map_or(0, Sequence::flops)
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let (b, samples) = (cx.backend, cx.micro.samples);
        let mut rows = b.alloc(MemoryKind::Activations, samples * self.ids.len() * self.width)?;
        b.embedding(&cx.micro.parts.ids, 0, params[0], B::cut(params[0], 0).0, B::all_mut(&mut rows))?;
        let Some(dense) = &self.dense else { return Ok((rows, vec![])) };
        let (of_numbers, kept) = dense.forward(cx, &params[1..], x)?;
        let mut y = b.alloc(MemoryKind::Activations, samples * self.rows() * self.width)?;
        b.copy_columns(self.of_numbers(samples), B::all(&of_numbers), B::all_mut(&mut y))?;
        b.copy_columns(self.of_tables(samples), B::all(&rows), B::all_mut(&mut y))?;
        Ok((y, kept))
    }

    fn backward<B: Kernels>(&self, cx: &Context<'_, B>, back: Back<'_, '_, '_, B>) -> Result<B::Buf> {
        let (b, samples) = (cx.backend, cx.micro.samples);
        let Back { params, grads, first, x, kept, dy, .. } = back;
        let mut rows = dy;
        if let Some(dense) = &self.dense {
            let mut of_numbers = b.alloc(MemoryKind::Activations, samples * self.width)?;
            b.copy_columns(reversed(self.of_numbers(samples)), B::all(&rows), B::all_mut(&mut of_numbers))?;
            let mut of_tables = b.alloc(MemoryKind::Activations, samples * self.ids.len() * self.width)?;
            b.copy_columns(reversed(self.of_tables(samples)), B::all(&rows), B::all_mut(&mut of_tables))?;
            rows = of_tables;
            let (params, grads) = (&params[1..], &mut grads[1..]);
            dense.backward(cx, Back { params, grads, first, x, kept, dy: of_numbers, wants_input: false })?;
        }
        let mut none = b.alloc_f32(MemoryKind::Activations, 0)?;
        b.embedding_backward(&cx.micro.parts.ids, 0, B::all(&rows), B::reborrow(&mut grads[0]), B::all_mut(&mut none))?;
        b.alloc(MemoryKind::Activations, 0)
    }
}
