//! `samples.jsonl`: one JSON object per text that the model has generated during training.

use serde::{Deserialize, Serialize};

/// The name of the file in a run's directory.
pub const FILE: &str = "samples.jsonl";

/// A generated text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextSample {
    /// The number of finished steps.
    pub step: u64,
    /// The text.
    pub text: String,
    /// Seconds since 1970.
    pub time: f64,
}
