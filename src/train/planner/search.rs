//! The search: layouts that fit, the fastest first, and the reasons.

use super::cost_model::{Rates, step_times};
use super::layouts::{LayoutKeys, RejectedLayout, layouts};
use super::profile::measure;
use super::timeline::Timeline;
use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::memory::foreign_ranks;
use hpctrain_comm::Comm;
use hpctrain_config::telemetry::startup_summary::Estimate;
use hpctrain_config::topology::Topology;
use hpctrain_config::{
    Config, DeviceChoice, Environment, Interval, ModelKind, ResolvedConfig, resolve,
};
use hpctrain_cpu::Cpu;
use hpctrain_cuda::Cuda;
use hpctrain_device::{Kernels, MemoryKind, format_bytes};
use hpctrain_engine::memory;
use hpctrain_engine::memory::{BaselineMemory, MemoryBudget};
use hpctrain_engine::vocabulary;
use hpctrain_parallel::{Storage, Zero};

/// Fraction of a step that each axis or other property of a layout must save to be preferred over a
/// simpler layout.
const COMPLEXITY_PENALTY: f64 = 0.005;

/// A layout that fits.
#[derive(Debug, Clone)]
pub struct Proposal {
    /// The keys of the layout.
    pub keys: LayoutKeys,
    /// The resolved configuration with these keys.
    pub plan: ResolvedConfig,
    /// Memory of the rank that needs the most.
    pub memory: Estimate,
    /// The predicted times of a step.
    pub time: Timeline,
}

impl Proposal {
    /// Returns the tokens or samples per second.
    pub fn per_second(&self) -> f64 {
        self.plan.tokens_per_step() as f64 / self.time.step
    }

    /// Returns true if a step takes longer than predicted, since work on the host is not modelled.
    pub fn has_unmodelled_host_work(&self) -> bool {
        self.keys.offload.any() || self.plan.has_host_tables()
    }

    /// Returns the bytes on a GPU if there is one, else on the host.
    pub fn bytes(&self) -> usize {
        if self.memory.gpu.is_some() { self.memory.gpu() } else { self.memory.host() }
    }
}

/// The result of a search.
#[derive(Debug, Clone)]
pub struct SearchResult {
    /// The layouts that fit, the best first.
    pub proposals: Vec<Proposal>,
    /// The layouts that were rejected.
    pub rejected: Vec<RejectedLayout>,
    /// Memory that a rank may use.
    pub room: MemoryBudget,
    /// Sentences that explain the result.
    pub reasons: Vec<String>,
}

/// The limits of a search.
#[derive(Debug, Clone, Copy)]
pub struct SearchLimits {
    /// Memory that a rank may use.
    pub room: MemoryBudget,
    /// Memory in use that does not depend on the layout.
    pub held: BaselineMemory,
    /// Consecutive ranks on each node.
    pub per_node: usize,
}

