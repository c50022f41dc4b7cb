//! A rank's shard of a unit: a range of its parameters, the optimizer state of that range, and
//! their update.
//!
//! This type hides whether the state and its update are on the device ([`DeviceState`]) or on the
//! host ([`Offloaded`]). Gradients and updated parameters are always windows of device buffers.
//!
//! The average of `optimizer.ema` is one more buffer of optimizer state. It replaces the parameters
//! during an evaluation (`Sharded::swap_ema`).

use std::ops::Range;

use super::Storage;
use super::cpu_offload::{HostUpdater, Offloaded};
use super::device_state::{DeviceState, UpdateSettings};
use super::local_sgd::LocalSgd;
use super::sparse::SparseRows;
use super::step_params::{Hyper, missing_parameters};
use hpctrain_base::error::Result;
use hpctrain_base::layout::UnitLayout;
use hpctrain_cpu::Cpu;
use hpctrain_device::{Backend as _, Kernels, MemoryKind};
use hpctrain_nn::optim::{Group, SquaredNorms, UpdateRule, group_runs};

/// How and where parameters are updated.
#[derive(Clone)]
pub struct Updates {
    /// The update rule.
    pub rule: UpdateRule,
    /// The parameter groups with other settings.
    pub groups: Vec<Group>,
    /// The decay of the parameters' EMA, if there is one.
    pub ema_decay: Option<f32>,
    /// The settings of local SGD, if it is used.
    pub local_sgd: Option<LocalSgd>,
    /// The ranks that update parameters.
    pub storage: Storage,
    /// The number of steps between two SDC checks of replicas; 0 disables SDC checks.
    pub sdc_check_every: u64,
    /// The CPU that keeps and updates the master weights and optimizer state (CPU offload); none
    /// leaves them on the device.
    pub host: Option<Cpu>,
}

/// Parameters or optimizer state of an owned range, on the device or on the host.
pub enum Values<'a, B: Kernels> {
    /// Values on the device.
    Device(&'a B, B::View<'a>),
    /// Values on the host.
    Host(&'a Cpu, &'a [f32]),
}

impl<'a, B: Kernels> Values<'a, B> {
    /// Returns the values in `range`.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Values<'a, B> {
        match *self {
            Values::Device(backend, view) => {
                let (until, _) = B::split_at(view, range.end);
                Values::Device(backend, B::split_at(until, range.start).1)
            }
            Values::Host(cpu, values) => Values::Host(cpu, &values[range]),
        }
    }

    /// Returns the values in host memory, if they are there.
    pub fn on_host(&self) -> Option<&'a [f32]> {
        match *self {
            Values::Device(_, view) => B::on_host(view),
            Values::Host(_, values) => Some(values),
        }
    }

    /// Copies the values to `to`, which has their length.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn read(&self, to: &mut [f32]) -> Result<()> {
        match *self {
            Values::Device(backend, view) => backend.download(view, to),
            Values::Host(cpu, values) => cpu.download(values, to),
        }
    }
}

impl OptimizerShard<Cpu> {
    /// Updates some rows with their gradients; all other rows and their state stay as they are. The
    /// range begins and ends at rows of `width` elements.
    ///
    /// # Errors
    /// Returns an error if memory runs out, or no buffer holds the parameters.
    pub fn update_rows(&mut self, hyper: Hyper, gradient: &SparseRows, width: usize) -> Result<()> {
        if self.range.is_empty() {
            return Ok(());
        }
        let first = self.range.start / width;
        match &mut self.placement {
            ShardPlacement::Device(held) => held.update_rows(hyper, gradient, (first, width)),
            ShardPlacement::Host(_) => Err(missing_parameters()),
        }
    }

    /// Returns the parameters of the range.
    ///
    /// # Errors
    /// Returns an error if no buffer holds them.
    pub fn params(&self) -> Result<&[f32]> {
        match &self.placement {
            _ if self.range.is_empty() => Ok(&[]),
            ShardPlacement::Device(held) => Ok(held.master()?.as_slice()),
            ShardPlacement::Host(_) => Err(missing_parameters()),
        }
    }
}

