//! Storage of units over a shard × replica mesh: DDP, ZeRO-1, -2, -3 and hybrid sharding are one mesh shape and
//! one [`Residency`] each.
//!
//! A gradient's journey: blocks add into a unit's flat buffer; at the end of a lane the buffer joins the rank's
//! tree of lanes; after the last lane the sum moves to the communication thread, which reduces it while the
//! next block computes; [`Sharded::reduce`] waits for all and agrees on loss and norm; [`Sharded::update`] lets
//! each [`ShardOwner`] update its range and gathers the parameters again.
//!
//! Parameters that do not live always are gathered ahead of their use: a pass states its order of blocks
//! ([`Sharded::begin`]), and a window slides along it ([`Prefetch`]).
//!
//! Where full gradients live for their use only, the reduction of one block is waited for once the reduction of the
//! next one has been requested: two of them are whole at once, besides a lent one. Otherwise nothing is waited for
//! before the end of the step.

use std::ops::Range;
use std::sync::Arc;

use super::control_flags::{AllFlags, ControlFlags};
use super::hyper::{Hyper, state_names};
use super::lanes::{Lanes, Tree, tree_sum};
use super::norms::{self, Norms};
use super::offload::Host;
use super::prefetch::{Prefetch, Visit};
use super::shard_owner::{ShardOwner, Updates, Values};
use super::step_summary::{Squares, StepSummary, sum_of_squares};
use super::{Life, Residency};
use crate::activity::{Doing, span};
use crate::backend::{Kernels, MemoryKind};
use crate::comm::{Group, Pending};
use crate::error::{Error, Result};
use crate::layout::{Init, UnitLayout, part};
use crate::nn::{Blocks, Grads, Params};
use crate::optim::{Part, Rule};
use crate::random;

/// The groups of data parallelism.
pub struct Groups<B: Kernels> {
    /// Ranks that share one copy of the parameters.
    pub shard: Group<B>,
    /// Ranks that own the same range in different copies.
    pub replica: Group<B>,
    /// Both: every rank with different data, replica-major.
    pub data: Group<B>,
}

/// Results of a step's reductions, the same on all data-parallel ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ReducedStep {
    /// Sum of the lanes' losses.
    pub loss: f64,
    /// Global norm of the gradient, before clipping.
    pub norm: f64,
    /// Seconds that each data-parallel rank computed in this step.
    pub compute: Vec<f64>,
    /// Control flags of each data-parallel rank.
    pub flags: AllFlags,
}

/// A full buffer: at hand, on the wire, or given up.
enum Slot<T> {
    Here(T),
    InFlight(Pending<T>),
    Gone,
}

impl<T: Send + 'static> Slot<T> {
    /// Waits until the buffer is here, unless it was given up.
    fn land(&mut self) -> Result<Option<&mut T>> {
        *self = match std::mem::replace(self, Slot::Gone) {
            Slot::InFlight(pending) => Slot::Here(pending.wait()?),
            settled => settled,
        };
        Ok(match self {
            Slot::Here(buf) => Some(buf),
            _ => None,
        })
    }

    /// The buffer, if it is here.
    fn here(&self) -> Option<&T> {
        match self {
            Slot::Here(buf) => Some(buf),
            _ => None,
        }
    }
}

/// The sum of a unit's gradients over all ranks.
enum Reduction<B: Kernels> {
    /// On its way: over the shard axis, then over the replica axis.
    InFlight(Pending<B::Buf>),
    /// Finished.
    Done(Sum<B>),
}

/// A reduced gradient.
struct Sum<B: Kernels> {
    grad: B::Buf,
    /// Range of the owned part in its buffer.
    window: Range<usize>,
    /// Squares of this rank's virtual shards.
    squares: Vec<B::Scalar>,
}

struct Unit<B: Kernels> {
    layout: UnitLayout,
    /// Settings of the update of each tensor.
    tensors: Vec<Part>,
    /// The shard of this rank.
    owner: ShardOwner<B>,
    /// Full parameters.
    params: Slot<B::Buf>,
    /// The full gradient of the current lane.
    grads: Option<B::Buf>,
    /// Whether `grads` holds this lane's sum; if not, `zeroed` is to be zeroed before use.
    grads_open: bool,
    /// Ranges that no backward overwrites.
    zeroed: Vec<Range<usize>>,
    /// Finished lanes of this rank.
    lanes: Tree<B::Buf>,
    reduction: Option<Reduction<B>>,
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

/// Units over the ranks of a shard × replica mesh.
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
    units: Vec<Unit<B>>,
    /// Units whose reduction is under way, in order.
    started: Vec<usize>,
    /// The pass under way.
    prefetch: Prefetch,
    /// Whether it multiplies parameters several times before they change.
    reuses: bool,
}

