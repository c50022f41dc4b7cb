//! Elastic jobs: ranks that are killed or stopped at every point of a step, and processes that join.
//! Runs end with the bits of an undisturbed one, on processes that were never started again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::{kill, ranks, refused, until_step};
use hpctrain_testkit::launch::Transport::{self, Alone, Simulate, Spawn};
use hpctrain_testkit::launch::{Ended, LIMIT, finish, program, send, start};
use hpctrain_testkit::peers::mpirun_with_ulfm;
use hpctrain_testkit::runs::{Run, RunFiles, SMALL};
use hpctrain_testkit::simulator::with_simulator;

const STEPS: u64 = 24;

/// Returns a run of 24 steps that saves in files at steps 8 and 16, and evaluates at step 6.
fn run(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> Run {
    let dir = format!("memory_checkpoint.dir={}", root.join("shm").display());
    let own = [
        "run.steps=24",
        "eval.every=6",
        "checkpoint.every=8",
        "parallel.virtual_ranks=8",
        "memory_checkpoint.every=1",
        &dir,
    ];
    std::fs::create_dir_all(root.join("shm")).unwrap();
    Run::new(transport, root, name, &[&own, settings].concat())
}

/// Returns an elastic run.
fn elastic(ranks: usize, root: &Path, name: &str, settings: &[&str]) -> Run {
    run(Spawn(ranks), root, name, &[&["elastic.on=true", "elastic.timeout=3"], settings].concat())
}

/// Returns the same run, undisturbed.
fn reference(root: &Path, settings: &[&str]) -> RunFiles {
    run(Alone, root, "reference", settings).succeeds()
}

/// A fault that kills a process once.
struct Fault {
    text: String,
    file: PathBuf,
}

impl Fault {
    /// Plants a fault at a point of step 6, in rank `rank`.
    fn at(root: &Path, point: &str, rank: &str) -> Self {
        Self::at_step(root, point, 6, rank)
    }

    fn at_step(root: &Path, point: &str, step: u64, rank: &str) -> Self {
        static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let file = root.join(format!("fault-{number}"));
        Self { text: format!("{point}:{step}:{rank}:{}", file.display()), file }
    }
}

/// Returns the command of a run with faults.
fn with_faults(run: &Run, faults: &[Fault]) -> Command {
    let mut command = run.command();
    let all: Vec<&str> = faults.iter().map(|fault| &fault.text[..]).collect();
    command.env("HPCTRAIN_FAULT_AT", all.join(","));
    command
}

/// Runs a run with faults, which must happen, to its end.
#[track_caller]
fn survives(run: &Run, faults: &[Fault]) -> Ended {
    let ended = start(&mut with_faults(run, faults)).finish(LIMIT);
    let missed: Vec<&str> =
        faults.iter().filter(|fault| !fault.file.exists()).map(|fault| &fault.text[..]).collect();
    assert!(missed.is_empty(), "{missed:?} did not happen: {ended}");
    ended.succeeded()
}

/// Returns the changes of the ranks of a run.
fn changes(files: &RunFiles) -> Vec<Value> {
    files.text("elastic.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the memberships of a run.
fn memberships(files: &RunFiles) -> Vec<Value> {
    let mut names: Vec<PathBuf> = files
        .path("membership")
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .collect();
    names.sort();
    names.iter().map(|path| hpctrain_testkit::runs::json(path)).collect()
}

/// Panics unless every member that did not join is a process of the membership before.
#[track_caller]
fn survivors_are_the_same_processes(files: &RunFiles) {
    let all = memberships(files);
    let pids = |membership: &Value| -> BTreeSet<u64> {
        let members = membership["members"].as_array().unwrap();
        members.iter().map(|member| member["pid"].as_u64().unwrap()).collect()
    };
    for pair in all.windows(2) {
        let joined = pair[1]["joined"].as_array().unwrap().len();
        let new = pids(&pair[1]).difference(&pids(&pair[0])).count();
        assert_eq!(new, joined, "{pair:?}");
    }
}

/// Kills a rank at each point of a step, the first one and the last one.
fn killed_at(points: &[&str], zero: &str) {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    for point in points {
        for rank in ["0", "2"] {
            let name = format!("{point}-{rank}");
            let run = elastic(3, root.path(), &name, &[zero, "elastic.rejoin=false"]);
            survives(&run, &[Fault::at(root.path(), point, rank)]);
            let files = run.files();
            files.same_as(&reference, STEPS, &name);
            survivors_are_the_same_processes(&files);
            let changes = changes(&files);
            assert_eq!(changes.len(), 1, "{name}: {changes:?}");
            assert_eq!(changes[0]["lost"][0]["rank"].to_string(), rank, "{name}: {changes:?}");
            let redone =
                changes[0]["step"].as_u64().unwrap() - changes[0]["resumed"].as_u64().unwrap();
            assert!(redone <= 2, "{name}: {changes:?}");
        }
    }
}

#[test]
fn a_rank_is_killed_while_it_computes() {
    killed_at(&["forward", "backward", "summary", "update"], "parallel.zero=0");
}

#[test]
fn a_rank_is_killed_while_it_communicates() {
    killed_at(&["reduce", "gather"], "parallel.zero=3");
    killed_at(&["reduce", "gather"], "parallel.zero=1");
}

#[test]
fn a_rank_is_killed_while_it_copies_saves_or_evaluates() {
    killed_at(&["copy", "copied", "evaluation", "save"], "parallel.zero=2");
}

/// Only rank 0 publishes, and decides on memberships.
#[test]
fn rank_0_is_killed_while_it_publishes_a_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let run = elastic(3, root.path(), "publish", &["elastic.rejoin=false"]);
    survives(&run, &[Fault::at(root.path(), "publish", "0")]);
    run.files().same_as(&reference, STEPS, "publish");
}

/// Trains on simulated GPUs, each of which a rank has for itself: their memory, kernels and
/// communicators are made anew in the same processes.
#[test]
fn a_rank_is_killed_on_simulated_gpus() {
    let root = tempfile::tempdir().unwrap();
    let gpu = ["run.device=cuda", "device.memory_limit=128MiB", "run.steps=12", "eval.every=6"];
    let on_gpus = |command: &mut Command| {
        with_simulator(command).env("CUDASIM_DEVICES", "3");
    };
    let reference = run(Alone, root.path(), "reference", &gpu);
    let mut command = reference.command();
    on_gpus(&mut command);
    start(&mut command).finish(LIMIT).succeeded();
    for (transport, zero) in [("host-staged", "parallel.zero=3"), ("nccl", "parallel.zero=1")] {
        let transport = format!("comm.transport={transport}");
        let settings = [&gpu[..], &["elastic.rejoin=false", zero, &transport]].concat();
        let run = elastic(3, root.path(), &transport, &settings);
        let fault = Fault::at(root.path(), "backward", "1");
        let mut command = with_faults(&run, std::slice::from_ref(&fault));
        on_gpus(&mut command);
        let ended = start(&mut command).finish(LIMIT).succeeded();
        assert!(fault.file.exists(), "{ended}");
        run.files().same_as(&reference.files(), 12, &transport);
        assert_eq!(changes(&run.files())[0]["ranks"], 2, "{ended}");
    }
}

/// Over MPI, whose library goes on without the ranks that are lost.
#[test]
fn a_rank_is_killed_under_ulfm() {
    let root = tempfile::tempdir().unwrap();
    let Some(_) = mpirun_with_ulfm(4) else { return };
    let reference = reference(root.path(), &[]);
    /// The step, the point and the rank of a fault.
    type Point = (u64, &'static str, &'static str);
    let cases: [(&str, &[Point]); 4] = [
        ("parallel.zero=0", &[(6, "backward", "0")]),
        ("parallel.zero=1", &[(6, "update", "3")]),
        ("parallel.zero=3", &[(6, "reduce", "1"), (6, "agree", "0")]),
        ("parallel.zero=1", &[(4, "backward", "3"), (9, "forward", "0"), (15, "copy", "1")]),
    ];
    for (number, (zero, points)) in cases.into_iter().enumerate() {
        let name = format!("ulfm-{number}");
        let run = elastic(4, root.path(), &name, &[zero]);
        let faults: Vec<Fault> = points
            .iter()
            .map(|(step, point, rank)| Fault::at_step(root.path(), point, *step, rank))
            .collect();
        let mut command = mpirun_with_ulfm(4).expect("it was found above");
        // The arguments of the program without those of --spawn.
        let of_program = with_faults(&run, &faults);
        let arguments: Vec<_> = of_program.get_args().collect();
        command.arg(hpctrain_testkit::program()).arg("train").args(&arguments[3..]);
        let faults_at = of_program.get_envs().find(|(name, _)| *name == "HPCTRAIN_FAULT_AT");
        command.env("HPCTRAIN_FAULT_AT", faults_at.and_then(|(_, value)| value).unwrap());
        let mut job = start(&mut command);
        let files = run.files();
        job.until("at its end", || files.path("run.json").exists());
        // The launcher sometimes stays after ranks were killed; a supervisor would end it.
        drop(job);
        assert!(faults.iter().all(|fault| fault.file.exists()), "{name}");
        files.same_as(&reference, STEPS, &name);
        survivors_are_the_same_processes(&files);
        let text = files.text("run.json");
        assert!(text.contains("Open MPI v5"), "{text}");
    }
}

/// A second rank is killed while the others go on without the first one.
#[test]
fn a_rank_is_killed_during_a_recovery() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let cases = [
        ("agree", "0"),
        ("agree", "3"),
        ("decide", "0"),
        ("decided", "0"),
        ("connect", "0"),
        ("connect", "3"),
        ("build", "0"),
        ("build", "2"),
    ];
    for (point, rank) in cases {
        let name = format!("{point}-{rank}");
        let run = elastic(4, root.path(), &name, &["elastic.rejoin=false", "parallel.zero=1"]);
        let faults = [Fault::at(root.path(), "backward", "1"), Fault::at(root.path(), point, rank)];
        survives(&run, &faults);
        let files = run.files();
        files.same_as(&reference, STEPS, &name);
        survivors_are_the_same_processes(&files);
        let last = memberships(&files).pop().unwrap();
        assert_eq!(last["members"].as_array().unwrap().len(), 2, "{name}: {last}");
    }
}

#[test]
fn three_of_four_ranks_are_killed_one_by_one() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let run = elastic(4, root.path(), "x", &["elastic.rejoin=false", "parallel.zero=3"]);
    let faults = [(4, "3"), (9, "0"), (15, "1")]
        .map(|(step, rank)| Fault::at_step(root.path(), "backward", step, rank));
    survives(&run, &faults);
    let files = run.files();
    files.same_as(&reference, STEPS, "after three losses");
    let ranks: Vec<u64> =
        changes(&files).iter().map(|one| one["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [3, 2, 1]);
}

#[test]
fn a_process_joins_for_each_that_was_lost() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &["run.steps=400", "checkpoint.every=100"]);
    let settings = ["run.steps=400", "checkpoint.every=100", "parallel.zero=1"];
    let run = elastic(3, root.path(), "x", &settings);
    let faults = [
        Fault::at_step(root.path(), "backward", 6, "1"),
        // The process that joins is killed, too; another one joins.
        Fault::at_step(root.path(), "join", 0, "*"),
    ];
    survives(&run, &faults);
    let files = run.files();
    files.same_as(&reference, 400, "after a rank has joined");
    survivors_are_the_same_processes(&files);
    let changes = changes(&files);
    let joined = changes.iter().find(|one| one["joined"] == 1).expect("a process joins");
    assert_eq!((&joined["ranks"], &joined["step"]), (&Value::from(3), &joined["resumed"]));
}

