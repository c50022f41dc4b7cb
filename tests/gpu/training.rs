//! Training on GPUs, in their simulator: the loss curve matches the CPU's with every layout and
//! transport, and errors are clear if a GPU cannot do what is required.

use std::path::Path;
use std::process::Command;

use sha2::{Digest as _, Sha256};

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{Ended, finish, program};
use hpctrain_testkit::runs::{Run, RunFiles, json};
use hpctrain_testkit::simulator::{Settings, simulator, with_simulator};

const STEPS: u64 = 4;

/// Returns a small run on simulated GPUs, and its command.
fn command(
    transport: Transport,
    root: &Path,
    name: &str,
    settings: &[&str],
    sim: Settings,
) -> (Run, Command) {
    let ours =
        ["run.steps=4", "parallel.virtual_ranks=2", "eval.samples=8", "device.memory_limit=96MiB"];
    let run = Run::new(transport, root, name, &[&ours, settings].concat());
    let mut command = run.command();
    with_simulator(&mut command).envs(sim.iter().copied());
    (run, command)
}

#[track_caller]
fn trains(
    transport: Transport,
    root: &Path,
    name: &str,
    settings: &[&str],
    sim: Settings,
) -> RunFiles {
    let (run, mut command) = command(transport, root, name, settings, sim);
    finish(&mut command).succeeded();
    run.files()
}

#[track_caller]
fn refused(settings: &[&str], sim: Settings) -> String {
    let root = tempfile::tempdir().unwrap();
    let (_, mut command) = command(Alone, root.path(), "x", settings, sim);
    said(&finish(&mut command))
}

#[track_caller]
fn said(ended: &Ended) -> String {
    assert_eq!(ended.code(), 2, "{ended}");
    assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended}");
    ended.stderr.clone()
}

