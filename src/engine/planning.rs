//! Resolves a configuration to a plan, for the ranks and the data of a run.

use std::path::Path;
use std::sync::Arc;

use super::micro_batches;
use super::splits::check_sizes;
use hpctrain_base::error::Result;
use hpctrain_comm::{Comm, Group};
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, DeviceChoice, Environment, ResolvedConfig, resolve};
use hpctrain_data::{ExcludedSamples, Source};
use hpctrain_device::Kernels;

/// Resolves a configuration for the ranks of `comm` and the data of `train`. `threads` is the
/// number of compute threads per rank; by default the ranks of a node share its cores. Collective
/// over the world.
///
/// # Errors
/// Returns an error, the same on all ranks, if a key is invalid, if the network cannot take the
/// samples, or if there are fewer samples than a global batch. Also if a message between ranks
/// fails.
pub fn plan<B: Kernels>(
    comm: &Comm<B>,
    config: Config,
    train: &dyn Source,
    threads: Option<usize>,
) -> Result<ResolvedConfig> {
    let world = comm.world();
    let threads = match threads {
        Some(threads) => threads,
        None => Topology::gather(&world, comm.node().host)?.threads(),
    };
    let vocabulary = Some(train.vocabulary()).filter(|ids| *ids > 0);
    let on_gpu = !B::ON_HOST && config.run.device != DeviceChoice::Mixed;
    let facts = Environment { ranks: world.size(), threads, vocabulary, on_gpu };
    let excluded = read_excluded(&world, &config, train)?;
    world.all_ok(plan_without(config, &facts, train, excluded))
}

/// Resolves a configuration for an environment and the data of `train`, like [`plan`] on one
/// process.
///
/// # Errors
/// Returns an error if a key is invalid, if the network cannot take the samples, or if there are
/// fewer samples than a global batch.
pub fn plan_for(config: Config, facts: &Environment, train: &dyn Source) -> Result<ResolvedConfig> {
    let file = config.data.exclude.as_deref();
    let excluded = file.map(|file| ExcludedSamples::read(file.as_ref(), train.samples()));
    let excluded = excluded.transpose()?;
    plan_without(config, facts, train, excluded)
}

/// Resolves a configuration for an environment and the data of `train`, without some samples.
fn plan_without(
    mut config: Config,
    facts: &Environment,
    train: &dyn Source,
    excluded: Option<ExcludedSamples>,
) -> Result<ResolvedConfig> {
    config.resolve_batch(facts.ranks)?;
    config.count_epochs(train.samples());
    let mut plan = resolve(config, facts)?;
    plan.excluded = excluded.map(Arc::new);
    check_sizes(&plan, train)?;
    micro_batches::check_size(&plan, train)?;
    Ok(plan)
}

/// Reads `data.exclude` on rank 0, which sends it to the others, so that all ranks have the same
/// samples and one reads the file. Collective.
fn read_excluded<B: Kernels>(
    world: &Group<B>,
    config: &Config,
    train: &dyn Source,
) -> Result<Option<ExcludedSamples>> {
    let Some(file) = &config.data.exclude else { return Ok(None) };
    let numbers = world.all_ok(if world.rank() == 0 {
        let excluded = ExcludedSamples::read(Path::new(file), train.samples());
        excluded.map(|excluded| excluded.numbers().to_vec())
    } else {
        Ok(vec![])
    })?;
    world.broadcast_numbers(&numbers).map(|numbers| Some(ExcludedSamples::new(numbers)))
}
