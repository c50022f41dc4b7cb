//! The state of a run for the screen, kept up to date from the files of its directory.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::follow::{Appended, Follower};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;
use hpctrain_checkpoint::run_dir::RunDirectory;
use hpctrain_config::telemetry::evaluations::{Evaluation, EvaluationStatus, LossSplit};
use hpctrain_config::telemetry::goodput::{Goodput, Pauses};
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_config::telemetry::rank_times::RankTimes;
use hpctrain_config::telemetry::run_record::RunRecord;
use hpctrain_config::telemetry::worker_records::WorkerRecord;
use hpctrain_config::telemetry::{self, starts};
use hpctrain_config::{Config, ModelKind};
use hpctrain_report::downsample::Point;
use hpctrain_report::run_records::configuration;
use hpctrain_report::runs::{RunState, state};

/// The number of steps over which rates and times are averaged.
const RECENT: usize = 20;

/// The number of gradients of workers over which their times are averaged.
const RECENT_GRADIENTS: usize = 1000;

/// Bytes that are read of the end of a log file.
const LOG_BYTES: u64 = 64 << 10;

/// Goodput is measured from all records, so it may take at most this share of the time.
const GOODPUT_SHARE: u32 = 50;

/// The shortest time between two measurements of the goodput.
const GOODPUT_INTERVAL: Duration = Duration::from_secs(10);

/// A quantity that is drawn by step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// The training loss.
    Loss,
    /// Tokens or samples per second.
    Throughput,
    /// Model FLOPs utilisation, in percent.
    Mfu,
    /// The global norm of the gradient.
    GradNorm,
    /// The peak of memory of rank 0 so far, in MiB.
    Memory,
}

/// The values of a step that are drawn.
#[derive(Debug, Clone, Copy)]
struct Drawn {
    step: u64,
    loss: f64,
    per_second: f64,
    mfu: f64,
    grad_norm: f64,
    peak_mib: f64,
}

/// The checkpoints of a run.
#[derive(Debug, Default)]
pub struct CheckpointList {
    /// The number of published ones.
    pub kept: usize,
    /// The step of the last one, and its size in bytes if its manifest can be read.
    pub latest: Option<(u64, Option<u64>)>,
    /// The step of the one with the lowest validation loss.
    pub best: Option<u64>,
}

/// The compute time of a rank, or of a worker of parameter servers.
#[derive(Debug, Clone, PartialEq)]
pub struct RankTime {
    /// Its number and host.
    pub name: String,
    /// Milliseconds per step, or per gradient of a worker.
    pub ms: f64,
}

/// The compute times of the last window of steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ranks {
    /// The number of ranks or workers.
    pub count: usize,
    /// The median in milliseconds.
    pub median_ms: f64,
    /// Those that are known, slowest first; of more than 64 ranks only the slowest.
    pub slowest: Vec<RankTime>,
    /// Whether they are workers of parameter servers.
    pub are_workers: bool,
    /// Whether the times are those of a virtual rank, because ranks have unequal numbers of them.
    pub per_virtual_rank: bool,
}

/// A run and what is known of it.
pub struct RunView {
    directory: RunDirectory,
    /// The configuration with every default resolved.
    pub config: Config,
    steps: Follower<Step>,
    evaluated: Follower<Evaluation>,
    timed: Follower<RankTimes>,
    given: Follower<WorkerRecord>,
    drawn: Vec<Drawn>,
    recent: VecDeque<Step>,
    /// The evaluations, in the order of their ends.
    pub evaluations: Vec<Evaluation>,
    last_times: Option<RankTimes>,
    last_given: VecDeque<WorkerRecord>,
    /// The host of each rank of the last start; empty with parameter servers.
    pub hosts: Vec<String>,
    /// The number of starts.
    pub starts: usize,
    /// The state of the run.
    pub state: RunState,
    /// The reason of its end, if it has one.
    pub reason: Option<String>,
    /// The checkpoints.
    pub checkpoints: CheckpointList,
    /// The goodput so far.
    pub goodput: Option<Goodput>,
    goodput_at: Option<(Instant, Duration)>,
    /// The name of the log file that was written last, and its last lines.
    pub log: (String, Vec<String>),
    /// The part of the records that cannot be read at present.
    pub note: Option<String>,
}

