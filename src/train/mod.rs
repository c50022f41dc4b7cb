//! Training runs.

mod alike;
mod budget;
mod energy;
mod hooks;
mod meters;
mod outages;
mod placed;
mod records;
mod run;
mod stop_requests;

pub(crate) use alike::check_alike;
pub(crate) use budget::Budget;
pub(crate) use energy::Energy;
pub use hooks::{Hook, Outcome};
pub(crate) use outages::{Outages, is_outage};
pub use placed::train_on_device;
pub(crate) use records::Records;
pub(crate) use run::fresh_id;
pub use run::{GpuPlace, Own, Request, train};
pub(crate) use stop_requests::StopRequests;
