//! Layouts that must give the same bits as a single rank with the same virtual ranks.
//!
//! With a fixed number of virtual ranks sums are added in the same tree in every layout, so the
//! results are bitwise equal.

use super::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use super::runs::RunFiles;

/// The computation of a run, whose reference is a run of the same computation on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Computation {
    virtual_ranks: usize,
    batch: usize,
    /// The number of samples of a micro-batch.
    micro: usize,
    dropout: f32,
    /// The number of virtual tensor-parallel ranks.
    slices: usize,
}

impl Computation {
    fn settings(self) -> Vec<String> {
        let Self { virtual_ranks, batch, micro, dropout, slices } = self;
        vec![
            format!("parallel.virtual_ranks={virtual_ranks}"),
            format!("batch.global={batch}"),
            format!("batch.micro={micro}"),
            format!("model.dropout={dropout:?}"),
            format!("parallel.virtual_tensor_ranks={slices}"),
        ]
    }
}

/// Eight virtual ranks of one sample.
const EIGHT: Computation =
    Computation { virtual_ranks: 8, batch: 8, micro: 1, dropout: 0.0, slices: 1 };
const DROPOUT: Computation = Computation { dropout: 0.1, ..EIGHT };
/// Eight virtual ranks of three samples, computed together or one after another.
const WIDE: Computation =
    Computation { virtual_ranks: 8, batch: 24, micro: 3, dropout: 0.0, slices: 1 };
const ACCUMULATED: Computation = Computation { micro: 1, ..WIDE };
const TWELVE: Computation =
    Computation { virtual_ranks: 12, batch: 12, micro: 1, dropout: 0.0, slices: 1 };
const SIX: Computation =
    Computation { virtual_ranks: 6, batch: 24, micro: 2, dropout: 0.1, slices: 1 };
/// Blocks with two virtual tensor-parallel ranks.
const SLICED: Computation = Computation { slices: 2, ..DROPOUT };
const SLICED_ACCUMULATED: Computation = Computation { slices: 2, ..ACCUMULATED };

