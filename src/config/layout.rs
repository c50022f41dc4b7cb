//! The layout that a configuration asks for: the mesh of its ranks, lanes and micro-batches, the
//! stages of a pipeline.

use std::ops::Range;

use super::range::out_of_range;
use super::{Config, Interval, ModelKind, Parallel};
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
        ("lanes", parallel.lanes),
        ("pipeline", Some(parallel.pipeline)),
        ("tensor", Some(parallel.tensor)),
        ("tensor_lanes", parallel.tensor_lanes),
        ("average_replicas", parallel.average_replicas),
    ];
    for (key, value) in keys {
        if value == Some(0) {
            return Err(out_of_range(&format!("parallel.{key}"), 0, "at least 1"));
        }
    }
    let of_stage = (ranks / parallel.pipeline / parallel.tensor).max(1);
    check_storage(parallel)?;
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
fn check_storage(parallel: &Parallel) -> Result<()> {
    let Parallel { owners, .. } = *parallel;
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
    if parallel.average_every != Interval::Steps(0) {
        return Err(Error::input(
            "parallel.average_every trains replicas apart, which parallel.storage = central does not",
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
    let Parallel {
        average_every, average_replicas, outer_lr: lr, outer_momentum: momentum, ..
    } = config.parallel;
    let Interval::Steps(every) = average_every else {
        return Err(Error::input(
            "parallel.average_every = epoch, but the data whose epoch it is was not looked at",
        )
        .hint("give the steps of an epoch: samples / batch.global"));
    };
    if every == 0 {
        let set = [
            ("average_replicas", average_replicas.map(|replicas| replicas.to_string())),
            ("outer_lr", (lr != 1.0).then(|| lr.to_string())),
            ("outer_momentum", (momentum != 0.0).then(|| momentum.to_string())),
        ];
        return match set.into_iter().find_map(|(key, value)| Some((key, value?))) {
            None => Ok(None),
            Some((key, value)) => Err(Error::input(format!(
                "parallel.{key} = {value} does nothing with parallel.average_every = 0"
            ))
            .hint(format!(
                "set parallel.average_every to the steps between averages, or leave {key} out"
            ))),
        };
    }
    let replicas = average_replicas.unwrap_or(mesh.replica);
    if !replicas.is_multiple_of(mesh.replica) {
        let nearest = replicas.next_multiple_of(mesh.replica);
        return Err(Error::input(format!(
            "parallel.average_replicas = {replicas} does not divide over the {} replicas of the mesh",
            mesh.replica
        ))
        .hint(format!("the nearest that does: {nearest}")));
    }
    if replicas == 1 {
        return Err(Error::input(format!(
            "parallel.average_every = {every}, but there is one replica"
        ))
        .hint(
            "start more ranks, give them parallel.replica=2 or more, or let a rank train several: \
             parallel.average_replicas=2",
        ));
    }
    if !(lr > 0.0 && lr.is_finite()) {
        return Err(out_of_range("parallel.outer_lr", lr, "greater than 0"));
    }
    if !(0.0..1.0).contains(&momentum) {
        return Err(out_of_range(
            "parallel.outer_momentum",
            momentum,
            "at least 0 and less than 1",
        ));
    }
    let keep = config.checkpoint.keep_every;
    if !keep.is_multiple_of(every) {
        let up = keep.next_multiple_of(every);
        let nearest = if keep > every { format!("{} or {up}", up - every) } else { up.to_string() };
        return Err(Error::input(format!(
            "checkpoint.keep_every = {keep} is no multiple of parallel.average_every = {every}: checkpoints are those of averages"
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
    tensor_lanes: usize,
    on_gpu: bool,
) -> Result<usize> {
    let Parallel { logit_rows, sequence, schedule, .. } = config.parallel;
    let slices = TensorShards::of_rank(tensor_lanes, 0, mesh.tensor, sequence);
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
        () => return Ok(logit_rows.unwrap_or(if on_gpu { LOGIT_ROWS } else { 0 })),
    };
    match logit_rows {
        Some(rows) if rows > 0 => {
            Err(Error::input(format!("parallel.logit_rows = {rows}, {why}")).hint("leave it out"))
        }
        _ => Ok(0),
    }
}

/// The tensor lanes of a network.
///
/// # Errors
/// Its blocks cannot be divided so, or ranks cannot divide the lanes among themselves.
pub fn tensor_lanes(parallel: &Parallel, network: &Network) -> Result<usize> {
    let Parallel { tensor, sequence, .. } = *parallel;
    let lanes = parallel.tensor_lanes.unwrap_or(tensor);
    let key = if parallel.tensor_lanes.is_some() { "tensor_lanes" } else { "tensor" };
    if sequence && tensor == 1 {
        return Err(Error::input(
            "parallel.sequence = true divides nothing with parallel.tensor = 1",
        )
        .hint("set parallel.tensor to 2 or more, or leave parallel.sequence out"));
    }
    if lanes == 1 {
        return Ok(1);
    }
    if !lanes.is_multiple_of(tensor) {
        return Err(Error::input(format!(
            "parallel.tensor_lanes = {lanes} does not divide over {tensor} ranks"
        ))
        .hint(format!("the nearest that does: {}", lanes.next_multiple_of(tensor))));
    }
    let (heads, kind) = match network {
        Network::Gpt(gpt) => (gpt.heads, "model.heads"),
        Network::Llama(llama) => (llama.kv_heads, "model.kv_heads"),
        Network::Layers(_) | Network::Own(_) => {
            let kind =
                if matches!(network, Network::Own(_)) { "of a program's own" } else { "by layers" };
            return Err(Error::input(format!(
                "parallel.{key} = {lanes}, but a network {kind} is not divided"
            ))
            .hint("leave it out: parallel.pipeline and parallel.zero are for all networks"));
        }
    };
    if !heads.is_multiple_of(lanes) {
        // Any divisor, or of slices given apart those that the ranks divide.
        let step = if parallel.tensor_lanes.is_some() { tensor } else { 1 };
        let fits = |slices: &usize| heads.is_multiple_of(*slices) && slices.is_multiple_of(step);
        let legal: Vec<String> =
            (1..=heads).filter(fits).map(|slices| slices.to_string()).collect();
        let hint = match &legal[..] {
            [] => format!("parallel.tensor = {tensor} must divide {kind}"),
            legal => format!("parallel.{key} may be {}", legal.join(", ")),
        };
        return Err(Error::input(format!(
            "parallel.{key} = {lanes} does not divide {kind} = {heads}"
        ))
        .hint(hint));
    }
    // The last lane has fewer rows of what does not divide, but not none.
    let mut widths = vec![("model.vocabulary", network.outputs())];
    if let Network::Llama(llama) = network {
        widths.push(("model.hidden", llama.hidden));
    }
    for (name, width) in widths {
        if width.div_ceil(lanes) * (lanes - 1) >= width {
            return Err(Error::input(format!(
                "parallel.{key} = {lanes} leaves a slice without any of {name} = {width}"
            ))
            .hint("use fewer slices"));
        }
    }
    if sequence && !network.context().is_multiple_of(lanes) {
        let context = network.context();
        return Err(Error::input(format!(
            "parallel.sequence = true, but {lanes} slices do not divide model.context = {context}"
        ))
        .hint(format!(
            "a context of {} divides, or leave parallel.sequence out",
            context.next_multiple_of(lanes)
        )));
    }
    Ok(lanes)
}

/// Lanes of the global batch, of which each replica has an equal part and each of its shards one of
/// that.
///
/// # Errors
/// They cannot be divided so.
pub fn lanes(config: &Config, replicas: usize, mesh: &Mesh) -> Result<usize> {
    let ranks = replicas * mesh.shard;
    let lanes = config.parallel.lanes.unwrap_or(ranks);
    if lanes.is_multiple_of(ranks) {
        return Ok(lanes);
    }
    let up = lanes.next_multiple_of(ranks);
    let nearest = if lanes > ranks { format!("{} or {up}", up - ranks) } else { up.to_string() };
    let over = match replicas == mesh.replica {
        true => format!("{ranks} data-parallel ranks"),
        false => format!("{replicas} replicas of {} shards", mesh.shard),
    };
    Err(Error::input(format!("parallel.lanes = {lanes} does not divide over {over}"))
        .hint(format!("the nearest that does: {nearest}")))
}

/// Whether so many ranks can train a configuration, as far as its layout and its batch say.
///
/// # Errors
/// They cannot: the first key that does not fit, with its value.
pub fn check_ranks(config: &Config, ranks: usize) -> Result<()> {
    let mesh = mesh(config, ranks)?;
    let replicas = averaging(config, &mesh)?.map_or(mesh.replica, |averaging| averaging.replicas);
    let lanes = lanes(config, replicas, &mesh)?;
    batch(config, lanes, replicas, &mesh).map(drop)
}

/// Samples of a lane, and of a micro-batch, where `replicas` divide the lanes.
///
/// # Errors
/// The batch cannot be cut so.
pub fn batch(config: &Config, lanes: usize, replicas: usize, mesh: &Mesh) -> Result<(u64, u64)> {
    let global = config.batch.global;
    let lanes = lanes as u64;
    if !global.is_multiple_of(lanes) {
        let up = global.next_multiple_of(lanes);
        let nearest =
            if global > lanes { format!("{} or {up}", up - lanes) } else { up.to_string() };
        return Err(Error::input(format!(
            "batch.global = {global} does not divide into {lanes} lanes ({global} / {lanes} = {:.2} samples)",
            global as f64 / lanes as f64
        ))
        .hint(format!("the nearest batch that does: {nearest}")));
    }
    let lane_samples = global / lanes;
    let predictions =
        if config.model.kind == ModelKind::Layers { 1 } else { config.model.context as u64 };
    let of_pass = lanes / (replicas * mesh.shard) as u64 * lane_samples;
    let enough =
        |micro: u64| mesh.pipeline == 1 || of_pass / micro >= MICROS_A_STAGE * mesh.pipeline as u64;
    let fits = |micro: &u64| {
        lane_samples.is_multiple_of(*micro) && micro * predictions <= MICRO_TOKENS && enough(*micro)
    };
    let micro =
        config.batch.micro.unwrap_or_else(|| (1..=lane_samples).rev().find(fits).unwrap_or(1));
    if !lane_samples.is_multiple_of(micro) {
        let divisors = (1..=lane_samples).filter(|d| lane_samples.is_multiple_of(*d));
        let nearest = divisors.min_by_key(|d| d.abs_diff(micro)).unwrap_or(1);
        return Err(Error::input(format!(
            "batch.micro = {micro} does not divide the {lane_samples} samples of a lane \
             (batch.global = {global} / {lanes} lanes)"
        ))
        .hint(format!("the nearest that does: {nearest}")));
    }
    Ok((lane_samples, micro))
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
