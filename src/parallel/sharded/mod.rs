//! Stores a stage's units over its shard × replica mesh: DDP, ZeRO-1, -2, -3 and hybrid sharding
//! are each one mesh shape and one [`ShardingPolicy`].
//!
//! The path of a gradient: blocks add into a unit's flat buffer; at the end of a virtual rank the
//! buffer is added to the rank's tree of virtual ranks; after the last virtual rank the
//! communication thread reduces the sum while the next block computes: reduce-scatter over the
//! shard axis, then all-reduce of the owned part over the replica axis. [`Sharded::reduce`] waits
//! for all reductions and computes loss and norm; [`Sharded::update`] lets each [`OptimizerShard`]
//! update its range and all-gathers the parameters.
//!
//! A block with tied weights adds its gradient into a separate buffer. At the end of a virtual rank
//! it is added to the gradient of the unit that it is tied to, so that the order of additions is
//! the same whether the two blocks are in one pipeline stage, or in two, between which the buffer
//! is sent.
//!
//! Parameters that are freed after use are prefetched: a pass declares its order of blocks
//! ([`Sharded::begin_step`]), and a window slides along it ([`Prefetch`]).
//!
//! If full gradients are freed after use, the reduction of a block is awaited after that of the
//! next one has started, so two full gradients are alive at once, besides a tied one. Otherwise
//! reductions are awaited only at the end of the step.
//!
//! Gradients that are reduced after each micro-batch ([`ReduceAfter`](super::ReduceAfter)) take the
//! path in another order: reduce-scatter over the shard axis at the end of a virtual rank, then the
//! tree of virtual ranks, of owned parts, and after the last virtual rank the all-reduce over the
//! replica axis.
//!
//! Pipeline stages other than the first start their reductions once their last gradient has been
//! sent, because the stage before waits for it.
//!
//! [`OptimizerShard`]: super::OptimizerShard

mod block_reduction;
mod gradients;
mod histograms;
mod host_units;
mod local_sgd;
mod observed;
mod restore;
mod sdc_check;
mod state;
mod update;

pub use gradients::{Reduced, ReducedStep};
pub use histograms::whole as whole_histograms;
pub use host_units::HostUnits;
pub use observed::OpenGradient;
pub use update::UpdateObserver;

use block_reduction::BlockReduction;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::cpu_offload::HostUpdater;
use super::fsdp_unit::{BufferState, InactiveReplica, Unit, initial};
use super::groups::Groups;
use super::local_sgd::LocalSgd;
use super::optimizer_shard::Updates;
use super::owned::Histograms;
use super::param_prefetch::{self, BlockUse, Prefetch};
use super::pipeline_schedule::StepSchedule;
use super::pipeline_stage::{Stage, TiedImport};
use super::sdc_check::SdcChecks;
use super::step_params::state_names;
use super::tied_replica::TiedReplica;
use super::{Lifetime, ReduceAfter, ShardingPolicy, Storage, VirtualRanks};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::{TensorShards, UnitLayout, share, trained};
use hpctrain_base::tree_sum::Tree;
use hpctrain_comm::{Group, Pending, UnequalCollective};
use hpctrain_device::Kernels;
use hpctrain_nn::optim::{GroupRun, UpdateRule};
use hpctrain_nn::{Blocks, Grads, Params};

