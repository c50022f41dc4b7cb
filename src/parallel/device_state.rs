//! Parameters and optimizer state of a range of a unit in the memory of one device, and their
//! update.

use std::ops::Range;

use super::local_sgd::OuterOptimizer;
use super::sdc_checksum::SdcChecksum;
use super::sparse::{RowCopies, SparseRows, elements_of};
use super::step_params::{Hyper, missing_parameters, state_names};
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::{Cpu, CpuBuf};
use hpctrain_device::{Kernels, MemoryKind, Sgd, UpdateChecksums};
use hpctrain_nn::optim::{EMA, GroupRun, SquaredNorms, UpdateRule};

/// How a range is updated.
pub struct UpdateSettings {
    /// The update rule; none if nothing is trained.
    pub rule: Option<UpdateRule>,
    /// The decay of the parameters' EMA, if there is one.
    pub average: Option<f32>,
    /// The outer optimizer of local SGD, if there is one.
    pub outer: Option<OuterOptimizer>,
    /// The parts of the range, each of which is updated with the same settings.
    pub parts: Vec<GroupRun>,
    /// Whether updates compute checksums for SDC checks.
    pub has_sdc_checks: bool,
}

/// Parameters and state of a range.
pub struct DeviceState<B: Kernels> {
    /// The device.
    pub backend: B,
    recipe: UpdateSettings,
    /// The fp32 master weights of the range. None if the full parameters are always in memory in
    /// f32; then the parameters are a window of those.
    master: Option<B::Buf>,
    /// One buffer for each name in [`UpdateRule::state`], then the EMA.
    state: Vec<B::Buf>,
    /// The state of the outer optimizer, if there is one.
    outer: Option<OuterState<B>>,
    /// The checksum, if SDC checks are on.
    checksum: Option<SdcChecksum<B>>,
}

/// The state of the outer optimizer.
struct OuterState<B: Kernels> {
    step: OuterOptimizer,
    /// The parameters after the last average.
    anchor: B::Buf,
    /// The momentum buffer, if the momentum is not 0.
    momentum: Option<B::Buf>,
}

impl<B: Kernels> DeviceState<B> {
    /// Creates fresh optimizer state for a range with parameters `values`, and master weights if
    /// `has_master`.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice.
    pub fn new(
        backend: &B,
        recipe: UpdateSettings,
        values: &[f32],
        has_master: bool,
    ) -> Result<Self> {
        let zeros = || {
            let mut buf = backend.alloc_f32(MemoryKind::Optimizer, values.len())?;
            backend.zero(B::all_mut(&mut buf))?;
            Ok(buf)
        };
        let state =
            state_names(recipe.rule, recipe.average, None).into_iter().map(|name| match name {
                EMA => backend.upload_f32(MemoryKind::Optimizer, values),
                _ => zeros(),
            });
        let state = state.collect::<Result<_>>()?;
        let outer = recipe.outer.map(|step| {
            Ok::<_, Error>(OuterState {
                step,
                anchor: backend.upload_f32(MemoryKind::Optimizer, values)?,
                momentum: (step.momentum > 0.0).then(zeros).transpose()?,
            })
        });
        Ok(Self {
            state,
            outer: outer.transpose()?,
            master: has_master
                .then(|| backend.upload_f32(MemoryKind::Parameters, values))
                .transpose()?,
            checksum: recipe.has_sdc_checks.then(SdcChecksum::default),
            backend: backend.clone(),
            recipe,
        })
    }

    /// Returns the digest of parameters and state after the last update, if SDC checks are on and
    /// there was an update.
    ///
    /// # Errors
    /// Returns an error if memory changed between the last two updates, or the device fails.
    pub fn digest(&mut self) -> Result<Option<u64>> {
        self.checksum.as_mut().map_or(Ok(None), |checksum| checksum.settle(&self.backend))
    }

