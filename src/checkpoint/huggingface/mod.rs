//! Import and export of Hugging Face directories of GPT-2 and Llama: `config.json`,
//! `model.safetensors`, the tokenizer with its settings, and the generation defaults.
//!
//! Tensors have the same names as in hpctrain, with a prefix. In a GPT-2 of Hugging Face, linear
//! layers are stored as inputs × outputs instead of outputs × inputs, and always have biases.

mod architecture;
mod export;
mod gpt2;
mod import;
mod llama;
mod name_map;
pub(crate) mod safetensors;
pub(crate) mod staging;
mod tokenizer;

pub use export::{Exported, export};
pub(crate) use export::{checked_network, json, write};
pub use import::import;
pub(crate) use tokenizer::TOKENIZER;
pub use tokenizer::tokenizer;

use hpctrain_base::layout::{Tensor, TensorShards};
use hpctrain_nn::Network;

/// Name of the file with the architecture.
pub(crate) const CONFIG: &str = "config.json";

/// Name of the file with the weights.
pub(crate) const MODEL: &str = "model.safetensors";

/// Name of the index of models saved in several files.
const INDEX: &str = "model.safetensors.index.json";

/// Returns all tensors of a network, with their names and shapes in hpctrain.
pub(crate) fn tensors(network: &Network) -> Vec<Tensor> {
    network.cpu_blocks(&TensorShards::whole()).iter().flat_map(|block| block.tensors()).collect()
}
