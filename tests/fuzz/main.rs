//! Fuzzing: every reader of files and messages gets mutated real ones. It may refuse them, but must
//! not panic, hang, or take memory out of proportion.
//!
//! Inputs are determined by a seed and the number of a round, and both are printed with a failure;
//! the input is saved in a file.
//!
//! | variable | meaning |
//! |---|---|
//! | `HPCTRAIN_FUZZ_SECONDS` | time for each reader, default 3: more time means more rounds |
//! | `HPCTRAIN_FUZZ_SEED` | the seed, default 20 |
//! | `HPCTRAIN_FUZZ_ROUND` | only this round, of each reader that runs |
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod checkpoints;
mod config;
mod harness;
mod imports;
mod memory;
mod messages;
mod models;
mod mutate;
mod records;
mod roles;
mod samples;