    /// Checks that parameters and state have not changed since the last update, if SDC checks are
    /// on. `full` is as in [`DeviceState::update`].
    ///
    /// # Errors
    /// Returns an error if they have changed, the device fails, or no buffer holds the parameters.
    pub fn compare<'a>(&'a mut self, full: Option<B::View<'a>>) -> Result<()> {
        let Some(checksum) = &mut self.checksum else { return Ok(()) };
        let params = self.master.as_ref().map(B::all).or(full).ok_or_else(missing_parameters)?;
        let mut left: Vec<B::View<'_>> =
            std::iter::once(params).chain(self.state.iter().map(B::all)).collect();
        let mut windows = Vec::new();
        for part in &self.recipe.parts {
            for view in &mut left {
                let (of_part, rest) = B::split_at(*view, part.len);
                windows.push(of_part);
                *view = rest;
            }
        }
        // Running statistics have no optimizer state.
        checksum.compare(&self.backend, windows.into_iter())
    }

    /// Returns the master weights.
    ///
    /// # Errors
    /// Returns an error if there are none.
    pub fn master(&self) -> Result<&B::Buf> {
        self.master.as_ref().ok_or_else(missing_parameters)
    }

    /// Returns the squared norms for trust ratios ([`UpdateRule::squares`]) of the parts of tensors
    /// in `range`, which is relative to this range. `params` and `grad` are windows of the whole
    /// range.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn squares<'a>(
        &'a self,
        hyper: Hyper,
        range: Range<usize>,
        grad: B::View<'a>,
        params: B::View<'a>,
    ) -> Result<Vec<(usize, SquaredNorms<B::Scalar>)>> {
        let rule = self.rule()?;
        let cut = |view, at: &Range<usize>| B::split_at(B::split_at(view, at.end).0, at.start).1;
        let mut squares = Vec::new();
        let mut end = 0;
        for part in &self.recipe.parts {
            let at = range.start.max(end)..range.end.min(end + part.len);
            end += part.len;
            let Some(tensor) = part.scaled_by.filter(|_| at.start < at.end) else { continue };
            let state: Vec<_> = self.state(&at).take(rule.state().len()).collect();
            let update = hyper.update_of(part, 1.0);
            squares.push((
                tensor,
                rule.squared_norms(
                    &self.backend,
                    update,
                    cut(grad, &at),
                    &state,
                    cut(params, &at),
                )?,
            ));
        }
        Ok(squares)
    }

    fn rule(&self) -> Result<UpdateRule> {
        self.recipe.rule.ok_or_else(|| Error::internal("the update has no rule"))
    }

    /// Updates the parameters with their gradient. `full` is the range's window of the full
    /// parameters, if they are always in memory; `trust` has the trust ratio of every tensor of the
    /// unit, for layer-wise rules.
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
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
            (None, None) => return Err(missing_parameters()),
        };
        // Check the digests of the previous update first.
        self.checksum.as_mut().map_or(Ok(None), |checksum| checksum.settle(&self.backend))?;
        let mut audit = self.checksum.is_some().then(UpdateChecksums::default);
        let state = self.state.iter_mut().map(B::all_mut).collect();
        let mut left = Windows::<B> { grad, state, params, copy };
        for part in &self.recipe.parts {
            let (Windows { grad, mut state, mut params, copy }, rest) = left.cut(part.len);
            left = rest;
            let average = self.recipe.average.and_then(|decay| Some((decay, state.pop()?)));
            let to = B::reborrow(&mut params);
            match part.average {
                Some(rate) => self.backend.update_average(rate, grad, to, copy, audit.as_mut())?,
                None => {
                    let update =
                        hyper.update_of(part, part.scaled_by.map_or(1.0, |tensor| trust[tensor]));
                    rule.update(&self.backend, update, grad, state, to, copy, audit.as_mut())?;
                }
            }
            if let Some((decay, average)) = average {
                self.backend.update_average(
                    1.0 - decay,
                    B::shared(&params),
                    average,
                    None,
                    audit.as_mut(),
                )?;
            }
        }
        if let (Some(checksum), Some(audit)) = (&mut self.checksum, audit) {
            checksum.updated(audit);
        }
        Ok(())
    }

    /// Swaps the parameters and their EMA, if there is one. `full` is as in
    /// [`DeviceState::update`].
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
    pub fn swap_ema(&mut self, full: Option<B::ViewMut<'_>>) -> Result<()> {
        let b = &self.backend;
        let Some(average) = self.state.last_mut().filter(|_| self.recipe.average.is_some()) else {
            return Ok(());
        };
        match (&mut self.master, full) {
            (Some(master), full) => {
                std::mem::swap(master, average);
                full.map_or(Ok(()), |full| b.copy(B::all(master), full))
            }
            (None, Some(mut full)) => {
                let mut saved = b.alloc_f32(MemoryKind::Parameters, B::len(average))?;
                b.copy(B::shared(&full), B::all_mut(&mut saved))?;
                b.copy(B::all(average), B::reborrow(&mut full))?;
                b.copy(B::all(&saved), B::all_mut(average))
            }
            (None, None) => Err(missing_parameters()),
        }
    }

    /// Returns the number of buffers that are averaged over replicas: parameters, the rule's state
    /// and the EMA.
    pub fn averaged(&self) -> usize {
        1 + self.state.len()
    }

    /// Writes this replica's contribution to the mean over replicas into `to`: `rate` times
    /// parameters and state, one after the other. `full` is as in [`DeviceState::update`].
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
    pub fn scaled_state<'a>(
        &'a self,
        rate: f32,
        full: Option<B::View<'a>>,
        to: &mut B::Buf,
    ) -> Result<()> {
        let params = self.master.as_ref().map(B::all).or(full).ok_or_else(missing_parameters)?;
        self.backend.zero(B::all_mut(to))?;
        let len = B::len(to) / self.averaged();
        for (part, values) in
            std::iter::once(params).chain(self.state.iter().map(B::all)).enumerate()
        {
            self.backend.update_average(
                rate,
                values,
                B::view_mut(to, part * len..(part + 1) * len),
                None,
                None,
            )?;
        }
        Ok(())
    }

    /// Applies the mean over replicas, which has the layout of [`DeviceState::scaled_state`]:
    /// replaces the state, and the parameters by the outer step if there is one. `full` is as in
    /// [`DeviceState::update`].
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
    pub fn apply_average(
        &mut self,
        mean: B::View<'_>,
        len: usize,
        full: Option<B::ViewMut<'_>>,
    ) -> Result<()> {
        self.checksum.iter_mut().for_each(SdcChecksum::forget);
        let b = &self.backend;
        let (params, mut rest) = B::split_at(mean, len);
        for buf in &mut self.state {
            let (of_buf, others) = B::split_at(rest, len);
            b.copy(of_buf, B::all_mut(buf))?;
            rest = others;
        }
        let Some(outer) = &mut self.outer else { return set(b, params, &mut self.master, full) };
        outer.take(b, &self.recipe.parts, params)?;
        set(b, B::all(&outer.anchor), &mut self.master, full)
    }

    /// Returns the elements `range` of every buffer of state.
    pub fn state(&self, range: &Range<usize>) -> impl Iterator<Item = B::View<'_>> {
        let of_outer = self.outer.iter().filter_map(|outer| outer.momentum.as_ref());
        self.state.iter().chain(of_outer).map(|buf| B::view(buf, range.clone()))
    }

    /// Returns the numbers of the parts that [`DeviceState::restore`] loads, in order.
    pub fn restored_parts(&self) -> Vec<usize> {
        let copies = usize::from(self.master.is_some()) + usize::from(self.outer.is_some());
        let momentum = self.outer.as_ref().is_some_and(|outer| outer.momentum.is_some());
        let states = self.state.len() + usize::from(momentum);
        std::iter::repeat_n(0, copies).chain(1..=states).collect()
    }

    /// Replaces parameters and state by the values that `load` returns: part 0 is the parameters,
    /// part k the k-th buffer of state.
    ///
    /// # Errors
    /// Returns the error of `load`, or an error if the device fails.
    pub fn restore(&mut self, mut load: impl FnMut(usize) -> Result<Vec<f32>>) -> Result<()> {
        self.checksum.iter_mut().for_each(SdcChecksum::forget);
        if let Some(master) = &mut self.master {
            self.backend.write(&load(0)?, B::all_mut(master))?;
        }
        if let Some(outer) = &mut self.outer {
            self.backend.write(&load(0)?, B::all_mut(&mut outer.anchor))?;
        }
        let of_outer = self.outer.iter_mut().filter_map(|outer| outer.momentum.as_mut());
        for (part, buf) in self.state.iter_mut().chain(of_outer).enumerate() {
            self.backend.write(&load(part + 1)?, B::all_mut(buf))?;
        }
        Ok(())
    }
}

