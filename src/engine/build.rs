//! Creates the network of a plan on its mesh, ready to train.

use std::path::Path;

use super::activation_offload::ActivationOffload;
use super::collectives::{self, CollectiveChoices};
use super::forward_backward::{Engine, Geometry};
use super::host_embedding::HostEmbedding;
use super::model::Model;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_comm::{Algorithm, AlgorithmTable, Comm, Group};
use hpctrain_config::ResolvedConfig;
use hpctrain_cpu::Cpu;
use hpctrain_device::Kernels;
use hpctrain_nn::{Blocks, loans};
use hpctrain_parallel::{Groups, HostUnits, RowSource, Sharded, SparseTables, Stage, Updates};

/// Creates the network of a plan on its mesh. `choices` is the file with earlier results of
/// benchmarks of collectives. Collective over the world.
///
/// # Errors
/// Returns an error if memory runs out, or if a message between ranks fails.
pub fn engine<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    backend: B,
    choices: Option<&Path>,
) -> Result<(Engine<B>, CollectiveChoices)> {
    let blocks = plan.network.tensor_parallel_blocks(&plan.tensor_shards(comm.rank()));
    let (mut engine, exchange) = build(comm, plan, blocks, backend, choices)?;
    if plan.has_host_tables() {
        engine.model = with_host_embedding(comm, plan, engine.model, true)?;
    }
    Ok((engine, exchange))
}

/// Adds embedding tables on the host as the first block of `model`. With `trains`, the tables are
/// initialised and have an optimizer; else they are zero until they are restored. Collective over
/// the world of `comm`.
///
/// # Errors
/// Returns an error if memory runs out, or if a message between ranks fails.
pub fn with_host_embedding<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    model: Model<B>,
    trains: bool,
) -> Result<Model<B>> {
    let cpu =
        Cpu::with_profile(plan.threads, model.backend.profile().clone()).with_all_threads()?;
    let groups = Groups::split(&comm.on::<Cpu>(), &plan.mesh, false)?;
    // Collectives on the host are not benchmarked: they use the configured algorithm if the host
    // has it, else halving-doubling.
    let algorithms = |group: &Group<Cpu>| {
        let given = plan.config.comm.algorithm.fixed();
        let given = given.filter(|algorithm| group.algorithms(false).contains(algorithm));
        AlgorithmTable::uniform(given.unwrap_or(Algorithm::HalvingDoubling))
    };
    let of_shards = algorithms(&groups.shard);
    let of_replicas = algorithms(&groups.replica);
    let groups = groups.with_algorithms(of_shards, of_replicas);
    let slices = plan.tensor_shards(comm.rank());
    let mut blocks: Blocks<Cpu> = plan.network.tensor_parallel_blocks(&slices);
    let seed = trains.then_some(plan.config.run.seed);
    let updates = trains.then(|| updates(plan, None));
    let tables = match plan.sparse_tables {
        Some(sharding) => {
            let block = &blocks[0];
            let layout =
                UnitLayout::sharded(block.name(), block.tensors(), plan.virtual_ranks, &slices);
            HostUnits::Sparse(Box::new(SparseTables::new(
                cpu.clone(),
                groups.data,
                layout,
                sharding,
                plan.assignment(),
                updates.as_ref(),
                seed,
            )?))
        }
        None => HostUnits::Dense(Box::new(Sharded::new(
            cpu.clone(),
            groups,
            plan.host_table_sharding_policy(),
            &plan.assignment(),
            updates,
            &blocks,
            &slices,
            Stage::embedding_tables(&loans(&blocks)),
            seed,
        )?)),
    };
    let block = HostEmbedding::new(&model.backend, cpu, blocks.swap_remove(0))?;
    Ok(model.with_host_embedding(block, tables))
}

