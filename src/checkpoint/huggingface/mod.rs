//! Hugging Face's directories of GPT-2 and Llama: `config.json` and `model.safetensors`, and the
//! tokenizer with its settings and those of generation.
//!
//! Their tensors have the names of ours behind a prefix. GPT-2's linear maps are stored as inputs ×
//! outputs there, outputs × inputs here, and always have biases.

mod architecture;
mod export;
mod gpt2;
mod import;
mod llama;
mod name_map;
mod safetensors;
mod staging;
mod tokenizer;

pub use export::{Exported, export};
pub use import::import;
pub use tokenizer::tokenizer;

use hpctrain_base::layout::{Tensor, TensorShards};
use hpctrain_nn::Network;

/// File with the architecture.
const CONFIG: &str = "config.json";

/// File with the numbers.
const MODEL: &str = "model.safetensors";

/// Index of the tensors when they are in several files.
const INDEX: &str = "model.safetensors.index.json";

/// Every tensor of a network, with the names and shapes that they have here.
fn tensors(network: &Network) -> Vec<Tensor> {
    network.cpu_blocks(&TensorShards::whole()).iter().flat_map(|block| block.tensors()).collect()
}
