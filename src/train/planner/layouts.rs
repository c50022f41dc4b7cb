//! Enumerates the layouts of a configuration on a number of ranks.

use std::fmt;

use super::offload::OffloadKeys;
use hpctrain_config::{Config, Environment, LayoutMode, ResolvedConfig, resolve};
use hpctrain_parallel::{PipelineSchedule, Zero};

/// Maximum number of micro-batch sizes that are tried for each layout, the largest first.
const MICROS: usize = 5;

/// Tokens of a micro-batch beyond which matmuls do not get more efficient.
const MOST_TOKENS: u64 = 16384;

/// The configuration keys that define a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutKeys {
    /// Pipeline stages.
    pub pipeline: usize,
    /// The pipeline schedule.
    pub schedule: PipelineSchedule,
    /// Tensor-parallel ranks.
    pub tensor: usize,
    /// Whether they use sequence parallelism.
    pub sequence: bool,
    /// ZeRO stage.
    pub zero: Zero,
    /// Ranks over which one copy of the parameters or state is sharded.
    pub shard: usize,
    /// Replicas, the number of copies.
    pub replica: usize,
    /// Samples of a micro-batch. `None` if the configuration's default applies.
    pub micro: Option<u64>,
    /// Whether activation checkpointing is on.
    pub recompute: bool,
    /// The offload to host memory.
    pub offload: OffloadKeys,
}

impl LayoutKeys {
    /// Returns the layout of one rank that has everything.
    pub fn whole() -> Self {
        Self {
            pipeline: 1,
            schedule: PipelineSchedule::default(),
            tensor: 1,
            sequence: false,
            zero: Zero::Zero,
            shard: 1,
            replica: 1,
            micro: None,
            recompute: false,
            offload: OffloadKeys::default(),
        }
    }

    /// Returns the number of properties by which the layout is more complex than a single rank.
    pub fn parts(&self) -> usize {
        let Self {
            pipeline,
            schedule,
            tensor,
            sequence,
            zero,
            shard,
            replica,
            micro: _,
            recompute,
            offload: host,
        } = *self;
        let axes = [pipeline, tensor, replica].into_iter().filter(|size| *size > 1).count();
        let order = schedule != PipelineSchedule::default();
        let switches = [sequence, order, recompute, shard > 1].into_iter().filter(|on| *on).count();
        axes + switches + host.count() + usize::from(u8::from(zero))
    }

    /// Returns the same layout on GPUs with more offloading: the fewest keys first, then the ones
    /// that keep most on the GPU. Keys that `base` gives are kept. On one rank, offloading
    /// parameters sets ZeRO 3, which shards nothing there. The configuration may still refuse some.
    pub(super) fn with_more_offload(&self, base: &Config, may_recompute: bool) -> Vec<Self> {
        let is_given = |key: &str| base.parallel.given.contains(key);
        let whole = self.shard * self.replica == 1 && !is_given("parallel.zero");
        let again =
            if may_recompute && !self.recompute { vec![false, true] } else { vec![self.recompute] };
        let now = self.offload;
        let mut all = Vec::new();
        for [optimizer, shards, activations] in
            (1..8).map(|bits| [1, 2, 4].map(|bit| bits & bit != 0))
        {
            // Offload that the configuration sets stays.
            let changes = [
                (now.optimizer, optimizer, "offload.optimizer"),
                (now.params, shards, "offload.params"),
                (now.activations, activations, "offload.activations"),
            ];
            let may_change = changes
                .iter()
                .all(|(before, after, key)| before == after || (*after && !is_given(key)));
            let host = OffloadKeys { optimizer, params: shards, activations };
            if !may_change || host == now {
                continue;
            }
            let zero = if shards && whole { Zero::Three } else { self.zero };
            let has_owners = !shards || (zero == Zero::Three && optimizer);
            let all_of_host =
                again.iter().filter(|recompute| has_owners && (**recompute || !activations));
            all.extend(all_of_host.map(|&recompute| Self {
                zero,
                recompute,
                offload: host,
                ..*self
            }));
        }
        all.sort_by_key(|keys| (keys.offload.count(), keys.offload.params, keys.recompute));
        all
    }

    /// Returns true if another layout differs only in micro-batch, recomputation and offloading.
    pub fn same_but_micro(&self, other: &Self) -> bool {
        self.shape() == other.shape()
    }

    /// Returns the layout without micro-batch, recomputation and offloading.
    fn shape(&self) -> Self {
        Self { micro: None, recompute: false, offload: OffloadKeys::default(), ..*self }
    }

