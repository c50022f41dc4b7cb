//! A run in one line: its state, progress, loss and speed, from the ends of its files.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use toml::Table;

use super::jsonl_tail::{self, Tail};
use hpctrain_base::safe_open;
use hpctrain_checkpoint::run_dir::RunDirectory;
use hpctrain_checkpoint::run_dir::markers::{End, RunStatus};
use hpctrain_config::Config;
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::Evaluation;

/// Bytes read from the end of `metrics.jsonl`: some forty steps. If they contain no readable step,
/// more.
const STEPS: u64 = 16 << 10;
const MORE_STEPS: u64 = 1 << 20;

/// The maximum number of bytes read from the end of `eval.jsonl`.
const EVALUATIONS: u64 = 4 << 20;

/// The time since a trainer's last heartbeat after which it does not count as alive, as for an
/// observer of its lease.
const SILENT: Duration = Duration::from_secs(120);

/// The state of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// A trainer holds it.
    Running,
    /// All steps are done, or it was stopped.
    Finished,
    /// It has saved and should be resumed.
    Preempted,
    /// Its trainer ended with an error.
    Failed,
    /// No trainer holds it and it has no END marker: it was killed.
    Stale,
}

impl RunState {
    /// Returns the name of the state.
    pub fn name(self) -> &'static str {
        match self {
            RunState::Running => "running",
            RunState::Finished => "finished",
            RunState::Preempted => "preempted",
            RunState::Failed => "failed",
            RunState::Stale => "stale",
        }
    }
}

/// The layout of a run's ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RunLayout {
    /// The number of training ranks; `None` for a run with parameter servers, whose workers vary.
    pub ranks: Option<u64>,
    /// The number of pipeline stages.
    pub pipeline: u64,
    /// The number of replicas.
    pub replica: u64,
    /// The number of ranks that shard a replica.
    pub shard: u64,
    /// The number of tensor-parallel ranks.
    pub tensor: u64,
    /// The ZeRO stage.
    pub zero: u64,
}

impl RunLayout {
    /// Formats the axes with more than one rank, and the ZeRO stage.
    pub fn describe(&self) -> String {
        if self.ranks.is_none() {
            return "servers".into();
        }
        let axes = [
            ("pipeline", self.pipeline),
            ("replica", self.replica),
            ("shard", self.shard),
            ("tensor", self.tensor),
        ];
        let mut parts: Vec<String> = axes
            .into_iter()
            .filter(|(_, ranks)| *ranks > 1)
            .map(|(axis, ranks)| format!("{axis} {ranks}"))
            .collect();
        if parts.is_empty() {
            parts.push("one rank".into());
        }
        if self.zero > 0 {
            parts.push(format!("ZeRO {}", self.zero));
        }
        parts.join(", ")
    }
}

/// A run in one line. Numbers that are not in its files are null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunSummary {
    /// The last component of its path.
    pub name: String,
    /// The path of its directory.
    pub path: PathBuf,
    /// The state of the run.
    pub state: RunState,
    /// The reason for its end, unless all steps are done.
    pub reason: Option<String>,
    /// The last recorded step.
    pub step: Option<u64>,
    /// The number of steps in the configuration.
    pub steps: Option<u64>,
    /// The number of passes over the training data.
    pub epoch: Option<f64>,
    /// The training loss of the last step.
    pub loss: Option<f64>,
    /// The loss of the last evaluation: over validation data or, without any, over an epoch of
    /// training.
    pub evaluated_loss: Option<f64>,
    /// The lowest loss of an evaluation.
    pub best_loss: Option<f64>,
    /// The step of the lowest loss.
    pub best_step: Option<u64>,
    /// The median throughput of the last steps, in tokens per second, or in samples if it is not a
    /// language model.
    pub per_second: Option<f64>,
    /// The unit of the throughput: `tokens` or `samples`.
    pub unit: &'static str,
    /// The time of the last step, or of the start, in seconds since 1970.
    pub time: Option<f64>,
    /// The number of seconds since then.
    pub age_seconds: Option<f64>,
    /// The layout of its ranks.
    pub layout: Option<RunLayout>,
    /// The size of its files in bytes.
    pub bytes: u64,
    /// One note for each part that cannot be read.
    pub notes: Vec<String>,
}

