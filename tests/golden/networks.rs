//! Every network against PyTorch: logits, loss, every gradient, ten steps of two optimizers, on
//! every device.

use hdf5::types::FixedAscii;
use hpctrain::backend::Kernels;
use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::cuda::{Arithmetic, Cuda, Device, Precision};
use hpctrain::comm;
use hpctrain::engine::Engine;
use hpctrain::mesh::Mesh;
use hpctrain::nn::gpt::Gpt;
use hpctrain::nn::llama::Llama;
use hpctrain::nn::loss::Loss;
use hpctrain::nn::{FrequencyScaling, Network};
use hpctrain::optim::{LrDecay, Schedule, UpdateRule};
use hpctrain::parallel::{ControlFlags, Hyper, Zero};

use hpctrain_testkit::simulator::under;
use hpctrain_testkit::{
    Cut, distance, engine_on, floats, golden, gradients, ids, micro, numbers, parameters,
};

const ONE: Mesh = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };

fn attribute(group: &hdf5::Group, name: &str) -> f64 {
    group.attr(name).unwrap().read_scalar::<f64>().unwrap()
}

fn size(group: &hdf5::Group, name: &str) -> usize {
    group.attr(name).unwrap().read_scalar::<i64>().unwrap() as usize
}

fn flag(group: &hdf5::Group, name: &str) -> bool {
    group.attr(name).unwrap().read_scalar::<bool>().unwrap()
}

/// The golden networks: file, group.
const CASES: [(&str, &str); 6] = [
    ("gpt.h5", "bias"),
    ("gpt.h5", "nobias"),
    ("llama.h5", "grouped"),
    ("llama.h5", "tied"),
    ("llama.h5", "linear"),
    ("llama.h5", "llama3"),
];

/// Returns the RoPE scaling of a Llama.
fn scaling(case: &hdf5::Group) -> FrequencyScaling {
    match &case.attr("rope_type").unwrap().read_scalar::<FixedAscii<16>>().unwrap()[..] {
        "default" => FrequencyScaling::Unscaled,
        "linear" => FrequencyScaling::Linear { factor: attribute(case, "factor") },
        "llama3" => FrequencyScaling::Llama3 {
            factor: attribute(case, "factor"),
            low_freq_factor: attribute(case, "low_freq_factor"),
            high_freq_factor: attribute(case, "high_freq_factor"),
            original_max_position_embeddings: size(case, "original_max_position_embeddings"),
        },
        other => panic!("{other}"),
    }
}

/// Runs a test on every golden network.
fn each_case(test: impl Fn(&str, &hdf5::Group, &Network)) {
    for (file, name) in CASES {
        let file_of_case = golden(file);
        let case = file_of_case.group(name).unwrap();
        let [layers, heads, width, context, vocabulary] =
            ["layers", "heads", "width", "context", "vocabulary"].map(|name| size(&case, name));
        let network = if file == "gpt.h5" {
            Network::Gpt(Gpt {
                layers,
                heads,
                width,
                context,
                vocabulary,
                bias: name == "bias",
                dropout: 0.0,
            })
        } else {
            Network::Llama(Llama {
                layers,
                heads,
                kv_heads: size(&case, "kv_heads"),
                width,
                hidden: size(&case, "hidden"),
                context,
                vocabulary,
                rope_theta: attribute(&case, "rope_theta"),
                rope_scaling: scaling(&case),
                epsilon: attribute(&case, "epsilon") as f32,
                tied: flag(&case, "tied"),
                dropout: 0.0,
            })
        };
        test(&format!("{file}/{name}"), &case, &network);
    }
}

/// Returns a network with its golden parameters on one rank.
fn load<B: Kernels>(
    b: &B,
    case: &hdf5::Group,
    network: &Network,
    rule: UpdateRule,
    cut: Cut,
) -> Engine<B> {
    let predictions = (size(case, "batch") * network.context()) as u64;
    let mut engine = engine_on(
        b.clone(),
        &comm::single(),
        network,
        Loss::cross_entropy(),
        ONE,
        Zero::Zero,
        rule,
        cut,
        predictions,
    );
    let params = case.group("params").unwrap();
    engine
        .model
        .sharded
        .restore(|tensor, part, _, range, out| {
            if part == 0 {
                out.copy_from_slice(&floats(&params, tensor)[range]);
            }
            Ok(())
        })
        .unwrap();
    engine
}

