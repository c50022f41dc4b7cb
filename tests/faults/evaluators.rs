//! Evaluators of running trainers: killed, slow, several at once, or idle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use hpctrain::checkpoint::Checkpoints;
use hpctrain::evaluate::{NewCheckpoints, Policy};
use hpctrain::telemetry::evaluations::{self, Evaluation, EvaluationStatus};
use libc::{SIGTERM, SIGUSR1};

use crate::disks::flip;
use crate::{kill, lines, preempted, ranks, until_step};
use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun};
use hpctrain_testkit::launch::{
    LIMIT, Running, handles, mpirun, program, send, start, start_without_waiting,
};
use hpctrain_testkit::program as executable;
use hpctrain_testkit::runs::{Run, RunFiles, copy, json};

const STEPS: u64 = 12;
/// Settings that save every second step; an evaluation takes a few hundred milliseconds.
const SETTINGS: [&str; 5] = [
    "run.steps=12",
    "checkpoint.every=2",
    "checkpoint.keep=20",
    "parallel.virtual_ranks=4",
    "eval.samples=3000",
];

/// Returns a trainer that does not evaluate inline.
fn trainer(transport: Transport, root: &Path, more: &[&str]) -> Run {
    Run::new(transport, root, "x", &[&SETTINGS[..], &["eval.inline=false"], more].concat())
}

/// Returns the bits of the validation losses that a trainer computes inline, by step.
fn inline_losses() -> &'static BTreeMap<u64, u64> {
    static LOSSES: OnceLock<BTreeMap<u64, u64>> = OnceLock::new();
    LOSSES.get_or_init(|| {
        let root = tempfile::tempdir().unwrap();
        let files = Run::new(Alone, root.path(), "x", &[&SETTINGS[..], &["eval.every=2"]].concat())
            .succeeds();
        let losses = losses(&files);
        assert_eq!(losses.keys().copied().collect::<Vec<_>>(), [2, 4, 6, 8, 10, 12]);
        losses
    })
}

/// Returns an evaluator of a run on some ranks.
fn evaluator(ranks: usize, files: &RunFiles, more: &[&str]) -> Command {
    let mut command = match ranks {
        1 => program(["eval"]),
        _ => {
            let mut command = mpirun(ranks);
            command.arg(executable()).arg("eval");
            command
        }
    };
    command.arg("--run").arg(&files.0).args(more);
    command
}

/// Options of an evaluator that evaluates every checkpoint.
const EVERY: [&str; 3] = ["--watch", "--policy", "every"];

fn read(files: &RunFiles) -> Vec<Evaluation> {
    evaluations::read(&files.path(evaluations::FILE)).unwrap().all().unwrap().to_vec()
}

/// Returns the bits of the losses by step; panics if a checkpoint was evaluated twice.
#[track_caller]
fn losses(files: &RunFiles) -> BTreeMap<u64, u64> {
    let done: Vec<_> =
        read(files).into_iter().filter(|one| one.status == EvaluationStatus::Done).collect();
    let losses: BTreeMap<u64, u64> =
        done.iter().map(|one| (one.step, one.loss.unwrap().to_bits())).collect();
    assert_eq!(losses.len(), done.len(), "a checkpoint was evaluated twice: {done:#?}");
    losses
}

/// Panics unless `best` is the existing checkpoint with the lowest loss.
#[track_caller]
fn best_is_best(files: &RunFiles) {
    let checkpoints = Checkpoints::new(files.path("checkpoints"));
    let (best, _) = evaluations::best(&read(files), &checkpoints.steps().unwrap()).unwrap();
    assert_eq!(
        checkpoints.best().canonicalize().unwrap(),
        checkpoints.path(best).canonicalize().unwrap()
    );
}

/// Returns the leases on checkpoints of a run.
fn leases(files: &RunFiles) -> Vec<String> {
    let Ok(entries) = files.path("checkpoints/.leases").read_dir() else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".lease")).collect()
}

/// Waits until an evaluator has claimed a checkpoint.
#[track_caller]
fn until_it_evaluates(evaluator: &mut Running, files: &RunFiles) {
    evaluator
        .until("evaluates", || leases(files).iter().any(|name| name.ends_with(".evaluate.lease")));
}

/// Starts an evaluator of a run that has not started, and waits until it reports that.
fn waiting_evaluator(ranks: usize, files: &RunFiles, more: &[&str]) -> Running {
    std::fs::create_dir_all(files.path("checkpoints")).unwrap();
    let mut job = start(&mut evaluator(ranks, files, more));
    let mut text = String::new();
    while !text.contains("waiting for the first checkpoint") {
        assert!(job.runs(), "{text}");
        std::thread::sleep(Duration::from_millis(10));
        text = job.printed();
    }
    job
}

