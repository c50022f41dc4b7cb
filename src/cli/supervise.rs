//! `hpctrain supervise`.

use clap::Args;

use crate::job::fail;
use crate::supervise::{Request, supervise};

/// Arguments of `hpctrain supervise`.
#[derive(Debug, Args)]
pub struct SuperviseArgs {
    /// Starts in a row that may gain no checkpoint, besides the first.
    #[arg(long, value_name = "N", default_value_t = 3)]
    retries: u32,
    /// End with exit code 75 where the job does, rather than start it again: a batch system requeues it.
    #[arg(long)]
    requeue: bool,
    /// The job's command, after `--`: a launcher with its arguments, or this program.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Supervises a job; returns the exit code of its last start.
pub fn run(args: SuperviseArgs) -> i32 {
    let SuperviseArgs { retries, requeue, command } = args;
    supervise(&Request { command, retries, requeue }).unwrap_or_else(|e| fail(&e))
}
