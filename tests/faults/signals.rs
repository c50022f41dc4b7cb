//! Requests to end: signals at any moment, and time limits. The job saves, exits with code 75, and
//! can be resumed.

use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use libc::{SIGINT, SIGTERM, SIGUSR1, SIGXCPU};

use crate::{LARGE, lines, preempted, ranks, saves, until_step};
use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{CoreShare, Ended, LIMIT, Running, handles, send, start, start_on};
use hpctrain_testkit::runs::{Run, RunFiles, json};

/// The target of a signal.
#[derive(Debug, Clone, Copy)]
enum To {
    /// A rank of the job; with simulate all ranks are one process.
    Rank(usize),
    /// mpirun, which forwards SIGUSR1, or `--spawn`, which forwards all signals.
    Launcher,
}

/// The phase of the job in which the signal arrives.
#[derive(Debug, Clone, Copy)]
enum During {
    /// This number of milliseconds after it started to listen for signals.
    Start(u64),
    Training,
    Save,
}

/// Waits until all ranks of a job handle a signal, and returns them.
fn listening(run: &Run, job: &mut Running, signal: i32) -> Vec<u32> {
    let wanted = match run.transport {
        Alone | Simulate(_) => 1,
        Mpirun(ranks) | Spawn(ranks) => ranks,
    };
    let mut found = Vec::new();
    job.until("listens to signals", || {
        found = ranks(run);
        found.len() == wanted && found.iter().all(|pid| handles(*pid, signal))
    });
    found
}

/// Interrupts a job and waits for its end.
fn interrupt(run: &Run, signal: i32, to: To, during: During) -> Ended {
    let files = run.files();
    let mut job = start(&mut run.command());
    let ranks = listening(run, &mut job, signal);
    match during {
        During::Start(delay) => std::thread::sleep(Duration::from_millis(delay)),
        During::Training => until_step(&mut job, &files, 7),
        During::Save => {
            job.until("saves", || lines(&files.path("metrics.jsonl")) >= 4 && saves(&files))
        }
    }
    let target = match to {
        To::Rank(rank) => ranks[rank],
        To::Launcher => job.id(),
    };
    send(target, signal);
    job.finish(LIMIT)
}

#[test]
fn interrupted_runs_go_on_as_if_nothing_was() {
    const STEPS: u64 = 16;
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=16", "eval.every=5"];
    let run = |transport, name: &str, more: &[&str]| {
        Run::new(transport, root.path(), name, &[&LARGE[..], &settings, more].concat())
    };
    let reference = run(Alone, "reference", &[]).succeeds();
    let mut table = vec![
        (Alone, SIGINT, To::Rank(0), During::Start(0), Mpirun(2)),
        (Mpirun(2), SIGUSR1, To::Launcher, During::Start(60), Simulate(2)),
        (Mpirun(2), SIGTERM, To::Rank(1), During::Training, Mpirun(4)),
        (Mpirun(2), SIGINT, To::Rank(0), During::Training, Alone),
        (Spawn(2), SIGTERM, To::Launcher, During::Training, Mpirun(2)),
        (Simulate(2), SIGUSR1, To::Rank(0), During::Training, Simulate(4)),
        // The signal of a limit on CPU time.
        (Alone, SIGXCPU, To::Rank(0), During::Training, Alone),
        (Alone, SIGUSR1, To::Rank(0), During::Save, Mpirun(2)),
        (Spawn(2), SIGINT, To::Rank(1), During::Save, Spawn(4)),
        (Mpirun(2), SIGUSR1, To::Launcher, During::Save, Alone),
    ];
    if std::env::var_os("HPCTRAIN_FAULT_RUNS").is_some() {
        table.extend([
            (Mpirun(2), SIGTERM, To::Rank(1), During::Start(0), Alone),
            (Mpirun(4), SIGINT, To::Rank(3), During::Start(300), Mpirun(2)),
            (Simulate(2), SIGTERM, To::Rank(0), During::Start(40), Mpirun(2)),
            (Alone, SIGTERM, To::Rank(0), During::Training, Alone),
            (Mpirun(4), SIGUSR1, To::Launcher, During::Training, Mpirun(2)),
            (Mpirun(2), SIGTERM, To::Rank(1), During::Save, Mpirun(2)),
            (Simulate(2), SIGINT, To::Rank(0), During::Save, Alone),
        ]);
    }
    for (i, (transport, signal, to, during, after)) in table.into_iter().enumerate() {
        let what = format!("{transport:?}, signal {signal} to {to:?} in {during:?}");
        let asked = run(transport, &format!("x-{i}"), &[&*format!("parallel.zero={}", i % 4)]);
        let ended = interrupt(&asked, signal, to, during);
        let files = asked.files();
        println!("{what}: {} steps", files.steps().len());
        preempted(&ended, &files, transport);
        assert!(!saves(&files), "{what}: leftovers");
        // Everything that was trained is saved.
        let at = files.steps().len() as u64;
        assert!(
            at < STEPS && (at == 0 || files.checkpoint(at).exists()),
            "{what}: at step {at}: {ended}"
        );
        assert_eq!(json(&files.path("END"))["step"], at, "{what}");
        run(after, &asked.name, &[]).resume("auto").succeeds().same_as(&reference, STEPS, &what);
    }
}

