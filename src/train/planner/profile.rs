//! Measures the speed of this machine, on all ranks at once.
//!
//! Blocks are timed in real steps of a network with few blocks. Each tensor-parallel group trains
//! independently, so that cores and memory are as busy as in a run, without collectives between
//! groups. Collectives are timed separately, and how much of their time overlaps with computation
//! follows from steps with many and with few of them.

use std::collections::BTreeMap;
use std::time::Instant;

use super::cost_model::{BlockTimes, GroupExtent, Rates, step_times};
use super::offload::OffloadKeys;
use super::timeline::StepTimes;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::mesh::{Axis, Mesh};
use hpctrain_base::spans::{ActivityKind, SpanEvent, Track};
use hpctrain_comm::{Algorithm, AlgorithmTable, Comm, Group, Operation, slowest};
use hpctrain_config::{
    Config, Environment, LayerList, LayoutMode, ReduceChoice, ResolvedConfig, WorkShares, resolve,
};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_engine::SyntheticTrainer;
use hpctrain_parallel::{Lifetime, PipelineSchedule, Zero};

/// Timed steps, after the warm-up steps.
const STEPS: usize = 5;

/// Rounds in which everything is timed again. The fastest step counts, since other processes only
/// slow steps down, and a disturbance that lasts does not affect every round.
const ROUNDS: usize = 5;

/// Seconds after which no further round begins: long steps are disturbed little, and on a crowded
/// machine all rounds would take too long.
const TIME_BUDGET: f64 = 20.0;

/// Warm-up steps, which touch memory for the first time.
const WARM_UP: usize = 2;

/// Minimum number of transformer blocks of the timed network. Those of a deeper one are as fast.
const BLOCKS: usize = 2;

/// Minimum bytes of parameters in the timed blocks, if the network has as many: a network that fits
/// into caches would be too fast.
const BEYOND_CACHES: usize = 64 << 20;

/// Range of the fraction of a collective's time that overlaps with computation. It is negative if
/// the collective slows computation down by more than its own time.
const OVERLAP: [f64; 2] = [-1.0, 1.0];

/// The same range for all-gathers before each use of parameters, after which matmuls also pack the
/// weights again.
const PARAM_OVERLAP: [f64; 2] = [-9.0, 1.0];

/// Timed buffer sizes of collectives, in bytes. Times between them are interpolated.
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20];

/// Maximum number of micro-batches of a timed step, which otherwise has as many as a step of a run.
/// The longer a step, the less likely it is that none of its repetitions is disturbed.
const MICROS: u64 = 8;

/// Repetitions of a collective.
const REPETITIONS: usize = 5;

/// Everything that the time of a block depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    tensor: usize,
    sequence: bool,
    micro: u64,
    /// Consecutive micro-batches that use the same parameters.
    micros: u64,
    /// Whether wgrad is computed separately, deferred.
    deferred_wgrad: bool,
}

impl Key {
    fn new(plan: &ResolvedConfig) -> Self {
        let micros = (plan.step_schedule(0).micros() as u64).min(MICROS);
        let parallel = &plan.config.parallel;
        let deferred_wgrad =
            plan.mesh.pipeline > 1 && parallel.schedule == PipelineSchedule::ZeroBubble;
        Self {
            tensor: plan.mesh.tensor,
            sequence: parallel.sequence,
            micro: plan.micro,
            micros,
            deferred_wgrad,
        }
    }
}

/// The times of the blocks of a step, on the slowest rank.
#[derive(Debug, Clone)]
struct Times {
    /// The whole step.
    step: f64,
    /// The passes of each block, in the first micro-batch of a step and in a later one.
    passes: [Vec<BlockTimes>; 2],
    micro: [f64; 2],
    /// Seconds of the update per parameter element.
    update: f64,
}

/// A communication between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Exchange {
    Collective(Operation),
    Message,
}

/// Measured rates of this machine.
pub struct MeasuredRates {
    times: BTreeMap<Key, Times>,
    /// Buffer sizes in bytes, ascending, with their seconds.
    exchanges: BTreeMap<(Exchange, GroupExtent), Vec<(usize, f64)>>,
    overlap: f64,
    param_overlap: f64,
}

