//! Records of a supervised run: `restarts.jsonl`, and the goodput in `run.json`.

use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::run_dir::RunDirectory;
use crate::safe_open;
use crate::telemetry::long_lines::{FromEnd, parse_record};
use crate::telemetry::restarts::{self, Restart};
use crate::telemetry::run_record::RunRecord;
use crate::telemetry::{short_lines, starts, unix_time};

/// Records the starts of a job.
#[derive(Default)]
pub struct RestartLog {
    /// Starts that could not be recorded yet.
    waiting: Vec<Restart>,
}

impl RestartLog {
    /// Returns the step of the run's newest checkpoint, if there is one.
    pub fn checkpoint(&self, run: Option<&Path>) -> Option<u64> {
        // Checkpoints that cannot be listed do not count.
        let steps = RunDirectory::at(run?).checkpoints().steps();
        steps
            .inspect_err(|e| log::warn!("{}: counted as no checkpoint", e.message()))
            .ok()?
            .into_iter()
            .next_back()
    }

    /// Returns the step that shows whether a start has gained anything: that of the run's newest
    /// checkpoint or, if it takes in-memory checkpoints, from which the next start continues, that
    /// of its last record of an update. Steps whose update was skipped gain nothing.
    pub fn reached(&self, run: Option<&Path>) -> Option<u64> {
        let directory = RunDirectory::at(run?);
        let in_memory = directory.takes_memory_checkpoints().unwrap_or(false);
        let recorded = in_memory.then(|| last_update(&directory.metrics_path()));
        let recorded = recorded.transpose().unwrap_or_else(|e| {
            log::warn!("{}; counted as no progress", e.message());
            None
        });
        self.checkpoint(run).max(recorded.flatten())
    }

    /// Records a start that has ended as a line of `restarts.jsonl`.
    ///
    /// # Errors
    /// Returns an error if the line cannot be written. It is written with the next one.
    pub fn add(&mut self, run: Option<&Path>, restart: Restart) -> Result<()> {
        let checkpoint = self.checkpoint(run);
        let (steps_lost, seconds_lost) =
            match run.map(|run| steps_after(run, checkpoint.unwrap_or(0))) {
                Some(lost) => lost.unwrap_or_else(|e| {
                    log::warn!("{}; the steps lost by this start are not recorded", e.message());
                    (0, 0.0)
                }),
                None => (0, 0.0),
            };
        self.waiting.push(Restart { checkpoint, steps_lost, seconds_lost, ..restart });
        let Some(run) = run else { return Ok(()) };
        while let Some(restart) = self.waiting.first() {
            let start = restarts::read_run(run)?.len() as u64 + 1;
            short_lines::append(&run.join(restarts::FILE), &Restart { start, ..restart.clone() })?;
            self.waiting.remove(0);
        }
        Ok(())
    }
}

/// Adds to the goodput in the run's summary the time before the first start and after the last one,
/// if the last start has written the summary.
///
/// # Errors
/// Returns an error if a file cannot be read or written.
pub fn record_goodput(run: &Path) -> Result<()> {
    let path = RunDirectory::at(run).summary_path();
    let Some(mut summary) = RunRecord::read(&path)? else { return Ok(()) };
    let Some(goodput) = summary.goodput else { return Ok(()) };
    let restarts = restarts::read_run(run)?;
    let starts = starts::read(run)?;
    let (Some(first), Some(last), Some(trained)) =
        (restarts.first(), restarts.last(), starts.first())
    else {
        return Ok(());
    };
    if summary.time < last.time {
        return Ok(());
    }
    let before = (trained.time - trained.startup_seconds - first.time).max(0.0);
    let after = (unix_time() - summary.time).max(0.0);
    summary.goodput = Some(goodput.supervised(restarts.len() as u64, before, after));
    summary.write(&path)
}

