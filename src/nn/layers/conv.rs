//! Convolution of images.

use std::ops::Range;

use super::init::he;
use super::layer::{BackwardArgs, LayerSizes, Op};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Init, Tensor};
use hpctrain_device::{Backend, Convolution, Im2colShape, Kernels, MemoryKind, StridedCopy};

/// A convolution, whose weights are filters × rows × columns × channels of a group.
#[derive(Debug, Clone, PartialEq)]
pub struct Conv {
    /// The name before `.weight` and `.bias`.
    pub name: String,
    /// The window, with a batch of one image.
    pub window: Im2colShape,
    pub filters: usize,
    /// The number of groups: filters of a group read only the channels of the same group.
    pub groups: usize,
    pub bias: bool,
}

impl Conv {
    /// Returns the number of input channels of a group.
    fn channels(&self) -> usize {
        self.window.channels / self.groups
    }

    /// Returns the number of weights of a filter.
    fn weights_per_filter(&self) -> usize {
        self.window.size[0] * self.window.size[1] * self.channels()
    }

    /// Returns the convolution of a group on `images` images.
    fn convolution(&self, group: usize, images: usize) -> Convolution {
        let channels = self.channels();
        let filters = self.filters / self.groups;
        let window = Im2colShape { batch: images, ..self.window };
        Convolution { window, first_channel: group * channels, channels, filters }
    }

    /// Returns `[width, first]` of a group's columns within all output columns, and within a buffer
    /// of that group only.
    fn columns(&self, group: usize) -> [[usize; 2]; 2] {
        let own = self.filters / self.groups;
        [[self.filters, group * own], [own, 0]]
    }

    /// Returns the range of a group in a tensor of `len` elements whose first axis is the filters.
    fn of_group(&self, group: usize, len: usize) -> Range<usize> {
        let per_group = len / self.groups;
        group * per_group..(group + 1) * per_group
    }
}

/// Returns a range of a view.
fn slice<B: Backend>(view: B::View<'_>, range: Range<usize>) -> B::View<'_> {
    B::split_at(B::split_at(view, range.start).1, range.len()).0
}

/// Returns a range of a mutable view.
fn slice_mut<B: Backend>(view: B::ViewMut<'_>, range: Range<usize>) -> B::ViewMut<'_> {
    B::split_at_mut(B::split_at_mut(view, range.start).1, range.len()).0
}

impl Op for Conv {
    fn tensors(&self) -> Vec<Tensor> {
        let [rows, columns] = self.window.size;
        let shape = [self.filters, rows, columns, self.channels()];
        let weight =
            Tensor::new(format!("{}.weight", self.name), &shape, he(self.weights_per_filter()));
        let bias = self
            .bias
            .then(|| Tensor::new(format!("{}.bias", self.name), &[self.filters], Init::Zeros));
        std::iter::once(weight).chain(bias).collect()
    }

    fn sizes(&self) -> LayerSizes {
        let grouped =
            if self.groups > 1 { self.window.rows() * self.filters / self.groups } else { 0 };
        LayerSizes {
            input: self.window.elements(),
            output: self.window.rows() * self.filters,
            // The im2col buffer and its gradient, on devices that use im2col.
            scratch: 2 * self.window.rows() * self.weights_per_filter() + grouped,
            ..LayerSizes::default()
        }
    }

    fn flops(&self) -> u64 {
        2u64.saturating_mul(self.window.rows() as u64)
            .saturating_mul((self.weights_per_filter() * self.filters) as u64)
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let samples = cx.micro.samples;
        let rows = samples * self.window.rows();
        let mut y = b.alloc(MemoryKind::Activations, rows * self.filters)?;
        let none = B::split_at(params[0], 0).0;
        for group in 0..self.groups {
            let convolution = self.convolution(group, samples);
            let weight = slice::<B>(
                params[0],
                self.of_group(group, self.filters * self.weights_per_filter()),
            );
            let bias = params
                .get(1)
                .map_or(none, |bias| slice::<B>(*bias, self.of_group(group, self.filters)));
            if self.groups == 1 {
                b.convolve(convolution, B::all(x), weight, bias, B::all_mut(&mut y))?;
                continue;
            }
            let mut own = b.alloc(MemoryKind::Activations, rows * convolution.filters)?;
            b.convolve(convolution, B::all(x), weight, bias, B::all_mut(&mut own))?;
            let [to, from] = self.columns(group);
            let columns = StridedCopy { rows, count: convolution.filters, from, to };
            b.copy_columns(columns, B::all(&own), B::all_mut(&mut y))?;
        }
        Ok((y, vec![]))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let samples = cx.micro.samples;
        let rows = samples * self.window.rows();
        let BackwardArgs { params, grads, x, dy, needs_input_grad: wants_input, .. } = back;
        let mut dx = b.alloc(
            MemoryKind::Activations,
            if wants_input { samples * self.window.elements() } else { 0 },
        )?;
        b.zero(B::all_mut(&mut dx))?;
        let mut none = b.alloc_f32(MemoryKind::Activations, 0)?;
        let (dweight, dbias) = grads.split_at_mut(1);
        for group in 0..self.groups {
            let convolution = self.convolution(group, samples);
            let mut own = b.alloc(
                MemoryKind::Activations,
                if self.groups > 1 { rows * convolution.filters } else { 0 },
            )?;
            let dy = match self.groups {
                1 => B::all(&dy),
                _ => {
                    let [from, to] = self.columns(group);
                    let columns = StridedCopy { rows, count: convolution.filters, from, to };
                    b.copy_columns(columns, B::all(&dy), B::all_mut(&mut own))?;
                    B::all(&own)
                }
            };
            let of_weight = self.of_group(group, self.filters * self.weights_per_filter());
            let dbias = match dbias.first_mut() {
                Some(dbias) => {
                    slice_mut::<B>(B::reborrow(dbias), self.of_group(group, self.filters))
                }
                None => B::all_mut(&mut none),
            };
            let dweight = slice_mut::<B>(B::reborrow(&mut dweight[0]), of_weight.clone());
            b.convolve_backward_weight(convolution, dy, B::all(x), dweight, dbias)?;
            if wants_input {
                let weight = slice::<B>(params[0], of_weight);
                b.convolve_backward_input(convolution, dy, weight, B::all_mut(&mut dx))?;
            }
        }
        Ok(dx)
    }
}
