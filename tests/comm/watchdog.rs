//! Tests of the watchdog: jobs whose ranks are stopped, killed or stuck end soon, and name the
//! rank.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use hpctrain::backend::cpu::Cpu;
use hpctrain::comm::{Algorithm, start_mpi_within};
use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Mpirun, Simulate};
use hpctrain_testkit::launch::{Ended, LIMIT, Running, signal, start};
use hpctrain_testkit::ranks::{is_rank_of, mpirun_with};
use hpctrain_testkit::runs::Run;
use hpctrain_testkit::simulator::with_simulator;

/// Long enough for the watchdog to end a job on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// A job in the middle of its training.
struct Job {
    running: Running,
    logs: PathBuf,
    /// Stopped processes, which a launcher may not be able to end.
    stopped: Vec<String>,
    _root: tempfile::TempDir,
}

impl Job {
    /// Starts a job that would train for hours.
    fn start(transport: Transport, settings: &[&str]) -> Self {
        Self::start_as(transport, settings, |command| command)
    }

    /// Starts such a job on simulated GPUs.
    fn start_on_gpus(ranks: usize, settings: &[&str]) -> Self {
        let ours = ["device.memory_limit=128MiB"];
        let settings = [&ours, settings].concat();
        Self::start_as(Mpirun(ranks), &settings, |command| {
            with_simulator(command).env("CUDASIM_DEVICES", "4")
        })
    }

