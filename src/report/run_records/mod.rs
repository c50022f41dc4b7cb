//! The records of a run's directory, for reports and other programs. They can be read while the run
//! writes them, after a kill, and if the disk has damaged some.
//!
//! An incomplete last line is normal. A damaged line is a gap: the lines around it are used, and a
//! note reports it. A directory that is not a run, or has records of another version, is refused.

mod jsonl;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use jsonl::{DamagedLine, JsonLines, read};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::mesh::Mesh;
use hpctrain_base::safe_open;
use hpctrain_checkpoint::Checkpoints;
use hpctrain_checkpoint::run_dir::markers::End;
use hpctrain_checkpoint::run_dir::{Branch, RunDirectory};
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::Evaluation;
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_config::telemetry::rank_times;
use hpctrain_config::telemetry::rank_times::RankTimes;
use hpctrain_config::telemetry::restarts;
use hpctrain_config::telemetry::restarts::Restart;
use hpctrain_config::telemetry::run_record::RunRecord;
use hpctrain_config::telemetry::text_samples;
use hpctrain_config::telemetry::text_samples::TextSample;
use hpctrain_config::telemetry::worker_records;
use hpctrain_config::telemetry::worker_records::WorkerRecord;
use hpctrain_config::{Config, ModelKind};

/// The hint if `config.toml` is not as a run has written it.
const RESTORE: &str = "restore config.toml, or start the run again under another run.name";

/// The maximum number of ranks along an axis, since the file may contain any number.
const MOST_RANKS: usize = 1 << 15;

/// The records of a run.
#[derive(Debug, Clone)]
pub struct RunRecords {
    /// The path of its directory.
    pub path: PathBuf,
    /// The last component of its path.
    pub name: String,
    /// The configuration, with every default resolved.
    pub config: Config,
    /// The configuration by key, such as `optimizer.lr`, with values as in the file.
    pub settings: BTreeMap<String, String>,
    /// The steps, ascending; the last record of a step that was repeated.
    pub steps: Vec<Step>,
    /// The damaged lines of `metrics.jsonl`.
    pub gaps: Vec<DamagedLine>,
    /// The evaluations, in the order of their ends.
    pub evaluations: Vec<Evaluation>,
    /// The starts of the run, if it was supervised.
    pub restarts: Vec<Restart>,
    /// The compute times of the ranks for each window, if there are several ranks.
    pub rank_times: Vec<RankTimes>,
    /// The gradients that workers pushed, in a run with parameter servers.
    pub worker_records: Vec<WorkerRecord>,
    /// The generated samples.
    pub samples: Vec<TextSample>,
    /// The existing checkpoints, ascending by step.
    pub checkpoints: Vec<SavedCheckpoint>,
    /// The run summary, once the run has ended.
    pub summary: Option<RunRecord>,
    /// How the run ended, if its trainer wrote the END marker.
    pub end: Option<End>,
    /// Whether a trainer holds the run now.
    pub running: bool,
    /// The checkpoint of another run at which it began, if any.
    pub branch: Option<Branch>,
    /// One line for each thing that could not be read.
    pub notes: Vec<String>,
}

/// A published checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SavedCheckpoint {
    /// The number of finished steps.
    pub step: u64,
    /// The size of its files in bytes; `None` if its manifest cannot be read.
    pub bytes: Option<u64>,
    /// The time at which it was written, in seconds since 1970.
    pub time: Option<f64>,
    /// Whether `latest` points to it.
    pub latest: bool,
    /// Whether `best` points to it.
    pub best: bool,
}

