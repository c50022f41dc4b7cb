//! Estimates the memory of a rank, before anything is allocated.

use super::tables::HostTables;
use hpctrain_base::layout::{TensorShards, UnitLayout};
use hpctrain_comm::{Comm, DeviceTransport, UNEQUAL_SCRATCH};
use hpctrain_config::ResolvedConfig;
use hpctrain_config::telemetry::startup_summary::Estimate;
use hpctrain_data::{SampleSizes, Source};
use hpctrain_device::{Backend, Kernels, MemoryKind};
use hpctrain_nn::{Blocks, loans};
use hpctrain_parallel::{
    self as parallel, Lifetime, MemoryMoment, MemoryTimeline, ReduceAfter, Stage, StepPosition,
    StepSchedule, Storage,
};

/// Bytes of an f32.
pub(super) const F32: usize = size_of::<f32>();

/// Measured growth of a process after the start, outside the categories: packed operands of
/// matmuls, message buffers of MPI, slack of the allocator. It does not depend on the model.
const GROWTH: usize = 7 << 20;

/// Memory in use that does not depend on the plan.
#[derive(Debug, Clone, Copy)]
pub struct BaselineMemory {
    /// Maximum bytes of message buffers.
    pub messages: usize,
    /// Whether message buffers are on the device that computes.
    pub messages_on_device: bool,
    /// Resident bytes of the process.
    pub resident: usize,
    /// Maximum bytes that data sets cache.
    pub cache: usize,
    /// The number of ranks of other nodes whose in-memory checkpoints a rank keeps.
    pub foreign_ranks: usize,
    /// Bytes of earlier in-memory checkpoints on this node, which those of the run replace.
    pub replaced: usize,
}

impl BaselineMemory {
    /// Returns the present memory of this process, which sends its messages by `comm` and reads
    /// these data sets.
    pub fn now<B: Backend>(comm: &Comm<B>, data: &[&dyn Source]) -> Self {
        let messages_on_device =
            comm.device_transport().is_some_and(DeviceTransport::uses_device_memory);
        let cache = data.iter().map(|dataset| dataset.cache_limit()).sum();
        Self {
            messages: comm.staging(),
            messages_on_device,
            resident: resident().0,
            cache,
            foreign_ranks: usize::from(comm.world().nodes() > 1),
            replaced: 0,
        }
    }
}

/// Live bytes of the memory that is allocated and freed within a step.
#[derive(Debug, Clone, Copy, Default)]
struct Alive {
    parameters: usize,
    gradients: usize,
    activations: usize,
}

impl Alive {
    fn total(self) -> usize {
        self.parameters + self.gradients + self.activations
    }

    /// Returns the maximum of each category over both moments.
    fn most(self, other: Self) -> Self {
        Self {
            parameters: self.parameters.max(other.parameters),
            gradients: self.gradients.max(other.gradients),
            activations: self.activations.max(other.activations),
        }
    }
}

/// Returns the largest [`estimate`] over all pipeline stages, by the memory of the GPU if ranks
/// compute on one, else by that of the host.
pub fn worst<B: Kernels>(plan: &ResolvedConfig, held: BaselineMemory) -> Estimate {
    let others = (1..plan.mesh.pipeline).map(|stage| estimate::<B>(plan, stage, held));
    others.fold(estimate::<B>(plan, 0, held), |most, one| {
        if (one.gpu(), one.host()) > (most.gpu(), most.host()) { one } else { most }
    })
}