    fn start_as(
        transport: Transport,
        settings: &[&str],
        prepare: fn(&mut Command) -> &mut Command,
    ) -> Self {
        let root = tempfile::tempdir().unwrap();
        let endless =
            ["run.steps=100000000", "eval.every=0", "checkpoint.every=0", "batch.global=12"];
        let run = Run::new(transport, root.path(), "x", &[&endless, settings].concat());
        let mut running = start(prepare(&mut run.command()));
        let files = run.files();
        let begun = Instant::now();
        let steps = || {
            std::fs::read_to_string(files.path("metrics.jsonl")).unwrap_or_default().lines().count()
        };
        while steps() < 3 {
            assert!(
                begun.elapsed() < SOON && running.runs(),
                "{}",
                running.finish(Duration::from_secs(1))
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { running, logs: files.path("logs"), stopped: Vec::new(), _root: root }
    }

    fn pid(&self, rank: usize) -> String {
        // The ranks of this node share a file.
        let text = std::fs::read_to_string(self.logs.join("heartbeat-00000")).unwrap();
        let heartbeat: Value = serde_json::from_str(text.lines().nth(rank).unwrap()).unwrap();
        assert_eq!(heartbeat["rank"], rank);
        heartbeat["pid"].to_string()
    }

    fn stop(&mut self, rank: usize) -> String {
        self.stopped.push(self.pid(rank));
        signal("STOP", &self.stopped[0]);
        self.stopped[0].clone()
    }

    /// Waits for the end. Returns how it ended, and the flight recorders of these ranks. Other
    /// ranks may have written one, too: the launcher wakes a stopped rank to end it.
    fn ends(self, ranks: &[usize]) -> (Ended, Vec<Value>) {
        self.ends_within(SOON, ranks)
    }

    /// Waits for the end as [`Job::ends`] does, for this time at most.
    fn ends_within(self, limit: Duration, ranks: &[usize]) -> (Ended, Vec<Value>) {
        let Self { running, logs, stopped, _root } = self;
        let _killed = KillAll(stopped);
        let ended = running.finish(limit);
        let recorder = |rank| {
            hpctrain_testkit::runs::json(&logs.join(format!("flight-recorder-rank-{rank:05}.json")))
        };
        let recorders = ranks.iter().map(|&rank| recorder(rank)).collect();
        (ended, recorders)
    }
}

/// Kills processes when it is dropped.
struct KillAll(Vec<String>);

impl Drop for KillAll {
    fn drop(&mut self) {
        self.0.iter().for_each(|pid| signal("KILL", pid));
    }
}

/// Panics unless a flight recorder is of a rank that waits in its last collective.
fn check_recorder(rank: usize, recorder: &Value) {
    let collectives = recorder["collectives"].as_array().unwrap();
    let (last, before) = collectives.split_last().unwrap();
    assert_eq!(recorder["rank"], rank);
    assert!(last["ended"].is_null() && !before.is_empty(), "{last}");
    for (entry, next) in before.iter().zip(&collectives[1..]) {
        assert_eq!(entry["number"].as_u64().unwrap() + 1, next["number"].as_u64().unwrap());
        assert!(entry["ended"].as_f64().unwrap() >= entry["started"].as_f64().unwrap(), "{entry}");
    }
    let block = before.iter().find(|entry| entry["unit"] == "h.0").unwrap();
    assert!(block["op"] == "all_reduce" && block["bytes"].as_u64() > Some(0), "{block}");
}

/// Checks a job of which a rank is stopped in the middle of training, as by a debugger or a frozen
/// node.
fn stopped(ranks: usize, rank: usize, algorithm: &str) {
    let job =
        Job::start(Mpirun(ranks), &["comm.timeout=2", &format!("comm.algorithm={algorithm}")]);
    check_stopped(job, ranks, rank);
}

fn check_stopped(mut job: Job, ranks: usize, rank: usize) {
    let pid = job.stop(rank);
    let others: Vec<_> = (0..ranks).filter(|other| *other != rank).collect();
    let (ended, recorders) = job.ends(&others);
    assert_ne!(ended.code(), 0, "{ended}");
    let words = [
        format!("the job hangs: rank {rank} (process {pid} on "),
        ") does not answer: last seen ".into(),
        "; rank".into(),
        " in #".into(),
        "hint: ".into(),
    ];
    for word in words {
        assert!(ended.stderr.contains(&word), "{word:?} is missing: {ended}");
    }
    assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
    others.iter().zip(&recorders).for_each(|(rank, recorder)| check_recorder(*rank, recorder));
}

#[test]
fn a_rank_is_stopped() {
    stopped(2, 1, "halving-doubling");
}

#[test]
fn the_first_of_three_ranks_is_stopped() {
    stopped(3, 0, "halving-doubling");
}

#[test]
fn a_rank_is_stopped_under_the_vendors_collectives() {
    stopped(2, 1, "vendor");
}

/// Its peer waits for it in a collective, and the stages before wait for messages. The report names
/// only the stopped rank.
#[test]
fn a_rank_of_a_stage_is_stopped() {
    let mut job =
        Job::start(Mpirun(4), &["comm.timeout=2", "parallel.pipeline=2", "parallel.zero=1"]);
    let pid = job.stop(3);
    let (ended, _) = job.ends(&[]);
    assert_ne!(ended.code(), 0, "{ended}");
    assert!(ended.stderr.contains(&format!("hangs: rank 3 (process {pid} on ")), "{ended}");
    assert!(
        ended.stderr.contains(" wait") && ended.stderr.matches("error:").count() == 1,
        "{ended}"
    );
}

#[test]
fn a_rank_is_killed() {
    let job = Job::start(Mpirun(2), &["comm.timeout=2"]);
    signal("KILL", &job.pid(1));
    let (ended, _) = job.ends(&[]);
    assert_ne!(ended.code(), 0, "{ended}");
}

#[test]
fn a_rank_is_stopped_or_killed_under_nccl() {
    let nccl = "comm.transport=nccl";
    for algorithm in ["comm.algorithm=halving-doubling", "comm.algorithm=vendor"] {
        check_stopped(Job::start_on_gpus(2, &["comm.timeout=2", algorithm, nccl]), 2, 1);
    }
    let job = Job::start_on_gpus(2, &["comm.timeout=2", nccl]);
    signal("KILL", &job.pid(1));
    let (ended, _) = job.ends(&[]);
    assert_ne!(ended.code(), 0, "{ended}");
}

/// Kernels of the other rank wait for messages of one that no longer runs.
#[test]
fn a_rank_is_stopped_or_killed_under_cuda_ipc() {
    let ipc = "comm.transport=cuda-ipc";
    let settings = ["comm.timeout=2", "comm.algorithm=halving-doubling", ipc];
    check_stopped(Job::start_on_gpus(2, &settings), 2, 1);
    let job = Job::start_on_gpus(2, &settings);
    signal("KILL", &job.pid(1));
    let (ended, _) = job.ends(&[]);
    assert_ne!(ended.code(), 0, "{ended}");
}

#[test]
fn a_wait_that_ends_in_time_ends_nothing() {
    let mut job = Job::start(Mpirun(2), &["comm.timeout=20"]);
    let pid = job.stop(1);
    let steps = |job: &Job| {
        std::fs::read_to_string(job.logs.with_file_name("metrics.jsonl")).unwrap().len()
    };
    std::thread::sleep(Duration::from_millis(500));
    let before = steps(&job);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(steps(&job), before);
    signal("CONT", &pid);
    let begun = Instant::now();
    while steps(&job) == before {
        assert!(begun.elapsed() < SOON && job.running.runs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the timeouts in seconds that a rank has set from measured times.
fn measured_timeouts(log: &str) -> Vec<u64> {
    let words = "a wait for another rank ends the job after ";
    let after = |line: &str| line.split_once(words)?.1.split_once(' ')?.0.parse().ok();
    log.lines().filter_map(after).collect()
}

#[test]
fn measured_steps_replace_the_timeout_of_the_start() {
    let root = tempfile::tempdir().unwrap();
    // An asynchronous save may end after the last step.
    let settings = [
        "run.steps=8",
        "eval.every=4",
        "eval.samples=8",
        "checkpoint.every=6",
        "checkpoint.async_save=false",
    ];
    let files = Run::new(Mpirun(2), root.path(), "auto", &settings).succeeds();
    // After the third round, and again after the first evaluation and the first save.
    for rank in 0..2 {
        let log = files.text(&format!("logs/rank-{rank:05}.log"));
        assert_eq!(measured_timeouts(&log), [120, 600, 120, 600, 120, 600], "{log}");
    }
    let given = [&settings[..], &["comm.timeout=300"]].concat();
    let files = Run::new(Mpirun(2), root.path(), "given", &given).succeeds();
    assert!(measured_timeouts(&files.text("logs/rank-00000.log")).is_empty());
}

#[test]
#[ignore = "waits for two minutes: scripts/test full runs it"]
fn a_hang_is_reported_after_the_measured_timeout() {
    let mut job = Job::start(Mpirun(2), &[]);
    let log = job.logs.join("rank-00001.log");
    job.running.until("measured", || {
        measured_timeouts(&std::fs::read_to_string(&log).unwrap_or_default()) == [120]
    });
    job.stop(1);
    // The 600 s of the start are longer than this.
    let (ended, _) = job.ends_within(2 * LIMIT, &[]);
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.stderr.contains("does not answer"), "{ended}");
    assert!(ended.stderr.contains("comm.timeout = 120 seconds"), "{ended}");
}

#[test]
fn a_clean_end_leaves_no_heartbeats() {
    let root = tempfile::tempdir().unwrap();
    for transport in [Mpirun(2), Simulate(2)] {
        let run = Run::new(
            transport,
            root.path(),
            &format!("{transport:?}"),
            &["run.steps=2", "comm.timeout=5"],
        );
        let logs = run.succeeds().path("logs");
        let names =
            logs.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let others: Vec<_> = names.filter(|name| !name.ends_with(".log")).collect();
        assert!(others.is_empty(), "{others:?}");
    }
}

/// Freezes a thread of another process, like a read that never returns. The other threads continue.
fn freeze(thread: i32, frozen: &Sender<bool>) {
    let null = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: requests that take no memory of this process.
    let held = unsafe {
        libc::ptrace(libc::PTRACE_SEIZE, thread, null, null) == 0
            && libc::ptrace(libc::PTRACE_INTERRUPT, thread, null, null) == 0
    };
    // SAFETY: a status need not be written.
    let wait = || unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) };
    frozen.send(held && wait() == thread).unwrap();
    // The process can end only after the end of the thread was waited for here.
    wait();
}

/// Returns the threads of a process that read data.
fn loaders(pid: &str) -> Vec<i32> {
    let threads = PathBuf::from(format!("/proc/{pid}/task")).read_dir().unwrap();
    let threads = threads.map(|entry| entry.unwrap().path());
    let reads = |path: &PathBuf| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name == "hpctrain-data\n")
    };
    threads
        .filter(reads)
        .map(|path| path.file_name().unwrap().to_str().unwrap().parse().unwrap())
        .collect()
}

