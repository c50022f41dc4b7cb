//! Sharded HDF5 data: shards, sample order, prefetching, import, verification.
//!
//! From the file up: [`Dataset`] opens the shards of one split and numbers their samples,
//! [`Sampler`] says which sample stands at which position of the run ([`Order`] does where several
//! data sets are mixed), and [`Loader`] reads positions ahead of the training step. A program that
//! makes its samples itself puts a [`Source`] of its own in the place of the files.

mod augment;
mod axes;
pub mod bench;
mod bounded;
mod brief;
pub mod bundled;
mod catalogue;
mod columns;
mod compare;
mod completeness;
mod content;
mod dataset;
mod division;
mod dtype;
mod fingerprint;
mod format;
mod h5;
#[doc(hidden)]
pub mod hdf5_files;
pub mod import;
pub mod inspect;
mod links;
mod listing;
mod loader;
mod order;
mod packing;
mod parts;
mod preprocessing;
mod raw_path;
mod rows;
mod sampler;
pub mod sandbox;
mod shard;
mod source;
mod spec;
pub mod stage;
mod standard;
mod storage;
mod stored;
mod tokenizer;
pub mod verify;
mod walk;

pub use augment::Augment;
pub use axes::Axes;
pub use catalogue::{Catalogue, described};
pub use columns::{Category, Coding, Columns};
pub use dataset::Dataset;
pub use dataset::is_weight;
pub use fingerprint::{DataChange, Fingerprint, ShardPrint, TrainedOn};
pub use h5::one_line;
pub use loader::{Batch, Loader};
pub use order::{Draw, Mix, Order};
pub use parts::{Parts, SampleMut, Sizes};
pub use preprocessing::{Preprocessing, Scale};
pub use sampler::Sampler;
pub use source::Source;
pub use spec::{DataSpec, ExternalFiles, Held, Ids, InputScale, SampleSpec, Split, Target, Verify};
pub use tokenizer::{HuggingFace, Tokenizer, TokenizerKind};
