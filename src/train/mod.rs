//! Training: the run, its directory, and the one step.

mod collectives;
mod directory;
mod feed;
mod memory;
mod run;
mod step;

pub use directory::{Resume, RunDirectory};
pub use feed::vocabulary;
pub use run::{Request, train};
pub use step::{Engine, Geometry};
