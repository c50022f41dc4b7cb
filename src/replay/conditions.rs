//! The conditions of equal bits that a run, or its replay, does not meet.

use crate::checkpoint::Manifest;
use crate::comm;
use crate::config::{Config, LayerList, MessageDtype, ResolvedConfig};
use crate::nn::layers::Layer;
use crate::parallel::ReduceAfter;
use crate::run_dir::differences;
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

/// Returns what may explain differences between a run, whose plan is `of_run`, and its replay, a
/// sentence each. `now` is the configuration of the steps, `manifest` that of the run's checkpoint,
/// if the replay began at one.
pub fn unmet(
    of_run: &ResolvedConfig,
    replay: &Config,
    ranks: usize,
    manifest: Option<&Manifest>,
    now: &Config,
) -> Vec<String> {
    let Config { comm: messages, device, .. } = &of_run.config;
    let mut found = Vec::new();
    let rows = [("the run", layout(of_run)), ("the replay", replay_layout(replay, ranks))];
    for (what, row) in rows {
        if !is_tree(of_run, &row) {
            found.push(format!(
                "{what} on {} ranks adds gradients in another tree: each rank and each replica needs \
                 a power of two of the {} virtual ranks",
                row.ranks, of_run.virtual_ranks
            ));
        }
    }
    if of_run.mesh.ranks() > 1 {
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
    if device.matmul_autotune {
        found.push("device.matmul_autotune = true chooses GEMM algorithms by a measurement".into());
    }
    if let Some(manifest) = manifest {
        let version = env!("CARGO_PKG_VERSION");
        if manifest.origin.hpctrain != version {
            found.push(format!(
                "the run used hpctrain {}, this is {version}",
                manifest.origin.hpctrain
            ));
        }
        let here = comm::single::<crate::backend::cpu::Cpu>().node().host.to_string();
        if !manifest.origin.hosts.contains(&here) {
            let hosts = &manifest.origin.hosts;
            found.push(format!(
                "the run computed on {}, this is {here}: another kind of GPU, or other vector \
                 instructions, give other last bits",
                hosts.first().map_or("an unknown host", String::as_str)
            ));
        }
        let changed = differences(&manifest.config, now, decides_curve);
        found.extend(
            changed
                .iter()
                .map(|change| format!("the configuration changed after the checkpoint: {change}")),
        );
    }
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
        ("run", "seed" | "steps")
            | ("parallel", "virtual_ranks" | "virtual_tensor_ranks")
            | ("batch", "global" | "micro")
            | ("model" | "loss" | "optimizer" | "lr_schedule" | "precision" | "local_sgd", _)
    )
}
