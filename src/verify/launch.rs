//! Launching the ranks of a layout: as threads of this process, or as processes of `mpirun`.

use std::path::Path;
use std::process::{Command, Stdio};

use serde::Serialize;

use super::local_ranks::{RankTask, cores, on_device, on_local_ranks};
use super::run_layout::{LayoutTask, Recording, record};
use crate::backend::Kernels;
use crate::backend::cpu::Cpu;
use crate::comm::Comm;
use crate::config::{Config, ResolvedConfig};
use crate::error::{Error, Result};

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

    /// Runs a task on `ranks` ranks, and returns the result of rank 0. With `mpirun`, the task and
    /// the result are passed through files in `folder`.
    ///
    /// # Errors
    /// Returns an error if the ranks cannot be started, or the task fails.
    pub fn run<T: RankTask>(self, ranks: usize, task: &T, folder: &Path) -> Result<T::Output> {
        match self {
            Self::Threads => on_local_ranks(ranks, task),
            Self::Mpirun { open_mpi } => processes(ranks, task, folder, open_mpi),
        }
    }
}

impl RankTask for LayoutTask {
    const COMMAND: &'static str = "verify-rank";
    type Output = Recording;

    fn config(&self) -> &Config {
        &self.config
    }

    fn run<B: Kernels>(
        &self,
        comm: &Comm<B>,
        threads: Option<usize>,
        backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
    ) -> Result<Recording> {
        record(comm, self, threads, backend)
    }
}

fn processes<T: RankTask>(
    ranks: usize,
    task: &T,
    folder: &Path,
    open_mpi: bool,
) -> Result<T::Output> {
    let task_file = folder.join("task.json");
    let result_file = folder.join("result.json");
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
    command.arg(program).arg(T::COMMAND).arg(&task_file).arg(&result_file).stdin(Stdio::null());
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
    let text = std::fs::read(&result_file).map_err(|e| Error::io("read", &result_file, e))?;
    serde_json::from_slice(&text).map_err(|e| Error::internal(format!("result of rank 0: {e}")))
}

/// Runs a task on one rank of `mpirun`. Rank 0 writes its result to `path`.
///
/// # Errors
/// Returns an error if the task fails, or the result cannot be written.
pub fn rank<T: RankTask>(comm: &Comm<Cpu>, task: &T, path: &Path) -> Result<()> {
    let result = on_device(comm, task, None)?;
    comm.world().all_ok(if comm.rank() == 0 { write(&result, path) } else { Ok(()) })
}

/// Writes a result to a file.
fn write(result: &impl Serialize, path: &Path) -> Result<()> {
    let text = serde_json::to_vec(result).map_err(|e| Error::internal(format!("result: {e}")))?;
    std::fs::write(path, text).map_err(|e| Error::io("write", path, e))
}

/// Reads the task from a file.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn task<T: RankTask>(path: &Path) -> Result<T> {
    let text =
        std::fs::read(path).map_err(|e| Error::io("read", path, e).hint("--mpi writes it"))?;
    serde_json::from_slice(&text).map_err(|e| Error::internal(format!("task: {e}")))
}
