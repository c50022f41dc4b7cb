//! `samples.jsonl`: one JSON object a text that the model in training has continued.

use serde::{Deserialize, Serialize};

/// Name of the file in a run's directory.
pub const FILE: &str = "samples.jsonl";

/// A text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextSample {
    /// Steps finished.
    pub step: u64,
    /// The text.
    pub text: String,
    /// Seconds since 1970.
    pub time: f64,
}
