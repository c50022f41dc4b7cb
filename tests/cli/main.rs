//! Tests of the command line: commands and their output, invalid input, the doctor, the set-up
//! script, and job scripts.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod bad_input;
mod commands;
mod compat;
mod doctor;
mod environment;
mod hostile;
mod pages;
mod publish;
mod report;
mod runs;
mod setup;
mod slurm;
mod submit;
mod watch;
