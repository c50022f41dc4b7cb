//! Launching the ranks of a layout: as threads of this process, or as processes of `mpirun`.

use std::path::Path;
use std::process::{Command, Stdio};

use super::run_layout::{LayoutTask, Recording, record};
use crate::backend::cpu::Cpu;
use crate::comm::{self, Comm};
use crate::engine::on_threads;
use crate::error::{Error, Result};
use crate::gpu_assignment::{assign_gpus, open_cpu};

/// How the ranks of a layout are launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// Threads of this process.
    Threads,
    /// Processes that `mpirun` starts.
    Mpirun {
        /// Whether it is Open MPI's `mpirun`, which needs an option if ranks outnumber cores.
        open_mpi: bool,
    },
}

impl Launcher {
    /// Detects `mpirun`.
    ///
    /// # Errors
    /// Returns an error if `mpirun` cannot be started.
    pub fn mpirun() -> Result<Self> {
        let output =
            Command::new("mpirun").arg("--version").stdin(Stdio::null()).output().map_err(|e| {
                Error::input(format!("--mpi needs mpirun, which cannot be started: {e}"))
                    .hint("put the MPI library's mpirun on PATH (module load mpi), or omit --mpi")
            })?;
        Ok(Self::Mpirun { open_mpi: String::from_utf8_lossy(&output.stdout).contains("Open MPI") })
    }

    /// Returns the display name of the kind of ranks.
    pub fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads of this process",
            Self::Mpirun { .. } => "processes of mpirun",
        }
    }

    /// Runs a task on `ranks` ranks. With `mpirun`, the task and the recording are passed through
    /// files in `folder`.
    ///
    /// # Errors
    /// Returns an error if the ranks cannot be started, or the task fails.
    pub fn run(self, ranks: usize, task: LayoutTask, folder: &Path) -> Result<Recording> {
        match self {
            Self::Threads => local(ranks, task),
            Self::Mpirun { open_mpi } => processes(ranks, &task, folder, open_mpi),
        }
    }
}

/// Returns the number of cores that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs a task on ranks in this process.
pub fn local(ranks: usize, task: LayoutTask) -> Result<Recording> {
    let task = LayoutTask { threads: Some((cores() / ranks).max(1)), ..task };
    if ranks == 1 {
        return on_device(&comm::single(), &task);
    }
    let recordings = on_threads(ranks, |comm| on_device(comm, &task))?;
    recordings.into_iter().next().ok_or_else(|| Error::internal("no rank 0"))
}

fn processes(ranks: usize, task: &LayoutTask, folder: &Path, open_mpi: bool) -> Result<Recording> {
    let task_file = folder.join("task.json");
    let recording_file = folder.join("recording.json");
    let text = serde_json::to_vec(task).map_err(|e| Error::internal(format!("task: {e}")))?;
    std::fs::write(&task_file, text).map_err(|e| Error::io("write", &task_file, e))?;
    let program = std::env::current_exe()
        .map_err(|e| Error::internal(format!("this program's path: {e}")))?;
    let mut command = Command::new("mpirun");
    command.args(["-np", &ranks.to_string()]);
    if open_mpi && ranks > cores() {
        command.arg("--oversubscribe");
    }
    // The ranks are launched by MPI, whether or not this process is.
    command.env("HPCTRAIN_MPI", "1");
    command
        .arg(program)
        .arg("verify-rank")
        .arg(&task_file)
        .arg(&recording_file)
        .stdin(Stdio::null());
    let output = command.output().map_err(|e| Error::internal(format!("mpirun: {e}")))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        // The first error line of a rank has the reason; the lines of mpirun only say that ranks
        // ended.
        let why = stderr
            .lines()
            .find_map(|line| line.strip_prefix("error: "))
            .map_or(stderr.trim(), str::trim);
        let message = format!("mpirun -np {ranks} ended with {}: {why}", output.status);
        return Err(match output.status.code() {
            Some(2) => Error::input(message),
            _ => Error::comm(message),
        }
        .hint("mpirun -np N hpctrain train must work first"));
    }
    let text = std::fs::read(&recording_file).map_err(|e| Error::io("read", &recording_file, e))?;
    serde_json::from_slice(&text).map_err(|e| Error::internal(format!("recording: {e}")))
}

/// Records a layout on the device that `run.device` selects.
fn on_device(comm: &Comm<Cpu>, task: &LayoutTask) -> Result<Recording> {
    match assign_gpus(comm, &task.config)? {
        None => record(comm, task, open_cpu),
        Some(gpu) => record(&gpu.device_comm(comm), task, |plan| gpu.backend(plan)),
    }
}

/// Runs `hpctrain verify-rank` on one rank of `mpirun`: records `task`. Rank 0 writes the recording
/// to `given`.
///
/// # Errors
/// Returns an error if the task fails, or the recording cannot be written.
pub fn rank(comm: &Comm<Cpu>, task: &LayoutTask, path: &Path) -> Result<()> {
    let recording = on_device(comm, task)?;
    comm.world().all_ok(if comm.rank() == 0 { write(&recording, path) } else { Ok(()) })
}

/// Writes a recording to a file.
fn write(recording: &Recording, path: &Path) -> Result<()> {
    let text =
        serde_json::to_vec(recording).map_err(|e| Error::internal(format!("recording: {e}")))?;
    std::fs::write(path, text).map_err(|e| Error::io("write", path, e))
}

/// Reads the task from a file.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn task(path: &Path) -> Result<LayoutTask> {
    let text = std::fs::read(path)
        .map_err(|e| Error::io("read", path, e).hint("hpctrain verify --mpi writes it"))?;
    serde_json::from_slice(&text).map_err(|e| Error::internal(format!("task: {e}")))
}
