//! Tests of modules: gradients by finite differences, bits of blocks written by hand, memory.

use super::*;
use crate::gpt::Gpt;
use crate::{Block, Context, Grads, MicroBatch, Params, Training, gradcheck};
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Init, Tensor, UnitLayout};
use hpctrain_base::random;
use hpctrain_cpu::{Cpu, CpuBuf};
use hpctrain_device::{Activation, Backend as _, Kernels, MemoryKind};

const WIDTH: usize = 6;
const TIME: usize = 5;

/// The modules to check, by the operations that they use.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Case {
    Linear,
    SharedWeight,
    Norms,
    Gate,
    Columns,
    Attention,
    Similarity,
    Softmax,
    Functions,
    Dropout,
    Identity,
    Constant,
}

impl Module for Case {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn tensors(&self) -> Vec<Tensor> {
        let matrix = |name: &str, rows| Tensor::new(name, &[rows, WIDTH], Init::Normal(1.0));
        let vector = |name: &str, init| Tensor::new(name, &[WIDTH], init);
        match self {
            Case::Linear | Case::SharedWeight => {
                vec![matrix("w", WIDTH), vector("b", Init::Zeros)]
            }
            Case::Norms => vec![
                vector("norm.weight", Init::Ones),
                vector("norm.bias", Init::Zeros),
                vector("rms.weight", Init::Ones),
            ],
            Case::Attention => vec![matrix("qkv", 2 * WIDTH), matrix("out", WIDTH)],
            Case::Gate => vec![matrix("gate", 2 * WIDTH)],
            _ => vec![],
        }
    }

    fn input_per_row(&self) -> usize {
        WIDTH
    }

    fn forward<B: Kernels>(
        &self,
        tape: &mut Tape<'_, B>,
        params: &[Var<B>],
        x: &Var<B>,
    ) -> Result<Var<B>> {
        match self {
            Case::Linear => {
                let h = tape.linear(x, &params[0], Some(&params[1]))?;
                let h = tape.activation(&h, Activation::Silu)?;
                tape.subtract(&h, x)
            }
            Case::SharedWeight => {
                let h = tape.linear(x, &params[0], None)?;
                let h = tape.activation(&h, Activation::Tanh)?;
                let h = tape.linear(&h, &params[0], Some(&params[1]))?;
                tape.add(&h, &h)
            }
            Case::Norms => {
                let h = tape.layer_norm(x, &params[0], Some(&params[1]), 1e-3)?;
                let h = tape.add(x, &h)?;
                let h = tape.rms_norm(&h, &params[2], 1e-3)?;
                let h = tape.normalize(&h, 1e-3)?;
                tape.add(x, &h)
            }
            Case::Gate => {
                let h = tape.linear(x, &params[0], None)?;
                tape.swiglu(&h)
            }
            Case::Columns => {
                let left = tape.columns(x, 0..2)?;
                let right = tape.columns(x, 1..6)?;
                let sum = tape.sum_columns(&right)?;
                let sum = tape.broadcast(&sum, 2)?;
                let product = tape.multiply(&left, &sum)?;
                tape.concatenate(&[&product, &right, &left])
            }
            Case::Attention => {
                let qkv = tape.linear(x, &params[0], None)?;
                let h = tape.attention(&qkv, 2, 1)?;
                let h = tape.linear(&h, &params[1], None)?;
                tape.add(x, &h)
            }
            Case::Similarity => {
                let z = tape.normalize(x, 1e-3)?;
                let p = tape.softmax(&z)?;
                tape.sum_columns(&p)?;
                let similar = tape.multiply(&p, x)?;
                let sum = tape.sum_columns(&similar)?;
                tape.broadcast(&sum, WIDTH)
            }
            Case::Softmax => tape.softmax(x),
            Case::Functions => {
                let square = tape.activation(x, Activation::Square)?;
                let more = tape.activation(&square, Activation::Shift(1.0))?;
                let ln = tape.activation(&more, Activation::Ln)?;
                let less = tape.scale(&ln, -0.5)?;
                let exp = tape.activation(&less, Activation::Exp)?;
                tape.multiply(&exp, x)
            }
            Case::Dropout => {
                let h = tape.dropout(x, 0.4)?;
                let h = tape.activation(&h, Activation::Sigmoid)?;
                tape.dropout(&h, 0.4)
            }
            Case::Identity => Ok(x.clone()),
            Case::Constant => {
                let zero = tape.scale(x, 0.0)?;
                tape.activation(&zero, Activation::Shift(1.0))
            }
        }
    }
}

const CASES: [Case; 12] = [
    Case::Linear,
    Case::SharedWeight,
    Case::Norms,
    Case::Gate,
    Case::Columns,
    Case::Attention,
    Case::Similarity,
    Case::Softmax,
    Case::Functions,
    Case::Dropout,
    Case::Identity,
    Case::Constant,
];