/// Adds embedding tables whose rows another process holds as the first block of `model`, which one
/// rank computes.
///
/// # Errors
/// Returns an error if memory runs out.
pub fn with_tables_elsewhere<B: Kernels>(
    alone: &Comm<B>,
    plan: &ResolvedConfig,
    model: Model<B>,
    source: Box<dyn RowSource>,
) -> Result<Model<B>> {
    let cpu =
        Cpu::with_profile(plan.threads, model.backend.profile().clone()).with_all_threads()?;
    let slices = plan.tensor_shards(0);
    let mut blocks: Blocks<Cpu> = plan.network.tensor_parallel_blocks(&slices);
    let tables = SparseTables::elsewhere(
        cpu.clone(),
        alone.on::<Cpu>().world(),
        UnitLayout::sharded(blocks[0].name(), blocks[0].tensors(), plan.virtual_ranks, &slices),
        plan.assignment(),
        source,
    );
    let block = HostEmbedding::new(&model.backend, cpu, blocks.swap_remove(0))?;
    Ok(model.with_host_embedding(block, HostUnits::Sparse(Box::new(tables))))
}

/// Returns the updates of a plan. `host` is the CPU of an offloaded optimizer.
fn updates(plan: &ResolvedConfig, host: Option<Cpu>) -> Updates {
    Updates {
        rule: plan.update_rule,
        groups: plan.config.optimizer.groups.clone(),
        ema_decay: plan.ema,
        local_sgd: plan.local_sgd,
        storage: plan.config.parallel.storage,
        sdc_check_every: plan.config.run.sdc_check_every,
        host,
    }
}

/// Creates an engine like [`engine`], with custom blocks instead of those of the plan's network.
/// They must be made for the same [tensor-parallel shards](ResolvedConfig::tensor_shards), take the same samples and give
/// outputs of the same width.
///
/// # Errors
/// Returns an error if [`engine`] does, or if the plan has embedding tables in host memory, which
/// custom blocks do not support.
pub fn engine_with_blocks<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    blocks: Blocks<B>,
    backend: B,
    choices: Option<&Path>,
) -> Result<(Engine<B>, CollectiveChoices)> {
    if plan.has_host_tables() {
        return Err(Error::input(
            "model.place.tables = host and optimizer.tables = sparse are not supported with custom blocks",
        )
        .hint("set model.place.tables=device and optimizer.tables=dense"));
    }
    blocks.iter().try_for_each(|block| block.check())?;
    build(comm, plan, blocks, backend, choices)
}

fn build<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    blocks: Blocks<B>,
    backend: B,
    choices: Option<&Path>,
) -> Result<(Engine<B>, CollectiveChoices)> {
    let (groups, exchange) = collectives::groups(comm, plan, &backend, &blocks, choices)?;
    let number = plan.mesh.stage(comm.rank());
    let stage = plan.stage(number, &loans(&blocks));
    let keep = plan.sharding_policy();
    let seed = plan.config.run.seed;
    let host = || Cpu::with_profile(plan.threads, backend.profile().clone()).with_all_threads();
    let host = plan.config.offload.optimizer.then(host).transpose()?;
    let updates = updates(plan, host);
    let slices = plan.tensor_shards(comm.rank());
    let sharded = Sharded::new(
        backend.clone(),
        groups,
        keep,
        &plan.assignment(),
        Some(updates),
        &blocks,
        &slices,
        stage,
        Some(seed),
    )?;
    let geometry = Geometry {
        schedule: plan.step_schedule(number),
        idle_virtual_ranks: plan.idle_virtual_ranks(sharded.data().rank()),
        rows: plan.micro as usize * plan.network.context(),
        predictions: plan.tokens_per_replica(),
        recompute: plan.config.parallel.recompute,
        seed,
    };
    let host_inputs =
        plan.config.offload.activations.then(|| ActivationOffload::new(&backend)).transpose()?;
    let model = Model::new(backend, blocks, plan.objective().with_tensor_shards(&slices), sharded)
        .with_loss_chunk_rows(plan.loss_chunk_tokens);
    let engine = Engine { model, geometry, activation_offload: host_inputs, observer: None };
    Ok((engine, exchange))
}
