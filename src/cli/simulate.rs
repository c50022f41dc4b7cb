//! `hpctrain simulate`: ranks as threads of this process.

use clap::Args;

use super::fail;
use super::train::TrainArgs;
use crate::backend::cpu::Cpu;
use crate::comm::{self, Algorithm};
use crate::error::{Error, Kind, Result};
use crate::train::{Request, train};

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
    match args.train.request(Some((cores / ranks).max(1))).and_then(|request| simulate(ranks, &request)) {
        Ok(()) => 0,
        Err(e) => fail(&e),
    }
}

fn simulate(ranks: usize, request: &Request) -> Result<()> {
    let comms = comm::threads::start(ranks, Algorithm::Tree);
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || train(&comm, request, Cpu::new).map_err(|e| (comm.rank(), e))))
            .collect();
        let panicked = || Err((0, Error::internal("a rank panicked")));
        let name = |(rank, e): (usize, Error)| if e.is_shared() { e } else { e.on_rank(rank) };
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked()).map_err(name)).collect()
    });
    // When one rank fails alone, the others fail because it is gone: its error says why.
    let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    errors.sort_by_key(|e| e.kind() == Kind::Comm);
    errors.into_iter().next().map_or(Ok(()), Err)
}
