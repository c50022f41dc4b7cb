//! `workers.jsonl`: one JSON object a gradient that a worker has given to parameter servers.

use serde::{Deserialize, Serialize};

use super::metrics::null_is_nan;

/// Name of the file in a run's directory.
pub const FILE: &str = "workers.jsonl";

/// A gradient that a worker has given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// The step that it is part of, or as many workers' batches as that.
    pub step: u64,
    /// Host and process.
    pub worker: String,
    /// Samples that it is of.
    pub samples: u64,
    /// Mean over the samples; null when it is not finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Updates between its pull and its push; null if it was not finite, and so was left out.
    pub staleness: Option<u64>,
    /// Milliseconds of compute.
    pub compute_ms: f64,
    /// Milliseconds it waited for data.
    pub loader_ms: f64,
    /// Milliseconds of the pull of parameters.
    pub pull_ms: f64,
    /// Milliseconds of the push of the gradient.
    pub push_ms: f64,
    /// Seconds since 1970.
    pub time: f64,
}
