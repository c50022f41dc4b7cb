//! The cost model: seconds of the kernels, collectives, messages and updates of a step, from rates.

use super::timeline::{StageTimes, StepTimes, UnitTimes};
use hpctrain_base::error::Result;
use hpctrain_base::layout::UnitLayout;
use hpctrain_base::mesh::{Axis, Mesh};
use hpctrain_comm::Operation;
use hpctrain_config::ResolvedConfig;
use hpctrain_nn::loans;
use hpctrain_parallel::{Lifetime, ReduceAfter, Stage};

/// Size of an f32 in bytes.
const F32: usize = size_of::<f32>();

/// The number of ranks in a group, and of the nodes they are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupExtent {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of nodes.
    pub nodes: usize,
}

impl GroupExtent {
    /// Returns the extent of rank `rank`'s group along `axes` of a mesh, with `per_node`
    /// consecutive ranks on each node.
    pub fn new(mesh: &Mesh, axes: &[Axis], rank: usize, per_node: usize) -> Self {
        let colors = mesh.colors(axes);
        let group: Vec<usize> =
            (0..colors.len()).filter(|other| colors[*other] == colors[rank]).collect();
        let mut nodes: Vec<usize> = group.iter().map(|rank| rank / per_node.max(1)).collect();
        nodes.dedup();
        Self { ranks: group.len(), nodes: nodes.len() }
    }
}

/// Seconds of a block for a micro-batch, including the communication of tensor parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BlockTimes {
    /// The forward.
    pub forward: f64,
    /// The backward, without recomputation.
    pub backward: f64,
    /// The wgrad part of the backward.
    pub weights: f64,
}

/// The speed of one rank of a machine, while all others are equally busy.
pub trait Rates {
    /// Returns the seconds of every block of a plan's network, for a micro-batch.
    fn passes(&self, plan: &ResolvedConfig) -> Result<Vec<BlockTimes>>;

    /// Returns the seconds to copy a micro-batch to the device and to compute its loss.
    fn micro(&self, plan: &ResolvedConfig) -> Result<f64>;

    /// Returns the seconds of a collective on a buffer of `bytes`, of f32 in reductions.
    fn collective(&self, operation: Operation, span: GroupExtent, bytes: usize) -> f64;

    /// Returns the seconds of a message between two ranks.
    fn message(&self, span: GroupExtent, bytes: usize) -> f64;

    /// Returns the seconds of the norm and the update of `elements` elements.
    fn update(&self, plan: &ResolvedConfig, elements: usize) -> f64;

    /// Returns the fraction of a collective's time that overlaps with computation.
    fn overlap(&self) -> f64;

    /// Returns the same for all-gathers before each use of parameters, after which computations
    /// also have to read the parameters again.
    fn param_overlap(&self) -> f64 {
        self.overlap()
    }
}

