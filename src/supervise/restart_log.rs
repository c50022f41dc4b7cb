//! The records of a supervised run: `restarts.jsonl`, and its goodput in `run.json`.

use std::io::{ErrorKind, Write as _};
use std::path::Path;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::own_files;
use crate::run_dir::RunDirectory;
use crate::safe_open;
use crate::telemetry::long_lines::{FromEnd, record};
use crate::telemetry::restarts::{self, Restart};
use crate::telemetry::run_card::{Goodput, RunCard};
use crate::telemetry::unix_time;

/// The starts so far.
#[derive(Default)]
pub struct RestartLog {
    /// Starts that are not on record yet.
    waiting: Vec<Restart>,
}

impl RestartLog {
    /// The step of the run's newest checkpoint; none without one.
    pub fn checkpoint(&self, run: Option<&Path>) -> Option<u64> {
        // Checkpoints that cannot be listed are not gained.
        let steps = RunDirectory::at(run?).checkpoints().steps();
        steps
            .inspect_err(|e| log::warn!("{}: counted as no checkpoint", e.message()))
            .ok()?
            .into_iter()
            .next_back()
    }

    /// Adds a start that has ended, as a line of `restarts.jsonl`.
    ///
    /// # Errors
    /// The file system refused. The line is written with the next one.
    pub fn add(&mut self, run: Option<&Path>, restart: Restart) -> Result<()> {
        let checkpoint = self.checkpoint(run);
        let (steps_lost, seconds_lost) =
            match run.map(|run| taken_after(run, checkpoint.unwrap_or(0))) {
                Some(lost) => lost.unwrap_or_else(|e| {
                    log::warn!("{}; the steps lost by this start are not on record", e.message());
                    (0, 0.0)
                }),
                None => (0, 0.0),
            };
        self.waiting.push(Restart { checkpoint, steps_lost, seconds_lost, ..restart });
        let Some(run) = run else { return Ok(()) };
        let path = run.join(restarts::FILE);
        let refused = |e| Error::io("write", &path, e);
        let mut file = own_files::append(&path).map_err(refused)?;
        while let Some(restart) = self.waiting.first() {
            let before = std::fs::read(&path).map_err(refused)?;
            let start = restarts::in_lines(&before).len() as u64 + 1;
            let line = serde_json::to_string(&Restart { start, ..restart.clone() });
            let mut line = line.map_err(|e| Error::internal(format!("restarts: {e}")))? + "\n";
            // A line that was torn must not take this one with it.
            if before.last().is_some_and(|byte| *byte != b'\n') {
                line.insert(0, '\n');
            }
            file.write_all(line.as_bytes()).map_err(refused)?;
            self.waiting.remove(0);
        }
        Ok(())
    }
}

/// Adds the sums over all starts on record to the run's card, if it has one.
///
/// # Errors
/// The file system refused.
pub fn sum_up(run: &Path) -> Result<()> {
    let path = RunDirectory::at(run).card_path();
    let Some(mut card) = RunCard::read(&path)? else { return Ok(()) };
    let restarts = restarts::of_run(run).unwrap_or_default();
    let Some(first) = restarts.first() else { return Ok(()) };
    let (_, useful_seconds) = taken_after(run, 0)?;
    let seconds = unix_time() - first.time;
    card.goodput = Some(Goodput {
        starts: restarts.len() as u64,
        seconds,
        useful_seconds,
        steps_lost: restarts.iter().map(|restart| restart.steps_lost).sum(),
        seconds_lost: restarts.iter().map(|restart| restart.seconds_lost).sum(),
        share: useful_seconds / seconds,
    });
    card.write(&path)
}

/// The part of a step's record that counts here.
#[derive(Deserialize)]
struct Taken {
    step: u64,
    step_ms: f64,
}

/// The steps on record after step `checkpoint`, and their seconds: the last lines of the records,
/// one at a time.
fn taken_after(run: &Path, checkpoint: u64) -> Result<(u64, f64)> {
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
        match record(line.text) {
            Some(Taken { step, .. }) if step <= checkpoint => break,
            Some(Taken { step_ms, .. }) => {
                steps += 1;
                seconds += step_ms * 1e-3;
            }
            // Torn or damaged.
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
    fn lost_steps_are_those_after_the_checkpoint() {
        let run = tempfile::tempdir().unwrap();
        let step = |step: u64| Step { step, step_ms: 500.0, ..Step::default() };
        let lines: Vec<String> =
            (1..=7).map(|n| serde_json::to_string(&step(n)).unwrap()).collect();
        std::fs::write(run.path().join("metrics.jsonl"), lines.join("\n") + "\n{\"torn").unwrap();
        let mut account = RestartLog::default();
        // The first start died before it had a directory.
        account.add(None, Restart { why: "a".into(), ..Restart::default() }).unwrap();
        account.add(Some(run.path()), Restart { why: "b".into(), ..Restart::default() }).unwrap();
        let text = std::fs::read_to_string(run.path().join("restarts.jsonl")).unwrap();
        let told: Vec<Restart> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            told.iter().map(|one| (one.start, one.steps_lost)).collect::<Vec<_>>(),
            [(1, 0), (2, 7)]
        );
        assert_eq!((told[1].seconds_lost, told[1].checkpoint), (3.5, None));
    }
}
