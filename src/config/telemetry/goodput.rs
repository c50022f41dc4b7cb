//! Goodput: the part of the time since a run's first start that was spent on its result.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::long_lines::{FromEnd, parse_record};
use super::metrics::Step;
use super::starts::{self, Start, StartEnd};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// The goodput of a run over all its starts. All seconds but those of evaluations, which are useful,
/// add up to `seconds`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The number of starts.
    pub starts: u64,
    /// The seconds from the first start to the end, without pauses in which the run was finished.
    pub seconds: f64,
    /// The seconds of the steps that are in the result, without their waits for data, and of the
    /// evaluations.
    pub useful_seconds: f64,
    /// The seconds of the evaluations.
    pub evaluation_seconds: f64,
    /// The number of steps that were lost and taken again.
    pub steps_lost: u64,
    /// The seconds of the steps that were lost, with their evaluations and saves.
    pub seconds_lost: f64,
    /// The seconds from the last step of a start to the training of the next one.
    pub restart_seconds: f64,
    /// The seconds that the first start took until it trained, and the first one after the run was
    /// extended.
    pub startup_seconds: f64,
    /// The seconds for which saves blocked training.
    pub save_seconds: f64,
    /// The seconds for which steps waited for data.
    pub loader_seconds: f64,
    /// All other seconds: between steps, and at the end.
    pub other_seconds: f64,
    /// The useful seconds as a fraction of all.
    pub share: f64,
}

/// Pauses of training after the last record of a step, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pauses {
    /// Evaluations.
    pub eval_ms: f64,
    /// Saves.
    pub save_ms: f64,
}

impl Goodput {
    /// Measures the goodput of the run in directory `run` at time `now`, from its starts and the
    /// records at `metrics`; `last` are the pauses after the last record. Returns `None` if no start
    /// is recorded.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn measure(run: &Path, metrics: &Path, now: f64, last: Pauses) -> Result<Option<Self>> {
        let starts = starts::read(run)?;
        let mut sum = Sum { eval: last.eval_ms, save: last.save_ms, ..Sum::default() };
        // A later start may have gone on from an older checkpoint than the first recorded one.
        sum.add_after(metrics, starts.iter().map(|start| start.step).min().unwrap_or(0))?;
        Ok(Self::from_starts(&starts, sum, now))
    }

    fn from_starts(starts: &[Start], sum: Sum, now: f64) -> Option<Self> {
        let first = starts.first()?;
        let mut seconds = now - first.time + first.startup_seconds;
        let mut startup_seconds = first.startup_seconds;
        let mut restart_seconds = 0.0;
        let mut steps_lost = 0;
        let mut seconds_lost = 0.0;
        for start in starts {
            let Some(previous) = start.previous else { continue };
            let gap = (start.time - previous.time).max(0.0);
            if previous.end == StartEnd::Finished {
                seconds -= (gap - start.startup_seconds).max(0.0);
                startup_seconds += gap.min(start.startup_seconds);
            } else {
                restart_seconds += gap;
            }
            steps_lost += previous.steps_lost;
            seconds_lost += previous.seconds_lost;
        }
        let [steps, loader_seconds, evaluation_seconds, save_seconds] =
            [sum.steps, sum.loader, sum.eval, sum.save].map(|ms| ms * 1e-3);
        let useful_seconds = steps - loader_seconds + evaluation_seconds;
        let lost = seconds_lost + restart_seconds + startup_seconds + save_seconds + loader_seconds;
        Some(Self {
            starts: starts.len() as u64,
            seconds,
            useful_seconds,
            evaluation_seconds,
            steps_lost,
            seconds_lost,
            restart_seconds,
            startup_seconds,
            save_seconds,
            loader_seconds,
            other_seconds: (seconds - useful_seconds - lost).max(0.0),
            share: useful_seconds / seconds,
        })
    }

    /// Returns true if the share is below 100 %, to a tenth of a percent.
    pub fn shows_a_loss(&self) -> bool {
        self.share < 0.9995
    }

    /// Adds what a supervisor has seen: the number of its starts, and the seconds before the process
    /// of the first start and after the end of the last one.
    #[must_use]
    pub fn supervised(self, starts: u64, before: f64, after: f64) -> Self {
        let seconds = self.seconds + before + after;
        Self {
            starts: self.starts.max(starts),
            seconds,
            startup_seconds: self.startup_seconds + before,
            other_seconds: self.other_seconds + after,
            share: self.useful_seconds / seconds,
            ..self
        }
    }
}

impl fmt::Display for Goodput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} % of {:.1} s", 100.0 * self.share, self.seconds)?;
        let causes = [
            ("start-up", self.startup_seconds),
            ("restarts", self.restart_seconds),
            ("saves", self.save_seconds),
            ("waits for data", self.loader_seconds),
            ("other", self.other_seconds),
        ];
        if self.steps_lost > 0 {
            let plural = if self.steps_lost == 1 { "" } else { "s" };
            let steps = self.steps_lost;
            write!(f, ", {steps} step{plural} taken again {:.1} s", self.seconds_lost)?;
        }
        let causes = causes.into_iter().filter(|(_, seconds)| *seconds >= 0.05);
        causes.into_iter().try_for_each(|(cause, seconds)| write!(f, ", {cause} {seconds:.1} s"))
    }
}

/// Sums over the records of steps, in milliseconds.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    steps: f64,
    loader: f64,
    eval: f64,
    save: f64,
}