/// Returns the largest difference of losses.
fn largest_difference(one: &RunFiles, other: &RunFiles) -> f64 {
    let losses = |files: &RunFiles| {
        let mut losses = files.numbers("metrics.jsonl", "loss");
        losses.extend(files.numbers("eval.jsonl", "loss"));
        losses
    };
    let one = losses(one);
    let other = losses(other);
    assert_eq!(one.len(), other.len());
    one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn the_curve_is_that_of_the_cpu() {
    let root = tempfile::tempdir().unwrap();
    let cpu = trains(Alone, root.path(), "cpu", &["run.device=cpu"], &[]);
    let narrow =
        trains(Alone, root.path(), "bf16", &["log.placement=true"], &[("CUDASIM_STREAMS", "lazy")]);
    let log = narrow.text("logs/rank-00000.log");
    assert!(log.contains(", optimizer state ") && log.contains(" on GPU of rank 0 ("), "{log}");
    for line in ["placement: kernel adamw, ", "placement: matmul ", "placement: buffer of "] {
        assert!(
            log.contains(line) && log.contains("CPU simulator 0 at 0000:01:00.0"),
            "{line}: {log}"
        );
    }
    let exact = trains(Alone, root.path(), "f32", &["precision.dtype=f32"], &[]);
    let narrow = largest_difference(&cpu, &narrow);
    let exact = largest_difference(&cpu, &exact);
    assert!(exact < 1e-4, "f32 is {exact} off");
    assert!(0.0 < narrow && narrow < 2e-2, "bf16 is {narrow} off");
}

/// Rows of logits are padded, so that they are aligned for matmuls with any vocabulary: the
/// simulator refuses leading dimensions that are not multiples of 16 bytes. The curve matches the
/// CPU's, whose rows are not padded. With tensor parallelism, one and two ranks are compared.
#[test]
fn any_vocabulary_has_aligned_logits_and_the_curve_of_the_cpu() {
    let root = tempfile::tempdir().unwrap();
    let sim = [("CUDASIM_LEADING", "16"), ("CUDASIM_DEVICES", "2")];
    let networks =
        ["model.vocabulary=67", "model.vocabulary=129 model.kind=llama", "model.vocabulary=1025"];
    for (number, network) in networks.into_iter().enumerate() {
        let with = |transport, name: &str, settings: &str, sim: Settings| {
            let settings: Vec<_> = network.split(' ').chain(settings.split(' ')).collect();
            trains(transport, root.path(), &format!("{number}-{name}"), &settings, sim)
        };
        let cpu = with(Alone, "cpu", "run.device=cpu", &[]);
        for (precision, most) in [("f32", 1e-4), ("bf16", 2e-2)] {
            let of = format!("precision.dtype={precision}");
            let whole = with(Alone, precision, &of, &sim);
            let slices = format!("{of} parallel.virtual_tensor_ranks=2");
            let one = with(Alone, &format!("{precision}-slices"), &slices, &sim);
            let tensor_parallel = format!("{slices} parallel.tensor=2 parallel.virtual_ranks=1");
            let base = with(
                Alone,
                &format!("{precision}-virtual rank"),
                &format!("{slices} parallel.virtual_ranks=1"),
                &sim,
            );
            let two = with(Mpirun(2), &format!("{precision}-two"), &tensor_parallel, &sim);
            two.same_as(&base, STEPS, &format!("{network}, {precision}, slices on two ranks"));
            let pieces = with(
                Alone,
                &format!("{precision}-pieces"),
                &format!("{of} parallel.loss_chunk_tokens=7"),
                &sim,
            );
            for (run, how) in
                [(&whole, "whole"), (&one, "in slices"), (&pieces, "some rows at a time")]
            {
                let off = largest_difference(&cpu, run);
                assert!(off < most, "{network}, {precision}, {how}: {off} off");
            }
        }
    }
    // The simulator does refuse: rows of 36 bf16 elements are not multiples of 16 bytes.
    let (_, mut asked) = command(Alone, root.path(), "odd", &["model.width=36"], &sim);
    let ended = finish(&mut asked);
    assert!(
        ended.code() == 1 && ended.stderr.contains("knows no algorithm to multiply"),
        "{ended}"
    );
    let odd = trains(Alone, root.path(), "any", &["model.width=36"], &[]);
    assert_eq!(odd.steps().len(), STEPS as usize);
}

/// Text is sampled from the logits, not from their padding: with f32, it is the text that the CPU
/// samples.
#[test]
fn a_sample_is_that_of_the_cpu() {
    let root = tempfile::tempdir().unwrap();
    let trained = trains(Alone, root.path(), "trained", &["precision.dtype=f32"], &[]);
    let drawn = |settings: &[&str]| {
        let checkpoint = trained.checkpoint(STEPS);
        let mut asked =
            program(["sample", "--checkpoint", checkpoint.to_str().unwrap(), "--temperature", "0"]);
        asked.args(["--tokens", "30", "--json", "--prompt", "the"]);
        asked.args(settings.iter().flat_map(|setting| ["--set", setting]));
        finish(with_simulator(&mut asked)).succeeded().stdout
    };
    let on_gpu = drawn(&["run.device=cuda", "precision.dtype=f32", "device.memory_limit=64MiB"]);
    assert!(on_gpu.contains("\"end\":\"length\""), "{on_gpu}");
    assert_eq!(on_gpu, drawn(&["run.device=cpu"]));
}

/// Dropout, recomputation and accumulation, which use other kernels and orders.
#[test]
fn what_changes_the_order_of_work_changes_no_curve() {
    let root = tempfile::tempdir().unwrap();
    let settings =
        ["model.dropout=0.2", "parallel.recompute=true", "batch.micro=2", "optimizer.kind=sgd"];
    let on_cpu = [&settings[..], &["run.device=cpu"]].concat();
    let cpu = trains(Alone, root.path(), "cpu", &on_cpu, &[]);
    let on_gpu = [&settings[..], &["precision.dtype=f32"]].concat();
    let gpu = trains(Alone, root.path(), "gpu", &on_gpu, &[("CUDASIM_ORDER", "reverse")]);
    let off = largest_difference(&cpu, &gpu);
    assert!(off < 1e-4, "{off}");
}

#[test]
fn every_layout_gives_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    for precision in ["precision.dtype=f32", "precision.dtype=bf16"] {
        let name = |row: &str| format!("{}-{row}", precision.rsplit('=').next().unwrap());
        let one = trains(Alone, root.path(), &name("one"), &[precision], &[]);
        // MPI cannot access device memory.
        let isolated =
            [("CUDASIM_DEVICES", "2"), ("CUDASIM_HOST_ACCESS", "0"), ("CUDASIM_STREAMS", "lazy")];
        let stages = (0..4).map(|zero| format!("parallel.zero={zero}"));
        for layout in stages.chain(["parallel.storage=central".into()]) {
            let settings = [precision, &layout, "comm.transport=host-staged"];
            let two = trains(Mpirun(2), root.path(), &name(&layout), &settings, &isolated);
            two.same_as(&one, STEPS, &format!("{precision}, {layout}, 2 ranks"));
        }
        // Ranks share a GPU, as threads of one process.
        let settings =
            [precision, "parallel.zero=3", "device.ranks_per_gpu=2", "device.memory=0.4"];
        let shared = trains(Simulate(2), root.path(), &name("shared"), &settings, &[]);
        shared.same_as(&one, STEPS, &format!("{precision}, one GPU shared"));
    }
}

