//! The table of layouts on GPUs, in their simulator: every row gives the bits of one rank, whether
//! messages are host-staged (pinned memory) or CUDA-aware MPI is used.

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::layouts::{EQUAL_LAYOUTS, LayoutCase, give_the_same_bits};
use hpctrain_testkit::runs::Run;
use hpctrain_testkit::simulator::with_simulator;

const STEPS: u64 = 3;

/// Less of everything that takes the simulator long and that no layout depends on.
const SMALLER: [&str; 7] = [
    "run.device=cuda",
    "run.steps=3",
    "model.width=16",
    "model.context=8",
    "eval.samples=6",
    "device.memory_limit=48MiB",
    "device.ranks_per_gpu=12",
];

const F32: &str = "precision.dtype=f32";
const BF16: &str = "precision.dtype=bf16";
const STAGED: &str = "comm.transport=host-staged";
const DIRECT: &str = "comm.transport=cuda-aware";
/// The terms of ordered sums take up to 56 MiB of each of eight ranks.
const ROOM: &str = "device.memory_limit=128MiB";
const NCCL: &str = "comm.transport=nccl";
const IPC: &str = "comm.transport=cuda-ipc";

/// Rows on GPUs that compute in `precision`, each with its way of messages. Every third row has two
/// GPUs for its ranks, the others one.
fn on_gpus<'a>(precision: &str, rows: impl Iterator<Item = (&'a LayoutCase, &'a str)>) {
    let root = tempfile::tempdir().unwrap();
    let rows = rows.map(|(row, path)| (row, vec![path]));
    give_the_same_bits(rows, STEPS, |transport, settings, name| {
        let ours = SMALLER.iter().chain([&precision]).map(|setting| setting.to_string());
        let room = settings.iter().any(|setting| setting == DIRECT).then(|| ROOM.to_string());
        let settings = ours.chain(settings).chain(room).collect();
        let run = Run { settings, ..Run::new(transport, root.path(), name, &[]) };
        let devices = if name.ends_with(['0', '3', '6', '9']) { "2" } else { "1" };
        let sim = [("CUDASIM_DEVICES", devices), ("CUDASIM_MEM", "2G")];
        finish(with_simulator(&mut run.command()).envs(sim)).succeeded();
        run.files()
    });
}

/// The rows whose ranks are processes.
fn processes() -> impl Iterator<Item = &'static LayoutCase> {
    EQUAL_LAYOUTS.iter().filter(|LayoutCase(_, transport, _)| matches!(transport, Mpirun(_)))
}

#[test]
fn staged_messages_give_the_same_bits() {
    on_gpus(F32, processes().step_by(2).map(|row| (row, STAGED)));
}

#[test]
fn direct_messages_give_the_same_bits() {
    on_gpus(F32, processes().skip(1).step_by(2).map(|row| (row, DIRECT)));
}

/// Each row with the transport that the tests above do not use.
#[test]
#[ignore = "takes minutes: the same rows, the other way"]
fn the_other_way_gives_the_same_bits() {
    on_gpus(F32, processes().zip([DIRECT, STAGED].into_iter().cycle()));
}

/// One rank alone, and threads as ranks, which cannot use CUDA-aware MPI.
#[test]
fn one_process_gives_the_same_bits() {
    let alone = EQUAL_LAYOUTS.iter().filter(|LayoutCase(_, transport, _)| *transport == Alone);
    let threads =
        EQUAL_LAYOUTS.iter().filter(|LayoutCase(_, transport, _)| matches!(transport, Simulate(_)));
    on_gpus(F32, alone.chain(threads.step_by(3)).map(|row| (row, STAGED)));
}

/// Over NCCL each rank has its own GPU, and the device orders collectives with compute: in any order
/// of streams that the simulator chooses, no wait is missing.
#[test]
fn nccl_gives_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let mut orders = ["eager", "lazy", "racing"].into_iter().cycle();
    let rows = EQUAL_LAYOUTS
        .iter()
        .filter(|LayoutCase(_, transport, _)| matches!(transport, Mpirun(_) | Simulate(2..=8)));
    let orders = std::cell::RefCell::new(&mut orders);
    give_the_same_bits(
        rows.step_by(3).map(|row| (row, vec![])),
        STEPS,
        |transport, settings, name| {
            let ours =
                SMALLER.iter().filter(|setting| !setting.starts_with("device.ranks_per_gpu"));
            let own = if transport == Alone { STAGED } else { NCCL };
            let ours = ours
                .chain([&F32, &own, &"device.memory_limit=192MiB"])
                .map(|setting| setting.to_string());
            let settings = ours.chain(settings).collect();
            let run = Run { settings, ..Run::new(transport, root.path(), name, &[]) };
            let order = orders.borrow_mut().next().unwrap();
            let sim = [("CUDASIM_DEVICES", "8"), ("CUDASIM_STREAMS", order)];
            finish(with_simulator(&mut run.command()).envs(sim)).succeeded();
            run.files()
        },
    );
}

