//! The layout of a configuration: the mesh of its ranks, virtual ranks and micro-batches, and the
//! stages of a pipeline.

use std::ops::Range;

use super::epochs;
use super::range::out_of_range;
use super::{
    Compute, Config, DataOrder, Interval, LayerList, LocalSgdConfig, MessageDtype, ModelKind,
    Parallel, ReduceChoice, WorkShares,
};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::TensorShards;
use hpctrain_base::mesh::Mesh;
use hpctrain_comm::Algorithm;
use hpctrain_nn::Network;
use hpctrain_nn::layers::Layer;
use hpctrain_parallel::{
    LocalSgd, OuterOptimizer, PipelineSchedule, ReduceAfter, Storage, VirtualRanks, Zero, partition,
};

/// The most tokens of a micro-batch by default: enough for efficient GEMMs, few enough for the
/// memory of activations.
const MICRO_TOKENS: u64 = 4096;

/// The bytes of logits that are in memory at once by default.
const LOSS_CHUNK_BYTES: usize = 1 << 30;

/// The fewest tokens of a chunk of the loss by default: with fewer, the GEMMs of the LM head have too
/// few tiles for a GPU, and each chunk reads and writes the gradient of its weight once more.
const MIN_LOSS_CHUNK_TOKENS: usize = 16_384;

/// The most tokens of a chunk of the loss by default: more than any micro-batch.
const MAX_LOSS_CHUNK_TOKENS: usize = 1 << 20;

/// The fewest micro-batches per rank and pipeline stage by default: with four times as many
/// micro-batches as stages, at most a fifth of the step is idle.
const MICRO_BATCHES_PER_STAGE: u64 = 4;

/// Returns the mesh of `ranks` ranks.
///
/// # Errors
/// Returns an error if the axes do not multiply to the number of ranks, or if a key has no effect.
pub fn mesh(config: &Config, ranks: usize) -> Result<Mesh> {
    let parallel = &config.parallel;
    let keys = [
        ("shard", parallel.shard),
        ("replica", parallel.replica),
        ("owners", Some(parallel.owners)),
        ("virtual_ranks", parallel.virtual_ranks),
        ("pipeline", Some(parallel.pipeline)),
        ("tensor", Some(parallel.tensor)),
        ("virtual_tensor_ranks", parallel.virtual_tensor_ranks),
    ];
    for (key, value) in keys {
        if value == Some(0) {
            return Err(out_of_range(&format!("parallel.{key}"), 0, "at least 1"));
        }
    }
    if config.local_sgd.replicas == Some(0) {
        return Err(out_of_range("local_sgd.replicas", 0, "at least 1"));
    }
    let stage_ranks = (ranks / parallel.pipeline / parallel.tensor).max(1);
    check_storage(config)?;
    let shard = match (parallel.zero, parallel.shard) {
        _ if parallel.storage == Storage::Central => parallel.owners,
        (Zero::Zero, Some(shard)) if shard > 1 => {
            return Err(Error::input(format!(
                "parallel.shard = {shard} with parallel.zero = 0 shards nothing"
            ))
            .hint("set parallel.zero to 1, 2 or 3"));
        }
        (Zero::Zero, _) => 1,
        (_, Some(shard)) => shard,
        (_, None) => (stage_ranks / parallel.replica.unwrap_or(1).min(stage_ranks)).max(1),
    };
    let replica = parallel.replica.unwrap_or((stage_ranks / shard.min(stage_ranks)).max(1));
    let mesh = Mesh { pipeline: parallel.pipeline, replica, shard, tensor: parallel.tensor };
    if parallel.storage == Storage::Central && !stage_ranks.is_multiple_of(parallel.owners) {
        let owners = parallel.owners;
        let nearest = (1..=stage_ranks)
            .filter(|n| stage_ranks.is_multiple_of(*n))
            .min_by_key(|n| n.abs_diff(owners));
        return Err(Error::input(format!(
            "parallel.owners = {owners} does not divide the {stage_ranks} data-parallel ranks"
        ))
        .hint(format!("the nearest that does: {}", nearest.unwrap_or(1))));
    }
    mesh.check(ranks, parallel.zero != Zero::Zero)?;
    Ok(mesh)
}