impl RunRecords {
    /// Reads the records of the run at `path`.
    ///
    /// # Errors
    /// Returns an error if the directory is not a run, or of another version, or a file cannot be
    /// read.
    pub fn open(path: &Path) -> Result<Self> {
        let directory =
            RunDirectory::at(std::path::absolute(path).map_err(|e| Error::io("find", path, e))?);
        let mut notes = Vec::new();
        let (config, settings) = configuration(path, &directory)?;
        let metrics: JsonLines<Step> = read(&directory.metrics_path())?;
        if let (true, Some(other)) =
            (metrics.records.is_empty(), metrics.damaged.iter().find(|one| one.is_json))
        {
            let file = path.join("metrics.jsonl");
            return Err(of_another_version(
                &file,
                &format!("line {}: {}", other.line, other.reason),
            ));
        }
        notes.extend(metrics.damage_summary("metrics.jsonl"));
        let mut steps = metrics.records;
        // Reversed, the last record of a step comes first, and is kept.
        if !steps.is_sorted_by(|one, next| one.step < next.step) {
            steps.reverse();
            steps.sort_by_key(|step| step.step);
            steps.dedup_by_key(|step| step.step);
        }
        let run = directory.path();
        let found_evaluations = noted(run, evaluations::FILE, &mut notes)?;
        let rank_times = noted(run, rank_times::FILE, &mut notes)?;
        let given = noted(run, worker_records::FILE, &mut notes)?;
        let samples = noted(run, text_samples::FILE, &mut notes)?;
        let starts = noted(run, restarts::FILE, &mut notes)?;
        let card = RunRecord::read(&directory.summary_path()).unwrap_or_else(|e| {
            notes.push(format!("run.json cannot be read: {}", e.message()));
            None
        });
        let branch = value_or_note(directory.branch(), &mut notes);
        Ok(Self {
            name: directory.name(),
            config,
            settings,
            steps,
            gaps: metrics.damaged,
            evaluations: found_evaluations,
            restarts: starts,
            rank_times,
            worker_records: given,
            samples,
            checkpoints: saved(&directory.checkpoints(), &mut notes)?,
            summary: card,
            end: directory.markers().ended(),
            // If the lease cannot be read, it is unknown.
            running: directory.has_trainer().unwrap_or(false),
            branch,
            notes,
            path: path.to_path_buf(),
        })
    }

    /// Returns true if the network is a language model, whose throughput is in tokens.
    pub fn is_language(&self) -> bool {
        self.config.model.kind != ModelKind::Layers
    }

    /// Returns the steps at which the supervisor restarted it.
    pub fn restarted_at(&self) -> Vec<u64> {
        let (last, before) = match self.restarts.split_last() {
            Some((last, before)) => (Some(last).filter(|last| last.code != 0), before),
            None => (None, &[][..]),
        };
        before.iter().chain(last).map(|restart| restart.checkpoint.unwrap_or(0)).collect()
    }

    /// Returns the layout of its ranks according to the configuration.
    pub fn mesh(&self) -> Mesh {
        let parallel = &self.config.parallel;
        let size = |ranks: usize| ranks.clamp(1, MOST_RANKS);
        Mesh {
            pipeline: size(parallel.pipeline),
            replica: size(parallel.replica.unwrap_or(1)),
            shard: size(parallel.shard.unwrap_or(1)),
            tensor: size(parallel.tensor),
        }
    }
}

/// Reads the records of a file of the run, and adds a note about damaged lines.
fn noted<T: serde::de::DeserializeOwned>(
    run: &Path,
    file: &str,
    notes: &mut Vec<String>,
) -> Result<Vec<T>> {
    let found = read(&run.join(file))?;
    notes.extend(found.damage_summary(file));
    Ok(found.records)
}

/// Reads the configuration of the run in `directory`, which messages call `path`, as a struct and by
/// key.
///
/// # Errors
/// Returns an error if the directory is not a run, or of another version.
pub fn configuration(
    path: &Path,
    directory: &RunDirectory,
) -> Result<(Config, BTreeMap<String, String>)> {
    let file = path.join("config.toml");
    let text = match safe_open::read_to_string(&directory.config_path()) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound || e.kind() == ErrorKind::NotADirectory => {
            return Err(not_a_run(path, directory));
        }
        Err(e) => return Err(Error::io("read", &file, e)),
    };
    let table: toml::Table = toml::from_str(&text).map_err(|e| {
        Error::input(format!("{} is not a valid configuration: {}", file.display(), one_line(&e)))
            .hint(RESTORE)
    })?;
    if table.is_empty() {
        return Err(Error::input(format!("{} is empty: its run has not begun", file.display()))
            .hint("start it with hpctrain train, or give the directory of another run"));
    }
    let config = text.parse().map_err(|e| of_another_version(&file, &one_line(&e)))?;
    let mut settings = BTreeMap::new();
    flatten(&toml::Value::Table(table), "", &mut settings);
    Ok((config, settings))
}

