//! Layer-list models against PyTorch: outputs, losses, metrics and every gradient, on every device.

use std::ops::Range;

use hdf5::types::FixedAscii;
use hpctrain::backend::Kernels;
use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::cuda::{Arithmetic, Cuda, Device, Precision};
use hpctrain::comm;
use hpctrain::config::{Config, Environment, ResolvedConfig, resolve};
use hpctrain::data::{Ids, SampleFields, SampleSpec};
use hpctrain::mesh::Mesh;
use hpctrain::nn::MicroBatch;
use hpctrain::nn::loss::Loss;
use hpctrain::optim::UpdateRule;
use hpctrain::parallel::{ControlFlags, Zero};

use hpctrain_testkit::simulator::under;
use hpctrain_testkit::{Cut, distance, engine_on, floats, golden, gradients, ids, numbers};

/// The tolerance of a device against PyTorch's f64.
#[derive(Clone, Copy)]
struct Within {
    output: f64,
    gradients: f64,
    /// The tolerance of gradients through batch and group norms, where most of the signal of a few
    /// samples cancels, but rounding errors do not.
    through_norms: f64,
}

const F32: Within = Within { output: 2e-6, gradients: 1e-5, through_norms: 1e-5 };
const BF16: Within = Within { output: 2e-2, gradients: 6e-2, through_norms: 0.15 };

fn text(group: &hdf5::Group, name: &str) -> String {
    group.attr(name).unwrap().read_scalar::<FixedAscii<2048>>().unwrap().to_string()
}

/// Returns the resolved configuration of a case.
fn plan(case: &hdf5::Group) -> ResolvedConfig {
    let text = format!(
        "[model]\nkind = \"layers\"\n{}\n[loss]\n{}",
        text(case, "model"),
        text(case, "loss")
    );
    let config: Config = toml::from_str(&text).unwrap();
    resolve(config, &Environment { ranks: 1, threads: 1, vocabulary: None, on_gpu: false }).unwrap()
}

/// Returns the number of rows of each embedding table.
fn tables(plan: &ResolvedConfig) -> &[usize] {
    let SampleSpec::Rows { ids: Ids::Tables(tables), .. } = &plan.samples else { return &[] };
    tables
}

/// Uploads the samples of a case to the device.
fn samples<B: Kernels>(b: &B, case: &hdf5::Group, plan: &ResolvedConfig) -> MicroBatch<B> {
    let shape = case.dataset("inputs").unwrap().shape();
    let of_ids = case.dataset("inputs").unwrap().dtype().unwrap().is::<u32>();
    let (input, features) = match tables(plan) {
        _ if of_ids => (ids(case, "inputs"), vec![]),
        [] => (vec![], floats(case, "inputs")),
        // Ids count through all tables.
        [first, second, _] => {
            let before = [0, *first, first + second].into_iter().cycle();
            let ids = ids(case, "categories")
                .into_iter()
                .zip(before)
                .map(|(id, before)| id + before as u32);
            (ids.collect(), floats(case, "inputs"))
        }
        other => panic!("{} tables", other.len()),
    };
    let (classes, values) = match plan.loss {
        Loss::CrossEntropy { .. } => (ids(case, "targets"), vec![]),
        Loss::Deviation(_) | Loss::Custom(_) => (vec![], floats(case, "targets")),
    };
    let weights = if case.link_exists("weights") { floats(case, "weights") } else { vec![] };
    let parts = SampleFields {
        ids: &*input,
        features: &*features,
        classes: &*classes,
        values: &*values,
        weights: &*weights,
    };
    MicroBatch::upload(b, parts, shape[0], 1, 0).unwrap()
}

fn everything<B: Kernels>(b: &B, within: Within) {
    let file = golden("layers.h5");
    for name in [
        "convolutions",
        "numbers",
        "norms",
        "ids",
        "weighted_classes",
        "weighted_numbers",
        "tables",
    ] {
        let case = file.group(name).unwrap();
        let plan = plan(&case);
        for recompute in [false, true] {
            let one = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };
            let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
            let cut = Cut { recompute, ..Cut::WHOLE };
            let count = samples(b, &case, &plan).samples as u64;
            let comm = comm::single();
            let network = &plan.network;
            let loss = plan.loss.clone();
            let mut engine =
                engine_on(b.clone(), &comm, network, loss, one, Zero::Zero, rule, cut, count);
            let params = case.group("params").unwrap();
            let from_golden = |tensor: &str,
                               part,
                               _: Option<&Range<usize>>,
                               range: Range<usize>,
                               out: &mut [f32]| {
                if part == 0 {
                    out.copy_from_slice(&floats(&params, tensor)[range]);
                }
                Ok(())
            };
            engine.model.sharded.restore(from_golden).unwrap();

            let micro = samples(b, &case, &plan);
            let output = engine.model.output(&micro).unwrap().unwrap();
            let mut host = vec![0.0; B::len(&output)];
            b.download(B::all(&output), &mut host).unwrap();
            let off = distance(&host, &numbers(&case, "output"));
            assert!(off < within.output, "{name}: output {off:e}");

            let sums = engine.model.measure(&micro, &[]).unwrap().unwrap();
            let metrics = engine.model.objective.metrics().to_vec();
            let golden_metrics = case.group("metrics").unwrap();
            assert_eq!(golden_metrics.len() as usize, 1 + metrics.len(), "{name}");
            let means: Vec<f64> = sums.iter().map(|sum| sum / count as f64).collect();
            let of_metrics = metrics
                .iter()
                .zip(&means[1..])
                .map(|(metric, mean)| (metric.name(), metric.from_mean(*mean)));
            for (metric, value) in [("loss", means[0])].into_iter().chain(of_metrics) {
                let expected = numbers(&golden_metrics, metric)[0];
                assert!(
                    (value - expected).abs() <= within.output * expected.abs(),
                    "{name} {metric}: {value}, PyTorch {expected}"
                );
            }

            let mut micro = Some(micro);
            let synced =
                engine.gradients(0, || Ok(micro.take().unwrap()), ControlFlags::empty).unwrap();
            let loss = synced.loss / count as f64;
            let expected = numbers(&case, "loss")[0];
            assert!(
                (loss / expected - 1.0).abs() < within.output,
                "{name} loss: {loss}, PyTorch {expected}"
            );
            let golden = case.group("grads").unwrap();
            let found = gradients(&engine);
            assert_eq!(found.len(), golden.len() as usize);
            for (tensor, got) in found {
                let off = distance(&got, &numbers(&golden, &tensor));
                let most = if name == "norms" { within.through_norms } else { within.gradients };
                assert!(off < most, "{name}/{tensor}: {off:e}");
            }
        }
    }
}

#[test]
fn on_the_cpu() {
    everything(&Cpu::new(2), F32);
}

/// Returns a GPU that computes in `precision`.
fn gpu(precision: Precision) -> Cuda {
    Cuda::new(&Device::open(0).unwrap(), 128 << 20, precision).unwrap()
}

#[test]
fn on_a_gpu_in_f32() {
    under(&[&[("CUDASIM_STREAMS", "lazy"), ("CUDASIM_ORDER", "reverse")]], || {
        everything(&gpu(Precision::F32(Arithmetic::Full)), F32);
    });
}

#[test]
fn on_a_gpu_in_bf16() {
    under(&[&[]], || everything(&gpu(Precision::Bf16), BF16));
}
