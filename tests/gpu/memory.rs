//! The banner's promise of GPU memory against what a run took of it, in the GPU's simulator.

use std::path::Path;

use crate::common::launch::Transport::{self, Alone, Mpirun};
use crate::common::launch::{Ended, finish};
use crate::common::runs::{Run, json};
use crate::common::simulator::with_simulator;

/// A network whose own memory is several times that of one activation.
const BIG: [&str; 10] = [
    "run.device=cuda",
    "model.layers=4",
    "model.width=192",
    "model.heads=3",
    "model.context=64",
    "batch.global=4",
    "batch.micro=2",
    "run.steps=2",
    "eval.samples=2",
    "eval.batch=2",
];

/// The promise in MiB: the banner's line is "gpu memory   123.4 MiB a rank: …".
fn promised(stdout: &str) -> f64 {
    let line = stdout.lines().find(|line| line.starts_with("gpu memory ")).unwrap();
    let (number, _) = line["gpu memory ".len()..].trim().split_once(" MiB a rank: ").unwrap();
    number.parse().unwrap()
}

fn run(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> (Run, Ended) {
    let run = Run::new(transport, root, name, &[&BIG, settings].concat());
    let ended = finish(with_simulator(&mut run.command()).env("CUDASIM_DEVICES", "2")).succeeded();
    (run, ended)
}

/// Promise and peak may differ by this part of the promise.
const TOLERANCE: f64 = 0.03;

/// The workspace of matrix products in MiB: the same in every run, and so no part of what is compared.
const WORKSPACE: f64 = 32.0;

/// Layouts that also run where there is little more than what was promised: no pieces of free memory are left over that
/// are too small for anything, but for one that is smaller than the largest buffer. That has 1.7 MiB, a block's gradients.
const TIGHT: [&str; 2] = ["parallel.zero=0", "parallel.zero=3"];
const LARGEST: f64 = 1.71;

#[test]
fn the_banner_promises_what_a_run_takes_of_a_gpu() {
    let layouts: [(Transport, &str); 12] = [
        (Alone, "parallel.zero=0"),
        (Alone, "parallel.zero=0 optimizer.offload=true"),
        (Alone, "parallel.recompute=true"),
        (Alone, "parallel.lanes=2 batch.micro=1"),
        (Alone, "precision.compute=f32 optimizer.offload=true model.dropout=0.1"),
        (Alone, "eval.batch=24 eval.samples=24"),
        (Mpirun(2), "parallel.zero=0"),
        (Mpirun(2), "parallel.zero=2 batch.micro=1"),
        (Mpirun(2), "parallel.zero=3"),
        (Mpirun(2), "parallel.zero=3 optimizer.offload=true"),
        (Mpirun(2), "parallel.zero=3 precision.compute=f32"),
        (Mpirun(2), "parallel.zero=3 parallel.recompute=true optimizer.offload=true batch.global=8"),
    ];
    let root = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (i, (transport, layout)) in layouts.into_iter().enumerate() {
        let settings: Vec<&str> = layout.split_whitespace().collect();
        let (ran, ended) = run(transport, root.path(), &format!("x-{i}"), &settings);
        let card = json(&ran.files().path("run.json"));
        let peak = card["peak_gpu_bytes"].as_f64().unwrap() / f64::from(1 << 20);
        let promise = promised(&ended.stdout);
        let line = ended.stdout.lines().find(|line| line.starts_with("gpu memory ")).unwrap();
        let off = (promise - peak) / (promise - WORKSPACE);
        println!(
            "{transport:?} {layout}: {promise} MiB promised, {peak:.1} MiB taken: {:.1} % off\n  {line}",
            100.0 * off
        );
        if off.abs() > TOLERANCE {
            wrong.push(format!("{transport:?} {layout}: {promise} MiB promised, {peak:.1} MiB taken"));
        }
        if TIGHT.contains(&layout) {
            let limit = format!("device.memory_limit={}KiB", (1024.0 * (promise + LARGEST)) as u64);
            run(transport, root.path(), &format!("tight-{i}"), &[layout, &limit]);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
