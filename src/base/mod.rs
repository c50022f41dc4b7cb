//! Foundations of hpctrain, which all its crates use: errors, files and directories, signals and
//! threads, random numbers, shapes of memory and of meshes, spans of threads, energy.
//!
//! It serves the other crates of hpctrain: it may change at any time.

#![forbid(unsafe_code)]

pub mod control_groups;
pub mod energy;
pub mod error;
pub mod escape;
pub mod fd_limit;
pub mod histogram;
pub mod layout;
pub mod mesh;
pub mod own_files;
pub mod panics;
pub mod pattern;
pub mod random;
pub mod safe_open;
pub mod signals;
pub mod simd;
pub mod spans;
pub mod spawn;
pub mod time_limit;
pub mod tree_sum;
pub mod user_dirs;
