//! Llama (Touvron et al., "LLaMA: open and efficient foundation language models", 2023): RMS norms,
//! rotary positions, SwiGLU, no biases; grouped-query attention as in Llama 2 and 3.
//!
//! Tensors have the names of Hugging Face's `LlamaForCausalLM`, without `model.`. The weights of
//! queries, keys and values are consecutive in a unit, and so are gates and ups: each group is one
//! fused matmul.
//!
//! Shape letters: b sequences, t context, d width, f hidden width; rows are b·t.

use std::sync::Arc;

use super::dropout::ResidualDropout;
use super::embedding::Embedding;
use super::kv_cache::attend;
use super::lm_head::{Head, Table};
use super::rope::{FrequencyScaling, RopeTable};
use super::tensor_parallel::{ColumnLinear, NormGradRanges, TensorParallel};
use super::wgrad::GradRange;
use super::{Block, Blocks, Context, Grads, INIT, KvCache, Params, take};
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Cut, Init, Tensor, TensorShards};
use hpctrain_device::{Attention, Backend, Kernels, Linear, MemoryKind, Norm, Rotary};

/// The hyperparameters of a Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    /// The number of transformer blocks.
    pub layers: usize,
    /// The number of query heads per block.
    pub heads: usize,
    /// The number of key and value heads per block, a divisor of `heads`.
    pub kv_heads: usize,
    /// The width of the residual stream, a multiple of 2·`heads`.
    pub width: usize,
    /// The hidden width of a block's MLP.
    pub hidden: usize,
    /// The number of positions per sequence.
    pub context: usize,
    /// The number of token ids.
    pub vocabulary: usize,
    /// The base of the RoPE frequencies.
    pub rope_theta: f64,
    /// The scaling of the RoPE frequencies.
    pub rope_scaling: FrequencyScaling,
    /// The constant added to the mean square in norms.
    pub epsilon: f32,
    /// Whether the LM head is tied to the token embedding.
    pub tied: bool,
    /// The dropout rate after the embedding and at the end of each residual branch.
    pub dropout: f32,
}

impl Llama {
    /// Returns the network as blocks.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        self.tensor_parallel_blocks(&TensorShards::whole())
    }

    /// Returns the network as blocks, sharded for the virtual tensor ranks `slices` of this rank.
    /// The number of key heads must be a multiple of the number of virtual tensor ranks.
    pub fn tensor_parallel_blocks<B: Kernels>(&self, slices: &TensorShards) -> Blocks<B> {
        let embedding = Embedding {
            token_table: "embed_tokens.weight",
            position_table: None,
            vocabulary: self.vocabulary,
            dropout: self.dropout(),
            slices: slices.clone(),
        };
        let head = Head {
            norm: "norm",
            bias: false,
            centred: false,
            epsilon: self.epsilon,
            width: self.width,
            vocabulary: self.vocabulary,
            table: if self.tied { Table::Tied } else { Table::Own("lm_head.weight") },
            slices: slices.clone(),
        };
        let angles = Arc::new(RopeTable::new(
            self.rope_theta,
            self.rope_scaling,
            self.head_width(),
            self.context,
        ));
        let mut blocks: Blocks<B> = vec![Box::new(embedding)];
        blocks.extend((0..self.layers).map(|layer| {
            Box::new(Decoder {
                llama: self.clone(),
                layer,
                angles: angles.clone(),
                slices: slices.clone(),
            }) as _
        }));
        blocks.push(Box::new(head));
        blocks
    }

    /// Returns the width of a head.
    pub fn head_width(&self) -> usize {
        self.width / self.heads
    }

    fn dropout(&self) -> ResidualDropout {
        ResidualDropout { rate: self.dropout, width: self.width }
    }
}

/// `x += attention(norm(x)); x += mlp(norm(x))`.
struct Decoder<B: Backend> {
    llama: Llama,
    layer: usize,
    angles: Arc<RopeTable<B>>,
    slices: TensorShards,
}

impl<B: Backend> Decoder<B> {
    /// Returns the lengths of a virtual rank's fused weights in storage order: QKV; out; gates and
    /// ups; down; two norms.
    fn lens(&self, virtual_rank: usize) -> [usize; 6] {
        let d = self.llama.width;
        let f = self.hidden(virtual_rank);
        [self.packed() * d, d * self.heads_width(), 2 * f * d, f * d, d, d]
    }

