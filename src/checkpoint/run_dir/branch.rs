//! A run that begins at a checkpoint of another run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Parts of a checkpoint that a run takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestoreScope {
    /// All: the run goes on as if it had not been interrupted.
    Everything,
    /// Parameters and progress; the optimizer begins anew.
    NoOptimizer,
    /// The parameters: another run begins at step 0 with them.
    Weights,
}

/// Origin of a run that began at a checkpoint of another run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Branch {
    /// The checkpoint.
    pub from: PathBuf,
    /// Parts of it that were taken.
    pub take: RestoreScope,
}
