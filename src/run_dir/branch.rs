//! A run that begins at a checkpoint of another run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What of a checkpoint is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Take {
    /// All: the run goes on as if it had not been interrupted.
    Everything,
    /// Parameters and progress; the optimizer begins anew.
    NoOptimizer,
    /// The parameters: another run begins at step 0 with them.
    Weights,
}

/// Where a run began that began at a checkpoint of another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Branch {
    /// The checkpoint.
    pub from: PathBuf,
    /// What of it was taken.
    pub take: Take,
}
