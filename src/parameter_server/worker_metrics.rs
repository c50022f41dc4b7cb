//! Metrics of a run's workers: `workers.jsonl`, warnings about stragglers, and totals for the run
//! summary.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::protocol::WorkerTimes;
use super::scheduler::Contribution;
use hpctrain_base::error::Result;
use hpctrain_config::Log;
use hpctrain_config::telemetry::json_lines::JsonLines;
use hpctrain_config::telemetry::straggler::slow;
use hpctrain_config::telemetry::times::Times;
use hpctrain_config::telemetry::unix_time;
use hpctrain_config::telemetry::worker_records::WorkerRecord;

/// The work of a worker in a window of steps.
#[derive(Default)]
struct Window {
    compute: f64,
    shares: usize,
}

/// The metrics of all workers of a session.
pub struct WorkerMetrics {
    file: JsonLines,
    factor: f64,
    window: u64,
    /// The number of samples of a share.
    samples: u64,
    /// The number of predictions of a share.
    predictions: u64,
    /// The number of steps in the current window.
    steps: u64,
    /// The work of each worker in the current window.
    of_workers: BTreeMap<String, Window>,
    step_ms: Vec<f64>,
    skipped: u64,
    /// The total times of all workers.
    seconds: WorkerTimes,
    /// The host of each worker that has pushed a gradient.
    hosts: Vec<String>,
    workers: Vec<String>,
}

