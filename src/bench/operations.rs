//! Speed of a device on the operations of a GPT.
//!
//! An operation is queued many times in a row, then waited for: the time of a batch divided by its
//! launches, the median of several batches. Launches rotate through sets of operands, so that none
//! is still in a cache from the launch before.

use std::time::Instant;

use crate::backend::{
    Activation, AdamW, Attention, CrossEntropy, Gemm, Kernels, Linear, LossWeights, MemoryKind,
    Norm,
};
use crate::error::{Error, Result};
use crate::random::Stream;

/// The sizes of the timed operations.
#[derive(Debug, Clone)]
pub struct OpSizes {
    /// The numbers of rows of activations, one table of operations each.
    pub rows: Vec<usize>,
    /// The sequence length, which divides every number of rows.
    pub time: usize,
    /// The number of heads.
    pub heads: usize,
    /// The width of a head.
    pub head_width: usize,
    /// The number of classes.
    pub vocabulary: usize,
    /// The number of parameters that the optimizer updates.
    pub parameters: usize,
    /// The number of elements of a copy.
    pub copied: usize,
    /// The total bytes of the operand sets that are used in rotation.
    pub cold: usize,
    /// The minimum seconds of a batch of launches.
    pub batch: f64,
}

impl OpSizes {
    /// Returns the sizes of GPT-2 with 124 M parameters, its vocabulary padded to a multiple of
    /// 128.
    pub fn gpt2() -> Self {
        Self {
            rows: vec![8192, 16_384],
            time: 1024,
            heads: 12,
            head_width: 64,
            vocabulary: 50_304,
            parameters: 124_475_904,
            copied: 1 << 29,
            cold: 512 << 20,
            batch: 0.01,
        }
    }

    /// Returns sizes so small that a simulated device finishes in minutes. Their times are
    /// meaningless.
    pub fn small() -> Self {
        Self {
            rows: vec![32, 64],
            time: 32,
            heads: 1,
            head_width: 64,
            vocabulary: 256,
            parameters: 4096,
            copied: 1 << 14,
            cold: 0,
            batch: 0.0,
        }
    }

    fn width(&self) -> usize {
        self.heads * self.head_width
    }
}

/// The time of an operation.
#[derive(Debug, Clone)]
pub struct OpTiming {
    /// The name of the operation, such as `layer norm, backward`.
    pub operation: String,
    /// The shape, such as `8192×768`.
    pub shape: String,
    /// The time of one launch: the median over batches.
    pub seconds: f64,
    /// The time of one launch in the fastest batch.
    pub fastest: f64,
    /// The bytes that must be read and written, every operand once; indices are not counted.
    pub bytes: f64,
    /// The floating-point operations of matmuls and attention; 0 for operations that only move
    /// memory.
    pub flops: f64,
}

/// An operand: the number of elements, their type, and how often each is moved.
#[derive(Debug, Clone, Copy)]
struct Tensor {
    len: usize,
    is_wide: bool,
    passes: f64,
}

impl Tensor {
    /// Creates an operand in the compute type: parameters and activations.
    fn narrow(len: usize) -> Self {
        Self { len, is_wide: false, passes: 1.0 }
    }

    /// Creates an operand in f32: statistics, gradients of parameters, fp32 master weights.
    fn wide(len: usize) -> Self {
        Self { is_wide: true, ..Self::narrow(len) }
    }

    /// Makes the operand read, and written in place.
    fn changed(self) -> Self {
        Self { passes: 2.0, ..self }
    }

    /// Makes only `elements` of the elements moved, each read and written.
    fn touched(self, elements: usize) -> Self {
        Self { passes: 2.0 * elements as f64 / self.len as f64, ..self }
    }

    /// Makes only `elements` of the elements moved; the others are padding.
    fn holding(self, elements: usize) -> Self {
        Self { passes: self.passes * elements as f64 / self.len as f64, ..self }
    }
}

/// The maximum number of operand sets.
const MOST_TURNS: usize = 64;

/// The maximum number of launches in a batch: the queue of a device is limited.
const MOST_LAUNCHES: usize = 1000;

struct Bench<'a, B: Kernels> {
    backend: &'a B,
    sizes: &'a OpSizes,
    batches: usize,
    /// Normally distributed f32 numbers, from which operands are filled.
    pattern: B::Buf,
    /// Called with each timing.
    report: &'a mut dyn FnMut(&OpTiming) -> Result<()>,
}

