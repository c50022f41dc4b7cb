//! `comm.transport = auto` on simulated GPUs: it selects the first transport that passes a probe, and
//! reports the reasons.

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
        "cuda-ipc" => "device memory by CUDA IPC",
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
    for transport in [Mpirun(2), Simulate(2)] {
        let name = format!("{transport:?}");
        let (files, path, why) = path(transport, root.path(), &name, &["parallel.zero=2"], &[TWO]);
        let (library, speed) = why.split_once(" passed its probe; ").unwrap_or_default();
        assert!(path == "nccl" && library.starts_with("NCCL 2."), "{path}: {why}");
        assert!(
            speed.starts_with("an all-reduce of 4.0 MiB inside a node has ")
                && speed.ends_with(" GB/s (bus bandwidth)"),
            "{why}"
        );
        files.same_as(&one.files(), STEPS, &name);
    }
}

/// Without NCCL, ranks of one node that have a GPU each write to each other's memory.
#[test]
fn auto_takes_cuda_ipc_without_nccl() {
    let root = tempfile::tempdir().unwrap();
    let one = Run::new(Alone, root.path(), "one", &SMALLER);
    finish(with_simulator(&mut one.command())).succeeded();
    for transport in [Mpirun(2), Simulate(2)] {
        let name = format!("{transport:?}");
        let sim = [TWO, ("CUDASIM_FAIL", "nccl")];
        let (files, path, why) = path(transport, root.path(), &name, &["parallel.zero=2"], &sim);
        assert!(
            path == "cuda-ipc"
                && why.starts_with(
                    "CUDA IPC passed its probe; NCCL not used: the NCCL probe of rank 0 failed: "
                )
                && why.ends_with(" GB/s (bus bandwidth)"),
            "{path}: {why}"
        );
        files.same_as(&one.files(), STEPS, &name);
    }
}

/// Beside NCCL, collectives over CUDA IPC are measured, and taken where they are faster; the bits are
/// the same. A later start takes the same, unless memory can no longer be opened.
#[test]
fn cuda_ipc_is_measured_beside_nccl() {
    const SLOW: (&str, &str) = ("CUDASIM_NCCL_DELAY", "0.02");
    const NO_PEERS: (&str, &str) = ("CUDASIM_PEERS", "0");
    let root = tempfile::tempdir().unwrap();
    let start = |transport, name: &str, more: &[&str], sim: Settings| {
        let ours = ["parallel.zero=1", "device.memory_limit=128MiB", "checkpoint.every=1"];
        path(transport, root.path(), name, &[&ours, more].concat(), sim)
    };
    let chosen = |files: &RunFiles| files.text("collectives.json").contains("cuda-ipc");
    let fast = |transport, name: &str| {
        let (fast, path, _) = start(transport, name, &[], &[TWO, SLOW]);
        assert!(path == "nccl" && chosen(&fast), "{}", fast.text("collectives.json"));
        fast
    };
    let processes = fast(Mpirun(2), "fast");
    fast(Simulate(2), "threads").same_as(&processes, STEPS, "threads");
    for (what, more, sim) in [
        ("grown", &["device.memory=grow"][..], &[TWO, SLOW][..]),
        ("shut", &[], &[TWO, SLOW, NO_PEERS]),
    ] {
        let (files, path, _) = start(Mpirun(2), what, more, sim);
        assert!(path == "nccl" && !chosen(&files), "{what}");
        files.same_as(&processes, STEPS, what);
    }
    let given = [&SMALLER[..], &["parallel.zero=1", "comm.transport=nccl"]].concat();
    let given = Run::new(Mpirun(2), root.path(), "given", &given);
    finish(with_simulator(&mut given.command()).envs([TWO, SLOW])).succeeded();
    assert!(!chosen(&given.files()), "{}", given.files().text("collectives.json"));
    // The choice is kept, but not where it does not work.
    for (sim, kept) in [(&[TWO, SLOW][..], true), (&[TWO, SLOW, NO_PEERS], false)] {
        let settings =
            [&SMALLER[..], &["parallel.zero=1", "device.memory_limit=128MiB", "run.steps=3"]];
        let run = Run::new(Mpirun(2), root.path(), "fast", &settings.concat()).resume("auto");
        let command = &mut run.command();
        let ended = finish(with_simulator(command).envs(sim.iter().copied())).succeeded();
        let how = if kept { "(measured before)" } else { "(measured)" };
        assert!(ended.stdout.contains(how), "{ended}");
        assert_eq!(chosen(&run.files()), kept);
    }
}