#[test]
fn a_killed_evaluator_begins_again_where_it_was() {
    let inline = inline_losses();
    for ranks in [1, 2] {
        let root = tempfile::tempdir().unwrap();
        let files = trainer(Alone, root.path(), &[]).copied();
        assert!(read(&files).is_empty());
        let mut recorded = BTreeSet::new();
        for done in [0, 2, 3] {
            let mut job = start(&mut evaluator(ranks, &files, &EVERY));
            job.until("has evaluated some", || lines(&files.path(evaluations::FILE)) >= done);
            until_it_evaluates(&mut job, &files);
            std::thread::sleep(Duration::from_millis(60 * done as u64));
            for pid in hpctrain_testkit::launch::processes(files.0.to_str().unwrap()) {
                kill(pid);
            }
            assert!(!job.finish(LIMIT).status.success());
            assert!(!leases(&files).is_empty());
            let steps = read(&files).into_iter().map(|one| one.step);
            recorded.extend(steps.map(|step| format!("step-{step:08}.evaluate.lease")));
        }
        start(&mut evaluator(ranks, &files, &EVERY)).finish(LIMIT).succeeded();
        assert_eq!(losses(&files), *inline, "{ranks} ranks");
        assert_eq!(read(&files).len(), inline.len());
        best_is_best(&files);
        // The killed evaluators no longer hold checkpoints, except one that they were killed for
        // just after they had recorded its evaluation: nobody claims it again.
        let is_over = |name: &String| name.starts_with("queue-") || recorded.contains(name);
        assert!(leases(&files).iter().all(is_over), "{:?}, {recorded:?}", leases(&files));
    }
}

/// The trainer removes checkpoints while the evaluator reads.
#[test]
fn the_latest_is_evaluated_while_others_go() {
    let root = tempfile::tempdir().unwrap();
    let more = [
        "run.steps=400",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "checkpoint.keep_best=0",
        "eval.samples=30",
    ];
    let run = trainer(Mpirun(2), root.path(), &more);
    let files = run.files();
    let evaluator = waiting_evaluator(1, &files, &["--watch"]);
    start_without_waiting(&evaluator, &mut run.command()).finish(LIMIT).succeeded();
    let ended = evaluator.finish(LIMIT).succeeded();
    let all = read(&files);
    assert!(all.iter().all(|one| one.status == EvaluationStatus::Done), "{ended}");
    assert_eq!(all.last().unwrap().step, 400, "{ended}");
    let evaluated = losses(&files).len();
    assert!((2..400).contains(&evaluated), "{evaluated}: {ended}");
}

#[test]
fn nothing_is_skipped_however_slow_the_evaluator_is() {
    let inline = inline_losses();
    for ranks in [1, 2] {
        let root = tempfile::tempdir().unwrap();
        let run = trainer(Alone, root.path(), &["checkpoint.keep=1", "checkpoint.keep_best=0"]);
        let files = run.files();
        let evaluator = waiting_evaluator(ranks, &files, &EVERY);
        start_without_waiting(&evaluator, &mut run.command()).finish(LIMIT).succeeded();
        evaluator.finish(LIMIT).succeeded();
        assert_eq!(losses(&files), *inline, "{ranks} ranks");
        best_is_best(&files);
    }
}

/// A program goes through all checkpoints, slower than the trainer saves and removes them.
#[test]
fn an_iterator_has_every_checkpoint_once() {
    let root = tempfile::tempdir().unwrap();
    let run = trainer(Alone, root.path(), &["checkpoint.keep=1", "checkpoint.keep_best=0"]);
    let files = run.files();
    std::fs::create_dir_all(files.path("checkpoints")).unwrap();
    let timeout = Some(Duration::from_secs(100));
    let new = NewCheckpoints::watch(&files.0, Policy::Every, timeout).unwrap();
    let job = start(&mut run.command());
    let mut found = Vec::new();
    let mut first = None;
    for checkpoint in new {
        let checkpoint = checkpoint.unwrap();
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(checkpoint.open().unwrap().manifest().step, checkpoint.step());
        assert_eq!(checkpoint.open().unwrap().manifest().id, checkpoint.id());
        found.push(checkpoint.step());
        first.get_or_insert(checkpoint);
    }
    job.finish(LIMIT).succeeded();
    assert_eq!(found, [2, 4, 6, 8, 10, 12]);
    // The one that is still in use was not removed.
    assert!(first.as_ref().unwrap().path().is_dir());
    let held = leases(&files);
    assert!(held.len() == 1 && held[0].starts_with("step-00000002."), "{held:?}");
    drop(first);
    assert!(leases(&files).is_empty() && read(&files).is_empty());
}

