//! Training: the run, its directory, and the one step.

mod directory;
mod memory;
mod run;
mod step;

pub use directory::{Resume, RunDirectory};
pub use run::{Request, train, vocabulary};
pub use step::{Engine, Geometry};
