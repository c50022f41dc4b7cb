//! Jobs that the supervisor restarts, and jobs that it does not.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::kills::Dice;
use crate::{LARGE, lines};
use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Spawn};
use hpctrain_testkit::launch::{LIMIT, finish, processes, program, rank_of, send, start};
use hpctrain_testkit::runs::{Run, RunFiles, json};

/// Returns the command that supervises a run.
pub fn supervised(run: &Run, options: &[&str]) -> Command {
    let inner = run.command();
    let mut command = program(["supervise"]);
    command.args(options).arg("--").arg(inner.get_program()).args(inner.get_args());
    command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(&run.root);
    command
}

fn restarts(files: &RunFiles) -> Vec<serde_json::Value> {
    files.text("restarts.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_that_is_killed_ten_times_has_the_same_bits() {
    const STEPS: u64 = 40;
    const KILLS: usize = 10;
    let root = tempfile::tempdir().unwrap();
    let settings = [&LARGE[..], &["run.steps=40", "eval.every=5"]].concat();
    let reference = Run::new(Alone, root.path(), "reference", &settings).succeeds();
    let run = Run::new(Mpirun(2), root.path(), "x", &settings);
    let files = run.files();
    let mut dice = Dice(0xd1ce);
    let mut job = start(&mut supervised(&run, &[]));
    let begun = Instant::now();
    for number in 0..KILLS {
        // Each start saves a checkpoint before it is killed.
        let words = format!("run.root={}", root.path().display());
        let before = newest(&files);
        job.until("saved", || newest(&files) > before && files.path("metrics.jsonl").exists());
        std::thread::sleep(Duration::from_millis(dice.below(150)));
        let ranks: Vec<u32> =
            processes(&words).into_iter().filter(|pid| rank_of(*pid).is_some()).collect();
        let victims = if number % 3 == 0 { &ranks[..] } else { &ranks[..ranks.len().min(1)] };
        victims.iter().for_each(|pid| send(*pid, libc::SIGKILL));
        job.until("counted", || {
            lines(&files.path("restarts.jsonl")) > number || newest(&files) == STEPS
        });
    }
    let ended = job.finish(LIMIT).succeeded();
    let seconds = begun.elapsed().as_secs_f64();
    files.same_as(&reference, STEPS, "after ten kills");
    let restarts = restarts(&files);
    assert_eq!(restarts.len(), KILLS + 1, "{ended}");
    for (number, restart) in (1..).zip(&restarts) {
        assert_eq!(restart["start"], number, "{restart}");
        let died = number <= KILLS;
        assert_eq!(restart["code"] != 0, died, "{restart}");
        assert_eq!(restart["rank"].is_u64(), died, "{restart}");
        assert!(!died || restart["host"].is_string(), "{restart}");
        assert!(restart["steps_lost"].as_u64().unwrap() <= 6, "{restart}");
    }
    let goodput = &json(&files.path("run.json"))["goodput"];
    assert_eq!(goodput["starts"], restarts.len(), "{goodput}");
    let sum = |key: &str| files.numbers("metrics.jsonl", key).iter().sum::<f64>() * 1e-3;
    let evaluated = goodput["evaluation_seconds"].as_f64().unwrap();
    let useful = sum("step_ms") - sum("loader_ms") + evaluated;
    let share = goodput["share"].as_f64().unwrap();
    assert!(
        (share - useful / seconds).abs() <= 0.01 * share,
        "{share}, not {}: {goodput}",
        useful / seconds
    );
}

/// A killed supervisor leaves its job running; the next supervisor waits for the job, and resumes
/// where it ended.
#[test]
fn a_job_that_outlives_its_supervisor_is_found() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&LARGE[..], &["run.steps=400", "eval.every=0"]].concat();
    let run = Run::new(Alone, root.path(), "x", &settings).resume("auto");
    let files = run.files();
    let mut first = start(&mut supervised(&run, &[]));
    first.until("under way", || lines(&files.path("metrics.jsonl")) > 2);
    send(first.id(), libc::SIGKILL);
    first.finish(LIMIT);
    let ended = finish(&mut supervised(&run, &[])).succeeded();
    assert!(ended.stderr.contains("is being trained by a job whose supervisor"), "{ended}");
    assert_eq!(json(&files.path("END"))["status"], "finished");
    assert_eq!(files.steps().len(), 400);
    let names = root
        .path()
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.into_iter().all(|name| !name.starts_with(".hpctrain-supervised")), "leftovers");
}

