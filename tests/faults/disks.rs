//! Disks that are full, read-only, or return corrupted data.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use hpctrain::checkpoint::{Checkpoints, Reader};

use crate::{LARGE, lines, ranks, refused, saves};
use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{Ended, LIMIT, finish, program, send, start};
use hpctrain_testkit::runs::{Run, RunFiles, copy, json};

/// A tmpfs, which is unmounted when this is dropped.
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    /// Mounts a tmpfs of a size such as `14m` on a directory; returns none if this user may not.
    pub fn mount(at: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        // By default the tmpfs is world-writable, which a run's directory must not be.
        let output = mount
            .args(["-t", "tmpfs", "-o", &format!("size={size},mode=755"), "tmpfs"])
            .arg(at)
            .output();
        if output.is_ok_and(|output| output.status.success()) {
            return Some(Self(at.to_path_buf()));
        }
        println!("skipped: this user may not mount file systems");
        None
    }

    /// Remounts it with other options; returns false if it is in use.
    fn remount(&self, options: &str) -> bool {
        let mut mount = Command::new("mount");
        mount
            .args(["-o", &format!("remount,{options}")])
            .arg(&self.0)
            .output()
            .unwrap()
            .status
            .success()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily: a test that failed may have left a process there.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Panics unless the only checkpoint is a valid one of this step, to which `latest` points.
#[track_caller]
fn only_whole_one(files: &RunFiles, step: u64) {
    let checkpoints = Checkpoints::new(files.path("checkpoints"));
    assert_eq!(checkpoints.steps().unwrap(), [step]);
    assert_eq!(
        checkpoints.latest().canonicalize().unwrap(),
        checkpoints.path(step).canonicalize().unwrap()
    );
    let mut reader = Reader::open(&checkpoints.latest()).unwrap();
    let names: Vec<String> = reader.manifest().files.keys().cloned().collect();
    names.iter().for_each(|name| reader.verify(name).unwrap());
    assert!(!saves(files), "leftovers");
}

const STEPS: u64 = 6;

/// Saves every second step and keeps one checkpoint.
fn large(transport: Transport, root: &Path, name: &str, more: &[&str]) -> Run {
    let settings = [
        "run.steps=6",
        "eval.every=2",
        "checkpoint.keep=1",
        "checkpoint.keep_best=0",
        "checkpoint.io_retry_seconds=0",
    ];
    Run::new(transport, root, name, &[&LARGE[..], &settings, more].concat())
}

/// The ways in which these tests write checkpoints.
const WAYS: [(Transport, &[&str]); 4] = [
    (Alone, &["checkpoint.async_save=true"]),
    (Alone, &["checkpoint.async_save=false"]),
    (Mpirun(2), &["checkpoint.async_save=true", "parallel.zero=0"]),
    (Mpirun(2), &["checkpoint.async_save=false", "parallel.zero=2"]),
];

#[test]
fn a_full_disk_ends_the_run_and_costs_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let reference = large(Alone, root.path(), "", &[]).shared();
    for (i, (transport, way)) in WAYS.into_iter().enumerate() {
        let asked = large(transport, root.path(), &format!("x-{i}"), way);
        let files = asked.files();
        // Room for one checkpoint and a half.
        let Some(disk) = Tmpfs::mount(&files.path("checkpoints"), "14m") else { return };
        let ended = asked.ends();
        given_up(
            &ended,
            &["cannot write", "step-00000004", "/rank-0000", ".h5", "No space left", "step 4"],
        );
        only_whole_one(&files, 2);
        // The run can be continued from the last checkpoint.
        given_up(&asked.clone().resume("auto").ends(), &["No space left"]);
        only_whole_one(&files, 2);
        assert!(disk.remount("size=64m"));
        asked.clone().resume("auto").succeeds().same_as(
            &reference,
            STEPS,
            &format!("{transport:?} {way:?}"),
        );
    }
}

/// Panics unless a job ended because its disk failed for longer than `checkpoint.io_retry_seconds`.
#[track_caller]
fn given_up(ended: &Ended, words: &[&str]) {
    assert_eq!(ended.code(), 74, "{ended}");
    assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
    for word in words.iter().chain(&["the last good checkpoint is", "hint:"]) {
        assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
    }
}