impl WorkerMetrics {
    /// Opens the file `path` for a run at `step`. A share of the work has `samples` samples and
    /// `predictions` predictions.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn open(path: &Path, step: u64, log: &Log, samples: u64, predictions: u64) -> Result<Self> {
        Ok(Self {
            file: JsonLines::open(path, step)?,
            factor: log.straggler_factor,
            window: log.straggler_window,
            samples,
            predictions,
            steps: 0,
            of_workers: BTreeMap::new(),
            step_ms: Vec::new(),
            skipped: 0,
            seconds: WorkerTimes::default(),
            hosts: Vec::new(),
            workers: Vec::new(),
        })
    }

    /// Records a step with the contributions of its workers, and logs warnings about stragglers at
    /// the end of a window.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn step(
        &mut self,
        step: u64,
        took: Duration,
        skipped: bool,
        of_step: &[Contribution],
    ) -> Result<()> {
        let mut written = Ok(());
        self.step_ms.push(took.as_secs_f64() * 1e3);
        self.skipped += u64::from(skipped);
        for Contribution { place, shares, loss, staleness, seconds } in of_step {
            let WorkerTimes { compute, loader, pull, push } = *seconds;
            // In synchronous training the loss is a sum over predictions, otherwise a mean.
            let predictions =
                if self.predictions == 0 { 1 } else { *shares as u64 * self.predictions };
            let line = self.file.write(&WorkerRecord {
                step,
                worker: place.clone(),
                samples: *shares as u64 * self.samples,
                loss: loss / predictions as f64,
                staleness: *staleness,
                compute_ms: compute * 1e3,
                loader_ms: loader * 1e3,
                pull_ms: pull * 1e3,
                push_ms: push * 1e3,
                time: unix_time(),
            });
            // A line that could not be written is kept and written later.
            written = written.and(line);
            self.seconds += *seconds;
            if !self.workers.contains(place) {
                self.workers.push(place.clone());
                self.hosts
                    .push(place.rsplit_once(':').map_or(place.as_str(), |(host, _)| host).into());
            }
            let worker = self.of_workers.entry(place.clone()).or_default();
            worker.compute += compute;
            worker.shares += shares;
        }
        self.steps += 1;
        if self.steps == self.window {
            for warning in self.slow_workers() {
                log::warn!("{warning}");
            }
            (self.steps, self.of_workers) = (0, BTreeMap::new());
        }
        written
    }

    /// Writes the lines that could not be written before.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        self.file.flush()
    }

    /// Reopens the file. Only the process that owns the run may call this.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn reopen(&mut self) -> Result<()> {
        self.file.reopen()
    }

    /// Returns a warning for each straggler in the window.
    fn slow_workers(&self) -> Vec<String> {
        let shares: usize = self.of_workers.values().map(|worker| worker.shares).sum();
        // Times are scaled to the mean number of shares, since workers compute different numbers.
        let mean_shares = shares as f64 / self.of_workers.len().max(1) as f64;
        let seconds: Vec<f64> = self
            .of_workers
            .values()
            .map(|worker| worker.compute / worker.shares.max(1) as f64 * mean_shares)
            .collect();
        let places: Vec<&String> = self.of_workers.keys().collect();
        let warnings = slow(&seconds, self.factor, self.window).into_iter().map(|(worker, times)| {
            format!(
                "worker {} computes {times:.1} times as long as the median worker over the last {} steps",
                places[worker], self.window
            )
        });
        warnings.collect()
    }

    /// Returns the number of steps whose update was skipped.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Returns the median step time in milliseconds, or none without steps.
    pub fn median_ms(&self) -> Option<f64> {
        let mut step_ms = self.step_ms.clone();
        step_ms.sort_by(f64::total_cmp);
        step_ms.get(step_ms.len() / 2).copied()
    }

    /// Returns the mean times of a worker in seconds.
    pub fn times(&self) -> Times {
        let WorkerTimes { compute, loader, pull, push } = self.seconds;
        let sum = Times { compute, loader, comm_exposed: pull + push, ..Times::default() };
        sum / self.workers.len().max(1) as f64
    }

    /// Returns the host of each worker that has pushed a gradient.
    pub fn hosts(&self) -> Vec<String> {
        self.hosts.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contribution(place: &str, shares: usize, compute: f64) -> Contribution {
        let seconds = WorkerTimes { compute, loader: 0.25, pull: 0.5, push: 0.125 };
        Contribution {
            place: place.into(),
            shares,
            loss: 8.0 * shares as f64,
            staleness: Some(3),
            seconds,
        }
    }

    #[test]
    fn workers_are_recorded_and_stragglers_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("workers.jsonl");
        let log = Log { straggler_factor: 1.5, straggler_window: 2, ..Log::default() };
        let mut tally = WorkerMetrics::open(&path, 0, &log, 4, 16).unwrap();
        let step =
            [contribution("a:1", 2, 0.2), contribution("b:2", 1, 0.2), contribution("b:3", 1, 0.1)];
        tally.step(1, Duration::from_millis(300), false, &step).unwrap();
        // Worker a:1 computes twice as many shares in the same time and is not a straggler.
        let expected =
            "worker b:2 computes 2.0 times as long as the median worker over the last 2 steps";
        assert_eq!(tally.slow_workers(), [expected]);
        tally.step(2, Duration::from_millis(100), true, &step[..1]).unwrap();
        assert_eq!(tally.slow_workers(), Vec::<String>::new(), "a window is over");
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 4);
        let first = &lines[0];
        assert_eq!((first["step"].as_u64(), first["worker"].as_str()), (Some(1), Some("a:1")));
        assert_eq!((first["samples"].as_u64(), first["loss"].as_f64()), (Some(8), Some(0.5)));
        assert_eq!(
            (first["pull_ms"].as_f64(), first["staleness"].as_u64()),
            (Some(500.0), Some(3))
        );
        assert_eq!((tally.skipped(), tally.median_ms()), (1, Some(300.0)));
        assert_eq!(tally.hosts(), ["a", "b", "b"]);
        let times = tally.times();
        assert!((times.comm_exposed - 4.0 * 0.625 / 3.0).abs() < 1e-12, "{times:?}");
        // A run that resumes at step 1 writes the second step again.
        drop(WorkerMetrics::open(&path, 1, &log, 4, 16).unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
    }
}
