//! Sharded HDF5 data: shards, sample order, prefetching, import, verification.
//!
//! [`Dataset`] opens the shards of one split and numbers their samples, [`Sampler`] maps each
//! position of the run to a sample ([`SampleOrder`] if several data sets are mixed), and [`Loader`]
//! reads samples ahead of the training step. A program that generates its samples implements
//! [`Source`] instead of reading files.

mod arrays;
mod augment;
pub mod bench;
mod block_checksums;
pub mod bundled;
mod columns;
mod dataset;
mod decompression_limit;
mod dtype;
mod element_convert;
mod excluded_samples;
mod external_links;
mod file_order;
mod fingerprint;
mod format;
mod h5;
#[doc(hidden)]
pub mod hdf5_open;
mod image_layout;
pub mod import;
pub mod inspect;
mod listing;
mod loader;
pub mod local_cache;
mod lookup;
mod normalization;
mod packing;
mod preprocessing;
mod raw_path;
mod rows;
mod sample_contents;
mod sample_fields;
mod sample_order;
mod sampler;
pub mod sandbox;
mod shard;
mod shard_delta;
mod shard_index;
mod shard_schema;
mod shard_set_check;
mod source;
mod spec;
mod storage;
mod text_vectorizer;
mod tokenizer;
mod train_val_split;
pub mod verify;
mod walk;

/// The crate of the arrays in [`Arrays`].
pub use ndarray;

pub use arrays::Arrays;
pub use augment::Augment;
pub use columns::{Category, Coding, Columns, TextColumns};
pub use dataset::Dataset;
pub use dataset::is_weight;
pub use excluded_samples::{ExcludedSamples, ExcludedSummary};
pub use file_order::{FileOrder, RankBatches};
pub use fingerprint::{DataChange, Fingerprint, ShardFingerprint, TrainedOn};
pub use h5::one_line;
pub use image_layout::Axes;
pub use loader::{Batch, Loader};
pub use lookup::{Lookup, LookupOptions};
pub use preprocessing::{Preprocessing, Scale};
pub use sample_contents::SampleContents;
pub use sample_fields::{SampleFields, SampleMut, SampleSizes};
pub use sample_order::{Mix, SampleOrder};
pub use sampler::{Draw, Sampler};
pub use shard_index::{ShardIndex, described};
pub use source::Source;
pub use spec::{
    DataSpec, ExternalFiles, Ids, InputScale, SampleSpec, Split, Target, ValidationSource, Verify,
};
pub use text_vectorizer::TextVectorizer;
pub use tokenizer::{HuggingFace, Tokenizer, TokenizerKind};
