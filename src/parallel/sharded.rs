//! Storage of a stage's units over its shard × replica mesh: DDP, ZeRO-1, -2, -3 and hybrid sharding are one mesh shape
//! and one [`Residency`] each.
//!
//! A gradient's journey: blocks add into a unit's flat buffer; at the end of a lane the buffer joins the rank's
//! tree of lanes; after the last lane the sum moves to the communication thread, which reduces it while the
//! next block computes; [`Sharded::reduce`] waits for all and agrees on loss and norm; [`Sharded::update`] lets
//! each [`ShardOwner`] update its range and gathers the parameters again.
//!
//! A block that borrows another block's parameters adds its gradient into a buffer of its own. At the end of a lane it is
//! added to the lender's, so that the order of additions does not depend on the place of the two blocks: in one stage of
//! the pipeline, or in two, between which the buffer is sent.
//!
//! Parameters that do not live always are gathered ahead of their use: a pass states its order of blocks
//! ([`Sharded::begin_step`]), and a window slides along it ([`Prefetch`]).
//!
//! Where full gradients live for their use only, the reduction of one block is waited for once the reduction of the
//! next one has been requested: two of them are whole at once, besides a lent one. Otherwise nothing is waited for
//! before the end of the step.

use std::ops::Range;
use std::sync::Arc;

use super::control_flags::{AllFlags, ControlFlags};
use super::groups::Groups;
use super::guest::Guest;
use super::hyper::{Hyper, state_names};
use super::lanes::{Lanes, Tree, tree_sum};
use super::norms::{self, Norms};
use super::offload::Host;
use super::prefetch::{self, Prefetch, Visit};
use super::schedule::StepSchedule;
use super::shard_owner::{ShardOwner, Updates, Values};
use super::stage::{Borrowed, Stage};
use super::step_summary::{Squares, StepSummary, sum_of_squares};
use super::unit::{Reduction, Slot, Sum, Unit, initial};
use super::{Life, Residency};
use crate::activity::{Doing, span};
use crate::backend::{Kernels, MemoryKind};
use crate::comm::{Group, Pending};
use crate::error::{Error, Result};
use crate::layout::{UnitLayout, part};
use crate::nn::{Blocks, Grads, Params};
use crate::optim::{Part, Rule};

/// Results of a step's reductions, the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ReducedStep {
    /// Sum of the lanes' losses.
    pub loss: f64,
    /// Global norm of the gradient, before clipping.
    pub norm: f64,
    /// Seconds that each rank computed in this step.
    pub compute: Vec<f64>,
    /// Control flags of each rank.
    pub flags: AllFlags,
}

/// The owned part of a unit, for checkpoints.
pub struct Owned<'a, B: Kernels> {
    /// The unit's layout.
    pub layout: &'a UnitLayout,
    /// The range of the unit that this view covers.
    pub range: Range<usize>,
    /// Its parameters.
    pub params: Values<'a, B>,
    /// Its optimizer state, one for each of [`Sharded::state_names`].
    pub state: Vec<Values<'a, B>>,
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

/// Units of a pipeline stage over the ranks of its shard × replica mesh.
pub struct Sharded<B: Kernels> {
    backend: B,
    groups: Groups<B>,
    keep: Residency,
    lanes: Lanes,
    /// None where nothing is trained.
    rule: Option<Rule>,
    /// Decay of the parameters' running average, if one is kept.
    average: Option<f32>,
    /// Whether owners keep state and masters on the host, and so want gradients early.
    offloads: bool,
    /// Layouts of the whole network.
    network: Vec<UnitLayout>,
    stage: Stage,
    units: Vec<Unit<B>>,
    /// Units of other stages that blocks of this one borrow.
    guests: Vec<Guest<B>>,
    /// Gradients of lent units that other stages are to send, by unit, for the end of the lane.
    expected: Vec<(usize, Pending<B::Buf>)>,
    /// Units whose lanes have all ended, in order.
    ended: Vec<usize>,
    /// Units whose reduction is under way, in order.
    started: Vec<usize>,
    /// The pass under way.
    prefetch: Prefetch,
    /// Whether it multiplies parameters several times before they change.
    reuses: bool,
}

