//! Parameter servers: synchronous steps give the bits of data parallelism, and asynchronous workers
//! do not wait for each other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{Ended, finish};
use hpctrain_testkit::runs::{Run, RunFiles, json};

/// Synchronous steps. With four virtual ranks, any number of workers gives the same bits.
const SYNC: [&str; 5] = [
    "parallel.virtual_ranks=4",
    "model.dropout=0.1",
    "eval.every=3",
    "checkpoint.every=3",
    "checkpoint.keep=9",
];

/// Asynchronous steps.
const ASYNC: [&str; 4] = [
    "parameter_server.staleness='none'",
    "eval.every=3",
    "checkpoint.every=3",
    "checkpoint.keep=9",
];

/// Runs with the ranks of `transport`, `servers` of which are parameter servers.
#[track_caller]
fn served(
    transport: Transport,
    servers: usize,
    root: &Path,
    name: &str,
    settings: &[&str],
) -> (Ended, RunFiles) {
    let run = Run::new(transport, root, name, settings);
    let ended = finish(run.command().args(["--servers", &servers.to_string()])).succeeded();
    (ended, run.files())
}

#[test]
fn the_bits_are_those_of_data_parallelism() {
    let root = tempfile::tempdir().unwrap();
    let reference = Run::new(Simulate(2), root.path(), "ranks", &SYNC).succeeds();
    let runs: [(&str, Transport, usize, &[&str]); 9] = [
        ("one worker, one server", Simulate(2), 1, &[]),
        ("two workers, three servers", Simulate(5), 3, &[]),
        ("four workers, two servers", Simulate(6), 2, &["parameter_server.partition='fixed:3'"]),
        (
            "three workers, which do not divide the virtual ranks",
            Simulate(5),
            2,
            &["parameter_server.partition='max:4KiB'"],
        ),
        ("recomputed", Simulate(4), 2, &["parallel.recompute=true"]),
        ("one thread writes", Simulate(3), 1, &["checkpoint.async_save=false"]),
        ("three threads in every process", Spawn(3), 1, &["run.threads=3"]),
        ("processes", Spawn(4), 2, &[]),
        ("processes of MPI", Mpirun(3), 1, &[]),
    ];
    for (name, transport, servers, settings) in runs {
        let (_, files) =
            served(transport, servers, root.path(), name, &[&SYNC[..], settings].concat());
        files.same_as(&reference, 6, name);
        for step in [3, 6] {
            assert_eq!(files.tensors(step), reference.tensors(step), "{name}: step {step}");
        }
        assert_eq!(json(&files.path("END"))["status"], "finished", "{name}");
        // Each sample of a step is computed by one worker.
        let mut samples = [0; 6];
        for line in files.text("workers.jsonl").lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            samples[line["step"].as_u64().unwrap() as usize - 1] +=
                line["samples"].as_u64().unwrap();
            assert!(
                line["compute_ms"].as_f64().unwrap() > 0.0
                    && line["pull_ms"].as_f64().unwrap() > 0.0,
                "{line}"
            );
        }
        assert_eq!(samples, [8; 6], "{name}");
        let card = json(&files.path("run.json"));
        assert_eq!(
            (&card["steps"], &card["mpi"]),
            (&6.into(), &"servers over TCP".into()),
            "{name}"
        );
        assert!(
            card["tokens_per_second"].as_f64().unwrap() > 0.0
                && card["parameters"].as_u64().unwrap() > 0,
            "{card}"
        );
    }
}

/// Each process divides its own cores; the coordinator does not decide for the others.
#[test]
fn every_process_has_its_own_number_of_threads() {
    let root = tempfile::tempdir().unwrap();
    let cores = std::thread::available_parallelism().unwrap().get();
    let run = Run::new(Spawn(2), root.path(), "x", &SYNC);
    let mut command = run.command();
    let ended = finish(command.args(["--servers", "1"]).env("RUST_LOG", "info")).succeeded();
    for before in ["computes on ", "updates on "] {
        let lines = ended.stderr.lines().filter_map(|line| line.split_once(before));
        let counts: Vec<usize> = lines
            .map(|(_, rest)| rest.strip_suffix(" threads").unwrap().parse().unwrap())
            .collect();
        // A quota of the control group is rounded up, and available_parallelism down.
        let expected = (cores / 2).max(1);
        assert!(counts == [expected] || counts == [expected + 1], "{before}{counts:?}: {ended}");
    }
}

