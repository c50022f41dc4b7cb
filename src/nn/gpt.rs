//! GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019): learned
//! positions, pre-norm blocks, tanh-GELU, an output head tied to the token table.
//!
//! Shape letters: b sequences, t context, d width, h heads, v vocabulary; rows are b·t.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dropout::ResidualDropout;
use super::embedding::Embedding;
use super::kv_cache::attend;
use super::lm_head::{Head, Table};
use super::tensor_parallel::{ColumnLinear, NormGradRanges, TensorParallel};
use super::wgrad::GradRange;
use super::{Block, Blocks, Context, Grads, INIT, KvCache, Params, take};
use hpctrain_base::error::Result;
use hpctrain_base::layout::{Cut, Init, Tensor, TensorShards};
use hpctrain_device::{Attention, Backend, Kernels, Linear, MemoryKind, Norm};

/// The hyperparameters of a GPT.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpt {
    /// The number of transformer blocks.
    pub layers: usize,
    /// The number of attention heads per block.
    pub heads: usize,
    /// The width of the residual stream, a multiple of `heads`.
    pub width: usize,
    /// The number of positions per sequence.
    pub context: usize,
    /// The number of token ids.
    pub vocabulary: usize,
    /// Whether linear layers and norms have biases.
    pub bias: bool,
    /// The dropout rate after the embedding and at the end of each residual branch.
    pub dropout: f32,
}

/// The constant added to the variance in norms.
pub const EPSILON: f32 = 1e-5;

impl Gpt {
    /// Returns the network as blocks.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        self.tensor_parallel_blocks(&TensorShards::whole())
    }

    /// Returns the network as blocks, sharded for the virtual tensor ranks `slices` of this rank.
    /// The number of heads must be a multiple of the number of virtual tensor ranks.
    pub fn tensor_parallel_blocks<B: Kernels>(&self, slices: &TensorShards) -> Blocks<B> {
        let embedding = Embedding {
            token_table: "wte.weight",
            position_table: Some(("wpe.weight", self.context)),
            vocabulary: self.vocabulary,
            dropout: self.dropout(),
            slices: slices.clone(),
        };
        let head = Head {
            norm: "ln_f",
            bias: self.bias,
            centred: true,
            epsilon: EPSILON,
            width: self.width,
            vocabulary: self.vocabulary,
            table: Table::Tied,
            slices: slices.clone(),
        };
        let mut blocks: Blocks<B> = vec![Box::new(embedding)];
        blocks.extend((0..self.layers).map(|layer| {
            Box::new(Transformer { gpt: self.clone(), layer, slices: slices.clone() }) as _
        }));
        blocks.push(Box::new(head));
        blocks
    }

    fn dropout(&self) -> ResidualDropout {
        ResidualDropout { rate: self.dropout, width: self.width }
    }

    /// Returns a bias parameter, or `None` if the model has no biases.
    fn bias(&self, name: String, len: usize) -> Option<Tensor> {
        self.bias.then(|| Tensor::new(name, &[len], Init::Zeros))
    }

    /// Returns the length of a bias, `len` or 0.
    fn bias_len(&self, len: usize) -> usize {
        if self.bias { len } else { 0 }
    }
}

/// `x += attention(norm(x)); x += mlp(norm(x))`.
struct Transformer {
    gpt: Gpt,
    layer: usize,
    slices: TensorShards,
}

impl Transformer {
    /// Returns the widths of a virtual rank's heads and of its hidden layer.
    fn of_virtual_rank(&self) -> [usize; 2] {
        [self.gpt.width / self.slices.total, 4 * self.gpt.width / self.slices.total]
    }

    /// Returns the lengths of a virtual rank's tensors in storage order: the four matrices and two
    /// biases that are sharded, then the biases of summed outputs and the norms.
    fn lens(&self) -> [usize; 12] {
        let (d, [a, h]) = (self.gpt.width, self.of_virtual_rank());
        let bias = |len| self.gpt.bias_len(len);
        [
            3 * a * d,
            d * a,
            h * d,
            d * h,
            bias(3 * a),
            bias(h),
            bias(d),
            bias(d),
            d,
            bias(d),
            d,
            bias(d),
        ]
    }