fn log(files: &RunFiles) -> String {
    std::fs::read_to_string(files.path("logs/rank-00000.log")).unwrap_or_default()
}

/// Checkpoints and records that cannot be written are written once there is space again, and
/// training continues meanwhile.
#[test]
fn a_disk_that_is_full_for_a_while_costs_nothing() {
    let root = tempfile::tempdir().unwrap();
    let reference = large(Alone, root.path(), "", &[]).shared();
    for (i, (transport, way)) in WAYS.into_iter().enumerate() {
        let asked = large(
            transport,
            root.path(),
            &format!("x-{i}"),
            &[way, &["checkpoint.io_retry_seconds=600"]].concat(),
        );
        let files = asked.files();
        // Records are on the disk, too: there is space for one and a half checkpoints.
        let Some(disk) = Tmpfs::mount(&files.0, "14m") else { return };
        let mut job = start(&mut asked.command());
        // At its end the run waits for space.
        job.until("refused at the end", || {
            files.checkpoint(2).exists()
                && log(&files).matches("training goes on, and saves again").count() > 1
        });
        assert!(disk.remount("size=64m"));
        let ended = job.finish(LIMIT).succeeded();
        assert!(ended.stderr.contains("No space left"), "{ended}");
        files.same_as(&reference, STEPS, &format!("{transport:?} {way:?}"));
        only_whole_one(&files, STEPS);
    }
}

/// A run that waits for space for its last checkpoint ends after one more attempt on a signal.
#[test]
fn a_run_that_waits_for_room_ends_when_it_is_asked_to() {
    let root = tempfile::tempdir().unwrap();
    for (name, transport) in [("alone", Alone), ("two", Mpirun(2))] {
        let asked = large(transport, root.path(), name, &["checkpoint.io_retry_seconds=3600"]);
        let files = asked.files();
        let Some(_disk) = Tmpfs::mount(&files.path("checkpoints"), "14m") else { return };
        let mut job = start(&mut asked.command());
        job.until("waits at its end", || {
            lines(&files.path("metrics.jsonl")) == STEPS as usize
                && log(&files).matches("saves again").count() > 2
        });
        send(ranks(&asked)[0], libc::SIGTERM);
        given_up(&job.finish(LIMIT), &["No space left"]);
        assert_eq!(json(&files.path("END"))["status"], "failed", "{name}");
    }
}

/// A limit on the size of files is handled like a full disk, and kills no process.
#[test]
fn a_limit_on_the_size_of_files_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let limited = |inner: &Command| {
        let mut command = Command::new("sh");
        command
            .args(["-c", "ulimit -f 4096; exec \"$0\" \"$@\""])
            .arg(inner.get_program())
            .args(inner.get_args());
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        finish(&mut command)
    };
    // Not mpirun, which itself writes larger files.
    let ways = [
        (Alone, "checkpoint.async_save=true"),
        (Alone, "checkpoint.async_save=false"),
        (Spawn(2), "parallel.zero=1"),
    ];
    for (i, (transport, way)) in ways.into_iter().enumerate() {
        let run = large(transport, root.path(), &format!("x-{i}"), &[way]);
        refused(&limited(&run.command()), &["File too large", "ulimit -f"]);
    }
    let whole = large(Alone, root.path(), "", &[]).shared();
    let out = root.path().join("exported");
    let export = limited(program(["checkpoint", "export"]).arg(&whole.0).arg("--out").arg(&out));
    refused(&export, &["File too large", "ulimit -f"]);
    assert!(!out.exists());
}

/// Only TensorBoard events wait for space: training continues after one warning.
#[test]
fn points_wait_for_a_full_disk_and_training_does_not() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["log.tensorboard=true", "log.histograms=1", "run.steps=8"];
    let asked = Run::new(Alone, root.path(), "x", &settings);
    let files = asked.files();
    let Some(_disk) = Tmpfs::mount(&files.path("tensorboard"), "32k") else { return };
    let ended = asked.ends().succeeded();
    assert_eq!(ended.stderr.matches("warn: ").count(), 1, "{ended}");
    for words in
        ["/tensorboard/events.out.tfevents.", "No space left on device", "training continues"]
    {
        assert!(ended.stderr.contains(words), "{words:?} is missing: {ended}");
    }
    assert_eq!(files.steps().len(), 8);
    // The records that fit are whole.
    if let Some(found) = hpctrain_testkit::peers::events(&files.0) {
        assert_eq!(found["scalars"]["loss/training"][0][0], 1, "{found}");
    }
}