impl<B: Kernels> Sharded<B> {
    /// Storage for the units of `stage`, of a network of `blocks`, initialised from `seed`: the same values for any mesh.
    /// Without a seed it is zero, to be restored; without updates there is no optimizer state.
    ///
    /// # Errors
    /// Out of memory, or the first gather failed.
    #[expect(clippy::too_many_arguments, reason = "one for each property of a layout")]
    pub fn new(
        backend: B,
        groups: Groups<B>,
        keep: Residency,
        lanes: Lanes,
        updates: Option<Updates>,
        blocks: &Blocks<B>,
        stage: Stage,
        seed: Option<u64>,
    ) -> Result<Self> {
        let (shards, shard) = (groups.shard.size(), groups.shard.rank());
        let keep = keep.over(shards);
        let host = updates.as_ref().and_then(|updates| updates.host.clone());
        let host = host.map(|cpu| Host::new(&backend, cpu)).transpose()?;
        let groups_of = updates.as_ref().map_or(&[][..], |updates| &updates.groups);
        let network: Vec<UnitLayout> =
            blocks.iter().map(|block| UnitLayout::new(block.name(), block.tensors(), lanes.total)).collect();
        let mut units = Vec::with_capacity(stage.units.len());
        for layout in &network[stage.units.clone()] {
            let owned = layout.part(shard, shards);
            let full = initial(layout, seed);
            let params = match keep.params {
                Life::Step => Slot::Here(backend.upload(MemoryKind::Parameters, &full)?),
                Life::Use => Slot::Gone,
            };
            let (values, are_full_here) = (&full[owned.clone()], keep.params == Life::Step);
            let (host, updates) = (host.as_ref(), updates.as_ref());
            units.push(Unit {
                owner: ShardOwner::new(&backend, host, updates, layout, owned, values, are_full_here)?,
                tensors: layout.tensors.iter().map(|(tensor, _)| Part::of(tensor, groups_of)).collect(),
                zeroed: layout.zeroed(),
                layout: layout.clone(),
                params,
                grads: None,
                grads_open: false,
                borrowed: None,
                returned: Vec::new(),
                lanes: Tree::default(),
                reduction: None,
            });
        }
        let guest = |guest: &super::stage::Guest| {
            let layout = network[guest.unit].clone();
            let (range, full) = (layout.part(shard, shards), initial(&layout, seed));
            Guest::new(&backend, layout, guest.stage, range, keep.params, &full)
        };
        let guests = stage.guests.iter().map(guest).collect::<Result<_>>()?;
        let (rule, average) = updates.map_or((None, None), |updates| (Some(updates.rule), updates.average));
        Ok(Self {
            backend,
            groups,
            keep,
            lanes,
            rule,
            average,
            offloads: host.is_some(),
            network,
            stage,
            units,
            guests,
            expected: Vec::new(),
            ended: Vec::new(),
            started: Vec::new(),
            prefetch: Prefetch::default(),
            reuses: false,
        })
    }

    /// The ranks of this stage, each with different data.
    pub fn data(&self) -> &Group<B> {
        &self.groups.data
    }

    /// The stages that compute the same data, in order.
    pub fn pipeline(&self) -> &Group<B> {
        &self.groups.pipeline
    }

