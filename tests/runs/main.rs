//! Tests of whole training runs: their files, resuming, and the same bits in every layout.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod apart;
mod averages;
mod checkpoint_format;
mod checkpoints;
mod diverging;
mod efficiency;
mod epochs;
mod examples;
mod hooks;
mod layouts;
mod many_files;
mod memory;
mod memory_table;
mod networks;
mod plan;
mod predict;
mod resume;
mod sample;
mod servers;
mod slices;
mod step_times;
mod tensorboard;
mod trace;
mod verify;
