//! Training: the run, its directory, and the one step.

mod advance;
mod available;
mod budget;
mod collectives;
mod directory;
pub mod feed;
mod fits;
mod hooks;
mod local;
pub mod marks;
mod memory;
mod notes;
mod orders;
mod placed;
mod planning;
mod records;
mod resume;
mod run;
pub mod saving;
mod splits;
mod step;

pub use advance::{Taken, advance};
pub use available::available;
pub use collectives::Exchange;
pub use directory::{Resume, RunDirectory};
pub use feed::vocabulary;
pub use fits::check as check_memory;
pub use hooks::{Hook, Outcome};
pub use local::on_threads;
pub use memory::{Held, resident};
pub use placed::train_on_device;
pub use planning::plan;
pub use resume::Take;
pub use run::{Ending, GpuPlace, Own, Request, engine, engine_of, train};
pub use splits::Splits;
pub use step::{Engine, Geometry};
