//! Fault injection: jobs that are killed, interrupted, out of disk space, or left with damaged
//! files. Published checkpoints must always be valid, and a run that is continued must give the
//! same bits as an undisturbed one.
//!
//! `HPCTRAIN_FAULT_RUNS` is the number of kills; default: 20.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod attacks;
mod containers;
mod copied_runs;
mod disks;
mod elastic;
mod evaluators;
mod goodput;
mod input;
mod kills;
mod memory_checkpoints;
mod observer;
mod sdc_checks;
mod servers;
mod shared_directories;
mod signals;
mod soak;
mod supervise;
mod trainers;
mod waits;

use std::path::Path;

use hpctrain_testkit::launch::{Ended, Running, Transport, processes, rank_of, send};
use hpctrain_testkit::runs::{Run, RunFiles, json};

/// A network whose checkpoint has 9 MB, so that a save takes a while, and a step about 50 ms. Four
/// virtual ranks give the same bits on up to four ranks.
const LARGE: [&str; 8] = [
    "model.layers=4",
    "model.width=128",
    "model.heads=4",
    "model.dropout=0.1",
    "parallel.virtual_ranks=4",
    "eval.samples=16",
    "checkpoint.keep=2",
    "checkpoint.every=2",
];

/// Panics unless all records of a job say that it was preempted.
#[track_caller]
fn preempted(ended: &Ended, files: &RunFiles, transport: Transport) {
    assert_eq!(ended.code(), 75, "{ended}");
    assert_eq!(json(&files.path("END"))["status"], "preempted", "{ended}");
    assert!(!files.path("run.json").exists(), "{ended}");
    let ranks = match transport {
        Transport::Alone => 1,
        Transport::Mpirun(ranks) | Transport::Spawn(ranks) => ranks,
        // All threads share one log.
        Transport::Simulate(_) => 0,
    };
    for rank in 0..ranks {
        let log = files.text(&format!("logs/rank-{rank:05}.log"));
        assert!(log.lines().last().unwrap().contains("Preempted"), "rank {rank}: {log}");
    }
}

/// Panics unless a job ended with exit code 2, one error with these words, and a hint.
#[track_caller]
fn refused(ended: &Ended, words: &[&str]) {
    assert_eq!(ended.code(), 2, "{ended}");
    assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
    for word in words.iter().chain(&["hint:"]) {
        assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
    }
}

/// Returns the processes of a run's ranks in rank order; incomplete while they start.
fn ranks(run: &Run) -> Vec<u32> {
    let all = processes(&format!("run.root={}", run.root.display()));
    match run.transport {
        Transport::Alone | Transport::Simulate(_) => all,
        Transport::Mpirun(_) | Transport::Spawn(_) => {
            let mut ranks: Vec<(usize, u32)> =
                all.iter().filter_map(|pid| Some((rank_of(*pid)?, *pid))).collect();
            ranks.sort_unstable();
            ranks.into_iter().map(|(_, pid)| pid).collect()
        }
    }
}

/// Returns whether a checkpoint of a run is being written.
fn saves(files: &RunFiles) -> bool {
    let Ok(entries) = files.path("checkpoints").read_dir() else { return false };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().contains(".tmp-"))
}

/// Returns the current number of lines of a file.
fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

/// Waits until a run has taken `step` steps.
#[track_caller]
fn until_step(job: &mut Running, files: &RunFiles, step: usize) {
    job.until(&format!("at step {step}"), || lines(&files.path("metrics.jsonl")) >= step);
}

/// Kills a process.
fn kill(pid: u32) {
    send(pid, libc::SIGKILL);
}