/// The keys of a step's record that are used here.
#[derive(Debug, Deserialize)]
struct Step {
    step: u64,
    epoch: Option<f64>,
    loss: Option<f64>,
    tokens_per_second: Option<f64>,
    time: Option<f64>,
}

/// Returns true if a directory is a run, even an incomplete one.
pub fn is_run(path: &Path) -> bool {
    let run = RunDirectory::at(path);
    run.config_path().is_file() || run.metrics_path().is_file() || path.join("checkpoints").is_dir()
}

impl RunSummary {
    /// Reads the summary of the run at `path`, with `now` as the current time. Parts that cannot be
    /// read are noted.
    pub fn read(path: &Path, now: SystemTime) -> Self {
        let run = RunDirectory::at(path);
        let mut notes = Vec::new();
        let settings = settings(&run, &mut notes);
        let step = last_step(&run, &mut notes);
        let speed = step.as_ref().and_then(|(_, speed)| *speed);
        let last = step.map(|(last, _)| last);
        let evaluated = evaluated(&run, &mut notes);
        let losses = evaluations::losses(&evaluated, evaluations::over(&evaluated));
        let best = losses.iter().filter_map(|(step, loss)| Some((*step, (*loss)?)));
        let best = best.filter(|(_, loss)| loss.is_finite()).min_by(|a, b| a.1.total_cmp(&b.1));
        let ended = run.markers().ended();
        let state = state(&run, ended.as_ref(), now, &mut notes);
        let begun = || Some(seconds(fs::metadata(run.config_path()).ok()?.modified().ok()?));
        let time = last.as_ref().and_then(|last| last.time).or_else(begun);
        let kind = settings
            .as_ref()
            .and_then(|all| value(all, "model", "kind")?.as_str().map(str::to_owned));
        let total = settings.as_ref().and_then(|all| number(all, "run", "steps"));
        let bytes = size(path).unwrap_or_else(|e| {
            notes.push(format!("its files cannot be listed: {e}"));
            0
        });
        Self {
            name: run.name(),
            path: path.to_path_buf(),
            state,
            reason: ended.filter(|_| state != RunState::Running).and_then(|end| end.reason),
            step: last.as_ref().map(|last| last.step),
            steps: total,
            epoch: last.as_ref().and_then(|last| last.epoch),
            loss: last.as_ref().and_then(|last| last.loss),
            evaluated_loss: losses.last_key_value().and_then(|(_, loss)| *loss),
            best_loss: best.map(|(_, loss)| loss),
            best_step: best.map(|(step, _)| step),
            per_second: speed,
            unit: if kind.as_deref() == Some("layers") { "samples" } else { "tokens" },
            time,
            age_seconds: time.map(|time| (seconds(now) - time).max(0.0)),
            layout: settings.as_ref().map(|all| layout(all, run.workers_path().is_file())),
            bytes,
            notes,
        }
    }
}

/// Reads the configuration by key, of any version.
fn settings(run: &RunDirectory, notes: &mut Vec<String>) -> Option<Table> {
    let path = run.config_path();
    let text = match safe_open::read_to_string(&path) {
        Ok(text) => text,
        Err(e) => {
            notes.push(format!("config.toml cannot be read: {e}"));
            return None;
        }
    };
    let table: Option<Table> = toml::from_str(&text).ok().filter(|table: &Table| !table.is_empty());
    if table.is_none() {
        notes.push("config.toml is half written or not a configuration".into());
    } else if text.parse::<Config>().is_err() {
        notes.push("config.toml is of another version of hpctrain".into());
    }
    table
}

fn value<'a>(settings: &'a Table, section: &str, key: &str) -> Option<&'a toml::Value> {
    settings.get(section)?.as_table()?.get(key)
}

fn number(settings: &Table, section: &str, key: &str) -> Option<u64> {
    value(settings, section, key)?.as_integer()?.try_into().ok()
}

