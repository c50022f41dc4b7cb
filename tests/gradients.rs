//! Every gradient of the GPT by finite differences, through the whole step.

mod common;

use common::{Cut, engine, gradients, micro, parameters};
use hpctrain::comm;
use hpctrain::mesh::Mesh;
use hpctrain::nn::gpt::Gpt;
use hpctrain::optim::Rule;
use hpctrain::parallel::Zero;

const TIME: usize = 6;
const SEQUENCES: usize = 3;

/// The directional derivative along a random ±1 pattern over each tensor: a sum over all its elements, hence large
/// against f32 rounding.
#[test]
fn backward_is_the_derivative_of_forward() {
    for (bias, dropout) in [(true, 0.0), (false, 0.3), (true, 0.3)] {
        let gpt = Gpt { layers: 2, heads: 2, width: 10, context: TIME, vocabulary: 13, bias, dropout };
        let mesh = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };
        let rule = Rule::Sgd { momentum: 0.0, nesterov: false };
        let predictions = (SEQUENCES * TIME) as u64;
        let mut engine = engine(&comm::single(), &gpt, mesh, Zero::Zero, rule, Cut::WHOLE, predictions, 1);
        // Larger weights than the initial ones, and biases and norms off their special values.
        let at_zero: Vec<(String, Vec<f32>)> = parameters(&mut engine)
            .into_iter()
            .map(|(name, values)| {
                let wiggle = |(i, x): (usize, &f32)| 8.0 * x + 0.1 * ((i * 7919 + name.len()) as f32).sin();
                let values = values.iter().enumerate().map(wiggle).collect();
                (name, values)
            })
            .collect();
        let tokens: Vec<u32> = (0..predictions as u32).map(|i| i * 5 % 13).collect();
        let targets: Vec<u32> = (0..predictions as u32).map(|i| (i * i + 3) % 13).collect();

        let mut loss_at = |tensor: &str, distance: f32| {
            engine
                .sharded
                .restore(|name, part, range, out| {
                    if part == 0 {
                        let (_, values) = at_zero.iter().find(|(n, _)| n == name).unwrap();
                        let moved = if name == tensor { distance } else { 0.0 };
                        let direction = |i: usize| if (i * 31 + 7) % 3 == 0 { 1.0 } else { -1.0 };
                        for (out, i) in out.iter_mut().zip(range) {
                            *out = values[i] + moved * direction(i);
                        }
                    }
                    Ok(())
                })
                .unwrap();
            let backend = engine.backend.clone();
            let synced = engine.gradients(0, || Ok(micro(&backend, &tokens, &targets, TIME, 0))).unwrap();
            let found = gradients(&engine);
            engine.sharded.skip();
            (synced.loss / predictions as f64, found)
        };

        let (_, found) = loss_at("", 0.0);
        for (name, gradient) in found {
            let direction = |i: usize| if (i * 31 + 7) % 3 == 0 { 1.0 } else { -1.0 };
            let analytic: f64 = gradient.iter().enumerate().map(|(i, &g)| f64::from(g) * direction(i)).sum();
            let size: f64 = gradient.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
            let h = 2e-3;
            let numeric = (loss_at(&name, h).0 - loss_at(&name, -h).0) / (2.0 * f64::from(h));
            let allowed = 2e-3 * analytic.abs().max(size).max(0.05);
            assert!((analytic - numeric).abs() < allowed, "{name}: {analytic} by backward, {numeric} by differences");
        }
    }
}
