//! Messages between ranks: collectives, MPI, the memory of devices, the watch over ranks that stand
//! still.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod collectives;
mod devices;
mod mpi;
mod watchdog;