/// Times all operations in the order of the tables, each as the median of `batches` batches, at
/// least one. `report` is called with each timing.
///
/// # Errors
/// Returns an error if memory is exhausted, the device fails, or `report` returns one.
pub fn operations<B: Kernels>(
    backend: &B,
    sizes: &OpSizes,
    batches: usize,
    report: &mut dyn FnMut(&OpTiming) -> Result<()>,
) -> Result<()> {
    let mut pattern = vec![0.0; sizes.copied.min(1 << 20)];
    Stream::new(1).fill_normal(&mut pattern);
    let pattern = backend.upload_f32(MemoryKind::Activations, &pattern)?;
    let mut bench = Bench { backend, sizes, batches: batches.max(1), pattern, report };
    bench.memory()?;
    for &rows in &sizes.rows {
        bench.elementwise(rows)?;
        bench.norms(rows)?;
        bench.tables(rows)?;
        bench.matmuls(rows)?;
        bench.attention(rows)?;
    }
    bench.optimizer()
}

impl<B: Kernels> Bench<'_, B> {
    /// Times copies and additions, to which the other timings are compared.
    fn memory(&mut self) -> Result<()> {
        let len = self.sizes.copied;
        let shape = len.to_string();
        let [one, two] = [Tensor::narrow(len), Tensor::narrow(len)];
        self.time("copy", &shape, 0.0, [one, two], |b, [x, y]| b.copy(B::all(x), B::all_mut(y)))?;
        self.time("add", &shape, 0.0, [one, two.changed()], |b, [x, y]| {
            b.add(B::all(x), B::all_mut(y))
        })?;
        let [one, two] = [Tensor::wide(len / 2), Tensor::wide(len / 2)];
        let shape = (len / 2).to_string();
        self.time("add in f32", &shape, 0.0, [one, two.changed()], |b, [x, y]| {
            b.add(B::all(x), B::all_mut(y))
        })?;
        // The cost of a launch, independent of its work, is the lower bound of all timings.
        let [one, two] = [Tensor::narrow(8), Tensor::narrow(8)];
        self.time("launch", "8", 0.0, [one, two.changed()], |b, [x, y]| {
            b.add(B::all(x), B::all_mut(y))
        })
    }

    fn elementwise(&mut self, rows: usize) -> Result<()> {
        let width = 4 * self.sizes.width();
        let shape = format!("{rows}×{width}");
        let x = Tensor::narrow(rows * width);
        self.time("gelu", &shape, 0.0, [x, x], |b, [x, y]| {
            b.activation(Activation::Gelu, B::all(x), B::all_mut(y))
        })?;
        self.time("gelu, backward", &shape, 0.0, [x, x.changed()], |b, [x, dy]| {
            b.activation_backward(Activation::Gelu, B::all(x), B::all_mut(dy))
        })
    }

    fn norms(&mut self, rows: usize) -> Result<()> {
        let width = self.sizes.width();
        let norm = Norm { rows, width, epsilon: 1e-5, centred: true };
        let shape = format!("{rows}×{width}");
        let x = Tensor::narrow(rows * width);
        let weight = Tensor::narrow(width);
        let stats = Tensor::wide(2 * rows);
        let dweight = Tensor::wide(width).changed();
        let tensors = [x, weight, weight, x, stats];
        self.time("layer norm", &shape, 0.0, tensors, |b, [x, weight, bias, y, stats]| {
            b.norm(norm, B::all(x), B::all(weight), B::all(bias), B::all_mut(y), B::all_mut(stats))
        })?;
        let tensors = [x, x.changed(), weight, weight, x, stats];
        self.time(
            "add and layer norm",
            &shape,
            0.0,
            tensors,
            |b, [x, stream, weight, bias, y, stats]| {
                let weight = B::all(weight);
                let bias = B::all(bias);
                b.add_norm(
                    norm,
                    B::all(x),
                    B::all_mut(stream),
                    weight,
                    bias,
                    B::all_mut(y),
                    B::all_mut(stats),
                )
            },
        )?;
        let tensors = [x, x, weight, stats, x.changed(), dweight, dweight];
        self.time(
            "layer norm, backward",
            &shape,
            0.0,
            tensors,
            |b, [dy, x, weight, stats, dx, dweight, dbias]| {
                let dx = B::all_mut(dx);
                let dweight = B::all_mut(dweight);
                let dbias = B::all_mut(dbias);
                b.norm_backward(
                    norm,
                    B::all(dy),
                    B::all(x),
                    B::all(weight),
                    B::all(stats),
                    dx,
                    dweight,
                    dbias,
                )
            },
        )
    }

    /// Times the embedding and the classifier.
    fn tables(&mut self, rows: usize) -> Result<()> {
        let OpSizes { vocabulary, time, .. } = *self.sizes;
        let width = self.sizes.width();
        let shape = format!("{rows}×{width}");
        let y = Tensor::narrow(rows * width);
        let indices = |seed: u64, below: usize| -> Result<B::IndexBuf> {
            let ids =
                (0..rows as u64).map(|i| (Stream::new(seed).uniform(i) * below as f64) as u32);
            self.backend.upload_indices(&ids.collect::<Vec<_>>())
        };
        let tokens = indices(2, vocabulary)?;
        let targets = indices(3, vocabulary)?;
        let words = vocabulary * width;
        let places = time * width;
        // Each row reads at most one row of the table.
        let read = Tensor {
            passes: 0.5 * Tensor::narrow(words).touched(rows * width).passes,
            ..Tensor::narrow(words)
        };
        self.time(
            "embedding",
            &shape,
            0.0,
            [read, Tensor::narrow(places), y],
            |b, [words, places, y]| {
                b.embedding(&tokens, 0, B::all(words), B::all(places), B::all_mut(y))
            },
        )?;
        let tensors =
            [y, Tensor::wide(words).touched(rows * width), Tensor::wide(places).changed()];
        self.time("embedding, backward", &shape, 0.0, tensors, |b, [dy, words, places]| {
            b.embedding_backward(&tokens, 0, B::all(dy), B::all_mut(words), B::all_mut(places))
        })?;
        let shape = format!("{rows}×{vocabulary}");
        let stride = B::row_stride(vocabulary);
        let logits = Tensor::narrow(rows * stride).changed().holding(rows * vocabulary);
        let tensors = [logits, Tensor::wide(0), Tensor::wide(rows)];
        let classes = vocabulary;
        let scale = 1.0 / rows as f32;
        let loss = CrossEntropy { rows, classes, stride, scale, gradient: true, smoothing: 0.0 };
        self.time("classifier", &shape, 0.0, tensors, |b, [logits, none, losses]| {
            let weights = LossWeights { classes: B::all(none), rows: B::all(none) };
            b.cross_entropy(loss, B::all_mut(logits), &targets, weights, B::all_mut(losses))
        })
    }

    /// Times every linear layer of a block, and the LM head, forward and backward.
    fn matmuls(&mut self, rows: usize) -> Result<()> {
        let width = self.sizes.width();
        let vocabulary = self.sizes.vocabulary;
        let maps = [
            ("qkv", width, 3 * width),
            ("out", width, width),
            ("up", width, 4 * width),
            ("down", 4 * width, width),
            ("head", width, vocabulary),
        ];
        for (name, inputs, outputs) in maps {
            let stride = if name == "head" { B::row_stride(outputs) } else { outputs };
            let linear = Linear { stride, ..Linear::new(rows, inputs, outputs) };
            let flops = 2.0 * rows as f64 * inputs as f64 * outputs as f64;
            let x = Tensor::narrow(rows * inputs);
            let y = Tensor::narrow(rows * stride).holding(rows * outputs);
            let weight = Tensor::narrow(inputs * outputs);
            let dweight = Tensor::wide(inputs * outputs).changed();
            let bias = if name == "head" { 0 } else { outputs };
            let shape = format!("{rows}×{inputs}→{outputs}");
            let tensors = [x, weight, Tensor::narrow(bias), y];
            self.time(name, &shape, flops, tensors, |b, [x, weight, bias, y]| {
                b.linear(linear, B::all(x), B::all(weight), B::all(bias), B::all_mut(y))
            })?;
            self.time(
                &format!("{name}, input's gradient"),
                &shape,
                flops,
                [y, weight, x],
                |b, [dy, weight, dx]| {
                    b.linear_backward_input(linear, B::all(dy), B::all(weight), B::all_mut(dx))
                },
            )?;
            let tensors = [y, x, dweight, Tensor::wide(bias).changed()];
            self.time(
                &format!("{name}, weight's gradient"),
                &shape,
                flops,
                tensors,
                |b, [dy, x, dweight, dbias]| {
                    b.linear_backward_weight(
                        linear,
                        B::all(dy),
                        B::all(x),
                        B::all_mut(dweight),
                        B::all_mut(dbias),
                        true,
                    )
                },
            )?;
        }
        let inputs = width;
        let outputs = 4 * width;
        let linear = Linear::new(rows, inputs, outputs);
        let flops = 2.0 * rows as f64 * inputs as f64 * outputs as f64;
        let x = Tensor::narrow(rows * inputs);
        let y = Tensor::narrow(rows * outputs);
        let weight = Tensor::narrow(inputs * outputs);
        let bias = Tensor::narrow(outputs);
        let shape = format!("{rows}×{inputs}→{outputs}");
        self.time(
            "up and gelu",
            &shape,
            flops,
            [x, weight, bias, y, y],
            |b, [x, weight, bias, h, y]| {
                b.linear_gelu(
                    linear,
                    B::all(x),
                    B::all(weight),
                    B::all(bias),
                    B::all_mut(h),
                    B::all_mut(y),
                )
            },
        )?;
        // With both dimensions large, the best case of the library.
        let edge = rows.min(8192);
        let gemm = Gemm { m: edge, n: edge, k: edge, ta: false, tb: true, acc: false };
        let square = Tensor::narrow(edge * edge);
        let flops = 2.0 * (edge as f64).powi(3);
        self.time("square matmul", &format!("{edge}³"), flops, [square; 3], |b, [x, y, z]| {
            b.gemm(gemm, B::all(x), B::all(y), B::all_mut(z))
        })
    }

    fn attention(&mut self, rows: usize) -> Result<()> {
        let OpSizes { time, heads, head_width, .. } = *self.sizes;
        let attention = Attention { batch: rows / time, time, heads, kv_heads: heads, head_width };
        let shape = format!("{}×{time}×{heads}×{head_width}", attention.batch);
        let y = Tensor::narrow(rows * self.sizes.width());
        let lse = Tensor::wide(rows * heads);
        let qkv = Tensor::narrow(3 * y.len);
        // Two matmuls over half of the scores, which are causal; five in the backward pass.
        let matmul = rows as f64 * time as f64 * (heads * head_width) as f64;
        self.time("attention", &shape, 2.0 * matmul, [qkv, y, lse], |b, [qkv, y, lse]| {
            b.attention(attention, B::all(qkv), B::all_mut(y), B::all_mut(lse))
        })?;
        let tensors = [qkv, y, lse, y, qkv];
        self.time(
            "attention, backward",
            &shape,
            5.0 * matmul,
            tensors,
            |b, [qkv, y, lse, dy, dqkv]| {
                b.attention_backward(
                    attention,
                    B::all(qkv),
                    B::all(y),
                    B::all(lse),
                    B::all(dy),
                    B::all_mut(dqkv),
                )
            },
        )
    }

    fn optimizer(&mut self) -> Result<()> {
        let len = self.sizes.parameters;
        let shape = len.to_string();
        let gradient = Tensor::wide(len);
        let state = gradient.changed();
        let update = AdamW {
            lr: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 100,
            grad_scale: 1.0,
        };
        let is_narrow = self.backend.has_master_weights();
        let copy = Tensor::narrow(if is_narrow { len } else { 0 });
        self.time(
            "adamw",
            &shape,
            0.0,
            [gradient, state, state, state, copy],
            |b, [grad, m, v, p, copy]| {
                let copy = is_narrow.then(|| B::all_mut(copy));
                b.adamw(
                    update,
                    B::all(grad),
                    B::all_mut(m),
                    B::all_mut(v),
                    B::all_mut(p),
                    copy,
                    None,
                )
            },
        )?;
        self.time("sum of squares", &shape, 0.0, [gradient], |b, [x]| {
            b.sum_squares(B::all(x)).map(drop)
        })
    }

    /// Times one operation; `launch` queues it on one set of operands.
    fn time<const N: usize>(
        &mut self,
        operation: &str,
        shape: &str,
        flops: f64,
        tensors: [Tensor; N],
        launch: impl Fn(&B, &mut [B::Buf; N]) -> Result<()>,
    ) -> Result<()> {
        let narrow = if self.backend.has_master_weights() { 2.0 } else { 4.0 };
        let size = |tensor: &Tensor| tensor.len as f64 * if tensor.is_wide { 4.0 } else { narrow };
        let held: f64 = tensors.iter().map(size).sum();
        let turns = ((self.sizes.cold as f64 / held).ceil() as usize).clamp(1, MOST_TURNS);
        let mut sets = (0..turns).map(|_| self.operands(tensors)).collect::<Result<Vec<_>>>()?;
        let mut run = |launches| time_batch(self.backend, &mut sets, launches, &launch);
        // The first launches compile, plan and wake up the device.
        run(1)?;
        let guess = run(turns)?;
        let launches = ((self.sizes.batch / guess).ceil() as usize).clamp(1, MOST_LAUNCHES);
        run(launches)?;
        let mut seconds = (0..self.batches).map(|_| run(launches)).collect::<Result<Vec<_>>>()?;
        seconds.sort_by(f64::total_cmp);
        (self.report)(&OpTiming {
            operation: operation.into(),
            shape: shape.into(),
            seconds: seconds[seconds.len() / 2],
            fastest: seconds[0],
            bytes: tensors.iter().map(|tensor| size(tensor) * tensor.passes).sum(),
            flops,
        })
    }

    /// Creates a set of operands.
    fn operands<const N: usize>(&self, tensors: [Tensor; N]) -> Result<[B::Buf; N]> {
        let buffers =
            tensors.iter().map(|tensor| self.operand(tensor)).collect::<Result<Vec<_>>>()?;
        buffers.try_into().map_err(|_| Error::internal("operands"))
    }

    fn operand(&self, tensor: &Tensor) -> Result<B::Buf> {
        let backend = self.backend;
        let mut buffer = match tensor.is_wide {
            true => backend.alloc_f32(MemoryKind::Activations, tensor.len)?,
            false => backend.alloc(MemoryKind::Activations, tensor.len)?,
        };
        if tensor.is_wide {
            // Zeros are valid for sums and for second moments.
            backend.zero(B::all_mut(&mut buffer))?;
            return Ok(buffer);
        }
        let period = B::len(&self.pattern);
        let mut start = 0;
        while start < tensor.len {
            let end = tensor.len.min(start + period);
            backend.copy(
                B::view(&self.pattern, 0..end - start),
                B::view_mut(&mut buffer, start..end),
            )?;
            start = end;
        }
        Ok(buffer)
    }
}

