//! Options of `hpctrain verify --chaos`, and the overrides of its two jobs.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::{Config, Elastic, Sources, load};
use crate::error::Result;
use crate::telemetry::say;

/// The virtual ranks of each rank, unless the configuration fixes their number.
const VIRTUAL_RANKS_PER_RANK: usize = 4;

/// More steps than any job takes in a second.
const STEPS_PER_SECOND: u64 = 10_000;

/// A check of an elastic job.
#[derive(Debug, Clone)]
pub struct ChaosOptions {
    /// The preset of the configuration.
    pub preset: Option<String>,
    /// The file of the configuration.
    pub file: Option<PathBuf>,
    /// The overrides of the configuration.
    pub overrides: Vec<String>,
    /// The number of ranks.
    pub ranks: usize,
    /// The time for which ranks are lost.
    pub time: Duration,
    /// The mean time between losses.
    pub every: Duration,
    /// The directory that keeps both runs, if there is one.
    pub keep: Option<PathBuf>,
    /// Whether to print one JSON object at the end instead of lines.
    pub json: bool,
}

impl ChaosOptions {
    /// Loads the configuration with more overrides.
    pub fn load(&self, more: &[String]) -> Result<(Config, String)> {
        let overrides = [&self.overrides, more].concat();
        let preset = self.preset.as_deref();
        let file = self.file.as_deref();
        load(&Sources { preset, file, overrides: &overrides })
    }

    /// Returns the arguments of a job that trains the configuration with more overrides.
    pub fn arguments(&self, more: &[String]) -> Vec<String> {
        let mut arguments = vec!["train".into(), "--spawn".into(), self.ranks.to_string()];
        arguments.extend(self.preset.iter().flat_map(|name| ["--preset".into(), name.clone()]));
        let file = self.file.iter().map(|file| file.display().to_string());
        arguments.extend(file.flat_map(|file| ["--config".into(), file]));
        let overrides = self.overrides.iter().chain(more);
        arguments.extend(overrides.flat_map(|one| ["--set".into(), one.clone()]));
        arguments
    }

    /// Returns the overrides of both jobs, for a configuration without them.
    pub fn common(&self, config: &Config) -> Vec<String> {
        let steps = self.time.as_secs().saturating_mul(STEPS_PER_SECOND).max(config.run.steps);
        let mut overrides = vec![
            "run.epochs=0".into(),
            format!("run.steps={steps}"),
            "run.time_limit=0s".into(),
            "eval.patience=0".into(),
        ];
        if !config.memory_checkpoint.every.is_on() {
            overrides.push("memory_checkpoint.every=1".into());
        }
        if config.parallel.virtual_ranks.is_none() {
            let virtual_ranks = VIRTUAL_RANKS_PER_RANK * self.ranks;
            overrides.push(format!("parallel.virtual_ranks={virtual_ranks}"));
        }
        overrides
    }

    /// Prints a line, except with `--json`.
    pub fn say(&self, line: impl std::fmt::Display) {
        if !self.json {
            say(line);
        }
    }
}

/// Returns the overrides that turn elastic training off.
pub fn undisturbed() -> Vec<String> {
    let Elastic { min_ranks, timeout, rejoin, .. } = Elastic::default();
    vec![
        "elastic.on=false".into(),
        format!("elastic.min_ranks={min_ranks}"),
        format!("elastic.timeout={timeout}"),
        format!("elastic.rejoin={rejoin}"),
    ]
}
