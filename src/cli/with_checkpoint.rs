//! A checkpoint that is used rather than trained on: the common part of `sample`, `predict` and
//! `eval --checkpoint`.

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
use crate::gpu_assignment::{cpu, place};
use crate::job;
use crate::run_dir::RunDirectory;
use crate::topology::Topology;

/// Part of a directory of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SplitChoice {
    /// Those for training.
    Train,
    /// Those for validation.
    Validation,
}

/// The work of a command with a checkpoint.
pub trait Work {
    /// The configuration, on top of that of the checkpoint.
    ///
    /// # Errors
    /// A key or value is not known, or something is missing.
    fn config(&self, reader: &Reader) -> Result<Config>;

    /// Works with the checkpoint: collective over the world.
    ///
    /// # Errors
    /// Of the data, the device, the file system, or a message between ranks.
    fn on<B: Kernels>(&self, found: LoadedCheckpoint<'_, B>) -> Result<()>;
}

/// A checkpoint, and the ranks that are to use it.
pub struct LoadedCheckpoint<'a, B: Kernels> {
    /// The checkpoint.
    pub reader: Reader,
    /// The plan of its network on these ranks.
    pub plan: ResolvedConfig,
    /// All ranks.
    pub world: Group<B>,
    comm: &'a Comm<B>,
    backend: B,
}

impl<B: Kernels> LoadedCheckpoint<'_, B> {
    /// The data that `open` opens, with samples as the network learned them. On every rank.
    ///
    /// # Errors
    /// Of `open`; or the data cannot be brought to that.
    pub fn data<D: Source>(
        &self,
        open: impl FnOnce(&mut ShardIndex, &ResolvedConfig) -> Result<D>,
    ) -> Result<D> {
        let (data, notes) = self.converted(open)?;
        if self.world.rank() == 0 {
            notes.iter().for_each(|note| log::warn!("data: {note}"));
        }
        Ok(data)
    }

    /// As [`data`](Self::data), with notes on the conversion in the place of warnings.
    ///
    /// # Errors
    /// The same.
    pub fn converted<D: Source>(
        &self,
        open: impl FnOnce(&mut ShardIndex, &ResolvedConfig) -> Result<D>,
    ) -> Result<(D, Vec<String>)> {
        let opened = |catalogue: &mut ShardIndex| {
            let mut data = open(catalogue, &self.plan)?;
            let notes = self.reader.manifest().conform(&mut data)?;
            Ok((data, notes))
        };
        micro_batches::together(&self.world, opened)
    }

    /// The network with the parameters of the checkpoint.
    ///
    /// # Errors
    /// The checkpoint is damaged, or out of memory.
    pub fn network(&mut self) -> Result<Model<B>> {
        let Self { reader, plan, world, comm, backend } = self;
        let mut model = model::build(comm, plan, backend.clone())?;
        model::load(world, &mut model, reader)?;
        Ok(model)
    }
}

/// Does `work` with the checkpoint at `path`, or the newest of the run there, on the device of its
/// configuration; returns the exit code. Rank 0 holds a lease on it, so that a trainer beside does
/// not remove it meanwhile.
pub fn run(work: &impl Work, path: &Path, overrides: &[String], launch: Option<&Launch>) -> i32 {
    job::run(launch, patience(overrides), |comm| {
        let world = comm.world();
        let threads = Topology::gather(&world, comm.node().host)?.threads();
        let (path, _lease) = resolve_path::together(&world, path)?;
        let reader = Reader::open_together(&world, &path, || Reader::open(&path))?;
        comm.watch_apart(&places(&path))?;
        let config = world.all_ok(work.config(&reader))?;
        comm.wait_at_most(seconds(config.comm.timeout))?;
        match place(comm, &config)? {
            None => on(work, comm, reader, config, threads, cpu),
            Some(gpu) => {
                on(work, &gpu.beside(comm), reader, config, threads, |plan| gpu.backend(plan))
            }
        }?;
        Ok(0)
    })
}

fn on<B: Kernels>(
    work: &impl Work,
    comm: &Comm<B>,
    reader: Reader,
    config: Config,
    threads: usize,
    backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
) -> Result<()> {
    let world = comm.world();
    let plan = world.all_ok(model::plan(config, world.size(), threads, !B::ON_HOST))?;
    let backend = world.all_ok(backend(&plan))?;
    work.on(LoadedCheckpoint { reader, plan, world, comm, backend })
}

/// Time after which a wait for another rank ends the job, as long as nothing but the command line
/// is known.
pub fn patience(overrides: &[String]) -> Duration {
    // Keys that are not known are refused later, by all ranks.
    let config = overlay(&Config::default(), overrides).unwrap_or_default();
    seconds(config.comm.timeout)
}

/// `comm.timeout`.
pub fn seconds(timeout: u64) -> Duration {
    Duration::from_secs(timeout)
}

/// Directories in which the ranks that use a checkpoint can leave signs of life: its run's, or one
/// of the node.
fn places(checkpoint: &Path) -> Vec<PathBuf> {
    let run =
        checkpoint.parent().and_then(Path::parent).map(|run| RunDirectory::at(run).logs_path());
    run.into_iter().chain([std::env::temp_dir()]).collect()
}

/// The shards that are meant: those asked for, else those for validation if there are any.
///
/// # Errors
/// The data of the configuration cannot be looked for.
pub fn split(config: &Config, asked: Option<SplitChoice>) -> Result<Split> {
    Ok(match asked {
        // One file is one part, with any name, unless a fraction of it was kept.
        _ if config.data.mix.is_empty()
            && config.data.val_fraction == 0.0
            && Path::new(&config.data.path).is_file() =>
        {
            Split::Train
        }
        Some(SplitChoice::Train) => Split::Train,
        Some(SplitChoice::Validation) => Split::Validation,
        None if micro_batches::has(config, Split::Validation)? => Split::Validation,
        None => Split::Train,
    })
}
