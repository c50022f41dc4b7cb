//! The groups of a run, and the algorithms of their collectives.

use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_base::mesh::Mesh;
use hpctrain_base::safe_open;
use hpctrain_comm::{
    Algorithm, AlgorithmTable, Comm, DeviceTransport, Group, Operation, connect_ranks, measure,
};
use hpctrain_config::ResolvedConfig;
use hpctrain_device::{Element, Kernels};
use hpctrain_nn::Blocks;
use hpctrain_parallel::{Groups, ReduceAfter, Storage};

/// Collectives of shards on units.
const SHARD_OPERATIONS: [Operation; 2] = [Operation::ReduceScatter, Operation::AllGather];

/// Collectives of tensor-parallel ranks on activations.
const TENSOR_OPERATIONS: [Operation; 3] =
    [Operation::AllReduce, Operation::ReduceScatter, Operation::AllGather];

/// Returns the collectives of replicas on units.
fn replica_operations(storage: Storage) -> &'static [Operation] {
    match storage {
        Storage::Ranks => &[Operation::AllReduce],
        Storage::Central => &[Operation::Reduce, Operation::Broadcast],
    }
}

/// The content of `collectives.json`: the result of a benchmark, and all that it depends on.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct SavedChoices {
    key: Key,
    shard: AlgorithmTable,
    replica: AlgorithmTable,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Key {
    mesh: Mesh,
    storage: Storage,
    library: String,
    shared_memory: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<DeviceTransport>,
    reproducible: bool,
    /// Bytes of the largest unit.
    largest: usize,
    /// Version of the rule of choice. Tables of another version are measured again.
    #[serde(default)]
    way: u32,
}

/// The present version of the rule of choice. Version 0 used the fastest at the largest measured
/// size for all larger ones; version 1 let the start of NCCL count as time of the measurement; version 2 did not measure CUDA IPC
/// beside NCCL.
const RULE_VERSION: u32 = 3;

/// The chosen algorithms of the collectives of a run.
pub struct CollectiveChoices {
    /// A line for display. Empty if there are no collectives.
    pub summary: String,
    /// The result of a new benchmark, to be written to `collectives.json`.
    pub to_save: Option<String>,
}

/// Connects the devices of ranks that will exchange, where that takes device memory: NCCL allocates
/// buffers for each pair of ranks. Returns the bytes that it has taken on this rank's device.
/// Collective over the world.
///
/// # Errors
/// Returns an error if a message between ranks fails, or the device has too little memory.
pub fn connect_devices<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    backend: &B,
) -> Result<usize> {
    if comm.size() == 1 || comm.device_transport() != Some(DeviceTransport::Nccl) {
        return Ok(0);
    }
    let before = backend.used_memory()?;
    let Groups { shard, replica, tensor, .. } =
        &Groups::split(comm, &plan.mesh, plan.local_sgd.is_some())?;
    let exact = plan.config.comm.deterministic;
    let given = |group: &Group<B>| {
        let of_bf16 = sums_bf16(plan).then(|| group.default_algorithm(true));
        plan.config.comm.algorithm.fixed().or(of_bf16)
    };
    let of_replicas = replica_operations(plan.config.parallel.storage);
    connect_ranks(shard, backend, &SHARD_OPERATIONS, given(shard), exact)?;
    connect_ranks(replica, backend, of_replicas, given(replica), exact)?;
    connect_ranks(tensor, backend, &TENSOR_OPERATIONS, Some(comm.algorithm()), exact)?;
    Ok(backend.used_memory()?.saturating_sub(before))
}

/// Returns true if gradients are reduced in bf16.
fn sums_bf16(plan: &ResolvedConfig) -> bool {
    plan.sharding_policy().reduce_dtype == Element::Bf16
}

