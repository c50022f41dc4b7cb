//! The guide to a layout: every way to train a network on so many ranks, those that fit into
//! memory, and the time that a step takes in each.
//!
//! A layout is a configuration: `layouts.rs` makes them and [`resolve`](hpctrain_config::resolve)
//! says which are legal, so that nothing is proposed that a run would refuse. Memory is that of
//! [`estimate`](hpctrain_engine::memory::estimate). The time of a step is played through by
//! `timeline.rs` over the list of actions that the step itself runs, with the seconds of its pieces
//! from [`Rates`]: a description of a machine, or a measurement on this one.

mod cost_model;
mod layouts;
mod machine;
#[cfg(test)]
mod megatron_reference;
mod offload;
mod profile;
mod report;
mod search;
mod timeline;
mod trial_runs;

pub use cost_model::{GroupExtent, Rates};
pub use layouts::{Keys, LeftOut};
pub use machine::Machine;
pub use offload::OnHost;
pub use profile::{Measured, measure};
pub use report::PlanReport;
pub use search::{Choice, Here, Proposal, SearchLimits, choose, choose_here, facts};
pub use trial_runs::{Trial, try_out};
