//! Embedding tables: their memory (`model.place.tables`), their updates (`optimizer.tables`) and
//! their ranks (`parallel.tables`).

use super::{
    Config, EmbeddingPlacement, Interval, LayerList, OptimizerKind, TableShardingChoice,
    TableUpdates,
};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::mesh::Mesh;
use hpctrain_nn::Network;
use hpctrain_nn::layers::Layer;
use hpctrain_parallel::{Storage, TableSharding};

/// Returns the network for the placement of its embedding tables: with tables on the host, or with
/// sparse updates, its first block contains only the tables.
///
/// # Errors
/// Returns an error if the host cannot hold the tables: there is no GPU, the network does not begin
/// with embedding tables, or the layout shards their block or averages it.
pub fn with_embedding_placement(
    config: &Config,
    network: Network,
    mesh: &Mesh,
    virtual_tensor_ranks: usize,
    sparse: Option<TableSharding>,
    on_gpu: bool,
) -> Result<Network> {
    if config.model.place.tables == EmbeddingPlacement::Device {
        return match sparse {
            Some(_) => network.with_separate_embedding().map_err(Error::internal),
            None => Ok(network),
        };
    }
    let refused = |why: &str| Error::input(format!("model.place.tables = host {why}"));
    if !on_gpu {
        return Err(refused("is for GPUs").hint(
            "omit it, or run on a node with a GPU: on a CPU tables are in host memory anyway",
        ));
    }
    if let Some((key, why)) = unsupported_layout(config, mesh, virtual_tensor_ranks) {
        return Err(refused(&format!("does not go with {key}, {why}"))
            .hint(format!("omit {key}, or set model.place.tables=device")));
    }
    network.with_separate_embedding().map_err(|why| {
        refused(why)
            .hint("omit it: layer-list models, and Llamas with model.tied = false, support it")
    })
}

/// Returns a key that is set and does not go with tables that are a separate block in host memory,
/// and the reason.
fn unsupported_layout(
    config: &Config,
    mesh: &Mesh,
    virtual_tensor_ranks: usize,
) -> Option<(&'static str, &'static str)> {
    let averages = config.local_sgd.sync_every != Interval::Steps(0);
    let is_central = config.parallel.storage == Storage::Central;
    let layouts = [
        (mesh.pipeline > 1, "parallel.pipeline", "whose stages are all on one device"),
        (virtual_tensor_ranks > 1, "parallel.tensor", "which divides tables among devices"),
        (is_central, "parallel.storage", "whose owners hold all parameters"),
        (averages, "local_sgd.sync_every", "which averages parameters of the device"),
    ];
    layouts.into_iter().find(|(is_set, ..)| *is_set).map(|(_, key, why)| (key, why))
}

/// Returns a key that is set and does not go with sparse updates, and the reason.
fn unsupported_with_sparse(config: &Config, on_gpu: bool) -> Option<(&'static str, &'static str)> {
    let is_layerwise = matches!(config.optimizer.kind, OptimizerKind::Lamb | OptimizerKind::Lars);
    let is_on_gpu = on_gpu && config.model.place.tables == EmbeddingPlacement::Device;
    let keys = [
        (is_on_gpu, "model.place.tables = device", "since sparse tables are in host memory"),
        (is_layerwise, "optimizer.kind", "which needs the norms of whole tables"),
        (config.optimizer.ema > 0.0, "optimizer.ema", "which changes all rows in every step"),
        (config.run.sdc_check_every > 0, "run.sdc_check_every", "which reads all rows"),
    ];
    keys.into_iter().find(|(is_set, ..)| *is_set).map(|(_, key, why)| (key, why))
}

/// Returns how the rows of embedding tables with sparse updates are divided among ranks; `None` for
/// dense updates.
///
/// # Errors
/// Returns an error if `optimizer.tables` or `parallel.tables` is set and not supported with other
/// keys or by the network.
pub fn sparse_tables(
    config: &Config,
    network: &Network,
    mesh: &Mesh,
    virtual_tensor_ranks: usize,
    on_gpu: bool,
) -> Result<Option<TableSharding>> {
    let unsupported = unsupported_layout(config, mesh, virtual_tensor_ranks)
        .or_else(|| unsupported_with_sparse(config, on_gpu));
    let separate = network.with_separate_embedding();
    let is_sparse = match config.optimizer.tables {
        TableUpdates::Dense => false,
        TableUpdates::Auto => {
            has_tables(config)
                && config.sparse_updates_are_exact()
                && unsupported.is_none()
                && separate.is_ok()
        }
        TableUpdates::Sparse => {
            let refused = |why: &str| Error::input(format!("optimizer.tables = sparse {why}"));
            if let Some((key, why)) = unsupported {
                return Err(refused(&format!("does not go with {key}, {why}"))
                    .hint(format!("change {key}, or set optimizer.tables=dense")));
            }
            separate.map_err(|why| {
                refused(why).hint(
                    "omit it: layer-list models, and Llamas with model.tied = false, support it",
                )
            })?;
            true
        }
    };
    let choice = config.parallel.tables;
    if !is_sparse && choice != TableShardingChoice::Auto {
        return Err(Error::input(
            "parallel.tables divides embedding tables with sparse updates, but these have dense ones",
        )
        .hint("omit it, or set optimizer.tables=sparse"));
    }
    Ok(is_sparse.then(|| choice.resolve(config.parallel.zero)))
}

