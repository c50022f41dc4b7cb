//! The kinds of networks ([`Network`]), and the sample fields that each requires.

use serde::Serialize;

use super::custom::CustomModel;
use super::gpt::Gpt;
use super::layers::{Layers, format_shape};
use super::llama::Llama;
use super::loss::Loss;
use super::{Block, Blocks};
use hpctrain_base::layout::{Tensor, TensorShards, trained};
use hpctrain_cpu::Cpu;
use hpctrain_data::SampleSpec;
use hpctrain_device::Kernels;

/// The FLOPs of matmuls that take as long as writing, saving and reading one element. It is a rough
/// figure, by which memory traffic is a twentieth of the work of a GPT-2 block.
const FLOPS_PER_SAVED_ELEMENT: f64 = 64.0;

/// Multiplies the factors, saturating at `u64::MAX`.
fn product(factors: &[usize]) -> u64 {
    factors.iter().fold(1, |all, one| all.saturating_mul(*one as u64))
}

/// Returns the number of elements of the tensors with weight decay, which are the matrices.
fn decayed(tensors: &[Tensor]) -> usize {
    tensors.iter().filter(|tensor| tensor.decays()).map(Tensor::len).sum()
}

/// A network and its size.
#[derive(Debug, Clone, PartialEq)]
pub enum Network {
    /// GPT-2.
    Gpt(Gpt),
    /// Llama.
    Llama(Llama),
    /// A layer-list (sequential) model.
    Layers(Layers),
    /// A custom network.
    Custom(CustomModel),
}

/// The sizes of a layer, or of a block of a language model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerSummary {
    /// Its name and kind.
    pub name: String,
    /// The shape of its output for one sample.
    pub output: Vec<usize>,
    /// The number of elements of its tensors.
    pub parameters: usize,
    /// The FLOPs of the forward's matmuls per sample. For attention, only those that a causal mask
    /// leaves count.
    pub flops: u64,
    /// The number of elements saved for the backward per sample, without recomputation.
    pub kept: usize,
}

impl Network {
    /// Returns the layers of the network in order.
    pub fn summary(&self) -> Vec<LayerSummary> {
        let (width, heads) = match self {
            Network::Layers(layers) => return layers.summary().to_vec(),
            Network::Custom(_) => return self.own_summary(),
            Network::Gpt(gpt) => (gpt.width, gpt.heads),
            Network::Llama(llama) => (llama.width, llama.heads),
        };
        let blocks = self.blocks::<Cpu>();
        (0..blocks.len()).map(|i| self.block_summary(&blocks, i, [width, heads])).collect()
    }

    /// Returns the summary of block `i` of a language model with this width and number of heads.
    fn block_summary(
        &self,
        blocks: &[Box<dyn Block<Cpu>>],
        i: usize,
        [width, heads]: [usize; 2],
    ) -> LayerSummary {
        let context = self.context();
        let block = &blocks[i];
        let last = blocks.len() - 1;
        let tensors = block.tensors();
        let matrices = decayed(&tensors);
        let (columns, multiplied) = match i {
            0 => (width, 0),
            i if i == last => (self.outputs(), self.outputs() * width),
            _ => (width, matrices),
        };
        // The scores and their matmul with the values, for half of all pairs.
        let attention = if i == 0 || i == last {
            0
        } else {
            product(&[2, context, context, width / heads, heads])
        };
        LayerSummary {
            name: block.name(),
            output: vec![context, columns],
            parameters: trained(&tensors),
            flops: product(&[2, context, multiplied]).saturating_add(attention),
            kept: context * (block.saved_elems_per_row() + block.saved_f32_per_row() + columns),
        }
    }

    /// Returns the blocks of a custom network. Each matrix counts as one matmul per row.
    fn own_summary(&self) -> Vec<LayerSummary> {
        let blocks = self.blocks::<Cpu>();
        (0..blocks.len()).map(|i| self.own_block_summary(&blocks, i)).collect()
    }

