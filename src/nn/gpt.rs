//! GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019): learned positions,
//! pre-norm blocks, tanh-GELU, an output head tied to the token table.
//!
//! Shape letters: b sequences, t context, d width, h heads, v vocabulary; rows are b·t.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dropout::StreamDropout;
use super::embedding::Embedding;
use super::gradients::{At, OutputGradient, ranges};
use super::head::{Head, Table};
use super::{Block, Blocks, Context, Grads, INIT, Params, unpack};
use crate::backend::{Attention, Backend, Kernels, Linear, MemoryKind, Norm, split};
use crate::error::Result;
use crate::layout::{Init, Tensor};

/// The size of a GPT.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpt {
    /// Transformer blocks.
    pub layers: usize,
    /// Attention heads a block.
    pub heads: usize,
    /// Width of the residual stream; a multiple of `heads`.
    pub width: usize,
    /// Positions a sequence.
    pub context: usize,
    /// Token ids.
    pub vocabulary: usize,
    /// Biases in linear maps and norms.
    pub bias: bool,
    /// Dropout rate after the embedding, and at the end of each residual branch.
    pub dropout: f32,
}

/// Added to the variance in norms.
pub const EPSILON: f32 = 1e-5;

impl Gpt {
    /// The network as blocks.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        let embedding = Embedding {
            words: "wte.weight",
            places: Some(("wpe.weight", self.context)),
            vocabulary: self.vocabulary,
            dropout: self.dropout(),
        };
        let head = Head {
            norm: "ln_f",
            bias: self.bias,
            centred: true,
            epsilon: EPSILON,
            width: self.width,
            vocabulary: self.vocabulary,
            table: Table::Tied,
        };
        let mut blocks: Blocks<B> = vec![Box::new(embedding)];
        blocks.extend((0..self.layers).map(|layer| Box::new(Transformer { gpt: self.clone(), layer }) as _));
        blocks.push(Box::new(head));
        blocks
    }

    fn dropout(&self) -> StreamDropout {
        StreamDropout { rate: self.dropout, width: self.width }
    }

    /// A vector parameter, or none where the model has no biases.
    fn bias(&self, name: String, len: usize) -> Option<Tensor> {
        self.bias.then(|| Tensor::new(name, &[len], Init::Zeros))
    }

    /// Elements of a bias of length `len`.
    fn bias_len(&self, len: usize) -> usize {
        if self.bias { len } else { 0 }
    }
}

/// `x += attention(norm(x)); x += mlp(norm(x))`.
struct Transformer {
    gpt: Gpt,
    layer: usize,
}

impl Transformer {
    /// Lengths of the tensors in storage order: four matrices, then biases and norms.
    fn lens(&self) -> [usize; 12] {
        let d = self.gpt.width;
        let bias = |len| self.gpt.bias_len(len);
        [3 * d * d, d * d, 4 * d * d, 4 * d * d, bias(3 * d), bias(d), bias(4 * d), bias(d), d, bias(d), d, bias(d)]
    }

    fn shapes<B: Backend>(&self, cx: &Context<'_, B>) -> Shapes {
        let (rows, d, heads) = (cx.micro.rows(), self.gpt.width, self.gpt.heads);
        Shapes {
            norm: Norm { rows, width: d, epsilon: EPSILON, centred: true },
            qkv: Linear { rows, inputs: d, outputs: 3 * d },
            attention: Attention {
                batch: cx.micro.samples,
                time: cx.micro.time,
                heads,
                kv_heads: heads,
                head_width: d / heads,
            },
            out: Linear { rows, inputs: d, outputs: d },
            up: Linear { rows, inputs: d, outputs: 4 * d },
            down: Linear { rows, inputs: 4 * d, outputs: d },
        }
    }

    /// Numbers of the two dropout sites; 0 is the embedding's.
    fn sites(&self) -> [usize; 2] {
        [2 * self.layer + 1, 2 * self.layer + 2]
    }
}

/// The operations of a block with their sizes.
struct Shapes {
    norm: Norm,
    qkv: Linear,
    attention: Attention,
    out: Linear,
    up: Linear,
    down: Linear,
}