/// A long evaluation is cancelled, and repeated after resuming.
#[test]
fn a_signal_ends_an_evaluation() {
    const STEPS: u64 = 4;
    let root = tempfile::tempdir().unwrap();
    let slow =
        ["model.layers=4", "model.width=96", "run.steps=4", "eval.every=2", "eval.samples=1200"];
    let run = |transport: Transport, name: &str| {
        let more = ["parallel.virtual_ranks=4", "parallel.zero=3"];
        let more = if transport == Alone { &more[..1] } else { &more };
        Run::new(transport, root.path(), name, &[&slow[..], more].concat())
    };
    let reference = run(Alone, "reference").succeeds();
    let table = [
        (Alone, SIGTERM, To::Rank(0)),
        (Mpirun(2), SIGINT, To::Rank(1)),
        (Mpirun(2), SIGUSR1, To::Launcher),
        (Simulate(2), SIGTERM, To::Rank(0)),
    ];
    for (i, (transport, signal, to)) in table.into_iter().enumerate() {
        let asked = run(transport, &format!("x-{i}"));
        let files = asked.files();
        let mut job = start(&mut asked.command());
        let ranks = listening(&asked, &mut job, signal);
        until_step(&mut job, &files, 2);
        std::thread::sleep(Duration::from_millis(50));
        send(if let To::Rank(rank) = to { ranks[rank] } else { job.id() }, signal);
        let ended = job.finish(LIMIT);
        preempted(&ended, &files, transport);
        // It was cancelled rather than awaited.
        assert_eq!((lines(&files.path("eval.jsonl")), files.steps().len()), (0, 2), "{ended}");
        assert!(files.checkpoint(2).exists(), "{ended}");
        let resumed =
            run(if i % 2 == 0 { Mpirun(2) } else { Alone }, &asked.name).resume("auto").succeeds();
        resumed.same_as(&reference, STEPS, &format!("{transport:?}, signal {signal}"));
    }
}

/// Runs steps that take far longer than a test may.
#[test]
fn a_second_interrupt_ends_at_once() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["model.layers=8", "model.width=512", "model.context=256", "batch.global=128"];
    for transport in [Alone, Simulate(2)] {
        let run = Run::new(transport, root.path(), &format!("{transport:?}"), &settings);
        let files = run.files();
        let mut job = start(&mut run.command());
        job.until("trains", || files.path("metrics.jsonl").exists());
        // On a busy machine the first step starts some time after the file exists.
        std::thread::sleep(Duration::from_millis(2000));
        send(job.id(), SIGINT);
        std::thread::sleep(Duration::from_millis(100));
        assert!(job.runs(), "the first one ended it: {}", job.printed());
        send(job.id(), SIGINT);
        let ended = job.finish(LIMIT);
        assert_eq!(ended.code(), 130, "{ended}");
        assert_eq!(lines(&files.path("metrics.jsonl")), 0, "the step was not long enough");
    }
}

/// Returns a run that would take hours.
fn endless(transport: Transport, root: &std::path::Path, more: &[&str]) -> Run {
    let settings = ["run.steps=100000000", "eval.every=0", "checkpoint.every=0"];
    Run::new(transport, root, "endless", &[&settings, more].concat())
}

/// Panics unless a run that is started on a share of the cores ends before its time limit, has
/// saved, and can be resumed.
fn ends_in_time(run: &Run, share: CoreShare, command: &mut Command, limit: Duration) {
    let begun = Instant::now();
    let ended = start_on(share, command).finish(LIMIT);
    let took = begun.elapsed();
    let files: RunFiles = run.files();
    preempted(&ended, &files, run.transport);
    assert!(took < limit, "{took:?}: {ended}");
    let end = json(&files.path("END"));
    assert!(
        end["reason"].as_str().unwrap().contains("time is up") || run.transport != Alone,
        "{end}"
    );
    let steps = files.steps().len() as u64;
    assert!(steps > 0 && files.checkpoint(steps).exists(), "{ended}");

    let more = [&*format!("run.steps={}", steps + 3), "run.time_limit=0s"];
    let resumed = endless(run.transport, &run.root, &more).resume("auto").succeeds();
    assert_eq!(resumed.steps().len() as u64, steps + 3);
}

#[test]
fn a_time_limit_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let run = endless(Alone, root.path(), &["run.time_limit=8s"]);
    let mut command = run.command();
    ends_in_time(&run, CoreShare::acquire(&command), &mut command, Duration::from_secs(14));
}

#[test]
fn the_end_that_slurm_sets_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let run = endless(Mpirun(2), root.path(), &[]);
    let limit = Duration::from_secs(12);
    let mut command = run.command();
    let share = CoreShare::acquire(&command);
    let end = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + limit;
    ends_in_time(&run, share, command.env("SLURM_JOB_END_TIME", end.as_secs().to_string()), limit);
}

#[test]
fn the_clock_asks_for_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let run =
        endless(Mpirun(2), root.path(), &["checkpoint.every_seconds=1", "checkpoint.keep=100"]);
    let files = run.files();
    let steps =
        || hpctrain::checkpoint::Checkpoints::new(files.path("checkpoints")).steps().unwrap();
    let mut job = start(&mut run.command());
    job.until("saved twice", || steps().len() >= 2);
    send(job.id(), SIGUSR1);
    preempted(&job.finish(LIMIT), &files, run.transport);
    // Not every step is saved, but the last one is.
    let saved = steps();
    assert!(saved.len() < files.steps().len() / 2, "{saved:?}");
    assert_eq!(saved.last(), Some(&(files.steps().len() as u64)));
}