/// Returns the times of the parts of a plan's step, with `per_node` consecutive ranks on each node.
///
/// # Errors
/// Returns an error if the rates do not cover the plan.
pub fn step_times(
    plan: &ResolvedConfig,
    rates: &impl Rates,
    per_node: usize,
    on_host: bool,
) -> Result<StepTimes> {
    let mesh = &plan.mesh;
    let slices = plan.tensor_shards(0);
    let size = plan.config.precision.dtype.size(on_host);
    let blocks = plan.network.cpu_blocks(&slices);
    let loans = loans(&blocks);
    let passes = rates.passes(plan)?;
    let micro_and_loss = rates.micro(plan)?;
    let rows = plan.micro as usize * plan.network.context();
    let last = blocks.len() - 1;
    let stride = mesh.ranks() / mesh.pipeline;
    let mut stages = Vec::with_capacity(mesh.pipeline);
    for index in 0..mesh.pipeline {
        let stage = plan.stage(index, &loans);
        let rank = index * stride;
        let span = |axes: &[Axis]| GroupExtent::new(mesh, axes, rank, per_node);
        let shard = span(&[Axis::Shard]);
        let replica = span(&[Axis::Replica]);
        let mut units = Vec::with_capacity(stage.units.len());
        for unit in stage.units.clone() {
            let block = &blocks[unit];
            let padded =
                UnitLayout::sharded(block.name(), block.tensors(), plan.virtual_ranks, &slices)
                    .padded;
            let mut times = passes[unit];
            // The backward of the last block follows its forward: nothing of it is recomputed.
            if plan.config.parallel.recompute && unit != last {
                times.backward += times.forward;
            }
            units.push(unit_times(plan, rates, times, padded, size, [shard, replica]));
        }
        let next = blocks.get(stage.units.end);
        let message = next.map_or(0.0, |next| {
            let ends = [rank, rank + stride].map(|rank| rank / per_node.max(1));
            let nodes = if ends[0] == ends[1] { 1 } else { 2 };
            rates.message(
                GroupExtent { ranks: 2, nodes },
                slices.own(next.input_per_row()) * rows * size,
            )
        });
        // Embeddings on the host are looked up before the first block, and their gradient is
        // copied back after it: neither overlaps with computation.
        let embedding =
            if stage.takes_embedding_rows() { passes[0].forward + passes[0].backward } else { 0.0 };
        let micro = embedding + if stage.is_last() { micro_and_loss } else { 0.0 };
        let tied = tied_bytes(&stage).map(|(bytes, other)| {
            let ends = [rank, other * stride].map(|rank| rank / per_node.max(1));
            let nodes = if ends[0] == ends[1] { 1 } else { 2 };
            rates.message(GroupExtent { ranks: 2, nodes }, bytes)
        });
        let tied = tied.sum();
        stages.push(StageTimes { stage, units, micro, message, tied });
    }
    let world = GroupExtent { ranks: mesh.ranks(), nodes: mesh.ranks().div_ceil(per_node.max(1)) };
    let summary = if world.ranks > 1 {
        rates.collective(Operation::AllGather, world, F32 * world.ranks)
    } else {
        0.0
    };
    let keep = plan.sharding_policy();
    debug_assert!(
        keep.params == Lifetime::Step || mesh.shard > 1 || keep.on_host,
        "parameters live per use without shards"
    );
    let schedule = plan.step_schedule(0);
    Ok(StepTimes {
        stages,
        schedule,
        keep,
        shards: mesh.shard > 1,
        summary,
        overlap: rates.overlap(),
        param_overlap: rates.param_overlap(),
    })
}

/// Iterates over the gradients of tied parameters that a stage sends or receives for a virtual rank:
/// their bytes, and the other stage.
fn tied_bytes(stage: &Stage) -> impl Iterator<Item = (usize, usize)> {
    let sent = stage.tied_imports.iter().flatten().filter_map(|tied| Some((tied.len, tied.from?)));
    let received = stage.tied_exports.iter().map(|tied| (tied.len, tied.to));
    sent.chain(received).map(|(len, other)| (F32 * len, other))
}

/// Returns the times of a unit of `padded` elements with parameters of `size` bytes, from those of
/// its block, on a rank with these groups of shards and replicas.
fn unit_times(
    plan: &ResolvedConfig,
    rates: &impl Rates,
    block: BlockTimes,
    padded: usize,
    size: usize,
    [shard, replica]: [GroupExtent; 2],
) -> UnitTimes {
    let collective = |operation, span: GroupExtent, bytes: usize| {
        if span.ranks == 1 { 0.0 } else { rates.collective(operation, span, bytes) }
    };
    let owned = plan.assignment().largest_shard(padded);
    // Ranks with several blocks of virtual ranks send the sum of each.
    let sums = match plan.reduce_after {
        ReduceAfter::StepInBlocks => plan.assignment().blocks(0, 0).len(),
        ReduceAfter::Step | ReduceAfter::MicroBatch => 1,
    };
    let of_gradient = sums * plan.sharding_policy().reduce_dtype.size();
    UnitTimes {
        forward: block.forward,
        backward: block.backward,
        weights: block.weights,
        gather: collective(Operation::AllGather, shard, padded * size),
        reduce_scatter: collective(Operation::ReduceScatter, shard, padded * of_gradient),
        all_reduce: collective(Operation::AllReduce, replica, owned * of_gradient),
        update: rates.update(plan, owned),
    }
}
