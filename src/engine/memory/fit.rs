//! Checks that a run fits into memory before anything is allocated, and finds settings with which
//! it would.

use std::cmp::Reverse;
use std::ops::Range;

use super::available::available;
use super::budget::MemoryBudget;
use super::estimate::{BaselineMemory, worst};
use super::stage_split::split_to_fit;
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_config::telemetry::startup_summary::Estimate;
use hpctrain_config::topology::Topology;
use hpctrain_config::{
    Config, CopyInterval, EmbeddingPlacement, Environment, MemoryCheckpoint, ReduceChoice,
    ResolvedConfig, TableUpdates, WorkShares, resolve,
};
use hpctrain_device::{Kernels, format_bytes};
use hpctrain_parallel::{PipelineSchedule, Zero};

/// Checks that a rank fits into `run.memory_limit`, that this node's ranks fit into the node's
/// memory, and that a rank fits into the `gpu` bytes of its GPU that it may use. `held` is the
/// memory in use that does not depend on the plan.
///
/// # Errors
/// Returns an error if a rank does not fit. It gives the need by category, the available memory,
/// and settings that would fit.
pub fn check<B: Kernels>(
    plan: &ResolvedConfig,
    topology: &Topology,
    held: BaselineMemory,
    gpu: Option<usize>,
) -> Result<()> {
    let node = Node {
        host: &topology.here().host,
        ranks: topology.ranks_here(),
        available: available(held.replaced),
        gpu,
    };
    if node.available.is_none() {
        log::warn!(
            "{}: cannot read the available memory from /proc/meminfo or a control group: only run.memory_limit is checked",
            node.host
        );
    }
    fits::<B>(plan, &node, held)
}

/// Returns the memory that a rank of this node may use. The arguments are those of [`check`].
pub fn budget(
    plan: &ResolvedConfig,
    topology: &Topology,
    held: BaselineMemory,
    gpu: Option<usize>,
) -> MemoryBudget {
    let node = Node {
        host: &topology.here().host,
        ranks: topology.ranks_here(),
        available: available(held.replaced),
        gpu,
    };
    node.budget(plan, held)
}

/// Describes the smallest change of a plan after which a rank fits into `room`: settings, or more
/// ranks.
pub fn smallest_change<B: Kernels>(
    plan: &ResolvedConfig,
    room: &MemoryBudget,
    held: BaselineMemory,
) -> String {
    advice(plan, &|plan| worst::<B>(plan, held), room)
}

/// The node whose memory ranks must fit into.
struct Node<'a> {
    host: &'a str,
    /// The number of ranks on the node.
    ranks: usize,
    /// Bytes available to the ranks, with those of in-memory checkpoints that they replace, if
    /// known.
    available: Option<usize>,
    /// Bytes of its GPU that a rank may use.
    gpu: Option<usize>,
}

impl Node<'_> {
    /// Returns the budget of each rank on the node, of which this rank already uses `held`.
    fn budget(&self, plan: &ResolvedConfig, held: BaselineMemory) -> MemoryBudget {
        let limit = plan.config.run.memory_limit.map_or(usize::MAX, |limit| limit.0);
        MemoryBudget {
            // The estimate includes resident memory, which is not part of the available memory.
            host: self.available.map_or(limit, |available| {
                (available / self.ranks).saturating_add(held.resident).min(limit)
            }),
            gpu: self.gpu.unwrap_or(usize::MAX),
        }
    }
}

/// Splits the blocks into other pipeline stages if those of `plan` do not fit into the memory of
/// every rank but others do. Chooses those with the least work in the busiest stage. Returns true
/// if it has changed the stages, the same on all ranks. The arguments are those of [`check`].
/// Collective over `world`.
///
/// # Errors
/// Returns an error if a message between ranks fails.
pub fn fit_stages<B: Kernels>(
    world: &Group<B>,
    plan: &mut ResolvedConfig,
    topology: &Topology,
    held: BaselineMemory,
    gpu: Option<usize>,
) -> Result<bool> {
    let node = Node {
        host: &topology.here().host,
        ranks: topology.ranks_here(),
        available: available(held.replaced),
        gpu,
    };
    let room = MemoryBudget::least(&world.all_gather_u64(&node.budget(plan, held).numbers())?);
    // Rank 0 decides, since the resident memory of processes differs slightly.
    let decides = world.rank() == 0 && !room.holds(&worst::<B>(plan, held));
    let cut = if decides { split_to_fit::<B>(plan, held, room) } else { None };
    let ends: Vec<u64> = cut.iter().flatten().map(|stage| stage.end as u64).collect();
    let all_ends = world.all_gather_u64(&ends)?;
    let ends = all_ends[0].iter().map(|end| *end as usize);
    if ends.len() == 0 {
        return Ok(false);
    }
    plan.stages =
        std::iter::once(0).chain(ends.clone()).zip(ends).map(|(start, end)| start..end).collect();
    plan.config.parallel.stages = Some(plan.stages.iter().map(Range::len).collect());
    Ok(true)
}