impl Config {
    /// Converts `batch.per_rank` to `batch.global`, for the data-parallel ranks of `ranks` ranks.
    ///
    /// # Errors
    /// Returns an error if both are given, or if the layout does not fit the ranks.
    pub fn resolve_batch(&mut self, ranks: usize) -> Result<()> {
        let per_rank = self.batch.per_rank;
        if per_rank == 0 {
            return Ok(());
        }
        epochs::check_batch(self)?;
        let data_ranks = mesh(self, ranks)?.data() as u64;
        self.batch.global = per_rank.saturating_mul(data_ranks);
        (self.batch.of_rank, self.batch.per_rank) = (per_rank, 0);
        Ok(())
    }

    /// Sets a global batch for steps that measure or evaluate and do not train: it need not have a
    /// learning rate.
    pub fn set_trial_batch(&mut self, global: u64) {
        (self.batch.global, self.batch.per_rank, self.lr_schedule.lr_by_batch) = (global, 0, None);
    }

    /// Refuses `batch.per_rank`, if it is given, for work on several numbers of ranks or layouts.
    ///
    /// # Errors
    /// Returns an error that says `why`.
    pub fn check_fixed_batch(&self, why: &str) -> Result<()> {
        match self.batch.per_rank {
            0 => Ok(()),
            per_rank => Err(Error::input(format!("batch.per_rank = {per_rank}, but {why}"))
                .hint("set batch.global: batch.per_rank × replicas × shards")),
        }
    }
}

/// Checks that the keys of central storage are consistent with each other and with other keys.
fn check_storage(config: &Config) -> Result<()> {
    let parallel = &config.parallel;
    let owners = parallel.owners;
    if parallel.storage == Storage::Ranks {
        return match owners {
            1 => Ok(()),
            _ => Err(Error::input(format!(
                "parallel.owners = {owners} does nothing with parallel.storage = ranks"
            ))
            .hint("set parallel.storage to central, or omit owners")),
        };
    }
    if !matches!(parallel.zero, Zero::Zero | Zero::Three) {
        let zero = u8::from(parallel.zero);
        return Err(Error::input(format!(
            "parallel.storage = central has the optimizer state on owners only, but parallel.zero = {zero}"
        ))
        .hint(
            "set parallel.zero to 0, or to 3, with which the other ranks hold parameters only while they use them; \
             parallel.owners divides the optimizer state among several ranks",
        ));
    }
    if parallel.zero == Zero::Three && parallel.pipeline > 1 {
        return Err(Error::input(
            "parallel.storage = central with parallel.zero = 3 is not supported with parallel.pipeline",
        )
        .hint("set parallel.zero=0, or omit parallel.pipeline"));
    }
    if let Some(shard) = parallel.shard.filter(|shard| *shard != owners) {
        return Err(Error::input(format!(
            "parallel.shard = {shard}, but with parallel.storage = central the shards are its owners: parallel.owners = {owners}"
        ))
        .hint("omit parallel.shard"));
    }
    if config.local_sgd.sync_every != Interval::Steps(0) {
        return Err(Error::input(
            "local_sgd.sync_every is not supported with parallel.storage = central",
        )
        .hint("omit one of them"));
    }
    Ok(())
}

