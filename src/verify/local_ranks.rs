//! Ranks as threads of this process, on the device that `run.device` selects.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backend::Kernels;
use crate::backend::cpu::Cpu;
use crate::comm::{self, Comm};
use crate::config::{Config, ResolvedConfig};
use crate::engine::on_threads;
use crate::error::{Error, Result};
use crate::gpu_assignment::{assign_gpus, open_cpu};

/// Work of the ranks of a layout, on any device.
pub trait RankTask: Sync + Serialize + DeserializeOwned {
    /// The command that runs one rank of `mpirun`, with the files of the task and of the result.
    const COMMAND: &'static str;
    /// The result of a rank.
    type Output: Send + Serialize + DeserializeOwned;

    /// Returns the configuration, which selects the device.
    fn config(&self) -> &Config;

    /// Does the work of one rank. Collective over the world of `comm`. `threads` are the compute
    /// threads of the rank, if known; `backend` creates its device.
    ///
    /// # Errors
    /// Returns the error that stopped the work.
    fn run<B: Kernels>(
        &self,
        comm: &Comm<B>,
        threads: Option<usize>,
        backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
    ) -> Result<Self::Output>;
}

/// Returns the number of cores that this process may use.
pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs a task on `ranks` ranks in this process, and returns the result of rank 0.
///
/// # Errors
/// Returns the error of the rank that made the others fail.
pub fn on_local_ranks<T: RankTask>(ranks: usize, task: &T) -> Result<T::Output> {
    let threads = Some((cores() / ranks).max(1));
    if ranks == 1 {
        return on_device(&comm::single(), task, threads);
    }
    let outputs = on_threads(ranks, |comm| on_device(comm, task, threads))?;
    outputs.into_iter().next().ok_or_else(|| Error::internal("no rank 0"))
}

/// Runs a rank of a task on the device that its configuration selects.
pub(super) fn on_device<T: RankTask>(
    comm: &Comm<Cpu>,
    task: &T,
    threads: Option<usize>,
) -> Result<T::Output> {
    match assign_gpus(comm, task.config())? {
        None => task.run(comm, threads, open_cpu),
        Some(gpu) => task.run(&gpu.device_comm(comm), threads, |plan| gpu.backend(plan)),
    }
}
