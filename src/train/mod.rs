//! Training: the run, its directory, and the one step.

mod advance;
mod available;
mod budget;
mod collectives;
mod directory;
pub mod feed;
mod fits;
mod local;
pub mod marks;
mod memory;
mod notes;
mod orders;
pub mod pace;
mod records;
mod resume;
mod run;
pub mod saving;
mod step;

pub use advance::{Taken, advance};
pub use available::available;
pub use collectives::Exchange;
pub use directory::{Resume, RunDirectory};
pub use feed::vocabulary;
pub use fits::check as check_memory;
pub use local::on_threads;
pub use memory::{Held, resident};
pub use resume::Take;
pub use run::{Ending, GpuPlace, Request, engine, train};
pub use step::{Engine, Geometry};
