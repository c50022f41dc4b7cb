//! Several trainers of one run directory, concurrently or one after the other.

use std::path::{Path, PathBuf};
use std::time::Duration;

use libc::SIGTERM;
use serde_json::Value;

use crate::{LARGE, kill, preempted, ranks, refused, until_step};
use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{LIMIT, Running, program, send, start, start_without_waiting};
use hpctrain_testkit::runs::{Run, RunFiles, SMALL, json};

fn lease(files: &RunFiles) -> PathBuf {
    files.path(".leases/trainer.lease")
}

/// Returns a run of many steps that saves every second one.
fn long(transport: Transport, root: &Path, name: &str) -> Run {
    Run::new(transport, root, name, &[&LARGE[..], &["run.steps=5000", "eval.every=0"]].concat())
}

/// Returns the names and inodes of everything in a run directory, which only the holder of the
/// lease may change.
fn inventory(files: &RunFiles) -> Vec<(String, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let mut all = Vec::new();
    for folder in [files.0.clone(), files.path("checkpoints")] {
        for entry in folder.read_dir().unwrap() {
            let entry = entry.unwrap();
            let inode = entry.path().symlink_metadata().unwrap().ino();
            all.push((entry.file_name().into_string().unwrap(), inode));
        }
    }
    all.sort();
    all
}

#[test]
fn a_second_trainer_is_refused_and_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let first = long(Mpirun(2), root.path(), "x");
    let files = first.files();
    let mut job = start(&mut first.command());
    until_step(&mut job, &files, 3);
    let holder = json(&lease(&files))["pid"].as_u64().unwrap() as u32;
    assert_eq!(holder, ranks(&first)[0]);
    let words = format!("x is being trained by process {holder} on ");
    for (transport, more) in [
        (Alone, &[][..]),
        (Mpirun(2), &[]),
        (Simulate(2), &[]),
        (Mpirun(3), &["--evaluators", "1"]),
        (Mpirun(3), &["--evaluators", "1", "--servers", "1"]),
    ] {
        let mut command = long(transport, root.path(), "x").resume("auto").command();
        let ended = start_without_waiting(&job, command.args(more)).finish(LIMIT);
        refused(&ended, &[&words, ", since ", "run.name="]);
    }
    // Without --resume it is refused for the same reason.
    refused(
        &start_without_waiting(&job, &mut long(Alone, root.path(), "x").command()).finish(LIMIT),
        &[&words],
    );
    assert!(job.runs(), "it ended too early: {}", job.printed());
    // The run is still far from its end, however long the refusals took.
    send(holder, SIGTERM);
    preempted(&job.finish(LIMIT), &files, Mpirun(2));
    assert!(!lease(&files).exists());

    // An undisturbed run to the same step has the same bits. It keeps every second checkpoint; the
    // other kept its last two.
    let steps = files.steps();
    let mut reference = long(Alone, root.path(), "reference");
    reference.settings.push("checkpoint.keep=5000".into());
    let undisturbed = reference.files();
    let mut job = start(&mut reference.command());
    until_step(&mut job, &undisturbed, steps.len());
    send(job.id(), SIGTERM);
    preempted(&job.finish(LIMIT), &undisturbed, Alone);
    assert_eq!(undisturbed.steps()[..steps.len()], steps, "beside others that were refused");
    let saved = steps.len() as u64 & !1;
    assert!(
        files.tensors(saved) == undisturbed.tensors(saved),
        "beside others that were refused, step {saved}"
    );
}

/// The next trainer need not wait until the lease expires.
#[test]
fn a_killed_trainer_is_followed_at_once() {
    let root = tempfile::tempdir().unwrap();
    for (transport, next) in [(Alone, Mpirun(2)), (Mpirun(2), Simulate(2)), (Simulate(2), Alone)] {
        let run = long(transport, root.path(), &format!("{transport:?}"));
        let files = run.files();
        let mut job = start(&mut run.command());
        until_step(&mut job, &files, 3);
        for pid in ranks(&run) {
            kill(pid);
        }
        kill(job.id());
        drop(job);
        assert!(lease(&files).exists());
        let resumed = long(next, root.path(), &run.name).resume("auto");
        let mut job = start(&mut resumed.command());
        job.until("goes on", || {
            json(&lease(&files))["pid"] != 0 && files.path("metrics.jsonl").exists()
        });
        until_step(&mut job, &files, files.steps().len() + 1);
        assert!(job.printed().contains("which is gone: removed"), "{}", job.printed());
        send(ranks(&resumed)[0], SIGTERM);
        preempted(&job.finish(LIMIT), &files, next);
        assert!(!lease(&files).exists());
    }
}