/// Returns the settings of local SGD, if it is enabled.
///
/// # Errors
/// Returns an error if there is one replica, if ranks cannot divide the replicas equally, if
/// checkpoints that are kept do not fall on averages, or if a key of `[local_sgd]` is out of range
/// or has no effect.
pub fn local_sgd(config: &Config, mesh: &Mesh) -> Result<Option<LocalSgd>> {
    let LocalSgdConfig { sync_every, replicas, outer_lr: lr, outer_momentum: momentum } =
        config.local_sgd;
    let Interval::Steps(every) = sync_every else {
        return Err(Error::input(
            "local_sgd.sync_every = epoch, but the data was not read, so the steps of an epoch are not known",
        )
        .hint("give the steps of an epoch: samples / batch.global"));
    };
    if every == 0 {
        let set = [
            ("replicas", replicas.map(|replicas| replicas.to_string())),
            ("outer_lr", (lr != 1.0).then(|| lr.to_string())),
            ("outer_momentum", (momentum != 0.0).then(|| momentum.to_string())),
        ];
        return match set.into_iter().find_map(|(key, value)| Some((key, value?))) {
            None => Ok(None),
            Some((key, value)) => Err(Error::input(format!(
                "local_sgd.{key} = {value} does nothing with local_sgd.sync_every = 0"
            ))
            .hint(format!(
                "set local_sgd.sync_every to the steps between averages, or omit {key}"
            ))),
        };
    }
    let replicas = replicas.unwrap_or(mesh.replica);
    if !replicas.is_multiple_of(mesh.replica) {
        let nearest = replicas.next_multiple_of(mesh.replica);
        return Err(Error::input(format!(
            "local_sgd.replicas = {replicas} does not divide over the {} replicas of the mesh",
            mesh.replica
        ))
        .hint(format!("the nearest that does: {nearest}")));
    }
    if replicas == 1 {
        return Err(Error::input(format!(
            "local_sgd.sync_every = {every}, but there is one replica"
        ))
        .hint(
            "start more ranks, give them parallel.replica=2 or more, or let a rank train several: \
             local_sgd.replicas=2",
        ));
    }
    if !(lr > 0.0 && lr.is_finite()) {
        return Err(out_of_range("local_sgd.outer_lr", lr, "greater than 0"));
    }
    if !(0.0..1.0).contains(&momentum) {
        return Err(out_of_range(
            "local_sgd.outer_momentum",
            momentum,
            "at least 0 and less than 1",
        ));
    }
    let keep = config.checkpoint.keep_every;
    if !keep.is_multiple_of(every) {
        let up = keep.next_multiple_of(every);
        let nearest = if keep > every { format!("{} or {up}", up - every) } else { up.to_string() };
        return Err(Error::input(format!(
            "checkpoint.keep_every = {keep} is not a multiple of local_sgd.sync_every = {every}: checkpoints are saved at averages"
        ))
        .hint(format!("the nearest that is: {nearest}")));
    }
    let outer = (lr != 1.0 || momentum > 0.0).then_some(OuterOptimizer { lr: lr as f32, momentum });
    Ok(Some(LocalSgd { every, replicas, outer }))
}

/// Returns the number of tokens whose logits are in memory at once; 0 means all.
///
/// The default depends on the vocabulary and the number format alone, because the number of chunks
/// changes last bits: two runs of a model have the same on any device and in any layout that
/// supports chunks.
///
/// # Errors
/// Returns an error if the configuration gives a number, but the network or the layout does not
/// support chunked cross-entropy.
pub fn loss_chunk_tokens(
    config: &Config,
    network: &Network,
    mesh: &Mesh,
    virtual_tensor_ranks: usize,
) -> Result<usize> {
    let Parallel { loss_chunk_tokens, sequence, schedule, .. } = config.parallel;
    let slices = TensorShards::of_rank(virtual_tensor_ranks, 0, mesh.tensor, sequence);
    let default = default_loss_chunk(config.precision.dtype, network.outputs());
    let is_row_by_row =
        || network.cpu_blocks(&slices).last().is_some_and(|last| last.is_row_by_row());
    let why = match () {
        () if !network.is_language() => "but the network is not a language model",
        () if sequence => "but parallel.sequence = true shards its tokens among ranks",
        () if mesh.pipeline > 1 && schedule == PipelineSchedule::ZeroBubble => {
            "but parallel.schedule = zero-bubble keeps the gradient of all logits"
        }
        () if !is_row_by_row() => "but the last block of the custom model takes all tokens at once",
        () => return Ok(loss_chunk_tokens.unwrap_or(default)),
    };
    match loss_chunk_tokens {
        Some(tokens) if tokens > 0 => {
            Err(Error::input(format!("parallel.loss_chunk_tokens = {tokens}, {why}"))
                .hint("omit it"))
        }
        _ => Ok(0),
    }
}

