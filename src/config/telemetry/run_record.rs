//! `run.json`: the summary of a run.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::goodput::Goodput;
use super::times::Times;
use crate::ReduceChoice;
use hpctrain_base::energy::EnergySource;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;
use hpctrain_comm::DeviceTransport;
use hpctrain_data::DataChange;
use hpctrain_device::format_bytes;

/// The memory of the ranks of a stage, in bytes by category.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageMemory {
    /// The estimate for a rank, as in the startup summary.
    pub estimated_bytes: BTreeMap<String, usize>,
    /// The largest peaks of a rank.
    pub peak_bytes: BTreeMap<String, usize>,
}

/// The interval between checkpoints with `checkpoint.every = "auto"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointInterval {
    /// The number of steps.
    pub steps: u64,
    /// The seconds that these steps take.
    pub seconds: f64,
    /// The seconds that a save costs.
    pub save_seconds: f64,
    /// The mean time between failures in seconds.
    pub failure_seconds: f64,
    /// The number of failures from which it is known; if 0, it is assumed.
    pub failures: u64,
}

/// The energy that a run used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnergyUse {
    /// The devices that were measured, on all nodes of the run.
    pub sources: Vec<EnergySource>,
    /// The energy of all starts.
    pub kwh: f64,
    /// The joules per prediction (token or sample) of this start's steps, evaluations and saves
    /// included.
    pub joules_per_token: f64,
}

/// The summary of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The version of hpctrain.
    pub version: String,
    /// The transport of messages: the MPI library, threads, or none.
    pub mpi: String,
    /// The transport of GPU buffers, if ranks compute on GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_path: Option<DeviceTransport>,
    /// The reasons for that transport, if `comm.transport` is auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_path_reason: Option<String>,
    /// When gradients were reduced over shards, if there are several: `step` or `micro`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce: Option<ReduceChoice>,
    /// The number of ranks.
    pub ranks: usize,
    /// The number of compute threads per rank; none if each process has its own, as with parameter
    /// servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// The host of every rank.
    pub hosts: Vec<String>,
    /// The number of parameters of the network.
    pub parameters: u64,
    /// The number of finished steps.
    pub steps: u64,
    /// The number of steps whose update was skipped.
    pub skipped: u64,
    /// The digest of the training data, if known.
    #[serde(default)]
    pub data: Option<String>,
    /// Changes of the training data during the run.
    #[serde(default)]
    pub data_changes: Vec<DataChange>,
    /// The last validation loss, if the trainer evaluates.
    pub validation_loss: Option<f64>,
    /// The throughput in tokens or samples per second: the median over this start's steps, with
    /// parameter servers the mean from the first step to the last.
    pub tokens_per_second: f64,
    /// Model TFLOP/s per rank at that throughput.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops_per_rank: Option<f64>,
    /// Model FLOPs utilisation at that throughput, from 0 to 1, if the peak of every rank's device
    /// is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// The energy, if all nodes have counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<EnergyUse>,
    /// The seconds of this start, including evaluation and saving.
    pub seconds: f64,
    /// The breakdown of the seconds of rank 0 in this start's steps.
    pub step_seconds: Times,
    /// The seconds that rank 0 waited for data.
    pub loader_wait_seconds: f64,
    /// The seconds that rank 0 waited for messages, in steps or outside.
    pub comm_wait_seconds: f64,
    /// The bytes that rank 0 sent to other ranks in this start, if there are others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm_sent_bytes: Option<u64>,
    /// The requests of rank 0 in a step of this start, on average, without the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_step: Option<StepCounts>,
    /// The length of the longest chain of dependent messages between ranks; counted if ranks are
    /// threads (`hpctrain simulate`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm_rounds: Option<u64>,
    /// The peak of allocated GPU memory of rank 0 in bytes.
    pub peak_gpu_bytes: Option<usize>,
    /// The peaks of memory of rank 0 in bytes, by category.
    pub peak_bytes: BTreeMap<String, usize>,
    /// The memory of each stage of the pipeline; a single one without pipeline parallelism.
    #[serde(default)]
    pub stages: Vec<StageMemory>,
    /// The peak resident set size of the process of rank 0 in bytes.
    pub peak_resident_bytes: usize,
    /// The time of the end, in seconds since 1970.
    pub time: f64,
    /// The last interval between checkpoints that this start has chosen, with `checkpoint.every =
    /// "auto"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_interval: Option<CheckpointInterval>,
    /// The goodput over all starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput: Option<Goodput>,
}

/// The requests of a rank in a step, on average.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepCounts {
    /// Kernels, matmuls, and copies and fills within its GPU.
    pub launches: f64,
    /// Waits of the host for its GPU, or for messages of GPU memory.
    pub host_waits: f64,
    /// Messages that it sends, without those of collectives of MPI and NCCL.
    pub messages: f64,
    /// Bytes that it sends.
    pub sent_bytes: f64,
}

impl fmt::Display for StepCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { launches, host_waits, messages, sent_bytes } = self;
        write!(
            f,
            "{launches:.1} launches, {host_waits:.1} host waits, {messages:.1} messages, {} sent per step and rank",
            format_bytes(*sent_bytes as usize)
        )
    }
}

impl RunRecord {
    /// Reads the summary at `path`; returns `None` if there is no such file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or is not a valid summary.
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

    /// Writes the summary to `path`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| Error::internal(format!("run summary: {e}")))?;
        own_files::write(path, text + "\n").map_err(|e| Error::io("write", path, e))
    }
}
