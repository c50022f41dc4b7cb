//! `hpctrain eval`: evaluates the checkpoints of a run, in a separate job or on ranks of the
//! trainer's job, or measures one checkpoint.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::eval_checkpoint;
use super::rank_roles::{RankAssignment, StartCommand};
use super::with_checkpoint::{SplitChoice, comm_timeout};
use crate::comm::Launch;
use crate::config::Time;
use crate::error::Result;
use crate::evaluate::{Policy, SidecarOptions, TRAINER_TIMEOUT};
use crate::job::{self, fail};
use crate::run_dir::RunDirectory;
use crate::signals;
use crate::train::{Customization, evaluate_run};

/// Arguments of `hpctrain eval`.
#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true))]
pub struct EvalArgs {
    /// Evaluate the checkpoints of this run, such as runs/gpt-char, on its validation data, and
    /// record the results in the run.
    #[arg(long, value_name = "DIR", group = "what")]
    run: Option<PathBuf>,
    /// Evaluate this checkpoint, or the newest of this run, and print the results without recording
    /// them.
    #[arg(long, value_name = "DIR", group = "what")]
    checkpoint: Option<PathBuf>,
    /// Evaluate on this directory of shards or HDF5 file [default: the data that the checkpoint was
    /// trained on]
    #[arg(long, value_name = "PATH", conflicts_with = "run")]
    data: Option<PathBuf>,
    /// Shards of a directory to evaluate on [default: validation shards, if there are any]
    #[arg(long, value_enum, conflicts_with = "run")]
    split: Option<SplitChoice>,
    /// Print one JSON object instead of the table.
    #[arg(long, conflicts_with = "run")]
    json: bool,
    /// Wait for further checkpoints until the run ends.
    #[arg(long, conflicts_with = "checkpoint")]
    watch: bool,
    /// Which checkpoints to evaluate.
    #[arg(long, value_enum, default_value_t = Policy::Latest, conflicts_with = "checkpoint")]
    policy: Policy,
    /// Exit with code 1 if no trainer has held the run for this long, such as 2h [default: 30m]
    #[arg(long, value_name = "TIME", conflicts_with = "checkpoint")]
    timeout: Option<Time>,
    /// Override one key of the configuration, such as run.device=cpu or, with --checkpoint,
    /// eval.samples=100; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// Runs one rank and returns its exit code.
pub fn run(args: &EvalArgs, launch: Option<&Launch>) -> i32 {
    let run = match (&args.run, &args.checkpoint) {
        (_, Some(checkpoint)) => {
            let checkpoint = checkpoint.clone();
            let overrides = args.overrides.clone();
            let EvalArgs { data, split, json, .. } = args;
            let request = eval_checkpoint::EvalOptions {
                checkpoint,
                data: data.clone(),
                split: *split,
                json: *json,
                overrides,
            };
            return eval_checkpoint::run(&request, launch);
        }
        (run, None) => run.clone().unwrap_or_default(),
    };
    if let Err(e) = signals::record_signals() {
        return fail(&e);
    }
    job::run(launch, comm_timeout(&args.overrides), |comm| {
        // A training rank that cannot start reports its error here.
        comm.world().all_ok(Ok(()))?;
        let role = RankAssignment::find(comm, StartCommand::Evaluate)?;
        let request = SidecarOptions {
            run: run.clone(),
            watch: args.watch,
            policy: args.policy,
            timeout: if role.mixed {
                None
            } else {
                Some(args.timeout.map_or(TRAINER_TIMEOUT, |Time(timeout)| timeout))
            },
            overrides: args.overrides.clone(),
            threads: role.threads,
            in_trainer_job: role.mixed,
            start_timeout: None,
        };
        evaluate(&role, request)
    })
}

/// Runs an evaluator rank and returns its exit code. In a job with a trainer, an error that all
/// evaluators share is printed and does not end the trainer.
///
/// # Errors
/// Returns the errors of [`evaluate_run`] in a job of evaluators only; in a job with a trainer, only those
/// that the evaluators do not share.
pub fn evaluate(role: &RankAssignment, mut request: SidecarOptions) -> Result<i32> {
    if role.mixed {
        // Only the trainer knows the directory of a run without a name.
        request.run = match role.announcement.wait()? {
            Ok(run) => run,
            Err(code) => return Ok(code),
        };
        let logs = RunDirectory::at(&request.run).logs_path();
        role.comm.world().all_ok(role.comm.watch_in(&logs))?;
    }
    match evaluate_run(&role.comm, &request, Customization::default()) {
        Ok(outcome) => Ok(outcome.exit_code()),
        Err(e) if role.mixed && (e.is_shared() || role.comm.size() == 1) => {
            if role.comm.rank() == 0 {
                fail(&e.clone().at("evaluator"));
            }
            Ok(e.exit_code())
        }
        Err(e) => Err(e),
    }
}
