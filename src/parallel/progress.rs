//! The progress of a run.

use serde::{Deserialize, Serialize};

/// The progress of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The number of finished steps.
    pub step: u64,
    /// The number of updates.
    pub updates: u64,
    /// The number of consumed samples.
    pub position: u64,
}
