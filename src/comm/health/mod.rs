//! Whether all ranks still go on: the ledger of their collectives, heartbeats, and the report of a job that stands still.

pub(super) mod heartbeat;
pub(super) mod ledger;
pub(super) mod partners;
mod runs;
pub(super) mod stall;
pub(super) mod watch;
pub(super) mod watchdog;
