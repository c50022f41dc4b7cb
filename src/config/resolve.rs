//! Resolution of a configuration: sets every optional key and checks every combination.

use std::ops::Range;
use std::sync::Arc;

use super::bounds;
use super::elastic;
use super::embedding_tables::{sparse_tables, with_embedding_placement};
use super::epochs::{self, EpochLength};
use super::layout::{
    batch, local_sgd, loss_chunk_tokens, mesh, stages, virtual_ranks, virtual_tensor_ranks,
};
use super::memory_checkpoint;
use super::mixed_devices;
use super::network::{loss, network};
use super::range::out_of_range;
use super::work_shares::{self, WorkShares};
use super::{
    Compute, Config, DataOrder, DeviceChoice, EmbeddingPlacement, LayerList, LayoutMode, LrByBatch,
    MessageDtype, ModelKind, Optimizer, OptimizerKind, Parallel, ReduceChoice, Scaling,
    TableUpdates,
};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::part;
use hpctrain_base::layout::{Tensor, TensorShards};
use hpctrain_base::mesh::{Axis, Mesh};
use hpctrain_comm::Algorithm;
use hpctrain_data::{ExcludedSamples, SampleSpec};
use hpctrain_device::{Element, Elementwise, Kernels};
use hpctrain_nn::layers::Layer;
use hpctrain_nn::loss::{CustomMetric, Loss, Objective};
use hpctrain_nn::optim::{Group, Schedule, UpdateRule};
use hpctrain_nn::{Network, TiedParam};
use hpctrain_parallel::{
    LocalSgd, PipelineSchedule, ReduceAfter, ShardingPolicy, Stage, StepSchedule, TableSharding,
    VirtualRanks,
};

/// Facts about the environment that a [`ResolvedConfig`] depends on.
#[derive(Debug, Clone, Copy)]
pub struct Environment {
    /// The number of ranks that train.
    pub ranks: usize,
    /// The number of compute threads of this rank, unless the configuration sets it.
    pub threads: usize,
    /// The number of token ids in the data, if the data records it.
    pub vocabulary: Option<usize>,
    /// Whether all ranks compute on GPUs.
    pub on_gpu: bool,
}

/// A resolved configuration: all values are set, and their combination is valid.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedConfig {
    /// The configuration with all keys set; it resolves to itself.
    pub config: Config,
    /// The layout of the ranks.
    pub mesh: Mesh,
    /// The blocks of every stage of the pipeline.
    pub stages: Vec<Range<usize>>,
    /// The number of virtual ranks of the global batch.
    pub virtual_ranks: usize,
    /// The number of virtual tensor-parallel ranks, which share each block.
    pub virtual_tensor_ranks: usize,
    /// The number of samples per virtual rank.
    pub virtual_rank_samples: u64,
    /// When gradients are reduced over ranks.
    pub reduce_after: ReduceAfter,
    /// The number of samples per micro-batch; divides `virtual_rank_samples`.
    pub micro: u64,
    /// The number of tokens whose logits are in memory at once; 0 means all of a micro-batch.
    pub loss_chunk_tokens: usize,
    /// The number of compute threads of this rank.
    pub threads: usize,
    /// The network.
    pub network: Network,
    /// The loss that it minimises.
    pub loss: Loss,
    /// Custom metrics, which evaluations measure besides those of the loss.
    pub metrics: Vec<CustomMetric>,
    /// How the rows of embedding tables with sparse updates are divided among ranks; `None` for
    /// dense updates.
    pub sparse_tables: Option<TableSharding>,
    /// The number of virtual ranks of each data-parallel rank, if `parallel.work_shares` says so.
    pub virtual_rank_counts: Option<Arc<[usize]>>,
    /// The samples that the network takes.
    pub samples: SampleSpec,
    /// The update rule of the optimizer.
    pub update_rule: UpdateRule,
    /// The decay of the exponential moving average of the parameters, if enabled.
    pub ema: Option<f32>,
    /// The settings of local SGD, if enabled.
    pub local_sgd: Option<LocalSgd>,
    /// The learning-rate schedule.
    pub schedule: Schedule,
    /// The training samples that are not read, if `data.exclude` lists any. [`resolve`] does not
    /// read the file.
    pub excluded: Option<Arc<ExcludedSamples>>,
}

impl ResolvedConfig {
    /// Returns the objective of the network, for a device.
    pub fn objective<B: Kernels>(&self) -> Objective<B> {
        Objective::new(self.loss.clone(), self.network.outputs(), !self.network.is_language())
            .with_metrics(&self.metrics)
    }

    /// Sets the custom metrics of evaluations.
    ///
    /// # Errors
    /// Returns an error if logits are sharded among tensor-parallel ranks, which no metric sees
    /// whole.
    pub fn set_metrics(&mut self, metrics: Vec<CustomMetric>) -> Result<()> {
        if let Some(metric) = metrics.first()
            && self.virtual_tensor_ranks > 1
        {
            return Err(Error::input(format!(
                "the custom metric {:?} is not supported with tensor parallelism",
                metric.name()
            ))
            .hint("set parallel.tensor=1 and parallel.virtual_tensor_ranks=1"));
        }
        self.metrics = metrics;
        Ok(())
    }

    /// Returns the number of micro-batches of a virtual rank.
    pub fn micros_per_virtual_rank(&self) -> usize {
        (self.virtual_rank_samples / self.micro) as usize
    }

    /// Returns the number of replicas that divide the virtual ranks of a batch: those of local SGD
    /// if enabled, else those of the mesh.
    pub fn replicas(&self) -> usize {
        self.local_sgd.map_or(self.mesh.replica, |averaging| averaging.replicas)
    }

    /// Returns the number of replicas that a rank trains in turn.
    pub fn replicas_per_rank(&self) -> usize {
        self.replicas() / self.mesh.replica
    }

    /// Returns the virtual ranks and the ranks that compute them.
    pub fn assignment(&self) -> VirtualRanks {
        VirtualRanks {
            total: self.virtual_ranks,
            replicas: self.replicas(),
            shards: self.mesh.shard,
            reduce_after: self.reduce_after,
            counts: self.virtual_rank_counts.clone(),
        }
    }

    /// Returns the assignment with which a rank needs the most memory: with `parallel.work_shares =
    /// auto`, one in which a rank has the most blocks.
    pub fn largest_assignment(&self) -> VirtualRanks {
        let assignment = self.assignment();
        let others = self.mesh.data() - 1;
        if self.config.parallel.work_shares != WorkShares::Auto || others == 0 {
            return assignment;
        }
        let most = ((self.virtual_ranks - others + 1).next_power_of_two() / 2).max(2) - 1;
        let mut counts = VirtualRanks::deal(self.virtual_ranks - most, &vec![1.0; others]);
        counts.insert(0, most);
        let is_possible = counts.iter().sum::<usize>() == self.virtual_ranks;
        VirtualRanks { counts: is_possible.then(|| counts.into()), ..assignment }
    }

    /// Divides the virtual ranks among the data-parallel ranks in proportion to these shares, as
    /// `parallel.work_shares = auto` does.
    pub fn deal(&mut self, shares: &[f64]) {
        let counts = VirtualRanks::deal(self.virtual_ranks, shares);
        let shares = counts.iter().map(|count| *count as f64).collect();
        self.config.parallel.work_shares = WorkShares::Given(shares);
        self.virtual_rank_counts = Some(counts.into());
    }

    /// Returns the virtual ranks of a batch that data-parallel rank `rank` of a stage computes, in
    /// order, for each replica that it trains.
    pub fn virtual_ranks_of_rank(&self, rank: usize) -> Vec<Vec<usize>> {
        let assignment = self.assignment();
        let replicas = part(self.replicas(), rank / self.mesh.shard, self.mesh.replica);
        replicas.map(|replica| assignment.for_shard(replica, rank % self.mesh.shard)).collect()
    }

    /// Returns the number of virtual ranks of each rank of the run.
    pub fn virtual_ranks_of_all(&self) -> Vec<usize> {
        let data_rank = |rank: usize| {
            let coordinates = self.mesh.coordinates(rank);
            coordinates[Axis::Replica as usize] * self.mesh.shard
                + coordinates[Axis::Shard as usize]
        };
        let count = |rank| self.virtual_ranks_of_rank(data_rank(rank)).iter().map(Vec::len).sum();
        (0..self.mesh.ranks()).map(count).collect()
    }

