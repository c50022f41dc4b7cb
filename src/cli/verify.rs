//! `hpctrain verify`: checks that training gives the same bits in every layout, and after losses of
//! ranks.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::train::SourceArgs;
use crate::comm::Launch;
use crate::config::ReduceChoice;
use crate::error::{Error, Result};
use crate::job::{self, fail};
use crate::parallel::Zero;
use crate::verify::{
    ChaosOptions, Launcher, LayoutAxes, RankTask, VerifyOptions, rank, survive, task, verify,
};

/// The numbers of ranks to compare by default.
const RANKS: [u16; 4] = [1, 2, 4, 8];

/// The number of ranks with `--chaos` by default.
const CHAOS_RANKS: u16 = 4;

/// The mean time between losses by default.
const EVERY: Duration = Duration::from_secs(10);

/// Arguments of `hpctrain verify`.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if all layouts agree, 1 if one differs, 2 if the input is invalid.\n\
                        Example: hpctrain verify --set parallel.virtual_ranks=8 --ranks 1,2,4,8 --zero 0,1,2,3\n\
                        Example: hpctrain verify --chaos 60 --ranks 4"
)]
pub struct VerifyArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Numbers of ranks to compare [default: 1,2,4,8]; one number with --chaos [default: 4].
    #[arg(long, value_name = "N,…", value_delimiter = ',',
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
    /// Train the configuration as an elastic job for SECONDS while ranks are killed and stopped at
    /// random moments and processes join, and compare all bits with a run without losses.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..),
          conflicts_with_all = ["pipeline", "tensor", "zero", "reduce", "steps", "mpi"])]
    chaos: Option<u32>,
    /// Mean number of seconds between losses [default: 10, but at most a third of --chaos].
    #[arg(long, value_name = "SECONDS", requires = "chaos", value_parser = seconds)]
    every: Option<Duration>,
    /// Keep the runs with losses and without in DIRECTORY, as `disturbed` and `undisturbed`.
    #[arg(long, value_name = "DIRECTORY", requires = "chaos")]
    keep: Option<PathBuf>,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// Parses a positive number of seconds.
fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let number = text.parse::<f64>().ok().filter(|number| *number > 0.0);
    number
        .and_then(|number| Duration::try_from_secs_f64(number).ok())
        .ok_or_else(|| "a positive number of seconds".into())
}

/// Parses a value of `--reduce`.
fn reduction(text: &str) -> std::result::Result<ReduceChoice, String> {
    ReduceChoice::ALL
        .into_iter()
        .find(|choice| choice.to_string() == text)
        .ok_or_else(|| "one of auto, step, micro".into())
}

impl VerifyArgs {
    /// Returns the numbers of ranks to compare.
    fn numbers_of_ranks(&self) -> &[u16] {
        if self.ranks.is_empty() { &RANKS } else { &self.ranks }
    }

    /// Converts the arguments to options of `--chaos`.
    fn chaos(&self, seconds: u32) -> Result<ChaosOptions> {
        let ranks = match self.ranks[..] {
            [] => CHAOS_RANKS,
            [ranks] => ranks,
            _ => {
                let numbers: Vec<String> = self.ranks.iter().map(ToString::to_string).collect();
                return Err(Error::input(format!(
                    "--ranks {}, but --chaos starts one job",
                    numbers.join(",")
                ))
                .hint("give one number of ranks"));
            }
        };
        let time = Duration::from_secs(seconds.into());
        let every = self.every.unwrap_or(EVERY.min(time / 3));
        if every > time {
            let every = every.as_secs_f64();
            return Err(Error::input(format!(
                "--every {every} is longer than --chaos {seconds}: no rank would be lost"
            ))
            .hint("give a shorter --every, or a longer --chaos"));
        }
        let (preset, file, overrides) = self.sources.parts();
        Ok(ChaosOptions {
            preset,
            file,
            overrides,
            ranks: ranks.into(),
            time,
            every,
            keep: self.keep.clone(),
            json: self.json,
        })
    }

    /// Compares what the arguments ask for; returns true if all agrees.
    fn run(&self) -> Result<bool> {
        match self.chaos {
            Some(seconds) => survive(&self.chaos(seconds)?),
            None => verify(&self.options()?),
        }
    }

    /// Converts the arguments to options.
    fn options(&self) -> Result<VerifyOptions> {
        let (config, name) = self.sources.load()?;
        let [ranks, pipelines, tensors] =
            [self.numbers_of_ranks(), &self.pipeline[..], &self.tensor[..]].map(|numbers| {
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

/// Compares layouts, or runs with losses and without, and returns the exit code.
pub fn run(args: &VerifyArgs) -> i32 {
    match args.run() {
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
