//! The groups of a run, and the algorithms by which they exchange and add.

use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_base::mesh::Mesh;
use hpctrain_base::safe_open;
use hpctrain_comm::{Algorithm, Comm, DeviceTransport, Group, Operation, Table, measure};
use hpctrain_config::ResolvedConfig;
use hpctrain_device::Kernels;
use hpctrain_nn::{Block, Blocks};
use hpctrain_parallel::{Groups, Storage};

/// Operations of shards on units.
const OF_SHARDS: [Operation; 2] = [Operation::ReduceScatter, Operation::AllGather];

/// Operations of replicas on units.
fn of_replicas_in(storage: Storage) -> &'static [Operation] {
    match storage {
        Storage::Ranks => &[Operation::AllReduce],
        Storage::Central => &[Operation::Reduce, Operation::Broadcast],
    }
}

/// `collectives.json`: the result of a measurement, and all that it depends on.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Found {
    key: Key,
    shard: Table,
    replica: Table,
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
    /// The way of choosing: tables of another one are measured anew.
    #[serde(default)]
    way: u32,
}

/// The way of choosing that this program has. The one before took the winner at the largest size
/// measured for all larger ones.
const WAY: u32 = 1;

/// Algorithms of the exchange between the ranks of a run.
pub struct Exchange {
    /// A line for people; empty where nothing is exchanged.
    pub told: String,
    /// Result of a new measurement, to be kept in `collectives.json`.
    pub found: Option<String>,
}

/// Collective over the world: the groups of `plan`'s mesh, each with its algorithms. Rank 0 reads
/// earlier choices of `auto` from `path`.
///
/// # Errors
/// A message failed.
pub fn groups<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    backend: &B,
    blocks: &Blocks<B>,
    path: Option<&Path>,
) -> Result<(Groups<B>, Exchange)> {
    let groups = Groups::split(comm, &plan.mesh, plan.averaging.is_some())?;
    let Groups { world, shard, replica, .. } = &groups;
    let storage = plan.config.parallel.storage;
    let mut found = None;
    let mut how = "as configured";
    // One rank has nothing to measure.
    let alone = (comm.size() == 1).then_some(Algorithm::HalvingDoubling);
    let (of_shards, of_replicas) = match plan.config.comm.algorithm.fixed().or(alone) {
        Some(algorithm) => (Table::always(algorithm), Table::always(algorithm)),
        None => {
            let key = Key::of(comm, plan, blocks);
            how = "measured before";
            let choices = match recall(world, path, &key)? {
                Some(choices) => choices,
                None => {
                    how = "measured";
                    let choices = find(world, shard, replica, backend, key)?;
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
    let told = |group: &Group<B>, table: &Table, operations: &[Operation], axis: &str| {
        (group.size() > 1)
            .then(|| format!("{} {axis}: {}", group.size(), table.describe(operations)))
    };
    let parts = [
        told(shard, &of_shards, &OF_SHARDS, "shards"),
        told(replica, &of_replicas, of_replicas_in(storage), "replicas"),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    let told =
        if parts.is_empty() { String::new() } else { format!("{} ({how})", parts.join("; ")) };
    Ok((groups.with_algorithms(of_shards, of_replicas), Exchange { told, found }))
}

impl Key {
    fn of<B: Kernels>(comm: &Comm<B>, plan: &ResolvedConfig, blocks: &Blocks<B>) -> Self {
        let slices = plan.slices(0);
        let layout_of = |block: &dyn Block<B>| {
            UnitLayout::sliced(block.name(), block.tensors(), plan.virtual_ranks, &slices)
        };
        let sizes = blocks.iter().map(|block| layout_of(&**block).padded);
        Self {
            mesh: plan.mesh,
            storage: plan.config.parallel.storage,
            library: comm.library().to_string(),
            shared_memory: comm.shares_memory(),
            path: comm.device_path(),
            reproducible: plan.config.comm.deterministic,
            largest: sizes.max().unwrap_or(0) * size_of::<f32>(),
            way: WAY,
        }
    }
}

/// Measures the collectives that the mesh will need.
fn find<B: Kernels>(
    world: &Group<B>,
    shard: &Group<B>,
    replica: &Group<B>,
    backend: &B,
    key: Key,
) -> Result<Found> {
    let of = |group: &Group<B>, operations: &[Operation]| {
        let operations = if group.size() > 1 { operations } else { &[] };
        measure(world, group, backend, operations, key.largest, key.reproducible)
    };
    let shard = of(shard, &OF_SHARDS)?;
    let replica = of(replica, of_replicas_in(key.storage))?;
    Ok(Found { key, shard, replica })
}

/// The content of the file of an earlier start; none, with a warning, if it cannot be used.
fn written(path: &Path, reproducible: bool) -> Option<Vec<u8>> {
    let read = safe_open::read(path).and_then(|bytes| {
        serde_json::from_slice::<Found>(&bytes)?;
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
            log::warn!("{}: {e}: algorithms of messages are measured again{bits}", path.display());
            None
        }
    }
}

/// The measurement that rank 0 finds in the file, on every rank.
fn recall<B: Kernels>(world: &Group<B>, path: Option<&Path>, key: &Key) -> Result<Option<Found>> {
    let path = path.filter(|_| world.rank() == 0);
    let mine = path.and_then(|path| written(path, key.reproducible)).unwrap_or_default();
    let all = world.gather_bytes(mine).wait()?;
    let found = all.first().and_then(|bytes| serde_json::from_slice::<Found>(bytes).ok());
    Ok(found.filter(|found| found.key == *key))
}
