//! Tests of the CUDA backend on a simulator of the driver (`tests/cudasim/`), or on a GPU with
//! `HPCTRAIN_TEST_GPU=1`.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod cubin;
mod driver;
mod efficiency;
mod eight_gpus;
mod host_embedding;
mod layouts;
mod matmul_autotune;
mod memory;
mod memory_checkpoints;
mod mixed_devices;
mod nvrtc;
mod offload;
mod ordered_sums;

mod threads;
mod training;
mod transport_selection;
mod verification;