fn fits<B: Kernels>(plan: &ResolvedConfig, node: &Node<'_>, held: BaselineMemory) -> Result<()> {
    let Node { host, ranks, available, .. } = *node;
    let need = |plan: &ResolvedConfig| worst::<B>(plan, held);
    let here = need(plan);
    let limit = plan.config.run.memory_limit;
    let room = node.budget(plan, held);
    let message = if here.gpu() > room.gpu {
        let need = format_bytes(here.gpu());
        let parts = here.gpu_parts();
        format!("a rank needs {need} of its GPU ({parts}), but may use {}", format_bytes(room.gpu))
    } else if let Some(limit) = limit.filter(|limit| here.host() > limit.0) {
        format!("a rank needs {}, more than run.memory_limit = {limit}", describe(&here))
    } else if here.host() > room.host {
        let there = format_bytes(available.unwrap_or(usize::MAX) / ranks * ranks);
        format!(
            "{ranks} × {} are needed for the ranks on {host}, where {there} are available",
            describe(&here)
        )
    } else {
        return Ok(());
    };
    Err(Error::input(message).hint(advice(plan, &need, &room)))
}

/// Formats host memory as in `1.5 GiB (parameters 0.5 GiB, …)`.
fn describe(estimate: &Estimate) -> String {
    format!("{} ({})", format_bytes(estimate.host()), estimate.host_parts())
}

/// Formats the total as in `1.5 GiB`, or those of GPU and host if there is a GPU.
fn sizes(need: &Estimate) -> String {
    match need.gpu {
        None => format_bytes(need.host()),
        Some(_) => {
            format!(
                "{} of the GPU and {} of the host",
                format_bytes(need.gpu()),
                format_bytes(need.host())
            )
        }
    }
}

/// Describes the in-memory checkpoints with which a rank fits into `room`, if fewer or none help.
fn fewer_copies(
    plan: &ResolvedConfig,
    need: impl Fn(&ResolvedConfig) -> Estimate,
    room: &MemoryBudget,
) -> Option<String> {
    let MemoryCheckpoint { every, keep, .. } = plan.config.memory_checkpoint;
    let with = |key: &str, every, keep| {
        let mut plan = plan.clone();
        (plan.config.memory_checkpoint.every, plan.config.memory_checkpoint.keep) = (every, keep);
        let need = need(&plan);
        room.holds(&need).then(|| format!("{key} takes {} a rank", sizes(&need)))
    };
    let one = if keep > 1 { with("memory_checkpoint.keep=1", every, 1) } else { None };
    one.or_else(|| with(&without_copies(plan), CopyInterval::Steps(0), 1))
}

/// Returns the setting that takes no in-memory checkpoints; their other keys are refused with it.
fn without_copies(plan: &ResolvedConfig) -> String {
    let MemoryCheckpoint { every, .. } = plan.config.memory_checkpoint;
    let has_others =
        plan.config.memory_checkpoint != MemoryCheckpoint { every, ..MemoryCheckpoint::default() };
    let others = if has_others { " without other keys of memory_checkpoint" } else { "" };
    format!("memory_checkpoint.every=0{others}")
}