/// The units of a pipeline stage, sharded over the ranks of its shard × replica mesh.
pub struct Sharded<B: Kernels> {
    backend: B,
    groups: Groups<B>,
    storage: Storage,
    policy: ShardingPolicy,
    /// The number of virtual ranks of the global batch.
    virtual_ranks: usize,
    /// The blocks of virtual ranks of all ranks, if gradients are reduced in blocks.
    blocks: Option<BlockReduction>,
    /// The virtual tensor-parallel ranks of every unit.
    slices: TensorShards,
    /// The update rule; none if nothing is trained.
    rule: Option<UpdateRule>,
    /// The decay of the parameters' EMA, if there is one.
    average: Option<f32>,
    /// The settings of local SGD, if it is used.
    averaging: Option<LocalSgd>,
    /// The SDC checks, if they are on.
    sdc_checks: Option<SdcChecks>,
    /// The CPU updater, with CPU offload of master weights and optimizer state.
    host: Option<HostUpdater>,
    /// A reduced gradient that is being downloaded to the host, to be freed afterwards.
    downloading: Option<B::Buf>,
    /// The layouts of the whole network.
    network: Vec<UnitLayout>,
    stage: Stage,
    /// The units before these on the host, with embedding offload.
    host_units: Option<HostUnits>,
    units: Vec<Unit<B>>,
    /// The replicas of other stages' units that blocks of this stage are tied to.
    tied_replicas: Vec<TiedReplica<B>>,
    /// The gradients of tied units that other stages send at the end of the virtual rank, by unit.
    expected: Vec<(usize, Pending<B::Buf>)>,
    /// The units whose gradients can be reduced, in order, each with whether its last virtual rank
    /// has ended.
    ended: Vec<(usize, bool)>,
    /// The units whose reduction has started, in order, each with the same.
    started: Vec<(usize, bool)>,
    /// The units whose gradients were reduced over shards after each micro-batch, and whose sums are
    /// being reduced over replicas, in order.
    replicating: Vec<usize>,
    /// The current pass.
    prefetch: Prefetch,
    /// Whether the pass uses parameters several times before they change.
    reuses: bool,
    /// The step for which histograms of gradients are requested, and those counted so far.
    counts: Option<(u64, Histograms)>,
}

impl<B: Kernels> Sharded<B> {
    /// Creates the units of `stage`, of a network of `blocks` that were made for `slices`,
    /// initialised from `seed` with the same values on any mesh. Without a seed the values are
    /// zero, to be restored; without updates there is no optimizer state.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice.
    #[expect(clippy::too_many_arguments, reason = "one for each property of a layout")]
    pub fn new(
        backend: B,
        groups: Groups<B>,
        keep: ShardingPolicy,
        assignment: &VirtualRanks,
        updates: Option<Updates>,
        blocks: &Blocks<B>,
        slices: &TensorShards,
        stage: Stage,
        seed: Option<u64>,
    ) -> Result<Self> {
        let shards = groups.shard.size();
        let shard = groups.shard.rank();
        let averaging = updates.as_ref().and_then(|updates| updates.local_sgd);
        let storage = updates.as_ref().map_or(Storage::Ranks, |updates| updates.storage);
        let keep = keep.for_mesh(shards, groups.replica.size(), storage);
        let audits = updates.as_ref().and_then(|updates| SdcChecks::every(updates.sdc_check_every));
        let replicas_here =
            averaging.map_or(1, |averaging| averaging.replicas / groups.replica.size());
        let host = updates.as_ref().and_then(|updates| updates.host.clone());
        let host = host.map(|cpu| HostUpdater::new(&backend, cpu)).transpose()?;
        let virtual_ranks = assignment.total;
        let parts = slices.held.len() * virtual_ranks;
        let data = &groups.step.data;
        let assignment = VirtualRanks {
            replicas: data.size() / shards,
            shards,
            reduce_after: keep.reduce_after,
            ..assignment.clone()
        };
        let blocks_of_ranks = (keep.reduce_after == ReduceAfter::StepInBlocks)
            .then(|| BlockReduction::new(assignment, data.rank(), storage));
        let groups_of = updates.as_ref().map_or(&[][..], |updates| &updates.groups);
        let network: Vec<UnitLayout> = blocks
            .iter()
            .map(|block| UnitLayout::sharded(block.name(), block.tensors(), virtual_ranks, slices))
            .collect();
        let of_shard = |layout: &UnitLayout| layout.parts(share(parts, shard, shards), parts);
        let mut units = Vec::with_capacity(stage.units.len());
        for layout in &network[stage.units.clone()] {
            let owned = if storage.owns(groups.replica.rank()) { of_shard(layout) } else { 0..0 };
            let full = initial(layout, seed);
            let updates = (host.as_ref(), updates.as_ref());
            let replica = || {
                InactiveReplica::new(&backend, updates, layout, owned.clone(), &full, keep.params)
            };
            let InactiveReplica { shard: owner, params } = replica()?;
            units.push(Unit {
                owner,
                inactive: (1..replicas_here).map(|_| replica()).collect::<Result<VecDeque<_>>>()?,
                tensors: layout
                    .tensors
                    .iter()
                    .map(|tensor| GroupRun::from_tensor(tensor, groups_of))
                    .collect(),
                zeroed: layout.zeroed(),
                layout: layout.clone(),
                params,
                grads: None,
                grads_open: false,
                tied_grads: None,
                grads_from_tied: Vec::new(),
                virtual_ranks: Tree::default(),
                summed: 0,
                blocks: Vec::new(),
                reduction: None,
            });
        }
        let mut tied_replicas = Vec::with_capacity(stage.tied_replicas.len());
        for unit in &stage.tied_replicas {
            let layout = network[unit.unit].clone();
            let range = of_shard(&layout);
            let full = initial(&layout, seed);
            let mut tied =
                TiedReplica::new(&backend, layout, unit.stage, range, keep.params, &full)?;
            (1..replicas_here).try_for_each(|_| tied.add_replica(&backend, keep.params, &full))?;
            tied_replicas.push(tied);
        }
        let (rule, average) =
            updates.map_or((None, None), |updates| (Some(updates.rule), updates.ema_decay));
        Ok(Self {
            backend,
            groups,
            storage,
            policy: keep,
            virtual_ranks,
            blocks: blocks_of_ranks,
            slices: slices.clone(),
            rule,
            average,
            averaging,
            sdc_checks: audits,
            host,
            downloading: None,
            network,
            stage,
            host_units: None,
            units,
            tied_replicas,
            expected: Vec::new(),
            ended: Vec::new(),
            started: Vec::new(),
            replicating: Vec::new(),
            prefetch: Prefetch::default(),
            reuses: false,
            counts: None,
        })
    }

