//! Messages between ranks.
//!
//! One **communication thread** per rank owns the wire: with MPI it initialises the library, makes every
//! call and finalises it. Compute threads hand it buffers *by move*, and [`Pending::wait`] gives them
//! back, so no borrow can race with the wire. Requests run in the order they were made, one at a time;
//! only sends finish in the background. The ranks of a group must make the same collective requests in
//! the same order, which debug builds check.
//!
//! Four things carry messages: MPI ([`start_mpi`]), TCP between processes that meet by themselves ([`start_tcp`]), mailboxes between
//! threads of one process ([`start_threads`], for tests and simulation), and nothing at all ([`single`]). The collectives above them are shared.
//! A group of one rank is the identity, so callers never ask how large a group is.

mod algorithms;
mod autotune;
mod backoff;
mod clock;
mod communicator;
mod cut;
mod device;
mod exit;
mod group;
mod health;
mod operand;
mod patience;
mod pending;
mod posted;
mod shared;

#[cfg(test)]
mod tests;
mod wire;
mod worker;

pub use algorithms::{Algorithm, Operation};
pub use autotune::choice::{Choice, measure, slowest};
pub use autotune::table::Table;
pub use communicator::{Comm, single, start_mpi, start_mpi_within, start_tcp, start_threads, start_threads_on_nodes};
pub use device::own::OwnDevice;
pub use device::path::{DevicePath, PathSetting};
pub use device::select::{PROOF, prove, proved_by};
pub use device::trial::{TOGETHER, answer_trial, can_be_tried};
pub use group::Group;
pub use health::watch::Watch;
pub use pending::Pending;
pub use shared::Stats;
pub use wire::launch::{Launch, launched};
pub use wire::mpi;
pub use wire::tcp::{
    Acceptor, Caller, Connection, Credentials, HANDSHAKE_TIMEOUT, Handshake, MEETING, Meeting, Secret, call,
    write_secret,
};
pub use wire::threads::Aborted;
pub use wire::{NodeInfo, sorted_by_node};
