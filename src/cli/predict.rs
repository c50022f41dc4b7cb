//! `hpctrain predict`: outputs of a network for every row of a data set, on any number of ranks.

use std::path::PathBuf;

use clap::Args;

use super::used::{self, Part};
use crate::backend::Kernels;
use crate::checkpoint::Reader;
use crate::comm::Comm;
use crate::config::{Config, LossKind, Plan};
use crate::error::{Error, Result};
use crate::evaluate::{Predictions, model, predict};
use crate::job;
use crate::placement::{cpu, place};
use crate::telemetry::{grouped, say};
use crate::topology::Topology;
use crate::train::feed;

/// Arguments of `hpctrain predict`.
#[derive(Args)]
pub struct PredictArgs {
    /// A checkpoint, or a run, of which the newest is taken.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// An HDF5 file with rows of inputs, or a directory of shards; targets are not needed.
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// Of a directory, which shards [default: those for validation, if there are any]
    #[arg(long, value_enum)]
    split: Option<Part>,
    /// The HDF5 file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// A key of the configuration, such as run.device=cpu or eval.batch=1000 (rows computed at once); repeatable.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// Runs the subcommand; returns the exit code.
pub fn run(args: &PredictArgs, launched: bool) -> i32 {
    job::run(launched, |comm| {
        let world = comm.world();
        let threads = Topology::gather(&world, comm.node().host)?.threads();
        // Held until all is read.
        let (reader, _lease) = used::open(&world, &args.checkpoint)?;
        let config = world.agree(used::config(&reader, &args.overrides, Some(&args.data)))?;
        match place(comm, &config)? {
            None => on(comm, args, reader, config, threads, cpu),
            Some(gpu) => on(&comm.on(), args, reader, config, threads, |plan| gpu.backend(plan)),
        }
    })
}

fn on<B: Kernels>(
    comm: &Comm<B>,
    args: &PredictArgs,
    mut reader: Reader,
    config: Config,
    threads: usize,
    backend: impl FnOnce(&Plan) -> Result<B>,
) -> Result<i32> {
    let world = comm.world();
    let with_classes = config.loss.kind == LossKind::CrossEntropy;
    let plan = world.agree(model::plan(config, world.size(), threads, !B::ON_HOST))?;
    if plan.network.is_language() {
        return Err(Error::input("a language model predicts tokens of a text")
            .hint("hpctrain sample continues one; hpctrain eval measures it")
            .shared());
    }
    let opened = || {
        let mut rows = feed::inputs(&plan.config, used::split(&plan.config, args.split)?)?;
        let notes = reader.manifest().conform(&mut rows)?;
        Ok((rows, notes))
    };
    let (dataset, notes) = world.agree(opened())?;
    used::warn(&notes, world.rank());
    let backend = world.agree(backend(&plan))?;
    let mut engine = model::engine(comm, &plan, backend)?;
    world.agree(model::load(&mut engine, &mut reader))?;
    let samples = dataset.samples();
    let create = || Predictions::create(&args.out, samples as usize, plan.network.outputs(), with_classes);
    let to = world.agree((world.rank() == 0).then(create).transpose())?;
    predict(&mut engine, dataset, &world, plan.config.eval.batch, to)?;
    if world.rank() == 0 {
        say(format_args!("{}: outputs of {} rows", args.out.display(), grouped(samples)));
    }
    Ok(0)
}