#[test]
fn a_trace_has_workers_servers_and_the_coordinator() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("trace.json");
    for (name, transport, settings) in
        [("sync", Simulate(4), &SYNC[..]), ("async", Spawn(4), &ASYNC)]
    {
        let run = Run::new(transport, root.path(), name, settings);
        finish(run.command().args(["--servers", "2", "--trace"]).arg(&path)).succeeded();
        let trace = json(&path);
        let events = trace["traceEvents"].as_array().unwrap();
        let processes: BTreeMap<u64, &str> = events
            .iter()
            .filter(|event| event["name"] == "process_name")
            .map(|event| (event["pid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap()))
            .collect();
        // The number of spans by role and kind.
        let mut done = BTreeMap::new();
        for event in events.iter().filter(|event| event["ph"] == "X") {
            let role = processes[&event["pid"].as_u64().unwrap()].split(' ').next().unwrap();
            *done.entry((role, event["cat"].as_str().unwrap())).or_insert(0) += 1;
            let start = event["ts"].as_f64().unwrap();
            let lasts = event["dur"].as_f64().unwrap();
            assert!(start >= 0.0 && lasts >= 0.0 && start + lasts < 600e6, "{name}: {event}");
        }
        let roles =
            |role: &str| processes.values().filter(|process| process.starts_with(role)).count();
        assert_eq!(
            [roles("coordinator"), roles("server"), roles("worker")],
            [1, 2, 2],
            "{name}: {processes:?}"
        );
        assert_eq!(done[&("coordinator", "step")], 6, "{name}: {done:?}");
        assert_eq!(done[&("worker", "pull")], done[&("server", "pull")] / 2, "{name}: {done:?}");
        assert_eq!(done[&("worker", "push")], done[&("server", "push")] / 2, "{name}: {done:?}");
        // One push per worker and step, or for groups of a step's virtual ranks.
        let pushes = done[&("worker", "push")];
        assert!(if name == "async" { pushes == 12 } else { pushes >= 6 }, "{name}: {done:?}");
        assert!(
            done[&("worker", "forward")] > 0 && done[&("worker", "evaluation")] > 0,
            "{name}: {done:?}"
        );
    }
}

#[test]
fn several_connections_carry_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    // Messages of some MiB, enough to use all connections.
    let wide = [&SYNC[..], &["model.width=256", "run.steps=3"]].concat();
    let reference = Run::new(Simulate(2), root.path(), "ranks", &wide).succeeds();
    let path = root.path().join("trace.json");
    let run = Run::new(
        Simulate(3),
        root.path(),
        "served",
        &[&wide[..], &["parameter_server.connections=3", "parameter_server.partition='fixed:4'"]]
            .concat(),
    );
    finish(run.command().args(["--servers", "1", "--trace"]).arg(&path)).succeeded();
    run.files().same_as(&reference, 3, "several connections");
    let trace = json(&path);
    let events = trace["traceEvents"].as_array().unwrap();
    let pushes =
        events.iter().filter(|event| event["cat"] == "push" && event["args"].get("unit").is_none());
    let threads: BTreeSet<(u64, u64)> = pushes
        .map(|event| (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap()))
        .collect();
    // Each connection of the two workers has a thread on the server; a worker has one thread.
    assert_eq!(threads.len(), 2 * 3 + 2, "{threads:?}");
}

#[test]
fn every_rule_updates_on_servers() {
    let root = tempfile::tempdir().unwrap();
    for rule in ["sgd", "adam", "adagrad", "rmsprop", "lamb", "lars", "lion"] {
        let kind = format!("optimizer.kind={rule}");
        let group = "optimizer.groups=[{names='wte.*',lr_factor=2.0,weight_decay=0.3}]";
        let settings =
            [&SYNC[..], &[&kind, "optimizer.ema=0.75", "optimizer.grad_clip=0.5", group]].concat();
        let reference =
            Run::new(Simulate(2), root.path(), &format!("{rule} on ranks"), &settings).succeeds();
        let (_, files) =
            served(Simulate(5), 3, root.path(), &format!("{rule} on servers"), &settings);
        files.same_as(&reference, 6, rule);
    }
}

#[test]
fn checkpoints_go_from_ranks_to_servers_and_back() {
    let root = tempfile::tempdir().unwrap();
    let reference = Run::new(Alone, root.path(), "reference", &SYNC).succeeds();
    for (name, first, then) in [
        ("to servers", None, Some(2)),
        ("back", Some(2), None),
        ("other servers", Some(1), Some(3)),
    ] {
        // Later checkpoints are removed, as if it had been killed after step 3.
        let run = |servers: Option<usize>, resume: &str| {
            let ranks = servers.map_or(2, |servers| servers + 2);
            let mut run = Run::new(Simulate(ranks), root.path(), name, &SYNC);
            if !resume.is_empty() {
                run = run.resume(resume);
            }
            let mut command = run.command();
            command
                .args(servers.iter().flat_map(|servers| ["--servers".into(), servers.to_string()]));
            finish(&mut command).succeeded();
            run.files()
        };
        let files = run(first, "");
        for path in ["checkpoints/latest", "checkpoints/best", "END"] {
            std::fs::remove_file(files.path(path)).unwrap();
        }
        std::fs::remove_dir_all(files.checkpoint(6)).unwrap();
        let files = run(then, "auto");
        files.same_as(&reference, 6, name);
    }
    // Another run starts from the ranks' checkpoint.
    let from = reference.checkpoint(3).display().to_string();
    let branch = Run::new(Simulate(4), root.path(), "branch", &SYNC).resume(&from);
    finish(branch.command().args(["--servers", "2"])).succeeded();
    assert_eq!(branch.files().tensors(6), reference.tensors(6));
    // The directory of a run means its newest checkpoint.
    let from = reference.path("").display().to_string();
    let newest =
        Run::new(Simulate(4), root.path(), "newest", &[&SYNC[..], &["run.steps=7"]].concat())
            .resume(&from);
    finish(newest.command().args(["--servers", "2"])).succeeded();
    assert_eq!(newest.files().numbers("metrics.jsonl", "step"), [7.0]);
}

#[test]
fn asynchronous_workers_see_every_sample() {
    let root = tempfile::tempdir().unwrap();
    let runs: [(&str, Transport, usize, &[&str]); 4] = [
        ("threads", Simulate(5), 2, &["parameter_server.batches_per_lease=2"]),
        ("processes", Spawn(3), 1, &["parameter_server.partition='fixed:2'"]),
        (
            "bound",
            Simulate(4),
            1,
            &["parameter_server.staleness=1", "parameter_server.stale_lr='inverse'"],
        ),
        ("bf16", Simulate(4), 2, &["parameter_server.message_dtype='bf16'", "batch.worker=2"]),
    ];
    for (name, transport, servers, settings) in runs {
        let settings = [&ASYNC[..], &["run.steps=30", "eval.every=10"], settings].concat();
        let (ended, files) = served(transport, servers, root.path(), name, &settings);
        let losses = files.numbers("metrics.jsonl", "loss");
        assert_eq!(losses.len(), 30, "{name}");
        let last = losses[20..].iter().sum::<f64>() / 10.0;
        assert!(last < 0.9 * losses[0], "{name}: {losses:?}");
        assert_eq!(files.numbers("eval.jsonl", "step"), [10.0, 20.0, 30.0], "{name}");
        let workers = match transport {
            Simulate(ranks) | Spawn(ranks) => ranks - servers,
            _ => 1,
        };
        let share = if name == "bf16" { 2 } else { (8.0 / workers as f64).round() as usize };
        let manifest = json(&files.checkpoint(30).join("manifest.json"));
        assert_eq!(manifest["position"], 30 * workers * share, "{name}: every batch is done");
        assert_eq!(manifest["updates"], 30 * workers, "{name}");
        assert!(ended.stdout.contains("updates on average"), "{ended}");
    }
}

#[test]
fn checkpoints_of_asynchronous_runs_are_close_to_their_step() {
    let root = tempfile::tempdir().unwrap();
    let settings = [
        "parameter_server.staleness='none'",
        "model.layers=1",
        "model.width=8",
        "run.steps=300",
        "eval.every=0",
        "checkpoint.every=100",
        "checkpoint.keep=9",
    ];
    let (_, files) = served(Simulate(3), 1, root.path(), "tiny", &settings);
    for step in [100, 200, 300] {
        let manifest = json(&files.checkpoint(step).join("manifest.json"));
        let updates = manifest["updates"].as_u64().unwrap();
        // Two workers finish at most four steps' batches before the coordinator has accounted
        // them, and each has one batch in flight.
        let most = if step == 300 { 600 } else { 2 * step + 4 * 2 + 2 };
        assert!((2 * step..=most).contains(&updates), "step {step} has {updates} updates");
    }
    // The times of the steps add up to the time on the clock, and the rate is that of the clock.
    let times = files.numbers("metrics.jsonl", "time");
    let clock = times[299] - times[0];
    let sum = files.numbers("metrics.jsonl", "step_ms")[1..].iter().sum::<f64>() * 1e-3;
    assert!((0.9..1.1).contains(&(sum / clock)), "steps of {sum} s in {clock} s");
    let rate = json(&files.path("run.json"))["tokens_per_second"].as_f64().unwrap();
    let expected = 299.0 * 8.0 * 16.0 / clock;
    assert!((0.9..1.1).contains(&(rate / expected)), "{rate} and {expected} tokens/s");
}

#[test]
fn one_worker_alone_is_never_late() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["eval.every=0", "checkpoint.every=0"];
    let reference = Run::new(Alone, root.path(), "one rank", &settings).succeeds();
    // It has the batches of a rank, and no update comes between its pull and push.
    let settings = [&settings[..], &["parameter_server.staleness='none'"]].concat();
    let (ended, files) = served(Simulate(3), 2, root.path(), "one worker", &settings);
    assert!(ended.stdout.contains("0.00 updates on average (0: 100.0 %)"), "{ended}");
    files.same_as(&reference, 6, "one worker");
}

#[test]
fn a_gradient_that_is_not_finite_is_skipped() {
    let root = tempfile::tempdir().unwrap();
    let wild = ["optimizer.lr=1e30", "optimizer.grad_clip=0", "run.max_skipped=2", "run.steps=50"];
    for mode in [&ASYNC[..], &SYNC[..]] {
        let name = format!("wild {}", mode.len());
        let run = Run::new(Simulate(4), root.path(), &name, &[mode, &wild].concat());
        let ended = finish(run.command().args(["--servers", "2"]));
        assert_eq!(ended.code(), 1, "{ended}");
        assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
        assert!(ended.stderr.contains("2 steps in a row were not finite"), "{ended}");
        assert_eq!(json(&run.files().path("END"))["status"], "failed");
    }
}
