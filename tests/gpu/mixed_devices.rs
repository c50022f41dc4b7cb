//! Jobs in which some ranks compute on GPUs, in their simulator, and others on the CPU.

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Spawn};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles};
use hpctrain_testkit::simulator::with_simulator;

const SETTINGS: [&str; 5] = [
    "run.device=mixed",
    "parallel.virtual_ranks=8",
    "parallel.zero=1",
    "device.memory_limit=96MiB",
    "eval.samples=8",
];

/// Returns the losses of steps and evaluations.
fn losses(files: &RunFiles) -> Vec<f64> {
    let mut losses = files.numbers("metrics.jsonl", "loss");
    losses.extend(files.numbers("eval.jsonl", "loss"));
    losses
}

#[track_caller]
fn is_close(one: &RunFiles, other: &RunFiles, tolerance: f64, what: &str) {
    let (one, other) = (losses(one), losses(other));
    assert_eq!(one.len(), other.len());
    let pairs = one.iter().zip(&other);
    let is_close = pairs.clone().all(|(a, b)| (a - b).abs() < tolerance);
    assert!(is_close, "{what}: {one:?} {other:?}");
}

/// The simulator has one GPU, so the first rank of the node has it and the others have none.
#[test]
fn ranks_without_a_gpu_train_beside_those_with_one() {
    let root = tempfile::tempdir().unwrap();
    let run = |transport: Transport, name: &str, settings: &[&str]| {
        let run = Run::new(transport, root.path(), name, &[&SETTINGS[..], settings].concat());
        let ended = finish(with_simulator(&mut run.command())).succeeded();
        (run.files(), ended)
    };
    let on_cpu = [&SETTINGS[1..3], &SETTINGS[4..], &["run.device=cpu"]].concat();
    let cpu = Run::new(Alone, root.path(), "cpu", &on_cpu).succeeds();
    for (name, transport, settings) in [
        ("two", Mpirun(2), &[][..]),
        ("tf32", Mpirun(2), &["precision.dtype=tf32"]),
        ("three", Spawn(3), &["parallel.zero=3"]),
        ("two-3", Spawn(2), &["parallel.zero=2"]),
        ("shares", Mpirun(2), &["parallel.work_shares=[3, 1]", "parallel.zero=3"]),
        ("central", Spawn(2), &["parallel.zero=0", "parallel.storage=central"]),
        ("copies", Spawn(2), &["memory_checkpoint.every=1"]),
    ] {
        let (files, ended) = run(transport, name, settings);
        for line in ["rank 0 on ", ": CPU, cores", "host-staged", "CPUs and GPUs round differently"]
        {
            assert!(ended.stdout.contains(line), "{line}: {ended}");
        }
        // TF32 rounds to 10 bits.
        is_close(&files, &cpu, if name == "tf32" { 0.03 } else { 1e-4 }, name);
        // A start with the same ranks on the same devices has the same bits.
        if name == "two" {
            let (again, _) = run(Mpirun(2), "again", settings);
            again.same_as(&files, 6, "again");
        }
    }
}

/// Units of more elements than a chunk of the messages.
#[test]
fn large_units_go_in_the_same_chunks() {
    let root = tempfile::tempdir().unwrap();
    let large = ["model.width=320", "model.heads=4", "model.layers=1", "model.context=8"];
    for (name, zero) in [("one", "parallel.zero=1"), ("three", "parallel.zero=3")] {
        let settings = [&SETTINGS[..], &large, &[zero, "run.steps=2"]].concat();
        let run = Run::new(Spawn(2), root.path(), name, &settings);
        finish(with_simulator(&mut run.command())).succeeded();
        let on_cpu = [&settings[..], &["run.device=cpu"]].concat();
        let cpu = Run::new(Spawn(2), root.path(), &format!("{name}-cpu"), &on_cpu).succeeds();
        is_close(&run.files(), &cpu, 1e-4, name);
    }
}

/// Shares follow from the measured speed, and a checkpoint restores on other devices.
#[test]
fn unequal_devices_get_unequal_shares() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&SETTINGS[..], &["parallel.work_shares=auto", "checkpoint.every=3"]].concat();
    let run = Run::new(Spawn(2), root.path(), "run", &settings);
    let mut command = run.command();
    // By far more than they compute, also on a busy machine: the rank on the CPU takes three times as
    // long.
    command.env("HPCTRAIN_SLOW_RANK", "0:150,1:450");
    let ended = finish(with_simulator(&mut command)).succeeded();
    assert!(ended.stdout.contains("8 virtual ranks (6, 2 on the ranks)"), "{ended}");
    let checkpoint = run.files().checkpoint(3).display().to_string();
    let ended = finish(&mut program(["eval", "--checkpoint", &checkpoint])).succeeded();
    assert!(ended.stdout.contains("over 8 samples"), "{ended}");
}

/// An owner of central storage needs no GPU where it computes nothing, although it is the first rank.
#[test]
fn owners_that_compute_nothing_need_no_gpu() {
    let root = tempfile::tempdir().unwrap();
    let central = ["parallel.storage=central", "parallel.zero=3"];
    let on_cpu = [&SETTINGS[1..3], &SETTINGS[4..], &["run.device=cpu"]].concat();
    let cpu = Run::new(Alone, root.path(), "cpu", &on_cpu).succeeds();
    let settings = [&SETTINGS[..], &central, &["parallel.work_shares=[0, 1]"]].concat();
    let run = Run::new(Spawn(2), root.path(), "mixed", &settings);
    let ended = finish(with_simulator(&mut run.command())).succeeded();
    let table: Vec<&str> =
        ended.stdout.lines().filter(|line| line.starts_with("device ")).collect();
    assert!(table[0].contains(": CPU, cores") && table[1].contains("simulator"), "{ended}");
    is_close(&run.files(), &cpu, 1e-4, "mixed");
    // A GPU that receives a sum to which it adds nothing, by every transport.
    let settings = [&settings[..], &["run.device=cuda", "precision.dtype=f32"]].concat();
    let mut first = None;
    for transport in ["host-staged", "cuda-ipc", "nccl", "auto"] {
        let on = format!("comm.transport={transport}");
        let run =
            Run::new(Mpirun(2), root.path(), transport, &[&settings[..], &[&on[..]]].concat());
        finish(with_simulator(&mut run.command()).env("CUDASIM_DEVICES", "2")).succeeded();
        let files = run.files();
        is_close(&files, &cpu, 1e-4, transport);
        first.get_or_insert(run).files().same_as(&files, 6, transport);
    }
}

#[test]
fn what_would_update_a_parameter_twice_is_refused() {
    let root = tempfile::tempdir().unwrap();
    for (settings, words) in [
        ("parallel.zero=0", "parallel.zero = 0 is not supported with run.device = mixed"),
        ("comm.transport=nccl", "comm.transport = nccl is not supported with run.device = mixed"),
        ("parallel.layout=auto", "run.device = mixed, but layouts are compared on devices of one"),
        ("parallel.tensor=2", "parallel.tensor is not supported with run.device = mixed"),
    ] {
        let settings = [&SETTINGS[..], &[settings]].concat();
        let run = Run::new(Spawn(2), root.path(), "refused", &settings);
        let ended = finish(with_simulator(&mut run.command()));
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stderr.contains(words) && ended.stderr.contains("hint:"), "{ended}");
        assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended}");
    }
}
