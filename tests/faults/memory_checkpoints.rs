//! Jobs that are killed and continue from in-memory checkpoints.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::kills::Dice;
use crate::supervise::supervised;
use crate::{LARGE, kill, lines, ranks, until_step};
use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{Ended, LIMIT, processes, rank_of, send, start};
use hpctrain_testkit::runs::{Run, RunFiles};

const STEPS: u64 = 40;

/// Returns a run of 40 steps that saves a checkpoint file only at its end, with in-memory
/// checkpoints in `root`.
fn run(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> Run {
    let dir = format!("memory_checkpoint.dir={}", root.join("shm").display());
    let own = [
        "run.steps=40",
        "eval.every=10",
        "checkpoint.every=0",
        "parallel.virtual_tensor_ranks=2",
        "memory_checkpoint.every=1",
        &dir,
    ];
    std::fs::create_dir_all(root.join("shm")).unwrap();
    Run::new(transport, root, name, &[&LARGE[..], &own, settings].concat())
}

/// Returns the same run without in-memory checkpoints, undisturbed.
fn reference(root: &Path, settings: &[&str]) -> RunFiles {
    let off = ["memory_checkpoint.every=0", "memory_checkpoint.dir=/dev/shm"];
    run(Alone, root, "reference", &[settings, &off].concat()).succeeds()
}

/// Returns the step and the place from which a start of a job has resumed.
fn resumed(output: &str) -> Vec<(u64, String)> {
    let places = output.lines().filter_map(|line| line.strip_prefix("resumed "));
    let places = places.filter_map(|place| place.trim().strip_prefix("at step "));
    places
        .map(|place| {
            let (step, from) = place.split_once(" from ").unwrap();
            (step.parse().unwrap(), from.to_string())
        })
        .collect()
}

/// Starts a run and kills all its ranks after step `step`; returns the number of recorded steps.
#[track_caller]
fn killed(run: &Run, step: usize) -> u64 {
    let mut job = start(&mut run.command());
    until_step(&mut job, &run.files(), step);
    ranks(run).into_iter().for_each(kill);
    let ended = job.finish(LIMIT);
    assert!(!ended.status.success(), "{ended}");
    lines(&run.files().path("metrics.jsonl")) as u64
}

/// Resumes a run to its end and returns its output.
#[track_caller]
fn finished(run: &Run) -> Ended {
    start(&mut run.clone().resume("auto").command()).finish(LIMIT).succeeded()
}

/// Returns the files of in-memory checkpoints whose names contain `name`.
fn slots(root: &Path, name: &str) -> Vec<std::path::PathBuf> {
    let mut folders = vec![root.join("shm")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().unwrap().to_str().unwrap().contains(name) {
                found.push(path);
            }
        }
    }
    found
}

#[test]
fn a_supervised_job_loses_two_steps_at_most() {
    const KILLS: usize = 8;
    // Slots in tmpfs are mapped.
    let root = tempfile::tempdir_in("/dev/shm").unwrap();
    let reference = reference(root.path(), &[]);
    let run = run(Mpirun(2), root.path(), "x", &[]);
    let files = run.files();
    let mut dice = Dice(0xc0ffee);
    let mut job = start(&mut supervised(&run, &["--retries", "2"]));
    let mut recorded = Vec::new();
    let words = format!("run.root={}", root.path().display());
    let ranks = || -> Vec<u32> {
        processes(&words).into_iter().filter(|pid| rank_of(*pid).is_some()).collect()
    };
    for number in 0..KILLS {
        let step = 4 * (number + 1);
        job.until("training", || lines(&files.path("metrics.jsonl")) >= step);
        std::thread::sleep(Duration::from_millis(dice.below(60)));
        ranks().into_iter().for_each(|pid| send(pid, libc::SIGKILL));
        job.until("dead", || ranks().is_empty());
        recorded.push(lines(&files.path("metrics.jsonl")) as u64);
    }
    let ended = job.finish(LIMIT).succeeded();
    files.same_as(&reference, STEPS, "after kills of all ranks");
    let resumed = resumed(&ended.stdout);
    assert_eq!(resumed.len(), KILLS, "{ended}");
    for ((step, from), recorded) in resumed.iter().zip(&recorded) {
        assert!(from.contains("/shm/hpctrain-") && recorded - step <= 2, "{recorded}: {ended}");
    }
    println!("recorded {recorded:?}, resumed at {resumed:?}");
    assert!(slots(root.path(), "").is_empty(), "a run that has ended has removed its slots");
}

