//! `hpctrain ps coordinator`: starts a run to which servers and workers connect.

use clap::Args;

use super::servers::coordinate_run;
use super::train::RunArgs;
use crate::job::{exit_on_panic, fail};
use crate::signals;

/// Arguments of `hpctrain ps coordinator`.
#[derive(Args)]
pub struct CoordinateArgs {
    /// Number of workers that the run is planned for [default: parameter_server.workers, or those
    /// connected at the start]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    workers: Option<u16>,
    /// Number of servers to wait for.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    servers: u16,
    #[command(flatten)]
    run: RunArgs,
}

/// Runs `hpctrain ps coordinator` and returns the exit code.
pub fn run(args: &CoordinateArgs) -> i32 {
    exit_on_panic("coordinator");
    match signals::record_signals().and_then(|()| args.run.request(None)) {
        Ok(run) => coordinate_run(run, usize::from(args.servers), args.workers.map(usize::from)),
        Err(e) => fail(&e),
    }
}
