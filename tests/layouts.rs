//! One batch, one result: every layout of a run against one rank that computes the same lanes.
//!
//! With fixed lanes, and on each rank and each copy of the parameters a power of two of them, sums are the same tree
//! everywhere: the results have the same bits. Otherwise sums are taken in another order and the results are close.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod common;

use std::path::Path;

use common::launch::Transport::{self, Alone, Mpirun, Simulate};
use common::runs::{Run, RunFiles};

/// Steps of a run.
const STEPS: u64 = 6;

/// What a run computes: the one-rank run of the same is its reference.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sums {
    lanes: usize,
    batch: usize,
    /// Samples computed at once.
    micro: usize,
    dropout: f32,
}

impl Sums {
    fn settings(self) -> Vec<String> {
        let Self { lanes, batch, micro, dropout } = self;
        vec![
            format!("parallel.lanes={lanes}"),
            format!("batch.global={batch}"),
            format!("batch.micro={micro}"),
            format!("model.dropout={dropout:?}"),
        ]
    }
}

/// Eight lanes of one sample.
const EIGHT: Sums = Sums { lanes: 8, batch: 8, micro: 1, dropout: 0.0 };
const DROPOUT: Sums = Sums { dropout: 0.1, ..EIGHT };
/// Eight lanes of three samples, computed together or one after another.
const WIDE: Sums = Sums { lanes: 8, batch: 24, micro: 3, dropout: 0.0 };
const ACCUMULATED: Sums = Sums { micro: 1, ..WIDE };
const TWELVE: Sums = Sums { lanes: 12, batch: 12, micro: 1, dropout: 0.0 };
const SIX: Sums = Sums { lanes: 6, batch: 24, micro: 2, dropout: 0.1 };

/// A layout that must give the bits of the reference.
struct Row(Sums, Transport, &'static str);

/// Everything that may not make a difference, one row each.
const SAME: [Row; 52] = [
    // More threads or blocks computed again, on one rank.
    Row(EIGHT, Alone, "run.threads=3"),
    Row(EIGHT, Alone, "parallel.recompute=true"),
    Row(DROPOUT, Alone, "parallel.recompute=true run.threads=1"),
    Row(EIGHT, Alone, "parallel.zero=3"),
    Row(EIGHT, Mpirun(1), "parallel.zero=3"),
    Row(EIGHT, Simulate(1), ""),
    // Every stage on every power of two.
    Row(EIGHT, Mpirun(2), "parallel.zero=0"),
    Row(EIGHT, Mpirun(2), "parallel.zero=1"),
    Row(EIGHT, Mpirun(2), "parallel.zero=2"),
    Row(EIGHT, Mpirun(2), "parallel.zero=3"),
    Row(EIGHT, Mpirun(4), "parallel.zero=0"),
    Row(EIGHT, Mpirun(4), "parallel.zero=1"),
    Row(EIGHT, Mpirun(4), "parallel.zero=2"),
    Row(EIGHT, Mpirun(4), "parallel.zero=3"),
    Row(EIGHT, Simulate(2), "parallel.zero=1"),
    Row(EIGHT, Simulate(4), "parallel.zero=3"),
    Row(EIGHT, Simulate(8), "parallel.zero=0"),
    Row(EIGHT, Simulate(8), "parallel.zero=1"),
    Row(EIGHT, Simulate(8), "parallel.zero=2"),
    Row(EIGHT, Simulate(8), "parallel.zero=3"),
    // Copies of shards.
    Row(EIGHT, Mpirun(4), "parallel.zero=1 parallel.shard=2 parallel.replica=2"),
    Row(EIGHT, Mpirun(4), "parallel.zero=2 parallel.shard=2 parallel.replica=2"),
    Row(EIGHT, Mpirun(4), "parallel.zero=3 parallel.shard=2 parallel.replica=2"),
    Row(EIGHT, Simulate(8), "parallel.zero=3 parallel.shard=2"),
    Row(EIGHT, Simulate(8), "parallel.zero=2 parallel.replica=2"),
    Row(EIGHT, Simulate(4), "parallel.zero=3 parallel.replica=4"),
    // Algorithms that add in the same order.
    Row(EIGHT, Mpirun(2), "comm.algorithm=hierarchical"),
    Row(EIGHT, Mpirun(4), "comm.algorithm=reduce-to-one parallel.zero=2"),
    Row(EIGHT, Mpirun(4), "comm.algorithm=hierarchical parallel.zero=3 parallel.replica=2"),
    Row(EIGHT, Simulate(8), "comm.algorithm=reduce-to-one parallel.zero=1"),
    Row(EIGHT, Mpirun(2), "comm.algorithm=tree parallel.zero=1"),
    // Dropout and blocks computed again.
    Row(DROPOUT, Mpirun(2), "parallel.zero=0 parallel.recompute=true"),
    Row(DROPOUT, Mpirun(4), "parallel.zero=3 parallel.recompute=true"),
    Row(DROPOUT, Simulate(8), "parallel.zero=2"),
    // Parameters gathered when they are needed, or ahead of that; the head borrows the first unit.
    Row(EIGHT, Mpirun(2), "parallel.zero=3 parallel.prefetch=0"),
    Row(EIGHT, Mpirun(4), "parallel.zero=3 parallel.prefetch=2"),
    Row(EIGHT, Simulate(8), "parallel.zero=3 parallel.prefetch=8"),
    Row(DROPOUT, Mpirun(4), "parallel.zero=3 parallel.prefetch=2 parallel.recompute=true"),
    Row(EIGHT, Mpirun(4), "parallel.zero=3 parallel.prefetch=2 parallel.shard=2"),
    Row(ACCUMULATED, Mpirun(2), "parallel.zero=3 parallel.prefetch=8"),
    Row(ACCUMULATED, Simulate(4), "parallel.zero=3 parallel.prefetch=0 parallel.replica=2"),
    // Micro-batches.
    Row(WIDE, Mpirun(2), "parallel.zero=2"),
    Row(WIDE, Simulate(8), "parallel.zero=3 parallel.recompute=true"),
    Row(ACCUMULATED, Mpirun(4), "parallel.zero=3"),
    Row(ACCUMULATED, Simulate(2), "parallel.zero=1 parallel.recompute=true"),
    // Not a power of two of ranks.
    Row(TWELVE, Mpirun(3), "parallel.zero=0"),
    Row(TWELVE, Simulate(3), "parallel.zero=3"),
    Row(TWELVE, Simulate(12), "parallel.zero=2"),
    Row(SIX, Mpirun(3), "parallel.zero=1"),
    Row(SIX, Mpirun(3), "parallel.zero=3 parallel.recompute=true"),
    Row(SIX, Simulate(6), "parallel.zero=2 parallel.shard=2"),
    Row(SIX, Simulate(3), "parallel.zero=2"),
];

/// The run of a row, in a directory of its own.
fn run(sums: Sums, transport: Transport, settings: &str, root: &Path, name: &str) -> RunFiles {
    let settings: Vec<String> =
        sums.settings().into_iter().chain(settings.split_whitespace().map(Into::into)).collect();
    Run { settings, ..Run::new(transport, root, name, &[]) }.succeeds()
}

#[test]
fn layouts_with_the_same_lanes_give_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let mut references: Vec<(Sums, RunFiles)> = Vec::new();
    for (i, Row(sums, transport, settings)) in SAME.iter().enumerate() {
        if !references.iter().any(|(known, _)| known == sums) {
            let reference = run(*sums, Alone, "", root.path(), &format!("reference-{}", references.len()));
            references.push((*sums, reference));
        }
        let (_, reference) = references.iter().find(|(known, _)| known == sums).unwrap();
        let files = run(*sums, *transport, settings, root.path(), &format!("row-{i}"));
        files.same_as(reference, STEPS, &format!("{sums:?} on {transport:?}, {settings}"));
    }
    // The references themselves differ: equal bits say something.
    for (i, (sums, one)) in references.iter().enumerate() {
        for (others, other) in &references[..i] {
            assert_ne!(one.steps(), other.steps(), "{sums:?} and {others:?}");
        }
    }
}

