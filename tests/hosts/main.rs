//! Jobs across hosts, made of network namespaces by `scripts/hosts`: the bits of one rank, bytes
//! between hosts, clocks, roles on other hosts, cables that are cut, hosts that vanish, the job
//! scripts under Slurm. Skipped, with the reason, where such hosts cannot be made.
//!
//! With `HPCTRAIN_TEST_HOSTS` set, as `scripts/test full` does, all layouts and all faults are
//! tried; without, layouts that differ in their messages, and one fault of each kind.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod cables;
mod layouts;
mod roles;
mod script;
mod slurm;
mod supervise;
mod traces;
mod traffic;

use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::{Running, rank_of};
use hpctrain_testkit::runs::{Run, RunFiles};

/// Whether all is tried.
fn long() -> bool {
    std::env::var_os("HPCTRAIN_TEST_HOSTS").is_some()
}

/// Steps on record.
fn steps(files: &RunFiles) -> usize {
    std::fs::read_to_string(files.path("metrics.jsonl")).unwrap_or_default().lines().count()
}

/// Waits until a run has taken so many steps.
#[track_caller]
fn until_step(job: &mut Running, files: &RunFiles, step: usize) {
    job.until(&format!("at step {step}"), || steps(files) >= step);
}

/// The processes of a run's ranks on a host.
fn ranks(hosts: &Hosts, host: &str, run: &Run) -> Vec<u32> {
    let all = hosts.processes(host, &format!("run.root={}", run.root.display()));
    all.into_iter().filter(|process| rank_of(*process).is_some()).collect()
}
