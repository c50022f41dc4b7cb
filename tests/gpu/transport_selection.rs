//! `comm.transport = auto` on simulated GPUs: it selects the fastest transport that passes a probe,
//! and reports the reasons.

use std::path::Path;
use std::process::Command;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, mpirun};
use hpctrain_testkit::runs::{Run, RunFiles, json};
use hpctrain_testkit::simulator::{Settings, simulator, with_simulator};

const STEPS: u64 = 2;

const SMALLER: [&str; 8] = [
    "run.device=cuda",
    "run.steps=2",
    "model.layers=1",
    "model.width=16",
    "model.context=8",
    "parallel.virtual_ranks=2",
    "eval.samples=4",
    "device.memory_limit=96MiB",
];

const TWO: (&str, &str) = ("CUDASIM_DEVICES", "2");

/// Returns the transport of a run, with the reasons in `run.json` and in the startup summary.
#[track_caller]
fn path(
    transport: Transport,
    root: &Path,
    name: &str,
    more: &[&str],
    sim: Settings,
) -> (RunFiles, String, String) {
    let run = Run::new(transport, root, name, &[&SMALLER, more].concat());
    let ended = finish(with_simulator(&mut run.command()).envs(sim.iter().copied())).succeeded();
    let files = run.files();
    let card = json(&files.path("run.json"));
    let field = |key: &str| {
        card[key].as_str().unwrap_or_else(|| panic!("{name}: no {key} in {card}")).to_owned()
    };
    let path = field("device_path");
    let why = field("device_path_reason");
    assert!(ended.stdout.contains(&why), "{name}: {why} is not in {ended}");
    let described = match &path[..] {
        "nccl" => "device memory by NCCL",
        "cuda-aware" => "device memory by CUDA-aware MPI",
        _ => "device memory host-staged (pinned memory)",
    };
    assert!(ended.stdout.contains(described), "{name}: {ended}");
    (files, path, why)
}

/// Builds a shared library from a source next to this file.
fn built(root: &Path, source: &str, name: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu").join(source);
    let out = root.join(name);
    let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&out, &file]).status();
    assert!(status.unwrap().success());
    out.to_str().unwrap().to_owned()
}

/// NCCL is used if each rank has a GPU, and gives the same bits.
#[test]
fn auto_takes_nccl_where_it_is_proved() {
    let root = tempfile::tempdir().unwrap();
    let one = Run::new(Alone, root.path(), "one", &SMALLER);
    finish(with_simulator(&mut one.command())).succeeded();
    for (transport, mpi) in [
        (Mpirun(2), "does not claim to be CUDA-aware"),
        (Simulate(2), "cannot send from GPU memory"),
    ] {
        let name = format!("{transport:?}");
        let (files, path, why) = path(transport, root.path(), &name, &["parallel.zero=2"], &[TWO]);
        assert!(
            path == "nccl" && why.starts_with("NCCL 2.") && why.contains(" works here; "),
            "{path}: {why}"
        );
        assert!(why.ends_with(mpi), "{why}");
        files.same_as(&one.files(), STEPS, &name);
    }
}

/// If ranks share a GPU, or NCCL fails, crashes, hangs or is missing, the reason is reported and
/// another transport is used.
#[test]
fn auto_does_without_an_nccl_that_does_not_work() {
    let root = tempfile::tempdir().unwrap();
    let broken = root.path().join("lib");
    std::fs::create_dir(&broken).unwrap();
    for file in ["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libcublasLt.so"] {
        std::os::unix::fs::symlink(simulator().join("lib").join(file), broken.join(file)).unwrap();
    }
    let include = root.path().join("include");
    std::os::unix::fs::symlink(simulator().join("include"), include).unwrap();
    let library = ("LD_LIBRARY_PATH", broken.to_str().unwrap());
    let staged = |name: &str, more: &[&str], sim: Settings| {
        let (_, path, why) = path(Mpirun(2), root.path(), name, more, sim);
        assert_eq!(path, "host-staged", "{name}: {why}");
        why
    };

    let why = staged("missing", &[], &[TWO, library]);
    assert!(
        why.contains(
            "NCCL not used: NCCL is missing: libnccl.so.2 was not found; CUDA-aware MPI not used: "
        ),
        "{why}"
    );
    built(&broken, "broken_nccl.c", "libnccl.so.2");
    for (name, says) in [("crash", "ended by signal 6"), ("hang", "no answer after 3 seconds")] {
        let why = staged(
            name,
            &[],
            &[TWO, library, ("BROKEN_NCCL", name), ("HPCTRAIN_PROBE_SECONDS", "3")],
        );
        assert!(
            why.contains(&format!(
                "NCCL not used: the NCCL probe of rank 0 failed: {says}; CUDA-aware MPI not used: "
            )),
            "{why}"
        );
    }
    let why = staged("old", &[], &[TWO, ("CUDASIM_NCCL_VERSION", "21702")]);
    assert!(
        why.contains(
            "NCCL not used: NCCL is too old: 2.17.2 is installed; CUDA-aware MPI not used: "
        ),
        "{why}"
    );
    let why = staged("fails", &[], &[TWO, ("CUDASIM_FAIL", "nccl")]);
    assert!(
        why.contains("the NCCL probe of rank 0 failed: NCCL could not exchange a message: "),
        "{why}"
    );
    let why = staged("shared", &["device.ranks_per_gpu=2"], &[]);
    assert!(
        why.contains("NCCL not used: ranks 0, 1 share a GPU; CUDA-aware MPI not used: "),
        "{why}"
    );
}

