//! TensorBoard event files, as read by TensorBoard itself.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::peers::{events, events_in};
use hpctrain_testkit::runs::{Run, RunFiles};

/// With four virtual ranks, any number of ranks gives the same bits.
const SETTINGS: [&str; 9] = [
    "log.tensorboard=true",
    "log.histograms=3",
    "log.sample_tokens=12",
    "log.straggler_window=2",
    "parallel.virtual_ranks=4",
    "batch.micro=1",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "eval.every=3",
];

fn run(transport: Transport, root: &Path, name: &str, more: &[&str]) -> Run {
    Run::new(transport, root, name, &[&SETTINGS, more].concat())
}

/// Returns the points of a tag: step and value.
fn points(found: &Value, tag: &str) -> Vec<(u64, f64)> {
    let all = found["scalars"][tag]
        .as_array()
        .unwrap_or_else(|| panic!("no {tag}: {}", found["scalars"]));
    all.iter().map(|one| (one[0].as_u64().unwrap(), one[1].as_f64().unwrap())).collect()
}

/// Returns the same points from a file of JSON lines, in the f32 of TensorBoard.
fn recorded(files: &RunFiles, file: &str, key: &str) -> Vec<(u64, f64)> {
    let values = files.numbers(file, key).into_iter().map(|value| f64::from(value as f32));
    files.numbers(file, "step").into_iter().map(|step| step as u64).zip(values).collect()
}

#[test]
fn points_are_those_of_the_records() {
    let root = tempfile::tempdir().unwrap();
    let files = run(Simulate(2), root.path(), "x", &[]).succeeds();
    assert_eq!(files.text("rank_times.jsonl").lines().count(), 3);
    let Some(found) = events(&files.0) else { return };
    for (tag, key) in [
        ("loss/training", "loss"),
        ("optimizer/learning_rate", "lr"),
        ("optimizer/gradient_norm", "grad_norm"),
        ("speed/tokens_per_second", "tokens_per_second"),
        ("memory/peak_bytes", "peak_bytes"),
        ("time/step_ms", "step_ms"),
        ("time/compute_ms", "compute_ms"),
        ("time/exposed_communication_ms", "comm_exposed_ms"),
        ("time/hidden_communication_ms", "comm_hidden_ms"),
        ("time/loader_ms", "loader_ms"),
        ("time/optimizer_ms", "optimizer_ms"),
    ] {
        assert_eq!(points(&found, tag), recorded(&files, "metrics.jsonl", key), "{tag}");
    }
    assert_eq!(points(&found, "loss/validation"), recorded(&files, "eval.jsonl", "loss"));
    assert_eq!(points(&found, "loss/validation").len(), 2);

    let text = |tag: &str| {
        found["texts"][tag][0][1].as_str().unwrap_or_else(|| panic!("no {tag}: {found}"))
    };
    assert!(
        text("texts/startup_summary").contains("    layout       pipeline 1 × replica 2"),
        "{}",
        text("texts/startup_summary")
    );
    assert!(text("texts/configuration").contains("    tensorboard = true"));
    let sample: Value =
        serde_json::from_str(files.text("samples.jsonl").lines().next().unwrap()).unwrap();
    let first_line = sample["text"].as_str().unwrap().lines().next().unwrap();
    assert!(text("texts/sample").starts_with(&format!("    {first_line}")) && sample["step"] == 6);

    let histograms = found["histograms"].as_object().unwrap();
    let of = |kind: &str| histograms.keys().filter(|tag| tag.starts_with(kind)).count();
    assert!(of("weights/") == of("gradients/") && of("weights/") > 10, "{:?}", histograms.keys());
    for (tag, of_tensor) in histograms {
        let steps: Vec<u64> =
            of_tensor.as_array().unwrap().iter().map(|one| one[0].as_u64().unwrap()).collect();
        assert_eq!(steps, [3, 6], "{tag}");
        for one in of_tensor.as_array().unwrap() {
            let counts: f64 =
                one[7].as_array().unwrap().iter().map(|count| count.as_f64().unwrap()).sum();
            assert!(Some(counts) == one[3].as_f64() && counts > 0.0, "{tag}: {one}");
        }
    }
    // The matrix has 32 × 96 values.
    assert_eq!(found["histograms"]["weights/h.0.attn.c_attn.weight"][0][3].as_f64(), Some(3072.0));
    // The norm of all gradients follows from their squares.
    let squares = |at: usize| -> f64 {
        let gradients = histograms.iter().filter(|(tag, _)| tag.starts_with("gradients/"));
        gradients.map(|(_, of_tensor)| of_tensor[at][5].as_f64().unwrap()).sum()
    };
    let norms = files.numbers("metrics.jsonl", "grad_norm");
    for (at, step) in [(0, 3), (1, 6)] {
        let norm = squares(at).sqrt();
        assert!(
            (norm / norms[step - 1] - 1.0).abs() < 1e-6,
            "step {step}: {norm} and {}",
            norms[step - 1]
        );
    }
}