/// A rank that does not answer is expelled, and ended.
#[test]
fn a_rank_is_stopped() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=300", "checkpoint.every=100", "eval.every=100"];
    let reference = reference(root.path(), &settings);
    for (index, zero) in [(0, "parallel.zero=1"), (2, "parallel.zero=3")] {
        let name = format!("stopped-{index}");
        let run = elastic(3, root.path(), &name, &[&settings[..], &[zero]].concat());
        let mut job = start(&mut run.command());
        until_step(&mut job, &run.files(), 5);
        let pid = ranks(&run)[index];
        send(pid, libc::SIGSTOP);
        let ended = job.finish(LIMIT).succeeded();
        let files = run.files();
        files.same_as(&reference, 300, &name);
        let changes = changes(&files);
        let why = changes[0]["lost"][0]["why"].as_str().unwrap();
        assert!(why.contains("no answer for"), "{changes:?} {ended}");
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{ended}");
    }
}

#[test]
fn too_few_ranks_end_the_job_to_be_resumed() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference(root.path(), &[]);
    let run = elastic(2, root.path(), "x", &["elastic.min_ranks=2", "elastic.rejoin=false"]);
    let ended =
        start(&mut with_faults(&run, &[Fault::at(root.path(), "forward", "1")])).finish(LIMIT);
    assert_eq!(ended.code(), 75, "{ended}");
    assert!(ended.stderr.contains("fewer than elastic.min_ranks = 2"), "{ended}");
    run.clone().resume("auto").succeeds();
    run.files().same_as(&reference, STEPS, "after a restart");
}