    /// This rank's part of the network.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Names of the optimizer's buffers.
    pub fn state_names(&self) -> Vec<&'static str> {
        state_names(self.rule, self.average)
    }

    /// Parameters of the network, averages and padding left out.
    pub fn parameters(&self) -> u64 {
        self.network.iter().map(|unit| unit.trained as u64).sum()
    }

    /// Layouts of all units of the network, those of other stages included.
    pub fn layouts(&self) -> &[UnitLayout] {
        &self.network
    }

    /// Name of unit `unit` of the stage.
    pub fn name(&self, unit: usize) -> &Arc<str> {
        &self.units[unit].layout.name
    }

    /// Seconds this rank has been blocked so far, waiting for messages.
    pub fn waited(&self) -> f64 {
        self.groups.data.stats().blocked
    }

    /// A step begins: blocks of the stage will take their turns in its order, which is the same on all ranks of the stage.
    pub fn begin_step(&mut self, schedule: StepSchedule) {
        self.begin(prefetch::step(&self.stage.borrows(), schedule));
        // Buffers that live for their use only are another unit's before long.
        self.reuses = schedule.micros() > 1 && self.keep.params == Life::Step;
    }

    /// A forward outside training begins: blocks of the stage will take their turns once.
    pub fn begin_forward(&mut self) {
        self.begin(prefetch::forward(&self.stage.borrows()));
    }

    fn begin(&mut self, visits: Vec<Visit>) {
        self.prefetch = Prefetch::new(visits);
        self.backend.end_reuse();
        self.reuses = false;
    }

    /// Parameters of unit `unit` and of the one that its block borrows, whose turn it is, gathered if they are not here.
    ///
    /// # Errors
    /// The gather failed.
    pub fn params(&mut self, unit: usize) -> Result<Params<'_, B>> {
        let borrowed = self.stage.borrowed[unit];
        self.fetch(Visit { own: unit, lent: borrowed.map(|loan| loan.slot) })?;
        Ok(Params { own: self.full(unit)?, lent: borrowed.map(|loan| self.full(loan.slot)).transpose()? })
    }

    /// As [`Sharded::params`], with the gradients to add to.
    ///
    /// # Errors
    /// The gather failed.
    pub fn params_and_grads(&mut self, unit: usize) -> Result<(Params<'_, B>, Grads<'_, B>)> {
        let loan = self.stage.borrowed[unit];
        self.fetch(Visit { own: unit, lent: loan.map(|loan| loan.slot) })?;
        let own = &mut self.units[unit];
        let first = own.open_grads(&self.backend)?;
        let lent_first = loan.map_or(Ok(false), |loan| own.open_borrowed(&self.backend, loan.len))?;
        let (before, own) = self.units.split_at_mut(unit);
        let (own, after) = own.split_first_mut().ok_or_else(|| Error::internal("no such unit"))?;
        let missing = || Error::internal("parameters or gradients are not here");
        let lent = match loan {
            None => None,
            Some(Borrowed { slot, .. }) => {
                let guest = || self.guests.get(slot - unit - 1 - after.len()).map(|guest| &guest.params);
                let lender = before.get(slot).map_or_else(guest, |unit| Some(&unit.params));
                Some(B::all(lender.and_then(Slot::here).ok_or_else(missing)?))
            }
        };
        let grads = own.grads.as_mut().ok_or_else(missing)?;
        Ok((
            Params { own: B::all(own.params.here().ok_or_else(missing)?), lent },
            Grads { own: B::all_mut(grads), first, lent: own.borrowed.as_mut().map(B::all_mut), lent_first },
        ))
    }

    /// A block's turn ends: parameters that live for their use only are given up, unless the next turns want them.
    pub fn release(&mut self) {
        for index in self.prefetch.pass(self.keep.ahead) {
            if self.keep.params == Life::Use {
                *self.slot(index).1 = Slot::Gone;
            }
        }
    }

    /// The last backward of a lane begins: gets ready for the gradients that other stages have of this stage's units.
    ///
    /// # Errors
    /// Out of memory.
    pub fn lane_ends(&mut self) -> Result<()> {
        for lent in &self.stage.lent {
            let buf = self.backend.alloc(MemoryKind::Gradients, lent.len)?;
            let name = &self.units[lent.slot].layout.name;
            self.expected.push((lent.slot, self.groups.ties.about(name).recv(lent.to, buf)));
        }
        Ok(())
    }

    /// The unit's gradient of one lane is final. After the rank's last lane its sum can be
    /// [reduced](Sharded::start_reductions).
    ///
    /// # Errors
    /// A message between stages failed.
    pub fn lane_done(&mut self, unit: usize, last: bool) -> Result<()> {
        if let (Some(loan), Some(part)) = (self.stage.borrowed[unit], self.units[unit].borrowed.take()) {
            match loan.from {
                None => self.units[loan.slot].returned.push(part),
                // The communication thread gives the buffer back to its pool; an error of it fails the next request.
                Some(from) => {
                    let name = &self.guests[loan.slot - self.units.len()].layout.name;
                    drop(self.groups.ties.about(name).send(from, part));
                }
            }
        }
        let (of_unit, others) = std::mem::take(&mut self.expected).into_iter().partition(|(slot, _)| *slot == unit);
        self.expected = others;
        let of_unit: Vec<(usize, Pending<B::Buf>)> = of_unit;
        for (_, part) in of_unit {
            self.units[unit].returned.push(part.wait()?);
        }
        self.units[unit].lane_done(&self.backend, last)?;
        if last {
            self.ended.push(unit);
        }
        Ok(())
    }

    /// Starts to reduce the gradients of units whose lanes have all ended.
    ///
    /// # Errors
    /// A reduction failed.
    pub fn start_reductions(&mut self) -> Result<()> {
        for unit in std::mem::take(&mut self.ended) {
            let state = &mut self.units[unit];
            let Some(Reduction::Ended(sum)) = state.reduction.take() else {
                return Err(Error::internal("no sum of lanes to reduce"));
            };
            let scattered = self.groups.shard.about(&state.layout.name).reduce_scatter(sum);
            let replicas = self.groups.replica.about(&state.layout.name);
            state.reduction = Some(Reduction::InFlight(replicas.all_reduce_after(scattered, state.owner.range())));
            if self.keep.grads == Life::Use {
                // Full gradients live for their use: those of the unit before have had this block's time to be reduced.
                std::mem::take(&mut self.started).into_iter().try_for_each(|before| self.land(before))?;
            }
            self.started.push(unit);
            if self.offloads {
                // Gradients go down as soon as they can, beside the backwards that are left.
                let arrived = self.started.iter().take_while(|&&unit| self.units[unit].has_arrived()).count();
                self.started.drain(..arrived).collect::<Vec<_>>().into_iter().try_for_each(|unit| self.land(unit))?;
            }
        }
        Ok(())
    }

    /// Waits for all reductions and agrees on the sum of the lanes' losses and the global gradient norm.
    /// `losses` are those of this rank's lanes, in order, where its stage computes them; `compute` is the seconds it has computed in this step. All
    /// ranks receive the `flags` of each.
    ///
    /// # Errors
    /// A reduction failed.
    pub fn reduce(&mut self, losses: &[f64], compute: f64, flags: ControlFlags) -> Result<ReducedStep> {
        self.backend.end_reuse();
        std::mem::take(&mut self.started).into_iter().try_for_each(|unit| self.land(unit))?;
        let shards = self.virtual_shards();
        let mut squares = Vec::with_capacity(self.units.len() * shards.len());
        for unit in &mut self.units {
            let Some(Reduction::Done(sum)) = &mut unit.reduction else {
                return Err(Error::internal("a unit without gradient"));
            };
            for square in sum.squares.drain(..) {
                squares.push(self.backend.read(square)?);
            }
        }
        // Every rank gets every lane's loss and the squares of every unit's virtual shards, and adds them in the same order.
        let first_unit = self.stage.units.start;
        let squares = Squares { first_unit, first_shard: shards.start, shards: shards.len(), values: squares };
        let mine = StepSummary { compute, flags, losses: losses.to_vec(), squares };
        let messages = self.groups.world.gather_bytes(mine.encode()).wait()?;
        let told: Vec<StepSummary> = messages.iter().map(|one| StepSummary::decode(one)).collect::<Result<_>>()?;
        let losses: Vec<f64> = told.iter().flat_map(|one| one.losses.iter().copied()).collect();
        let squares = sum_of_squares(told.iter().map(|one| &one.squares), self.network.len(), self.lanes.total)?;
        Ok(ReducedStep {
            loss: tree_sum(&losses),
            norm: squares.sqrt(),
            compute: told.iter().map(|one| one.compute).collect(),
            flags: AllFlags(told.into_iter().map(|one| one.flags).collect()),
        })
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
                Some(Reduction::Done(sum)) => {
                    let grad = B::view(&sum.grad, sum.window.clone());
                    Ok(Reduced { layout: &unit.layout, range: unit.owner.range(), grad })
                }
                _ => Err(early()),
            })
            .collect()
    }

    /// The factor on the step of every tensor of every unit where the rule scales them by norms; nothing elsewhere.
    ///
    /// # Errors
    /// The device or a message between ranks failed.
    fn trust(&mut self, hyper: Hyper) -> Result<Vec<Vec<f32>>> {
        let Some(rule) = self.rule.filter(Rule::is_layerwise) else {
            return Ok(vec![vec![]; self.units.len()]);
        };
        let (shards, total) = (self.virtual_shards(), self.lanes.total);
        let mut measured = Vec::new();
        let mut first = 0;
        for unit in &mut self.units {
            unit.params.land()?;
            let Some(Reduction::Done(sum)) = &unit.reduction else {
                return Err(Error::internal("an update without gradient"));
            };
            for shard in shards.clone() {
                let (range, grad) = (unit.layout.part(shard, total), B::view(&sum.grad, sum.window.clone()));
                for (tensor, squares) in unit.owner.squares(hyper, range, grad, unit.params.here())? {
                    measured.push((shard - shards.start, first + tensor, squares));
                }
            }
            first += unit.layout.tensors.len();
        }
        let mut norms = Norms::new(shards, first);
        for (shard, tensor, squares) in measured {
            let [norm, compared] = squares;
            norms.set(shard, tensor, [norm.read(&self.backend)?, compared.read(&self.backend)?]);
        }
        let messages = self.groups.data.gather_bytes(norms.encode()).wait()?;
        let mut squares = norms::whole(&messages, total, first)?.into_iter();
        let of_unit = |unit: &Unit<B>| {
            let decays = unit.tensors.iter().map(|part| part.decay(hyper.weight_decay));
            decays.zip(&mut squares).map(|(decay, squares)| rule.trust(squares, decay, hyper.grad_scale)).collect()
        };
        Ok(self.units.iter().map(of_unit).collect())
    }

    /// Updates the owned ranges from the reduced gradients, then spreads them.
    ///
    /// # Errors
    /// The device or the gather failed.
    pub fn update(&mut self, hyper: Hyper) -> Result<()> {
        let keep = self.keep;
        let trust = self.trust(hyper)?;
        for index in 0..self.units.len() {
            let unit = &mut self.units[index];
            let Some(Reduction::Done(Sum { grad, window, .. })) = unit.reduction.take() else {
                return Err(Error::internal("an update without gradient"));
            };
            let span = span(Doing::Update, Some(&unit.layout.name));
            unit.owner.update(hyper, &trust[index], B::view(&grad, window), unit.params.land()?)?;
            drop(span);
            if keep.grads == Life::Step {
                unit.grads = Some(grad);
            }
            self.lend(index)?;
            match keep.params {
                Life::Step => self.spread(index),
                // Every pass begins with the first blocks.
                Life::Use if index < keep.ahead => self.gather(index)?,
                Life::Use => {}
            }
        }
        self.borrow()
    }

    /// Lets parameters and their running average take each other's places, where one is kept: before an evaluation, and after
    /// it. Collective.
    ///
    /// # Errors
    /// The device or a gather failed.
    pub fn swap_average(&mut self) -> Result<()> {
        if self.average.is_none() {
            return Ok(());
        }
        for index in 0..self.units.len() {
            let unit = &mut self.units[index];
            match self.keep.params {
                Life::Step => {
                    unit.owner.swap(unit.params.land()?)?;
                    self.lend(index)?;
                    self.spread(index);
                }
                Life::Use => {
                    unit.params.land()?;
                    unit.params = Slot::Gone;
                    unit.owner.swap(None)?;
                    self.lend(index)?;
                }
            }
        }
        self.borrow()
    }

    /// Forgets the reduced gradients: this step does not count.
    pub fn skip(&mut self) {
        for unit in &mut self.units {
            unit.owner.forget();
            if let Some(Reduction::Done(sum)) = unit.reduction.take()
                && self.keep.grads == Life::Step
            {
                unit.grads = Some(sum.grad);
            }
        }
    }

    /// The parts of the units that this rank, and no other, writes to a checkpoint.
    ///
    /// # Errors
    /// A gather under way failed.
    pub fn owned(&mut self) -> Result<Vec<Owned<'_, B>>> {
        let shards = self.virtual_shards();
        let total = self.lanes.total;
        for unit in &mut self.units {
            unit.params.land()?;
        }
        self.units
            .iter()
            .map(|unit| {
                let range = unit.layout.part(shards.start, total).start..unit.layout.part(shards.end - 1, total).end;
                let (params, state) = unit.owner.values(range.clone(), unit.params.here())?;
                Ok(Owned { layout: &unit.layout, range, params, state })
            })
            .collect()
    }

    /// Replaces parameters and optimizer state by the values that `read(tensor, part, range)` gives for every range of
    /// every tensor that this rank stores: part 0 is the parameters, part k the k-th of
    /// [`Sharded::state_names`].
    ///
    /// # Errors
    /// Of `read`, or of the device.
    pub fn restore(&mut self, mut read: impl FnMut(&str, usize, Range<usize>, &mut [f32]) -> Result<()>) -> Result<()> {
        let backend = &self.backend;
        let mut load_of = |layout: &UnitLayout, part, range: Range<usize>| {
            let mut host = vec![0.0; range.len()];
            for piece in layout.pieces(range) {
                read(&piece.tensor.name, part, piece.of_tensor, &mut host[piece.of_owned])?;
            }
            Ok::<_, Error>(host)
        };
        for unit in &mut self.units {
            let layout = &unit.layout;
            let mut load = |part, range| load_of(layout, part, range);
            unit.params = match self.keep.params {
                Life::Step => Slot::Here(backend.upload(MemoryKind::Parameters, &load(0, 0..layout.padded)?)?),
                Life::Use => Slot::Gone,
            };
            unit.owner.restore(load)?;
        }
        for guest in &mut self.guests {
            let (layout, range) = (guest.layout.clone(), guest.range());
            let full = load_of(&layout, 0, 0..layout.padded)?;
            *guest = Guest::new(backend, layout, guest.from, range, self.keep.params, &full)?;
        }
        Ok(())
    }

    /// Virtual shards, of [`Lanes::total`] in every unit, whose norm and checkpoint fall to this rank. They lie
    /// in its owned range; replicas divide them among themselves.
    fn virtual_shards(&self) -> Range<usize> {
        let owned = part(self.lanes.total, self.groups.shard.rank(), self.groups.shard.size());
        let mine = part(owned.len(), self.groups.replica.rank(), self.groups.replica.size());
        owned.start + mine.start..owned.start + mine.end
    }

    /// Starts the gathers that the turn under way and the next ones want, and waits for those of `visit`.
    fn fetch(&mut self, visit: Visit) -> Result<()> {
        debug_assert_eq!(self.prefetch.turn(), Some(visit), "blocks take their turns in the order of the pass");
        let wanted: Vec<usize> = self.prefetch.wanted(self.keep.ahead).collect();
        wanted.into_iter().try_for_each(|index| self.gather(index))?;
        for index in visit.units() {
            let reuses = self.reuses;
            let backend = self.backend.clone();
            if let Some(params) = self.slot(index).1.land()?
                && reuses
            {
                backend.reuse(B::all(params));
            }
        }
        Ok(())
    }

    /// The full parameters of a slot, with its unit's layout.
    fn slot(&mut self, slot: usize) -> (&UnitLayout, &mut Slot<B::Buf>) {
        let own = self.units.len();
        match self.units.get_mut(slot) {
            Some(Unit { layout, params, .. }) => (layout, params),
            None => {
                let Guest { layout, params, .. } = &mut self.guests[slot - own];
                (layout, params)
            }
        }
    }

    /// Starts the gather of the full parameters of a slot, unless they are here or on their way.
    fn gather(&mut self, slot: usize) -> Result<()> {
        let full = match slot.checked_sub(self.units.len()) {
            None => self.units[slot].contribution(&self.backend)?,
            Some(guest) => self.guests[guest].contribution(&self.backend)?,
        };
        if let Some(full) = full {
            self.all_gather(slot, full);
        }
        Ok(())
    }

    /// Sends the updated owned part of full parameters to the other shards.
    fn spread(&mut self, slot: usize) {
        if let Slot::Here(full) = std::mem::replace(self.slot(slot).1, Slot::Gone) {
            self.all_gather(slot, full);
        }
    }

    fn all_gather(&mut self, slot: usize, full: B::Buf) {
        let name = self.slot(slot).0.name.clone();
        let group = self.groups.shard.about(&name);
        *self.slot(slot).1 = Slot::InFlight(group.all_gather(full));
    }

    /// Sends this rank's part of a unit's parameters to the stages that borrow them.
    fn lend(&mut self, index: usize) -> Result<()> {
        for lent in self.stage.lent.iter().filter(|lent| lent.slot == index) {
            let unit = &mut self.units[index];
            let range = unit.owner.range();
            let mut part = self.backend.alloc(MemoryKind::Parameters, range.len())?;
            match (self.keep.params, unit.params.land()?) {
                (Life::Step, Some(full)) => self.backend.copy(B::view(full, range), B::all_mut(&mut part))?,
                _ => unit.owner.contribute(&mut part, 0..range.len())?,
            }
            // As a gradient that is returned, the buffer goes back to its pool.
            drop(self.groups.ties.about(&unit.layout.name).send(lent.to, part));
        }
        Ok(())
    }

    /// Takes the parameters of other stages' units that blocks of this one borrow.
    fn borrow(&mut self) -> Result<()> {
        for guest in 0..self.guests.len() {
            let Guest { layout, from, .. } = &self.guests[guest];
            let part = self.backend.alloc(MemoryKind::Parameters, self.guests[guest].range().len())?;
            let part = self.groups.ties.about(&layout.name).recv(*from, part).wait()?;
            if let Some(full) = self.guests[guest].renew(&self.backend, part)? {
                self.all_gather(self.units.len() + guest, full);
            }
        }
        Ok(())
    }

    fn full(&self, slot: usize) -> Result<B::View<'_>> {
        let params = match slot.checked_sub(self.units.len()) {
            None => &self.units[slot].params,
            Some(guest) => &self.guests[guest].params,
        };
        params.here().map(B::all).ok_or_else(|| Error::internal("parameters used before they were gathered"))
    }

    /// Waits for a reduction's end. Of a full buffer that lives for its use the owned part is kept.
    fn land(&mut self, index: usize) -> Result<()> {
        let shards = self.virtual_shards();
        let unit = &mut self.units[index];
        let Some(Reduction::InFlight(pending)) = unit.reduction.take() else {
            return Err(Error::internal("no reduction to wait for"));
        };
        let (full, owned) = (pending.wait()?, unit.owner.range());
        // Read while it is on its way through the caches, and while the next units are reduced.
        let square = |shard| {
            let trained = unit.layout.trained(unit.layout.part(shard, self.lanes.total));
            self.backend.sum_squares(B::view(&full, trained))
        };
        let squares = shards.map(square).collect::<Result<_>>()?;
        let (mut grad, window) = match self.keep.grads {
            Life::Step => (full, owned),
            Life::Use => {
                let mut own = self.backend.alloc(MemoryKind::Gradients, owned.len())?;
                self.backend.copy(B::view(&full, owned.clone()), B::all_mut(&mut own))?;
                (own, 0..owned.len())
            }
        };
        unit.owner.reduced(&mut grad, window.clone())?;
        unit.reduction = Some(Reduction::Done(Sum { grad, window, squares }));
        Ok(())
    }
}
