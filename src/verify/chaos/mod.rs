//! `hpctrain verify --chaos`: checks that a configuration survives losses of ranks with the same
//! bits.
//!
//! An elastic job trains the configuration in a temporary directory while ranks are killed and
//! stopped at random moments, and processes join. It is asked to end after the given time, and so
//! saves the step that it has reached. Then a job that nothing disturbs trains the same steps, and
//! saves the same one. Both have the same `run.steps`, which is at least that of the configuration,
//! and so the same learning rates.

mod comparison;
mod disturbance;
mod options;
mod report;
mod trainer;

use std::path::{Path, PathBuf};

use tempfile::TempDir;

pub use options::ChaosOptions;
use options::undisturbed;
pub use report::ChaosReport;

use crate::config::{Config, DataOrder, check_elastic};
use crate::elastic::check_numbers_of_ranks;
use crate::error::{Error, Kind, Result};
use crate::signals;
use crate::telemetry::say;
use disturbance::disturb;
use trainer::Trainer;

/// The names of the runs: with losses, and without.
const RUNS: [&str; 2] = ["disturbed", "undisturbed"];

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
        options.time.as_secs(),
        (options.every.as_secs_f64() * 10.0).round() / 10.0
    ));
    let compared = compare(options, &config, &name, folder.path(), [&elastic, &common]);
    let has_records = match &compared {
        Ok(agrees) => !agrees,
        Err(e) => ![Kind::Input, Kind::Interrupted].contains(&e.kind()),
    };
    if has_records {
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
    if strikes.is_empty() {
        return Err(Error::input(format!(
            "--chaos {}: no rank could be lost in this time",
            options.time.as_secs()
        ))
        .hint("give more seconds"));
    }
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