/// Returns the default `parallel.loss_chunk_tokens` of a language model: a power of two.
fn default_loss_chunk(dtype: Compute, vocabulary: usize) -> usize {
    let element = if dtype == Compute::Bf16 { size_of::<u16>() } else { size_of::<f32>() };
    let tokens = LOSS_CHUNK_BYTES / (element * vocabulary.max(1));
    (1 << tokens.max(1).ilog2()).clamp(MIN_LOSS_CHUNK_TOKENS, MAX_LOSS_CHUNK_TOKENS)
}

/// Returns the number of virtual tensor-parallel ranks of a network.
///
/// # Errors
/// Returns an error if blocks of the network cannot be divided by this number, or ranks cannot
/// divide the virtual ranks equally.
pub fn virtual_tensor_ranks(parallel: &Parallel, network: &Network) -> Result<usize> {
    let Parallel { tensor, sequence, .. } = *parallel;
    let virtual_ranks = parallel.virtual_tensor_ranks.unwrap_or(tensor);
    let key =
        if parallel.virtual_tensor_ranks.is_some() { "virtual_tensor_ranks" } else { "tensor" };
    if sequence && tensor == 1 {
        return Err(Error::input(
            "parallel.sequence = true divides nothing with parallel.tensor = 1",
        )
        .hint("set parallel.tensor to 2 or more, or omit parallel.sequence"));
    }
    if virtual_ranks == 1 {
        return Ok(1);
    }
    if !virtual_ranks.is_multiple_of(tensor) {
        return Err(Error::input(format!(
            "parallel.virtual_tensor_ranks = {virtual_ranks} does not divide over {tensor} ranks"
        ))
        .hint(format!("the nearest that does: {}", virtual_ranks.next_multiple_of(tensor))));
    }
    let (heads, kind) = match network {
        Network::Gpt(gpt) => (gpt.heads, "model.heads"),
        Network::Llama(llama) => (llama.kv_heads, "model.kv_heads"),
        Network::Layers(_) | Network::Custom(_) => {
            let kind = if matches!(network, Network::Custom(_)) { "custom" } else { "layer-list" };
            return Err(Error::input(format!(
                "parallel.{key} = {virtual_ranks}, but {kind} models do not support tensor parallelism"
            ))
            .hint("omit it: all models support parallel.pipeline and parallel.zero"));
        }
    };
    if !heads.is_multiple_of(virtual_ranks) {
        // Any divisor of the heads; if virtual ranks are given, only multiples of the ranks.
        let step = if parallel.virtual_tensor_ranks.is_some() { tensor } else { 1 };
        let legal: Vec<String> = (1..=heads)
            .filter(|count| heads.is_multiple_of(*count) && count.is_multiple_of(step))
            .map(|count| count.to_string())
            .collect();
        let hint = match &legal[..] {
            [] => format!("parallel.tensor = {tensor} must divide {kind}"),
            legal => format!("parallel.{key} may be {}", legal.join(", ")),
        };
        return Err(Error::input(format!(
            "parallel.{key} = {virtual_ranks} does not divide {kind} = {heads}"
        ))
        .hint(hint));
    }
    // The last virtual rank may have fewer rows of these than the others, but not none.
    let mut widths = vec![("model.vocabulary", network.outputs())];
    if let Network::Llama(llama) = network {
        widths.push(("model.hidden", llama.hidden));
    }
    for (name, width) in widths {
        if width.div_ceil(virtual_ranks) * (virtual_ranks - 1) >= width {
            return Err(Error::input(format!(
                "parallel.{key} = {virtual_ranks} leaves a rank without any of {name} = {width}"
            ))
            .hint("use fewer tensor-parallel ranks"));
        }
    }
    if sequence && !network.context().is_multiple_of(virtual_ranks) {
        let context = network.context();
        return Err(Error::input(format!(
            "parallel.sequence = true, but parallel.{key} = {virtual_ranks} does not divide model.context = {context}"
        ))
        .hint(format!(
            "set model.context={}, or omit parallel.sequence",
            context.next_multiple_of(virtual_ranks)
        )));
    }
    Ok(virtual_ranks)
}

