//! Training on parameter servers: servers hold the parameters, workers take them and give gradients back, a coordinator gives work out.
//!
//! Li et al., "Scaling distributed machine learning with the parameter server" (2014); Ho et al., "More effective distributed ML
//! via a stale synchronous parallel parameter server" (2013). `docs/servers.md` describes it for users.
//!
//! [`Coordinator`] is for programs: it has functions that workers know called by name, each on one of them.
//!
//! All speak TCP, also under `mpirun`: a job of MPI dies with any of its ranks, and here everyone but the coordinator may come and
//! go. A server holds ranges of units (`division.rs`, `storage.rs`). Work is given out under tickets, and given out again when its
//! worker is gone (`pool.rs`). With `servers.staleness = 0` a step is so many lanes: workers compute groups of them, servers add them
//! in the fixed tree (`sums.rs`), and nothing depends on the worker that computed one. Otherwise each worker's gradient is applied as it
//! comes.

#![forbid(unsafe_code)]

mod address;
mod calls;
mod coordinator;
mod course;
mod division;
mod exchange;
mod fleet;
mod heart;
mod hub;
mod journal;
mod line;
mod listener;
mod message;
mod pool;
mod program;
mod rates;
mod saving;
mod server;
mod site;
mod status;
mod storage;
mod sums;
mod tally;
mod terms;
mod trace;
mod wire;
mod worker;

pub use address::host_of;
pub use calls::{Coordinator, Functions, Handle, work_on_calls};
pub use coordinator::{Call, ServedRun};
pub use rates::{Direction, Rate, rates};
pub use server::{Post, serve};
pub use site::Site;
pub use status::{status, told};
pub use worker::{Hand, config_of_run, work};