/// A layout that must give the bits of the reference.
pub struct LayoutCase(pub Computation, pub Transport, pub &'static str);

/// All layouts that must not change any bit.
pub const EQUAL_LAYOUTS: [LayoutCase; 104] = [
    // More threads or activation checkpointing on one rank.
    LayoutCase(EIGHT, Alone, "run.threads=3"),
    LayoutCase(EIGHT, Alone, "parallel.recompute=true"),
    LayoutCase(DROPOUT, Alone, "parallel.recompute=true run.threads=1"),
    LayoutCase(EIGHT, Alone, "parallel.zero=3"),
    LayoutCase(EIGHT, Mpirun(1), "parallel.zero=3"),
    LayoutCase(EIGHT, Simulate(1), ""),
    // Every ZeRO stage on every power of two of ranks.
    LayoutCase(EIGHT, Mpirun(2), "parallel.zero=0"),
    LayoutCase(EIGHT, Mpirun(2), "parallel.zero=1"),
    LayoutCase(EIGHT, Mpirun(2), "parallel.zero=2"),
    LayoutCase(EIGHT, Mpirun(2), "parallel.zero=3"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=0"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=1"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=2"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=3"),
    LayoutCase(EIGHT, Simulate(2), "parallel.zero=1"),
    LayoutCase(EIGHT, Simulate(4), "parallel.zero=3"),
    LayoutCase(EIGHT, Simulate(8), "parallel.zero=0"),
    LayoutCase(EIGHT, Simulate(8), "parallel.zero=1"),
    LayoutCase(EIGHT, Simulate(8), "parallel.zero=2"),
    LayoutCase(EIGHT, Simulate(8), "parallel.zero=3"),
    // Hybrid sharding: replicas of shards.
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=1 parallel.shard=2 parallel.replica=2"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=2 parallel.shard=2 parallel.replica=2"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=3 parallel.shard=2 parallel.replica=2"),
    LayoutCase(EIGHT, Simulate(8), "parallel.zero=3 parallel.shard=2"),
    LayoutCase(EIGHT, Simulate(8), "parallel.zero=2 parallel.replica=2"),
    LayoutCase(EIGHT, Simulate(4), "parallel.zero=3 parallel.replica=4"),
    // Gradients reduced after each micro-batch, which is the default with ZeRO 2 and 3 here, or once
    // per step.
    LayoutCase(EIGHT, Mpirun(2), "parallel.zero=2 parallel.reduce=step"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=3 parallel.reduce=step"),
    LayoutCase(EIGHT, Mpirun(2), "parallel.zero=1 parallel.reduce=micro"),
    LayoutCase(
        EIGHT,
        Mpirun(4),
        "parallel.zero=2 parallel.shard=2 parallel.reduce=micro run.sdc_check_every=1",
    ),
    LayoutCase(
        EIGHT,
        Mpirun(2),
        "parallel.zero=3 parallel.reduce=micro log.tensorboard=true log.histograms=1",
    ),
    LayoutCase(DROPOUT, Mpirun(4), "parallel.pipeline=2 parallel.zero=2 parallel.reduce=micro"),
    LayoutCase(SLICED, Mpirun(4), "parallel.tensor=2 parallel.zero=2 parallel.reduce=micro"),
    LayoutCase(
        DROPOUT,
        Simulate(8),
        "parallel.pipeline=2 parallel.zero=3 parallel.shard=2 parallel.reduce=micro",
    ),
    LayoutCase(
        SLICED,
        Simulate(8),
        "parallel.tensor=2 parallel.sequence=true parallel.pipeline=2 parallel.zero=1 parallel.reduce=micro",
    ),
    LayoutCase(EIGHT, Spawn(4), "parallel.zero=3 parallel.shard=2 parallel.reduce=micro"),
    // Algorithms that add in the same order.
    LayoutCase(EIGHT, Mpirun(2), "comm.algorithm=hierarchical"),
    LayoutCase(EIGHT, Mpirun(4), "comm.algorithm=reduce-to-one parallel.zero=2"),
    LayoutCase(EIGHT, Mpirun(4), "comm.algorithm=hierarchical parallel.zero=3 parallel.replica=2"),
    LayoutCase(EIGHT, Simulate(8), "comm.algorithm=reduce-to-one parallel.zero=1"),
    LayoutCase(EIGHT, Mpirun(2), "comm.algorithm=halving-doubling parallel.zero=1"),
    // Dropout and activation checkpointing.
    LayoutCase(DROPOUT, Mpirun(2), "parallel.zero=0 parallel.recompute=true"),
    LayoutCase(DROPOUT, Mpirun(4), "parallel.zero=3 parallel.recompute=true"),
    LayoutCase(DROPOUT, Simulate(8), "parallel.zero=2"),
    // Parameters all-gathered on demand or prefetched; the head is tied to the first unit.
    LayoutCase(EIGHT, Mpirun(2), "parallel.zero=3 parallel.prefetch=0"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=3 parallel.prefetch=2"),
    LayoutCase(EIGHT, Simulate(8), "parallel.zero=3 parallel.prefetch=8"),
    LayoutCase(DROPOUT, Mpirun(4), "parallel.zero=3 parallel.prefetch=2 parallel.recompute=true"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.zero=3 parallel.prefetch=2 parallel.shard=2"),
    LayoutCase(ACCUMULATED, Mpirun(2), "parallel.zero=3 parallel.prefetch=8"),
    LayoutCase(ACCUMULATED, Simulate(4), "parallel.zero=3 parallel.prefetch=0 parallel.replica=2"),
    // Micro-batches.
    LayoutCase(WIDE, Mpirun(2), "parallel.zero=2"),
    LayoutCase(WIDE, Simulate(8), "parallel.zero=3 parallel.recompute=true"),
    LayoutCase(ACCUMULATED, Mpirun(4), "parallel.zero=3"),
    LayoutCase(ACCUMULATED, Simulate(2), "parallel.zero=1 parallel.recompute=true"),
    // Numbers of ranks that are not powers of two.
    LayoutCase(TWELVE, Mpirun(3), "parallel.zero=0"),
    LayoutCase(TWELVE, Simulate(3), "parallel.zero=3"),
    LayoutCase(TWELVE, Simulate(12), "parallel.zero=2"),
    LayoutCase(SIX, Mpirun(3), "parallel.zero=1"),
    LayoutCase(SIX, Mpirun(3), "parallel.zero=3 parallel.recompute=true"),
    LayoutCase(SIX, Simulate(6), "parallel.zero=2 parallel.shard=2"),
    LayoutCase(SIX, Simulate(3), "parallel.zero=2"),
    // Pipeline parallelism; the head is tied to the embedding table of the first stage.
    LayoutCase(EIGHT, Mpirun(2), "parallel.pipeline=2"),
    LayoutCase(
        DROPOUT,
        Mpirun(2),
        "parallel.pipeline=2 parallel.recompute=true parallel.stages=[1,3]",
    ),
    LayoutCase(DROPOUT, Mpirun(4), "parallel.pipeline=2 parallel.zero=1"),
    LayoutCase(EIGHT, Mpirun(4), "parallel.pipeline=2 parallel.zero=3 parallel.recompute=true"),
    LayoutCase(WIDE, Mpirun(4), "parallel.pipeline=2 parallel.zero=2 parallel.prefetch=0"),
    LayoutCase(ACCUMULATED, Mpirun(4), "parallel.pipeline=4"),
    LayoutCase(ACCUMULATED, Simulate(8), "parallel.pipeline=4 parallel.zero=3"),
    LayoutCase(DROPOUT, Simulate(8), "parallel.pipeline=2 parallel.shard=2 parallel.zero=1"),
    LayoutCase(TWELVE, Simulate(9), "parallel.pipeline=3"),
    LayoutCase(SIX, Simulate(6), "parallel.pipeline=2 parallel.zero=2"),
    // Deferred wgrad.
    LayoutCase(ACCUMULATED, Mpirun(2), "parallel.pipeline=2 parallel.schedule=zero-bubble"),
    LayoutCase(
        ACCUMULATED,
        Mpirun(4),
        "parallel.pipeline=4 parallel.schedule=zero-bubble parallel.recompute=true",
    ),
    LayoutCase(
        ACCUMULATED,
        Mpirun(4),
        "parallel.pipeline=2 parallel.schedule=zero-bubble parallel.zero=3",
    ),
    LayoutCase(
        SIX,
        Simulate(6),
        "parallel.pipeline=2 parallel.schedule=zero-bubble parallel.zero=1",
    ),
    LayoutCase(
        ACCUMULATED,
        Simulate(8),
        "parallel.pipeline=4 parallel.schedule=zero-bubble parallel.zero=2",
    ),
    LayoutCase(
        DROPOUT,
        Simulate(8),
        "parallel.pipeline=2 parallel.schedule=zero-bubble parallel.shard=2 parallel.zero=1",
    ),
    // Central storage, on one rank or several.
    LayoutCase(EIGHT, Mpirun(2), "parallel.storage=central"),
    LayoutCase(
        DROPOUT,
        Mpirun(4),
        "parallel.storage=central parallel.owners=2 parallel.recompute=true comm.algorithm=reduce-to-one",
    ),
    LayoutCase(
        ACCUMULATED,
        Simulate(8),
        "parallel.storage=central parallel.owners=2 parallel.pipeline=2",
    ),
    // Processes over TCP.
    LayoutCase(EIGHT, Spawn(2), "parallel.zero=3"),
    LayoutCase(DROPOUT, Spawn(4), "parallel.zero=1 parallel.pipeline=2"),
    LayoutCase(SLICED, Spawn(2), "parallel.tensor=2 parallel.sequence=true"),
    // Tensor and sequence parallelism.
    LayoutCase(SLICED, Alone, "parallel.recompute=true run.threads=1"),
    LayoutCase(SLICED, Mpirun(2), "parallel.tensor=2"),
    LayoutCase(SLICED, Mpirun(2), "parallel.tensor=2 parallel.sequence=true"),
    LayoutCase(SLICED, Mpirun(4), "parallel.tensor=2 parallel.zero=3 parallel.recompute=true"),
    LayoutCase(
        SLICED_ACCUMULATED,
        Mpirun(4),
        "parallel.tensor=2 parallel.sequence=true parallel.pipeline=2",
    ),
    LayoutCase(SLICED, Simulate(4), "parallel.zero=2"),
    LayoutCase(
        SLICED,
        Simulate(8),
        "parallel.tensor=2 parallel.pipeline=2 parallel.shard=2 parallel.zero=1",
    ),
    LayoutCase(
        SLICED_ACCUMULATED,
        Simulate(4),
        "parallel.tensor=2 parallel.pipeline=2 parallel.schedule=zero-bubble",
    ),
    LayoutCase(
        SLICED,
        Simulate(8),
        "parallel.tensor=2 parallel.sequence=true parallel.zero=3 parallel.replica=2",
    ),
    // Unequal numbers of virtual ranks, and groups of them whose sum does not occur in the tree.
    LayoutCase(EIGHT, Mpirun(3), "parallel.zero=0"),
    LayoutCase(DROPOUT, Mpirun(3), "parallel.zero=1 run.sdc_check_every=1"),
    LayoutCase(WIDE, Mpirun(3), "parallel.zero=2 parallel.recompute=true"),
    LayoutCase(EIGHT, Mpirun(3), "parallel.zero=3 parallel.prefetch=2"),
    LayoutCase(ACCUMULATED, Simulate(5), "parallel.zero=3 log.tensorboard=true log.histograms=1"),
    LayoutCase(SIX, Mpirun(4), "parallel.zero=2"),
    LayoutCase(TWELVE, Simulate(6), "parallel.zero=3 parallel.shard=3"),
    LayoutCase(EIGHT, Simulate(6), "parallel.zero=1 parallel.shard=3 parallel.replica=2"),
    LayoutCase(SLICED, Simulate(6), "parallel.tensor=2 parallel.zero=2"),
    LayoutCase(DROPOUT, Simulate(6), "parallel.pipeline=2 parallel.zero=3"),
    LayoutCase(EIGHT, Spawn(3), "parallel.zero=3"),
];

/// Runs every layout, and a reference on one rank for all layouts of the same computation; panics
/// unless metrics, evaluations and the last checkpoint have the same bits. `run` runs some settings
/// under a name.
#[track_caller]
pub fn give_the_same_bits<'a>(
    rows: impl IntoIterator<Item = (&'a LayoutCase, Vec<&'a str>)>,
    steps: u64,
    run: impl Fn(Transport, Vec<String>, &str) -> RunFiles,
) {
    let mut references: Vec<(Computation, RunFiles)> = Vec::new();
    let run = |sums: Computation, transport, settings: &[&str], name: String| {
        let settings =
            sums.settings().into_iter().chain(settings.iter().map(|setting| setting.to_string()));
        run(transport, settings.collect(), &name)
    };
    for (i, (LayoutCase(sums, transport, settings), more)) in rows.into_iter().enumerate() {
        if !references.iter().any(|(known, _)| known == sums) {
            references
                .push((*sums, run(*sums, Alone, &[], format!("reference-{}", references.len()))));
        }
        let (_, reference) = references.iter().find(|(known, _)| known == sums).unwrap();
        let settings = [&settings.split_whitespace().collect::<Vec<_>>()[..], &more].concat();
        let files = run(*sums, *transport, &settings, format!("row-{i}"));
        files.same_as(reference, steps, &format!("{sums:?} on {transport:?}, {settings:?}"));
    }
    // The references differ from each other, so equal bits are meaningful.
    for (i, (sums, one)) in references.iter().enumerate() {
        for (others, other) in &references[..i] {
            assert_ne!(one.steps(), other.steps(), "{sums:?} and {others:?}");
        }
    }
}