impl RunView {
    /// Opens the run at `path` and reads its records.
    ///
    /// # Errors
    /// Returns an error if the directory is not a run, or of another version.
    pub fn open(path: &Path) -> Result<Self> {
        let directory =
            RunDirectory::at(std::path::absolute(path).map_err(|e| Error::io("find", path, e))?);
        let (config, _) = configuration(path, &directory)?;
        Ok(Self {
            steps: Follower::new(directory.metrics_path()),
            evaluated: Follower::new(directory.evaluations_path()),
            timed: Follower::new(directory.rank_times_path()),
            given: Follower::new(directory.workers_path()),
            config,
            drawn: Vec::new(),
            recent: VecDeque::new(),
            evaluations: Vec::new(),
            last_times: None,
            last_given: VecDeque::new(),
            hosts: Vec::new(),
            starts: 0,
            state: RunState::Stale,
            reason: None,
            checkpoints: CheckpointList::default(),
            goodput: None,
            goodput_at: None,
            log: (String::new(), Vec::new()),
            note: None,
            directory,
        })
    }

    /// Reads what was written since the last call. Returns whether more is there already. An error
    /// becomes the note: the file may be readable again a moment later.
    pub fn refresh(&mut self) -> bool {
        self.note = None;
        let has_more = self.read_records().unwrap_or_else(|e| {
            self.note = Some(e.message().to_owned());
            false
        });
        if !has_more && let Err(e) = self.read_state() {
            self.note = Some(e.message().to_owned());
        }
        has_more
    }

    fn read_records(&mut self) -> Result<bool> {
        let Appended { records, is_new, has_more } = self.steps.poll()?;
        if is_new {
            self.drawn.clear();
            self.recent.clear();
        }
        records.iter().for_each(|step| self.add(step));
        let Appended { records, is_new, .. } = self.evaluated.poll()?;
        if is_new {
            self.evaluations.clear();
        }
        self.evaluations.extend(records);
        if let Some(last) = self.timed.poll()?.records.pop() {
            self.last_times = Some(last);
        }
        self.last_given.extend(self.given.poll()?.records);
        let excess = self.last_given.len().saturating_sub(RECENT_GRADIENTS);
        self.last_given.drain(..excess);
        Ok(has_more)
    }

    /// Adds a step. A start that goes on from an earlier step replaces the steps after it.
    fn add(&mut self, step: &Step) {
        if self.drawn.last().is_some_and(|last| last.step >= step.step) {
            let kept = self.drawn.partition_point(|one| one.step < step.step);
            self.drawn.truncate(kept);
            self.recent.retain(|one| one.step < step.step);
        }
        self.drawn.push(Drawn {
            step: step.step,
            loss: step.loss,
            per_second: step.tokens_per_second,
            mfu: step.mfu.map_or(f64::NAN, |mfu| 100.0 * mfu),
            grad_norm: step.grad_norm,
            peak_mib: if step.peak_bytes > 0 { step.peak_bytes as f64 / MIB } else { f64::NAN },
        });
        self.recent.push_back(*step);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }

    fn read_state(&mut self) -> Result<()> {
        if !self.directory.config_path().exists() {
            return Err(Error::input(format!("{} is gone", self.directory.path().display())));
        }
        let ended = self.directory.markers().ended();
        let mut notes = Vec::new();
        self.state = state(&self.directory, ended.as_ref(), SystemTime::now(), &mut notes);
        self.note = notes.pop();
        self.reason = ended.filter(|_| self.state != RunState::Running).and_then(|end| end.reason);
        let starts = starts::read(self.directory.path())?;
        self.starts = starts.len();
        self.hosts =
            starts.into_iter().rev().find_map(|start| start.job).map_or(vec![], |job| job.hosts);
        self.read_checkpoints()?;
        self.read_goodput()?;
        self.log = newest_log(&self.directory.logs_path()).unwrap_or_default();
        Ok(())
    }