/// Where no transport works although each rank has a GPU, a warning says what that costs; where one
/// is much slower than the links of the GPUs, too.
#[test]
fn slow_transports_are_warned_of() {
    let root = tempfile::tempdir().unwrap();
    let warned = |name: &str, more: &[&str], sim: Settings| {
        let run = Run::new(Mpirun(2), root.path(), name, &[&SMALLER, more].concat());
        finish(with_simulator(&mut run.command()).envs(sim.iter().copied())).succeeded().stderr
    };
    let none = [TWO, ("CUDASIM_FAIL", "nccl,ipc")];
    let text = warned("none", &[], &none);
    let cost = "messages between GPUs go through host memory: an all-reduce takes ";
    assert!(
        text.matches(cost).count() == 1
            && text.contains(" s per GB of gradients, measured with 4.0 MiB (NCCL not used: ")
            && text.contains("hint: install NCCL (pip install nvidia-nccl-cu13)"),
        "{text}"
    );
    let shared = warned("shared", &["device.ranks_per_gpu=2"], &[("CUDASIM_FAIL", "nccl,ipc")]);
    assert!(!shared.contains("WARN"), "{shared}");

    let slow = "although NVLink of this model reaches more than 50 GB/s\nhint: let the ranks of a node see";
    let text = warned("slow", &[], &[TWO, ("CUDASIM_NAME", "NVIDIA H100 80GB HBM3")]);
    assert_eq!(text.matches(slow).count(), 1, "{text}");
    let text = warned("other", &[], &[TWO, ("CUDASIM_NAME", "NVIDIA H100 PCIe")]);
    assert!(!text.contains("WARN"), "{text}");
}

/// CUDA IPC is refused, with a remedy, where it cannot be used.
#[test]
fn cuda_ipc_is_refused_where_it_cannot_be() {
    let root = tempfile::tempdir().unwrap();
    for (name, more, says, sim) in [
        (
            "nodes",
            "device.ranks_per_gpu=1",
            "comm.transport = cuda-ipc: the ranks are on 2 nodes, and CUDA IPC is for one\nhint: ",
            ("HPCTRAIN_RANKS_PER_NODE", "1"),
        ),
        (
            "grows",
            "device.memory=grow",
            "comm.transport = cuda-ipc: CUDA IPC requires a memory pool of fixed size, and device.memory = grow\nhint: ",
            ("CUDASIM_STREAMS", "eager"),
        ),
        (
            "vendor",
            "comm.algorithm=vendor",
            "comm.transport = cuda-ipc: CUDA IPC has no vendor collectives, and comm.algorithm = vendor\nhint: ",
            ("CUDASIM_STREAMS", "eager"),
        ),
        (
            "peers",
            "device.ranks_per_gpu=1",
            "the GPU could not open memory of another process (CUDA IPC): ",
            ("CUDASIM_PEERS", "0"),
        ),
    ] {
        let settings = [&SMALLER, &["comm.transport=cuda-ipc", more][..]].concat();
        let run = Run::new(Mpirun(2), root.path(), name, &settings);
        let ended = finish(with_simulator(&mut run.command()).envs([TWO, sim]));
        let has_hint = ended.stderr.contains("\nhint: ");
        assert!(ended.code() != 0 && ended.stderr.contains(says) && has_hint, "{name}: {ended}");
    }
}