#[test]
fn messages_take_the_way_they_are_told() {
    let root = tempfile::tempdir().unwrap();
    let two = ("CUDASIM_DEVICES", "2");
    let staged = trains(
        Mpirun(2),
        root.path(),
        "staged",
        &["comm.transport=host-staged", "parallel.zero=2"],
        &[two],
    );
    // Any MPI can read the simulator's memory, as CUDA-aware MPI requires.
    for algorithm in ["halving-doubling", "ring", "vendor"] {
        let settings = [
            "comm.transport=cuda-aware",
            // The terms of ordered sums take 32 MiB.
            "device.memory_limit=128MiB",
            "parallel.zero=2",
            &format!("comm.algorithm={algorithm}"),
        ];
        let direct = trains(Mpirun(2), root.path(), algorithm, &settings, &[two]);
        direct.same_as(&staged, STEPS, algorithm);
    }
    // An impossible transport fails in the probe.
    let (_, mut command) = command(
        Mpirun(2),
        root.path(),
        "no",
        &["comm.transport=cuda-aware"],
        &[two, ("CUDASIM_HOST_ACCESS", "0")],
    );
    let ended = finish(&mut command);
    assert_eq!(ended.code(), 2, "{ended}");
    let is_named = ended
        .stderr
        .contains("comm.transport = cuda-aware: the MPI library cannot exchange memory of the GPU");
    assert!(is_named && ended.stderr.contains("hint: set comm.transport = host-staged"), "{ended}");
}

#[test]
fn nccl_gives_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let devices = |count| {
        [("CUDASIM_DEVICES", count), ("CUDASIM_HOST_ACCESS", "0"), ("CUDASIM_STREAMS", "lazy")]
    };
    let two = devices("2");
    let one = trains(Alone, root.path(), "one", &["parallel.virtual_ranks=4"], &[]);
    let with = |transport, name: &str, settings: &str, sim: Settings| {
        // The terms of ordered sums take up to 48 MiB on each of four GPUs.
        let ours =
            ["parallel.virtual_ranks=4", "comm.transport=nccl", "device.memory_limit=128MiB"];
        let settings: Vec<_> = ours.into_iter().chain(settings.split(' ')).collect();
        trains(transport, root.path(), name, &settings, sim)
    };
    for zero in 0..4 {
        let settings = format!("parallel.zero={zero}");
        let files = with(Mpirun(2), &settings, &settings, &two);
        files.same_as(&one, STEPS, &settings);
        assert!(files.text("collectives.json").contains("\"nccl\""));
    }
    with(Simulate(2), "threads", "parallel.zero=3", &two).same_as(
        &one,
        STEPS,
        "threads of one process",
    );
    let hybrid = "parallel.zero=2 parallel.shard=2 parallel.replica=2";
    with(Mpirun(4), "hybrid", hybrid, &devices("4")).same_as(&one, STEPS, hybrid);
    let central = "parallel.storage=central parallel.owners=2";
    with(Mpirun(4), "central", central, &devices("4")).same_as(&one, STEPS, central);

    // NCCL's collectives add in another order.
    let own = with(Mpirun(4), "own", &format!("{hybrid} comm.algorithm=vendor"), &devices("4"));
    let off = largest_difference(&own, &one);
    assert!(off < 1e-3, "{off}");
    let own =
        with(Mpirun(2), "own-central", "parallel.storage=central comm.algorithm=vendor", &two);
    let off = largest_difference(&own, &one);
    assert!(off < 1e-3, "{off}");
}

