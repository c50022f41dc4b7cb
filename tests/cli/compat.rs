//! Records of older versions in `tests/compat/` are read by this one: configurations, runs and
//! checkpoints.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{Ended, finish, program};

/// The records of a version.
fn records(version: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compat").join(version)
}

/// Copies the run of a version into `root`.
fn copied_run(version: &str, root: &Path) -> PathBuf {
    let copied =
        Command::new("cp").arg("-a").arg(records(version).join("run")).arg(root).status().unwrap();
    assert!(copied.success());
    root.join("run")
}

fn upgrade(file: &Path, more: &[&str]) -> Ended {
    finish(program(["config", "upgrade"]).arg(file).args(more))
}

#[test]
fn former_names_are_upgraded() {
    let file = records("0.1").join("former-names.toml");
    let expected = fs::read_to_string(records("0.1").join("former-names.upgraded.toml")).unwrap();
    let ended = upgrade(&file, &[]).succeeded();
    assert_eq!(ended.stdout.trim_end(), expected.trim_end());
    for line in ["parallel.lanes is now parallel.virtual_ranks", "servers is now parameter_server"]
    {
        assert!(ended.stderr.lines().any(|printed| printed == line), "{ended}");
    }

    // The file and its upgrade are the same configuration.
    let shown = |file: &Path| {
        let mut command = program(["config", "show", "--set", "data.local_cache=/tmp", "--config"]);
        finish(command.arg(file)).stdout
    };
    let root = tempfile::tempdir().unwrap();
    let copy = root.path().join("mine.toml");
    fs::copy(&file, &copy).unwrap();
    upgrade(&copy, &["--in-place"]).succeeded();
    assert_eq!(fs::read_to_string(&copy).unwrap(), expected);
    assert_eq!(shown(&file), shown(&copy));
    let ended = upgrade(&copy, &["--in-place"]).succeeded();
    assert!(ended.stderr.contains("has the present names of all keys"), "{ended}");
    assert_eq!(fs::read_to_string(&copy).unwrap(), expected);

    fs::write(&copy, "[run]\nstep = 3\n").unwrap();
    let ended = upgrade(&copy, &["--in-place"]);
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("mine.toml") && ended.stderr.contains("hint: "), "{ended}");
    let ended = upgrade(&root.path().join("none.toml"), &[]);
    assert!(ended.code() == 2 && ended.stderr.contains("none.toml"), "{ended}");
}

#[test]
fn runs_of_older_versions_are_read() {
    let root = tempfile::tempdir().unwrap();
    let run = copied_run("0.1", root.path());
    let run_text = run.to_str().unwrap();
    let report = root.path().join("report.html");
    for args in [
        &["report", run_text, "--out", report.to_str().unwrap()][..],
        &["watch", run_text, "--once"],
        &["compare", run_text, run_text],
        &["checkpoint", "verify", run_text],
    ] {
        finish(&mut program(args)).succeeded();
    }
    let ended = finish(program(["runs"]).arg(root.path()).arg("--json")).succeeded();
    let listed: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(listed["runs"][0]["step"], 4, "{listed:#}");
    assert_eq!(listed["runs"][0]["notes"], Value::Array(vec![]), "{listed:#}");

    // Its configuration may have former names, as in runs of versions that had them.
    let config = run.join("config.toml");
    let text = fs::read_to_string(&config).unwrap();
    assert!(text.contains("async_save = ") && text.contains("[lr_schedule]"));
    let former =
        text.replace("async_save = ", "asynchronous = ").replace("[lr_schedule]", "[schedule]");
    fs::write(&config, former).unwrap();
    let screen = finish(&mut program(["watch", run_text, "--once"])).succeeded().stdout;
    assert!(screen.contains("step 4 of 4"), "{screen}");
}

#[test]
fn checkpoints_of_older_versions_go_on() {
    let version = "0.1";
    let expected = fs::read_to_string(records(version).join("next-steps.jsonl")).unwrap();
    let losses = |text: &str| -> Vec<(u64, f64)> {
        let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        records.map(|one| (one["step"].as_u64().unwrap(), one["loss"].as_f64().unwrap())).collect()
    };
    for transport in [Alone, Mpirun(2), Simulate(2)] {
        let root = tempfile::tempdir().unwrap();
        let run = copied_run(version, root.path());
        let mut command = transport.train();
        command.arg("--config").arg(run.join("config.toml"));
        let root_key = format!("run.root={}", root.path().display());
        let shard = if transport == Alone { 1 } else { 2 };
        for setting in ["run.steps=6", &root_key, &format!("parallel.shard={shard}")] {
            command.args(["--set", setting]);
        }
        finish(command.args(["--resume", "auto"])).succeeded();
        let all = losses(&fs::read_to_string(run.join("metrics.jsonl")).unwrap());
        let (known, now) = (losses(&expected), &all[4..]);
        assert_eq!(now.len(), known.len());
        for (one, other) in now.iter().zip(&known) {
            // Other processors may add in another order.
            let difference = (one.1 - other.1).abs();
            assert!(one.0 == other.0 && difference < 1e-5, "{transport:?}: {one:?} {other:?}");
        }
    }
}
