//! Storage of units over a shard × replica mesh: DDP, ZeRO-1, -2, -3 and hybrid sharding are one mesh shape and
//! one [`Residency`] each.
//!
//! A gradient's journey: blocks add into a unit's flat buffer; at the end of a lane the buffer joins the rank's
//! tree of lanes; after the last lane the sum moves to the communication thread, which reduces it while the
//! next block computes; [`Sharded::reduce`] waits for all and agrees on loss and norm; [`Sharded::update`] runs
//! one fused kernel on each owned range and gathers the parameters again.

use std::ops::Range;
use std::sync::Arc;

use super::lanes::{Lanes, Tree, tree_sum};
use super::{Life, Residency};
use crate::activity::{Doing, span};
use crate::backend::{Kernels, Memory};
use crate::comm::{Group, Pending};
use crate::error::{Error, Result};
use crate::layout::{Init, UnitLayout, part};
use crate::nn::{Blocks, Grads, Params};
use crate::optim::{Rule, Update};
use crate::random;

/// The groups that data parallelism speaks in.
pub struct Groups<B: Kernels> {
    /// Ranks that share one copy of the parameters.
    pub shard: Group<B>,
    /// Ranks that own the same range in different copies.
    pub replica: Group<B>,
    /// Both: every rank with different data, replica-major.
    pub data: Group<B>,
}

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

/// What all data-parallel ranks know after the gradients met.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Synced {
    /// Sum of the lanes' losses.
    pub loss: f64,
    /// Global norm of the gradient, before clipping.
    pub norm: f64,
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
}

/// A reduction under way, and where in its buffer the owned part will be.
enum Reduction<T> {
    /// Over the shard axis.
    Scatter(Pending<T>),
    /// Over the replica axis; the owned part is this window.
    Replicas(Pending<T>, Range<usize>),
    /// Finished.
    Done(T, Range<usize>),
}

struct Unit<B: Kernels> {
    layout: UnitLayout,
    /// The shard of this rank.
    owned: Range<usize>,
    /// Full parameters.
    params: Slot<B::Buf>,
    /// The owned parameters, when the full ones do not live always.
    master: Option<B::Buf>,
    /// Optimizer state of the owned range, one buffer for each name in [`Rule::state`].
    state: Vec<B::Buf>,
    /// The full gradient of the current lane.
    grads: Option<B::Buf>,
    /// Whether `grads` holds this lane's sum; if not, it is to be zeroed before use.
    grads_open: bool,
    /// Finished lanes of this rank.
    lanes: Tree<B::Buf>,
    reduction: Option<Reduction<B::Buf>>,
}

/// The owned part of a unit, for checkpoints.
pub struct Owned<'a, B: Kernels> {
    /// The device it is on.
    pub backend: &'a B,
    /// The unit's layout.
    pub layout: &'a UnitLayout,
    /// The range of the unit that this view covers.
    pub range: Range<usize>,
    /// Its parameters.
    pub params: B::View<'a>,
    /// Its optimizer state, one window for each name in [`Rule::state`].
    pub state: Vec<B::View<'a>>,
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
    units: Vec<Unit<B>>,
    /// Units whose reduction has been started in this step, in order.
    started: Vec<usize>,
}

impl<B: Kernels> Sharded<B> {
    /// Storage for `blocks`, initialised from `seed`: the same values for any mesh. Without a seed it is zero, to
    /// be restored; without a rule there is no optimizer state.
    ///
    /// # Errors
    /// Out of memory, or the first gather failed.
    pub fn new(
        backend: B,
        groups: Groups<B>,
        keep: Residency,
        lanes: Lanes,
        rule: Option<Rule>,
        blocks: &Blocks<B>,
        seed: Option<u64>,
    ) -> Result<Self> {
        let (shards, shard) = (groups.shard.size(), groups.shard.rank());
        let keep = keep.over(shards);
        let mut units = Vec::with_capacity(blocks.len());
        for block in blocks {
            let layout = UnitLayout::new(block.name(), block.tensors(), lanes.total);
            let owned = layout.part(shard, shards);
            let full = seed.map_or_else(|| vec![0.0; layout.padded], |seed| initial(&layout, seed));
            let (params, master) = match keep.params {
                Life::Step => (Slot::Here(backend.upload(Memory::Parameters, &full)?), None),
                Life::Use => (Slot::Gone, Some(backend.upload(Memory::Parameters, &full[owned.clone()])?)),
            };
            let state = state_names(rule).iter().map(|_| {
                let mut buf = backend.alloc(Memory::Optimizer, owned.len())?;
                backend.zero(B::all_mut(&mut buf))?;
                Ok(buf)
            });
            units.push(Unit {
                state: state.collect::<Result<_>>()?,
                layout,
                owned,
                params,
                master,
                grads: None,
                grads_open: false,
                lanes: Tree::default(),
                reduction: None,
            });
        }
        Ok(Self { backend, groups, keep, lanes, rule, units, started: Vec::new() })
    }

