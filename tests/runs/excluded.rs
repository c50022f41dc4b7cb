//! `data.exclude`: branches of a run without some of its samples.

use std::path::{Path, PathBuf};

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles, json};

use super::samples::{imported, which};

/// Returns the numbers of the samples of a step, in the order of their positions.
fn samples(run: &RunFiles, step: u64) -> Vec<u64> {
    which(&run.0, step, &[]).iter().map(|sample| sample["sample"].as_u64().unwrap()).collect()
}

/// Writes a list of samples.
fn list(root: &Path, name: &str, samples: &[u64]) -> (PathBuf, String) {
    let path = root.join(name);
    let lines: Vec<String> = samples.iter().map(|sample| format!("{sample} # bad\n")).collect();
    std::fs::write(&path, lines.concat()).unwrap();
    let setting = format!("data.exclude={}", path.display());
    (path, setting)
}

/// A branch without two samples of step 5 has the bits of the run until then, and never reads them.
#[test]
fn a_branch_is_the_run_up_to_the_first_excluded_sample() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 5);
    // 420 samples: the run sees them more than once.
    let settings = [
        &data[..],
        "parallel.virtual_ranks=4",
        "run.steps=8",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "lr_schedule.kind=constant",
    ];
    let run = Run::new(Alone, root.path(), "run", &settings).succeeds();
    let bad = samples(&run, 5);
    let bad = [bad[1], bad[6]];
    let (_, exclude) = list(root.path(), "exclude.txt", &bad);
    let from = run.checkpoint(2).display().to_string();
    let without = [&settings[..], &[&exclude]].concat();
    let branch = |transport, name: &str, more: &[&str]| {
        let settings = [&without[..], more].concat();
        Run::new(transport, root.path(), name, &settings).resume(&from).ends().succeeded()
    };
    let ended = branch(Alone, "one", &[]);
    let digest = json(&root.path().join("one/checkpoints/step-00000008/manifest.json"));
    let excluded = &digest["data"]["excluded"];
    assert_eq!(excluded["samples"], 2);
    let digest = excluded["digest"].as_str().unwrap();
    let line = "exclude      2 samples (data.exclude = ";
    assert!(ended.stdout.contains(line) && ended.stdout.contains(digest), "{ended}");
    let change = format!("data.exclude: excluded samples: 2 ({digest}), before none");
    let warning = format!("the run resumes with other training data: {change}");
    assert!(ended.stderr.contains(&warning), "{ended}");
    let one = RunFiles(root.path().join("one"));
    let record = json(&one.path("run.json"));
    assert_eq!(record["data_changes"][0]["step"], 2);
    assert_eq!(record["data_changes"][0]["what"], change[..]);

    // Steps 3 and 4 have the same bits, step 5 has others.
    let of_run = run.steps();
    let of_one = one.steps();
    assert_eq!(of_one[..2], of_run[2..4]);
    assert_ne!(of_one[2], of_run[4]);
    for step in 3..=8 {
        let before = samples(&run, step);
        let now = samples(&one, step);
        for (before, now) in before.iter().zip(&now) {
            assert!(before == now || bad.contains(before), "step {step}");
            assert!(!bad.contains(now), "step {step}");
        }
        let mut distinct = now.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), now.len(), "step {step}");
    }

    // The same bits on more ranks, and after a resume.
    branch(Mpirun(2), "two", &["parallel.zero=1"]);
    branch(Simulate(4), "four", &["parallel.zero=3"]);
    for name in ["two", "four"] {
        let files = RunFiles(root.path().join(name));
        assert_eq!(files.steps(), of_one, "{name}");
        assert_eq!(files.tensors(8), one.tensors(8), "{name}");
    }
    let parts =
        Run::new(Simulate(2), root.path(), "parts", &[&without[..], &["run.steps=6"]].concat());
    parts.clone().resume(&from).succeeds();
    let mut rest = parts.resume("auto");
    rest.settings.push("run.steps=8".into());
    let rest = rest.ends().succeeded();
    assert!(!rest.stderr.contains("other training data"), "{rest}");
    let parts = RunFiles(root.path().join("parts"));
    assert_eq!(parts.tensors(8), one.tensors(8));

    // Another list under the same name is reported, and `data which` refuses it.
    let more = [&bad[..], &[0]].concat();
    list(root.path(), "exclude.txt", &more);
    let refused = finish(program(["data", "which", "--step", "5"]).arg(&one.0));
    assert_eq!(refused.code(), 2, "{refused}");
    let expected = "has changed since the run: data.exclude: excluded samples: 3 (";
    assert!(refused.stderr.contains(expected), "{refused}");
    // The start is recorded, too.
    [6, 8].into_iter().for_each(|step| std::fs::remove_dir_all(one.checkpoint(step)).unwrap());
    let refused = finish(program(["data", "which", "--step", "5"]).arg(&one.0));
    assert!(refused.code() == 2 && refused.stderr.contains(expected), "{refused}");
    let refused = finish(program(["replay", "--steps", "5..6"]).arg(&one.0));
    assert_eq!(refused.code(), 2, "{refused}");
    assert!(refused.stderr.contains(expected), "{refused}");
    let again = [&without[..], &["run.steps=9"]].concat();
    let again = Run::new(Alone, root.path(), "parts", &again).resume("auto").ends().succeeded();
    assert!(again.stderr.contains("other training data: data.exclude: excluded samples: 3 ("));
    let described = finish(program(["checkpoint", "inspect"]).arg(parts.checkpoint(9))).succeeded();
    assert!(described.stdout.contains(", without 3 ("), "{described}");
}