/// Searches the layouts of a configuration on the ranks of `facts`. `rates` is called once, with
/// the layouts that fit.
///
/// # Errors
/// Returns an error if no layout is legal; if none fits, with the smallest change after which one
/// does as the hint; or if local SGD or central storage is configured.
pub fn search_layouts<R: Rates>(
    config: &Config,
    facts: &Environment,
    place: &SearchLimits,
    rates: impl FnOnce(&[&ResolvedConfig]) -> Result<R>,
) -> Result<SearchResult> {
    let SearchLimits { room, held, per_node } = *place;
    if config.local_sgd.sync_every != Interval::Steps(0) {
        let message = "local_sgd.sync_every is set, but layouts differ in their numbers of replicas, which change the result of local SGD";
        return Err(Error::input(message)
            .hint("search without it, then add it to the keys of the chosen layout"));
    }
    if config.parallel.storage == Storage::Central {
        return Err(Error::input(
            "parallel.storage = central is a layout of its own, which has no alternatives to search",
        )
        .hint("search without it"));
    }
    if config.run.device == DeviceChoice::Mixed {
        return Err(Error::input(
            "run.device = mixed, but layouts are compared on devices of one kind",
        )
        .hint("set the keys of the layout: parallel.zero=1, or parallel.storage=central"));
    }
    let need = |plan: &ResolvedConfig| worst_estimate(plan, facts.on_gpu, held);
    let (legal, refused) = layouts(config, facts, per_node);
    if legal.is_empty() {
        return Err(none_legal(&refused));
    }
    let mut rejected = refused;
    let may_recompute = !config.parallel.given.contains("parallel.recompute");
    let mut fitting = Vec::new();
    let mut smallest = None::<(usize, ResolvedConfig, Estimate)>;
    for (keys, plan) in legal {
        let recomputes = LayoutKeys { recompute: true, ..keys };
        let again = (may_recompute && !keys.recompute).then_some(recomputes);
        let mut tried = vec![(keys, plan)];
        tried.extend(
            again.and_then(|again| Some((again, resolve(again.config(config), facts).ok()?))),
        );
        let mut found = None;
        for (keys, plan) in tried {
            let memory = need(&plan);
            if room.holds(&memory) {
                found = Some((keys, plan, memory));
                break;
            }
            let bytes = if memory.gpu.is_some() { memory.gpu() } else { memory.host() };
            if smallest.as_ref().is_none_or(|(least, ..)| bytes < *least) {
                smallest = Some((bytes, plan, memory));
            }
        }
        if found.is_none() && facts.on_gpu {
            found = on_host(&keys, config, facts, &room, need);
        }
        match found {
            Some(found) => fitting.push(found),
            None => {
                let memory = resolve(keys.config(config), facts).map(|plan| need(&plan));
                let why = memory
                    .map_or_else(|e| e.message().to_owned(), |memory| too_large(&memory, &room));
                rejected.push(RejectedLayout { keys, reason: why, hint: None });
            }
        }
    }
    if fitting.is_empty() {
        let Some((_, plan, memory)) = smallest else { return Err(none_legal(&[])) };
        let hint = match facts.on_gpu {
            true => memory::smallest_change::<Cuda>(&plan, &room, held),
            false => memory::smallest_change::<Cpu>(&plan, &room, held),
        };
        let message = format!(
            "no layout fits: of {} ranks the smallest {}",
            facts.ranks,
            too_large(&memory, &room)
        );
        return Err(Error::input(message).hint(hint));
    }
    let plans: Vec<&ResolvedConfig> = fitting.iter().map(|(_, plan, _)| plan).collect();
    let rates = rates(&plans)?;
    let mut proposals = Vec::with_capacity(fitting.len());
    for (keys, plan, memory) in fitting {
        match step_times(&plan, &rates, per_node, !facts.on_gpu)?.simulate() {
            Some(time) => proposals.push(Proposal { keys, plan, memory, time }),
            None => rejected.push(RejectedLayout {
                keys,
                reason: "its pipeline schedule deadlocks".into(),
                hint: None,
            }),
        }
    }
    // The time of copies to the host is not modelled: layouts that need them come last, those
    // with the fewest first.
    let cost =
        |one: &Proposal| one.time.step * (1.0 + COMPLEXITY_PENALTY * one.keys.parts() as f64);
    let on_host = |one: &Proposal| one.keys.offload.count();
    proposals.sort_by(|one, other| {
        on_host(one).cmp(&on_host(other)).then(cost(one).total_cmp(&cost(other)))
    });
    let reasons = reasons(config, facts, &room, &proposals, need);
    Ok(SearchResult { proposals, rejected, room, reasons })
}

/// Returns the layout with the least offloading with which it fits, if there is one.
fn on_host(
    keys: &LayoutKeys,
    config: &Config,
    facts: &Environment,
    room: &MemoryBudget,
    need: impl Fn(&ResolvedConfig) -> Estimate,
) -> Option<(LayoutKeys, ResolvedConfig, Estimate)> {
    let may_recompute = !config.parallel.given.contains("parallel.recompute");
    let legal = |keys: LayoutKeys| {
        let plan = resolve(keys.config(config), facts).ok()?;
        let memory = need(&plan);
        Some((keys, plan, memory))
    };
    let all = keys.with_more_offload(config, may_recompute);
    // The last one offloads the most: if it does not fit on the GPU, neither do the others.
    let most = all.iter().rev().find_map(|keys| legal(*keys))?;
    if most.2.gpu() > room.gpu {
        return None;
    }
    all.into_iter().filter_map(legal).find(|(_, _, memory)| room.holds(memory))
}

