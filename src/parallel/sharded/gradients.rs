//! Reduces the gradients of virtual ranks to one gradient, and computes the loss and gradient norm
//! of the step.

use std::ops::Range;

use super::Sharded;
use super::block_reduction::BlockReduction;
use crate::control_flags::{AllFlags, ControlFlags};
use crate::fsdp_unit::{ReducedGradient, Reduction};
use crate::sparse::SquareSum;
use crate::step_summary::{Squares, StepSummary, sum_of_squares};
use crate::{Lifetime, ReduceAfter, Storage, VirtualRanks};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fault;
use hpctrain_base::layout::{UnitLayout, share};
use hpctrain_base::tree_sum::tree_sum;
use hpctrain_comm::{Group, Pending};
use hpctrain_device::{Element, Kernels, MemoryKind};

/// The results of a step's reductions, the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ReducedStep {
    /// The sum of the virtual ranks' losses.
    pub loss: f64,
    /// The global gradient norm before clipping.
    pub norm: f64,
    /// The compute time of each rank in this step, in seconds.
    pub compute: Vec<f64>,
    /// The control flags of each rank.
    pub flags: AllFlags,
}

/// The reduced gradient of a unit.
pub struct Reduced<'a, B: Kernels> {
    /// The unit's layout.
    pub layout: &'a UnitLayout,
    /// The range of the unit that this rank owns.
    pub range: Range<usize>,
    /// The gradient of that range.
    pub grad: B::View<'a>,
}

impl<B: Kernels> Sharded<B> {
    /// Posts receives for the gradients of this stage's tied units from other stages, and waits for
    /// the reductions of the virtual rank before. Must be called before the last backward of a
    /// virtual rank.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice, or an earlier reduction fails.
    pub fn virtual_rank_ends(&mut self) -> Result<()> {
        if self.defers_micro_batches() {
            self.finish_started()?;
        }
        for lent in &self.stage.tied_exports {
            let buf = self.backend.alloc(MemoryKind::Gradients, lent.len)?;
            let name = &self.units[lent.slot].layout.name;
            self.expected.push((lent.slot, self.groups.ties.with_label(name).recv(lent.to, buf)));
        }
        Ok(())
    }

    /// Ends the unit's gradient of one virtual rank. After the rank's last virtual rank its sum can
    /// be [reduced](Sharded::start_reductions).
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    pub fn virtual_rank_done(&mut self, unit: usize, last: bool) -> Result<()> {
        if self.started.iter().any(|(started, _)| *started == unit) {
            // The gradient of its previous virtual rank.
            self.finish_started()?;
        }
        if let (Some(loan), Some(part)) =
            (self.stage.tied_imports[unit], self.units[unit].tied_grads.take())
        {
            match loan.from {
                None => self.units[loan.slot].grads_from_tied.push(part),
                // The communication thread returns the buffer to its pool; an error fails the next
                // request.
                Some(from) => {
                    let name = &self.tied_replicas[loan.slot - self.units.len()].layout.name;
                    drop(self.groups.ties.with_label(name).send(from, part));
                }
            }
        }
        let (of_unit, others) =
            std::mem::take(&mut self.expected).into_iter().partition(|(slot, _)| *slot == unit);
        self.expected = others;
        let of_unit: Vec<(usize, Pending<B::Buf>)> = of_unit;
        for (_, part) in of_unit {
            self.units[unit].grads_from_tied.push(part.wait()?);
        }
        self.units[unit].add_copies(&self.backend, &self.groups.tensor)?;
        match self.policy.reduce_after {
            ReduceAfter::Step | ReduceAfter::StepInBlocks => {
                let blocks = self.blocks.as_ref().map(|blocks| &blocks.own[..]);
                self.units[unit].virtual_rank_done(&self.backend, last, blocks)?;
                if last {
                    self.ended.push((unit, last));
                }
            }
            ReduceAfter::MicroBatch => {
                self.units[unit].micro_batch_done(&self.backend)?;
                self.ended.push((unit, last));
            }
        }
        Ok(())
    }

