//! `ranks.jsonl`: the compute time of every rank, one JSON object a window of `log.straggler_window` steps.

use serde::{Deserialize, Serialize};

/// Name of the file in a run's directory.
pub const FILE: &str = "ranks.jsonl";

/// The ranks in a window of steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankTimes {
    /// The last step of the window.
    pub step: u64,
    /// Its steps.
    pub steps: u64,
    /// Milliseconds a step that each rank computed, waits for messages and data left out; ranks in order.
    pub compute_ms: Vec<f64>,
}
