//! `hpctrain doctor`: checks whether this machine can train.

use std::path::PathBuf;

use clap::Args;

use crate::comm::Launch;
use crate::doctor::{self, DoctorOptions};
use crate::error::Result;
use crate::job::{self, fail};
use crate::run_dir::REQUEUE;
use crate::signals;
use crate::telemetry::say;

/// Arguments of `hpctrain doctor`.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if no check failed (warnings do not count), 1 if one did; 75 if a launcher started it and\n\
                        SIGTERM or SIGUSR1 arrived, as when a batch system preempts the job.\n\
                        Example: mpirun -np 2 hpctrain doctor --run-root /scratch/runs\n\
                        Before training on GPUs: srun --mpi=pmix hpctrain doctor --require-gpus"
)]
pub struct DoctorArgs {
    /// Directory for runs, whose file system is tested; files written there are removed.
    #[arg(long, value_name = "DIR", default_value = "runs")]
    run_root: PathBuf,
    /// Fail, instead of warning, if a rank has no GPU or shares one; training with run.device=cuda
    /// would end.
    #[arg(long)]
    require_gpus: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// Runs one rank and returns its exit code.
pub fn run(args: &DoctorArgs, launch: Option<&Launch>) -> i32 {
    // A rank ends together with the others; a process without a launcher ends at once.
    if launch.is_some()
        && let Err(e) = signals::record_signals()
    {
        return fail(&e);
    }
    let launcher = launch.map(|launch| launch.by);
    let request = DoctorOptions {
        run_root: args.run_root.clone(),
        launcher,
        requires_gpus: args.require_gpus,
    };
    job::run(launch, super::with_checkpoint::comm_timeout(&[]), |comm| {
        let report = doctor::run(comm, &request)?;
        if comm.rank() == 0 {
            if args.json {
                super::json(&report)?;
            } else {
                say(&report);
            }
        }
        // The signal may have ended the child processes that run the checks.
        Ok(if signals::last_signal().is_some() {
            REQUEUE
        } else {
            i32::from(report.has_failures())
        })
    })
}

/// Arguments of `hpctrain doctor-probe`, which `hpctrain doctor` starts.
#[derive(Args)]
pub struct ProbeArgs {
    /// The checks to run, as JSON.
    probe: String,
}

/// Runs the checks that could crash, in this separate process.
pub fn probe(args: &ProbeArgs) -> Result<()> {
    doctor::probe::run_as_child(&args.probe)
}
