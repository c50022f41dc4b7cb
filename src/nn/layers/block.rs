//! Consecutive layers as one block, from a layer with parameters up to the next one.

use super::layer::{BackwardArgs, Op};
use super::sequential::Sequence;
use crate::{Block, Context, Grads, Params};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_device::{Backend, Kernels};

/// A block of layers, whose parameters form one unit.
pub struct LayerBlock {
    name: String,
    layers: Sequence,
    /// Whether its input is the micro-batch.
    is_first: bool,
    /// For each slice of the layers' parameters ([`Op::slices`]), its index in the unit.
    places: Vec<usize>,
}

impl LayerBlock {
    pub fn new(name: String, layers: Sequence, is_first: bool) -> Self {
        let orders: Vec<u8> = layers.slices().into_iter().map(|(order, _)| order).collect();
        let places = (0..orders.len())
            .map(|i| {
                let earlier =
                    orders.iter().enumerate().filter(|(j, order)| (**order, *j) < (orders[i], i));
                earlier.count()
            })
            .collect();
        Self { name, layers, is_first, places }
    }

    /// Returns the lengths of the slices in the order of the unit.
    fn lens(&self) -> Vec<usize> {
        let mut lens = vec![0; self.places.len()];
        for ((_, len), &place) in self.layers.slices().into_iter().zip(&self.places) {
            lens[place] = len;
        }
        lens
    }

    /// Returns the slices of the unit in the order of the layers.
    fn params<'a, B: Backend>(&self, mut unit: B::View<'a>) -> Vec<B::View<'a>> {
        let cut = self.lens().into_iter().map(|len| {
            let (window, rest) = B::split_at(unit, len);
            unit = rest;
            window
        });
        let stored: Vec<B::View<'a>> = cut.collect();
        self.places.iter().map(|&place| stored[place]).collect()
    }

    /// Returns the slices of the unit in the order of the layers, mutably.
    fn grads<'a, B: Backend>(&self, unit: B::ViewMut<'a>) -> Result<Vec<B::ViewMut<'a>>> {
        let mut stored = Vec::new();
        let mut rest = Some(unit);
        for len in self.lens() {
            let unit =
                rest.take().ok_or_else(|| Error::internal("a unit ended before its last slice"))?;
            let (window, others) = B::split_at_mut(unit, len);
            stored.push(Some(window));
            rest = Some(others);
        }
        let taken = self.places.iter().map(|&place| stored[place].take());
        taken
            .map(|window| {
                window.ok_or_else(|| Error::internal("two slices have the same index in a unit"))
            })
            .collect()
    }

    fn input<'a, B: Kernels>(&self, cx: &Context<'a, B>, x: &'a B::Buf) -> &'a B::Buf {
        if self.is_first { &cx.micro.fields.features } else { x }
    }
}

impl<B: Kernels> Block<B> for LayerBlock {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let mut tensors = self.layers.tensors();
        tensors.sort_by_key(Tensor::order);
        tensors
    }

    fn input_per_row(&self) -> usize {
        self.layers.sizes().input
    }

    fn saved_elems_per_row(&self) -> usize {
        self.layers.sizes().kept
    }

    fn saved_f32_per_row(&self) -> usize {
        self.layers.sizes().saved_f32
    }

    fn scratch_per_row(&self) -> usize {
        self.layers.sizes().scratch
    }

    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        self.layers.forward(cx, &self.params::<B>(params.own), self.input(cx, x))
    }

    fn backward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        grads: Grads<'_, B>,
        x: &B::Buf,
        saved: Vec<B::Buf>,
        dy: B::Buf,
    ) -> Result<B::Buf> {
        let first = grads.first;
        let params = self.params::<B>(params.own);
        let mut grads = self.grads::<B>(grads.own)?;
        let x = self.input(cx, x);
        let wants_input = !self.is_first;
        self.layers.backward(
            cx,
            BackwardArgs {
                params: &params,
                grads: &mut grads,
                first,
                x,
                kept: saved,
                dy,
                needs_input_grad: wants_input,
            },
        )
    }
}