    /// Starts to reduce the gradient of a unit of which this rank, an owner without virtual ranks,
    /// has computed nothing.
    ///
    /// # Errors
    /// Returns an error if the device or an earlier reduction fails.
    pub fn reduce_of_others(&mut self, unit: usize) -> Result<()> {
        let len = self.units[unit].layout.padded;
        let sum = self.backend.alloc(MemoryKind::Gradients, len)?;
        self.units[unit].reduction = Some(Reduction::Ready(sum));
        self.ended.push((unit, true));
        self.start_reductions()
    }

    /// Starts to reduce the gradients of units whose virtual ranks have ended: all of them, or the
    /// last one if gradients are reduced after each micro-batch.
    ///
    /// # Errors
    /// Returns an error if an earlier reduction or the device fails.
    pub fn start_reductions(&mut self) -> Result<()> {
        for (unit, last) in std::mem::take(&mut self.ended) {
            fault::point("reduce");
            let range = self.shard_of(unit);
            let Some(Reduction::Ready(sum)) = self.units[unit].reduction.take() else {
                return Err(Error::internal("there is no sum of virtual ranks to reduce"));
            };
            let (sum, full) = self.message(sum)?;
            let full = full.filter(|_| self.policy.grads == Lifetime::Step);
            let sum = match &self.blocks {
                Some(blocks) => self.start_block_reduction(unit, blocks, sum),
                None => self.start_reduction(unit, range, sum),
            };
            self.units[unit].reduction = Some(Reduction::InFlight { sum, full });
            if self.policy.grads == Lifetime::Use && !self.defers_micro_batches() {
                // Full gradients are freed after use; the reduction of the previous unit has
                // overlapped with this block.
                self.finish_started()?;
            }
            self.started.push((unit, last));
            if self.host.is_some() && self.policy.reduce_after != ReduceAfter::MicroBatch {
                // Gradients are downloaded as early as possible, overlapped with the remaining
                // backwards.
                let has_arrived = |(unit, _): &&(usize, bool)| self.units[*unit].has_arrived();
                let arrived = self.started.iter().take_while(has_arrived).count();
                self.started
                    .drain(..arrived)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .try_for_each(|(unit, _)| self.finish_reduction(unit))?;
            }
        }
        Ok(())
    }

    /// Starts to reduce a unit's gradient over shards, then the owned part over replicas; of one
    /// micro-batch only over shards.
    fn start_reduction(&self, unit: usize, range: Range<usize>, sum: B::Buf) -> Pending<B::Buf> {
        let name = &self.units[unit].layout.name;
        let scattered = self.groups.shard.with_label(name).reduce_scatter(sum);
        let replicas = self.groups.step.replica.with_label(name);
        match (self.policy.reduce_after, self.storage) {
            (ReduceAfter::MicroBatch, _) => scattered,
            (_, Storage::Ranks) => replicas.all_reduce_after(scattered, range),
            (_, Storage::Central) => replicas.reduce_after(scattered, range),
        }
    }

    /// Starts to reduce the sums of the blocks of this rank's virtual ranks over all ranks.
    fn start_block_reduction(
        &self,
        unit: usize,
        blocks: &BlockReduction,
        sums: B::Buf,
    ) -> Pending<B::Buf> {
        let layout = &self.units[unit].layout;
        let shards = self.groups.shard.size();
        let parts = self.parts();
        let of_shard = |shard| layout.parts(share(parts, shard, shards), parts);
        let data = self.groups.step.data.with_label(&layout.name);
        data.unequal(Pending::ready(sums), blocks.collective(layout.padded, of_shard))
    }

