//! The dense features of recommendation models: a row of them before the embedding rows.

use super::layer::{BackwardArgs, LayerSizes, Op, Slice};
use super::sequential::Sequence;
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::Tensor;
use hpctrain_device::{Kernels, MemoryKind, StridedCopy};

/// Layers that map a sample's dense features to a row, which is put before the embedding rows of
/// its categories. The embedding rows are the input; the features are read from the micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseFeatures {
    /// The number of embedding rows.
    pub tables: usize,
    pub width: usize,
    /// The number of dense features per sample.
    pub features: usize,
    /// The layers that map the features to a row.
    pub dense: Sequence,
}

impl DenseFeatures {
    /// Returns the copy of the embedding rows into the output.
    fn of_tables(&self, samples: usize) -> StridedCopy {
        let own = self.tables * self.width;
        let all = (1 + self.tables) * self.width;
        StridedCopy { rows: samples, count: own, from: [own, 0], to: [all, all - own] }
    }

    /// Returns the copy of the features' row into the output.
    fn of_numbers(&self, samples: usize) -> StridedCopy {
        let all = (1 + self.tables) * self.width;
        StridedCopy { rows: samples, count: self.width, from: [self.width, 0], to: [all, 0] }
    }
}

/// Returns the copy in the opposite direction.
fn reversed(columns: StridedCopy) -> StridedCopy {
    StridedCopy { from: columns.to, to: columns.from, ..columns }
}

impl Op for DenseFeatures {
    fn tensors(&self) -> Vec<Tensor> {
        self.dense.tensors()
    }

    fn slices(&self) -> Vec<Slice> {
        self.dense.slices()
    }

    fn saved_buffers(&self) -> usize {
        self.dense.saved_buffers()
    }

    fn sizes(&self) -> LayerSizes {
        let dense = self.dense.sizes();
        LayerSizes {
            input: self.tables * self.width,
            output: (1 + self.tables) * self.width,
            // The features' row exists at the same time as the whole output.
            scratch: dense.scratch + dense.output,
            ..dense
        }
    }

    fn flops(&self) -> u64 {
        self.dense.flops()
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let samples = cx.micro.samples;
        let (of_numbers, kept) = self.dense.forward(cx, params, &cx.micro.fields.features)?;
        let mut y = b.alloc(MemoryKind::Activations, samples * (1 + self.tables) * self.width)?;
        b.copy_columns(self.of_numbers(samples), B::all(&of_numbers), B::all_mut(&mut y))?;
        b.copy_columns(self.of_tables(samples), B::all(x), B::all_mut(&mut y))?;
        Ok((y, kept))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let samples = cx.micro.samples;
        let BackwardArgs { params, grads, first, kept, dy, .. } = back;
        let mut of_numbers = b.alloc(MemoryKind::Activations, samples * self.width)?;
        b.copy_columns(
            reversed(self.of_numbers(samples)),
            B::all(&dy),
            B::all_mut(&mut of_numbers),
        )?;
        let mut of_tables = b.alloc(MemoryKind::Activations, samples * self.tables * self.width)?;
        b.copy_columns(reversed(self.of_tables(samples)), B::all(&dy), B::all_mut(&mut of_tables))?;
        drop(dy);
        let x = &cx.micro.fields.features;
        self.dense.backward(
            cx,
            BackwardArgs { params, grads, first, x, kept, dy: of_numbers, needs_input_grad: false },
        )?;
        Ok(of_tables)
    }
}