    /// Returns the number of virtual ranks that other data-parallel ranks of a stage compute before
    /// rank `rank` begins, because it has fewer than those that have the most.
    pub fn idle_virtual_ranks(&self, rank: usize) -> usize {
        let of_replicas = self.virtual_ranks_of_rank(rank);
        self.assignment().most() - of_replicas.first().map_or(0, Vec::len)
    }

    /// Returns the number of the last step of the round after `step` steps: that of the next
    /// average with local SGD, else the next step.
    pub fn round_end(&self, step: u64) -> u64 {
        let every = self.local_sgd.map_or(1, |averaging| averaging.every);
        (step / every + 1).saturating_mul(every).min(self.config.run.steps)
    }

    /// Returns true if an action with a period of `every` steps is due after `step`, the last step
    /// of a round. A period of 0 disables the action.
    pub fn is_due(&self, every: u64, step: u64) -> bool {
        let round = self.local_sgd.map_or(1, |averaging| averaging.every);
        let before = step.saturating_sub(1) / round * round;
        every > 0 && step / every > before / every
    }

    /// Returns true if an action with a period of `every` epochs is due after the round that ends
    /// with step `step`, at position `position` of training data with `samples` samples. A period
    /// of 0 disables the action.
    pub fn is_due_by_epochs(&self, every: u64, step: u64, position: u64, samples: u64) -> bool {
        let round = self.local_sgd.map_or(1, |averaging| averaging.every);
        let taken = step - step.saturating_sub(1) / round * round;
        every > 0
            && EpochLength::new(&self.config, samples)
                .ended(step, position, taken, self.config.batch.global)
                .any(|epoch| epoch.is_multiple_of(every))
    }

    /// Describes the peak learning rate, if it is not `optimizer.lr` itself.
    pub fn describe_peak(&self) -> Option<String> {
        let Config { batch, optimizer, lr_schedule, .. } = &self.config;
        let peak = self.schedule.peak;
        let global = batch.global;
        if lr_schedule.lr_by_batch.is_some() {
            return Some(format!("{peak} = lr_schedule.lr_by_batch of batch.global = {global}"));
        }
        let reference = lr_schedule.reference_batch?;
        let (factor, rule) = match lr_schedule.scaling {
            Scaling::Linear => (format!("{global} / {reference}"), "linear"),
            Scaling::Sqrt => (format!("√({global} / {reference})"), "sqrt"),
        };
        Some(format!("{peak} = optimizer.lr {} × {factor} ({rule} scaling)", optimizer.lr))
    }

    /// Returns the order of work of a step in stage `stage` of the pipeline, for each replica that
    /// a rank trains. A rank with fewer virtual ranks than others has the same order, and
    /// [none](Self::idle_virtual_ranks) of the first ones.
    pub fn step_schedule(&self, stage: usize) -> StepSchedule {
        let virtual_ranks = self.assignment().most();
        let micros_per_virtual_rank = self.micros_per_virtual_rank();
        // A single stage has no idle time, so it does not defer weight gradients.
        let order = match self.mesh.pipeline {
            _ if self.loss.over_batch() => PipelineSchedule::GPipe,
            1 => PipelineSchedule::default(),
            _ => self.config.parallel.schedule,
        };
        StepSchedule {
            virtual_ranks,
            micros_per_virtual_rank,
            stage,
            stages: self.mesh.pipeline,
            order,
        }
    }

    /// Returns stage `index` of the pipeline, of a network whose blocks have these tied parameters.
    /// With one stage it may be another network than that of this configuration.
    pub fn stage(&self, index: usize, tied: &[Option<TiedParam>]) -> Stage {
        match self.mesh.pipeline {
            1 if self.has_host_tables() => Stage::after_embedding_tables(tied),
            1 => Stage::whole(tied),
            _ => Stage::new(&self.stages, index, tied),
        }
    }

    /// Returns true if the first block is embedding tables in host memory, apart from the blocks of
    /// the device.
    pub fn has_host_tables(&self) -> bool {
        self.config.model.place.tables == EmbeddingPlacement::Host || self.sparse_tables.is_some()
    }

    /// Returns true if the first block is embedding tables in host memory instead of a GPU's.
    pub fn offloads_embeddings(&self) -> bool {
        self.config.model.place.tables == EmbeddingPlacement::Host
    }

    /// Returns the tensor-parallel shards of blocks that rank `rank` of the run holds.
    pub fn tensor_shards(&self, rank: usize) -> TensorShards {
        let tensor = self.mesh.coordinates(rank)[Axis::Tensor as usize];
        TensorShards::of_rank(
            self.virtual_tensor_ranks,
            tensor,
            self.mesh.tensor,
            self.config.parallel.sequence,
        )
    }

    /// Returns the sharding policy of units.
    pub fn sharding_policy(&self) -> ShardingPolicy {
        let Parallel { prefetch, zero, .. } = self.config.parallel;
        let on_host = self.config.offload.params;
        let reduce_dtype = match self.config.comm.dtype {
            // With local SGD, replicas exchange no gradients.
            MessageDtype::Bf16
                if self.mesh.shard > 1 || self.mesh.replica > 1 && self.local_sgd.is_none() =>
            {
                Element::Bf16
            }
            MessageDtype::F32 | MessageDtype::Bf16 => Element::F32,
        };
        let reduce_after = self.reduce_after;
        ShardingPolicy { prefetch, on_host, reduce_dtype, reduce_after, ..zero.sharding_policy() }
            .for_mesh(self.mesh.shard, self.mesh.replica, self.config.parallel.storage)
    }

    /// Returns the sharding policy of embedding tables in host memory.
    pub fn host_table_sharding_policy(&self) -> ShardingPolicy {
        let reduce_dtype = Element::F32;
        ShardingPolicy { on_host: false, reduce_dtype, ..self.sharding_policy() }.for_mesh(
            self.mesh.shard,
            self.mesh.replica,
            self.config.parallel.storage,
        )
    }

    /// Returns the number of tokens over which a gradient is averaged: those of a global batch, or
    /// with local SGD those of one replica.
    pub fn tokens_per_replica(&self) -> u64 {
        self.tokens_per_step() / self.local_sgd.map_or(1, |averaging| averaging.replicas as u64)
    }

    /// Returns the number of tokens of a global batch.
    pub fn tokens_per_step(&self) -> u64 {
        self.config.batch.global * self.network.context() as u64
    }
}

/// The longest timeout, in seconds: a week.
const LONGEST_TIMEOUT: u64 = 604_800;