impl<B: Kernels> Sharded<B> {
    /// Storage for `blocks`, initialised from `seed`: the same values for any mesh. Without a seed it is zero, to
    /// be restored; without updates there is no optimizer state.
    ///
    /// # Errors
    /// Out of memory, or the first gather failed.
    pub fn new(
        backend: B,
        groups: Groups<B>,
        keep: Residency,
        lanes: Lanes,
        updates: Option<Updates>,
        blocks: &Blocks<B>,
        seed: Option<u64>,
    ) -> Result<Self> {
        let (shards, shard) = (groups.shard.size(), groups.shard.rank());
        let keep = keep.over(shards);
        let host = updates.as_ref().and_then(|updates| updates.host.clone());
        let host = host.map(|cpu| Host::new(&backend, cpu)).transpose()?;
        let groups_of = updates.as_ref().map_or(&[][..], |updates| &updates.groups);
        let mut units = Vec::with_capacity(blocks.len());
        for block in blocks {
            let layout = UnitLayout::new(block.name(), block.tensors(), lanes.total);
            let owned = layout.part(shard, shards);
            let full = seed.map_or_else(|| vec![0.0; layout.padded], |seed| initial(&layout, seed));
            let params = match keep.params {
                Life::Step => Slot::Here(backend.upload(MemoryKind::Parameters, &full)?),
                Life::Use => Slot::Gone,
            };
            let (values, are_full_here) = (&full[owned.clone()], keep.params == Life::Step);
            units.push(Unit {
                owner: ShardOwner::new(
                    &backend,
                    host.as_ref(),
                    updates.as_ref(),
                    &layout,
                    owned,
                    values,
                    are_full_here,
                )?,
                tensors: layout.tensors.iter().map(|(tensor, _)| Part::of(tensor, groups_of)).collect(),
                zeroed: layout.zeroed(),
                layout,
                params,
                grads: None,
                grads_open: false,
                lanes: Tree::default(),
                reduction: None,
            });
        }
        let (rule, average) = updates.map_or((None, None), |updates| (Some(updates.rule), updates.average));
        Ok(Self {
            backend,
            groups,
            keep,
            lanes,
            rule,
            average,
            offloads: host.is_some(),
            units,
            started: Vec::new(),
            prefetch: Prefetch::default(),
            reuses: false,
        })
    }

    /// The ranks with different data.
    pub fn data(&self) -> &Group<B> {
        &self.groups.data
    }

