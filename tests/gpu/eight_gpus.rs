//! Hybrid sharding with tensor parallelism on eight simulated GPUs over NCCL. What a step requests is held to the formulae of docs/parallelism.md.

use hpctrain_testkit::launch::Transport::Simulate;
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::{Run, RunFiles, json};
use hpctrain_testkit::simulator::with_simulator;

/// GPT-2's shape, small: 12 blocks, 12 heads and a tied head.
const LAYERS: f64 = 12.0;
const WIDTH: f64 = 48.0;
const CONTEXT: f64 = 16.0;

/// Shards, replicas and tensor-parallel ranks.
const AXES: f64 = 2.0;

/// Trains six steps on eight simulated GPUs. Messages under way at the end of a step count in it or
/// in the next one, which changes the mean of several steps little.
fn trains_on_eight(root: &std::path::Path, name: &str, more: &[&str]) -> RunFiles {
    let settings = [
        "run.device=cuda",
        "comm.transport=nccl",
        "comm.algorithm=halving-doubling",
        "model.layers=12",
        "model.heads=12",
        "model.width=48",
        "model.context=16",
        "model.vocabulary=512",
        "parallel.zero=2",
        "parallel.shard=2",
        "parallel.replica=2",
        "parallel.tensor=2",
        "batch.global=8",
        "run.steps=6",
        "eval.samples=2",
        "device.memory_limit=256MiB",
    ];
    let run = Run::new(Simulate(8), root, name, &[&settings, more].concat());
    finish(with_simulator(&mut run.command()).env("CUDASIM_DEVICES", "8")).succeeded();
    run.files()
}

#[test]
fn a_step_on_eight_gpus_requests_what_the_formulae_say() {
    let root = tempfile::tempdir().unwrap();
    let files = trains_on_eight(root.path(), "eight", &[]);
    let card = json(&files.path("run.json"));
    let [launches, host_waits, messages, sent] =
        ["launches", "host_waits", "messages", "sent_bytes"]
            .map(|key| card["per_step"][key].as_f64().unwrap());

    // The host waits once, at the end of the step.
    assert_eq!(host_waits, 1.0);
    // Some 40 for the forward and backward of each block.
    assert!((30.0 * LAYERS..60.0 * LAYERS).contains(&launches), "{launches} launches");

    // Norms and positions are on all tensor-parallel ranks, everything else is divided.
    let whole = (2.0 * LAYERS + 1.0) * WIDTH + CONTEXT * WIDTH;
    let parameters = (card["parameters"].as_f64().unwrap() - whole) / AXES + whole;
    let part = (AXES - 1.0) / AXES;
    let gradients = part * 4.0 * parameters + 2.0 * part * 4.0 * parameters / AXES;
    let gathered = part * 2.0 * parameters;
    // One micro-batch of two samples; a sum in both directions after attention and MLP, and one for
    // the embedding and the head.
    let rows = 2.0 * CONTEXT;
    let sums = 4.0 * LAYERS + 2.0;
    let activations = sums * rows * WIDTH * 4.0 * 2.0 * part;
    let bytes = gradients + gathered + activations;
    assert!((sent / bytes - 1.0).abs() < 0.04, "{sent} bytes sent, {bytes} by the formulae");

    // Per unit a reduce-scatter, an all-gather and an all-reduce, which has two messages; the
    // gradients of a unit's norms are summed over tensor-parallel ranks.
    let units = LAYERS + 2.0;
    let collectives = 4.0 * units + sums;
    let of_collectives = (1.0 + 1.0 + 2.0 + 2.0) * units + 2.0 * sums;
    // Debug builds compare each collective with a neighbour's first.
    let compared = if cfg!(debug_assertions) { collectives } else { 0.0 };
    let counted = of_collectives + compared;
    assert!(
        (messages - counted).abs() < 0.06 * counted,
        "{messages} messages, {counted} by the formulae"
    );

    // Gradients in bf16 halve the bytes of their sums. Rounded sums change the curve little.
    let bf16 = trains_on_eight(root.path(), "bf16", &["comm.dtype=bf16"]);
    let rounded = json(&bf16.path("run.json"))["per_step"]["sent_bytes"].as_f64().unwrap();
    let saved = sent - rounded;
    assert!((saved / (gradients / 2.0) - 1.0).abs() < 0.05, "{saved} of {gradients} bytes saved");
    let curve = |files: &RunFiles| files.numbers("metrics.jsonl", "loss");
    for (full, rounded) in curve(&files).iter().zip(curve(&bf16)) {
        assert!((full - rounded).abs() < 1e-3 * full, "{full} in f32, {rounded} in bf16");
    }
    assert_ne!(curve(&files), curve(&bf16), "nothing was rounded");

    // The loss curve is that of host-staged messages.
    let staged = trains_on_eight(root.path(), "staged", &["comm.transport=host-staged"]);
    files.same_as(&staged, 6, "NCCL and host-staged messages");
    let waits = json(&staged.path("run.json"))["per_step"]["host_waits"].as_f64().unwrap();
    assert!(waits > collectives, "{waits} waits for {collectives} host-staged collectives");
}
