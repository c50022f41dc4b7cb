//! A network to be used rather than trained: parameters from checkpoints, no gradients, no
//! optimizer.

use std::path::Path;

use hpctrain_base::error::Result;
use hpctrain_checkpoint::Reader;
use hpctrain_comm::{Comm, Group};
use hpctrain_config::{Config, Environment, Parallel, ResolvedConfig, overlay, resolve};
use hpctrain_device::Kernels;
use hpctrain_engine::{Model, behind_tables};
use hpctrain_nn::loans;
use hpctrain_parallel::{Groups, Sharded, VirtualRanks, Zero};

/// The configuration of a trained network to be used, with `overrides`. Its layout is none of the
/// training's: ranks share one copy of the parameters by ZeRO 3, unless `overrides` say otherwise.
///
/// # Errors
/// A key or value is not known.
pub fn config(trained: &Config, overrides: &[String]) -> Result<Config> {
    let parallel = Parallel { zero: Zero::Three, ..Parallel::default() };
    overlay(&Config { parallel, ..trained.clone() }, overrides)
}

/// The configuration of a checkpoint with `overrides`, and with the data at `data` in the place of
/// its own.
///
/// # Errors
/// A key or value is not known.
pub fn config_on(reader: &Reader, overrides: &[String], data: Option<&Path>) -> Result<Config> {
    let mut config = config(&reader.manifest().config, overrides)?;
    if let Some(data) = data {
        config.data.path = data.display().to_string();
        config.data.mix.clear();
        // All of it: the fraction is one of the run's own data.
        config.data.val_fraction = 0.0;
        // So is its scale, which the checkpoint keeps for any data; bytes and floats of the same
        // numbers are the same to it.
        if reader.manifest().preprocessing.is_some() {
            config.data.scale = None;
        }
    }
    Ok(config)
}

/// The plan for `ranks` ranks of a configuration made by [`config`], trained in any layout.
///
/// # Errors
/// The configuration is not possible.
pub fn plan(
    mut config: Config,
    ranks: usize,
    threads: usize,
    on_gpu: bool,
) -> Result<ResolvedConfig> {
    (config.batch, config.optimizer, config.run.threads) = Default::default();
    if !on_gpu {
        // A GPU may have trained it, or a CPU of another kind; all know f32, and have tables in one
        // memory.
        (config.precision, config.model.place) = Default::default();
    }
    // Nothing is trained: any batch that divides among the ranks will do.
    config.batch.global = ranks as u64;
    resolve(config, &Environment { ranks, threads, vocabulary: None, on_gpu })
}

/// The network of a plan made by [`plan`], with parameters that are yet to be [loaded](load).
/// Collective over the world of `comm`.
///
/// # Errors
/// Out of memory, or a message between ranks failed.
pub fn build<B: Kernels>(comm: &Comm<B>, plan: &ResolvedConfig, backend: B) -> Result<Model<B>> {
    let groups = Groups::split(comm, &plan.mesh, false)?;
    let virtual_ranks = VirtualRanks {
        total: plan.virtual_ranks,
        ranks: groups.data.size(),
        rank: groups.data.rank(),
    };
    let slices = plan.slices(comm.rank());
    let blocks = plan.network.sliced(&slices);
    let stage = plan.stage(plan.mesh.stage(comm.rank()), &loans(&blocks));
    let sharded = Sharded::new(
        backend.clone(),
        groups,
        plan.residency(),
        virtual_ranks,
        None,
        &blocks,
        &slices,
        stage,
        None,
    )?;
    let model = Model::new(backend, blocks, plan.objective().sliced(&slices), sharded)
        .with_logit_rows(plan.logit_rows);
    match plan.has_tables_on_host() {
        true => behind_tables(comm, plan, model, false),
        false => Ok(model),
    }
}

/// Checks the files of a checkpoint, each on one rank, and replaces the parameters by those of the
/// checkpoint, or by their running average, if it has one: collective over `world`.
///
/// # Errors
/// Returns an error, the same on all ranks, if it is damaged, or another model's.
pub fn load<B: Kernels>(world: &Group<B>, model: &mut Model<B>, reader: &mut Reader) -> Result<()> {
    reader.fetch(world, &model.sharded.restored())?;
    let checked = reader.check_files();
    world.all_ok(
        checked.and_then(|()| reader.manifest().check(reader.dir(), model.sharded.layouts(), None)),
    )?;
    let used = reader.used();
    world.all_ok(
        model.sharded.restore(|tensor, _, columns, range, out| {
            reader.read(tensor, used, columns, range, out)
        }),
    )
}
