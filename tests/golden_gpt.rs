//! The GPT against PyTorch: logits, loss, every gradient, ten steps of two optimizers.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod common;

use common::{Cut, distance, engine, floats, golden, gradients, ids, micro, numbers, parameters};
use hpctrain::backend::Backend as _;
use hpctrain::backend::cpu::Cpu;
use hpctrain::comm;
use hpctrain::mesh::Mesh;
use hpctrain::nn::gpt::Gpt;
use hpctrain::optim::{Rule, Schedule, Shape};
use hpctrain::parallel::{Hyper, Zero};
use hpctrain::train::Engine;

const ONE: Mesh = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };

fn attribute(group: &hdf5::Group, name: &str) -> f64 {
    group.attr(name).unwrap().read_scalar::<f64>().unwrap()
}

fn size(group: &hdf5::Group, name: &str) -> usize {
    group.attr(name).unwrap().read_scalar::<i64>().unwrap() as usize
}

/// The golden network with its golden parameters on one rank.
fn load(case: &hdf5::Group, bias: bool, rule: Rule, cut: Cut) -> (Engine<Cpu>, Gpt) {
    let [layers, heads, width, context, vocabulary] =
        ["layers", "heads", "width", "context", "vocabulary"].map(|name| size(case, name));
    let gpt = Gpt { layers, heads, width, context, vocabulary, bias, dropout: 0.0 };
    let predictions = (size(case, "batch") * context) as u64;
    let mut engine = engine(&comm::single(), &gpt, ONE, Zero::Zero, rule, cut, predictions);
    let params = case.group("params").unwrap();
    engine
        .sharded
        .restore(|tensor, part, range, out| {
            if part == 0 {
                out.copy_from_slice(&floats(&params, tensor)[range]);
            }
            Ok(())
        })
        .unwrap();
    (engine, gpt)
}

/// Losses and gradient norms of ten steps, and the trained network.
fn train(
    case: &hdf5::Group,
    bias: bool,
    rule: Rule,
    cut: Cut,
    rate: impl Fn(u64) -> f64,
    weight_decay: f32,
    clip: f64,
) -> (Vec<f64>, Vec<f64>, Engine<Cpu>) {
    let (mut engine, gpt) = load(case, bias, rule, cut);
    let (tokens, targets) = (ids(case, "tokens"), ids(case, "targets"));
    let batch = size(case, "batch");
    let per_step = batch * gpt.context;
    let per_micro = per_step / (cut.lanes * cut.micros_per_lane);
    let (mut losses, mut norms) = (vec![], vec![]);
    for step in 0..10u64 {
        let mut at = step as usize * per_step;
        let backend = engine.backend.clone();
        let synced = engine
            .gradients(
                step,
                || {
                    let range = at..at + per_micro;
                    at += per_micro;
                    Ok(micro(&backend, &tokens[range.clone()], &targets[range], gpt.context, 0))
                },
                || 0,
            )
            .unwrap();
        losses.push(synced.loss / per_step as f64);
        norms.push(synced.norm);
        let grad_scale = if synced.norm > clip { clip / (synced.norm + 1e-6) } else { 1.0 } as f32;
        engine.sharded.update(Hyper { lr: rate(step) as f32, weight_decay, step: step + 1, grad_scale }).unwrap();
    }
    (losses, norms, engine)
}

fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g / w - 1.0).abs() < tolerance, "{what} {i}: {g}, PyTorch {w}");
    }
}

/// Every tensor within `tolerance` of the golden one. The gradient of the keys' bias is zero in exact arithmetic
/// (softmax does not see a shift of all scores), which AdamW turns into noise: those rows are left out.
fn same_parameters(case: &hdf5::Group, group: &str, engine: &mut Engine<Cpu>, tolerance: f64) {
    let golden = case.group(group).unwrap();
    for (name, mut got) in parameters(engine) {
        let mut want = numbers(&golden, &name);
        if name.ends_with("c_attn.bias") {
            let d = got.len() / 3;
            got.drain(d..2 * d);
            want.drain(d..2 * d);
        }
        let off = distance(&got, &want);
        assert!(off < tolerance, "{group}/{name}: {off:e}");
    }
}

