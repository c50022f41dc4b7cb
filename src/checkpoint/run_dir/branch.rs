//! Runs that begin at a checkpoint of another run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The parts of a checkpoint that a run restores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestoreScope {
    /// Everything: the run continues as if it had not been interrupted.
    Everything,
    /// Parameters and progress; the optimizer state is reset.
    NoOptimizer,
    /// Only the parameters: a new run begins with them at step 0.
    Weights,
}

/// The origin of a run that began at a checkpoint of another run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Branch {
    /// The checkpoint.
    pub from: PathBuf,
    /// The parts that were restored.
    pub take: RestoreScope,
}
