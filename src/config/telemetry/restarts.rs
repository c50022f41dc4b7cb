//! `restarts.jsonl`: one JSON object per start of a supervised run.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::short_lines;
use hpctrain_base::error::Result;

/// The name of the file in a run's directory.
pub const FILE: &str = "restarts.jsonl";

/// One start that has ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Restart {
    /// The number of the start, from 1.
    pub start: u64,
    /// The time of the start, in seconds since 1970.
    pub time: f64,
    /// The duration in seconds.
    pub seconds: f64,
    /// The exit code, as a shell reports it.
    pub code: i32,
    /// The reason for its end.
    pub reason: String,
    /// The rank that failed first, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u64>,
    /// The host of that rank, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The hosts with their numbers of ranks, if the supervisor chose them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<String>,
    /// The step of the newest checkpoint at the end.
    pub checkpoint: Option<u64>,
    /// The number of steps taken since that checkpoint, which the next start repeats.
    pub steps_lost: u64,
    /// The seconds of those steps.
    pub seconds_lost: f64,
    /// The pause before the next start.
    pub pause_seconds: f64,
}

/// Reads the starts recorded in a run's directory; empty if the run was not supervised.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn read_run(run: &Path) -> Result<Vec<Restart>> {
    short_lines::read(&run.join(FILE))
}
