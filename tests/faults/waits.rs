//! Timeouts: a stopped rank ends every command that runs on ranks, in all phases, and an evaluator
//! does not wait forever for a trainer.

use std::process::Command;

use serde_json::Value;

use crate::{kill, lines, ranks, until_step};
use hpctrain_testkit::launch::Transport::{Alone, Mpirun};
use hpctrain_testkit::launch::{LIMIT, Running, mpirun, processes, send, start};
use hpctrain_testkit::program as executable;
use hpctrain_testkit::runs::{Run, RunFiles};

/// Kills a stopped process, which a launcher may not be able to end.
struct Stopped(u32);

impl Drop for Stopped {
    fn drop(&mut self) {
        kill(self.0);
    }
}

/// Returns the processes of the ranks that have written heartbeats below a run's logs; none before
/// all have.
fn met(run: &RunFiles, ranks: usize) -> Option<Vec<u32>> {
    let folders = run.path("logs").read_dir().ok()?.flatten().map(|entry| entry.path());
    let folder = folders
        .into_iter()
        .find(|path| path.file_name().unwrap().to_string_lossy().starts_with("watchdog-"))?;
    let text = std::fs::read_to_string(folder.join("heartbeat-00000")).ok()?;
    let heartbeats = text.lines().map(|line| serde_json::from_str(line).ok());
    let heartbeats: Vec<Value> = heartbeats.collect::<Option<_>>()?;
    // Wait until the ranks are past their start, in a collective of the work.
    let works = |one: &Value| one["finished"]["number"].as_u64() > Some(40);
    let pids =
        heartbeats.iter().filter(|one| works(one)).map(|one| one["pid"].as_u64().unwrap() as u32);
    let pids: Vec<u32> = pids.collect();
    (pids.len() == ranks).then_some(pids)
}

/// Rank 1 of two is stopped: the job ends within the timeout and names it.
fn names_the_stopped(mut command: Command, run: &RunFiles) {
    let mut job = start(&mut command);
    let mut pids = None;
    job.until("works", || {
        pids = met(run, 2);
        pids.is_some()
    });
    let pid = pids.unwrap()[1];
    send(pid, libc::SIGSTOP);
    let _killed = Stopped(pid);
    let ended = job.finish(LIMIT);
    assert_eq!(ended.code(), 1, "{ended}");
    let words = [
        format!("the job hangs: rank 1 (process {pid} on "),
        ") does not answer: last seen ".into(),
        "rank 0 waits in #".into(),
        "comm.timeout = 2 seconds".into(),
    ];
    for word in words {
        assert!(ended.stderr.contains(&word), "{word:?} is missing: {ended}");
    }
}

/// Returns `hpctrain COMMAND` on two ranks.
fn on_two(arguments: &[&str], settings: &[&str]) -> Command {
    let mut command = mpirun(2);
    command.arg(executable()).args(arguments);
    settings.iter().chain(&["comm.timeout=2"]).for_each(|setting| {
        command.args(["--set", setting]);
    });
    command
}

#[test]
fn a_stopped_rank_ends_evaluations_and_samples() {
    let root = tempfile::tempdir().unwrap();
    let files = Run::new(Alone, root.path(), "x", &["eval.inline=false", "eval.samples=1000000"])
        .succeeds();
    let at = files.0.to_str().unwrap();
    // Each command would take minutes.
    let slow = ["eval.batch=1"];
    names_the_stopped(on_two(&["eval", "--run", at], &slow), &files);
    clear(&files);
    names_the_stopped(on_two(&["eval", "--checkpoint", at, "--split", "train"], &slow), &files);
    clear(&files);
    names_the_stopped(on_two(&["sample", "--checkpoint", at, "--tokens", "10000000"], &[]), &files);
}

/// Removes the logs of one job, so that they are not mistaken for those of the next.
fn clear(files: &RunFiles) {
    std::fs::remove_dir_all(files.path("logs")).unwrap();
    std::fs::create_dir(files.path("logs")).unwrap();
}

#[test]
fn a_stopped_rank_ends_predictions() {
    let root = tempfile::tempdir().unwrap();
    let rows = |name: &str, rows: usize| {
        let path = root.path().join(name);
        let file = hdf5::File::create(&path).unwrap();
        file.new_dataset::<f32>()
            .shape([rows, 2])
            .create("inputs")
            .unwrap()
            .write_raw(&vec![0.5; 2 * rows])
            .unwrap();
        file.new_dataset::<f32>()
            .shape([rows, 1])
            .create("targets")
            .unwrap()
            .write_raw(&vec![1.0; rows])
            .unwrap();
        path
    };
    let data = rows("train.h5", 64);
    let settings = [
        "model.kind=layers",
        "model.input=[2]",
        "model.layers=[{kind='dense', units=1}]",
        "loss.kind=mse",
        "data.val_fraction=0.25",
        &format!("data.path={}", data.display()),
    ];
    let files = Run::new(Alone, root.path(), "x", &settings).succeeds();
    let many = rows("many.h5", 4_000_000);
    let [many, out] = [many, root.path().join("out.h5")].map(|path| path.display().to_string());
    let arguments =
        ["predict", "--checkpoint", files.0.to_str().unwrap(), "--data", &many, "--out", &out];
    names_the_stopped(on_two(&arguments, &["eval.batch=1"]), &files);
}

