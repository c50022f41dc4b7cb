//! `hpctrain config`: prints configuration keys, the resolved configuration, and the layers of the
//! model.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::json;
use super::train::SourceArgs;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::config::{
    Config, Environment, ModelKind, Parallel, Upgraded, describe_keys, json_schema, keys_markdown,
    network, resolve, upgrade,
};
use crate::data::inspect::table;
use crate::engine::{memory, micro_batches, vocabulary};
use crate::error::{Error, Result};
use crate::nn::LayerSummary;
use crate::nn::layers::format_shape;
use crate::own_files;
use crate::telemetry::{bytes, grouped, say, say_error};

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
        /// Print only this section, such as optimizer.
        #[arg(value_name = "SECTION")]
        section: Option<String>,
        /// Print the page docs/configuration.md instead: a table of keys for each section.
        #[arg(long, conflicts_with = "section")]
        markdown: bool,
    },
    /// Print the JSON schema of the configuration file, for editors.
    Schema,
    /// Write a configuration file with the present names of keys and values, with its comments.
    Upgrade {
        /// The configuration file.
        file: PathBuf,
        /// Replace the file instead of printing the new one.
        #[arg(long)]
        in_place: bool,
    },
    /// Print the resolved configuration: every key with the value that would be used.
    Show {
        #[command(flatten)]
        sources: SourceArgs,
        /// Number of ranks to resolve for.
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
        ranks: u16,
        /// Print it as one JSON object instead of TOML.
        #[arg(long)]
        json: bool,
    },
    /// Print the layers of the model: output shape, parameters, FLOPs and saved activations of
    /// each; with pipeline parallelism, the stages too.
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
        ConfigCommand::Keys { markdown: true, .. } => {
            keys_markdown().map(|page| say(page.trim_end()))
        }
        ConfigCommand::Keys { section, .. } => describe_keys(section.as_deref()).map(say),
        ConfigCommand::Upgrade { file, in_place } => upgrade_file(file, *in_place),
        ConfigCommand::Schema => json(&json_schema()?),
        ConfigCommand::Show { sources, ranks, json } => show(sources, *ranks, *json),
        ConfigCommand::Summary { sources, json } => summary(sources, *json),
    }
}

/// Upgrades a file; prints the new names on standard error.
fn upgrade_file(file: &Path, in_place: bool) -> Result<()> {
    let text =
        std::fs::read_to_string(file).map_err(|e| Error::io("read the configuration", file, e))?;
    let Upgraded { text: upgraded, renamed } = upgrade(&text, &file.display().to_string())?;
    for (former, ours) in &renamed {
        say_error(format_args!("{former} is now {ours}"));
    }
    if renamed.is_empty() {
        say_error(format_args!("{} has the present names of all keys", file.display()));
    }
    if !in_place {
        say(upgraded.trim_end());
    } else if upgraded != text {
        own_files::replace(file, upgraded.as_bytes()).map_err(|e| Error::io("write", file, e))?;
    }
    Ok(())
}

/// Returns the number of token ids in the data, if the network depends on it.
fn data_vocabulary(config: &Config) -> Result<Option<usize>> {
    let depends = config.model.vocabulary.is_none() && config.model.kind != ModelKind::Layers;
    depends.then(|| vocabulary(config)).transpose()
}

/// Returns the configuration with epochs converted to steps, which opens the data.
fn resolve_epochs(mut config: Config) -> Result<Config> {
    if config.is_in_epochs() {
        let (train, _) = micro_batches::open(&config)?;
        config.count_epochs(train.samples());
    }
    Ok(config)
}

fn summary(sources: &SourceArgs, as_json: bool) -> Result<()> {
    let (mut config, _) = sources.load()?;
    let vocabulary = data_vocabulary(&config)?;
    let original = config.clone();
    let network = network(&mut config.model, vocabulary)?;
    let pipeline = (original.parallel.pipeline > 1)
        .then(|| Pipeline::new(original, vocabulary))
        .transpose()?;
    if as_json {
        return json(&ModelSummary {
            network: network.describe(),
            layers: network.summary(),
            pipeline,
        });
    }
    let mut rows = vec![["layer", "output", "parameters", "flops", "saved"].map(str::to_owned)];
    let mut parameters = 0;
    let mut flops = 0;
    let mut saved = 0;
    for layer in network.summary() {
        parameters += layer.parameters;
        flops += layer.flops;
        saved += layer.kept;
        let [layer_parameters, layer_flops] = [layer.parameters as u64, layer.flops].map(grouped);
        rows.push([
            layer.name,
            format_shape(&layer.output),
            layer_parameters,
            layer_flops,
            bytes(layer.kept * size_of::<f32>()),
        ]);
    }
    rows.push([
        "all".to_owned(),
        String::new(),
        grouped(parameters as u64),
        grouped(flops),
        bytes(saved * size_of::<f32>()),
    ]);
    say(network.describe());
    say(table(&rows).trim_end());
    say(
        "flops: of the matmuls of a forward pass, per sample; saved: activations in f32, per sample",
    );
    pipeline.iter().for_each(Pipeline::print);
    Ok(())
}