/// Describes the smallest change of the configuration after which a rank fits into `room`.
fn advice(
    plan: &ResolvedConfig,
    need: &dyn Fn(&ResolvedConfig) -> Estimate,
    room: &MemoryBudget,
) -> String {
    if plan.config.memory_checkpoint.every.is_on() {
        return fewer_copies(plan, need, room).unwrap_or_else(|| {
            let mut without = plan.clone();
            without.config.memory_checkpoint = MemoryCheckpoint::default();
            format!("{}, and {}", without_copies(plan), advice(&without, need, room))
        });
    }
    let on_gpu = need(plan).gpu.is_some();
    let fitting = |ranks: usize| {
        let all =
            variants(plan, ranks, on_gpu).into_iter().map(|variant| (need(&variant.plan), variant));
        all.filter(|(need, _)| room.holds(need)).collect::<Vec<_>>()
    };
    let now = plan.mesh.ranks();
    if let Some((need, best)) = fitting(now).into_iter().min_by_key(|(_, variant)| variant.cost()) {
        return format!("{} takes {} a rank", best.settings(), sizes(&need));
    }
    // Evaluations have a separate batch size.
    let lighter = (plan.config.eval.batch > plan.micro).then(|| {
        let mut config = plan.config.clone();
        config.eval.batch = plan.micro;
        let facts = Environment {
            ranks: now,
            threads: plan.threads,
            vocabulary: plan.network.vocabulary(),
            on_gpu,
        };
        resolve(config, &facts).ok().map(|plan| (need(&plan), plan))
    });
    if let Some((need, lighter)) = lighter.flatten().filter(|(need, _)| room.holds(need)) {
        return format!("eval.batch={} takes {} a rank", lighter.config.eval.batch, sizes(&need));
    }
    // Try doubling the number of ranks as long as the batch can be divided among them.
    let mut ranks = 2 * now;
    while !variants(plan, ranks, on_gpu).is_empty() {
        let as_deep = fitting(ranks).into_iter().filter(|(_, variant)| variant.pipeline.is_none());
        if let Some((need, best)) = as_deep.min_by_key(|(need, _)| (need.gpu(), need.host())) {
            let settings = best.settings();
            return format!(
                "{ranks} ranks, as many on each node as now, and {settings}: {} a rank",
                sizes(&need)
            );
        }
        ranks *= 2;
    }
    "no layout of this network and batch.global fits: reduce model.layers, model.width or model.context".into()
}

/// A variant of the configuration that runs the same training.
struct Variant {
    plan: ResolvedConfig,
    /// Write checkpoints without an asynchronous copy.
    sync_save: bool,
    zero: Option<Zero>,
    recompute: bool,
    offload: Option<bool>,
    /// Offload the inputs of recomputed blocks, or not.
    offload_activations: Option<bool>,
    /// Offload parameters and reduced gradients, or not.
    offload_params: Option<bool>,
    /// Place embedding tables on the host.
    tables_on_host: bool,
    pipeline: Option<usize>,
    /// Use the 1F1B schedule, which does not defer wgrad.
    one_forward_one_backward: bool,
    micro: Option<u64>,
}

impl Variant {
    /// Returns a sort key: few changes first, then the lowest ZeRO stage and the largest
    /// micro-batch. Deeper pipelines and offloading come last. The 1F1B schedule is the first of
    /// single changes. Synchronous checkpoints count as half a change.
    fn cost(&self) -> impl Ord + use<> {
        let Self {
            zero,
            recompute,
            offload,
            offload_activations,
            offload_params,
            tables_on_host,
            pipeline,
            micro,
            ..
        } = *self;
        let changed = [
            zero.is_some(),
            recompute,
            offload.is_some(),
            offload_activations.is_some(),
            offload_params.is_some(),
            tables_on_host,
            pipeline.is_some(),
            self.one_forward_one_backward,
            micro.is_some(),
        ];
        let changes = changed.into_iter().filter(|changed| *changed).count();
        let cost = 2 * changes + usize::from(self.sync_save);
        let on_host = (offload_params, offload, offload_activations, tables_on_host);
        (cost, on_host, pipeline, zero.map(u8::from), recompute, micro.is_some(), Reverse(micro))
    }

