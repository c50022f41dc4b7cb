//! From the gradients of virtual ranks to one reduced gradient, and the loss and norm of the step.

use std::ops::Range;

use super::Sharded;
use crate::control_flags::{AllFlags, ControlFlags};
use crate::fsdp_unit::{Reduction, Sum};
use crate::step_summary::{Squares, StepSummary, sum_of_squares};
use crate::{Lifetime, Storage};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::{UnitLayout, part};
use hpctrain_base::tree_sum::tree_sum;
use hpctrain_comm::{Group, Pending};
use hpctrain_device::{Kernels, MemoryKind};

/// Results of a step's reductions, the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ReducedStep {
    /// Sum of the virtual ranks' losses.
    pub loss: f64,
    /// Global norm of the gradient, before clipping.
    pub norm: f64,
    /// Seconds that each rank computed in this step.
    pub compute: Vec<f64>,
    /// Control flags of each rank.
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
    /// The last backward of a virtual rank begins: gets ready for the gradients that other stages have of
    /// this stage's units.
    ///
    /// # Errors
    /// Out of memory.
    pub fn virtual_rank_ends(&mut self) -> Result<()> {
        for lent in &self.stage.lent {
            let buf = self.backend.alloc(MemoryKind::Gradients, lent.len)?;
            let name = &self.units[lent.slot].layout.name;
            self.expected.push((lent.slot, self.groups.ties.with_label(name).recv(lent.to, buf)));
        }
        Ok(())
    }

    /// The unit's gradient of one virtual rank is final. After the rank's last virtual rank its sum can be
    /// [reduced](Sharded::start_reductions).
    ///
    /// # Errors
    /// A message between stages failed.
    pub fn virtual_rank_done(&mut self, unit: usize, last: bool) -> Result<()> {
        if let (Some(loan), Some(part)) =
            (self.stage.borrowed[unit], self.units[unit].borrowed.take())
        {
            match loan.from {
                None => self.units[loan.slot].returned.push(part),
                // The communication thread gives the buffer back to its pool; an error of it fails
                // the next request.
                Some(from) => {
                    let name = &self.guests[loan.slot - self.units.len()].layout.name;
                    drop(self.groups.ties.with_label(name).send(from, part));
                }
            }
        }
        let (of_unit, others) =
            std::mem::take(&mut self.expected).into_iter().partition(|(slot, _)| *slot == unit);
        self.expected = others;
        let of_unit: Vec<(usize, Pending<B::Buf>)> = of_unit;
        for (_, part) in of_unit {
            self.units[unit].returned.push(part.wait()?);
        }
        self.units[unit].add_copies(&self.backend, &self.groups.tensor)?;
        self.units[unit].virtual_rank_done(&self.backend, last)?;
        if last {
            self.ended.push(unit);
        }
        Ok(())
    }

    /// Starts to reduce the gradients of units whose virtual ranks have all ended.
    ///
    /// # Errors
    /// A reduction failed.
    pub fn start_reductions(&mut self) -> Result<()> {
        for unit in std::mem::take(&mut self.ended) {
            let range = self.shard_of(unit);
            let state = &mut self.units[unit];
            let Some(Reduction::Ended(sum)) = state.reduction.take() else {
                return Err(Error::internal("no sum of virtual ranks to reduce"));
            };
            let scattered = self.groups.shard.with_label(&state.layout.name).reduce_scatter(sum);
            let replicas = self.groups.step.replica.with_label(&state.layout.name);
            state.reduction = Some(Reduction::InFlight(match self.storage {
                Storage::Ranks => replicas.all_reduce_after(scattered, range),
                Storage::Central => replicas.reduce_after(scattered, range),
            }));
            if self.keep.grads == Lifetime::Use {
                // Full gradients live for their use: those of the unit before have had this block's
                // time to be reduced.
                std::mem::take(&mut self.started)
                    .into_iter()
                    .try_for_each(|before| self.land(before))?;
            }
            self.started.push(unit);
            if self.host.is_some() {
                // Gradients go down as soon as they can, beside the backwards that are left.
                let arrived =
                    self.started.iter().take_while(|&&unit| self.units[unit].has_arrived()).count();
                self.started
                    .drain(..arrived)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .try_for_each(|unit| self.land(unit))?;
            }
        }
        Ok(())
    }

    /// Waits for all reductions and agrees on the sum of the virtual ranks' losses and the global gradient
    /// norm: with all ranks, or where replicas train apart, with those of its own. `losses` are
    /// those of this rank's virtual ranks, in order, where it tells them: the last stage does, the first of
    /// each tensor group; `compute` is the seconds it has computed in this step. All ranks receive
    /// the `flags` of each.
    ///
    /// # Errors
    /// A reduction failed.
    pub fn reduce(
        &mut self,
        losses: &[f64],
        compute: f64,
        flags: ControlFlags,
    ) -> Result<ReducedStep> {
        // Every rank gets every virtual rank's loss and the squares of every unit's virtual shards, and
        // adds them in the same order.
        let squares = self.squares()?;
        let mine = StepSummary { compute, flags, losses: losses.to_vec(), squares };
        let messages = self.groups.step.world.gather_bytes(mine.encode()).wait()?;
        let told: Vec<StepSummary> =
            messages.iter().map(|one| StepSummary::decode(one)).collect::<Result<_>>()?;
        let losses: Vec<f64> = told.iter().flat_map(|one| one.losses.iter().copied()).collect();
        let squares = sum_of_squares(
            told.iter().map(|one| &one.squares),
            self.network.len(),
            self.slices.total * self.virtual_ranks.total,
        )?;
        Ok(ReducedStep {
            loss: tree_sum(&losses),
            norm: squares.sqrt(),
            compute: told.iter().map(|one| one.compute).collect(),
            flags: AllFlags(told.into_iter().map(|one| one.flags).collect()),
        })
    }

    /// Waits for all reductions; the squares of this rank's virtual shards of every unit, those on
    /// the host first.
    fn squares(&mut self) -> Result<Squares> {
        self.backend.end_weight_reuse();
        let mut values = self
            .tables
            .as_mut()
            .map_or(Ok(vec![]), |tables| tables.squares().map(|told| told.values))?;
        std::mem::take(&mut self.started).into_iter().try_for_each(|unit| self.land(unit))?;
        for unit in &mut self.units {
            let Some(Reduction::Done(sum)) = &mut unit.reduction else {
                return Err(Error::internal("a unit without gradient"));
            };
            for square in sum.squares.drain(..) {
                values.push(self.backend.read(square)?);
            }
        }
        let shards = self.virtual_shards(&self.groups.step.replica);
        let first_shard = self.first_virtual_shard() + shards.start;
        Ok(Squares { first_unit: self.first_unit(), first_shard, shards: shards.len(), values })
    }

    /// The reduced gradient of every unit, between [`Sharded::reduce`] and the update.
    ///
    /// # Errors
    /// Nothing was reduced.
    pub fn gradients(&self) -> Result<Vec<Reduced<'_, B>>> {
        let early = || Error::internal("gradients were asked for before they were reduced");
        self.units
            .iter()
            .map(|unit| match &unit.reduction {
                Some(Reduction::Done(sum)) if sum.window.len() == unit.owner.range().len() => {
                    let grad = B::view(&sum.grad, sum.window.clone());
                    Ok(Reduced { layout: &unit.layout, range: unit.owner.range(), grad })
                }
                _ => Err(early()),
            })
            .collect()
    }

    /// The gradient that left for the host last is freed.
    pub(super) fn let_go(&mut self) -> Result<()> {
        if let (Some(grad), Some(host)) = (self.leaving.take(), &self.host) {
            host.fetched()?;
            drop(grad);
        }
        Ok(())
    }

    /// Waits for a reduction's end. Of a full buffer that lives for its use the owned part is kept,
    /// or goes to the host alone.
    fn land(&mut self, index: usize) -> Result<()> {
        // Its copy has had the time of a block's backward.
        self.let_go()?;
        let shards = self.virtual_shards(&self.groups.step.replica);
        let parts = self.parts();
        let unit = &mut self.units[index];
        let Some(Reduction::InFlight(pending)) = unit.reduction.take() else {
            return Err(Error::internal("no reduction to wait for"));
        };
        let full = pending.wait()?;
        let owned = unit.owner.range();
        // Read while it is on its way through the caches, and while the next units are reduced.
        let square = |shard| {
            let counted = unit.layout.counted(unit.layout.part(shard, parts));
            self.backend.sum_squares(B::view(&full, counted))
        };
        let squares = shards.map(square).collect::<Result<_>>()?;
        let (mut grad, window) = match self.keep.grads {
            Lifetime::Step => (full, owned),
            // One rank has all of it.
            Lifetime::Use if owned.len() == B::len(&full) => (full, owned),
            Lifetime::Use => {
                let mut own = self.backend.alloc(MemoryKind::Gradients, owned.len())?;
                self.backend.copy(B::view(&full, owned.clone()), B::all_mut(&mut own))?;
                (own, 0..owned.len())
            }
        };
        unit.owner.reduced(&mut grad, window.clone())?;
        unit.reduction = Some(Reduction::Done(match self.keep.on_host {
            false => Sum { grad, window, squares },
            true => {
                self.leaving = Some(grad);
                Sum { grad: self.backend.alloc(MemoryKind::Gradients, 0)?, window: 0..0, squares }
            }
        }));
        Ok(())
    }

    /// Virtual shards of this rank's part of a unit: [`VirtualRanks::total`](crate::VirtualRanks)
    /// for each virtual tensor rank.
    pub(super) fn parts(&self) -> usize {
        self.slices.held.len() * self.virtual_ranks.total
    }

    /// The number of the first of them, counted over the ranks of the tensor axis.
    pub(super) fn first_virtual_shard(&self) -> usize {
        self.slices.held.start * self.virtual_ranks.total
    }

    /// Those that lie in this rank's owned range and fall to it, where the ranks of `copies`, which
    /// own the same range, divide them among themselves. None on a rank that owns nothing.
    pub(super) fn virtual_shards(&self, copies: &Group<B>) -> Range<usize> {
        let of_shard = part(self.parts(), self.groups.shard.rank(), self.groups.shard.size());
        let mine = match self.storage {
            Storage::Ranks => part(of_shard.len(), copies.rank(), copies.size()),
            Storage::Central => 0..if self.owns() { of_shard.len() } else { 0 },
        };
        of_shard.start + mine.start..of_shard.start + mine.end
    }
}