/// Creates the groups of `plan`'s mesh, each with its algorithms. Rank 0 reads earlier choices of
/// `comm.algorithm = auto` from `path`. Collective over the world.
///
/// # Errors
/// Returns an error if a message between ranks fails.
pub fn groups<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    backend: &B,
    blocks: &Blocks<B>,
    path: Option<&Path>,
) -> Result<(Groups<B>, CollectiveChoices)> {
    let groups = Groups::split(comm, &plan.mesh, plan.local_sgd.is_some())?;
    let Groups { world, shard, replica, .. } = &groups;
    let storage = plan.config.parallel.storage;
    let mut found = None;
    let mut how = "as configured";
    // With one rank there is nothing to measure.
    let alone = (comm.size() == 1).then_some(Algorithm::HalvingDoubling);
    let is_bf16 = sums_bf16(plan);
    let in_blocks = plan.reduce_after == ReduceAfter::StepInBlocks;
    // Then parts of parameters, too, are unequal, or not sharded.
    let is_direct =
        in_blocks && (shard.size() == 1 || !plan.virtual_ranks.is_multiple_of(shard.size()));
    let direct = is_direct.then_some(Algorithm::HalvingDoubling);
    let fixed = plan.config.comm.algorithm.fixed().or(alone).or(direct);
    let (of_shards, of_replicas) = match fixed {
        Some(algorithm) => (AlgorithmTable::uniform(algorithm), AlgorithmTable::uniform(algorithm)),
        // Algorithms round at different points, so a measurement must not choose the bits.
        None if is_bf16 => {
            how = "for bf16";
            let default = |group: &Group<B>| AlgorithmTable::uniform(group.default_algorithm(true));
            (default(shard), default(replica))
        }
        None => {
            let key = Key::new(comm, plan, blocks);
            how = "measured before";
            let recalled = recall(world, path, &key)?;
            let recalled = usable(recalled, world, [shard, replica], backend)?;
            let choices = match recalled {
                Some(choices) => choices,
                None => {
                    how = "measured";
                    let choices = benchmark(world, shard, replica, backend, key)?;
                    found = Some(
                        serde_json::to_string(&choices)
                            .map_err(|e| Error::internal(e.to_string()))?
                            + "\n",
                    );
                    choices
                }
            };
            (choices.shard, choices.replica)
        }
    };
    if is_bf16 {
        let able = check_bf16_sums(shard, &of_shards)
            .and_then(|()| check_bf16_sums(&groups.step.replica, &of_replicas));
        world.all_ok(able)?;
    }
    let describe =
        |group: &Group<B>, table: &AlgorithmTable, operations: &[Operation], axis: &str| {
            (group.size() > 1)
                .then(|| format!("{} {axis}: {}", group.size(), table.describe(operations)))
        };
    let parts = [
        describe(shard, &of_shards, &SHARD_OPERATIONS, "shards"),
        describe(replica, &of_replicas, replica_operations(storage), "replicas"),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    let line = match () {
        () if parts.is_empty() => String::new(),
        () if is_direct => format!("{} ranks: unequal parts to their owners", plan.mesh.data()),
        () if in_blocks => format!("gradients to their owners; {} ({how})", parts.join("; ")),
        () => format!("{} ({how})", parts.join("; ")),
    };
    Ok((
        groups.with_algorithms(of_shards, of_replicas),
        CollectiveChoices { summary: line, to_save: found },
    ))
}

/// Returns an error if gradients in bf16 cannot be summed over a group.
fn check_bf16_sums<B: Kernels>(group: &Group<B>, table: &AlgorithmTable) -> Result<()> {
    let algorithm = table.pick(Operation::ReduceScatter, 0).algorithm;
    if group.size() == 1 || group.can_sum_bf16(algorithm) {
        return Ok(());
    }
    let message = match group.transport() {
        None | Some(DeviceTransport::HostStaged) => {
            "comm.dtype = bf16 requires nccl, cuda-ipc or cuda-aware, but this job has \
             comm.transport = host-staged"
                .into()
        }
        Some(_) => format!(
            "comm.dtype = bf16: {algorithm} cannot sum over {} ranks on {} nodes",
            group.size(),
            group.nodes()
        ),
    };
    Err(Error::input(message).hint("omit comm.dtype, or set it to f32"))
}

impl Key {
    fn new<B: Kernels>(comm: &Comm<B>, plan: &ResolvedConfig, blocks: &Blocks<B>) -> Self {
        let slices = plan.tensor_shards(0);
        let sizes = blocks.iter().map(|block| {
            UnitLayout::sharded(block.name(), block.tensors(), plan.virtual_ranks, &slices).padded
        });
        Self {
            mesh: plan.mesh,
            storage: plan.config.parallel.storage,
            library: comm.library().to_string(),
            shared_memory: comm.shares_memory(),
            path: if comm.is_mixed() {
                Some(DeviceTransport::HostStaged)
            } else {
                comm.device_transport()
            },
            reproducible: plan.config.comm.deterministic,
            largest: sizes.max().unwrap_or(0) * size_of::<f32>(),
            way: RULE_VERSION,
        }
    }
}

/// Benchmarks the collectives that the mesh needs.
fn benchmark<B: Kernels>(
    world: &Group<B>,
    shard: &Group<B>,
    replica: &Group<B>,
    backend: &B,
    key: Key,
) -> Result<SavedChoices> {
    let measure_group = |group: &Group<B>, operations: &[Operation]| {
        let operations = if group.size() > 1 { operations } else { &[] };
        measure(world, group, backend, operations, key.largest, key.reproducible)
    };
    let shard = measure_group(shard, &SHARD_OPERATIONS)?;
    let replica = measure_group(replica, replica_operations(key.storage))?;
    Ok(SavedChoices { key, shard, replica })
}

/// Returns the content of the file of an earlier start, or `None`, with a warning, if it cannot be
/// used.
fn written(path: &Path, reproducible: bool) -> Option<Vec<u8>> {
    let read = safe_open::read(path).and_then(|bytes| {
        serde_json::from_slice::<SavedChoices>(&bytes)?;
        Ok(bytes)
    });
    match read {
        Ok(bytes) => Some(bytes),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => {
            let bits = if reproducible {
                ""
            } else {
                ", which may change the last bits (comm.deterministic=false)"
            };
            log::warn!(
                "{}: {e}: algorithms of collectives are measured again{bits}",
                path.display()
            );
            None
        }
    }
}

/// Returns the choices if all groups can use their transports. Collective over the world.
fn usable<B: Kernels>(
    choices: Option<SavedChoices>,
    world: &Group<B>,
    groups: [&Group<B>; 2],
    backend: &B,
) -> Result<Option<SavedChoices>> {
    let Some(choices) = choices else { return Ok(None) };
    let tables = [&choices.shard, &choices.replica];
    let mut is_usable = true;
    for (table, group) in tables.into_iter().zip(groups) {
        if table.uses(DeviceTransport::CudaIpc) && group.size() > 1 {
            is_usable &= group.open_peers(backend)?;
        }
    }
    // Groups on other nodes may differ.
    let all = world.all_gather_u64(&[u64::from(is_usable)])?;
    Ok(all.iter().all(|theirs| theirs[0] == 1).then_some(choices))
}

/// Returns, on every rank, the choices that rank 0 reads from the file.
fn recall<B: Kernels>(
    world: &Group<B>,
    path: Option<&Path>,
    key: &Key,
) -> Result<Option<SavedChoices>> {
    let path = path.filter(|_| world.rank() == 0);
    let mine = path.and_then(|path| written(path, key.reproducible)).unwrap_or_default();
    let all = world.gather_bytes(mine).wait()?;
    let found = all.first().and_then(|bytes| serde_json::from_slice::<SavedChoices>(bytes).ok());
    Ok(found.filter(|found| found.key == *key))
}
