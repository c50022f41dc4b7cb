//! One embedding table for each category, with the dense features as another row.

use super::dense_features::DenseFeatures;
use super::layer::{BackwardArgs, LayerSizes, Op, Slice};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Init, Tensor};
use hpctrain_device::{Kernels, MemoryKind};

/// The first layer if samples have an id for each category: it looks up a row in each category's
/// table, and puts a row computed from the dense features before them.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingTables {
    /// The name before `.tables.0.weight` and so on.
    pub name: String,
    /// The number of rows of each table.
    pub ids: Vec<usize>,
    pub width: usize,
    /// The dense features, if samples have any.
    pub dense_features: Option<DenseFeatures>,
}

impl EmbeddingTables {
    /// Returns the tables without the dense features, and the dense features.
    pub fn split_dense_features(&self) -> (Self, Option<DenseFeatures>) {
        (Self { dense_features: None, ..self.clone() }, self.dense_features.clone())
    }
}

impl Op for EmbeddingTables {
    fn tensors(&self) -> Vec<Tensor> {
        // The reference implementation of the paper draws uniform numbers. These are normal, with
        // the same variance.
        let tables = self.ids.iter().enumerate().map(|(i, &ids)| {
            let init = Init::Normal((1.0 / (3.0 * ids as f32)).sqrt());
            Tensor::new(format!("{}.tables.{i}.weight", self.name), &[ids, self.width], init)
        });
        let numbers = self.dense_features.as_ref().map_or(vec![], DenseFeatures::tensors);
        tables.chain(numbers).collect()
    }

    /// Returns all tables as one slice: tables are consecutive in memory, and so are their ids.
    fn slices(&self) -> Vec<Slice> {
        let tables = (0, self.ids.iter().sum::<usize>() * self.width);
        std::iter::once(tables)
            .chain(self.dense_features.as_ref().map_or(vec![], DenseFeatures::slices))
            .collect()
    }

    fn saved_buffers(&self) -> usize {
        self.dense_features.as_ref().map_or(0, DenseFeatures::saved_buffers)
    }

    fn sizes(&self) -> LayerSizes {
        let of_tables = self.ids.len() * self.width;
        match &self.dense_features {
            None => LayerSizes { output: of_tables, scratch: of_tables, ..LayerSizes::default() },
            Some(numbers) => {
                let sizes = numbers.sizes();
                LayerSizes { input: numbers.features, scratch: sizes.scratch + of_tables, ..sizes }
            }
        }
    }

    fn flops(&self) -> u64 {
        self.dense_features.as_ref().map_or(0, DenseFeatures::flops)
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
            &cx.micro.fields.ids,
            0,
            params[0],
            B::split_at(params[0], 0).0,
            B::all_mut(&mut rows),
        )?;
        match &self.dense_features {
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
        let rows = match &self.dense_features {
            None => dy,
            Some(numbers) => {
                let params = &params[1..];
                numbers.backward(
                    cx,
                    BackwardArgs { params, grads, first, x, kept, dy, needs_input_grad: true },
                )?
            }
        };
        let mut none = b.alloc_f32(MemoryKind::Activations, 0)?;
        b.embedding_backward(
            &cx.micro.fields.ids,
            0,
            B::all(&rows),
            B::reborrow(&mut table[0]),
            B::all_mut(&mut none),
        )?;
        b.alloc(MemoryKind::Activations, 0)
    }
}
