//! The startup summary: directory, layout and memory of the run.

use std::fmt::Write as _;
use std::path::Path;

use super::{bytes, grouped};
use crate::{Config, DataOrder, Device, OrAuto, ResolvedConfig};
use hpctrain_comm::DeviceTransport;
use hpctrain_data::ExcludedSummary;
use hpctrain_device::MemoryKind;
use hpctrain_parallel::{ReduceAfter, Storage};

/// The contents of the startup summary besides the configuration.
pub struct StartupFacts<'a> {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of distinct hosts.
    pub hosts: usize,
    /// The host of rank 0.
    pub host: &'a str,
    /// The number of cores that rank 0 may use.
    pub cores: usize,
    /// The CPU quota of the control group of rank 0, in CPUs, if it has one.
    pub quota: Option<String>,
    /// Whether cores of its node are used by no rank.
    pub spare_cores: bool,
    /// The transport of messages: the MPI library, threads, or none.
    pub library: &'a str,
    /// The device of every rank, one line each; empty if all compute on CPUs.
    pub devices: &'a [String],
    /// Notes about them, one line each.
    pub device_notes: &'a [String],
    /// Whether the ranks are numbered by node and not by the launcher.
    pub is_renumbered: bool,
    /// Whether ranks of a node communicate through shared memory.
    pub shares_memory: bool,
    /// The transport of GPU buffers, if there are any.
    pub transport: Option<DeviceTransport>,
    /// The reasons for that transport, if there was a choice.
    pub transport_reason: Option<&'a str>,
    /// The algorithms of collectives; empty if there is no communication.
    pub collectives: String,
    /// The choice of GEMM algorithms; empty without autotuning.
    pub matmuls: String,
    /// The run's directory.
    pub directory: &'a Path,
    /// The number of parameters of the network.
    pub parameters: u64,
    /// The numbers of training samples and tokens.
    pub train: (u64, u64),
    /// The number of validation samples, if there are any.
    pub validation: Option<u64>,
    /// Notes about the data, such as omitted rows and conversions.
    pub notes: Vec<String>,
    /// The memory that a rank needs: in a pipeline, that of the stage that needs most.
    pub memory: &'a Estimate,
    /// Bytes of this rank's GPU that NCCL has taken for its buffers.
    pub nccl_memory: usize,
    /// The step and the checkpoint that a resumed run starts from; without a checkpoint it starts
    /// from the beginning.
    pub resumed: Option<(u64, Option<&'a Path>)>,
    /// The remaining time, if it is limited.
    pub time: Option<String>,
}

/// The most ranks whose GPUs are listed.
const MAX_LISTED_RANKS: usize = 16;

/// The bytes that a rank will need.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// Host memory by category, in the order of [`MemoryKind::ALL`].
    pub host: [usize; MemoryKind::ALL.len()],
    /// GPU memory by category, if ranks compute on GPUs.
    pub gpu: Option<[usize; MemoryKind::ALL.len()]>,
    /// Host memory for staging copies to and from checkpoints.
    pub staging: usize,
    /// Host memory of the program, libraries and MPI, including its growth.
    pub runtime: usize,
}

impl Estimate {
    /// Returns the host memory in bytes.
    pub fn host(&self) -> usize {
        self.host.iter().sum::<usize>() + self.staging + self.runtime
    }

    /// Returns the GPU memory in bytes.
    pub fn gpu(&self) -> usize {
        self.gpu.iter().flatten().sum()
    }

    /// Returns the sum of host and GPU memory by category.
    pub fn categories(&self) -> [usize; MemoryKind::ALL.len()] {
        std::array::from_fn(|kind| self.host[kind] + self.gpu.map_or(0, |gpu| gpu[kind]))
    }

    /// Formats the host memory by use: `parameters 3.1 MiB, …, runtime 30.0 MiB`.
    pub fn host_parts(&self) -> String {
        listed(named(&self.host).chain([("staging", self.staging), ("runtime", self.runtime)]))
    }

    /// Formats the GPU memory by use.
    pub fn gpu_parts(&self) -> String {
        listed(self.gpu.iter().flat_map(named))
    }
}

fn named(
    categories: &[usize; MemoryKind::ALL.len()],
) -> impl Iterator<Item = (&'static str, usize)> {
    MemoryKind::ALL.iter().map(|kind| kind.name()).zip(categories.iter().copied())
}

