//! Shared code of the test programs in `tests/`: jobs, small networks, golden files, comparisons.

#![allow(missing_docs, clippy::unwrap_used, reason = "tests: a failure is the test's failure")]

pub mod hosts;
pub mod launch;
pub mod layouts;
pub mod peers;
pub mod python;
pub mod ranks;
pub mod runs;
pub mod sealed;
pub mod shards;
pub mod simulator;

use std::path::{Path, PathBuf};

use hpctrain::backend::Kernels;
use hpctrain::backend::cpu::Cpu;
use hpctrain::comm::Comm;
use hpctrain::engine::{Engine, Geometry, Model};
use hpctrain::layout::TensorShards;
use hpctrain::mesh::Mesh;
use hpctrain::nn::loss::{Loss, Objective};
use hpctrain::nn::{MicroBatch, Network, loans};
use hpctrain::optim::UpdateRule;
use hpctrain::parallel::{
    Groups, ReduceAfter, Sharded, ShardingPolicy, Stage, StepSchedule, Storage, Updates,
    VirtualRanks, Zero,
};

/// Opens a file of `tests/golden/`.
pub fn golden(name: &str) -> hdf5::File {
    let path = root().join("tests/golden").join(name);
    hdf5::File::open(path).unwrap()
}

/// Reads a dataset as f64.
pub fn numbers(group: &hdf5::Group, name: &str) -> Vec<f64> {
    group.dataset(name).unwrap().read_raw().unwrap()
}

/// Reads a dataset as f32.
pub fn floats(group: &hdf5::Group, name: &str) -> Vec<f32> {
    group.dataset(name).unwrap().read_raw().unwrap()
}

/// Reads a dataset as ids.
pub fn ids(group: &hdf5::Group, name: &str) -> Vec<u32> {
    group.dataset(name).unwrap().read_raw().unwrap()
}

/// Returns the relative 2-norm of a difference: |actual - expected| / |expected|.
pub fn distance(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(expected).map(|(&a, e)| f64::from(a) - e));
    difference / norm(&mut expected.iter().copied()).max(1e-30)
}

/// The virtual ranks and micro-batches of a step.
#[derive(Clone, Copy)]
pub struct Cut {
    pub virtual_ranks: usize,
    pub micros_per_virtual_rank: usize,
    pub recompute: bool,
    pub reduce_after: ReduceAfter,
}

impl Cut {
    pub const WHOLE: Cut = Cut {
        virtual_ranks: 1,
        micros_per_virtual_rank: 1,
        recompute: false,
        reduce_after: ReduceAfter::Step,
    };
}

/// Creates an engine on this rank of a world, initialised from seed 7.
pub fn engine(
    comm: &Comm<Cpu>,
    network: &Network,
    mesh: Mesh,
    zero: Zero,
    rule: UpdateRule,
    cut: Cut,
    predictions: u64,
) -> Engine<Cpu> {
    engine_on(Cpu::new(2), comm, network, Loss::cross_entropy(), mesh, zero, rule, cut, predictions)
}

/// Creates an engine as [`engine`] does, on another device.
#[expect(clippy::too_many_arguments, reason = "one for each property of a layout")]
pub fn engine_on<B: Kernels>(
    backend: B,
    comm: &Comm<B>,
    network: &Network,
    loss: Loss,
    mesh: Mesh,
    zero: Zero,
    rule: UpdateRule,
    cut: Cut,
    predictions: u64,
) -> Engine<B> {
    let groups = Groups::split(comm, &mesh, false).unwrap();
    let virtual_ranks_here = cut.virtual_ranks / groups.data.size();
    let blocks = network.blocks();
    let storage = Storage::Ranks;
    let updates = Updates {
        rule,
        groups: vec![],
        ema_decay: None,
        local_sgd: None,
        storage,
        sdc_check_every: 0,
        host: None,
    };
    let reduce_after = cut.reduce_after;
    let keep = ShardingPolicy { reduce_after, ..zero.sharding_policy() };
    let assignment = VirtualRanks {
        total: cut.virtual_ranks,
        replicas: mesh.replica,
        shards: mesh.shard,
        reduce_after,
        counts: None,
    };
    let stage = Stage::whole(&loans(&blocks));
    let slices = TensorShards::whole();
    let sharded = Sharded::new(
        backend.clone(),
        groups,
        keep,
        &assignment,
        Some(updates),
        &blocks,
        &slices,
        stage,
        Some(7),
    )
    .unwrap();
    let geometry = Geometry {
        schedule: StepSchedule::alone(virtual_ranks_here, cut.micros_per_virtual_rank),
        idle_virtual_ranks: 0,
        // Only pipelines need the number of rows of a micro-batch in advance.
        rows: 0,
        predictions,
        recompute: cut.recompute,
        seed: 7,
    };
    let objective = Objective::new(loss, network.outputs(), !network.is_language());
    Engine {
        model: Model::new(backend, blocks, objective, sharded),
        geometry,
        activation_offload: None,
        observer: None,
    }
}

/// Creates a micro-batch of sequences `first..` of a global batch.
pub fn micro<B: Kernels>(
    backend: &B,
    tokens: &[u32],
    targets: &[u32],
    time: usize,
    first: u64,
) -> MicroBatch<B> {
    MicroBatch::from_text(backend, tokens, targets, time, first).unwrap()
}

/// Returns the reduced gradients of one rank that owns everything, by tensor name.
pub fn gradients<B: Kernels>(engine: &Engine<B>) -> Vec<(String, Vec<f32>)> {
    let mut named = Vec::new();
    for unit in engine.model.sharded.gradients().unwrap() {
        let mut host = vec![0.0; unit.range.len()];
        engine.model.backend.download(unit.grad, &mut host).unwrap();
        named.extend(
            unit.layout
                .pieces(unit.range)
                .map(|p| (p.tensor.name.clone(), host[p.of_owned].to_vec())),
        );
    }
    named
}

/// Returns all parameters of one rank that owns everything, by tensor name.
pub fn parameters<B: Kernels>(engine: &mut Engine<B>) -> Vec<(String, Vec<f32>)> {
    let mut named = Vec::new();
    for unit in engine.model.sharded.owned().unwrap() {
        let mut host = vec![0.0; unit.range.len()];
        unit.params.read(&mut host).unwrap();
        named.extend(
            unit.layout
                .pieces(unit.range.clone())
                .map(|p| (p.tensor.name.clone(), host[p.of_owned].to_vec())),
        );
    }
    named
}

/// Returns the root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the path of the program under test, which is built next to this one.
pub fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("hpctrain")
}

/// Returns a folder for files that later test runs may reuse.
pub fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).unwrap().join("tmp")
}
