//! Timings of the parts of training: operations of a device, collectives, checkpoints.

pub mod checkpoints;
pub mod collectives;
pub mod operations;
