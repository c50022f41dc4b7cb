//! The directory of a run: its choice, its ownership, the starting point of the run in it and its end.

mod branch;
mod changes;
mod directory;
mod ending;
pub mod markers;
mod resume;
mod supervised;

pub use branch::{Branch, Take};
pub use changes::differences;
pub use directory::{Resume, RunDirectory};
pub use ending::{Ending, REQUEUE};
pub use resume::data_changes;
pub use resume::{Resumed, Taking, resume};
pub use supervised::SUPERVISED;
