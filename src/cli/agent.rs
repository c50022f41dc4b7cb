//! `hpctrain agent`: starts the ranks of an elastic job on this host, and replaces lost ones.

use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::path::PathBuf;

use clap::Args;

use super::supervise::training_config;
use crate::comm::host_name;
use crate::config::Config;
use crate::elastic::{await_rendezvous, launched_rank, rendezvous_directory};
use crate::elastic_ranks::ElasticRanks;
use crate::error::{Error, Result};
use crate::job::{NO_RANKS, fail};

/// Arguments of `hpctrain agent`.
#[derive(Debug, Args)]
pub struct AgentArgs {
    /// Number of ranks on this host.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    slots: u16,
    /// The first rank here and the number of ranks of the job. Default: as srun says, which starts
    /// one agent on every host.
    #[arg(long, value_name = "FIRST/RANKS", conflicts_with = "join")]
    ranks: Option<String>,
    /// The processes join a job that trains already.
    #[arg(long, requires = "rendezvous")]
    join: bool,
    /// The directory in which the processes of the job find each other. Default: one below
    /// run.root, named after the job of srun.
    #[arg(long, value_name = "DIR", hide = true)]
    rendezvous: Option<PathBuf>,
    /// The command of a rank, after `--`.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs the agent and returns its exit code.
pub fn run(args: AgentArgs) -> i32 {
    let started = ranks(args).and_then(|ranks| match lock(&ranks)? {
        Some(_lock) => ranks.launch(),
        None => {
            log::info!("the agent of this host runs still, and replaces lost ranks itself");
            Ok(NO_RANKS)
        }
    });
    started.unwrap_or_else(|e| fail(&e))
}

/// Locks this host for one agent of the job; returns `None` if another one runs.
fn lock(ranks: &ElasticRanks) -> Result<Option<File>> {
    let path = ranks.rendezvous.join(format!("agent-{}", host_name()));
    let file = File::create(&path).map_err(|e| Error::io("write", &path, e))?;
    match file.try_lock() {
        // Some file systems have no locks.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
    }
}

/// Returns the ranks that the arguments describe.
fn ranks(args: AgentArgs) -> Result<ElasticRanks> {
    let AgentArgs { slots, ranks, join, rendezvous, command } = args;
    let slots = usize::from(slots);
    let config = training_config(&command)?;
    if !config.elastic.on {
        return Err(Error::input("hpctrain agent, but elastic.on = false in its command")
            .hint("add --set elastic.on=true to the command after --"));
    }
    let (first, rendezvous) = match (ranks, rendezvous) {
        (Some(text), Some(rendezvous)) => (Some(parse(&text)?), rendezvous),
        (None, Some(rendezvous)) if join => (None, rendezvous),
        _ => by_launcher(slots, &config)?,
    };
    let mut words = command.into_iter().map(OsString::from);
    let program = words.next().ok_or_else(|| Error::input("hpctrain agent without a command"))?;
    Ok(ElasticRanks {
        program,
        arguments: words.collect(),
        slots,
        first,
        rendezvous,
        has_other_hosts: true,
        rejoin: config.elastic.rejoin,
    })
}

fn parse(text: &str) -> Result<(usize, usize)> {
    let parsed = text
        .split_once('/')
        .and_then(|(first, ranks)| Some((first.parse().ok()?, ranks.parse().ok()?)));
    parsed.ok_or_else(|| {
        Error::input(format!("--ranks {text} is not of the form FIRST/RANKS"))
            .hint("such as --ranks 2/4")
    })
}

/// Returns the first rank, the number of ranks and the rendezvous of an agent that srun has started.
fn by_launcher(slots: usize, config: &Config) -> Result<(Option<(usize, usize)>, PathBuf)> {
    let launched = launched_rank(|name| std::env::var(name).ok()).ok_or_else(|| {
        Error::input("hpctrain agent was not started by srun").hint(
            "srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 hpctrain agent --slots 8 -- \
             hpctrain train …; on hosts without Slurm: hpctrain supervise --elastic --hosts …",
        )
    })?;
    let root = config.run.root.as_ref();
    let rendezvous = match launched.rank {
        0 => rendezvous_directory(root, &launched.job)?,
        _ => await_rendezvous(root, &launched.job)?,
    };
    Ok((Some((launched.rank * slots, launched.ranks * slots)), rendezvous))
}