impl Sum {
    /// Adds the records of the steps after `began`: an older version, which did not record its
    /// starts, may have taken the others.
    fn add_after(&mut self, metrics: &Path, began: u64) -> Result<()> {
        let unread = |e| Error::io("read", metrics, e);
        let file = match safe_open::open(metrics) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(unread(e)),
        };
        let mut lines = FromEnd::new(file).map_err(unread)?;
        while let Some(line) = lines.previous().map_err(unread)? {
            // Lines may be cut short or damaged.
            let Some(step) = parse_record::<Step>(line.text) else { continue };
            if step.step <= began {
                break;
            }
            self.steps += step.step_ms;
            self.loader += step.loader_ms;
            self.eval += step.eval_ms.unwrap_or(0.0);
            self.save += step.save_ms.unwrap_or(0.0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::starts::PreviousStart;

    fn start(number: u64, time: f64, previous: Option<PreviousStart>) -> Start {
        Start { start: number, time, startup_seconds: 2.0, step: 0, previous, job: None }
    }

    fn previous(end: StartEnd, time: f64, steps_lost: u64, seconds_lost: f64) -> PreviousStart {
        PreviousStart { end, time, step: 0, steps_lost, seconds_lost }
    }

    const SUM: Sum = Sum { steps: 50e3, loader: 4e3, eval: 3e3, save: 1e3 };

    #[test]
    fn the_causes_add_up_to_the_time_since_the_first_start() {
        assert_eq!(Goodput::from_starts(&[], SUM, 7.0), None);
        let alone = Goodput::from_starts(&[start(1, 100.0, None)], SUM, 160.0).unwrap();
        assert_eq!((alone.starts, alone.seconds, alone.useful_seconds), (1, 62.0, 49.0));
        assert_eq!((alone.steps_lost, alone.seconds_lost, alone.restart_seconds), (0, 0.0, 0.0));
        assert_eq!(
            (alone.startup_seconds, alone.save_seconds, alone.other_seconds),
            (2.0, 1.0, 6.0)
        );
        assert_eq!(alone.share, 49.0 / 62.0);

        let killed = [
            start(1, 100.0, None),
            start(2, 130.0, Some(previous(StartEnd::Killed, 120.0, 3, 5.0))),
            start(3, 150.0, Some(previous(StartEnd::Preempted, 149.0, 0, 0.0))),
        ];
        let found = Goodput::from_starts(&killed, SUM, 180.0).unwrap();
        assert_eq!((found.starts, found.seconds, found.restart_seconds), (3, 82.0, 11.0));
        assert_eq!((found.steps_lost, found.seconds_lost), (3, 5.0));
        let parts = found.useful_seconds + found.seconds_lost + found.restart_seconds;
        let rest = found.startup_seconds + found.save_seconds + found.loader_seconds;
        assert_eq!(parts + rest + found.other_seconds, found.seconds);
        assert_eq!(
            found.to_string(),
            "59.8 % of 82.0 s, 3 steps taken again 5.0 s, start-up 2.0 s, restarts 11.0 s, saves 1.0 s, \
             waits for data 4.0 s, other 10.0 s"
        );
    }

    #[test]
    fn the_pause_before_a_finished_run_was_extended_does_not_count() {
        let starts = [
            start(1, 100.0, None),
            start(2, 1000.0, Some(previous(StartEnd::Finished, 130.0, 0, 0.0))),
        ];
        let found = Goodput::from_starts(&starts, SUM, 1030.0).unwrap();
        assert_eq!((found.seconds, found.startup_seconds, found.restart_seconds), (64.0, 4.0, 0.0));
    }

    #[test]
    fn a_supervisor_adds_the_time_around_the_starts() {
        let alone = Goodput::from_starts(&[start(1, 100.0, None)], SUM, 160.0).unwrap();
        let seen = alone.supervised(3, 3.0, 2.0);
        assert_eq!((seen.starts, seen.seconds, seen.startup_seconds), (3, 67.0, 5.0));
        assert_eq!((seen.other_seconds, seen.share), (8.0, 49.0 / 67.0));
    }

    #[test]
    fn records_of_steps_are_added_up() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = dir.path().join("metrics.jsonl");
        let last = Pauses { eval_ms: 250.0, save_ms: 125.0 };
        assert_eq!(Goodput::measure(dir.path(), &metrics, 0.0, last).unwrap(), None);
        let first = starts::record(dir.path(), &metrics, 4, 2.0, StartEnd::Killed, None).unwrap();
        let began = first[0].time;
        let step = |step, save_ms| Step {
            step,
            step_ms: 1000.0,
            loader_ms: 500.0,
            eval_ms: Some(250.0),
            save_ms,
            ..Step::default()
        };
        // Step 4 is of an older version.
        let lines = [step(4, None), step(5, None), step(6, Some(375.0))];
        let text: String =
            lines.iter().map(|step| serde_json::to_string(step).unwrap() + "\n").collect();
        std::fs::write(&metrics, text).unwrap();
        let found = Goodput::measure(dir.path(), &metrics, began + 6.0, last).unwrap().unwrap();
        assert_eq!((found.seconds, found.useful_seconds), (8.0, 1.75));
        assert_eq!((found.evaluation_seconds, found.save_seconds), (0.75, 0.5));
        assert_eq!((found.loader_seconds, found.other_seconds), (1.0, 2.75));
        // The next start takes step 4 again.
        starts::record(dir.path(), &metrics, 3, 2.0, StartEnd::Killed, None).unwrap();
        let found = Goodput::measure(dir.path(), &metrics, began + 6.0, last).unwrap().unwrap();
        assert_eq!((found.useful_seconds, found.evaluation_seconds), (2.5, 1.0));
    }
}
