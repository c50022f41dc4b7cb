//! Checks every gradient of every network by finite differences, through a whole step.

use hpctrain::backend::cpu::Cpu;
use hpctrain::comm;
use hpctrain::data::SampleFields;
use hpctrain::mesh::Mesh;
use hpctrain::nn::gpt::Gpt;
use hpctrain::nn::gradcheck::{NamedTensor, derivatives};
use hpctrain::nn::layers::{Layer, Layers};
use hpctrain::nn::llama::Llama;
use hpctrain::nn::{FrequencyScaling, MicroBatch, Network};
use hpctrain::optim::UpdateRule;
use hpctrain::parallel::{ControlFlags, Zero};
use hpctrain::random::derive;

use hpctrain_testkit::{Cut, engine, gradients, micro, parameters};

const TIME: usize = 6;
const SEQUENCES: usize = 3;

/// Returns a fixed random sign for each element.
fn sign(i: usize) -> f32 {
    if derive(1, &[i as u64]).is_multiple_of(2) { 1.0 } else { -1.0 }
}

#[test]
fn backward_is_the_derivative_of_forward() {
    let gpt = |bias, dropout| {
        Network::Gpt(Gpt {
            layers: 2,
            heads: 2,
            width: 10,
            context: TIME,
            vocabulary: 13,
            bias,
            dropout,
        })
    };
    let llama = |kv_heads, tied, dropout| {
        Network::Llama(Llama {
            layers: 2,
            heads: 4,
            kv_heads,
            width: 16,
            hidden: 11,
            context: TIME,
            vocabulary: 13,
            rope_theta: 10.0,
            rope_scaling: FrequencyScaling::Unscaled,
            epsilon: 1e-5,
            tied,
            dropout,
        })
    };
    let gpts = [gpt(true, 0.0), gpt(false, 0.3), gpt(true, 0.3)];
    for network in
        gpts.into_iter().chain([llama(2, false, 0.0), llama(1, true, 0.3), llama(4, true, 0.0)])
    {
        let predictions = (SEQUENCES * TIME) as u64;
        let tokens: Vec<u32> = (0..predictions as u32).map(|i| i * 5 % 13).collect();
        let targets: Vec<u32> = (0..predictions as u32).map(|i| (i * i + 3) % 13).collect();
        check(&network, predictions, &|backend| micro(backend, &tokens, &targets, TIME, 0));
    }
}

/// Every kind of layer, away from kinks: ReLU and max pooling have no derivative there.
#[test]
fn backward_of_layers_is_the_derivative_of_their_forward() {
    let layers = "[{kind='conv2d', filters=4, kernel=3, padding=1, groups=2}, {kind='silu'}, {kind='avg_pool2d', kernel=2}, \
                  {kind='residual', layers=[{kind='conv2d', filters=6, kernel=[2, 1], stride=[1, 2], padding=[1, 0]}, \
                  {kind='tanh'}], shortcut=[{kind='conv2d', filters=6, kernel=[2, 1], stride=[1, 2], padding=[1, 0], bias=false}]}, \
                  {kind='dropout', rate=0.2}, {kind='layer_norm'}, {kind='gelu'}, {kind='flatten'}, {kind='dense', units=9}, \
                  {kind='softmax'}, {kind='sigmoid'}, {kind='dense', units=5}]";
    let layers: toml::Table = toml::from_str(&format!("layers = {layers}")).unwrap();
    let layers: Vec<Layer> = layers["layers"].clone().try_into().unwrap();
    let network = Network::Layers(Layers::new(&[6, 5, 2], &layers).unwrap());
    check(&network, 7, &|backend| {
        let features: Vec<f32> =
            (0..7 * 60).map(|i| sign(i) * (0.3 + (i % 7) as f32 * 0.2)).collect();
        // The weighted loss has the weighted gradient.
        let classes = &[0, 1, 2, 3, 4, 0, 2][..];
        let weights = &[1.0, 0.5, 2.0, 0.0, 1.5, 3.0, 1.0][..];
        let parts =
            SampleFields { features: &*features, classes, weights, ..SampleFields::default() };
        MicroBatch::upload(backend, parts, 7, 1, 0).unwrap()
    });
}

/// Embedding tables with dense features, and the dot products of all pairs of rows.
#[test]
fn backward_of_tables_is_the_derivative_of_their_forward() {
    let layers = "[{kind='embedding_tables', ids=[3, 7, 2], width=4, dense=[{kind='dense', units=6}, {kind='tanh'}, \
                  {kind='dropout', rate=0.2}, {kind='dense', units=4}, {kind='layer_norm'}]}, {kind='dot_interaction'}, \
                  {kind='layer_norm'}, {kind='dense', units=5}, {kind='silu'}, {kind='dense', units=3}]";
    let layers: toml::Table = toml::from_str(&format!("layers = {layers}")).unwrap();
    let layers: Vec<Layer> = layers["layers"].clone().try_into().unwrap();
    let network = Network::Layers(Layers::new(&[5], &layers).unwrap());
    check(&network, 6, &|backend| {
        let features: Vec<f32> =
            (0..6 * 5).map(|i| sign(i) * (0.3 + (i % 7) as f32 * 0.2)).collect();
        // Rows of all tables: below 3, from 3 below 10, from 10 below 12.
        let ids: Vec<u32> = (0..6).flat_map(|i| [i % 2, 3 + i * 5 % 7, 10 + i / 3]).collect();
        let parts = SampleFields {
            ids: &*ids,
            features: &*features,
            classes: &[0, 1, 2, 0, 2, 1],
            ..SampleFields::default()
        };
        MicroBatch::upload(backend, parts, 6, 1, 0).unwrap()
    });
}

/// Checks every tensor of a network, through a whole step.
fn check(network: &Network, predictions: u64, micro: &dyn Fn(&Cpu) -> MicroBatch<Cpu>) {
    let mesh = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let mut engine =
        engine(&comm::single(), network, mesh, Zero::Zero, rule, Cut::WHOLE, predictions);
    // Larger weights than the initial ones, and biases and norms off their special values.
    let tensors: Vec<NamedTensor> = parameters(&mut engine)
        .into_iter()
        .map(|(name, values)| {
            let wiggle = |(i, x): (usize, &f32)| 5.0 * x + 0.05 * sign(i + name.len());
            let values = values.iter().enumerate().map(wiggle).collect();
            (name, values)
        })
        .collect();
    let found = derivatives(&tensors, |tensors| {
        engine.model.sharded.restore(|name, part, _, range, out| {
            if part == 0 {
                let (_, values) = tensors.iter().find(|(n, _)| n == name).unwrap();
                out.copy_from_slice(&values[range]);
            }
            Ok(())
        })?;
        let backend = engine.model.backend.clone();
        let synced = engine.gradients(0, || Ok(micro(&backend)), ControlFlags::empty)?;
        let found = gradients(&engine);
        engine.model.sharded.skip().unwrap();
        Ok((synced.loss / predictions as f64, found))
    });
    assert_eq!(found.unwrap().len(), tensors.len(), "one derivative by each tensor");
}
