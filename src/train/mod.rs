//! Training runs.

#![forbid(unsafe_code)]

mod alike;
mod budget;
mod energy;
pub mod evaluate;
mod hooks;
mod meters;
mod outages;
mod placed;
pub mod planner;
mod records;
mod run;
mod stop_requests;

pub use alike::check_alike;
pub use budget::Budget;
pub use energy::Energy;
pub use hooks::{Hook, Outcome};
pub use outages::{Outages, is_outage};
pub use placed::train_on_device;
pub use records::Records;
pub use run::fresh_id;
pub use run::{GpuPlace, Own, Request, train};
pub use stop_requests::StopRequests;
