//! `hpctrain sample`: generates text with a checkpoint, on any number of ranks.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::with_checkpoint::{self, CheckpointCommand, LoadedCheckpoint};
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
    /// Prompt to continue; may be repeated [default: a line break]
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// File with a prompt on each line, which follow those of --prompt; empty lines are skipped.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Number of tokens to sample for each prompt.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Stop generating at this text, which is not printed; may be repeated.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Do not stop at the end-of-text token.
    #[arg(long)]
    ignore_eos: bool,
    /// Sampling temperature; 0 takes the most likely token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Sample from the K most likely tokens only.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Random seed; each prompt has a separate random stream.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object per line and prompt: prompt, text, ids, and end, the reason for
    /// stopping.
    #[arg(long)]
    json: bool,
    /// Override one key of the configuration, such as run.device=cpu or parallel.tensor=2; may be
    /// repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// A prompt and its token ids.
struct Prompt {
    text: String,
    ids: Vec<u32>,
}

/// The object of a prompt for `--json`.
#[derive(Serialize)]
struct Completion<'a> {
    prompt: &'a str,
    /// The continuation, without the prompt.
    text: &'a str,
    /// All sampled ids, including those of a stop text.
    ids: &'a [u32],
    /// The reason for stopping: `stop` (a text of --stop), `eos` (the end-of-text token) or
    /// `length`.
    end: &'static str,
}

impl SampleArgs {
    /// Returns the prompts.
    fn prompts(&self) -> Result<Vec<String>> {
        let mut prompts = self.prompt.clone();
        if let Some(path) = &self.prompts {
            let text = safe_open::read_to_string(path).map_err(|e| {
                Error::io("read", path, e)
                    .hint("--prompts expects a UTF-8 text file with a prompt on each line")
            })?;
            prompts.extend(text.lines().filter(|line| !line.is_empty()).map(str::to_owned));
            if prompts.is_empty() {
                return Err(Error::input(format!("{} has no prompt", path.display()))
                    .hint("write one on each line, or omit --prompts"));
            }
        }
        if prompts.is_empty() {
            prompts.push("\n".into());
        }
        Ok(prompts)
    }

    /// Returns the checkpoint's tokenizer, and the prompts with their ids.
    fn encoded<'a>(&self, manifest: &'a Manifest) -> Result<(&'a Tokenizer, Vec<Prompt>)> {
        let place = self.checkpoint.display();
        if manifest.config.model.kind == ModelKind::Layers {
            return Err(Error::input(format!("{place}: a layer-list model is not a language model")).hint(
                "hpctrain predict writes its outputs for rows of data; hpctrain eval --checkpoint evaluates it",
            ));
        }
        let tokenizer = manifest.tokenizer.as_ref().ok_or_else(|| {
            Error::input(format!("{place}: the data of this model had no tokenizer"))
                .hint("train on data made by hpctrain data import, or give the tokenizer to hpctrain checkpoint import --tokenizer")
        })?;
        if self.stop.iter().any(String::is_empty) {
            return Err(
                Error::input("--stop is empty").hint("give at least one character, or omit it")
            );
        }
        let vocabulary = config::network(&mut manifest.config.model.clone(), None)?.outputs();
        let prompts = self.prompts()?.into_iter();
        let prompts = prompts.map(|text| self.encode(text, tokenizer, vocabulary));
        Ok((tokenizer, prompts.collect::<Result<_>>()?))
    }

    /// Returns a prompt with its ids, all of which are in the vocabulary of the model.
    fn encode(&self, text: String, tokenizer: &Tokenizer, vocabulary: usize) -> Result<Prompt> {
        let place = self.checkpoint.display();
        let ids = tokenizer.prompt(&text).map_err(|e| e.at(&place))?;
        if ids.is_empty() {
            return Err(
                Error::input("--prompt is empty").hint("give at least one character, or omit it")
            );
        }
        match ids.iter().find(|id| **id as usize >= vocabulary) {
            None => Ok(Prompt { text, ids }),
            Some(id) => Err(Error::input(format!(
                "{place}: the tokenizer {} gives id {id} for {text:?}, but the vocabulary of the model has {vocabulary}",
                tokenizer.name()
            ))
            .hint("import the model again with the tokenizer it was trained with: hpctrain checkpoint import --tokenizer")),
        }
    }

    /// Returns true if a continuation has ended: with the token `eos`, or with a stop text among
    /// its last `longest` tokens.
    fn is_end(
        &self,
        drawn: &[u32],
        tokenizer: &Tokenizer,
        eos: Option<u32>,
        longest: usize,
    ) -> bool {
        if eos.is_some() && drawn.last().copied() == eos {
            return true;
        }
        let last = &drawn[drawn.len().saturating_sub(longest)..];
        !self.stop.is_empty() && self.find_stop(&tokenizer.decode(last)).is_some()
    }

    /// Returns the position of the first stop text in a continuation.
    fn find_stop(&self, text: &str) -> Option<usize> {
        self.stop.iter().filter_map(|stop| text.find(stop)).min()
    }
}

/// The number of extra tokens decoded in the search for stop texts, because the text of a token may
/// depend on its neighbours.
const MARGIN: usize = 8;

impl CheckpointCommand for SampleArgs {
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

    fn execute<B: Kernels>(&self, mut found: LoadedCheckpoint<'_, B>) -> Result<()> {
        let mut model = found.network()?;
        let (tokenizer, prompts) = self.encoded(found.reader.manifest())?;
        let context = found.plan.network.context();
        // Every token of a stop text covers at least one byte of it.
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
            let drawn = generate(&mut model, ids, context, sampling, |drawn| {
                self.is_end(drawn, tokenizer, eos, longest)
            })?;
            if found.world.rank() != 0 {
                continue;
            }
            let has_eos = eos.is_some() && drawn.last().copied() == eos;
            let text = tokenizer.decode_after(ids, &drawn[..drawn.len() - usize::from(has_eos)]);
            let stopped = self.find_stop(&text);
            let text = &text[..stopped.unwrap_or(text.len())];
            if self.json {
                let end = match stopped {
                    Some(_) => "stop",
                    None if has_eos => "eos",
                    None => "length",
                };
                let line = serde_json::to_string(&Completion { prompt, text, ids: &drawn, end });
                say(line.map_err(|e| Error::internal(e.to_string()))?);
            } else {
                let between = if index == 0 { "" } else { "\n" };
                say_text(&format!("{between}{prompt}{text}"));
            }
        }
        Ok(())
    }
}

/// Runs one rank and returns its exit code.
pub fn run(args: &SampleArgs, launch: Option<&Launch>) -> i32 {
    with_checkpoint::run(args, &args.checkpoint, &args.overrides, launch)
}