fn layout(settings: &Table, has_workers: bool) -> RunLayout {
    let [pipeline, replica, shard, tensor] = ["pipeline", "replica", "shard", "tensor"]
        .map(|axis| number(settings, "parallel", axis).unwrap_or(1));
    let ranks = [pipeline, replica, shard, tensor].into_iter().fold(1, u64::saturating_mul);
    let zero = number(settings, "parallel", "zero").unwrap_or(0);
    RunLayout { ranks: (!has_workers).then_some(ranks), pipeline, replica, shard, tensor, zero }
}

/// Returns the last recorded step, and the median speed of the last ones.
fn last_step(run: &RunDirectory, notes: &mut Vec<String>) -> Option<(Step, Option<f64>)> {
    let mut tail = Tail { records: Vec::<Step>::new(), damaged: 0, foreign: 0, is_cut: false };
    for most in [STEPS, MORE_STEPS] {
        tail = match jsonl_tail::read(&run.metrics_path(), most) {
            Ok(tail) => tail,
            Err(e) => {
                notes.push(format!("metrics.jsonl cannot be read: {e}"));
                return None;
            }
        };
        if !tail.records.is_empty() || !tail.is_cut {
            break;
        }
    }
    note_damage(&tail, "metrics.jsonl", notes);
    let mut speeds: Vec<f64> =
        tail.records.iter().filter_map(|step| step.tokens_per_second).collect();
    speeds.sort_by(f64::total_cmp);
    let median = speeds.get(speeds.len() / 2).copied();
    tail.records.pop().map(|last| (last, median))
}

/// Reads the evaluations, or the last ones if there are many.
fn evaluated(run: &RunDirectory, notes: &mut Vec<String>) -> Vec<Evaluation> {
    match jsonl_tail::read(&run.evaluations_path(), EVALUATIONS) {
        Ok(tail) => {
            note_damage(&tail, evaluations::FILE, notes);
            if tail.is_cut {
                notes.push(format!(
                    "eval.jsonl is long: the best loss is that of its last {} evaluations",
                    tail.records.len()
                ));
            }
            tail.records
        }
        Err(e) => {
            notes.push(format!("eval.jsonl cannot be read: {e}"));
            vec![]
        }
    }
}

fn note_damage<T>(tail: &Tail<T>, file: &str, notes: &mut Vec<String>) {
    let lines = |count: usize| if count == 1 { "a line".into() } else { format!("{count} lines") };
    if tail.damaged > 0 {
        notes.push(format!("{file}: {} near its end cannot be read", lines(tail.damaged)));
    }
    if tail.foreign > 0 {
        notes.push(format!(
            "{file}: {} near its end of another version of hpctrain",
            lines(tail.foreign)
        ));
    }
}

/// Returns the state at time `now` of a run with the END marker `ended`: a trainer with heartbeats
/// takes precedence over the marker. Adds a note if the trainer cannot be determined.
pub fn state(
    run: &RunDirectory,
    ended: Option<&End>,
    now: SystemTime,
    notes: &mut Vec<String>,
) -> RunState {
    let has_trainer = run.has_trainer().unwrap_or_else(|e| {
        notes.push(format!("cannot determine whether a trainer holds it: {}", e.message()));
        false
    });
    // On another node the lease is confirmed only by its next heartbeats; its file time shows it at
    // once, if the clocks agree.
    let is_silent = || {
        run.last_heartbeat()
            .is_some_and(|seen| now.duration_since(seen).is_ok_and(|since| since > SILENT))
    };
    if has_trainer && !is_silent() {
        return RunState::Running;
    }
    match ended.map(|end| end.status) {
        Some(RunStatus::Finished) => RunState::Finished,
        Some(RunStatus::Preempted) => RunState::Preempted,
        Some(RunStatus::Failed) => RunState::Failed,
        None => RunState::Stale,
    }
}

/// Returns the size of all files below a directory. Links are not followed, and files that
/// disappear in the meantime do not count.
fn size(path: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(path)? {
        let Ok(entry) = entry else { continue };
        let Ok(what) = entry.metadata() else { continue };
        bytes += if what.is_dir() { size(&entry.path()).unwrap_or(0) } else { what.len() };
    }
    Ok(bytes)
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
