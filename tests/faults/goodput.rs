//! Goodput: the cost of kills in `starts.jsonl` and `run.json`, and intervals between checkpoints
//! that follow from them.

use serde_json::Value;

use crate::supervise::supervised;
use crate::{LARGE, kill, lines, ranks, until_step};
use hpctrain_testkit::launch::Transport::Mpirun;
use hpctrain_testkit::launch::{LIMIT, finish, program, start};
use hpctrain_testkit::runs::{Run, RunFiles, json};

fn starts(files: &RunFiles) -> Vec<Value> {
    files.text("starts.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Panics unless the seconds of all causes add up to those since the first start.
#[track_caller]
fn adds_up(goodput: &Value) {
    let seconds = |key: &str| goodput[key].as_f64().unwrap();
    let causes = [
        "useful_seconds",
        "seconds_lost",
        "restart_seconds",
        "startup_seconds",
        "save_seconds",
        "loader_seconds",
        "other_seconds",
    ];
    let all: f64 = causes.into_iter().map(seconds).sum();
    assert!((all - seconds("seconds")).abs() < 1e-3, "{all}: {goodput}");
    let share = seconds("useful_seconds") / seconds("seconds");
    assert!((share - seconds("share")).abs() < 1e-9 && share > 0.0 && share < 1.0, "{goodput}");
}

#[test]
fn an_undisturbed_run_has_lost_no_step() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=12", "checkpoint.every=4", "eval.every=6", "eval.samples=8"];
    let run = Run::new(Mpirun(2), root.path(), "x", &settings);
    let ended = run.ends().succeeded();
    assert!(ended.stdout.contains("\ngoodput  "), "{ended}");
    let files = run.files();
    let goodput = &json(&files.path("run.json"))["goodput"];
    adds_up(goodput);
    let counts = ["starts", "steps_lost", "seconds_lost", "restart_seconds"];
    assert_eq!(counts.map(|key| goodput[key].as_f64().unwrap()), [1.0, 0.0, 0.0, 0.0]);
    let spent = ["startup_seconds", "save_seconds", "evaluation_seconds"];
    assert!(spent.iter().all(|key| goodput[*key].as_f64().unwrap() > 0.0), "{goodput}");
    assert_eq!(starts(&files).len(), 1);
    assert!(starts(&files)[0]["previous"].is_null());
    // The first step after an evaluation or a save has its time.
    let records: Vec<Value> = files
        .text("metrics.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let with = |key: &str| -> Vec<u64> {
        let with = records.iter().filter(|record| record[key].is_f64());
        with.map(|record| record["step"].as_u64().unwrap()).collect()
    };
    assert_eq!(with("eval_ms"), [7]);
    assert!(with("save_ms").starts_with(&[5]), "{:?}", with("save_ms"));
}

#[test]
fn a_killed_run_counts_the_steps_that_it_takes_again() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&LARGE[..], &["run.steps=60", "checkpoint.every=10", "eval.every=0"]].concat();
    let run = Run::new(Mpirun(2), root.path(), "x", &settings);
    let files = run.files();
    let mut job = start(&mut run.command());
    until_step(&mut job, &files, 24);
    ranks(&run).into_iter().for_each(kill);
    job.finish(LIMIT);
    let recorded = lines(&files.path("metrics.jsonl")) as u64;

    let ended = run.resume("auto").ends().succeeded();
    let all = starts(&files);
    assert_eq!(all.len(), 2, "{ended}");
    let (second, previous) = (&all[1], &all[1]["previous"]);
    assert_eq!((&previous["end"], &second["start"]), (&"killed".into(), &2.into()), "{second}");
    let step = second["step"].as_u64().unwrap();
    // The last line may have been cut short.
    let last = previous["step"].as_u64().unwrap();
    assert!(step >= 10 && step.is_multiple_of(10) && recorded - last <= 1, "{second}");
    assert_eq!(previous["steps_lost"], last - step, "{second}");
    let goodput = &json(&files.path("run.json"))["goodput"];
    adds_up(goodput);
    assert_eq!((&goodput["starts"], &goodput["steps_lost"]), (&2.into(), &(last - step).into()));
    assert_eq!(goodput["seconds_lost"], previous["seconds_lost"]);
    assert!(goodput["restart_seconds"].as_f64().unwrap() > 0.0, "{goodput}");
    assert!(last == step || goodput["seconds_lost"].as_f64().unwrap() > 0.0, "{goodput}");
    assert!(ended.stdout.contains(" taken again ") || last == step, "{ended}");
    assert!(ended.stdout.contains(", restarts "), "{ended}");

    let compared = finish(program(["compare"]).args([&files.0, &files.0])).succeeded();
    let share = format!("{:.1} %", 100.0 * goodput["share"].as_f64().unwrap());
    assert!(compared.stdout.contains(&share), "{compared}");
}