    /// Expects the virtual ranks of another division of them among ranks in the next steps.
    pub fn expect(&mut self, assignment: &VirtualRanks) {
        let data = &self.groups.step.data;
        let shards = self.groups.shard.size();
        if self.blocks.is_some() {
            let replicas = data.size() / shards;
            let assignment = VirtualRanks { replicas, shards, ..assignment.clone() };
            self.blocks = Some(BlockReduction::new(assignment, data.rank(), self.storage));
        }
        match &mut self.host_units {
            Some(HostUnits::Dense(units)) => units.expect(assignment),
            Some(HostUnits::Sparse(tables)) => tables.expect(assignment),
            None => {}
        }
    }

    /// Expects `virtual_ranks` virtual ranks of every rank in the next steps, not those of the layout.
    /// Their sums are not those of the layout.
    pub fn expect_virtual_ranks(&mut self, virtual_ranks: usize) {
        self.blocks = self.blocks.take().map(|blocks| blocks.with_equal_blocks(virtual_ranks));
    }

    /// Returns the group of ranks of this stage with different data.
    pub fn data(&self) -> &Group<B> {
        &self.groups.data
    }

    /// Returns the group of these ranks that compute a step together: all, or with local SGD those
    /// of one replica.
    pub fn step_data(&self) -> &Group<B> {
        &self.groups.step.data
    }

    /// Returns this rank among those that compute a step together.
    pub fn step_rank(&self) -> usize {
        self.groups.step.world.rank()
    }

    /// Returns the group of pipeline stages that compute the same data, in order.
    pub fn pipeline(&self) -> &Group<B> {
        &self.groups.pipeline
    }

    /// Returns the tensor-parallel group, if it has several ranks.
    pub fn tensor(&self) -> Option<&Group<B>> {
        Some(&self.groups.tensor).filter(|group| group.size() > 1)
    }

    /// Returns this rank's slices of the blocks.
    pub fn slices(&self) -> &TensorShards {
        &self.slices
    }

