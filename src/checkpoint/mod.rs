//! Checkpoints: HDF5 files of owned ranges and a manifest, keyed by tensor name and global range.
//!
//! ```text
//! checkpoints/
//!   step-00000200/    complete by its name: it was renamed into place
//!     manifest.json   step, data position, configuration, every tensor's pieces and checksums
//!     rank-00000.h5   the ranges that rank owned: /params/<tensor>, /m/<tensor>, /v/<tensor>
//!   latest            symbolic link to the newest published one
//! ```
//!
//! Nothing in it depends on the ranks that wrote it: any number of ranks in any layout can read it.

mod directory;
mod manifest;
mod read;
mod write;

pub use directory::Checkpoints;
pub use manifest::{Manifest, Piece, TensorEntry};
pub use read::Reader;
pub use write::{Progress, save};

/// Datasets with parameters are under this group; optimizer state is under the name of its buffer.
pub const PARAMS: &str = "params";
