//! `hpctrain simulate`: trains with ranks as threads of this process.

use clap::Args;

use super::train::{RunArgs, may_use_vendor};
use crate::comm::prepare_environment;
use crate::engine::on_threads;
use crate::error::Result;
use crate::job::fail;
use crate::run_dir::RunOutcome;
use crate::signals;
use crate::train::{Customization, TrainRequest, train};

/// Arguments of `hpctrain simulate`.
#[derive(Args)]
pub struct SimulateArgs {
    /// Number of ranks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,
    /// Number of ranks that are parameter servers instead of training.
    #[arg(long, value_name = "N", default_value_t = 0)]
    servers: usize,
    #[command(flatten)]
    run: RunArgs,
}

/// Runs all ranks and returns the exit code.
pub fn run(args: &SimulateArgs) -> i32 {
    let ranks = usize::from(args.ranks);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let request = signals::record_signals()
        .and_then(|()| args.run.job_request(args.servers, Some((cores / ranks).max(1))));
    prepare_environment(request.as_ref().is_ok_and(|request| may_use_vendor(&request.config)));
    let code = request.and_then(|request| match args.servers {
        0 => simulate(ranks, &request),
        servers => super::servers::simulate(ranks, servers, request),
    });
    code.unwrap_or_else(|e| fail(&e))
}

fn simulate(ranks: usize, request: &TrainRequest) -> Result<i32> {
    let outcomes = on_threads(ranks, |comm| train(comm, request, Customization::default(), None))?;
    Ok(outcomes.first().map_or(0, RunOutcome::exit_code))
}