    /// The ranks with different data.
    pub fn data(&self) -> &Group<B> {
        &self.groups.data
    }

    /// Names of the optimizer's buffers.
    pub fn state_names(&self) -> &'static [&'static str] {
        state_names(self.rule)
    }

    /// Parameters of the network, padding left out.
    pub fn parameters(&self) -> u64 {
        self.layouts().map(|unit| unit.used as u64).sum()
    }

    /// Layouts of all units.
    pub fn layouts(&self) -> impl Iterator<Item = &UnitLayout> {
        self.units.iter().map(|unit| &unit.layout)
    }

    /// What unit `unit` is called.
    pub fn name(&self, unit: usize) -> &Arc<str> {
        &self.units[unit].layout.name
    }

    /// Parameters of unit `unit` and of the unit it borrows, gathered if they are not here.
    ///
    /// # Errors
    /// The gather failed.
    pub fn params(&mut self, unit: usize, borrowed: Option<usize>) -> Result<Params<'_, B>> {
        self.gather(unit)?;
        borrowed.map_or(Ok(()), |lent| self.gather(lent))?;
        Ok(Params { own: self.full(unit)?, lent: borrowed.map(|lent| self.full(lent)).transpose()? })
    }

    /// As [`Sharded::params`], with the gradients to add to.
    ///
    /// # Errors
    /// The gather failed.
    pub fn params_and_grads(&mut self, unit: usize, borrowed: Option<usize>) -> Result<(Params<'_, B>, Grads<'_, B>)> {
        for index in [Some(unit), borrowed].into_iter().flatten() {
            self.gather(index)?;
            self.open_grads(index)?;
        }
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
        Ok((Params { own: own_params, lent: lent_params }, Grads { own: own_grads, lent: lent_grads }))
    }

    /// A block has used its parameters: those that live for their use only are given up.
    pub fn release(&mut self, unit: usize, borrowed: Option<usize>) {
        if self.keep.params == Life::Use {
            for index in [Some(unit), borrowed].into_iter().flatten() {
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
        state.reduction = Some(Reduction::Scatter(self.groups.shard.about(&state.layout.name).reduce_scatter(sum)));
        if let Some(&before) = self.started.last() {
            self.advance(before)?;
        }
        if self.groups.shard.size() == 1 {
            // Nothing was scattered: the replicas can meet at once.
            self.advance(unit)?;
        }
        self.started.push(unit);
        Ok(())
    }

    /// Waits for all reductions and agrees on the sum of the lanes' losses and the global gradient norm.
    /// `losses` are those of this rank's lanes, in order.
    ///
    /// # Errors
    /// A reduction failed.
    pub fn reduce(&mut self, losses: &[f64]) -> Result<Synced> {
        for unit in std::mem::take(&mut self.started) {
            self.advance(unit)?;
            self.land(unit)?;
        }
        let shards = self.virtual_shards();
        let mut squares = vec![0.0; shards.len()];
        for unit in &self.units {
            let Some(Reduction::Done(grad, window)) = &unit.reduction else {
                return Err(Error::internal("a unit without gradient"));
            };
            for (square, shard) in squares.iter_mut().zip(shards.clone()) {
                let range = unit.layout.part(shard, self.lanes.total);
                let at = range.start - unit.owned.start + window.start;
                *square += self.backend.sum_squares(B::view(grad, at..at + range.len()))?;
            }
        }
        // Every rank gets every lane's loss and every virtual shard's square, and adds them in the same tree.
        let message = LaneFacts { first: shards.start, losses, squares: &squares }.encode();
        let (mut all_losses, mut all_squares) = (Vec::new(), vec![0.0; self.lanes.total]);
        for message in self.groups.data.gather_bytes(message).wait()? {
            let (first, losses, squares) = LaneFacts::decode(&message)?;
            all_losses.extend(losses);
            all_squares[first..first + squares.len()].copy_from_slice(&squares);
        }
        Ok(Synced { loss: tree_sum(&all_losses), norm: tree_sum(&all_squares).sqrt() })
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
                Some(Reduction::Done(grad, window)) => {
                    let grad = B::view(grad, window.clone());
                    Ok(Reduced { layout: &unit.layout, range: unit.owned.clone(), grad })
                }
                _ => Err(early()),
            })
            .collect()
    }

    /// Updates the owned ranges from the reduced gradients, then spreads them.
    ///
    /// # Errors
    /// The device or the gather failed.
    pub fn update(&mut self, hyper: Hyper) -> Result<()> {
        let (Some(rule), keep) = (self.rule, self.keep) else {
            return Err(Error::internal("an update without a rule"));
        };
        for index in 0..self.units.len() {
            let unit = &mut self.units[index];
            let Some(Reduction::Done(grad, window)) = unit.reduction.take() else {
                return Err(Error::internal("an update without gradient"));
            };
            let owned = unit.owned.clone();
            let params = match (&mut unit.master, unit.params.land()?) {
                (Some(master), _) => B::all_mut(master),
                (None, Some(full)) => B::view_mut(full, owned.clone()),
                (None, None) => return Err(Error::internal("parameters are nowhere")),
            };
            let g = B::view(&grad, window);
            let state = unit.state.iter_mut().map(B::all_mut).collect();
            // Decayed tensors come first: one cut separates the two groups.
            let cut = unit.layout.decayed.clamp(owned.start, owned.end) - owned.start;
            let update =
                |weight_decay| Update { lr: hyper.lr, weight_decay, step: hyper.step, grad_scale: hyper.grad_scale };
            let (g_decayed, g_rest) = B::cut(g, cut);
            let (p_decayed, p_rest) = B::cut_mut(params, cut);
            let (s_decayed, s_rest) = cut_all::<B>(state, cut);
            let span = span(Doing::Update, Some(&unit.layout.name));
            rule.update(&self.backend, update(hyper.weight_decay), g_decayed, s_decayed, p_decayed)?;
            rule.update(&self.backend, update(0.0), g_rest, s_rest, p_rest)?;
            drop(span);
            if keep.grads == Life::Step {
                unit.grads = Some(grad);
            }
            if keep.params == Life::Step {
                self.spread(index);
            }
        }
        Ok(())
    }

    /// Forgets the reduced gradients: this step does not count.
    pub fn skip(&mut self) {
        for unit in &mut self.units {
            if let Some(Reduction::Done(grad, _)) = unit.reduction.take()
                && self.keep.grads == Life::Step
            {
                unit.grads = Some(grad);
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
                let of_owned = range.start - unit.owned.start..range.end - unit.owned.start;
                let params = match (&unit.master, &unit.params) {
                    (Some(master), _) => B::view(master, of_owned.clone()),
                    (None, Slot::Here(full)) => B::view(full, range.clone()),
                    (None, _) => return Err(Error::internal("parameters are nowhere")),
                };
                let state = unit.state.iter().map(|buf| B::view(buf, of_owned.clone())).collect();
                Ok(Owned { backend: &self.backend, layout: &unit.layout, range, params, state })
            })
            .collect()
    }

    /// Replaces parameters and optimizer state by what `read(tensor, part, range)` gives for every range of every
    /// tensor that this rank stores: part 0 is the parameters, part k the k-th buffer of [`Rule::state`].
    ///
    /// # Errors
    /// Of `read`, or of the device.
    pub fn restore(&mut self, mut read: impl FnMut(&str, usize, Range<usize>, &mut [f32]) -> Result<()>) -> Result<()> {
        for unit in &mut self.units {
            let kept = if unit.master.is_some() { unit.owned.clone() } else { 0..unit.layout.padded };
            let mut fill = |part: usize, range: Range<usize>| -> Result<B::Buf> {
                let mut host = vec![0.0; range.len()];
                for piece in unit.layout.pieces(range) {
                    read(&piece.tensor.name, part, piece.of_tensor, &mut host[piece.of_owned])?;
                }
                let what = if part == 0 { Memory::Parameters } else { Memory::Optimizer };
                self.backend.upload(what, &host)
            };
            let params = fill(0, kept)?;
            match &mut unit.master {
                Some(master) => *master = params,
                None => unit.params = Slot::Here(params),
            }
            for (part, buf) in unit.state.iter_mut().enumerate() {
                *buf = fill(part + 1, unit.owned.clone())?;
            }
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

    /// Starts the gather of a unit's full parameters unless they are here or on their way, and waits for them.
    fn gather(&mut self, index: usize) -> Result<()> {
        let unit = &mut self.units[index];
        if let (Slot::Gone, Some(master)) = (&unit.params, &unit.master) {
            let mut full = self.backend.alloc(Memory::Parameters, unit.layout.padded)?;
            self.backend.copy(B::all(master), B::view_mut(&mut full, unit.owned.clone()))?;
            unit.params = Slot::InFlight(self.groups.shard.about(&unit.layout.name).all_gather(full));
        }
        unit.params.land().map(drop)
    }

    /// Sends the updated owned part of full parameters to the other shards.
    fn spread(&mut self, index: usize) {
        let unit = &mut self.units[index];
        if let Slot::Here(full) = std::mem::replace(&mut unit.params, Slot::Gone) {
            unit.params = Slot::InFlight(self.groups.shard.about(&unit.layout.name).all_gather(full));
        }
    }

    fn full(&self, index: usize) -> Result<B::View<'_>> {
        match &self.units[index].params {
            Slot::Here(full) => Ok(B::all(full)),
            _ => Err(Error::internal("parameters used before they were gathered")),
        }
    }

    /// Makes the gradient buffer of a unit ready to add to.
    fn open_grads(&mut self, index: usize) -> Result<()> {
        let unit = &mut self.units[index];
        if unit.grads.is_none() {
            unit.grads = Some(self.backend.alloc(Memory::Gradients, unit.layout.padded)?);
        }
        if let (false, Some(grads)) = (unit.grads_open, &mut unit.grads) {
            self.backend.zero(B::all_mut(grads))?;
            unit.grads_open = true;
        }
        Ok(())
    }

    /// Moves a reduction from the shard axis to the replica axis. Waits for the first; the second runs on.
    fn advance(&mut self, index: usize) -> Result<()> {
        let unit = &mut self.units[index];
        let scattered = match unit.reduction.take() {
            Some(Reduction::Scatter(pending)) => pending.wait()?,
            other => {
                unit.reduction = other;
                return Ok(());
            }
        };
        let (sum, window) = match self.keep.grads {
            Life::Step => (scattered, unit.owned.clone()),
            Life::Use => {
                let mut own = self.backend.alloc(Memory::Gradients, unit.owned.len())?;
                self.backend.copy(B::view(&scattered, unit.owned.clone()), B::all_mut(&mut own))?;
                (own, 0..unit.owned.len())
            }
        };
        let pending = self.groups.replica.about(&unit.layout.name).all_reduce(sum, window.clone());
        unit.reduction = Some(Reduction::Replicas(pending, window));
        Ok(())
    }

    /// Waits for a reduction's end.
    fn land(&mut self, index: usize) -> Result<()> {
        let unit = &mut self.units[index];
        if let Some(Reduction::Replicas(pending, window)) = unit.reduction.take() {
            unit.reduction = Some(Reduction::Done(pending.wait()?, window));
        }
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

fn state_names(rule: Option<Rule>) -> &'static [&'static str] {
    rule.map_or(&[], |rule| rule.state())
}

/// Cuts every window at the same element.
fn cut_all<B: Kernels>(views: Vec<B::ViewMut<'_>>, at: usize) -> (Vec<B::ViewMut<'_>>, Vec<B::ViewMut<'_>>) {
    views.into_iter().map(|view| B::cut_mut(view, at)).unzip()
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

/// What a rank tells the others about its lanes and virtual shards; little-endian f64.
struct LaneFacts<'a> {
    /// First virtual shard of `squares`.
    first: usize,
    losses: &'a [f64],
    squares: &'a [f64],
}

impl LaneFacts<'_> {
    fn encode(&self) -> Vec<u8> {
        let head = [self.first as f64, self.losses.len() as f64];
        head.iter().chain(self.losses).chain(self.squares).flat_map(|x| x.to_le_bytes()).collect()
    }

    fn decode(bytes: &[u8]) -> Result<(usize, Vec<f64>, Vec<f64>)> {
        let numbers: Vec<f64> = bytes.as_chunks().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect();
        match numbers.as_slice() {
            [first, losses, rest @ ..] if *losses as usize <= rest.len() => {
                let (losses, squares) = rest.split_at(*losses as usize);
                Ok((*first as usize, losses.to_vec(), squares.to_vec()))
            }
            _ => Err(Error::comm("another rank sent a malformed summary of its lanes")),
        }
    }
}