/// Returns the estimate of the rank of a plan that needs the most memory.
fn worst_estimate(plan: &ResolvedConfig, on_gpu: bool, held: BaselineMemory) -> Estimate {
    match on_gpu {
        true => memory::worst::<Cuda>(plan, held),
        false => memory::worst::<Cpu>(plan, held),
    }
}

fn none_legal(refused: &[RejectedLayout]) -> Error {
    let first = refused.first();
    let why = first.map_or("no keys divide the ranks", |first| &first.reason);
    // If all layouts have the same reason, the cause is the configuration, and its hint applies.
    let common_hint = first
        .filter(|first| refused.iter().all(|other| other.reason == first.reason))
        .and_then(|first| first.hint.as_deref());
    let others = "remove keys of [parallel], or use another number of ranks";
    let hint = common_hint.map_or(others.to_owned(), |hint| format!("{hint}; or {others}"));
    Error::input(format!("no layout is possible: {why}")).hint(hint)
}

/// Returns a reason such as `needs 3 GiB (parameters 1 GiB, …), more than 2 GiB a rank`.
fn too_large(memory: &Estimate, room: &MemoryBudget) -> String {
    let (need, parts, there) = match memory.gpu {
        Some(_) if memory.gpu() > room.gpu => (memory.gpu(), memory.gpu_parts(), room.gpu),
        _ => (memory.host(), memory.host_parts(), room.host),
    };
    format!("needs {} ({parts}), more than {} a rank", format_bytes(need), format_bytes(there))
}

/// Explains the result: first whether the whole network fits a rank, then the times.
fn reasons(
    config: &Config,
    facts: &Environment,
    room: &MemoryBudget,
    proposals: &[Proposal],
    need: impl Fn(&ResolvedConfig) -> Estimate,
) -> Vec<String> {
    let mut sentences = Vec::new();
    let Some(best) = proposals.first() else { return sentences };
    // Each rank has the whole state and the smallest micro-batch, so that activations need little.
    let whole = LayoutKeys { replica: facts.ranks, micro: Some(1), ..LayoutKeys::whole() };
    let whole = resolve(whole.config(config), facts).map(|plan| need(&plan));
    let bytes = |memory: &Estimate| if memory.gpu.is_some() { memory.gpu() } else { memory.host() };
    let budget = if facts.on_gpu { room.gpu } else { room.host };
    if let Ok(whole) = whole {
        let [needed, there] = [bytes(&whole), budget].map(format_bytes);
        sentences.push(if room.holds(&whole) {
            format!("The training state of the whole network fits a rank ({needed} of {there}): data parallelism suffices, and other axes are used only if they are faster.")
        } else {
            let kind = |kind: MemoryKind| whole.categories()[kind as usize];
            let state = kind(MemoryKind::Parameters) + kind(MemoryKind::Gradients) + kind(MemoryKind::Optimizer);
            let cure = if state > budget {
                "ZeRO, pipeline or tensor parallelism can shard parameters and state"
            } else {
                "recomputation, tensor or pipeline parallelism can reduce activations"
            };
            format!("The training state of the whole network does not fit a rank ({needed}, of {there}): {cure}.")
        });
    }
    let runner_up = proposals.iter().find(|other| !other.keys.same_axes(&best.keys));
    let Proposal { time, .. } = best;
    let mut first = format!(
        "First: {}; a rank waits {:.0} % of the step for other stages and {:.0} % for collectives.",
        best.keys,
        100.0 * time.bubble,
        100.0 * time.exposed
    );
    if let Some(other) = runner_up {
        let slower = (100.0 * (other.time.step / time.step - 1.0)).max(0.0);
        first += &format!(" The next with other axes, {}, takes {slower:.0} % longer.", other.keys);
    }
    sentences.push(first);
    if best.plan.has_host_tables() {
        sentences
            .push("These times do not include the messages and updates of embedding tables in host memory.".into());
    }
    if proposals.iter().any(|one| one.keys.offload.any()) {
        sentences.push(
            "Layouts with offloading come after all that fit without: their times do not include copies to the host and updates there."
                .into(),
        );
    }
    if best.keys.zero == Zero::Zero && best.keys.replica > 1 {
        let saved = proposals.iter().find(|other| {
            other.keys.zero == Zero::One && other.keys.same_axes_but_zero(&best.keys)
        });
        if let Some(other) = saved {
            let slower = 100.0 * (other.time.step / time.step - 1.0).max(0.0);
            let [less, now] = [other, best].map(|one| format_bytes(one.bytes()));
            sentences.push(format!(
                "ZeRO 1 would take {less} a rank instead of {now}, for {slower:.1} % more time."
            ));
        }
    }
    sentences
}

