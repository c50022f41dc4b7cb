//! Loads a checkpoint for inference: the common part of `sample`, `predict` and `eval
//! --checkpoint`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;

use crate::backend::Kernels;
use crate::checkpoint::Reader;
use crate::checkpoint::tools::resolve_path;
use crate::comm::{Comm, Group, Launch};
use crate::config::{Config, ResolvedConfig, overlay};
use crate::data::{ShardIndex, Source, Split};
use crate::engine::{Model, micro_batches};
use crate::error::Result;
use crate::evaluate::model;
use crate::gpu_assignment::{assign_gpus, open_cpu};
use crate::job;
use crate::run_dir::RunDirectory;
use crate::topology::Topology;

/// The split of a directory of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SplitChoice {
    /// Training shards.
    Train,
    /// Validation shards.
    Validation,
}

/// A command that uses a checkpoint.
pub trait CheckpointCommand {
    /// Returns the checkpoint's configuration with the overrides of the command.
    ///
    /// # Errors
    /// Returns an error if a key or value is unknown, or a required argument is missing.
    fn config(&self, reader: &Reader) -> Result<Config>;

    /// Runs the command with the loaded checkpoint. Collective over the world.
    ///
    /// # Errors
    /// Returns an error if the data cannot be read, the result cannot be written, the device fails,
    /// or a message between ranks fails.
    fn execute<B: Kernels>(&self, found: LoadedCheckpoint<'_, B>) -> Result<()>;
}

/// A checkpoint, and the ranks that use it.
pub struct LoadedCheckpoint<'a, B: Kernels> {
    /// The checkpoint.
    pub reader: Reader,
    /// The configuration resolved for these ranks.
    pub plan: ResolvedConfig,
    /// The group of all ranks.
    pub world: Group<B>,
    comm: &'a Comm<B>,
    backend: B,
}

impl<B: Kernels> LoadedCheckpoint<'_, B> {
    /// Returns the data that `open` opens, with samples preprocessed as in training, and logs notes
    /// on the conversion. Collective.
    ///
    /// # Errors
    /// Returns the error of `open`, or an error if the samples cannot be converted.
    pub fn data<D: Source>(
        &self,
        open: impl FnOnce(&mut ShardIndex, &ResolvedConfig) -> Result<D>,
    ) -> Result<D> {
        let (data, notes) = self.data_with_notes(open)?;
        if self.world.rank() == 0 {
            notes.iter().for_each(|note| log::warn!("data: {note}"));
        }
        Ok(data)
    }

    /// Does the same as [`data`](Self::data), and returns the notes instead of logging them.
    ///
    /// # Errors
    /// Returns the same errors as [`data`](Self::data).
    pub fn data_with_notes<D: Source>(
        &self,
        open: impl FnOnce(&mut ShardIndex, &ResolvedConfig) -> Result<D>,
    ) -> Result<(D, Vec<String>)> {
        micro_batches::open_together(&self.world, |index| {
            let mut data = open(index, &self.plan)?;
            let notes = self.reader.manifest().conform(&mut data)?;
            Ok((data, notes))
        })
    }

    /// Builds the model with the parameters of the checkpoint.
    ///
    /// # Errors
    /// Returns an error if the checkpoint is damaged, or the memory does not suffice.
    pub fn network(&mut self) -> Result<Model<B>> {
        let Self { reader, plan, world, comm, backend } = self;
        let mut model = model::build(comm, plan, backend.clone())?;
        model::load(world, &mut model, reader)?;
        Ok(model)
    }
}

/// Runs `work` with the checkpoint at `path`, or the newest checkpoint of the run there, on the
/// device of its configuration; returns the exit code. Rank 0 holds a lease on the checkpoint, so
/// that a running trainer does not remove it.
pub fn run(
    work: &impl CheckpointCommand,
    path: &Path,
    overrides: &[String],
    launch: Option<&Launch>,
) -> i32 {
    job::run(launch, comm_timeout(overrides), |comm| {
        let world = comm.world();
        let threads = Topology::gather(&world, comm.node().host)?.threads();
        let (path, _lease) = resolve_path::checkpoint_collective(&world, path)?;
        let reader = Reader::open_collective(&world, &path, || Reader::open(&path))?;
        comm.watch_in_own_directory(&heartbeat_dirs(&path))?;
        let config = world.all_ok(work.config(&reader))?;
        comm.set_watchdog_timeout(config.comm.unmeasured_timeout())?;
        match assign_gpus(comm, &config)? {
            None => run_on(work, comm, reader, config, threads, open_cpu),
            Some(gpu) => run_on(work, &gpu.device_comm(comm), reader, config, threads, |plan| {
                gpu.backend(plan)
            }),
        }?;
        Ok(0)
    })
}

/// Runs `work` on the backend that `backend` creates.
fn run_on<B: Kernels>(
    work: &impl CheckpointCommand,
    comm: &Comm<B>,
    reader: Reader,
    config: Config,
    threads: usize,
    backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
) -> Result<()> {
    let world = comm.world();
    let plan = world.all_ok(model::plan(config, world.size(), threads, !B::ON_HOST))?;
    let backend = world.all_ok(backend(&plan))?;
    work.execute(LoadedCheckpoint { reader, plan, world, comm, backend })
}

/// Returns the time after which a wait for another rank ends the job, `comm.timeout`, as long as
/// only the overrides of the command line are known.
pub fn comm_timeout(overrides: &[String]) -> Duration {
    // Unknown keys are refused later, by all ranks together.
    let config = overlay(&Config::default(), overrides).unwrap_or_default();
    config.comm.unmeasured_timeout()
}

/// Returns directories in which the ranks that use a checkpoint can write heartbeats: that of its
/// run, else one of the node.
fn heartbeat_dirs(checkpoint: &Path) -> Vec<PathBuf> {
    let run =
        checkpoint.parent().and_then(Path::parent).map(|run| RunDirectory::at(run).logs_path());
    run.into_iter().chain([std::env::temp_dir()]).collect()
}

/// Returns the split to use: `choice`, else validation shards if there are any.
///
/// # Errors
/// Returns an error if the data of the configuration cannot be listed.
pub fn split(config: &Config, choice: Option<SplitChoice>) -> Result<Split> {
    Ok(match choice {
        // A single file has only a training split, unless a fraction of it is kept for validation.
        _ if config.data.mix.is_empty()
            && config.data.val_fraction == 0.0
            && Path::new(&config.data.path).is_file() =>
        {
            Split::Train
        }
        Some(SplitChoice::Train) => Split::Train,
        Some(SplitChoice::Validation) => Split::Validation,
        None if micro_batches::has_split(config, Split::Validation)? => Split::Validation,
        None => Split::Train,
    })
}
