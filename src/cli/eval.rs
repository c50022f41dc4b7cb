//! `hpctrain eval`: the evaluator of a run, one rank of a job of its own or of the trainer's; or
//! the measure of one checkpoint.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::eval_checkpoint;
use super::rank_roles::{Role, Start};
use super::with_checkpoint::{SplitChoice, patience};
use crate::backend::cpu::Cpu;
use crate::comm::{Comm, Launch};
use crate::config::{Config, Time, overlay};
use crate::error::{Error, Result};
use crate::evaluate::{ABANDONED, Policy, SidecarOptions, watch};
use crate::gpu_assignment::{cpu, place};
use crate::job::{self, fail};
use crate::run_dir::{RunDirectory, RunOutcome};
use crate::signals;

/// Arguments of `hpctrain eval`.
#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true))]
pub struct EvalArgs {
    /// Evaluate the checkpoints of this run, such as runs/gpt-char, on its own validation data, and
    /// record the results there.
    #[arg(long, value_name = "DIR", group = "what")]
    run: Option<PathBuf>,
    /// Measure this checkpoint, or the newest of this run, and print the results; nothing is
    /// recorded.
    #[arg(long, value_name = "DIR", group = "what")]
    checkpoint: Option<PathBuf>,
    /// Measure on this directory of shards or this HDF5 file [default: the data that the checkpoint
    /// was trained on]
    #[arg(long, value_name = "PATH", conflicts_with = "run")]
    data: Option<PathBuf>,
    /// Of a directory, measure on these shards [default: those for validation, if there are any]
    #[arg(long, value_enum, conflicts_with = "run")]
    split: Option<SplitChoice>,
    /// Print one JSON object instead of the table
    #[arg(long, conflicts_with = "run")]
    json: bool,
    /// Wait for further checkpoints until the run ends.
    #[arg(long, conflicts_with = "checkpoint")]
    watch: bool,
    /// Which checkpoints: the latest, or every one, oldest first.
    #[arg(long, value_enum, default_value_t = Policy::Latest, conflicts_with = "checkpoint")]
    policy: Policy,
    /// End with exit code 1 when no trainer has held the run for so long, such as 2h [default: 30m]
    #[arg(long, value_name = "TIME", conflicts_with = "checkpoint")]
    timeout: Option<Time>,
    /// Override one key of the configuration, such as run.device=cpu or, with --checkpoint,
    /// eval.samples=100; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// Runs one rank; returns the exit code.
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
    if let Err(e) = signals::listen() {
        return fail(&e);
    }
    job::run(launch, patience(&args.overrides), |comm| {
        // A trainer's rank that cannot begin says so to all.
        comm.world().all_ok(Ok(()))?;
        let role = Role::find(comm, Start::Evaluate)?;
        let request = SidecarOptions {
            run: run.clone(),
            watch: args.watch,
            policy: args.policy,
            timeout: if role.mixed {
                None
            } else {
                Some(args.timeout.map_or(ABANDONED, |Time(timeout)| timeout))
            },
            overrides: args.overrides.clone(),
            threads: role.threads,
            beside_trainer: role.mixed,
        };
        evaluate(&role, request)
    })
}

/// Evaluates where `run.device` says, of the settings given to the evaluator.
pub fn watch_on_device(comm: &Comm<Cpu>, request: &SidecarOptions) -> Result<RunOutcome> {
    let config = comm.world().all_ok(overlay(&Config::default(), &request.overrides))?;
    match place(comm, &config)? {
        None => watch(comm, request, cpu),
        Some(gpu) => watch(&gpu.beside(comm), request, move |plan| gpu.backend(plan)),
    }
}

/// Evaluates as one of the ranks that do; returns the exit code. A failure here does not end the
/// trainer.
///
/// # Errors
/// The errors of [`watch`], in a job of evaluators alone, and errors that the evaluators do not
/// share.
pub fn evaluate(role: &Role, mut request: SidecarOptions) -> Result<i32> {
    if role.mixed {
        // The trainer knows where it is, also where its run has no name.
        let told = role.everyone.world().gather_bytes(vec![]).wait()?;
        let told = told.iter().find(|bytes| !bytes.is_empty());
        let run = told.ok_or_else(|| Error::internal("no trainer told its directory"))?;
        request.run = PathBuf::from(String::from_utf8_lossy(run).into_owned());
        let logs = RunDirectory::at(&request.run).logs_path();
        role.comm.world().all_ok(role.comm.watch_beside(&logs))?;
    }
    match watch_on_device(&role.comm, &request) {
        Ok(ending) => Ok(ending.exit_code()),
        Err(e) if role.mixed && (e.is_shared() || role.comm.size() == 1) => {
            if role.comm.rank() == 0 {
                fail(&e.clone().at("evaluator"));
            }
            Ok(e.exit_code())
        }
        Err(e) => Err(e),
    }
}