/// The step itself may kill ranks.
#[test]
fn losses_at_one_step_end_the_job() {
    let root = tempfile::tempdir().unwrap();
    let run = elastic(5, root.path(), "x", &["elastic.rejoin=false"]);
    let faults = ["0", "0", "0"].map(|rank| Fault::at(root.path(), "forward", rank));
    let ended = start(&mut with_faults(&run, &faults)).finish(LIMIT);
    assert_eq!(ended.code(), 1, "{ended}");
    assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
    let words = ["step 6: ranks were lost 3 times in a row", "hpctrain data which", "--step 6"];
    assert!(words.iter().all(|words| ended.stderr.contains(words)), "{ended}");
}

/// An error of a rank ends the job, as without elasticity: the others do not go on without it.
#[test]
fn a_rank_that_fails_ends_the_job() {
    let root = tempfile::tempdir().unwrap();
    for rank in ["0", "2"] {
        let run = elastic(3, root.path(), rank, &[]);
        let ended = start(&mut with_faults(&run, &[Fault::at(root.path(), "backward!", rank)]))
            .finish(LIMIT);
        assert_eq!(ended.code(), 1, "{ended}");
        assert!(ended.stderr.contains(&format!("rank {rank}: internal error")), "{ended}");
        assert!(!run.files().path("elastic.jsonl").exists(), "{ended}");
    }
}

