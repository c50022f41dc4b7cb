//! `hpctrain sample`: text from a checkpoint, on any number of ranks.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::with_checkpoint::{self, LoadedCheckpoint, Work};
use crate::backend::Kernels;
use crate::checkpoint::{Manifest, Reader};
use crate::comm::Launch;
use crate::config::{self, Config, ModelKind};
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::evaluate::{Sampling, generate, model};
use crate::random::{derive, name};
use crate::safe_open;
use crate::telemetry::{say, say_text};

/// Arguments of `hpctrain sample`.
#[derive(Args)]
pub struct SampleArgs {
    /// A checkpoint, such as runs/x/checkpoints/latest.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text to continue; repeatable. Without any, a line break.
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// A file with a text to continue on each line, after those of --prompt; empty lines are passed
    /// over.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Tokens to draw for each text.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// A text that ends a continuation, which does not have it; repeatable.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue after the token that ends a text, instead of ending there.
    #[arg(long)]
    ignore_eos: bool,
    /// Divides the logits; 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Draw among the K likeliest tokens only.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Names the random stream; each text has its own.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print a line for each text, an object for programs: prompt, text, ids, and the reason of the
    /// end.
    #[arg(long)]
    json: bool,
    /// A key of the configuration, such as run.device=cpu or parallel.tensor=2; repeatable.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// A text to continue.
struct Prompt {
    text: String,
    ids: Vec<u32>,
}

/// A continuation, for programs.
#[derive(Serialize)]
struct Continued<'a> {
    prompt: &'a str,
    /// The continuation, without the prompt.
    text: &'a str,
    /// All ids that were drawn, those of a text that ended it included.
    ids: &'a [u32],
    /// `stop` (a text of --stop), `eos` (the token that ends a text) or `length`.
    end: &'static str,
}

impl SampleArgs {
    /// The texts to continue.
    fn prompts(&self) -> Result<Vec<String>> {
        let mut prompts = self.prompt.clone();
        if let Some(path) = &self.prompts {
            let text = safe_open::read_to_string(path).map_err(|e| {
                Error::io("read", path, e)
                    .hint("--prompts is a text file in UTF-8 with a text to continue on each line")
            })?;
            prompts.extend(text.lines().filter(|line| !line.is_empty()).map(str::to_owned));
            if prompts.is_empty() {
                return Err(Error::input(format!("{} has no text to continue", path.display()))
                    .hint("write one on each line, or leave --prompts out"));
            }
        }
        if prompts.is_empty() {
            prompts.push("\n".into());
        }
        Ok(prompts)
    }

    /// The checkpoint's tokenizer, and the prompts with their ids.
    fn encoded<'a>(&self, manifest: &'a Manifest) -> Result<(&'a Tokenizer, Vec<Prompt>)> {
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
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::input("--stop is empty")
                .hint("give at least one character, or leave it out"));
        }
        let vocabulary = config::network(&mut manifest.config.model.clone(), None)?.outputs();
        let encode = |text: String| {
            let ids = tokenizer.prompt(&text).map_err(|e| e.at(&place))?;
            if ids.is_empty() {
                return Err(Error::input("--prompt is empty")
                    .hint("give at least one character, or leave it out"));
            }
            match ids.iter().find(|id| **id as usize >= vocabulary) {
                None => Ok(Prompt { text, ids }),
                Some(id) => Err(Error::input(format!(
                    "{place}: the tokenizer {} gives id {id} for {text:?}, but the model knows {vocabulary} ids",
                    tokenizer.name()
                ))
                .hint("import the model again with the tokenizer that it was trained with: hpctrain checkpoint import --tokenizer")),
            }
        };
        Ok((tokenizer, self.prompts()?.into_iter().map(encode).collect::<Result<_>>()?))
    }

    /// Where in a continuation the first of the stops begins; none if there is none.
    fn stopped(&self, text: &str) -> Option<usize> {
        self.stop.iter().filter_map(|stop| text.find(stop)).min()
    }
}

/// Tokens before the last ones of which a stop can consist: those whose text hangs on their
/// neighbours.
const MARGIN: usize = 8;

impl Work for SampleArgs {
    fn config(&self, reader: &Reader) -> Result<Config> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(Error::input(format!(
                "--temperature {} is out of range",
                self.temperature
            ))
            .hint("0 or more"));
        }
        self.encoded(reader.manifest())?;
        model::config_on(reader, &self.overrides, None)
    }

    fn on<B: Kernels>(&self, mut found: LoadedCheckpoint<'_, B>) -> Result<()> {
        let mut model = found.network()?;
        let (tokenizer, prompts) = self.encoded(found.reader.manifest())?;
        let context = found.plan.network.context();
        // Every token of a stop has a byte of it at least.
        let longest = self.stop.iter().map(String::len).max().unwrap_or(0) + MARGIN;
        for (index, Prompt { text: prompt, ids }) in prompts.iter().enumerate() {
            let seed = if index == 0 {
                self.seed
            } else {
                derive(self.seed, &[name("prompt"), index as u64])
            };
            let sampling = Sampling {
                tokens: self.tokens,
                temperature: self.temperature,
                top_k: self.top_k.map(|k| k as usize),
                seed,
            };
            let eos = tokenizer.ends()[1].filter(|_| !self.ignore_eos);
            let is_end = |drawn: &[u32]| {
                if eos.is_some() && drawn.last().copied() == eos {
                    return true;
                }
                let last = &drawn[drawn.len().saturating_sub(longest)..];
                !self.stop.is_empty() && self.stopped(&tokenizer.decode(last)).is_some()
            };
            let drawn = generate(&mut model, ids, context, sampling, is_end)?;
            if found.world.rank() != 0 {
                continue;
            }
            let has_eos = eos.is_some() && drawn.last().copied() == eos;
            let text = tokenizer.decode_after(ids, &drawn[..drawn.len() - usize::from(has_eos)]);
            let stopped = self.stopped(&text);
            let text = &text[..stopped.unwrap_or(text.len())];
            if self.json {
                let end = match stopped {
                    Some(_) => "stop",
                    None if has_eos => "eos",
                    None => "length",
                };
                let line = serde_json::to_string(&Continued { prompt, text, ids: &drawn, end });
                say(line.map_err(|e| Error::internal(e.to_string()))?);
            } else {
                let between = if index == 0 { "" } else { "\n" };
                say_text(&format!("{between}{prompt}{text}"));
            }
        }
        Ok(())
    }
}

/// Prints prompts and continuations; returns the exit code.
pub fn run(args: &SampleArgs, launch: Option<&Launch>) -> i32 {
    with_checkpoint::run(args, &args.checkpoint, &args.overrides, launch)
}
