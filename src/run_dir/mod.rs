//! The directory of a run: which one, whose, where the run in it begins and how it ended.

mod branch;
mod changes;
mod directory;
mod ending;
pub mod markers;
mod resume;

pub use branch::{Branch, Take};
pub use directory::{Resume, RunDirectory};
pub use ending::Ending;
pub use resume::{Resumed, Taking, resume};