#[test]
fn an_iterator_of_the_latest_ends_with_the_run_or_its_timeout() {
    let root = tempfile::tempdir().unwrap();
    let files = trainer(Alone, root.path(), &[]).copied();
    let steps = |new: NewCheckpoints| -> Vec<u64> {
        new.map(|checkpoint| checkpoint.unwrap().step()).collect()
    };
    let short = Some(Duration::from_millis(500));
    let watch = |policy| NewCheckpoints::watch(&files.0, policy, short).unwrap();
    assert_eq!(steps(watch(Policy::Latest)), [STEPS]);
    // Each iterator has all of them.
    assert_eq!(steps(watch(Policy::Every)), [2, 4, 6, 8, 10, 12]);
    // Without its end, the run counts as under way until no trainer has held it for a while.
    std::fs::remove_file(files.path("END")).unwrap();
    let mut new = watch(Policy::Latest);
    assert_eq!(new.next().unwrap().unwrap().step(), STEPS);
    let error = new.next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("no trainer has held ") && error.contains("hint: "), "{error}");
    assert!(new.next().is_none());
    let error = NewCheckpoints::watch(root.path().join("none"), Policy::Latest, short);
    assert!(error.err().unwrap().to_string().contains("none does not exist"));
}

#[test]
fn a_slow_evaluator_of_the_latest_skips_some() {
    let inline = inline_losses();
    let root = tempfile::tempdir().unwrap();
    let run = trainer(Alone, root.path(), &["checkpoint.keep=1"]);
    let files = run.files();
    let evaluator = waiting_evaluator(1, &files, &["--watch", "--policy", "latest"]);
    start_without_waiting(&evaluator, &mut run.command()).finish(LIMIT).succeeded();
    evaluator.finish(LIMIT).succeeded();
    let losses = losses(&files);
    assert!(losses.len() < inline.len() && losses.contains_key(&STEPS), "{losses:?}");
    assert!(losses.iter().all(|(step, loss)| inline[step] == *loss), "{losses:?}");
    best_is_best(&files);
}

#[test]
fn two_evaluators_share_the_work() {
    let inline = inline_losses();
    let root = tempfile::tempdir().unwrap();
    let files = trainer(Alone, root.path(), &[]).copied();
    let first = start(&mut evaluator(1, &files, &EVERY));
    let second = start_without_waiting(&first, &mut evaluator(2, &files, &EVERY));
    first.finish(LIMIT).succeeded();
    second.finish(LIMIT).succeeded();
    assert_eq!(losses(&files), *inline);
    best_is_best(&files);
}

/// `best` exists even if retention does not keep the best checkpoint, and never dangles.
#[test]
fn the_best_of_those_that_are_left() {
    let root = tempfile::tempdir().unwrap();
    for (steps, keep_best) in (3..=8).flat_map(|steps| [(steps, 0), (steps, 1)]) {
        // Losses vary so much that the best checkpoint is sometimes an old one.
        let fast = ["optimizer.lr=0.5", "eval.every=1", "checkpoint.every=1", "checkpoint.keep=1"];
        let more = [format!("run.steps={steps}"), format!("checkpoint.keep_best={keep_best}")];
        let settings = [&fast[..], &[&more[0], &more[1]]].concat();
        let files =
            Run::new(Alone, root.path(), &format!("{steps}-{keep_best}"), &settings).succeeds();
        best_is_best(&files);
    }
}

