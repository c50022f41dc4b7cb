//! Detection of hangs: the flight recorder of collectives, heartbeats, the watchdog, and the report
//! of a job that hangs.

pub(super) mod flight_recorder;
pub(super) mod hang_report;
pub(super) mod heartbeat;
pub(super) mod pending_peers;
mod rank_ranges;
pub(super) mod watchdog;
pub(super) mod watchdog_guard;
