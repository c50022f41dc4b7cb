//! Compares every layout with one rank, with threads as ranks.

use super::{ActivationOffload, Engine, Geometry, Model};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::layout::{TensorRange, TensorShards, UnitLayout};
use hpctrain_base::mesh::{Axis, Mesh};
use hpctrain_comm::{Algorithm, Comm, start_threads};
use hpctrain_cpu::Cpu;
use hpctrain_device::{Backend as _, MemoryKind};
use hpctrain_nn::gpt::Gpt;
use hpctrain_nn::loss::{Loss, Objective};
use hpctrain_nn::optim::UpdateRule;
use hpctrain_nn::{MicroBatch, loans};
use hpctrain_parallel::{
    ControlFlags, Groups, Hyper, LocalSgd, MemoryMoment, MemoryTimeline, OuterOptimizer,
    PipelineSchedule, ReduceAfter, ReplicaStep, RoundSummary, Sharded, ShardingPolicy, Stage,
    StepSchedule, Storage, TiedExport, TiedImport, Updates, VirtualRanks, Zero, offloaded_bytes,
    partition, steps_of_replicas,
};

const STEPS: u64 = 4;
const BATCH: usize = 24;
const TIME: usize = 8;

/// A piece of a tensor's values or state: its name, its first element, its values as bits.
type Tensor = (String, usize, Vec<u32>);

/// Loss and norm of every step, and parameters and optimizer state of every tensor, as bits.
#[derive(PartialEq)]
struct Outcome {
    curve: Vec<(u64, u64)>,
    tensors: Vec<Tensor>,
    /// Peak bytes of every rank, by kind of memory.
    peaks: Vec<[usize; 4]>,
}

#[derive(Clone, Copy)]
struct LayoutCase {
    pipeline: usize,
    order: PipelineSchedule,
    shard: usize,
    replica: usize,
    tensor: usize,
    virtual_tensor_ranks: usize,
    sequence: bool,
    zero: Zero,
    virtual_ranks: usize,
    micros_per_virtual_rank: usize,
    recompute: bool,
    ahead: usize,
    algorithm: Algorithm,
    /// Whether the optimizer is offloaded. The device is a CPU here, too.
    offload: bool,
    /// Local SGD.
    averaging: Option<LocalSgd>,
    storage: Storage,
    reduce_after: ReduceAfter,
    /// The virtual ranks of each data-parallel rank; empty if they are as equal as possible.
    counts: &'static [usize],
}

const ONE: LayoutCase = LayoutCase {
    pipeline: 1,
    order: PipelineSchedule::OneForwardOneBackward,
    shard: 1,
    replica: 1,
    tensor: 1,
    virtual_tensor_ranks: 1,
    sequence: false,
    zero: Zero::Zero,
    virtual_ranks: 8,
    micros_per_virtual_rank: 1,
    recompute: false,
    ahead: 1,
    algorithm: Algorithm::HalvingDoubling,
    offload: false,
    averaging: None,
    storage: Storage::Ranks,
    reduce_after: ReduceAfter::Step,
    counts: &[],
};

impl LayoutCase {
    /// Returns the virtual ranks of the global batch.
    fn virtual_ranks(&self) -> VirtualRanks {
        let replicas = self.averaging.map_or(self.replica, |averaging| averaging.replicas);
        let Self { shard: shards, reduce_after, virtual_ranks: total, .. } = *self;
        let counts = (!self.counts.is_empty()).then(|| self.counts.into());
        VirtualRanks { total, replicas, shards, reduce_after, counts }
    }

    /// Returns the layouts, and again those that can reduce gradients after each micro-batch.
    fn with_both_reductions(rows: Vec<Self>) -> Vec<Self> {
        let is_able = |row: &Self| row.zero != Zero::Zero && row.micros_per_virtual_rank == 1;
        let micro: Vec<Self> = rows
            .iter()
            .filter(|row| is_able(row))
            .map(|row| Self { reduce_after: ReduceAfter::MicroBatch, ..*row })
            .collect();
        [rows, micro].concat()
    }
}

const RULE: UpdateRule = UpdateRule::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8 };

/// The number of blocks, the last of which is tied to the first.
const BLOCKS: usize = 4;
const GPT: Gpt =
    Gpt { layers: 2, heads: 4, width: 16, context: TIME, vocabulary: 19, bias: true, dropout: 0.2 };

/// Returns the bytes of the padded units.
fn unit_bytes(virtual_ranks: usize) -> Vec<usize> {
    GPT.blocks::<Cpu>()
        .iter()
        .map(|block| UnitLayout::new(block.name(), block.tensors(), virtual_ranks))
        .map(|layout| layout.padded * size_of::<f32>())
        .collect()
}

/// Steps between SDC checks.
const SDC_CHECK_EVERY: u64 = 2;

/// Creates the engine of a rank.
fn engine(comm: &Comm<Cpu>, row: LayoutCase, backend: &Cpu) -> Engine<Cpu> {
    let mesh =
        Mesh { pipeline: row.pipeline, replica: row.replica, shard: row.shard, tensor: row.tensor };
    let groups = Groups::split(comm, &mesh, row.averaging.is_some()).unwrap();
    let tensor = mesh.coordinates(comm.rank())[Axis::Tensor as usize];
    let slices = TensorShards::of_rank(row.virtual_tensor_ranks, tensor, row.tensor, row.sequence);
    let blocks = GPT.tensor_parallel_blocks(&slices);
    let cut = partition(&[1.0; BLOCKS], row.pipeline, |_, _| true).unwrap();
    let stage = Stage::new(&cut, mesh.stage(comm.rank()), &loans(&blocks));
    let host = row.offload.then(|| Cpu::new(2));
    let averaging = row.averaging;
    let storage = row.storage;
    let updates = Updates {
        rule: RULE,
        groups: vec![],
        ema_decay: averaging.map(|_| 0.5),
        local_sgd: averaging,
        storage,
        sdc_check_every: SDC_CHECK_EVERY,
        host,
    };
    let on_host = row.offload && row.zero == Zero::Three && averaging.is_none();
    let reduce_after = row.reduce_after;
    let keep =
        ShardingPolicy { prefetch: row.ahead, on_host, reduce_after, ..row.zero.sharding_policy() };
    let stages = stage.count;
    let number = stage.index;
    let sharded = Sharded::new(
        backend.clone(),
        groups,
        keep,
        &row.virtual_ranks(),
        Some(updates),
        &blocks,
        &slices,
        stage,
        Some(3),
    )
    .unwrap();
    let dealt = row.virtual_ranks();
    let data_rank = sharded.data().rank();
    let own = dealt.for_shard(data_rank / row.shard, data_rank % row.shard).len();
    let predictions =
        (BATCH * TIME) as u64 / row.averaging.map_or(1, |averaging| averaging.replicas as u64);
    let geometry = Geometry {
        schedule: StepSchedule {
            stage: number,
            stages,
            order: row.order,
            ..StepSchedule::alone(dealt.most(), row.micros_per_virtual_rank)
        },
        idle_virtual_ranks: dealt.most() - own,
        rows: BATCH / row.virtual_ranks / row.micros_per_virtual_rank * TIME,
        predictions,
        recompute: row.recompute,
        seed: 3,
    };
    let objective =
        Objective::new(Loss::cross_entropy(), GPT.vocabulary, false).with_tensor_shards(&slices);
    // The device is a CPU here, too.
    let host_inputs =
        (row.recompute && row.offload).then(|| ActivationOffload::new(backend).unwrap());
    Engine {
        model: Model::new(backend.clone(), blocks, objective, sharded),
        geometry,
        activation_offload: host_inputs,
        observer: None,
    }
}

