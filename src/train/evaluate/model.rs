//! Models for inference: parameters from checkpoints, no gradients, no optimizer.

use std::path::Path;

use hpctrain_base::error::Result;
use hpctrain_checkpoint::Reader;
use hpctrain_comm::{Comm, Group};
use hpctrain_config::{
    Config, DeviceChoice, Environment, MessageDtype, ModelKind, Parallel, ReduceChoice,
    ResolvedConfig, overlay, resolve,
};
use hpctrain_device::Kernels;
use hpctrain_engine::{Model, with_host_embedding};
use hpctrain_nn::loans;
use hpctrain_parallel::{Groups, Sharded, Zero};

/// Returns the configuration for inference with a trained network, with `overrides`. The layout of
/// the training is dropped: ranks shard the parameters by ZeRO 3, unless `overrides` say otherwise.
///
/// # Errors
/// Returns an error if a key of `overrides` is unknown or its value is invalid.
pub fn config(trained: &Config, overrides: &[String]) -> Result<Config> {
    let parallel = Parallel { zero: Zero::Three, ..Parallel::default() };
    let mut trained = Config { parallel, ..trained.clone() };
    if trained.run.device == DeviceChoice::Mixed {
        trained.run.device = DeviceChoice::Auto;
    }
    overlay(&trained, overrides)
}

/// Returns the configuration of a checkpoint with `overrides`, and with the data at `data` instead
/// of the checkpoint's.
///
/// # Errors
/// Returns an error if a key of `overrides` is unknown or its value is invalid.
pub fn config_on(reader: &Reader, overrides: &[String], data: Option<&Path>) -> Result<Config> {
    let mut config = config(&reader.manifest().config, overrides)?;
    if let Some(data) = data {
        config.data.path = data.display().to_string();
        config.data.mix.clear();
        // All of it is used: the fraction is one of the run's own data.
        config.data.val_fraction = 0.0;
        // The scale of the run's data is dropped as well, since the checkpoint's preprocessing has
        // it, whether data is stored as bytes or as floats.
        if reader.manifest().preprocessing.is_some() {
            config.data.scale = None;
        }
    }
    Ok(config)
}

/// Resolves a configuration made by [`config`] for `ranks` ranks, whatever layout it was trained
/// in.
///
/// # Errors
/// Returns an error if the configuration is invalid for `ranks` ranks.
pub fn plan(
    mut config: Config,
    ranks: usize,
    threads: usize,
    on_gpu: bool,
) -> Result<ResolvedConfig> {
    (config.batch, config.optimizer, config.run.threads) = Default::default();
    if !on_gpu {
        // It may have been trained on a GPU, or on a CPU of another kind. Every CPU computes in
        // f32, and has embedding tables in its one memory.
        (config.precision, config.model.place) = Default::default();
    }
    config.parallel.reduce = ReduceChoice::Step;
    config.comm.dtype = MessageDtype::F32;
    // Nothing is trained, so any batch size that the ranks divide is valid. Two samples are enough
    // for the check that batch normalisation has a variance, which only training needs.
    let samples = if config.model.kind == ModelKind::Layers { 2 } else { 1 };
    config.set_trial_batch(samples * ranks as u64);
    config.batch.micro = Some(samples);
    resolve(config, &Environment { ranks, threads, vocabulary: None, on_gpu })
}

/// Creates the model of a plan made by [`plan`]. Its parameters must be [loaded](load) before use.
/// Collective over the world of `comm`.
///
/// # Errors
/// Returns an error if memory runs out, or if a message between ranks fails.
pub fn build<B: Kernels>(comm: &Comm<B>, plan: &ResolvedConfig, backend: B) -> Result<Model<B>> {
    let model = build_blocks(comm, plan, backend)?;
    match plan.has_host_tables() {
        true => with_host_embedding(comm, plan, model, false),
        false => Ok(model),
    }
}

/// Creates the model of a plan as [`build`] does, without embedding tables in host memory.
///
/// # Errors
/// Returns an error if memory runs out, or if a message between ranks fails.
pub fn build_blocks<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    backend: B,
) -> Result<Model<B>> {
    let groups = Groups::split(comm, &plan.mesh, false)?;
    let slices = plan.tensor_shards(comm.rank());
    let blocks = plan.network.tensor_parallel_blocks(&slices);
    let stage = plan.stage(plan.mesh.stage(comm.rank()), &loans(&blocks));
    let sharded = Sharded::new(
        backend.clone(),
        groups,
        plan.sharding_policy(),
        &plan.assignment(),
        None,
        &blocks,
        &slices,
        stage,
        None,
    )?;
    Ok(Model::new(backend, blocks, plan.objective().with_tensor_shards(&slices), sharded)
        .with_loss_chunk_rows(plan.loss_chunk_tokens))
}

/// Verifies the files of a checkpoint, each on one rank, and loads its parameters, or their EMA if
/// it has one. Collective over `world`.
///
/// # Errors
/// Returns an error, the same on all ranks, if the checkpoint is damaged, or belongs to another
/// model.
pub fn load<B: Kernels>(world: &Group<B>, model: &mut Model<B>, reader: &mut Reader) -> Result<()> {
    reader.fetch(world, &model.sharded.restored())?;
    let checked = reader.check_files();
    world.all_ok(
        checked.and_then(|()| reader.manifest().check(reader.dir(), model.sharded.layouts(), None)),
    )?;
    let used = reader.inference_part();
    world.all_ok(
        model.sharded.restore(|tensor, _, columns, range, out| {
            reader.read(tensor, used, columns, range, out)
        }),
    )
}