/// Returns the number of virtual ranks of the global batch, and when their gradients are reduced over
/// the ranks that divide them.
///
/// # Errors
/// Returns an error if the ranks cannot divide them, or if gradients cannot be reduced as the
/// configuration says.
pub fn virtual_ranks(
    config: &Config,
    replicas: usize,
    mesh: &Mesh,
) -> Result<(usize, ReduceAfter)> {
    let virtual_ranks = given_virtual_ranks(config, replicas, mesh)?;
    let after_step = || Ok((virtual_ranks, after_step(config, virtual_ranks, mesh)?));
    let is_asked = config.parallel.reduce == ReduceChoice::Micro;
    let is_step = matches!(config.parallel.reduce, ReduceChoice::Step | ReduceChoice::Blocks);
    if is_step || has_shares(config, mesh) && !is_asked {
        return after_step();
    }
    // A wrong batch is reported later.
    let micro_batches = match batch(config, virtual_ranks, replicas, mesh) {
        Ok((_, micro)) => (config.batch.global / micro) as usize,
        Err(_) if !is_asked => return after_step(),
        Err(error) => return Err(error),
    };
    match check_micro(config, mesh, virtual_ranks, micro_batches, replicas) {
        Ok(()) if is_asked || saves_memory(config, mesh, micro_batches, replicas) => {
            Ok((micro_batches, ReduceAfter::MicroBatch))
        }
        Err(error) if is_asked => Err(error),
        _ => after_step(),
    }
}

/// Returns true if several ranks have shares of the work that may be unequal.
fn has_shares(config: &Config, mesh: &Mesh) -> bool {
    config.parallel.work_shares != WorkShares::Equal && mesh.data() > 1
}

/// Returns how gradients are reduced at the end of a step: in blocks where ranks have unequal
/// numbers of virtual ranks, or where only blocks give the bits of one rank and these are asked for.
fn after_step(config: &Config, virtual_ranks: usize, mesh: &Mesh) -> Result<ReduceAfter> {
    let is_local = config.local_sgd.sync_every != Interval::Steps(0);
    let has_shares = has_shares(config, mesh);
    let is_one_tree = VirtualRanks::are_in_one_tree(virtual_ranks, mesh.replica, mesh.shard);
    if is_local || is_one_tree && !has_shares {
        return Ok(ReduceAfter::Step);
    }
    let ranks = mesh.data();
    let are_equal = virtual_ranks.is_multiple_of(ranks) && !has_shares;
    let reduce = config.parallel.reduce;
    let is_asked = match reduce {
        ReduceChoice::Blocks => true,
        ReduceChoice::Auto => config.parallel.virtual_ranks.is_some() && config.comm.deterministic,
        ReduceChoice::Step | ReduceChoice::Micro => false,
    };
    match excludes_blocks(config) {
        Some((key, value)) if !are_equal || reduce == ReduceChoice::Blocks => {
            Err(Error::input(format!(
                "{key} = {value} requires as many virtual ranks on every rank, added without blocks, \
                 but {ranks} data-parallel ranks share parallel.virtual_ranks = {virtual_ranks}"
            ))
            .hint(equal_numbers(config, virtual_ranks, ranks, key)))
        }
        None if is_asked || !are_equal => Ok(ReduceAfter::StepInBlocks),
        _ => Ok(ReduceAfter::Step),
    }
}

/// Returns a key, with its value, with which gradients cannot be reduced in blocks.
fn excludes_blocks(config: &Config) -> Option<(&'static str, String)> {
    let comm = &config.comm;
    let algorithm = comm.algorithm.fixed().filter(|one| *one != Algorithm::HalvingDoubling);
    match algorithm {
        _ if comm.dtype == MessageDtype::Bf16 => Some(("comm.dtype", "bf16".into())),
        _ if config.data.order == DataOrder::Files => Some(("data.order", "files".into())),
        Some(algorithm) => Some(("comm.algorithm", algorithm.to_string())),
        None => None,
    }
}

