//! Code of the programs of `tests/`: jobs and their ends, small networks, golden files,
//! comparisons.

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
    Groups, Sharded, Stage, StepSchedule, Storage, Updates, VirtualRanks, Zero,
};

/// A file of `tests/golden/`.
pub fn golden(name: &str) -> hdf5::File {
    let path = root().join("tests/golden").join(name);
    hdf5::File::open(path).unwrap()
}

/// A dataset as f64.
pub fn numbers(group: &hdf5::Group, name: &str) -> Vec<f64> {
    group.dataset(name).unwrap().read_raw().unwrap()
}

/// A dataset as f32.
pub fn floats(group: &hdf5::Group, name: &str) -> Vec<f32> {
    group.dataset(name).unwrap().read_raw().unwrap()
}

/// A dataset as ids.
pub fn ids(group: &hdf5::Group, name: &str) -> Vec<u32> {
    group.dataset(name).unwrap().read_raw().unwrap()
}

/// The relative 2-norm of a difference: |got - want| / |want|.
pub fn distance(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(&g, w)| f64::from(g) - w));
    difference / norm(&mut want.iter().copied()).max(1e-30)
}

/// The division of a step.
#[derive(Clone, Copy)]
pub struct Cut {
    pub virtual_ranks: usize,
    pub micros_per_virtual_rank: usize,
    pub recompute: bool,
}

impl Cut {
    pub const WHOLE: Cut = Cut { virtual_ranks: 1, micros_per_virtual_rank: 1, recompute: false };
}

/// An engine on this rank of a world, initialised from seed 7.
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

/// As [`engine`], on another device.
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
    let virtual_ranks = VirtualRanks {
        total: cut.virtual_ranks,
        ranks: groups.data.size(),
        rank: groups.data.rank(),
    };
    let blocks = network.blocks();
    let storage = Storage::Ranks;
    let updates = Updates {
        rule,
        groups: vec![],
        average: None,
        averaging: None,
        storage,
        audit_every: 0,
        host: None,
    };
    let keep = zero.residency();
    let stage = Stage::whole(&loans(&blocks));
    let slices = TensorShards::whole();
    let sharded = Sharded::new(
        backend.clone(),
        groups,
        keep,
        virtual_ranks,
        Some(updates),
        &blocks,
        &slices,
        stage,
        Some(7),
    )
    .unwrap();
    let geometry = Geometry {
        schedule: StepSchedule::alone(virtual_ranks.mine().len(), cut.micros_per_virtual_rank),
        // Micro-batches of a pipeline alone are known by their rows before they come.
        rows: 0,
        predictions,
        recompute: cut.recompute,
        seed: 7,
    };
    let objective = Objective::new(loss, network.outputs(), !network.is_language());
    Engine { model: Model::new(backend, blocks, objective, sharded), geometry, host_inputs: None }
}

/// A micro-batch of sequences `first..` of a global batch.
pub fn micro<B: Kernels>(
    backend: &B,
    tokens: &[u32],
    targets: &[u32],
    time: usize,
    first: u64,
) -> MicroBatch<B> {
    MicroBatch::of_text(backend, tokens, targets, time, first).unwrap()
}

/// The reduced gradients of one rank that owns everything, by tensor name.
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

/// All parameters of one rank that owns everything, by tensor name.
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

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The program under test, which is built beside this one.
pub fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("hpctrain")
}

/// A folder for files of tests that other runs of them may use.
pub fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).unwrap().join("tmp")
}
