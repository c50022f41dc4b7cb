//! The network of a plan on its mesh, ready to train.

use std::path::Path;

use super::collectives::{self, Exchange};
use super::host_inputs::HostInputs;
use super::model::Model;
use super::step::{Engine, Geometry};
use crate::backend::Kernels;
use crate::backend::cpu::Cpu;
use crate::comm::Comm;
use crate::config::Plan;
use crate::error::Result;
use crate::nn::{Blocks, loans};
use crate::parallel::{Lanes, Sharded, Updates};

/// The network on its mesh. Collective over the world. `choices` is the file in which a measurement of collectives may
/// be kept.
///
/// # Errors
/// Out of memory, or a message between ranks failed.
pub fn engine<B: Kernels>(
    comm: &Comm<B>,
    plan: &Plan,
    backend: B,
    choices: Option<&Path>,
) -> Result<(Engine<B>, Exchange)> {
    engine_of(comm, plan, plan.network.sliced(&plan.slices(comm.rank())), backend, choices)
}

/// As [`engine`], of other blocks than those of the plan's network, made for the same [slices](Plan::slices): they take the same samples and give outputs of the same
/// width.
///
/// # Errors
/// As [`engine`].
pub fn engine_of<B: Kernels>(
    comm: &Comm<B>,
    plan: &Plan,
    blocks: Blocks<B>,
    backend: B,
    choices: Option<&Path>,
) -> Result<(Engine<B>, Exchange)> {
    let (groups, exchange) = collectives::groups(comm, plan, &backend, &blocks, choices)?;
    let data = &groups.data;
    let number = plan.mesh.stage(comm.rank());
    let stage = plan.stage(number, &loans(&blocks));
    let lanes = Lanes { total: plan.lanes, ranks: data.size(), rank: data.rank() };
    let (keep, seed) = (plan.residency(), plan.config.run.seed);
    let host = plan.config.optimizer.offload.then(|| Cpu::profiled(plan.threads, backend.profile().clone()));
    let groups_of = plan.config.optimizer.groups.clone();
    let updates = Updates {
        rule: plan.rule,
        groups: groups_of,
        average: plan.average,
        averaging: plan.averaging,
        storage: plan.config.parallel.storage,
        audit_every: plan.config.run.audit_every,
        host,
    };
    let slices = plan.slices(comm.rank());
    let sharded =
        Sharded::new(backend.clone(), groups, keep, lanes, Some(updates), &blocks, &slices, stage, Some(seed))?;
    let geometry = Geometry {
        schedule: plan.step_schedule(number),
        rows: plan.micro as usize * plan.network.context(),
        predictions: plan.tokens_of_replica(),
        recompute: plan.config.parallel.recompute,
        seed,
    };
    let host_inputs = plan.config.parallel.offload_activations.then(|| HostInputs::new(&backend)).transpose()?;
    let model = Model::new(backend, blocks, plan.objective().sliced(&slices), sharded).with_logit_rows(plan.logit_rows);
    Ok((Engine { model, geometry, host_inputs }, exchange))
}