    /// Returns true if another layout has the same axes and micro-batch, with or without ZeRO.
    pub fn same_axes_but_zero(&self, other: &Self) -> bool {
        let axes = |keys: &Self| {
            (keys.pipeline, keys.tensor, keys.shard * keys.replica, keys.sequence, keys.schedule)
        };
        axes(self) == axes(other) && self.micro == other.micro
    }

    /// Returns true if another layout has the same axes.
    pub fn same_axes(&self, other: &Self) -> bool {
        let axes = |keys: &Self| (keys.pipeline, keys.tensor, keys.shard, keys.replica);
        axes(self) == axes(other)
    }

    /// Returns the configuration with this layout.
    pub fn config(&self, base: &Config) -> Config {
        let mut config = base.clone();
        let parallel = &mut config.parallel;
        parallel.layout = LayoutMode::Given;
        parallel.given.clear();
        (parallel.pipeline, parallel.schedule) = (self.pipeline, self.schedule);
        (parallel.tensor, parallel.sequence) = (self.tensor, self.sequence);
        parallel.zero = self.zero;
        (parallel.shard, parallel.replica) = (Some(self.shard), Some(self.replica));
        parallel.recompute = self.recompute;
        self.offload.set(&mut config);
        config.batch.micro = self.micro;
        config
    }

    /// Returns the keys to set as TOML, without those that have their defaults.
    pub fn toml(&self) -> String {
        let mut lines = vec!["[parallel]".to_string()];
        let mut line = |is_set: bool, text: String| lines.extend(is_set.then_some(text));
        line(self.pipeline > 1, format!("pipeline = {}", self.pipeline));
        line(
            self.schedule != PipelineSchedule::default(),
            format!("schedule = \"{}\"", self.schedule),
        );
        line(self.tensor > 1, format!("tensor = {}", self.tensor));
        line(self.sequence, "sequence = true".into());
        line(self.zero != Zero::Zero, format!("zero = {}", u8::from(self.zero)));
        line(self.shard > 1, format!("shard = {}", self.shard));
        line(self.replica > 1, format!("replica = {}", self.replica));
        line(self.recompute, "recompute = true".into());
        if self.offload.any() {
            lines.extend([String::new(), "[offload]".into()]);
        }
        let offload = [
            ("optimizer", self.offload.optimizer),
            ("params", self.offload.params),
            ("activations", self.offload.activations),
        ];
        lines.extend(
            offload.iter().filter(|(_, is_set)| *is_set).map(|(key, _)| format!("{key} = true")),
        );
        if let Some(micro) = self.micro {
            lines.extend([String::new(), "[batch]".into(), format!("micro = {micro}")]);
        }
        lines.join("\n")
    }
}

impl fmt::Display for LayoutKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = [("pipeline", self.pipeline), ("tensor", self.tensor), ("shard", self.shard)];
        let axes =
            axes.into_iter().chain([("replica", self.replica)]).filter(|(_, size)| *size > 1);
        let mut parts: Vec<String> = axes.map(|(name, size)| format!("{name} {size}")).collect();
        if parts.is_empty() {
            parts.push("one rank".into());
        }
        let mut text = parts.join(" × ");
        if self.zero != Zero::Zero {
            text += &format!(", ZeRO {}", u8::from(self.zero));
        }
        if self.sequence {
            text += ", sequence";
        }
        if self.schedule != PipelineSchedule::default() {
            text += &format!(", {}", self.schedule);
        }
        if self.recompute {
            text += ", recompute";
        }
        text += &self.offload.to_string();
        if let Some(micro) = self.micro {
            text += &format!(", micro {micro}");
        }
        f.pad(&text)
    }
}

/// A layout that was rejected, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedLayout {
    /// The layout.
    pub keys: LayoutKeys,
    /// The reason, in one line.
    pub reason: String,
    /// A hint, if the configuration is invalid.
    pub hint: Option<String>,
}

/// Returns every layout of `config` on the ranks of `facts`, `per_node` of them on each node, and
/// the rejected ones. Keys that the configuration gives are kept, and so are recomputation and
/// offloading.
pub fn layouts(
    config: &Config,
    facts: &Environment,
    per_node: usize,
) -> (Vec<(LayoutKeys, ResolvedConfig)>, Vec<RejectedLayout>) {
    let mut legal = Vec::new();
    let mut refused = Vec::new();
    for keys in shapes(config, facts.ranks, per_node) {
        match resolve(keys.config(config), facts) {
            Err(e) => refused.push(RejectedLayout {
                keys,
                reason: e.message().into(),
                hint: e.advice().map(str::to_owned),
            }),
            Ok(plan) => {
                for micro in micros(config, &plan) {
                    let keys = LayoutKeys { micro: Some(micro), ..keys };
                    legal.extend(resolve(keys.config(config), facts).ok().map(|plan| (keys, plan)));
                }
            }
        }
    }
    (legal, refused)
}

