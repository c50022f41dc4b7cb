//! The banner's promise of GPU memory against what a run took of it, in the GPU's simulator.

use std::path::Path;

use hpctrain::backend::cuda::{Arithmetic, Cuda, Device, PoolBudget, Precision};
use hpctrain::backend::{Backend, MemoryKind};

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun};
use hpctrain_testkit::launch::{Ended, finish};
use hpctrain_testkit::runs::{Run, json};
use hpctrain_testkit::simulator::{is_on_gpu, under, with_simulator};

/// A network whose own memory is several times that of one activation. Messages pass through the
/// host: of their memory the estimate knows the most only.
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

/// The promise in MiB: the banner's line is "gpu memory   123.4 MiB a rank: …".
fn promised(stdout: &str) -> f64 {
    let line = stdout.lines().find(|line| line.starts_with("gpu memory ")).unwrap();
    let (number, _) = line["gpu memory ".len()..].trim().split_once(" MiB a rank: ").unwrap();
    number.parse().unwrap()
}

fn run(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> (Run, Ended) {
    let run = Run::new(transport, root, name, &[&BIG, settings].concat());
    let ended = finish(with_simulator(&mut run.command()).env("CUDASIM_DEVICES", "2")).succeeded();
    (run, ended)
}

/// Promise and peak may differ by this part of the promise.
const TOLERANCE: f64 = 0.03;

/// A small network whose logits are a good part of its memory, and their padding a good part of
/// those: whole, and in two slices.
const PADDED: &str = "model.vocabulary=257 model.layers=1 model.width=32 model.heads=2 model.context=128 batch.global=32 batch.micro=32";
const PADDED_SLICES: &str = "model.vocabulary=641 model.layers=1 model.width=32 model.heads=2 model.context=128 batch.global=32 batch.micro=32 parallel.virtual_tensor_ranks=2";

/// The workspace of matrix products in MiB: the same in every run, and so no part of what is
/// compared.
const WORKSPACE: f64 = 32.0;

/// Layouts that also run where there is little more than what was promised: no pieces of free
/// memory are left over that are too small for anything, but for one that is smaller than the
/// largest buffer. That has 1.7 MiB, a block's gradients.
const TIGHT: [&str; 2] = ["parallel.zero=0", "parallel.zero=3"];
const LARGEST: f64 = 1.71;

#[test]
fn the_banner_promises_what_a_run_takes_of_a_gpu() {
    let in_pieces = [PADDED, PADDED_SLICES]
        .map(|settings| format!("{settings} parallel.loss_chunk_tokens=512"));
    let layouts: [(Transport, &str); 22] = [
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
        let promise = promised(&ended.stdout);
        let line = ended.stdout.lines().find(|line| line.starts_with("gpu memory ")).unwrap();
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

/// The pool's size shows in no bit, and memory that grows is taken as it is needed: the network
/// wants more than a block.
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
    let (part, told) = with("part", "0.5", &[]);
    assert!(told.contains(", 512.0 MiB of 1.0 GiB, "), "{told}");
    for (name, memory, says, sim) in [
        ("bytes", "200MiB", ", 200.0 MiB of 1.0 GiB, ", &[][..]),
        ("grow", "grow", ", up to 921.6 MiB of 1.0 GiB, ", &[]),
        // The device refuses a block, and has room for what is wanted of it.
        ("scarce", "grow", ", up to 921.6 MiB of 1.0 GiB, ", &[("CUDASIM_FAIL", "alloc:2")]),
    ] {
        let (files, told) = with(name, memory, sim);
        assert!(told.contains(says), "{name}: {told}");
        files.same_as(&part, 2, name);
        let peak = json(&files.path("run.json"))["peak_gpu_bytes"].as_u64().unwrap();
        assert!(peak > 64 << 20, "{name}: one block would do: {peak}");
    }
}

/// A pool that is exhausted tells what was asked for and what there is.
#[test]
fn a_pool_grows_until_there_is_no_more() {
    under(&[&[("CUDASIM_MEM", "192M")]], || {
        let with = |most: usize| {
            let memory = PoolBudget { bytes: most << 20, grows: true };
            Cuda::with_journal(
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
        let told = mebibytes(&bounded, 48).err().unwrap().to_string();
        let says = "no 48.0 MiB for gradients in the 160.0 MiB that this rank may take: it has taken gradients 84.0 MiB, ";
        assert!(told.contains(says) && told.contains("device.memory_limit higher"), "{told}");
        // There is room for less.
        assert_eq!(Cuda::len(&mebibytes(&bounded, 30).unwrap()), 30 << 18);
        drop((kept, bounded));
        if is_on_gpu() {
            return;
        }
        let free = with(1 << 10);
        let _kept = mebibytes(&free, 100).unwrap();
        let told = mebibytes(&free, 48).err().unwrap().to_string();
        let says = "out of GPU memory: no 48.0 MiB for gradients where 28.0 MiB of the GPU are free; this rank has 164.0 MiB, ";
        assert!(told.contains(says) && told.contains("end what else runs on this GPU"), "{told}");
    });
}