/// Slots are pieces of tensors, which any layout reads.
#[test]
fn a_job_continues_on_other_ranks_and_in_another_layout() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let layouts: [(Transport, &[&str]); 6] = [
        (Mpirun(2), &["parallel.zero=0"]),
        (Mpirun(4), &["parallel.zero=3"]),
        (Spawn(2), &["parallel.pipeline=2", "batch.micro=2"]),
        (Alone, &[]),
        (Mpirun(4), &["parallel.tensor=2", "parallel.zero=1"]),
        (Spawn(4), &["parallel.zero=2", "parallel.shard=2"]),
    ];
    for (number, (transport, settings)) in layouts.into_iter().enumerate() {
        let run = run(transport, root.path(), "x", settings).resume("auto");
        let before = lines(&run.files().path("metrics.jsonl")) as u64;
        let step = 5 * (number + 1);
        let mut job = start(&mut run.command());
        until_step(&mut job, &run.files(), step);
        ranks(&run).into_iter().for_each(kill);
        let ended = job.finish(LIMIT);
        let resumed = resumed(&ended.stdout);
        let continues = resumed.iter().all(|(step, _)| step + 2 >= before);
        assert!(continues && resumed.len() == usize::from(number > 0), "{before}: {ended}");
    }
    let ended = finished(&run(Simulate(2), root.path(), "x", &[]));
    assert!(resumed(&ended.stdout)[0].0 >= 28, "{ended}");
    run(Alone, root.path(), "x", &[]).files().same_as(&reference, STEPS, "in seven layouts");
}

/// A kill of one rank leaves whole slots, too, and a round of local SGD is copied after its average.
#[test]
fn one_rank_and_averages() {
    for settings in [&["parallel.zero=1"][..], &["local_sgd.sync_every=4", "batch.micro=1"]] {
        let root = tempfile::tempdir().unwrap();
        let whole = run(Mpirun(2), root.path(), "whole", settings).succeeds();
        let run = run(Mpirun(2), root.path(), "x", settings);
        let mut job = start(&mut run.command());
        until_step(&mut job, &run.files(), 20);
        kill(ranks(&run)[1]);
        job.finish(LIMIT);
        let recorded = lines(&run.files().path("metrics.jsonl")) as u64;
        let ended = finished(&run);
        let (step, from) = &resumed(&ended.stdout)[0];
        let round = if settings.len() == 2 { 4 } else { 1 };
        assert!(from.contains("/shm/") && recorded - step <= 2 * round, "{recorded}: {ended}");
        assert!(step.is_multiple_of(round), "{ended}");
        run.files().same_as(&whole, STEPS, &settings.join(" "));
    }
}

#[test]
fn damaged_and_foreign_slots_are_named_and_passed_over() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let mut dice = Dice(0xda3a9e);
    for case in ["damaged", "torn", "foreign", "missing"] {
        let settings = ["checkpoint.every=5"];
        let run = run(Mpirun(2), root.path(), case, &settings);
        let begun = Instant::now();
        killed(&run, 12);
        let all = slots(root.path(), "rank-00001.own.");
        assert!(!all.is_empty(), "{case}");
        let expected = match case {
            "damaged" => {
                for slot in &all {
                    let mut bytes = std::fs::read(slot).unwrap();
                    let at = dice.below(bytes.len() as u64) as usize;
                    bytes[at] ^= 16;
                    std::fs::write(slot, &bytes).unwrap();
                }
                "damaged"
            }
            "torn" => {
                for slot in &all {
                    let bytes = std::fs::read(slot).unwrap();
                    std::fs::write(slot, &bytes[..bytes.len() - 1]).unwrap();
                }
                "its length is not that of its arrays"
            }
            "foreign" => {
                std::fs::write(run.files().path("memory_checkpoint.id"), "other\n").unwrap();
                "it is of another run"
            }
            _ => {
                all.iter().for_each(|slot| std::fs::remove_file(slot).unwrap());
                "no node has a whole slot of rank 1"
            }
        };
        let ended = finished(&run);
        let log =
            run.files().text("logs/rank-00001.log") + &run.files().text("logs/rank-00000.log");
        let named = [&ended.stderr, &log].into_iter().any(|text| text.contains(expected));
        assert!(named, "{case}: {expected:?} is missing: {ended}\n{log}");
        let (step, from) = &resumed(&ended.stdout)[0];
        assert!(from.contains("checkpoints/step-") && *step >= 5, "{case}: {ended}");
        run.files().same_as(&reference, STEPS, case);
        println!("{case}: resumed at {step} after {:.1} s", begun.elapsed().as_secs_f64());
    }
}

