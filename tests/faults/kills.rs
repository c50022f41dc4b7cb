//! Repeated kills of one rank or of all, at any moment and during saves.

use std::time::{Duration, Instant};

use hpctrain::checkpoint::{Checkpoints, Reader};

use crate::observer::Observer;
use crate::{LARGE, kill, lines, ranks, saves, until_step};
use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{LIMIT, Running, processes, start};
use hpctrain_testkit::runs::{Run, RunFiles};

const STEPS: u64 = 30;

/// The ranks and layout between two kills.
const LAYOUTS: [(Transport, &[&str]); 10] = [
    (Mpirun(2), &["parallel.zero=0"]),
    (Mpirun(4), &["parallel.zero=3"]),
    (Alone, &["parallel.zero=0", "checkpoint.async_save=false"]),
    (Spawn(2), &["parallel.zero=2"]),
    (Simulate(2), &["parallel.zero=1"]),
    (Mpirun(4), &["parallel.zero=1", "parallel.shard=2", "checkpoint.if_busy=skip"]),
    (Mpirun(1), &["parallel.zero=0"]),
    (Mpirun(2), &["parallel.zero=3", "checkpoint.async_save=false"]),
    (Mpirun(4), &["parallel.pipeline=2", "parallel.zero=1", "batch.micro=2"]),
    (Mpirun(4), &["parallel.tensor=2", "parallel.sequence=true", "parallel.zero=1"]),
];

/// A random number generator, with the same numbers in every run of the test.
pub struct Dice(pub u64);

impl Dice {
    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % limit
    }
}

/// The results of the kills so far.
#[derive(Debug, Default)]
struct Tally {
    /// The number of kills during a save.
    in_saves: u64,
    one_rank: u64,
    all: u64,
    /// The number of runs that reached their end despite kills.
    runs: u64,
    /// The number of kills after which a published checkpoint was missing without a newer one.
    lost: u64,
    /// The number of steps of the completed runs, and of those whose loss differs from the
    /// undisturbed run.
    steps: u64,
    differing: u64,
}

fn killed(transport: Transport, root: &std::path::Path, name: &str, settings: &[&str]) -> Run {
    // Two virtual tensor-parallel ranks, on one rank or two.
    let steps = ["run.steps=30", "eval.every=5", "parallel.virtual_tensor_ranks=2"];
    Run::new(transport, root, name, &[&LARGE[..], &steps, settings].concat())
}

#[test]
fn killed_runs_equal_undisturbed_ones() {
    let kills = std::env::var("HPCTRAIN_FAULT_RUNS").map_or(20, |number| number.parse().unwrap());
    let root = tempfile::tempdir().unwrap();
    let whole = killed(Alone, root.path(), "reference", &["checkpoint.if_busy=wait"]);
    start(&mut whole.command()).finish(limit()).succeeded();
    let reference = whole.files();
    assert_eq!(reference.evaluations().len(), 6);

    let mut dice = Dice(0x5eed);
    let mut tally = Tally::default();
    let mut number = 0;
    while number < kills {
        // Every few kills a new run starts, which must reach its end.
        let name = format!("killed-{}", tally.runs);
        let files = RunFiles(root.path().join(&name));
        let mut newest = 0;
        let observer = Observer::start(files.path("checkpoints"));
        for _ in 0..8 {
            // The order differs each time, so that every layout is killed in every way.
            let (transport, settings) = LAYOUTS[(number + number / 8) as usize % LAYOUTS.len()];
            let run = killed(transport, root.path(), &name, settings).resume("auto");
            if number == kills || !disturb(&run, number, &mut dice, &mut tally) {
                break;
            }
            number += 1;
            let left = newest_whole(&files);
            tally.lost += u64::from(left < newest);
            newest = left;
        }
        let (transport, settings) = LAYOUTS[dice.below(LAYOUTS.len() as u64) as usize];
        let last = killed(transport, root.path(), &name, settings).resume("auto");
        start(&mut last.command()).finish(limit()).succeeded();
        let found = files.steps();
        let wanted = reference.steps();
        tally.steps += wanted.len() as u64;
        let equal = found.iter().zip(&wanted).filter(|(found, wanted)| found == wanted).count();
        tally.differing += (wanted.len().max(found.len()) - equal) as u64;
        println!("{number} kills: {tally:?}");
        files.same_as(&reference, STEPS, &name);
        let latest = files.path("checkpoints/latest");
        assert_eq!(latest.canonicalize().unwrap(), files.checkpoint(STEPS).canonicalize().unwrap());
        assert!(!saves(&files), "{name}: leftovers");
        let seen = observer.finish();
        assert!(seen.looks > 20 && seen.verified > 20 && seen.latest > 10, "{seen:?}");
        println!("{name}: {seen:?}");
        tally.runs += 1;
    }
    println!("{kills} kills: {tally:?}");
    assert_eq!((tally.lost, tally.differing), (0, 0), "{tally:?}");
    assert!(kills < 20 || tally.in_saves > 0 && tally.one_rank > 0 && tally.all > 0, "{tally:?}");
}

