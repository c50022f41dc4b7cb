//! The guide to a layout: every way to train a network on so many ranks, those that fit into memory, and the time that a step
//! takes in each.
//!
//! A layout is a configuration: `layouts.rs` makes them and [`resolve`](hpctrain_config::resolve) says which are legal, so that
//! nothing is proposed that a run would refuse. Memory is that of [`estimate`](hpctrain_engine::memory::estimate). The time of a
//! step is played through by `timeline.rs` over the list of actions that the step itself runs, with the seconds of its pieces
//! from [`Rates`]: a description of a machine, or a measurement on this one.

mod choice;
mod costs;
mod layouts;
mod machine;
mod measured;
mod on_host;
#[cfg(test)]
mod published;
mod report;
mod timeline;
mod tried;

pub use choice::{Choice, Here, Place, Proposal, choose, choose_here, facts};
pub use costs::{Rates, Span};
pub use layouts::{Keys, LeftOut};
pub use machine::Machine;
pub use measured::{Measured, measure};
pub use on_host::OnHost;
pub use report::Report;
pub use tried::{Trial, try_out};
