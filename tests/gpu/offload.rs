//! `offload.optimizer`, `offload.params` and `offload.activations` on GPUs, in their simulator:
//! offloading fp32 master weights, moments, parameters and block inputs changes no bit.

use std::path::Path;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::{Run, RunFiles};
use hpctrain_testkit::simulator::{Settings, with_simulator};

const STEPS: u64 = 4;

/// A small run with gradient clipping and weight decay, which saves a checkpoint halfway.
const SMALLER: [&str; 13] = [
    "run.device=cuda",
    "comm.transport=host-staged",
    "run.steps=4",
    "model.width=16",
    "model.context=8",
    "parallel.virtual_ranks=2",
    "optimizer.grad_clip=0.5",
    "optimizer.weight_decay=0.1",
    "eval.samples=8",
    "checkpoint.every=2",
    "checkpoint.keep=5",
    "device.memory_limit=48MiB",
    "device.ranks_per_gpu=2",
];

const OFFLOAD: &str = "offload.optimizer=true";

fn command(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> Run {
    Run::new(transport, root, name, &[&SMALLER, settings].concat())
}

#[track_caller]
fn succeeds(run: &Run, sim: Settings) -> RunFiles {
    finish(with_simulator(&mut run.command()).envs(sim.iter().copied())).succeeded();
    run.files()
}

/// Runs every ZeRO stage on one rank and two, with changing settings of the simulator that reveal
/// mistakes.
fn every_stage(precision: &str, sims: [Settings; 4]) {
    let root = tempfile::tempdir().unwrap();
    let here = succeeds(&command(Alone, root.path(), "here", &[precision]), &[]);
    let stages = (0..4).map(|zero| format!("parallel.zero={zero}")).zip(sims);
    let central = [
        ("parallel.storage=central".into(), sims[0]),
        // The variables are in the host memory of the owner.
        ("parallel.storage=central parallel.zero=3 offload.params=true".into(), sims[1]),
    ];
    for (layout, sim) in stages.chain(central) {
        for transport in [Alone, Mpirun(2)] {
            let name = format!("{transport:?}-{layout}");
            let keys: Vec<&str> =
                [precision, OFFLOAD].into_iter().chain(layout.split(' ')).collect();
            let there = succeeds(&command(transport, root.path(), &name, &keys), sim);
            there.same_as(
                &here,
                STEPS,
                &format!("{precision}, {layout} on {transport:?}, {sim:?}"),
            );
            assert_eq!(there.tensors(2), here.tensors(2), "{name}: the checkpoint before the last");
            // The device did not hold the optimizer state.
            let peaks = hpctrain_testkit::runs::json(&there.path("run.json"))["peak_bytes"].clone();
            assert!(
                peaks["optimizer"] == 0 && peaks["offloaded"].as_u64().unwrap() > 0,
                "{name}: {peaks}"
            );
        }
    }
}

const LAZY: (&str, &str) = ("CUDASIM_STREAMS", "lazy");
const REVERSE: (&str, &str) = ("CUDASIM_ORDER", "reverse");
/// Host code cannot access device memory.
const NO_HOST_ACCESS: (&str, &str) = ("CUDASIM_HOST_ACCESS", "0");
const CHECK: (&str, &str) = ("CUDASIM_CHECK", "1");

#[test]
fn the_host_updates_as_the_device_does_in_f32() {
    every_stage("precision.dtype=f32", [&[LAZY, NO_HOST_ACCESS], &[CHECK], &[], &[LAZY, REVERSE]]);
}

#[test]
fn the_host_updates_as_the_device_does_in_bf16() {
    every_stage("precision.dtype=bf16", [&[CHECK], &[LAZY, NO_HOST_ACCESS], &[LAZY, REVERSE], &[]]);
}

#[test]
fn every_rule_updates_on_the_host_as_well() {
    let root = tempfile::tempdir().unwrap();
    for kind in ["sgd", "adam", "adagrad", "rmsprop", "lamb", "lars", "lion"] {
        let own = format!("optimizer.kind={kind}");
        let settings = [
            &own[..],
            if kind == "sgd" { "optimizer.nesterov=true" } else { "optimizer.momentum=0.5" },
        ];
        let here = succeeds(&command(Alone, root.path(), &format!("{kind}-here"), &settings), &[]);
        let settings = [&settings[..], &[OFFLOAD, "parallel.zero=1"]].concat();
        let there = succeeds(
            &command(Mpirun(2), root.path(), &format!("{kind}-there"), &settings),
            &[LAZY],
        );
        there.same_as(&here, STEPS, kind);
    }
}

/// Checkpoints do not depend on where the state was.
#[test]
fn a_run_goes_on_with_and_without() {
    let root = tempfile::tempdir().unwrap();
    for precision in ["precision.dtype=f32", "precision.dtype=bf16"] {
        let name = |what: &str| format!("{}-{what}", precision.rsplit('=').next().unwrap());
        let whole = succeeds(
            &command(
                Mpirun(2),
                root.path(),
                &name("whole"),
                &[precision, OFFLOAD, "parallel.zero=3"],
            ),
            &[],
        );
        for (what, transport, settings) in [
            ("with", Mpirun(2), &["offload.optimizer=true", "parallel.zero=2"][..]),
            ("without", Alone, &["offload.optimizer=false"]),
        ] {
            let run =
                command(transport, root.path(), &name(what), &[&[precision], settings].concat());
            let files = succeeds(&run.resume(whole.checkpoint(2).to_str().unwrap()), &[LAZY]);
            assert_eq!(files.tensors(STEPS), whole.tensors(STEPS), "{precision} {what}");
            let all = whole.steps();
            let mine = files.steps();
            assert_eq!(mine, all[all.len() - mine.len()..], "{precision} {what}");
        }
    }
}

/// Block inputs are offloaded and return with the same bits, in every order of work, with the
/// estimated memory.
#[test]
fn inputs_of_blocks_come_back_from_the_host() {
    const AWAY: &str = "offload.activations=true";
    let root = tempfile::tempdir().unwrap();
    let base = ["model.layers=4", "model.dropout=0.1", "batch.micro=2", "eval.batch=1"];
    for precision in ["precision.dtype=f32", "precision.dtype=bf16"] {
        let name = |what: &str| format!("{}-{what}", precision.rsplit('=').next().unwrap());
        let with = |transport, what: &str, settings: &[&str], sim| {
            let settings = [&base[..], &[precision], settings].concat();
            let files = succeeds(&command(transport, root.path(), &name(what), &settings), sim);
            let card = hpctrain_testkit::runs::json(&files.path("run.json"));
            (files, card)
        };
        let (here, _) = with(Alone, "here", &[], &[]);
        let (_, again) = with(Alone, "again", &["parallel.recompute=true"], &[]);
        let away = ["parallel.recompute=true", AWAY];
        for (what, transport, layout, sim) in [
            ("alone", Alone, &["parallel.zero=0"][..], &[LAZY, NO_HOST_ACCESS][..]),
            ("checked", Alone, &["offload.optimizer=true"], &[CHECK]),
            ("shards", Mpirun(2), &["parallel.zero=3", "offload.optimizer=true"], &[LAZY, REVERSE]),
            ("stages", Mpirun(2), &["parallel.pipeline=2"], &[LAZY, NO_HOST_ACCESS]),
            ("late", Mpirun(2), &["parallel.pipeline=2", "parallel.schedule=zero-bubble"], &[LAZY]),
        ] {
            let (files, card) = with(transport, what, &[&away, layout].concat(), sim);
            files.same_as(&here, STEPS, &format!("{precision}, {what}, {sim:?}"));
            for stage in card["stages"].as_array().unwrap() {
                let [promised, taken] = ["estimated_bytes", "peak_bytes"]
                    .map(|key| stage[key]["offloaded"].as_u64().unwrap());
                assert!(
                    taken > 0 && promised == taken,
                    "{precision} {what}: {promised} promised, {taken} taken"
                );
            }
            let activations =
                |card: &serde_json::Value| card["peak_bytes"]["activations"].as_u64().unwrap();
            assert!(
                what != "alone" || activations(&card) < activations(&again),
                "{precision}: {card}"
            );
        }
    }
}

/// Parameters that only the host holds, on one rank and sharded over two, in every order of work.
#[test]
fn parameters_come_from_the_host_for_their_turn() {
    const AWAY: [&str; 3] = ["parallel.zero=3", OFFLOAD, "offload.params=true"];
    let root = tempfile::tempdir().unwrap();
    for precision in ["precision.dtype=f32", "precision.dtype=bf16"] {
        let name = |what: &str| format!("{}-{what}", precision.rsplit('=').next().unwrap());
        let base = [precision, "optimizer.ema=0.9", "batch.micro=2"];
        let with = |transport, what: &str, settings: &[&str], sim| {
            succeeds(
                &command(transport, root.path(), &name(what), &[&base[..], settings].concat()),
                sim,
            )
        };
        let here = with(Alone, "here", &[], &[]);
        for (what, transport, more, sim) in [
            ("alone", Alone, &["parallel.prefetch=1"][..], &[LAZY, NO_HOST_ACCESS][..]),
            ("late", Alone, &["parallel.prefetch=0"], &[LAZY, REVERSE]),
            ("early", Alone, &["parallel.prefetch=3"], &[CHECK]),
            ("shards", Mpirun(2), &["parallel.recompute=true"], &[LAZY]),
            ("stages", Mpirun(2), &["parallel.pipeline=2"], &[LAZY, NO_HOST_ACCESS]),
        ] {
            let files = with(transport, what, &[&AWAY[..], more].concat(), sim);
            files.same_as(&here, STEPS, &format!("{precision}, {what}, {sim:?}"));
            assert_eq!(files.tensors(2), here.tensors(2), "{what}: the checkpoint before the last");
        }
        let peak = |what: &str| {
            let card = hpctrain_testkit::runs::json(&root.path().join(name(what)).join("run.json"));
            card["peak_bytes"]["parameters"].as_u64().unwrap()
        };
        assert!(peak("alone") < peak("here"), "{precision}: {} of {}", peak("alone"), peak("here"));
    }
}

/// Parts of gradients that are reduced after each micro-batch are added on the device, and their sum
/// goes to the host.
#[test]
fn sums_of_micro_batches_go_to_the_host() {
    let root = tempfile::tempdir().unwrap();
    let base = [
        "precision.dtype=bf16",
        "parallel.virtual_ranks=8",
        "batch.global=8",
        "batch.micro=1",
        "device.ranks_per_gpu=4",
    ];
    let with = |transport, what: &str, settings: &[&str], sim| {
        let settings = [&base[..], settings].concat();
        succeeds(&command(transport, root.path(), what, &settings), sim)
    };
    let here = with(Alone, "here", &[], &[]);
    const MICRO: &str = "parallel.reduce=micro";
    for (what, ranks, more, sim) in [
        ("one", 2, &["parallel.zero=1", OFFLOAD][..], &[LAZY, NO_HOST_ACCESS][..]),
        ("two", 4, &["parallel.zero=2", "parallel.shard=2", OFFLOAD], &[CHECK]),
        ("three", 2, &["parallel.zero=3", OFFLOAD, "offload.params=true"], &[LAZY, REVERSE]),
        (
            "hybrid",
            4,
            &["parallel.zero=3", "parallel.shard=2", OFFLOAD, "offload.params=true"],
            &[LAZY],
        ),
        (
            "stages",
            4,
            &["parallel.zero=3", "parallel.pipeline=2", OFFLOAD, "offload.params=true"],
            &[],
        ),
    ] {
        let files = with(Mpirun(ranks), what, &[more, &[MICRO]].concat(), sim);
        files.same_as(&here, STEPS, what);
        let card = hpctrain_testkit::runs::json(&files.path("run.json"));
        assert_eq!(card["reduce"], "micro", "{what}");
        let bytes = |kind: &str, what: &str| card["stages"][0][kind][what].as_f64().unwrap();
        let [estimated, taken] =
            ["estimated_bytes", "peak_bytes"].map(|kind| bytes(kind, "gradients"));
        println!("{what}: gradients {estimated} estimated, {taken} taken");
    }
}