/// Resolves a configuration for an environment.
///
/// # Errors
/// Returns an error for the first invalid key, with its value and the values that are valid.
pub fn resolve(mut config: Config, environment: &Environment) -> Result<ResolvedConfig> {
    if config.parallel.layout == LayoutMode::Auto {
        return Err(Error::input(
            "parallel.layout = auto chooses a layout for a run, which this command does not start",
        )
        .hint("hpctrain plan prints the keys of the layout, to be set here"));
    }
    config.parallel.given.clear();
    config.resolve_batch(environment.ranks)?;
    if config.run.steps_per_epoch > 0 {
        config.count_epochs(0);
    }
    epochs::check(&config)?;
    check_ranges(&config)?;
    let mesh = mesh(&config, environment.ranks)?;
    mixed_devices::check(&config, &mesh)?;
    let averaging = local_sgd(&config, &mesh)?;
    let replicas = averaging.map_or(mesh.replica, |averaging| averaging.replicas);
    let (virtual_ranks, reduce_after) = virtual_ranks(&config, replicas, &mesh)?;
    let counts = work_shares::counts(&config, virtual_ranks, reduce_after, &mesh)?;
    let (virtual_rank_samples, micro) = batch(&config, virtual_ranks, replicas, &mesh)?;
    let threads = config.run.threads.unwrap_or(environment.threads);
    let network = network(&mut config.model, environment.vocabulary)?;
    let virtual_tensor_ranks = virtual_tensor_ranks(&config.parallel, &network)?;
    let on_gpu = environment.on_gpu;
    let sparse = sparse_tables(&config, &network, &mesh, virtual_tensor_ranks, on_gpu)?;
    let network =
        with_embedding_placement(&config, network, &mesh, virtual_tensor_ranks, sparse, on_gpu)?;
    let stages = stages(&config.parallel, &network)?;
    // Replicas of local SGD do not share statistics of batch normalization.
    let (synced_virtual_ranks, synced_ranks) = match averaging {
        None => (virtual_ranks, mesh.data()),
        Some(_) => (virtual_ranks / replicas, mesh.shard),
    };
    check_batch_norm(
        &config.model.layers,
        synced_virtual_ranks,
        synced_ranks,
        virtual_ranks / synced_virtual_ranks,
    )?;
    check_batch(&network, micro, synced_ranks)?;
    let loss = loss(&config, &network)?;
    check_batch_loss(&config, &loss, &mesh)?;
    work_shares::check_idle(counts.as_deref(), loss.over_batch(), &config.model.layers)?;
    let samples = network.sample_spec(&loss);
    check_groups(&config.optimizer.groups, &network)?;
    let schedule = schedule(&config)?;
    let Optimizer { beta1, beta2, eps, momentum, nesterov, trust, .. } = config.optimizer;
    let rule = match config.optimizer.kind {
        OptimizerKind::Adamw => UpdateRule::AdamW { beta1, beta2, eps },
        OptimizerKind::Sgd => UpdateRule::Sgd { momentum, nesterov },
        OptimizerKind::Adam => UpdateRule::Elementwise(Elementwise::Adam { beta1, beta2, eps }),
        OptimizerKind::Adagrad => UpdateRule::Elementwise(Elementwise::Adagrad { eps }),
        OptimizerKind::Rmsprop => {
            UpdateRule::Elementwise(Elementwise::RmsProp { alpha: beta2, eps, momentum })
        }
        OptimizerKind::Lamb => UpdateRule::Lamb { beta1, beta2, eps },
        OptimizerKind::Lars => UpdateRule::Lars { momentum, nesterov, trust_ratio: trust },
        OptimizerKind::Lion => UpdateRule::Elementwise(Elementwise::Lion { beta1, beta2 }),
    };
    config.precision.dtype = resolved_dtype(&config, environment.on_gpu)?;
    if config.offload.optimizer && !environment.on_gpu {
        return Err(Error::input("offload.optimizer = true is for GPUs").hint(
            "omit it, or run on a node with a GPU: on a CPU the optimizer state is in host memory anyway",
        ));
    }
    if config.offload.activations {
        let refused = |why: &str| Error::input(format!("offload.activations = true {why}"));
        if !environment.on_gpu {
            return Err(refused("is for GPUs")
                .hint("omit it: on a CPU activations are in host memory anyway"));
        }
        if !config.parallel.recompute {
            return Err(refused("requires parallel.recompute = true")
                .hint("set parallel.recompute=true too"));
        }
    }
    if config.offload.params {
        let refused = |why: &str| Error::input(format!("offload.params = true {why}"));
        if !environment.on_gpu {
            return Err(refused("is for GPUs")
                .hint("omit it: on a CPU parameters are in host memory anyway"));
        }
        if u8::from(config.parallel.zero) != 3 || !config.offload.optimizer {
            return Err(refused("requires parallel.zero = 3 and offload.optimizer = true")
                .hint("set parallel.zero=3 and offload.optimizer=true too"));
        }
        if config.log.histograms > 0 || averaging.is_some() {
            return Err(refused("does not support log.histograms and local_sgd.sync_every")
                .hint("set log.histograms=0 and local_sgd.sync_every=0, or offload.params=false"));
        }
    }
    check_comm_dtype(&config, &network, environment.on_gpu)?;
    let loss_chunk = loss_chunk_tokens(&config, &network, &mesh, virtual_tensor_ranks)?;
    if network.is_language() {
        config.parallel.loss_chunk_tokens = Some(loss_chunk);
    }
    config.parallel.shard = Some(mesh.shard);
    config.parallel.replica = Some(mesh.replica);
    config.parallel.virtual_ranks = Some(virtual_ranks);
    config.optimizer.tables =
        if sparse.is_some() { TableUpdates::Sparse } else { TableUpdates::Dense };
    config.parallel.reduce = match reduce_after {
        ReduceAfter::Step => ReduceChoice::Step,
        ReduceAfter::StepInBlocks => ReduceChoice::Blocks,
        ReduceAfter::MicroBatch => ReduceChoice::Micro,
    };
    config.local_sgd.replicas = averaging.map(|averaging| averaging.replicas);
    if mesh.pipeline > 1 {
        config.parallel.stages = Some(stages.iter().map(Range::len).collect());
    }
    config.parallel.virtual_tensor_ranks =
        Some(virtual_tensor_ranks).filter(|virtual_ranks| *virtual_ranks > 1);
    config.batch.micro = Some(micro);
    config.run.threads = Some(threads);
    config.lr_schedule.decay = Some(schedule.decay);
    let average = (config.optimizer.ema > 0.0).then_some(config.optimizer.ema);
    Ok(ResolvedConfig {
        config,
        mesh,
        stages,
        virtual_ranks,
        virtual_tensor_ranks,
        virtual_rank_samples,
        reduce_after,
        micro,
        loss_chunk_tokens: loss_chunk,
        threads,
        network,
        loss,
        metrics: vec![],
        sparse_tables: sparse,
        virtual_rank_counts: counts,
        samples,
        update_rule: rule,
        ema: average,
        local_sgd: averaging,
        schedule,
        excluded: None,
    })
}

/// Checks that a loss of the whole batch has all forwards before its backwards.
fn check_batch_loss(config: &Config, loss: &Loss, mesh: &Mesh) -> Result<()> {
    let schedule = config.parallel.schedule;
    if loss.over_batch() && mesh.pipeline > 1 && schedule == PipelineSchedule::ZeroBubble {
        return Err(Error::input(format!(
            "parallel.schedule = {schedule} does not support a loss over the whole batch"
        ))
        .hint("omit it: such a loss has all forwards before all backwards"));
    }
    Ok(())
}

/// Checks that gradients can be reduced in `comm.dtype`.
fn check_comm_dtype(config: &Config, network: &Network, on_gpu: bool) -> Result<()> {
    if config.comm.dtype == MessageDtype::F32 {
        return Ok(());
    }
    if !on_gpu {
        return Err(Error::input("comm.dtype = bf16 is for GPUs").hint("omit it"));
    }
    if let Some(algorithm @ (Algorithm::Vendor | Algorithm::Ring | Algorithm::ReduceToOne)) =
        config.comm.algorithm.fixed()
    {
        return Err(Error::input(format!(
            "comm.dtype = bf16 is not supported by comm.algorithm = {algorithm}"
        ))
        .hint("set comm.algorithm to auto, halving-doubling or hierarchical, or omit comm.dtype"));
    }
    let blocks = network.cpu_blocks(&TensorShards::whole());
    let average =
        blocks.iter().flat_map(|block| block.tensors()).find(|tensor| tensor.average.is_some());
    match average {
        // They are summed with the gradients of their block.
        Some(tensor) => Err(Error::input(format!(
            "comm.dtype = bf16 would round the running average {}",
            tensor.name
        ))
        .hint("omit comm.dtype, or use layer_norm or group_norm")),
        None => Ok(()),
    }
}

/// Returns the number format, which the device must support.
fn resolved_dtype(config: &Config, on_gpu: bool) -> Result<Compute> {
    match (config.precision.dtype, on_gpu) {
        (Compute::Auto, true) => Ok(Compute::Bf16),
        (Compute::Auto, false) => Ok(Compute::F32),
        (Compute::Tf32, false) if config.run.device != DeviceChoice::Mixed => {
            Err(Error::input("precision.dtype = tf32 is for GPUs")
                .hint("omit it, or run on a node with a GPU"))
        }
        (compute, _) => Ok(compute),
    }
}