    /// Returns true if reductions after micro-batches overlap with the computations up to the next
    /// backward: a stage that starts all of them at once would wait for all but the last.
    fn defers_micro_batches(&self) -> bool {
        self.policy.reduce_after == ReduceAfter::MicroBatch && !self.stage.is_first()
    }

    /// Returns a gradient in the format of messages, and the gradient itself if that is another.
    fn message(&self, gradient: B::Buf) -> Result<(B::Buf, Option<B::Buf>)> {
        match self.policy.reduce_dtype {
            Element::F32 => Ok((gradient, None)),
            Element::Bf16 => {
                let mut rounded =
                    self.backend.alloc_bf16(MemoryKind::Gradients, B::len(&gradient))?;
                self.backend.copy(B::all(&gradient), B::all_mut(&mut rounded))?;
                Ok((rounded, Some(gradient)))
            }
        }
    }

    /// Waits for the reductions that have started.
    fn finish_started(&mut self) -> Result<()> {
        let replicating = std::mem::take(&mut self.replicating);
        for (unit, last) in std::mem::take(&mut self.started) {
            match self.policy.reduce_after {
                ReduceAfter::Step | ReduceAfter::StepInBlocks => self.finish_reduction(unit)?,
                ReduceAfter::MicroBatch => self.finish_micro_batch(unit, last)?,
            }
        }
        // They have overlapped with a block more.
        replicating.into_iter().try_for_each(|unit| self.finish_reduction(unit))
    }

    /// Waits for all reductions, and computes the sum of the virtual ranks' losses and the global
    /// gradient norm over all ranks, or with local SGD over those of this replica. `losses` are
    /// those of the micro-batches of this rank's virtual ranks, in order; only the first rank of each
    /// tensor-parallel group of the last stage passes them. `compute` returns the compute time of
    /// this step in seconds, given what [`Sharded::waited`] returns once the device has no more work.
    /// All ranks receive the `flags` of each.
    ///
    /// The host waits for the device only here, once in a step.
    ///
    /// # Errors
    /// Returns an error if a reduction or a message between ranks fails.
    pub fn reduce(
        &mut self,
        losses: Vec<Vec<B::Scalar>>,
        compute: impl FnOnce(f64) -> f64,
        flags: ControlFlags,
    ) -> Result<ReducedStep> {
        // Every rank receives every virtual rank's loss and the squared norms of every unit's
        // virtual shards, and adds them in the same order.
        let (squares, of_rows) = self.squares()?;
        let losses = losses.into_iter().map(|losses| total(&self.backend, losses));
        let losses = losses.collect::<Result<_>>()?;
        let compute = compute(self.waited());
        let mine = StepSummary { compute, flags, losses, squares, of_rows };
        let messages = self.groups.step.world.gather_bytes(mine.encode()).wait()?;
        let summaries: Vec<StepSummary> =
            messages.iter().map(|message| StepSummary::decode(message)).collect::<Result<_>>()?;
        let losses = summaries.iter().map(|summary| summary.losses.clone());
        let losses: Vec<_> = losses.filter(|losses| !losses.is_empty()).collect();
        let layout = VirtualRanks {
            total: self.virtual_ranks,
            replicas: self.groups.step.replica.size(),
            shards: self.groups.shard.size(),
            reduce_after: self.policy.reduce_after,
            counts: None,
        };
        let assignment = self.blocks.as_ref().map_or(&layout, |blocks| &blocks.assignment);
        let losses = assignment.in_order(&losses)?;
        let squares = sum_of_squares(
            summaries.iter().map(|summary| &summary.squares),
            self.network.len(),
            self.slices.total * self.virtual_ranks,
        )?;
        let of_rows = summaries.iter().filter_map(|summary| summary.of_rows.clone());
        let of_rows = of_rows.reduce(|mut sum, other| {
            sum.merge(&other);
            sum
        });
        Ok(ReducedStep {
            loss: tree_sum(&losses),
            norm: (squares + of_rows.map_or(0.0, |sum| sum.value())).sqrt(),
            compute: summaries.iter().map(|summary| summary.compute).collect(),
            flags: AllFlags(summaries.into_iter().map(|summary| summary.flags).collect()),
        })
    }