fn one_line(e: &toml::de::Error) -> String {
    e.message().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the error for a directory without a configuration.
fn not_a_run(path: &Path, directory: &RunDirectory) -> Error {
    let shown = path.display();
    let runs = || std::fs::read_dir(path).into_iter().flatten().flatten();
    let first = runs().map(|entry| entry.path()).find(|entry| entry.join("config.toml").exists());
    if !path.exists() {
        Error::input(format!("{shown}: there is no such directory"))
            .hint("give the directory of a run, such as runs/gpt-char")
    } else if !path.is_dir() {
        Error::input(format!("{shown} is a file, not the directory of a run"))
            .hint("give the directory of a run, such as runs/gpt-char")
    } else if directory.metrics_path().exists() || directory.logs_path().exists() {
        Error::input(format!("{shown} is an incomplete run: it has no config.toml")).hint(RESTORE)
    } else if let Some(first) = first {
        Error::input(format!("{shown} is not a run, but contains runs"))
            .hint(format!("give one of them, such as {}", first.display()))
    } else {
        Error::input(format!("{shown} is not a run: it has no config.toml"))
            .hint("give the directory of a run, such as runs/gpt-char")
    }
}

fn of_another_version(file: &Path, why: &str) -> Error {
    Error::input(format!("{} is of another version of hpctrain: {why}", file.display())).hint(
        format!(
            "this is version {}: read it with the version that wrote it",
            env!("CARGO_PKG_VERSION")
        ),
    )
}

/// Collects values by the paths of their keys. Lists are values.
fn flatten(value: &toml::Value, key: &str, into: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => {
            for (name, value) in table {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                flatten(value, &key, into);
            }
        }
        toml::Value::String(text) => drop(into.insert(key.to_owned(), text.clone())),
        other => drop(into.insert(key.to_owned(), other.to_string())),
    }
}

/// Returns the published checkpoints, and adds notes about unreadable manifests.
fn saved(checkpoints: &Checkpoints, notes: &mut Vec<String>) -> Result<Vec<SavedCheckpoint>> {
    let steps = checkpoints.steps()?;
    let latest = value_or_note(checkpoints.latest_step(), notes);
    let best = value_or_note(checkpoints.best_step(), notes);
    let mut all = Vec::with_capacity(steps.len());
    for step in steps {
        let found = checkpoints.read_intact(step);
        if let Err(e) = &found {
            notes.push(format!("the checkpoint of step {step}: {}", e.message()));
        }
        let (bytes, time) =
            found.map_or((None, None), |found| (Some(found.bytes()), Some(found.origin.time)));
        all.push(SavedCheckpoint {
            step,
            bytes,
            time,
            latest: latest == Some(step),
            best: best == Some(step),
        });
    }
    Ok(all)
}