/// Returns the losses and gradient norms of ten steps, and the trained network.
#[expect(clippy::too_many_arguments, reason = "one for each property of a training")]
fn train<B: Kernels>(
    b: &B,
    case: &hdf5::Group,
    network: &Network,
    rule: UpdateRule,
    cut: Cut,
    rate: impl Fn(u64) -> f64,
    weight_decay: f32,
    clip: f64,
) -> (Vec<f64>, Vec<f64>, Engine<B>) {
    let mut engine = load(b, case, network, rule, cut);
    let tokens = ids(case, "tokens");
    let targets = ids(case, "targets");
    let batch = size(case, "batch");
    let per_step = batch * network.context();
    let per_micro = per_step / (cut.virtual_ranks * cut.micros_per_virtual_rank);
    let mut losses = vec![];
    let mut norms = vec![];
    for step in 0..10u64 {
        let mut at = step as usize * per_step;
        let backend = engine.model.backend.clone();
        let synced = engine
            .gradients(
                step,
                || {
                    let range = at..at + per_micro;
                    at += per_micro;
                    Ok(micro(
                        &backend,
                        &tokens[range.clone()],
                        &targets[range],
                        network.context(),
                        0,
                    ))
                },
                ControlFlags::empty,
            )
            .unwrap();
        losses.push(synced.loss / per_step as f64);
        norms.push(synced.norm);
        let grad_scale = if synced.norm > clip { clip / (synced.norm + 1e-6) } else { 1.0 } as f32;
        engine
            .model
            .sharded
            .update(Hyper { lr: rate(step) as f32, weight_decay, step: step + 1, grad_scale })
            .unwrap();
    }
    (losses, norms, engine)
}

fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g / w - 1.0).abs() < tolerance, "{what} {i}: {g}, PyTorch {w}");
    }
}