    /// Returns the summary of block `i` of a custom network.
    fn own_block_summary(&self, blocks: &[Box<dyn Block<Cpu>>], i: usize) -> LayerSummary {
        let context = self.context();
        let block = &blocks[i];
        let tensors = block.tensors();
        let columns = blocks.get(i + 1).map_or(self.outputs(), |next| next.input_per_row());
        LayerSummary {
            name: block.name(),
            output: vec![context, columns],
            parameters: trained(&tensors),
            flops: product(&[2, context, decayed(&tensors)]),
            kept: context * (block.saved_elems_per_row() + block.saved_f32_per_row() + columns),
        }
    }

    /// Returns the summary by blocks, the units of recomputation and pipeline parallelism.
    pub fn blocks_summary(&self) -> Vec<LayerSummary> {
        match self {
            Network::Layers(layers) => layers.blocks_summary(),
            Network::Gpt(_) | Network::Llama(_) | Network::Custom(_) => self.summary(),
        }
    }

    /// Model FLOPs of training on one sample: the numerator of MFU (model FLOPs utilisation).
    ///
    /// Three times the forward's matmuls (the backward has two for each), which is 6 per weight and
    /// position where N counts the weights that multiply, LM head included and embedding look-ups
    /// excluded; attention adds 12 · layers · width · context per position, counted whole although
    /// a causal mask leaves half of it. Recomputation does not count. This is the convention of
    /// Chowdhery et al., "PaLM: scaling language modeling with pathways" (2022), appendix B.
    pub fn training_flops(&self) -> f64 {
        let forward: f64 = self.blocks_summary().iter().map(|block| block.flops as f64).sum();
        let (layers, width) = match self {
            Network::Gpt(gpt) => (gpt.layers, gpt.width),
            Network::Llama(llama) => (llama.layers, llama.width),
            Network::Layers(_) | Network::Custom(_) => (0, 0),
        };
        // The summary counts the half of attention that a causal mask leaves.
        let masked = product(&[2, layers, self.context(), self.context(), width]) as f64;
        3.0 * (forward + masked)
    }

    /// Returns the estimated work of every block in a training step, per sample, in FLOPs of
    /// matmuls. Memory traffic is estimated from the number of saved elements.
    pub fn work_per_block(&self, recompute: bool) -> Vec<f64> {
        let blocks = self.blocks_summary();
        let last = blocks.len() - 1;
        blocks
            .iter()
            .enumerate()
            .map(|(i, block)| {
                // A forward, a backward twice as long, and another forward with recomputation.
                let passes = if recompute && i != last { 4.0 } else { 3.0 };
                passes * (block.flops as f64 + FLOPS_PER_SAVED_ELEMENT * block.kept as f64)
            })
            .collect()
    }

