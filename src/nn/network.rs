//! The families of networks.

use super::Blocks;
use super::gpt::Gpt;
use super::llama::Llama;
use crate::backend::Kernels;

/// A network and its size.
#[derive(Debug, Clone, PartialEq)]
pub enum Network {
    /// GPT-2.
    Gpt(Gpt),
    /// Llama.
    Llama(Llama),
}

impl Network {
    /// The network as blocks.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        match self {
            Network::Gpt(gpt) => gpt.blocks(),
            Network::Llama(llama) => llama.blocks(),
        }
    }

    /// Positions a sequence.
    pub fn context(&self) -> usize {
        match self {
            Network::Gpt(gpt) => gpt.context,
            Network::Llama(llama) => llama.context,
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
            Network::Llama(Llama { layers, heads, kv_heads, width, hidden, context, vocabulary, tied, .. }) => {
                let head = if *tied { "tied" } else { "own" };
                format!(
                    "Llama, {layers} layers, {heads} heads ({kv_heads} of keys), width {width}, hidden {hidden}, \
                     context {context}, vocabulary {vocabulary}, {head} head"
                )
            }
        }
    }

    /// Token ids.
    pub fn vocabulary(&self) -> usize {
        match self {
            Network::Gpt(gpt) => gpt.vocabulary,
            Network::Llama(llama) => llama.vocabulary,
        }
    }
}