/// The memory of the node is lost, as by a reboot.
#[test]
fn a_disk_outlives_the_memory_of_its_node() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let disk = root.path().join("disk");
    let dir = format!("memory_checkpoint.disk_dir={}", disk.display());
    let run = run(Mpirun(2), root.path(), "x", &[&dir, "memory_checkpoint.disk_every=5"]);
    killed(&run, 20);
    std::fs::remove_dir_all(root.path().join("shm")).unwrap();
    std::fs::create_dir(root.path().join("shm")).unwrap();
    let ended = finished(&run);
    let (step, from) = &resumed(&ended.stdout)[0];
    assert!(from.starts_with(disk.to_str().unwrap()) && *step >= 5, "{ended}");
    println!("resumed at step {step} from {from}");
    run.files().same_as(&reference, STEPS, "from the disk");
    assert_eq!(disk.read_dir().unwrap().count(), 0, "a run that has ended has removed its slots");
}

/// Copies on a disk would replace the slots of the run, and those of its last job.
#[test]
fn a_disk_that_is_the_memory_is_refused_under_any_name() {
    let root = tempfile::tempdir().unwrap();
    let run = run(Mpirun(2), root.path(), "x", &[]);
    killed(&run, 6);
    let before = slots(root.path(), "own");
    let shm = root.path().join("shm");
    let link = root.path().join("disk");
    std::os::unix::fs::symlink(&shm, &link).unwrap();
    for disk in [&shm, &shm.join("../shm/"), &link] {
        let dir = format!("memory_checkpoint.disk_dir={}", disk.display());
        let ended = self::run(Mpirun(2), root.path(), "x", &[&dir]).resume("auto").ends();
        assert_eq!(ended.code(), 2, "{ended}");
        let named = format!("memory_checkpoint.disk_dir = {} is the same", disk.display());
        let errors: Vec<&str> = ended.stderr.matches("is the same directory").collect();
        assert!(ended.stderr.contains(&named) && ended.stderr.contains("hint:"), "{ended}");
        assert_eq!(errors.len(), 1, "{ended}");
        assert!(before.iter().all(|slot| slot.exists()), "{before:?}");
    }
}

/// A newer checkpoint file is preferred, and another run in the same directory takes no slots.
#[test]
fn slots_of_the_past_are_not_used() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=12"];
    let run = run(Spawn(2), root.path(), "x", &settings);
    killed(&run, 5);
    assert!(!slots(root.path(), "own").is_empty());
    let without = [&settings[..], &["memory_checkpoint.every=0", "memory_checkpoint.dir=/dev/shm"]];
    let other = self::run(Spawn(2), root.path(), "x", &without.concat()).resume("auto");
    other.succeeds();
    // The slots are older than the last checkpoint of the run, which goes on.
    let longer = self::run(Spawn(2), root.path(), "x", &["run.steps=14"]);
    let ended = finished(&longer);
    let (step, from) = &resumed(&ended.stdout)[0];
    assert!(*step == 12 && from.contains("checkpoints/step-00000012"), "{ended}");
    assert!(slots(root.path(), "").is_empty());

    let run = self::run(Spawn(2), root.path(), "y", &settings);
    killed(&run, 5);
    std::fs::remove_dir_all(&run.files().0).unwrap();
    let ended = finished(&run);
    assert!(ended.stdout.contains("no checkpoint yet: begins at step 0"), "{ended}");
    run.files().same_as(&self::run(Alone, root.path(), "z", &settings).succeeds(), 12, "again");
}

