//! Evaluators, servers and workers on other hosts than the trainer.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::Transport::{Alone, Simulate};
use hpctrain_testkit::launch::{LIMIT, program, start, start_without_waiting, test_name};
use hpctrain_testkit::python::python_with;
use hpctrain_testkit::runs::{Run, json};

#[test]
fn an_evaluator_on_another_host_finds_the_same_bits() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let settings = ["checkpoint.every=2", "checkpoint.keep=9", "parallel.virtual_ranks=4"];
    let inline = [&settings[..], &["eval.every=2"]].concat();
    let reference = Run::new(Alone, root.path(), "reference", &inline).succeeds();
    let sidecar = [&settings[..], &["eval.inline=false"]].concat();

    // Next to a trainer, connected only by files.
    let run = Run::new(Alone, root.path(), "sidecar", &sidecar);
    let trainer = start(&mut hosts.across("h0:2", &run.command()));
    let eval =
        program(["eval", "--watch", "--policy", "every", "--run", run.files().0.to_str().unwrap()]);
    let evaluator = start_without_waiting(&trainer, &mut hosts.on("h1", &eval));
    trainer.finish(LIMIT).succeeded();
    evaluator.finish(LIMIT).succeeded();
    assert_eq!(run.files().numbers("eval.jsonl", "loss"), reference.numbers("eval.jsonl", "loss"));

    // As the last ranks of the job.
    let run = Run::new(Alone, root.path(), "within", &sidecar);
    let mut command = run.command();
    command.args(["--evaluators", "1", "--policy", "every"]);
    start(&mut hosts.across("h0:2,h1:1", &command)).finish(LIMIT).succeeded();
    assert_eq!(run.files().numbers("eval.jsonl", "loss"), reference.numbers("eval.jsonl", "loss"));
}

#[test]
fn servers_and_workers_on_other_hosts_give_the_same_bits() {
    let Some(hosts) = Hosts::new(3) else { return };
    let root = tempfile::tempdir().unwrap();
    let settings = ["parallel.virtual_ranks=4", "parameter_server.timeout=30"];
    let reference = Run::new(Simulate(2), root.path(), "reference", &settings[..1]).succeeds();
    let run = Run::new(Alone, root.path(), "x", &settings);
    let arguments = run.command();
    let mut coordinate = program(["ps", "coordinator", "--servers", "2", "--workers", "2"]);
    coordinate.args(arguments.get_args().skip(1));
    let coordinator = start(&mut hosts.on("h0", &coordinate));
    let folder = run.files().0;
    let others = [("h1", "server"), ("h2", "server"), ("h1", "worker"), ("h2", "worker")].map(
        |(host, role)| {
            let mut command = program(["ps", role, "--run"]);
            start_without_waiting(&coordinator, &mut hosts.on(host, command.arg(&folder)))
        },
    );
    coordinator.finish(LIMIT).succeeded();
    others.into_iter().for_each(|other| drop(other.finish(LIMIT).succeeded()));
    run.files().same_as(&reference, 6, "servers and workers on two hosts");
    // Both hosts were involved.
    assert!(["h1", "h2"].iter().all(|host| hosts.bytes(host).0 > 100_000));
    assert_eq!(json(&run.files().path("END"))["status"], "finished");
}

/// Captures all packets that a host receives and sends on `eth0`. Prints a line once it listens
/// and, at the end of its input, the number of packets and the number of those that contain the
/// word.
const LISTENER: &str = r#"
import select, socket, sys
word = sys.argv[1].encode()
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.bind(("eth0", 0))
packets.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)
print("listens", flush=True)
heard = found = 0
while True:
    ready, _, _ = select.select([packets, sys.stdin], [], [])
    if packets in ready:
        heard += 1
        found += word in packets.recv(1 << 17)
    elif sys.stdin in ready:
        break
print(heard, found)
"#;

#[test]
fn messages_between_hosts_are_encrypted() {
    let Some(hosts) = Hosts::new(2) else { return };
    let Some(python) = python_with("select, socket") else {
        return println!("SKIPPED: {}: no python3; scripts/setup --test installs it", test_name());
    };
    let root = tempfile::tempdir().unwrap();
    for encrypt in [true, false] {
        let mut listener = Command::new(python.get_program());
        listener.args(["-c", LISTENER, "\"generation\""]);
        let mut listener = hosts.on("h1", &listener);
        let mut listener = listener.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut printed = BufReader::new(listener.stdout.take().unwrap());
        let mut line = String::new();
        printed.read_line(&mut line).unwrap();
        assert_eq!(line, "listens\n");

        let settings = [format!("comm.encrypt={encrypt}"), "comm.interface='10.77.0.0/16'".into()];
        let run = Run::new(
            Alone,
            root.path(),
            &format!("{encrypt}"),
            &settings.each_ref().map(String::as_str),
        );
        let mut coordinate = program(["ps", "coordinator", "--servers", "1", "--workers", "1"]);
        coordinate.args(run.command().get_args().skip(1));
        let coordinator = start(&mut hosts.on("h0", &coordinate));
        let others = [("h0", "server"), ("h1", "worker")].map(|(host, role)| {
            let mut command = program(["ps", role, "--run"]);
            start_without_waiting(&coordinator, &mut hosts.on(host, command.arg(run.files().0)))
        });
        coordinator.finish(LIMIT).succeeded();
        others.into_iter().for_each(|other| drop(other.finish(LIMIT).succeeded()));
        assert!(
            run.files().coordinator().starts_with("10.77.0.1:"),
            "{}",
            run.files().coordinator()
        );

        drop(listener.stdin.take());
        line.clear();
        printed.read_line(&mut line).unwrap();
        listener.wait().unwrap();
        let (heard, found) = line.trim().split_once(' ').unwrap();
        let [heard, found]: [u64; 2] = [heard, found].map(|count| count.parse().unwrap());
        assert!(heard > 50, "{line}");
        assert_eq!(
            found > 0,
            !encrypt,
            "comm.encrypt={encrypt}: {found} of {heard} packets have a request in plain text"
        );
    }
}

#[test]
fn connections_between_hosts_are_timed() {
    let Some(hosts) = Hosts::new(2) else { return };
    let command = program(["bench", "connection", "--sizes", "64KiB", "--batches", "1", "--json"]);
    let ended = start(&mut hosts.across("h0:1,h1:1", &command)).finish(LIMIT).succeeded();
    let rates: Vec<serde_json::Value> = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(
        rates.iter().map(|rate| rate["direction"].as_str().unwrap()).collect::<Vec<_>>(),
        ["push", "pull"]
    );
    for rate in rates {
        assert!(
            rate["bytes"] == 65536
                && rate["plain"].as_f64() > Some(0.0)
                && rate["encrypted"].as_f64() > Some(0.0),
            "{rate}"
        );
    }
    // On a single host there is no connection to time.
    let ended = start(&mut hosts.across("h0:2", &command)).finish(LIMIT);
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("the first two ranks are both on host h0"), "{ended}");
}