/// The ranks and devices that a search measures.
pub struct SearchEnvironment<'a, B: Kernels, F: Fn(&ResolvedConfig) -> Result<B>> {
    /// The ranks.
    pub comm: &'a Comm<B>,
    /// Creates the device of a rank for a plan.
    pub backend: F,
    /// Bytes of its GPU that a rank may use.
    pub gpu: Option<usize>,
    /// Compute threads per rank, unless the configuration sets them. Default: the ranks of a node
    /// share its cores.
    pub threads: Option<usize>,
    /// Vocabulary size of the data. Default: that of the configuration's data.
    pub vocabulary: Option<usize>,
    /// Bytes of in-memory checkpoints on this node that the run will replace.
    pub replaced: usize,
}

/// Refuses `batch.per_rank`: the planner compares layouts of one batch, and layouts with fewer
/// data-parallel ranks would train with a smaller one.
///
/// # Errors
/// Returns an error if the key is given.
pub fn check_batch(config: &Config) -> Result<()> {
    config.check_fixed_batch("the planner compares layouts with the same batch")
}

/// Searches the layouts for these ranks and devices, with rates measured on them. Returns the
/// result and the number of ranks per node. Collective over the world of the communicator.
///
/// # Errors
/// Returns an error if [`search_layouts`] does, or if the device or a message between ranks fails.
pub fn search_layouts_here<B: Kernels, F: Fn(&ResolvedConfig) -> Result<B>>(
    config: &Config,
    here: &SearchEnvironment<'_, B, F>,
) -> Result<(SearchResult, usize)> {
    let SearchEnvironment { comm, backend, gpu, .. } = here;
    let config = &config.clone().with_any_length();
    let world = comm.world();
    world.all_ok(check_batch(config))?;
    let topology = Topology::gather(&world, comm.node().host)?;
    let threads = here.threads.unwrap_or_else(|| topology.threads());
    let facts = match here.vocabulary {
        Some(ids) => {
            Environment { ranks: world.size(), threads, vocabulary: Some(ids), on_gpu: !B::ON_HOST }
        }
        None => world.all_ok(environment(config, world.size(), threads, !B::ON_HOST))?,
    };
    // All ranks decide by the same numbers: the most memory in use on any rank, the smallest
    // budget, and the fewest ranks on a node.
    let mine = BaselineMemory { replaced: here.replaced, ..BaselineMemory::now(comm, &[]) };
    let foreign_ranks = foreign_ranks(&topology.hosts(), &topology.here().host);
    let foreign_ranks = foreign_ranks.div_ceil(topology.ranks_here()) as u64;
    let numbers = [mine.resident as u64, topology.ranks_here() as u64, foreign_ranks];
    let numbers = world.all_gather_u64(&numbers)?;
    let resident = numbers.iter().map(|of_rank| of_rank[0]).max().unwrap_or(0) as usize;
    let per_node = numbers.iter().map(|of_rank| of_rank[1]).min().unwrap_or(1) as usize;
    let foreign_ranks = numbers.iter().map(|of_rank| of_rank[2]).max().unwrap_or(0) as usize;
    let held = BaselineMemory { resident, foreign_ranks, ..mine };
    let any = world.all_ok(any_plan(config, &facts))?;
    let room = MemoryBudget::least(
        &world.all_gather_u64(&memory::budget(&any, &topology, held, *gpu).numbers())?,
    );
    let spare = topology.has_spare_cores();
    let choice = search_layouts(config, &facts, &SearchLimits { room, held, per_node }, |plans| {
        measure(comm, plans, per_node, spare, backend)
    });
    Ok((world.all_ok(choice)?, per_node))
}