    /// Returns the same network with its embedding tables as a separate first block, which can be
    /// offloaded to the host. The names of tensors and their values stay.
    ///
    /// # Errors
    /// Returns an error if the tables cannot be separated. The error is the reason, to be appended
    /// to the name of a key.
    pub fn with_separate_embedding(&self) -> Result<Self, &'static str> {
        match self {
            Network::Layers(layers) => layers.with_separate_embedding().map(Network::Layers).ok_or(
                "but model.layers does not begin with embedding or embedding_tables before others with parameters",
            ),
            Network::Llama(llama) if llama.tied => Err("but model.tied = true multiplies by the table as well"),
            Network::Llama(llama) if llama.dropout > 0.0 => {
                Err("but model.dropout drops elements of its rows, rounded as the GPU has them")
            }
            Network::Llama(_) => Ok(self.clone()),
            Network::Gpt(_) => Err("but the head of a GPT multiplies by the table as well"),
            Network::Custom(_) => Err("but the network is a custom one"),
        }
    }

    /// Returns the network as blocks.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        self.tensor_parallel_blocks(&TensorShards::whole())
    }

    /// Returns the network as blocks, sharded for the virtual tensor ranks `slices` of this rank.
    /// Layer-list models and custom networks are never sharded.
    pub fn tensor_parallel_blocks<B: Kernels>(&self, slices: &TensorShards) -> Blocks<B> {
        match self {
            Network::Gpt(gpt) => gpt.tensor_parallel_blocks(slices),
            Network::Llama(llama) => llama.tensor_parallel_blocks(slices),
            Network::Layers(layers) => layers.blocks(),
            Network::Custom(own) => own.blocks(),
        }
    }

    /// Returns the blocks of a rank with `slices` on a CPU, to query their tensors and sizes. It is
    /// not generic, so that callers in other crates compile no copy of the kernels.
    pub fn cpu_blocks(&self, slices: &TensorShards) -> Blocks<Cpu> {
        self.tensor_parallel_blocks(slices)
    }

    /// Returns the number of predictions per sample (positions of a sequence for language models).
    pub fn context(&self) -> usize {
        match self {
            Network::Gpt(gpt) => gpt.context,
            Network::Llama(llama) => llama.context,
            Network::Layers(_) => 1,
            Network::Custom(own) => own.context(),
        }
    }

    /// Returns a human-readable description: kind and size.
    pub fn describe(&self) -> String {
        match self {
            Network::Gpt(Gpt { layers, heads, width, context, vocabulary, bias, .. }) => {
                let biases = if *bias { "with" } else { "without" };
                format!(
                    "GPT, {layers} layers, {heads} heads, width {width}, context {context}, vocabulary {vocabulary}, \
                     {biases} biases"
                )
            }
            Network::Llama(Llama {
                layers,
                heads,
                kv_heads,
                width,
                hidden,
                context,
                vocabulary,
                tied,
                ..
            }) => {
                let head = if *tied { "tied" } else { "own" };
                format!(
                    "Llama, {layers} layers, {heads} heads ({kv_heads} of keys), width {width}, hidden {hidden}, \
                     context {context}, vocabulary {vocabulary}, {head} head"
                )
            }
            Network::Layers(layers) => {
                format!(
                    "{} layers from {} to {}",
                    layers.len(),
                    format_shape(layers.input()),
                    format_shape(layers.output())
                )
            }
            Network::Custom(own) => own.name().to_owned(),
        }
    }

    /// Returns the number of token ids of a language model.
    pub fn vocabulary(&self) -> Option<usize> {
        match self {
            Network::Gpt(gpt) => Some(gpt.vocabulary),
            Network::Llama(llama) => Some(llama.vocabulary),
            Network::Layers(_) => None,
            Network::Custom(own) => own.vocabulary(),
        }
    }

    /// Returns the samples required to train it with `loss`.
    pub fn sample_spec(&self, loss: &Loss) -> SampleSpec {
        let layers = match self {
            Network::Gpt(_) | Network::Llama(_) => return SampleSpec::Text,
            Network::Custom(own) => return own.sample_spec(loss),
            Network::Layers(layers) => layers,
        };
        SampleSpec::Rows {
            input: layers.input().iter().product(),
            ids: layers.ids().clone(),
            target: loss.target(self.outputs()),
        }
    }

    /// Returns true if it is a language model, which predicts tokens.
    pub fn is_language(&self) -> bool {
        self.vocabulary().is_some()
    }

    /// Returns the word for its predictions, in the plural.
    pub fn predictions(&self) -> &'static str {
        if self.is_language() { "tokens" } else { "samples" }
    }

    /// Returns the number of output elements per prediction: classes or values.
    pub fn outputs(&self) -> usize {
        match self {
            Network::Gpt(gpt) => gpt.vocabulary,
            Network::Llama(llama) => llama.vocabulary,
            Network::Layers(layers) => layers.output().iter().product(),
            Network::Custom(own) => own.outputs(),
        }
    }
}
