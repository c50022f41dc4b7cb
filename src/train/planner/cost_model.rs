//! Seconds of the pieces of a step, from rates: of kernels, collectives, messages and updates.

use super::timeline::{StageTimes, StepTimes, UnitTimes};
use hpctrain_base::error::Result;
use hpctrain_base::layout::UnitLayout;
use hpctrain_base::mesh::{Axis, Mesh};
use hpctrain_comm::Operation;
use hpctrain_config::ResolvedConfig;
use hpctrain_nn::loans;
use hpctrain_parallel::Lifetime;

/// Bytes of an f32.
const F32: usize = size_of::<f32>();

/// The ranks of an exchange, and their nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupExtent {
    /// Ranks.
    pub ranks: usize,
    /// Nodes that they are on.
    pub nodes: usize,
}

impl GroupExtent {
    /// The group of rank `rank` along `axes` of a mesh, on nodes with so many consecutive ranks
    /// each.
    pub fn of(mesh: &Mesh, axes: &[Axis], rank: usize, per_node: usize) -> Self {
        let colors = mesh.colors(axes);
        let group: Vec<usize> =
            (0..colors.len()).filter(|other| colors[*other] == colors[rank]).collect();
        let mut nodes: Vec<usize> = group.iter().map(|rank| rank / per_node.max(1)).collect();
        nodes.dedup();
        Self { ranks: group.len(), nodes: nodes.len() }
    }
}

/// Seconds of a block for a micro-batch, in which ranks that share it wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Passes {
    /// Its forward.
    pub forward: f64,
    /// Its backward; without a forward that is computed again.
    pub backward: f64,
    /// Part of the backward: gradients of weights.
    pub weights: f64,
}

/// The speed of a machine, of one rank while all others are as busy.
pub trait Rates {
    /// Every block of a plan's network, for one of its micro-batches.
    fn passes(&self, plan: &ResolvedConfig) -> Result<Vec<Passes>>;

    /// A micro-batch that is brought to the device, and its loss.
    fn micro(&self, plan: &ResolvedConfig) -> Result<f64>;

    /// A collective on a buffer of so many bytes, of f32 where it adds.
    fn collective(&self, operation: Operation, span: GroupExtent, bytes: usize) -> f64;

    /// A message between two ranks.
    fn message(&self, span: GroupExtent, bytes: usize) -> f64;

    /// The norm and the update of so many elements.
    fn update(&self, plan: &ResolvedConfig, elements: usize) -> f64;

    /// Part of a collective's time that takes nothing from computations beside it.
    fn beside(&self) -> f64;

    /// The same for gathers of parameters that live for their use, which computations also read
    /// anew.
    fn beside_uses(&self) -> f64 {
        self.beside()
    }
}

/// The pieces of a plan's step, with so many consecutive ranks on each node.
///
/// # Errors
/// The rates do not cover the plan.
pub fn step_times(
    plan: &ResolvedConfig,
    rates: &impl Rates,
    per_node: usize,
    on_host: bool,
) -> Result<StepTimes> {
    let mesh = &plan.mesh;
    let slices = plan.slices(0);
    let size = plan.config.precision.dtype.size(on_host);
    let blocks = plan.network.cpu_blocks(&slices);
    let loans = loans(&blocks);
    let passes = rates.passes(plan)?;
    let of_micro = rates.micro(plan)?;
    let rows = plan.micro as usize * plan.network.context();
    let last = blocks.len() - 1;
    let stride = mesh.ranks() / mesh.pipeline;
    let mut stages = Vec::with_capacity(mesh.pipeline);
    for index in 0..mesh.pipeline {
        let stage = plan.stage(index, &loans);
        let rank = index * stride;
        let span = |axes: &[Axis]| GroupExtent::of(mesh, axes, rank, per_node);
        let shard = span(&[Axis::Shard]);
        let replica = span(&[Axis::Replica]);
        let collective = |operation, span: GroupExtent, elements: usize, size: usize| {
            if span.ranks == 1 { 0.0 } else { rates.collective(operation, span, elements * size) }
        };
        let of_unit = |unit: usize| {
            let block = &blocks[unit];
            let padded =
                UnitLayout::sliced(block.name(), block.tensors(), plan.virtual_ranks, &slices)
                    .padded;
            let owned = padded / mesh.shard;
            let Passes { forward, backward, weights } = passes[unit];
            // The last block's backward begins at once: nothing of it is computed again.
            let again = if plan.config.parallel.recompute && unit != last { forward } else { 0.0 };
            UnitTimes {
                forward,
                backward: backward + again,
                weights,
                gather: collective(Operation::AllGather, shard, padded, size),
                reduce: collective(Operation::ReduceScatter, shard, padded, F32)
                    + collective(Operation::AllReduce, replica, owned, F32),
                update: rates.update(plan, owned),
            }
        };
        let units: Vec<UnitTimes> = stage.units.clone().map(of_unit).collect();
        let next = blocks.get(stage.units.end);
        let message = next.map_or(0.0, |next| {
            let ends = [rank, rank + stride].map(|rank| rank / per_node.max(1));
            let nodes = if ends[0] == ends[1] { 1 } else { 2 };
            rates.message(
                GroupExtent { ranks: 2, nodes },
                slices.own(next.input_per_row()) * rows * size,
            )
        });
        // Rows of tables on the host come before all, and their gradient goes there after all:
        // nothing hides either.
        let of_rows = if stage.takes_rows() { passes[0].forward + passes[0].backward } else { 0.0 };
        let micro = of_rows + if stage.is_last() { of_micro } else { 0.0 };
        stages.push(StageTimes { stage, units, micro, message });
    }
    let world = GroupExtent { ranks: mesh.ranks(), nodes: mesh.ranks().div_ceil(per_node.max(1)) };
    let summary = if world.ranks > 1 {
        rates.collective(Operation::AllGather, world, F32 * world.ranks)
    } else {
        0.0
    };
    let keep = plan.residency();
    debug_assert!(
        keep.params == Lifetime::Step || mesh.shard > 1 || keep.on_host,
        "one rank owns all it has"
    );
    let schedule = plan.step_schedule(0);
    let beside = rates.beside();
    let beside_uses = rates.beside_uses();
    Ok(StepTimes { stages, schedule, keep, shards: mesh.shard > 1, summary, beside, beside_uses })
}