/// Ranks that write to each other's memory (CUDA IPC), on one or two GPUs that they share: a few rows.
#[test]
fn cuda_ipc_gives_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let orders = std::cell::RefCell::new(["eager", "lazy", "racing"].into_iter().cycle());
    let rows = EQUAL_LAYOUTS
        .iter()
        .filter(|LayoutCase(_, transport, _)| matches!(transport, Mpirun(_) | Simulate(2..=8)));
    give_the_same_bits(
        rows.step_by(5).map(|row| (row, vec![])),
        STEPS,
        |transport, settings, name| {
            let ours = SMALLER.iter().filter(|setting| !setting.starts_with("device.memory"));
            let own = if transport == Alone { STAGED } else { IPC };
            // Terms take up to 64 MiB.
            let ours = ours
                .chain([&F32, &own, &"device.memory_limit=144MiB"])
                .map(|setting| setting.to_string());
            let settings = ours.chain(settings).collect();
            let run = Run { settings, ..Run::new(transport, root.path(), name, &[]) };
            let devices = if name.ends_with(['0', '3', '6', '9']) { "2" } else { "1" };
            let order = orders.borrow_mut().next().unwrap();
            let sim =
                [("CUDASIM_DEVICES", devices), ("CUDASIM_STREAMS", order), ("CUDASIM_MEM", "2G")];
            finish(with_simulator(&mut run.command()).envs(sim)).succeeded();
            run.files()
        },
    );
}

/// Ranks with unequal numbers of virtual ranks, over each transport.
#[test]
fn unequal_ranks_give_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let trained = |transport, name: &str, own: &[&str], sim: [(&str, &str); 2]| {
        let ours = ["parallel.virtual_ranks=8", "batch.global=8", "device.memory_limit=192MiB"];
        let small = SMALLER.iter().copied().filter(|setting| {
            let is_shared = own.contains(&NCCL) && setting.starts_with("device.ranks_per_gpu");
            !(setting.starts_with("device.memory") || is_shared)
        });
        let settings: Vec<_> = small.chain(ours).chain(own.iter().copied()).collect();
        let run = Run::new(transport, root.path(), name, &settings);
        finish(with_simulator(&mut run.command()).envs(sim)).succeeded();
        run.files()
    };
    for (precision, zero) in [(F32, "parallel.zero=1"), (BF16, "parallel.zero=3")] {
        let alone = format!("one-{}", precision.len());
        let shared = [("CUDASIM_DEVICES", "1"), ("CUDASIM_MEM", "2G")];
        let one = trained(Alone, &alone, &[precision], shared);
        for (path, sim) in [
            (STAGED, shared),
            (DIRECT, shared),
            (IPC, shared),
            (NCCL, [("CUDASIM_DEVICES", "3"), ("CUDASIM_STREAMS", "racing")]),
        ] {
            let name =
                format!("{}-{}", path.trim_start_matches("comm.transport="), precision.len());
            let three = trained(Mpirun(3), &name, &[precision, zero, path], sim);
            three.same_as(&one, STEPS, &name);
        }
    }
}

/// Eight processes write to each other's memory on one GPU, each to the other seven.
#[test]
fn eight_processes_share_a_gpu() {
    let root = tempfile::tempdir().unwrap();
    let trained = |transport, name: &str, own: &[&str]| {
        let ours =
            ["parallel.virtual_ranks=8", "batch.global=8", F32, "device.memory_limit=144MiB"];
        let small = SMALLER.iter().copied().filter(|setting| !setting.starts_with("device.memory"));
        let settings: Vec<_> = small.chain(ours).chain(own.iter().copied()).collect();
        let run = Run::new(transport, root.path(), name, &settings);
        finish(with_simulator(&mut run.command()).env("CUDASIM_MEM", "2G")).succeeded();
        run.files()
    };
    let one = trained(Alone, "one", &[]);
    for zero in ["parallel.zero=1", "parallel.zero=3"] {
        trained(Mpirun(8), zero, &[IPC, zero]).same_as(&one, STEPS, zero);
    }
}

/// bf16 changes kernels, and the all-gathers of parameters. A selection of rows.
#[test]
fn bf16_gives_the_same_bits() {
    on_gpus(BF16, processes().step_by(4).zip([STAGED, DIRECT].into_iter().cycle()));
}
