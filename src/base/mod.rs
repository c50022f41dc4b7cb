//! Foundations of hpctrain, which all its crates use: errors, files and directories, signals and threads, random numbers, shapes of
//! memory and of meshes, spans of threads, energy.
//!
//! It serves the other crates of hpctrain: it may change at any time.

#![forbid(unsafe_code)]

pub mod activity;
pub mod control_groups;
pub mod descriptors;
pub mod energy;
pub mod error;
pub mod histogram;
pub mod layout;
pub mod mesh;
pub mod own_files;
pub mod panics;
pub mod pattern;
pub mod private;
pub mod random;
pub mod regular_files;
pub mod signals;
pub mod simd;
pub mod spawn;
pub mod time_limit;
pub mod tree;
pub mod visible;