    fn read_checkpoints(&mut self) -> Result<()> {
        let checkpoints = self.directory.checkpoints();
        let kept = checkpoints.steps()?.len();
        let latest = checkpoints.latest_step()?;
        let before = self.checkpoints.latest.filter(|(step, _)| latest == Some(*step));
        let size = |step| checkpoints.read_intact(step).ok().map(|found| found.bytes());
        let latest = latest.map(|step| before.unwrap_or_else(|| (step, size(step))));
        self.checkpoints = CheckpointList { kept, latest, best: checkpoints.best_step()? };
        Ok(())
    }

    /// The summary of a run that has ended has its goodput.
    fn read_goodput(&mut self) -> Result<()> {
        if self.state != RunState::Running {
            let summary = RunRecord::read(&self.directory.summary_path())?;
            self.goodput = summary.and_then(|summary| summary.goodput);
            return Ok(());
        }
        let is_due = self
            .goodput_at
            .is_none_or(|(at, took)| at.elapsed() >= GOODPUT_INTERVAL.max(took * GOODPUT_SHARE));
        if is_due && self.last().is_some() {
            let begun = Instant::now();
            let (run, metrics) = (self.directory.path(), self.directory.metrics_path());
            // The time since the last record counts as a part of the step under way.
            let now = self.last().map_or_else(telemetry::unix_time, |step| step.time);
            self.goodput = Goodput::measure(run, &metrics, now, Pauses::default())?;
            self.goodput_at = Some((begun, begun.elapsed()));
        }
        Ok(())
    }

    /// Returns the name of the run.
    pub fn name(&self) -> String {
        self.directory.name()
    }

    /// Returns the last recorded step.
    pub fn last(&self) -> Option<&Step> {
        self.recent.back()
    }

    /// Returns the median over the last steps.
    pub fn recent(&self, value: impl Fn(&Step) -> Option<f64>) -> Option<f64> {
        let values = self.recent.iter().filter_map(value).filter(|value| value.is_finite());
        median(values.collect())
    }

    /// Returns the shares of the last steps' time: compute, exposed communication, waits for data,
    /// optimizer.
    pub fn time_shares(&self) -> Option<[f64; 4]> {
        let parts = |step: &Step| {
            [step.compute_ms, step.comm_exposed_ms, step.loader_ms, step.optimizer_ms]
        };
        let mut sums = [0.0; 4];
        for step in &self.recent {
            sums.iter_mut().zip(parts(step)).for_each(|(sum, ms)| *sum += ms);
        }
        let all: f64 = sums.iter().sum();
        (all > 0.0).then(|| sums.map(|sum| sum / all))
    }

    /// Returns the seconds that the steps left take at the present rate.
    pub fn seconds_left(&self) -> Option<f64> {
        let last = self.last()?;
        let left = self.config.run.steps.saturating_sub(last.step);
        Some(self.recent(|step| Some(step.step_ms))? * 1e-3 * left as f64)
    }