    fn shapes<B: Backend>(&self, cx: &Context<'_, B>) -> Shapes {
        let (rows, d, [a, h]) = (cx.micro.rows(), self.gpt.width, self.of_virtual_rank());
        let heads = self.gpt.heads / self.slices.total;
        Shapes {
            norm: Norm { rows, width: d, epsilon: EPSILON, centred: true },
            qkv: Linear::new(rows, d, 3 * a),
            attention: Attention {
                batch: cx.micro.samples,
                time: cx.micro.time,
                heads,
                kv_heads: heads,
                head_width: d / self.gpt.heads,
            },
            out: Linear::new(rows, a, d),
            up: Linear::new(rows, d, h),
            down: Linear::new(rows, h, d),
        }
    }

    /// Returns the numbers of the two dropout sites. Site 0 belongs to the embedding.
    fn sites(&self) -> [usize; 2] {
        [2 * self.layer + 1, 2 * self.layer + 2]
    }

    /// Returns the output and the saved buffers. With a KV cache `past` the positions are added to
    /// it, and the saved buffers are of no use.
    fn compute<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
        mut past: Option<&mut KvCache<B>>,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        let (b, rows, d, [a, h]) =
            (cx.backend, cx.micro.rows(), self.gpt.width, self.of_virtual_rank());
        let s = self.shapes(cx);
        let virtual_ranks = TensorParallel::new(cx, &self.slices);
        let new = |len| b.alloc(MemoryKind::Activations, len);
        let [
            w_qkv,
            w_out,
            w_up,
            w_down,
            b_qkv,
            b_up,
            b_out,
            b_down,
            w_norm1,
            b_norm1,
            w_norm2,
            b_norm2,
        ] = virtual_ranks.parameters(&params, |_| self.lens());
        let has_bias = self.gpt.bias;
        let ([site1, site2], first_row) = (self.sites(), virtual_ranks.own_rows().start);
        let before = x;
        // If nothing comes between a matmul and its addition to the stream, the matmul adds the
        // stream.
        let joined = virtual_ranks.is_unsharded() && !self.gpt.dropout().drops(cx) && b.fuses_add();

        let (norm1, stats1) = virtual_ranks.norm(s.norm, x, w_norm1[0], b_norm1[0])?;
        let all_rows = virtual_ranks.gather(&norm1, d)?;
        let mut of_virtual_ranks = Vec::with_capacity(5 * self.slices.held.len());
        let branch = virtual_ranks.sum(rows * d, None, |k, y| {
            let x = B::all(all_rows.as_ref().unwrap_or(&norm1));
            let project = |_, to: B::ViewMut<'_>| b.linear(s.qkv, x, w_qkv[k], b_qkv[k], to);
            let mut heads = new(rows * a)?;
            let mut lse = b.alloc_f32(MemoryKind::Activations, rows * s.attention.heads)?;
            let qkv =
                attend(b, past.as_deref_mut(), k, s.attention, project, [&mut heads, &mut lse])?;
            if joined {
                b.linear_add(s.out, B::all(&heads), w_out[k], b_out[k], B::all(before), y)?;
            } else {
                virtual_ranks.row_linear(
                    k,
                    s.out,
                    B::all(&heads),
                    w_out[k],
                    has_bias.then_some(b_out[k]),
                    y,
                )?;
            }
            of_virtual_ranks.extend(qkv.into_iter().chain([heads, lse]));
            Ok(())
        })?;
        drop(all_rows);
        let mut stream = virtual_ranks.wait_sum(virtual_ranks.start_sum(branch), d)?;
        self.gpt.dropout().apply(cx, site1, first_row, B::all_mut(&mut stream))?;

        let (norm2, stats2) = match joined {
            true => virtual_ranks.norm(s.norm, &stream, w_norm2[0], b_norm2[0])?,
            false => virtual_ranks.add_norm(s.norm, x, &mut stream, w_norm2[0], b_norm2[0])?,
        };
        let all_rows = virtual_ranks.gather(&norm2, d)?;
        let branch = virtual_ranks.sum(rows * d, None, |k, y| {
            let mut up = new(rows * h)?;
            let mut act = new(rows * h)?;
            let x = B::all(all_rows.as_ref().unwrap_or(&norm2));
            b.linear_gelu(s.up, x, w_up[k], b_up[k], B::all_mut(&mut up), B::all_mut(&mut act))?;
            if joined {
                b.linear_add(s.down, B::all(&act), w_down[k], b_down[k], B::all(&stream), y)?;
            } else {
                virtual_ranks.row_linear(
                    k,
                    s.down,
                    B::all(&act),
                    w_down[k],
                    has_bias.then_some(b_down[k]),
                    y,
                )?;
            }
            of_virtual_ranks.extend([up, act]);
            Ok(())
        })?;
        drop(all_rows);
        let mut y = virtual_ranks.wait_sum(virtual_ranks.start_sum(branch), d)?;
        self.gpt.dropout().apply(cx, site2, first_row, B::all_mut(&mut y))?;
        if !joined {
            b.add(B::all(&stream), B::all_mut(&mut y))?;
        }
        Ok((
            y,
            [norm1, stats1, stream, norm2, stats2].into_iter().chain(of_virtual_ranks).collect(),
        ))
    }
}

