//! Llama (Touvron et al., "LLaMA: open and efficient foundation language models", 2023): RMS norms, rotary positions,
//! SwiGLU, no biases; grouped-query attention as in Llama 2 and 3.
//!
//! Tensors have the names of Hugging Face's `LlamaForCausalLM`, without `model.`. Queries, keys and values lie one after
//! the other in a unit, and so do gates and ups: each is one matrix product.
//!
//! Shape letters: b sequences, t context, d width, f hidden width; rows are b·t.

use std::sync::Arc;

use super::dropout::StreamDropout;
use super::embedding::Embedding;
use super::gradients::{At, OutputGradient, ranges};
use super::head::{Head, Table};
use super::rotary::Angles;
use super::{Block, Blocks, Context, Grads, INIT, Params, unpack};
use crate::backend::{Attention, Backend, Kernels, Linear, MemoryKind, Norm, Rotary, split};
use crate::error::Result;
use crate::layout::{Init, Tensor};

/// The size of a Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    /// Transformer blocks.
    pub layers: usize,
    /// Heads of queries a block.
    pub heads: usize,
    /// Heads of keys and values; a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of the residual stream; a multiple of 2·`heads`.
    pub width: usize,
    /// Gates of a block.
    pub hidden: usize,
    /// Positions a sequence.
    pub context: usize,
    /// Token ids.
    pub vocabulary: usize,
    /// Base of the angles of rotary positions.
    pub rope_theta: f64,
    /// Added to the mean square in norms.
    pub epsilon: f32,
    /// Whether the output matrix is the token table.
    pub tied: bool,
    /// Dropout rate after the embedding, and at the end of each residual branch.
    pub dropout: f32,
}

impl Llama {
    /// The network as blocks.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        let embedding = Embedding {
            words: "embed_tokens.weight",
            places: None,
            vocabulary: self.vocabulary,
            dropout: self.dropout(),
        };
        let head = Head {
            norm: "norm",
            bias: false,
            centred: false,
            epsilon: self.epsilon,
            width: self.width,
            vocabulary: self.vocabulary,
            table: if self.tied { Table::Tied } else { Table::Own("lm_head.weight") },
        };
        let angles = Arc::new(Angles::new(self.rope_theta, self.head_width(), self.context));
        let decoder = |layer| Decoder { llama: self.clone(), layer, angles: angles.clone() };
        let mut blocks: Blocks<B> = vec![Box::new(embedding)];
        blocks.extend((0..self.layers).map(|layer| Box::new(decoder(layer)) as _));
        blocks.push(Box::new(head));
        blocks
    }

    /// Width of a head.
    pub fn head_width(&self) -> usize {
        self.width / self.heads
    }

    fn dropout(&self) -> StreamDropout {
        StreamDropout { rate: self.dropout, width: self.width }
    }
}

/// `x += attention(norm(x)); x += mlp(norm(x))`.
struct Decoder<B: Backend> {
    llama: Llama,
    layer: usize,
    angles: Arc<Angles<B>>,
}

impl<B: Backend> Decoder<B> {
    /// Lengths of the parts that are used at once, in storage order: queries, keys and values; out; gates and ups;
    /// down; two norms.
    fn lens(&self) -> [usize; 6] {
        let Llama { width: d, hidden: f, .. } = self.llama;
        [self.packed() * d, d * d, 2 * f * d, f * d, d, d]
    }

    /// Columns of queries, keys and values.
    fn packed(&self) -> usize {
        let Llama { heads, kv_heads, .. } = self.llama;
        (heads + 2 * kv_heads) * self.llama.head_width()
    }

