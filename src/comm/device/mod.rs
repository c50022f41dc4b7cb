//! Communication of device memory: host-staged, by CUDA-aware MPI, or by NCCL.
//!
//! `Backend::comm_buffer` gives the communication thread a buffer as host memory, or as a
//! `DeviceSpan`, whose elements it cannot access, with `DeviceCopies` that copy and add spans on a
//! separate stream. A request carries an event that compute records when it passes on the buffer.
//! Unless the device orders the work, the thread waits for the event, and answers only when its work
//! on the device is done, so any stream may use the buffer that `Pending::wait` returns.
//!
//! Over NCCL and CUDA IPC the **device orders** collectives with compute: messages wait for the event on their
//! stream, the thread answers once they are queued, and `Pending::wait` makes the compute stream wait
//! for their end. So the host queues a step ahead of the device. The thread polls what is in flight
//! (`device_queue.rs`); the device measures how long it takes and how long compute is idle.
//!
//! | `comm.transport` | messages | sums |
//! |---|---|---|
//! | `host-staged` | through pinned slots of 4 MiB, by the host's transport | on the host |
//! | `cuda-aware` | MPI is given device addresses; reductions and all-gathers of `halving-doubling` and `hierarchical` in the same groups, for each of which the host waits | on the device, in the host's order |
//! | `nccl` | pairs of `ncclSend` and `ncclRecv`; reductions and all-gathers of `halving-doubling` and `hierarchical` in groups (`grouped_collective.rs`) | on the device, in the host's order |
//! | `cuda-ipc` | kernels write to the memory of the receiver, on the same node; in the same groups | on the device, in the host's order |
//!
//! `auto` takes the first that works (`select.rs`), after probes in child processes that may crash
//! (`rank_probe.rs`, and `transport/mpi/cuda_probe.rs` for MPI).
//!
//! With `comm.algorithm = "vendor"` MPI or NCCL runs the collectives, with its order of additions.
//! CUDA IPC has none.

pub(super) mod chunk_pipeline;
pub(super) mod comms;
pub(super) mod cuda_aware;
pub(super) mod device_queue;
pub(super) mod grouped_collective;
pub(super) mod host_chunks;
pub(super) mod host_staged;
pub(super) mod local_device;
pub(super) mod message_groups;
pub(super) mod path;
pub(super) mod rank_probe;
pub(super) mod select;
