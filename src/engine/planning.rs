//! Resolves a configuration to a plan, for the ranks and the data of a run.

use super::micro_batches;
use super::splits::check_sizes;
use hpctrain_base::error::Result;
use hpctrain_comm::Comm;
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, Environment, ResolvedConfig, resolve};
use hpctrain_data::Source;
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
    let facts = Environment { ranks: world.size(), threads, vocabulary, on_gpu: !B::ON_HOST };
    world.all_ok(plan_for(config, &facts, train))
}

/// Resolves a configuration for an environment and the data of `train`, like [`plan`] on one
/// process.
///
/// # Errors
/// Returns an error if a key is invalid, if the network cannot take the samples, or if there are
/// fewer samples than a global batch.
pub fn plan_for(
    mut config: Config,
    facts: &Environment,
    train: &dyn Source,
) -> Result<ResolvedConfig> {
    config.resolve_batch(facts.ranks)?;
    config.count_epochs(train.samples());
    let plan = resolve(config, facts)?;
    check_sizes(&plan, train)?;
    micro_batches::check_size(&plan, train)?;
    Ok(plan)
}