/// Measures the times of everything that steps of `plans` consist of. Collective over the world of
/// `comm`, which has the ranks of the plans, `per_node` on each node. `backend` creates the device
/// of a rank for a plan.
///
/// # Errors
/// Returns an error if memory runs out, or if the device or a message between ranks fails.
pub fn measure<B: Kernels>(
    comm: &Comm<B>,
    plans: &[&ResolvedConfig],
    per_node: usize,
    spare_cores: bool,
    backend: &impl Fn(&ResolvedConfig) -> Result<B>,
) -> Result<MeasuredRates> {
    comm.activity().register_thread(Track::Compute);
    let world = comm.world();
    let mut of_keys = BTreeMap::new();
    let mut of_exchanges = BTreeMap::new();
    for plan in plans {
        of_keys.entry(Key::new(plan)).or_insert(*plan);
        for (exchange, axes) in used(&plan.mesh) {
            let span = GroupExtent::new(&plan.mesh, axes, 0, per_node);
            if span.ranks > 1 {
                of_exchanges.entry((exchange, span)).or_insert((*plan, axes));
            }
        }
    }
    let mut times = BTreeMap::<Key, Times>::new();
    let mut exchanges = BTreeMap::<_, Vec<f64>>::new();
    let begun = Instant::now();
    for round in 0..ROUNDS {
        if round > 0 && is_enough(&world, begun)? {
            break;
        }
        for (&key, plan) in &of_keys {
            let found = time_blocks(comm, plan, backend)?;
            if times.get(&key).is_none_or(|before| found.step < before.step) {
                times.insert(key, found);
            }
        }
        let Some((first, _)) = of_exchanges.values().next() else { continue };
        let backend = world.all_ok(backend(first))?;
        let on_path =
            comm.select_transport(first.config.comm.transport, hpctrain_comm::probe_cuda_aware)?;
        for (&key, (plan, axes)) in &of_exchanges {
            let found = time_exchange(&on_path, &plan.mesh, axes, key.0, plan, &backend)?;
            let before = exchanges.entry(key).or_insert_with(|| found.clone());
            before.iter_mut().zip(found).for_each(|(before, found)| *before = before.min(found));
        }
    }
    let exchanges = exchanges
        .into_iter()
        .map(|(key, times)| (key, SIZES.into_iter().zip(times).collect()))
        .collect();
    // Communication threads have spare cores, or take those of computation. With GPUs they have.
    let overlap = if spare_cores || !B::ON_HOST { 1.0 } else { 0.0 };
    let mut measured = MeasuredRates { times, exchanges, overlap, param_overlap: overlap };
    let gathers_per_use = |plan: &&&ResolvedConfig| {
        plan.sharding_policy().params == Lifetime::Use
            && plan.mesh.shard > 1
            && plan.mesh.pipeline == 1
    };
    // The plan with the most uses of parameters per step.
    if let Some(plan) =
        plans.iter().filter(gathers_per_use).max_by_key(|plan| (Key::new(plan).micros, plan.micro))
    {
        [measured.overlap, measured.param_overlap] =
            measure_overlap(comm, plan, per_node, &measured, backend)?;
    }
    Ok(measured)
}

/// Returns true if the rank that began first has measured for long enough. Collective.
fn is_enough<B: Kernels>(world: &Group<B>, begun: Instant) -> Result<bool> {
    Ok(slowest(world, &[begun.elapsed().as_secs_f64()])?[0] > TIME_BUDGET)
}

