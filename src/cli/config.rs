//! `hpctrain config`: the configuration that would run.

use std::ops::Range;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::json;
use super::train::SourceArgs;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::config::{Config, Environment, ModelKind, Parallel, described, network, resolve};
use crate::data::inspect::table;
use crate::engine::{memory, micro_batches, vocabulary};
use crate::error::Result;
use crate::nn::LayerSummary;
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
    /// Print all keys of the configuration file with their explanations and defaults, as comments.
    Keys {
        /// Of this section alone, such as optimizer.
        #[arg(value_name = "SECTION")]
        section: Option<String>,
    },
    /// Print the resolved configuration file: every key with the value that would be used.
    Show {
        #[command(flatten)]
        sources: SourceArgs,
        /// Ranks to resolve for.
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
        ranks: u16,
        /// Print it as one JSON object instead of TOML.
        #[arg(long)]
        json: bool,
    },
    /// Print the network's layers: output, parameters, operations and kept elements of each; of a
    /// pipeline, its stages as well.
    Summary {
        #[command(flatten)]
        sources: SourceArgs,
        /// Print one JSON object instead of tables.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the subcommand.
pub fn run(args: &ConfigArgs) -> Result<()> {
    match &args.command {
        ConfigCommand::Keys { section } => described(section.as_deref()).map(say),
        ConfigCommand::Show { sources, ranks, json } => show(sources, *ranks, *json),
        ConfigCommand::Summary { sources, json } => summary(sources, *json),
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
        let (train, _) = micro_batches::open(&config)?;
        config.count_epochs(train.samples());
    }
    Ok(config)
}

fn summary(sources: &SourceArgs, as_json: bool) -> Result<()> {
    let (mut config, _) = sources.load()?;
    let of_data = of_data(&config)?;
    let whole = config.clone();
    let network = network(&mut config.model, of_data)?;
    let pipeline =
        (whole.parallel.pipeline > 1).then(|| Pipeline::of(whole, of_data)).transpose()?;
    if as_json {
        return json(&Report { network: network.describe(), layers: network.summary(), pipeline });
    }
    let mut rows = vec![["layer", "output", "parameters", "flops", "kept"].map(str::to_owned)];
    let mut parameters = 0;
    let mut flops = 0;
    let mut kept = 0;
    for layer in network.summary() {
        parameters += layer.parameters;
        flops += layer.flops;
        kept += layer.kept;
        let [of_layer, computed] = [layer.parameters as u64, layer.flops].map(grouped);
        rows.push([
            layer.name,
            shown(&layer.output),
            of_layer,
            computed,
            bytes(layer.kept * size_of::<f32>()),
        ]);
    }
    let all = [grouped(parameters as u64), grouped(flops), bytes(kept * size_of::<f32>())];
    let [parameters, flops, kept] = all;
    rows.push(["all".to_owned(), String::new(), parameters, flops, kept]);
    say(network.describe());
    say(table(&rows).trim_end());
    say("flops: of a forward's matrix products, a sample; kept: in f32 for the backward, a sample");
    pipeline.iter().for_each(Pipeline::print);
    Ok(())
}

/// The object of `config summary --json`.
#[derive(Serialize)]
struct Report {
    network: String,
    layers: Vec<LayerSummary>,
    /// Of a pipeline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline: Option<Pipeline>,
}

/// The stages of a pipeline.
#[derive(Serialize)]
struct Pipeline {
    ranks: usize,
    micro_batches: usize,
    /// Part of a step in which a rank waits for others, where all stages take as long.
    idle: f64,
    stages: Vec<Stage>,
}

/// A stage of a pipeline.
#[derive(Serialize)]
struct Stage {
    /// Names of its blocks.
    blocks: Vec<String>,
    parameters: usize,
    /// Its part of all work.
    work: f64,
    /// Estimate of a rank.
    memory_bytes: usize,
}

impl Pipeline {
    fn of(config: Config, of_data: Option<usize>) -> Result<Self> {
        let Parallel { pipeline, shard, replica, .. } = config.parallel;
        let ranks = pipeline * shard.unwrap_or(1) * replica.unwrap_or(1);
        let on_gpu = config.needs_gpu();
        let plan = resolve(
            config.of_any_length(),
            &Environment { ranks, threads: 1, vocabulary: of_data, on_gpu },
        )?;
        let held = memory::Held {
            messages: 0,
            messages_on_device: false,
            resident: memory::resident().0,
            cache: 0,
        };
        let blocks = plan.network.blocks_summary();
        let work = plan.network.work(plan.config.parallel.recompute);
        let all: f64 = work.iter().sum();
        let stage = |(stage, units): (usize, &Range<usize>)| Stage {
            blocks: blocks[units.clone()].iter().map(|block| block.name.clone()).collect(),
            parameters: blocks[units.clone()].iter().map(|block| block.parameters).sum(),
            work: work[units.clone()].iter().sum::<f64>() / all,
            memory_bytes: match on_gpu {
                false => memory::estimate::<Cpu>(&plan, stage, held).host(),
                true => memory::estimate::<Cuda>(&plan, stage, held).gpu(),
            },
        };
        let schedule = plan.step_schedule(0);
        let stages = plan.stages.iter().enumerate().map(stage).collect();
        Ok(Self {
            ranks,
            micro_batches: schedule.micros(),
            idle: schedule.bubble_fraction(),
            stages,
        })
    }

    fn print(&self) {
        let mut rows =
            vec![["stage", "blocks", "parameters", "work", "memory a rank"].map(str::to_owned)];
        for (stage, Stage { blocks, parameters, work, memory_bytes }) in
            self.stages.iter().enumerate()
        {
            let names = match &blocks[..] {
                [one] => one.clone(),
                [first, .., last] => format!("{first} to {last} ({})", blocks.len()),
                [] => String::new(),
            };
            let work = format!("{:.1} %", 100.0 * work);
            rows.push([
                stage.to_string(),
                names,
                grouped(*parameters as u64),
                work,
                bytes(*memory_bytes),
            ]);
        }
        let Self { ranks, micro_batches, idle, .. } = self;
        let idle = 100.0 * idle;
        say(format_args!("\n{}", table(&rows).trim_end()));
        say(format_args!(
            "{ranks} ranks, {micro_batches} micro-batches each a step: {idle:.1} % of it idle where all stages take as long"
        ));
    }
}

fn show(sources: &SourceArgs, ranks: u16, as_json: bool) -> Result<()> {
    let (config, name) = sources.load()?;
    let mut config = counted(config)?;
    config.run.name.get_or_insert(name);
    let of_data = of_data(&config)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let on_gpu = config.needs_gpu();
    let plan = resolve(
        config,
        &Environment { ranks: usize::from(ranks), threads, vocabulary: of_data, on_gpu },
    )?;
    if as_json {
        return json(&plan.config);
    }
    let text = plan.config.to_toml()?;
    say(text.trim_end());
    Ok(())
}
