//! A rank's part of a unit: a range of its parameters, the optimizer's state of that range, and
//! their update.
//!
//! Nothing else knows the place of the state and of its update: on the device that computes
//! ([`DeviceState`]), or on the host ([`Offloaded`]). The gradient comes as a window, and updated
//! parameters leave as a window, of the device that computes.

use std::ops::Range;

use super::Storage;
use super::cpu_offload::{HostUpdater, Offloaded};
use super::device_state::{DeviceState, Recipe};
use super::local_sgd::LocalSgd;
use super::step_params::Hyper;
use hpctrain_base::error::Result;
use hpctrain_base::layout::UnitLayout;
use hpctrain_cpu::Cpu;
use hpctrain_device::{Backend as _, Kernels, MemoryKind};
use hpctrain_nn::optim::{Group, Pair, UpdateRule, parts};

/// Rule and place of the updates of parameters.
#[derive(Clone)]
pub struct Updates {
    /// The rule.
    pub rule: UpdateRule,
    /// Parameters for which something is different.
    pub groups: Vec<Group>,
    /// Decay of a running average of the parameters, if one is kept.
    pub average: Option<f32>,
    /// The averages of replicas, where those train apart.
    pub averaging: Option<LocalSgd>,
    /// The ranks that update.
    pub storage: Storage,
    /// Steps between two comparisons of replicas, whose updates are audited; 0 audits none.
    pub audit_every: u64,
    /// The CPU that keeps masters and optimizer state and updates them. None leaves that to the
    /// device that computes.
    pub host: Option<Cpu>,
}

/// Parameters or optimizer state of an owned range, on the device or on the host.
pub enum Values<'a, B: Kernels> {
    /// On the device that computes.
    Device(&'a B, B::View<'a>),
    /// On the host.
    Host(&'a Cpu, &'a [f32]),
}

impl<B: Kernels> Values<'_, B> {
    /// Copies them; `to` has their length.
    ///
    /// # Errors
    /// The device failed.
    pub fn read(&self, to: &mut [f32]) -> Result<()> {
        match *self {
            Values::Device(backend, view) => backend.download(view, to),
            Values::Host(cpu, values) => cpu.download(values, to),
        }
    }
}

/// A number that the device or the host computed.
pub enum Number<B: Kernels> {
    /// On the device that computes.
    Later(B::Scalar),
    /// On the host.
    Known(f64),
}

impl<B: Kernels> Number<B> {
    /// Its value.
    ///
    /// # Errors
    /// The device failed.
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
    home: ShardPlacement<B>,
}

/// The memory of parameters and state.
enum ShardPlacement<B: Kernels> {
    Device(DeviceState<B>),
    Host(Box<Offloaded<B>>),
}