/// Estimates the memory of a rank in pipeline stage `stage`, from the plan alone. A GPU has one
/// pool, so its estimate is the peak over the moments of a step. On the host every category keeps
/// its own peak.
pub fn estimate<B: Kernels>(plan: &ResolvedConfig, stage: usize, held: BaselineMemory) -> Estimate {
    let BaselineMemory { messages, messages_on_device, resident, cache, foreign_ranks, .. } = held;
    let size = plan.config.precision.dtype.size(B::ON_HOST);
    let slices = plan.tensor_shards(0);
    let mut blocks = plan.network.tensor_parallel_blocks::<B>(&slices);
    let schedule = plan.step_schedule(stage);
    let stage = plan.stage(stage, &loans(&blocks));
    let of_unit = |unit: usize| {
        let block = &blocks[unit];
        UnitLayout::sharded(block.name(), block.tensors(), plan.virtual_ranks, &slices)
    };
    let tables = stage
        .takes_embedding_rows()
        .then(|| HostTables::new(plan, of_unit(0), blocks[1].input_per_row()));
    let slots: Vec<usize> = stage.slots().map(|unit| of_unit(unit).padded).collect();
    let padded = &slots[..stage.units.len()];
    let next = blocks.get(stage.units.end).map(|block| slices.own(block.input_per_row()));
    blocks.truncate(stage.units.end);
    blocks.drain(..stage.units.start);
    let all: usize = padded.iter().sum();
    let ranks = plan.largest_assignment();
    let owned = ranks.largest_shard(all);
    let offloads = plan.config.offload.optimizer;
    let has_master_weights =
        !offloads && (plan.sharding_policy().params == Lifetime::Use || size < F32);
    let master_weights = if has_master_weights { owned * F32 } else { 0 };
    let outer = plan.local_sgd.and_then(|averaging| averaging.outer);
    let states = parallel::state_names(Some(plan.update_rule), plan.ema, outer).len();
    let state = states * owned;
    // An outer optimizer also keeps the parameters at the last average, which are not saved.
    let kept = states + usize::from(outer.is_some());
    let here = plan.replicas_per_rank();
    let tied_replicas = ranks.largest_shard(slots.iter().sum::<usize>() - all) * size;
    let tied_replicas =
        if plan.sharding_policy().params == Lifetime::Use { tied_replicas } else { 0 };
    // Full parameters that the other replicas of this rank keep: all, or those gathered ahead.
    let gathered = match plan.sharding_policy().params {
        Lifetime::Step => slots.len(),
        Lifetime::Use => plan.sharding_policy().prefetch.min(padded.len()),
    };
    let resting = (here - 1) * slots[..gathered].iter().sum::<usize>() * size;
    let moments = moments(plan, &blocks, &slices, &stage, schedule, &slots, next);
    let alive = match B::ON_HOST {
        true => moments.into_iter().fold(Alive::default(), Alive::most),
        false => moments.into_iter().max_by_key(|moment| moment.total()).unwrap_or_default(),
    };

    let mut device = [0; MemoryKind::ALL.len()];
    device[MemoryKind::Parameters as usize] =
        alive.parameters + resting + here * (master_weights + tied_replicas);
    device[MemoryKind::Gradients as usize] = alive.gradients;
    let constants: usize = blocks.iter().map(|block| block.constants()).sum();
    device[MemoryKind::Activations as usize] = alive.activations + constants * F32;
    device[MemoryKind::Workspace as usize] = B::WORKSPACE;
    if schedule.micros() > 1 && plan.sharding_policy().params == Lifetime::Step {
        // The token embedding is an operand of a matmul only if the head is tied to it.
        let has_lookup_only = plan.network.is_language()
            && stage.units.start == 0
            && !stage.tied_slots().contains(&Some(0));
        let multiplied = slots.iter().skip(usize::from(has_lookup_only)).sum();
        let rows = plan.micro as usize * plan.network.context();
        device[MemoryKind::Workspace as usize] += B::reuse_bytes(multiplied, rows);
    }
    let mut host = [0; MemoryKind::ALL.len()];
    match offloads {
        true => {
            host[MemoryKind::Offloaded as usize] = here * parallel::offloaded_bytes(kept, owned)
        }
        false => device[MemoryKind::Optimizer as usize] = here * kept * owned * F32,
    }
    if let (true, Some(_)) = (offloads, plan.local_sgd) {
        // The buffers of one unit that are being averaged.
        let averaged = 1 + parallel::state_names(Some(plan.update_rule), plan.ema, None).len();
        host[MemoryKind::Offloaded as usize] +=
            averaged * ranks.largest_shard(*padded.iter().max().unwrap_or(&0)) * F32;
    }
    if plan.config.offload.activations {
        let keep = plan.sharding_policy();
        let timeline =
            MemoryTimeline { stage: &stage, sizes: &slots, ranks: &ranks, policy: keep, schedule };
        host[MemoryKind::Offloaded as usize] += inputs_on_host(plan, &blocks, &slices, &timeline);
    }
    if let Some(tables) = &tables {
        host[MemoryKind::Offloaded as usize] += tables.bytes(size, kept);
    }
    let carrier = if messages_on_device { &mut device } else { &mut host };
    let terms = match plan.reduce_after {
        ReduceAfter::StepInBlocks => UNEQUAL_SCRATCH,
        ReduceAfter::Step | ReduceAfter::MicroBatch => 0,
    };
    carrier[MemoryKind::Communication as usize] = messages + terms;
    // Rows may have weights. Features and values on a device count as activations.
    let sizes = SampleSizes { weights: 1, ..plan.samples.sizes(plan.network.context()) };
    let of_host = sizes.all().into_iter().sum::<usize>() * size_of::<u32>();
    let of_device =
        (if tables.is_some() { 0 } else { sizes.ids } + sizes.classes) * size_of::<u32>();
    // Batches that are read ahead, one that is being read, and one in use.
    host[MemoryKind::Data as usize] =
        cache + (plan.config.data.prefetch + 2) * plan.micro as usize * of_host;
    device[MemoryKind::Data as usize] = plan.micro.max(plan.config.eval.batch) as usize * of_device;
    // Replicas divide a copy of parameters and state among themselves, except with central storage.
    let copies =
        if plan.config.parallel.storage == Storage::Central { 1 } else { plan.mesh.replica };
    let of_tables = tables.as_ref().map_or(0, |tables| tables.saved(states, copies));
    let copy = ((owned + state).div_ceil(copies) + of_tables) * F32;
    if plan.config.checkpoint.async_save {
        host[MemoryKind::Checkpoint as usize] = copy;
    }
    let in_memory = &plan.config.memory_checkpoint;
    if in_memory.every.is_on() {
        // Those of ranks of other nodes are as many, and one is sent while others are received.
        let slots = in_memory.slots() * (1 + foreign_ranks);
        host[MemoryKind::MemoryCheckpoint as usize] = slots * copy;
        if foreign_ranks > 0 {
            let carrier = if B::ON_HOST { &mut host } else { &mut device };
            carrier[MemoryKind::MemoryCheckpoint as usize] += (1 + foreign_ranks) * copy;
        }
    }
    // At the start, and when a checkpoint is written without async_save, one unit at a time is
    // copied to the host.
    let of_tables = tables.as_ref().map(HostTables::copied_at_once);
    let staging = padded.iter().copied().chain(of_tables).max().unwrap_or(0) * F32;
    let (host, gpu) = match B::ON_HOST {
        true => (std::array::from_fn(|what| host[what] + device[what]), None),
        false => (host, Some(device)),
    };
    Estimate { host, gpu, staging, runtime: resident + GROWTH }
}