/// A lease file of a process that died on this node is ignored.
#[test]
fn the_dead_keep_nothing_from_being_removed_or_evaluated() {
    let inline = inline_losses();
    let root = tempfile::tempdir().unwrap();
    let run = trainer(Alone, root.path(), &["checkpoint.keep=1", "checkpoint.keep_best=0"]);
    let files = run.files();
    let folder = files.path("checkpoints/.leases");
    std::fs::create_dir_all(&folder).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let named =
        |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).unwrap_or_default();
    let space = format!("{} {}{}", boot.trim(), named("pid").display(), named("time").display());
    // The process id is larger than the kernel assigns.
    let holder = format!("{{\"host\":\"here\",\"space\":{space:?},\"pid\":4194305,\"started\":1}}");
    for name in
        ["queue-dead", "step-00000002.dead", "step-00000004.evaluate", "step-00000012.evaluate"]
    {
        std::fs::write(folder.join(format!("{name}.lease")), &holder).unwrap();
    }
    run.succeeds();
    let checkpoints = Checkpoints::new(files.path("checkpoints"));
    assert_eq!(checkpoints.steps().unwrap(), [STEPS]);
    start(&mut evaluator(1, &files, &EVERY)).finish(LIMIT).succeeded();
    assert_eq!(losses(&files), BTreeMap::from([(STEPS, inline[&STEPS])]));
    assert!(leases(&files).is_empty(), "{:?}", leases(&files));
}

#[test]
fn an_evaluator_ends_when_nobody_comes() {
    let root = tempfile::tempdir().unwrap();
    let files = trainer(Alone, root.path(), &["eval.samples=30"]).succeeds();
    // Without the END mark the run may resume at any time.
    std::fs::remove_file(files.path("END")).unwrap();
    let ended = start(&mut evaluator(1, &files, &["--watch", "--timeout", "1s"])).finish(LIMIT);
    assert!(
        ended.code() == 1 && ended.stdout.contains("waiting for the next checkpoint"),
        "{ended}"
    );
    assert!(
        ended.stderr.contains("no trainer has held ")
            && ended.stderr.contains(" for 1s (--timeout)"),
        "{ended}"
    );
    assert_eq!(losses(&files).len(), 1);
    // An evaluator that does not watch does not wait.
    let ended = start(&mut evaluator(2, &files, &["--policy", "every"])).finish(LIMIT).succeeded();
    assert!(ended.stdout.contains("every checkpoint is evaluated"), "{ended}");
    assert_eq!(losses(&files).len(), 6);
    // An evaluator that waits for a first checkpoint ends after its timeout.
    let none = RunFiles(root.path().join("none"));
    let waiting = waiting_evaluator(1, &none, &["--watch", "--timeout", "1s"]);
    let ended = waiting.finish(LIMIT);
    assert!(
        ended.code() == 1 && ended.stderr.contains("(--timeout): none has saved anything"),
        "{ended}"
    );
}

#[test]
fn a_damaged_checkpoint_is_given_up_and_the_next_evaluated() {
    let inline = inline_losses();
    let root = tempfile::tempdir().unwrap();
    let files = trainer(Mpirun(2), root.path(), &[]).succeeds();
    flip(&files.checkpoint(4).join("rank-00001.h5"), 40_000);
    std::fs::remove_file(files.checkpoint(6).join("rank-00000.h5")).unwrap();
    flip(&files.checkpoint(8).join("manifest.json"), 200);
    let ended = start(&mut evaluator(2, &files, &EVERY)).finish(LIMIT).succeeded();
    let sound = inline.iter().filter(|(step, _)| ![4, 6, 8].contains(*step));
    assert_eq!(losses(&files), sound.map(|(step, loss)| (*step, *loss)).collect(), "{ended}");
    let all = read(&files);
    for (step, file) in [(4, "rank-00001.h5"), (6, "rank-00000.h5")] {
        let of_it: Vec<_> = all.iter().filter(|one| one.step == step).collect();
        let statuses: Vec<EvaluationStatus> = of_it.iter().map(|one| one.status).collect();
        assert_eq!(
            statuses,
            [EvaluationStatus::Retried, EvaluationStatus::Retried, EvaluationStatus::Failed],
            "step {step}: {ended}"
        );
        assert!(of_it.iter().all(|one| one.error.as_ref().unwrap().contains(file)), "{of_it:#?}");
    }
    // A checkpoint without a name cannot be recorded.
    assert!(all.iter().all(|one| one.step != 8), "{ended}");
    assert!(
        ended.stderr.contains("cannot evaluate") && ended.stderr.contains("step-00000008"),
        "{ended}"
    );
    best_is_best(&files);
}