/// Gradients in bf16 are summed the same by every transport and ZeRO stage that exchanges in groups
/// of messages; all others refuse them.
#[test]
fn bf16_gradients_have_the_same_bits_by_every_transport() {
    let root = tempfile::tempdir().unwrap();
    let sim = [("CUDASIM_DEVICES", "4")];
    let on = |name: &str, layout: &str| {
        let settings: Vec<&str> = layout.split(' ').collect();
        let ours = ["comm.dtype=bf16", "parallel.virtual_ranks=4", "device.memory_limit=128MiB"];
        trains(Mpirun(4), root.path(), name, &[&ours[..], &settings].concat(), &sim)
    };
    let nccl = on("nccl", "comm.transport=nccl");
    for (name, layout) in [
        ("sharded", "comm.transport=nccl parallel.zero=3"),
        ("ipc", "comm.transport=cuda-ipc parallel.zero=2"),
        ("aware", "comm.transport=cuda-aware parallel.zero=1"),
        ("offloaded", "comm.transport=cuda-ipc parallel.zero=3 offload.optimizer=true"),
        ("accumulated", "comm.transport=nccl batch.micro=1"),
    ] {
        if name == "accumulated" {
            on(name, layout);
        } else {
            on(name, layout).same_as(&nccl, STEPS, layout);
        }
    }
    // The shards of a hybrid layout are summed first, and rounded.
    let hybrid = on("hybrid", "comm.transport=nccl parallel.shard=2 parallel.zero=2");
    let full = on("full", "comm.transport=nccl comm.dtype=f32");
    for (name, files) in [("nccl", &nccl), ("hybrid", &hybrid)] {
        let difference = largest_difference(files, &full);
        assert!(difference > 0.0 && difference < 2e-2, "{name}: {difference}");
    }

    let refused = |settings: &[&str], reason: &str| {
        let settings = [&["comm.dtype=bf16"], settings].concat();
        let (_, mut command) = command(Mpirun(2), root.path(), "refused", &settings, &sim);
        let message = said(&finish(&mut command));
        assert!(message.contains(reason) && message.contains("\nhint: "), "{message}");
    };
    refused(&["run.device=cpu"], "comm.dtype = bf16 is for GPUs");
    refused(&["comm.transport=host-staged"], "but this job has comm.transport = host-staged");
    refused(
        &["comm.algorithm=ring"],
        "comm.dtype = bf16 is not supported by comm.algorithm = ring",
    );
    // A rank that exchanges with no other needs nothing.
    trains(Alone, root.path(), "alone", &["comm.dtype=bf16"], &[]);
}