    /// Returns this rank's stage of the network.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Returns the names of the optimizer's buffers.
    pub fn state_names(&self) -> Vec<&'static str> {
        state_names(self.rule, self.average, self.averaging.and_then(|averaging| averaging.outer))
    }

    /// Returns the number of trained parameters of the network, without running statistics and
    /// padding.
    pub fn parameters(&self) -> u64 {
        self.network.iter().map(|unit| trained(&unit.tensors) as u64).sum()
    }

    /// Returns the layouts of all units of the network, including those of other stages.
    pub fn layouts(&self) -> &[UnitLayout] {
        &self.network
    }

    /// Returns the name of unit `unit` of the stage.
    pub fn name(&self, unit: usize) -> &Arc<str> {
        &self.units[unit].layout.name
    }

    /// Returns the time that this rank has waited for messages so far, in seconds.
    pub fn waited(&self) -> f64 {
        self.groups.data.stats().blocked
    }

    /// Starts a step, in which blocks of the stage take their turns in the order of `schedule`,
    /// which is the same on all ranks of the stage.
    pub fn begin_step(&mut self, schedule: StepSchedule) {
        if let Some(tables) = &mut self.host_units {
            tables.begin_step(schedule);
        }
        self.begin(param_prefetch::step(&self.stage.tied_slots(), schedule));
        // Buffers that are freed after use are soon reused for other units.
        self.reuses = schedule.micros() > 1 && self.policy.params == Lifetime::Step;
    }

    /// Starts a forward pass outside training, in which blocks of the stage take their turns once.
    pub fn begin_forward(&mut self) {
        if let Some(tables) = &mut self.host_units {
            tables.begin_forward();
        }
        self.begin(param_prefetch::forward(&self.stage.tied_slots()));
    }

    fn begin(&mut self, visits: Vec<BlockUse>) {
        self.prefetch = Prefetch::new(visits);
        self.backend.end_weight_reuse();
        self.reuses = false;
    }

    /// Returns the parameters of unit `unit`, whose turn it is, and of the unit that its block is
    /// tied to; all-gathers them if they are not in memory.
    ///
    /// # Errors
    /// Returns an error if the all-gather fails.
    pub fn params(&mut self, unit: usize) -> Result<Params<'_, B>> {
        let borrowed = self.stage.tied_imports[unit];
        self.fetch(BlockUse { own: unit, tied: borrowed.map(|loan| loan.slot) })?;
        let lent_section = borrowed.map_or(0, |loan| self.section(loan.slot));
        let own = self.full(unit)?;
        let lent = borrowed.map(|loan| self.full(loan.slot)).transpose()?;
        Ok(Params { own, section: self.section(unit), tied: lent, tied_section: lent_section })
    }

    /// Returns the parameters as [`Sharded::params`] does, and the gradients to add to.
    ///
    /// # Errors
    /// Returns an error if the all-gather fails, or the memory does not suffice.
    pub fn params_and_grads(&mut self, unit: usize) -> Result<(Params<'_, B>, Grads<'_, B>)> {
        let loan = self.stage.tied_imports[unit];
        self.fetch(BlockUse { own: unit, tied: loan.map(|loan| loan.slot) })?;
        let lent_section = loan.map_or(0, |loan| self.section(loan.slot));
        let own = &mut self.units[unit];
        let section = own.layout.section;
        let first = own.open_grads(&self.backend)?;
        let lent_first =
            loan.map_or(Ok(false), |loan| own.open_borrowed(&self.backend, loan.len))?;
        let (before, own) = self.units.split_at_mut(unit);
        let (own, after) =
            own.split_first_mut().ok_or_else(|| Error::internal("the unit does not exist"))?;
        let missing = || Error::internal("parameters or gradients are not in memory");
        let lent = match loan {
            None => None,
            Some(TiedImport { slot, .. }) => {
                let lender = match before.get(slot) {
                    Some(unit) => Some(&unit.params),
                    None => {
                        let replica = self.tied_replicas.get(slot - unit - 1 - after.len());
                        replica.map(|replica| &replica.params)
                    }
                };
                Some(B::all(lender.and_then(BufferState::get).ok_or_else(missing)?))
            }
        };
        let grads = own.grads.as_mut().ok_or_else(missing)?;
        Ok((
            Params {
                own: B::all(own.params.get().ok_or_else(missing)?),
                section,
                tied: lent,
                tied_section: lent_section,
            },
            Grads {
                own: B::all_mut(grads),
                first,
                tied: own.tied_grads.as_mut().map(B::all_mut),
                tied_first: lent_first,
                deferred: None,
            },
        ))
    }

    /// Returns the gradients of a unit for the deferred wgrad of this virtual rank; `first` is
    /// whether gradients that wgrad overwrites have no values yet.
    ///
    /// # Errors
    /// Returns an error if no backward has started the gradients.
    pub fn open_grads(&mut self, unit: usize, first: bool) -> Result<Grads<'_, B>> {
        let unit = &mut self.units[unit];
        let grads = unit
            .grads
            .as_mut()
            .ok_or_else(|| Error::internal("no backward has started these gradients"))?;
        let lent = unit.tied_grads.as_mut().map(B::all_mut);
        Ok(Grads { own: B::all_mut(grads), first, tied: lent, tied_first: first, deferred: None })
    }

    /// Ends a block's turn. Parameters that are freed after use are freed, unless the next turns
    /// need them.
    pub fn release(&mut self) {
        for index in self.prefetch.end_turn(self.policy.prefetch) {
            if self.policy.params == Lifetime::Use {
                *self.slot(index).1 = BufferState::Freed;
            }
        }
    }

    /// Takes the turn of a block without computing it, so that this rank takes part in the
    /// all-gathers of its parameters.
    ///
    /// # Errors
    /// Returns an error if the all-gather fails.
    pub fn skip_turn(&mut self, unit: usize) -> Result<()> {
        self.params(unit)?;
        self.release();
        Ok(())
    }

    /// Starts the all-gathers of the current turn and the prefetched ones, and waits for those of
    /// `visit`.
    fn fetch(&mut self, visit: BlockUse) -> Result<()> {
        debug_assert_eq!(
            self.prefetch.turn(),
            Some(visit),
            "blocks take their turns in the order of the pass"
        );
        // A rank was lost: the step will not end.
        self.groups.shard.check_interruption()?;
        // Compute waits for uploads that were started in earlier turns, but not for those started
        // below.
        self.arrived()?;
        let window: Vec<usize> = self.prefetch.window(self.policy.prefetch).collect();
        let is_late = visit.units().any(|index| matches!(self.slot(index).1, BufferState::Freed));
        window.into_iter().try_for_each(|index| self.start_all_gather(index))?;
        if is_late {
            self.arrived()?;
        }
        for index in visit.units() {
            let reuses = self.reuses;
            let backend = self.backend.clone();
            if let Some(params) = self.slot(index).1.wait()?
                && reuses
            {
                backend.begin_weight_reuse(B::all(params));
            }
        }
        Ok(())
    }

    /// Returns whether this rank has the complete parameters of its units, on the host.
    fn is_alone(&self) -> bool {
        let has_others = self.storage == Storage::Central && self.groups.replica.size() > 1;
        self.policy.on_host && self.groups.shard.size() == 1 && !has_others
    }

    /// Makes later compute wait for the uploads of parameters from the host.
    fn arrived(&self) -> Result<()> {
        match &self.host {
            Some(host) if self.is_alone() => host.wait_for_uploads(),
            _ => Ok(()),
        }
    }

    /// Returns the number of elements of a section of a slot's unit.
    fn section(&self, slot: usize) -> usize {
        match slot.checked_sub(self.units.len()) {
            None => self.units[slot].layout.section,
            Some(guest) => self.tied_replicas[guest].layout.section,
        }
    }

    /// Returns the full parameters of a slot, with its unit's layout.
    fn slot(&mut self, slot: usize) -> (&UnitLayout, &mut BufferState<B::Buf>) {
        let own = self.units.len();
        match self.units.get_mut(slot) {
            Some(Unit { layout, params, .. }) => (layout, params),
            None => {
                let TiedReplica { layout, params, .. } = &mut self.tied_replicas[slot - own];
                (layout, params)
            }
        }
    }

    /// Starts the all-gather of the full parameters of a slot, unless they are in memory or in
    /// flight.
    fn start_all_gather(&mut self, slot: usize) -> Result<()> {
        let alone = self.is_alone();
        let full = match slot.checked_sub(self.units.len()) {
            None => self.units[slot].contribution(&self.backend, alone)?,
            Some(guest) => self.tied_replicas[guest].contribution(&self.backend)?,
        };
        if let Some(full) = full {
            self.all_gather(slot, full);
        }
        Ok(())
    }

    /// Sends the updated owned part of full parameters to the ranks that do not own it: with
    /// central storage first to the other replicas, then to the other shards.
    fn distribute_params(&mut self, unit: usize) {
        let BufferState::InMemory(full) =
            std::mem::replace(&mut self.units[unit].params, BufferState::Freed)
        else {
            return;
        };
        let layout = &self.units[unit].layout;
        let full = self.gathered(layout, self.broadcast_by_owners(layout, full));
        self.units[unit].params = BufferState::InFlight(full);
    }

    /// Starts to send the owned part of a unit's parameters to the other replicas, if these own
    /// nothing.
    fn broadcast_by_owners(&self, layout: &UnitLayout, full: B::Buf) -> Pending<B::Buf> {
        match self.storage {
            Storage::Ranks => Pending::ready(full),
            Storage::Central => {
                let range = self.shard_range(layout);
                self.groups.replica.with_label(&layout.name).broadcast_range(full, range)
            }
        }
    }

    /// Starts the all-gather of the shards of a unit in each replica.
    fn gathered(&self, layout: &UnitLayout, full: Pending<B::Buf>) -> Pending<B::Buf> {
        let group = self.groups.shard.with_label(&layout.name);
        gather_shards(&group, full, layout, self.parts())
    }

    fn all_gather(&mut self, slot: usize, full: B::Buf) {
        let layout = self.slot(slot).0.clone();
        // Replicas of tied units of other stages have their own part.
        let is_own = slot < self.units.len() && self.policy.params == Lifetime::Use;
        let full =
            if is_own { self.broadcast_by_owners(&layout, full) } else { Pending::ready(full) };
        let full = self.gathered(&layout, full);
        *self.slot(slot).1 = BufferState::InFlight(full);
    }

    /// Returns the range of a unit that this shard has, regardless of which replica owns it.
    fn shard_of(&self, unit: usize) -> Range<usize> {
        self.shard_range(&self.units[unit].layout)
    }

    fn shard_range(&self, layout: &UnitLayout) -> Range<usize> {
        let (shard, shards) = (self.groups.shard.rank(), self.groups.shard.size());
        let parts = self.parts();
        layout.parts(share(parts, shard, shards), parts)
    }

    /// Returns whether this rank owns ranges of its units.
    fn owns(&self) -> bool {
        self.storage.owns(self.groups.replica.rank())
    }

    fn full(&self, slot: usize) -> Result<B::View<'_>> {
        let params = match slot.checked_sub(self.units.len()) {
            None => &self.units[slot].params,
            Some(guest) => &self.tied_replicas[guest].params,
        };
        params
            .get()
            .map(B::all)
            .ok_or_else(|| Error::internal("parameters were used before they were all-gathered"))
    }
}

/// Starts the all-gather of the shards of a unit of `parts` virtual shards, which they divide as equally as they
/// can.
fn gather_shards<B: Kernels>(
    shards: &Group<B>,
    full: Pending<B::Buf>,
    layout: &UnitLayout,
    parts: usize,
) -> Pending<B::Buf> {
    let count = shards.size();
    if parts.is_multiple_of(count) {
        return shards.all_gather_after(full, layout.padded);
    }
    let of_shard = |shard| layout.parts(share(parts, shard, count), parts);
    let collective = UnequalCollective {
        len: layout.padded,
        parts: (0..count).map(of_shard).collect(),
        terms: None,
        all_gathers: Vec::from([(0..count).collect()]),
    };
    shards.unequal(full, collective)
}
