//! How far a run is.

use serde::{Deserialize, Serialize};

/// Progress of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps finished.
    pub step: u64,
    /// Updates done.
    pub updates: u64,
    /// Samples consumed.
    pub position: u64,
}