/// If ranks share a GPU, or NCCL fails, crashes, hangs or is missing, the reason is reported and
/// another transport is used.
#[test]
fn auto_does_without_an_nccl_that_does_not_work() {
    let no_ipc = ("CUDASIM_FAIL", "ipc");
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
        assert!(why.contains("; CUDA-aware MPI not used: "), "{name}: {why}");
        why
    };

    // Python packages of this machine are not searched.
    let home = root.path().join("home");
    std::fs::create_dir(&home).unwrap();
    let home = ("HOME", home.to_str().unwrap());
    let why = staged("missing", &[], &[TWO, library, no_ipc, home]);
    assert!(
        why.contains(
            "NCCL not used: NCCL is missing: libnccl.so.2 was not found; CUDA IPC not used: the CUDA IPC probe of rank "
        ),
        "{why}"
    );
    // NVIDIA's Python package is found where the loader does not look.
    let package = root.path().join("venv/lib/python3.12/site-packages/nvidia/nccl/lib");
    std::fs::create_dir_all(&package).unwrap();
    let package = package.join("libnccl.so.2");
    std::os::unix::fs::symlink(simulator().join("lib/libnccl.so.2"), &package).unwrap();
    let venv = root.path().join("venv");
    let venv = ("VIRTUAL_ENV", venv.to_str().unwrap());
    let (_, found, why) = path(Mpirun(2), root.path(), "package", &[], &[TWO, library, venv]);
    let says = format!(" from {} passed its probe; ", package.display());
    assert!(found == "nccl" && why.contains(&says), "{found}: {why}");
    built(&broken, "broken_nccl.c", "libnccl.so.2");
    for (name, says) in [("crash", "ended by signal 6"), ("hang", "no answer after 3 seconds")] {
        let why = staged(
            name,
            &[],
            &[TWO, library, no_ipc, ("BROKEN_NCCL", name), ("HPCTRAIN_PROBE_SECONDS", "3")],
        );
        assert!(
            why.contains("NCCL not used: the NCCL probe of rank ")
                && why.contains(&format!(" failed: {says}; CUDA IPC not used: ")),
            "{why}"
        );
    }
    let why = staged("old", &[], &[TWO, no_ipc, ("CUDASIM_NCCL_VERSION", "21702")]);
    assert!(
        why.contains("NCCL not used: NCCL is too old: 2.17.2 is installed; CUDA IPC not used: "),
        "{why}"
    );
    let why = staged("fails", &[], &[TWO, ("CUDASIM_FAIL", "nccl,ipc")]);
    assert!(
        why.contains("the NCCL probe of rank 0 failed: NCCL could not exchange a message: "),
        "{why}"
    );
    let why = staged("shared", &["device.ranks_per_gpu=2"], &[]);
    assert!(
        why.contains(
            "NCCL not used: ranks 0, 1 share a GPU; CUDA IPC not used: ranks 0, 1 share a GPU; "
        ),
        "{why}"
    );
}

/// CUDA-aware MPI is probed only where NCCL and CUDA IPC do not work.
#[test]
fn auto_takes_cuda_aware_mpi_last() {
    let root = tempfile::tempdir().unwrap();
    let claims = built(root.path(), "claims.c", "claims.so");
    let claims = ("LD_PRELOAD", &claims[..]);
    let zero = ["parallel.zero=3"];
    let (nccl, path_nccl, why) = path(Mpirun(2), root.path(), "nccl", &zero, &[TWO, claims]);
    assert!(path_nccl == "nccl" && !why.contains("MPI"), "{path_nccl}: {why}");
    let fails = ("CUDASIM_FAIL", "nccl,ipc");
    let (direct, path_direct, why) =
        path(Mpirun(2), root.path(), "direct", &zero, &[TWO, claims, fails]);
    assert!(
        path_direct == "cuda-aware"
            && why.starts_with("CUDA-aware MPI passed its probe; NCCL not used: ")
            && why.contains("; CUDA IPC not used: "),
        "{why}"
    );
    direct.same_as(&nccl, STEPS, "direct");
    // MPI cannot read device memory here.
    let none = [TWO, claims, fails, ("CUDASIM_HOST_ACCESS", "0")];
    let (staged, path_staged, why) = path(Mpirun(2), root.path(), "staged", &zero, &none);
    assert!(
        path_staged == "host-staged"
            && why.contains(
                "; CUDA-aware MPI not used: the MPI library cannot exchange memory of the GPU: "
            ),
        "{why}"
    );
    staged.same_as(&nccl, STEPS, "staged");
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
    let sim = [TWO, ("LD_PRELOAD", &claims[..]), ("CUDASIM_FAIL", "nccl,ipc")];
    let ended = finish(with_simulator(&mut bound).envs(sim)).succeeded();
    for words in [
        "see different GPUs: NCCL copies through host memory instead of NVLink, and CUDA-aware MPI",
        "hint: srun --gpus-per-node=N --gpu-bind=none, without --gpus-per-task",
    ] {
        assert!(ended.stdout.contains(words), "{words:?} is missing: {ended}");
    }
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