#[test]
fn backwards_agree_with_finite_differences() {
    for case in CASES {
        let checked = gradcheck::block(&*block(case), 3, TIME).unwrap();
        assert_eq!(checked.len(), case.tensors().len() + 1, "{case:?}");
    }
}

#[test]
fn linear_layers_overwrite_and_shared_weights_add() {
    let overwritten = |case: Case| -> Vec<bool> {
        let block = block::<Cpu>(case);
        block.tensors().iter().map(|tensor| tensor.overwritten).collect()
    };
    assert_eq!(overwritten(Case::Linear), [true, false]);
    assert_eq!(overwritten(Case::SharedWeight), [true, false]);
    assert_eq!(overwritten(Case::Norms), [false; 3]);
}

#[test]
fn only_what_a_backward_reads_is_saved() {
    let saved = |case: Case| {
        let block = block::<Cpu>(case);
        (block.saved_elems_per_row(), block.saved_f32_per_row())
    };
    // The input of the activation; the input of the block is kept anyway.
    assert_eq!(saved(Case::Linear), (WIDTH, 0));
    // The sum, the normalised sum and the statistics of three norms.
    assert_eq!(saved(Case::Norms), (2 * WIDTH, 6));
    assert_eq!(saved(Case::Gate), (2 * WIDTH, 0));
    assert_eq!(saved(Case::Identity), (0, 0));
    assert_eq!(saved(Case::Dropout), (WIDTH, 0));
    // Queries, keys and values, the result, and the logarithm of each denominator.
    assert_eq!(saved(Case::Attention), (2 * WIDTH + WIDTH, 2));
    let scratch = |case: Case| {
        let block = block::<Cpu>(case);
        (block.forward_scratch_per_row(), block.scratch_per_row())
    };
    // Forward: the gate is saved. Backward: its gradient, then also that of the input.
    assert_eq!(scratch(Case::Gate), (0, 3 * WIDTH));
}

/// A shape that does not fit, or an operation in the wrong place.
struct Wrong(usize);

impl Module for Wrong {
    fn name(&self) -> String {
        "wrong".into()
    }

    fn tensors(&self) -> Vec<Tensor> {
        vec![Tensor::new("w", &[3, 4], Init::Zeros)]
    }

    fn input_per_row(&self) -> usize {
        WIDTH
    }

