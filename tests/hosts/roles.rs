//! Evaluators, servers and workers on other hosts than the run.

use crate::common::hosts::Hosts;
use crate::common::launch::Transport::{Alone, Simulate};
use crate::common::launch::{LIMIT, program, start, start_beside};
use crate::common::runs::{Run, json};

#[test]
fn an_evaluator_on_another_host_finds_the_same_bits() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let settings = ["checkpoint.every=2", "checkpoint.keep=9", "parallel.lanes=4"];
    let inline = [&settings[..], &["eval.every=2"]].concat();
    let reference = Run::new(Alone, root.path(), "reference", &inline).succeeds();
    let beside = [&settings[..], &["eval.inline=false"]].concat();

    // Beside a trainer, by the files alone.
    let run = Run::new(Alone, root.path(), "beside", &beside);
    let trainer = start(&mut hosts.across("h0:2", &run.command()));
    let eval = program(["eval", "--watch", "--policy", "every", "--run", run.files().0.to_str().unwrap()]);
    let evaluator = start_beside(&trainer, &mut hosts.on("h1", &eval));
    trainer.finish(LIMIT).succeeded();
    evaluator.finish(LIMIT).succeeded();
    assert_eq!(run.files().numbers("eval.jsonl", "loss"), reference.numbers("eval.jsonl", "loss"));

    // As the last ranks of the job.
    let run = Run::new(Alone, root.path(), "within", &beside);
    let mut command = run.command();
    command.args(["--evaluators", "1", "--policy", "every"]);
    start(&mut hosts.across("h0:2,h1:1", &command)).finish(LIMIT).succeeded();
    assert_eq!(run.files().numbers("eval.jsonl", "loss"), reference.numbers("eval.jsonl", "loss"));
}

#[test]
fn servers_and_workers_on_other_hosts_give_the_same_bits() {
    let Some(hosts) = Hosts::new(3) else { return };
    let root = tempfile::tempdir().unwrap();
    let settings = ["parallel.lanes=4", "servers.timeout=30"];
    let reference = Run::new(Simulate(2), root.path(), "reference", &settings[..1]).succeeds();
    let run = Run::new(Alone, root.path(), "x", &settings);
    let arguments = run.command();
    let mut coordinate = program(["coordinate", "--servers", "2", "--workers", "2"]);
    coordinate.args(arguments.get_args().skip(1));
    let coordinator = start(&mut hosts.on("h0", &coordinate));
    let folder = run.files().0;
    let others = [("h1", "server"), ("h2", "server"), ("h1", "worker"), ("h2", "worker")].map(|(host, role)| {
        let mut command = program([role, "--run"]);
        start_beside(&coordinator, &mut hosts.on(host, command.arg(&folder)))
    });
    coordinator.finish(LIMIT).succeeded();
    others.into_iter().for_each(|other| drop(other.finish(LIMIT).succeeded()));
    run.files().same_as(&reference, 6, "servers and workers on two hosts");
    // They were there.
    assert!(["h1", "h2"].iter().all(|host| hosts.bytes(host).0 > 100_000));
    assert_eq!(json(&run.files().path("END"))["status"], "finished");
}