    /// Returns the width of a virtual rank's queries.
    fn heads_width(&self) -> usize {
        self.llama.width / self.slices.total
    }

    /// Returns the width of a virtual rank's packed queries, keys and values.
    fn packed(&self) -> usize {
        let Llama { heads, kv_heads, .. } = self.llama;
        (heads + 2 * kv_heads) / self.slices.total * self.llama.head_width()
    }

    /// Returns the number of gates of a virtual rank.
    fn hidden(&self, virtual_rank: usize) -> usize {
        self.slices.share(self.llama.hidden, virtual_rank).len()
    }

    /// Returns an upper bound of the number of gates of all virtual ranks of this rank.
    fn all_hidden(&self) -> usize {
        self.slices.held.len() * self.hidden(0)
    }

    fn shapes(&self, cx: &Context<'_, B>) -> Shapes {
        let Llama { width: d, epsilon, .. } = self.llama;
        let rows = cx.micro.rows();
        let batch = cx.micro.samples;
        let time = cx.micro.time;
        let head_width = self.llama.head_width();
        let [heads, kv_heads] =
            [self.llama.heads, self.llama.kv_heads].map(|heads| heads / self.slices.total);
        let packed = self.packed();
        Shapes {
            norm: Norm { rows, width: d, epsilon, centred: false },
            qkv: Linear::new(rows, d, packed),
            // Only queries and keys are rotated, not the values behind them.
            rotary: Rotary {
                batch,
                time,
                heads: heads + kv_heads,
                head_width,
                width: packed,
                inverse: false,
            },
            attention: Attention { batch, time, heads, kv_heads, head_width },
            out: Linear::new(rows, self.heads_width(), d),
        }
    }

    /// Returns the linear layer to gates and ups, of a virtual rank.
    fn gate_up(&self, rows: usize, virtual_rank: usize) -> Linear {
        Linear::new(rows, self.llama.width, 2 * self.hidden(virtual_rank))
    }

    /// Returns the down projection of a virtual rank.
    fn down(&self, rows: usize, virtual_rank: usize) -> Linear {
        Linear::new(rows, self.hidden(virtual_rank), self.llama.width)
    }

    /// Returns the numbers of the two dropout sites. Site 0 belongs to the embedding.
    fn sites(&self) -> [usize; 2] {
        [2 * self.layer + 1, 2 * self.layer + 2]
    }
}

/// The operations of a block with their sizes: norms of all rows, the rest of one virtual rank.
struct Shapes {
    norm: Norm,
    qkv: Linear,
    rotary: Rotary,
    attention: Attention,
    out: Linear,
}

impl<B: Kernels> Decoder<B> {
    /// Returns the output and the saved buffers. With a KV cache `past` the positions are added to
    /// it, and the saved buffers are of no use.
    fn compute(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
        mut past: Option<&mut KvCache<B>>,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let b = cx.backend;
        let rows = cx.micro.rows();
        let d = self.llama.width;
        let drop_out = self.llama.dropout();
        let s = self.shapes(cx);
        let virtual_ranks = TensorParallel::new(cx, &self.slices);
        let new = |len| b.alloc(MemoryKind::Activations, len);
        let [w_qkv, w_out, w_gate_up, w_down, w_norm1, w_norm2] =
            virtual_ranks.parameters(&params, |virtual_rank| self.lens(virtual_rank));
        let (none, _) = B::split_at(params.own, 0);
        let ([site1, site2], first_row) = (self.sites(), virtual_ranks.own_rows().start);
        let before = x;
        // If nothing comes between a matmul and its addition to the stream, the matmul adds the
        // stream.
        let joined = virtual_ranks.is_unsharded() && !drop_out.drops(cx) && b.fuses_add();

        let (norm1, stats1) = virtual_ranks.norm(s.norm, x, w_norm1[0], none)?;
        let all_rows = virtual_ranks.gather(&norm1, d)?;
        let mut of_virtual_ranks = Vec::with_capacity(5 * self.slices.held.len());
        let branch = virtual_ranks.sum(rows * d, None, |k, y| {
            let x = B::all(all_rows.as_ref().unwrap_or(&norm1));
            let project = |first: usize, mut to: B::ViewMut<'_>| {
                b.linear(s.qkv, x, w_qkv[k], none, B::reborrow(&mut to))?;
                let (_, angles) =
                    B::split_at(self.angles.table(b)?, first * self.llama.head_width());
                b.rotary(s.rotary, angles, to)
            };
            let mut heads = new(rows * self.heads_width())?;
            let mut lse = b.alloc_f32(MemoryKind::Activations, rows * s.attention.heads)?;
            let qkv =
                attend(b, past.as_deref_mut(), k, s.attention, project, [&mut heads, &mut lse])?;
            match joined {
                true => b.linear_add(s.out, B::all(&heads), w_out[k], none, B::all(before), y)?,
                false => b.linear(s.out, B::all(&heads), w_out[k], none, y)?,
            }
            of_virtual_ranks.extend(qkv.into_iter().chain([heads, lse]));
            Ok(())
        })?;
        drop(all_rows);
        let mut stream = virtual_ranks.wait_sum(virtual_ranks.start_sum(branch), d)?;
        drop_out.apply(cx, site1, first_row, B::all_mut(&mut stream))?;

