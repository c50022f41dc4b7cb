//! In-memory checkpoints of jobs that lose a node.

use std::process::Command;

use crate::{ranks, steps, until_step};
use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{LIMIT, send, start};
use hpctrain_testkit::runs::Run;

/// A network whose steps take longer than the messages with its state.
const SETTINGS: [&str; 9] = [
    "model.layers=4",
    "model.width=128",
    "model.heads=4",
    "run.steps=60",
    "parallel.virtual_ranks=4",
    "parallel.zero=1",
    "checkpoint.every=0",
    "eval.every=20",
    "model.dropout=0.1",
];

/// All ranks are killed, and the memory of one node is lost. The job continues from the copies on
/// the other one: there alone, or on both, where elements are sent to the node without memory.
#[test]
fn the_other_node_has_copies() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let reference = Run::new(Alone, root.path(), "reference", &SETTINGS).succeeds();
    let settings = [&SETTINGS[..], &["memory_checkpoint.every=1"]].concat();
    for (number, (lost, next)) in
        [("h1", "h0:2"), ("h1", "h0:2,h1:2"), ("h0", "h0:2,h1:2")].into_iter().enumerate()
    {
        let run = Run::new(Alone, root.path(), &format!("x{number}"), &settings);
        let files = run.files();
        let mut job = start(&mut hosts.across("h0:2,h1:2", &run.command()));
        until_step(&mut job, &files, 20);
        for host in ["h0", "h1"] {
            ranks(&hosts, host, &run).into_iter().for_each(|pid| send(pid, libc::SIGKILL));
        }
        let ended = job.finish(LIMIT);
        assert!(!ended.status.success(), "{ended}");
        let recorded = steps(&files);
        let mut wipe = Command::new("sh");
        wipe.args(["-c", "rm -r /dev/shm/hpctrain-*"]);
        assert!(hosts.on(lost, &wipe).status().unwrap().success());

        let again = run.resume("auto");
        let ended = start(&mut hosts.across(next, &again.command())).finish(LIMIT).succeeded();
        let line = ended.stdout.lines().find(|line| line.starts_with("resumed ")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let step: usize = words[3].parse().unwrap();
        // Copies are taken less often while the messages of one take longer than a step.
        assert!(words[5].starts_with("/dev/shm/") && 2 * step >= recorded, "{recorded}: {ended}");
        println!("{lost} lost after step {recorded}: resumed on {next} at step {step}");
        files.same_as(&reference, 60, next);
    }
}
