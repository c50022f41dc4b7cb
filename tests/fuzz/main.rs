//! Fuzzing: every reader of files and messages gets mutated real ones. It may refuse them, but not
//! panic, not hang, and not take memory out of proportion.
//!
//! Inputs follow from a seed and the number of a round, and both are printed with a failure; the
//! input is kept in a file.
//!
//! | variable | is |
//! |---|---|
//! | `HPCTRAIN_FUZZ_SECONDS` | time for each reader, 3 without: more time means more rounds, and nothing else |
//! | `HPCTRAIN_FUZZ_SEED` | the seed, 20 without |
//! | `HPCTRAIN_FUZZ_ROUND` | this round alone, of each reader that is asked for |
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