pub fn newest(files: &RunFiles) -> u64 {
    let checkpoints = hpctrain::checkpoint::Checkpoints::new(files.path("checkpoints"));
    checkpoints.steps().unwrap_or_default().into_iter().next_back().unwrap_or(0)
}

#[test]
fn faults_of_the_input_are_not_tried_again() {
    let root = tempfile::tempdir().unwrap();
    for transport in [Alone, Mpirun(2)] {
        let ended = finish(&mut supervised(
            &Run::new(transport, root.path(), "x", &["model.heads=7"]),
            &[],
        ));
        assert_eq!((ended.code(), ended.stderr.matches("error:").count()), (2, 1), "{ended}");
        assert!(!ended.stderr.contains("restarting in"), "{ended}");
    }
    let ended = finish(program(["supervise", "--", "/no/such/program"]).current_dir(root.path()));
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("cannot start /no/such/program") && ended.stderr.contains("\nhint: "),
        "{ended}"
    );
    assert_eq!(finish(program(["supervise"]).current_dir(root.path())).code(), 2);
    assert_eq!(root.path().read_dir().unwrap().count(), 0, "leftovers");
}

#[test]
fn starts_that_gain_nothing_are_counted() {
    let root = tempfile::tempdir().unwrap();
    let mut command =
        program(["supervise", "--retries", "1", "--", "sh", "-c", "echo once >> count; exit 74"]);
    let ended = finish(command.current_dir(root.path()));
    assert_eq!(ended.code(), 74, "{ended}");
    assert_eq!(lines(&root.path().join("count")), 2, "{ended}");
    assert!(
        ended.stderr.contains("2 consecutive starts saved no new checkpoint: giving up"),
        "{ended}"
    );
}

#[test]
fn a_signal_preempts_the_whole() {
    let root = tempfile::tempdir().unwrap();
    for (number, (transport, signal)) in [
        (Alone, libc::SIGTERM),
        (Mpirun(2), libc::SIGTERM),
        (Spawn(2), libc::SIGINT),
        (Mpirun(2), libc::SIGUSR1),
    ]
    .into_iter()
    .enumerate()
    {
        let run = Run::new(
            transport,
            root.path(),
            &format!("x{number}"),
            &["run.steps=100000", "checkpoint.keep=1"],
        );
        let files = run.files();
        let mut job = start(&mut supervised(&run, &[]));
        job.until("under way", || lines(&files.path("metrics.jsonl")) > 5);
        send(job.id(), signal);
        let ended = job.finish(LIMIT);
        assert_eq!(ended.code(), 75, "{ended}");
        assert_eq!(json(&files.path("END"))["status"], "preempted", "{ended}");
        assert_eq!(restarts(&files).len(), 1, "{ended}");
    }
}

/// mpirun has been observed to survive its ranks after a cable was cut.
#[test]
fn a_launcher_that_outlives_its_ranks_is_ended() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "x", &["checkpoint.every=2"]);
    let reference = Run::new(Alone, root.path(), "reference", &["checkpoint.every=2"]).succeeds();
    let inner = run.command();
    // The first start never ends after its rank; the second one does.
    let script = "if [ -e again ]; then exec \"$@\"; fi; touch again; \"$@\"; while :; do read -t 1 line < /dev/zero; done";
    let mut command = program(["supervise", "--", "bash", "-c", script, "bash"]);
    command.arg(inner.get_program()).args(inner.get_args()).current_dir(root.path());
    let ended = finish(&mut command).succeeded();
    assert!(ended.stderr.contains("the launcher outlives its ranks by 30 s: ending it"), "{ended}");
    run.files().same_as(&reference, 6, "started again");
    assert_eq!(restarts(&run.files()).len(), 2, "{ended}");
}