/// Returns true if the first layer is embedding tables, of which a batch contains few rows.
fn has_tables(config: &Config) -> bool {
    match &config.model.layers {
        LayerList::List(layers) => {
            matches!(layers.first(), Some(Layer::EmbeddingTables { .. }))
        }
        LayerList::Count(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Environment, Sources, load, resolve};
    use hpctrain_cpu::Cpu;

    fn resolved(
        preset: &str,
        ranks: usize,
        settings: &[&str],
        on_gpu: bool,
    ) -> Result<crate::ResolvedConfig> {
        let overrides: Vec<String> =
            settings.iter().chain(&["model.place.tables=host"]).map(|s| s.to_string()).collect();
        let (config, _) =
            load(&Sources { preset: Some(preset), overrides: &overrides, ..Sources::default() })?;
        resolve(config, &Environment { ranks, threads: 1, vocabulary: Some(65), on_gpu })
    }

    /// Returns the names and shapes of the tensors of each block.
    fn names(network: &Network) -> Vec<Vec<(String, Vec<usize>)>> {
        let blocks = network.blocks::<Cpu>();
        let tensors = blocks.iter().map(|block| block.tensors().into_iter());
        tensors.map(|all| all.map(|tensor| (tensor.name, tensor.shape)).collect()).collect()
    }

    #[test]
    fn tables_are_a_separate_block_with_the_same_tensors() {
        for preset in ["dlrm", "llama-char"] {
            let plan = resolved(preset, 2, &["parallel.zero=3"], true).unwrap();
            let whole = crate::network(&mut plan.config.model.clone(), None).unwrap();
            assert_eq!(plan.network.describe(), whole.describe());
            let offloaded = names(&plan.network);
            let whole = names(&whole);
            assert!(
                offloaded[0]
                    .iter()
                    .all(|(name, _)| name.contains("tables") || name.contains("embed_tokens"))
            );
            let [mut one, mut other] = [offloaded, whole].map(|blocks| blocks.concat());
            one.sort();
            other.sort();
            assert_eq!(one, other, "{preset}");
            let stage = plan.stage(0, &[None, None, None]);
            assert!(stage.takes_embedding_rows() && stage.is_last() && stage.units == (1..3));
            // Resolved again it is the same.
            let facts = Environment { ranks: 2, threads: 9, vocabulary: None, on_gpu: true };
            assert_eq!(resolve(plan.config.clone(), &facts).unwrap(), plan);
        }
    }

    #[test]
    fn unsupported_embedding_offload_is_an_error() {
        let only = "model.layers=[{kind='embedding_tables', ids=[3], width=1}, {kind='flatten'}]";
        for (preset, ranks, settings, on_gpu, expected) in [
            ("dlrm", 1, &[][..], false, "is for GPUs"),
            ("dlrm", 2, &["parallel.pipeline=2"], true, "does not go with parallel.pipeline"),
            ("llama-char", 2, &["parallel.tensor=2"], true, "does not go with parallel.tensor"),
            (
                "llama-char",
                1,
                &["parallel.virtual_tensor_ranks=2"],
                true,
                "does not go with parallel.tensor",
            ),
            ("dlrm", 2, &["parallel.storage=central"], true, "does not go with parallel.storage"),
            ("dlrm", 2, &["local_sgd.sync_every=3"], true, "does not go with local_sgd.sync_every"),
            ("gpt-char", 1, &[], true, "but the head of a GPT multiplies by the table as well"),
            (
                "llama-char",
                1,
                &["model.tied=true"],
                true,
                "but model.tied = true multiplies by the table as well",
            ),
            (
                "llama-char",
                1,
                &["model.dropout=0.1"],
                true,
                "but model.dropout drops elements of its rows",
            ),
            (
                "mlp-mnist",
                1,
                &[],
                true,
                "but model.layers does not begin with embedding or embedding_tables",
            ),
            (
                "dlrm",
                1,
                &[only, "model.input=[0]"],
                true,
                "but model.layers does not begin with embedding",
            ),
        ] {
            let error = resolved(preset, ranks, settings, on_gpu).unwrap_err();
            let text = error.to_string();
            assert!(
                text.starts_with("model.place.tables = host ") && text.contains(expected),
                "{settings:?}: {text}"
            );
            assert!(
                error.exit_code() == 2 && text.contains("\nhint: ") && text.lines().count() == 2,
                "{text}"
            );
        }
    }
}