/// The fields of a step's record that are needed here.
#[derive(Deserialize)]
struct StepTime {
    step: u64,
    step_ms: f64,
}

/// The fields that show whether a step has gained anything.
#[derive(Deserialize)]
struct StepUpdate {
    step: u64,
    #[serde(default)]
    skipped: bool,
}

/// Returns the last step of `metrics.jsonl` whose update was not skipped, if there is one.
fn last_update(path: &Path) -> Result<Option<u64>> {
    let unread = |e| Error::io("read", path, e);
    let file = match safe_open::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(unread(e)),
    };
    let mut lines = FromEnd::new(file).map_err(unread)?;
    while let Some(line) = lines.previous().map_err(unread)? {
        if let Some(StepUpdate { step, skipped: false }) = parse_record(line.text) {
            return Ok(Some(step));
        }
    }
    Ok(None)
}

/// Returns the number of recorded steps after step `checkpoint`, and their seconds, from the last
/// lines of `metrics.jsonl`.
fn steps_after(run: &Path, checkpoint: u64) -> Result<(u64, f64)> {
    let path = RunDirectory::at(run).metrics_path();
    let unread = |e| Error::io("read", &path, e);
    let file = match safe_open::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok((0, 0.0)),
        Err(e) => return Err(unread(e)),
    };
    let mut lines = FromEnd::new(file).map_err(unread)?;
    let mut steps = 0;
    let mut seconds = 0.0;
    while let Some(line) = lines.previous().map_err(unread)? {
        match parse_record(line.text) {
            Some(StepTime { step, .. }) if step <= checkpoint => break,
            Some(StepTime { step_ms, .. }) => {
                steps += 1;
                seconds += step_ms * 1e-3;
            }
            // The line is cut short or damaged.
            None => {}
        }
    }
    Ok((steps, seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::Step;

    #[test]
    fn recorded_steps_count_if_they_may_be_in_memory() {
        let run = tempfile::tempdir().unwrap();
        let records = RestartLog::default();
        assert_eq!(records.reached(None), None);
        std::fs::write(run.path().join("metrics.jsonl"), "{\"step\":7}\n{\"st").unwrap();
        assert_eq!(records.reached(Some(run.path())), None);
        std::fs::write(run.path().join("memory_checkpoint.id"), "id\n").unwrap();
        assert_eq!(records.reached(Some(run.path())), Some(7));
        // Skipped steps gain nothing.
        let skipped = "{\"step\":7}\n{\"step\":8,\"skipped\":true}\n";
        std::fs::write(run.path().join("metrics.jsonl"), skipped).unwrap();
        assert_eq!(records.reached(Some(run.path())), Some(7));
        std::fs::remove_file(run.path().join("metrics.jsonl")).unwrap();
        assert_eq!(records.reached(Some(run.path())), None);
    }

    #[test]
    fn lost_steps_are_those_after_the_checkpoint() {
        let run = tempfile::tempdir().unwrap();
        let lines: Vec<String> = (1..=7)
            .map(|step| Step { step, step_ms: 500.0, ..Step::default() })
            .map(|step| serde_json::to_string(&step).unwrap())
            .collect();
        std::fs::write(run.path().join("metrics.jsonl"), lines.join("\n") + "\n{\"torn").unwrap();
        let mut records = RestartLog::default();
        // The first start died before it had a directory.
        records.add(None, Restart { reason: "a".into(), ..Restart::default() }).unwrap();
        records
            .add(Some(run.path()), Restart { reason: "b".into(), ..Restart::default() })
            .unwrap();
        let text = std::fs::read_to_string(run.path().join("restarts.jsonl")).unwrap();
        let restarts: Vec<Restart> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            restarts.iter().map(|one| (one.start, one.steps_lost)).collect::<Vec<_>>(),
            [(1, 0), (2, 7)]
        );
        assert_eq!((restarts[1].seconds_lost, restarts[1].checkpoint), (3.5, None));
    }
}