    /// Returns the unit of the throughput.
    pub fn predictions(&self) -> &'static str {
        if self.config.model.kind == ModelKind::Layers { "samples" } else { "tokens" }
    }

    /// Returns a quantity by step. Steps without it are omitted.
    pub fn points(&self, quantity: Quantity) -> Vec<Point> {
        let value = |one: &Drawn| match quantity {
            Quantity::Loss => one.loss,
            Quantity::Throughput => one.per_second,
            Quantity::Mfu => one.mfu,
            Quantity::GradNorm => one.grad_norm,
            Quantity::Memory => one.peak_mib,
        };
        self.drawn
            .iter()
            .map(|one| (one.step, value(one)))
            .filter(|point| point.1.is_finite())
            .collect()
    }

    /// Returns the losses of evaluations: over validation data or, without any, over epochs of
    /// training.
    pub fn evaluated_losses(&self) -> Vec<Point> {
        let over = match self.evaluations.iter().any(|one| one.split == LossSplit::Validation) {
            true => LossSplit::Validation,
            false => LossSplit::Training,
        };
        let done = self.evaluations.iter();
        let done = done.filter(|one| one.split == over && one.status == EvaluationStatus::Done);
        let losses: BTreeMap<u64, f64> =
            done.filter_map(|one| Some((one.step, one.loss?))).collect();
        losses.into_iter().filter(|point| point.1.is_finite()).collect()
    }

    /// Returns the compute times of the ranks or workers; `None` if there are none.
    pub fn ranks(&self) -> Option<Ranks> {
        if !self.last_given.is_empty() {
            return Some(self.workers());
        }
        let times = self.last_times.as_ref()?;
        let name = |rank: usize| match self.hosts.get(rank) {
            Some(host) if self.hosts.len() == times.ranks() => format!("{rank} on {host}"),
            _ => rank.to_string(),
        };
        let mut slowest: Vec<(usize, f64)> = match &times.spread {
            Some(spread) => spread.slowest_ms.clone(),
            None => times.compute_ms.iter().copied().enumerate().collect(),
        };
        let per_virtual_rank = !times.virtual_ranks.is_empty();
        if per_virtual_rank {
            let count = |rank: usize| times.virtual_ranks.get(rank).copied().unwrap_or(0);
            slowest.retain(|(rank, _)| count(*rank) > 0);
            slowest.iter_mut().for_each(|(rank, ms)| *ms /= count(*rank) as f64);
        }
        let median_ms = match &times.spread {
            Some(spread) => spread.quantiles_ms[2],
            None => median(slowest.iter().map(|(_, ms)| *ms).collect())?,
        };
        slowest.sort_by(|a, b| b.1.total_cmp(&a.1));
        let slowest =
            slowest.into_iter().map(|(rank, ms)| RankTime { name: name(rank), ms }).collect();
        Some(Ranks {
            count: times.ranks(),
            median_ms,
            slowest,
            are_workers: false,
            per_virtual_rank,
        })
    }

    fn workers(&self) -> Ranks {
        let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        for given in &self.last_given {
            let (ms, count) = sums.entry(&given.worker).or_default();
            (*ms, *count) = (*ms + given.compute_ms, *count + 1.0);
        }
        let mut slowest: Vec<RankTime> = sums
            .into_iter()
            .map(|(name, (ms, count))| RankTime { name: name.into(), ms: ms / count })
            .collect();
        slowest.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        let median_ms = median(slowest.iter().map(|one| one.ms).collect()).unwrap_or(0.0);
        let count = slowest.len();
        Ranks { count, median_ms, slowest, are_workers: true, per_virtual_rank: false }
    }
}

const MIB: f64 = (1 << 20) as f64;

fn median(mut values: Vec<f64>) -> Option<f64> {
    // Of an even number the lower one, so that one of two ranks can be slow.
    let middle = values.len().saturating_sub(1) / 2;
    (!values.is_empty()).then(|| *values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

/// Returns the name of the log of rank 0 or of the coordinator that was written last (of another one
/// if they have none), and its last lines.
fn newest_log(logs: &Path) -> Option<(String, Vec<String>)> {
    let files = fs::read_dir(logs).ok()?.flatten().map(|entry| entry.path());
    let newest: PathBuf = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
        .max_by_key(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let leads = name.starts_with("rank-00000") || name.starts_with("coordinator");
            (leads, path.metadata().and_then(|file| file.modified()).ok(), path.clone())
        })?;
    let mut file = safe_open::open(&newest).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES))).ok()?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    // The first line may be incomplete.
    let lines = text.lines().skip(usize::from(length > LOG_BYTES));
    Some((newest.file_stem()?.to_string_lossy().into_owned(), lines.map(short_line).collect()))
}