/// A number that the device or the host computes.
pub enum Number<B: Kernels> {
    /// A number on the device, which may not be computed yet.
    Later(B::Scalar),
    /// A number on the host.
    Known(f64),
}

impl<B: Kernels> Number<B> {
    /// Waits for the number and returns it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn read(self, backend: &B) -> Result<f64> {
        match self {
            Number::Later(scalar) => backend.read(scalar),
            Number::Known(value) => Ok(value),
        }
    }
}

/// The owned range of one unit.
pub struct OptimizerShard<B: Kernels> {
    /// The range of the unit.
    range: Range<usize>,
    placement: ShardPlacement<B>,
}

/// Where master weights and optimizer state are.
enum ShardPlacement<B: Kernels> {
    Device(DeviceState<B>),
    Host(Box<Offloaded<B>>),
}

impl<B: Kernels> OptimizerShard<B> {
    /// Creates the shard `range` with parameters `values` and fresh optimizer state; without
    /// `updates` there is no optimizer state. Master weights are kept, unless the full parameters
    /// are always in memory (`are_full_here`) in f32 and there is no CPU offload. An empty range
    /// has no state and no updates.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice.
    pub fn new(
        backend: &B,
        host: Option<&HostUpdater>,
        updates: Option<&Updates>,
        layout: &UnitLayout,
        range: Range<usize>,
        values: &[f32],
        are_full_here: bool,
    ) -> Result<Self> {
        let (host, updates) = if range.is_empty() { (None, None) } else { (host, updates) };
        let (rule, groups) =
            updates.map_or((None, &[][..]), |updates| (Some(updates.rule), &updates.groups));
        let parts =
            group_runs(layout, range.clone(), groups, rule.is_some_and(|rule| rule.is_layerwise()));
        let average = updates.and_then(|updates| updates.ema_decay);
        let outer = updates.and_then(|updates| updates.local_sgd?.outer);
        let audits = updates.is_some_and(|updates| updates.sdc_check_every > 0);
        let recipe = UpdateSettings { rule, average, outer, parts, has_sdc_checks: audits };
        let has_master = !range.is_empty() && (!are_full_here || backend.has_master_weights());
        let placement = match host {
            None => ShardPlacement::Device(DeviceState::new(backend, recipe, values, has_master)?),
            Some(host) => {
                ShardPlacement::Host(Box::new(Offloaded::new(backend, host, recipe, values)?))
            }
        };
        Ok(Self { range, placement })
    }

    /// Returns the range of the unit.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Takes the reduced gradient of the range, the window `at` of `grad`, which must not change
    /// until [`OptimizerShard::update`] or [`OptimizerShard::forget`].
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn reduced(&mut self, grad: &mut B::Buf, at: Range<usize>) -> Result<()> {
        match &mut self.placement {
            ShardPlacement::Device(_) => Ok(()),
            ShardPlacement::Host(offloaded) => offloaded.fetch(B::comm_buffer(grad, at)?),
        }
    }

    /// Discards the reduced gradient.
    pub fn forget(&mut self) {
        if let ShardPlacement::Host(offloaded) = &mut self.placement {
            offloaded.forget();
        }
    }

