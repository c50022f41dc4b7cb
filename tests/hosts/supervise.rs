//! Host faults under `hpctrain supervise`: the run resumes on the remaining hosts.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{long, ranks, steps as steps_of, until_step};
use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{Ended, LIMIT, Running, program, send, start};
use hpctrain_testkit::runs::{Run, RunFiles};

const STEPS: u64 = 400;

/// Settings for steps of some milliseconds, so that a fault comes in the middle, and for the same
/// bits on any number of ranks that divides the virtual ranks.
const SETTINGS: [&str; 6] = [
    "run.steps=400",
    "parallel.virtual_ranks=4",
    "comm.timeout=8",
    "checkpoint.every=20",
    "eval.every=100",
    "model.dropout=0.1",
];

/// Starts a run on two hosts, supervised from h0.
fn supervised(hosts: &Hosts, root: &Path, settings: &[&str]) -> (Run, Running) {
    let run = Run::new(Alone, root, "x", &[&SETTINGS[..], settings].concat());
    let inner = run.command();
    let mut command =
        program(["supervise", "--hosts", "h0:2,h1:2", "--agent", &hosts.agent(), "--", "mpirun"]);
    command
        .args(["--host", "{hosts}", "-np", "{ranks}", "-x", "XDG_CACHE_HOME"])
        .arg(inner.get_program())
        .args(inner.get_args());
    command.current_dir(root);
    // A daemon that loses its connection to mpirun ends.
    command
        .env("OMPI_MCA_oob_tcp_keepalive_time", "15")
        .env("OMPI_MCA_oob_tcp_keepalive_intvl", "1");
    command.env("OMPI_MCA_oob_tcp_keepalive_probes", "5");
    let job = start(&mut hosts.on("h0", &command));
    (run, job)
}

/// Reads the lines of `restarts.jsonl`.
fn restarts(files: &RunFiles) -> Vec<Value> {
    let text = std::fs::read_to_string(files.path("restarts.jsonl")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Trains with this fault in the middle; returns how it ended, the run's files and the lines of
/// `restarts.jsonl`.
fn disturbed(hosts: &Hosts, root: &Path, fault: &[&str]) -> (Ended, RunFiles, Vec<Value>) {
    // The other host's daemon gives up on mpirun within half a minute instead of a quarter of an
    // hour: keepalive does not apply while data is in flight.
    let mut give_up = std::process::Command::new("sh");
    give_up.args(["-c", "echo 6 >/proc/sys/net/ipv4/tcp_retries2"]);
    assert!(hosts.on("h1", &give_up).status().unwrap().success());
    let (run, mut job) = supervised(hosts, root, &[]);
    let files = run.files();
    until_step(&mut job, &files, 60);
    hosts.run_script(fault);
    let ended = job.finish(LIMIT).succeeded();
    assert!(ranks(hosts, "h0", &run).is_empty(), "{ended}");
    // No process of the first start is left on the other host, once its daemon has noticed.
    let left = || hosts.processes("h1", "orted").len() + ranks(hosts, "h1", &run).len();
    let begun = Instant::now();
    while left() > 0 {
        assert!(begun.elapsed() < LIMIT, "{} processes are left on h1: {ended}", left());
        std::thread::sleep(Duration::from_millis(50));
    }
    let restarts = restarts(&files);
    (ended, files, restarts)
}

/// Panics unless a second start on h0 alone has ended the run with the bits of one rank.
#[track_caller]
fn assert_resumed(root: &Path, (ended, files, restarts): (Ended, RunFiles, Vec<Value>)) {
    let reference = Run::new(Alone, root, "reference", &SETTINGS).succeeds();
    files.same_as(&reference, STEPS, "on the remaining host");
    let hosts: Vec<_> = restarts.iter().map(|restart| restart["hosts"].as_str().unwrap()).collect();
    assert_eq!(hosts, ["h0:2,h1:2", "h0:2"], "{ended}");
    assert!(restarts[0]["code"] != 0 && restarts[1]["code"] == 0, "{restarts:?}");
    assert!(ended.stderr.contains("no answer from h1"), "{ended}");
}

#[test]
fn a_cut_cable_leaves_a_run_on_one_host() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let (ended, files, restarts) = disturbed(&hosts, root.path(), &["cut", "h1"]);
    let why = restarts[0]["reason"].as_str().unwrap().to_string();
    assert!(why.contains("hosts h0 and h1 do not reach each other: rank "), "{why}: {ended}");
    assert!(
        restarts[0].get("rank").is_none() && restarts[0].get("host").is_none(),
        "{}",
        restarts[0]
    );
    // Open MPI 4.1's mpirun ends with its own ranks, or waits for those that it does not reach until
    // it notices the loss of the other host's daemon or the supervisor ends it: it depends on what
    // it noticed first.
    let ways = [
        "one or more processes exited with non-zero status",
        "the launcher outlives its ranks by 30 s: ending it",
        "lost communication with a remote daemon",
    ];
    assert!(ways.iter().any(|way| ended.stderr.contains(way)), "{ended}");
    assert_resumed(root.path(), (ended, files, restarts));
}

#[test]
fn a_host_that_vanishes_leaves_a_run_on_the_other() {
    if !long() {
        return;
    }
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let (ended, files, restarts) = disturbed(&hosts, root.path(), &["lose", "h1"]);
    assert_eq!(restarts[0]["host"], "h1", "{}", restarts[0]);
    assert_resumed(root.path(), (ended, files, restarts));
}

#[test]
fn a_host_that_is_back_has_ranks_again() {
    if !long() {
        return;
    }
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let steps = ["run.steps=3000", "checkpoint.every=200", "eval.every=0"];
    let (run, mut job) = supervised(&hosts, root.path(), &steps);
    let files = run.files();
    until_step(&mut job, &files, 60);
    hosts.run_script(&["cut", "h1"]);
    // Not before the hosts of the second start are chosen.
    let path = job.stderr();
    job.until("on one host", || {
        std::fs::read_to_string(&path).unwrap().contains("no answer from h1")
    });
    hosts.run_script(&["mend", "h1"]);
    job.until("going on", || !ranks(&hosts, "h0", &run).is_empty() && steps_of(&files) > 300);
    send(ranks(&hosts, "h0", &run)[0], libc::SIGKILL);
    let ended = job.finish(LIMIT).succeeded();
    let hosts_of_starts: Vec<_> =
        restarts(&files).iter().map(|one| one["hosts"].as_str().unwrap().to_string()).collect();
    assert_eq!(hosts_of_starts, ["h0:2,h1:2", "h0:2", "h0:2,h1:2"], "{ended}");
    let reference =
        Run::new(Alone, root.path(), "reference", &[&SETTINGS[..], &steps].concat()).succeeds();
    files.same_as(&reference, 3000, "on two hosts, one, and two again");
}