impl<B: Kernels> Block<B> for Transformer {
    fn name(&self) -> String {
        format!("h.{}", self.layer)
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (d, layer) = (self.gpt.width, self.layer);
        let name = |rest: &str| format!("h.{layer}.{rest}");
        // Both ends of a residual branch start smaller, so that the stream's variance does not grow with depth.
        let residual = INIT / (2.0 * self.gpt.layers as f32).sqrt();
        let matrices = [
            Tensor::new(name("attn.c_attn.weight"), &[3 * d, d], Init::Normal(INIT)).overwritten(),
            Tensor::new(name("attn.c_proj.weight"), &[d, d], Init::Normal(residual)).overwritten(),
            Tensor::new(name("mlp.c_fc.weight"), &[4 * d, d], Init::Normal(INIT)).overwritten(),
            Tensor::new(name("mlp.c_proj.weight"), &[d, 4 * d], Init::Normal(residual)).overwritten(),
        ];
        let vectors = [
            self.gpt.bias(name("attn.c_attn.bias"), 3 * d),
            self.gpt.bias(name("attn.c_proj.bias"), d),
            self.gpt.bias(name("mlp.c_fc.bias"), 4 * d),
            self.gpt.bias(name("mlp.c_proj.bias"), d),
            Some(Tensor::new(name("ln_1.weight"), &[d], Init::Ones)),
            self.gpt.bias(name("ln_1.bias"), d),
            Some(Tensor::new(name("ln_2.weight"), &[d], Init::Ones)),
            self.gpt.bias(name("ln_2.bias"), d),
        ];
        matrices.into_iter().chain(vectors.into_iter().flatten()).collect()
    }

    fn input_per_row(&self) -> usize {
        self.gpt.width
    }

    fn saved_per_row(&self) -> usize {
        // norm 1, qkv, attention, stream, norm 2, up, gelu.
        (1 + 3 + 1 + 1 + 1 + 4 + 4) * self.gpt.width
    }

    fn exact_per_row(&self) -> usize {
        // Statistics of both norms, and the lse.
        4 + self.gpt.heads
    }

    fn scratch_per_row(&self) -> usize {
        // The gradients of stream and up, and that of the branch where dropout masks it.
        (1 + 4 + usize::from(self.gpt.dropout > 0.0)) * self.gpt.width
    }

    fn deferred_per_row(&self) -> usize {
        // The inputs of the four maps, and the gradients of their outputs.
        ((1 + 1 + 1 + 4) + (3 + 1 + 4 + 1)) * self.gpt.width
    }

    fn deferring_scratch_per_row(&self) -> usize {
        // When queries, keys and values get theirs: the gradients of stream, norm and maps' outputs, less up.
        (1 + 1 + (3 + 1 + 4 + 1) - 4) * self.gpt.width
    }

    fn forward(&self, cx: &Context<'_, B>, params: Params<'_, B>, x: &B::Buf) -> Result<(B::Buf, Vec<B::Buf>)> {
        let (b, rows, d) = (cx.backend, cx.micro.rows(), self.gpt.width);
        let s = self.shapes(cx);
        let new = |len| b.alloc(MemoryKind::Activations, len);
        let [w_qkv, w_out, w_up, w_down, b_qkv, b_out, b_up, b_down, w_norm1, b_norm1, w_norm2, b_norm2] =
            split::<B, 12>(params.own, self.lens());
        let [site1, site2] = self.sites();

        let exact = |len| b.alloc_f32(MemoryKind::Activations, len);
        let (mut norm1, mut stats1) = (new(rows * d)?, exact(rows * 2)?);
        b.norm(s.norm, B::all(x), w_norm1, b_norm1, B::all_mut(&mut norm1), B::all_mut(&mut stats1))?;
        let mut qkv = new(rows * 3 * d)?;
        b.linear(s.qkv, B::all(&norm1), w_qkv, b_qkv, B::all_mut(&mut qkv))?;
        let (mut heads, mut lse) = (new(rows * d)?, exact(rows * self.gpt.heads)?);
        b.attention(s.attention, B::all(&qkv), B::all_mut(&mut heads), B::all_mut(&mut lse))?;
        let mut stream = new(rows * d)?;
        b.linear(s.out, B::all(&heads), w_out, b_out, B::all_mut(&mut stream))?;
        self.gpt.dropout().apply(cx, site1, B::all_mut(&mut stream))?;

        let (mut norm2, mut stats2) = (new(rows * d)?, exact(rows * 2)?);
        let (y, stats) = (B::all_mut(&mut norm2), B::all_mut(&mut stats2));
        b.add_norm(s.norm, B::all(x), B::all_mut(&mut stream), w_norm2, b_norm2, y, stats)?;
        let (mut up, mut act) = (new(rows * 4 * d)?, new(rows * 4 * d)?);
        b.linear_gelu(s.up, B::all(&norm2), w_up, b_up, B::all_mut(&mut up), B::all_mut(&mut act))?;
        let mut y = new(rows * d)?;
        b.linear(s.down, B::all(&act), w_down, b_down, B::all_mut(&mut y))?;
        self.gpt.dropout().apply(cx, site2, B::all_mut(&mut y))?;
        b.add(B::all(&stream), B::all_mut(&mut y))?;
        Ok((y, vec![norm1, stats1, qkv, heads, lse, stream, norm2, stats2, up, act]))
    }

