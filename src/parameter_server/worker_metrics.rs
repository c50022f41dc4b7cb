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
    /// The number of steps in total.
    all_steps: u64,
    /// The time of the first step, which includes the start of the workers.
    first_step: Duration,
    /// The time from the record of the first step to that of the last one, without evaluations.
    later_steps: Duration,
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
            all_steps: 0,
            first_step: Duration::ZERO,
            later_steps: Duration::ZERO,
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
        if self.all_steps == 0 {
            self.first_step = took;
        } else {
            self.later_steps += took;
        }
        self.all_steps += 1;
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

    /// Returns the mean time between two steps, or the time of the only one; none without steps. It
    /// is not the median, because asynchronous steps end in bursts.
    pub fn mean_step_time(&self) -> Option<Duration> {
        match self.all_steps {
            0 => None,
            1 => Some(self.first_step),
            steps => Some(self.later_steps.div_f64((steps - 1) as f64)),
        }
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
        assert_eq!(
            (tally.skipped(), tally.mean_step_time()),
            (1, Some(Duration::from_millis(100)))
        );
        assert_eq!(tally.hosts(), ["a", "b", "b"]);
        let times = tally.times();
        assert!((times.comm_exposed - 4.0 * 0.625 / 3.0).abs() < 1e-12, "{times:?}");
        // A run that resumes at step 1 writes the second step again.
        drop(WorkerMetrics::open(&path, 1, &log, 4, 16).unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
    }

    #[test]
    fn the_rate_is_that_of_the_clock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("workers.jsonl");
        let mut tally = WorkerMetrics::open(&path, 0, &Log::default(), 4, 0).unwrap();
        assert_eq!(tally.mean_step_time(), None);
        // The first step waits for the workers, and the others end in pairs.
        let times = [2000, 99, 1, 99, 1, 1].map(Duration::from_millis);
        for (step, took) in (1..).zip(times) {
            tally.step(step, took, false, &[]).unwrap();
            if step == 1 {
                assert_eq!(tally.mean_step_time(), Some(Duration::from_secs(2)));
            }
        }
        // 201 ms for five steps; the median is 1 or 99 ms.
        assert_eq!(tally.mean_step_time(), Some(Duration::from_micros(40_200)));
    }
}
