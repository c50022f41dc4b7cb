//! The contrastive loss, compared with PyTorch's losses and gradients in f64
//! (`tests/golden/contrastive.py`).

use serde::Deserialize;

use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::{Backend, MemoryKind};
use hpctrain::data::SampleFields;
use hpctrain::nn::MicroBatch;
use hpctrain::nn::loss::{ContrastiveLoss, CustomLoss, Loss, Objective};

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

/// Embeddings with their classes, the loss of each, and the gradient of the mean.
#[derive(Deserialize)]
struct Case {
    rows: usize,
    width: usize,
    temperature: f32,
    classes: Vec<u32>,
    outputs: Vec<f64>,
    losses: Vec<f64>,
    gradient: Vec<f64>,
}

#[track_caller]
fn close(found: &[f32], wanted: &[f64], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let largest = wanted.iter().fold(1e-6, |most: f64, x| most.max(x.abs()));
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let off = (f64::from(*found) - wanted).abs() / largest;
        assert!(off < 1e-5, "{what}[{i}]: {found}, by PyTorch {wanted}");
    }
}

#[test]
fn contrastive_losses_are_those_of_pytorch() {
    let golden: Golden = serde_json::from_str(include_str!("contrastive.json")).unwrap();
    assert_eq!(golden.cases.len(), 4);
    for case in golden.cases {
        let Case { rows, width, temperature, classes, outputs, losses, gradient } = case;
        let backend = Cpu::new(2);
        let host = |buf: &<Cpu as Backend>::Buf| {
            let mut host = vec![0.0; Cpu::len(buf)];
            backend.download(Cpu::all(buf), &mut host).unwrap();
            host
        };
        let fields = SampleFields { classes: &classes[..], ..SampleFields::default() };
        let micro = MicroBatch::upload(&backend, fields, rows, 1, 0).unwrap();
        let loss = Loss::Custom(CustomLoss::new(ContrastiveLoss { temperature }));
        let objective = Objective::<Cpu>::new(loss, width, false);
        let outputs: Vec<f32> = outputs.into_iter().map(|x| x as f32).collect();
        let mut output = backend.upload(MemoryKind::Activations, &outputs).unwrap();
        let scale = 1.0 / rows as f32;
        let found = objective.losses(&backend, None, &micro, &mut output, scale).unwrap();
        let what = format!("{rows} embeddings at {temperature}");
        close(&host(&found), &losses, &what);
        close(&host(&output), &gradient, &format!("gradient of {what}"));
    }
}