const CASES: [(&str, bool); 2] = [("bias", true), ("nobias", false)];
const ADAMW: Rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

#[test]
fn logits_loss_and_every_gradient() {
    let file = golden("gpt.h5");
    for (name, bias) in CASES {
        let case = file.group(name).unwrap();
        for recompute in [false, true] {
            let (mut engine, gpt) = load(&case, bias, ADAMW, Cut { recompute, ..Cut::WHOLE });
            let (tokens, targets) = (ids(&case, "tokens"), ids(&case, "targets"));
            let n = size(&case, "batch") * gpt.context;
            let whole = micro(&engine.backend, &tokens[..n], &targets[..n], gpt.context, 0);
            let logits = engine.logits(&whole).unwrap();
            let off = distance(Cpu::all(&logits), &numbers(&case, "logits"));
            assert!(off < 2e-6, "{name}: logits {off:e}");

            let mut whole = Some(whole);
            let synced = engine.gradients(0, || Ok(whole.take().unwrap()), || 0).unwrap();
            close(&[synced.loss / n as f64], &numbers(&case, "loss"), 1e-6, "loss");
            let golden = case.group("grads").unwrap();
            let found = gradients(&engine);
            assert_eq!(found.len(), golden.len() as usize);
            for (tensor, got) in found {
                let off = distance(&got, &numbers(&golden, &tensor));
                assert!(off < 1e-5, "{name}/{tensor}: {off:e}");
            }
        }
    }
}

#[test]
fn ten_steps_of_adamw() {
    let file = golden("gpt.h5");
    for (name, bias) in CASES {
        let case = file.group(name).unwrap();
        let golden = case.group("adamw").unwrap();
        let schedule = Schedule {
            shape: Shape::Cosine,
            peak: attribute(&golden, "lr"),
            min: attribute(&golden, "min_lr"),
            warmup: size(&golden, "warmup_steps") as u64,
            total: size(&golden, "total_steps") as u64,
            decay: 0,
        };
        let rates: Vec<f64> = (0..10).map(|step| schedule.rate(step)).collect();
        close(&rates, &numbers(&golden, "lr"), 1e-12, "learning rate");
        // In one piece, as accumulated micro-batches, and as lanes.
        for (lanes, micros_per_lane) in [(1, 1), (1, 5), (5, 1)] {
            let cut = Cut { lanes, micros_per_lane, recompute: false };
            let (decay, clip) = (attribute(&golden, "weight_decay") as f32, attribute(&golden, "grad_clip"));
            let (losses, norms, mut engine) = train(&case, bias, ADAMW, cut, |s| schedule.rate(s), decay, clip);
            close(&losses, &numbers(&golden, "losses"), 1e-5, "loss");
            close(&norms, &numbers(&golden, "grad_norms"), 1e-4, "norm");
            // AdamW divides a gradient by its own size, so rounding in tiny elements shows: the same ten steps with
            // PyTorch's f32 gradients end 8e-5 from its f64 ones, with f64 gradients and f32 updates 2e-7.
            same_parameters(&case, "adamw/params", &mut engine, 1e-4);
        }
    }
}

#[test]
fn ten_steps_of_nesterov() {
    let file = golden("gpt.h5");
    for (name, bias) in CASES {
        let case = file.group(name).unwrap();
        let golden = case.group("sgd").unwrap();
        let rule = Rule::Sgd { momentum: attribute(&golden, "momentum") as f32, nesterov: true };
        let rate = attribute(&golden, "lr");
        let decay = attribute(&golden, "weight_decay") as f32;
        let (losses, _, mut engine) = train(&case, bias, rule, Cut::WHOLE, |_| rate, decay, f64::INFINITY);
        close(&losses, &numbers(&golden, "losses"), 1e-5, "loss");
        same_parameters(&case, "sgd/params", &mut engine, 1e-5);
    }
}