    /// Waits for all reductions, and returns the squared norms of this rank's virtual shards of
    /// every unit, those on the host first, and that of its rows of sparse tables.
    pub(super) fn squares(&mut self) -> Result<(Squares, Option<SquareSum>)> {
        self.backend.end_weight_reuse();
        let shards = self.virtual_shards(&self.groups.step.replica);
        let (mut values, of_rows) = match &mut self.host_units {
            Some(tables) => tables.squares(&shards)?,
            None => (vec![], None),
        };
        // After the first wait, the last units may still be reduced over replicas.
        while !(self.started.is_empty() && self.replicating.is_empty()) {
            self.finish_started()?;
        }
        for unit in &mut self.units {
            let Some(Reduction::Done(sum)) = &mut unit.reduction else {
                return Err(Error::internal("the unit has no gradient"));
            };
            for square in sum.squares.drain(..) {
                values.push(self.backend.read(square)?);
            }
        }
        let first_shard = self.first_virtual_shard() + shards.start;
        let first_unit = self.first_unit();
        Ok((Squares { first_unit, first_shard, shards: shards.len(), values }, of_rows))
    }

    /// Returns the reduced gradient of every unit, between [`Sharded::reduce`] and the update.
    ///
    /// # Errors
    /// Returns an error if the gradients were not reduced.
    pub fn gradients(&self) -> Result<Vec<Reduced<'_, B>>> {
        self.units
            .iter()
            .map(|unit| match &unit.reduction {
                Some(Reduction::Done(sum)) if sum.window.len() == unit.owner.range().len() => {
                    let grad = B::view(&sum.grad, sum.window.clone());
                    Ok(Reduced { layout: &unit.layout, range: unit.owner.range(), grad })
                }
                _ => Err(Error::internal("gradients were requested before they were reduced")),
            })
            .collect()
    }

    /// Frees the gradient whose download to the host was started last.
    pub(super) fn free_downloaded_gradient(&mut self) -> Result<()> {
        if let (Some(grad), Some(host)) = (self.downloading.take(), &self.host) {
            host.wait_for_downloads()?;
            drop(grad);
        }
        Ok(())
    }

    /// Waits for the reduction of a micro-batch, and adds its owned part to those of the virtual
    /// ranks before. After the `last` virtual rank starts to reduce the sum over replicas.
    fn finish_micro_batch(&mut self, index: usize, last: bool) -> Result<()> {
        let unit = &mut self.units[index];
        let Some(Reduction::InFlight { sum, .. }) = unit.reduction.take() else {
            return Err(Error::internal("there is no micro-batch to wait for"));
        };
        let full = sum.wait()?;
        let owned = unit.owner.range();
        let mut own = self.backend.alloc(MemoryKind::Gradients, owned.len())?;
        self.backend.copy(B::view(&full, owned), B::all_mut(&mut own))?;
        drop(full);
        let backend = &self.backend;
        let add = |into: &mut B::Buf, from: B::Buf| backend.add(B::all(&from), B::all_mut(into));
        unit.virtual_ranks.push(own, add)?;
        if !last {
            return Ok(());
        }
        let sum = unit.virtual_ranks.finish(add)?;
        let sum = sum.ok_or_else(|| Error::internal("there is no virtual rank to reduce"))?;
        let sum = if self.groups.step.replica.size() > 1 { self.message(sum)?.0 } else { sum };
        let name = &self.units[index].layout.name;
        let range = 0..B::len(&sum);
        let sum = self.groups.step.replica.with_label(name).all_reduce(sum, range);
        self.units[index].reduction = Some(Reduction::InFlight { sum, full: None });
        self.replicating.push(index);
        Ok(())
    }

    /// Waits for a reduction over all ranks. If full gradients are freed after use, keeps only the
    /// owned part, or downloads it to the host.
    fn finish_reduction(&mut self, index: usize) -> Result<()> {
        // Its download has overlapped with the backward of a block.
        self.free_downloaded_gradient()?;
        let shards = self.virtual_shards(&self.groups.step.replica);
        let parts = self.parts();
        let unit = &mut self.units[index];
        let Some(Reduction::InFlight { sum, full }) = unit.reduction.take() else {
            return Err(Error::internal("there is no reduction to wait for"));
        };
        let sum = sum.wait()?;
        let owned = unit.owner.range();
        // A sum of owned parts, or of whole units.
        let at = match self.policy.reduce_after {
            ReduceAfter::Step | ReduceAfter::StepInBlocks => owned.clone(),
            ReduceAfter::MicroBatch => 0..owned.len(),
        };
        let is_whole = at.len() == B::len(&sum) && B::element_of(&sum) == Element::F32;
        let (mut grad, window) = match (full, self.policy.grads) {
            // It was rounded for the messages.
            (Some(mut full), _) => {
                self.backend.copy(B::view(&sum, at.clone()), B::view_mut(&mut full, at.clone()))?;
                (full, at)
            }
            (None, Lifetime::Step) => (sum, at),
            (None, Lifetime::Use) if is_whole => (sum, at),
            (None, Lifetime::Use) => {
                let mut own = self.backend.alloc(MemoryKind::Gradients, at.len())?;
                self.backend.copy(B::view(&sum, at.clone()), B::all_mut(&mut own))?;
                (own, 0..at.len())
            }
        };
        // The norm is computed while the gradient is still in the caches, and overlapped with the
        // next reductions.
        let squares = shards
            .map(|shard| {
                let counted = unit.layout.counted(unit.layout.part(shard, parts));
                let at = |element: usize| element - owned.start + window.start;
                self.backend.sum_squares(B::view(&grad, at(counted.start)..at(counted.end)))
            })
            .collect::<Result<_>>()?;
        unit.owner.reduced(&mut grad, window.clone())?;
        unit.reduction = Some(Reduction::Done(match self.policy.on_host {
            false => ReducedGradient { grad, window, squares },
            true => {
                self.downloading = Some(grad);
                ReducedGradient {
                    grad: self.backend.alloc(MemoryKind::Gradients, 0)?,
                    window: 0..0,
                    squares,
                }
            }
        }));
        Ok(())
    }

    /// Returns the number of virtual shards of this rank's part of a unit:
    /// as many as virtual ranks for each virtual tensor-parallel rank.
    pub(super) fn parts(&self) -> usize {
        self.slices.held.len() * self.virtual_ranks
    }

    /// Returns the index of the first of these virtual shards over the ranks of the tensor axis.
    pub(super) fn first_virtual_shard(&self) -> usize {
        self.slices.held.start * self.virtual_ranks
    }

    /// Returns the virtual shards in this rank's owned range that it is responsible for: the ranks
    /// of `copies`, which own the same range, divide them. Returns none on a rank that owns
    /// nothing.
    pub(super) fn virtual_shards(&self, copies: &Group<B>) -> Range<usize> {
        let of_shard = share(self.parts(), self.groups.shard.rank(), self.groups.shard.size());
        let mine = match self.storage {
            Storage::Ranks => share(of_shard.len(), copies.rank(), copies.size()),
            Storage::Central => 0..if self.owns() { of_shard.len() } else { 0 },
        };
        of_shard.start + mine.start..of_shard.start + mine.end
    }
}
/// Returns the sum of the losses of a virtual rank's micro-batches, in order.
fn total<B: Kernels>(backend: &B, losses: Vec<B::Scalar>) -> Result<f64> {
    losses.into_iter().try_fold(0.0, |sum, loss| Ok(sum + backend.read(loss)?))
}
