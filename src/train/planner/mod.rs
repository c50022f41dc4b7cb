//! The layout planner: searches the parallel layouts of a network on a number of ranks, and
//! predicts which fit into memory and how long a step takes in each.
//!
//! A layout is a configuration: `layouts.rs` enumerates them and
//! [`resolve`](hpctrain_config::resolve) checks which are legal, so that nothing is proposed that a
//! run would refuse. Memory is estimated by [`estimate`](hpctrain_engine::memory::estimate). The
//! time of a step is simulated by `timeline.rs` over the same list of actions that a real step
//! runs. The seconds of each action come from [`Rates`]: from a description of a machine, or from a
//! measurement on this one.

mod cost_model;
mod layouts;
mod machine;
#[cfg(test)]
mod megatron_reference;
mod offload;
#[cfg(test)]
mod predicted_scaling;
mod profile;
mod report;
mod search;
mod timeline;
mod trial_runs;

pub use cost_model::{GroupExtent, Rates};
pub use layouts::{LayoutKeys, RejectedLayout};
pub use machine::Machine;
pub use offload::OffloadKeys;
pub use profile::{MeasuredRates, measure};
pub use report::PlanReport;
pub use search::{
    Proposal, SearchEnvironment, SearchLimits, SearchResult, check_batch, environment,
    search_layouts, search_layouts_here,
};
pub use trial_runs::{Trial, run_trials};
