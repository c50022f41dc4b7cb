//! The layout that a configuration asks for: the mesh of its ranks, virtual ranks and micro-batches, the
//! stages of a pipeline.

use std::ops::Range;

use super::range::out_of_range;
use super::{Config, Interval, LocalSgdConfig, ModelKind, Parallel};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::TensorShards;
use hpctrain_base::mesh::Mesh;
use hpctrain_nn::Network;
use hpctrain_parallel::{LocalSgd, OuterOptimizer, PipelineSchedule, Storage, Zero, partition};

/// Tokens that a micro-batch has at most unless the configuration says: enough for efficient
/// products, few enough for the memory of activations.
const MICRO_TOKENS: u64 = 4096;

/// Rows whose logits are in memory at once on GPUs, unless the configuration says. Products of so
/// many rows should keep a GPU busy by their count of tiles; no GPU has measured it.
const LOGIT_ROWS: usize = 4096;

/// Micro-batches that a rank has at least for each stage of a pipeline, unless the configuration
/// says: with four times as many as stages, a fifth of the step is idle at most.
const MICROS_A_STAGE: u64 = 4;

/// The mesh of so many ranks.
///
/// # Errors
/// The axes do not multiply to them, or one of them does nothing.
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
    let of_stage = (ranks / parallel.pipeline / parallel.tensor).max(1);
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
        (_, None) => (of_stage / parallel.replica.unwrap_or(1).min(of_stage)).max(1),
    };
    let replica = parallel.replica.unwrap_or((of_stage / shard.min(of_stage)).max(1));
    let mesh = Mesh { pipeline: parallel.pipeline, replica, shard, tensor: parallel.tensor };
    if parallel.storage == Storage::Central && !of_stage.is_multiple_of(parallel.owners) {
        let owners = parallel.owners;
        let nearest = (1..=of_stage)
            .filter(|n| of_stage.is_multiple_of(*n))
            .min_by_key(|n| n.abs_diff(owners));
        return Err(Error::input(format!(
            "parallel.owners = {owners} does not divide the {of_stage} data-parallel ranks"
        ))
        .hint(format!("the nearest that does: {}", nearest.unwrap_or(1))));
    }
    mesh.check(ranks, parallel.zero != Zero::Zero)?;
    Ok(mesh)
}

/// Whether the keys of central storage go together, and with the others.
fn check_storage(config: &Config) -> Result<()> {
    let parallel = &config.parallel;
    let owners = parallel.owners;
    if parallel.storage == Storage::Ranks {
        return match owners {
            1 => Ok(()),
            _ => Err(Error::input(format!(
                "parallel.owners = {owners} does nothing with parallel.storage = ranks"
            ))
            .hint("set parallel.storage to central, or leave owners out")),
        };
    }
    if parallel.zero != Zero::Zero {
        let zero = u8::from(parallel.zero);
        return Err(Error::input(format!(
            "parallel.storage = central keeps all parameters on every rank, but parallel.zero = {zero}"
        ))
        .hint(
            "leave parallel.zero out, or parallel.storage; several owners divide the optimizer state: parallel.owners",
        ));
    }
    if let Some(shard) = parallel.shard.filter(|shard| *shard != owners) {
        return Err(Error::input(format!(
            "parallel.shard = {shard}, but with parallel.storage = central the shards are its owners: parallel.owners = {owners}"
        ))
        .hint("leave parallel.shard out"));
    }
    if config.local_sgd.sync_every != Interval::Steps(0) {
        return Err(Error::input(
            "local_sgd.sync_every trains replicas apart, which parallel.storage = central does not",
        )
        .hint("leave one of them out"));
    }
    Ok(())
}

