//! Parameters and optimizer state of a range of a unit in the memory of one device, and their update there.

use std::ops::Range;

use super::hyper::{Hyper, nowhere, state_names};
use crate::backend::{Kernels, MemoryKind};
use crate::error::{Error, Result};
use crate::optim::{AVERAGE, Pair, Part, Rule};

/// Rule and parts of a range's update.
pub struct Recipe {
    /// None where nothing is trained.
    pub rule: Option<Rule>,
    /// Decay of the parameters' running average, if one is kept.
    pub average: Option<f32>,
    /// The parts of the range that are updated alike.
    pub parts: Vec<Part>,
}

/// Parameters and state of a range.
pub struct DeviceState<B: Kernels> {
    /// The device.
    pub backend: B,
    recipe: Recipe,
    /// The parameters of the range in f32. None where full ones live always, in f32: then they are its window of those.
    master: Option<B::Buf>,
    /// One buffer for each name in [`Rule::state`], then the average.
    state: Vec<B::Buf>,
}

impl<B: Kernels> DeviceState<B> {
    /// Fresh optimizer state for a range whose parameters are `values`; those too, if they are kept apart.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(backend: &B, recipe: Recipe, values: &[f32], is_apart: bool) -> Result<Self> {
        let state = state_names(recipe.rule, recipe.average).into_iter().map(|name| match name {
            AVERAGE => backend.upload_f32(MemoryKind::Optimizer, values),
            _ => {
                let mut buf = backend.alloc_f32(MemoryKind::Optimizer, values.len())?;
                backend.zero(B::all_mut(&mut buf))?;
                Ok(buf)
            }
        });
        Ok(Self {
            state: state.collect::<Result<_>>()?,
            master: is_apart.then(|| backend.upload_f32(MemoryKind::Parameters, values)).transpose()?,
            backend: backend.clone(),
            recipe,
        })
    }

    /// The parameters, where they are kept apart.
    ///
    /// # Errors
    /// They are not.
    pub fn master(&self) -> Result<&B::Buf> {
        self.master.as_ref().ok_or_else(nowhere)
    }

    /// The squares that scale the steps of tensors ([`Rule::squares`]): of their parts in `range`, which counts from
    /// the start of this range. `params` and `grad` are windows of the whole range.
    ///
    /// # Errors
    /// The device failed.
    pub fn squares<'a>(
        &'a self,
        hyper: Hyper,
        range: Range<usize>,
        grad: B::View<'a>,
        params: B::View<'a>,
    ) -> Result<Vec<(usize, Pair<B::Scalar>)>> {
        let rule = self.rule()?;
        let cut = |view, at: &Range<usize>| B::cut(B::cut(view, at.end).0, at.start).1;
        let (mut squares, mut end) = (Vec::new(), 0);
        for part in &self.recipe.parts {
            let at = range.start.max(end)..range.end.min(end + part.len);
            end += part.len;
            let Some(tensor) = part.scaled_by.filter(|_| at.start < at.end) else { continue };
            let state: Vec<_> = self.state(&at).take(rule.state().len()).collect();
            let update = hyper.of(part, 1.0);
            squares.push((tensor, rule.squares(&self.backend, update, cut(grad, &at), &state, cut(params, &at))?));
        }
        Ok(squares)
    }

    fn rule(&self) -> Result<Rule> {
        self.recipe.rule.ok_or_else(|| Error::internal("an update without a rule"))
    }

    /// Updates the parameters from their gradient. `full` is the range's window of full ones, where they live always;
    /// `trust` has a factor for every tensor of the unit where steps are scaled.
    ///
    /// # Errors
    /// The device failed, or no buffer holds the parameters.
    pub fn update<'a>(
        &'a mut self,
        hyper: Hyper,
        trust: &[f32],
        grad: B::View<'_>,
        full: Option<B::ViewMut<'a>>,
    ) -> Result<()> {
        let rule = self.rule()?;
        let (params, copy) = match (&mut self.master, full) {
            (Some(master), full) => (B::all_mut(master), full),
            (None, Some(full)) => (full, None),
            (None, None) => return Err(nowhere()),
        };
        let state = self.state.iter_mut().map(B::all_mut).collect();
        let mut left = Windows::<B> { grad, state, params, copy };
        for part in &self.recipe.parts {
            let (Windows { grad, mut state, mut params, copy }, rest) = left.cut(part.len);
            left = rest;
            let average = self.recipe.average.and_then(|decay| Some((decay, state.pop()?)));
            let to = B::reborrow(&mut params);
            match part.average {
                Some(rate) => self.backend.approach(rate, grad, to, copy)?,
                None => {
                    let update = hyper.of(part, part.scaled_by.map_or(1.0, |tensor| trust[tensor]));
                    rule.update(&self.backend, update, grad, state, to, copy)?;
                }
            }
            if let Some((decay, average)) = average {
                self.backend.approach(1.0 - decay, B::shared(&params), average, None)?;
            }
        }
        Ok(())
    }

    /// Lets the parameters and their average take each other's places, if one is kept. `full` as in [`DeviceState::update`].
    ///
    /// # Errors
    /// The device failed, or no buffer holds the parameters.
    pub fn swap(&mut self, full: Option<B::ViewMut<'_>>) -> Result<()> {
        let b = &self.backend;
        let Some(average) = self.state.last_mut().filter(|_| self.recipe.average.is_some()) else { return Ok(()) };
        match (&mut self.master, full) {
            (Some(master), full) => {
                std::mem::swap(master, average);
                full.map_or(Ok(()), |full| b.copy(B::all(master), full))
            }
            (None, Some(mut full)) => {
                let mut kept = b.alloc_f32(MemoryKind::Parameters, B::len(average))?;
                b.copy(B::shared(&full), B::all_mut(&mut kept))?;
                b.copy(B::all(average), B::reborrow(&mut full))?;
                b.copy(B::all(&kept), B::all_mut(average))
            }
            (None, None) => Err(nowhere()),
        }
    }

    /// The elements `range` of every buffer of state.
    pub fn state(&self, range: &Range<usize>) -> impl Iterator<Item = B::View<'_>> {
        self.state.iter().map(|buf| B::view(buf, range.clone()))
    }

    /// Replaces parameters and state by the values that `load` gives: part 0 is the parameters, part k the k-th buffer
    /// of state.
    ///
    /// # Errors
    /// Of `load`.
    pub fn restore(&mut self, mut load: impl FnMut(usize) -> Result<Vec<f32>>) -> Result<()> {
        if let Some(master) = &mut self.master {
            self.backend.write(&load(0)?, B::all_mut(master))?;
        }
        for (part, buf) in self.state.iter_mut().enumerate() {
            self.backend.write(&load(part + 1)?, B::all_mut(buf))?;
        }
        Ok(())
    }
}

/// The same elements of all that an update reads and writes.
struct Windows<'g, 'a, B: Kernels> {
    grad: B::View<'g>,
    state: Vec<B::ViewMut<'a>>,
    params: B::ViewMut<'a>,
    copy: Option<B::ViewMut<'a>>,
}

impl<B: Kernels> Windows<'_, '_, B> {
    /// Cuts every window at the same element.
    fn cut(self, at: usize) -> (Self, Self) {
        let (grad, grad_rest) = B::cut(self.grad, at);
        let (params, params_rest) = B::cut_mut(self.params, at);
        let (state, state_rest) = self.state.into_iter().map(|view| B::cut_mut(view, at)).unzip();
        let (copy, copy_rest) = self.copy.map(|copy| B::cut_mut(copy, at)).unzip();
        let rest = Self { grad: grad_rest, state: state_rest, params: params_rest, copy: copy_rest };
        (Self { grad, state, params, copy }, rest)
    }
}
