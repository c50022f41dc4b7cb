//! candle: a training step on the CPU. Its fused layer norm, softmax and attention have no
//! backward, so they are composed.
//!
//!     RAYON_NUM_THREADS=2 candle char 50     # size, steps; prints tokens or samples a second

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{AdamW, Conv2d, Init, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use rust_peers::{Gpt, arguments, flush_subnormals, ids, time};

struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    fn new(inputs: usize, outputs: usize, bias: bool, vars: VarBuilder) -> Result<Self> {
        let weight = vars.get_with_hints((outputs, inputs), "w", Init::Randn { mean: 0.0, stdev: 0.02 })?;
        let bias = bias.then(|| vars.get_with_hints(outputs, "b", Init::Const(0.0))).transpose()?;
        Ok(Self { weight, bias })
    }

    /// One product of all rows.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut shape = x.dims().to_vec();
        let width = shape.pop().unwrap_or(1);
        let y = x.reshape(((), width))?.matmul(&self.weight.t()?)?;
        let y = match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        shape.push(self.weight.dim(0)?);
        y.reshape(shape)
    }
}

struct Norm {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Norm {
    fn new(width: usize, bias: bool, vars: VarBuilder) -> Result<Self> {
        let weight = vars.get_with_hints(width, "w", Init::Const(1.0))?;
        let bias = bias.then(|| vars.get_with_hints(width, "b", Init::Const(0.0))).transpose()?;
        Ok(Self { weight, bias })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let width = x.dim(D::Minus1)? as f64;
        let x = x.broadcast_sub(&(x.sum_keepdim(D::Minus1)? / width)?)?;
        let deviation = ((x.sqr()?.sum_keepdim(D::Minus1)? / width)? + 1e-5)?.sqrt()?;
        let y = x.broadcast_div(&deviation)?.broadcast_mul(&self.weight)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

struct Block {
    norms: [Norm; 2],
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

fn gpt(Gpt { layers, heads, width, context, batch, vocabulary, bias }: Gpt, steps: usize) -> Result<()> {
    let device = Device::Cpu;
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &device);
    let table = |rows: usize, name: &str| vars.get_with_hints((rows, width), name, Init::Randn { mean: 0.0, stdev: 0.02 });
    let words = table(vocabulary, "words")?;
    let places = table(context, "places")?;
    let last = Norm::new(width, bias, vars.pp("norm"))?;
    let block = |i: usize| -> Result<Block> {
        let vars = vars.pp(i.to_string());
        let linear = |name: &str, inputs, outputs| Linear::new(inputs, outputs, bias, vars.pp(name));
        Ok(Block {
            norms: [Norm::new(width, bias, vars.pp("norm1"))?, Norm::new(width, bias, vars.pp("norm2"))?],
            qkv: linear("qkv", width, 3 * width)?,
            out: linear("out", width, width)?,
            up: linear("up", width, 4 * width)?,
            down: linear("down", 4 * width, width)?,
        })
    };
    let blocks = (0..layers).map(block).collect::<Result<Vec<_>>>()?;
    let tokens = Tensor::from_vec(ids(batch * context, 7919, vocabulary), batch * context, &device)?;
    let targets = Tensor::from_vec(ids(batch * context, 104_729, vocabulary), batch * context, &device)?;
    let hidden = |i: usize| if i % context > i / context { f32::NEG_INFINITY } else { 0.0 };
    let mask = Tensor::from_vec((0..context * context).map(hidden).collect(), (1, 1, context, context), &device)?;
    let mut optimizer = AdamW::new(map.all_vars(), ParamsAdamW { lr: 1e-4, ..Default::default() })?;
    let of_head = width / heads;
    let mut step = || -> Result<()> {
        let mut x = words.index_select(&tokens, 0)?.reshape((batch, context, width))?.broadcast_add(&places)?;
        for block in &blocks {
            let qkv = block.qkv.forward(&block.norms[0].forward(&x)?)?.reshape((batch, context, 3, heads, of_head))?;
            let qkv = qkv.permute((2, 0, 3, 1, 4))?.contiguous()?;
            let q = qkv.get(0)?;
            let k = qkv.get(1)?;
            let v = qkv.get(2)?;
            let scores = (q.matmul(&k.t()?)? / (of_head as f64).sqrt())?.broadcast_add(&mask)?;
            let seen = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
            let seen = seen.transpose(1, 2)?.contiguous()?.reshape((batch, context, width))?;
            x = (x + block.out.forward(&seen)?)?;
            let inner = block.up.forward(&block.norms[1].forward(&x)?)?.gelu()?;
            x = (x + block.down.forward(&inner)?)?;
        }
        let logits = last.forward(&x)?.reshape((batch * context, width))?.matmul(&words.t()?)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &targets)?;
        optimizer.backward_step(&loss)?;
        loss.to_scalar::<f32>().map(|_| ())
    };
    time(batch * context, steps, || step().expect("a step"));
    Ok(())
}

/// A classifier on random samples of `shape`, `batch` at a time.
fn layers(
    shape: &[usize],
    batch: usize,
    map: &VarMap,
    steps: usize,
    forward: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let samples = Tensor::rand(0f32, 1.0, [&[4096], shape].concat(), &Device::Cpu)?;
    let classes = Tensor::from_vec(ids(4096, 7919, 10), 4096, &Device::Cpu)?;
    let mut optimizer = AdamW::new(map.all_vars(), ParamsAdamW::default())?;
    let mut at = 0;
    let mut step = || -> Result<()> {
        let x = samples.narrow(0, at, batch)?;
        let y = classes.narrow(0, at, batch)?;
        at = (at + batch) % 4096;
        let loss = candle_nn::loss::cross_entropy(&forward(&x)?, &y)?;
        optimizer.backward_step(&loss)?;
        loss.to_scalar::<f32>().map(|_| ())
    };
    time(batch, steps, || step().expect("a step"));
    Ok(())
}

fn mlp(steps: usize) -> Result<()> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let a = Linear::new(784, 512, true, vars.pp("a"))?;
    let b = Linear::new(512, 512, true, vars.pp("b"))?;
    let c = Linear::new(512, 10, true, vars.pp("c"))?;
    layers(&[784], 128, &map, steps, |x| c.forward(&b.forward(&a.forward(x)?.relu()?)?.relu()?))
}

fn cnn(steps: usize) -> Result<()> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let a: Conv2d = candle_nn::conv2d(1, 32, 3, Default::default(), vars.pp("a"))?;
    let b: Conv2d = candle_nn::conv2d(32, 64, 3, Default::default(), vars.pp("b"))?;
    let c = Linear::new(1600, 128, true, vars.pp("c"))?;
    let d = Linear::new(128, 10, true, vars.pp("d"))?;
    layers(&[1, 28, 28], 64, &map, steps, |x| {
        let x = a.forward(x)?.relu()?.max_pool2d(2)?;
        // The backward of its pooling wants even sizes: the second one leaves out what it would not
        // see.
        let x = b.forward(&x)?.relu()?.narrow(2, 0, 10)?.narrow(3, 0, 10)?.contiguous()?.max_pool2d(2)?;
        d.forward(&c.forward(&x.flatten_from(1)?)?.relu()?)
    })
}

fn main() -> Result<()> {
    flush_subnormals();
    let (size, steps) = arguments();
    match &size[..] {
        "mlp" => mlp(steps),
        "cnn" => cnn(steps),
        size => gpt(rust_peers::gpt(size).expect("char, baby, gpt2-124m, mlp or cnn"), steps),
    }
}