impl DeviceState<Cpu> {
    /// Updates some rows with their gradients; all other rows and their state stay as they are.
    /// `first` is the id of the first row of the range, whose rows have `width` elements.
    ///
    /// # Errors
    /// Returns an error if memory runs out, or no buffer holds the parameters.
    pub fn update_rows(
        &mut self,
        hyper: Hyper,
        gradient: &SparseRows,
        (first, width): (usize, usize),
    ) -> Result<()> {
        let rule = self.rule()?;
        let Self { backend, recipe, master, state, .. } = self;
        let params = master.as_mut().ok_or_else(missing_parameters)?.as_mut_slice();
        let mut end = first;
        for part in &recipe.parts {
            let places = gradient.within(&(end..end + part.len / width));
            end += part.len / width;
            let rows = RowCopies { first, width, ids: &gradient.ids[places.clone()] };
            let grad = &gradient.values[elements_of(places, width)];
            let mut of_rows = rows.copy_from(backend, params)?;
            let of_state = state.iter().map(|buf| rows.copy_from(backend, buf.as_slice()));
            let mut of_state = of_state.collect::<Result<Vec<_>>>()?;
            let windows = of_state.iter_mut().map(CpuBuf::as_mut_slice).collect();
            let update = hyper.update_of(part, 1.0);
            rule.update(backend, update, grad, windows, of_rows.as_mut_slice(), None, None)?;
            rows.copy_to(of_rows.as_slice(), params);
            for (from, to) in of_state.iter().zip(&mut *state) {
                rows.copy_to(from.as_slice(), to.as_mut_slice());
            }
        }
        Ok(())
    }
}