/// Returns the interval that a run has chosen.
fn interval(files: &RunFiles) -> Value {
    json(&files.path("run.json"))["checkpoint_interval"].clone()
}

#[test]
fn kills_shorten_the_measured_interval_between_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let more = ["run.steps=100", "checkpoint.every=auto", "checkpoint.keep=99", "eval.every=0"];
    let settings = [&LARGE[..], &more].concat();
    let saved = |files: &RunFiles| {
        hpctrain::checkpoint::Checkpoints::new(files.path("checkpoints"))
            .steps()
            .unwrap_or_default()
    };
    let run = Run::new(Mpirun(2), root.path(), "intact", &settings);
    let intact = run.succeeds();
    // The first one is measured, and the next one would be far behind the end.
    assert_eq!(saved(&intact), [10, 100]);
    let long = interval(&intact);
    assert_eq!((&long["failures"], &long["failure_seconds"]), (&0.into(), &86400.0.into()));
    assert!(long["steps"].as_u64().unwrap() > 300, "{long}");
    let log = intact.text("logs/rank-00000.log");
    assert!(log.contains("checkpoint.every = auto: a checkpoint every "), "{log}");

    let run = Run::new(Mpirun(2), root.path(), "killed", &settings);
    let files = run.files();
    let mut job = start(&mut supervised(&run, &["--retries", "9"]));
    for number in 1..=2 {
        job.until("saved", || starts_of(&files) == number && saved(&files).len() >= number);
        ranks(&run).into_iter().for_each(kill);
        job.until("counted", || lines(&files.path("restarts.jsonl")) == number);
    }
    let ended = job.finish(LIMIT).succeeded();
    let short = interval(&files);
    assert_eq!(short["failures"], 2, "{ended}");
    let [short, long] = [short, long].map(|one| one["steps"].as_u64().unwrap());
    assert!(10 * short < long, "{short}, {long}: {ended}");
    assert!(saved(&files).len() > saved(&intact).len(), "{:?}", saved(&files));
    files.same_as(&intact, 100, "killed twice");
}

fn starts_of(files: &RunFiles) -> usize {
    lines(&files.path("starts.jsonl"))
}

/// The multiples of `checkpoint.keep_every`, evaluated steps and averages of local SGD are saved.
#[test]
fn a_measured_interval_meets_the_steps_of_other_keys() {
    let root = tempfile::tempdir().unwrap();
    let settings =
        ["run.steps=40", "checkpoint.every=auto", "checkpoint.keep=99", "eval.samples=8"];
    let saved = |name: &str, more: &[&str]| {
        let run = Run::new(Mpirun(2), root.path(), name, &[&settings[..], more].concat());
        let files = run.succeeds();
        hpctrain::checkpoint::Checkpoints::new(files.path("checkpoints")).steps().unwrap()
    };
    assert_eq!(saved("kept", &["checkpoint.keep_every=15", "eval.every=0"]), [10, 15, 30, 40]);
    let local = ["local_sgd.sync_every=4", "parallel.replica=2", "eval.every=0", "run.steps=48"];
    assert_eq!(saved("averaged", &local), [40, 48]);
}
