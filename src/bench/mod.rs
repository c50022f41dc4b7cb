//! Timings of the parts of training: steps, operations of a device, collectives, checkpoints.

pub mod checkpoints;
pub mod collectives;
pub mod operations;
pub mod steps;
