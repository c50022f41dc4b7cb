//! Training runs.

#![forbid(unsafe_code)]

mod config_consistency;
mod device_dispatch;
mod elastic;
mod energy;
pub mod evaluate;
mod evaluate_run;
mod hang_timeout;
mod hooks;
mod io_retry;
pub mod planner;
mod records;
mod run;
mod save_interval;
mod step_timers;
mod stop_requests;
mod time_limit;

pub use config_consistency::{check_same_config, config_digest};
pub use device_dispatch::train;
pub use elastic::ElasticJob;
pub use energy::Energy;
pub use evaluate_run::evaluate_run;
pub use hooks::{Hook, Hooks, Outcome};
pub use io_retry::{IoFailureTolerance, is_outage};
pub use records::{Records, record_start};
pub use run::fresh_id;
pub use run::{Customization, DeviceTable, RankGpu, TrainRequest, train_on};
pub use stop_requests::StopRequests;
pub use time_limit::TimeLimit;