/// Layouts that add in another order than one rank, one lane.
const CLOSE: [(Transport, &str); 13] = [
    (Mpirun(1), ""),
    (Mpirun(2), ""),
    (Mpirun(3), ""),
    (Mpirun(4), ""),
    (Mpirun(3), "parallel.zero=3"),
    (Mpirun(4), "parallel.zero=2"),
    (Mpirun(2), "comm.algorithm=mpi"),
    (Mpirun(3), "comm.algorithm=mpi parallel.zero=3"),
    (Mpirun(4), "comm.algorithm=mpi parallel.zero=1"),
    (Mpirun(4), "comm.algorithm=ring"),
    (Mpirun(3), "comm.algorithm=ring parallel.zero=2"),
    (Simulate(6), "comm.algorithm=ring parallel.zero=3"),
    (Simulate(4), "comm.algorithm=ring parallel.zero=3 parallel.shard=2"),
];

/// Two orders of adding n numbers in single precision differ by less than about n·2⁻²⁴ of the sum of their
/// magnitudes: some 1e-6 of a gradient here. Adam divides by the gradient's own size, so that elements near zero may
/// move by a good part of the rate instead, but those hardly move the loss. In six steps the loss has been seen to
/// be off by 1e-8 and the norm by 1e-7. A lost or doubled contribution of a rank is worth more than 1e-2.
const LOSS: f64 = 1e-6;
const NORM: f64 = 1e-5;

#[test]
fn other_orders_of_adding_give_almost_the_same() {
    let root = tempfile::tempdir().unwrap();
    let settings =
        |more: &'static str| ["batch.global=24"].into_iter().chain(more.split_whitespace()).collect::<Vec<_>>();
    let reference = Run::new(Alone, root.path(), "reference", &settings("")).succeeds();
    for (i, (transport, more)) in CLOSE.into_iter().enumerate() {
        let files = Run::new(transport, root.path(), &format!("row-{i}"), &settings(more)).succeeds();
        for (file, key, bound) in
            [("metrics.jsonl", "loss", LOSS), ("metrics.jsonl", "grad_norm", NORM), ("eval.jsonl", "loss", LOSS)]
        {
            let (got, wanted) = (files.numbers(file, key), reference.numbers(file, key));
            assert_eq!(got.len(), wanted.len());
            for (step, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                let off = (got - wanted).abs() / wanted;
                assert!(off < bound, "{transport:?} {more}: {file} line {}: {key} is off by {off:e}", step + 1);
            }
        }
    }
}
