//! `optimizer.ema`: the EMA of the parameters is saved, evaluated and restored, and does not change
//! the training.

use std::collections::BTreeMap;
use std::path::Path;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles, json};
use hpctrain_testkit::simulator::with_simulator;

const EMA: &str = "optimizer.ema=0.75";
const STEPS: u64 = 6;

fn run(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> Run {
    let settings = [&["parallel.virtual_ranks=4", "eval.every=3"], settings].concat();
    Run::new(transport, root, name, &settings)
}

/// Returns the values of a part of every tensor of a checkpoint.
fn part(files: &RunFiles, step: u64, part: usize) -> BTreeMap<String, Vec<f32>> {
    let end = format!(", part {part}");
    let of = files.tensors(step).into_iter().filter_map(|(name, bits)| {
        Some((name.strip_suffix(&end)?.to_string(), bits.into_iter().map(f32::from_bits).collect()))
    });
    of.collect()
}

#[test]
fn the_ema_is_correct_and_used_in_evaluations() {
    let root = tempfile::tempdir().unwrap();
    let every = ["checkpoint.every=1", "checkpoint.keep=9"];
    let plain = run(Alone, root.path(), "plain", &every).succeeds();
    let averaged = run(Alone, root.path(), "averaged", &[&every[..], &[EMA]].concat()).succeeds();
    assert_eq!(plain.steps(), averaged.steps(), "training");
    assert_ne!(plain.evaluations(), averaged.evaluations());
    // Parts 1 and 2 are the moments of AdamW.
    let mut want = part(&averaged, 1, 3);
    for step in 2..=STEPS {
        for (name, parameters) in part(&plain, step, 0) {
            for (average, parameter) in want.get_mut(&name).unwrap().iter_mut().zip(parameters) {
                *average += 0.25 * (parameter - *average);
            }
        }
        assert_eq!(part(&averaged, step, 3), want, "step {step}");
    }
    // An evaluator measures the same as the run does inline.
    let alone =
        run(Mpirun(2), root.path(), "alone", &[EMA, "eval.inline=false", "checkpoint.every=3"])
            .succeeds();
    finish(program(["eval", "--policy", "every", "--run"]).arg(&alone.0)).succeeded();
    assert_eq!(alone.numbers("eval.jsonl", "loss"), averaged.numbers("eval.jsonl", "loss"));
    // Another run that starts from this one's weights starts from the EMA.
    let from = averaged.checkpoint(STEPS).display().to_string();
    let mut begun = run(
        Alone,
        root.path(),
        "begun",
        &["run.steps=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"],
    );
    begun.settings.push(EMA.into());
    finish(begun.resume(&from).command().arg("--weights-only")).succeeded();
    assert_eq!(part(&RunFiles(root.path().join("begun")), 1, 0), want);
}

#[test]
fn the_ema_is_the_same_in_every_layout_and_is_resumed() {
    let root = tempfile::tempdir().unwrap();
    let one = run(Alone, root.path(), "one", &[EMA, "checkpoint.every=3"]).succeeds();
    for (i, (transport, layout)) in [
        (Mpirun(2), "parallel.zero=0"),
        (Mpirun(2), "parallel.zero=1"),
        (Mpirun(2), "parallel.zero=2"),
        (Mpirun(4), "parallel.zero=3"),
        (Simulate(4), "parallel.zero=3 parallel.shard=2 parallel.prefetch=0"),
        (Mpirun(2), "parallel.pipeline=2 batch.micro=2"),
        (Mpirun(4), "parallel.pipeline=2 parallel.zero=3 batch.micro=2"),
    ]
    .into_iter()
    .enumerate()
    {
        let settings: Vec<&str> = [EMA].into_iter().chain(layout.split(' ')).collect();
        let files = run(transport, root.path(), &format!("layout-{i}"), &settings).succeeds();
        files.same_as(&one, STEPS, layout);
    }
    let middle = one.checkpoint(3).display().to_string();
    let on =
        run(Mpirun(2), root.path(), "on", &[EMA, "parallel.zero=3"]).resume(&middle).succeeds();
    assert_eq!(on.tensors(STEPS), one.tensors(STEPS));
    // With a fresh optimizer the EMA restarts at the parameters.
    let fresh = run(
        Alone,
        root.path(),
        "fresh",
        &[EMA, "run.steps=4", "optimizer.lr=1e-30", "optimizer.weight_decay=0"],
    );
    finish(fresh.resume(&middle).command().arg("--skip-optimizer")).succeeded();
    let fresh = RunFiles(root.path().join("fresh"));
    assert_eq!(part(&fresh, 4, 3), part(&one, 3, 0));
}

#[test]
fn the_ema_works_on_gpus_and_offloaded() {
    let root = tempfile::tempdir().unwrap();
    let gpu =
        ["run.device=cuda", "run.steps=3", "device.memory_limit=48MiB", "device.ranks_per_gpu=2"];
    for precision in ["precision.dtype=f32", "precision.dtype=bf16"] {
        let on_gpu = |transport, name: &str, settings: &[&str]| {
            let name = format!("{}-{name}", precision.rsplit('=').next().unwrap());
            let run = run(
                transport,
                root.path(),
                &name,
                &[&gpu[..], &[EMA, precision], settings].concat(),
            );
            finish(with_simulator(&mut run.command()).env("CUDASIM_HOST_ACCESS", "0")).succeeded();
            run.files()
        };
        let one = on_gpu(Alone, "one", &[]);
        on_gpu(Mpirun(2), "sharded", &["parallel.zero=3"]).same_as(&one, 3, precision);
        on_gpu(Mpirun(2), "stages", &["parallel.pipeline=2", "batch.micro=2"])
            .same_as(&one, 3, precision);
        on_gpu(Mpirun(2), "offloaded", &["parallel.zero=1", "offload.optimizer=true"])
            .same_as(&one, 3, precision);
        let peaks = json(&one.path("run.json"))["peak_bytes"].clone();
        assert!(peaks["optimizer"].as_u64().unwrap() > 0, "{peaks}");
    }
}
