//! `hpctrain verify`: checks that training gives the same bits in every layout.

use std::path::PathBuf;

use clap::Args;

use super::train::SourceArgs;
use crate::comm::Launch;
use crate::config::ReduceChoice;
use crate::error::{Error, Result};
use crate::job::{self, fail};
use crate::parallel::Zero;
use crate::verify::{Launcher, LayoutAxes, RankTask, VerifyOptions, rank, task, verify};

/// Arguments of `hpctrain verify`.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if all layouts agree, 1 if one differs, 2 if the input is invalid.\n\
                        Example: hpctrain verify --set parallel.virtual_ranks=8 --ranks 1,2,4,8 --zero 0,1,2,3"
)]
pub struct VerifyArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Numbers of ranks to compare.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2,4,8",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: Vec<u16>,
    /// Numbers of pipeline stages to compare; --ranks counts the ranks of all stages.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pipeline: Vec<u16>,
    /// Tensor-parallel sizes to compare; --ranks counts all tensor-parallel ranks of all stages.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    tensor: Vec<u16>,
    /// ZeRO stages to compare; 1 to 3 also with several replicas of several shards (hybrid
    /// sharding).
    #[arg(long, value_name = "STAGE,…", value_delimiter = ',', default_value = "0,1,2,3",
          value_parser = clap::value_parser!(u8).range(0..=3))]
    zero: Vec<u8>,
    /// When gradients are reduced over shards: step, micro or auto, to compare; default:
    /// `parallel.reduce`. The layouts of ZeRO 1 to 3 run with each.
    #[arg(long, value_name = "WHEN,…", value_delimiter = ',', value_parser = reduction)]
    reduce: Vec<ReduceChoice>,
    /// Number of steps of each layout.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Start the ranks with mpirun instead of as threads of this process.
    #[arg(long)]
    mpi: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// Parses a value of `--reduce`.
fn reduction(text: &str) -> std::result::Result<ReduceChoice, String> {
    ReduceChoice::ALL
        .into_iter()
        .find(|choice| choice.to_string() == text)
        .ok_or_else(|| "one of auto, step, micro".into())
}

impl VerifyArgs {
    /// Converts the arguments to options.
    fn options(&self) -> Result<VerifyOptions> {
        let (config, name) = self.sources.load()?;
        let [ranks, pipelines, tensors] =
            [&self.ranks, &self.pipeline, &self.tensor].map(|numbers| {
                let mut numbers: Vec<usize> = numbers.iter().copied().map(usize::from).collect();
                numbers.sort_unstable();
                numbers.dedup();
                numbers
            });
        let mut stages = self.zero.clone();
        stages.sort_unstable();
        stages.dedup();
        let stages = stages
            .into_iter()
            .map(Zero::try_from)
            .collect::<Result<_, _>>()
            .map_err(Error::input)?;
        let launcher = if self.mpi { Launcher::mpirun()? } else { Launcher::Threads };
        let reductions = match &self.reduce[..] {
            [] => vec![config.parallel.reduce],
            given => given.to_vec(),
        };
        Ok(VerifyOptions {
            config,
            name,
            axes: LayoutAxes { ranks, pipelines, tensors, stages, reductions },
            steps: self.steps,
            launcher,
            json: self.json,
        })
    }
}

/// Compares the layouts and returns the exit code.
pub fn run(args: &VerifyArgs) -> i32 {
    match args.options().and_then(|options| verify(&options)) {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(e) => fail(&e),
    }
}

/// Arguments of the commands that `--mpi` starts under mpirun.
#[derive(Args)]
pub struct RankArgs {
    /// File that describes the task of the ranks.
    task: PathBuf,
    /// File to which rank 0 writes the result.
    result: PathBuf,
}

/// Runs one rank of a task and returns its exit code.
pub fn run_rank<T: RankTask>(args: &RankArgs, launch: Option<&Launch>) -> i32 {
    let task = task::<T>(&args.task);
    job::run(launch, super::with_checkpoint::comm_timeout(&[]), |comm| {
        let task = comm.world().all_ok(task)?;
        rank(comm, &task, &args.result).map(|()| 0)
    })
}
