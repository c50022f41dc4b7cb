//! The start banner: location, layout and needs of the run.

use std::fmt::Write as _;
use std::path::Path;

use super::{bytes, grouped};
use crate::ResolvedConfig;
use hpctrain_comm::DeviceTransport;
use hpctrain_device::MemoryKind;
use hpctrain_parallel::Storage;

/// Content of the banner besides the plan.
pub struct Facts<'a> {
    /// Ranks of the world.
    pub ranks: usize,
    /// Distinct hosts.
    pub hosts: usize,
    /// Host of rank 0.
    pub host: &'a str,
    /// Cores that rank 0 may use.
    pub cores: usize,
    /// The CPU quota of the control group of rank 0, in CPUs, if it has one.
    pub quota: Option<String>,
    /// Whether cores of its node are left to no rank.
    pub spare_cores: bool,
    /// Transport of messages: the MPI library, threads, or none.
    pub library: &'a str,
    /// GPU of every rank, a line each; empty on CPUs.
    pub gpus: &'a [String],
    /// Whether ranks of a node exchange through shared memory.
    pub shares_memory: bool,
    /// Path of messages to device memory, if there is any.
    pub path: Option<DeviceTransport>,
    /// The reasons for that path, where there was a choice.
    pub why_path: Option<&'a str>,
    /// Algorithms of exchanges and sums; empty if nothing is exchanged.
    pub collectives: String,
    /// Choice of the algorithms of matrix products; empty if they are not chosen by time.
    pub products: String,
    /// The run's directory.
    pub directory: &'a Path,
    /// Parameters of the network.
    pub parameters: u64,
    /// Training samples and tokens.
    pub train: (u64, u64),
    /// Validation samples, if there are any.
    pub validation: Option<u64>,
    /// Notes about the data: rows left out, conversions.
    pub notes: Vec<String>,
    /// Memory that a rank needs: of a pipeline, in the stage that needs most.
    pub memory: &'a Estimate,
    /// Step and checkpoint resumed from, if it was asked to resume; without one there was none.
    pub resumed: Option<(u64, Option<&'a Path>)>,
    /// The time that is left, where it is limited.
    pub time: Option<String>,
}

/// Ranks whose GPUs are listed, at most.
const MOST_PLACES: usize = 16;

/// Bytes a rank will need.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// On the host by category, in the order of [`MemoryKind::ALL`].
    pub host: [usize; MemoryKind::ALL.len()],
    /// On the GPU, where one computes.
    pub gpu: Option<[usize; MemoryKind::ALL.len()]>,
    /// Copies on the host on their way to and from checkpoints.
    pub staging: usize,
    /// Program, libraries, MPI, and their growth.
    pub runtime: usize,
}

impl Estimate {
    /// Memory of the host.
    pub fn host(&self) -> usize {
        self.host.iter().sum::<usize>() + self.staging + self.runtime
    }

    /// Memory of the GPU.
    pub fn gpu(&self) -> usize {
        self.gpu.iter().flatten().sum()
    }

    /// Both memories, by category.
    pub fn categories(&self) -> [usize; MemoryKind::ALL.len()] {
        std::array::from_fn(|what| self.host[what] + self.gpu.map_or(0, |gpu| gpu[what]))
    }

    /// Memory of the host by use: `parameters 3.1 MiB, …, runtime 30.0 MiB`.
    pub fn host_parts(&self) -> String {
        listed(named(&self.host).chain([("staging", self.staging), ("runtime", self.runtime)]))
    }

    /// As [`Estimate::host_parts`], of the GPU's memory.
    pub fn gpu_parts(&self) -> String {
        listed(self.gpu.iter().flat_map(named))
    }
}

fn named(
    categories: &[usize; MemoryKind::ALL.len()],
) -> impl Iterator<Item = (&'static str, usize)> {
    MemoryKind::ALL.iter().map(|what| what.name()).zip(categories.iter().copied())
}