/// Returns the seconds per launch of a batch of launches, which rotate through the sets of
/// operands.
fn time_batch<B: Kernels, const N: usize>(
    backend: &B,
    sets: &mut [[B::Buf; N]],
    launches: usize,
    launch: &impl Fn(&B, &mut [B::Buf; N]) -> Result<()>,
) -> Result<f64> {
    let turns = sets.len();
    let start = Instant::now();
    for launch_number in 0..launches {
        launch(backend, &mut sets[launch_number % turns])?;
    }
    if let Some(last) = B::record_event(&sets[0][0])? {
        last.wait()?;
    }
    Ok(start.elapsed().as_secs_f64() / launches as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;

    #[test]
    fn every_operation_is_timed() {
        let mut seen = Vec::new();
        let sizes = OpSizes::small();
        operations(&Cpu::new(2), &sizes, 1, &mut |timing| {
            assert!(
                timing.seconds > 0.0 && timing.fastest <= timing.seconds && timing.bytes > 0.0,
                "{timing:?}"
            );
            seen.push(timing.clone());
            Ok(())
        })
        .unwrap();
        let find =
            |operation: &str| seen.iter().find(|timing| timing.operation == operation).unwrap();
        assert_eq!(find("copy").bytes, 2.0 * 4.0 * sizes.copied as f64);
        assert_eq!(find("adamw").bytes, 28.0 * sizes.parameters as f64);
        assert_eq!(find("qkv").flops, 2.0 * 32.0 * 64.0 * 192.0);
        assert_eq!(find("attention").flops, 2.0 * 32.0 * 32.0 * 64.0);
        assert_eq!(find("attention, backward").flops, 5.0 * 32.0 * 32.0 * 64.0);
        assert_eq!(seen.len(), 4 + sizes.rows.len() * 27 + 2);
    }
}