/// Converts an `f32` to the `f64` with the same decimal digits: 0.1 and not 0.10000000149011612.
fn digits(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

fn check_ranges(config: &Config) -> Result<()> {
    bounds::check(config)?;
    let Config {
        run, model, data, batch, optimizer, lr_schedule, eval, checkpoint, comm, log, ..
    } = config;
    let positive = [
        ("run.steps", run.steps),
        ("run.max_skipped", run.max_skipped),
        ("model.heads", model.heads as u64),
        ("model.width", model.width as u64),
        ("model.context", model.context as u64),
        ("data.prefetch", data.prefetch as u64),
        ("batch.global", batch.global),
        ("batch.micro", batch.micro.unwrap_or(1)),
        ("eval.batch", eval.batch),
        ("eval.samples", eval.samples.unwrap_or(1)),
        ("checkpoint.keep", checkpoint.keep as u64),
        ("log.every", log.every),
        ("device.ranks_per_gpu", config.device.ranks_per_gpu as u64),
        ("log.straggler_window", log.straggler_window),
        ("run.threads", run.threads.unwrap_or(1) as u64),
        ("lr_schedule.reference_batch", lr_schedule.reference_batch.unwrap_or(1)),
        ("model.vocabulary", model.vocabulary.unwrap_or(1) as u64),
    ];
    for (key, value) in positive {
        if value == 0 {
            return Err(out_of_range(key, value, "at least 1"));
        }
    }
    let fractions = [
        ("model.dropout", digits(model.dropout)),
        ("optimizer.beta1", digits(optimizer.beta1)),
        ("optimizer.beta2", digits(optimizer.beta2)),
        ("optimizer.momentum", digits(optimizer.momentum)),
        ("optimizer.ema", digits(optimizer.ema)),
        ("data.val_fraction", data.val_fraction),
    ];
    for (key, value) in fractions {
        if !(0.0..1.0).contains(&value) {
            return Err(out_of_range(key, value, "at least 0 and less than 1"));
        }
    }
    config.device.memory.check()?;
    memory_checkpoint::check(config)?;
    elastic::check(config)?;
    if data.order == DataOrder::Files && !data.mix.is_empty() {
        return Err(Error::input("data.order = files is not supported with data.mix")
            .hint("omit one of them"));
    }
    let not_negative = [
        ("optimizer.weight_decay", digits(optimizer.weight_decay)),
        ("optimizer.grad_clip", optimizer.grad_clip),
        ("optimizer.eps", digits(optimizer.eps)),
    ];
    for (key, value) in not_negative {
        if !(value >= 0.0 && value.is_finite()) {
            return Err(out_of_range(key, value, "0 or more"));
        }
    }
    if comm.timeout.number().is_some_and(|seconds| seconds > LONGEST_TIMEOUT) {
        return Err(out_of_range(
            "comm.timeout",
            comm.timeout,
            "auto, or 0 (for ever) to 604800 seconds (a week)",
        ));
    }
    if !(optimizer.lr > 0.0 && optimizer.lr.is_finite()) {
        return Err(out_of_range("optimizer.lr", optimizer.lr, "greater than 0"));
    }
    if !(optimizer.trust > 0.0 && optimizer.trust.is_finite()) {
        return Err(out_of_range("optimizer.trust", optimizer.trust, "greater than 0"));
    }
    if !(0.0..=1.0).contains(&lr_schedule.min_ratio) {
        return Err(out_of_range("lr_schedule.min_ratio", lr_schedule.min_ratio, "from 0 to 1"));
    }
    if log.straggler_factor != 0.0
        && !(log.straggler_factor > 1.0 && log.straggler_factor.is_finite())
    {
        return Err(out_of_range(
            "log.straggler_factor",
            log.straggler_factor,
            "0 (off) or more than 1",
        ));
    }
    if log.histograms > 0 && !log.tensorboard {
        let message = format!(
            "log.histograms = {}, but log.tensorboard = false: histograms are written for TensorBoard",
            log.histograms
        );
        return Err(Error::input(message).hint("set log.tensorboard=true, or omit log.histograms"));
    }
    if optimizer.nesterov && optimizer.momentum == 0.0 {
        return Err(out_of_range(
            "optimizer.momentum",
            optimizer.momentum,
            "greater than 0 with nesterov",
        ));
    }
    if let Some(name) = &run.name
        && (name.is_empty()
            || name.contains('/')
            || name.contains(char::is_control)
            || name.starts_with('.'))
    {
        return Err(Error::input(format!("run.name = {name:?} cannot name a directory"))
            .hint("use letters and digits"));
    }
    if model.kind != ModelKind::Layers && !model.width.is_multiple_of(model.heads) {
        let below = (1..=model.heads).rev().find(|h| model.width.is_multiple_of(*h)).unwrap_or(1);
        return Err(Error::input(format!(
            "model.width = {} does not divide into model.heads = {} heads",
            model.width, model.heads
        ))
        .hint(format!(
            "set model.heads={below}, or model.width={}",
            model.width.next_multiple_of(model.heads)
        )));
    }
    Ok(())
}

/// Checks that ranks which share statistics of batch normalization have one virtual rank each, as
/// they can share only the statistics of samples that they compute at the same time. `replicas` is
/// the number of replicas that do not share statistics (local SGD).
fn check_batch_norm(
    layers: &LayerList,
    virtual_ranks: usize,
    ranks: usize,
    replicas: usize,
) -> Result<()> {
    let LayerList::List(layers) = layers else { return Ok(()) };
    match Layer::synchronised(layers, "model.layers") {
        Some(place) if virtual_ranks > ranks => Err(Error::input(format!(
            "{place} (batch_norm) shares statistics among ranks, but with parallel.virtual_ranks = {} a rank computes several \
             virtual ranks, one after the other",
            virtual_ranks * replicas
        ))
        .hint(format!(
            "set parallel.virtual_ranks={}, or synchronised=false to take the statistics of each micro-batch alone",
            ranks * replicas
        ))),
        _ => Ok(()),
    }
}

/// Checks that batch normalization gets more than one number per channel, as one has no variance.
fn check_batch(network: &Network, micro: u64, ranks: usize) -> Result<()> {
    let Network::Layers(layers) = network else { return Ok(()) };
    match layers.single_value_batch_norm() {
        Some((place, synchronised)) if micro * if synchronised { ranks as u64 } else { 1 } < 2 => {
            Err(Error::input(format!(
                "{place} (batch_norm) would have one number per channel in a batch"
            ))
            .hint("set batch.micro to 2 or more, or use layer_norm or group_norm"))
        }
        _ => Ok(()),
    }
}

/// Checks that every group has valid values and matches at least one parameter.
fn check_groups(groups: &[Group], network: &Network) -> Result<()> {
    if groups.is_empty() {
        return Ok(());
    }
    let tensors: Vec<Tensor> = network
        .cpu_blocks(&TensorShards::whole())
        .iter()
        .flat_map(|block| block.tensors())
        .collect();
    for (i, group) in groups.iter().enumerate() {
        let key = format!("optimizer.groups[{i}]");
        if !(group.lr_factor >= 0.0 && group.lr_factor.is_finite()) {
            return Err(out_of_range(&format!("{key}.lr_factor"), group.lr_factor, "0 or more"));
        }
        if let Some(decay) =
            group.weight_decay.filter(|decay| !(*decay >= 0.0 && decay.is_finite()))
        {
            return Err(out_of_range(&format!("{key}.weight_decay"), decay, "0 or more"));
        }
        if !tensors.iter().any(|tensor| group.holds(tensor)) {
            let some: Vec<&str> = tensors.iter().take(4).map(|tensor| &tensor.name[..]).collect();
            return Err(Error::input(format!(
                "{key}.names = {:?} matches no parameter",
                group.names.as_str()
            ))
            .hint(format!(
                "`*` matches any characters; parameters are called, for example, {}",
                some.join(", ")
            )));
        }
    }
    Ok(())
}

/// Returns the learning-rate schedule.
///
/// # Errors
/// Returns an error if `lr_schedule.lr_by_batch` does not have the global batch, or if the rate
/// would be scaled, too.
fn schedule(config: &Config) -> Result<Schedule> {
    let peak = match &config.lr_schedule.lr_by_batch {
        None => config.optimizer.lr * batch_factor(config),
        Some(rates) => lr_of_batch(config, rates)?,
    };
    Ok(Schedule {
        shape: config.lr_schedule.kind,
        peak,
        min: peak * config.lr_schedule.min_ratio,
        warmup: config.lr_schedule.warmup,
        total: config.run.steps,
        decay: config.lr_schedule.decay.unwrap_or(config.run.steps / 10),
    })
}

/// Returns the peak learning rate that a table has for the global batch.
fn lr_of_batch(config: &Config, rates: &LrByBatch) -> Result<f64> {
    let global = config.batch.global;
    if let Some(reference) = config.lr_schedule.reference_batch {
        return Err(Error::input(format!(
            "lr_schedule.lr_by_batch and lr_schedule.reference_batch = {reference} are both given"
        ))
        .hint("omit one of them: the rates of the table are not scaled"));
    }
    rates.get(global).ok_or_else(|| {
        let batches: Vec<String> = rates.batches().map(|batch| batch.to_string()).collect();
        let near = rates.batches().min_by_key(|batch| batch.abs_diff(global)).unwrap_or(global);
        Error::input(format!(
            "batch.global = {global}, but lr_schedule.lr_by_batch has rates for {} only",
            batches.join(", ")
        ))
        .hint(format!("set batch.global={near}, or lr_schedule.lr_by_batch.{global}=RATE"))
    })
}

/// Returns the factor by which the rate is scaled from the reference batch to the global batch.
fn batch_factor(config: &Config) -> f64 {
    config.lr_schedule.reference_batch.map_or(1.0, |reference| {
        let ratio = config.batch.global as f64 / reference as f64;
        match config.lr_schedule.scaling {
            Scaling::Linear => ratio,
            Scaling::Sqrt => ratio.sqrt(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sources, load};
    use hpctrain_nn::FrequencyScaling;

    fn plan(ranks: usize, overrides: &[&str]) -> Result<ResolvedConfig> {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() })?;
        resolve(config, &Environment { ranks, threads: 2, vocabulary: Some(65), on_gpu: false })
    }

    fn refusal(ranks: usize, overrides: &[&str]) -> String {
        let error = plan(ranks, overrides).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    /// Returns the tokens whose logits 2 ranks have in memory at once, or the error.
    fn chunk_tokens(on_gpu: bool, overrides: &[&str]) -> Result<usize, String> {
        let overrides: Vec<String> = overrides.iter().map(|setting| (*setting).into()).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        let facts = Environment { ranks: 2, threads: 1, vocabulary: Some(65), on_gpu };
        resolve(config, &facts)
            .map(|plan| plan.loss_chunk_tokens)
            .map_err(|error| error.to_string())
    }

    /// Returns the plan of a model with batch normalization, which has `more` settings, on 2 ranks.
    fn batch_norm(more: &str) -> Result<ResolvedConfig, String> {
        let layers =
            format!("model.layers=[{{kind='residual', layers=[{{kind='batch_norm'{more}}}]}}]");
        let model = [
            "model.kind=layers",
            "model.input=[3]",
            &layers,
            "loss.kind=mse",
            "parallel.virtual_ranks=4",
        ];
        plan(2, &model).map_err(|error| error.to_string())
    }

    #[test]
    fn a_resolved_plan_resolves_to_itself() {
        let first = plan(4, &["parallel.zero=2", "parallel.replica=2", "parallel.virtual_ranks=8"])
            .unwrap();
        assert_eq!(
            (first.mesh.shard, first.mesh.replica, first.virtual_rank_samples, first.micro),
            (2, 2, 2, 2)
        );
        let facts = Environment { ranks: 4, threads: 99, vocabulary: None, on_gpu: false };
        assert_eq!(resolve(first.config.clone(), &facts).unwrap(), first);
    }

    #[test]
    fn the_batch_arithmetic_is_in_the_error() {
        let error = refusal(3, &[]);
        assert!(error.contains("16 / 3 = 5.33") && error.contains("15 or 18, or let"), "{error}");
        assert!(error.ends_with("parallel.virtual_ranks=8"), "{error}");
        assert!(plan(3, &["parallel.virtual_ranks=8"]).is_ok());
        let error = refusal(2, &["batch.micro=3"]);
        assert!(
            error.contains("the 8 samples of a virtual rank")
                && error.contains("nearest that does: 2"),
            "{error}"
        );
        let micro = |overrides: &[&str]| plan(1, overrides).unwrap().micro;
        assert_eq!((micro(&[]), micro(&["batch.global=150"])), (16, 50));
        assert_eq!((micro(&["model.context=5000"]), micro(&["batch.global=71"])), (1, 1));
        let error = refusal(32, &[]);
        assert!(error.contains("batch that does: 32"), "{error}");
    }

    #[test]
    fn layouts_are_checked() {
        assert!(refusal(4, &["parallel.replica=3"]).contains("= 3 ranks, but 4 started"));
        let few = refusal(3, &["parallel.virtual_ranks=2", "batch.global=24"]);
        assert!(few.contains("= 2 leaves some of the 3 data-parallel ranks without work"), "{few}");
        assert!(refusal(2, &["parallel.shard=2"]).contains("parallel.zero"));
        let sliced = refusal(3, &["parallel.tensor=3"]);
        assert!(sliced.contains("parallel.tensor = 3 does not divide model.heads = 4"), "{sliced}");
        assert!(sliced.ends_with("hint: parallel.tensor may be 1, 2, 4"), "{sliced}");
        let layers =
            ["model.kind=layers", "model.input=[3]", "model.layers=[{kind='dense', units=4}]"];
        let sliced = refusal(2, &[&layers[..], &["parallel.tensor=2"]].concat());
        assert!(
            sliced.contains("parallel.tensor = 2, but layer-list models do not support"),
            "{sliced}"
        );
        assert!(refusal(1, &["parallel.zero=4"]).contains("ZeRO has stages 0 to 3, not 4"));
        assert_eq!(plan(4, &["parallel.zero=3"]).unwrap().mesh.shard, 4);
    }

    #[test]
    fn ranks_may_have_unequal_numbers_of_virtual_ranks() {
        let eight = ["parallel.virtual_ranks=8", "batch.global=24"];
        let on = |ranks: usize, more: &[&str]| plan(ranks, &[&eight[..], more].concat()).unwrap();
        let three = on(3, &["parallel.zero=3"]);
        assert_eq!(three.reduce_after, ReduceAfter::StepInBlocks);
        let of_ranks = [0, 1, 2].map(|rank| three.virtual_ranks_of_rank(rank).concat());
        assert_eq!(of_ranks, [vec![0, 1, 6], vec![2, 3, 7], vec![4, 5]]);
        assert_eq!([0, 1, 2].map(|rank| three.idle_virtual_ranks(rank)), [0, 0, 1]);
        assert_eq!(three.step_schedule(0).virtual_ranks, 3);
        // Where sums have one tree anyway, it is faster without blocks.
        let after = |ranks, more: &[&str]| on(ranks, more).reduce_after;
        assert_eq!([1, 2, 4, 8].map(|ranks| after(ranks, &[])), [ReduceAfter::Step; 4]);
        // The resolved configuration says which it was, also where the default is not the same.
        assert_eq!(three.config.parallel.reduce, ReduceChoice::Blocks);
        let hybrid = ["parallel.zero=1", "parallel.shard=3", "batch.global=24"];
        let default = plan(6, &hybrid).unwrap();
        assert_eq!(default.reduce_after, ReduceAfter::Step);
        let facts = Environment { ranks: 6, threads: 2, vocabulary: None, on_gpu: false };
        assert_eq!(resolve(default.config.clone(), &facts).unwrap(), default);
        let blocks = plan(6, &[&hybrid[..], &["parallel.reduce=blocks"]].concat()).unwrap();
        assert_eq!(blocks.reduce_after, ReduceAfter::StepInBlocks);
        assert_eq!(resolve(blocks.config.clone(), &facts).unwrap(), blocks);
        let twelve = ["parallel.virtual_ranks=12"];
        assert_eq!(
            [3, 4].map(|ranks| after(ranks, &twelve)),
            [ReduceAfter::Step, ReduceAfter::StepInBlocks]
        );
        // Other orders of addition were asked for.
        for given in ["comm.algorithm=ring", "comm.deterministic=false"] {
            assert_eq!(after(4, &["parallel.virtual_ranks=12", given]), ReduceAfter::Step);
        }
        for (refused, key) in [
            ("comm.algorithm=ring", "comm.algorithm = ring"),
            ("comm.dtype=bf16", "comm.dtype = bf16"),
            ("parallel.reduce=micro", "parallel.reduce = micro"),
            ("data.order=files", "data.order = files"),
            ("local_sgd.sync_every=2", "(local_sgd.sync_every)"),
        ] {
            let error = refusal(3, &[&eight[..], &[refused]].concat());
            assert!(error.contains(key) && error.contains("hint: "), "{error}");
        }
        let error = refusal(3, &[&eight[..], &["comm.algorithm=vendor"]].concat());
        assert!(error.contains("set parallel.virtual_ranks to 6 or 12, or omit"), "{error}");
        // A hint names only values that work.
        let few = ["batch.global=8", "parallel.virtual_ranks=8", "comm.algorithm=ring"];
        let error = refusal(3, &few);
        assert!(
            error.ends_with("hint: start 1, 2, 4 or 8 ranks, or omit comm.algorithm"),
            "{error}"
        );
        let error = refusal(3, &["comm.algorithm=ring"]);
        assert!(!error.contains("unequal"), "{error}");
        let error = refusal(7, &["batch.global=1024"]);
        assert!(error.ends_with("parallel.virtual_ranks=32"), "{error}");
    }

    #[test]
    fn local_sgd_replicas_divide_the_virtual_ranks() {
        let settings =
            ["local_sgd.sync_every=8", "local_sgd.replicas=4", "parallel.virtual_ranks=8"];
        let local_sgd =
            |ranks, more: &[&str]| plan(ranks, &[&settings[..], more].concat()).unwrap();
        let one = local_sgd(1, &[]);
        assert_eq!(one.virtual_ranks_of_rank(0), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(
            (one.replicas_per_rank(), one.step_schedule(0).virtual_ranks, one.tokens_per_replica()),
            (4, 2, 16 / 4 * 64)
        );
        // Each replica's virtual ranks are divided among its shards.
        let sharded = local_sgd(4, &["parallel.zero=1", "parallel.shard=2"]);
        assert_eq!(
            [0, 1, 2, 3].map(|rank| sharded.virtual_ranks_of_rank(rank)),
            [[[0], [2]], [[1], [3]], [[4], [6]], [[5], [7]]]
        );
        let facts = Environment { ranks: 4, threads: 2, vocabulary: None, on_gpu: false };
        assert_eq!(resolve(sharded.config.clone(), &facts).unwrap(), sharded);
        let synchronous =
            plan(4, &["parallel.zero=1", "parallel.shard=2", "parallel.virtual_ranks=8"]).unwrap();
        assert_eq!(
            [0, 3].map(|rank| synchronous.virtual_ranks_of_rank(rank)),
            [[[0, 1]], [[6, 7]]]
        );
    }

    #[test]
    fn rounds_end_at_averages() {
        let local_sgd = plan(2, &["local_sgd.sync_every=8", "run.steps=20"]).unwrap();
        assert_eq!([0, 7, 8, 13, 16].map(|step| local_sgd.round_end(step)), [8, 8, 16, 16, 20]);
        // An action is due at the first average after its period.
        let due = |every| [8, 16, 20].map(|step| local_sgd.is_due(every, step));
        assert_eq!(
            (due(0), due(8), due(10)),
            ([false; 3], [true, true, false], [false, true, true])
        );
        let synchronous = plan(2, &["run.steps=20"]).unwrap();
        assert_eq!([0, 7].map(|step| synchronous.round_end(step)), [1, 8]);
        assert_eq!(
            [1, 4, 5, 6, 10].map(|step| synchronous.is_due(5, step)),
            [false, false, true, false, true]
        );
    }

    #[test]
    fn values_out_of_range_name_the_key() {
        for (setting, wanted) in [
            ("run.steps=0", "run.steps = 0"),
            ("model.dropout=1.0", "model.dropout = 1"),
            ("optimizer.lr=-1.0", "optimizer.lr = -1"),
            ("optimizer.lr=nan", "optimizer.lr = NaN"),
            ("model.heads=3", "does not divide into model.heads = 3"),
            (
                "model.kv_heads=2",
                "model.kv_heads is not a key of GPTs\nhint: omit it, or set model.kind=llama",
            ),
            ("model.vocabulary=10", "model.vocabulary = 10"),
            ("run.name=../x", "run.name"),
            ("lr_schedule.min_ratio=2.0", "lr_schedule.min_ratio"),
            ("optimizer.trust=0", "optimizer.trust"),
            ("log.straggler_factor=1.0", "log.straggler_factor = 1 "),
            ("log.straggler_factor=nan", "log.straggler_factor = NaN"),
            ("log.straggler_window=0", "log.straggler_window = 0"),
            ("log.histograms=5", "log.histograms = 5, but log.tensorboard = false"),
            ("comm.timeout=1000000", "comm.timeout = 1000000"),
            (
                "optimizer.groups=[{names='x*'}]",
                "optimizer.groups[0].names = \"x*\" matches no parameter\nhint: ",
            ),
            (
                "optimizer.groups=[{names='*', lr_factor=-1.0}]",
                "optimizer.groups[0].lr_factor = -1 is out of range",
            ),
            (
                "optimizer.groups=[{names='*', weight_decay=nan}]",
                "optimizer.groups[0].weight_decay = NaN",
            ),
            ("offload.params=true", "offload.params = true is for GPUs\nhint: omit it"),
            ("offload.optimizer=true", "offload.optimizer = true is for GPUs\nhint: omit it"),
            ("offload.activations=true", "offload.activations = true is for GPUs\nhint: omit it"),
        ] {
            assert!(refusal(1, &[setting]).contains(wanted), "{setting}");
        }
    }

    #[test]
    fn chunked_cross_entropy_requires_a_supporting_head() {
        let zero_bubble = ["parallel.pipeline=2", "parallel.schedule=zero-bubble", "batch.micro=1"];
        let sequence = ["parallel.tensor=2", "parallel.sequence=true"];
        let layers =
            ["model.kind=layers", "model.input=[4]", "model.layers=[{kind='dense', units=10}]"];
        // Up to 1 GiB of logits, of 4 or of 2 bytes. Devices do not matter.
        let some = "model.vocabulary=2000";
        let f32_setting = [some, "precision.dtype=f32"];
        let of_f32 = [chunk_tokens(false, &[some]), chunk_tokens(true, &f32_setting)];
        assert_eq!(of_f32, [Ok(1 << 17), Ok(1 << 17)]);
        assert_eq!(chunk_tokens(true, &[some]), Ok(1 << 18));
        assert_eq!(chunk_tokens(true, &[]), Ok(1 << 20));
        let many = ["model.vocabulary=32000", "model.vocabulary=50257", "model.vocabulary=128256"];
        assert_eq!(many.map(|ids| chunk_tokens(true, &[ids]).unwrap()), [16_384; 3]);
        let given = plan(1, &[]).unwrap().config.parallel.loss_chunk_tokens;
        assert_eq!(given, Some(1 << 20), "the resolved configuration has the default");
        assert_eq!(
            [
                chunk_tokens(false, &["parallel.loss_chunk_tokens=9"]),
                chunk_tokens(true, &["parallel.loss_chunk_tokens=0"])
            ],
            [Ok(9), Ok(0)]
        );
        for (settings, why) in [
            (&zero_bubble[..], "parallel.schedule = zero-bubble keeps"),
            (&sequence, "parallel.sequence = true shards its tokens"),
            (&layers, "the network is not a language model"),
        ] {
            assert_eq!(chunk_tokens(true, settings), Ok(0), "{why}");
            let error = chunk_tokens(true, &[settings, &["parallel.loss_chunk_tokens=9"]].concat())
                .unwrap_err();
            assert!(
                error.starts_with(&format!("parallel.loss_chunk_tokens = 9, but {why}")),
                "{error}"
            );
            assert!(error.ends_with("\nhint: omit it"), "{error}");
        }
    }

    #[test]
    fn a_llama_is_filled_in_and_checked() {
        let model = |overrides: &[&str]| {
            plan(1, &[&["model.kind=llama"], overrides].concat()).unwrap().config.model
        };
        let small = model(&["model.width=96"]);
        assert_eq!((small.kv_heads, small.hidden, small.tied), (Some(4), Some(256), Some(false)));
        assert_eq!(
            (small.rope_theta, small.norm_epsilon, small.bias),
            (Some(10_000.0), Some(1e-5), Some(false))
        );
        for (setting, wanted) in [
            (
                "model.kv_heads=3",
                "model.kv_heads = 3 does not divide model.heads = 4\nhint: one of 1, 2, 4 does",
            ),
            (
                "model.width=12",
                "model.width / model.heads = 3, but rotary positions (RoPE) require an even number\nhint: a width of 16",
            ),
            ("model.bias=true", "a Llama has no biases"),
            ("model.hidden=0", "model.hidden = 0 is out of range"),
            ("model.rope_theta=0.5", "model.rope_theta = 0.5"),
            ("model.norm_epsilon=0.0", "model.norm_epsilon = 0"),
        ] {
            let error = refusal(1, &["model.kind=llama", setting]);
            assert!(error.contains(wanted), "{setting}: {error}");
        }
    }

    #[test]
    fn scaled_positions_are_checked() {
        let llama3 = [
            "model.kind=llama",
            "model.rope_scaling.rope_type=llama3",
            "model.rope_scaling.factor=8",
            "model.rope_scaling.low_freq_factor=1",
            "model.rope_scaling.high_freq_factor=4",
            "model.rope_scaling.original_max_position_embeddings=8192",
        ];
        let Network::Llama(llama) = plan(1, &llama3).unwrap().network else {
            panic!("not a Llama")
        };
        assert_eq!(
            llama.rope_scaling,
            FrequencyScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192
            }
        );
        for (setting, expected) in [
            (
                "factor=0.5",
                "model.rope_scaling.factor = 0.5 is out of range\nhint: model.rope_scaling.factor must be at least 1",
            ),
            ("low_freq_factor=0", "model.rope_scaling.low_freq_factor = 0 is out of range"),
            ("low_freq_factor=-1", "model.rope_scaling.low_freq_factor = -1 is out of range"),
            (
                "high_freq_factor=1",
                "model.rope_scaling.high_freq_factor must be greater than model.rope_scaling.low_freq_factor = 1",
            ),
            (
                "original_max_position_embeddings=0",
                "model.rope_scaling.original_max_position_embeddings = 0 is out of range",
            ),
            (
                "original_max_position_embeddings=99999999",
                "model.rope_scaling.original_max_position_embeddings = 99999999",
            ),
            (
                "rope_type=linear",
                "model.rope_scaling.low_freq_factor is given, but model.rope_scaling.rope_type = linear",
            ),
            (
                "rope_type=default",
                "model.rope_scaling.factor is given, but model.rope_scaling.rope_type = default",
            ),
        ] {
            let setting = format!("model.rope_scaling.{setting}");
            let error = refusal(1, &[&llama3[..], &[&setting]].concat());
            assert!(error.contains(expected) && error.contains("\nhint: "), "{setting}: {error}");
        }
        for missing in 2..llama3.len() {
            let error = refusal(1, &[&llama3[..missing], &llama3[missing + 1..]].concat());
            let (key, _) = llama3[missing].split_once('=').unwrap();
            let expected =
                format!("model.rope_scaling.rope_type = llama3, but {key} is missing\nhint: ");
            assert!(error.contains(&expected), "{error}");
        }
        let error = refusal(1, &["model.kind=llama", "model.rope_scaling.rope_type=linear"]);
        assert!(
            error.contains("rope_type = linear, but model.rope_scaling.factor is missing\nhint: "),
            "{error}"
        );
        for kind in [
            &["model.kind=gpt"][..],
            &["model.kind=layers", "model.input=[4]", "model.layers=[{kind='relu'}]"],
        ] {
            let error = refusal(1, &[kind, &llama3[1..]].concat());
            assert!(error.contains("model.rope_scaling is not a key of "), "{error}");
        }
    }

    #[test]
    fn layer_list_models_are_checked() {
        let dense = "model.layers=[{kind='flatten'}, {kind='dense', units=10}]";
        let model = ["model.kind=layers", "model.input=[4, 4, 1]", dense];
        let first = plan(1, &model).unwrap();
        assert_eq!((first.network.outputs(), first.network.context(), first.micro), (10, 1, 16));
        let facts = Environment { ranks: 1, threads: 9, vocabulary: None, on_gpu: false };
        assert_eq!(resolve(first.config.clone(), &facts).unwrap(), first);
        for (setting, wanted) in [
            ("model.layers=3", "model.kind = layers requires model.input and [[model.layers]]"),
            ("model.layers=[{kind='relu'}]", "model.layers has no layer with parameters"),
            ("model.layers=[{kind='dense', units=0}]", "model.layers[0] (dense): units = 0"),
            (
                "model.layers=[{kind='dense', units=2}]",
                "the last of model.layers gives 4 × 4 × 2, but cross-entropy requires",
            ),
            ("model.input=[]", "model.input = [] has no elements"),
            (
                "model.input=[16777216, 16777216, 16777216]",
                "model.layers[0] (flatten) gets 16777216 × 16777216 × 16777216: too many elements",
            ),
            (
                "model.layers=[{kind='conv2d', filters=1048576, kernel=1048576, padding=1048575}, {kind='dense', units=3}]",
                "model.layers[0] (conv2d) gets 4 × 4 × 1, but expects a smaller kernel",
            ),
            (
                "model.layers=[{kind='reshape', shape=[1048576, 1048576, 1048576, 1048576]}]",
                "but expects the elements of",
            ),
            ("model.layers=[{kind='dense', units=1048576}]", "but cross-entropy requires"),
            (
                "model.dropout=0.1",
                "model.dropout is not a key of layer-list models\nhint: omit it, and add",
            ),
            ("model.kv_heads=2", "model.kv_heads is not a key of layer-list models"),
            ("loss.class_weights=[1.0]", "loss.class_weights has 1 weights for 10 classes"),
            ("loss.label_smoothing=1.0", "loss.label_smoothing = 1 is out of range"),
            ("loss.huber_delta=0.0", "loss.huber_delta = 0 is out of range"),
        ] {
            let error = refusal(1, &[&model[..], &[setting]].concat());
            assert!(error.contains(wanted) && error.contains("\nhint: "), "{setting}: {error}");
        }
        let error =
            refusal(1, &[&model[..], &["loss.kind=mse", "loss.label_smoothing=0.1"]].concat());
        assert!(error.contains("are for cross-entropy"), "{error}");
        assert!(
            refusal(1, &["loss.kind=mse"]).contains("language models support only cross-entropy")
        );
        assert!(refusal(1, &["data.image_layout=nchw"]).contains(
            "data.image_layout and data.scale are not supported for language models\nhint: "
        ));
        assert!(
            refusal(1, &["data.weights=/w"])
                .contains("data.weights is not supported for language models\nhint: ")
        );
        assert!(
            refusal(1, &[dense])
                .contains("model.layers is a list, but transformers have a number of blocks")
        );
        assert!(
            refusal(1, &["model.input=[3]"])
                .contains("model.input is not a key of language models")
        );
    }

    #[test]
    fn ranks_share_statistics_of_what_they_compute_together() {
        let error = batch_norm("").unwrap_err();
        assert!(
            error.starts_with("model.layers[0].layers[0] (batch_norm) shares statistics"),
            "{error}"
        );
        assert!(
            error.contains("hint: set parallel.virtual_ranks=2, or synchronised=false"),
            "{error}"
        );
        assert_eq!(batch_norm(", synchronised=false").map(|plan| plan.virtual_ranks), Ok(4));
        let layers = "model.layers=[{kind='dense', units=2}, {kind='batch_norm'}]";
        let one =
            ["model.kind=layers", "model.input=[3]", layers, "loss.kind=mse", "batch.micro=1"];
        let error = refusal(1, &one);
        assert!(
            error.starts_with("model.layers[1] (batch_norm) would have one number per channel"),
            "{error}"
        );
        assert!(plan(2, &one).is_ok());
    }

    /// Returns the virtual ranks and the way in which gradients are reduced.
    fn reductions(ranks: usize, overrides: &[&str]) -> (usize, ReduceChoice) {
        let plan = plan(ranks, &[&["batch.micro=1"], overrides].concat()).unwrap();
        let facts = Environment { ranks, threads: 2, vocabulary: Some(65), on_gpu: false };
        assert_eq!(resolve(plan.config.clone(), &facts).unwrap(), plan);
        (plan.virtual_ranks, plan.config.parallel.reduce)
    }

    #[test]
    fn gradients_are_reduced_after_each_micro_batch_where_that_saves_memory() {
        use ReduceChoice::{Micro, Step};
        let of = |ranks: usize, micros: usize, overrides: &[&str]| {
            let batch = format!("batch.global={}", ranks * micros);
            reductions(ranks, &[&[&batch[..]], overrides].concat())
        };
        for zero in ["parallel.zero=2", "parallel.zero=3"] {
            assert_eq!(of(16, 8, &[zero]), (128, Micro));
            assert_eq!(of(8, 8, &[zero]), (64, Micro));
            // A few parts of a quarter are as much as one full gradient.
            assert_eq!(of(4, 8, &[zero]), (4, Step));
            assert_eq!(of(4, 8, &[zero, "parallel.virtual_ranks=32"]), (32, Micro));
            assert_eq!(of(4, 8, &[zero, "parallel.virtual_ranks=8"]), (8, Step));
            assert_eq!(of(4, 8, &[zero, "parallel.reduce=micro"]), (32, Micro));
            assert_eq!(of(16, 8, &[zero, "parallel.reduce=step"]), (16, Step));
            assert_eq!(of(16, 1, &[zero]), (16, Step));
            // Other numbers than powers of two, and schedules that defer weight gradients.
            assert_eq!(of(12, 8, &[zero]), (12, Step));
            assert_eq!(of(16, 6, &[zero]), (16, Step));
            let staged = ["parallel.pipeline=2", "parallel.schedule=zero-bubble", zero];
            assert_eq!(of(16, 8, &staged), (8, Step));
            // A stage has its full gradients until they are reduced.
            assert_eq!(of(16, 4, &[zero, "parallel.pipeline=2"]), (8, Step));
            let fixed = ["parallel.pipeline=2", "parallel.virtual_ranks=64", zero];
            assert_eq!(of(16, 4, &fixed), (64, Micro));
            assert_eq!(of(16, 8, &[zero, "parallel.replica=2"]), (128, Micro));
        }
        for zero in ["parallel.zero=0", "parallel.zero=1"] {
            assert_eq!(of(16, 8, &[zero]), (16, Step));
        }
        assert_eq!(of(16, 8, &["parallel.zero=1", "parallel.reduce=micro"]), (128, Micro));
        // One rank has the virtual ranks, and nothing to reduce.
        assert_eq!(of(1, 8, &["parallel.zero=2", "parallel.reduce=micro"]), (8, Micro));
        let one = plan(1, &["parallel.zero=2", "parallel.reduce=micro", "batch.micro=1"]).unwrap();
        assert_eq!(one.sharding_policy().reduce_after, ReduceAfter::Step);
        let sharded = plan(
            4,
            &["parallel.zero=1", "parallel.reduce=micro", "batch.micro=1", "parallel.shard=2"],
        )
        .unwrap();
        assert_eq!(
            [0, 3].map(|rank| sharded.virtual_ranks_of_rank(rank)),
            [[[0, 2, 4, 6]], [[9, 11, 13, 15]]]
        );
    }

    #[test]
    fn reductions_after_each_micro_batch_are_refused_where_they_cannot_be() {
        let of = |ranks: usize, overrides: &[&str]| {
            let ours = ["parallel.reduce=micro", "batch.micro=1", "batch.global=24"];
            refusal(ranks, &[&ours, overrides].concat())
        };
        for (ranks, overrides, reason) in [
            (
                4,
                &[][..],
                "with parallel.zero = 0 has no shards to reduce over\nhint: set parallel.zero",
            ),
            (4, &["parallel.storage=central"], "is not supported with parallel.storage = central"),
            (
                4,
                &["parallel.zero=2", "parallel.virtual_ranks=8"],
                "but parallel.virtual_ranks = 8, and a step has 24 micro-batches\nhint: set parallel.virtual_ranks=24",
            ),
            (
                3,
                &["parallel.zero=2"],
                "there are 3 shards and 8 micro-batches on each rank\nhint: ",
            ),
            (4, &["parallel.zero=2"], "there are 4 shards and 6 micro-batches on each rank"),
            (
                6,
                &[
                    "parallel.zero=1",
                    "parallel.shard=1",
                    "parallel.pipeline=2",
                    "parallel.schedule=zero-bubble",
                ],
                "is not supported by parallel.schedule = zero-bubble",
            ),
        ] {
            let error = of(ranks, overrides);
            assert!(error.starts_with("parallel.reduce = micro "), "{error}");
            assert!(error.contains(reason), "{error}");
        }
        let norm = "model.layers=[{kind='dense', units=4}, {kind='batch_norm'}]";
        let layers =
            ["model.kind=layers", "model.input=[3]", norm, "loss.kind=mse", "parallel.zero=2"];
        let micros = ["batch.global=16", "batch.micro=2"];
        let error = refusal(2, &[&layers[..], &micros, &["parallel.reduce=micro"]].concat());
        assert!(error.contains("model.layers[1] (batch_norm), which shares statistics"), "{error}");
        let plan = plan(2, &[&layers[..], &micros].concat()).unwrap();
        assert_eq!(plan.config.parallel.reduce, ReduceChoice::Step);
    }

    #[test]
    fn the_rate_follows_the_batch() {
        let peak = |overrides: &[&str]| plan(1, overrides).unwrap().schedule.peak;
        assert_eq!(peak(&["lr_schedule.reference_batch=4"]), 4e-3);
        assert_eq!(peak(&["lr_schedule.reference_batch=4", "lr_schedule.scaling=sqrt"]), 2e-3);
        assert_eq!(peak(&[]), 1e-3);
    }

    #[test]
    fn the_rate_of_a_batch_is_looked_up() {
        let table = "lr_schedule.lr_by_batch={ 8 = 0.1, 16 = 0.15, 20 = 1 }";
        let found = plan(1, &[table]).unwrap();
        assert_eq!((found.schedule.peak, found.schedule.min), (0.15, 0.15 * 0.1));
        let text = found.describe_peak().unwrap();
        assert_eq!(text, "0.15 = lr_schedule.lr_by_batch of batch.global = 16");
        // Integers are rates, too, and a key alone adds a batch.
        assert_eq!(plan(1, &[table, "batch.global=20"]).unwrap().schedule.peak, 1.0);
        let more = "lr_schedule.lr_by_batch.2=0.5";
        assert_eq!(plan(1, &[table, more, "batch.global=2"]).unwrap().schedule.peak, 0.5);
        // The table is written in full and read back.
        let text = found.config.to_toml().unwrap();
        assert_eq!(text.parse::<Config>().unwrap(), found.config);
        let error = refusal(1, &[table, "batch.global=12"]);
        assert_eq!(
            error,
            "batch.global = 12, but lr_schedule.lr_by_batch has rates for 8, 16, 20 only\n\
             hint: set batch.global=8, or lr_schedule.lr_by_batch.12=RATE"
        );
        let error = refusal(1, &[table, "lr_schedule.reference_batch=4"]);
        assert!(error.contains("reference_batch = 4 are both given\nhint: "), "{error}");
        for (wrong, why) in [
            ("{ }", "has no batches"),
            ("{ x = 0.1 }", "\"x\" is not a number of samples"),
            ("{ 0 = 0.1 }", "\"0\" is not a number of samples"),
            ("{ 16 = 0.0 }", "16 = 0, but rates are greater than 0"),
        ] {
            let error = refusal(1, &[&format!("lr_schedule.lr_by_batch={wrong}")]);
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_scaled_rate_is_described() {
        let described = |keys: &[&str]| plan(1, keys).unwrap().describe_peak();
        assert_eq!(described(&[]), None);
        let linear = described(&["optimizer.lr=0.5", "lr_schedule.reference_batch=4"]).unwrap();
        assert_eq!(linear, "2 = optimizer.lr 0.5 × 16 / 4 (linear scaling)");
        let keys =
            ["optimizer.lr=0.5", "lr_schedule.reference_batch=4", "lr_schedule.scaling=sqrt"];
        let sqrt = described(&keys).unwrap();
        assert_eq!(sqrt, "1 = optimizer.lr 0.5 × √(16 / 4) (sqrt scaling)");
    }

    #[test]
    fn the_batch_of_a_rank_is_multiplied_by_the_data_parallel_ranks() {
        let found =
            plan(4, &["batch.per_rank=5", "parallel.zero=2", "parallel.replica=2"]).unwrap();
        let batch = &found.config.batch;
        assert_eq!((batch.global, batch.per_rank, batch.of_rank), (20, 0, 5));
        assert!(found.config.to_toml().unwrap().contains("global = 20\nper_rank = 0\n"));
        // Ranks of a pipeline share samples.
        let staged = plan(4, &["batch.per_rank=5", "parallel.pipeline=2"]).unwrap();
        assert_eq!(staged.config.batch.global, 10);
        // The resolved configuration keeps the batch on another number of ranks.
        let facts = Environment { ranks: 2, threads: 2, vocabulary: Some(65), on_gpu: false };
        let again = resolve(Config { parallel: Parallel::default(), ..found.config }, &facts);
        assert_eq!(again.unwrap().config.batch.global, 20);
        let error = refusal(4, &["batch.per_rank=16777216"]);
        assert!(error.starts_with("batch.global = 67108864 is out of range"), "{error}");
        let mut both = Config::default();
        both.batch.per_rank = 3;
        let error = resolve(both, &facts).unwrap_err().to_string();
        assert!(error.starts_with("batch.global and batch.per_rank are both given"), "{error}");
    }
}