/// Returns some plan of the configuration, for its memory limit.
fn any_plan(config: &Config, facts: &Environment) -> Result<ResolvedConfig> {
    let (mut legal, refused) = layouts(config, facts, facts.ranks);
    if legal.is_empty() { Err(none_legal(&refused)) } else { Ok(legal.swap_remove(0).1) }
}

/// Returns the facts that a plan depends on, with the vocabulary size of the configuration's data.
///
/// # Errors
/// Returns an error if the data cannot be opened.
pub fn environment(
    config: &Config,
    ranks: usize,
    threads: usize,
    on_gpu: bool,
) -> Result<Environment> {
    let is_unknown = config.model.kind != ModelKind::Layers && config.model.vocabulary.is_none();
    let vocabulary = is_unknown.then(|| vocabulary(config)).transpose()?;
    Ok(Environment { ranks, threads, vocabulary, on_gpu })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::{Machine, OffloadKeys};
    use hpctrain_config::{Sources, load};
    use std::path::Path;

    fn configured(settings: &[&str]) -> Config {
        let overrides: Vec<String> = settings.iter().map(|setting| setting.to_string()).collect();
        let preset = Some("gpt2-124m");
        load(&Sources { preset, overrides: &overrides, ..Sources::default() }).unwrap().0
    }

    fn chosen(settings: &[&str], ranks: usize, machine: &str) -> Result<SearchResult> {
        let machine = Machine::named(machine).unwrap();
        let facts = Environment { ranks, threads: 1, vocabulary: Some(50304), on_gpu: true };
        let held = BaselineMemory {
            messages: 0,
            messages_on_device: true,
            resident: 0,
            cache: 0,
            foreign_ranks: 0,
            replaced: 0,
        };
        let place = SearchLimits {
            room: machine.memory_budget(),
            held,
            per_node: machine.ranks_per_node.min(ranks),
        };
        search_layouts(&configured(settings), &facts, &place, |_| Ok(machine))
    }

    /// A small network, for fewer layouts.
    const SMALL: [&str; 3] = ["model.layers=4", "batch.global=16", "batch.micro=2"];

    #[test]
    fn a_proposal_is_the_configuration_that_it_prints() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layout.toml");
        let choice = chosen(&SMALL, 4, "h100x8").unwrap();
        assert!(choice.proposals.len() > 20, "{}", choice.proposals.len());
        let overrides: Vec<String> = SMALL.iter().map(|setting| setting.to_string()).collect();
        for proposal in &choice.proposals {
            std::fs::write(&path, proposal.keys.toml()).unwrap();
            let sources =
                Sources { preset: Some("gpt2-124m"), file: Some(&path), overrides: &overrides };
            let facts = Environment { ranks: 4, threads: 1, vocabulary: Some(50304), on_gpu: true };
            let plan = resolve(load(&sources).unwrap().0, &facts).unwrap();
            assert_eq!(
                (plan.mesh, plan.micro),
                (proposal.plan.mesh, proposal.plan.micro),
                "{}",
                proposal.keys
            );
            assert_eq!(
                plan.config.parallel.recompute, proposal.keys.recompute,
                "{}",
                proposal.keys
            );
            assert_eq!(plan.config.parallel.schedule, proposal.keys.schedule, "{}", proposal.keys);
            assert_eq!(plan.config.parallel.sequence, proposal.keys.sequence, "{}", proposal.keys);
        }
        // No layout is listed twice.
        let mut seen: Vec<String> =
            choice.proposals.iter().map(|proposal| proposal.keys.to_string()).collect();
        let all = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), all);
    }

    #[test]
    fn given_keys_stay() {
        let settings =
            [&SMALL[..], &["parallel.pipeline=1", "parallel.zero=3", "parallel.sequence=true"]]
                .concat();
        let choice = chosen(&settings, 4, "h100x8").unwrap();
        for Proposal { keys, plan, .. } in &choice.proposals {
            assert_eq!(
                (keys.pipeline, keys.zero, keys.sequence, plan.micro),
                (1, Zero::Three, true, 2),
                "{keys}"
            );
        }
        assert!(!choice.proposals.is_empty());
        let none = chosen(&[&SMALL[..], &["parallel.pipeline=3"]].concat(), 4, "h100x8")
            .unwrap_err()
            .to_string();
        assert!(none.contains("no layout is possible: ") && none.contains("hint: "), "{none}");
    }

    #[test]
    fn memory_decides_first() {
        // 20 bytes per parameter, as f32 and bf16: more than one GPU has, and less than eight.
        let large = ["model.layers=48", "model.width=6144", "model.heads=48", "batch.global=64"];
        let choice = chosen(&large, 8, "h100x8").unwrap();
        for proposal in &choice.proposals {
            let LayoutKeys { pipeline, tensor, shard, .. } = proposal.keys;
            assert!(
                pipeline * tensor * shard == 8 || proposal.keys.offload.any(),
                "{}",
                proposal.keys
            );
            assert!(proposal.bytes() <= choice.room.gpu, "{}", proposal.keys);
        }
        let whole = choice.rejected.iter().find(|left| left.keys.replica == 8).unwrap();
        assert!(
            whole.reason.starts_with("needs ") && whole.reason.contains("optimizer "),
            "{}",
            whole.reason
        );
        assert!(choice.reasons[0].contains("does not fit a rank"), "{}", choice.reasons[0]);
        let small = chosen(&SMALL, 8, "h100x8").unwrap();
        assert!(small.reasons[0].contains("data parallelism suffices"), "{}", small.reasons[0]);
        let error = chosen(&[&large[..], &["parallel.zero=0"]].concat(), 1, "h100x8").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        assert!(error.starts_with("no layout fits: of 1 ranks the smallest needs "), "{error}");
        assert!(
            error.contains("hint: ") && error.contains(" ranks, as many on each node as now"),
            "{error}"
        );
    }

    /// Returns settings of a network with billions of parameters, and micro-batches of one sample.
    fn large(layers: usize, width: usize) -> [String; 6] {
        let heads = width / 128;
        [
            format!("model.layers={layers}"),
            format!("model.width={width}"),
            format!("model.heads={heads}"),
            "batch.global=2".into(),
            "batch.micro=1".into(),
            "checkpoint.async_save=false".into(),
        ]
    }

    /// Returns the result for a [`large`] network with more settings on one GPU.
    fn chosen_for_large(layers: usize, width: usize, more: &[&str]) -> Result<SearchResult> {
        let sizes = large(layers, width);
        let settings: Vec<&str> =
            sizes.iter().map(String::as_str).chain(more.iter().copied()).collect();
        chosen(&settings, 1, "h100x8")
    }

    #[test]
    fn the_host_takes_what_a_gpu_has_no_room_for() {
        // 6.6e9 parameters, for which a GPU of 74 GiB has room for 6 bytes each but not for 18; and
        // 14e9, for which it does not even have room for 6.
        let optimizer = OffloadKeys { optimizer: true, ..OffloadKeys::default() };
        let choice = chosen_for_large(32, 4096, &[]).unwrap();
        let [best] = &choice.proposals[..] else { panic!("{:?}", choice.proposals.len()) };
        assert_eq!(
            (best.keys.offload, best.keys.zero, best.keys.recompute),
            (optimizer, Zero::Zero, false)
        );
        assert!(
            best.bytes() < choice.room.gpu && best.memory.host() > 90 << 30,
            "{}",
            format_bytes(best.bytes())
        );
        assert!(best.keys.to_string().contains("optimizer on the host"), "{}", best.keys);
        assert!(best.keys.toml().contains("[offload]\noptimizer = true"), "{}", best.keys.toml());
        assert!(
            choice.reasons.iter().any(|reason| reason.contains("do not include copies")),
            "{:?}",
            choice.reasons
        );
        let choice = chosen_for_large(44, 5120, &[]).unwrap();
        let best = &choice.proposals[0];
        assert_eq!(
            (best.keys.offload, best.keys.zero),
            (OffloadKeys { params: true, ..optimizer }, Zero::Three)
        );
        assert!(
            best.keys.toml().contains("\n[offload]\noptimizer = true\nparams = true"),
            "{}",
            best.keys.toml()
        );
        // Given keys are kept.
        for given in
            [&["offload.optimizer=false"][..], &["parallel.zero=2"], &["offload.params=false"]]
        {
            let error = chosen_for_large(44, 5120, given).unwrap_err().to_string();
            assert!(error.starts_with("no layout fits: of 1 ranks "), "{given:?}: {error}");
        }
    }

    #[test]
    fn inputs_go_to_the_host_where_they_are_what_is_large() {
        // Parameters and one block's activations are small compared with the inputs of all blocks.
        let wide = [
            "model.layers=320",
            "model.context=163840",
            "batch.global=1",
            "batch.micro=1",
            "eval.batch=1",
        ];
        let choice = chosen(&[&wide[..], &["optimizer.kind=sgd"]].concat(), 1, "a100x8").unwrap();
        let keys = choice.proposals[0].keys;
        assert!(keys.recompute && keys.offload.activations && !keys.offload.params, "{keys}");
        let given = ["offload.activations=false", "optimizer.kind=sgd"];
        let others = chosen(&[&wide[..], &given].concat(), 1, "a100x8");
        assert!(others.is_err(), "{}", others.unwrap().proposals[0].keys);
    }

    #[test]
    fn layouts_with_something_on_the_host_come_last() {
        let sizes = large(32, 4096);
        let settings: Vec<&str> = sizes.iter().map(String::as_str).collect();
        let choice = chosen(&settings, 2, "h100x8").unwrap();
        let counts: Vec<usize> =
            choice.proposals.iter().map(|one| one.keys.offload.count()).collect();
        assert!(counts.is_sorted() && counts[0] == 0 && counts[counts.len() - 1] > 0, "{counts:?}");
        // A layout that fits without offloading is not listed with it.
        for one in choice.proposals.iter().filter(|one| one.keys.offload.any()) {
            let plain = choice.proposals.iter().any(|other| {
                other.keys.same_but_micro(&one.keys)
                    && other.keys.micro == one.keys.micro
                    && !other.keys.offload.any()
            });
            assert!(!plain, "{}", one.keys);
            assert!(
                one.bytes() <= choice.room.gpu && one.memory.host() <= choice.room.host,
                "{}",
                one.keys
            );
        }
    }

    /// Returns the error for a machine whose description is `text`, at `path`.
    fn refused_machine(path: &Path, text: &str) -> String {
        std::fs::write(path, text).unwrap();
        let error = Machine::named(path.to_str().unwrap()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    #[test]
    fn machines_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.toml");
        let shipped = include_str!("machines/dgx-h100.toml");
        let error = refused_machine(&path, &shipped.replace("overlap = 0.9", "overlap = 9"));
        assert!(error.contains("mine.toml: overlap = 9\nhint: it must be from 0 to 1"), "{error}");
        let error = refused_machine(&path, &shipped.replace("bf16 = 6.0e14", "bf16 = 0"));
        assert!(
            error.contains("mine.toml: flops.bf16 = 0\nhint: it must be more than 0"),
            "{error}"
        );
        let error = refused_machine(&path, &shipped.replace("launch =", "lunch ="));
        assert!(error.contains("mine.toml:12: unknown field `lunch`"), "{error}");
        let error = Machine::named("b300x8").unwrap_err().to_string();
        assert!(
            error.contains("b300x8") && error.contains("hint: ") && error.contains("h200x8"),
            "{error}"
        );
    }
}
