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

/// Categories whose peaks follow from the layout of a stage; of the rest, buffers are counted as they are needed.
const OF_A_STAGE: [&str; 4] = ["parameters", "gradients", "optimizer", "activations"];

#[test]
fn the_first_stage_takes_what_is_said_of_it() {
    let root = tempfile::tempdir().unwrap();
    let mut cases = Vec::new();
    for zero in 0..4 {
        for (pipeline, recompute) in [(2, false), (2, true), (4, false)] {
            cases.push((zero, pipeline, recompute));
        }
    }
    for (i, (zero, pipeline, recompute)) in cases.into_iter().enumerate() {
        let layout = [
            format!("parallel.zero={zero}"),
            format!("parallel.pipeline={pipeline}"),
            format!("parallel.recompute={recompute}"),
            // Training takes more than an evaluation.
            "eval.batch=1".into(),
        ];
        let layout: Vec<&str> = layout.iter().map(String::as_str).collect();
        let (ranks, name) = (if zero == 0 { pipeline } else { 2 * pipeline }, format!("x-{i}"));
        let run = Run::new(Transport::Simulate(ranks), root.path(), &name, &[&BIG[..], &layout].concat());
        let ended = run.ends().succeeded();
        let line = ended.stdout.lines().find(|line| line.starts_with("memory ")).unwrap();
        let card: Value = serde_json::from_str(&run.files().text("run.json")).unwrap();
        for category in OF_A_STAGE {
            let said = mib_of(line, category);
            let taken = card["peak_bytes"][category].as_f64().unwrap() / (1 << 20) as f64;
            println!("{layout:?} {category}: {said:.2} MiB said, {taken:.2} MiB taken");
            // The banner rounds to 0.1 MiB.
            let is_near = (taken - said).abs() <= 0.05 * said + 0.05;
            assert!(is_near, "{layout:?} {category}: {said:.2} MiB said, {taken:.2} MiB taken");
        }
    }
}

/// The MiB of a category in the banner's line.
fn mib_of(line: &str, category: &str) -> f64 {
    let part = line.split([':', ',']).map(str::trim).find_map(|part| part.strip_prefix(category)).unwrap().trim();
    let (number, unit) = part.split_once(' ').unwrap();
    number.parse::<f64>().unwrap() / if unit == "KiB" { 1024.0 } else { 1.0 }
}