impl<B: Kernels> OptimizerShard<B> {
    /// The owner of `range`, whose parameters are `values`, with fresh optimizer state; without
    /// updates there is none. Parameters are kept, unless full ones live always and there is no
    /// host to keep them. Of an empty range nothing is kept or done.
    ///
    /// # Errors
    /// Out of memory.
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
            parts(layout, range.clone(), groups, rule.is_some_and(|rule| rule.is_layerwise()));
        let average = updates.and_then(|updates| updates.average);
        let outer = updates.and_then(|updates| updates.averaging?.outer);
        let audits = updates.is_some_and(|updates| updates.audit_every > 0);
        let recipe = Recipe { rule, average, outer, parts, audits };
        let is_apart = !range.is_empty() && (!are_full_here || backend.has_master_weights());
        let home = match host {
            None => ShardPlacement::Device(DeviceState::new(backend, recipe, values, is_apart)?),
            Some(host) => {
                ShardPlacement::Host(Box::new(Offloaded::new(backend, host, recipe, values)?))
            }
        };
        Ok(Self { range, home })
    }

    /// The range of the unit.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The reduced gradient of the range is the window `at` of `grad`, which stays as it is until
    /// [`OptimizerShard::update`] or [`OptimizerShard::forget`].
    ///
    /// # Errors
    /// The device failed.
    pub fn reduced(&mut self, grad: &mut B::Buf, at: Range<usize>) -> Result<()> {
        match &mut self.home {
            ShardPlacement::Device(_) => Ok(()),
            ShardPlacement::Host(offloaded) => offloaded.fetch(B::comm_buffer(grad, at)?),
        }
    }

    /// The reduced gradient is not to be used.
    pub fn forget(&mut self) {
        if let ShardPlacement::Host(offloaded) = &mut self.home {
            offloaded.forget();
        }
    }

    /// The squares that scale the steps of tensors, of their parts in `range`, a range of the unit
    /// within the owned one; by the tensors' places in the unit. `grad` is of the owned range,
    /// `full` as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// The device failed, or no buffer holds the parameters.
    pub fn squares<'a>(
        &'a mut self,
        hyper: Hyper,
        range: Range<usize>,
        grad: B::View<'a>,
        full: Option<&'a B::Buf>,
    ) -> Result<Vec<(usize, Pair<Number<B>>)>> {
        let of_owned = range.start - self.range.start..range.end - self.range.start;
        match &mut self.home {
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

    /// Updates the parameters from the reduced gradient of the range. `full` are the full ones,
    /// where they live always; `trust` has a factor for every tensor of the unit where steps are
    /// scaled.
    ///
    /// # Errors
    /// The device failed, or no buffer holds the parameters.
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
        match (&mut self.home, full) {
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

    /// The digest of parameters and state after the last update, where updates are audited and
    /// there was one.
    ///
    /// # Errors
    /// That update had found other values than the one before it had left; or the device failed.
    pub fn digest(&mut self) -> Result<Option<u64>> {
        match &mut self.home {
            ShardPlacement::Device(held) => held.digest(),
            ShardPlacement::Host(offloaded) => offloaded.held_mut().digest(),
        }
    }

    /// Compares parameters and state with those that the last update has left, where updates are
    /// audited. `full` as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// They differ; the device failed, or no buffer holds the parameters.
    pub fn compare(&mut self, full: Option<&B::Buf>) -> Result<()> {
        if self.range.is_empty() {
            return Ok(());
        }
        match &mut self.home {
            ShardPlacement::Device(held) => {
                held.compare(full.map(|full| B::view(full, self.range.clone())))
            }
            ShardPlacement::Host(offloaded) => offloaded.held_mut().compare(None),
        }
    }

    /// This replica's part of the mean over replicas: `rate` times parameters and optimizer state.
    /// `full` as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// Out of memory, the device failed, or no buffer holds the parameters.
    pub fn scaled_state(&self, backend: &B, rate: f32, full: Option<&B::Buf>) -> Result<B::Buf> {
        let buffers = match &self.home {
            ShardPlacement::Device(held) => held.averaged(),
            ShardPlacement::Host(offloaded) => offloaded.held().averaged(),
        };
        let mut share = backend.alloc_f32(MemoryKind::Gradients, buffers * self.range.len())?;
        match &self.home {
            ShardPlacement::Device(held) => held.scaled_state(
                rate,
                full.map(|full| B::view(full, self.range.clone())),
                &mut share,
            )?,
            ShardPlacement::Host(offloaded) => offloaded.scaled_state(rate, &mut share)?,
        }
        Ok(share)
    }

    /// Takes the sum of the replicas' [shares](OptimizerShard::scaled_state), and the outer step on
    /// it, if there is one. `full` as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// The device failed, or no buffer holds the parameters.
    pub fn apply_average(&mut self, mean: &B::Buf, full: Option<&mut B::Buf>) -> Result<()> {
        match (&mut self.home, full) {
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

    /// Lets parameters and their average take each other's places, where one is kept. `full` as in
    /// [`OptimizerShard::update`].
    ///
    /// # Errors
    /// The device failed, or no buffer holds the parameters.
    pub fn swap_ema(&mut self, full: Option<&mut B::Buf>) -> Result<()> {
        if self.range.is_empty() {
            return Ok(());
        }
        match (&mut self.home, full) {
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

    /// Puts the parameters into a place of a buffer, to be gathered or sent.
    ///
    /// # Errors
    /// The device failed, or no buffer holds the parameters.
    pub fn copy_into(&mut self, to: &mut B::Buf, at: Range<usize>) -> Result<()> {
        match &mut self.home {
            ShardPlacement::Device(held) => {
                held.backend.copy(B::all(held.master()?), B::view_mut(to, at))
            }
            ShardPlacement::Host(offloaded) => offloaded.copy_into(B::comm_buffer(to, at)?),
        }
    }

    /// As [`OptimizerShard::copy_into`]; from a host the parameters are there after
    /// `HostUpdater::arrived`.
    ///
    /// # Errors
    /// As [`OptimizerShard::copy_into`].
    pub fn begin_copy_into(&mut self, to: &mut B::Buf, at: Range<usize>) -> Result<()> {
        match &mut self.home {
            ShardPlacement::Device(_) => self.copy_into(to, at),
            ShardPlacement::Host(offloaded) => offloaded.begin_copy_into(B::comm_buffer(to, at)?),
        }
    }

    /// Parameters and optimizer state of `range`, a range of the unit within the owned one. `full`
    /// as in [`OptimizerShard::update`].
    ///
    /// # Errors
    /// No buffer holds the parameters.
    pub fn values<'a>(
        &'a self,
        range: Range<usize>,
        full: Option<&'a B::Buf>,
    ) -> Result<(Values<'a, B>, Vec<Values<'a, B>>)> {
        let of_owned = range.start - self.range.start..range.end - self.range.start;
        match &self.home {
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
                let held = offloaded.held();
                let value = |values| Values::Host(&held.backend, values);
                let params = Cpu::view(held.master()?, of_owned.clone());
                Ok((value(params), held.state(&of_owned).map(value).collect()))
            }
        }
    }

    /// Numbers of the parts that [`OptimizerShard::restore`] asks for, in its order.
    pub fn restored_parts(&self) -> Vec<usize> {
        match &self.home {
            ShardPlacement::Device(held) => held.restored_parts(),
            ShardPlacement::Host(offloaded) => offloaded.held().restored_parts(),
        }
    }

    /// Replaces parameters and state by the values that `load(part, range)` gives: part 0 is the
    /// parameters, part k the k-th buffer of state.
    ///
    /// # Errors
    /// Of `load`.
    pub fn restore(
        &mut self,
        mut load: impl FnMut(usize, Range<usize>) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let load = |part| load(part, self.range.clone());
        match &mut self.home {
            ShardPlacement::Device(held) => held.restore(load),
            ShardPlacement::Host(offloaded) => offloaded.restore(load),
        }
    }
}
