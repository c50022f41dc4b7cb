//! In-memory checkpoints: copies of parameters and optimizer state in a file system in memory, from
//! which a job that was killed continues.
//!
//! They are not checkpoints to publish: only a restart of the same run reads them, and a run that
//! ends removes them. Like checkpoints they do not depend on the layout: pieces are found by the
//! name of the tensor and the range, and every rank reads a share.

mod copies;
mod disk;
mod find;
mod node_directory;
mod partner;
mod restore;
mod slot;
mod slot_memory;

pub use copies::{MemoryCheckpoints, MemoryJob};
pub use find::{Candidate, NodeSlots, find};
pub use node_directory::{NodeDirectory, is_same_directory};
pub use partner::{foreign_ranks, partners};
pub use restore::SlotSource;
