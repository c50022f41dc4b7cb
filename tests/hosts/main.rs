//! Jobs across hosts, which `scripts/hosts` makes of network namespaces: the bits of one rank,
//! bytes between hosts, clocks, roles on other hosts, cables that are cut, hosts that vanish, and
//! the job scripts under Slurm. Skipped, with the reason, if such hosts cannot be made.
//!
//! With `HPCTRAIN_TEST_HOSTS` set, as `scripts/test full` does, all layouts and all faults are
//! tried; otherwise, layouts with different communication, and one fault of each kind.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod cables;
mod elastic;
mod layouts;
mod memory_checkpoints;
mod roles;
mod script;
mod slurm;
mod supervise;
mod traces;
mod traffic;

use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::{Running, rank_of};
use hpctrain_testkit::runs::{Run, RunFiles};

/// Returns true if all layouts and faults are tried.
fn long() -> bool {
    std::env::var_os("HPCTRAIN_TEST_HOSTS").is_some()
}

/// Returns the number of recorded steps.
fn steps(files: &RunFiles) -> usize {
    std::fs::read_to_string(files.path("metrics.jsonl")).unwrap_or_default().lines().count()
}

/// Waits until a run has taken `step` steps.
#[track_caller]
fn until_step(job: &mut Running, files: &RunFiles, step: usize) {
    job.until(&format!("at step {step}"), || steps(files) >= step);
}

/// Returns the processes of a run's ranks on a host.
fn ranks(hosts: &Hosts, host: &str, run: &Run) -> Vec<u32> {
    let all = hosts.processes(host, &format!("run.root={}", run.root.display()));
    all.into_iter().filter(|process| rank_of(*process).is_some()).collect()
}