fn listed(parts: impl Iterator<Item = (&'static str, usize)>) -> String {
    let parts =
        parts.filter(|(_, size)| *size > 0).map(|(name, size)| format!("{name} {}", bytes(size)));
    parts.collect::<Vec<_>>().join(", ")
}

/// Describes the virtual ranks, and how many a rank has where these are unequal numbers.
fn virtual_ranks(plan: &ResolvedConfig) -> String {
    let total = plan.virtual_ranks;
    let total = if total == 1 { "1 virtual rank".into() } else { format!("{total} virtual ranks") };
    let most = plan.assignment().most();
    if let Some(counts) = &plan.virtual_rank_counts {
        let counts: Vec<String> = counts.iter().map(ToString::to_string).collect();
        return format!("{total} ({} on the ranks)", counts.join(", "));
    }
    match plan.virtual_ranks.is_multiple_of(plan.replicas() * plan.mesh.shard) {
        true => total,
        false => format!("{total} ({} or {most} a rank)", most - 1),
    }
}

/// Returns when gradients are reduced over shards, if there is a choice.
fn reductions(plan: &ResolvedConfig) -> Option<&'static str> {
    let is_choice = plan.mesh.shard > 1 && plan.step_schedule(0).micros() > 1;
    is_choice.then_some(match plan.reduce_after {
        ReduceAfter::Step => "once per step",
        ReduceAfter::StepInBlocks => "once per step, in blocks of virtual ranks",
        ReduceAfter::MicroBatch => "after each micro-batch",
    })
}

/// Describes the keys of a configuration that have no effect because ranks compute on CPUs; `None`
/// if there are none.
pub fn keys_without_effect(config: &Config) -> Option<String> {
    let given = &config.device;
    let default = Device::default();
    let keys = [
        ("device.memory", given.memory != default.memory),
        ("device.memory_limit", given.memory_limit != default.memory_limit),
        ("device.ranks_per_gpu", given.ranks_per_gpu != default.ranks_per_gpu),
        ("device.matmul_autotune", given.matmul_autotune != default.matmul_autotune),
    ];
    let names: Vec<&str> =
        keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key).collect();
    let have = if names.len() == 1 { "has" } else { "have" };
    (!names.is_empty()).then(|| {
        format!(
            "{} {have} no effect on CPUs (hint: compute on GPUs with run.device=cuda, or omit the \
             {})",
            names.join(", "),
            if names.len() == 1 { "key" } else { "keys" },
        )
    })
}

/// Describes the time after which a wait for another rank ends the job.
fn hangs(timeout: OrAuto) -> String {
    match timeout {
        OrAuto::Auto => {
            "a wait for another rank ends the job after 120 s, or 20 × the slowest step, \
                         evaluation or save (comm.timeout = auto)"
                .to_owned()
        }
        OrAuto::Number(0) => {
            "a wait for another rank never ends the job (comm.timeout = 0)".to_owned()
        }
        OrAuto::Number(seconds) => {
            format!("a wait for another rank ends the job after {seconds} s (comm.timeout)")
        }
    }
}

