//! Parameters and optimizer state of a range of a unit in the memory of one device, and their update there.

use std::ops::Range;

use super::owner::{Hyper, nowhere, state_names};
use crate::backend::{Kernels, Memory};
use crate::error::{Error, Result};
use crate::optim::{Rule, Update};

/// What is held of a range.
pub struct Held<B: Kernels> {
    /// The device.
    pub backend: B,
    /// None where nothing is trained.
    rule: Option<Rule>,
    /// Elements of the range before this one decay.
    decayed: usize,
    /// The parameters of the range in f32. None where full ones live always, in f32: then they are its window of those.
    master: Option<B::Buf>,
    /// One buffer for each name in [`Rule::state`].
    state: Vec<B::Buf>,
}

impl<B: Kernels> Held<B> {
    /// Fresh optimizer state for `len` elements, of which the first `decayed` decay, and their parameters if they are kept
    /// apart.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(backend: &B, rule: Option<Rule>, len: usize, decayed: usize, master: Option<&[f32]>) -> Result<Self> {
        let state = state_names(rule).iter().map(|_| {
            let mut buf = backend.alloc_f32(Memory::Optimizer, len)?;
            backend.zero(B::all_mut(&mut buf))?;
            Ok(buf)
        });
        Ok(Self {
            state: state.collect::<Result<_>>()?,
            master: master.map(|values| backend.upload_f32(Memory::Parameters, values)).transpose()?,
            backend: backend.clone(),
            rule,
            decayed,
        })
    }

    /// The parameters, where they are kept apart.
    ///
    /// # Errors
    /// They are not.
    pub fn master(&self) -> Result<&B::Buf> {
        self.master.as_ref().ok_or_else(nowhere)
    }

    /// Updates the parameters from their gradient. `full` is the range's window of full ones, where they live always.
    ///
    /// # Errors
    /// The device failed, or the parameters are nowhere.
    pub fn update<'a>(&'a mut self, hyper: Hyper, grad: B::View<'_>, full: Option<B::ViewMut<'a>>) -> Result<()> {
        let rule = self.rule.ok_or_else(|| Error::internal("an update without a rule"))?;
        let (params, copy) = match (&mut self.master, full) {
            (Some(master), full) => (B::all_mut(master), full),
            (None, Some(full)) => (full, None),
            (None, None) => return Err(nowhere()),
        };
        let state = self.state.iter_mut().map(B::all_mut).collect();
        let Hyper { lr, weight_decay, step, grad_scale } = hyper;
        let update = |weight_decay| Update { lr, weight_decay, step, grad_scale };
        let (g_decayed, g_rest) = B::cut(grad, self.decayed);
        let (p_decayed, p_rest) = B::cut_mut(params, self.decayed);
        let (s_decayed, s_rest) = cut_all::<B>(state, self.decayed);
        let (c_decayed, c_rest) = copy.map(|copy| B::cut_mut(copy, self.decayed)).unzip();
        rule.update(&self.backend, update(weight_decay), g_decayed, s_decayed, p_decayed, c_decayed)?;
        rule.update(&self.backend, update(0.0), g_rest, s_rest, p_rest, c_rest)
    }

    /// The elements `range` of every buffer of state.
    pub fn state(&self, range: &Range<usize>) -> impl Iterator<Item = B::View<'_>> {
        self.state.iter().map(|buf| B::view(buf, range.clone()))
    }

    /// Replaces what is held by the values that `load` gives: part 0 is the parameters, part k the k-th buffer of state.
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

/// Cuts every window at the same element.
fn cut_all<B: Kernels>(views: Vec<B::ViewMut<'_>>, at: usize) -> (Vec<B::ViewMut<'_>>, Vec<B::ViewMut<'_>>) {
    views.into_iter().map(|view| B::cut_mut(view, at)).unzip()
}