/// Another node has found the lease of a stopped trainer expired, and has started to train.
#[test]
fn a_trainer_that_was_replaced_stops_and_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    for (transport, asynchronous) in
        [(Alone, true), (Mpirun(2), true), (Mpirun(2), false), (Simulate(2), true)]
    {
        let way = format!("checkpoint.async_save={asynchronous}");
        let mut run = long(transport, root.path(), &format!("{transport:?}-{asynchronous}"));
        run.settings.push(way);
        let files = run.files();
        let mut job = start(&mut run.command());
        until_step(&mut job, &files, 4);
        // The trainer is stopped, so that the files do not change while they are read.
        let all = ranks(&run);
        all.iter().for_each(|pid| send(*pid, libc::SIGSTOP));
        let mut held: Value = json(&lease(&files));
        held["host"] = "far".into();
        held["pid"] = 4711.into();
        held["space"] = "another".into();
        held["token"] = "another".into();
        std::fs::write(lease(&files), held.to_string()).unwrap();
        // The metrics of the other trainer are a separate file.
        std::fs::remove_file(files.path("metrics.jsonl")).unwrap();
        std::fs::write(files.path("metrics.jsonl"), "").unwrap();
        let before = inventory(&files);
        all.iter().for_each(|pid| send(*pid, libc::SIGCONT));
        let ended = job.finish(LIMIT);
        refused(&ended, &["trainer.lease was taken by process 4711 on far"]);
        // It may have started to write a checkpoint under a separate name.
        let after = inventory(&files)
            .into_iter()
            .filter(|(name, _)| !name.contains(".tmp-"))
            .collect::<Vec<_>>();
        let before =
            before.into_iter().filter(|(name, _)| !name.contains(".tmp-")).collect::<Vec<_>>();
        assert_eq!(after, before, "{transport:?} {ended}");
        assert_eq!(json(&lease(&files)), held);
        assert_eq!(files.text("metrics.jsonl"), "");
        assert!(!files.path("END").exists());
    }
}

