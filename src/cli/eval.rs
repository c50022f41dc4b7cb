//! `hpctrain eval`: the evaluator of a run, one rank of a job of its own or of the trainer's.

use std::path::PathBuf;

use clap::Args;

use super::roles::{Role, Start};
use super::train::exit_code;
use crate::backend::cpu::Cpu;
use crate::comm::Comm;
use crate::config::{Config, Time, overlay};
use crate::error::{Error, Result};
use crate::evaluate::{Policy, Request, watch};
use crate::job::{self, fail};
use crate::placement::{cpu, place};
use crate::signals;
use crate::train::Ending;

/// Arguments of `hpctrain eval`.
#[derive(Args)]
pub struct EvalArgs {
    /// Directory of the run, such as runs/gpt-char.
    #[arg(long, value_name = "DIR")]
    run: PathBuf,
    /// Wait for further checkpoints until the run ends.
    #[arg(long)]
    watch: bool,
    /// Which checkpoints: the latest, or every one, oldest first.
    #[arg(long, value_enum, default_value_t = Policy::Latest)]
    policy: Policy,
    /// End when no checkpoint has come for so long, such as 30m.
    #[arg(long, value_name = "TIME")]
    timeout: Option<Time>,
    /// Override one key of the run's configuration, such as eval.samples=100; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// Runs one rank; returns the exit code.
pub fn run(args: &EvalArgs, launched: bool) -> i32 {
    if let Err(e) = signals::listen() {
        return fail(&e);
    }
    job::run(launched, |comm| {
        // A trainer's rank that cannot begin says so to all.
        comm.world().agree(Ok(()))?;
        let role = Role::find(comm, Start::Evaluate)?;
        let request = Request {
            run: args.run.clone(),
            watch: args.watch,
            policy: args.policy,
            timeout: args.timeout.map(|Time(timeout)| timeout),
            overrides: args.overrides.clone(),
            threads: role.threads,
            beside_trainer: role.mixed,
        };
        evaluate(&role, request)
    })
}

/// Evaluates where `run.device` says, of the settings given to the evaluator.
fn watch_on_device(comm: &Comm<Cpu>, request: &Request) -> Result<Ending> {
    let config = comm.world().agree(overlay(&Config::default(), &request.overrides))?;
    match place(comm, &config)? {
        None => watch(comm, request, cpu),
        Some(gpu) => watch(&comm.on(), request, move |plan| gpu.backend(plan)),
    }
}

/// Evaluates as one of the ranks that do; returns the exit code. What goes wrong here does not end the trainer.
///
/// # Errors
/// Those of [`watch`], in a job of evaluators alone, and those that the evaluators do not share.
pub fn evaluate(role: &Role, mut request: Request) -> Result<i32> {
    if role.mixed {
        // The trainer knows where it is, also where its run has no name.
        let told = role.everyone.world().gather_bytes(vec![]).wait()?;
        let told = told.iter().find(|bytes| !bytes.is_empty());
        let run = told.ok_or_else(|| Error::internal("no trainer told its directory"))?;
        request.run = PathBuf::from(String::from_utf8_lossy(run).into_owned());
    }
    match watch_on_device(&role.comm, &request) {
        Ok(ending) => Ok(exit_code(&ending)),
        Err(e) if role.mixed && (e.is_shared() || role.comm.size() == 1) => {
            if role.comm.rank() == 0 {
                fail(&e.clone().at("evaluator"));
            }
            Ok(e.exit_code())
        }
        Err(e) => Err(e),
    }
}
