//! `hpctrain submit`: writes the job script of a batch system, and submits it.

use std::path::PathBuf;

use clap::Args;

use super::servers::check_no_server_keys;
use super::train::SourceArgs;
use crate::config::Time;
use crate::error::{Error, Result};
use crate::submit::{BatchSystem, SubmitOptions, job_script};
use crate::telemetry::{say, say_error, say_text};

/// Arguments of `hpctrain submit`.
#[derive(Args)]
#[command(
    after_help = "The job checks its nodes with hpctrain doctor, trains with --resume auto, and is requeued when it has saved.\n\
                        Example: hpctrain submit --nodes 2 --time 4h --config my.toml --now"
)]
pub struct SubmitArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Number of nodes.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    nodes: u32,
    /// Number of ranks on each node [default: one per GPU if the configuration trains on GPUs, else
    /// one per four cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks_per_node: Option<u32>,
    /// Time limit of the job, such as 4h [default: that of the site file]
    #[arg(long, value_name = "TIME")]
    time: Option<Time>,
    /// Name of the job, and the beginning of the run's name unless run.name is set [default: the
    /// name of the preset or file]
    #[arg(long)]
    name: Option<String>,
    /// The batch system [default: that of the site file, else the one whose command is on PATH]
    #[arg(long, value_enum)]
    scheduler: Option<BatchSystem>,
    /// The site file (TOML): partition, account, modules, GPUs and cores of a node, and more
    /// [default: ~/.config/hpctrain/site.toml]
    #[arg(long, value_name = "FILE")]
    site: Option<PathBuf>,
    /// Write the script to FILE instead of standard output.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Submit the script, and print the job's id as the last line.
    #[arg(long)]
    now: bool,
}

/// Writes the script, and submits it if asked to.
pub fn run(args: &SubmitArgs) -> Result<()> {
    let (config, name) = args.sources.load()?;
    check_no_server_keys(&config)?;
    let options = SubmitOptions {
        nodes: args.nodes as usize,
        ranks_per_node: args.ranks_per_node.map(|ranks| ranks as usize),
        time: args.time,
        name: args.name.clone(),
        scheduler: args.scheduler,
        site: args.site.clone(),
        arguments: train_arguments(&args.sources)?,
    };
    let script = job_script(&options, &config, &name)?;
    say_error(format_args!("plan: {}", script.plan));
    match &args.out {
        Some(path) => {
            std::fs::write(path, &script.text).map_err(|e| Error::io("write", path, e))?;
        }
        None => say_text(script.text.trim_end()),
    }
    if args.now {
        say(script.system.submit(&script.text, args.out.as_deref())?);
    }
    Ok(())
}

/// Returns the arguments of `hpctrain train` with the same configuration.
fn train_arguments(sources: &SourceArgs) -> Result<Vec<String>> {
    let (preset, file, overrides) = sources.parts();
    let file = file
        .map(|path| {
            path.into_os_string().into_string().map_err(|path| {
                Error::input(format!("--config {} is not UTF-8", path.display()))
                    .hint("use another path")
            })
        })
        .transpose()?;
    let given = preset.map(|preset| ("--preset", preset));
    let given = given.into_iter().chain(file.map(|file| ("--config", file)));
    let given = given.chain(overrides.into_iter().map(|setting| ("--set", setting)));
    Ok(given.flat_map(|(flag, value)| [flag.to_owned(), value]).collect())
}