/// Returns true if the input of block `block` of a stage's `blocks` is offloaded until its
/// backward. The last block's is not, since its backward follows at once.
fn is_offloaded(plan: &ResolvedConfig, stage: &Stage, blocks: usize, block: usize) -> bool {
    plan.config.offload.activations && !(stage.is_last() && block + 1 == blocks)
}

/// Returns the host bytes for the offloaded inputs of all micro-batches in flight.
fn inputs_on_host<B: Kernels>(
    plan: &ResolvedConfig,
    blocks: &Blocks<B>,
    slices: &TensorShards,
    timeline: &MemoryTimeline<'_>,
) -> usize {
    let offloaded = blocks
        .iter()
        .enumerate()
        .filter(|(block, _)| is_offloaded(plan, timeline.stage, blocks.len(), *block));
    let rows = plan.micro as usize * plan.network.context();
    let size = plan.config.precision.dtype.size(B::ON_HOST);
    let of_micro: usize = offloaded
        .map(|(_, block)| (rows * slices.own(block.input_per_row()) * size).next_multiple_of(F32))
        .sum();
    let waiting = timeline.step().into_iter().map(|moment| moment.waiting).max().unwrap_or(0);
    (waiting + 1) * of_micro
}

/// Returns the moments of training and of evaluations in a stage with these blocks and slots. Rows
/// of its output have `next` elements, or are the network's output if `next` is `None`.
fn moments<B: Kernels>(
    plan: &ResolvedConfig,
    blocks: &Blocks<B>,
    slices: &TensorShards,
    stage: &Stage,
    schedule: StepSchedule,
    slots: &[usize],
    next: Option<usize>,
) -> Vec<Alive> {
    let ranks = plan.largest_assignment();
    let timeline = MemoryTimeline {
        stage,
        sizes: slots,
        ranks: &ranks,
        policy: plan.sharding_policy(),
        schedule,
    };
    let bytes = ActivationBytes::new(plan, blocks, slices, stage, next);
    let kept = bytes.kept();
    // One message is received while another is sent. More may wait for a slow later stage, at most
    // as many as there are later stages.
    let messages = match stage.count {
        0 | 1 => 0,
        _ => bytes.input[0].max(if stage.is_last() { 0 } else { bytes.of_stage }),
    };
    let rows = |samples: u64| samples as usize * plan.network.context();
    let training = timeline
        .step()
        .into_iter()
        .map(|moment| bytes.alive(moment, rows(plan.micro), &kept, messages));
    let nothing = vec![0; blocks.len() + 1];
    let evaluated = rows(plan.config.eval.batch);
    let evaluation =
        timeline.forward().into_iter().map(|moment| bytes.alive(moment, evaluated, &nothing, 0));
    let average =
        plan.local_sgd.map(|_| average(plan, B::ON_HOST, &slots[..stage.units.len()], slots));
    let of_loss = if stage.is_last() { custom_loss::<B>(plan) } else { [0; 2] };
    let with_loss = |mut moment: Alive, bytes: usize| {
        moment.activations += bytes;
        moment
    };
    let training = training.map(|moment| with_loss(moment, of_loss[0]));
    let evaluation = evaluation.map(|moment| with_loss(moment, of_loss[1]));
    training.chain(evaluation).chain(average).collect()
}