#[test]
fn jobs_that_cannot_be_elastic_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let on = ["elastic.on=true"];
    for (transport, settings, words) in [
        (Alone, &[][..], "this process has no other ranks"),
        (Simulate(2), &[], "ranks are not processes"),
        (Spawn(2), &["memory_checkpoint.every=0"], "memory_checkpoint.every = 0"),
        (Spawn(2), &["parallel.pipeline=2"], "parallel.pipeline = 2"),
        (Spawn(2), &["comm.algorithm=ring"], "comm.algorithm = ring"),
    ] {
        let run = run(transport, root.path(), "x", &[&on[..], settings].concat());
        let ended = start(&mut run.command()).finish(LIMIT);
        refused(&ended, &[words]);
    }
}

/// Returns the end of `hpctrain verify --chaos` with more arguments, of a small network. It may
/// leave files in `root` only.
fn chaos(root: &Path, arguments: &[&str], settings: &[&str]) -> Ended {
    let dir = format!("memory_checkpoint.dir={}", root.join("shm").display());
    std::fs::create_dir_all(root.join("shm")).unwrap();
    let mut command = program(["verify", "--chaos"]);
    command.args(arguments);
    let settings = SMALL.iter().chain(settings).copied().chain([&dir[..], "elastic.timeout=2"]);
    command.args(settings.flat_map(|setting| ["--set", setting]));
    start(command.env("TMPDIR", root)).finish(LIMIT)
}