/// Returns a line of a log with its time of day, its level if it is not the usual one, and its
/// message: without the date and the module, and without control characters.
fn short_line(line: &str) -> String {
    let shown = || {
        let (head, message) = line.strip_prefix('[')?.split_once("] ")?;
        let mut words = head.split_whitespace();
        let time = words.next()?.split_once('T')?.1.trim_end_matches('Z');
        let level = words.next().filter(|level| *level != "INFO");
        let level = level.map(|level| format!("{level} ")).unwrap_or_default();
        Some(format!("{time} {level}{message}"))
    };
    let text = shown().unwrap_or_else(|| line.to_owned());
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.toml"), Config::default().to_toml().unwrap()).unwrap();
        dir
    }

    fn append(path: &Path, record: &impl serde::Serialize) {
        use std::io::Write as _;
        let mut file = fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        writeln!(file, "{}", serde_json::to_string(record).unwrap()).unwrap();
    }

    #[test]
    fn a_start_from_an_earlier_step_replaces_the_steps_after_it() {
        let dir = run();
        let metrics = dir.path().join("metrics.jsonl");
        let mut view = RunView::open(dir.path()).unwrap();
        assert!(!view.refresh() && view.last().is_none() && view.state == RunState::Stale);
        let add = |step: u64, loss: f64| {
            append(&metrics, &Step { step, loss, step_ms: 10.0, ..Step::default() });
        };
        (1..=30).for_each(|step| add(step, step as f64));
        view.refresh();
        assert_eq!(view.points(Quantity::Loss).len(), 30);
        add(11, 0.5);
        add(12, f64::NAN);
        view.refresh();
        assert_eq!(view.points(Quantity::Loss).last(), Some(&(11, 0.5)));
        assert_eq!((view.points(Quantity::Loss).len(), view.last().unwrap().step), (11, 12));
        let left = (view.config.run.steps - 12) as f64 * 0.01;
        assert!((view.seconds_left().unwrap() - left).abs() < 1e-6);
        assert!(view.points(Quantity::Mfu).is_empty() && view.time_shares().is_none());
    }

    #[test]
    fn the_slowest_ranks_come_first() {
        let dir = run();
        let mut view = RunView::open(dir.path()).unwrap();
        append(&dir.path().join("rank_times.jsonl"), &RankTimes::new(20, 20, vec![3.0, 9.0, 4.0]));
        view.refresh();
        let ranks = view.ranks().unwrap();
        assert_eq!((ranks.count, ranks.median_ms, ranks.are_workers), (3, 4.0, false));
        assert_eq!(ranks.slowest[0], RankTime { name: "1".into(), ms: 9.0 });
        let many = (0..100).map(f64::from).collect();
        append(&dir.path().join("rank_times.jsonl"), &RankTimes::new(40, 20, many));
        view.refresh();
        let ranks = view.ranks().unwrap();
        assert_eq!((ranks.count, ranks.slowest[0].ms), (100, 99.0));
        // A rank is not slow because it has more virtual ranks, nor fast because it has none.
        let unequal = RankTimes::new(60, 20, vec![0.1, 12.0, 9.0]).with_virtual_ranks(&[0, 6, 3]);
        append(&dir.path().join("rank_times.jsonl"), &unequal);
        view.refresh();
        let ranks = view.ranks().unwrap();
        assert_eq!((ranks.count, ranks.median_ms, ranks.per_virtual_rank), (3, 2.0, true));
        assert_eq!(ranks.slowest[0], RankTime { name: "2".into(), ms: 3.0 });
    }

    #[test]
    fn a_run_that_disappears_is_noted() {
        let dir = run();
        let mut view = RunView::open(dir.path()).unwrap();
        view.refresh();
        assert_eq!(view.note, None);
        fs::remove_file(dir.path().join("config.toml")).unwrap();
        view.refresh();
        assert!(view.note.as_ref().unwrap().ends_with("is gone"), "{:?}", view.note);
    }

    #[test]
    fn lines_of_a_log_are_short() {
        assert_eq!(
            short_line("[2026-11-28T23:13:47Z INFO  hpctrain_train::run] saved\x1b[1m"),
            "23:13:47 saved [1m"
        );
        assert_eq!(short_line("[2026-11-28T23:13:47Z WARN  x] slow"), "23:13:47 WARN slow");
        assert_eq!(short_line("[half"), "[half");
    }
}