/// Returns the bytes that a custom loss allocates at once in training and in an evaluation; zeros
/// for the others, which work in place.
fn custom_loss<B: Kernels>(plan: &ResolvedConfig) -> [usize; 2] {
    let objective = plan.objective::<B>();
    let rows = |samples: u64| samples as usize * plan.network.context();
    // Its shapes were checked when the configuration was resolved.
    let bytes = |rows: usize| objective.peak_elements(rows).unwrap_or(0) * F32;
    let evaluation = bytes(rows(plan.config.eval.batch));
    if !objective.over_batch() {
        return [bytes(rows(plan.micro)), evaluation];
    }
    let of_batch = plan.tokens_per_replica() as usize;
    // The gathered outputs and targets in two orders, and those of this rank's micro-batches.
    let sizes = SampleSizes { weights: 1, ..plan.samples.sizes(plan.network.context()) };
    let targets = sizes.classes + sizes.values + sizes.weights;
    let samples = of_batch / plan.network.context();
    let gathered = 3 * (of_batch * plan.network.outputs() + samples * targets) * F32;
    // The inputs of all its micro-batches, which wait for their backwards.
    let inputs = samples / plan.mesh.shard * (sizes.features + sizes.ids) * F32;
    [bytes(of_batch) + gathered + inputs, evaluation]
}

/// Bytes per row of the activations of a stage, by block.
pub(super) struct ActivationBytes<'a> {
    plan: &'a ResolvedConfig,
    stage: &'a Stage,
    /// Bytes of an element.
    size: usize,
    input: Vec<usize>,
    saved: Vec<usize>,
    /// Scratch of the backward.
    scratch: Vec<usize>,
    /// Scratch of the forward.
    forward: Vec<usize>,
    /// Scratch of a backward whose wgrad is deferred.
    deferring: Vec<usize>,
    /// Bytes that deferred wgrads keep, summed over the blocks before each block, then over all.
    deferred_before: Vec<usize>,
    /// The output of the stage.
    of_stage: usize,
}

