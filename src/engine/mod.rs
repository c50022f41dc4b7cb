//! The one step, and all that it stands on: the network on its mesh, its samples, the memory it takes.

#![forbid(unsafe_code)]

mod advance;
mod build;
mod collectives;
pub mod feed;
mod host_inputs;
mod host_tables;
mod local;
pub mod memory;
mod model;
mod neighbours;
mod pace;
mod pieces;
mod planning;
mod products;
mod rehearsal;
mod splits;
mod step;
#[cfg(test)]
mod tests;

pub use advance::clip;
pub use advance::{Round, StepResult, advance};
pub use build::behind_tables;
pub use build::{engine, engine_of};
pub use collectives::Exchange;
pub use feed::check_size;
pub use feed::vocabulary;
pub use host_inputs::HostInputs;
pub use local::on_threads;
pub use model::Model;
pub use pace::Pace;
pub use planning::plan;
pub use products::{TimedProducts, time_products};
pub use splits::Splits;
pub use step::{Engine, Geometry};
