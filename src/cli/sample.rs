//! `hpctrain sample`: text from a checkpoint, on any number of ranks.

use std::path::PathBuf;

use clap::Args;

use super::used::{self, Found, Work};
use crate::backend::Kernels;
use crate::checkpoint::{Manifest, Reader};
use crate::comm::Launch;
use crate::config::{Config, ModelKind};
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::evaluate::{Sampling, generate};
use crate::telemetry::say_text;

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
    /// A key of the configuration, such as run.device=cpu or parallel.tensor=2; repeatable.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

impl SampleArgs {
    /// The checkpoint's tokenizer, and the prompt by it.
    fn prompt<'a>(&self, manifest: &'a Manifest) -> Result<(&'a Tokenizer, Vec<u32>)> {
        let place = self.checkpoint.display();
        if manifest.config.model.kind == ModelKind::Layers {
            return Err(Error::input(format!("{place}: a network by layers is no language model")).hint(
                "hpctrain predict writes what it gives for rows of data; hpctrain eval --checkpoint measures it",
            ));
        }
        let tokenizer = manifest.tokenizer.as_ref().ok_or_else(|| {
            Error::input(format!("{place}: the data of this model had no tokenizer"))
                .hint("train on data made by hpctrain data import, or name the tokenizer in hpctrain checkpoint import --tokenizer")
        })?;
        let prompt = tokenizer.encode(&self.prompt)?;
        if prompt.is_empty() {
            return Err(Error::input("--prompt is empty").hint("give at least one character, or leave it out"));
        }
        Ok((tokenizer, prompt))
    }
}

impl Work for SampleArgs {
    fn config(&self, reader: &Reader) -> Result<Config> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(Error::input(format!("--temperature {} is out of range", self.temperature)).hint("0 or more"));
        }
        self.prompt(reader.manifest())?;
        used::config(reader, &self.overrides, None)
    }

    fn on<B: Kernels>(&self, mut found: Found<'_, B>) -> Result<()> {
        let mut model = found.network()?;
        let (tokenizer, prompt) = self.prompt(found.reader.manifest())?;
        let sampling = Sampling {
            tokens: self.tokens,
            temperature: self.temperature,
            top_k: self.top_k.map(|k| k as usize),
            seed: self.seed,
        };
        let drawn = generate(&mut model, &prompt, found.plan.network.context(), sampling)?;
        if found.world.rank() == 0 {
            say_text(&format!("{}{}", self.prompt, tokenizer.decode(&drawn)));
        }
        Ok(())
    }
}

/// Prints prompt and continuation; returns the exit code.
pub fn run(args: &SampleArgs, launch: Option<&Launch>) -> i32 {
    used::run(args, &args.checkpoint, &args.overrides, launch)
}