impl<'a> ActivationBytes<'a> {
    /// Returns the bytes for a stage with these blocks. Rows of its output have `next` elements, or
    /// are the network's output if `next` is `None`.
    pub(super) fn new<B: Kernels>(
        plan: &'a ResolvedConfig,
        blocks: &Blocks<B>,
        slices: &TensorShards,
        stage: &'a Stage,
        next: Option<usize>,
    ) -> Self {
        let size = plan.config.precision.dtype.size(B::ON_HOST);
        // The logits include the padding of their rows, and their losses.
        let is_padded = blocks.last().is_some_and(|block| block.pads_output());
        let outputs = slices.held.clone().map(|virtual_rank| {
            let columns = slices.share(plan.network.outputs(), virtual_rank).len();
            if is_padded { B::row_stride(columns) } else { columns }
        });
        let of_output = outputs.sum::<usize>() * size + F32;
        Self {
            plan,
            stage,
            size,
            input: blocks.iter().map(|block| slices.own(block.input_per_row()) * size).collect(),
            saved: blocks
                .iter()
                .map(|block| block.saved_elems_per_row() * size + block.saved_f32_per_row() * F32)
                .collect(),
            scratch: blocks.iter().map(|block| block.scratch_per_row() * size).collect(),
            forward: blocks.iter().map(|block| block.forward_scratch_per_row() * size).collect(),
            deferring: blocks.iter().map(|block| block.deferred_scratch_per_row() * size).collect(),
            deferred_before: blocks.iter().fold(vec![0], |mut sums, block| {
                sums.push(sums[sums.len() - 1] + block.deferred_per_row() * size);
                sums
            }),
            of_stage: next.map_or(of_output, |next| next * size),
        }
    }

    /// Returns the bytes that the blocks before each block save, then those of all.
    pub(super) fn kept(&self) -> Vec<usize> {
        let mut kept = vec![0; self.input.len() + 1];
        for block in 0..self.input.len() {
            let stays = if self.is_offloaded(block) { 0 } else { self.input[block] };
            let saved = if self.recomputes(block) { 0 } else { self.saved[block] };
            kept[block + 1] = kept[block] + stays + saved;
        }
        kept
    }

    /// Returns the memory at a moment with micro-batches of `rows` rows, when the blocks before
    /// each block have saved `kept` bytes per row, and buffers of messages have `messages`.
    fn alive(&self, moment: MemoryMoment, rows: usize, kept: &[usize], messages: usize) -> Alive {
        let MemoryMoment { when, params, grads, waiting, deferred } = moment;
        let Self { input, saved, scratch, forward, deferring, deferred_before, .. } = self;
        let last = input.len() - 1;
        let of_chunk = match when {
            StepPosition::Forward(block) if self.is_chunked(block, rows) => {
                saved[block] + self.output(block) + forward[block]
            }
            StepPosition::Backward(block) if self.is_chunked(block, rows) => {
                saved[block] + scratch[block]
            }
            _ => 0,
        };
        let of_row = match when {
            StepPosition::Forward(block) if self.is_chunked(block, rows) => {
                kept[block] + input[block]
            }
            StepPosition::Backward(block) if self.is_chunked(block, rows) => {
                kept[block] + self.fetched(block) + 2 * input[block]
            }
            StepPosition::Forward(block) => {
                kept[block] + input[block] + saved[block] + self.output(block) + forward[block]
            }
            StepPosition::Backward(block) => {
                let work = scratch[block].max(self.recomputed(block));
                kept[block] + self.fetched(block) + input[block] + saved[block] + work
            }
            StepPosition::BackwardInput(block) => {
                let of_later_blocks = deferred_before[last + 1] - deferred_before[block + 1];
                let work = deferring[block].max(self.recomputed(block));
                kept[block]
                    + self.fetched(block)
                    + input[block]
                    + saved[block]
                    + work
                    + of_later_blocks
            }
            StepPosition::BackwardWeight(block) => deferred_before[block + 1],
            // The gradient of the input is as large as the input.
            StepPosition::After(block) => kept[block] + self.fetched(block) + 2 * input[block],
        };
        let of_waiting = waiting * kept[last + 1] + deferred * deferred_before[last + 1];
        let of_row = of_row + of_waiting + messages;
        // The rows of a chunk's input are a copy.
        let of_chunk = if of_chunk > 0 { of_chunk + input[last] } else { 0 };
        let activations = rows * of_row + self.chunk_rows(rows) * of_chunk;
        Alive { parameters: params * self.size, gradients: grads * F32, activations }
    }