/// The operations of a block with their sizes: norms of all rows, the rest of one virtual rank.
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
        let d = self.gpt.width;
        let layer = self.layer;
        let name = |rest: &str| format!("h.{layer}.{rest}");
        // Both ends of a residual branch start smaller, so that the stream's variance does not grow
        // with depth.
        let residual = INIT / (2.0 * self.gpt.layers as f32).sqrt();
        let matrix = |rest: &str, shape: [usize; 2], init, cut| {
            Tensor::new(name(rest), &shape, Init::Normal(init)).overwritten().cut(cut)
        };
        let of_heads = Cut::Rows { segments: 3 };
        let rows = Cut::Rows { segments: 1 };
        let matrices = [
            matrix("attn.c_attn.weight", [3 * d, d], INIT, of_heads),
            matrix("attn.c_proj.weight", [d, d], residual, Cut::Columns),
            matrix("mlp.c_fc.weight", [4 * d, d], INIT, rows),
            matrix("mlp.c_proj.weight", [d, 4 * d], residual, Cut::Columns),
        ];
        let vectors = [
            self.gpt.bias(name("attn.c_attn.bias"), 3 * d).map(|bias| bias.cut(of_heads)),
            self.gpt.bias(name("mlp.c_fc.bias"), 4 * d).map(|bias| bias.cut(rows)),
            self.gpt.bias(name("attn.c_proj.bias"), d),
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

    fn saved_elems_per_row(&self) -> usize {
        // Norm 1, stream, norm 2; for each virtual rank QKV, heads, up and GELU.
        let (d, [a, h]) = (self.gpt.width, self.of_virtual_rank());
        self.slices.own(3 * d) + self.slices.held.len() * (4 * a + 2 * h)
    }

    fn saved_f32_per_row(&self) -> usize {
        // The statistics of both norms, and the LSE.
        self.slices.own(4) + self.slices.held.len() * self.gpt.heads / self.slices.total
    }

    fn forward_scratch_per_row(&self) -> usize {
        let width = self.gpt.width;
        self.slices.sums(width).saturating_sub(self.slices.own(width))
    }

    fn scratch_per_row(&self) -> usize {
        // The gradient of the stream, and that of the branch if dropout masks it. The gradient of
        // up reuses the memory of its GELU; sums over virtual ranks are allocated after the ups are
        // freed.
        let (d, [_, h], slices) = (self.gpt.width, self.of_virtual_rank(), &self.slices);
        let streams = if self.gpt.dropout > 0.0 { 2 } else { 1 };
        let sums = slices.sums(d).saturating_sub(slices.held.len() * h);
        slices.own(streams * d) + slices.gathered(d).max(sums)
    }

    fn deferred_per_row(&self) -> usize {
        // The inputs of the four linear layers and the gradients of their outputs. Gradients of
        // summed outputs have the full width in every virtual rank.
        let (d, [a, h]) = (self.gpt.width, self.of_virtual_rank());
        (2 * d + 2 * d) + self.slices.held.len() * ((a + h) + (3 * a + h))
    }

    fn deferred_scratch_per_row(&self) -> usize {
        // At the gradient of QKV: the gradients of the stream, the norm and the linear layers'
        // outputs, without up.
        let (d, [a, _], slices) = (self.gpt.width, self.of_virtual_rank(), &self.slices);
        slices.own(d) + slices.sums(d).max(d) + 2 * d + slices.held.len() * 3 * a
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
        let (b, rows, d, [a, h]) =
            (cx.backend, cx.micro.rows(), self.gpt.width, self.of_virtual_rank());
        let s = self.shapes(cx);
        let virtual_ranks = TensorParallel::new(cx, &self.slices);
        let count = self.slices.held.len();
        let new = |len| b.alloc(MemoryKind::Activations, len);
        let [w_qkv, w_out, w_up, w_down, _, _, _, _, w_norm1, _, w_norm2, _] =
            virtual_ranks.parameters(&params, |_| self.lens());
        let [
            a_qkv,
            a_out,
            a_up,
            a_down,
            b_qkv,
            b_up,
            b_out,
            b_down,
            a_norm1,
            b_norm1,
            a_norm2,
            b_norm2,
        ] = virtual_ranks.places(params.section, |_| self.lens());
        let mut saved = saved.into_iter();
        let [norm1, stats1, stream, norm2, stats2] = take(&mut saved)?;
        let attention: Vec<[B::Buf; 3]> =
            (0..count).map(|_| take(&mut saved)).collect::<Result<_>>()?;
        let mlp: Vec<[B::Buf; 2]> = (0..count).map(|_| take(&mut saved)).collect::<Result<_>>()?;
        let (dropout, [site1, site2]) = (self.gpt.dropout(), self.sites());

        // From here on dy is the gradient of the stream, to which each branch adds its own.
        let mut dups = Vec::with_capacity(count);
        let branch = virtual_ranks.branch(dropout, site2, &dy, grads.deferred.is_some())?;
        for (k, [up, act]) in mlp.into_iter().enumerate() {
            let at = GradRange::Own(a_down[k].clone());
            let bias = virtual_ranks.row_linear_bias(&b_down[k]);
            grads.linear(b, s.down, branch.of_output(&dy), &Arc::new(act), at, bias)?;
            let mut dup = new(rows * h)?;
            b.linear_gelu_backward_input(
                s.down,
                branch.all(&dy),
                w_down[k],
                B::all(&up),
                B::all_mut(&mut dup),
            )?;
            dups.push((Arc::new(dup), 0..rows * h));
        }
        virtual_ranks.add_bias(branch.own_rows(&dy), d, &mut grads, &b_down)?;
        drop(branch);
        let map = ColumnLinear {
            shapes: vec![s.up; count],
            weights: w_up,
            places: GradRange::own(a_up),
            biases: b_up,
        };
        let dnorm = virtual_ranks.column_backward(
            &map,
            &mut grads,
            dups,
            virtual_ranks.gathered(norm2, d)?,
        )?;
        let places = NormGradRanges { weights: &a_norm2, biases: &b_norm2 };
        virtual_ranks.norm_backward(
            s.norm, &dnorm, &stream, w_norm2[0], &stats2, &mut dy, &mut grads, places,
        )?;
        drop(dnorm);

        // The input of the second norm is not needed any more: the gradient of the heads reuses its
        // memory.
        let mut spare = Some(stream).filter(|_| self.slices.total == 1);
        let mut dqkvs = Vec::with_capacity(count);
        let branch = virtual_ranks.branch(dropout, site1, &dy, grads.deferred.is_some())?;
        for (k, [qkv, heads, lse]) in attention.into_iter().enumerate() {
            let mut dheads = spare.take().map_or_else(|| new(rows * a), Ok)?;
            b.linear_backward_input(s.out, branch.all(&dy), w_out[k], B::all_mut(&mut dheads))?;
            let mut dqkv = new(rows * 3 * a)?;
            let y = B::all(&heads);
            let lse = B::all(&lse);
            let g = B::all(&dheads);
            b.attention_backward(s.attention, B::all(&qkv), y, lse, g, B::all_mut(&mut dqkv))?;
            drop(qkv);
            let at = GradRange::Own(a_out[k].clone());
            let bias = virtual_ranks.row_linear_bias(&b_out[k]);
            grads.linear(b, s.out, branch.of_output(&dy), &Arc::new(heads), at, bias)?;
            dqkvs.push((Arc::new(dqkv), 0..rows * 3 * a));
        }
        virtual_ranks.add_bias(branch.own_rows(&dy), d, &mut grads, &b_out)?;
        drop(branch);
        let map = ColumnLinear {
            shapes: vec![s.qkv; count],
            weights: w_qkv,
            places: GradRange::own(a_qkv),
            biases: b_qkv,
        };
        let dnorm = virtual_ranks.column_backward(
            &map,
            &mut grads,
            dqkvs,
            virtual_ranks.gathered(norm1, d)?,
        )?;
        let places = NormGradRanges { weights: &a_norm1, biases: &b_norm1 };
        virtual_ranks
            .norm_backward(s.norm, &dnorm, x, w_norm1[0], &stats1, &mut dy, &mut grads, places)?;
        Ok(dy)
    }
}
