//! Tests of communication between ranks: collectives, MPI, device memory, and the watchdog.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod collectives;
mod devices;
mod mpi;
mod watchdog;