#[test]
fn nccl_is_refused_where_it_cannot_be() {
    let root = tempfile::tempdir().unwrap();
    let refused = |name: &str, settings: &[&str], sim: Settings| {
        let settings = [&["comm.transport=nccl"], settings].concat();
        let (run, mut command) = command(Mpirun(2), root.path(), name, &settings, sim);
        let message = said(&finish(&mut command));
        assert!(message.contains("\nhint: ") && !run.files().0.exists(), "{message}");
        message
    };
    let shares = ["device.ranks_per_gpu=2", "device.memory=0.4"];
    let message = refused("shared", &shares, &[]);
    assert!(
        message.contains("comm.transport = nccl requires a GPU for every rank: ranks 0, 1 on "),
        "{message}"
    );
    assert!(
        message.contains(
            " share CPU simulator 0 at 0000:01:00.0\nhint: set comm.transport=host-staged"
        ),
        "{message}"
    );

    let without = only(&["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libcublasLt.so"]);
    let libraries = without.path().to_str().unwrap();
    let message =
        refused("missing", &[], &[("CUDASIM_DEVICES", "2"), ("LD_LIBRARY_PATH", libraries)]);
    assert!(
        message.contains(
            "comm.transport = nccl: NCCL is missing: libnccl.so.2 was not found\nhint: install NCCL"
        ),
        "{message}"
    );
}

#[test]
fn a_run_goes_on_from_gpu_to_cpu_and_back() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["precision.dtype=f32", "checkpoint.every=2", "checkpoint.keep=5"];
    let whole = trains(Alone, root.path(), "whole", &settings, &[]);
    let resumed = |name: &str, settings: &[&str], sim: Settings| {
        let (run, _) = command(Alone, root.path(), name, settings, &[]);
        let run = run.resume(whole.checkpoint(2).to_str().unwrap());
        let mut command = run.command();
        with_simulator(&mut command).envs(sim.iter().copied());
        finish(&mut command).succeeded();
        run.files()
    };
    let here = resumed("here", &settings, &[]);
    assert_eq!(here.tensors(STEPS), whole.tensors(STEPS));
    let on_cpu = resumed("cpu", &["run.device=cpu", "precision.dtype=f32"], &[]);
    let losses = |files: &RunFiles| {
        files.numbers("metrics.jsonl", "loss").split_off(files.steps().len() - 2)
    };
    for (a, b) in losses(&on_cpu).iter().zip(losses(&whole)) {
        assert!((a - b).abs() < 1e-4, "{a} is not {b}");
    }
}

/// Creates a folder with some of the simulator's libraries.
fn only(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        std::os::unix::fs::symlink(simulator().join("lib").join(name), folder.path().join(name))
            .unwrap();
    }
    folder
}

#[test]
fn missing_libraries_are_named() {
    let cuda = ["libcuda.so", "libcuda.so.1"];
    let none = only(&[]);
    let driver = only(&cuda);
    let compiler = only(&[&cuda[..], &["libnvrtc.so"]].concat());
    let with = |folder: &tempfile::TempDir| folder.path().to_str().unwrap().to_string();
    for (folder, device, text) in [
        (
            &none,
            "cuda",
            "rank 0 on localhost has no GPU: no CUDA driver: libcuda.so.1 was not found",
        ),
        (&driver, "auto", "NVRTC, which compiles the GPU kernels, was not found"),
        (&compiler, "auto", "cuBLASLt, which multiplies matrices on the GPU, was not found"),
    ] {
        let said =
            refused(&[&format!("run.device={device}")], &[("LD_LIBRARY_PATH", &with(folder))]);
        assert!(said.contains(text) && said.contains("\nhint: "), "{said}");
    }
    // Without a driver the CPU is used.
    let root = tempfile::tempdir().unwrap();
    trains(Alone, root.path(), "x", &[], &[("LD_LIBRARY_PATH", &with(&none))]);
}

