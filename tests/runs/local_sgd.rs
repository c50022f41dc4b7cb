//! Local SGD: replicas are averaged, and any number of ranks that divides them gives the same bits.

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::{Run, RunFiles};
use hpctrain_testkit::simulator::with_simulator;

const STEPS: u64 = 6;
const LOCAL_SGD: [&str; 3] =
    ["local_sgd.sync_every=2", "local_sgd.replicas=4", "parallel.virtual_ranks=8"];
/// Settings with everything that is averaged, or kept between averages.
const OUTER: [&str; 3] =
    ["local_sgd.outer_lr=0.7", "local_sgd.outer_momentum=0.9", "optimizer.ema=0.75"];

fn run(transport: Transport, root: &std::path::Path, name: &str, settings: &[&str]) -> Run {
    Run::new(transport, root, name, &[&LOCAL_SGD[..], &["eval.every=2"], settings].concat())
}

#[test]
fn every_layout_gives_the_same_bits_and_goes_on() {
    let root = tempfile::tempdir().unwrap();
    for (outer, name) in [(&OUTER[..], "outer"), (&[], "mean")] {
        let saves = [outer, &["checkpoint.every=2", "checkpoint.keep=9"]].concat();
        let one = run(Alone, root.path(), &format!("{name}-one"), &saves).succeeds();
        for (i, (transport, layout)) in [
            (Mpirun(2), "parallel.zero=0"),
            (Mpirun(4), "parallel.zero=0"),
            (Simulate(4), "parallel.zero=1 parallel.shard=2"),
            (Simulate(8), "parallel.zero=3 parallel.shard=2"),
            (Simulate(4), "parallel.pipeline=2 parallel.zero=2 parallel.shard=2"),
        ]
        .into_iter()
        .enumerate()
        {
            let settings: Vec<&str> = outer.iter().copied().chain(layout.split(' ')).collect();
            let files =
                run(transport, root.path(), &format!("{name}-layout-{i}"), &settings).succeeds();
            files.same_as(&one, STEPS, layout);
        }
        // A checkpoint of an average can be resumed in any layout.
        let middle = one.checkpoint(4).display().to_string();
        let settings = [outer, &["parallel.zero=3", "parallel.shard=2"]].concat();
        let on = run(Simulate(4), root.path(), &format!("{name}-on"), &settings)
            .resume(&middle)
            .succeeds();
        assert_eq!(on.tensors(STEPS), one.tensors(STEPS), "{name}");
    }
    // Without outer momentum, synchronous training can resume from it.
    let middle = RunFiles(root.path().join("mean-one")).checkpoint(4).display().to_string();
    Run::new(Mpirun(2), root.path(), "synchronous", &[]).resume(&middle).succeeds();
}

/// If updates are linear in the gradient, averaging after every step equals a step by the mean
/// gradient.
#[test]
fn averages_at_every_step_are_synchronous_sgd() {
    let root = tempfile::tempdir().unwrap();
    let linear = [
        "optimizer.kind=sgd",
        "optimizer.momentum=0.5",
        "optimizer.grad_clip=0",
        "parallel.virtual_ranks=4",
    ];
    let together = Run::new(Mpirun(4), root.path(), "together", &linear).succeeds();
    let settings = [&linear[..], &["local_sgd.sync_every=1"]].concat();
    let local = Run::new(Mpirun(4), root.path(), "local", &settings).succeeds();
    for (file, key) in [("metrics.jsonl", "loss"), ("eval.jsonl", "loss")] {
        let local = local.numbers(file, key);
        let together = together.numbers(file, key);
        assert_eq!(local.len(), together.len());
        let off = local.iter().zip(&together).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
        assert!(off < 1e-6, "{file}: {off:e}");
    }
}