/// Returns a hint at what gives `ranks` ranks equal numbers of virtual ranks, or at leaving out the
/// key that requires them.
fn equal_numbers(config: &Config, virtual_ranks: usize, ranks: usize, key: &str) -> String {
    let fits = |number: &usize| config.batch.global.is_multiple_of(*number as u64);
    let most = config.batch.global as usize;
    let below = (ranks..=virtual_ranks).step_by(ranks).filter(fits).last();
    let first = virtual_ranks.next_multiple_of(ranks);
    let above = (first..=most.max(first)).step_by(ranks).find(fits);
    let numbers: Vec<usize> = below.into_iter().chain(above).collect();
    let change = match &numbers[..] {
        [] => format!(
            "start {} ranks",
            one_of((1..=virtual_ranks).filter(|n| virtual_ranks.is_multiple_of(*n)))
        ),
        numbers => format!("set parallel.virtual_ranks to {}", one_of(numbers.iter().copied())),
    };
    format!("{change}, or omit {key}")
}

/// Returns numbers as a choice, such as `1, 2 or 4`.
fn one_of(numbers: impl Iterator<Item = usize>) -> String {
    let mut words: Vec<String> = numbers.map(|number| number.to_string()).collect();
    let last = words.pop().unwrap_or_default();
    if words.is_empty() { last } else { format!("{} or {last}", words.join(", ")) }
}

/// Returns true if reducing gradients after each micro-batch saves at least half of them, by the
/// stages of ZeRO that shard gradients.
///
/// A rank then has a part of 1/shards for each level of the tree over its micro-batches; a pipeline
/// stage, which reduces all its gradients at once, also a full gradient. Otherwise it has a full
/// gradient for each level, or a single one if it adds its micro-batches in one virtual rank.
fn saves_memory(config: &Config, mesh: &Mesh, micro_batches: usize, replicas: usize) -> bool {
    let of_rank = micro_batches / (replicas * mesh.shard);
    if (config.parallel.zero as u8) < 2 || mesh.shard == 1 || of_rank == 1 {
        return false;
    }
    let levels = of_rank.ilog2() as usize + 1;
    let full = if config.parallel.virtual_ranks.is_some() { levels } else { 1 };
    let at_once = if mesh.pipeline > 1 { mesh.shard } else { 0 };
    2 * (levels + at_once) <= full * mesh.shard
}

/// Checks that gradients can be reduced after each micro-batch.
fn check_micro(
    config: &Config,
    mesh: &Mesh,
    virtual_ranks: usize,
    micro_batches: usize,
    replicas: usize,
) -> Result<()> {
    let Parallel { zero, storage, schedule, .. } = config.parallel;
    let refused = |why: String, hint: String| {
        Err(Error::input(format!("parallel.reduce = micro {why}")).hint(hint))
    };
    if storage == Storage::Central {
        let why = "is not supported with parallel.storage = central";
        return refused(why.into(), "omit parallel.reduce".into());
    }
    if zero == Zero::Zero {
        let why = "with parallel.zero = 0 has no shards to reduce over";
        return refused(why.into(), "set parallel.zero to 1, 2 or 3, or omit reduce".into());
    }
    if config.parallel.virtual_ranks.is_some() && virtual_ranks != micro_batches {
        return refused(
            format!(
                "requires a virtual rank for each micro-batch, but parallel.virtual_ranks = {virtual_ranks}, and a step has \
                 {micro_batches} micro-batches"
            ),
            format!("set parallel.virtual_ranks={micro_batches}, or omit it"),
        );
    }
    let ranks = replicas * mesh.shard;
    if !micro_batches.is_multiple_of(ranks) {
        return refused(
            format!(
                "requires as many micro-batches on every rank, but {ranks} data-parallel ranks share \
                 {micro_batches}"
            ),
            "set parallel.reduce=step, or change batch.micro or batch.global".into(),
        );
    }
    let of_rank = micro_batches / ranks;
    if !(mesh.shard.is_power_of_two() && of_rank.is_power_of_two()) {
        return refused(
            format!(
                "requires powers of two, but there are {} shards and {of_rank} micro-batches on each rank",
                mesh.shard
            ),
            "set parallel.reduce=step, or change parallel.shard, batch.micro or batch.global"
                .into(),
        );
    }
    if mesh.pipeline > 1 && schedule == PipelineSchedule::ZeroBubble {
        let why = "is not supported by parallel.schedule = zero-bubble, which defers weight gradients from one micro-batch \
                   to the next";
        return refused(why.into(), "set parallel.schedule=1f1b, or parallel.reduce=step".into());
    }
    if let LayerList::List(layers) = &config.model.layers
        && let Some(place) = Layer::synchronised(layers, "model.layers").filter(|_| of_rank > 1)
    {
        return refused(
            format!(
                "is not supported by {place} (batch_norm), which shares statistics among ranks"
            ),
            "set synchronised=false, or parallel.reduce=step".into(),
        );
    }
    Ok(())
}

