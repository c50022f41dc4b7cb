//! Collectives and point-to-point messages between ranks.
//!
//! One **communication thread** per rank owns the transport: with MPI it initialises the library,
//! makes every call and finalises it. Compute threads hand it buffers *by move*, and
//! [`Pending::wait`] gives them back, so no borrow can race with the transport. Requests run in the
//! order they were made, one at a time; only sends finish in the background. The ranks of a group
//! must make the same collective requests in the same order, which debug builds check. After a
//! request fails, all later ones fail with the same error, because ranks may no longer agree on the
//! next request.
//!
//! The transports are MPI ([`start_mpi`]), TCP between processes that meet by themselves
//! ([`start_tcp`]), and mailboxes between threads of one process ([`start_threads`], for tests and
//! simulation); a single rank needs none ([`single`]). The collectives above them are shared. A
//! collective of a group of one rank is the identity, so callers need not check the group's size.

mod algorithms;
mod autotune;
mod chunking;
mod clock;
mod collective;
mod communicator;
mod device;
mod environment;
mod exit;
mod group;
mod health;
pub mod interface;
mod keepalive;
pub mod membership;
mod p2p_request;
mod pending;
mod polling;
mod reduce_buffer;
mod shared;

#[cfg(test)]
mod tests;
mod transport;
mod worker;

pub use algorithms::{Algorithm, Operation, TermOrder, UNEQUAL_SCRATCH, UnequalCollective};
pub use autotune::choice::{AlgorithmChoice, connect_ranks, measure, slowest};
pub use autotune::table::AlgorithmTable;
pub use communicator::{
    Comm, Interrupter, single, start_mpi, start_mpi_within, start_tcp, start_tcp_mesh,
    start_threads, start_threads_on_nodes,
};
pub use device::local_device::LocalDevice;
pub use device::path::{DeviceTransport, TransportChoice};
pub use device::rank_probe::{RankProbe, enable_rank_probes, run_rank_probe};
pub use device::select::{CUDA_PROBE_COMMAND, probe_cuda_aware, probe_cuda_aware_processes};
pub use environment::prepare_environment;
pub use group::Group;
pub use health::watchdog_guard::WatchdogGuard;
pub use pending::Pending;
pub use shared::Stats;
pub use transport::in_process::Aborted;
pub use transport::launch::{ADDRESS_VARIABLE, JOIN_VARIABLE, Launch, launched};
pub use transport::mpi;
pub use transport::tcp::{
    Acceptor, Connection, Credentials, HANDSHAKE_TIMEOUT, Handshake, PeerId, RENDEZVOUS_VARIABLE,
    Secret, TcpMesh, TcpRendezvous, call, host_name, write_secret,
};
pub use transport::{NodeInfo, sorted_by_node};
