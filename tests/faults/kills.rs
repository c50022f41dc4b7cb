//! Kills: of one rank or of all, at any moment and in the middle of a save, again and again.

use std::time::{Duration, Instant};

use hpctrain::checkpoint::{Checkpoints, Reader};

use crate::observer::Observer;
use crate::{LARGE, kill, lines, ranks, saves, until_step};
use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{LIMIT, Running, processes, start};
use hpctrain_testkit::runs::{Run, RunFiles};

const STEPS: u64 = 30;

/// Ranks and layout between two kills.
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

/// Random numbers, the same in every run of the test.
pub struct Dice(pub u64);

impl Dice {
    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % limit
    }
}

/// The kills so far.
#[derive(Debug, Default)]
struct Tally {
    /// Of them in the middle of a save.
    in_saves: u64,
    one_rank: u64,
    all: u64,
    /// Runs that were killed again and again, and came to their end.
    runs: u64,
    /// Kills after which a checkpoint was not there any more that had been published, and nothing
    /// newer.
    lost: u64,
    /// Steps of the runs that came to their end, and those of them whose loss is not the
    /// undisturbed run's.
    steps: u64,
    differing: u64,
}

fn killed(transport: Transport, root: &std::path::Path, name: &str, settings: &[&str]) -> Run {
    // Two slices of each block, on one rank or two.
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
        // A run of its own for every so many kills: it must come to an end.
        let name = format!("killed-{}", tally.runs);
        let files = RunFiles(root.path().join(&name));
        let mut newest = 0;
        let observer = Observer::of(files.path("checkpoints"));
        for _ in 0..8 {
            // In another order every time: each layout is killed in all ways.
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

/// Replicas that train apart meet seldom: the job ends all the same, and goes on from an average.
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

/// The step of the newest checkpoint that is whole to its last byte; 0 if there is none. Nobody
/// writes.
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

/// Limit of a job's time: on a machine that has other things to do `HPCTRAIN_FAULT_LIMIT` seconds.
pub fn limit() -> Duration {
    std::env::var("HPCTRAIN_FAULT_LIMIT")
        .map_or(LIMIT, |seconds| Duration::from_secs(seconds.parse().unwrap()))
}

/// Starts a run and kills it: in the middle of a save, or at a moment between its first instruction
/// and its last. False if it had ended before.
fn disturb(run: &Run, number: u64, dice: &mut Dice, tally: &mut Tally) -> bool {
    let files = run.files();
    let done = lines(&files.path("metrics.jsonl"));
    let mut job = start(&mut run.command());
    let in_save = number.is_multiple_of(2);
    if in_save {
        // Leftovers of the kill before go when the run begins.
        let begins = || files.path("logs").join("rank-00000.log").exists() && !saves(&files);
        let begun = Instant::now();
        while job.runs() && !begins() && begun.elapsed() < limit() {
            std::thread::sleep(Duration::from_micros(200));
        }
        let later = dice.below(3);
        let wanted = done.saturating_sub(2) + 2 * later as usize;
        wait(&mut job, || lines(&files.path("metrics.jsonl")) >= wanted && saves(&files));
        // Into the writing, the manifest, the renames, the removal of the oldest.
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
    // Without their launcher some may live on for a while. A scheduler would end them before it
    // starts the job again.
    let of_run = format!("run.root={}", run.root.display());
    while let left = processes(&of_run)
        && !left.is_empty()
    {
        left.into_iter().for_each(kill);
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Waits until something is so, or the job has ended.
fn wait(job: &mut Running, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while job.runs() && !is_so() {
        assert!(begun.elapsed() < limit(), "hangs: {}", job.printed());
        std::thread::sleep(Duration::from_micros(200));
    }
}