fn listed(parts: impl Iterator<Item = (&'static str, usize)>) -> String {
    let parts =
        parts.filter(|(_, size)| *size > 0).map(|(name, size)| format!("{name} {}", bytes(size)));
    parts.collect::<Vec<_>>().join(", ")
}

/// The banner's text.
pub fn banner(plan: &ResolvedConfig, facts: &Facts<'_>) -> String {
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name:<12} {text}");
    };
    let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    line("hpctrain", env!("CARGO_PKG_VERSION").to_string());
    line("run", facts.directory.display().to_string());
    if let Some((step, from)) = facts.resumed {
        let from = from.map(|path| format!("at step {step} from {}", path.display()));
        line(
            "resumed",
            from.unwrap_or_else(|| format!("no checkpoint yet: begins at step {step}")),
        );
    }
    if let Some(time) = &facts.time {
        line("time", time.clone());
    }
    let bound = if facts.spare_cores && facts.ranks <= 2 && facts.library.starts_with("Open MPI") {
        " (mpirun binds each rank of a small job to one core: --bind-to none frees the others)"
    } else {
        ""
    };
    let quota = facts.quota.as_ref().map_or(String::new(), |cpus| format!(", CPU quota {cpus}"));
    line(
        "ranks",
        format!(
            "{} on {} ({}), {} a rank of {}{quota}{bound}",
            facts.ranks,
            plural(facts.hosts, "host"),
            facts.host,
            plural(plan.threads, "thread"),
            plural(facts.cores, "core"),
        ),
    );
    for place in facts.gpus.iter().take(MOST_PLACES) {
        line("gpu", place.clone());
    }
    if facts.gpus.len() > MOST_PLACES {
        line("", format!("and {} more ranks", facts.gpus.len() - MOST_PLACES));
    }
    line(
        "messages",
        format!(
            "{}{}{}",
            facts.library,
            if facts.shares_memory { ", shared memory inside a node" } else { "" },
            facts.path.map_or(String::new(), |path| format!(", {}", path.describe())),
        ),
    );
    if let Some(why) = facts.path.and(facts.why_path) {
        line("", why.to_string());
    }
    if !facts.collectives.is_empty() {
        line("collectives", facts.collectives.clone());
    }
    if !facts.products.is_empty() {
        line("products", facts.products.clone());
    }
    let mesh = &plan.mesh;
    line(
        "layout",
        format!(
            "pipeline {} × replica {} × shard {} × tensor {}, ZeRO {}, {}",
            mesh.pipeline,
            mesh.replica,
            mesh.shard,
            mesh.tensor,
            u8::from(plan.config.parallel.zero),
            plural(plan.virtual_ranks, "virtual_rank"),
        ),
    );
    if plan.config.parallel.storage == Storage::Central {
        let told = match mesh.shard {
            1 => "central, on the first rank".to_string(),
            owners => format!("central, on {owners} owners"),
        };
        line(
            "storage",
            told + if mesh.pipeline * mesh.tensor > 1 { " of each stage and slice" } else { "" },
        );
    }
    if let Some(averaging) = plan.averaging {
        let outer = averaging.outer.map_or(String::new(), |outer| {
            format!("; outer step at rate {} with momentum {}", outer.lr, outer.momentum)
        });
        let replicas = averaging.replicas;
        let every = plural(averaging.every as usize, "step");
        let told = format!("{replicas} replicas train apart, averaged every {every}");
        line("averages", format!("{told}, {} of them on a rank{outer}", plan.replicas_here()));
    }
    if mesh.pipeline > 1 {
        let schedule = plan.step_schedule(0);
        let blocks: Vec<String> = plan.stages.iter().map(|stage| stage.len().to_string()).collect();
        let told = format!(
            "micro-batches a rank and step: {}, idle: {:.0} %",
            schedule.micros(),
            100.0 * schedule.bubble_fraction()
        );
        line("pipeline", format!("stages of {} blocks; {told}", blocks.join(" + ")));
    }
    line("model", format!("{}: {} parameters", plan.network.describe(), grouped(facts.parameters)));
    let (samples, tokens) = facts.train;
    let tokens = if plan.network.is_language() {
        format!(" ({} tokens)", grouped(tokens))
    } else {
        String::new()
    };
    let path = plan.config.data.told();
    let validation = match facts.validation {
        Some(samples) => format!("{} for validation", grouped(samples)),
        None => {
            "no validation data: nothing is evaluated, best is the lowest mean training loss of an epoch".to_owned()
        }
    };
    line("data", format!("{path}: {} training samples{tokens}, {validation}", grouped(samples)));
    for told in &facts.notes {
        line("", told.clone());
    }
    line(
        "batch",
        format!(
            "{} samples = {} × {} × {} (virtual ranks × micro-batches × samples){}",
            plan.config.batch.global,
            plan.virtual_ranks,
            plan.micros_per_virtual_rank(),
            plan.micro,
            match plan.network.is_language() {
                true => format!(", {} tokens a step", grouped(plan.tokens_per_step())),
                false => String::new(),
            }
        ),
    );
    let memory = facts.memory;
    if memory.gpu.is_some() {
        line("gpu memory", format!("{} a rank: {}", bytes(memory.gpu()), memory.gpu_parts()));
        line("host memory", format!("{} a rank: {}", bytes(memory.host()), memory.host_parts()));
    } else {
        line("memory", format!("{} a rank: {}", bytes(memory.host()), memory.host_parts()));
    }
    out
}