/// The averages of replicas that train apart, if they do.
///
/// # Errors
/// There is one replica, the ranks cannot divide them among themselves, or a key of averages is set
/// without any.
pub fn averaging(config: &Config, mesh: &Mesh) -> Result<Option<LocalSgd>> {
    let LocalSgdConfig { sync_every, replicas, outer_lr: lr, outer_momentum: momentum } =
        config.local_sgd;
    let Interval::Steps(every) = sync_every else {
        return Err(Error::input(
            "local_sgd.sync_every = epoch, but the data whose epoch it is was not looked at",
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
                "set local_sgd.sync_every to the steps between averages, or leave {key} out"
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
            "checkpoint.keep_every = {keep} is no multiple of local_sgd.sync_every = {every}: checkpoints are those of averages"
        ))
        .hint(format!("the nearest that is: {nearest}")));
    }
    let outer = (lr != 1.0 || momentum > 0.0).then_some(OuterOptimizer { lr: lr as f32, momentum });
    Ok(Some(LocalSgd { every, replicas, outer }))
}

/// Rows whose logits are in memory at once; 0 are all.
///
/// # Errors
/// The configuration gives a number, but the network's last block takes all rows at once.
pub fn logit_rows(
    config: &Config,
    network: &Network,
    mesh: &Mesh,
    virtual_tensor_ranks: usize,
    on_gpu: bool,
) -> Result<usize> {
    let Parallel { loss_chunk_tokens, sequence, schedule, .. } = config.parallel;
    let slices = TensorShards::of_rank(virtual_tensor_ranks, 0, mesh.tensor, sequence);
    let is_row_by_row =
        || network.cpu_blocks(&slices).last().is_some_and(|last| last.is_row_by_row());
    let why = match () {
        () if !network.is_language() => "but the network is no language model",
        () if sequence => "but parallel.sequence = true divides rows among ranks",
        () if mesh.pipeline > 1 && schedule == PipelineSchedule::ZeroBubble => {
            "but parallel.schedule = zero-bubble keeps the logits' gradient for later"
        }
        () if !is_row_by_row() => {
            "but the last block of the program's own network takes all rows at once"
        }
        () => return Ok(loss_chunk_tokens.unwrap_or(if on_gpu { LOGIT_ROWS } else { 0 })),
    };
    match loss_chunk_tokens {
        Some(rows) if rows > 0 => {
            Err(Error::input(format!("parallel.loss_chunk_tokens = {rows}, {why}"))
                .hint("leave it out"))
        }
        _ => Ok(0),
    }
}

/// The virtual tensor ranks of a network.
///
/// # Errors
/// Its blocks cannot be divided so, or ranks cannot divide the virtual ranks among themselves.
pub fn virtual_tensor_ranks(parallel: &Parallel, network: &Network) -> Result<usize> {
    let Parallel { tensor, sequence, .. } = *parallel;
    let virtual_ranks = parallel.virtual_tensor_ranks.unwrap_or(tensor);
    let key =
        if parallel.virtual_tensor_ranks.is_some() { "virtual_tensor_ranks" } else { "tensor" };
    if sequence && tensor == 1 {
        return Err(Error::input(
            "parallel.sequence = true divides nothing with parallel.tensor = 1",
        )
        .hint("set parallel.tensor to 2 or more, or leave parallel.sequence out"));
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
        Network::Layers(_) | Network::Own(_) => {
            let kind =
                if matches!(network, Network::Own(_)) { "of a program's own" } else { "by layers" };
            return Err(Error::input(format!(
                "parallel.{key} = {virtual_ranks}, but a network {kind} is not divided"
            ))
            .hint("leave it out: parallel.pipeline and parallel.zero are for all networks"));
        }
    };
    if !heads.is_multiple_of(virtual_ranks) {
        // Any divisor, or of slices given apart those that the ranks divide.
        let step = if parallel.virtual_tensor_ranks.is_some() { tensor } else { 1 };
        let fits = |slices: &usize| heads.is_multiple_of(*slices) && slices.is_multiple_of(step);
        let legal: Vec<String> =
            (1..=heads).filter(fits).map(|slices| slices.to_string()).collect();
        let hint = match &legal[..] {
            [] => format!("parallel.tensor = {tensor} must divide {kind}"),
            legal => format!("parallel.{key} may be {}", legal.join(", ")),
        };
        return Err(Error::input(format!(
            "parallel.{key} = {virtual_ranks} does not divide {kind} = {heads}"
        ))
        .hint(hint));
    }
    // The last virtual rank has fewer rows of what does not divide, but not none.
    let mut widths = vec![("model.vocabulary", network.outputs())];
    if let Network::Llama(llama) = network {
        widths.push(("model.hidden", llama.hidden));
    }
    for (name, width) in widths {
        if width.div_ceil(virtual_ranks) * (virtual_ranks - 1) >= width {
            return Err(Error::input(format!(
                "parallel.{key} = {virtual_ranks} leaves a slice without any of {name} = {width}"
            ))
            .hint("use fewer slices"));
        }
    }
    if sequence && !network.context().is_multiple_of(virtual_ranks) {
        let context = network.context();
        return Err(Error::input(format!(
            "parallel.sequence = true, but {virtual_ranks} slices do not divide model.context = {context}"
        ))
        .hint(format!(
            "a context of {} divides, or leave parallel.sequence out",
            context.next_multiple_of(virtual_ranks)
        )));
    }
    Ok(virtual_ranks)
}