/// Ranks have different parts of the tensors in each layout, but the histograms have the same bits.
#[test]
fn histograms_are_the_same_in_every_layout() {
    let root = tempfile::tempdir().unwrap();
    let histograms = |transport, name: &str, more: &[&str]| {
        let files = run(transport, root.path(), name, more).succeeds();
        events(&files.0).map(|found| found["histograms"].clone())
    };
    let slices = ["parallel.virtual_tensor_ranks=2"];
    let Some(reference) = histograms(Alone, "reference", &slices) else { return };
    assert!(reference.as_object().unwrap().len() >= 30);
    for (at, (transport, more)) in [
        (Simulate(4), &["parallel.zero=0"][..]),
        (Mpirun(4), &["parallel.zero=3"]),
        (Simulate(4), &["parallel.zero=2", "parallel.shard=2"]),
        (Simulate(4), &["parallel.pipeline=2", "parallel.zero=1"]),
        (Simulate(4), &["parallel.tensor=2", "parallel.zero=1"]),
        (Simulate(2), &["parallel.storage=central"]),
    ]
    .into_iter()
    .enumerate()
    {
        let found = histograms(transport, &format!("x-{at}"), &[&slices, more].concat()).unwrap();
        let tags = |of: &Value| of.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(tags(&found), tags(&reference), "{more:?}");
        for (tag, of_tensor) in found.as_object().unwrap() {
            assert_eq!(of_tensor, &reference[tag], "{tag} with {more:?}");
        }
    }
}

/// With local SGD, the histograms of gradients are those of the first replica.
#[test]
fn local_sgd_has_histograms() {
    let root = tempfile::tempdir().unwrap();
    let local_sgd = ["local_sgd.sync_every=3", "parallel.replica=2", "checkpoint.every=3"];
    let files = run(Simulate(2), root.path(), "x", &local_sgd).succeeds();
    let Some(found) = events(&files.0) else { return };
    let of_tensor = &found["histograms"]["gradients/h.0.attn.c_attn.weight"];
    assert_eq!(
        (of_tensor[0][0].as_u64(), of_tensor[0][3].as_f64()),
        (Some(3), Some(3072.0)),
        "{of_tensor}"
    );
}

/// A run that was killed while writing a record and resumes from an older checkpoint has each point
/// once, with the last value.
#[test]
fn a_resumed_run_has_no_point_twice() {
    let root = tempfile::tempdir().unwrap();
    let asked = run(Alone, root.path(), "x", &[]);
    let files = asked.succeeds();
    std::fs::remove_dir_all(files.checkpoint(6)).unwrap();
    std::fs::remove_file(files.path("run.json")).unwrap();
    let entry = std::fs::read_dir(files.path("tensorboard")).unwrap().next().unwrap().unwrap();
    let mut torn = std::fs::OpenOptions::new().append(true).open(entry.path()).unwrap();
    torn.write_all(&[77, 0, 0, 0, 0, 0, 0, 0, 1, 2]).unwrap();
    let files = asked.resume("auto").succeeds();
    assert_eq!(std::fs::read_dir(files.path("tensorboard")).unwrap().count(), 2);
    let Some(found) = events(&files.0) else { return };
    assert_eq!(points(&found, "time/step_ms"), recorded(&files, "metrics.jsonl", "step_ms"));
    assert_eq!(points(&found, "loss/validation"), recorded(&files, "eval.jsonl", "loss"));
    let steps = |kind: &str, tag: &str| -> Vec<u64> {
        found[kind][tag].as_array().unwrap().iter().map(|one| one[0].as_u64().unwrap()).collect()
    };
    assert_eq!(steps("histograms", "weights/h.0.attn.c_attn.weight"), [3, 6]);
    assert_eq!(steps("texts", "texts/sample"), [6]);
    assert_eq!(steps("texts", "texts/startup_summary"), [1, 5]);
}

