//! `run.json`: the facts of a run that a table of results needs.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::times::Times;
use hpctrain_base::energy::EnergySource;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;
use hpctrain_comm::DeviceTransport;
use hpctrain_data::DataChange;

/// Memory of a stage's ranks, in bytes by category.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageMemory {
    /// The estimate for a rank, as the banner has it.
    pub estimated_bytes: BTreeMap<String, usize>,
    /// Largest peaks of a rank.
    pub peak_bytes: BTreeMap<String, usize>,
}

/// The use of the time of a run that was started several times.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// Starts.
    pub starts: u64,
    /// Seconds from the first start to the end.
    pub seconds: f64,
    /// Of them, those of steps that the result has.
    pub useful_seconds: f64,
    /// Steps that were taken again.
    pub steps_lost: u64,
    /// Their seconds, of the times they were lost.
    pub seconds_lost: f64,
    /// Useful seconds over all.
    pub share: f64,
}

/// The energy that a run took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnergyUse {
    /// Devices that were counted, on all nodes of the run.
    pub sources: Vec<EnergySource>,
    /// Energy of all starts.
    pub kwh: f64,
    /// Joules per prediction (token or sample) of this start's steps, evaluations and saves
    /// included.
    pub joules_per_token: f64,
}

/// The run card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunCard {
    /// Version of hpctrain.
    pub version: String,
    /// Transport of messages: the MPI library, threads, or none.
    pub mpi: String,
    /// Path of messages to the memory of GPUs, where ranks have some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_path: Option<DeviceTransport>,
    /// The reasons for that path, where `comm.transport` left the choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_path_reason: Option<String>,
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
    /// Model TFLOP/s per rank at that throughput.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops_per_rank: Option<f64>,
    /// Model FLOPs utilisation at that throughput, from 0 to 1, where the peak of every rank's
    /// device is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Energy, where all nodes have counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<EnergyUse>,
    /// Seconds of this start, with evaluation and saving.
    pub seconds: f64,
    /// Seconds of rank 0 in this start's steps, by use.
    pub step_seconds: Times,
    /// Seconds rank 0 waited for data.
    pub loader_wait_seconds: f64,
    /// Seconds rank 0 waited for messages, in steps or outside.
    pub comm_wait_seconds: f64,
    /// Bytes that rank 0 sent to other ranks in this start, where there are ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm_sent_bytes: Option<u64>,
    /// The longest chain of messages between ranks that had to come one after the other; counted
    /// where ranks are threads (`hpctrain simulate`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm_rounds: Option<u64>,
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
    /// Over all starts, where `hpctrain supervise` made them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput: Option<Goodput>,
}

impl RunCard {
    /// The card at `path`; none if there is no such file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", path, e)),
        };
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|e| Error::damaged(format!("{}: {e}", path.display())))
    }

    /// Writes the card.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| Error::internal(format!("run card: {e}")))?;
        own_files::write(path, text + "\n").map_err(|e| Error::io("write", path, e))
    }
}