/// If MPI claims to be CUDA-aware it is probed too, and the faster transport is used.
#[test]
fn auto_measures_where_both_ways_work() {
    let root = tempfile::tempdir().unwrap();
    let claims = built(root.path(), "claims.c", "claims.so");
    let claims = ("LD_PRELOAD", &claims[..]);
    let zero = ["parallel.zero=3"];
    let (both, path_of_both, why) = path(Mpirun(2), root.path(), "both", &zero, &[TWO, claims]);
    assert!(["nccl", "cuda-aware"].contains(&&path_of_both[..]), "{path_of_both}");
    let parts: Vec<&str> = why.split_whitespace().collect();
    let [
        "sums",
        "of",
        "4.0",
        "MiB",
        "take",
        by_nccl,
        "ms",
        "by",
        "NCCL",
        _,
        by_mpi,
        "ms",
        "by",
        "MPI",
    ] = parts[..]
    else {
        panic!("{why}");
    };
    let [by_nccl, by_mpi] = [by_nccl, by_mpi].map(|time| time.parse::<f64>().unwrap());
    assert!(
        if path_of_both == "nccl" { by_nccl <= by_mpi } else { by_mpi <= by_nccl },
        "{path_of_both}: {why}"
    );
    // MPI cannot read device memory here.
    let (isolated, path_isolated, why) = path(
        Mpirun(2),
        root.path(),
        "isolated",
        &zero,
        &[TWO, claims, ("CUDASIM_HOST_ACCESS", "0")],
    );
    assert!(
        path_isolated == "nccl"
            && why.contains("; the MPI library cannot exchange memory of the GPU: "),
        "{why}"
    );
    isolated.same_as(&both, STEPS, "another way");
    let fails = ("CUDASIM_FAIL", "nccl");
    let (direct, path_direct, why) =
        path(Mpirun(2), root.path(), "direct", &zero, &[TWO, claims, fails]);
    assert!(
        path_direct == "cuda-aware"
            && why.starts_with("CUDA-aware MPI passed its probe; NCCL not used: "),
        "{why}"
    );
    direct.same_as(&both, STEPS, "direct");
}

/// If each rank sees only its own device, a probe in a child process cannot use both devices.
#[test]
fn ranks_that_are_bound_to_their_devices_do_without_the_direct_way() {
    let root = tempfile::tempdir().unwrap();
    let claims = built(root.path(), "claims.c", "claims.so");
    let run = Run::new(Mpirun(2), root.path(), "bound", &SMALLER);
    let command = run.command();
    let mut bound = mpirun(2);
    let mut words = command.get_args().skip(2);
    bound
        .args(["sh", "-c", "CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_RANK exec \"$@\"", "sh"])
        .args(&mut words);
    let sim = [TWO, ("LD_PRELOAD", &claims[..]), ("CUDASIM_FAIL", "nccl")];
    finish(with_simulator(&mut bound).envs(sim)).succeeded();
    let why =
        json(&run.files().path("run.json"))["device_path_reason"].as_str().unwrap().to_owned();
    assert!(why.contains("CUDA-aware MPI not used: ranks of a node see different GPUs"), "{why}");
}

/// A context takes time and device memory, and in exclusive mode excludes other processes: a rank
/// creates one only on its own device.
#[test]
fn a_rank_has_a_context_on_its_own_device_alone() {
    let root = tempfile::tempdir().unwrap();
    let of = |name: &str, sim: Settings| {
        let run = Run::new(Alone, root.path(), name, &SMALLER);
        finish(
            with_simulator(&mut run.command())
                .env("CUDASIM_DEVICES", "4")
                .envs(sim.iter().copied()),
        )
    };
    let ended = of("one", &[("CUDASIM_TRACE", "1")]).succeeded();
    assert_eq!(ended.stderr.matches("trace cuDevicePrimaryCtxRetain").count(), 1, "{ended}");
    let ended = of("taken", &[("CUDASIM_FAIL", "retain")]);
    assert_eq!(ended.code(), 1, "{ended}");
    let says = "the GPU could not open GPU 0: CUDA_ERROR_DEVICE_UNAVAILABLE: ";
    assert!(
        ended.stderr.contains(says) && ended.stderr.contains("hint: its compute mode is exclusive"),
        "{ended}"
    );
}