/// Evaluations read all samples of their split.
#[test]
fn evaluation_is_not_affected() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 1);
    let settings = [&data[..], "optimizer.lr=1e-30", "eval.every=6"];
    let whole = Run::new(Alone, root.path(), "whole", &settings).succeeds();
    let numbers: Vec<u64> = (0..200).collect();
    let (_, exclude) = list(root.path(), "exclude.txt", &numbers);
    let settings = [&settings[..], &[&exclude]].concat();
    let without = Run::new(Alone, root.path(), "without", &settings).succeeds();
    assert_eq!(without.evaluations(), whole.evaluations());
    assert_ne!(without.steps(), whole.steps());
    // Nor does an evaluator refuse the key.
    let mut eval = program(["eval", "--policy", "every", "--set", &exclude, "--run"]);
    finish(eval.arg(&whole.0)).succeeded();
}

#[test]
fn lists_that_cannot_be_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 2);
    let refused = |content: &str, more: &[&str], expected: &str| {
        let path = root.path().join("list.txt");
        std::fs::write(&path, content).unwrap();
        let exclude = format!("data.exclude={}", path.display());
        let settings = [&[&data[..], &exclude][..], more].concat();
        let ended = Run::new(Simulate(2), root.path(), "x", &settings).ends();
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stderr.contains(expected) && ended.stderr.contains("\nhint: "), "{ended}");
        assert!(!root.path().join("x").exists(), "a refused run leaves no directory");
    };
    refused("1\nx\n", &[], "list.txt, line 2: \"x\" is not the number of a sample");
    refused(
        "1\n99999\n",
        &[],
        "list.txt, line 2: there is no sample 99999: the training data has ",
    );
    refused("\n", &[], "list.txt lists no sample");
    let all: String = (0..10_000).map(|number| format!("{number}\n")).collect();
    refused(&all, &[], "there is no sample ");
    let samples = {
        let config = [&data[..], "model.context=16"];
        let overrides: Vec<String> = config.iter().map(|it| it.to_string()).collect();
        let sources = hpctrain::config::Sources { overrides: &overrides, ..Default::default() };
        let config = hpctrain::config::load(&sources).unwrap().0;
        hpctrain::engine::micro_batches::open(&config).unwrap().0.samples()
    };
    let but = |left: u64| -> String { (left..samples).map(|it| format!("{it}\n")).collect() };
    refused(&but(0), &["data.repeat=true"], "data.exclude lists all training samples of ");
    refused(
        &but(7),
        &[],
        "has 7 training samples of 16 tokens that data.exclude does not list, fewer than \
         batch.global = 8\nhint: set batch.global to at most 7",
    );
    let missing = Run::new(Alone, root.path(), "y", &[&data, "data.exclude=/nowhere/x.txt"]).ends();
    assert_eq!(missing.code(), 2);
    let expected = "data.exclude = /nowhere/x.txt does not exist\nhint: ";
    assert!(missing.stderr.contains(expected), "{missing}");
    let (_, exclude) = list(root.path(), "good.txt", &[1]);
    let servers = Run::new(Simulate(3), root.path(), "z", &[&data, &exclude]);
    let ended = finish(servers.command().args(["--servers", "1"]));
    assert_eq!(ended.code(), 2);
    assert!(ended.stderr.contains("data.exclude is set, but parameter servers"), "{ended}");
}