#[test]
fn chaos_changes_no_bit() {
    let root = tempfile::tempdir().unwrap();
    let kept = root.path().join("kept");
    let keep = ["6", "--every", "1.5", "--ranks", "3", "--json", "--keep", kept.to_str().unwrap()];
    let ended = chaos(root.path(), &keep, &["checkpoint.every=50", "batch.global=12"]).succeeded();
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{report:#}"));
    assert!(number(&report["kills"]) + number(&report["stops"]) > 0, "{report:#}");
    assert!(number(&report["joins"]) > 0, "{report:#}");
    assert_eq!((&report["agrees"], &report["virtual_ranks"]), (&true.into(), &12.into()));
    let compared = &report["comparison"];
    assert_eq!((&compared["differing"], &compared["steps"]), (&0.into(), &report["steps"]));
    let changes = report["changes"].as_array().unwrap();
    let losses: usize = changes.iter().map(|one| one["lost"].as_array().unwrap().len()).sum();
    assert_eq!(losses as u64, number(&report["kills"]) + number(&report["stops"]), "{report:#}");

    // The runs are where they can be looked at, and are drawn.
    let picture = root.path().join("elastic.svg");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/elastic-picture");
    let mut draw = Command::new("python3");
    draw.arg(&script).arg(kept.join("disturbed")).arg(&picture).arg(kept.join("undisturbed"));
    let drawn = finish(&mut draw).succeeded();
    assert!(drawn.stdout.ends_with("losses equal in every bit\n"), "{drawn}");
    let svg = std::fs::read_to_string(&picture).unwrap();
    assert!(svg.contains(&format!(">{losses} ranks lost<")) && svg.ends_with("</svg>\n"), "{svg}");

    // They are not overwritten.
    refused(&chaos(root.path(), &keep, &["batch.global=12"]), &["--keep", "disturbed exists"]);
}

#[test]
fn chaos_refuses_what_cannot_be_elastic() {
    let root = tempfile::tempdir().unwrap();
    for (arguments, settings, words) in [
        (&["9"][..], &["parallel.pipeline=2"][..], "parallel.pipeline = 2"),
        (&["9"], &["comm.algorithm=ring"], "comm.algorithm = ring"),
        (&["9"], &["data.order=files"], "data.order = files"),
        (&["9", "--ranks", "1"], &[], "--ranks 1 with --chaos"),
        (&["9", "--ranks", "2,4"], &[], "--ranks 2,4, but --chaos starts one job"),
        (&["9", "--ranks", "2"], &["elastic.min_ranks=2"], "elastic.min_ranks = 2"),
        (&["9", "--every", "10"], &[], "--every 10 is longer than --chaos 9"),
        // The ranks refuse it.
        (&["9", "--ranks", "2"], &["model.heads=3"], "heads"),
    ] {
        refused(&chaos(root.path(), arguments, settings), &[words]);
    }
    for arguments in [&["9", "--steps", "3"][..], &["9", "--zero", "0"], &["9", "--mpi"], &["0"]] {
        let ended = chaos(root.path(), arguments, &[]);
        assert_eq!(ended.code(), 2, "{ended}");
    }
    let ended = finish(&mut program(["verify", "--every", "3"]));
    assert_eq!(ended.code(), 2, "{ended}");
}

#[test]
fn killed_launchers_leave_no_ranks() {
    let root = tempfile::tempdir().unwrap();
    let run = elastic(2, root.path(), "x", &["run.steps=100000"]);
    let mut job = start(&mut run.command());
    until_step(&mut job, &run.files(), 3);
    let pids = ranks(&run);
    assert_eq!(pids.len(), 2);
    kill(job.id());
    let ended = job.finish(LIMIT);
    assert!(!ended.status.success());
    let begun = std::time::Instant::now();
    while pids.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        assert!(begun.elapsed() < LIMIT, "ranks outlive their launcher");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
