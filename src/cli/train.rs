//! `hpctrain train`: one rank of a job.

use std::path::PathBuf;

use clap::Args;

use super::job;
use crate::backend::cpu::Cpu;
use crate::config::{Config, Sources, load};
use crate::error::Result;
use crate::train::{Request, Resume, train};

/// Where the configuration comes from.
#[derive(Args)]
pub struct SourceArgs {
    /// Configuration file (TOML); `hpctrain config show` prints one.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Compiled-in configuration to start from: gpt-char, gpt-baby or gpt2-124m.
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// Override one key, such as run.steps=500; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

impl SourceArgs {
    /// The configuration, and the name of a run that has none.
    pub fn load(&self) -> Result<(Config, String)> {
        let (preset, file) = (self.preset.as_deref(), self.config.as_deref());
        load(&Sources { preset, file, overrides: &self.overrides })
    }
}

/// Arguments of `hpctrain train`.
#[derive(Args)]
pub struct TrainArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Continue a run: `auto` takes the newest checkpoint of its directory, else the path of one.
    #[arg(long, value_name = "auto|CHECKPOINT")]
    resume: Option<String>,
    /// Write what every thread of every rank did, and when, to FILE at the end, for ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl TrainArgs {
    /// What to run.
    pub fn request(&self, threads: Option<usize>) -> Result<Request> {
        let (config, name) = self.sources.load()?;
        let resume = match self.resume.as_deref() {
            None => Resume::No,
            Some("auto") => Resume::Auto,
            Some(path) => Resume::From(path.into()),
        };
        Ok(Request { config, name, resume, trace: self.trace.clone(), threads })
    }
}

/// Runs one rank; returns the exit code.
pub fn run(args: &TrainArgs, launched: bool) -> i32 {
    // A rank whose configuration failed still meets the others, so that all hear of it and one speaks.
    let request = args.request(None);
    job::run(launched, |comm| comm.world().agree(request).and_then(|request| train(comm, &request, Cpu::new)))
}