    fn forward<B: Kernels>(
        &self,
        tape: &mut Tape<'_, B>,
        params: &[Var<B>],
        x: &Var<B>,
    ) -> Result<Var<B>> {
        match self.0 {
            0 => tape.linear(x, &params[0], None),
            1 => tape.add(x, &params[0]),
            2 => tape.cross_entropy(x, Targets::Classes, 0.0),
            4 => tape.linear(&params[0], &params[0], None),
            5 => Ok(params[0].clone()),
            _ => tape.linear(x, x, None),
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let refused = |which: usize| {
        let block = block::<Cpu>(Wrong(which));
        let checked = gradcheck::block(&*block, 2, 1).unwrap_err().to_string();
        let error = block.check().unwrap_err().to_string();
        assert_eq!(checked, error);
        error
    };
    assert_eq!(refused(0), "wrong: linear: the shapes 1×6 and 3×4 do not fit");
    assert!(refused(1).starts_with("wrong: add takes no parameter\nhint: "), "{}", refused(1));
    assert!(refused(2).contains("cross_entropy is for losses and metrics"), "{}", refused(2));
    assert!(refused(4).starts_with("wrong: linear takes no parameter"), "{}", refused(4));
    assert!(refused(5).starts_with("wrong: forward returns a parameter"), "{}", refused(5));
    assert!(refused(3).contains("linear: the weight must be a parameter"), "{}", refused(3));
}

/// A block of GPT-2 as a module, with the tensors of [`Gpt`]'s.
struct Transformer(Gpt);

impl Module for Transformer {
    fn name(&self) -> String {
        Block::<Cpu>::name(&*self.0.blocks::<Cpu>()[1])
    }

    fn tensors(&self) -> Vec<Tensor> {
        self.0.blocks::<Cpu>()[1].tensors()
    }

    fn input_per_row(&self) -> usize {
        self.0.width
    }

    fn forward<B: Kernels>(
        &self,
        tape: &mut Tape<'_, B>,
        params: &[Var<B>],
        x: &Var<B>,
    ) -> Result<Var<B>> {
        let Self(Gpt { heads, .. }) = *self;
        let [w_qkv, w_out, w_up, w_down, norm1, norm2] = params else {
            return Err(hpctrain_base::error::Error::internal("six tensors"));
        };
        let h = tape.layer_norm(x, norm1, None, 1e-5)?;
        let h = tape.linear(&h, w_qkv, None)?;
        let h = tape.attention(&h, heads, heads)?;
        let h = tape.linear(&h, w_out, None)?;
        let stream = tape.add(x, &h)?;
        let h = tape.layer_norm(&stream, norm2, None, 1e-5)?;
        let h = tape.linear(&h, w_up, None)?;
        let h = tape.activation(&h, Activation::Gelu)?;
        let h = tape.linear(&h, w_down, None)?;
        tape.add(&stream, &h)
    }
}

/// The embedding of GPT-2 as a module.
struct Embedded(Gpt);

impl Module for Embedded {
    fn name(&self) -> String {
        "embedding".into()
    }

    fn tensors(&self) -> Vec<Tensor> {
        self.0.blocks::<Cpu>()[0].tensors()
    }

    fn input_per_row(&self) -> usize {
        0
    }

    fn forward<B: Kernels>(
        &self,
        tape: &mut Tape<'_, B>,
        params: &[Var<B>],
        _: &Var<B>,
    ) -> Result<Var<B>> {
        tape.embedding(&params[0], Some(&params[1]), 1)
    }
}

fn values(name: &str, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    random::Stream::new(random::derive(3, &[random::name(name)])).fill_normal(&mut values);
    values
}

/// Returns the bits of the output and of the gradients of two micro-batches.
fn bits(block: &dyn Block<Cpu>) -> [Vec<u32>; 3] {
    let backend = Cpu::new(2);
    let layout = UnitLayout::new(block.name(), block.tensors(), 1);
    let unit = backend.upload(MemoryKind::Parameters, &values("unit", layout.padded)).unwrap();
    let mut own = vec![f32::NAN; layout.padded];
    layout.zeroed().into_iter().for_each(|range| own[range].fill(0.0));
    let mut own = backend.upload(MemoryKind::Gradients, &own).unwrap();
    let mut outputs = vec![];
    let mut inputs = vec![];
    let host = |buf: &CpuBuf| -> Vec<u32> {
        let mut host = vec![0.0; Cpu::len(buf)];
        backend.download(Cpu::all(buf), &mut host).unwrap();
        host.into_iter().map(f32::to_bits).collect()
    };
    for k in 0..2 {
        let ids: Vec<u32> = (0..3 * TIME as u32).map(|i| (i * 5 + k as u32) % 7).collect();
        let micro = MicroBatch::from_text(&backend, &ids, &ids, TIME, 3 * k).unwrap();
        let training = Some(Training { dropout: 1, ranks: None, batch_fraction: 0.5 });
        let cx = Context { backend: &backend, micro: &micro, training, tensor: None };
        let x = values(&format!("x {k}"), micro.rows() * block.input_per_row());
        let x = backend.upload(MemoryKind::Activations, &x).unwrap();
        let params = Params::with_micro_batch(&unit);
        let (y, saved) = block.forward(&cx, params, &x).unwrap();
        let dy = values(&format!("dy {k}"), Cpu::len(&y));
        let dy = backend.upload(MemoryKind::Activations, &dy).unwrap();
        let grads = Grads {
            own: Cpu::all_mut(&mut own),
            first: k == 0,
            tied: None,
            tied_first: false,
            deferred: None,
        };
        let dx = block.backward(&cx, params, grads, &x, saved, dy).unwrap();
        outputs.extend(host(&y));
        inputs.extend(host(&dx));
    }
    [outputs, inputs, host(&own)[..layout.tensors.iter().map(Tensor::len).sum()].to_vec()]
}

#[test]
fn a_transformer_block_has_the_bits_of_the_one_written_by_hand() {
    let gpt = Gpt {
        layers: 1,
        heads: 2,
        width: 12,
        context: TIME,
        vocabulary: 7,
        bias: false,
        dropout: 0.0,
    };
    let by_hand = &gpt.blocks::<Cpu>()[1];
    let derived = block::<Cpu>(Transformer(gpt.clone()));
    let names = ["output", "gradient of the input", "gradients of the parameters"];
    for ((one, other), name) in bits(&**by_hand).iter().zip(bits(&*derived)).zip(names) {
        assert!(!one.is_empty() && *one == other, "{name}: other bits");
    }
    let embedding = block::<Cpu>(Embedded(gpt.clone()));
    let [output, _, gradients] = bits(&*embedding);
    let [wanted, _, wanted_gradients] = bits(&*gpt.blocks::<Cpu>()[0]);
    assert!(!output.is_empty() && output == wanted && gradients == wanted_gradients);
    assert_eq!(derived.saved_elems_per_row(), by_hand.saved_elems_per_row());
    assert_eq!(derived.saved_f32_per_row(), by_hand.saved_f32_per_row());
    let overwritten = |block: &dyn Block<Cpu>| -> Vec<bool> {
        block.tensors().iter().map(|tensor| tensor.overwritten).collect()
    };
    assert_eq!(overwritten(&*derived), overwritten(&**by_hand));
}
