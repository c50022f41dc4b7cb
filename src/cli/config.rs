//! `hpctrain config`: the configuration that would run.

use clap::{Args, Subcommand};

use super::train::SourceArgs;
use crate::config::{Config, Facts, ModelKind, network, resolve};
use crate::data::inspect::table;
use crate::engine::vocabulary;
use crate::error::{Error, Result};
use crate::nn::layers::shown;
use crate::telemetry::{bytes, grouped, say};

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
    /// Print the network's layers: output, parameters, operations and kept elements of each.
    Summary {
        #[command(flatten)]
        sources: SourceArgs,
    },
}

/// Runs the subcommand.
pub fn run(args: &ConfigArgs) -> Result<()> {
    match &args.command {
        ConfigCommand::Show { sources, ranks } => show(sources, *ranks),
        ConfigCommand::Summary { sources } => summary(sources),
    }
}

/// Token ids in the data, if the network depends on it.
fn of_data(config: &Config) -> Result<Option<usize>> {
    let depends = config.model.vocabulary.is_none() && config.model.kind != ModelKind::Layers;
    depends.then(|| vocabulary(config)).transpose()
}

fn summary(sources: &SourceArgs) -> Result<()> {
    let (mut config, _) = sources.load()?;
    let of_data = of_data(&config)?;
    let network = network(&mut config.model, of_data)?;
    let mut rows = vec![["layer", "output", "parameters", "flops", "kept"].map(str::to_owned)];
    let (mut parameters, mut flops, mut kept) = (0, 0, 0);
    for layer in network.summary() {
        parameters += layer.parameters;
        flops += layer.flops;
        kept += layer.kept;
        let [of_layer, computed] = [layer.parameters as u64, layer.flops].map(grouped);
        rows.push([layer.name, shown(&layer.output), of_layer, computed, bytes(layer.kept * size_of::<f32>())]);
    }
    let all = [grouped(parameters as u64), grouped(flops), bytes(kept * size_of::<f32>())];
    let [parameters, flops, kept] = all;
    rows.push(["all".to_owned(), String::new(), parameters, flops, kept]);
    say(network.describe());
    say(table(&rows).trim_end());
    say("flops: of a forward's matrix products, a sample; kept: in f32 for the backward, a sample");
    Ok(())
}

fn show(sources: &SourceArgs, ranks: u16) -> Result<()> {
    let (mut config, name) = sources.load()?;
    config.run.name.get_or_insert(name);
    let of_data = of_data(&config)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let on_gpu = config.needs_gpu();
    let plan = resolve(config, &Facts { ranks: usize::from(ranks), threads, vocabulary: of_data, on_gpu })?;
    let text = toml::to_string(&plan.config).map_err(|e| Error::internal(format!("configuration: {e}")))?;
    say(text.trim_end());
    Ok(())
}