fn rank(comm: &Comm<Cpu>, row: LayoutCase) -> Outcome {
    let backend = Cpu::new(1);
    let mut engine = engine(comm, row, &backend);
    let sharded = &engine.model.sharded;
    let data_rank = sharded.data().rank();
    let stages = sharded.pipeline().size();
    let mut curve = Vec::new();
    let first_replica = engine.model.sharded.first_replica();
    let mut taken: Vec<Vec<ReplicaStep>> = vec![vec![]; engine.model.sharded.replicas_here()];
    let sequences = BATCH / row.virtual_ranks / row.micros_per_virtual_rank;
    for step in 0..STEPS {
        if step == 3 {
            // An evaluation uses the parameters that the update has gathered ahead.
            let micro = MicroBatch::from_text(&backend, &[1, 2, 3], &[2, 3, 4], 3, 0).unwrap();
            let loss = engine.model.measure(&micro, &[]).unwrap();
            let loss = loss.map_or(vec![], |sums| sums[0].to_bits().to_le_bytes().to_vec());
            let losses = engine.model.sharded.pipeline().gather_bytes(loss).wait().unwrap();
            curve.push((u64::from_le_bytes(*losses[stages - 1].first_chunk().unwrap()), 0));
        }
        for turn in 0..engine.model.sharded.replicas_here() {
            let replica =
                if row.averaging.is_some() { first_replica + turn } else { data_rank / row.shard };
            let samples = BATCH / row.virtual_ranks;
            let mut firsts = row
                .virtual_ranks()
                .for_shard(replica, data_rank % row.shard)
                .into_iter()
                .flat_map(|mine| (mine * samples..(mine + 1) * samples).step_by(sequences));
            let synced = engine
                .gradients(
                    step,
                    || micro_batch(&backend, step, firsts.next().unwrap(), sequences),
                    ControlFlags::empty,
                )
                .unwrap();
            // A skipped step changes nothing: for all replicas, or with local SGD for one.
            let skipped = step == 1 && (row.averaging.is_none() || replica == 1);
            engine.model.sharded.check_sdc(step).unwrap();
            match skipped {
                true => engine.model.sharded.skip().unwrap(),
                false => {
                    let hyper =
                        Hyper { lr: 1e-2, weight_decay: 0.1, step: step + 1, grad_scale: 0.7 };
                    engine.model.sharded.update(hyper).unwrap();
                }
            }
            engine.model.sharded.next_replica();
            match row.averaging {
                None => curve.push((synced.loss.to_bits(), synced.norm.to_bits())),
                Some(_) => {
                    taken[turn].push(ReplicaStep { loss: synced.loss, norm: synced.norm, skipped })
                }
            }
        }
        if let Some(LocalSgd { every, replicas, .. }) = row.averaging
            && ((step + 1).is_multiple_of(every) || step + 1 == STEPS)
        {
            engine.model.sharded.average().unwrap();
            let steps = taken[0].len();
            let replicas_here = taken.iter_mut().map(std::mem::take).collect();
            let flags = ControlFlags::empty();
            let compute = vec![0.0; steps];
            let mine = RoundSummary { flags, compute, first_replica, replicas: replicas_here };
            let summaries = engine.model.sharded.exchange_summaries(&mine).unwrap();
            let all = steps_of_replicas(&summaries, replicas, steps).unwrap();
            curve.extend(
                all.iter().flatten().map(|step| (step.loss.to_bits(), step.norm.to_bits())),
            );
            assert_eq!(
                all.iter().flatten().filter(|step| step.skipped).count(),
                usize::from(step + 1 - steps as u64 <= 1 && step >= 1)
            );
        }
    }
    engine.model.sharded.check_unchanged().unwrap();
    let tensors = tensors_of(&mut engine);
    let counted = [
        MemoryKind::Parameters,
        MemoryKind::Optimizer,
        MemoryKind::Gradients,
        MemoryKind::Offloaded,
    ];
    let peak = counted.map(|what| backend.memory_stats().peak(what));
    Outcome { curve, tensors, peaks: vec![peak] }
}

/// Returns the micro-batch of step `step` with `sequences` sequences from sequence `first` on.
fn micro_batch(
    backend: &Cpu,
    step: u64,
    first: usize,
    sequences: usize,
) -> Result<MicroBatch<Cpu>> {
    let id = |i: usize| ((i as u64 * 2_654_435_761 + step * 97) % 19) as u32;
    let from = first * TIME;
    let tokens: Vec<u32> = (from..from + sequences * TIME).map(id).collect();
    let targets: Vec<u32> = (from..from + sequences * TIME).map(|i| id(i + 1)).collect();
    MicroBatch::from_text(backend, &tokens, &targets, TIME, first as u64)
}

/// Returns the parameters and state that a rank saves, as bits.
fn tensors_of(engine: &mut Engine<Cpu>) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    for unit in engine.model.sharded.owned().unwrap() {
        for (part, values) in std::iter::once(unit.params).chain(unit.state).enumerate() {
            let mut view = vec![0.0; unit.range.len()];
            values.read(&mut view).unwrap();
            for piece in unit.layout.pieces(unit.range.clone()) {
                for (start, run) in piece.runs() {
                    let bits = view[run].iter().map(|x| x.to_bits()).collect();
                    tensors.push((format!("{}/{part}", piece.tensor.name), start, bits));
                }
            }
        }
    }
    tensors
}

