//! `scripts/publish`: runs arrive at a tracking server of MLflow.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{Ended, finish, inherits_nothing, start, start_without_waiting};
use hpctrain_testkit::runs::Run;

/// Returns a run of `scripts/publish` with these arguments.
fn publish(arguments: &[&str]) -> Ended {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/publish");
    finish(Command::new(script).args(arguments))
}

#[test]
fn what_cannot_be_published_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    for (arguments, words) in [
        (&[][..], "usage: scripts/publish mlflow URL RUN"),
        (&["mlflow", "http://127.0.0.1:9"], "usage: "),
        (&["wandb", folder], "is not the directory of a run: it has no config.toml"),
    ] {
        let ended = publish(arguments);
        assert_eq!(ended.code(), 1, "{ended}");
        assert!(ended.stderr.contains(words), "{ended}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
    }
    let run = Run::new(Alone, Path::new(folder), "run", &[]).succeeds();
    let run = run.path("");
    let ended = publish(&["mlflow", "http://127.0.0.1:9", run.to_str().unwrap()]);
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.stderr.starts_with("publish: http://127.0.0.1:9: "), "{ended}");
}

/// Returns the folder of MLflow's programs, which it fetches; none if it cannot.
fn mlflow() -> Option<PathBuf> {
    let folder = hpctrain_testkit::target().with_file_name("mlflow");
    let python = folder.join("bin/python");
    if !folder.join("bin/mlflow").exists() {
        let succeeds = |command: &mut Command| {
            inherits_nothing(command).status().is_ok_and(|status| status.success())
        };
        let pip = ["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "mlflow"];
        let is_there = succeeds(Command::new("python3").args(["-m", "venv"]).arg(&folder))
            && succeeds(Command::new(python).args(pip));
        if !is_there {
            println!("SKIPPED: MLflow cannot be fetched");
            return None;
        }
    }
    Some(folder.join("bin"))
}

/// A run under way is sent in parts, and the server has the same numbers, bit for bit.
#[test]
#[ignore = "fetches 700 MB: scripts/test full runs it"]
fn runs_arrive_at_a_server_of_mlflow() {
    let Some(programs) = mlflow() else { return };
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "run", &["run.steps=30", "eval.every=10"]).succeeds();
    let directory = run.path("").display().to_string();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let store = format!("sqlite:///{}", root.path().join("store.sqlite").display());
    let mut server = Command::new(programs.join("mlflow"));
    server.args(["server", "--host", "127.0.0.1", "--workers", "1", "--port", &port.to_string()]);
    server.args(["--backend-store-uri", &store]).current_dir(root.path());
    let path = std::env::var("PATH").unwrap();
    let mut server = start(server.env("PATH", format!("{}:{path}", programs.display())));
    server.until("listening", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());

    let url = format!("http://127.0.0.1:{port}");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/publish");
    let send = || {
        let mut command = Command::new(&script);
        command.args(["mlflow", &url, &directory]);
        start_without_waiting(&server, &mut command).finish(Duration::from_secs(120)).succeeded()
    };
    let metrics = run.path("metrics.jsonl");
    let all = std::fs::read_to_string(&metrics).unwrap();
    let end = std::fs::read(run.path("END")).unwrap();
    std::fs::remove_file(run.path("END")).unwrap();
    // The last line of the first part is not whole.
    std::fs::write(&metrics, &all[..all.len() / 2]).unwrap();
    let ended = send();
    assert!(ended.stdout.contains(" not ended"), "{ended}");
    std::fs::write(&metrics, &all).unwrap();
    std::fs::write(run.path("END"), end).unwrap();
    assert!(!send().stdout.contains(": 0 new points"));
    let ended = send();
    assert!(
        ended.stdout.contains(": 0 new points") && ended.stdout.contains("finished"),
        "{ended}"
    );

    let read = "\
import mlflow, sys
client = mlflow.MlflowClient(sys.argv[1])
run, = client.search_runs([client.get_experiment_by_name('hpctrain').experiment_id])
history = lambda key: sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, key))
print(run.info.status, run.data.params['run.steps'], [value for _, value in history('loss')], [step for step, _ in history('eval_loss')])
";
    let mut client = Command::new(programs.join("python"));
    client.args(["-c", read, &url]);
    let ended =
        start_without_waiting(&server, &mut client).finish(Duration::from_secs(120)).succeeded();
    assert!(
        ended.stdout.starts_with("FINISHED 30 [") && ended.stdout.contains("[10, 20, 30]"),
        "{ended}"
    );
    let there = ended.stdout.split(['[', ']']).nth(1).unwrap();
    let there: Vec<f64> = there.split(", ").map(|number| number.parse().unwrap()).collect();
    assert_eq!(there, run.numbers("metrics.jsonl", "loss"));
}