/// A rank is stopped before it has connected to the others.
#[test]
fn a_rank_that_does_not_start_ends_the_others() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Mpirun(1), root.path(), "x", &["comm.timeout=2"]);
    let mut command = run.command();
    command
        .args([":", "-np", "1", "sh", "-c", "kill -STOP $$"])
        .arg(format!("# {}", root.path().display()));
    let ended = start(&mut command).finish(LIMIT);
    processes(root.path().to_str().unwrap()).into_iter().for_each(kill);
    assert_ne!(ended.code(), 0, "{ended}");
    assert!(ended.stderr.contains("the job hangs: MPI_Init has not returned for"), "{ended}");
    assert!(ended.stderr.contains("comm.timeout = 2 seconds"), "{ended}");
}

/// Trainers that have finished wait for an evaluator longer than they would wait for each other.
#[test]
fn a_rank_with_other_work_is_waited_for() {
    let root = tempfile::tempdir().unwrap();
    let settings = [
        "run.steps=8",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "eval.samples=4000",
        "eval.batch=2",
        "comm.timeout=1",
    ];
    let run = Run::new(Mpirun(3), root.path(), "x", &settings);
    let ended = start(run.command().args(["--evaluators", "1", "--policy", "every"]))
        .finish(LIMIT)
        .succeeded();
    assert_eq!(lines(&run.files().path("eval.jsonl")), 4, "{ended}");
    let left: Vec<_> = run
        .files()
        .path("logs")
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(left.iter().all(|name| name.to_string_lossy().ends_with(".log")), "{left:?}");
}

fn watching(files: &RunFiles, ranks: usize, timeout: &str) -> Running {
    let mut command = mpirun(ranks);
    command
        .arg(executable())
        .args(["eval", "--watch", "--timeout", timeout, "--run"])
        .arg(&files.0);
    start(&mut command)
}

/// A killed trainer leaves no END mark.
#[test]
fn an_evaluator_gives_up_a_run_without_a_trainer() {
    let root = tempfile::tempdir().unwrap();
    for count in [1, 2] {
        let settings = ["run.steps=100000000", "checkpoint.every=5", "eval.inline=false"];
        let run = Run::new(Alone, root.path(), &format!("x{count}"), &settings);
        let files = run.files();
        let mut job = start(&mut run.command());
        until_step(&mut job, &files, 12);
        ranks(&run).into_iter().for_each(kill);
        drop(job.finish(LIMIT));
        let ended = watching(&files, count, "2s").finish(LIMIT);
        assert_eq!(ended.code(), 1, "{ended}");
        let words = format!(
            "no trainer has held {} for 2s (--timeout): the last one ended without a record of it",
            files.0.display()
        );
        assert!(
            ended.stderr.contains(&words) && ended.stderr.matches("error:").count() == 1,
            "{ended}"
        );
        assert!(
            ended.stderr.contains("hint: start the trainer again with --resume auto"),
            "{ended}"
        );
        // The existing checkpoints are evaluated.
        assert!(lines(&files.path("eval.jsonl")) > 0, "{ended}");
    }
}

/// A live trainer is waited for, however long it does not save.
#[test]
fn an_evaluator_waits_for_a_trainer_that_lives() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=100000000", "checkpoint.every=0", "eval.inline=false"];
    let run = Run::new(Alone, root.path(), "x", &settings);
    let files = run.files();
    let mut job = start(&mut run.command());
    until_step(&mut job, &files, 2);
    let mut evaluator = hpctrain_testkit::launch::start_without_waiting(
        &job,
        hpctrain_testkit::launch::program(["eval", "--watch", "--timeout", "1s", "--run"])
            .arg(&files.0),
    );
    let log = files.path("logs/evaluator-00000.log");
    evaluator.until("waits", || log.exists());
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert!(evaluator.runs(), "{}", evaluator.printed());
    send(job.id(), libc::SIGTERM);
    job.finish(LIMIT);
    let ended = evaluator.finish(LIMIT);
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.stderr.contains("the last one was interrupted at step "), "{ended}");
}
