//! Checkpoints: HDF5 files with each rank's shards and a manifest, keyed by tensor name and global
//! range.
//!
//! ```text
//! checkpoints/
//!   step-00000200/          complete, because it was renamed into place
//!     manifest.json         step, data position, configuration, every tensor's shards and
//! checksums
//!     manifest.crc32        checksum of the manifest
//!     rank-00000.h5         the shards that rank owned: /params/<tensor>, /m/<tensor>, /v/<tensor>
//!   step-00000400.tmp-<id>/ being written
//!   latest, best            symbolic links to published checkpoints, or files that name them
//! (`pointer`)
//!   .leases/                processes that are reading checkpoints
//! ```
//!
//! The format does not depend on the layout: any number of ranks in any layout can read a
//! checkpoint.
//! The format is in `docs/checkpoint-format.md`.

mod async_save;
mod directory;
mod excerpt;
pub mod export;
pub mod filesystem;
pub mod huggingface;
pub mod lease;
mod manifest;
mod marking;
pub mod memory;
mod names;
mod piece_source;
mod pointer;
mod read;
mod retention;
pub mod run_dir;
mod save_thread;
mod shard;
mod snapshot;
mod suspect;
pub mod tools;
mod trash;
mod writeback;

use std::path::Path;

use hpctrain_base::error::{Error, Reason};

pub use async_save::{Published, SaveContext, Saver};
pub use directory::{Checkpoints, files_checked};
pub use excerpt::most_received;
pub use hpctrain_parallel::Progress;
pub use manifest::ShardFileInfo;
pub use manifest::{Manifest, Origin, ShardSlice, TensorEntry, parsed};
pub use names::{name_of, step_of};
pub use piece_source::PieceSource;
pub use pointer::{Pointer, Target};
pub use read::Reader;
pub use retention::Retention;
pub use save_thread::{SaveTask, SaveThread};
pub use snapshot::{Ranged, write_ranges};
pub use trash::Removal;

/// The group of the parameters' datasets; optimizer state is in a group named after its buffer.
pub const PARAMS: &str = "params";

/// Returns the error of a file system operation that saving needs.
fn refused(action: &str, path: &Path, e: impl Reason) -> Error {
    Error::io(action, path, e).hint(
        "check the free space, the permissions, and the limit on the size of files (ulimit -f) there; the last published \
         checkpoint is kept",
    )
}
