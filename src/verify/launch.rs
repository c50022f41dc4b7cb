//! Launchers of the ranks of a row: as threads of this process, or as processes of `mpirun`.

use std::path::Path;
use std::process::{Command, Stdio};

use super::run_layout::{LayoutTask, Recording, record};
use crate::backend::cpu::Cpu;
use crate::comm::{self, Comm};
use crate::engine::on_threads;
use crate::error::{Error, Result};
use crate::gpu_assignment::{cpu, place};

/// The launcher of the ranks of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// Threads of this process.
    Threads,
    /// `mpirun`; whether it is Open MPI's, which wants to be told when ranks outnumber cores.
    Mpirun {
        /// It is.
        open_mpi: bool,
    },
}

impl Launcher {
    /// Looks for `mpirun`.
    ///
    /// # Errors
    /// There is none.
    pub fn mpirun() -> Result<Self> {
        let output =
            Command::new("mpirun").arg("--version").stdin(Stdio::null()).output().map_err(|e| {
                Error::input(format!("--mpi needs mpirun, which cannot be started: {e}")).hint(
                    "put the MPI library's mpirun on PATH (module load mpi), or leave out --mpi",
                )
            })?;
        Ok(Self::Mpirun { open_mpi: String::from_utf8_lossy(&output.stdout).contains("Open MPI") })
    }

    /// The kind of its ranks, for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads of this process",
            Self::Mpirun { .. } => "processes of mpirun",
        }
    }

    /// Runs a task on `ranks` ranks. Messages between them go by way of `folder`.
    ///
    /// # Errors
    /// Of the ranks, or they could not be started.
    pub fn run(self, ranks: usize, task: LayoutTask, folder: &Path) -> Result<Recording> {
        match self {
            Self::Threads => local(ranks, task),
            Self::Mpirun { open_mpi } => processes(ranks, &task, folder, open_mpi),
        }
    }
}

/// Cores of this machine that the process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Ranks in this process.
pub fn local(ranks: usize, task: LayoutTask) -> Result<Recording> {
    let task = LayoutTask { threads: Some((cores() / ranks).max(1)), ..task };
    if ranks == 1 {
        return on_device(&comm::single(), &task);
    }
    let recordings = on_threads(ranks, |comm| on_device(comm, &task))?;
    recordings.into_iter().next().ok_or_else(|| Error::internal("no rank 0"))
}

fn processes(ranks: usize, task: &LayoutTask, folder: &Path, open_mpi: bool) -> Result<Recording> {
    let asked = folder.join("task.json");
    let given = folder.join("recording.json");
    let text = serde_json::to_vec(task).map_err(|e| Error::internal(format!("task: {e}")))?;
    std::fs::write(&asked, text).map_err(|e| Error::io("write", &asked, e))?;
    let program = std::env::current_exe()
        .map_err(|e| Error::internal(format!("this program's path: {e}")))?;
    let mut command = Command::new("mpirun");
    command.args(["-np", &ranks.to_string()]);
    if open_mpi && ranks > cores() {
        command.arg("--oversubscribe");
    }
    // The ranks are launched by MPI, whether or not this process is.
    command.env("HPCTRAIN_MPI", "1");
    command.arg(program).arg("verify-rank").arg(&asked).arg(&given).stdin(Stdio::null());
    let output = command.output().map_err(|e| Error::internal(format!("mpirun: {e}")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        // The first error line of a rank gives the reason; the lines of mpirun say that ranks
        // ended.
        let why = said
            .lines()
            .find_map(|line| line.strip_prefix("error: "))
            .map_or(said.trim(), str::trim);
        let message = format!("mpirun -np {ranks} ended with {}: {why}", output.status);
        return Err(match output.status.code() {
            Some(2) => Error::input(message),
            _ => Error::comm(message),
        }
        .hint("mpirun -np N hpctrain train must work first"));
    }
    let text = std::fs::read(&given).map_err(|e| Error::io("read", &given, e))?;
    serde_json::from_slice(&text).map_err(|e| Error::internal(format!("recording: {e}")))
}

/// Records where `run.device` wants it.
fn on_device(comm: &Comm<Cpu>, task: &LayoutTask) -> Result<Recording> {
    match place(comm, &task.config)? {
        None => record(comm, task, cpu),
        Some(gpu) => record(&gpu.beside(comm), task, |plan| gpu.backend(plan)),
    }
}

/// `hpctrain verify-rank` on one rank of `mpirun`: records `task`. Rank 0 writes the recording to
/// `given`.
///
/// # Errors
/// Of the task.
pub fn rank(comm: &Comm<Cpu>, task: &LayoutTask, given: &Path) -> Result<()> {
    let recording = on_device(comm, task)?;
    let written = || {
        let text = serde_json::to_vec(&recording)
            .map_err(|e| Error::internal(format!("recording: {e}")))?;
        std::fs::write(given, text).map_err(|e| Error::io("write", given, e))
    };
    comm.world().all_ok(if comm.rank() == 0 { written() } else { Ok(()) })
}

/// The task in a file.
///
/// # Errors
/// It is not there.
pub fn task(asked: &Path) -> Result<LayoutTask> {
    let text = std::fs::read(asked)
        .map_err(|e| Error::io("read", asked, e).hint("hpctrain verify --mpi writes it"))?;
    serde_json::from_slice(&text).map_err(|e| Error::internal(format!("task: {e}")))
}