        let (norm2, stats2) = match joined {
            true => virtual_ranks.norm(s.norm, &stream, w_norm2[0], none)?,
            false => virtual_ranks.add_norm(s.norm, x, &mut stream, w_norm2[0], none)?,
        };
        let all_rows = virtual_ranks.gather(&norm2, d)?;
        let branch = virtual_ranks.sum(rows * d, None, |k, y| {
            let virtual_rank = self.slices.held.start + k;
            let f = self.hidden(virtual_rank);
            let mut gate_up = new(rows * 2 * f)?;
            let mut act = new(rows * f)?;
            let x = B::all(all_rows.as_ref().unwrap_or(&norm2));
            b.linear(
                self.gate_up(rows, virtual_rank),
                x,
                w_gate_up[k],
                none,
                B::all_mut(&mut gate_up),
            )?;
            b.swiglu(f, B::all(&gate_up), B::all_mut(&mut act))?;
            match joined {
                true => b.linear_add(
                    self.down(rows, virtual_rank),
                    B::all(&act),
                    w_down[k],
                    none,
                    B::all(&stream),
                    y,
                )?,
                false => {
                    b.linear(self.down(rows, virtual_rank), B::all(&act), w_down[k], none, y)?
                }
            }
            of_virtual_ranks.extend([gate_up, act]);
            Ok(())
        })?;
        drop(all_rows);
        let mut y = virtual_ranks.wait_sum(virtual_ranks.start_sum(branch), d)?;
        drop_out.apply(cx, site2, first_row, B::all_mut(&mut y))?;
        if !joined {
            b.add(B::all(&stream), B::all_mut(&mut y))?;
        }
        Ok((
            y,
            [norm1, stats1, stream, norm2, stats2].into_iter().chain(of_virtual_ranks).collect(),
        ))
    }
}

impl<B: Kernels> Block<B> for Decoder<B> {
    fn name(&self) -> String {
        format!("layers.{}", self.layer)
    }

    fn tensors(&self) -> Vec<Tensor> {
        let Llama { kv_heads, width: d, hidden: f, layers, .. } = self.llama;
        let keys = kv_heads * self.llama.head_width();
        // Both ends of a residual branch start smaller, so that the stream's variance does not grow
        // with depth.
        let residual = INIT / (2.0 * layers as f32).sqrt();
        let tensor = |rest: &str, shape: &[usize], init| {
            Tensor::new(format!("layers.{}.{rest}.weight", self.layer), shape, init)
        };
        let matrix = |rest: &str, shape: [usize; 2], init, cut| {
            tensor(rest, &shape, Init::Normal(init)).overwritten().cut(cut)
        };
        let rows = Cut::Rows { segments: 1 };
        vec![
            matrix("self_attn.q_proj", [d, d], INIT, rows),
            matrix("self_attn.k_proj", [keys, d], INIT, rows),
            matrix("self_attn.v_proj", [keys, d], INIT, rows),
            matrix("self_attn.o_proj", [d, d], residual, Cut::Columns),
            matrix("mlp.gate_proj", [f, d], INIT, rows),
            matrix("mlp.up_proj", [f, d], INIT, rows),
            matrix("mlp.down_proj", [d, f], residual, Cut::Columns),
            tensor("input_layernorm", &[d], Init::Ones),
            tensor("post_attention_layernorm", &[d], Init::Ones),
        ]
    }

