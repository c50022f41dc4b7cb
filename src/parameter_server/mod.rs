//! Training with parameter servers: servers hold the parameters, workers pull parameters and push
//! gradients, and a coordinator schedules the work.
//!
//! Li et al., "Scaling distributed machine learning with the parameter server" (2014); Ho et al.,
//! "More effective distributed ML via a stale synchronous parallel parameter server" (2013).
//! `docs/parameter-servers.md` describes it for users.
//!
//! [`Coordinator`] is an API for custom programs: it schedules calls of named functions on elastic
//! workers. [`Parameters`] are tensors on servers that these functions pull and push.
//!
//! All processes communicate over TCP, also under `mpirun`, because an MPI job dies with any of its
//! ranks, whereas here every process but the coordinator may join and leave. A server holds ranges
//! of units (`partitioner.rs`, `param_store.rs`). Work is assigned under tickets, and reassigned
//! when its worker is lost (`scheduler.rs`). With `parameter_server.staleness = 0` a step consists
//! of a fixed number of virtual ranks: workers compute groups of them and servers add the gradients
//! in a fixed tree (`tree_reducer.rs`), so that the result does not depend on which worker computed
//! which. Otherwise each worker's gradient is applied when it arrives.
//!
//! If a server is lost, the coordinator starts a new generation of servers at the last checkpoint.
//! A coordinator that was lost continues from its log (`wal.rs`).

#![forbid(unsafe_code)]

mod address;
mod checkpoint_task;
mod cluster_coordinator;
mod codec;
mod coordinator;
mod coordinator_service;
mod heartbeat;
mod job;
mod network_spec;
mod param_store;
mod parameter_servers;
mod parameters;
mod partitioner;
mod program;
mod protocol;
mod push_pull;
mod rates;
mod rendezvous;
mod row_client;
mod rpc_client;
mod rpc_server;
mod run_spec;
mod scheduler;
mod server;
mod server_clients;
mod session;
mod shared_splits;
mod status;
mod trace;
mod tree_reducer;
mod wal;
mod worker;
mod worker_metrics;

pub use address::host_of;
pub use cluster_coordinator::{Coordinator, Functions, Handle, WorkerContext, run_worker};
pub use coordinator::{CoordinatorOptions, CoordinatorRun};
pub use job::{RankEnd, ServedRank, coordinate, serve_alongside, serve_run, train, work_for_run};
pub use parameter_servers::{ParameterOptions, ParameterServers, run_server};
pub use parameters::Parameters;
pub use rates::{Direction, Rate, rates};
pub use rendezvous::PsRendezvous;
pub use server::{ServerOptions, serve};
pub use status::{format_status, status};
pub use worker::{WorkerOptions, config_of_run, work};