    /// Names of the optimizer's buffers.
    pub fn state_names(&self) -> Vec<&'static str> {
        state_names(self.rule, self.average)
    }

    /// Parameters of the network, averages and padding left out.
    pub fn parameters(&self) -> u64 {
        self.layouts().map(|unit| unit.trained as u64).sum()
    }

    /// Layouts of all units.
    pub fn layouts(&self) -> impl Iterator<Item = &UnitLayout> {
        self.units.iter().map(|unit| &unit.layout)
    }

    /// Name of unit `unit`.
    pub fn name(&self, unit: usize) -> &Arc<str> {
        &self.units[unit].layout.name
    }

    /// Seconds this rank has been blocked so far, waiting for messages.
    pub fn waited(&self) -> f64 {
        self.groups.data.stats().blocked
    }

    /// A pass begins: blocks will take their turns in this order, which is the same on all ranks. With `again` they take
    /// several each way before [`Sharded::reduce`], until which parameters stay as they are.
    pub fn begin(&mut self, visits: Vec<Visit>, again: bool) {
        self.prefetch = Prefetch::new(visits);
        self.backend.end_reuse();
        // Buffers that live for their use only are another unit's before long.
        self.reuses = again && self.keep.params == Life::Step;
    }

    /// Parameters of unit `unit` and of the unit it borrows, whose block's turn it is, gathered if they are not here.
    ///
    /// # Errors
    /// The gather failed.
    pub fn params(&mut self, unit: usize, borrowed: Option<usize>) -> Result<Params<'_, B>> {
        self.fetch(Visit { own: unit, lent: borrowed })?;
        Ok(Params { own: self.full(unit)?, lent: borrowed.map(|lent| self.full(lent)).transpose()? })
    }

    /// As [`Sharded::params`], with the gradients to add to.
    ///
    /// # Errors
    /// The gather failed.
    pub fn params_and_grads(&mut self, unit: usize, borrowed: Option<usize>) -> Result<(Params<'_, B>, Grads<'_, B>)> {
        let visit = Visit { own: unit, lent: borrowed };
        self.fetch(visit)?;
        let first = self.open_grads(unit)?;
        let lent_first = borrowed.map_or(Ok(false), |lent| self.open_grads(lent))?;
        let mut rest = &mut self.units[..];
        let mut lent = None;
        if let Some(index) = borrowed {
            debug_assert!(index < unit, "units lend to later blocks");
            let (head, tail) = rest.split_at_mut(unit);
            (lent, rest) = (Some(&mut head[index]), tail);
        } else {
            rest = &mut rest[unit..];
        }
        let own = rest.first_mut().ok_or_else(|| Error::internal("no such unit"))?;
        let (own_params, own_grads) = own.windows()?;
        let (lent_params, lent_grads) = lent.map(Unit::windows).transpose()?.unzip();
        Ok((
            Params { own: own_params, lent: lent_params },
            Grads { own: own_grads, first, lent: lent_grads, lent_first },
        ))
    }

    /// A block's turn ends: parameters that live for their use only are given up, unless the next turns want them.
    pub fn release(&mut self) {
        for index in self.prefetch.pass(self.keep.ahead) {
            if self.keep.params == Life::Use {
                self.units[index].params = Slot::Gone;
            }
        }
    }

    /// The unit's gradient of one lane is final. After the rank's last lane its reduction starts.
    ///
    /// # Errors
    /// A reduction failed.
    pub fn lane_done(&mut self, unit: usize, last: bool) -> Result<()> {
        let backend = &self.backend;
        let state = &mut self.units[unit];
        let lane = state.grads.take().ok_or_else(|| Error::internal("a lane ended before it began"))?;
        state.grads_open = false;
        // A merged buffer is free again: it serves the next lane.
        let mut spare = None;
        let mut add = |into: &mut B::Buf, from: B::Buf| {
            backend.add(B::all(&from), B::all_mut(into))?;
            spare = Some(from);
            Ok::<_, Error>(())
        };
        state.lanes.push(lane, &mut add)?;
        if !last {
            state.grads = spare;
            return Ok(());
        }
        let sum = state.lanes.finish(&mut add)?.ok_or_else(|| Error::internal("no lane to reduce"))?;
        drop(spare);
        let scattered = self.groups.shard.about(&state.layout.name).reduce_scatter(sum);
        let pending = self.groups.replica.about(&state.layout.name).all_reduce_after(scattered, state.owner.range());
        state.reduction = Some(Reduction::InFlight(pending));
        if self.keep.grads == Life::Use {
            // Full gradients live for their use: those of the unit before have had this block's time to be reduced.
            std::mem::take(&mut self.started).into_iter().try_for_each(|before| self.land(before))?;
        }
        self.started.push(unit);
        if self.offloads {
            // Gradients go down as soon as they can, beside the backwards that are left.
            let arrived = self.started.iter().take_while(|&&unit| has_arrived(&mut self.units[unit])).count();
            self.started.drain(..arrived).collect::<Vec<_>>().into_iter().try_for_each(|unit| self.land(unit))?;
        }
        Ok(())
    }

    /// Waits for all reductions and agrees on the sum of the lanes' losses and the global gradient norm.
    /// `losses` are those of this rank's lanes, in order; `compute` is the seconds it has computed in this step. All
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
        let squares = Squares { first_unit: 0, first_shard: shards.start, shards: shards.len(), values: squares };
        let mine = StepSummary { compute, flags, losses: losses.to_vec(), squares };
        let messages = self.groups.data.gather_bytes(mine.encode()).wait()?;
        let told: Vec<StepSummary> = messages.iter().map(|one| StepSummary::decode(one)).collect::<Result<_>>()?;
        let losses: Vec<f64> = told.iter().flat_map(|one| one.losses.iter().copied()).collect();
        let squares = sum_of_squares(told.iter().map(|one| &one.squares), self.units.len(), self.lanes.total)?;
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
            match keep.params {
                Life::Step => self.spread(index),
                // Every pass begins with the first blocks.
                Life::Use if index < keep.ahead => self.gather(index)?,
                Life::Use => {}
            }
        }
        Ok(())
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
                    self.spread(index);
                }
                Life::Use => {
                    unit.params.land()?;
                    unit.params = Slot::Gone;
                    unit.owner.swap(None)?;
                }
            }
        }
        Ok(())
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
        for unit in &mut self.units {
            let layout = &unit.layout;
            let mut load = |part, range: Range<usize>| {
                let mut host = vec![0.0; range.len()];
                for piece in layout.pieces(range) {
                    read(&piece.tensor.name, part, piece.of_tensor, &mut host[piece.of_owned])?;
                }
                Ok(host)
            };
            unit.params = match self.keep.params {
                Life::Step => Slot::Here(backend.upload(MemoryKind::Parameters, &load(0, 0..layout.padded)?)?),
                Life::Use => Slot::Gone,
            };
            unit.owner.restore(load)?;
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
            if let Some(params) = self.units[index].params.land()?
                && self.reuses
            {
                self.backend.reuse(B::all(params));
            }
        }
        Ok(())
    }

    /// Starts the gather of a unit's full parameters, unless they are here or on their way.
    fn gather(&mut self, index: usize) -> Result<()> {
        let unit = &mut self.units[index];
        if let Slot::Gone = unit.params {
            let mut full = self.backend.alloc(MemoryKind::Parameters, unit.layout.padded)?;
            unit.owner.contribute(&mut full)?;
            unit.params = Slot::InFlight(self.groups.shard.about(&unit.layout.name).all_gather(full));
        }
        Ok(())
    }

    /// Sends the updated owned part of full parameters to the other shards.
    fn spread(&mut self, index: usize) {
        let unit = &mut self.units[index];
        if let Slot::Here(full) = std::mem::replace(&mut unit.params, Slot::Gone) {
            unit.params = Slot::InFlight(self.groups.shard.about(&unit.layout.name).all_gather(full));
        }
    }

    fn full(&self, index: usize) -> Result<B::View<'_>> {
        let full = self.units[index].params.here();
        full.map(B::all).ok_or_else(|| Error::internal("parameters used before they were gathered"))
    }

    /// Makes the gradient buffer of a unit ready for a backward; whether it is the first of the lane.
    fn open_grads(&mut self, index: usize) -> Result<bool> {
        let unit = &mut self.units[index];
        if unit.grads.is_none() {
            unit.grads = Some(self.backend.alloc(MemoryKind::Gradients, unit.layout.padded)?);
        }
        let first = !std::mem::replace(&mut unit.grads_open, true);
        if let (true, Some(grads)) = (first, &mut unit.grads) {
            unit.zeroed.iter().try_for_each(|range| self.backend.zero(B::view_mut(grads, range.clone())))?;
        }
        Ok(first)
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

impl<B: Kernels> Unit<B> {
    /// Full parameters and open gradients, both of which must be here.
    fn windows(&mut self) -> Result<(B::View<'_>, B::ViewMut<'_>)> {
        match (&self.params, &mut self.grads) {
            (Slot::Here(params), Some(grads)) => Ok((B::all(params), B::all_mut(grads))),
            _ => Err(Error::internal("parameters or gradients are not here")),
        }
    }
}

/// Whether a unit's reduction is over, so that nothing need be waited for.
fn has_arrived<B: Kernels>(unit: &mut Unit<B>) -> bool {
    match &mut unit.reduction {
        Some(Reduction::InFlight(pending)) => pending.is_done(),
        _ => false,
    }
}

/// The initial values of a unit: each tensor a stream of its own, named by the tensor.
fn initial(layout: &UnitLayout, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; layout.padded];
    for (tensor, range) in &layout.tensors {
        let values = &mut values[range.clone()];
        match tensor.init {
            Init::Zeros => {}
            Init::Ones => values.fill(1.0),
            Init::Normal(std) => {
                let stream = random::Stream::new(random::derive(seed, &[random::name(&tensor.name)]));
                stream.fill_normal(values);
                values.iter_mut().for_each(|x| *x *= std);
            }
        }
    }
    values
}