    fn input_per_row(&self) -> usize {
        self.llama.width
    }

    fn saved_elems_per_row(&self) -> usize {
        // Norm 1, stream, norm 2; for each virtual rank QKV, heads; gates, ups and their SwiGLU.
        let of_virtual_rank = self.packed() + self.heads_width();
        self.slices.own(3 * self.llama.width)
            + self.slices.held.len() * of_virtual_rank
            + 3 * self.all_hidden()
    }

    fn saved_f32_per_row(&self) -> usize {
        // The statistics of both norms, and the LSE.
        self.slices.own(4) + self.slices.held.len() * self.llama.heads / self.slices.total
    }

    fn forward_scratch_per_row(&self) -> usize {
        let width = self.llama.width;
        self.slices.sums(width).saturating_sub(self.slices.own(width))
    }

    fn scratch_per_row(&self) -> usize {
        // The gradient of the stream, and that of the branch if dropout masks it. The gradient of
        // QKV is allocated after gates, ups and their SwiGLU are freed, sums over virtual ranks
        // after the SwiGLU is freed.
        let (Llama { width, dropout, .. }, slices) = (&self.llama, &self.slices);
        let streams = if *dropout > 0.0 { 2 } else { 1 };
        let packed = (slices.held.len() * self.packed()).saturating_sub(3 * self.all_hidden());
        let sums = slices.sums(*width).saturating_sub(self.all_hidden());
        slices.own(streams * width) + slices.gathered(*width).max(packed).max(sums)
    }

    fn deferred_per_row(&self) -> usize {
        // The inputs of the four linear layers (two norms, heads, SwiGLU) and the gradients of
        // their outputs.
        let width = self.llama.width;
        let virtual_ranks = self.slices.held.len();
        (2 * width + virtual_ranks * self.heads_width() + self.all_hidden())
            + (virtual_ranks * self.packed() + width + 2 * self.all_hidden() + width)
    }

    fn deferred_scratch_per_row(&self) -> usize {
        // Besides the gradient of the stream and the copies: first the gradient of the SwiGLU;
        // later those of the norm and of QKV.
        let width = self.llama.width;
        let slices = &self.slices;
        let packed = slices.held.len() * self.packed();
        (2 * width + self.all_hidden())
            .max(slices.own(width) + slices.sums(width).max(width) + 2 * width + packed)
    }

