//! The estimate of GPU memory in the startup summary, compared with the peak of a run, in the GPU
//! simulator.

use std::path::Path;

use hpctrain::backend::cuda::{Arithmetic, Cuda, Device, PoolBudget, Precision};
use hpctrain::backend::{Backend, MemoryKind};

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{Ended, finish};
use hpctrain_testkit::runs::{Run, json};
use hpctrain_testkit::simulator::{is_on_gpu, under, with_simulator};

/// A network whose parameters take several times the memory of one activation. Messages are
/// host-staged: for their memory the estimate is an upper bound.
const BIG: [&str; 11] = [
    "run.device=cuda",
    "comm.transport=host-staged",
    "model.layers=4",
    "model.width=192",
    "model.heads=3",
    "model.context=64",
    "batch.global=4",
    "batch.micro=2",
    "run.steps=2",
    "eval.samples=2",
    "eval.batch=2",
];

/// Returns the estimate in MiB, from the line "gpu memory 123.4 MiB per rank: …".
fn promised(stdout: &str) -> f64 {
    let line = stdout.lines().find(|line| line.starts_with("gpu memory ")).unwrap();
    let (number, _) = line["gpu memory ".len()..].trim().split_once(" MiB per rank: ").unwrap();
    number.parse().unwrap()
}

/// Returns the memory of messages in MiB, from the same line.
fn messages(line: &str) -> f64 {
    let Some((_, rest)) = line.split_once(", communication ") else { return 0.0 };
    rest.split_once(" MiB").unwrap().0.parse().unwrap()
}

