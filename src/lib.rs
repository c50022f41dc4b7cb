//! hpctrain trains neural networks on clusters that speak MPI.

pub mod activity;
pub mod backend;
pub mod checkpoint;
pub mod cli;
pub mod comm;
pub mod config;
pub mod data;
pub mod doctor;
pub mod error;
pub mod evaluate;
pub mod layout;
pub mod mesh;
pub mod nn;
pub mod optim;
pub mod parallel;
mod pattern;
pub mod placement;
pub mod random;
pub mod signals;
pub mod telemetry;
pub mod topology;
pub mod train;
pub mod verify;
