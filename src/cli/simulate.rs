//! `hpctrain simulate`: ranks as threads of this process.

use clap::Args;

use super::train::TrainArgs;
use crate::engine::on_threads;
use crate::error::Result;
use crate::job::fail;
use crate::run_dir::Ending;
use crate::signals;
use crate::train::{Own, Request, train_on_device};

/// Arguments of `hpctrain simulate`.
#[derive(Args)]
pub struct SimulateArgs {
    /// Ranks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,
    #[command(flatten)]
    train: TrainArgs,
}

/// Runs all ranks; returns the exit code.
pub fn run(args: &SimulateArgs) -> i32 {
    let ranks = usize::from(args.ranks);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let request = signals::listen().and_then(|()| args.train.request_of_job(Some((cores / ranks).max(1))));
    let servers = args.train.servers;
    let simulate = |request: Request| match servers {
        0 => simulate(ranks, &request),
        servers => super::servers::simulate(ranks, servers, request),
    };
    match request.and_then(simulate) {
        Ok(code) => code,
        Err(e) => fail(&e),
    }
}

fn simulate(ranks: usize, request: &Request) -> Result<i32> {
    let endings = on_threads(ranks, |comm| train_on_device(comm, request, Own::default(), None))?;
    Ok(endings.first().map_or(0, Ending::exit_code))
}