fn run(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> (Run, Ended) {
    let run = Run::new(transport, root, name, &[&BIG, settings].concat());
    let ended = finish(with_simulator(&mut run.command()).env("CUDASIM_DEVICES", "2")).succeeded();
    (run, ended)
}

/// The relative difference allowed between estimate and peak.
const TOLERANCE: f64 = 0.03;

/// A small network whose logits are a large part of its memory, and padding a large part of the
/// logits: unsharded, and with two virtual tensor ranks.
const PADDED: &str = "model.vocabulary=257 model.layers=1 model.width=32 model.heads=2 model.context=128 batch.global=32 batch.micro=32";
const PADDED_SLICES: &str = "model.vocabulary=641 model.layers=1 model.width=32 model.heads=2 model.context=128 batch.global=32 batch.micro=32 parallel.virtual_tensor_ranks=2";

/// The workspace of matmuls in MiB. It is the same in every run, so comparisons exclude it.
const WORKSPACE: f64 = 32.0;

/// Layouts that also run with little more memory than the estimate: fragmentation wastes at most
/// one free range smaller than the largest buffer, which has 1.7 MiB (the gradients of a block).
const TIGHT: [&str; 2] = ["parallel.zero=0", "parallel.zero=3"];
const LARGEST: f64 = 1.71;

#[test]
fn the_banner_promises_what_a_run_takes_of_a_gpu() {
    let in_pieces = [PADDED, PADDED_SLICES]
        .map(|settings| format!("{settings} parallel.loss_chunk_tokens=512"));
    let layouts: [(Transport, &str); 28] = [
        (Alone, "parallel.zero=0"),
        (Alone, "parallel.zero=0 offload.optimizer=true"),
        (Alone, "parallel.recompute=true"),
        (Alone, "parallel.recompute=true offload.activations=true"),
        (Alone, "model.kind=llama model.place.tables=host"),
        (Alone, "parallel.virtual_ranks=2 batch.micro=1"),
        (Alone, "precision.dtype=f32 offload.optimizer=true model.dropout=0.1"),
        (Alone, "eval.batch=24 eval.samples=24"),
        (Alone, PADDED),
        (Alone, PADDED_SLICES),
        (Alone, &in_pieces[0]),
        (Alone, &in_pieces[1]),
        (Mpirun(2), "parallel.zero=0"),
        (Mpirun(2), "parallel.zero=2 batch.micro=1"),
        (Mpirun(2), "parallel.zero=3"),
        (
            Mpirun(2),
            "parallel.pipeline=2 batch.micro=1 parallel.recompute=true offload.activations=true",
        ),
        (Mpirun(2), "parallel.zero=3 offload.optimizer=true"),
        (
            Mpirun(2),
            "parallel.zero=3 model.kind=llama model.vocabulary=2000 model.place.tables=host",
        ),
        (Alone, "parallel.zero=3 offload.optimizer=true offload.params=true batch.micro=4"),
        (Mpirun(2), "parallel.zero=3 offload.optimizer=true offload.params=true"),
        (Mpirun(2), "parallel.zero=3 precision.dtype=f32"),
        (Mpirun(2), "parallel.zero=2 batch.micro=1 parallel.virtual_ranks=4"),
        (
            Mpirun(4),
            "parallel.zero=3 batch.micro=1 batch.global=16 parallel.virtual_ranks=16 device.ranks_per_gpu=2",
        ),
        (
            Mpirun(2),
            "parallel.zero=3 batch.micro=1 parallel.virtual_ranks=4 offload.optimizer=true offload.params=true",
        ),
        (Mpirun(2), "parallel.zero=0 comm.dtype=bf16 comm.transport=cuda-ipc"),
        (Mpirun(2), "parallel.zero=2 comm.dtype=bf16 comm.transport=cuda-ipc batch.micro=1"),
        (Mpirun(2), "parallel.zero=3 comm.dtype=bf16 comm.transport=cuda-ipc"),
        (
            Mpirun(2),
            "parallel.zero=3 parallel.recompute=true offload.optimizer=true batch.global=8",
        ),
    ];
    let root = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (i, (transport, layout)) in layouts.into_iter().enumerate() {
        let settings: Vec<&str> = layout.split_whitespace().collect();
        let (ran, ended) = run(transport, root.path(), &format!("x-{i}"), &settings);
        let card = json(&ran.files().path("run.json"));
        let peak = card["peak_gpu_bytes"].as_f64().unwrap() / f64::from(1 << 20);
        let line = ended.stdout.lines().find(|line| line.starts_with("gpu memory ")).unwrap();
        // Messages of these small units take a part of their upper bound.
        let promise = promised(&ended.stdout) - messages(line);
        let off = (promise - peak) / (promise - WORKSPACE);
        println!(
            "{transport:?} {layout}: {promise} MiB promised, {peak:.1} MiB taken: {:.1} % off\n  {line}",
            100.0 * off
        );
        if off.abs() > TOLERANCE {
            wrong.push(format!(
                "{transport:?} {layout}: {promise} MiB promised, {peak:.1} MiB taken"
            ));
        }
        if TIGHT.contains(&layout) {
            let limit = format!("device.memory_limit={}KiB", (1024.0 * (promise + LARGEST)) as u64);
            run(transport, root.path(), &format!("tight-{i}"), &[layout, &limit]);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The size of the pool changes no bit, and a growing pool allocates memory on demand: the network
/// needs more than one block.
#[test]
fn pools_of_every_kind_give_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["parallel.virtual_ranks=2", "batch.micro=1"];
    let with = |name: &str, memory: &str, sim: &[(&str, &str)]| {
        let memory = format!("device.memory={memory}");
        let run = Run::new(Alone, root.path(), name, &[&BIG[..], &settings, &[&memory]].concat());
        let mut command = run.command();
        let sim = with_simulator(&mut command).envs(sim.iter().copied());
        let ended = finish(sim).succeeded();
        (run.files(), ended.stdout)
    };
    let (part, stdout) = with("part", "0.5", &[]);
    assert!(stdout.contains(", 512.0 MiB of 1.0 GiB, "), "{stdout}");
    for (name, memory, says, sim) in [
        ("bytes", "200MiB", ", 200.0 MiB of 1.0 GiB, ", &[][..]),
        ("grow", "grow", ", up to 921.6 MiB of 1.0 GiB, ", &[]),
        // The device refuses a block, but has enough memory for the allocation.
        ("scarce", "grow", ", up to 921.6 MiB of 1.0 GiB, ", &[("CUDASIM_FAIL", "alloc:2")]),
    ] {
        let (files, stdout) = with(name, memory, sim);
        assert!(stdout.contains(says), "{name}: {stdout}");
        files.same_as(&part, 2, name);
        let peak = json(&files.path("run.json"))["peak_gpu_bytes"].as_u64().unwrap();
        assert!(peak > 64 << 20, "{name}: one block would do: {peak}");
    }
}

/// The error of an exhausted pool names the requested and the available memory.
#[test]
fn a_pool_grows_until_there_is_no_more() {
    under(&[&[("CUDASIM_MEM", "192M")]], || {
        let with = |most: usize| {
            let memory = PoolBudget { bytes: most << 20, grows: true };
            Cuda::with_options(
                &Device::open(0).unwrap(),
                memory,
                Precision::F32(Arithmetic::Full),
                false,
            )
            .unwrap()
        };
        let mebibytes = |cuda: &Cuda, count: usize| cuda.alloc(MemoryKind::Gradients, count << 18);
        let bounded = with(160);
        let kept = [mebibytes(&bounded, 24).unwrap(), mebibytes(&bounded, 60).unwrap()];
        let message = mebibytes(&bounded, 48).err().unwrap().to_string();
        let says = "48.0 MiB for gradients do not fit into the 160.0 MiB limit of this rank; in use: gradients 84.0 MiB, ";
        assert!(
            message.contains(says) && message.contains("device.memory_limit higher"),
            "{message}"
        );
        // There is room for less.
        assert_eq!(Cuda::len(&mebibytes(&bounded, 30).unwrap()), 30 << 18);
        drop((kept, bounded));
        if is_on_gpu() {
            return;
        }
        let free = with(1 << 10);
        let _kept = mebibytes(&free, 100).unwrap();
        let message = mebibytes(&free, 48).err().unwrap().to_string();
        let says = "out of GPU memory: 48.0 MiB for gradients requested, 28.0 MiB of the GPU free; this rank has 164.0 MiB, in use: ";
        assert!(
            message.contains(says) && message.contains("end other processes on this GPU"),
            "{message}"
        );
    });
}

/// NCCL's buffers are allocated and measured before the pool takes the rest of the memory, so hybrid
/// sharding with tensor parallelism fits beside them, or is refused with the number.
#[test]
fn the_pool_leaves_what_nccl_has_taken() {
    let root = tempfile::tempdir().unwrap();
    // Replicas, shards and tensor-parallel ranks have a communicator each. 4.3 GB of an H100's 80.
    let layout = [
        "run.device=cuda",
        "comm.transport=nccl",
        "parallel.zero=2",
        "parallel.shard=2",
        "parallel.replica=2",
        "parallel.tensor=2",
        "batch.global=8",
        "run.steps=2",
        "model.width=16",
        "model.context=8",
        "eval.samples=4",
    ];
    let start = |name: &str, taken: &str| {
        let run = Run::new(Simulate(8), root.path(), name, &layout);
        let mut command = run.command();
        let sim = [("CUDASIM_DEVICES", "8"), ("CUDASIM_MEM", "800M"), ("CUDASIM_NCCL_MEM", taken)];
        finish(with_simulator(&mut command).envs(sim))
    };
    let summary = start("fits", "43M").succeeded().stdout;
    assert!(summary.contains("; 129.0 MiB for NCCL besides"), "{summary}");
    // Without room for NCCL the pool would take 720 MiB, and three communicators more than the rest.
    let ended = start("refused", "215M");
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("NCCL has taken 645.0 MiB of the GPU: a rank needs ")
            && ended.stderr.contains(", but may use 75.0 MiB"),
        "{ended}"
    );
}