/// Returns the text of the startup summary.
pub fn startup_summary(plan: &ResolvedConfig, facts: &StartupFacts<'_>) -> String {
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
    if facts.is_renumbered {
        let why = "the launcher placed consecutive ranks on different nodes (round robin)";
        line("", format!("ranks are renumbered by node: {why}"));
    }
    for device in facts.devices.iter().take(MAX_LISTED_RANKS) {
        line("device", device.clone());
    }
    if facts.devices.len() > MAX_LISTED_RANKS {
        line("", format!("and {} more ranks", facts.devices.len() - MAX_LISTED_RANKS));
    }
    for note in facts.device_notes {
        line("", note.clone());
    }
    if facts.memory.gpu.is_none()
        && facts.devices.is_empty()
        && let Some(note) = keys_without_effect(&plan.config)
    {
        line("warning", note);
    }
    line(
        "messages",
        format!(
            "{}{}{}",
            facts.library,
            if facts.shares_memory { ", shared memory inside a node" } else { "" },
            facts.transport.map_or(String::new(), |path| format!(", {}", path.describe())),
        ),
    );
    if let Some(why) = facts.transport.and(facts.transport_reason) {
        line("", why.to_string());
    }
    if !facts.collectives.is_empty() {
        line("collectives", facts.collectives.clone());
    }
    if !facts.matmuls.is_empty() {
        line("matmuls", facts.matmuls.clone());
    }
    let mesh = &plan.mesh;
    line(
        "layout",
        format!(
            "pipeline {} × replica {} × shard {} × tensor {}, ZeRO {}, {}{}",
            mesh.pipeline,
            mesh.replica,
            mesh.shard,
            mesh.tensor,
            u8::from(plan.config.parallel.zero),
            virtual_ranks(plan),
            reductions(plan).map_or(String::new(), |when| format!(", gradients reduced {when}")),
        ),
    );
    if plan.config.parallel.storage == Storage::Central {
        let counts = plan.virtual_rank_counts.as_deref().unwrap_or_default();
        let idle = counts.iter().filter(|count| **count == 0).count();
        let owners = match (mesh.shard, idle) {
            (1, 0) => "central, on the first rank".to_string(),
            (1, _) => "central, on the first rank, which computes no gradients".to_string(),
            (owners, 0) => format!("central, on {owners} owners"),
            (owners, idle) => {
                format!("central, on {owners} owners, {idle} of which compute no gradients")
            }
        };
        let each = if mesh.pipeline * mesh.tensor > 1 {
            " of each pipeline stage and tensor-parallel rank"
        } else {
            ""
        };
        line("storage", owners + each);
    }
    if let Some(averaging) = plan.local_sgd {
        let outer = averaging.outer.map_or(String::new(), |outer| {
            format!("; outer step at rate {} with momentum {}", outer.lr, outer.momentum)
        });
        let replicas = averaging.replicas;
        let every = plural(averaging.every as usize, "step");
        let here = plan.replicas_per_rank();
        line(
            "local SGD",
            format!("{replicas} replicas, averaged every {every}, {here} per rank{outer}"),
        );
    }
    if mesh.pipeline > 1 {
        let schedule = plan.step_schedule(0);
        let blocks: Vec<String> = plan.stages.iter().map(|stage| stage.len().to_string()).collect();
        let micros = format!(
            "micro-batches per rank and step: {}, bubble: {:.0} %",
            schedule.micros(),
            100.0 * schedule.bubble_fraction()
        );
        line("pipeline", format!("stages of {} blocks; {micros}", blocks.join(" + ")));
    }
    line("model", format!("{}: {} parameters", plan.network.describe(), grouped(facts.parameters)));
    let (samples, tokens) = facts.train;
    let tokens = if plan.network.is_language() {
        format!(" ({} tokens)", grouped(tokens))
    } else {
        String::new()
    };
    let path = plan.config.data.display_location();
    let validation = match facts.validation {
        Some(samples) => format!("{} for validation", grouped(samples)),
        None => {
            "no validation data: nothing is evaluated, best is the lowest mean training loss of an epoch".to_owned()
        }
    };
    line("data", format!("{path}: {} training samples{tokens}, {validation}", grouped(samples)));
    for note in &facts.notes {
        line("", note.clone());
    }
    if let (Some(excluded), Some(file)) = (&plan.excluded, &plan.config.data.exclude) {
        let ExcludedSummary { samples, digest } = excluded.summary();
        line(
            "exclude",
            format!("{} (data.exclude = {file}, {digest})", plural(samples as usize, "sample")),
        );
    }
    if plan.config.data.order == DataOrder::Files {
        let ranks = plural(mesh.data(), "data-parallel rank");
        line(
            "order",
            format!(
                "shards are dealt to {ranks} (data.order = files): their number changes the bits"
            ),
        );
    }
    line(
        "batch",
        format!(
            "{} samples = {} × {} × {} (virtual ranks × micro-batches × samples){}{}",
            plan.config.batch.global,
            plan.virtual_ranks,
            plan.micros_per_virtual_rank(),
            plan.micro,
            match plan.network.is_language() {
                true => format!(", {} tokens a step", grouped(plan.tokens_per_step())),
                false => String::new(),
            },
            match plan.config.batch.of_rank {
                0 => String::new(),
                of_rank => format!(
                    ", batch.per_rank = {of_rank} on {}",
                    plural(mesh.data(), "data-parallel rank")
                ),
            }
        ),
    );
    if let Some(peak) = plan.describe_peak() {
        line("peak lr", peak);
    }
    if plan.config.run.steps_per_epoch > 0 {
        let steps = plan.config.run.steps_per_epoch;
        line("epoch", format!("{} (run.steps_per_epoch)", plural(steps as usize, "step")));
    }
    if facts.ranks > 1 {
        line("hangs", hangs(plan.config.comm.timeout));
    }
    if plan.config.checkpoint.every == OrAuto::Auto {
        line(
            "checkpoints",
            "interval from the cost of a save and the failures so far (checkpoint.every = auto)"
                .to_owned(),
        );
    }
    let memory = facts.memory;
    if memory.gpu.is_some() {
        let nccl = match facts.nccl_memory {
            0 => String::new(),
            taken => format!("; {} for NCCL besides", bytes(taken)),
        };
        line(
            "gpu memory",
            format!("{} per rank: {}{nccl}", bytes(memory.gpu()), memory.gpu_parts()),
        );
        line("host memory", format!("{} per rank: {}", bytes(memory.host()), memory.host_parts()));
    } else {
        line("memory", format!("{} per rank: {}", bytes(memory.host()), memory.host_parts()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Environment, overlay, resolve};

    /// Returns the startup summary of one rank, on a GPU or a CPU, with these keys.
    fn summary(on_gpu: bool, keys: &[&str]) -> String {
        let keys: Vec<String> = keys.iter().map(|key| (*key).into()).collect();
        let config = overlay(&Config::default(), &keys).unwrap();
        let environment = Environment { ranks: 1, threads: 1, vocabulary: Some(65), on_gpu };
        let memory = Estimate {
            host: [1; MemoryKind::ALL.len()],
            gpu: on_gpu.then_some([1; MemoryKind::ALL.len()]),
            staging: 0,
            runtime: 0,
        };
        let facts = StartupFacts {
            ranks: 1,
            hosts: 1,
            host: "node7",
            cores: 1,
            quota: None,
            spare_cores: false,
            library: "",
            devices: &[],
            device_notes: &[],
            is_renumbered: false,
            shares_memory: false,
            transport: None,
            transport_reason: None,
            collectives: String::new(),
            matmuls: String::new(),
            directory: Path::new("runs/x"),
            parameters: 1,
            train: (1, 1),
            validation: None,
            notes: vec![],
            memory: &memory,
            nccl_memory: 0,
            resumed: None,
            time: None,
        };
        startup_summary(&resolve(config, &environment).unwrap(), &facts)
    }

    #[test]
    fn the_summary_warns_once_of_keys_without_effect() {
        let warning = "warning      device.memory has no effect on CPUs";
        let keys = ["device.memory=0.5"];
        assert_eq!(summary(false, &keys).matches(warning).count(), 1);
        assert!(!summary(false, &[]).contains("warning"));
        assert!(!summary(true, &keys).contains("warning"));
    }

    #[test]
    fn measured_intervals_are_named() {
        let words = "checkpoints  interval from the cost of a save and the failures so far";
        assert!(summary(false, &["checkpoint.every=auto"]).contains(words));
        // A single rank waits for no other.
        assert!(
            !summary(false, &[]).contains("checkpoints") && !summary(false, &[]).contains("hangs")
        );
        let ends = [OrAuto::Auto, OrAuto::Number(0), OrAuto::Number(5)].map(hangs);
        let expected = [
            "ends the job after 120 s, or 20 × the slowest step, evaluation or save",
            "never ends the job",
            "ends the job after 5 s (comm.timeout)",
        ];
        assert!(ends.iter().zip(expected).all(|(text, words)| text.contains(words)), "{ends:?}");
    }

    #[test]
    fn keys_without_effect_on_cpus_are_named() {
        let with = |keys: &[&str]| {
            let keys: Vec<String> = keys.iter().map(|key| (*key).into()).collect();
            keys_without_effect(&overlay(&Config::default(), &keys).unwrap())
        };
        assert_eq!(with(&[]), None);
        assert_eq!(with(&["device.memory=0.9", "log.placement=true"]), None);
        let one = with(&["device.memory=0.5"]).unwrap();
        assert!(one.starts_with("device.memory has no effect on CPUs (hint: "), "{one}");
        let some = with(&["device.memory='grow'", "device.ranks_per_gpu=2"]).unwrap();
        assert!(some.starts_with("device.memory, device.ranks_per_gpu have no effect"), "{some}");
        let others = with(&["device.memory_limit='1GiB'", "device.matmul_autotune=true"]).unwrap();
        assert!(
            others.starts_with("device.memory_limit, device.matmul_autotune have no"),
            "{others}"
        );
    }
}
