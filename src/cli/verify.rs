//! `hpctrain verify`: the same result in every layout, shown.

use std::path::PathBuf;

use clap::Args;

use super::train::SourceArgs;
use crate::comm::Launch;
use crate::error::{Error, Result};
use crate::job::{self, fail};
use crate::parallel::Zero;
use crate::verify::{Launcher, VerifyOptions, rank, task, verify};

/// Arguments of `hpctrain verify`.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if all rows agree, 1 if one differs, 2 if the input is wrong.\n\
                        Example: hpctrain verify --set parallel.virtual_ranks=8 --ranks 1,2,4,8 --zero 0,1,2,3"
)]
pub struct VerifyArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Numbers of ranks.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2,4,8",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: Vec<u16>,
    /// Stages of a pipeline; the ranks are those of all stages.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pipeline: Vec<u16>,
    /// Ranks that share blocks; the ranks are those of all stages and slices.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    tensor: Vec<u16>,
    /// ZeRO stages; 1 to 3 also with several copies of several shards.
    #[arg(long, value_name = "STAGE,…", value_delimiter = ',', default_value = "0,1,2,3",
          value_parser = clap::value_parser!(u8).range(0..=3))]
    zero: Vec<u8>,
    /// Steps of each row.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Start the ranks with mpirun instead of as threads of this process.
    #[arg(long)]
    mpi: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

impl VerifyArgs {
    fn request(&self) -> Result<VerifyOptions> {
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
        Ok(VerifyOptions {
            config,
            name,
            ranks,
            pipelines,
            tensors,
            stages,
            steps: self.steps,
            launcher,
            json: self.json,
        })
    }
}

/// Compares the rows; returns the exit code.
pub fn run(args: &VerifyArgs) -> i32 {
    match args.request().and_then(|request| verify(&request)) {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(e) => fail(&e),
    }
}

/// Arguments of `hpctrain verify-rank`, which `hpctrain verify --mpi` starts under mpirun.
#[derive(Args)]
pub struct RankArgs {
    /// The task.
    task: PathBuf,
    /// File for the result, which rank 0 writes.
    recording: PathBuf,
}

/// Runs one rank of a row; returns the exit code.
pub fn run_rank(args: &RankArgs, launch: Option<&Launch>) -> i32 {
    let task = task(&args.task);
    job::run(launch, super::with_checkpoint::patience(&[]), |comm| {
        let task = comm.world().all_ok(task)?;
        rank(comm, &task, &args.recording).map(|()| 0)
    })
}