/// Computes the gradients of a step with one micro-batch for every virtual rank of a rank.
fn take(engine: &mut Engine<Cpu>, backend: &Cpu, step: u64) {
    let rows = engine.geometry.rows;
    let tokens: Vec<u32> = (0..rows as u32).map(|i| (i * 7 + step as u32) % 19).collect();
    engine
        .gradients(
            step,
            || MicroBatch::from_text(backend, &tokens, &tokens, TIME, 0),
            ControlFlags::empty,
        )
        .unwrap();
}

/// The number of elements of parameters and state that a rank has read, or its error, and all
/// tensors after a step.
type Restored = (Result<usize>, Vec<Tensor>);

/// Restores an engine from values that depend on their positions, and takes a step. Reads fail
/// on rank `broken`.
fn restored(comm: &Comm<Cpu>, row: LayoutCase, broken: usize) -> Restored {
    let backend = Cpu::new(1);
    let mut engine = engine(comm, row, &backend);
    let sharded = &mut engine.model.sharded;
    let tensors =
        sharded.layouts().iter().flat_map(|layout| layout.tensors.clone()).collect::<Vec<_>>();
    let asked = sharded.restored();
    let mut read = 0;
    let mut ranges = vec![];
    let done = sharded.restore(|name, part, columns, range, out| {
        if comm.rank() == broken {
            return Err(Error::io("read", std::path::Path::new("x"), "broken"));
        }
        let tensor = tensors.iter().find(|tensor| tensor.name == name).unwrap();
        let width = tensor.shape.last().copied().unwrap_or(1);
        let all = columns.cloned().unwrap_or(0..width);
        for (element, x) in range.clone().zip(&mut *out) {
            let whole = element / all.len() * width + all.start + element % all.len();
            // Second moments are never negative.
            *x = ((whole * 7 + part * 5 + name.len()) % 23) as f32 * 0.01;
        }
        read += out.len();
        ranges.push(TensorRange { tensor: name.into(), columns: columns.cloned(), range });
        Ok(())
    });
    assert!(ranges.iter().all(|range| asked.contains(range)), "{ranges:?} of {asked:?}");
    if broken < comm.size() {
        return (done.map(|()| read), vec![]);
    }
    take(&mut engine, &backend, 0);
    let hyper = Hyper { lr: 1e-2, weight_decay: 0.1, step: 1, grad_scale: 0.7 };
    engine.model.sharded.update(hyper).unwrap();
    (done.map(|()| read), tensors_of(&mut engine))
}

#[test]
fn ranks_restore_one_copy_together_in_every_layout() {
    let rows = [
        LayoutCase { replica: 4, ..ONE },
        LayoutCase { shard: 4, zero: Zero::One, ..ONE },
        LayoutCase { shard: 2, replica: 2, zero: Zero::Two, ..ONE },
        LayoutCase { shard: 2, replica: 4, zero: Zero::Three, ..ONE },
        LayoutCase { shard: 2, zero: Zero::Three, offload: true, ..ONE },
        LayoutCase { shard: 2, replica: 2, storage: Storage::Central, ..ONE },
        LayoutCase { pipeline: 2, shard: 2, replica: 2, zero: Zero::Three, ..ONE },
        LayoutCase { pipeline: 2, replica: 2, ..ONE },
        LayoutCase { tensor: 2, virtual_tensor_ranks: 2, replica: 2, ..ONE },
    ];
    for row in rows {
        let one = LayoutCase { virtual_tensor_ranks: row.virtual_tensor_ranks, ..ONE };
        let merged = |all: Vec<Restored>| {
            let read: usize = all.iter().map(|(read, _)| *read.as_ref().unwrap()).sum();
            (read, joined(all.into_iter().flat_map(|(_, tensors)| tensors).collect()))
        };
        let (whole, want) = merged(restored_by_ranks(one, usize::MAX));
        let (read, got) = merged(restored_by_ranks(row, usize::MAX));
        let name = format!("{} x {} x {} x {}", row.pipeline, row.shard, row.replica, row.tensor);
        assert!(got == want, "{name}: other values");
        // Tensor-parallel ranks read replicated tensors several times, and stages the unit that
        // they are tied to.
        if row.pipeline == 1 && row.tensor == 1 {
            assert_eq!(read, whole, "{name}");
        }
        // If one rank cannot read, the others do not wait for it.
        let failed = restored_by_ranks(row, 1);
        assert!(
            failed.iter().enumerate().all(|(rank, (read, _))| read.is_err() == (rank == 1)),
            "{name}: {failed:?}"
        );
    }
}