/// Checks that every tensor is within `tolerance` of the golden one. The gradient of the keys' bias
/// is zero in exact arithmetic (softmax is invariant to a shift of all scores), and AdamW amplifies
/// its rounding noise: those rows are skipped.
fn same_parameters<B: Kernels>(
    case: &hdf5::Group,
    group: &str,
    engine: &mut Engine<B>,
    tolerance: f64,
) {
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

const ADAMW: UpdateRule = UpdateRule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

/// The tolerance of a device against PyTorch's f64.
#[derive(Clone, Copy)]
struct Within {
    logits: f64,
    loss: f64,
    gradients: f64,
    losses: f64,
    norms: f64,
    /// The tolerance of the final parameters. AdamW divides a gradient by its own magnitude, which
    /// amplifies rounding in tiny elements: the same ten steps with PyTorch's f32 gradients end
    /// 8e-5 from its f64 ones, with f64 gradients and f32 updates 2e-7.
    adamw: f64,
    sgd: f64,
}

const F32: Within = Within {
    logits: 2e-6,
    loss: 1e-6,
    gradients: 1e-5,
    losses: 1e-5,
    norms: 1e-4,
    adamw: 1e-4,
    sgd: 1e-5,
};
/// The norm of the tied Llama's sixth step is ten times as sensitive as the others: random relative
/// changes of the weights by 2⁻⁹ change it by 1.2 % in f64.
const BF16: Within = Within {
    logits: 2e-2,
    loss: 2e-3,
    gradients: 4e-2,
    losses: 2e-2,
    norms: 4e-2,
    adamw: 2e-2,
    sgd: 2e-2,
};

fn logits_loss_and_every_gradient<B: Kernels>(b: &B, within: Within) {
    each_case(|name, case, network| {
        for recompute in [false, true] {
            let mut engine = load(b, case, network, ADAMW, Cut { recompute, ..Cut::WHOLE });
            let tokens = ids(case, "tokens");
            let targets = ids(case, "targets");
            let n = size(case, "batch") * network.context();
            let whole =
                micro(&engine.model.backend, &tokens[..n], &targets[..n], network.context(), 0);
            let logits = engine.model.output(&whole).unwrap().unwrap();
            let host = engine.model.download(&logits, n).unwrap();
            let off = distance(&host, &numbers(case, "logits"));
            assert!(off < within.logits, "{name}: logits {off:e}");

            let mut whole = Some(whole);
            let synced =
                engine.gradients(0, || Ok(whole.take().unwrap()), ControlFlags::empty).unwrap();
            close(&[synced.loss / n as f64], &numbers(case, "loss"), within.loss, "loss");
            let golden = case.group("grads").unwrap();
            let found = gradients(&engine);
            assert_eq!(found.len(), golden.len() as usize);
            for (tensor, got) in found {
                let off = distance(&got, &numbers(&golden, &tensor));
                assert!(off < within.gradients, "{name}/{tensor}: {off:e}");
            }
        }
    });
}

fn ten_steps_of_adamw<B: Kernels>(b: &B, within: Within) {
    each_case(|_, case, network| {
        let golden = case.group("adamw").unwrap();
        let schedule = Schedule {
            shape: LrDecay::Cosine,
            peak: attribute(&golden, "lr"),
            min: attribute(&golden, "min_lr"),
            warmup: size(&golden, "warmup_steps") as u64,
            // PyTorch's schedule would reach the minimum one step after the last.
            total: size(&golden, "total_steps") as u64 + 1,
            decay: 0,
        };
        let rates: Vec<f64> = (0..10).map(|step| schedule.rate(step)).collect();
        close(&rates, &numbers(&golden, "lr"), 1e-12, "learning rate");
        // As one micro-batch, as accumulated micro-batches, and as virtual ranks.
        for (virtual_ranks, micros_per_virtual_rank) in [(1, 1), (1, 5), (5, 1)] {
            let cut = Cut { virtual_ranks, micros_per_virtual_rank, ..Cut::WHOLE };
            let decay = attribute(&golden, "weight_decay") as f32;
            let clip = attribute(&golden, "grad_clip");
            let (losses, norms, mut engine) =
                train(b, case, network, ADAMW, cut, |s| schedule.rate(s), decay, clip);
            close(&losses, &numbers(&golden, "losses"), within.losses, "loss");
            close(&norms, &numbers(&golden, "grad_norms"), within.norms, "norm");
            same_parameters(case, "adamw/params", &mut engine, within.adamw);
        }
    });
}

fn ten_steps_of_nesterov<B: Kernels>(b: &B, within: Within) {
    each_case(|_, case, network| {
        let golden = case.group("sgd").unwrap();
        let rule =
            UpdateRule::Sgd { momentum: attribute(&golden, "momentum") as f32, nesterov: true };
        let rate = attribute(&golden, "lr");
        let decay = attribute(&golden, "weight_decay") as f32;
        let (losses, _, mut engine) =
            train(b, case, network, rule, Cut::WHOLE, |_| rate, decay, f64::INFINITY);
        close(&losses, &numbers(&golden, "losses"), within.losses, "loss");
        same_parameters(case, "sgd/params", &mut engine, within.sgd);
    });
}

#[test]
fn on_the_cpu() {
    let cpu = Cpu::new(2);
    logits_loss_and_every_gradient(&cpu, F32);
    ten_steps_of_adamw(&cpu, F32);
    ten_steps_of_nesterov(&cpu, F32);
}

/// Returns a GPU that computes in `precision`.
fn gpu(precision: Precision) -> Cuda {
    Cuda::new(&Device::open(0).unwrap(), 128 << 20, precision).unwrap()
}

#[test]
fn on_a_gpu_in_f32() {
    under(&[&[], &[("CUDASIM_STREAMS", "lazy"), ("CUDASIM_ORDER", "reverse")]], || {
        let gpu = gpu(Precision::F32(Arithmetic::Full));
        logits_loss_and_every_gradient(&gpu, F32);
        ten_steps_of_adamw(&gpu, F32);
        ten_steps_of_nesterov(&gpu, F32);
    });
}

#[test]
fn on_a_gpu_in_bf16() {
    under(&[&[]], || {
        let gpu = gpu(Precision::Bf16);
        logits_loss_and_every_gradient(&gpu, BF16);
        ten_steps_of_adamw(&gpu, BF16);
        ten_steps_of_nesterov(&gpu, BF16);
    });
}
