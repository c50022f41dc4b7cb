//! `hpctrain predict`: outputs of a network for every row of a data set, on any number of ranks.

use std::path::PathBuf;

use clap::Args;

use super::used::{self, Found, Part, Work};
use crate::backend::Kernels;
use crate::checkpoint::Reader;
use crate::comm::Launch;
use crate::config::{Config, LossKind, Plan};
use crate::data::{Catalogue, Dataset};
use crate::engine::feed;
use crate::error::{Error, Result};
use crate::evaluate::{Predictions, predict};
use crate::telemetry::{grouped, say};

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

impl PredictArgs {
    /// The rows of inputs, for a network that gives outputs for rows.
    fn open(&self, catalogue: &mut Catalogue, plan: &Plan) -> Result<Dataset> {
        if plan.network.is_language() {
            return Err(Error::input("a language model predicts tokens of a text")
                .hint("hpctrain sample continues one; hpctrain eval measures it"));
        }
        feed::inputs(catalogue, &plan.config, used::split(&plan.config, self.split)?)
    }
}

impl Work for PredictArgs {
    fn config(&self, reader: &Reader) -> Result<Config> {
        used::config(reader, &self.overrides, Some(&self.data))
    }

    fn on<B: Kernels>(&self, mut found: Found<'_, B>) -> Result<()> {
        let dataset = found.data(|catalogue, plan| self.open(catalogue, plan))?;
        let mut model = found.network()?;
        let Found { plan, world, .. } = &found;
        let with_classes = plan.config.loss.kind == LossKind::CrossEntropy;
        let samples = dataset.samples();
        let create = || Predictions::create(&self.out, samples as usize, plan.network.outputs(), with_classes);
        // The last stage of a pipeline has the outputs.
        let writes = model.sharded.stage().is_last() && model.sharded.data().rank() == 0;
        let to = world.agree(writes.then(create).transpose())?;
        predict(&mut model, dataset, plan.config.eval.batch, to)?;
        if world.rank() == 0 {
            say(format_args!("{}: outputs of {} rows", self.out.display(), grouped(samples)));
        }
        Ok(())
    }
}

/// Runs the subcommand; returns the exit code.
pub fn run(args: &PredictArgs, launch: Option<&Launch>) -> i32 {
    used::run(args, &args.checkpoint, &args.overrides, launch)
}