    fn constants(&self) -> usize {
        if self.layer == 0 { self.angles.len() } else { 0 }
    }

    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        self.compute(cx, params, x, None)
    }

    fn supports_kv_cache(&self) -> bool {
        true
    }

    fn forward_cached(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
        past: &mut KvCache<B>,
    ) -> Result<B::Buf> {
        let (y, _) = self.compute(cx, params, x, Some(past))?;
        past.advance(cx.micro.rows())?;
        Ok(y)
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
        let b = cx.backend;
        let rows = cx.micro.rows();
        let d = self.llama.width;
        let a = self.heads_width();
        let s = self.shapes(cx);
        let virtual_ranks = TensorParallel::new(cx, &self.slices);
        let count = self.slices.held.len();
        let [w_qkv, w_out, w_gate_up, w_down, w_norm1, w_norm2] =
            virtual_ranks.parameters(&params, |virtual_rank| self.lens(virtual_rank));
        let [a_qkv, a_out, a_gate_up, a_down, a_norm1, a_norm2] =
            virtual_ranks.places(params.section, |virtual_rank| self.lens(virtual_rank));
        let mut saved = saved.into_iter();
        let [norm1, stats1, stream, norm2, stats2] = take(&mut saved)?;
        let attention: Vec<[B::Buf; 3]> =
            (0..count).map(|_| take(&mut saved)).collect::<Result<_>>()?;
        let mlp: Vec<[B::Buf; 2]> = (0..count).map(|_| take(&mut saved)).collect::<Result<_>>()?;
        let (dropout, [site1, site2]) = (self.llama.dropout(), self.sites());
        let new = |len| b.alloc(MemoryKind::Activations, len);
        let no_biases = vec![0..0; count];

        // From here on dy is the gradient of the stream, to which each branch adds its own.
        // Gradients reuse the memory of values that are not needed any more.
        let mut dgate_ups = Vec::with_capacity(count);
        let branch = virtual_ranks.branch(dropout, site2, &dy, grads.deferred.is_some())?;
        for (k, [mut gate_up, act]) in mlp.into_iter().enumerate() {
            let virtual_rank = self.slices.held.start + k;
            let down = self.down(rows, virtual_rank);
            let f = self.hidden(virtual_rank);
            let act = Arc::new(act);
            grads.linear(
                b,
                down,
                branch.of_output(&dy),
                &act,
                GradRange::Own(a_down[k].clone()),
                0..0,
            )?;
            let mut dact = Arc::into_inner(act).map_or_else(|| new(rows * f), Ok)?;
            b.linear_backward_input(down, branch.all(&dy), w_down[k], B::all_mut(&mut dact))?;
            b.swiglu_backward(f, B::all_mut(&mut gate_up), B::all(&dact))?;
            dgate_ups.push((Arc::new(gate_up), 0..rows * 2 * f));
        }
        drop(branch);
        let shapes =
            self.slices.held.clone().map(|virtual_rank| self.gate_up(rows, virtual_rank)).collect();
        let map = ColumnLinear {
            shapes,
            weights: w_gate_up,
            places: GradRange::own(a_gate_up),
            biases: no_biases.clone(),
        };
        let dnorm = virtual_ranks.column_backward(
            &map,
            &mut grads,
            dgate_ups,
            virtual_ranks.gathered(norm2, d)?,
        )?;
        let places = NormGradRanges { weights: &a_norm2, biases: &no_biases };
        virtual_ranks.norm_backward(
            s.norm, &dnorm, &stream, w_norm2[0], &stats2, &mut dy, &mut grads, places,
        )?;
        drop(dnorm);

        let mut spare = Some(stream).filter(|_| self.slices.total == 1);
        let mut dqkvs = Vec::with_capacity(count);
        let branch = virtual_ranks.branch(dropout, site1, &dy, grads.deferred.is_some())?;
        for (k, [qkv, heads, lse]) in attention.into_iter().enumerate() {
            let mut dheads = spare.take().map_or_else(|| new(rows * a), Ok)?;
            b.linear_backward_input(s.out, branch.all(&dy), w_out[k], B::all_mut(&mut dheads))?;
            let mut dqkv = new(rows * self.packed())?;
            let y = B::all(&heads);
            let lse = B::all(&lse);
            let g = B::all(&dheads);
            b.attention_backward(s.attention, B::all(&qkv), y, lse, g, B::all_mut(&mut dqkv))?;
            drop(qkv);
            grads.linear(
                b,
                s.out,
                branch.of_output(&dy),
                &Arc::new(heads),
                GradRange::Own(a_out[k].clone()),
                0..0,
            )?;
            b.rotary(
                Rotary { inverse: true, ..s.rotary },
                self.angles.table(b)?,
                B::all_mut(&mut dqkv),
            )?;
            dqkvs.push((Arc::new(dqkv), 0..rows * self.packed()));
        }
        drop(branch);
        let map = ColumnLinear {
            shapes: vec![s.qkv; count],
            weights: w_qkv,
            places: GradRange::own(a_qkv),
            biases: no_biases.clone(),
        };
        let dnorm = virtual_ranks.column_backward(
            &map,
            &mut grads,
            dqkvs,
            virtual_ranks.gathered(norm1, d)?,
        )?;
        let places = NormGradRanges { weights: &a_norm1, biases: &no_biases };
        virtual_ranks
            .norm_backward(s.norm, &dnorm, x, w_norm1[0], &stats1, &mut dy, &mut grads, places)?;
        Ok(dy)
    }
}
