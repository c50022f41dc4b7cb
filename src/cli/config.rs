//! `hpctrain config`: the configuration that would run.

use clap::{Args, Subcommand};

use super::train::SourceArgs;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::config::{Config, Facts, ModelKind, Parallel, network, resolve};
use crate::data::inspect::table;
use crate::engine::{feed, memory, vocabulary};
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
    /// Print the network's layers: output, parameters, operations and kept elements of each; of a pipeline, its stages as well.
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

/// The configuration with its epochs counted in steps, for which the data is looked at.
fn counted(mut config: Config) -> Result<Config> {
    if config.is_in_epochs() {
        let (train, _) = feed::open(&config)?;
        config.count_epochs(train.samples());
    }
    Ok(config)
}

fn summary(sources: &SourceArgs) -> Result<()> {
    let (mut config, _) = sources.load()?;
    let of_data = of_data(&config)?;
    let whole = config.clone();
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
    if whole.parallel.pipeline > 1 { stages(whole, of_data) } else { Ok(()) }
}

/// The stages of a pipeline: blocks, work and memory of each.
fn stages(config: Config, of_data: Option<usize>) -> Result<()> {
    let Parallel { pipeline, shard, replica, .. } = config.parallel;
    let (ranks, on_gpu) = (pipeline * shard.unwrap_or(1) * replica.unwrap_or(1), config.needs_gpu());
    let plan = resolve(config.of_any_length(), &Facts { ranks, threads: 1, vocabulary: of_data, on_gpu })?;
    let held = memory::Held { messages: 0, messages_on_device: false, resident: memory::resident().0, cache: 0 };
    let (blocks, work) = (plan.network.blocks_summary(), plan.network.work(plan.config.parallel.recompute));
    let all: f64 = work.iter().sum();
    let mut rows = vec![["stage", "blocks", "parameters", "work", "memory a rank"].map(str::to_owned)];
    for (stage, units) in plan.stages.iter().enumerate() {
        let names = match &blocks[units.clone()] {
            [one] => one.name.clone(),
            [first, .., last] => format!("{} to {} ({})", first.name, last.name, units.len()),
            [] => String::new(),
        };
        let parameters: usize = blocks[units.clone()].iter().map(|block| block.parameters).sum();
        let share = 100.0 * work[units.clone()].iter().sum::<f64>() / all;
        let memory = match on_gpu {
            false => memory::estimate::<Cpu>(&plan, stage, held).host(),
            true => memory::estimate::<Cuda>(&plan, stage, held).gpu(),
        };
        rows.push([stage.to_string(), names, grouped(parameters as u64), format!("{share:.1} %"), bytes(memory)]);
    }
    let schedule = plan.step_schedule(0);
    say(format_args!("\n{}", table(&rows).trim_end()));
    let (micros, idle) = (schedule.micros(), 100.0 * schedule.bubble());
    say(format_args!(
        "{ranks} ranks, {micros} micro-batches each a step: {idle:.1} % of it idle where all stages take as long"
    ));
    Ok(())
}

fn show(sources: &SourceArgs, ranks: u16) -> Result<()> {
    let (config, name) = sources.load()?;
    let mut config = counted(config)?;
    config.run.name.get_or_insert(name);
    let of_data = of_data(&config)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let on_gpu = config.needs_gpu();
    let plan = resolve(config, &Facts { ranks: usize::from(ranks), threads, vocabulary: of_data, on_gpu })?;
    let text = toml::to_string(&plan.config).map_err(|e| Error::internal(format!("configuration: {e}")))?;
    say(text.trim_end());
    Ok(())
}
