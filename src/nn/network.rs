//! The families of networks.

use serde::Serialize;

use super::custom::CustomModel;
use super::gpt::Gpt;
use super::layers::{Layers, shown};
use super::llama::Llama;
use super::loss::Loss;
use super::{Block, Blocks};
use hpctrain_base::layout::{Tensor, TensorShards, trained};
use hpctrain_cpu::Cpu;
use hpctrain_data::{SampleSpec, Target};
use hpctrain_device::Kernels;

/// Operations of matrix products that stand for an element which is written, kept and read again: a
/// rough figure, with which they are a twentieth of the work of a block of GPT-2.
const AN_ELEMENT: f64 = 64.0;

/// A product that may be more than any work.
fn product(of: &[usize]) -> u64 {
    of.iter().fold(1, |all, one| all.saturating_mul(*one as u64))
}

/// A network and its size.
#[derive(Debug, Clone, PartialEq)]
pub enum Network {
    /// GPT-2.
    Gpt(Gpt),
    /// Llama.
    Llama(Llama),
    /// Layers, one after the other.
    Layers(Layers),
    /// Blocks that a program makes.
    Own(CustomModel),
}

/// A layer, or a block of a language model, in numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerSummary {
    /// Its name and kind.
    pub name: String,
    /// Shape of its output, of one sample.
    pub output: Vec<usize>,
    /// Elements of its tensors.
    pub parameters: usize,
    /// Multiplications and additions of a forward's matrix products, a sample. Attention counts
    /// those that a causal mask leaves.
    pub flops: u64,
    /// Elements that a sample keeps from its forward to the backward, without recomputation.
    pub kept: usize,
}

impl Network {
    /// The parts of the network in order.
    pub fn summary(&self) -> Vec<LayerSummary> {
        let (width, heads) = match self {
            Network::Layers(layers) => return layers.summary().to_vec(),
            Network::Own(_) => return self.own_summary(),
            Network::Gpt(gpt) => (gpt.width, gpt.heads),
            Network::Llama(llama) => (llama.width, llama.heads),
        };
        let context = self.context();
        let blocks = self.blocks::<Cpu>();
        let last = blocks.len() - 1;
        let row = |i: usize, block: &dyn Block<Cpu>| {
            let tensors = block.tensors();
            let matrices: usize =
                tensors.iter().filter(|tensor| tensor.decays()).map(Tensor::len).sum();
            let (columns, multiplied) = match i {
                0 => (width, 0),
                i if i == last => (self.outputs(), self.outputs() * width),
                _ => (width, matrices),
            };
            // Scores and their product with the values, of half of all pairs.
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
        };
        blocks.iter().enumerate().map(|(i, block)| row(i, &**block)).collect()
    }

    /// The parts of a network of a program's own: each matrix counts as one product a row.
    fn own_summary(&self) -> Vec<LayerSummary> {
        let context = self.context();
        let blocks = self.blocks::<Cpu>();
        let row = |i: usize, block: &dyn Block<Cpu>| {
            let tensors = block.tensors();
            let matrices: usize =
                tensors.iter().filter(|tensor| tensor.decays()).map(Tensor::len).sum();
            let columns = blocks.get(i + 1).map_or(self.outputs(), |next| next.input_per_row());
            LayerSummary {
                name: block.name(),
                output: vec![context, columns],
                parameters: trained(&tensors),
                flops: product(&[2, context, matrices]),
                kept: context * (block.saved_elems_per_row() + block.saved_f32_per_row() + columns),
            }
        };
        blocks.iter().enumerate().map(|(i, block)| row(i, &**block)).collect()
    }

    /// As [`Network::summary`], by blocks, which are pieces of work that stay together.
    pub fn blocks_summary(&self) -> Vec<LayerSummary> {
        match self {
            Network::Layers(layers) => layers.blocks_summary(),
            Network::Gpt(_) | Network::Llama(_) | Network::Own(_) => self.summary(),
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
            Network::Layers(_) | Network::Own(_) => (0, 0),
        };
        // The summary counts the half of attention that a causal mask leaves.
        let masked = product(&[2, layers, self.context(), self.context(), width]) as f64;
        3.0 * (forward + masked)
    }