/// Measures the overlap of collectives with computation, and that of all-gathers before each use of
/// parameters, as in `plan`. Real steps of a network with few blocks are timed with ZeRO 1 and with
/// the plan's stage; the overlaps are those with which simulated steps take the same time.
fn measure_overlap<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    per_node: usize,
    measured: &MeasuredRates,
    backend: &impl Fn(&ResolvedConfig) -> Result<B>,
) -> Result<[f64; 2]> {
    let world = comm.world();
    let stages = [Zero::One, plan.config.parallel.zero];
    let both = stages.map(|zero| with_few_blocks(plan, zero, comm.size(), !B::ON_HOST));
    let both = world.all_ok(both.into_iter().collect::<Result<Vec<ResolvedConfig>>>())?;
    let mut fastest = vec![f64::INFINITY; both.len()];
    let begun = Instant::now();
    for round in 0..ROUNDS {
        if round > 0 && is_enough(&world, begun)? {
            break;
        }
        for (fastest, plan) in fastest.iter_mut().zip(&both) {
            let mut trainer =
                SyntheticTrainer::from_plan(comm, plan.clone(), world.all_ok(backend(plan))?)?;
            for _ in 0..WARM_UP {
                trainer.step()?;
            }
            let mine = (0..STEPS).map(|_| trainer.step()).collect::<Result<Vec<_>>>()?;
            *fastest = slowest(&world, &mine)?.into_iter().fold(*fastest, f64::min);
        }
    }
    let times = both
        .iter()
        .map(|plan| step_times(plan, measured, per_node, B::ON_HOST))
        .collect::<Result<Vec<_>>>()?;
    let simulated = |times: &StepTimes, overlap, param_overlap| {
        let time = StepTimes { overlap, param_overlap, ..times.clone() }.simulate();
        time.map_or(f64::INFINITY, |time| time.step)
    };
    let overlap = solve(OVERLAP, fastest[0], |overlap| simulated(&times[0], overlap, overlap));
    let once = simulated(&times[0], overlap, overlap);
    let param_overlap = solve(PARAM_OVERLAP, fastest[1] - fastest[0], |uses| {
        simulated(&times[1], overlap, uses) - once
    });
    Ok([overlap, param_overlap])
}

