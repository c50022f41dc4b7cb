//! Training on parameter servers: servers hold the parameters, workers take them and give gradients
//! back, a coordinator gives work out.
//!
//! Li et al., "Scaling distributed machine learning with the parameter server" (2014); Ho et al.,
//! "More effective distributed ML via a stale synchronous parallel parameter server" (2013).
//! `docs/parameter-servers.md` describes it for users.
//!
//! [`Coordinator`] is for programs: it has functions that workers know called by name, each on one
//! of them.
//!
//! All speak TCP, also under `mpirun`: a job of MPI dies with any of its ranks, and here everyone
//! but the coordinator may come and go. A server holds ranges of units (`partitioner.rs`,
//! `param_store.rs`). Work is given out under tickets, and given out again when its worker is gone
//! (`scheduler.rs`). With `parameter_server.staleness = 0` a step is so many virtual ranks: workers compute
//! groups of them, servers add them in the fixed tree (`tree_reducer.rs`), and nothing depends on
//! the worker that computed one. Otherwise each worker's gradient is applied as it comes.

#![forbid(unsafe_code)]

mod address;
mod checkpoint_task;
mod cluster_coordinator;
mod codec;
mod coordinator;
mod coordinator_service;
mod heartbeat;
mod param_store;
mod partitioner;
mod program;
mod protocol;
mod push_pull;
mod rates;
mod rendezvous;
mod rpc_client;
mod rpc_server;
mod run_spec;
mod scheduler;
mod server;
mod server_clients;
mod session;
mod status;
mod trace;
mod tree_reducer;
mod wal;
mod worker;
mod worker_metrics;

pub use address::host_of;
pub use cluster_coordinator::{Coordinator, Functions, Handle, work_on_calls};
pub use coordinator::{CoordinatorOptions, CoordinatorRun};
pub use rates::{Direction, Rate, rates};
pub use rendezvous::PsRendezvous;
pub use server::{ServerOptions, serve};
pub use status::{status, told};
pub use worker::{WorkerOptions, config_of_run, work};
