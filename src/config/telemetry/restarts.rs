//! `restarts.jsonl`: one JSON object a start of a supervised run.

use std::path::Path;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// Name of the file in a run's directory.
pub const FILE: &str = "restarts.jsonl";

/// One start that has ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Restart {
    /// Number of the start, from 1.
    pub start: u64,
    /// Begin of the start, in seconds since 1970.
    pub time: f64,
    /// Its duration.
    pub seconds: f64,
    /// Exit code, as a shell has it.
    pub code: i32,
    /// The reason for its end.
    pub why: String,
    /// The rank that failed first, if one is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u64>,
    /// Its host, if it is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The hosts with their ranks, where the supervisor chose them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<String>,
    /// Newest checkpoint at the end.
    pub checkpoint: Option<u64>,
    /// Steps taken since that checkpoint: the next start takes them again.
    pub steps_lost: u64,
    /// Seconds of those steps.
    pub seconds_lost: f64,
    /// Pause before the next start.
    pub pause_seconds: f64,
}

/// The starts in these lines; those that cannot be read are left out.
pub fn in_lines(lines: &[u8]) -> Vec<Restart> {
    lines
        .split(|byte| *byte == b'\n')
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect()
}

/// The starts on record in a run's directory; none where it was not supervised.
///
/// # Errors
/// The file cannot be read.
pub fn of_run(run: &Path) -> Result<Vec<Restart>> {
    let path = run.join(FILE);
    match safe_open::read(&path) {
        Ok(lines) => Ok(in_lines(&lines)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::io("read", &path, e)),
    }
}