#[test]
fn an_interrupted_evaluator_asks_to_be_started_again() {
    let inline = inline_losses();
    for (ranks, signal) in [(1, SIGTERM), (2, SIGUSR1)] {
        let root = tempfile::tempdir().unwrap();
        let files = trainer(Alone, root.path(), &[]).copied();
        let mut job = start(&mut evaluator(ranks, &files, &EVERY));
        until_it_evaluates(&mut job, &files);
        // To mpirun, which forwards it.
        send(job.id(), signal);
        let ended = job.finish(LIMIT);
        assert_eq!(ended.code(), 75, "{ended}");
        assert!(leases(&files).is_empty(), "{:?}", leases(&files));
        start(&mut evaluator(ranks, &files, &EVERY)).finish(LIMIT).succeeded();
        assert_eq!(losses(&files), *inline);
    }
    // While it waits.
    let root = tempfile::tempdir().unwrap();
    let job = waiting_evaluator(1, &RunFiles(root.path().join("x")), &["--watch"]);
    assert!(handles(job.id(), SIGTERM));
    send(job.id(), SIGTERM);
    let ended = job.finish(LIMIT);
    assert_eq!(ended.code(), 75, "{ended}");
}

#[test]
fn an_evaluator_outlives_an_interrupted_trainer() {
    const STEPS: u64 = 40;
    let root = tempfile::tempdir().unwrap();
    let more = [
        "run.steps=40",
        "checkpoint.every=10",
        "eval.samples=30",
        "model.width=128",
        "model.layers=4",
    ];
    let reference = Run::new(
        Alone,
        root.path(),
        "reference",
        &[&SETTINGS[..], &["eval.every=10"], &more].concat(),
    )
    .succeeds();
    let run = trainer(Mpirun(2), root.path(), &more);
    let files = run.files();
    let mut evaluator = waiting_evaluator(1, &files, &EVERY);
    let mut job = start_without_waiting(&evaluator, &mut run.command());
    until_step(&mut job, &files, 15);
    send(job.id(), SIGUSR1);
    preempted(&job.finish(LIMIT), &files, Mpirun(2));
    let at = files.steps().len() as u64;
    let mut printed = String::new();
    while !printed.contains("the trainer was interrupted: waiting for it to resume") {
        assert!(evaluator.runs(), "{printed}");
        std::thread::sleep(Duration::from_millis(10));
        printed = evaluator.printed();
    }
    start_without_waiting(&evaluator, &mut run.clone().resume("auto").command())
        .finish(LIMIT)
        .succeeded();
    evaluator.finish(LIMIT).succeeded();
    let mut found = losses(&files);
    assert!(at < STEPS && found.contains_key(&at), "step {at}: {found:?}");
    if !at.is_multiple_of(10) {
        found.remove(&at);
    }
    assert_eq!(found, losses(&reference));
}

#[test]
fn trainers_and_evaluators_share_a_job() {
    let inline = inline_losses();
    let root = tempfile::tempdir().unwrap();
    // Two programs in one job.
    let run = trainer(Mpirun(2), root.path(), &[]);
    let files = run.files();
    let mut command = run.command();
    command
        .args([":", "-np", "1"])
        .arg(executable())
        .arg("eval")
        .arg("--run")
        .arg(&files.0)
        .args(EVERY);
    start(&mut command).finish(LIMIT).succeeded();
    assert_eq!(losses(&files), *inline);
    assert_eq!(json(&files.path("END"))["status"], "finished");
    std::fs::remove_dir_all(&files.0).unwrap();

    // One program, one of whose ranks evaluates.
    let run = trainer(Mpirun(3), root.path(), &[]);
    let mut command = run.command();
    start(command.args(["--evaluators", "1", "--policy", "every"])).finish(LIMIT).succeeded();
    assert_eq!(losses(&files), *inline);
    assert_eq!(json(&files.path("END"))["status"], "finished");
    best_is_best(&files);
}

#[test]
fn training_stops_when_it_no_longer_helps() {
    let root = tempfile::tempdir().unwrap();
    // The learning rate is so high that losses vary.
    let settings =
        ["optimizer.lr=0.5", "eval.patience=1", "run.steps=100000000", "checkpoint.every=5"];
    let stopped = |files: &RunFiles| {
        let end = json(&files.path("END"));
        assert_eq!(end["status"], "finished", "{end}");
        assert!(end["reason"].as_str().unwrap().contains("no validation loss lower than"), "{end}");
        assert_eq!(end["step"].as_u64().unwrap(), files.steps().len() as u64);
        assert!(
            files.checkpoint(files.steps().len() as u64).exists()
                && files.path("run.json").exists()
        );
    };
    for transport in [Alone, Mpirun(2)] {
        let name = format!("{transport:?}");
        let files =
            Run::new(transport, root.path(), &name, &[&settings[..], &["eval.every=5"]].concat())
                .succeeds();
        stopped(&files);
        best_is_best(&files);
    }
    let run = trainer(Mpirun(2), root.path(), &[&settings[..], &["eval.samples=30"]].concat());
    let files = run.files();
    let evaluator = waiting_evaluator(1, &files, &["--watch"]);
    start_without_waiting(&evaluator, &mut run.command()).finish(LIMIT).succeeded();
    evaluator.finish(LIMIT).succeeded();
    stopped(&files);
    // The last one was evaluated as well.
    assert!(losses(&files).contains_key(&(files.steps().len() as u64)));
}

