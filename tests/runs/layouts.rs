//! Compares every layout of a run with one rank that computes the same virtual ranks.
//!
//! Layouts whose sums are the same tree give the same bits: their table is in `common/layouts.rs`.
//! Others add in another order, and their results are close.

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::layouts::{EQUAL_LAYOUTS, give_the_same_bits};
use hpctrain_testkit::runs::{Run, json};

/// The steps of a run.
const STEPS: u64 = 6;

#[test]
fn layouts_with_the_same_virtual_ranks_give_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let rows = EQUAL_LAYOUTS.iter().map(|row| (row, vec![]));
    give_the_same_bits(rows, STEPS, |transport, settings, name| {
        Run { settings, ..Run::new(transport, root.path(), name, &[]) }.succeeds()
    });
}

/// A launcher that places ranks round robin over the nodes: they are renumbered by node, and then
/// `hierarchical` gives the same bits.
#[test]
fn ranks_that_are_placed_round_robin_are_renumbered() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["comm.algorithm=hierarchical", "parallel.virtual_ranks=4"];
    let start = |name: &str, division: &str| {
        let run = Run::new(Mpirun(4), root.path(), name, &settings);
        let mut command = run.command();
        command.envs([("HPCTRAIN_RANKS_PER_NODE", division), ("RUST_LOG", "info")]);
        (finish(&mut command).succeeded(), run.files())
    };
    let (in_blocks, blocks) = start("blocks", "2");
    let (ended, cyclic) = start("cyclic", "2,cyclic");
    let says =
        "ranks are renumbered by node: the launcher placed consecutive ranks on different nodes";
    assert!(ended.stdout.contains(says) && !in_blocks.stdout.contains(says), "{ended}");
    cyclic.same_as(&blocks, STEPS, "round robin");
    // Messages on the console begin with the new numbers.
    for rank in 0..4 {
        let line = format!("info: rank {rank}: rank {rank} of 4 on ");
        assert!(ended.stderr.contains(&line), "{line:?} is missing: {ended}");
    }
}

/// Returns the rounds and bytes of a step, as counted by rank 0 of `simulate`.
fn step_of(ranks: usize, settings: &[&str]) -> (u64, u64) {
    let root = tempfile::tempdir().unwrap();
    let quiet = [
        "eval.every=0",
        "checkpoint.every=0",
        "eval.samples=2",
        "comm.algorithm=halving-doubling",
        "model.width=64",
    ];
    let batch = format!("batch.global={ranks}");
    let counted = |steps: u64| {
        let steps = format!("run.steps={steps}");
        let all = [&quiet[..], settings, &[&batch, &steps]].concat();
        let files =
            Run::new(Simulate(ranks), root.path(), &steps.replace('.', "-"), &all).succeeds();
        let card = json(&files.path("run.json"));
        ["comm_rounds", "comm_sent_bytes"].map(|key| card[key].as_u64().unwrap())
    };
    let ([rounds, bytes], [more, larger]) = (counted(1), counted(4));
    ((more - rounds) / 3, (larger - bytes) / 3)
}

/// The rounds of a step grow with the logarithm of the number of ranks, and its bytes only by the
/// summary that each rank sends. `HPCTRAIN_MANY_RANKS` lists numbers of ranks; default: 12 and 64.
#[test]
fn a_step_of_many_ranks_has_few_rounds() {
    let many = std::env::var("HPCTRAIN_MANY_RANKS").unwrap_or("12,64".into());
    for ranks in many.split(',').map(|ranks| ranks.parse::<usize>().unwrap()) {
        let log = u64::from(ranks.next_power_of_two().ilog2());
        for (name, settings) in [("data parallel", &[][..]), ("ZeRO 3", &["parallel.zero=3"])] {
            let (rounds, bytes) = step_of(ranks, settings);
            println!("| {ranks} | {name} | {rounds} | {bytes} |");
            // Four units; debug builds first compare each request with a neighbour's.
            let sum = 2 * log + 2;
            let gather = log;
            let compared = u64::from(cfg!(debug_assertions));
            let of_units = match name {
                "data parallel" => 4 * (sum + gather + compared),
                // Each unit is gathered for its forward and its backward.
                _ => 4 * (sum + compared) + 8 * (gather + compared),
            };
            assert!(rounds <= of_units + 2 * log + compared, "{name} on {ranks}: {rounds} rounds");
        }
    }
}