/// The first outer step starts from the initial parameters θ, and its gradient and momentum are θ
/// minus the mean of the replicas, which a run without an outer step gives.
#[test]
fn the_outer_step_is_nesterovs() {
    let root = tempfile::tempdir().unwrap();
    let values = |name: &str, step: u64, part: usize, settings: &[&str]| -> Vec<f32> {
        let files =
            run(Alone, root.path(), name, &[settings, &["checkpoint.every=2"]].concat()).succeeds();
        let end = format!(", part {part}");
        let tensors = files.tensors(step).into_iter().filter(|(name, _)| name.ends_with(&end));
        tensors.flat_map(|(_, bits)| bits).map(f32::from_bits).collect()
    };
    let start =
        values("start", 2, 0, &["run.steps=2", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]);
    let mean = values("mean", 2, 0, &["run.steps=2"]);
    let outer = ["run.steps=2", "local_sgd.outer_lr=0.7", "local_sgd.outer_momentum=0.9"];
    let stepped = values("outer", 2, 0, &outer);
    // Parts 1 and 2 are the moments of AdamW.
    let momentum = values("momentum", 2, 3, &outer);
    let without = values("without", 2, 0, &["run.steps=2", "local_sgd.outer_lr=0.7"]);
    assert!(start.len() == mean.len() && start.len() == momentum.len() && start != mean);
    for (i, (start, mean)) in start.iter().zip(&mean).enumerate() {
        let close = |a: f32, b: f32| (a - b).abs() <= 1e-6;
        let change = start - mean;
        assert!(close(momentum[i], change), "{i}: {} and not {change}", momentum[i]);
        assert!(close(stepped[i], start - 0.7 * 1.9 * change), "{i}: {}", stepped[i]);
        assert!(close(without[i], start - 0.7 * change), "{i}: {}", without[i]);
    }
}

/// Checkpoints and evaluations that are due between two averages are made at the next one. The last
/// round ends with the run.
#[test]
fn checkpoints_and_evaluations_wait_for_averages() {
    let root = tempfile::tempdir().unwrap();
    let settings =
        ["local_sgd.sync_every=4", "eval.every=3", "checkpoint.every=3", "checkpoint.keep=9"];
    let run = run(Mpirun(2), root.path(), "x", &[&settings[..], &["run.steps=14"]].concat());
    let files = run.succeeds();
    assert_eq!(files.numbers("metrics.jsonl", "step"), (1..=14).map(f64::from).collect::<Vec<_>>());
    assert_eq!(files.numbers("eval.jsonl", "step"), [4.0, 8.0, 12.0, 14.0]);
    for step in [4, 8, 12, 14] {
        assert!(files.checkpoint(step).exists(), "{step}");
    }
}

#[test]
fn replicas_are_averaged_on_gpus_and_offloaded() {
    let root = tempfile::tempdir().unwrap();
    let gpu =
        ["run.device=cuda", "run.steps=3", "device.memory_limit=48MiB", "device.ranks_per_gpu=2"];
    for precision in ["precision.dtype=f32", "precision.dtype=bf16"] {
        let on_gpu = |transport, name: &str, settings: &[&str]| {
            let name = format!("{}-{name}", precision.split_once('=').unwrap().1);
            let run = run(
                transport,
                root.path(),
                &name,
                &[&gpu[..], &OUTER, &[precision], settings].concat(),
            );
            finish(with_simulator(&mut run.command()).env("CUDASIM_HOST_ACCESS", "0")).succeeded();
            run.files()
        };
        let one = on_gpu(Alone, "one", &[]);
        on_gpu(Mpirun(2), "two", &[]).same_as(&one, 3, precision);
        let settings = ["parallel.zero=1", "offload.optimizer=true", "parallel.shard=2"];
        on_gpu(Mpirun(2), "offloaded", &settings).same_as(&one, 3, precision);
    }
}

#[test]
fn an_epoch_is_converted_to_steps() {
    let root = tempfile::tempdir().unwrap();
    let files =
        run(Mpirun(4), root.path(), "epoch", &["local_sgd.sync_every=epoch", "run.steps=2"])
            .succeeds();
    // 62,740 samples, eight per step.
    assert!(
        files.text("config.toml").contains("sync_every = 7843\n"),
        "{}",
        files.text("config.toml")
    );
    assert_eq!(files.steps().len(), 2);
}
