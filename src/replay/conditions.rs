//! The conditions of equal bits that a run, or its replay, does not meet.

use std::collections::BTreeSet;

use crate::comm;
use crate::config::{Config, DeviceChoice, LayerList, MessageDtype, ResolvedConfig};
use crate::nn::layers::Layer;
use crate::parallel::ReduceAfter;
use crate::run_dir::differences;
use crate::telemetry::starts::StartedJob;
use crate::verify::LayoutRow;

/// Returns why the samples of a micro-batch see each other, if they do.
pub fn mixing(plan: &ResolvedConfig) -> Option<&'static str> {
    if plan.loss.over_batch() {
        return Some("the loss compares the samples of the batch");
    }
    let LayerList::List(layers) = &plan.config.model.layers else { return None };
    has_batch_norm(layers).then_some("batch_norm mixes the samples of a micro-batch")
}

/// Returns true if a batch normalisation takes its statistics over all ranks.
pub fn has_synchronised(config: &Config) -> bool {
    match &config.model.layers {
        LayerList::List(layers) => Layer::synchronised(layers, "model.layers").is_some(),
        LayerList::Count(_) => false,
    }
}

/// Returns true if there is a batch normalisation among layers and the layers inside them.
fn has_batch_norm(layers: &[Layer]) -> bool {
    layers.iter().any(|layer| match layer {
        Layer::BatchNorm { .. } => true,
        Layer::Residual { layers, shortcut } => has_batch_norm(layers) || has_batch_norm(shortcut),
        Layer::EmbeddingTables { dense, .. } => has_batch_norm(dense),
        _ => false,
    })
}

/// Returns the layout of a run.
fn layout(plan: &ResolvedConfig) -> LayoutRow {
    LayoutRow {
        ranks: plan.mesh.ranks(),
        pipeline: plan.mesh.pipeline,
        tensor: plan.mesh.tensor,
        zero: plan.config.parallel.zero,
        shard: plan.mesh.shard,
        replica: plan.mesh.replica,
        storage: plan.config.parallel.storage,
        reduce: plan.config.parallel.reduce,
    }
}

/// Returns true if a layout adds in the tree of one rank.
fn is_tree(plan: &ResolvedConfig, row: &LayoutRow) -> bool {
    let replicas = plan.local_sgd.map(|averaging| averaging.replicas);
    let in_blocks = plan.reduce_after == ReduceAfter::StepInBlocks;
    row.same_tree(in_blocks, plan.virtual_ranks, plan.virtual_tensor_ranks, replicas)
}

/// A start of the run that took steps of a replay.
pub struct ReplayedJob {
    /// The finished steps from which it went on.
    pub since: u64,
    /// The record of the start.
    pub job: StartedJob,
    /// Its configuration.
    pub config: Config,
    /// Its plan, with the data of the replay.
    pub plan: ResolvedConfig,
}

/// Returns what may explain differences between a run and its replay, a sentence each. `of_run` is
/// the plan of the last step, and `jobs` are the starts of the run that took the steps after step
/// `from`, as far as they are recorded.
pub fn unmet(
    of_run: &ResolvedConfig,
    jobs: &[ReplayedJob],
    from: u64,
    replay: &Config,
    ranks: usize,
) -> Vec<String> {
    let mut found = Vec::new();
    if jobs.first().is_none_or(|first| first.since > from) {
        found.push(
            "starts.jsonl has no record of the start that took these steps: its configuration, \
             version and hosts are unknown"
                .to_owned(),
        );
    }
    if jobs.is_empty() {
        found.extend(unmet_by_run(of_run, of_run));
    }
    for job in jobs {
        found.extend(unmet_by_run(&job.plan, of_run));
        found.extend(unmet_by_job(job, &of_run.config));
    }
    found.extend(tree_of(of_run, "the replay", &replay_layout(replay, ranks)));
    let mut seen = BTreeSet::new();
    found.retain(|sentence| seen.insert(sentence.clone()));
    found
}

/// Returns a sentence if a layout adds gradients in another tree than one rank.
fn tree_of(of_run: &ResolvedConfig, what: &str, row: &LayoutRow) -> Option<String> {
    (!is_tree(of_run, row)).then(|| {
        format!(
            "{what} on {} ranks adds gradients in another tree: each rank and each replica needs \
             a power of two of the {} virtual ranks",
            row.ranks, of_run.virtual_ranks
        )
    })
}

/// Returns the conditions that the plan of a start does not meet.
fn unmet_by_run(plan: &ResolvedConfig, of_run: &ResolvedConfig) -> Vec<String> {
    let Config { comm: messages, device, run, .. } = &plan.config;
    let mut found = Vec::new();
    found.extend(tree_of(of_run, "the run", &layout(plan)));
    if plan.mesh.ranks() > 1 {
        let algorithm = messages.algorithm.to_string();
        if ["ring", "vendor"].contains(&&*algorithm) {
            found.push(format!("comm.algorithm = {algorithm} adds in another order"));
        }
        if !messages.deterministic {
            found.push("comm.deterministic = false may choose another order of additions".into());
        }
        if messages.dtype == MessageDtype::Bf16 {
            found.push(
                "comm.dtype = bf16 rounds gradients at points that depend on the layout".into(),
            );
        }
    }
    if run.device == DeviceChoice::Mixed {
        found.push("run.device = mixed computed on CPUs and GPUs, which round differently".into());
    }
    if device.matmul_autotune {
        found.push("device.matmul_autotune = true chooses GEMM algorithms by a measurement".into());
    }
    found
}

/// Returns the differences between the job of a start and this one.
fn unmet_by_job(job: &ReplayedJob, now: &Config) -> Vec<String> {
    let ReplayedJob { since, job: StartedJob { hpctrain, hosts, .. }, config, .. } = job;
    let mut found = Vec::new();
    let version = env!("CARGO_PKG_VERSION");
    if hpctrain != version {
        found.push(format!("the run used hpctrain {hpctrain}, this is {version}"));
    }
    let here = comm::single::<crate::backend::cpu::Cpu>().node().host.to_string();
    if !hosts.contains(&here) {
        let there = hosts.first().map_or("hosts that are not recorded", String::as_str);
        found.push(format!(
            "the run computed on {there}, this is {here}: another kind of GPU, or other vector \
             instructions, give other last bits"
        ));
    }
    let changed = differences(config, now, decides_curve);
    found.extend(changed.iter().map(|change| {
        format!("the start of the run at step {since} had another configuration: {change}")
    }));
    found
}

/// Returns the layout of a replay, which has data-parallel ranks only.
fn replay_layout(replay: &Config, ranks: usize) -> LayoutRow {
    LayoutRow {
        ranks,
        pipeline: 1,
        tensor: 1,
        zero: replay.parallel.zero,
        shard: replay.parallel.shard.unwrap_or(1),
        replica: replay.parallel.replica.unwrap_or(1),
        storage: replay.parallel.storage,
        reduce: replay.parallel.reduce,
    }
}

/// Returns true if a key decides the numbers of training.
fn decides_curve(section: &str, key: &str) -> bool {
    matches!(
        (section, key),
        ("run", "seed" | "steps" | "device")
            | ("data", "exclude" | "shuffle" | "mix" | "order" | "augment" | "repeat")
            | ("parallel", "virtual_ranks" | "virtual_tensor_ranks")
            | ("batch", "global" | "micro")
            | ("model" | "loss" | "optimizer" | "lr_schedule" | "precision" | "local_sgd", _)
    )
}
