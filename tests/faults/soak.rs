//! Supervised runs with all kinds of injected faults; each must end with the bits of an undisturbed
//! run.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::disks::Tmpfs;
use crate::kills::{Dice, limit};
use crate::sdc_checks::flip;
use crate::supervise::{newest, supervised};
use crate::{LARGE, lines, ranks, refused, saves};
use hpctrain_testkit::launch::Transport::{Alone, Mpirun};
use hpctrain_testkit::launch::{Running, program, send, start, start_without_waiting};
use hpctrain_testkit::runs::{Run, RunFiles, tensors};

const STEPS: u64 = 60;

/// A fault, and how often it happened.
const KINDS: [&str; 11] = [
    "kill -9 of a rank",
    "kill -9 of all ranks",
    "SIGSTOP for longer than comm.timeout",
    "SIGSTOP for a moment",
    "full disk for a while",
    "second trainer",
    "flipped byte in the newest checkpoint, then kill -9",
    "flipped bit in the memory of a rank",
    "input/output errors for a while",
    "stale file handles for a while",
    "stale listings, and kill -9 of all ranks",
];

/// Builds the library that makes a disk fail while a file requests it.
fn failing_disk(root: &Path) -> PathBuf {
    let library = root.join("failing_disk.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults/failing_disk.c");
    let mut compiler = Command::new("c++");
    compiler.args(["-x", "c", "-shared", "-fPIC", "-O1", "-Wall", "-o"]).args([&library, &source]);
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

struct Job {
    run: Run,
    job: Running,
    disk: Option<Tmpfs>,
}

impl Job {
    fn files(&self) -> RunFiles {
        self.run.files()
    }

    /// Returns the number of recorded starts that have ended.
    fn ended(&self) -> usize {
        lines(&self.files().path("restarts.jsonl"))
    }

    /// Injects a fault that ends a start, and waits for the next start.
    fn ends_a_start(&mut self, fault: impl FnOnce(&mut Self)) {
        let before = self.ended();
        fault(self);
        let path = self.files().path("restarts.jsonl");
        self.job.until("started again", || lines(&path) > before);
    }

    fn kill(&self, count: usize) {
        ranks(&self.run).into_iter().take(count).for_each(|rank| send(rank, libc::SIGKILL));
    }

    /// Injects a fault of a kind; returns false if this machine cannot.
    fn suffers(&mut self, kind: usize, dice: &mut Dice, root: &Path) -> bool {
        let run = self.run.clone();
        self.job.until("all ranks are there", || ranks(&run).len() == 2);
        let rank = ranks(&run)[dice.below(2) as usize];
        match kind {
            0 => self.ends_a_start(|_| send(rank, libc::SIGKILL)),
            1 => self.ends_a_start(|job| job.kill(2)),
            2 => self.ends_a_start(|_| send(rank, libc::SIGSTOP)),
            3 => {
                send(rank, libc::SIGSTOP);
                std::thread::sleep(Duration::from_millis(500));
                send(rank, libc::SIGCONT);
            }
            4 => {
                if self.disk.is_none() {
                    return false;
                }
                let filler = root.join("disk/filler");
                // Only this checkpoint is left.
                let _ = std::fs::write(&filler, vec![0; 64 << 20]);
                std::thread::sleep(Duration::from_millis(1200));
                std::fs::remove_file(&filler).unwrap();
            }
            5 => {
                let mut second = self.run.clone().resume("auto").command();
                refused(
                    &start_without_waiting(&self.job, &mut second).finish(limit()),
                    &["is being trained by process"],
                );
            }
            6 => {
                // There is an older checkpoint to fall back to.
                let files = self.files();
                self.job.until("saved twice", || newest(&files) > 3);
                let checkpoint = self.files().path("checkpoints/latest").canonicalize().unwrap();
                let file = checkpoint.read_dir().unwrap().flatten().map(|entry| entry.path());
                let mut files: Vec<_> =
                    file.filter(|path| path.extension().is_some_and(|end| end == "h5")).collect();
                files.sort();
                let file = OpenOptions::new().read(true).write(true).open(&files[0]).unwrap();
                let mut byte = [0];
                let at = file.metadata().unwrap().len() / 2;
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ 4], at).unwrap();
                self.ends_a_start(|job| job.kill(2));
            }
            7 => return self.forgets(rank),
            8 => self.while_the_disk_fails("eio", root, |_| {
                std::thread::sleep(Duration::from_millis(1200))
            }),
            9 => self.while_the_disk_fails("estale", root, |_| {
                std::thread::sleep(Duration::from_millis(1200))
            }),
            _ => {
                self.while_the_disk_fails("stale", root, |job| job.ends_a_start(|job| job.kill(2)))
            }
        }
        true
    }

    /// Flips a bit of parameters in the memory of a rank; returns false if this user may not.
    fn forgets(&mut self, rank: u32) -> bool {
        let files = self.files();
        // Another fault may have damaged the newest checkpoint.
        let before = newest(&files);
        while self.job.runs() {
            // SDC checks do not cover the copy that is being saved.
            if newest(&files) == before || saves(&files) {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let tensors = tensors(&files.checkpoint(newest(&files)));
            let (_, bits) =
                tensors.iter().find(|(tensor, _)| tensor.contains("wte.weight")).unwrap();
            let wanted: Vec<f32> = bits[..64].iter().map(|&bits| f32::from_bits(bits)).collect();
            send(rank, libc::SIGSTOP);
            let flipped = if saves(&files) { Some(0) } else { flip(rank, &wanted, 0.008) };
            match flipped {
                // The parameters have changed too much since that checkpoint, or a save has
                // started.
                Some(0) => send(rank, libc::SIGCONT),
                Some(_) => {
                    self.ends_a_start(|_| send(rank, libc::SIGCONT));
                    let restarts = files.text("restarts.jsonl");
                    let last = restarts.lines().next_back().unwrap();
                    assert!(last.contains("have changed in memory"), "{last}");
                    return true;
                }
                None => {
                    send(rank, libc::SIGCONT);
                    return false;
                }
            }
        }
        // The rank has ended meanwhile.
        false
    }

    /// Calls `something` while operations on the run's disk fail in one way.
    fn while_the_disk_fails(&mut self, way: &str, root: &Path, something: impl FnOnce(&mut Self)) {
        let fault = root.join("disk.fault");
        std::fs::write(&fault, way).unwrap();
        something(self);
        std::fs::remove_file(&fault).unwrap();
    }
}

