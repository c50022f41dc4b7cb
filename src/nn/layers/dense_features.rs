//! A row of a sample's numbers before the rows of its categories.

use super::layer::{BackwardArgs, LayerSizes, Op, Slice};
use super::sequential::Sequence;
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::Tensor;
use hpctrain_device::{Kernels, MemoryKind, StridedCopy};

/// Layers that make a row of a sample's numbers, and the place of that row before the rows of its
/// categories, which are the input. The numbers are those of the data.
#[derive(Debug, Clone, PartialEq)]
pub struct Numbers {
    /// Rows of categories.
    pub tables: usize,
    pub width: usize,
    /// Numbers of a sample.
    pub features: usize,
    /// Layers that make a row of the numbers.
    pub dense: Sequence,
}

impl Numbers {
    /// Columns by which the categories' part of a row of the output is copied there.
    fn of_tables(&self, samples: usize) -> StridedCopy {
        let own = self.tables * self.width;
        let all = (1 + self.tables) * self.width;
        StridedCopy { rows: samples, count: own, from: [own, 0], to: [all, all - own] }
    }

    /// As [`Numbers::of_tables`], of the numbers' row.
    fn of_numbers(&self, samples: usize) -> StridedCopy {
        let all = (1 + self.tables) * self.width;
        StridedCopy { rows: samples, count: self.width, from: [self.width, 0], to: [all, 0] }
    }
}

/// The way back.
fn reversed(columns: StridedCopy) -> StridedCopy {
    StridedCopy { from: columns.to, to: columns.from, ..columns }
}

impl Op for Numbers {
    fn tensors(&self) -> Vec<Tensor> {
        self.dense.tensors()
    }

    fn slices(&self) -> Vec<Slice> {
        self.dense.slices()
    }

    fn kept(&self) -> usize {
        self.dense.kept()
    }

    fn sizes(&self) -> LayerSizes {
        let dense = self.dense.sizes();
        LayerSizes {
            input: self.tables * self.width,
            output: (1 + self.tables) * self.width,
            // The numbers' row waits beside the whole.
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
        let (of_numbers, kept) = self.dense.forward(cx, params, &cx.micro.parts.features)?;
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
        let x = &cx.micro.parts.features;
        self.dense.backward(
            cx,
            BackwardArgs { params, grads, first, x, kept, dy: of_numbers, wants_input: false },
        )?;
        Ok(of_tables)
    }
}