/// A run with parameter servers also waits for a full disk.
#[test]
fn servers_wait_for_a_full_disk_too() {
    let root = tempfile::tempdir().unwrap();
    let reference = large(Alone, root.path(), "", &[]).shared();
    let asked = large(Simulate(3), root.path(), "x", &["checkpoint.io_retry_seconds=600"]);
    let files = asked.files();
    let Some(disk) = Tmpfs::mount(&files.0, "14m") else { return };
    let mut job = start(asked.command().args(["--servers", "1"]));
    job.until("refused at the end", || {
        let log = std::fs::read_to_string(files.path("logs/coordinator.log")).unwrap_or_default();
        files.checkpoint(2).exists() && log.matches("training goes on, and saves again").count() > 1
    });
    assert!(disk.remount("size=64m"));
    job.finish(LIMIT).succeeded();
    files.same_as(&reference, STEPS, "servers");
}

/// Even the first checkpoint does not fit, and records are on the same disk.
#[test]
fn a_disk_that_was_always_full_is_named() {
    let root = tempfile::tempdir().unwrap();
    let Some(_disk) = Tmpfs::mount(root.path(), "5m") else { return };
    for (transport, way) in WAYS {
        let name = format!("{transport:?}-{}", way[0].contains("true"));
        let ended = large(transport, root.path(), &name, way).ends();
        refused(&ended, &["cannot write", "No space left"]);
        std::fs::remove_dir_all(root.path().join(name)).unwrap();
    }
}

#[test]
fn a_disk_that_turns_read_only_ends_the_run() {
    let root = tempfile::tempdir().unwrap();
    let reference = large(Alone, root.path(), "", &[]).shared();
    for (i, (transport, way)) in WAYS.into_iter().enumerate() {
        // After the first checkpoint, which a later one may have replaced.
        let asked =
            large(transport, root.path(), &format!("x-{i}"), &[way, &["run.steps=1000"]].concat());
        let files = asked.files();
        let Some(disk) = Tmpfs::mount(&files.path("checkpoints"), "64m") else { return };
        let mut job = start(&mut asked.command());
        job.until("turned read-only", || files.checkpoint(2).exists() && disk.remount("ro"));
        let ended = job.finish(LIMIT);
        given_up(&ended, &["Read-only file system", "checkpoints"]);
        let refused_again = asked.clone().resume("auto").ends();
        assert!(disk.remount("rw"));
        let checkpoints = Checkpoints::new(files.path("checkpoints"));
        let latest = checkpoints.steps().unwrap().into_iter().next_back().unwrap();
        let mut reader = Reader::open(&checkpoints.latest()).unwrap();
        reader.check_files().unwrap();
        assert_eq!(reader.manifest().step, latest);
        refused(&refused_again, &["Read-only file system"]);
        if latest <= STEPS {
            let resumed = large(transport, root.path(), &asked.name, way).resume("auto").succeeds();
            resumed.same_as(&reference, STEPS, &format!("{transport:?} {way:?}"));
        }
    }
}

#[test]
fn a_read_only_root_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let Some(disk) = Tmpfs::mount(root.path(), "8m") else { return };
    assert!(disk.remount("ro"));
    for transport in [Alone, Mpirun(2), Simulate(2)] {
        let ended = Run::new(transport, root.path(), "x", &[]).ends();
        refused(
            &ended,
            &[
                "cannot create",
                &root.path().display().to_string(),
                "Read-only file system",
                "run.root",
            ],
        );
    }
}

/// Changes one bit.
pub fn flip(path: &Path, offset: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1 << (offset % 7)], offset).unwrap();
}