/// With local SGD replicas synchronize rarely; a kill still ends the job, which resumes from an
/// average.
#[test]
fn a_kill_between_averages_ends_the_job() {
    let root = tempfile::tempdir().unwrap();
    let run = |name| {
        let settings = ["local_sgd.sync_every=4", "local_sgd.replicas=4", "run.steps=24"];
        Run::new(Mpirun(4), root.path(), name, &[&LARGE[..], &settings].concat())
    };
    let whole = run("whole").succeeds();
    let cut = run("cut");
    let mut job = start(&mut cut.command());
    until_step(&mut job, &cut.files(), 8);
    kill(ranks(&cut)[2]);
    let ended = job.finish(limit());
    assert!(!ended.status.success(), "{ended}");
    cut.resume("auto").succeeds().same_as(&whole, 24, "killed between averages");
}

/// Returns the step of the newest valid checkpoint, or 0 if there is none. No process may be
/// writing.
fn newest_whole(files: &RunFiles) -> u64 {
    let checkpoints = Checkpoints::new(files.path("checkpoints"));
    let is_whole = |step: &u64| {
        Reader::open(&checkpoints.path(*step)).is_ok_and(|mut reader| {
            let names: Vec<String> = reader.manifest().files.keys().cloned().collect();
            names.iter().all(|name| reader.verify(name).is_ok())
        })
    };
    checkpoints.steps().unwrap().into_iter().rev().find(is_whole).unwrap_or(0)
}

/// Returns the time limit of a job; `HPCTRAIN_FAULT_LIMIT` sets it in seconds for busy machines.
pub fn limit() -> Duration {
    std::env::var("HPCTRAIN_FAULT_LIMIT")
        .map_or(LIMIT, |seconds| Duration::from_secs(seconds.parse().unwrap()))
}

/// Starts a run and kills it during a save or at any other moment. Returns false if it had ended
/// before.
fn disturb(run: &Run, number: u64, dice: &mut Dice, tally: &mut Tally) -> bool {
    let files = run.files();
    let done = lines(&files.path("metrics.jsonl"));
    let mut job = start(&mut run.command());
    let in_save = number.is_multiple_of(2);
    if in_save {
        // A new start removes what the previous kill left behind.
        let begins = || files.path("logs").join("rank-00000.log").exists() && !saves(&files);
        let begun = Instant::now();
        while job.runs() && !begins() && begun.elapsed() < limit() {
            std::thread::sleep(Duration::from_micros(200));
        }
        let later = dice.below(3);
        let wanted = done.saturating_sub(2) + 2 * later as usize;
        wait(&mut job, || lines(&files.path("metrics.jsonl")) >= wanted && saves(&files));
        // The kill hits the writes, the manifest, the renames, or the removal of the oldest
        // checkpoint.
        std::thread::sleep(Duration::from_millis(dice.below(5) * dice.below(30)));
    } else {
        let moment = Duration::from_millis(dice.below(1000));
        let begun = Instant::now();
        wait(&mut job, || begun.elapsed() >= moment);
    }
    if !job.runs() {
        job.finish(limit()).succeeded();
        return false;
    }
    tally.in_saves += u64::from(saves(&files));

    let victims = ranks(run);
    let all = dice.below(2) == 0 || victims.is_empty();
    if all {
        tally.all += 1;
        kill(job.id());
        victims.into_iter().for_each(kill);
    } else {
        tally.one_rank += 1;
        kill(victims[dice.below(victims.len() as u64) as usize]);
    }
    let ended = job.finish(limit());
    assert!(!ended.status.success() || files.path("run.json").exists(), "{ended}");
    // Without their launcher some ranks may survive for a while. A scheduler would end them before
    // it restarts the job.
    let of_run = format!("run.root={}", run.root.display());
    while let left = processes(&of_run)
        && !left.is_empty()
    {
        left.into_iter().for_each(kill);
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Waits until a condition is true, or the job has ended.
fn wait(job: &mut Running, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while job.runs() && !is_so() {
        assert!(begun.elapsed() < limit(), "hangs: {}", job.printed());
        std::thread::sleep(Duration::from_micros(200));
    }
}
