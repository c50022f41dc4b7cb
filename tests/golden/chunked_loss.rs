//! Chunked cross-entropy (`parallel.loss_chunk_tokens`): gradients, losses and memory compared with
//! those of all rows at once.

use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::{Backend, MemoryKind};
use hpctrain::comm;
use hpctrain::engine::Engine;
use hpctrain::mesh::Mesh;
use hpctrain::nn::gpt::Gpt;
use hpctrain::nn::llama::Llama;
use hpctrain::nn::{FrequencyScaling, Network};
use hpctrain::optim::UpdateRule;
use hpctrain::parallel::{ControlFlags, Zero};

use hpctrain_testkit::{Cut, distance, engine, gradients, micro};

const TIME: usize = 6;
const SEQUENCES: usize = 4;
/// Large enough that logits are most of the activations.
const VOCABULARY: usize = 1031;

struct Outcome {
    loss: f64,
    /// The losses outside training: of all predictions, and of two parts of them.
    measured: Vec<f64>,
    gradients: Vec<(String, Vec<f32>)>,
    /// The peak of activations in bytes.
    activations: usize,
}

fn step(network: &Network, micros: usize, logit_rows: usize) -> Outcome {
    let mesh = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let cut = Cut { micros_per_virtual_rank: micros, ..Cut::WHOLE };
    let rows = SEQUENCES * TIME;
    let engine = engine(&comm::single(), network, mesh, Zero::Zero, rule, cut, rows as u64);
    let Engine { model, geometry, activation_offload: host_inputs, .. } = engine;
    let mut engine: Engine<Cpu> = Engine {
        model: model.with_loss_chunk_rows(logit_rows),
        geometry,
        activation_offload: host_inputs,
        observer: None,
    };
    let backend = engine.model.backend.clone();
    let ids: Vec<u32> = (0..=rows as u32).map(|i| i * 41 % VOCABULARY as u32).collect();
    let mut at = 0;
    let next = || {
        let some = at..at + rows / micros;
        at = some.end;
        Ok(micro(
            &backend,
            &ids[some.clone()],
            &ids[some.start + 1..=some.end],
            TIME,
            (some.start / TIME) as u64,
        ))
    };
    let loss = engine.gradients(0, next, ControlFlags::empty).unwrap().loss;
    let gradients = gradients(&engine);
    engine.model.sharded.skip().unwrap();
    let all = micro(&backend, &ids[..rows], &ids[1..], TIME, 0);
    let measured = engine.model.measure(&all, &[0..7, 7..rows]).unwrap().unwrap();
    Outcome {
        loss,
        measured,
        gradients,
        activations: backend.memory_stats().peak(MemoryKind::Activations),
    }
}

#[test]
fn pieces_add_up_to_the_whole() {
    let gpt = Gpt {
        layers: 2,
        heads: 2,
        width: 10,
        context: TIME,
        vocabulary: VOCABULARY,
        bias: true,
        dropout: 0.2,
    };
    let llama = |tied| Llama {
        layers: 1,
        heads: 2,
        kv_heads: 1,
        width: 8,
        hidden: 11,
        context: TIME,
        vocabulary: VOCABULARY,
        rope_theta: 10.0,
        rope_scaling: FrequencyScaling::Unscaled,
        epsilon: 1e-5,
        tied,
        dropout: 0.0,
    };
    for network in [Network::Gpt(gpt), Network::Llama(llama(false)), Network::Llama(llama(true))] {
        for micros in [1, 2] {
            let whole = step(&network, micros, 0);
            for logit_rows in [1, 5, 6, 11] {
                let about =
                    format!("{}, {micros} micro-batches, {logit_rows} rows", network.describe());
                let pieces = step(&network, micros, logit_rows);
                assert!(
                    (pieces.loss / whole.loss - 1.0).abs() < 1e-6,
                    "{about}: {} {}",
                    pieces.loss,
                    whole.loss
                );
                for (got, expected) in pieces.measured.iter().zip(&whole.measured) {
                    assert!((got / expected - 1.0).abs() < 1e-6, "{about}: {got} {expected}");
                }
                assert_eq!(pieces.measured.len(), 3, "{about}");
                assert!(
                    (pieces.measured[1..].iter().sum::<f64>() / pieces.measured[0] - 1.0).abs()
                        < 1e-6,
                    "{about}"
                );
                for ((name, got), (_, want)) in pieces.gradients.iter().zip(&whole.gradients) {
                    let want: Vec<f64> = want.iter().map(|x| f64::from(*x)).collect();
                    let off = distance(got, &want);
                    assert!(off < 1e-5, "{about}, {name}: {off}");
                }
                // Checked for one micro-batch, where logits are most of the memory.
                let saved = (SEQUENCES * TIME - logit_rows) * VOCABULARY * size_of::<f32>();
                let less = whole.activations - pieces.activations;
                let most = micros > 1 || less as f64 > 0.8 * saved as f64;
                assert!(most, "{about}: {less} bytes less, not {saved}");
            }
            // With as many rows as there are, the results are those of all rows at once.
            let all = step(&network, micros, SEQUENCES * TIME);
            assert_eq!(
                (all.loss, &all.measured, &all.gradients),
                (whole.loss, &whole.measured, &whole.gradients)
            );
        }
    }
}
