//! Training.
mod step;
pub use step::{Engine, Geometry};