    /// Returns the settings of the variant.
    fn settings(&self) -> String {
        let zero = self.zero.map(|zero| format!("parallel.zero={}", u8::from(zero)));
        let recompute = self.recompute.then(|| "parallel.recompute=true".to_string());
        let offload = self.offload.map(|offload| format!("offload.optimizer={offload}"));
        let offload_activations =
            self.offload_activations.map(|on_host| format!("offload.activations={on_host}"));
        let offload_params = self.offload_params.map(|on_host| format!("offload.params={on_host}"));
        let tables_on_host = self.tables_on_host.then(|| "model.place.tables=host".to_string());
        let pipeline = self.pipeline.map(|pipeline| format!("parallel.pipeline={pipeline}"));
        let schedule = self.one_forward_one_backward.then(|| "parallel.schedule=1f1b".to_string());
        let micro = self.micro.map(|micro| format!("batch.micro={micro}"));
        let sync_save = self.sync_save.then(|| "checkpoint.async_save=false".to_string());
        let settings = [
            zero,
            recompute,
            tables_on_host,
            offload_activations,
            offload,
            offload_params,
            pipeline,
            schedule,
            micro,
            sync_save,
        ];
        let settings: Vec<String> = settings.into_iter().flatten().collect();
        if settings.is_empty() { "this configuration".into() } else { settings.join(" with ") }
    }
}

/// Returns the variants of `plan` on `ranks` ranks: higher ZeRO stages, recomputation, smaller
/// micro-batches, deeper pipelines, synchronous checkpoints, and each placement of the optimizer,
/// parameters, inputs and embedding tables.
fn variants(plan: &ResolvedConfig, ranks: usize, on_gpu: bool) -> Vec<Variant> {
    let now = plan.config.parallel.zero;
    let recompute = plan.config.parallel.recompute;
    let micro = plan.micro;
    let offloads = plan.config.offload.optimizer;
    let offloads_activations = plan.config.offload.activations;
    let offloads_params = plan.config.offload.params;
    let has_tables =
        on_gpu && !plan.has_host_tables() && plan.network.with_separate_embedding().is_ok();
    let stages = [Zero::Zero, Zero::One, Zero::Two, Zero::Three]
        .into_iter()
        .filter(|zero| *zero as u8 >= now as u8);
    let micros: Vec<u64> = (1..=micro).filter(|smaller| micro.is_multiple_of(*smaller)).collect();
    let depth = plan.mesh.pipeline;
    let defers_wgrad = depth > 1 && plan.config.parallel.schedule == PipelineSchedule::ZeroBubble;
    let deeper =
        |pipeline: &usize| Some(2 * pipeline).filter(|deeper| ranks.is_multiple_of(*deeper));
    let pipelines: Vec<usize> = std::iter::successors(Some(depth), deeper).collect();
    let mut variants = Vec::new();
    for (zero, &pipeline) in
        stages.flat_map(|zero| pipelines.iter().map(move |pipeline| (zero, pipeline)))
    {
        for &smaller in &micros {
            for [again, copy, elsewhere, inputs, shards, at_once, tables] in
                choices(on_gpu, defers_wgrad, has_tables)
            {
                let mut config: Config = plan.config.clone();
                if ranks != plan.mesh.ranks() {
                    (
                        config.parallel.shard,
                        config.parallel.replica,
                        config.parallel.virtual_ranks,
                    ) = (None, None, None);
                }
                if pipeline != depth {
                    (config.parallel.shard, config.parallel.replica, config.parallel.stages) =
                        (None, None, None);
                    config.parallel.pipeline = pipeline;
                }
                if now == Zero::Zero {
                    config.parallel.shard = None;
                    config.parallel.replica = (zero == Zero::Zero).then_some(ranks / pipeline);
                }
                config.parallel.zero = zero;
                if config.parallel.reduce == ReduceChoice::Micro {
                    config.parallel.reduce = ReduceChoice::Auto;
                    if smaller != micro {
                        // There is a virtual rank for each micro-batch.
                        config.parallel.virtual_ranks = None;
                    }
                }
                config.parallel.recompute |= again;
                config.parallel.work_shares = WorkShares::Equal;
                if at_once {
                    config.parallel.schedule = PipelineSchedule::OneForwardOneBackward;
                }
                config.offload.optimizer ^= elsewhere;
                config.offload.activations ^= inputs;
                config.offload.params ^= shards;
                if tables {
                    config.model.place.tables = EmbeddingPlacement::Host;
                    // They may have sparse updates there.
                    config.optimizer.tables = TableUpdates::Auto;
                }
                config.batch.micro = Some(smaller);
                let sync_save = !copy && std::mem::take(&mut config.checkpoint.async_save);
                let facts = Environment {
                    ranks,
                    threads: plan.threads,
                    vocabulary: plan.network.vocabulary(),
                    on_gpu,
                };
                if let Ok(plan) = resolve(config, &facts) {
                    let zero = (zero != now).then_some(zero);
                    let micro = (smaller != micro).then_some(smaller);
                    let recompute = again && !recompute;
                    let offload = elsewhere.then_some(!offloads);
                    let offload_activations = inputs.then_some(!offloads_activations);
                    let offload_params = shards.then_some(!offloads_params);
                    let pipeline = (pipeline != depth).then_some(pipeline);
                    let one_forward_one_backward = at_once;
                    variants.push(Variant {
                        plan,
                        sync_save,
                        zero,
                        recompute,
                        offload,
                        offload_activations,
                        offload_params,
                        tables_on_host: tables,
                        pipeline,
                        one_forward_one_backward,
                        micro,
                    });
                }
            }
        }
    }
    variants
}

