//! Embedding offload to host memory: `model.place.tables`.

use super::{Config, EmbeddingPlacement};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::mesh::Mesh;
use hpctrain_nn::Network;
use hpctrain_parallel::Storage;

/// Returns the network for the placement of its embedding tables: with tables on the host, its
/// first block contains only the tables.
///
/// # Errors
/// Returns an error if the host cannot hold the tables: there is no GPU, the network does not begin
/// with embedding tables, or the layout shards their block or averages it.
pub fn with_embedding_placement(
    config: &Config,
    network: Network,
    mesh: &Mesh,
    virtual_tensor_ranks: usize,
    on_gpu: bool,
) -> Result<Network> {
    if config.model.place.tables == EmbeddingPlacement::Device {
        return Ok(network);
    }
    let refused = |why: &str| Error::input(format!("model.place.tables = host {why}"));
    if !on_gpu {
        return Err(refused("is for GPUs").hint(
            "leave it out, or run on a node with a GPU: on a CPU tables are in host memory anyway",
        ));
    }
    let parallel = &config.parallel;
    let layouts = [
        (mesh.pipeline > 1, "parallel.pipeline", "whose stages are all on GPUs"),
        (virtual_tensor_ranks > 1, "parallel.tensor", "which divides tables among GPUs"),
        (
            parallel.storage == Storage::Central,
            "parallel.storage",
            "whose owners hold all parameters",
        ),
        (
            config.local_sgd.sync_every != super::Interval::Steps(0),
            "local_sgd.sync_every",
            "which averages parameters on GPUs",
        ),
    ];
    if let Some((_, key, why)) = layouts.into_iter().find(|(is_set, ..)| *is_set) {
        return Err(refused(&format!("does not go with {key}, {why}"))
            .hint(format!("leave {key} out, or set model.place.tables=device")));
    }
    network.with_separate_embedding().map_err(|why| {
        refused(why)
            .hint("leave it out: layer-list models, and Llamas with model.tied = false, support it")
    })
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