/// Returns the number of virtual ranks that the configuration gives, by default one for each
/// data-parallel rank.
fn given_virtual_ranks(config: &Config, replicas: usize, mesh: &Mesh) -> Result<usize> {
    let ranks = replicas * mesh.shard;
    let virtual_ranks = config.parallel.virtual_ranks.unwrap_or(ranks);
    let is_local = config.local_sgd.sync_every != Interval::Steps(0);
    if is_local && !virtual_ranks.is_multiple_of(ranks) {
        return Err(Error::input(format!(
            "parallel.virtual_ranks = {virtual_ranks} does not divide over {replicas} replicas of {} \
             shards, each of which trains by itself (local_sgd.sync_every)",
            mesh.shard
        ))
        .hint(equal_numbers(config, virtual_ranks, ranks, "local_sgd.sync_every")));
    }
    if virtual_ranks < ranks {
        return Err(Error::input(format!(
            "parallel.virtual_ranks = {virtual_ranks} leaves some of the {ranks} data-parallel ranks \
             without work"
        ))
        .hint(format!("set parallel.virtual_ranks to {ranks} or more, or start fewer ranks")));
    }
    Ok(virtual_ranks)
}

/// Checks that `ranks` ranks can train a configuration, as far as its layout and batch determine.
///
/// # Errors
/// Returns an error for the first key that does not fit, with its value.
pub fn check_ranks(config: &Config, ranks: usize) -> Result<()> {
    let mesh = mesh(config, ranks)?;
    let mut config = config.clone();
    config.resolve_batch(ranks)?;
    let config = &config;
    let replicas = local_sgd(config, &mesh)?.map_or(mesh.replica, |averaging| averaging.replicas);
    let (virtual_ranks, _) = virtual_ranks(config, replicas, &mesh)?;
    batch(config, virtual_ranks, replicas, &mesh).map(drop)
}

/// Describes the virtual ranks that `ranks` ranks may share unequally, as the rest of a hint: the
/// fewest with which the busiest rank has at most a tenth more samples than with any other number.
/// Empty where ranks need equal numbers.
fn unequal_shares(config: &Config, ranks: u64) -> String {
    let is_local = config.local_sgd.sync_every != Interval::Steps(0);
    let shares_statistics = matches!(&config.model.layers, LayerList::List(layers)
        if Layer::synchronised(layers, "model.layers").is_some());
    if config.parallel.virtual_ranks.is_some()
        || is_local
        || shares_statistics
        || config.parallel.reduce == ReduceChoice::Micro
        || excludes_blocks(config).is_some()
    {
        return String::new();
    }
    let global = config.batch.global;
    let busiest = |virtual_ranks: &u64| virtual_ranks.div_ceil(ranks) * (global / virtual_ranks);
    let divisors = || (ranks..=global).filter(|number| global.is_multiple_of(*number));
    let least = divisors().map(|number| busiest(&number)).min().unwrap_or_default();
    match divisors().find(|number| 10 * busiest(number) <= 11 * least) {
        None => String::new(),
        Some(virtual_ranks) => format!(
            ", or let ranks have unequal numbers of virtual ranks: parallel.virtual_ranks={virtual_ranks}"
        ),
    }
}

