//! `workers.jsonl`: one JSON object per gradient that a worker has pushed to parameter servers.

use serde::{Deserialize, Serialize};

use super::metrics::null_is_nan;

/// The name of the file in a run's directory.
pub const FILE: &str = "workers.jsonl";

/// A gradient that a worker has pushed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// The step that the gradient is part of; without steps in common, the number of batches
    /// divided by the number of workers.
    pub step: u64,
    /// The host and the process of the worker.
    pub worker: String,
    /// The number of samples of the gradient.
    pub samples: u64,
    /// The mean loss of the samples; null when it is not finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// The number of updates between the pull and the push; null if the gradient was not finite and
    /// was skipped.
    pub staleness: Option<u64>,
    /// The milliseconds of compute.
    pub compute_ms: f64,
    /// The milliseconds spent waiting for data.
    pub loader_ms: f64,
    /// The milliseconds of the pull of parameters.
    pub pull_ms: f64,
    /// The milliseconds of the push of the gradient.
    pub push_ms: f64,
    /// Seconds since 1970.
    pub time: f64,
}