#[test]
fn a_loader_is_stuck() {
    for (transport, algorithm) in
        [(Mpirun(2), "halving-doubling"), (Mpirun(2), "vendor"), (Simulate(2), "halving-doubling")]
    {
        let job =
            Job::start(transport, &["comm.timeout=2", &format!("comm.algorithm={algorithm}")]);
        let thread = loaders(&job.pid(1))[0];
        let (sender, frozen) = channel();
        let holder = std::thread::spawn(move || freeze(thread, &sender));
        if !frozen.recv().unwrap() {
            println!("skipped: this user may not trace threads");
            return;
        }
        let (ended, recorders) = job.ends(&[0, 1]);
        holder.join().unwrap();
        assert_ne!(ended.code(), 0, "{ended}");
        // Of the threads of one process it may be either's.
        let rank =
            if ended.stderr.contains("hangs: rank 0") && transport == Simulate(2) { 0 } else { 1 };
        let words = [
            format!("the job hangs: rank {rank} (process "),
            ") has not joined #".into(),
            ": wait for data since ".into(),
            format!("; rank {} waits in #", 1 - rank),
        ];
        for word in words {
            assert!(ended.stderr.contains(&word), "{word:?} is missing: {ended}");
        }
        assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
        check_recorder(1 - rank, &recorders[1 - rank]);
    }
}

/// A rank is stopped when all work is done and the others leave the world.
#[test]
fn a_rank_is_stopped_at_the_end() {
    const NAME: &str = "watchdog::a_rank_is_stopped_at_the_end";
    const FOLDER: &str = "HPCTRAIN_TEST_FOLDER";
    if is_rank_of(NAME) {
        hpctrain::job::name_console(None);
        let comm = start_mpi_within::<Cpu>(Algorithm::HalvingDoubling, SOON).unwrap();
        comm.set_watchdog_timeout(Duration::from_secs(2)).unwrap();
        let folder = std::env::var_os(FOLDER).unwrap();
        drop(comm.watch(Path::new(&folder), Duration::from_secs(2)).unwrap());
        comm.world().all_ok(Ok(())).unwrap();
        if comm.rank() == 1 {
            // SAFETY: touches no memory.
            unsafe { libc::raise(libc::SIGSTOP) };
        }
        comm.shutdown();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (status, printed) =
        mpirun_with(NAME, 2, 2, SOON.as_secs(), &[(FOLDER, folder.path().to_str().unwrap())]);
    assert_eq!(status.code(), Some(1), "{printed}");
    for word in [
        "the job hangs: rank 1 (process ",
        ") does not answer: last seen ",
        "; rank 0 waits in #",
        " leave since ",
    ] {
        assert!(printed.contains(word), "{word:?} is missing: {printed}");
    }
}