/// Copies parameters to the master weights and the full parameters.
fn set<B: Kernels>(
    backend: &B,
    params: B::View<'_>,
    master: &mut Option<B::Buf>,
    full: Option<B::ViewMut<'_>>,
) -> Result<()> {
    match (master, full) {
        (None, None) => Err(missing_parameters()),
        (None, Some(full)) => backend.copy(params, full),
        (Some(master), full) => {
            backend.copy(params, B::all_mut(master))?;
            full.map_or(Ok(()), |full| backend.copy(params, full))
        }
    }
}

impl<B: Kernels> OuterState<B> {
    /// Takes the outer step from the last average towards the `mean` of the replicas. Running
    /// statistics are not trained; they are replaced by the mean.
    fn take(&mut self, backend: &B, parts: &[GroupRun], mean: B::View<'_>) -> Result<()> {
        let OuterOptimizer { lr, momentum } = self.step;
        let mut mean = mean;
        let mut anchor = B::all_mut(&mut self.anchor);
        let mut velocity = self.momentum.as_mut().map(B::all_mut);
        for part in parts {
            let (of_part, mean_rest) = B::split_at(mean, part.len);
            let (to, anchor_rest) = B::split_at_mut(anchor, part.len);
            let (of_velocity, velocity_rest) =
                velocity.map(|velocity| B::split_at_mut(velocity, part.len)).unzip();
            match of_velocity {
                _ if part.average.is_some() => backend.copy(of_part, to)?,
                None => backend.update_average(lr, of_part, to, None, None)?,
                // The gradient is the anchor minus the mean; the anchor is a weight decay of 1.
                Some(velocity) => {
                    let step =
                        Sgd { lr, momentum, nesterov: true, weight_decay: 1.0, grad_scale: -1.0 };
                    backend.sgd(step, of_part, velocity, to, None, None)?;
                }
            }
            (mean, anchor, velocity) = (mean_rest, anchor_rest, velocity_rest);
        }
        Ok(())
    }
}

/// The same elements of all buffers that an update reads and writes.
struct Windows<'g, 'a, B: Kernels> {
    grad: B::View<'g>,
    state: Vec<B::ViewMut<'a>>,
    params: B::ViewMut<'a>,
    copy: Option<B::ViewMut<'a>>,
}

impl<B: Kernels> Windows<'_, '_, B> {
    /// Splits every window at the same element.
    fn cut(self, at: usize) -> (Self, Self) {
        let (grad, grad_rest) = B::split_at(self.grad, at);
        let (params, params_rest) = B::split_at_mut(self.params, at);
        let (state, state_rest) =
            self.state.into_iter().map(|view| B::split_at_mut(view, at)).unzip();
        let (copy, copy_rest) = self.copy.map(|copy| B::split_at_mut(copy, at)).unzip();
        let rest =
            Self { grad: grad_rest, state: state_rest, params: params_rest, copy: copy_rest };
        (Self { grad, state, params, copy }, rest)
    }
}