/// The object of `config summary --json`.
#[derive(Serialize)]
struct ModelSummary {
    network: String,
    layers: Vec<LayerSummary>,
    /// The stages, with pipeline parallelism.
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline: Option<Pipeline>,
}

/// The stages of a pipeline.
#[derive(Serialize)]
struct Pipeline {
    ranks: usize,
    micro_batches: usize,
    /// The fraction of a step in which a rank is idle (the pipeline bubble), if all stages take the
    /// same time.
    idle: f64,
    stages: Vec<Stage>,
}

/// A stage of a pipeline.
#[derive(Serialize)]
struct Stage {
    /// The names of its blocks.
    blocks: Vec<String>,
    parameters: usize,
    /// Its fraction of the total work.
    work: f64,
    /// The estimated memory of a rank.
    memory_bytes: usize,
}

impl Stage {
    /// Returns the stage with these blocks.
    fn new(blocks: &[LayerSummary], work: f64, memory_bytes: usize) -> Self {
        Self {
            blocks: blocks.iter().map(|block| block.name.clone()).collect(),
            parameters: blocks.iter().map(|block| block.parameters).sum(),
            work,
            memory_bytes,
        }
    }
}

impl Pipeline {
    fn new(config: Config, vocabulary: Option<usize>) -> Result<Self> {
        let Parallel { pipeline, shard, replica, .. } = config.parallel;
        let ranks = pipeline * shard.unwrap_or(1) * replica.unwrap_or(1);
        let on_gpu = config.needs_gpu();
        let plan = resolve(
            config.with_any_length(),
            &Environment { ranks, threads: 1, vocabulary, on_gpu },
        )?;
        let held = memory::BaselineMemory {
            messages: 0,
            messages_on_device: false,
            resident: memory::resident().0,
            cache: 0,
            foreign_ranks: 0,
            replaced: 0,
        };
        let blocks = plan.network.blocks_summary();
        let work = plan.network.work_per_block(plan.config.parallel.recompute);
        let total: f64 = work.iter().sum();
        let stages = plan.stages.iter().enumerate().map(|(stage, units)| {
            let memory_bytes = match on_gpu {
                false => memory::estimate::<Cpu>(&plan, stage, held).host(),
                true => memory::estimate::<Cuda>(&plan, stage, held).gpu(),
            };
            let work = work[units.clone()].iter().sum::<f64>() / total;
            Stage::new(&blocks[units.clone()], work, memory_bytes)
        });
        let schedule = plan.step_schedule(0);
        Ok(Self {
            ranks,
            micro_batches: schedule.micros(),
            idle: schedule.bubble_fraction(),
            stages: stages.collect(),
        })
    }

    fn print(&self) {
        let mut rows =
            vec![["stage", "blocks", "parameters", "work", "memory per rank"].map(str::to_owned)];
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
            "{ranks} ranks, {micro_batches} micro-batches each per step: pipeline bubble {idle:.1} %, if all stages take the same time"
        ));
    }
}

fn show(sources: &SourceArgs, ranks: u16, as_json: bool) -> Result<()> {
    let (mut config, name) = sources.load()?;
    config.resolve_batch(usize::from(ranks))?;
    let mut config = resolve_epochs(config)?;
    config.run.name.get_or_insert(name);
    let vocabulary = data_vocabulary(&config)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let on_gpu = config.needs_gpu();
    let plan =
        resolve(config, &Environment { ranks: usize::from(ranks), threads, vocabulary, on_gpu })?;
    if as_json {
        return json(&plan.config);
    }
    let text = plan.config.to_toml()?;
    // Several keys define the peak together, so it is in a comment.
    let peak = plan.describe_peak().map(|peak| format!("[lr_schedule]\n# peak: {peak}\n"));
    let text = peak.map_or(text.clone(), |peak| text.replacen("[lr_schedule]\n", &peak, 1));
    say(text.trim_end());
    Ok(())
}
