//! Tests of whole training runs: their files, resuming, and the same bits in every layout.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod batch;
mod checkpoint_format;
mod checkpoints;
mod diverging;
mod efficiency;
mod ema;
mod epochs;
mod examples;
mod excluded;
mod export;
mod hooks;
mod layouts;
mod local_sgd;
mod many_files;
mod memory;
mod memory_table;
mod networks;
mod plan;
mod predict;
mod replay;
mod resume;
mod sample;
mod samples;
mod servers;
mod sparse_tables;
mod step_times;
mod tensor_parallel;
mod tensorboard;
mod trace;
mod verify;
mod work_shares;
