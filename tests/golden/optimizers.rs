//! Optimizers against PyTorch's: ten steps of each, on every device. AdamW and SGD are in
//! `networks.rs`.

use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::cuda::{Arithmetic, Cuda, Device, Precision};
use hpctrain::backend::{Elementwise, Kernels, MemoryKind};
use hpctrain::optim::{Update, UpdateRule};

use hpctrain_testkit::simulator::under;
use hpctrain_testkit::{distance, floats, golden, numbers};

const RULES: [(&str, UpdateRule); 6] = [
    ("adam", UpdateRule::Elementwise(Elementwise::Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 })),
    ("adagrad", UpdateRule::Elementwise(Elementwise::Adagrad { eps: 1e-8 })),
    (
        "rmsprop",
        UpdateRule::Elementwise(Elementwise::RmsProp { alpha: 0.95, eps: 1e-8, momentum: 0.8 }),
    ),
    ("lion", UpdateRule::Elementwise(Elementwise::Lion { beta1: 0.9, beta2: 0.95 })),
    ("lamb", UpdateRule::Lamb { beta1: 0.9, beta2: 0.95, eps: 1e-8 }),
    ("lars", UpdateRule::Lars { momentum: 0.8, nesterov: true, trust_ratio: 0.05 }),
];

fn everything<B: Kernels>(b: &B) {
    let file = golden("optimizers.h5");
    let initial = floats(&file, "initial");
    let grads = floats(&file, "grads");
    let len = initial.len();
    for (name, rule) in RULES {
        let new = |values: &[f32]| b.upload_f32(MemoryKind::Optimizer, values).unwrap();
        let mut params = new(&initial);
        let mut state: Vec<B::Buf> = rule.state().iter().map(|_| new(&vec![0.0; len])).collect();
        for (grad, step) in grads.chunks(len).zip(1..) {
            let grad = new(grad);
            let mut update = Update {
                lr: 0.01 / step as f32,
                weight_decay: 0.1,
                step,
                grad_scale: 1.0,
                trust: 1.0,
            };
            if rule.is_layerwise() {
                let state: Vec<_> = state.iter().map(B::all).collect();
                let squares =
                    rule.squared_norms(b, update, B::all(&grad), &state, B::all(&params)).unwrap();
                update.trust =
                    rule.trust_ratio(squares.map(|square| b.read(square).unwrap()), 0.1, 1.0);
            }
            let state = state.iter_mut().map(B::all_mut).collect();
            rule.update(b, update, B::all(&grad), state, B::all_mut(&mut params), None, None)
                .unwrap();
        }
        let mut host = vec![0.0; len];
        b.download(B::all(&params), &mut host).unwrap();
        let off = distance(&host, &numbers(&file, name));
        assert!(off < 1e-6, "{name}: {off:e}");
    }
}

#[test]
fn on_the_cpu() {
    everything(&Cpu::new(2));
}

#[test]
fn on_a_gpu() {
    under(&[&[]], || {
        everything(
            &Cuda::new(&Device::open(0).unwrap(), 64 << 20, Precision::F32(Arithmetic::Full))
                .unwrap(),
        );
    });
}
