//! Elastic jobs across hosts: a host that is lost and returns, a cable that is cut, launchers that let
//! the other ranks run.

use std::process::Command;

use serde_json::Value;

use crate::{steps, until_step};
use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{LIMIT, program, send, start};
use hpctrain_testkit::runs::{Run, RunFiles};

/// A network whose steps take long enough for a host to return.
const SETTINGS: [&str; 9] = [
    "model.layers=4",
    "model.width=128",
    "model.heads=4",
    "run.steps=250",
    "parallel.virtual_ranks=16",
    "batch.global=16",
    "parallel.zero=1",
    "checkpoint.every=100",
    "eval.every=100",
];

const ELASTIC: [&str; 3] = ["elastic.on=true", "elastic.timeout=3", "memory_checkpoint.every=1"];

/// Returns the command of an elastic job on these hosts, supervised.
fn supervised(hosts: &Hosts, list: &str, run: &Run) -> Command {
    let mut command = program(["supervise", "--elastic", "--retries", "0", "--hosts", list]);
    command.args(["--agent-launcher", &format!("{} {{host}}", hosts.agent()), "--"]);
    command.arg(hpctrain_testkit::program()).args(run.command().get_args());
    command.env("HPCTRAIN_HOSTS", hosts.folder());
    hosts.on("h0", &command)
}

fn elastic(root: &std::path::Path, name: &str) -> Run {
    Run::new(Alone, root, name, &[&SETTINGS[..], &ELASTIC].concat())
}

/// Returns the changes of the ranks of a run.
fn changes(files: &RunFiles) -> Vec<Value> {
    files.text("elastic.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns whether a run has gone on with `ranks` ranks after a change.
fn has_ranks(files: &RunFiles, ranks: u64) -> bool {
    let text = std::fs::read_to_string(files.path("elastic.jsonl")).unwrap_or_default();
    let last = text.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
    last.is_some_and(|change| change["ranks"] == ranks)
}

/// One host vanishes, with rank 0 or without; the others go on, and it joins again.
#[test]
fn a_host_is_lost_and_returns() {
    let Some(hosts) = Hosts::new(3) else { return };
    let root = tempfile::tempdir().unwrap();
    let reference = Run::new(Alone, root.path(), "reference", &SETTINGS).succeeds();
    let run = elastic(root.path(), "x");
    let files = run.files();
    let mut job = start(&mut supervised(&hosts, "h0:1,h1:2,h2:1", &run));
    until_step(&mut job, &files, 20);
    hosts.run_script(&["cut", "h1"]);
    job.until("on two ranks", || has_ranks(&files, 2));
    hosts.run_script(&["mend", "h1"]);
    job.until("on four ranks", || has_ranks(&files, 4));
    let step = steps(&files);
    job.until("training", || steps(&files) > step + 5);
    let ended = job.finish(LIMIT).succeeded();
    files.same_as(&reference, 250, "after a host was lost and has returned");
    let changes = changes(&files);
    assert_eq!(changes[0]["lost"].as_array().unwrap().len(), 2, "{changes:?} {ended}");
    let redone = changes[0]["step"].as_u64().unwrap() - changes[0]["resumed"].as_u64().unwrap();
    assert!(redone <= 2, "{changes:?}");
}

/// Ranks that mpirun has started communicate over TCP, and go on without one that was killed.
#[test]
fn mpirun_lets_the_others_go_on() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let settings = [&SETTINGS[..], &["run.steps=60"]].concat();
    let reference = Run::new(Alone, root.path(), "reference", &settings).succeeds();
    let run = Run::new(Alone, root.path(), "x", &[&settings[..], &ELASTIC].concat());
    let files = run.files();
    let mut across = hosts.across("h0:1,h1:2", &run.command());
    across.env("OMPI_MCA_orte_enable_recovery", "1");
    let mut job = start(&mut across);
    until_step(&mut job, &files, 10);
    let pid = crate::ranks(&hosts, "h1", &run)[1];
    send(pid, libc::SIGKILL);
    job.until("at its end", || files.path("run.json").exists());
    // Open MPI's mpirun stays after a process of it was killed; a supervisor would end it.
    drop(job);
    files.same_as(&reference, 60, "after a rank was killed under mpirun");
    assert_eq!(changes(&files)[0]["ranks"], 2);
}