    /// Returns the output of a block.
    fn output(&self, block: usize) -> usize {
        self.input.get(block + 1).copied().unwrap_or(self.of_stage)
    }

    /// Returns true if the input of a block is offloaded until its backward.
    pub(super) fn is_offloaded(&self, block: usize) -> bool {
        is_offloaded(self.plan, self.stage, self.input.len(), block)
    }

    /// Returns the input of a block.
    pub(super) fn input_bytes(&self, block: usize) -> usize {
        self.input[block]
    }

    /// Returns the input of the previous block if it is copied back during the backward of `block`,
    /// else 0.
    fn fetched(&self, block: usize) -> usize {
        let before = block.checked_sub(1).filter(|before| self.is_offloaded(*before));
        before.map_or(0, |before| self.input[before])
    }

    /// Returns true if the forward of a block is recomputed before its backward.
    fn recomputes(&self, block: usize) -> bool {
        self.plan.config.parallel.recompute && !self.is_last(block)
    }

    /// Returns the memory of a block's recomputed forward, which has its output in addition to the
    /// gradient of the output.
    fn recomputed(&self, block: usize) -> usize {
        if self.recomputes(block) { 2 * self.output(block) + self.forward[block] } else { 0 }
    }

    /// Returns true if a block is the last of the network.
    fn is_last(&self, block: usize) -> bool {
        self.stage.is_last() && block + 1 == self.input.len()
    }

    /// Returns the rows of a chunk of the loss.
    fn chunk_rows(&self, rows: usize) -> usize {
        match self.plan.loss_chunk_tokens {
            0 => rows,
            some => rows.min(some),
        }
    }

    /// Returns true if a block computes its rows in chunks. With chunked cross-entropy, the last
    /// block has a chunk of rows in addition to its input and, in the backward, the gradient of the
    /// input.
    fn is_chunked(&self, block: usize, rows: usize) -> bool {
        self.is_last(block) && self.chunk_rows(rows) < rows
    }
}

/// Returns the memory during the average of replicas, where units have `padded` elements and slots
/// `slots`: the shares of one unit are added on this rank while the sum of the previous unit is
/// sent. Gradients that live for the whole step are allocated but not used.
fn average(plan: &ResolvedConfig, on_host: bool, padded: &[usize], slots: &[usize]) -> Alive {
    let size = plan.config.precision.dtype.size(on_host);
    let buffers = 1 + parallel::state_names(Some(plan.update_rule), plan.ema, None).len();
    let share = |unit: usize| buffers * padded[unit] / plan.mesh.shard * F32;
    let added_here = plan.replicas_per_rank().ilog2() as usize + 1;
    let most = (0..padded.len())
        .map(|unit| added_here * share(unit) + unit.checked_sub(1).map_or(0, share));
    let idle = match plan.sharding_policy().grads {
        Lifetime::Step => padded.iter().sum::<usize>() * F32,
        Lifetime::Use => 0,
    };
    let parameters = match plan.sharding_policy().params {
        Lifetime::Step => slots.iter().sum::<usize>() * size,
        Lifetime::Use => 0,
    };
    Alive { parameters, gradients: idle + most.max().unwrap_or(0), activations: 0 }
}

/// Returns the present and the peak resident bytes of this process.
pub fn resident() -> (usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0) * 1024
    };
    (bytes("VmRSS:"), bytes("VmHWM:"))
}