    /// The work of every block in a training step, a sample, in operations of matrix products.
    /// Elements that are kept for the backward stand for the rest, which reads and writes memory.
    pub fn work(&self, recompute: bool) -> Vec<f64> {
        let blocks = self.blocks_summary();
        let last = blocks.len() - 1;
        // A forward, a backward twice as long, and another forward where nothing inside is kept.
        let passes = |block: usize| if recompute && block != last { 4.0 } else { 3.0 };
        let one = |(i, block): (usize, &LayerSummary)| {
            passes(i) * (block.flops as f64 + AN_ELEMENT * block.kept as f64)
        };
        blocks.iter().enumerate().map(one).collect()
    }

    /// The same network, whose first block is nothing but tables that a host can keep in a device's
    /// stead; or the reason why it has none. Names of tensors, and their values, stay.
    ///
    /// # Errors
    /// The reason, to follow the name of a key.
    pub fn with_tables_apart(&self) -> Result<Self, &'static str> {
        match self {
            Network::Layers(layers) => layers.with_tables_apart().map(Network::Layers).ok_or(
                "but model.layers does not begin with embedding or embedding_tables before others with parameters",
            ),
            Network::Llama(llama) if llama.tied => Err("but model.tied = true multiplies by the table as well"),
            Network::Llama(llama) if llama.dropout > 0.0 => {
                Err("but model.dropout drops elements of its rows, rounded as the GPU has them")
            }
            Network::Llama(_) => Ok(self.clone()),
            Network::Gpt(_) => Err("but the head of a GPT multiplies by the table as well"),
            Network::Own(_) => Err("but the network is a program's own"),
        }
    }

    /// The network as blocks.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        self.sliced(&TensorShards::whole())
    }

    /// The network as blocks, of which this rank has `slices`; those of a network by layers or of a
    /// program's own are always whole.
    pub fn sliced<B: Kernels>(&self, slices: &TensorShards) -> Blocks<B> {
        match self {
            Network::Gpt(gpt) => gpt.sliced(slices),
            Network::Llama(llama) => llama.sliced(slices),
            Network::Layers(layers) => layers.blocks(),
            Network::Own(own) => own.blocks(),
        }
    }

    /// Returns the blocks of a rank with `slices` on a CPU, to ask for their tensors and sizes. It
    /// is not generic, so that callers in other crates compile no copy of the kernels' code.
    pub fn cpu_blocks(&self, slices: &TensorShards) -> Blocks<Cpu> {
        self.sliced(slices)
    }

    /// Predictions a sample; of language models, positions of a sequence.
    pub fn context(&self) -> usize {
        match self {
            Network::Gpt(gpt) => gpt.context,
            Network::Llama(llama) => llama.context,
            Network::Layers(_) => 1,
            Network::Own(own) => own.context(),
        }
    }

    /// For people: family and size.
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
                    shown(layers.input()),
                    shown(layers.output())
                )
            }
            Network::Own(own) => own.name().to_owned(),
        }
    }

    /// Token ids of a language model.
    pub fn vocabulary(&self) -> Option<usize> {
        match self {
            Network::Gpt(gpt) => Some(gpt.vocabulary),
            Network::Llama(llama) => Some(llama.vocabulary),
            Network::Layers(_) => None,
            Network::Own(own) => own.vocabulary(),
        }
    }

    /// The samples that it takes to be trained with `loss`.
    pub fn sample_spec(&self, loss: &Loss) -> SampleSpec {
        let layers = match self {
            Network::Gpt(_) | Network::Llama(_) => return SampleSpec::Text,
            Network::Own(own) => return own.sample_spec(loss),
            Network::Layers(layers) => layers,
        };
        let target = match loss {
            Loss::CrossEntropy { .. } => Target::Class(self.outputs()),
            Loss::Deviation(_) => Target::Values(self.outputs()),
        };
        SampleSpec::Rows {
            input: layers.input().iter().product(),
            ids: layers.ids().clone(),
            target,
        }
    }

    /// Whether it is of text: it predicts tokens.
    pub fn is_language(&self) -> bool {
        self.vocabulary().is_some()
    }

    /// The word for its predictions, in the plural.
    pub fn predictions(&self) -> &'static str {
        if self.is_language() { "tokens" } else { "samples" }
    }

    /// Elements of the output at each prediction: classes, or numbers.
    pub fn outputs(&self) -> usize {
        match self {
            Network::Gpt(gpt) => gpt.vocabulary,
            Network::Llama(llama) => llama.vocabulary,
            Network::Layers(layers) => layers.output().iter().product(),
            Network::Own(own) => own.outputs(),
        }
    }
}