/// Injects `HPCTRAIN_FAULT_RUNS` faults; default: one of each kind.
#[test]
fn supervised_runs_survive_all_kinds_of_faults() {
    let faults =
        std::env::var("HPCTRAIN_FAULT_RUNS").map_or(KINDS.len(), |number| number.parse().unwrap());
    let root = tempfile::tempdir().unwrap();
    let steps = format!("run.steps={STEPS}");
    let settings = [
        &LARGE[..],
        &[
            &steps,
            "eval.every=10",
            "checkpoint.every=3",
            "checkpoint.keep=3",
            "checkpoint.io_retry_seconds=60",
            "optimizer.lr=0.001",
        ],
        &["comm.timeout=4", "run.sdc_check_every=5", "model.layers=2", "parallel.zero=0"],
    ]
    .concat();
    let reference = Run::new(Alone, root.path(), "reference", &settings).succeeds();
    let library = failing_disk(root.path());
    let mut dice = Dice(0xfa17);
    let mut done = 0;
    let mut counts = [0; KINDS.len()];
    for number in 0.. {
        if done == faults {
            break;
        }
        let place = root.path().join("disk");
        let disk = Tmpfs::mount(&place, "96m");
        let run = Run::new(Mpirun(2), &place, &format!("x{number}"), &settings);
        let mut command = supervised(&run, &["--retries", "5"]);
        command.env("LD_PRELOAD", &library).env("FAILING_DISK", &place);
        let job = start(&mut command);
        let mut job = Job { run, job, disk };
        let mut last = 0;
        for _ in 0..5 {
            // The start after the last fault has saved a checkpoint.
            let files = job.files();
            job.job.until("saved", || newest(&files) > last);
            last = newest(&files);
            if done == faults || last + 12 > STEPS {
                break;
            }
            // First one fault of each kind, in order.
            let kind =
                if done < KINDS.len() { done } else { dice.below(KINDS.len() as u64) as usize };
            if job.suffers(kind, &mut dice, root.path()) {
                counts[kind] += 1;
            } else {
                println!("SKIPPED: {}", KINDS[kind]);
            }
            done += 1;
        }
        let Job { run, job, disk } = job;
        job.finish(limit()).succeeded();
        run.files().same_as(&reference, STEPS, &run.name);
        let verified = program(["checkpoint", "verify"]).arg(run.files().0).output().unwrap();
        assert!(verified.status.success(), "{verified:?}");
        drop(disk);
    }
    for (kind, count) in KINDS.iter().zip(counts) {
        println!("{kind}: {count}");
    }
}
