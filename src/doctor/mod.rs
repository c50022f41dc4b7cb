//! `hpctrain doctor`: checks that this machine can train: GPUs, MPI, HDF5, the file system, limits
//! and data.
//!
//! Each rank checks its own resources, and the first rank of each node those of the node. Checks
//! that could crash or hang run in a child process ([`probe`]). All findings are merged into one
//! [`DoctorReport`].

mod gpu;
mod h5;
mod limits;
mod mpi;
pub mod probe;
mod ranks;
mod report;
mod run_root;
mod transports;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::backend::cpu::Cpu;
use crate::comm::{Comm, Group};
use crate::config::{Config, DeviceChoice};
use crate::error::{Error, Kind, Result};
use crate::gpu_assignment::{COST_OF_HIDDEN_GPUS, SHOW_ALL_GPUS, assign_devices};
use crate::topology::Topology;

use probe::Probe;
use ranks::{Gpu, RankResources};

pub use report::DoctorReport;

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// The check passed.
    Ok,
    /// Training works, but not as well as it could, or not on all devices.
    Warning,
    /// Something does not work.
    Failure,
}

/// The finding of a check.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Finding {
    /// The outcome.
    pub status: CheckStatus,
    /// A short description of what was found.
    pub found: String,
    /// Advice for the user.
    pub hint: Option<String>,
}

impl Finding {
    fn ok(found: impl Into<String>) -> Self {
        Self { status: CheckStatus::Ok, found: found.into(), hint: None }
    }

    fn warning(found: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { status: CheckStatus::Warning, found: found.into(), hint: Some(hint.into()) }
    }

    fn failure(found: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { status: CheckStatus::Failure, found: found.into(), hint: Some(hint.into()) }
    }

    /// Turns a failure into a warning.
    fn at_most_a_warning(mut self) -> Self {
        if self.status == CheckStatus::Failure {
            self.status = CheckStatus::Warning;
        }
        self
    }

    fn named(self, name: impl Into<String>) -> Check {
        Check { name: name.into(), finding: self }
    }
}

impl From<Result<String>> for Finding {
    fn from(result: Result<String>) -> Self {
        match result {
            Ok(found) => Self::ok(found),
            Err(error) => {
                let hint = match error.kind() {
                    Kind::Device => {
                        "nvidia-smi and the kernel's log (dmesg) may show the cause; try another driver or toolkit"
                    }
                    _ => "this should not happen: please report it",
                };
                Self::failure(error.message(), error.advice().unwrap_or(hint))
            }
        }
    }
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Check {
    /// The name of what was checked.
    pub name: String,
    /// The finding.
    #[serde(flatten)]
    pub finding: Finding,
}

/// The options of the doctor.
#[derive(Debug, Clone)]
pub struct DoctorOptions {
    /// The directory of runs.
    pub run_root: PathBuf,
    /// The launcher of the ranks; `None` for a process that was started alone.
    pub launcher: Option<&'static str>,
    /// Whether a rank without its own GPU is a failure.
    pub requires_gpus: bool,
}

/// The message of every rank before the checks that involve several ranks.
#[derive(Serialize, Deserialize)]
struct Greeting {
    /// A file that rank 0 has created in the run root.
    marker: Option<PathBuf>,
    /// Whether the GPUs that it has checked, if any, have passed all checks.
    gpus_work: bool,
}

/// All findings of a rank, in the order of the report.
#[derive(Serialize, Deserialize)]
struct Facts {
    resources: RankResources,
    devices: Vec<Check>,
    messages: Vec<Check>,
    node: Vec<Check>,
}

/// Runs all checks; returns the same report on each rank. Collective over the world.
///
/// # Errors
/// Returns an error if a message between ranks fails.
pub fn run(comm: &Comm<Cpu>, request: &DoctorOptions) -> Result<DoctorReport> {
    let world = comm.world();
    let node = comm.node();
    let topology = Topology::gather(&world, node.host.clone())?;
    let is_first_of_node = node.local_rank == 0;

    let devices =
        probe::run_in_child(&Probe::Gpu { first: node.local_rank, every: node.local_size });
    let spread = topology.host_count() > 1;
    let marker =
        (comm.rank() == 0 && spread).then(|| run_root::marker(&request.run_root)).flatten();
    let greeting = Greeting {
        marker: marker.as_ref().map(|file| file.path().to_owned()),
        gpus_work: devices.iter().all(|check| check.finding.status != CheckStatus::Failure),
    };
    let greetings = gather(&world, &greeting)?;

    let mut messages = mpi::checks(comm, request.launcher);
    let mut assigned = None;
    // The checks in child processes have shown that this process will not crash here.
    if greetings.iter().all(|rank| rank.gpus_work) {
        let mut config = Config::default();
        if request.requires_gpus {
            config.run.device = DeviceChoice::Cuda;
        }
        match assign_devices(comm, &config) {
            Ok(devices) => assigned = Some(devices),
            Err(error) if error.is_shared() => {
                let finding = Finding::from(Err(error));
                let finding =
                    if request.requires_gpus { finding } else { finding.at_most_a_warning() };
                messages.push(finding.named("gpu of each rank"));
            }
            Err(error) => return Err(error),
        }
    }
    let table = assigned.as_ref().map_or(String::new(), |devices| devices.table.join("\n"));
    let gpu = assigned.and_then(|devices| devices.gpu);
    if let Some(gpu) = &gpu {
        messages.push(Finding::ok(table).named("gpu of each rank"));
        if gpu.is_isolated() && gpu.hiding_host().is_some() {
            messages.push(bound_to_gpus().named("visible gpus"));
        }
        if request.launcher.is_some() {
            messages.extend(transports::checks(comm, gpu, is_first_of_node)?);
        }
    }
    let mut node_checks = Vec::new();
    if is_first_of_node {
        node_checks = probe::run_in_child(&Probe::Node { run_root: request.run_root.clone() });
        node_checks.extend(greetings[0].marker.as_deref().map(run_root::is_shared));
    }
    let seat = RankResources {
        host: node.host,
        local_rank: node.local_rank,
        cores: topology.here().cores.clone(),
        spare_cores: topology.has_spare_cores(),
        gpu: gpu.as_ref().map(|gpu| Gpu::new(gpu.device())),
    };
    let facts = gather(&world, &Facts { resources: seat, devices, messages, node: node_checks })?;
    // Every rank has already looked for the file.
    drop::<Option<NamedTempFile>>(marker);
    Ok(DoctorReport::new(facts))
}

/// Returns the warning that ranks of a node see different GPUs.
fn bound_to_gpus() -> Finding {
    Finding::warning(
        format!("ranks of this node see different GPUs: {COST_OF_HIDDEN_GPUS}"),
        SHOW_ALL_GPUS,
    )
}

/// Gathers the values of all ranks. Collective.
fn gather<T: Serialize + serde::de::DeserializeOwned>(
    world: &Group<Cpu>,
    mine: &T,
) -> Result<Vec<T>> {
    let message = serde_json::to_vec(mine).map_err(|e| Error::internal(e.to_string()))?;
    let messages = world.gather_bytes(message).wait()?;
    let values = messages.iter().map(|bytes| serde_json::from_slice(bytes));
    values
        .collect::<Result<_, _>>()
        .map_err(|e| Error::comm(format!("another rank sent malformed findings: {e}")))
}
