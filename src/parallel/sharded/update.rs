//! Updates the owned ranges, and sends the new parameters to the other shards and to stages that
//! are tied to them.

use std::ops::Range;

use super::Sharded;
use crate::fsdp_unit::{BufferState, ReducedGradient, Reduction};
use crate::norms;
use crate::norms::Norms;
use crate::owned::Owned;
use crate::step_params::Hyper;
use crate::tied_replica::TiedReplica;
use crate::{Lifetime, Storage};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fault;
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::optim::UpdateRule;

/// Receives the parts of units that a rank saves, after their update.
pub type UpdateObserver<'a, B> = &'a mut dyn FnMut(Owned<'_, B>) -> Result<()>;

impl<B: Kernels> Sharded<B> {
    /// Returns the trust ratio of every tensor of every unit for layer-wise rules, and empty lists
    /// for others.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    fn trust(&mut self, hyper: Hyper) -> Result<Vec<Vec<f32>>> {
        let Some(rule) = self.rule.filter(UpdateRule::is_layerwise) else {
            return Ok(vec![vec![]; self.units.len()]);
        };
        let shards = self.virtual_shards(&self.groups.step.replica);
        let parts = self.parts();
        let before = self.first_virtual_shard();
        let mut measured = Vec::new();
        let mut first = 0;
        for unit in &mut self.units {
            unit.params.wait()?;
            let Some(Reduction::Done(sum)) = &unit.reduction else {
                return Err(Error::internal("the update has no gradient"));
            };
            for shard in shards.clone() {
                let range = unit.layout.part(shard, parts);
                let grad = B::view(&sum.grad, sum.window.clone());
                let start = range.start;
                for (tensor, squares) in
                    unit.owner.squares(hyper, range, grad, unit.params.get())?
                {
                    if unit.layout.is_copy(start, tensor) {
                        continue;
                    }
                    measured.push((shard - shards.start, first + tensor, squares));
                }
            }
            first += unit.layout.tensors.len();
        }
        let mut norms = Norms::new(before + shards.start..before + shards.end, first);
        for (shard, tensor, squares) in measured {
            let [norm, compared] = squares;
            norms.set(shard, tensor, [norm.read(&self.backend)?, compared.read(&self.backend)?]);
        }
        let messages = self.groups.step.stage.gather_bytes(norms.encode()).wait()?;
        let all = self.slices.total * self.virtual_ranks;
        let mut squares = norms::whole(&messages, all, first)?.into_iter();
        let ratios = self.units.iter().map(|unit| {
            let decays = unit.tensors.iter().map(|part| part.decay(hyper.weight_decay));
            decays
                .zip(&mut squares)
                .map(|(decay, squares)| rule.trust_ratio(squares, decay, hyper.grad_scale))
                .collect()
        });
        Ok(ratios.collect())
    }

    /// Updates the owned ranges with the reduced gradients, then starts to send the new parameters
    /// to the other ranks.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    pub fn update(&mut self, hyper: Hyper) -> Result<()> {
        self.update_observed(hyper, None)
    }

    /// Does the same as [`Sharded::update`], and passes the parts of the units that only this rank
    /// saves to `observer`, in the order of [`Sharded::owned`]. Each is passed between its update
    /// and the messages with its new parameters.
    ///
    /// # Errors
    /// Returns the errors of [`Sharded::update`] and of `observer`.
    pub fn update_observed(
        &mut self,
        hyper: Hyper,
        observer: Option<UpdateObserver<'_, B>>,
    ) -> Result<()> {
        let keep = self.policy;
        let shards = self.virtual_shards(&self.groups.replica);
        let parts = self.parts();
        self.free_downloaded_gradient()?;
        if let Some(tables) = &mut self.host_units {
            tables.update(hyper)?;
        }
        let mut observer = observer.filter(|_| !shards.is_empty());
        if let Some(observer) = &mut observer {
            let tables = Self::owned_on_host(self.host_units.as_mut())?;
            tables.into_iter().try_for_each(&mut *observer)?;
        }
        let trust = self.trust(hyper)?;
        for index in 0..self.units.len() {
            let unit = &mut self.units[index];
            let Some(Reduction::Done(ReducedGradient { grad, window, .. })) = unit.reduction.take()
            else {
                return Err(Error::internal("the update has no gradient"));
            };
            let span = span(ActivityKind::Update, Some(&unit.layout.name));
            fault::point("update");
            unit.owner.update(hyper, &trust[index], B::view(&grad, window), unit.params.wait()?)?;
            drop(span);
            if let Some(observer) = &mut observer {
                observer(unit.owned(&shards, parts)?)?;
            }
            fault::point("gather");
            if keep.grads == Lifetime::Step {
                unit.grads = Some(grad);
            }
            self.publish(index)?;
            // Every pass starts with the first blocks, so they are prefetched.
            if keep.params == Lifetime::Use && index < keep.prefetch {
                self.start_all_gather(index)?;
            }
        }
        self.recv_tied_params()
    }

    /// Sends updated parameters of a unit to the other shards, if full parameters are always in
    /// memory, and to stages that are tied to it.
    fn publish(&mut self, index: usize) -> Result<()> {
        match (self.storage, self.policy.params) {
            (Storage::Ranks, Lifetime::Step) => {
                self.send_tied_params(index)?;
                self.distribute_params(index);
                Ok(())
            }
            (Storage::Ranks, Lifetime::Use) => self.send_tied_params(index),
            // A rank that owns nothing must receive the parameters before it sends them.
            (Storage::Central, _) => {
                self.distribute_params(index);
                self.send_tied_params(index)
            }
        }
    }

    /// Swaps parameters and their EMA, if there is one, before and after an evaluation. Collective.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    pub fn swap_ema(&mut self) -> Result<()> {
        if self.average.is_none() {
            return Ok(());
        }
        if let Some(tables) = &mut self.host_units {
            tables.swap_ema()?;
        }
        for index in 0..self.units.len() {
            let unit = &mut self.units[index];
            match self.policy.params {
                Lifetime::Step => unit.owner.swap_ema(unit.params.wait()?)?,
                Lifetime::Use => {
                    unit.params.wait()?;
                    // Uploads must end before the memory is reused.
                    if let Some(host) = &self.host {
                        host.wait_for_uploads()?;
                    }
                    unit.params = BufferState::Freed;
                    unit.owner.swap_ema(None)?;
                }
            }
            self.publish(index)?;
        }
        self.recv_tied_params()
    }

    /// Replaces a range of the full parameters of a unit, which another process has updated.
    ///
    /// # Errors
    /// Returns an error if the full parameters are not in memory, or the device fails.
    pub fn set(&mut self, unit: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        let backend = self.backend.clone();
        backend.write(values, B::view_mut(self.full_params(unit)?, range))
    }

    /// Returns a range of the parameters of a unit, to replace it, if it is in host memory as f32.
    ///
    /// # Errors
    /// Returns an error if the full parameters are not in memory.
    pub fn on_host(&mut self, unit: usize, range: Range<usize>) -> Result<Option<&mut [f32]>> {
        Ok(B::on_host_mut(B::view_mut(self.full_params(unit)?, range)))
    }

    fn full_params(&mut self, unit: usize) -> Result<&mut B::Buf> {
        let full = self.units[unit].params.wait()?;
        full.ok_or_else(|| Error::internal("the full parameters are not in memory"))
    }

    /// Discards the reduced gradients, so that this step is skipped.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn skip(&mut self) -> Result<()> {
        self.free_downloaded_gradient()?;
        if let Some(tables) = &mut self.host_units {
            tables.skip()?;
        }
        for unit in &mut self.units {
            unit.owner.forget();
            if let Some(Reduction::Done(sum)) = unit.reduction.take()
                && self.policy.grads == Lifetime::Step
            {
                unit.grads = Some(sum.grad);
            }
        }
        Ok(())
    }

    /// Sends this rank's shard of a unit's parameters to the stages that are tied to it.
    pub(super) fn send_tied_params(&mut self, index: usize) -> Result<()> {
        for lent in self.stage.tied_exports.iter().filter(|lent| lent.slot == index) {
            let range = self.shard_of(index);
            let unit = &mut self.units[index];
            let mut part = self.backend.alloc(MemoryKind::Parameters, range.len())?;
            match (self.policy.params, unit.params.wait()?) {
                (Lifetime::Step, Some(full)) => {
                    self.backend.copy(B::view(full, range), B::all_mut(&mut part))?
                }
                _ => unit.owner.copy_into(&mut part, 0..range.len())?,
            }
            // The communication thread returns the buffer to its pool.
            drop(self.groups.ties.with_label(&unit.layout.name).send(lent.to, part));
        }
        Ok(())
    }

    /// Receives the parameters of other stages' units that blocks of this stage are tied to.
    pub(super) fn recv_tied_params(&mut self) -> Result<()> {
        for guest in 0..self.tied_replicas.len() {
            let TiedReplica { layout, from, .. } = &self.tied_replicas[guest];
            let part = self
                .backend
                .alloc(MemoryKind::Parameters, self.tied_replicas[guest].range().len())?;
            let part = self.groups.ties.with_label(&layout.name).recv(*from, part).wait()?;
            if let Some(full) = self.tied_replicas[guest].update_shard(&self.backend, part)? {
                self.all_gather(self.units.len() + guest, full);
            }
        }
        Ok(())
    }
}
