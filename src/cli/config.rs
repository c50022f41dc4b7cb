//! `hpctrain config`: the configuration that would run.

use clap::{Args, Subcommand};

use super::train::SourceArgs;
use crate::config::{Facts, resolve};
use crate::error::{Error, Result};
use crate::telemetry::say;
use crate::train::vocabulary;

/// Arguments of `hpctrain config`.
#[derive(Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Print the resolved configuration file: every key with the value that would be used.
    Show {
        #[command(flatten)]
        sources: SourceArgs,
        /// Ranks to resolve for.
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
        ranks: u16,
    },
}

/// Runs the subcommand.
pub fn run(args: &ConfigArgs) -> Result<()> {
    let ConfigCommand::Show { sources, ranks } = &args.command;
    let (mut config, name) = sources.load()?;
    config.run.name.get_or_insert(name);
    let of_data = match config.model.vocabulary {
        Some(_) => None,
        None => Some(vocabulary(&config)?),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let on_gpu = config.needs_gpu();
    let plan = resolve(config, &Facts { ranks: usize::from(*ranks), threads, vocabulary: of_data, on_gpu })?;
    let text = toml::to_string(&plan.config).map_err(|e| Error::internal(format!("configuration: {e}")))?;
    say(text.trim_end());
    Ok(())
}
