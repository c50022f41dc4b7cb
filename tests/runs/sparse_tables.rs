//! Embedding tables with sparse updates: the same bits on any number of ranks, with every division of
//! the rows, and on parameter servers.

use std::path::Path;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::{Run, RunFiles, json};
use hpctrain_testkit::simulator::with_simulator;

use crate::networks::data;

/// A recommender whose batches contain a part of the rows.
const NETWORK: [&str; 8] = [
    "model.kind=layers",
    "model.input=[1]",
    "model.layers=[{kind='embedding_tables', ids=[30, 50], width=6, dense=[{kind='dense', units=6}]}, \
     {kind='dot_interaction'}, {kind='dense', units=7}, {kind='relu'}, {kind='dense', units=1}]",
    "loss.kind=binary-cross-entropy",
    "parallel.virtual_ranks=4",
    "batch.micro=2",
    "checkpoint.every=3",
    "eval.every=3",
];

/// Updates that have the parameters of dense ones.
const EXACT: [&str; 2] = ["optimizer.kind=adagrad", "optimizer.weight_decay=0"];

/// Updates that differ from dense ones.
const LAZY: [&str; 2] = ["optimizer.kind=adamw", "optimizer.tables=sparse"];

fn run(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> Run {
    let path = format!("data.path={}", root.join("clicks").display());
    Run::new(transport, root, name, &[&NETWORK[..], &[&path], settings].concat())
}

fn served(transport: Transport, servers: usize, run: &Run) -> RunFiles {
    let run = Run { transport, ..run.clone() };
    finish(run.command().args(["--servers", &servers.to_string()])).succeeded();
    run.files()
}

#[test]
fn ranks_and_servers_have_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    for (kind, updates) in [("exact", EXACT), ("lazy", LAZY)] {
        let one = run(Alone, root.path(), &format!("{kind} on one"), &updates).succeeds();
        let layouts: [(&str, Transport, &[&str]); 6] = [
            ("replicated", Mpirun(2), &[]),
            ("unequal", Simulate(3), &[]),
            ("unequal rows", Simulate(3), &["parallel.zero=3"]),
            ("row-wise", Mpirun(4), &["parallel.zero=1"]),
            ("by table", Mpirun(3), &["parallel.zero=2", "parallel.tables=table-wise"]),
            (
                "hybrid",
                Simulate(4),
                &["parallel.zero=3", "parallel.shard=2", "parallel.tables=row-wise"],
            ),
        ];
        for (name, transport, layout) in layouts {
            let name = format!("{kind} {name}");
            let settings = [&updates[..], layout].concat();
            run(transport, root.path(), &name, &settings).succeeds().same_as(&one, 6, &name);
        }
        let servers: [(&str, Transport, usize, &[&str]); 3] = [
            ("one server", Simulate(2), 1, &[]),
            ("three servers", Simulate(5), 3, &["parameter_server.partition='fixed:5'"]),
            ("servers over MPI", Mpirun(4), 2, &[]),
        ];
        for (name, transport, count, more) in servers {
            let name = format!("{kind} {name}");
            let run = run(transport, root.path(), &name, &[&updates[..], more].concat());
            served(transport, count, &run).same_as(&one, 6, &name);
        }
    }
}

/// The rows of sparse updates are those of dense ones, and each continues a run of the other.
#[test]
fn exact_updates_are_those_of_dense_tables() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let clip = ["optimizer.grad_clip=0"];
    let of = |name: &str, more: &[&str]| {
        run(Mpirun(2), root.path(), name, &[&EXACT[..], &clip, more].concat())
    };
    let dense = of("dense", &["optimizer.tables=dense"]).succeeds();
    let sparse = of("sparse", &["parallel.zero=3"]).succeeds();
    same_results(&sparse, &dense);
    for (name, from, updates) in [("to sparse", &dense, "sparse"), ("to dense", &sparse, "dense")] {
        let updates = format!("optimizer.tables={updates}");
        let branch = of(name, &[&updates]).resume(&from.checkpoint(3).display().to_string());
        let ended = branch.ends().succeeded();
        assert!(!ended.stderr.contains("does not continue"), "{ended}");
        assert_eq!(branch.files().tensors(6), dense.tensors(6), "{name}");
    }
}

/// Panics unless losses and checkpoints are equal; norms are added in another order.
#[track_caller]
fn same_results(sparse: &RunFiles, dense: &RunFiles) {
    for file in ["metrics.jsonl", "eval.jsonl"] {
        assert_eq!(sparse.numbers(file, "loss"), dense.numbers(file, "loss"), "{file}");
    }
    assert_eq!(sparse.tensors(6), dense.tensors(6));
}

/// Rows on the host of a GPU, here a simulated one, have the bits of dense tables there.
#[test]
fn a_gpu_gets_the_rows_of_sparse_tables() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let common = [
        "optimizer.grad_clip=0",
        "run.device=cuda",
        "precision.dtype=f32",
        "device.ranks_per_gpu=2",
        "device.memory_limit=64MiB",
    ];
    let of = |name: &str, ranks, more: &[&str]| {
        let settings = [&EXACT[..], &common, &["model.place.tables=host"], more].concat();
        let run = run(ranks, root.path(), name, &settings);
        finish(with_simulator(&mut run.command())).succeeded();
        run.files()
    };
    let dense = of("dense", Alone, &["optimizer.tables=dense"]);
    same_results(&of("sparse", Simulate(2), &["parallel.zero=2"]), &dense);
}

#[test]
fn asynchronous_workers_push_rows() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let settings =
        [&EXACT[..], &["parameter_server.staleness='none'", "optimizer.lr=0.1"]].concat();
    let name = "asynchronous";
    let settings =
        [&settings[..], &["run.steps=60", "checkpoint.every=60", "eval.every=0", "batch.micro=1"]]
            .concat();
    let run = run(Simulate(5), root.path(), name, &settings);
    let files = served(Simulate(5), 2, &run);
    let losses = files.numbers("metrics.jsonl", "loss");
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&losses[50..]) < 0.8 * mean(&losses[..10]), "{losses:?}");
    // Every range counts every update, also those without a row of it.
    assert_eq!(json(&files.checkpoint(60).join("manifest.json"))["updates"], 60 * 3);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let refused: [(&[&str], &str); 5] = [
        (&["optimizer.tables=sparse", "parallel.pipeline=2"], "does not go with parallel.pipeline"),
        (&["optimizer.tables=sparse", "optimizer.kind=lamb"], "does not go with optimizer.kind"),
        (&["optimizer.tables=sparse", "optimizer.ema=0.9"], "does not go with optimizer.ema"),
        (&["optimizer.tables=sparse", "run.sdc_check_every=2"], "does not go with run.sdc_check"),
        (&["parallel.tables=row-wise", "optimizer.kind=adamw"], "but these have dense ones"),
    ];
    for (settings, words) in refused {
        let ended = run(Mpirun(2), root.path(), "refused", settings).ends();
        assert!(
            ended.code() == 2 && ended.stderr.contains(words) && ended.stderr.contains("hint:"),
            "{ended}"
        );
        assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
    }
    // Of itself, such a layout has dense updates.
    let staged =
        run(Mpirun(2), root.path(), "staged", &[&EXACT[..], &["parallel.pipeline=2"]].concat());
    staged.succeeds();
}
