//! `hpctrain verify --chaos`: checks that a configuration survives losses of ranks with the same
//! bits.
//!
//! An elastic job trains the configuration in a temporary directory while ranks are killed and
//! stopped at random moments, and processes join. It is asked to end after the given time, and so
//! saves the step that it has reached. Then a job that nothing disturbs trains the same steps, and
//! saves the same one. The learning rate of both is that of the configuration, since neither is
//! shortened: `run.steps` only grows.

mod comparison;
mod disturbance;
mod report;
mod trainer;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

pub use report::ChaosReport;

use crate::config::{Config, DataOrder, Elastic, Sources, check_elastic, load};
use crate::elastic::check_numbers_of_ranks;
use crate::error::{Error, Result};
use crate::signals;
use crate::telemetry::say;
use disturbance::disturb;
use trainer::Trainer;

/// The virtual ranks of each rank, unless the configuration fixes their number.
const VIRTUAL_RANKS_PER_RANK: usize = 4;

/// More steps than any job takes in a second.
const STEPS_PER_SECOND: u64 = 10_000;

/// The names of the runs: with losses, and without.
const RUNS: [&str; 2] = ["disturbed", "undisturbed"];

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
    fn load(&self, more: &[String]) -> Result<(Config, String)> {
        let overrides = [&self.overrides, more].concat();
        let preset = self.preset.as_deref();
        let file = self.file.as_deref();
        load(&Sources { preset, file, overrides: &overrides })
    }

    /// Returns the arguments of a job that trains the configuration with more overrides.
    fn arguments(&self, more: &[String]) -> Vec<String> {
        let mut arguments = vec!["train".into(), "--spawn".into(), self.ranks.to_string()];
        arguments.extend(self.preset.iter().flat_map(|name| ["--preset".into(), name.clone()]));
        let file = self.file.iter().map(|file| file.display().to_string());
        arguments.extend(file.flat_map(|file| ["--config".into(), file]));
        let overrides = self.overrides.iter().chain(more);
        arguments.extend(overrides.flat_map(|one| ["--set".into(), one.clone()]));
        arguments
    }

    /// Returns the overrides of both jobs, for a configuration without them.
    fn common(&self, config: &Config) -> Vec<String> {
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
    fn say(&self, line: impl std::fmt::Display) {
        if !self.json {
            say(line);
        }
    }
}

/// Returns the overrides that turn elastic training off.
fn undisturbed() -> Vec<String> {
    let Elastic { min_ranks, timeout, rejoin, .. } = Elastic::default();
    vec![
        "elastic.on=false".into(),
        format!("elastic.min_ranks={min_ranks}"),
        format!("elastic.timeout={timeout}"),
        format!("elastic.rejoin={rejoin}"),
    ]
}

/// Checks that the configuration can be elastic, and has the same bits on fewer ranks.
fn check(config: &Config, ranks: usize) -> Result<()> {
    const WHY: &str = "--chaos changes the number of ranks, not the batch";
    check_elastic(config)?;
    config.check_fixed_batch(WHY)?;
    if config.data.order == DataOrder::Files {
        return Err(Error::input(
            "data.order = files gives other samples, and so other bits, on each number of ranks",
        )
        .hint("verify with data.order=samples"));
    }
    let least = config.elastic.min_ranks.max(1);
    if ranks <= least {
        return Err(Error::input(format!(
            "--ranks {ranks} with --chaos: a loss leaves fewer than elastic.min_ranks = {least}"
        ))
        .hint(format!("give {} or more", least + 1)));
    }
    check_numbers_of_ranks(config, ranks)
}

/// Trains with losses and without, compares the bits and prints the result. Returns true if they
/// are equal.
///
/// # Errors
/// Returns an error if the configuration cannot be elastic, a job fails, or a signal comes.
pub fn survive(options: &ChaosOptions) -> Result<bool> {
    let (config, name) = options.load(&[])?;
    let common = options.common(&config);
    let elastic = [&common[..], &["elastic.on=true".into()]].concat();
    let (config, _) = options.load(&elastic)?;
    check(&config, options.ranks)?;
    signals::record_signals()?;
    let folder = Folder::create(options.keep.as_deref())?;
    let virtual_ranks = config.parallel.virtual_ranks.unwrap_or(options.ranks);
    options.say(format_args!(
        "verify       {name}: {} ranks with {virtual_ranks} virtual ranks, {} s with a loss every {} s",
        options.ranks,
        options.time.as_secs_f64(),
        options.every.as_secs_f64()
    ));
    let compared = compare(options, &config, &name, folder.path(), [&elastic, &common]);
    if !matches!(compared, Ok(true)) && signals::last_signal().is_none() {
        folder.keep();
    }
    compared
}

/// The directory of both runs.
enum Folder {
    /// One that the user has named.
    Given(PathBuf),
    /// One that is removed when this is dropped.
    Temporary(TempDir),
}

impl Folder {
    fn create(given: Option<&Path>) -> Result<Self> {
        let Some(given) = given else {
            let folder = tempfile::Builder::new().prefix("hpctrain-verify-").tempdir();
            let refused = |e| Error::io("create a directory in", &std::env::temp_dir(), e);
            return folder.map(Self::Temporary).map_err(refused);
        };
        std::fs::create_dir_all(given).map_err(|e| Error::io("create", given, e))?;
        match RUNS.iter().map(|name| given.join(name)).find(|run| run.exists()) {
            Some(run) => Err(Error::input(format!("--keep: {} exists", run.display()))
                .hint("give another directory, or remove it")),
            None => {
                std::path::absolute(given).map(Self::Given).map_err(|e| Error::io("find", given, e))
            }
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Given(path) => path,
            Self::Temporary(folder) => folder.path(),
        }
    }

    /// Keeps the runs, since their records may show why they differ.
    fn keep(self) {
        if let Self::Temporary(folder) = self {
            log::warn!("the runs are kept in {}", folder.keep().display());
        }
    }
}

/// Trains both runs in `folder`, compares them and prints the result.
fn compare(
    options: &ChaosOptions,
    config: &Config,
    name: &str,
    folder: &Path,
    [elastic, common]: [&Vec<String>; 2],
) -> Result<bool> {
    let root = format!("run.root={}", folder.display());
    let of_run = |name: &str| vec![root.clone(), format!("run.name={name}")];
    let overrides = [&elastic[..], &of_run(RUNS[0])].concat();
    let mut job = Trainer::start(RUNS[0], folder, &options.arguments(&overrides))?;
    let strikes = disturb(&mut job, options, config)?;
    let run = job.finish()?;
    let report = ChaosReport::new(name, options, config, &run, &strikes)?;
    options.say(report.disturbed());

    let step = report.steps;
    let saves = ["checkpoint.every_epochs=0", "checkpoint.every_seconds=0"].map(String::from);
    let every = format!("checkpoint.every={step}");
    let keep = format!("checkpoint.keep_every={step}");
    let more = [&of_run(RUNS[1])[..], &undisturbed(), &saves, &[every, keep]].concat();
    let overrides = [&common[..], &more].concat();
    let mut job = Trainer::start(RUNS[1], folder, &options.arguments(&overrides))?;
    job.until_saved(step)?;
    let reference = job.finish()?;
    let report = report.compared_with(&run, &reference)?;
    match options.json {
        true => {
            say(serde_json::to_string_pretty(&report)
                .map_err(|e| Error::internal(e.to_string()))?)
        }
        false => say(report.compared()),
    }
    Ok(report.agrees())
}