/// Returns the overlap within these limits with which the simulation takes `seconds`, found by
/// bisection: the larger the overlap, the shorter the step.
fn solve([mut low, mut high]: [f64; 2], seconds: f64, simulated: impl Fn(f64) -> f64) -> f64 {
    for _ in 0..20 {
        let middle = (low + high) / 2.0;
        if simulated(middle) > seconds { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// Returns the communications of a mesh, with their axes.
fn used(mesh: &Mesh) -> Vec<(Exchange, &'static [Axis])> {
    let mut used: Vec<(Exchange, &'static [Axis])> = vec![
        (Exchange::Collective(Operation::AllGather), &[Axis::Shard]),
        (Exchange::Collective(Operation::ReduceScatter), &[Axis::Shard]),
        (Exchange::Collective(Operation::AllReduce), &[Axis::Replica]),
        // The all-gather of loss and norm.
        (
            Exchange::Collective(Operation::AllGather),
            &[Axis::Pipeline, Axis::Replica, Axis::Shard, Axis::Tensor],
        ),
    ];
    if mesh.pipeline > 1 {
        used.push((Exchange::Message, &[Axis::Pipeline]));
    }
    used
}

/// Times the blocks of a plan's network.
fn time_blocks<B: Kernels>(
    comm: &Comm<B>,
    plan: &ResolvedConfig,
    backend: &impl Fn(&ResolvedConfig) -> Result<B>,
) -> Result<Times> {
    let world = comm.world();
    let key = Key::new(plan);
    let colors: Vec<usize> = (0..comm.size()).map(|rank| rank / key.tensor).collect();
    let tensor_comm = comm.role(&colors)?;
    let plan = world.all_ok(tensor_group_plan(plan, key, !B::ON_HOST))?;
    let backend = world.all_ok(backend(&plan))?;
    // With recording on, an asynchronous device is waited for after each kernel, so that blocks are
    // timed separately.
    backend.profile().record(!B::ON_HOST);
    let mut trainer = SyntheticTrainer::from_plan(&tensor_comm, plan, backend)?;
    if key.deferred_wgrad {
        trainer.defer_wgrad();
    }
    for _ in 0..WARM_UP {
        trainer.step()?;
    }
    let activity = comm.activity();
    let blocks = trainer.plan.network.blocks_summary().len();
    let mut fastest: Option<Vec<f64>> = None;
    for _ in 0..STEPS {
        world.barrier().wait()?;
        activity.record(true);
        let seconds = trainer.step();
        activity.record(false);
        let events = activity.take().recorded;
        let seconds = seconds?;
        let step = StepSpans::new(&trainer, &events, seconds, key.deferred_wgrad)?;
        let mut mine = vec![seconds];
        for micros in [0..1, usize::from(key.micros > 1)..step.loss.len()] {
            let mean = |of: &dyn Fn(usize) -> f64| {
                micros.clone().map(of).sum::<f64>() / micros.len() as f64
            };
            for unit in 0..blocks {
                mine.push(mean(&|micro| step.forward[micro][unit]));
                mine.push(mean(&|micro| step.backward[micro][unit]));
                mine.push(mean(&|micro| step.weights[micro][unit]));
            }
            mine.push(mean(&|micro| step.loss[micro]));
        }
        mine.push(step.rest / trainer.parameters().max(1) as f64);
        // Ranks wait for the slowest rank.
        let slowest = of_slowest(&world, &mine)?;
        if fastest.as_ref().is_none_or(|fastest| slowest[0] < fastest[0]) {
            fastest = Some(slowest);
        }
    }
    trainer.backend().profile().record(false);
    trainer.backend().profile().take();
    let [step, all @ ..] = &fastest.ok_or_else(|| Error::internal("no step was timed"))?[..] else {
        return Err(Error::internal("a timed step has no times"));
    };
    let of_micro = 3 * blocks + 1;
    let [first, other] = [&all[..of_micro], &all[of_micro..2 * of_micro]];
    let micro = [first[of_micro - 1], other[of_micro - 1]];
    Ok(Times {
        step: *step,
        passes: [block_times(first), block_times(other)],
        micro,
        update: all[2 * of_micro],
    })
}

/// Returns the times of the blocks from those of a micro-batch: three for each block, and the loss.
fn block_times(of_micro: &[f64]) -> Vec<BlockTimes> {
    let (passes, _) = of_micro.as_chunks::<3>();
    passes
        .iter()
        .map(|[forward, inputs, weights]| BlockTimes {
            forward: *forward,
            backward: inputs + weights,
            weights: *weights,
        })
        .collect()
}

/// Returns, on every rank, the numbers of the rank whose first number is the largest.
fn of_slowest<B: Kernels>(world: &Group<B>, mine: &[f64]) -> Result<Vec<f64>> {
    let messages =
        world.gather_bytes(mine.iter().flat_map(|x| x.to_le_bytes()).collect()).wait()?;
    let numbers = |bytes: Vec<u8>| {
        bytes.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x)).collect::<Vec<f64>>()
    };
    let slowest =
        messages.into_iter().map(numbers).max_by(|one, other| one[0].total_cmp(&other[0]));
    slowest
        .filter(|numbers| numbers.len() == mine.len())
        .ok_or_else(|| Error::comm("ranks measure different blocks"))
}

/// Returns the plan by which one tensor-parallel group trains a network of few blocks.
fn tensor_group_plan(plan: &ResolvedConfig, key: Key, on_gpu: bool) -> Result<ResolvedConfig> {
    let mut config = plan.config.clone();
    let parallel = &mut config.parallel;
    parallel.layout = LayoutMode::Given;
    (parallel.pipeline, parallel.schedule, parallel.stages) =
        (1, PipelineSchedule::default(), None);
    (parallel.zero, parallel.shard, parallel.replica, parallel.virtual_ranks) =
        (Zero::Zero, None, None, None);
    (parallel.recompute, parallel.reduce) = (false, ReduceChoice::Step);
    OffloadKeys::default().set(&mut config);
    config.batch.micro = Some(key.micro);
    config.set_trial_batch(key.micro * key.micros);
    few_blocks(&mut config, plan);
    let facts = Environment {
        ranks: key.tensor,
        threads: plan.threads,
        vocabulary: plan.network.vocabulary(),
        on_gpu,
    };
    resolve(config, &facts)
}

/// Returns the plan with another ZeRO stage, few blocks and few micro-batches.
fn with_few_blocks(
    plan: &ResolvedConfig,
    zero: Zero,
    ranks: usize,
    on_gpu: bool,
) -> Result<ResolvedConfig> {
    let mut config = plan.config.clone();
    OffloadKeys::default().set(&mut config);
    (config.parallel.zero, config.parallel.virtual_ranks, config.batch.micro) =
        (zero, None, Some(plan.micro));
    config.parallel.reduce = ReduceChoice::Step;
    config.set_trial_batch(plan.micro * plan.mesh.data() as u64 * Key::new(plan).micros);
    few_blocks(&mut config, plan);
    resolve(
        config,
        &Environment {
            ranks,
            threads: plan.threads,
            vocabulary: plan.network.vocabulary(),
            on_gpu,
        },
    )
}

/// Reduces the number of transformer blocks to those that need to be timed.
fn few_blocks(config: &mut Config, plan: &ResolvedConfig) {
    config.parallel.work_shares = WorkShares::Equal;
    if let LayerList::Count(count) = config.model.layers {
        let of_block = plan.network.blocks_summary().get(1).map_or(0, |block| block.parameters)
            * size_of::<f32>();
        let enough = BEYOND_CACHES.div_ceil(of_block.max(1)).max(BLOCKS);
        config.model.layers = LayerList::Count(count.min(enough));
    }
}

/// The parts of a step, in seconds, by micro-batch and then by block.
struct StepSpans {
    forward: Vec<Vec<f64>>,
    /// Without wgrad if it is deferred.
    backward: Vec<Vec<f64>>,
    weights: Vec<Vec<f64>>,
    loss: Vec<f64>,
    /// Norm, update, and all else.
    rest: f64,
}

impl StepSpans {
    fn new<B: Kernels>(
        trainer: &SyntheticTrainer<B>,
        events: &[SpanEvent],
        seconds: f64,
        deferred_wgrad: bool,
    ) -> Result<Self> {
        let blocks = trainer.plan.network.blocks_summary().len();
        let chunks = |times: Vec<f64>| -> Vec<Vec<f64>> {
            times.chunks(blocks).map(<[f64]>::to_vec).collect()
        };
        let forward = chunks(seconds_of(events, ActivityKind::Forward));
        let mut backward = chunks(seconds_of(events, ActivityKind::Backward));
        let mut loss = seconds_of(events, ActivityKind::Loss);
        if trainer.plan.loss.over_batch() {
            // One loss of all micro-batches.
            let share = loss.iter().sum::<f64>() / forward.len().max(1) as f64;
            loss = vec![share; forward.len()];
        }
        let micros = loss.len();
        let mut weights = if deferred_wgrad {
            chunks(seconds_of(events, ActivityKind::Weights))
        } else {
            vec![vec![0.0; blocks]; micros]
        };
        // Backward passes begin with the last block.
        backward.iter_mut().chain(&mut weights).for_each(|of_micro| of_micro.reverse());
        if [&forward, &backward, &weights].iter().any(|passes| passes.len() != micros)
            || micros == 0
        {
            return Err(Error::internal("a timed step lacks forward or backward spans"));
        }
        let passes = [&forward, &backward, &weights]
            .into_iter()
            .flatten()
            .flatten()
            .chain(&loss)
            .sum::<f64>();
        Ok(Self { forward, backward, weights, loss, rest: (seconds - passes).max(0.0) })
    }
}

/// Returns the seconds of each of a rank's computations of a kind, in order.
fn seconds_of(events: &[SpanEvent], doing: ActivityKind) -> Vec<f64> {
    let events =
        events.iter().filter(|event| event.track == Track::Compute && event.name == doing.name());
    events.map(|event| (event.end - event.start) as f64 * 1e-9).collect()
}

/// Times a communication along `axes` of a mesh, for all buffer sizes of [`SIZES`].
fn time_exchange<B: Kernels>(
    comm: &Comm<B>,
    mesh: &Mesh,
    axes: &[Axis],
    exchange: Exchange,
    plan: &ResolvedConfig,
    backend: &B,
) -> Result<Vec<f64>> {
    let world = comm.world();
    let group = comm.split(&mesh.colors(axes))?;
    let algorithm = plan.config.comm.algorithm.fixed().unwrap_or(Algorithm::HalvingDoubling);
    let group = group.with_algorithms(AlgorithmTable::uniform(algorithm));
    let mut times = Vec::with_capacity(SIZES.len());
    for bytes in SIZES {
        let len = (bytes / size_of::<f32>()).next_multiple_of(group.size());
        let mut buf = backend.upload(MemoryKind::Gradients, &vec![0.0; len])?;
        let mut mine = Vec::with_capacity(REPETITIONS);
        for _ in 0..=REPETITIONS {
            world.barrier().wait()?;
            let begun = Instant::now();
            buf = match exchange {
                Exchange::Collective(operation) => group.run(operation, buf).synchronize()?,
                Exchange::Message => ping_pong(&group, buf)?,
            };
            let ways = if exchange == Exchange::Message { 2.0 } else { 1.0 };
            mine.push(begun.elapsed().as_secs_f64() / ways);
        }
        // The first repetition touches memory for the first time.
        times.push(slowest(&world, &mine[1..])?.into_iter().fold(f64::INFINITY, f64::min));
    }
    backend.trim();
    Ok(times)
}

/// Sends a message from the first rank of a group to the second, and back.
fn ping_pong<B: Kernels>(group: &Group<B>, buf: B::Buf) -> Result<B::Buf> {
    match group.rank() {
        0 => {
            let buf = group.send(1, buf).wait()?;
            group.recv(1, buf).wait()
        }
        1 => {
            let buf = group.recv(0, buf).wait()?;
            group.send(0, buf).wait()
        }
        _ => Ok(buf),
    }
}

/// Returns the seconds for `bytes`: interpolated linearly between measured sizes, and in proportion
/// beyond them.
fn interpolated(times: &[(usize, f64)], bytes: usize) -> f64 {
    let (Some(first), Some(last)) = (times.first(), times.last()) else { return 0.0 };
    if bytes <= first.0 {
        return first.1;
    }
    let between = times.windows(2).find(|pair| bytes <= pair[1].0);
    match between {
        Some(pair) => {
            let share = (bytes - pair[0].0) as f64 / (pair[1].0 - pair[0].0) as f64;
            pair[0].1 + share * (pair[1].1 - pair[0].1)
        }
        None => last.1 * bytes as f64 / last.0 as f64,
    }
}

impl Times {
    /// Returns the mean times of block `unit` of `blocks` over a step's micro-batches, a fraction
    /// `first` of which come first.
    fn mean_of_block(&self, unit: usize, blocks: usize, first: f64) -> BlockTimes {
        let measured = self.passes[0].len();
        let of_kind = match unit {
            0 => 0,
            _ if unit + 1 == blocks => measured - 1,
            _ if measured == blocks => unit,
            // The last transformer block.
            _ => measured - 2,
        };
        let [one, other] = [self.passes[0][of_kind], self.passes[1][of_kind]];
        let mean = |of: fn(&BlockTimes) -> f64| first * of(&one) + (1.0 - first) * of(&other);
        BlockTimes {
            forward: mean(|p| p.forward),
            backward: mean(|p| p.backward),
            weights: mean(|p| p.weights),
        }
    }
}

impl MeasuredRates {
    /// Returns the times for a plan, and the fraction of a step's micro-batches that come first.
    fn lookup(&self, plan: &ResolvedConfig) -> Result<(&Times, f64)> {
        let times = self
            .times
            .get(&Key::new(plan))
            .ok_or_else(|| Error::internal("no times were measured for this layout"))?;
        Ok((times, 1.0 / plan.step_schedule(0).micros() as f64))
    }
}

impl Rates for MeasuredRates {
    fn passes(&self, plan: &ResolvedConfig) -> Result<Vec<BlockTimes>> {
        let (times, first) = self.lookup(plan)?;
        let blocks = plan.network.blocks_summary().len();
        Ok((0..blocks).map(|unit| times.mean_of_block(unit, blocks, first)).collect())
    }

    fn micro(&self, plan: &ResolvedConfig) -> Result<f64> {
        let (times, first) = self.lookup(plan)?;
        Ok(first * times.micro[0] + (1.0 - first) * times.micro[1])
    }

    fn collective(&self, operation: Operation, span: GroupExtent, bytes: usize) -> f64 {
        self.exchanges
            .get(&(Exchange::Collective(operation), span))
            .map_or(0.0, |times| interpolated(times, bytes))
    }

    fn message(&self, span: GroupExtent, bytes: usize) -> f64 {
        let times = self.exchanges.iter().find(|((exchange, group), _)| {
            *exchange == Exchange::Message && group.nodes >= span.nodes
        });
        times.map_or(0.0, |(_, times)| interpolated(times, bytes))
    }

    fn update(&self, plan: &ResolvedConfig, elements: usize) -> f64 {
        self.lookup(plan).map_or(0.0, |(times, _)| times.update * elements as f64)
    }

    fn overlap(&self) -> f64 {
        self.overlap
    }

    fn param_overlap(&self) -> f64 {
        self.param_overlap
    }
}