/// Virtual ranks of the global batch, of which each replica has an equal part and each of its shards one of
/// that.
///
/// # Errors
/// They cannot be divided so.
pub fn virtual_ranks(config: &Config, replicas: usize, mesh: &Mesh) -> Result<usize> {
    let ranks = replicas * mesh.shard;
    let virtual_ranks = config.parallel.virtual_ranks.unwrap_or(ranks);
    if virtual_ranks.is_multiple_of(ranks) {
        return Ok(virtual_ranks);
    }
    let up = virtual_ranks.next_multiple_of(ranks);
    let nearest =
        if virtual_ranks > ranks { format!("{} or {up}", up - ranks) } else { up.to_string() };
    let over = match replicas == mesh.replica {
        true => format!("{ranks} data-parallel ranks"),
        false => format!("{replicas} replicas of {} shards", mesh.shard),
    };
    Err(Error::input(format!(
        "parallel.virtual_ranks = {virtual_ranks} does not divide over {over}"
    ))
    .hint(format!("the nearest that does: {nearest}")))
}

/// Whether so many ranks can train a configuration, as far as its layout and its batch say.
///
/// # Errors
/// They cannot: the first key that does not fit, with its value.
pub fn check_ranks(config: &Config, ranks: usize) -> Result<()> {
    let mesh = mesh(config, ranks)?;
    let replicas = averaging(config, &mesh)?.map_or(mesh.replica, |averaging| averaging.replicas);
    let virtual_ranks = virtual_ranks(config, replicas, &mesh)?;
    batch(config, virtual_ranks, replicas, &mesh).map(drop)
}

/// Samples of a virtual rank, and of a micro-batch, where `replicas` divide the virtual ranks.
///
/// # Errors
/// The batch cannot be cut so.
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
        .hint(format!("the nearest batch that does: {nearest}")));
    }
    let virtual_rank_samples = global / virtual_ranks;
    let predictions =
        if config.model.kind == ModelKind::Layers { 1 } else { config.model.context as u64 };
    let of_pass = virtual_ranks / (replicas * mesh.shard) as u64 * virtual_rank_samples;
    let enough =
        |micro: u64| mesh.pipeline == 1 || of_pass / micro >= MICROS_A_STAGE * mesh.pipeline as u64;
    let fits = |micro: &u64| {
        virtual_rank_samples.is_multiple_of(*micro)
            && micro * predictions <= MICRO_TOKENS
            && enough(*micro)
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

/// The blocks of every stage of the pipeline: as the configuration has them, or cut by their work.
///
/// # Errors
/// There are more stages than blocks, or the configuration's do not add up.
pub fn stages(parallel: &Parallel, network: &Network) -> Result<Vec<Range<usize>>> {
    let wanted = parallel.pipeline;
    let costs = network.work(parallel.recompute);
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
    let told = if given.len() != wanted {
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
    Err(Error::input(format!("parallel.stages = {given:?} {told}"))
        .hint("leave it out; hpctrain config summary shows the blocks and the cut by their work"))
}
