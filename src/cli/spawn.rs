//! `hpctrain spawn`: starts any program that uses this crate as several ranks on this machine.

use std::ffi::OsString;

use clap::Args;

use crate::comm::Launch;
use crate::error::Error;
use crate::job::{fail, launch_program};

/// Arguments of `hpctrain spawn`.
#[derive(Args)]
pub struct SpawnArgs {
    /// Number of ranks.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,
    /// The program, with its arguments.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "PROGRAM"
    )]
    command: Vec<OsString>,
}

/// Starts the ranks, waits for them, and returns the exit code of the job.
pub fn run(args: &SpawnArgs, launch: Option<&Launch>) -> i32 {
    if let Some(launch) = launch {
        let e = Error::input(format!(
            "spawn -n {}, but this process was started by {}",
            args.ranks, launch.by
        ));
        return fail(&e.hint("use one of them"));
    }
    match args.command.split_first() {
        Some((program, arguments)) => launch_program(args.ranks.into(), program, arguments),
        None => {
            fail(&Error::input("spawn without a program").hint("hpctrain spawn -n 4 ./program"))
        }
    }
}
