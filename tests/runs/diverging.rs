//! Losses and gradients that are not finite: updates are skipped and counted, and the run ends
//! after too many in a row.

use std::path::Path;
use std::process::{Command, Output};

use hpctrain_testkit::launch::inherits_nothing;

const TINY: [&str; 8] = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=8",
    "eval.samples=8",
    "log.sample_tokens=0",
    "run.name=x",
    "run.threads=1",
];

fn run(root: &Path, arguments: &[&str], settings: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpctrain"));
    command.args(arguments).arg("--set").arg(format!("run.root={}", root.display()));
    for setting in TINY.iter().chain(settings) {
        command.args(["--set", setting]);
    }
    inherits_nothing(&mut command).output().unwrap()
}

fn records(root: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(root.join("x/metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_that_diverges_skips_and_then_gives_up() {
    for arguments in [&["train"][..], &["simulate", "--ranks", "2"]] {
        let root = tempfile::tempdir().unwrap();
        // The first update overflows the weights, and nothing is finite afterwards.
        let settings =
            ["run.steps=50", "run.max_skipped=4", "optimizer.lr=1e38", "lr_schedule.warmup=0"];
        let output = run(root.path(), arguments, &settings);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert_eq!(stderr.matches("error:").count(), 1, "{stderr}");
        assert!(
            stderr.contains("4 steps in a row were not finite") && stderr.contains("hint:"),
            "{stderr}"
        );
        let records = records(root.path());
        let skipped = records.iter().filter(|record| record["skipped"] == true).count();
        assert_eq!(skipped, 4);
        assert!(records.len() < 50 && records[0].get("skipped").is_none());
        assert!(records.last().unwrap()["loss"].is_null());
    }
}
