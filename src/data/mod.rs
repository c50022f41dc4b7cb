//! Sharded HDF5 data: shards, sample order, prefetching, import, verification.

mod sampler;
mod tokenizer;

pub use sampler::Sampler;
pub use tokenizer::{Tokenizer, TokenizerKind};