/// Returns the samples of a virtual rank and of a micro-batch, if `replicas` replicas divide the
/// virtual ranks.
///
/// # Errors
/// Returns an error if the batch cannot be divided equally.
pub fn batch(
    config: &Config,
    virtual_ranks: usize,
    replicas: usize,
    mesh: &Mesh,
) -> Result<(u64, u64)> {
    let global = config.batch.global;
    let virtual_ranks = virtual_ranks as u64;
    if !global.is_multiple_of(virtual_ranks) {
        let up = global.next_multiple_of(virtual_ranks);
        let nearest = if global > virtual_ranks {
            format!("{} or {up}", up - virtual_ranks)
        } else {
            up.to_string()
        };
        return Err(Error::input(format!(
            "batch.global = {global} does not divide into {virtual_ranks} virtual ranks ({global} / {virtual_ranks} = {:.2} samples)",
            global as f64 / virtual_ranks as f64
        ))
        .hint(format!(
            "the nearest batch that does: {nearest}{}",
            unequal_shares(config, virtual_ranks)
        )));
    }
    let virtual_rank_samples = global / virtual_ranks;
    let predictions =
        if config.model.kind == ModelKind::Layers { 1 } else { config.model.context as u64 };
    let rank_samples = virtual_ranks / (replicas * mesh.shard) as u64 * virtual_rank_samples;
    let fills_pipeline = |micro: u64| {
        mesh.pipeline == 1 || rank_samples / micro >= MICRO_BATCHES_PER_STAGE * mesh.pipeline as u64
    };
    let fits = |micro: &u64| {
        virtual_rank_samples.is_multiple_of(*micro)
            && micro * predictions <= MICRO_TOKENS
            && fills_pipeline(*micro)
    };
    let micro = config
        .batch
        .micro
        .unwrap_or_else(|| (1..=virtual_rank_samples).rev().find(fits).unwrap_or(1));
    if !virtual_rank_samples.is_multiple_of(micro) {
        let divisors =
            (1..=virtual_rank_samples).filter(|d| virtual_rank_samples.is_multiple_of(*d));
        let nearest = divisors.min_by_key(|d| d.abs_diff(micro)).unwrap_or(1);
        return Err(Error::input(format!(
            "batch.micro = {micro} does not divide the {virtual_rank_samples} samples of a virtual rank \
             (batch.global = {global} / {virtual_ranks} virtual ranks)"
        ))
        .hint(format!("the nearest that does: {nearest}")));
    }
    Ok((virtual_rank_samples, micro))
}

/// Returns the blocks of every stage of the pipeline: as the configuration gives them, or
/// partitioned by work.
///
/// # Errors
/// Returns an error if there are more stages than blocks, or if `parallel.stages` does not add up
/// to the blocks of the network.
pub fn stages(parallel: &Parallel, network: &Network) -> Result<Vec<Range<usize>>> {
    let wanted = parallel.pipeline;
    let costs = network.work_per_block(parallel.recompute);
    let blocks = costs.len();
    if wanted > blocks {
        let message = format!("parallel.pipeline = {wanted}, but the network has {blocks} blocks");
        return Err(
            Error::input(message).hint(format!("set parallel.pipeline to at most {blocks}"))
        );
    }
    let Some(given) = &parallel.stages else {
        let cut = partition(&costs, wanted, |_, _| true);
        return cut.ok_or_else(|| Error::internal(format!("{blocks} blocks in {wanted} stages")));
    };
    let sum: usize = given.iter().sum();
    let problem = if given.len() != wanted {
        format!("has {} stages, but parallel.pipeline = {wanted}", given.len())
    } else if given.contains(&0) {
        "has a stage without blocks".into()
    } else if sum != blocks {
        format!("adds up to {sum} blocks, but the network has {blocks}")
    } else {
        let ends = given.iter().scan(0, |end, len| {
            *end += len;
            Some(*end - len..*end)
        });
        return Ok(ends.collect());
    };
    Err(Error::input(format!("parallel.stages = {given:?} {problem}"))
        .hint("omit it; hpctrain config summary shows the blocks and a partition by work"))
}
