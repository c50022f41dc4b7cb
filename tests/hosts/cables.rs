//! Network cables that are cut, and hosts that vanish, without a supervisor.

use std::time::{Duration, Instant};

use crate::{long, ranks, steps, until_step};
use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{LIMIT, Running, start};
use hpctrain_testkit::runs::{Run, RunFiles};

/// A run that continues until it is ended.
const ENDLESS: [&str; 5] = [
    "run.steps=100000000",
    "eval.every=0",
    "checkpoint.every=0",
    "comm.timeout=8",
    "parallel.virtual_ranks=4",
];

/// Returns the logs of all ranks.
fn logs(files: &RunFiles, ranks: usize) -> String {
    (0..ranks)
        .map(|rank| {
            std::fs::read_to_string(files.path(&format!("logs/rank-{rank:05}.log")))
                .unwrap_or_default()
        })
        .collect()
}

/// Waits until the logs contain a report with these words, and no rank is left on these hosts.
#[track_caller]
fn until_reported(job: &Running, hosts: &Hosts, run: &Run, names: &[&str], words: &str) {
    let begun = Instant::now();
    while names.iter().any(|host| !ranks(hosts, host, run).is_empty()) {
        assert!(begun.elapsed() < LIMIT, "ranks are left: {}", job.printed());
        std::thread::sleep(Duration::from_millis(50));
    }
    let logs = logs(&run.files(), 4);
    assert!(logs.contains(words), "{words:?} is missing: {logs}\n{}", job.printed());
}

#[test]
fn a_cut_cable_is_reported_with_its_hosts() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let all =
        [&[][..], &["parallel.pipeline=2"], &["comm.algorithm=ring"], &["comm.algorithm=vendor"]];
    for (number, settings) in all.into_iter().enumerate().take(if long() { 4 } else { 2 }) {
        let run =
            Run::new(Alone, root.path(), &format!("x{number}"), &[&ENDLESS[..], settings].concat());
        let files = run.files();
        let mut job = start(&mut hosts.across("h0:2,h1:2", &run.command()));
        until_step(&mut job, &files, 3);
        hosts.run_script(&["cut", "h1"]);
        // mpirun of Open MPI 4.1 waits for its other half forever; the ranks do not.
        let wanted = "the job hangs: hosts h0 and h1 do not reach each other: rank ";
        until_reported(&job, &hosts, &run, &["h0", "h1"], wanted);
        assert!(job.printed().contains(wanted), "{}", job.printed());
        drop(job);
        hosts.run_script(&["mend", "h1"]);
    }
}

#[test]
fn a_cable_that_is_mended_in_time_changes_nothing() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=300", "parallel.virtual_ranks=4", "comm.timeout=120"];
    let reference = Run::new(Alone, root.path(), "reference", &settings).succeeds();
    let run = Run::new(Alone, root.path(), "x", &settings);
    let files = run.files();
    let mut job = start(&mut hosts.across("h0:2,h1:2", &run.command()));
    until_step(&mut job, &files, 20);
    hosts.run_script(&["cut", "h1"]);
    std::thread::sleep(Duration::from_secs(1));
    let before = steps(&files);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(steps(&files), before, "{}", job.printed());
    hosts.run_script(&["mend", "h1"]);
    job.finish(LIMIT).succeeded();
    files.same_as(&reference, 300, "mended");
}

#[test]
fn a_host_that_vanishes_ends_the_job() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "x", &ENDLESS);
    let files = run.files();
    let mut job = start(&mut hosts.across("h0:2,h1:2", &run.command()));
    until_step(&mut job, &files, 3);
    hosts.run_script(&["lose", "h1"]);
    let wanted = "the job hangs: host h1 with ranks 2, 3 does not answer: rank 2 was last seen ";
    until_reported(&job, &hosts, &run, &["h0"], wanted);
}