/// The loss spikes after step 4, and the run is resumed from it: later saves must affect neither
/// patience nor `best`.
#[test]
fn a_run_that_went_back_is_not_judged_by_later_saves() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["eval.samples=30", "eval.patience=3"];
    let trainer = |more: &[&str]| trainer(Alone, root.path(), &[&settings[..], more].concat());
    trainer(&["run.steps=4"]).succeeds();
    // Early stopping is off, otherwise the evaluator would end the run.
    let files = trainer(&["optimizer.lr=0.5", "eval.patience=0"]).resume("auto").succeeds();
    let evaluate = || start(&mut evaluator(1, &files, &EVERY[1..])).finish(LIMIT).succeeded();
    evaluate();
    let spiked = losses(&files);
    let loss_of = |step: u64| f64::from_bits(spiked[&step]);
    assert!(
        [6, 8, 10, 12].into_iter().all(|step| loss_of(step) > loss_of(4)),
        "no spike: {spiked:?}"
    );
    let lowest = |losses: &BTreeMap<u64, u64>| {
        losses
            .iter()
            .map(|(step, bits)| (*step, f64::from_bits(*bits)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap()
            .0
    };
    let before = root.path().join("before");
    copy(&files.0, &before);
    // The saves are removed; or they are damaged, skipped, and replaced one by one.
    for damaged in [false, true] {
        std::fs::remove_dir_all(&files.0).unwrap();
        copy(&before, &files.0);
        for step in [6, 8, 10, 12] {
            let save = files.checkpoint(step);
            if damaged {
                flip(&save.join("rank-00000.h5"), 4321)
            } else {
                std::fs::remove_dir_all(save).unwrap()
            }
        }
        trainer(&[]).resume("auto").succeeds();
        let end = json(&files.path("END"));
        assert_eq!(
            (end["status"].as_str(), end["step"].as_u64()),
            (Some("finished"), Some(STEPS)),
            "{end}"
        );
        assert!(read(&files).iter().all(|one| one.step <= 4), "{:?}", read(&files));
        evaluate();
        let again = losses(&files);
        assert_eq!(again.keys().copied().collect::<Vec<_>>(), [2, 4, 6, 8, 10, 12]);
        assert_ne!(again[&12], spiked[&12], "step 12 was trained again at another rate");
        best_is_best(&files);
        assert_eq!(
            files.path("checkpoints/best").canonicalize().unwrap(),
            files.checkpoint(lowest(&again)).canonicalize().unwrap()
        );
    }
}

#[test]
fn a_shared_job_is_interrupted_and_goes_on() {
    const STEPS: u64 = 30;
    let root = tempfile::tempdir().unwrap();
    let more = [
        "run.steps=30",
        "checkpoint.every=10",
        "eval.samples=30",
        "model.width=128",
        "model.layers=4",
    ];
    let reference = Run::new(
        Alone,
        root.path(),
        "reference",
        &[&SETTINGS[..], &["eval.every=10"], &more].concat(),
    )
    .succeeds();
    // The signal is sent to all of the job, or to one training rank.
    for signal in [SIGUSR1, SIGTERM] {
        let run = trainer(Mpirun(3), root.path(), &more);
        let files = run.files();
        let mixed = ["--evaluators", "1", "--policy", "every"];
        let mut job = start(run.command().args(mixed));
        until_step(&mut job, &files, 12);
        let target = if signal == SIGUSR1 { job.id() } else { ranks(&run)[1] };
        send(target, signal);
        preempted(&job.finish(LIMIT), &files, Mpirun(2));
        let at = files.steps().len() as u64;
        assert!((12..STEPS).contains(&at), "at step {at}");
        start(run.resume("auto").command().args(mixed)).finish(LIMIT).succeeded();
        assert_eq!(files.steps(), reference.steps());
        let mut found = losses(&files);
        if !at.is_multiple_of(10) {
            assert!(found.remove(&at).is_some(), "step {at}");
        }
        assert_eq!(found, losses(&reference));
        std::fs::remove_dir_all(&files.0).unwrap();
    }
}