    fn shapes(&self, cx: &Context<'_, B>) -> Shapes {
        let Llama { heads, kv_heads, width: d, hidden: f, epsilon, .. } = self.llama;
        let (rows, batch, time, head_width) = (cx.micro.rows(), cx.micro.samples, cx.micro.time, d / heads);
        let packed = self.packed();
        Shapes {
            norm: Norm { rows, width: d, epsilon, centred: false },
            qkv: Linear { rows, inputs: d, outputs: packed },
            // Queries and keys turn; the values behind them do not.
            rotary: Rotary { batch, time, heads: heads + kv_heads, head_width, width: packed, back: false },
            attention: Attention { batch, time, heads, kv_heads, head_width },
            out: Linear { rows, inputs: d, outputs: d },
            gate_up: Linear { rows, inputs: d, outputs: 2 * f },
            down: Linear { rows, inputs: f, outputs: d },
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
    rotary: Rotary,
    attention: Attention,
    out: Linear,
    gate_up: Linear,
    down: Linear,
}

impl<B: Kernels> Block<B> for Decoder<B> {
    fn name(&self) -> String {
        format!("layers.{}", self.layer)
    }

    fn tensors(&self) -> Vec<Tensor> {
        let Llama { kv_heads, width: d, hidden: f, layers, .. } = self.llama;
        let keys = kv_heads * self.llama.head_width();
        // Both ends of a residual branch start smaller, so that the stream's variance does not grow with depth.
        let residual = INIT / (2.0 * layers as f32).sqrt();
        let tensor = |rest: &str, shape: &[usize], init| {
            let tensor = Tensor::new(format!("layers.{}.{rest}.weight", self.layer), shape, init);
            if tensor.decays() { tensor.overwritten() } else { tensor }
        };
        vec![
            tensor("self_attn.q_proj", &[d, d], Init::Normal(INIT)),
            tensor("self_attn.k_proj", &[keys, d], Init::Normal(INIT)),
            tensor("self_attn.v_proj", &[keys, d], Init::Normal(INIT)),
            tensor("self_attn.o_proj", &[d, d], Init::Normal(residual)),
            tensor("mlp.gate_proj", &[f, d], Init::Normal(INIT)),
            tensor("mlp.up_proj", &[f, d], Init::Normal(INIT)),
            tensor("mlp.down_proj", &[d, f], Init::Normal(residual)),
            tensor("input_layernorm", &[d], Init::Ones),
            tensor("post_attention_layernorm", &[d], Init::Ones),
        ]
    }

    fn input_per_row(&self) -> usize {
        self.llama.width
    }

    fn saved_per_row(&self) -> usize {
        // norm 1, qkv, attention, stream, norm 2; gates, ups and their product.
        4 * self.llama.width + self.packed() + 3 * self.llama.hidden
    }

    fn exact_per_row(&self) -> usize {
        // Statistics of both norms, and the lse.
        4 + self.llama.heads
    }

    fn scratch_per_row(&self) -> usize {
        // The stream's gradient, and that of the branch where dropout masks it. The gradient of queries, keys and values
        // comes when the memory of gates, ups and their product is free.
        let Llama { width, hidden, dropout, .. } = self.llama;
        (1 + usize::from(dropout > 0.0)) * width + self.packed().saturating_sub(3 * hidden)
    }

    fn deferred_per_row(&self) -> usize {
        // The inputs of the four maps: two norms, heads, gates times ups; and the gradients of their outputs.
        let Llama { width, hidden, .. } = self.llama;
        (3 * width + hidden) + (self.packed() + width + 2 * hidden + width)
    }

    fn deferring_scratch_per_row(&self) -> usize {
        // With the stream's gradient and those that are copied: the gradient of the gates times ups; or, later, the norm's and
        // that of queries, keys and values.
        let Llama { width, hidden, .. } = self.llama;
        (2 * width + hidden).max(4 * width + self.packed())
    }

    fn constants(&self) -> usize {
        if self.layer == 0 { self.angles.len() } else { 0 }
    }

    fn forward(&self, cx: &Context<'_, B>, params: Params<'_, B>, x: &B::Buf) -> Result<(B::Buf, Vec<B::Buf>)> {
        let (b, rows, d, f) = (cx.backend, cx.micro.rows(), self.llama.width, self.llama.hidden);
        let (s, drop) = (self.shapes(cx), self.llama.dropout());
        let new = |len| b.alloc(MemoryKind::Activations, len);
        let exact = |len| b.alloc_f32(MemoryKind::Activations, len);
        let [w_qkv, w_out, w_gate_up, w_down, w_norm1, w_norm2] = split::<B, 6>(params.own, self.lens());
        let (none, _) = B::cut(params.own, 0);
        let [site1, site2] = self.sites();

        let (mut norm1, mut stats1) = (new(rows * d)?, exact(rows * 2)?);
        b.norm(s.norm, B::all(x), w_norm1, none, B::all_mut(&mut norm1), B::all_mut(&mut stats1))?;
        let mut qkv = new(rows * self.packed())?;
        b.linear(s.qkv, B::all(&norm1), w_qkv, none, B::all_mut(&mut qkv))?;
        b.rotary(s.rotary, self.angles.table(b)?, B::all_mut(&mut qkv))?;
        let (mut heads, mut lse) = (new(rows * d)?, exact(rows * self.llama.heads)?);
        b.attention(s.attention, B::all(&qkv), B::all_mut(&mut heads), B::all_mut(&mut lse))?;
        let mut stream = new(rows * d)?;
        b.linear(s.out, B::all(&heads), w_out, none, B::all_mut(&mut stream))?;
        drop.apply(cx, site1, B::all_mut(&mut stream))?;

        let (mut norm2, mut stats2) = (new(rows * d)?, exact(rows * 2)?);
        let (y, stats) = (B::all_mut(&mut norm2), B::all_mut(&mut stats2));
        b.add_norm(s.norm, B::all(x), B::all_mut(&mut stream), w_norm2, none, y, stats)?;
        let (mut gate_up, mut act) = (new(rows * 2 * f)?, new(rows * f)?);
        b.linear(s.gate_up, B::all(&norm2), w_gate_up, none, B::all_mut(&mut gate_up))?;
        b.swiglu(f, B::all(&gate_up), B::all_mut(&mut act))?;
        let mut y = new(rows * d)?;
        b.linear(s.down, B::all(&act), w_down, none, B::all_mut(&mut y))?;
        drop.apply(cx, site2, B::all_mut(&mut y))?;
        b.add(B::all(&stream), B::all_mut(&mut y))?;
        Ok((y, vec![norm1, stats1, qkv, heads, lse, stream, norm2, stats2, gate_up, act]))
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
        let (b, rows, f) = (cx.backend, cx.micro.rows(), self.llama.hidden);
        let (s, dropout) = (self.shapes(cx), self.llama.dropout());
        let [w_qkv, w_out, w_gate_up, w_down, w_norm1, w_norm2] = split::<B, 6>(params.own, self.lens());
        let [a_qkv, a_out, a_gate_up, a_down, a_norm1, a_norm2] = ranges(self.lens());
        let [norm1, stats1, qkv, heads, lse, stream, norm2, stats2, mut gate_up, act] = unpack(saved)?;
        let [site1, site2] = self.sites();
        let new = |len| b.alloc(MemoryKind::Activations, len);
        let no_bias = 0..0;

        // dy is the gradient of the stream from here on; each branch adds its share. Buffers whose values are not
        // needed any more take gradients.
        let mut dact;
        {
            let masked = dropout.masked(cx, site2, &dy)?.map(Arc::new);
            let of_branch = masked.as_ref().map_or(OutputGradient::Changing(&dy), OutputGradient::Kept);
            let spare = grads.linear(b, s.down, of_branch, act, At::Own(a_down), no_bias.clone())?;
            dact = spare.map_or_else(|| new(rows * f), Ok)?;
            let dbranch = B::all(masked.as_deref().unwrap_or(&dy));
            b.linear_backward_input(s.down, dbranch, w_down, B::all_mut(&mut dact))?;
        }
        b.swiglu_backward(f, B::all_mut(&mut gate_up), B::all(&dact))?;
        drop(dact);
        let dgate_up = Arc::new(gate_up);
        let of_maps = OutputGradient::Kept(&dgate_up);
        let spare = grads.linear(b, s.gate_up, of_maps, norm2, At::Own(a_gate_up), no_bias.clone())?;
        let mut dnorm = spare.map_or_else(|| new(rows * self.llama.width), Ok)?;
        b.linear_backward_input(s.gate_up, B::all(&dgate_up), w_gate_up, B::all_mut(&mut dnorm))?;
        drop(dgate_up);
        let (g, dstream, stats) = (B::all(&dnorm), B::all_mut(&mut dy), B::all(&stats2));
        let (dweight, none) = grads.pair(&a_norm2, &no_bias);
        b.norm_backward(s.norm, g, B::all(&stream), w_norm2, stats, dstream, dweight, none)?;

        let mut dheads = stream;
        let masked = dropout.masked(cx, site1, &dy)?.map(Arc::new);
        let dbranch = B::all(masked.as_deref().unwrap_or(&dy));
        b.linear_backward_input(s.out, dbranch, w_out, B::all_mut(&mut dheads))?;
        let mut dqkv = new(rows * self.packed())?;
        let (y, lse, g) = (B::all(&heads), B::all(&lse), B::all(&dheads));
        b.attention_backward(s.attention, B::all(&qkv), y, lse, g, B::all_mut(&mut dqkv))?;
        drop(qkv);
        let of_branch = masked.as_ref().map_or(OutputGradient::Changing(&dy), OutputGradient::Kept);
        grads.linear(b, s.out, of_branch, heads, At::Own(a_out), no_bias.clone())?;
        b.rotary(Rotary { back: true, ..s.rotary }, self.angles.table(b)?, B::all_mut(&mut dqkv))?;
        let dqkv = Arc::new(dqkv);
        grads.linear(b, s.qkv, OutputGradient::Kept(&dqkv), norm1, At::Own(a_qkv), no_bias.clone())?;
        b.linear_backward_input(s.qkv, B::all(&dqkv), w_qkv, B::all_mut(&mut dnorm))?;
        let (g, dstream, stats) = (B::all(&dnorm), B::all_mut(&mut dy), B::all(&stats1));
        let (dweight, none) = grads.pair(&a_norm1, &no_bias);
        b.norm_backward(s.norm, g, B::all(x), w_norm1, stats, dstream, dweight, none)?;
        Ok(dy)
    }
}