/// A lease that another node still renews, which is visible only by its heartbeats.
#[test]
fn a_trainer_of_another_node_is_seen_by_its_beats() {
    let root = tempfile::tempdir().unwrap();
    let run = long(Mpirun(2), root.path(), "x").resume("auto");
    let files = run.files();
    std::fs::create_dir_all(files.path(".leases")).unwrap();
    let beat = |beats: u64| {
        let text = format!(
            "{{\"host\":\"far\",\"space\":\"a b\",\"pid\":7,\"started\":1,\"token\":\"t\",\"beats\":{beats}}}"
        );
        std::fs::write(lease(&files), text).unwrap();
    };
    beat(0);
    let mut job = start(&mut run.command());
    while !job.printed().contains("for a heartbeat of process 7 on far") {
        assert!(job.runs(), "{}", job.printed());
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut beats = 0;
    while job.runs() {
        beats += 1;
        beat(beats);
        std::thread::sleep(Duration::from_millis(100));
    }
    refused(&job.finish(LIMIT), &["x is being trained by process 7 on far"]);
    // Not even directories were made.
    assert!(!files.path("checkpoints").exists() && !files.path("logs").exists());
}

/// The wait for a lease ends with a signal, as training does, and changes nothing.
#[test]
fn a_signal_ends_the_wait_for_a_trainer_of_another_node() {
    let root = tempfile::tempdir().unwrap();
    let run = long(Mpirun(2), root.path(), "x").resume("auto");
    let files = run.files();
    std::fs::create_dir_all(files.path(".leases")).unwrap();
    let held =
        "{\"host\":\"far\",\"space\":\"a b\",\"pid\":7,\"started\":1,\"token\":\"t\",\"beats\":0}";
    std::fs::write(lease(&files), held).unwrap();
    let mut job = start(&mut run.command());
    while !job.printed().contains("for a heartbeat of process 7 on far") {
        assert!(job.runs(), "{}", job.printed());
        std::thread::sleep(Duration::from_millis(10));
    }
    ranks(&run).iter().for_each(|pid| send(*pid, SIGTERM));
    let ended = job.finish(LIMIT);
    assert_eq!(ended.code(), 75, "{ended}");
    let expected = "trainer.lease: SIGTERM came during the wait for this lease";
    assert_eq!(ended.stderr.matches(expected).count(), 1, "{ended}");
    assert_eq!(std::fs::read_to_string(lease(&files)).unwrap(), held);
    assert!(!files.path("checkpoints").exists() && !files.path("logs").exists());
}

/// Returns a command that trains a run without a name.
fn unnamed(root: &Path, more: &[&str]) -> std::process::Command {
    let mut command = program(["train"]);
    let root = format!("run.root={}", root.display());
    for setting in SMALL.iter().chain(&[root.as_str(), "checkpoint.every=2"]) {
        command.args(["--set", setting]);
    }
    command.args(more);
    command
}

fn names(root: &Path) -> Vec<String> {
    let mut names: Vec<String> = root
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn unnamed_runs_have_directories_of_their_own_and_resume_their_own() {
    let root = tempfile::tempdir().unwrap();
    let slow = ["--set", "model.width=64", "--set", "run.steps=40"];
    let jobs: Vec<Running> = {
        let first = start(&mut unnamed(root.path(), &slow));
        let others: Vec<Running> = (0..2)
            .map(|_| start_without_waiting(&first, &mut unnamed(root.path(), &slow)))
            .collect();
        std::iter::once(first).chain(others).collect()
    };
    jobs.into_iter().for_each(|job| drop(job.finish(LIMIT).succeeded()));
    assert_eq!(names(root.path()), ["gpt-char", "gpt-char-2", "gpt-char-3"]);
    for name in names(root.path()) {
        assert_eq!(RunFiles(root.path().join(name)).steps().len(), 40);
    }
    // Three runs match, so the choice is ambiguous.
    let auto = [&slow[..], &["--resume", "auto"]].concat();
    let ended = start(&mut unnamed(root.path(), &auto)).finish(LIMIT);
    refused(&ended, &["any of 3 runs: ", "gpt-char-2 at step 40", "run.name=gpt-char-3"]);
    for name in ["gpt-char", "gpt-char-3"] {
        std::fs::remove_dir_all(root.path().join(name)).unwrap();
    }
    // A newer run that failed at its first batch has no checkpoint to resume from.
    let fails = [&slow[..], &["--set", "optimizer.lr=1e30", "--set", "run.max_skipped=1"]].concat();
    start(&mut unnamed(root.path(), &fails)).finish(LIMIT);
    assert!(root.path().join("gpt-char").exists(), "{:?}", names(root.path()));
    std::fs::rename(root.path().join("gpt-char"), root.path().join("gpt-char-3")).unwrap();
    let longer = [&auto[..], &["--set", "run.steps=42"]].concat();
    let ended = start(&mut unnamed(root.path(), &longer)).finish(LIMIT).succeeded();
    assert!(ended.stdout.contains("at step 40 from"), "{ended}");
    assert_eq!(names(root.path()), ["gpt-char-2", "gpt-char-3"]);
    // Another configuration is another run.
    let other = [&auto[..], &["--set", "model.dropout=0.5"]].concat();
    let ended = start(&mut unnamed(root.path(), &other)).finish(LIMIT).succeeded();
    assert!(
        ended.stderr.contains("no run of this configuration")
            && ended.stderr.contains("model.dropout"),
        "{ended}"
    );
    assert_eq!(names(root.path()), ["gpt-char", "gpt-char-2", "gpt-char-3"]);
}

/// With one invalid byte in `eval.jsonl` and one checkpoint kept, the best checkpoint and its link
/// stay.
#[test]
fn a_damaged_record_of_evaluations_costs_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=4", "checkpoint.every=2", "eval.every=2", "checkpoint.keep=1"];
    let run = |more: &[&str]| Run::new(Alone, root.path(), "x", &[&settings[..], more].concat());
    let files = run(&[]).succeeds();
    // Step 2 stays the best.
    let text = files.text("eval.jsonl");
    let loss = files.numbers("eval.jsonl", "loss")[0];
    let best = text.replacen(&format!("\"loss\":{loss}"), "\"loss\":0.001", 1);
    assert_ne!(best, text);
    for (i, damage) in
        [&b"\xff"[..], b"{\"step\":2,\"lo\xffss\"}\n", b"\0\0\0\0\0\0\0\0"].into_iter().enumerate()
    {
        std::fs::remove_dir_all(&files.0).unwrap();
        run(&["checkpoint.keep=9"]).succeeds();
        std::fs::write(files.path("eval.jsonl"), [best.as_bytes(), damage].concat()).unwrap();
        let link = files.path("checkpoints/best");
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("step-00000002", &link).unwrap();
        let ended = run(&["run.steps=10"]).resume("auto").ends().succeeded();
        assert!(ended.stderr.contains("eval.jsonl, line 3: "), "{i}: {ended}");
        assert!(ended.stderr.contains("no checkpoint is removed"), "{i}: {ended}");
        assert!(files.checkpoint(2).exists(), "{i}: {ended}");
        assert_eq!(link.read_link().unwrap(), Path::new("step-00000002"));
        // After the file is repaired, retention removes checkpoints again.
        let repaired: Vec<u8> = std::fs::read(files.path("eval.jsonl")).unwrap();
        let lines = repaired.split_inclusive(|byte| *byte == b'\n');
        let good: Vec<u8> = lines
            .filter(|line| serde_json::from_slice::<Value>(line).is_ok())
            .flatten()
            .copied()
            .collect();
        std::fs::write(files.path("eval.jsonl"), good).unwrap();
        run(&["run.steps=12"]).resume("auto").succeeds();
        let left =
            hpctrain::checkpoint::Checkpoints::new(files.path("checkpoints")).steps().unwrap();
        assert_eq!(left, [2, 12], "{i}");
    }
}