/// Restores a layout with threads as ranks. Reads fail on rank `broken`.
fn restored_by_ranks(row: LayoutCase, broken: usize) -> Vec<Restored> {
    let ranks = row.pipeline * row.shard * row.replica * row.tensor;
    let comms = start_threads::<Cpu>(ranks, row.algorithm).unwrap();
    std::thread::scope(|scope| {
        let ranks = comms.into_iter().map(|comm| scope.spawn(move || restored(&comm, row, broken)));
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Changes a bit in the memory of one rank between two steps.
#[test]
fn sdc_checks_find_a_bit_that_changes_in_memory() {
    for (row, index) in [
        (LayoutCase { replica: 2, ..ONE }, 0),
        (LayoutCase { shard: 2, zero: Zero::One, ..ONE }, 3),
    ] {
        let comms = start_threads::<Cpu>(2, Algorithm::HalvingDoubling).unwrap();
        let found: Vec<Result<()>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = comms
                .into_iter()
                .map(|comm| scope.spawn(move || check_changed_bit(&comm, row, index)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let error = found[1].clone().unwrap_err();
        let unit = ["embedding", "h.0", "h.1", "head"][index];
        let expected = format!(
            "step 2: {unit} on rank 1 on localhost: parameters or optimizer state have changed in memory"
        );
        assert!(error.message().starts_with(&expected), "{error}");
    }
}

/// Returns the result of the SDC check of step 2, after rank 1 has flipped a bit of its part of
/// unit `index` in step 0.
fn check_changed_bit(comm: &Comm<Cpu>, row: LayoutCase, index: usize) -> Result<()> {
    let backend = Cpu::new(1);
    let mut engine = engine(comm, row, &backend);
    for step in 0..3 {
        take(&mut engine, &backend, step);
        let checked = engine.model.sharded.check_sdc(step);
        if step == 2 {
            return checked;
        }
        checked.unwrap();
        let hyper = Hyper { lr: 1e-2, weight_decay: 0.1, step: step + 1, grad_scale: 0.7 };
        engine.model.sharded.update(hyper).unwrap();
        if step > 0 {
            continue;
        }
        engine.model.sharded.check_unchanged().unwrap();
        if comm.rank() == 1 {
            // Flip a bit of the first element that it owns.
            let owned = &engine.model.sharded.owned().unwrap()[index];
            let unit = owned.range.start;
            let mut value = vec![0.0; owned.range.len()];
            owned.params.read(&mut value).unwrap();
            let flipped = f32::from_bits(value[0].to_bits() ^ 1 << 7);
            engine.model.sharded.set(index, unit..unit + 1, &[flipped]).unwrap();
            let error = engine.model.sharded.check_unchanged().unwrap_err();
            assert_eq!(error.kind(), Kind::Corrupted);
        }
    }
    Ok(())
}

/// One rank of three computes a different update.
#[test]
fn sdc_checks_find_arithmetic_that_differs() {
    let row = LayoutCase { replica: 3, virtual_ranks: 3, ..ONE };
    let comms = start_threads::<Cpu>(3, Algorithm::HalvingDoubling).unwrap();
    let found: Vec<(u64, Error, Option<u64>)> = std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || find_difference(&comm, row)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (step, error, since) in found {
        // The difference is found at the next step with a check.
        assert_eq!((step, since), (4, Some(2)));
        assert_eq!(
            error.message(),
            "step 4: parameters or optimizer state of embedding on rank 1 on localhost differ from those of the 2 other replicas"
        );
    }
}

/// Returns the step at which an SDC check fails because rank 1 has taken step 2 with another
/// learning rate, the error, and the step since which checkpoints are suspect.
fn find_difference(comm: &Comm<Cpu>, row: LayoutCase) -> (u64, Error, Option<u64>) {
    let backend = Cpu::new(1);
    let mut engine = engine(comm, row, &backend);
    for step in 0.. {
        take(&mut engine, &backend, step);
        if let Err(e) = engine.model.sharded.check_sdc(step) {
            return (step, e, engine.model.sharded.suspect_since());
        }
        let lr = if (comm.rank(), step) == (1, 2) { 1.000_001e-2 } else { 1e-2 };
        engine
            .model
            .sharded
            .update(Hyper { lr, weight_decay: 0.1, step: step + 1, grad_scale: 0.7 })
            .unwrap();
    }
    unreachable!("steps have no end");
}

/// Runs a layout with threads as ranks, and joins the tensors of all ranks.
fn run(row: LayoutCase) -> Outcome {
    let comms =
        start_threads(row.pipeline * row.shard * row.replica * row.tensor, row.algorithm).unwrap();
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            comms.into_iter().map(|comm| scope.spawn(move || rank(&comm, row))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let tensors = outcomes.iter().flat_map(|outcome| outcome.tensors.clone()).collect();
    assert!(outcomes.iter().all(|outcome| outcome.curve == outcomes[0].curve), "ranks disagree");
    Outcome {
        curve: outcomes[0].curve.clone(),
        tensors: joined(tensors),
        peaks: outcomes.iter().map(|outcome| outcome.peaks[0]).collect(),
    }
}

/// Joins the pieces of all ranks to whole tensors.
fn joined(mut pieces: Vec<Tensor>) -> Vec<Tensor> {
    pieces.sort();
    let mut whole: Vec<Tensor> = Vec::new();
    for (name, start, bits) in pieces {
        match whole.last_mut() {
            Some((last, _, have)) if *last == name => {
                assert_eq!(have.len(), start, "{name}: pieces overlap or leave a hole");
                have.extend(bits);
            }
            _ => whole.push((name, start, bits)),
        }
    }
    whole
}

#[test]
fn every_layout_gives_the_bits_of_one_rank() {
    let stages = [Zero::Zero, Zero::One, Zero::Two, Zero::Three];
    let want = run(ONE);
    assert!(want.tensors.iter().any(|(name, _, _)| name == "wte.weight/2"));
    let mut rows = Vec::new();
    for ranks in [1, 2, 4, 8] {
        rows.push(LayoutCase { replica: ranks, ..ONE });
        rows.extend(stages[1..].iter().map(|&zero| LayoutCase { shard: ranks, zero, ..ONE }));
    }
    for (shard, replica) in [(2, 2), (4, 2), (2, 4)] {
        rows.extend(stages[1..].iter().map(|&zero| LayoutCase { shard, replica, zero, ..ONE }));
    }
    rows.push(LayoutCase { replica: 2, recompute: true, ..ONE });
    rows.push(LayoutCase { shard: 2, zero: Zero::Three, recompute: true, ..ONE });
    for ahead in [0, 2, 8] {
        let three = LayoutCase { zero: Zero::Three, ahead, ..ONE };
        rows.push(LayoutCase { shard: 4, ..three });
        rows.push(LayoutCase { shard: 2, recompute: true, ..three });
        rows.push(LayoutCase { shard: 2, replica: 2, ..three });
        rows.push(LayoutCase { shard: 4, replica: 2, recompute: true, ..three });
    }
    let offloaded = rows.iter().map(|row| LayoutCase { offload: true, ..*row });
    let rows = rows.clone().into_iter().chain(offloaded).collect();
    for row in LayoutCase::with_both_reductions(rows) {
        let got = run(row);
        let LayoutCase { shard, replica, zero, ahead, offload, reduce_after, .. } = row;
        let name = format!(
            "shard {shard} replica {replica} {zero:?} ahead {ahead} offload {offload}, reduced after {reduce_after:?}"
        );
        assert_eq!(got.curve, want.curve, "{name}");
        assert!(got.tensors == want.tensors, "{name}: other parameters");
    }
}

#[test]
fn every_pipeline_gives_the_bits_of_one_rank() {
    let stages = [Zero::Zero, Zero::One, Zero::Two, Zero::Three];
    for (virtual_ranks, micros_per_virtual_rank) in [(8, 1), (4, 3), (2, 2), (2, 6)] {
        let one = LayoutCase { virtual_ranks, micros_per_virtual_rank, ..ONE };
        let want = run(one);
        for pipeline in [2, 3, 4] {
            let mut rows = vec![
                LayoutCase { pipeline, ..one },
                LayoutCase { pipeline, recompute: true, ..one },
            ];
            rows.push(LayoutCase { pipeline, replica: 2, ..one });
            rows.extend(stages[1..].iter().map(|&zero| LayoutCase {
                pipeline,
                shard: 2,
                zero,
                ..one
            }));
            rows.push(LayoutCase {
                pipeline,
                shard: 2,
                zero: Zero::Three,
                ahead: 0,
                recompute: true,
                ..one
            });
            if virtual_ranks == 4 {
                rows.push(LayoutCase { pipeline, shard: 2, replica: 2, zero: Zero::Two, ..one });
                rows.extend([Zero::One, Zero::Three].map(|zero| LayoutCase {
                    offload: true,
                    pipeline,
                    shard: 2,
                    zero,
                    ..one
                }));
            }
            let deferred =
                rows.iter().map(|row| LayoutCase { order: PipelineSchedule::ZeroBubble, ..*row });
            let rows = rows.clone().into_iter().chain(deferred).collect();
            for row in LayoutCase::with_both_reductions(rows) {
                let got = run(row);
                let LayoutCase {
                    shard,
                    replica,
                    zero,
                    recompute,
                    offload,
                    order,
                    reduce_after,
                    ..
                } = row;
                let name = format!(
                    "pipeline {pipeline} {order} shard {shard} replica {replica} {zero:?} recompute {recompute} offload \
                     {offload}, {virtual_ranks} virtual ranks of {micros_per_virtual_rank}, reduced after {reduce_after:?}"
                );
                assert_eq!(got.curve, want.curve, "{name}");
                assert!(got.tensors == want.tensors, "{name}: other parameters");
            }
        }
    }
}

/// Ranks with unequal numbers of virtual ranks, and groups of them that are not subtrees, add in the
/// tree of one rank.
#[test]
fn any_number_of_ranks_gives_the_bits_of_one_rank() {
    let stages = [Zero::Zero, Zero::One, Zero::Two, Zero::Three];
    for (virtual_ranks, micros_per_virtual_rank) in [(8, 1), (12, 2), (24, 1), (6, 4)] {
        let one = LayoutCase { virtual_ranks, micros_per_virtual_rank, ..ONE };
        let want = run(one);
        let one = LayoutCase { reduce_after: ReduceAfter::StepInBlocks, ..one };
        let mut rows = Vec::new();
        for ranks in [2, 3, 5, 6, 7].into_iter().filter(|ranks| *ranks <= virtual_ranks) {
            rows.push(LayoutCase { replica: ranks, ..one });
            rows.extend(stages[1..].iter().map(|&zero| LayoutCase { shard: ranks, zero, ..one }));
        }
        let sharded = LayoutCase { shard: 3, zero: Zero::Three, ..one };
        rows.extend(stages[1..].iter().map(|&zero| LayoutCase { replica: 2, zero, ..sharded }));
        rows.push(LayoutCase { shard: 2, replica: 3, ..sharded });
        rows.push(LayoutCase { recompute: true, ahead: 0, ..sharded });
        rows.push(LayoutCase { ahead: 2, ..sharded });
        rows.extend([Zero::One, Zero::Three].map(|zero| LayoutCase {
            offload: true,
            zero,
            ..sharded
        }));
        for order in [
            PipelineSchedule::OneForwardOneBackward,
            PipelineSchedule::ZeroBubble,
            PipelineSchedule::GPipe,
        ] {
            rows.push(LayoutCase { pipeline: 2, order, ..sharded });
            rows.push(LayoutCase { pipeline: 2, replica: 3, order, ..one });
        }
        for row in rows {
            let got = run(row);
            let LayoutCase { pipeline, shard, replica, zero, ahead, offload, order, .. } = row;
            let name = format!(
                "{virtual_ranks} virtual ranks, pipeline {pipeline} {order} shard {shard} replica {replica} {zero:?} ahead {ahead} offload {offload}"
            );
            assert_eq!(got.curve, want.curve, "{name}");
            assert!(got.tensors == want.tensors, "{name}: other parameters");
        }
    }
    // Shares of the work.
    let one = LayoutCase { virtual_ranks: 12, ..ONE };
    let want = run(one);
    for counts in [&[7, 1, 4][..], &[11, 1], &[1, 2, 3, 6]] {
        let one = LayoutCase { counts, reduce_after: ReduceAfter::StepInBlocks, ..one };
        let ranks = counts.len();
        let rows = [
            LayoutCase { replica: ranks, ..one },
            LayoutCase { shard: ranks, zero: Zero::One, ..one },
            LayoutCase { shard: ranks, zero: Zero::Three, ..one },
            LayoutCase { shard: ranks, zero: Zero::Three, pipeline: 2, ..one },
        ];
        for row in rows.into_iter().filter(|row| ranks * row.pipeline <= 8) {
            let got = run(row);
            let name =
                format!("{counts:?} virtual ranks, {:?}, pipeline {}", row.zero, row.pipeline);
            assert_eq!(got.curve, want.curve, "{name}");
            assert!(got.tensors == want.tensors, "{name}: other parameters");
        }
    }
    let one = LayoutCase { virtual_tensor_ranks: 2, ..ONE };
    let want = run(one);
    for zero in stages {
        let (shard, replica) = if zero == Zero::Zero { (1, 3) } else { (3, 1) };
        let reduce_after = ReduceAfter::StepInBlocks;
        let got = run(LayoutCase { tensor: 2, shard, replica, zero, reduce_after, ..one });
        assert_eq!(got.curve, want.curve, "tensor parallelism, {zero:?}");
        assert!(got.tensors == want.tensors, "tensor parallelism, {zero:?}: other parameters");
    }
}

#[test]
fn every_tensor_parallel_layout_gives_the_bits_of_one_rank() {
    let stages = [Zero::Zero, Zero::One, Zero::Two, Zero::Three];
    for (virtual_tensor_ranks, virtual_ranks, micros_per_virtual_rank) in
        [(2, 4, 1), (2, 2, 3), (4, 2, 2)]
    {
        let one =
            LayoutCase { virtual_tensor_ranks, virtual_ranks, micros_per_virtual_rank, ..ONE };
        let want = run(one);
        let mut rows = vec![LayoutCase { recompute: true, ..one }];
        for tensor in [2, 4].into_iter().filter(|tensor| *tensor <= virtual_tensor_ranks) {
            let cut = LayoutCase { tensor, ..one };
            rows.extend([
                cut,
                LayoutCase { recompute: true, ..cut },
                LayoutCase { replica: 2, ..cut },
            ]);
            rows.extend([2, 3].map(|pipeline| LayoutCase { pipeline, ..cut }));
            rows.push(LayoutCase { pipeline: 2, order: PipelineSchedule::ZeroBubble, ..cut });
            rows.extend(stages[1..].iter().map(|&zero| LayoutCase { shard: 2, zero, ..cut }));
            rows.push(LayoutCase {
                shard: 2,
                zero: Zero::Three,
                recompute: true,
                offload: true,
                ..cut
            });
            rows.push(LayoutCase { pipeline: 2, shard: 2, zero: Zero::Two, ..cut });
        }
        rows.push(LayoutCase { pipeline: 2, order: PipelineSchedule::ZeroBubble, ..one });
        let with_sequence = rows
            .iter()
            .filter(|row| row.tensor > 1)
            .map(|row| LayoutCase { sequence: true, ..*row });
        let rows = rows.clone().into_iter().chain(with_sequence).collect();
        for row in LayoutCase::with_both_reductions(rows) {
            let got = run(row);
            let LayoutCase {
                pipeline,
                order,
                shard,
                replica,
                tensor,
                sequence,
                zero,
                recompute,
                offload,
                reduce_after,
                ..
            } = row;
            let name = format!(
                "{virtual_tensor_ranks} virtual tensor ranks: tensor {tensor} sequence {sequence} pipeline {pipeline} {order} shard {shard} \
                 replica {replica} {zero:?} recompute {recompute} offload {offload}, {virtual_ranks} virtual ranks of {micros_per_virtual_rank}, \
                 reduced after {reduce_after:?}"
            );
            assert_eq!(got.curve, want.curve, "{name}");
            assert!(got.tensors == want.tensors, "{name}: other parameters");
        }
    }
}

#[test]
fn local_sgd_gives_the_same_bits_on_any_ranks() {
    let momentum = |momentum| Some(OuterOptimizer { lr: 0.7, momentum });
    for (outer, every) in [(None, 1), (None, 3), (momentum(0.0), 3), (momentum(0.9), 3)] {
        let one = LayoutCase { averaging: Some(LocalSgd { every, replicas: 4, outer }), ..ONE };
        let want = run(one);
        assert!(want.tensors != run(ONE).tensors);
        let mut rows = vec![
            LayoutCase { recompute: true, ..one },
            LayoutCase { offload: true, replica: 2, ..one },
        ];
        rows.extend([2, 4].map(|replica| LayoutCase { replica, ..one }));
        for zero in [Zero::One, Zero::Two, Zero::Three] {
            rows.extend([1, 2, 4].map(|replica| LayoutCase { shard: 2, zero, replica, ..one }));
        }
        rows.push(LayoutCase {
            shard: 2,
            zero: Zero::Three,
            replica: 2,
            offload: true,
            ahead: 2,
            ..one
        });
        for pipeline in [2, 3] {
            rows.extend([1, 2].map(|replica| LayoutCase { pipeline, replica, ..one }));
            rows.push(LayoutCase { pipeline, shard: 2, zero: Zero::Three, replica: 2, ..one });
        }
        for row in LayoutCase::with_both_reductions(rows) {
            let got = run(row);
            let LayoutCase { pipeline, shard, replica, zero, offload, reduce_after, .. } = row;
            let name = format!(
                "every {every} {outer:?}: pipeline {pipeline} shard {shard} replica {replica} {zero:?} offload {offload}, \
                 reduced after {reduce_after:?}"
            );
            assert_eq!(got.curve, want.curve, "{name}");
            assert!(got.tensors == want.tensors, "{name}: other parameters");
        }
    }
    let averaging = Some(LocalSgd { every: 3, replicas: 2, outer: momentum(0.5) });
    let one = LayoutCase { averaging, virtual_tensor_ranks: 2, ..ONE };
    let want = run(one);
    for row in [
        LayoutCase { tensor: 2, ..one },
        LayoutCase { tensor: 2, replica: 2, sequence: true, ..one },
    ] {
        let got = run(row);
        assert!(
            got.curve == want.curve && got.tensors == want.tensors,
            "tensor parallel, {} replicas",
            row.replica
        );
    }
}

#[test]
fn central_storage_gives_the_bits_of_one_rank() {
    let one = LayoutCase { virtual_tensor_ranks: 2, ..ONE };
    let mut pairs = vec![];
    for (reference, cuts) in [(ONE, &[1, 2, 3][..]), (one, &[1, 2])] {
        let want = run(LayoutCase { storage: Storage::Ranks, ..reference });
        for &pipeline in cuts {
            let central = LayoutCase {
                storage: Storage::Central,
                pipeline,
                tensor: reference.virtual_tensor_ranks,
                ..reference
            };
            for (owners, replica) in [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (1, 8), (4, 2)] {
                let row = LayoutCase { shard: owners, replica, ..central };
                let ranks = pipeline * owners * replica * row.tensor;
                if ranks > 8 {
                    continue;
                }
                // The other ranks hold parameters only for a use.
                let freed = LayoutCase { zero: Zero::Three, ..row };
                let freed = [
                    freed,
                    LayoutCase { offload: true, ..freed },
                    LayoutCase { ahead: 0, ..freed },
                ];
                for row in [
                    row,
                    LayoutCase { offload: true, ..row },
                    LayoutCase { algorithm: Algorithm::ReduceToOne, ..row },
                ]
                .into_iter()
                .chain(freed.into_iter().filter(|_| pipeline == 1))
                {
                    let (got, LayoutCase { algorithm, offload, tensor, zero, .. }) =
                        (run(row), row);
                    let name = format!(
                        "{owners} owners of {replica} replicas, pipeline {pipeline}, tensor {tensor}, {zero:?}, {algorithm}, offload {offload}"
                    );
                    assert_eq!(got.curve, want.curve, "{name}");
                    assert!(got.tensors == want.tensors, "{name}: other parameters");
                    pairs.push((row, got.peaks));
                }
            }
        }
    }
    // Ranks have unequal numbers of virtual ranks, and owners may have none.
    for (micros_per_virtual_rank, virtual_ranks, owners, counts) in [
        (1, 8, 1, &[0, 8][..]),
        (1, 8, 1, &[0, 5, 3]),
        (1, 8, 1, &[3, 4, 1]),
        (1, 8, 2, &[0, 1, 6, 1]),
        (1, 8, 2, &[0, 0, 3, 5]),
        (2, 4, 1, &[0, 3, 1]),
    ] {
        let one = LayoutCase { micros_per_virtual_rank, virtual_ranks, ..ONE };
        let want = run(one);
        let row = LayoutCase {
            storage: Storage::Central,
            reduce_after: ReduceAfter::StepInBlocks,
            counts,
            shard: owners,
            replica: counts.len() / owners,
            ..one
        };
        let freed = LayoutCase { zero: Zero::Three, ..row };
        let staged = LayoutCase { pipeline: 2, ..row };
        for row in [
            row,
            freed,
            LayoutCase { offload: true, ..freed },
            staged,
            LayoutCase { order: PipelineSchedule::ZeroBubble, ..staged },
        ] {
            let got = run(row);
            let LayoutCase { zero, pipeline, offload, .. } = row;
            let name = format!(
                "{owners} owners, {counts:?} virtual ranks, {zero:?}, pipeline {pipeline}, offload {offload}"
            );
            assert_eq!(got.curve, want.curve, "{name}");
            assert!(got.tensors == want.tensors, "{name}: other parameters");
        }
    }
    // Owners of a whole network keep AdamW's two moments and nothing else.
    let padded: usize = unit_bytes(ONE.virtual_ranks).iter().sum();
    let of_whole = pairs.iter().filter(|(row, _)| row.pipeline == 1 && row.tensor == 1);
    for (LayoutCase { shard, offload, zero, .. }, peaks) in of_whole {
        for (rank, [parameters, optimizer, _, offloaded]) in peaks.iter().enumerate() {
            let owned = if rank < *shard { padded / shard } else { 0 };
            if *zero == Zero::Three {
                // Those of the current block and the next one.
                assert!(rank < *shard || *parameters < padded, "rank {rank}: {parameters}");
                assert!(*optimizer == 0 || rank < *shard, "rank {rank}: {optimizer}");
                continue;
            }
            let kept = if *offload {
                (0, offloaded_bytes(2, owned / size_of::<f32>()))
            } else {
                (2 * owned, 0)
            };
            assert_eq!(
                (*optimizer, *offloaded),
                kept,
                "rank {rank} of {} with {shard} owners",
                peaks.len()
            );
            assert_eq!(*parameters, padded);
        }
    }
}

#[test]
fn groups_of_a_power_of_two_agree_on_odd_ranks() {
    let virtual_ranks = LayoutCase { virtual_ranks: 12, ..ONE };
    let want = run(virtual_ranks);
    for (ranks, zero) in [(3, Zero::Zero), (3, Zero::Two), (6, Zero::Three), (12, Zero::One)] {
        let (shard, replica) = if zero == Zero::Zero { (1, ranks) } else { (ranks, 1) };
        let got = run(LayoutCase { shard, replica, zero, ..virtual_ranks });
        assert!(got.curve == want.curve && got.tensors == want.tensors, "{ranks} ranks {zero:?}");
    }
}

#[test]
fn other_orders_of_addition_are_close() {
    let loss = |row| f64::from_bits(run(row).curve[STEPS as usize - 1].0);
    let one_rank = loss(ONE);
    let rows = [
        LayoutCase { virtual_ranks: 1, ..ONE },
        LayoutCase { virtual_ranks: 3, replica: 3, ..ONE },
        LayoutCase { virtual_ranks: 1, micros_per_virtual_rank: 4, ..ONE },
        LayoutCase { replica: 4, algorithm: Algorithm::Ring, ..ONE },
        LayoutCase { shard: 4, zero: Zero::Three, algorithm: Algorithm::Ring, ..ONE },
    ];
    for row in rows {
        let got = loss(row);
        // A few updates of AdamW amplify rounding in tiny gradients to visible but small
        // differences.
        assert!(
            (got / one_rank - 1.0).abs() < 1e-5,
            "{got}, one rank with 8 virtual ranks {one_rank}"
        );
    }
}

#[test]
fn sharding_saves_the_expected_memory() {
    let padded: usize = unit_bytes(ONE.virtual_ranks).iter().sum();
    for (row, parameters, optimizer) in [
        (LayoutCase { replica: 4, ..ONE }, Some(padded), 2 * padded),
        (LayoutCase { shard: 4, zero: Zero::One, ..ONE }, Some(padded), padded / 2),
        // With four blocks, prefetching would gather most of the network.
        (LayoutCase { shard: 4, zero: Zero::Three, ahead: 0, ..ONE }, None, padded / 2),
    ] {
        let [have_parameters, have_optimizer, _, offloaded] = run(row).peaks[0];
        assert_eq!(offloaded, 0);
        let [bare_parameters, bare_optimizer, _, offloaded] =
            run(LayoutCase { offload: true, ..row }).peaks[0];
        // Everything except the full parameters is on the host, with two moments per owned element.
        assert_eq!(
            (bare_optimizer, offloaded),
            (0, offloaded_bytes(RULE.state().len(), optimizer / 8))
        );
        let master_weights = if row.zero == Zero::Three { optimizer / 2 } else { 0 };
        assert_eq!(bare_parameters, have_parameters - master_weights);
        assert_eq!(have_optimizer, optimizer);
        match parameters {
            Some(parameters) => assert_eq!(have_parameters, parameters),
            None => assert!(have_parameters < padded, "{have_parameters} of {padded} bytes"),
        }
    }
}

/// Returns a pipeline stage whose tied tensors have the lengths, in bytes, of their buffers.
fn stage_in_bytes(pipeline: usize, index: usize) -> Stage {
    let stage = Stage::new(
        &partition(&[1.0; BLOCKS], pipeline, |_, _| true).unwrap(),
        index,
        &loans(&GPT.blocks::<Cpu>()),
    );
    let bytes = |len: usize| (len * size_of::<f32>()).next_multiple_of(64);
    let imported = |loan: TiedImport| TiedImport { len: bytes(loan.len), ..loan };
    Stage {
        tied_imports: stage.tied_imports.iter().map(|one| one.map(imported)).collect(),
        tied_exports: stage
            .tied_exports
            .iter()
            .map(|export| TiedExport { len: bytes(export.len), ..*export })
            .collect(),
        ..stage
    }
}

/// Returns the most bytes alive at any moment of a step in stage `index`, with units of these
/// bytes.
fn most(row: LayoutCase, index: usize, units: &[usize], what: fn(&MemoryMoment) -> usize) -> usize {
    let reduce_after = row.reduce_after;
    let keep = ShardingPolicy { prefetch: row.ahead, reduce_after, ..row.zero.sharding_policy() }
        .for_mesh(row.shard, row.replica, row.storage);
    let stage = stage_in_bytes(row.pipeline, index);
    let ranks = row.virtual_ranks();
    let alone = StepSchedule::alone(ranks.most(), row.micros_per_virtual_rank);
    let schedule = StepSchedule { stage: index, stages: row.pipeline, order: row.order, ..alone };
    let sizes: Vec<usize> = stage.slots().map(|unit| units[unit]).collect();
    let timeline =
        MemoryTimeline { stage: &stage, sizes: &sizes, ranks: &ranks, policy: keep, schedule };
    timeline.step().iter().map(what).max().unwrap()
}

/// Checks the largest peaks of parameters and gradients of the ranks of each stage: they must
/// be from `least` to `most_times` times those of the timeline.
fn assert_peaks(row: LayoutCase, name: &str, least: f64, most_times: f64) {
    let units = unit_bytes(row.virtual_ranks);
    let outcome = run(row);
    for index in 0..row.pipeline {
        let ranks = row.shard * row.replica;
        let of_stage = &outcome.peaks[index * ranks..(index + 1) * ranks];
        // Other ranks may have the most parameters than those with the most virtual ranks.
        let [parameters, gradients] =
            [0, 2].map(|kind| of_stage.iter().map(|peaks| peaks[kind]).max().unwrap());
        let stage = stage_in_bytes(row.pipeline, index);
        let slots = stage.slots().map(|unit| units[unit]).sum::<usize>();
        let owned = row.virtual_ranks().largest_shard(slots);
        let master_weights = if row.zero == Zero::Three { owned } else { 0 };
        let expected = [
            master_weights + most(row, index, &units, |moment| moment.params),
            most(row, index, &units, |moment| moment.grads),
        ];
        for (what, have, expected) in
            [("parameters", parameters, expected[0]), ("gradients", gradients, expected[1])]
        {
            let range =
                (expected as f64 * least) as usize..=(expected as f64 * most_times) as usize;
            assert!(
                range.contains(&have),
                "{what} in stage {index}, {name}: {have} and not {expected} bytes"
            );
        }
    }
}

#[test]
fn the_number_of_full_buffers_is_as_estimated() {
    const RANKS: usize = 4;
    for zero in [Zero::One, Zero::Two, Zero::Three] {
        for (virtual_ranks, micros_per_virtual_rank) in
            [(1, 1), (1, 2), (1, 6), (2, 1), (4, 1), (2, 3), (3, 2)]
        {
            for (ahead, recompute) in [(0, false), (1, true), (1, false), (2, true), (8, false)] {
                let row = LayoutCase {
                    zero,
                    virtual_ranks: RANKS * virtual_ranks,
                    micros_per_virtual_rank,
                    shard: RANKS,
                    ahead,
                    recompute,
                    ..ONE
                };
                // A reused buffer may be a quarter larger than requested, and counts with its real
                // size. If buffers are reused only by the same unit and its tied replica, few are
                // larger.
                let exact = (zero, virtual_ranks, micros_per_virtual_rank) == (Zero::Three, 1, 2);
                for row in LayoutCase::with_both_reductions(vec![row]) {
                    let name = format!(
                        "{zero:?}, {virtual_ranks} virtual ranks of {micros_per_virtual_rank}, {ahead} ahead, reduced after \
                         {:?}",
                        row.reduce_after
                    );
                    assert_peaks(row, &name, 1.0, if exact { 1.01 } else { 1.05 });
                }
            }
        }
    }
    // Blocks of virtual ranks that are sent one by one.
    for zero in [Zero::One, Zero::Two, Zero::Three] {
        for virtual_ranks in [RANKS + 1, 2 * RANKS + 1, 3 * RANKS] {
            let row = LayoutCase {
                zero,
                virtual_ranks,
                shard: RANKS,
                reduce_after: ReduceAfter::StepInBlocks,
                ..ONE
            };
            assert_peaks(row, &format!("{zero:?}, {virtual_ranks} virtual ranks"), 1.0, 1.1);
        }
    }
    // At prefetch depth 0, a block's own buffer and that of the unit it is tied to; then one more
    // per step of depth.
    let two = LayoutCase {
        zero: Zero::Three,
        virtual_ranks: RANKS,
        micros_per_virtual_rank: 2,
        shard: RANKS,
        ..ONE
    };
    let buffers = [0, 1, 2, 8].map(|ahead| {
        most(LayoutCase { ahead, ..two }, 0, &[RANKS; 4], |moment| moment.params) / RANKS
    });
    assert_eq!(buffers, [2, 3, 4, 4]);
}

#[test]
fn stages_hold_the_estimated_buffers() {
    let orders = [PipelineSchedule::OneForwardOneBackward, PipelineSchedule::ZeroBubble];
    for (pipeline, order) in
        [2, 3, 4].into_iter().flat_map(|pipeline| orders.map(|order| (pipeline, order)))
    {
        for zero in [Zero::One, Zero::Two, Zero::Three] {
            for (virtual_ranks, micros_per_virtual_rank) in [(1, 1), (4, 1), (1, 4), (2, 3)] {
                let row = LayoutCase {
                    pipeline,
                    order,
                    zero,
                    virtual_ranks: 2 * virtual_ranks,
                    micros_per_virtual_rank,
                    shard: 2,
                    ..ONE
                };
                // A gradient sent to another stage is freed at some later time, and received parts
                // are small buffers that may reuse larger ones.
                for row in LayoutCase::with_both_reductions(vec![row]) {
                    let name = format!(
                        "{pipeline} stages {order}, {zero:?}, {virtual_ranks} virtual ranks of {micros_per_virtual_rank}, \
                         reduced after {:?}",
                        row.reduce_after
                    );
                    assert_peaks(row, &name, 0.5, 1.1);
                }
            }
        }
    }
}