/// Returns all combinations of keys except for the micro-batch, which is the configuration's.
fn shapes(config: &Config, ranks: usize, per_node: usize) -> Vec<LayoutKeys> {
    let parallel = &config.parallel;
    let is_given = |key: &str| parallel.given.contains(&format!("parallel.{key}"));
    let one_or =
        |key: &str, given: usize, all: Vec<usize>| if is_given(key) { vec![given] } else { all };
    let switch =
        |key: &str, given: bool| if is_given(key) { vec![given] } else { vec![false, true] };
    let deep = if is_given("stages") { vec![parallel.pipeline] } else { divisors(ranks) };
    let mut shapes = Vec::new();
    for pipeline in one_or("pipeline", parallel.pipeline, deep) {
        let of_stage = ranks / pipeline;
        for tensor in one_or("tensor", parallel.tensor, divisors(of_stage)) {
            let data = (of_stage / tensor).max(1);
            // Sequence parallelism requires more than one tensor-parallel rank.
            let sequences = if tensor == 1 && !parallel.sequence {
                vec![false]
            } else {
                switch("sequence", parallel.sequence)
            };
            let schedules = match pipeline {
                _ if is_given("schedule") => vec![parallel.schedule],
                1 => vec![PipelineSchedule::default()],
                _ => vec![PipelineSchedule::OneForwardOneBackward, PipelineSchedule::ZeroBubble],
            };
            for (zero, shard, replica) in shards(config, data, per_node / tensor.min(per_node)) {
                for (&sequence, &schedule) in
                    sequences.iter().flat_map(|s| schedules.iter().map(move |o| (s, o)))
                {
                    let micro = config.batch.micro;
                    let recompute = parallel.recompute;
                    let host = OffloadKeys::from_config(config);
                    let keys = LayoutKeys {
                        pipeline,
                        schedule,
                        tensor,
                        sequence,
                        zero,
                        shard,
                        replica,
                        micro,
                        recompute,
                        offload: host,
                    };
                    shapes.push(keys);
                }
            }
        }
    }
    shapes
}

/// Returns the ZeRO stages with the numbers of shards and replicas: sharded over all `data` ranks,
/// or over those of one node.
fn shards(config: &Config, data: usize, per_node: usize) -> Vec<(Zero, usize, usize)> {
    let parallel = &config.parallel;
    let is_given = |key: &str| parallel.given.contains(&format!("parallel.{key}"));
    let stages = match is_given("zero") {
        true => vec![parallel.zero],
        false => vec![Zero::Zero, Zero::One, Zero::Two, Zero::Three],
    };
    let shard = parallel.shard.filter(|_| is_given("shard"));
    let replica = parallel.replica.filter(|_| is_given("replica"));
    let mut all = Vec::new();
    for zero in stages {
        let mut sizes = match (shard, replica) {
            (Some(shard), _) => vec![shard],
            (None, Some(replica)) => vec![(data / replica).max(1)],
            (None, None) if zero == Zero::Zero => vec![1],
            (None, None) => vec![data, per_node],
        };
        sizes.dedup();
        // A ZeRO stage requires several shards.
        sizes.retain(|shard| {
            zero == Zero::Zero || is_given("zero") || (*shard > 1 && data.is_multiple_of(*shard))
        });
        all.extend(
            sizes
                .into_iter()
                .map(|shard| (zero, shard, replica.unwrap_or((data / shard.max(1)).max(1)))),
        );
    }
    all
}

/// Returns the micro-batch sizes to try, the largest first.
fn micros(config: &Config, plan: &ResolvedConfig) -> Vec<u64> {
    if config.parallel.given.contains("batch.micro") {
        return vec![plan.micro];
    }
    let most = (MOST_TOKENS / plan.network.context() as u64).max(plan.micro);
    // Virtual ranks that are not given follow the micro-batches.
    let samples = match config.parallel.virtual_ranks {
        Some(_) => plan.virtual_rank_samples,
        None => config.batch.global / (plan.replicas() * plan.mesh.shard) as u64,
    };
    (1..=most.min(samples))
        .rev()
        .filter(|micro| samples.is_multiple_of(*micro))
        .take(MICROS)
        .collect()
}

fn divisors(number: usize) -> Vec<usize> {
    (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).collect()
}
