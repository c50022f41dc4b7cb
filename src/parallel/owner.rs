//! What a rank owns of a unit: a range of its parameters, the optimizer's state of that range, and their update.
//!
//! Nothing else knows where the state is or how it is updated. The gradient comes as a window, and updated parameters
//! leave as a window, of the device that computes.

use std::ops::Range;

use crate::backend::{Kernels, Memory};
use crate::error::{Error, Result};
use crate::layout::UnitLayout;
use crate::optim::{Rule, Update};

/// Constants of one update.
#[derive(Debug, Clone, Copy)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f32,
    /// Decoupled (AdamW) or coupled (SGD) weight decay of tensors that decay.
    pub weight_decay: f32,
    /// Number of the update, from 1.
    pub step: u64,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
}

/// The owned range of one unit.
pub struct Owner<B: Kernels> {
    backend: B,
    /// None where nothing is trained.
    rule: Option<Rule>,
    /// The range of the unit.
    range: Range<usize>,
    /// Elements of the range before this one decay.
    decayed: usize,
    /// The parameters of the range in f32. None where full ones live always, in f32: then they are its window of those.
    master: Option<B::Buf>,
    /// One buffer for each name in [`Rule::state`].
    state: Vec<B::Buf>,
}

impl<B: Kernels> Owner<B> {
    /// The owner of `range`, with fresh optimizer state. `master` holds its parameters, unless full ones live always.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(
        backend: &B,
        rule: Option<Rule>,
        layout: &UnitLayout,
        range: Range<usize>,
        master: Option<&[f32]>,
    ) -> Result<Self> {
        let state = state_names(rule).iter().map(|_| {
            let mut buf = backend.alloc(Memory::Optimizer, range.len())?;
            backend.zero(B::all_mut(&mut buf))?;
            Ok(buf)
        });
        Ok(Self {
            state: state.collect::<Result<_>>()?,
            master: master.map(|values| backend.upload_f32(Memory::Parameters, values)).transpose()?,
            // Decayed tensors come first: one cut separates the two groups.
            decayed: layout.decayed.clamp(range.start, range.end) - range.start,
            backend: backend.clone(),
            rule,
            range,
        })
    }

    /// The range of the unit.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Updates the parameters from the reduced gradient of the range. `full` are the full ones, where they live always.
    ///
    /// # Errors
    /// The device failed, or the parameters are nowhere.
    pub fn update(&mut self, hyper: Hyper, grad: B::View<'_>, full: Option<&mut B::Buf>) -> Result<()> {
        let rule = self.rule.ok_or_else(|| Error::internal("an update without a rule"))?;
        let full = full.map(|full| B::view_mut(full, self.range.clone()));
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

    /// Puts the parameters into their place in a full buffer, to be gathered.
    ///
    /// # Errors
    /// The device failed, or the parameters are nowhere.
    pub fn contribute(&self, full: &mut B::Buf) -> Result<()> {
        let master = self.master.as_ref().ok_or_else(nowhere)?;
        self.backend.copy(B::all(master), B::view_mut(full, self.range.clone()))
    }

    /// Parameters and optimizer state of `range`, a range of the unit within the owned one. `full` as in
    /// [`Owner::update`].
    ///
    /// # Errors
    /// The parameters are nowhere.
    pub fn views<'a>(
        &'a self,
        range: Range<usize>,
        full: Option<&'a B::Buf>,
    ) -> Result<(B::View<'a>, Vec<B::View<'a>>)> {
        let of_owned = range.start - self.range.start..range.end - self.range.start;
        let params = match (&self.master, full) {
            (Some(master), _) => B::view(master, of_owned.clone()),
            (None, Some(full)) => B::view(full, range),
            (None, None) => return Err(nowhere()),
        };
        Ok((params, self.state.iter().map(|buf| B::view(buf, of_owned.clone())).collect()))
    }

    /// Replaces parameters and state by the values that `load(part, range)` gives: part 0 is the parameters, part k the
    /// k-th buffer of state.
    ///
    /// # Errors
    /// Of `load`.
    pub fn restore(&mut self, mut load: impl FnMut(usize, Range<usize>) -> Result<Vec<f32>>) -> Result<()> {
        if let Some(master) = &mut self.master {
            self.backend.write(&load(0, self.range.clone())?, B::all_mut(master))?;
        }
        for (part, buf) in self.state.iter_mut().enumerate() {
            self.backend.write(&load(part + 1, self.range.clone())?, B::all_mut(buf))?;
        }
        Ok(())
    }
}

/// Names of the buffers of state under `rule`.
pub fn state_names(rule: Option<Rule>) -> &'static [&'static str] {
    rule.map_or(&[], |rule| rule.state())
}

fn nowhere() -> Error {
    Error::internal("parameters are nowhere")
}

/// Cuts every window at the same element.
fn cut_all<B: Kernels>(views: Vec<B::ViewMut<'_>>, at: usize) -> (Vec<B::ViewMut<'_>>, Vec<B::ViewMut<'_>>) {
    views.into_iter().map(|view| B::cut_mut(view, at)).unzip()
}