    /// Returns the squared norms for trust ratios of the parts of tensors in `range`, a range of
    /// the unit within the owned one, with the index of each tensor in the unit. `grad` is that of
    /// the owned range, `full` is as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
    pub fn squares<'a>(
        &'a mut self,
        hyper: Hyper,
        range: Range<usize>,
        grad: B::View<'a>,
        full: Option<&'a B::Buf>,
    ) -> Result<Vec<(usize, SquaredNorms<Number<B>>)>> {
        let of_owned = range.start - self.range.start..range.end - self.range.start;
        match &mut self.placement {
            ShardPlacement::Device(held) => {
                let params = match (held.master(), full) {
                    (Ok(master), _) => B::all(master),
                    (Err(_), Some(full)) => B::view(full, self.range.clone()),
                    (Err(e), None) => return Err(e),
                };
                let squares = held.squares(hyper, of_owned, grad, params)?.into_iter();
                Ok(squares.map(|(tensor, pair)| (tensor, pair.map(Number::Later))).collect())
            }
            ShardPlacement::Host(offloaded) => {
                let squares = offloaded.squares(hyper, of_owned)?.into_iter();
                Ok(squares.map(|(tensor, pair)| (tensor, pair.map(Number::Known))).collect())
            }
        }
    }

    /// Updates the parameters with the reduced gradient of the range. `full` are the full
    /// parameters, if they are always in memory; `trust` has the trust ratio of every tensor of the
    /// unit, for layer-wise rules.
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
    pub fn update(
        &mut self,
        hyper: Hyper,
        trust: &[f32],
        grad: B::View<'_>,
        full: Option<&mut B::Buf>,
    ) -> Result<()> {
        if self.range.is_empty() {
            return Ok(());
        }
        match (&mut self.placement, full) {
            (ShardPlacement::Device(held), full) => held.update(
                hyper,
                trust,
                grad,
                full.map(|full| B::view_mut(full, self.range.clone())),
            ),
            (ShardPlacement::Host(offloaded), None) => offloaded.update(hyper, trust),
            (ShardPlacement::Host(offloaded), Some(full)) => {
                offloaded.update(hyper, trust)?;
                offloaded.copy_into(B::comm_buffer(full, self.range.clone())?)
            }
        }
    }

    /// Returns the digest of parameters and state after the last update, if SDC checks are on and
    /// there was an update.
    ///
    /// # Errors
    /// Returns an error if memory changed between the last two updates, or the device fails.
    pub fn digest(&mut self) -> Result<Option<u64>> {
        match &mut self.placement {
            ShardPlacement::Device(held) => held.digest(),
            ShardPlacement::Host(offloaded) => offloaded.state_mut().digest(),
        }
    }

    /// Checks that parameters and state have not changed since the last update, if SDC checks are
    /// on. `full` is as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// Returns an error if they have changed, the device fails, or no buffer holds the parameters.
    pub fn compare(&mut self, full: Option<&B::Buf>) -> Result<()> {
        if self.range.is_empty() {
            return Ok(());
        }
        match &mut self.placement {
            ShardPlacement::Device(held) => {
                held.compare(full.map(|full| B::view(full, self.range.clone())))
            }
            ShardPlacement::Host(offloaded) => offloaded.state_mut().compare(None),
        }
    }

    /// Returns this replica's contribution to the mean over replicas: `rate` times parameters and
    /// optimizer state. `full` is as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice, the device fails, or no buffer holds the
    /// parameters.
    pub fn scaled_state(&self, backend: &B, rate: f32, full: Option<&B::Buf>) -> Result<B::Buf> {
        let buffers = match &self.placement {
            ShardPlacement::Device(held) => held.averaged(),
            ShardPlacement::Host(offloaded) => offloaded.state().averaged(),
        };
        let mut scaled = backend.alloc_f32(MemoryKind::Gradients, buffers * self.range.len())?;
        match &self.placement {
            ShardPlacement::Device(held) => held.scaled_state(
                rate,
                full.map(|full| B::view(full, self.range.clone())),
                &mut scaled,
            )?,
            ShardPlacement::Host(offloaded) => offloaded.scaled_state(rate, &mut scaled)?,
        }
        Ok(scaled)
    }

    /// Applies the mean over replicas, the sum of their
    /// [contributions](OptimizerShard::scaled_state), with the outer optimizer if there is one.
    /// `full` is as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
    pub fn apply_average(&mut self, mean: &B::Buf, full: Option<&mut B::Buf>) -> Result<()> {
        match (&mut self.placement, full) {
            (ShardPlacement::Device(held), full) => {
                let full = full.map(|full| B::view_mut(full, self.range.clone()));
                held.apply_average(B::all(mean), self.range.len(), full)
            }
            (ShardPlacement::Host(offloaded), None) => offloaded.apply_average(B::all(mean)),
            (ShardPlacement::Host(offloaded), Some(full)) => {
                offloaded.apply_average(B::all(mean))?;
                offloaded.copy_into(B::comm_buffer(full, self.range.clone())?)
            }
        }
    }

    /// Swaps parameters and their EMA, if there is one. `full` is as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
    pub fn swap_ema(&mut self, full: Option<&mut B::Buf>) -> Result<()> {
        if self.range.is_empty() {
            return Ok(());
        }
        match (&mut self.placement, full) {
            (ShardPlacement::Device(held), full) => {
                held.swap_ema(full.map(|full| B::view_mut(full, self.range.clone())))
            }
            (ShardPlacement::Host(offloaded), None) => offloaded.swap_ema(),
            (ShardPlacement::Host(offloaded), Some(full)) => {
                offloaded.swap_ema()?;
                offloaded.copy_into(B::comm_buffer(full, self.range.clone())?)
            }
        }
    }

    /// Copies the parameters into the range `at` of a buffer, to be all-gathered or sent.
    ///
    /// # Errors
    /// Returns an error if the device fails, or no buffer holds the parameters.
    pub fn copy_into(&mut self, to: &mut B::Buf, at: Range<usize>) -> Result<()> {
        match &mut self.placement {
            ShardPlacement::Device(held) => {
                held.backend.copy(B::all(held.master()?), B::view_mut(to, at))
            }
            ShardPlacement::Host(offloaded) => offloaded.copy_into(B::comm_buffer(to, at)?),
        }
    }

    /// Does the same as [`OptimizerShard::copy_into`]; an upload from the host is complete only
    /// after `HostUpdater::arrived`.
    ///
    /// # Errors
    /// Returns the same errors as [`OptimizerShard::copy_into`].
    pub fn begin_copy_into(&mut self, to: &mut B::Buf, at: Range<usize>) -> Result<()> {
        match &mut self.placement {
            ShardPlacement::Device(_) => self.copy_into(to, at),
            ShardPlacement::Host(offloaded) => offloaded.begin_copy_into(B::comm_buffer(to, at)?),
        }
    }

    /// Returns parameters and optimizer state of `range`, a range of the unit within the owned one.
    /// `full` is as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// Returns an error if no buffer holds the parameters.
    pub fn values<'a>(
        &'a self,
        range: Range<usize>,
        full: Option<&'a B::Buf>,
    ) -> Result<(Values<'a, B>, Vec<Values<'a, B>>)> {
        let of_owned = range.start - self.range.start..range.end - self.range.start;
        match &self.placement {
            ShardPlacement::Device(held) => {
                let params = match (held.master(), full) {
                    (Ok(master), _) => B::view(master, of_owned.clone()),
                    (Err(_), Some(full)) => B::view(full, range),
                    (Err(e), None) => return Err(e),
                };
                let value = |view| Values::Device(&held.backend, view);
                Ok((value(params), held.state(&of_owned).map(value).collect()))
            }
            ShardPlacement::Host(offloaded) => {
                let held = offloaded.state();
                let value = |values| Values::Host(&held.backend, values);
                let params = Cpu::view(held.master()?, of_owned.clone());
                Ok((value(params), held.state(&of_owned).map(value).collect()))
            }
        }
    }

    /// Returns the numbers of the parts that [`OptimizerShard::restore`] loads, in order.
    pub fn restored_parts(&self) -> Vec<usize> {
        match &self.placement {
            ShardPlacement::Device(held) => held.restored_parts(),
            ShardPlacement::Host(offloaded) => offloaded.state().restored_parts(),
        }
    }

    /// Replaces parameters and state by the values that `load(part, range)` returns: part 0 is the
    /// parameters, part k the k-th buffer of state.
    ///
    /// # Errors
    /// Returns the error of `load`, or an error if the device fails.
    pub fn restore(
        &mut self,
        mut load: impl FnMut(usize, Range<usize>) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let load = |part| load(part, self.range.clone());
        match &mut self.placement {
            ShardPlacement::Device(held) => held.restore(load),
            ShardPlacement::Host(offloaded) => offloaded.restore(load),
        }
    }
}