/// Returns the combinations of the switches: recomputation, asynchronous checkpoints, the other
/// placement of the optimizer, of inputs and of parameters with a GPU, the 1F1B schedule if wgrad
/// is deferred, and embedding tables on the host if that is possible.
fn choices(on_gpu: bool, defers_wgrad: bool, has_tables: bool) -> impl Iterator<Item = [bool; 7]> {
    let all = (0..128).map(|bits| [1, 2, 4, 8, 16, 32, 64].map(|bit| bits & bit != 0));
    all.filter(move |[_, _, elsewhere, inputs, shards, at_once, tables]| {
        (on_gpu || !(*elsewhere || *inputs || *shards))
            && (defers_wgrad || !at_once)
            && (has_tables || !tables)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_config::{Sources, load};
    use hpctrain_cpu::Cpu;
    use hpctrain_cuda::Cuda;
    use hpctrain_device::MemoryKind;

    const NOTHING: BaselineMemory = BaselineMemory {
        messages: 0,
        messages_on_device: false,
        resident: 0,
        cache: 0,
        foreign_ranks: 0,
        replaced: 0,
    };

    /// Returns the error with this memory per rank, on top of resident memory; empty if it fits.
    fn refusal(ranks: usize, settings: &[&str], room_mib: usize) -> String {
        let base = ["model.layers=8", "model.width=256"];
        let overrides: Vec<String> =
            base.iter().chain(settings).map(|setting| setting.to_string()).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        let plan = resolve(
            config,
            &Environment { ranks, threads: 1, vocabulary: Some(65), on_gpu: false },
        )
        .unwrap();
        let held = BaselineMemory { resident: 30 << 20, ..NOTHING };
        let node =
            Node { host: "node", ranks, available: Some((room_mib << 20) * ranks), gpu: None };
        fits::<Cpu>(&plan, &node, held).err().map_or(String::new(), |error| {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        })
    }

    #[test]
    fn what_fits_is_not_refused() {
        assert_eq!(refusal(1, &[], 1000), "");
        assert_eq!(refusal(4, &["run.memory_limit=1GiB"], 1000), "");
    }

    #[test]
    fn the_least_change_is_suggested() {
        let error = refusal(1, &[], 160);
        assert!(
            error.starts_with("1 × 340.4 MiB") && error.contains(" MiB are available\nhint: "),
            "{error}"
        );
        assert!(
            error.contains("parameters 24.1 MiB") && error.contains("activations 131.3 MiB"),
            "{error}"
        );
        assert!(
            error.ends_with(
                "hint: batch.micro=4 with checkpoint.async_save=false takes 185.5 MiB a rank"
            ),
            "{error}"
        );
        let error = refusal(1, &[], 270);
        assert!(error.contains("hint: checkpoint.async_save=false takes "), "{error}");
        // Activations are small compared with the optimizer's state.
        let error = refusal(4, &["batch.micro=1"], 80);
        assert!(
            error.contains("hint: parallel.zero=") && !error.contains("parallel.recompute"),
            "{error}"
        );
        let error = refusal(2, &["batch.global=32"], 116);
        // ZeRO 1, which keeps whole gradients, is enough with half the micro-batch.
        let hint = "hint: parallel.zero=1 with batch.micro=2 with checkpoint.async_save=false takes 145.5 MiB a rank";
        assert!(error.ends_with(hint), "{error}");
    }

    #[test]
    fn fewer_in_memory_checkpoints_are_the_first_remedy() {
        // Each takes as much as the copy of an asynchronous save, about 73 MiB.
        let keep = ["batch.micro=1", "memory_checkpoint.every=1", "memory_checkpoint.keep=3"];
        let error = refusal(1, &keep, 500);
        assert!(error.contains("in-memory checkpoint ") && error.contains("run"), "{error}");
        assert!(error.contains("hint: memory_checkpoint.keep=1 takes "), "{error}");
        let error = refusal(1, &keep, 300);
        let without = "hint: memory_checkpoint.every=0 without other keys of memory_checkpoint";
        assert!(error.contains(&format!("{without} takes ")), "{error}");
        let only = ["batch.micro=1", "memory_checkpoint.every=1"];
        let of_one = refusal(1, &only, 300);
        assert!(of_one.contains("hint: memory_checkpoint.every=0 takes "), "{of_one}");
        let error = refusal(1, &keep, 200);
        let both = format!("{without}, and checkpoint.async_save=false takes ");
        assert!(error.contains(&both), "{error}");
        // Partners on other nodes keep as many.
        let overrides = ["memory_checkpoint.every=1"].map(String::from);
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        let facts = Environment { ranks: 2, threads: 1, vocabulary: Some(65), on_gpu: false };
        let plan = resolve(config, &facts).unwrap();
        let of = |foreign_ranks| worst::<Cpu>(&plan, BaselineMemory { foreign_ranks, ..NOTHING });
        let copies = [0, 1, 3].map(|n| of(n).host[MemoryKind::MemoryCheckpoint as usize]);
        assert_eq!(copies, [2, 6, 12].map(|n| n * of(0).host[MemoryKind::Checkpoint as usize]));
    }

    #[test]
    fn more_ranks_are_suggested_when_nothing_else_helps() {
        let error = refusal(2, &["batch.global=32"], 52);
        assert!(
            error.contains(" ranks, as many on each node as now, and parallel.zero=3"),
            "{error}"
        );
        let error = refusal(1, &["batch.global=1"], 20);
        assert!(error.contains("no layout of this network and batch.global fits"), "{error}");
    }

    #[test]
    fn deeper_pipelines_are_among_the_variants() {
        let overrides =
            ["model.layers=8", "parallel.pipeline=2", "batch.micro=1"].map(String::from);
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        let plan = resolve(
            config,
            &Environment { ranks: 4, threads: 1, vocabulary: Some(65), on_gpu: false },
        )
        .unwrap();
        let all = variants(&plan, 4, false);
        let meshes = all.iter().map(|variant| {
            (variant.pipeline, variant.plan.mesh.pipeline, variant.plan.mesh.data())
        });
        assert!(meshes.clone().all(|mesh| [(None, 2, 2), (Some(4), 4, 1)].contains(&mesh)));
        // Half the blocks per rank need less of everything except activations, since more
        // micro-batches are in flight.
        let deeper =
            all.iter().find(|variant| variant.settings() == "parallel.pipeline=4").unwrap();
        let parameters = |plan: &ResolvedConfig| {
            worst::<Cpu>(plan, NOTHING).host[MemoryKind::Parameters as usize]
        };
        assert!(parameters(&deeper.plan) < parameters(&plan) * 2 / 3);
    }

    #[test]
    fn a_pipeline_may_stop_deferring_wgrad() {
        let zero_bubble = [
            "parallel.pipeline=4",
            "parallel.schedule=zero-bubble",
            "batch.micro=1",
            "parallel.stages=[1,2,3,4]",
            "eval.batch=1",
            "checkpoint.async_save=false",
        ];
        // Most operands of deferred wgrads are in the last stage, which is the largest here.
        let need = |settings: &[&str]| {
            let error = refusal(4, settings, 1);
            let (_, rest) = error.split_once("4 × ").unwrap();
            rest.split_once(" MiB").unwrap().0.parse::<f64>().unwrap() as usize
        };
        let with = need(&zero_bubble);
        let without = need(&[&zero_bubble[..], &["parallel.schedule=1f1b"]].concat());
        assert!(with > without, "{with} and {without} MiB");
        let error = refusal(4, &zero_bubble, without + 1 - 30);
        assert!(error.contains("hint: parallel.schedule=1f1b takes "), "{error}");
    }

    /// Returns a plan for one GPU. Master weights and moments are twelve bytes per parameter;
    /// activations are small compared with them.
    fn on_gpu(offload: bool) -> ResolvedConfig {
        let overrides = ["model.layers=8", "model.width=256", "batch.global=1"].map(String::from);
        let (mut config, _) =
            load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        config.offload.optimizer = offload;
        resolve(config, &Environment { ranks: 1, threads: 1, vocabulary: Some(65), on_gpu: true })
            .unwrap()
    }

    fn need(plan: &ResolvedConfig) -> Estimate {
        worst::<Cuda>(plan, NOTHING)
    }

    #[test]
    fn the_optimizer_may_leave_a_gpu() {
        let there = need(&on_gpu(false));
        let here = need(&on_gpu(true));
        let moved = there.gpu() - here.gpu();
        assert_eq!(moved, there.gpu.unwrap()[MemoryKind::Optimizer as usize] / 2 * 3);
        // The host also needs the slot through which gradients are copied.
        assert_eq!(here.host() - there.host(), moved / 3 * 4);
        assert!(here.host_parts().contains("offloaded "), "{}", here.host_parts());
        assert!(
            !there.host_parts().contains("offloaded ") && there.gpu_parts().contains("optimizer ")
        );
    }

    /// Returns the error with this memory on a GPU and its host.
    fn refused(plan: &ResolvedConfig, gpu: usize, host: usize) -> String {
        let node = Node { host: "node", ranks: 1, available: Some(host), gpu: Some(gpu) };
        fits::<Cuda>(plan, &node, NOTHING).err().unwrap().to_string()
    }

    /// Returns a plan with recomputation for GPUs as pipeline stages, which may offload the inputs
    /// of blocks.
    fn recomputing(offload: bool, ranks: usize) -> ResolvedConfig {
        let mut config = Config::default();
        config.model.layers = hpctrain_config::LayerList::Count(8);
        (config.batch.global, config.batch.micro, config.eval.batch) = (8, Some(2), 1);
        (config.parallel.recompute, config.offload.activations) = (true, offload);
        config.parallel.pipeline = ranks;
        resolve(config, &Environment { ranks, threads: 1, vocabulary: Some(65), on_gpu: true })
            .unwrap()
    }

    #[test]
    fn inputs_may_leave_a_gpu() {
        for ranks in [1, 2] {
            let there = need(&recomputing(false, ranks));
            let here = need(&recomputing(true, ranks));
            let activations =
                |estimate: &Estimate| estimate.gpu.unwrap()[MemoryKind::Activations as usize];
            let moved = here.host[MemoryKind::Offloaded as usize];
            assert_eq!(here.host() - there.host(), moved, "{ranks} stages");
            // All but the current one and, in the backward, the next one.
            let left = activations(&there) - activations(&here);
            assert!(left > moved / 2 && left < moved, "{ranks} stages: {left} of {moved}");
        }
    }

    /// Returns the bytes of a GPU that trains GPT-2 with micro-batches of 32 × 1,024 tokens, of
    /// which `rows` are a chunk of the loss.
    fn gpu_bytes_with_chunks(rows: Option<usize>) -> usize {
        let mut config = Config::default();
        config.model.layers = hpctrain_config::LayerList::Count(12);
        (config.model.heads, config.model.width, config.model.context) = (12, 768, 1024);
        (config.batch.global, config.batch.micro, config.eval.batch) = (32, Some(32), 32);
        config.parallel.loss_chunk_tokens = rows;
        let plan = resolve(
            config,
            &Environment { ranks: 1, threads: 1, vocabulary: Some(50_257), on_gpu: true },
        );
        need(&plan.unwrap()).gpu()
    }

    /// GPT-2 with micro-batches of 32 × 1,024 tokens has 3.3 GB of logits without chunks.
    #[test]
    fn a_gpu_has_the_logits_of_some_rows() {
        let all = gpu_bytes_with_chunks(Some(0));
        let usual = gpu_bytes_with_chunks(None);
        let fewer = gpu_bytes_with_chunks(Some(1024));
        let logits = |rows: usize| rows * 50_304 * 2;
        for (rows, less) in [(16_384, all - usual), (1024, all - fewer)] {
            let saved = logits(32 << 10) - logits(rows);
            // The input of the chunk and the gradient of the whole input are added.
            assert!(less < saved && less > saved - saved / 30, "{rows} rows: {less} of {saved}");
        }
    }

    #[test]
    fn advice_for_a_gpu_leaves_room_on_the_host() {
        let there = need(&on_gpu(false));
        let here = need(&on_gpu(true));
        // Only the host can take the state.
        let error = refused(&on_gpu(false), here.gpu(), here.host());
        assert!(
            error.contains(" of its GPU (parameters ") && error.contains(", but may use "),
            "{error}"
        );
        let both = format!(
            "{} of the GPU and {} of the host a rank",
            format_bytes(here.gpu()),
            format_bytes(here.host())
        );
        assert!(error.ends_with(&format!("hint: offload.optimizer=true takes {both}")), "{error}");
        // With a little less memory, synchronous checkpoints are suggested as well; with much less,
        // nothing helps.
        let error = refused(&on_gpu(false), here.gpu(), here.host() - 1);
        let less = "hint: offload.optimizer=true with checkpoint.async_save=false takes ";
        assert!(error.contains(less), "{error}");
        let error = refused(&on_gpu(false), here.gpu(), there.host());
        assert!(
            !error.contains("offload") && error.contains("hint: no layout of this network"),
            "{error}"
        );
        // The reverse holds as well.
        let error = refused(&on_gpu(true), there.gpu(), there.host());
        assert!(
            error.starts_with("1 × ") && error.contains("hint: offload.optimizer=false takes "),
            "{error}"
        );
    }

    /// Returns the plan for one GPU with ZeRO 3 and an offloaded optimizer, which may offload
    /// shards.
    fn on_gpu_with_zero_3(shards: bool) -> ResolvedConfig {
        let mut config = on_gpu(true).config;
        config.parallel.zero = Zero::Three;
        config.offload.params = shards;
        resolve(config, &Environment { ranks: 1, threads: 1, vocabulary: Some(65), on_gpu: true })
            .unwrap()
    }

    #[test]
    fn shards_may_leave_a_gpu_with_zero_3() {
        let away = need(&on_gpu_with_zero_3(true));
        let error = refused(&on_gpu(false), away.gpu(), away.host());
        let both = format!(
            "{} of the GPU and {} of the host a rank",
            format_bytes(away.gpu()),
            format_bytes(away.host())
        );
        let settings = "parallel.zero=3 with offload.optimizer=true with offload.params=true";
        assert!(error.ends_with(&format!("hint: {settings} takes {both}")), "{error}");
        // The reverse holds if the host has no room for the slot of the copies.
        let error = refused(
            &on_gpu_with_zero_3(true),
            need(&on_gpu(false)).gpu(),
            need(&on_gpu(false)).host(),
        );
        assert!(
            error.contains("hint: offload.optimizer=false with offload.params=false takes "),
            "{error}"
        );
        // On CPUs there is nothing to offload.
        assert!(!refusal(1, &[], 60).contains("offload"));
    }

    /// Returns a plan for one GPU with embedding tables.
    fn with_tables_on(place: EmbeddingPlacement) -> ResolvedConfig {
        let (mut config, _) =
            load(&Sources { preset: Some("dlrm"), ..Sources::default() }).unwrap();
        config.model.place.tables = place;
        resolve(config, &Environment { ranks: 1, threads: 1, vocabulary: None, on_gpu: true })
            .unwrap()
    }

    #[test]
    fn tables_may_leave_a_gpu() {
        let there = with_tables_on(EmbeddingPlacement::Device);
        let away = need(&with_tables_on(EmbeddingPlacement::Host));
        let error = refused(&there, away.gpu(), away.host());
        let both = format!(
            "{} of the GPU and {} of the host a rank",
            format_bytes(away.gpu()),
            format_bytes(away.host())
        );
        assert!(error.ends_with(&format!("hint: model.place.tables=host takes {both}")), "{error}");
    }

    #[test]
    fn evaluations_may_take_fewer_samples_at_a_time() {
        let error =
            refusal(1, &["eval.batch=4096", "batch.global=1", "checkpoint.async_save=false"], 200);
        assert!(error.contains("hint: eval.batch=1 takes "), "{error}");
    }

    #[test]
    fn the_limit_of_the_configuration_counts_everything() {
        let error = refusal(1, &["run.memory_limit=200MiB"], 1000);
        assert!(error.contains("more than run.memory_limit = 200MiB\nhint: "), "{error}");
    }
}