/// Settings that do not fit the copies are refused as for files, and the copies stay.
#[test]
fn another_optimizer_is_refused_and_removes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let run = run(Mpirun(2), root.path(), "x", &[]);
    killed(&run, 6);
    let before = slots(root.path(), "own");
    let other = self::run(Mpirun(2), root.path(), "x", &["optimizer.kind=sgd"]).resume("auto");
    let ended = other.ends();
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("checkpoint of another optimizer"), "{ended}");
    assert!(ended.stderr.contains("/shm/hpctrain-") && ended.stderr.contains("hint:"), "{ended}");
    assert!(before.iter().all(|slot| slot.exists()), "{before:?}");
    let ended = finished(&run);
    assert!(resumed(&ended.stdout)[0].1.contains("/shm/hpctrain-"), "{ended}");
    run.files().same_as(&reference, STEPS, "after a refusal");
}

/// A run that takes no more copies, or takes them elsewhere, continues from those that it has.
#[test]
fn copies_are_found_after_a_change_of_their_settings() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let elsewhere = root.path().join("shm/elsewhere");
    std::fs::create_dir_all(&elsewhere).unwrap();
    let dir = format!("memory_checkpoint.dir={}", elsewhere.display());
    let off = ["memory_checkpoint.every=0", "memory_checkpoint.dir=/dev/shm"];
    for (name, settings) in [("off", &off[..]), ("elsewhere", &[&dir])] {
        let run = run(Mpirun(2), root.path(), name, &[]);
        let recorded = killed(&run, 6);
        let ended = finished(&self::run(Mpirun(2), root.path(), name, settings));
        let (step, from) = &resumed(&ended.stdout)[0];
        assert!(from.contains("/shm/hpctrain-") && step + 2 >= recorded, "{recorded}: {ended}");
        run.files().same_as(&reference, STEPS, name);
        assert!(slots(root.path(), "rank-").is_empty(), "{name}: a run that has ended leaves none");
        let id = run.files().path("memory_checkpoint.id");
        assert_eq!(id.exists(), name == "elsewhere", "{name}");
    }
}

/// A job does not take its own directory for that of an earlier one.
#[test]
fn the_same_directory_under_another_name_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    std::os::unix::fs::symlink(root.path().join("shm"), root.path().join("link")).unwrap();
    for (name, path) in [("slash", "shm/"), ("linked", "link")] {
        let dir = format!("memory_checkpoint.dir={}", root.path().join(path).display());
        killed(&run(Mpirun(2), root.path(), name, &[]), 6);
        let other = run(Mpirun(2), root.path(), name, &[&dir]).resume("auto");
        let recorded = killed(&other, 14);
        let ended = finished(&other);
        let (step, from) = &resumed(&ended.stdout)[0];
        assert!(from.contains("/hpctrain-") && step + 2 >= recorded, "{path}, {recorded}: {ended}");
        other.files().same_as(&reference, STEPS, path);
    }
}

/// Copies of steps without an update would let a run that diverges go on for ever.
#[test]
fn a_run_that_only_skips_is_not_finished_by_restarts() {
    let root = tempfile::tempdir().unwrap();
    let wild = ["run.max_skipped=4", "optimizer.lr=1e38", "lr_schedule.warmup=0"];
    let run = run(Mpirun(2), root.path(), "x", &wild);
    let ended = start(&mut supervised(&run, &["--retries", "1"])).finish(LIMIT);
    assert!(!ended.status.success(), "{ended}");
    assert!(ended.stderr.contains("4 steps in a row were not finite"), "{ended}");
    assert!(lines(&run.files().path("metrics.jsonl")) < 20, "{ended}");
    assert!(slots(root.path(), "rank-").is_empty(), "copies of such steps are removed");
}

/// Nothing but the copies knows the batch of a run without checkpoints in files.
#[test]
fn the_batch_of_copies_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let run = run(Mpirun(2), root.path(), "x", &[]);
    killed(&run, 6);
    let run = self::run(Alone, root.path(), "x", &[]).resume("auto");
    let command = run.command();
    let args = command.get_args().map(|arg| arg.to_str().unwrap().to_owned());
    let args = args.map(|arg| match &arg[..] {
        "batch.global=8" => "batch.per_rank=4".to_owned(),
        _ => arg,
    });
    let args: Vec<String> = args.collect();
    assert!(args.contains(&"batch.per_rank=4".to_owned()), "{args:?}");
    let ended = start(&mut hpctrain_testkit::launch::program(args)).finish(LIMIT).succeeded();
    assert!(ended.stdout.contains("/shm/hpctrain-"), "{ended}");
    run.files().same_as(&reference, STEPS, "with the batch of the run");
}