/// Returns a value that was read, or none and a note about the error.
fn value_or_note<T>(found: Result<Option<T>>, notes: &mut Vec<String>) -> Option<T> {
    found.unwrap_or_else(|e| {
        notes.push(e.message().to_owned());
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a run with these steps and losses.
    fn run(steps: &[(u64, f64)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.toml"), Config::default().to_toml().unwrap())
            .unwrap();
        let lines = steps.iter().map(|&(step, loss)| {
            serde_json::to_string(&Step { step, loss, ..Step::default() }).unwrap() + "\n"
        });
        std::fs::write(dir.path().join("metrics.jsonl"), lines.collect::<String>()).unwrap();
        dir
    }

    #[test]
    fn the_last_record_of_a_repeated_step_counts() {
        let dir = run(&[(1, 4.0), (2, 3.0), (3, 2.5), (2, 3.5), (3, 2.0), (4, f64::NAN)]);
        let records = RunRecords::open(dir.path()).unwrap();
        let seen: Vec<_> = records.steps.iter().map(|step| (step.step, step.loss)).collect();
        assert_eq!(seen[..3], [(1, 4.0), (2, 3.5), (3, 2.0)]);
        assert!(seen[3].0 == 4 && seen[3].1.is_nan() && records.notes.is_empty(), "{seen:?}");
        assert_eq!(records.settings["optimizer.kind"], "adamw");
    }

    #[test]
    fn damage_is_noted_and_costs_its_line_alone() {
        let dir = run(&[(1, 4.0), (2, 3.0), (3, 2.0)]);
        let metrics = dir.path().join("metrics.jsonl");
        let mut bytes = std::fs::read(&metrics).unwrap();
        let second = bytes.iter().position(|byte| *byte == b'\n').unwrap() + 4;
        bytes[second] = 0xff;
        bytes.extend(b"{\"step\":4,");
        std::fs::write(&metrics, bytes).unwrap();
        std::fs::write(dir.path().join("run.json"), "{\"version\":").unwrap();
        std::fs::write(dir.path().join("eval.jsonl"), "{\"step\":3,\"loss\":2.5,\"perplexity\":null,\"checkpoint\":null,\"time\":1.0,\"classes\":{\"names\":[\"a\",\"b\"],\"confusion\":[[3,1],[0,4]],\"precision\":[1.0,0.8],\"recall\":[0.75,1.0],\"f1\":[0.8,0.8],\"macro\":{\"precision\":0.9,\"recall\":0.875,\"f1\":0.8}}}\n").unwrap();
        let records = RunRecords::open(dir.path()).unwrap();
        assert_eq!(records.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(
            records.gaps.iter().map(|gap| (gap.line, gap.after)).collect::<Vec<_>>(),
            [(2, 1)]
        );
        assert!(
            records.notes.len() == 2 && records.notes[1].starts_with("run.json cannot be read"),
            "{:?}",
            records.notes
        );
        let classes = records.evaluations[0].classes.as_ref().unwrap();
        assert_eq!((classes.confusion[0][1], classes.recall[0], classes.roc_auc), (1, 0.75, None));
    }

    /// Returns the message of the error with which the records at `path` are refused.
    fn refusal(path: &Path) -> String {
        let e = RunRecords::open(path).unwrap_err();
        assert!(e.exit_code() == 2 && e.advice().is_some() && !e.message().contains('\n'), "{e:?}");
        e.message().to_owned()
    }

    #[test]
    fn other_directories_are_refused_in_one_line() {
        let dir = tempfile::tempdir().unwrap();
        assert!(refusal(&dir.path().join("absent")).contains("no such directory"));
        assert!(refusal(dir.path()).contains("is not a run: it has no config.toml"));
        let run = dir.path().join("x");
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("metrics.jsonl"), "").unwrap();
        assert!(refusal(&run).contains("is an incomplete run"));
        std::fs::write(run.join("config.toml"), "").unwrap();
        assert!(refusal(&run).contains("config.toml is empty"));
        assert!(refusal(dir.path()).contains("is not a run, but contains runs"));
        assert!(refusal(&run.join("config.toml")).contains("is a file"));
        std::fs::write(run.join("config.toml"), "[run]\nflux = 3\n").unwrap();
        let message = refusal(&run);
        assert!(
            message.contains("config.toml is of another version") && message.contains("flux"),
            "{message}"
        );
        std::fs::write(run.join("config.toml"), "[run]\nsteps = 3\n").unwrap();
        std::fs::write(run.join("metrics.jsonl"), "{\"iteration\":1}\n").unwrap();
        let message = refusal(&run);
        assert!(
            message.contains(
                "metrics.jsonl is of another version of hpctrain: line 1: missing field `step`"
            ),
            "{message}"
        );
    }
}
