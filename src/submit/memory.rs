//! The layout of the ranks of a job, and whether a rank fits into the memory of a GPU.

use super::job::BatchJob;
use super::site::SiteFile;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::backend::format_bytes;
use crate::config::{Config, LayoutMode, ResolvedConfig, resolve};
use crate::engine::memory::{self, BaselineMemory, MemoryBudget};
use crate::error::{Error, Result};
use crate::gpu_assignment::check_cpu;
use crate::planner::{Machine, SearchLimits, environment, search_layouts};

/// The machine whose rates sort the layouts of `parallel.layout = auto`; only whether one fits is
/// used.
const RATES: &str = "dgx-h100";

/// Resolves the configuration for the ranks of the job, and describes their layout and memory in
/// one line.
///
/// # Errors
/// Returns an error if the configuration is invalid on these ranks, if its data cannot be opened,
/// or if a rank needs more memory than `run.memory_limit` or `gpu_memory` of the site file.
pub(super) fn check(config: &Config, job: &BatchJob, site: &SiteFile) -> Result<String> {
    let on_gpu = job.has_gpus();
    if !on_gpu {
        check_cpu(config)?;
    }
    let ranks = job.ranks();
    let facts = environment(config, ranks, job.cores_per_rank.unwrap_or(1), on_gpu)?;
    let held = BaselineMemory {
        messages: 0,
        messages_on_device: on_gpu,
        resident: memory::resident().0,
        cache: 0,
        foreign_ranks: usize::from(job.nodes > 1),
        replaced: 0,
    };
    let room = MemoryBudget {
        host: config.run.memory_limit.map_or(usize::MAX, |limit| limit.0),
        gpu: site.gpu_memory.map_or(usize::MAX, |memory| memory.0),
    };
    let mut config = config.clone().with_any_length();
    if config.parallel.layout == LayoutMode::Auto {
        config.parallel.layout = LayoutMode::Given;
        let place = SearchLimits { room, held, per_node: job.ranks_per_node };
        let found = search_layouts(&config, &facts, &place, |_| Machine::named(RATES))?;
        let fitting = found.proposals.len();
        return Ok(format!("the ranks choose one of {fitting} layouts (parallel.layout = auto)"));
    }
    let plan = resolve(config, &facts)?;
    let need = match on_gpu {
        true => memory::worst::<Cuda>(&plan, held),
        false => memory::worst::<Cpu>(&plan, held),
    };
    let host = format_bytes(need.host());
    let need_text = match on_gpu {
        true => format!("{} of GPU memory and {host} of host memory", format_bytes(need.gpu())),
        false => format!("{host} of memory"),
    };
    if !room.holds(&need) {
        let (parts, limit) = match need.gpu() > room.gpu {
            true => {
                let path = site.path.display();
                let most = format_bytes(room.gpu);
                (need.gpu_parts(), format!("gpu_memory = {most} in {path}"))
            }
            false => (need.host_parts(), format!("run.memory_limit = {}", format_bytes(room.host))),
        };
        let hint = match on_gpu {
            true => memory::smallest_change::<Cuda>(&plan, &room, held),
            false => memory::smallest_change::<Cpu>(&plan, &room, held),
        };
        let message = format!("a rank needs {need_text} ({parts}), more than {limit}");
        return Err(Error::input(message).hint(hint));
    }
    Ok(format!("{}; a rank needs {need_text}", layout(&plan)))
}

/// Describes the layout of a plan.
fn layout(plan: &ResolvedConfig) -> String {
    let mesh = &plan.mesh;
    format!(
        "pipeline {} × replica {} × shard {} × tensor {}, ZeRO {}, micro-batches of {}",
        mesh.pipeline,
        mesh.replica,
        mesh.shard,
        mesh.tensor,
        u8::from(plan.config.parallel.zero),
        plan.micro
    )
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::small_job;
    use super::*;
    use crate::config::{Sources, load};

    fn on_gpus(site: &str, settings: &[&str]) -> Result<String> {
        let overrides: Vec<String> = settings.iter().map(ToString::to_string).collect();
        let sources =
            Sources { preset: Some("gpt2-124m"), overrides: &overrides, ..Sources::default() };
        let config = load(&sources)?.0;
        let job = BatchJob { gpus_per_node: 2, ..small_job() };
        check(&config, &job, &SiteFile::parse(site, "/s.toml".into())?)
    }

    const KNOWN: [&str; 2] = ["model.vocabulary=50304", "batch.global=16"];

    #[test]
    fn a_rank_that_does_not_fit_a_gpu_is_refused() {
        let line = on_gpus("gpu_memory = '74GiB'", &KNOWN).unwrap();
        assert!(line.starts_with("pipeline 1 × replica 4 × shard 1 × tensor 1, ZeRO "), "{line}");
        assert!(line.contains("; a rank needs ") && line.contains(" of GPU memory and "), "{line}");
        let error = on_gpus("gpu_memory = '1GiB'", &KNOWN).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        assert!(error.contains("more than gpu_memory = 1.0 GiB in /s.toml\nhint: "), "{error}");
    }

    #[test]
    fn a_layout_that_the_ranks_choose_is_searched() {
        let few = ["parallel.layout=auto", "parallel.pipeline=1", "parallel.tensor=1"];
        let auto = [&KNOWN[..], &few, &["model.layers=2"]].concat();
        let line = on_gpus("", &auto).unwrap();
        assert!(line.starts_with("the ranks choose one of "), "{line}");
        let error = on_gpus("gpu_memory = '100MiB'", &auto).unwrap_err().to_string();
        assert!(error.starts_with("no layout fits: of 4 ranks "), "{error}");
    }

    #[test]
    fn a_batch_that_the_ranks_do_not_divide_is_refused() {
        let error = on_gpus("", &["model.vocabulary=50304", "batch.global=6"]).unwrap_err();
        assert!(error.to_string().contains("batch.global"), "{error}");
    }
}