#[test]
fn gpus_that_cannot_are_told() {
    let cases: [(&[&str], Settings, &str); 12] = [
        (
            &["run.device=cuda"],
            &[("CUDASIM_DEVICES", "0")],
            "the CUDA driver finds no GPU: CUDA_ERROR_NO_DEVICE",
        ),
        (
            &["run.device=cuda"],
            &[("CUDASIM_DRIVER_VERSION", "11040")],
            "supports CUDA 11.4, but 12.0 is required",
        ),
        (
            &["run.device=cuda:7"],
            &[("CUDASIM_DEVICES", "4")],
            "run.device = cuda:7, but localhost has 4 GPUs",
        ),
        (&["run.device=gpu"], &[], "`gpu` is not a device"),
        (
            &[],
            &[("CUDASIM_CC", "75")],
            "CPU simulator 0 has compute capability 7.5, but 8.0 is required\nhint: use a GPU of",
        ),
        (
            &["precision.dtype=f32"],
            &[("CUDASIM_CC", "70")],
            "CPU simulator 0 has compute capability 7.0, but 8.0 is required\nhint: use a GPU of",
        ),
        (&["device.memory_limit=32900KiB"], &[], "of its GPU (parameters "),
        (&["device.memory=grow", "device.memory_limit=32900KiB"], &[], "of its GPU (parameters "),
        (&["device.memory=1.5"], &[], "device.memory = 1.5 is out of range"),
        (
            &["device.memory=all"],
            &[],
            "\"all\" is not \"grow\", a part of the GPU's memory such as 0.9, or a size such as \"40GiB\"",
        ),
        (
            &["device.memory=2GiB", "device.memory_limit=4GiB"],
            &[],
            "device.memory = 2GiB: CPU simulator 0 at 0000:01:00.0 on",
        ),
        (&["run.device=cpu", "precision.dtype=tf32"], &[], "precision.dtype = tf32 is for GPUs"),
    ];
    for (settings, sim, text) in cases {
        let said = refused(settings, sim);
        assert!(said.contains(text) && said.contains("\nhint: "), "{said}");
    }
    // The oldest supported generation trains.
    let root = tempfile::tempdir().unwrap();
    trains(Alone, root.path(), "x", &["precision.dtype=f32"], &[("CUDASIM_CC", "80")]);
}

/// If cuBLASLt does not support a residual, it is added by a second kernel, and the curve is that
/// of the CPU.
#[test]
fn residuals_that_are_not_fused_give_the_curve_of_the_cpu() {
    let root = tempfile::tempdir().unwrap();
    let cpu = trains(Alone, root.path(), "cpu", &["run.device=cpu"], &[]);
    for (precision, most) in [("f32", 1e-4), ("bf16", 2e-2)] {
        let dtype = format!("precision.dtype={precision}");
        let sim = [("CUDASIM_FAIL", "residual"), ("CUDASIM_STREAMS", "lazy")];
        let gpu = trains(Alone, root.path(), precision, &[&dtype], &sim);
        let off = largest_difference(&cpu, &gpu);
        assert!(off < most, "{precision} is {off} off");
        let log = gpu.text("logs/rank-00000.log");
        assert!(log.contains("with a fused residual: they run as two kernels"), "{log}");
    }
}

#[test]
fn more_ranks_than_gpus_may_share_if_told_so() {
    let root = tempfile::tempdir().unwrap();
    let (_, mut asked) =
        command(Mpirun(3), root.path(), "x", &["batch.global=6", "parallel.virtual_ranks=3"], &[]);
    let ended = finish(&mut asked);
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("3 ranks on "), "{ended}");
    assert!(
        ended.stderr.contains("are to share 1 GPU\nhint: ")
            && ended.stderr.contains("ranks_per_gpu=3"),
        "{ended}"
    );
}

/// Two ranks with a GPU each train, and the third one, without a GPU, is a parameter server.
#[test]
fn servers_need_no_gpu_beside_workers_with_some() {
    let root = tempfile::tempdir().unwrap();
    // With their default names the simulator's devices would be of two kinds.
    let sim: Settings = &[("CUDASIM_DEVICES", "2"), ("CUDASIM_NAME", "NVIDIA H100 80GB HBM3")];
    let alone = trains(Mpirun(2), root.path(), "ranks", &["parallel.zero=0"], sim);
    let (run, mut asked) = command(Mpirun(3), root.path(), "served", &["run.device=cuda"], sim);
    finish(asked.args(["--servers", "1"])).succeeded();
    let difference = largest_difference(&alone, &run.files());
    assert!(difference <= 1e-6, "{difference}");
}

