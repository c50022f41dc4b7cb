//! burn: a training step on the CPU, with its Flex backend.
//!
//!     RAYON_NUM_THREADS=2 burn char 50     # size, steps; prints tokens or samples a second
#![recursion_limit = "256"]

use burn::module::Param;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::MaxPool2dConfig;
use burn::nn::{Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::activation::{gelu_approximate, relu, softmax};
use rust_peers::{arguments, flush_subnormals, ids, time};

#[derive(Module, Debug)]
struct Layer {
    norm1: LayerNorm,
    norm2: LayerNorm,
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Gpt {
    words: Embedding,
    places: Param<Tensor<2>>,
    layers: Vec<Layer>,
    norm: LayerNorm,
}

fn integers(ids: Vec<u32>, device: &Device) -> Tensor<1, Int> {
    let ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
    Tensor::from_data(ids.as_slice(), device)
}

fn gpt(size: rust_peers::Gpt, steps: usize) {
    let rust_peers::Gpt { layers, heads, width, context, batch, vocabulary, bias } = size;
    let device = Device::flex().autodiff();
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(bias).init(&device);
    let norm = || LayerNormConfig::new(width).init(&device);
    let layer = |_| Layer {
        norm1: norm(),
        norm2: norm(),
        qkv: linear(width, 3 * width),
        out: linear(width, width),
        up: linear(width, 4 * width),
        down: linear(4 * width, width),
    };
    let mut model = Some(Gpt {
        words: EmbeddingConfig::new(vocabulary, width).init(&device),
        places: Initializer::Normal { mean: 0.0, std: 0.02 }.init([context, width], &device),
        layers: (0..layers).map(layer).collect(),
        norm: norm(),
    });
    let mut optimizer = AdamWConfig::new().init();
    let tokens = integers(ids(batch * context, 7919, vocabulary), &device).reshape([batch, context]);
    let targets = integers(ids(batch * context, 104_729, vocabulary), &device);
    let entropy = CrossEntropyLossConfig::new().init(&device);
    let mask = Tensor::<2>::ones([context, context], &device).triu(1).reshape([1, 1, context, context]) * -1e9;
    let of_head = width / heads;
    time(batch * context, steps, || {
        let own = model.take().expect("the model of the step before");
        let mut x = own.words.forward(tokens.clone()) + own.places.val().unsqueeze::<3>();
        for layer in &own.layers {
            let qkv = layer.qkv.forward(layer.norm1.forward(x.clone()));
            let qkv = qkv.reshape([batch, context, 3, heads, of_head]).permute([2, 0, 3, 1, 4]);
            let part = |i: usize| {
                let part = qkv.clone().slice([i..i + 1, 0..batch, 0..heads, 0..context, 0..of_head]);
                part.reshape([batch, heads, context, of_head])
            };
            let q: Tensor<4> = part(0);
            let k: Tensor<4> = part(1);
            let v: Tensor<4> = part(2);
            let scores = q.matmul(k.swap_dims(2, 3)) / (of_head as f64).sqrt() + mask.clone();
            let seen = softmax(scores, 3).matmul(v).swap_dims(1, 2).reshape([batch, context, width]);
            x = x + layer.out.forward(seen);
            x = x.clone() + layer.down.forward(gelu_approximate(layer.up.forward(layer.norm2.forward(x))));
        }
        let logits = own.norm.forward(x).reshape([batch * context, width]).matmul(own.words.weight.val().transpose());
        let loss = entropy.forward(logits, targets.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &own);
        model = Some(optimizer.step(1e-4, own, gradients));
        let _ = loss.into_scalar::<f32>();
    });
}

#[derive(Module, Debug)]
struct Mlp {
    a: Linear,
    b: Linear,
    c: Linear,
}

fn mlp(steps: usize) {
    let device = Device::flex().autodiff();
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
    let mut model = Some(Mlp { a: linear(784, 512), b: linear(512, 512), c: linear(512, 10) });
    let mut optimizer = AdamWConfig::new().init();
    let samples = Tensor::<2>::random([4096, 784], Distribution::Uniform(0.0, 1.0), &device);
    let classes = integers(ids(4096, 7919, 10), &device);
    let entropy = CrossEntropyLossConfig::new().init(&device);
    let mut at = 0;
    time(128, steps, || {
        let own = model.take().expect("the model of the step before");
        let x = samples.clone().slice([at..at + 128]);
        let y = classes.clone().slice([at..at + 128]);
        at = (at + 128) % 4096;
        let x = own.c.forward(relu(own.b.forward(relu(own.a.forward(x)))));
        let loss = entropy.forward(x, y);
        let gradients = GradientsParams::from_grads(loss.backward(), &own);
        model = Some(optimizer.step(1e-3, own, gradients));
        let _ = loss.into_scalar::<f32>();
    });
}

#[derive(Module, Debug)]
struct Cnn {
    a: Conv2d,
    b: Conv2d,
    c: Linear,
    d: Linear,
}

fn cnn(steps: usize) {
    let device = Device::flex().autodiff();
    let mut model = Some(Cnn {
        a: Conv2dConfig::new([1, 32], [3, 3]).init(&device),
        b: Conv2dConfig::new([32, 64], [3, 3]).init(&device),
        c: LinearConfig::new(1600, 128).init(&device),
        d: LinearConfig::new(128, 10).init(&device),
    });
    let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init();
    let mut optimizer = AdamWConfig::new().init();
    let samples = Tensor::<4>::random([4096, 1, 28, 28], Distribution::Uniform(0.0, 1.0), &device);
    let classes = integers(ids(4096, 7919, 10), &device);
    let entropy = CrossEntropyLossConfig::new().init(&device);
    let mut at = 0;
    time(64, steps, || {
        let own = model.take().expect("the model of the step before");
        let x = samples.clone().slice([at..at + 64]);
        let y = classes.clone().slice([at..at + 64]);
        at = (at + 64) % 4096;
        let x = pool.forward(relu(own.a.forward(x)));
        let x = pool.forward(relu(own.b.forward(x))).reshape([64, 1600]);
        let x = own.d.forward(relu(own.c.forward(x)));
        let loss = entropy.forward(x, y);
        let gradients = GradientsParams::from_grads(loss.backward(), &own);
        model = Some(optimizer.step(1e-3, own, gradients));
        let _ = loss.into_scalar::<f32>();
    });
}

fn main() {
    flush_subnormals();
    let (size, steps) = arguments();
    match &size[..] {
        "mlp" => mlp(steps),
        "cnn" => cnn(steps),
        size => gpt(rust_peers::gpt(size).expect("char, baby, gpt2-124m, mlp or cnn"), steps),
    }
}