/// Asynchronous runs on parameter servers record the staleness of gradients.
#[test]
fn runs_on_servers_record_staleness() {
    let root = tempfile::tempdir().unwrap();
    let more = ["parameter_server.staleness=none", "log.histograms=0"];
    let asked =
        Run::new(Simulate(3), root.path(), "x", &["log.tensorboard=true", more[0], more[1]]);
    let files = asked.files();
    finish(asked.command().args(["--servers", "1"])).succeeded();
    let Some(found) = events(&files.0) else { return };
    let mut of_steps: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    let given = files
        .numbers("workers.jsonl", "step")
        .into_iter()
        .zip(files.numbers("workers.jsonl", "staleness"));
    given.for_each(|(step, staleness)| of_steps.entry(step as u64).or_default().push(staleness));
    let mean = |(step, all): (u64, Vec<f64>)| {
        (step, f64::from((all.iter().sum::<f64>() / all.len() as f64) as f32))
    };
    assert_eq!(
        points(&found, "servers/staleness"),
        of_steps.into_iter().map(mean).collect::<Vec<_>>()
    );
}

/// An evaluator writes a file of its own, which has each evaluation once, also the last one.
#[test]
fn evaluators_write_their_own_points() {
    let root = tempfile::tempdir().unwrap();
    let more = ["eval.inline=false", "eval.samples=20", "log.histograms=0"];
    let asked = run(Alone, root.path(), "x", &more);
    let files = asked.succeeds();
    let evaluate = || {
        let mut command = program(["eval", "--policy", "every", "--run"]);
        finish(command.arg(&files.0)).succeeded()
    };
    evaluate();
    let folder = files.path("tensorboard/evaluator");
    let only = |folder: &Path| {
        let mut names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        names.find(|path| path.display().to_string().contains("tfevents")).unwrap()
    };
    let whole = std::fs::read(only(&folder)).unwrap();
    let lines = files.text("eval.jsonl");
    // It was killed after the line and before the whole point of the last evaluation.
    std::fs::write(only(&folder), &whole[..whole.len() - 9]).unwrap();
    evaluate();
    evaluate();
    assert_eq!(files.text("eval.jsonl"), lines);
    // The trainer goes back to step 4: the point of step 6 is no longer one of the run.
    if let Some(found) = events_in(&folder) {
        assert_eq!(points(&found, "loss/validation"), recorded(&files, "eval.jsonl", "loss"));
        let steps = points(&found, "loss/validation").into_iter().map(|(step, _)| step);
        assert_eq!(steps.collect::<Vec<_>>(), [2, 4, 6]);
        let of_trainer = events(&files.0).unwrap();
        assert!(of_trainer["scalars"]["loss/validation"].is_null(), "{of_trainer}");
    }
    std::fs::remove_dir_all(files.checkpoint(6)).unwrap();
    std::fs::remove_file(files.path("run.json")).unwrap();
    asked.resume("auto").succeeds();
    assert_eq!(files.numbers("eval.jsonl", "step"), [2.0, 4.0]);
    if let Some(found) = events_in(&folder) {
        assert_eq!(points(&found, "loss/validation"), recorded(&files, "eval.jsonl", "loss"));
    }
    evaluate();
    if let Some(found) = events_in(&folder) {
        assert_eq!(points(&found, "loss/validation"), recorded(&files, "eval.jsonl", "loss"));
        assert_eq!(points(&found, "loss/validation").len(), 3);
    }
}
