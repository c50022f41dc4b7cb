//! `run.json`: the facts of a run that a table of results needs.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::times::Times;
use crate::data::DataChange;
use crate::error::{Error, Result};

/// Memory of a stage's ranks, in bytes by category.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageMemory {
    /// The estimate for a rank, as the banner has it.
    pub estimated_bytes: BTreeMap<String, usize>,
    /// Largest peaks of a rank.
    pub peak_bytes: BTreeMap<String, usize>,
}

/// The run card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunCard {
    /// Version of hpctrain.
    pub version: String,
    /// Transport of messages: the MPI library, threads, or none.
    pub mpi: String,
    /// Ranks.
    pub ranks: usize,
    /// Compute threads a rank.
    pub threads: usize,
    /// Host of every rank.
    pub hosts: Vec<String>,
    /// Parameters of the network.
    pub parameters: u64,
    /// Steps finished.
    pub steps: u64,
    /// Steps whose update was skipped.
    pub skipped: u64,
    /// Digest of the training data, if it is known.
    #[serde(default)]
    pub data: Option<String>,
    /// Changes of the training data in the course of the run.
    #[serde(default)]
    pub data_changes: Vec<DataChange>,
    /// Last validation loss, if the trainer evaluates.
    pub validation_loss: Option<f64>,
    /// Median over this start's steps.
    pub tokens_per_second: f64,
    /// Seconds of this start, with evaluation and saving.
    pub seconds: f64,
    /// Seconds of rank 0 in this start's steps, by use.
    pub step_seconds: Times,
    /// Seconds rank 0 waited for data.
    pub loader_wait_seconds: f64,
    /// Seconds rank 0 waited for messages, in steps or outside.
    pub comm_wait_seconds: f64,
    /// Most bytes of a GPU's memory that rank 0 had taken at once.
    pub peak_gpu_bytes: Option<usize>,
    /// Peak bytes of rank 0 by category.
    pub peak_bytes: BTreeMap<String, usize>,
    /// Memory of each stage of the pipeline; of one, where there is none.
    #[serde(default)]
    pub stages: Vec<StageMemory>,
    /// Most resident bytes of rank 0's process.
    pub peak_resident_bytes: usize,
    /// Seconds since 1970 at the end.
    pub time: f64,
}

impl RunCard {
    /// Writes the card.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::internal(format!("run card: {e}")))?;
        std::fs::write(path, text + "\n").map_err(|e| Error::io("write", path, e))
    }
}