/// A rank with several micro-batches of 64 rows or more packs weights into panels, one with a
/// single micro-batch does not.
#[test]
fn weights_in_panels_give_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["model.width=64", "batch.global=16", "parallel.virtual_ranks=2"];
    let run = |transport, name| {
        let files = Run::new(transport, root.path(), name, &settings).succeeds();
        let workspace = json(&files.path("run.json"))["peak_bytes"]["workspace"].as_u64().unwrap();
        (files, workspace)
    };
    let (together, panels) = run(Alone, "one");
    let (divided, none) = run(Mpirun(2), "two");
    // Two layers of 12·64² weights and the head, in both orientations.
    assert!(panels >= 2 * 4 * 2 * 12 * 64 * 64 && none == 0, "{panels} and {none} bytes of panels");
    divided.same_as(&together, STEPS, "one rank, whose weights are in panels, and two");
}

/// Layouts that add in another order than one rank with one virtual rank.
const CLOSE: [(Transport, &str); 13] = [
    (Mpirun(1), ""),
    (Mpirun(2), ""),
    (Mpirun(3), ""),
    (Mpirun(4), ""),
    (Mpirun(3), "parallel.zero=3"),
    (Mpirun(4), "parallel.zero=2"),
    (Mpirun(2), "comm.algorithm=vendor"),
    (Mpirun(3), "comm.algorithm=vendor parallel.zero=3"),
    (Mpirun(4), "comm.algorithm=vendor parallel.zero=1"),
    (Mpirun(4), "comm.algorithm=ring"),
    (Mpirun(3), "comm.algorithm=ring parallel.zero=2"),
    (Simulate(6), "comm.algorithm=ring parallel.zero=3"),
    (Simulate(4), "comm.algorithm=ring parallel.zero=3 parallel.shard=2"),
];

/// Bounds of relative differences. Two orders of adding n numbers in single precision differ by
/// less than about n·2⁻²⁴ of the sum of their magnitudes: some 1e-6 of a gradient here. Adam
/// divides by the magnitude of the gradient, so elements near zero may differ by a good part of the
/// learning rate, but those hardly change the loss. In six steps, measured differences are 1e-8 of
/// the loss and 1e-7 of the norm. A lost or doubled contribution of a rank changes more than 1e-2.
const LOSS: f64 = 1e-6;
const NORM: f64 = 1e-5;

#[test]
fn other_orders_of_adding_give_almost_the_same() {
    let root = tempfile::tempdir().unwrap();
    let settings = |more: &'static str| {
        ["batch.global=24"].into_iter().chain(more.split_whitespace()).collect::<Vec<_>>()
    };
    let reference = Run::new(Alone, root.path(), "reference", &settings("")).succeeds();
    for (i, (transport, more)) in CLOSE.into_iter().enumerate() {
        let files =
            Run::new(transport, root.path(), &format!("row-{i}"), &settings(more)).succeeds();
        for (file, key, bound) in [
            ("metrics.jsonl", "loss", LOSS),
            ("metrics.jsonl", "grad_norm", NORM),
            ("eval.jsonl", "loss", LOSS),
        ] {
            let got = files.numbers(file, key);
            let wanted = reference.numbers(file, key);
            assert_eq!(got.len(), wanted.len());
            for (step, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                let off = (got - wanted).abs() / wanted;
                assert!(
                    off < bound,
                    "{transport:?} {more}: {file} line {}: {key} is off by {off:e}",
                    step + 1
                );
            }
        }
    }
}
