//! `hpctrain sample`: text from a checkpoint, on one rank.

use std::path::PathBuf;

use clap::Args;

use crate::backend::cpu::Cpu;
use crate::checkpoint::Reader;
use crate::checkpoint::tools::find;
use crate::comm::{self, Comm};
use crate::config::ModelKind;
use crate::error::{Error, Result};
use crate::evaluate::{Sampling, generate, model};
use crate::telemetry::say;

/// Arguments of `hpctrain sample`.
#[derive(Args)]
pub struct SampleArgs {
    /// A checkpoint, such as runs/x/checkpoints/latest.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text to continue; without it, a line break.
    #[arg(long, default_value = "\n", hide_default_value = true)]
    prompt: String,
    /// Tokens to draw.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Divides the logits; 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Draw among the K likeliest tokens only.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Names the random stream.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Prints prompt and continuation.
pub fn run(args: &SampleArgs) -> Result<()> {
    if !(args.temperature >= 0.0 && args.temperature.is_finite()) {
        return Err(Error::input(format!("--temperature {} is out of range", args.temperature)).hint("0 or more"));
    }
    let dir = find::checkpoint(&args.checkpoint)?;
    let _lease = find::hold(&dir);
    let mut reader = Reader::open(&dir)?;
    let manifest = reader.manifest().clone();
    if manifest.config.model.kind == ModelKind::Layers {
        return Err(Error::input(format!("{}: a network by layers is no language model", args.checkpoint.display()))
            .hint("hpctrain predict writes what it gives for rows of data; hpctrain eval --checkpoint measures it"));
    }
    let tokenizer = manifest.tokenizer.as_ref().ok_or_else(|| {
        Error::input(format!("{}: the data of this model had no tokenizer", args.checkpoint.display()))
            .hint("train on data made by hpctrain data import, or name the tokenizer in hpctrain checkpoint import --tokenizer")
    })?;
    let prompt = tokenizer.encode(&args.prompt)?;
    if prompt.is_empty() {
        return Err(Error::input("--prompt is empty").hint("give at least one character, or leave it out"));
    }

    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let plan = model::plan(manifest.config, 1, cores, false)?;
    let comm: Comm<Cpu> = comm::single();
    let mut model = model::build(&comm, &plan, Cpu::new(plan.threads))?;
    model::load(&mut model, &mut reader)?;

    let sampling = Sampling {
        tokens: args.tokens,
        temperature: args.temperature,
        top_k: args.top_k.map(|k| k as usize),
        seed: args.seed,
    };
    let drawn = generate(&mut model, &prompt, plan.network.context(), sampling)?;
    say(format_args!("{}{}", args.prompt, tokenizer.decode(&drawn)));
    Ok(())
}