#[test]
fn failures_of_the_device_end_the_run() {
    let root = tempfile::tempdir().unwrap();
    for (number, (failure, code, text)) in [
        ("launch:40", 1, " could not "),
        // The first block of the pool, and the rest.
        ("alloc:1", 2, "out of GPU memory: 64.0 MiB requested"),
        ("alloc:2", 2, "out of GPU memory: 32.0 MiB requested"),
        ("compile", 1, "does not compile for sm_90a"),
        ("matmul", 1, "cuBLASLt could not multiply"),
    ]
    .into_iter()
    .enumerate()
    {
        let cache = tempfile::tempdir().unwrap();
        let fresh = cache.path().to_str().unwrap();
        let sim = [("CUDASIM_FAIL", failure), ("XDG_CACHE_HOME", fresh), ("CUDASIM_CACHE", fresh)];
        let (_, mut asked) = command(Alone, root.path(), &format!("x{number}"), &[], &sim);
        let ended = finish(&mut asked);
        assert_eq!(ended.code(), code, "{failure}: {ended}");
        assert!(ended.stderr.contains(text), "{failure}: {ended}");
    }
}

/// A crash or a bad disk may corrupt cached kernels.
#[test]
fn kernels_kept_on_disk_are_checked_and_made_again() {
    let root = tempfile::tempdir().unwrap();
    let cache = tempfile::tempdir().unwrap();
    let own = [("XDG_CACHE_HOME", cache.path().to_str().unwrap())];
    let first = trains(Alone, root.path(), "first", &[], &own);
    let kernels = || {
        let ours = std::fs::read_dir(cache.path().join("hpctrain"))
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let folders: Vec<_> =
            ours.filter(|path| path.to_str().unwrap().contains("kernels")).collect();
        let files = std::fs::read_dir(&folders[0]).unwrap().map(|entry| entry.unwrap().path());
        let mut kernels: Vec<_> =
            files.filter(|path| path.extension().is_some_and(|end| end == "cubin")).collect();
        kernels.sort();
        kernels
    };
    let whole: Vec<Vec<u8>> = kernels().iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(whole.len() > 1);
    // Truncated, as after a crash; and with a valid hash, but contents that the device does not
    // load.
    let garbage = b"no kernel".repeat(10);
    for (path, whole) in kernels().iter().zip(&whole) {
        std::fs::write(path, &whole[..whole.len() / 2]).unwrap();
    }
    std::fs::write(&kernels()[0], [&Sha256::digest(&garbage)[..], &garbage].concat()).unwrap();
    let (run, mut command) = command(Alone, root.path(), "second", &[], &own);
    let ended = finish(&mut command).succeeded();
    assert_eq!(ended.stderr.matches("recompiling the cached kernel").count(), 1, "{ended}");
    assert_eq!(largest_difference(&first, &run.files()), 0.0);
    let again: Vec<Vec<u8>> = kernels().iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(again == whole);
}

/// Copies the simulator's libraries to names with a version.
fn versions(names: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = only(&["libcuda.so", "libcuda.so.1"]);
    for (from, to) in names {
        std::fs::copy(simulator().join("lib").join(from), folder.path().join(to)).unwrap();
    }
    // The compiler's headers are next to its folder.
    let inner = folder.path().join("lib");
    let include = folder.path().join("include");
    std::fs::create_dir(&inner).unwrap();
    for entry in std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap()) {
        if entry.file_name().to_str().unwrap().contains(".so") {
            std::fs::rename(entry.path(), inner.join(entry.file_name())).unwrap();
        }
    }
    std::os::unix::fs::symlink(simulator().join("include"), include).unwrap();
    folder
}

