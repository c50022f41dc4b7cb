//! Convolution of images, as a matrix product of what the window sees (im2col).

use std::ops::Range;

use super::init::he;
use super::op::{Back, Op, Sizes};
use crate::backend::{Backend, Columns, Kernels, Linear, Memory, Window};
use crate::error::Result;
use crate::layout::{Init, Tensor};
use crate::nn::Context;

/// Elements of the unfolded windows that are held at a time, unless one image has more.
const UNFOLDED: usize = 1 << 22;

/// A convolution. Weights are filters × rows × columns × channels of a group.
#[derive(Debug, Clone, PartialEq)]
pub struct Conv {
    /// Before `.weight` and `.bias`.
    pub name: String,
    /// On one image.
    pub window: Window,
    pub filters: usize,
    /// Equal parts of the channels that do not see each other.
    pub groups: usize,
    pub bias: bool,
}

impl Conv {
    /// Channels that a group sees.
    fn channels(&self) -> usize {
        self.window.channels / self.groups
    }

    /// Elements that a filter sees.
    fn seen(&self) -> usize {
        self.window.size[0] * self.window.size[1] * self.channels()
    }

    /// Images at a time.
    fn batches(&self, samples: usize) -> impl Iterator<Item = Range<usize>> {
        let most = (UNFOLDED / (self.window.rows() * self.seen())).max(1);
        (0..samples).step_by(most).map(move |first| first..samples.min(first + most))
    }

    /// The product of one group on so many images.
    fn product(&self, images: usize) -> Linear {
        Linear { rows: images * self.window.rows(), inputs: self.seen(), outputs: self.filters / self.groups }
    }

    /// A group's columns of the output, and those alone.
    fn columns(&self, group: usize) -> [[usize; 2]; 2] {
        let own = self.filters / self.groups;
        [[self.filters, group * own], [own, 0]]
    }

    /// A group's part of a tensor whose first axis is the filters.
    fn of_group(&self, group: usize, len: usize) -> Range<usize> {
        let part = len / self.groups;
        group * part..(group + 1) * part
    }
}

/// The part of a window of memory.
fn part<B: Backend>(view: B::View<'_>, range: Range<usize>) -> B::View<'_> {
    B::cut(B::cut(view, range.start).1, range.len()).0
}

/// As [`part`], exclusively.
fn part_mut<B: Backend>(view: B::ViewMut<'_>, range: Range<usize>) -> B::ViewMut<'_> {
    B::cut_mut(B::cut_mut(view, range.start).1, range.len()).0
}

impl Op for Conv {
    fn tensors(&self) -> Vec<Tensor> {
        let [rows, columns] = self.window.size;
        let shape = [self.filters, rows, columns, self.channels()];
        let weight = Tensor::new(format!("{}.weight", self.name), &shape, he(self.seen()));
        let bias = self.bias.then(|| Tensor::new(format!("{}.bias", self.name), &[self.filters], Init::Zeros));
        std::iter::once(weight).chain(bias).collect()
    }

    fn sizes(&self) -> Sizes {
        let grouped = if self.groups > 1 { self.window.rows() * self.filters / self.groups } else { 0 };
        Sizes {
            input: self.window.elements(),
            output: self.window.rows() * self.filters,
            // Windows and their gradient.
            scratch: 2 * self.window.rows() * self.seen() + grouped,
            ..Sizes::default()
        }
    }

    fn flops(&self) -> u64 {
        2 * (self.window.rows() * self.seen() * self.filters) as u64
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let (b, of_image, of_places) = (cx.backend, self.window.elements(), self.window.rows() * self.filters);
        let mut y = b.alloc(Memory::Activations, cx.micro.samples * of_places)?;
        let none = B::cut(params[0], 0).0;
        for images in self.batches(cx.micro.samples) {
            let (window, product) = (Window { batch: images.len(), ..self.window }, self.product(images.len()));
            let x = B::view(x, images.start * of_image..images.end * of_image);
            let places = images.start * of_places..images.end * of_places;
            let mut unfolded = b.alloc(Memory::Activations, product.rows * product.inputs)?;
            for group in 0..self.groups {
                b.unfold(window, group * self.channels(), self.channels(), x, B::all_mut(&mut unfolded))?;
                let weight = part::<B>(params[0], self.of_group(group, self.filters * self.seen()));
                let bias = params.get(1).map_or(none, |bias| part::<B>(*bias, self.of_group(group, self.filters)));
                if self.groups == 1 {
                    b.linear(product, B::all(&unfolded), weight, bias, B::view_mut(&mut y, places.clone()))?;
                    continue;
                }
                let mut own = b.alloc(Memory::Activations, product.rows * product.outputs)?;
                b.linear(product, B::all(&unfolded), weight, bias, B::all_mut(&mut own))?;
                let [to, from] = self.columns(group);
                let columns = Columns { rows: product.rows, count: product.outputs, from, to };
                b.copy_columns(columns, B::all(&own), B::view_mut(&mut y, places.clone()))?;
            }
        }
        Ok((y, vec![]))
    }

    fn backward<B: Kernels>(&self, cx: &Context<'_, B>, back: Back<'_, '_, '_, B>) -> Result<B::Buf> {
        let (b, of_image, of_places) = (cx.backend, self.window.elements(), self.window.rows() * self.filters);
        let Back { params, grads, x, dy, wants_input, .. } = back;
        let mut dx = b.alloc(Memory::Activations, if wants_input { cx.micro.samples * of_image } else { 0 })?;
        b.zero(B::all_mut(&mut dx))?;
        let mut none = b.alloc_f32(Memory::Activations, 0)?;
        let (dweight, dbias) = grads.split_at_mut(1);
        for images in self.batches(cx.micro.samples) {
            let (window, product) = (Window { batch: images.len(), ..self.window }, self.product(images.len()));
            let of_images = images.start * of_image..images.end * of_image;
            let places = images.start * of_places..images.end * of_places;
            let mut unfolded = b.alloc(Memory::Activations, product.rows * product.inputs)?;
            for group in 0..self.groups {
                let (first, channels) = (group * self.channels(), self.channels());
                let mut own =
                    b.alloc(Memory::Activations, if self.groups > 1 { product.rows * product.outputs } else { 0 })?;
                let dy = match self.groups {
                    1 => B::view(&dy, places.clone()),
                    _ => {
                        let [from, to] = self.columns(group);
                        let columns = Columns { rows: product.rows, count: product.outputs, from, to };
                        b.copy_columns(columns, B::view(&dy, places.clone()), B::all_mut(&mut own))?;
                        B::all(&own)
                    }
                };
                b.unfold(window, first, channels, B::view(x, of_images.clone()), B::all_mut(&mut unfolded))?;
                let of_weight = self.of_group(group, self.filters * self.seen());
                let dbias = match dbias.first_mut() {
                    Some(dbias) => part_mut::<B>(B::reborrow(dbias), self.of_group(group, self.filters)),
                    None => B::all_mut(&mut none),
                };
                let dweight = part_mut::<B>(B::reborrow(&mut dweight[0]), of_weight.clone());
                b.linear_backward_weight(product, dy, B::all(&unfolded), dweight, dbias)?;
                if wants_input {
                    // What the window saw is not needed any more: its memory takes its gradient.
                    b.linear_backward_input(product, dy, part::<B>(params[0], of_weight), B::all_mut(&mut unfolded))?;
                    let dx = B::view_mut(&mut dx, of_images.clone());
                    b.fold(window, first, channels, B::all(&unfolded), dx)?;
                }
            }
        }
        Ok(dx)
    }
}