    fn backward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        mut grads: Grads<'_, B>,
        x: &B::Buf,
        saved: Vec<B::Buf>,
        mut dy: B::Buf,
    ) -> Result<B::Buf> {
        let (b, rows, d) = (cx.backend, cx.micro.rows(), self.gpt.width);
        let s = self.shapes(cx);
        let new = |len| b.alloc(MemoryKind::Activations, len);
        let [w_qkv, w_out, w_up, w_down, _, _, _, _, w_norm1, _, w_norm2, _] = split::<B, 12>(params.own, self.lens());
        let [a_qkv, a_out, a_up, a_down, b_qkv, b_out, b_up, b_down, a_norm1, b_norm1, a_norm2, b_norm2] =
            ranges(self.lens());
        let [norm1, stats1, qkv, heads, lse, stream, norm2, stats2, up, act] = unpack(saved)?;
        let [site1, site2] = self.sites();

        // dy is the gradient of the stream from here on; each branch adds its share.
        let mut dup = new(rows * 4 * d)?;
        {
            let masked = self.gpt.dropout().masked(cx, site2, &dy)?.map(Arc::new);
            let of_branch = masked.as_ref().map_or(OutputGradient::Changing(&dy), OutputGradient::Kept);
            grads.linear(b, s.down, of_branch, act, At::Own(a_down), b_down)?;
            let dbranch = B::all(masked.as_deref().unwrap_or(&dy));
            b.linear_gelu_backward_input(s.down, dbranch, w_down, B::all(&up), B::all_mut(&mut dup))?;
        }
        drop(up);
        let dup = Arc::new(dup);
        let spare = grads.linear(b, s.up, OutputGradient::Kept(&dup), norm2, At::Own(a_up), b_up)?;
        let mut dnorm = spare.map_or_else(|| new(rows * d), Ok)?;
        b.linear_backward_input(s.up, B::all(&dup), w_up, B::all_mut(&mut dnorm))?;
        drop(dup);
        let (g, dstream) = (B::all(&dnorm), B::all_mut(&mut dy));
        let (dweight, dbias) = grads.pair(&a_norm2, &b_norm2);
        b.norm_backward(s.norm, g, B::all(&stream), w_norm2, B::all(&stats2), dstream, dweight, dbias)?;

        // The second norm's input is not needed any more: its memory takes the gradient of the heads.
        let mut dheads = stream;
        let masked = self.gpt.dropout().masked(cx, site1, &dy)?.map(Arc::new);
        let dbranch = B::all(masked.as_deref().unwrap_or(&dy));
        b.linear_backward_input(s.out, dbranch, w_out, B::all_mut(&mut dheads))?;
        let mut dqkv = new(rows * 3 * d)?;
        let (y, lse, g) = (B::all(&heads), B::all(&lse), B::all(&dheads));
        b.attention_backward(s.attention, B::all(&qkv), y, lse, g, B::all_mut(&mut dqkv))?;
        drop(qkv);
        let of_branch = masked.as_ref().map_or(OutputGradient::Changing(&dy), OutputGradient::Kept);
        grads.linear(b, s.out, of_branch, heads, At::Own(a_out), b_out)?;
        let dqkv = Arc::new(dqkv);
        grads.linear(b, s.qkv, OutputGradient::Kept(&dqkv), norm1, At::Own(a_qkv), b_qkv)?;
        b.linear_backward_input(s.qkv, B::all(&dqkv), w_qkv, B::all_mut(&mut dnorm))?;
        let (g, dstream) = (B::all(&dnorm), B::all_mut(&mut dy));
        let (dweight, dbias) = grads.pair(&a_norm1, &b_norm1);
        b.norm_backward(s.norm, g, B::all(x), w_norm1, B::all(&stats1), dstream, dweight, dbias)?;
        Ok(dy)
    }
}