/// Libraries with a major version that the driver does not support are skipped in favour of older
/// ones.
#[test]
fn libraries_that_are_too_new_for_the_driver_are_passed_over() {
    let root = tempfile::tempdir().unwrap();
    let new = [("libnvrtc.so", "libnvrtc.so.13"), ("libcublasLt.so", "libcublasLt.so.13")];
    let old = [("libnvrtc.so", "libnvrtc.so.12"), ("libcublasLt.so", "libcublasLt.so.12")];
    let only_new = versions(&new);
    let both = versions(&[new, old].concat());
    let compiler = versions(&[new[0], new[1], old[0]]);
    let with = |folder: &tempfile::TempDir| folder.path().join("lib").to_str().unwrap().to_string();
    let driver = ("CUDASIM_DRIVER_VERSION", "12020");

    for (folder, library) in [(&only_new, "NVRTC 13."), (&compiler, "cuBLASLt 13.0")] {
        let message = refused(&["run.device=cuda"], &[driver, ("LD_LIBRARY_PATH", &with(folder))]);
        let says = "requires a GPU driver of CUDA 13 (580 or later), but this one supports CUDA 12.2\nhint: update the driver";
        assert!(message.contains(library) && message.contains(says), "{message}");
        assert!(
            message.contains("pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12"),
            "{message}"
        );
    }
    let doctor_report = |folder: &tempfile::TempDir, driver: &str| {
        let mut doctor = program(["doctor", "--run-root", root.path().to_str().unwrap()]);
        let sim = [("CUDASIM_DRIVER_VERSION", driver), ("LD_LIBRARY_PATH", &with(folder))];
        finish(with_simulator(&mut doctor).envs(sim)).stdout
    };
    let doctor = doctor_report(&only_new, "12020");
    assert_eq!(
        doctor.matches("requires a GPU driver of CUDA 13 (580 or later)").count(),
        2,
        "{doctor}"
    );
    for (driver, nvrtc, cublaslt) in
        [("12020", "libnvrtc.so.12", "12.0, "), ("13000", "libnvrtc.so.13", "13.0, ")]
    {
        let doctor = doctor_report(&both, driver);
        assert!(doctor.contains(nvrtc) && doctor.contains(cublaslt), "{driver}: {doctor}");
        assert!(!doctor.contains("requires a GPU driver"), "{doctor}");
    }
    trains(
        Alone,
        root.path(),
        "older",
        &["run.device=cuda"],
        &[driver, ("LD_LIBRARY_PATH", &with(&both))],
    );
}

/// Returns what a step of rank 0 requests, from `run.json`: launches, host waits and messages.
fn requested(run: &RunFiles) -> [f64; 3] {
    let per_step = &json(&run.path("run.json"))["per_step"];
    ["launches", "host_waits", "messages"].map(|key| per_step[key].as_f64().unwrap())
}

/// Over NCCL the host queues a step without waiting for the device: ZeRO 3 and tensor parallelism
/// wait no more often than one rank does at the end of a step. Host-staged messages wait for each
/// collective.
#[test]
fn nccl_lets_the_host_run_ahead() {
    let root = tempfile::tempdir().unwrap();
    let devices = [("CUDASIM_DEVICES", "2")];
    let alone = trains(Alone, root.path(), "alone", &["device.memory_limit=128MiB"], &[]);
    let [_, at_the_end, none] = requested(&alone);
    assert_eq!((at_the_end, none), (1.0, 0.0), "one rank");
    for layout in ["parallel.zero=3", "parallel.zero=3 parallel.prefetch=0", "parallel.tensor=2"] {
        let on = |transport: &str| {
            let transport_key = format!("comm.transport={transport}");
            let settings: Vec<&str> = layout
                .split(' ')
                .chain([&transport_key[..], "device.memory_limit=128MiB"])
                .collect();
            let name = format!("{layout} {transport}");
            requested(&trains(Mpirun(2), root.path(), &name, &settings, &devices))
        };
        let [_, waits, messages] = on("nccl");
        assert!(
            waits == at_the_end && messages > 10.0,
            "{layout}: {waits} waits, {messages} messages"
        );
        let [_, waits, _] = on("host-staged");
        assert!(waits > at_the_end + 10.0, "{layout}: {waits} waits");
    }
}
