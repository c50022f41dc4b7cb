//! The directory of a run: its choice, its ownership, the starting point of the run in it and its
//! end.

mod branch;
mod config_diff;
mod directory;
pub mod markers;
mod outcome;
mod resume;
mod supervisor_hint;

pub use branch::{Branch, RestoreScope};
pub use config_diff::differences;
pub use directory::{MemoryNote, Resume, RunDirectory};
pub use outcome::{REQUEUE, RunOutcome};
pub use resume::data_changes;
pub use resume::{RestoreOptions, Resumed, resume};
pub use supervisor_hint::SUPERVISED;