#[test]
fn a_bit_that_flipped_anywhere_is_found() {
    const STEPS: u64 = 9;
    let root = tempfile::tempdir().unwrap();
    let settings = [
        "run.steps=9",
        "checkpoint.every=3",
        "eval.every=3",
        "parallel.virtual_ranks=4",
        "parallel.zero=2",
    ];
    let run = |transport, name: &str| {
        let settings = if transport == Alone { &settings[..4] } else { &settings };
        Run::new(transport, root.path(), name, &[settings, &["checkpoint.keep=9"]].concat())
    };
    let whole = run(Mpirun(2), "whole").succeeds();
    // Restore the state before the checkpoint of step 9.
    std::fs::remove_file(whole.path("run.json")).unwrap();
    let reference = RunFiles(root.path().join("reference"));
    copy(&whole.0, &reference.0);
    std::fs::remove_dir_all(whole.checkpoint(9)).unwrap();

    let mut damages: Vec<(String, Option<u64>)> = Vec::new();
    for entry in whole.checkpoint(6).read_dir().unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let length = entry.metadata().unwrap().len();
        let offsets = match name.ends_with(".h5") {
            true => vec![
                0,
                1,
                13,
                47,
                99,
                length / 5,
                length / 3,
                length / 2,
                length * 7 / 8,
                length - 1,
            ],
            false => vec![0, 9, length / 2, length - 1],
        };
        damages.extend(offsets.into_iter().map(|offset| (name.clone(), Some(offset))));
        damages.push((name, None));
    }
    assert_eq!(damages.len(), 2 * 5 + 2 * 11);
    for (i, (name, offset)) in damages.iter().enumerate() {
        let files = RunFiles(root.path().join(format!("x-{i}")));
        copy(&whole.0, &files.0);
        let path = files.checkpoint(6).join(name);
        match offset {
            Some(offset) => flip(&path, *offset),
            None => std::fs::remove_file(&path).unwrap(),
        }
        let transport = [Alone, Simulate(2), Alone, Mpirun(2)][i % 4];
        let ended = run(transport, &format!("x-{i}")).resume("auto").ends().succeeded();
        let what = format!("{name}, byte {offset:?}");
        let warnings: Vec<_> =
            ended.stderr.lines().filter(|line| line.starts_with("warn: ")).collect();
        assert!(warnings[0].contains("skipping") && warnings[0].contains(name), "{what}: {ended}");
        assert!(warnings[0].contains("step-00000006"), "{what}: {ended}");
        assert!(ended.stdout.contains("at step 3 from"), "{what}: {ended}");
        files.same_as(&reference, STEPS, &what);
        // The checkpoint was written again.
        let mut reader = Reader::open(&files.checkpoint(6)).unwrap();
        reader.check_files().unwrap();
        assert_eq!(files.tensors(6), reference.tensors(6), "{what}");
        std::fs::remove_dir_all(&files.0).unwrap();
    }
}

/// Copies that do not fit are refused before anything is copied, and a disk with enough space
/// accepts them.
#[test]
fn data_that_does_not_fit_is_not_staged() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    std::fs::create_dir(&data).unwrap();
    for name in ["train-0.h5", "train-1.h5", "val-0.h5"] {
        let file = hdf5::File::create(data.join(name)).unwrap();
        let ids: Vec<u8> = (0..400_000u32).map(|i| (i % 5) as u8).collect();
        file.new_dataset::<u8>()
            .shape(ids.len())
            .create("tokens")
            .unwrap()
            .write_raw(&ids)
            .unwrap();
        file.new_attr::<u64>().create("vocabulary_size").unwrap().write_scalar(&5u64).unwrap();
    }
    let disk = root.path().join("disk");
    // Two of the three would fit.
    let Some(mounted) = Tmpfs::mount(&disk, "1m") else { return };
    let settings =
        [format!("data.path={}", data.display()), format!("data.local_cache={}", disk.display())];
    let run =
        Run::new(Mpirun(2), root.path(), "x", &settings.each_ref().map(|setting| &setting[..]));
    refused(
        &run.ends(),
        &["data.local_cache = ", " bytes free, but ", " are to be copied", "omit data.local_cache"],
    );
    let copies = disk.read_dir().unwrap().next().unwrap().unwrap().path();
    let names =
        copies.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.into_iter().all(|name| !name.ends_with(".h5")));
    assert!(mounted.remount("size=8m"));
    run.succeeds();
}
