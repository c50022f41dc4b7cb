//! The foundations of all crates of hpctrain: errors, files and directories, signals and threads,
//! random numbers, layouts of memory and of ranks, spans of threads, energy.
//!
//! It is an internal crate, whose API may change at any time.

#![forbid(unsafe_code)]

pub mod control_groups;
pub mod energy;
pub mod error;
pub mod escape;
pub mod exact_sum;
pub mod fault;
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
