//! The banner's promise of memory against what the process took.

use serde_json::Value;

use crate::common::launch::Transport::{self, Alone, Mpirun};
use crate::common::runs::Run;

/// A network whose own memory is several times that of the program.
const BIG: [&str; 9] = [
    "model.layers=4",
    "model.width=256",
    "model.heads=4",
    "model.context=64",
    "batch.global=16",
    "run.steps=2",
    "eval.samples=32",
    "eval.batch=16",
    "run.threads=1",
];

/// The promise in MiB: the banner's line is "memory       123.4 MiB a rank: …".
fn promised(stdout: &str) -> f64 {
    let line = stdout.lines().find(|line| line.starts_with("memory ")).unwrap();
    let (number, _) = line["memory ".len()..].trim().split_once(" MiB a rank: ").unwrap();
    number.parse().unwrap()
}

/// Promise and peak may differ by this part of the promise.
const TOLERANCE: f64 = 0.1;

#[test]
fn the_banner_promises_what_a_run_takes() {
    let layouts: [(Transport, &str); 4] = [
        (Alone, "parallel.zero=0"),
        (Alone, "parallel.recompute=true"),
        (Mpirun(2), "parallel.zero=0"),
        (Mpirun(2), "parallel.zero=3"),
    ];
    let root = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (i, (transport, layout)) in layouts.into_iter().enumerate() {
        let run = Run::new(transport, root.path(), &format!("x-{i}"), &[&BIG[..], &[layout]].concat());
        let ended = run.ends().succeeded();
        let card: Value = serde_json::from_str(&run.files().text("run.json")).unwrap();
        let peak = card["peak_resident_bytes"].as_f64().unwrap() / (1 << 20) as f64;
        let promise = promised(&ended.stdout);
        let line = ended.stdout.lines().find(|line| line.starts_with("memory ")).unwrap();
        println!(
            "{transport:?} {layout}: {promise} MiB promised, {peak:.1} MiB taken\n  {line}\n  {}",
            card["peak_bytes"]
        );
        if (peak - promise).abs() > TOLERANCE * promise {
            wrong.push(format!("{transport:?} {layout}: {promise} MiB promised, {peak:.1} MiB taken"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
