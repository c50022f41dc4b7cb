//! Messages to and from device memory: through the host, by address, or by NCCL.
//!
//! `Backend::comm_buffer` gives the communication thread a buffer as host memory or as a `Span` of
//! device memory, which it cannot look into, with the `DeviceCopies` that copies and adds spans on
//! a stream of its own. A request carries an event that compute records when it hands the buffer
//! over. The thread waits for the event and answers only when its own work on the device is done,
//! so any stream may use the buffer that `Pending::wait` returns.
//!
//! | `comm.transport` | messages | sums |
//! |---|---|---|
//! | `staged` | through page-locked slots of 4 MiB, by the host's wire | the host's |
//! | `direct` | MPI is given device addresses | on the device, in the host's order |
//! | `nccl` | pairs of `ncclSend` and `ncclRecv`; sums and gathers of `tree` and `hierarchical` in groups of all ranks (`grouped.rs`) | on the device, in the host's order |
//!
//! `auto` chooses among them (`select.rs`); processes that may crash prove before that a library
//! works here (`trial.rs`, and `transport/mpi/cuda_probe.rs` for MPI's).
//!
//! With `comm.algorithm = "vendor"` the collectives are the library's own, MPI's or NCCL's, with
//! its order of additions.

mod chunk_pipeline;
pub(super) mod comms;
pub(super) mod cuda_aware;
pub(super) mod host_staged;
pub(super) mod local_device;
pub(super) mod nccl_p2p;
pub(super) mod nccl_probe;
pub(super) mod path;
pub(super) mod select;
