//! `starts.jsonl`: one JSON object per start of a run, written when it begins to train.
//!
//! A start removes the records of the steps that it takes again. Before that it notes here how many
//! there were and how long they took, so that the cost of failures stays known.

use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::long_lines::{FromEnd, parse_record};
use super::metrics::Step;
use super::short_lines;
use crate::Config;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;
use hpctrain_data::{ExcludedSummary, Fingerprint};

/// The name of the file in a run's directory.
pub const FILE: &str = "starts.jsonl";

/// How a start ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartEnd {
    /// The run was finished, and was then extended.
    Finished,
    /// It saved a checkpoint and ended as it was asked to.
    Preempted,
    /// It ended with an error.
    Failed,
    /// It ended without a record of its end.
    Killed,
}

impl StartEnd {
    /// Returns true if the start ended by a failure.
    pub fn is_failure(self) -> bool {
        matches!(self, Self::Failed | Self::Killed)
    }
}

/// The start before another one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PreviousStart {
    /// How it ended.
    pub end: StartEnd,
    /// The time of its last record, in seconds since 1970.
    pub time: f64,
    /// The last step that it recorded.
    pub step: u64,
    /// The number of its steps that are taken again.
    pub steps_lost: u64,
    /// The seconds of those steps, with their evaluations and saves.
    pub seconds_lost: f64,
}

/// The job of a start: its training, and its hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedJob {
    /// The version of the program.
    pub hpctrain: String,
    /// The host of each rank; empty if workers of parameter servers computed the gradients.
    pub hosts: Vec<String>,
    /// The position in the training data before its first step.
    pub position: u64,
    /// The samples that it does not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excluded: Option<ExcludedSummary>,
    /// The digest of its training data, if known ([`Fingerprint::digest`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// Its resolved configuration, as TOML.
    pub config: String,
}

impl StartedJob {
    /// Returns the job of this program with a resolved configuration.
    ///
    /// # Errors
    /// Returns an error if the configuration cannot be serialized.
    pub fn new(
        config: &Config,
        hosts: Vec<String>,
        position: u64,
        excluded: Option<ExcludedSummary>,
        data: Option<&Fingerprint>,
    ) -> Result<Self> {
        let hpctrain = env!("CARGO_PKG_VERSION").to_owned();
        let data = data.map(Fingerprint::digest);
        Ok(Self { hpctrain, hosts, position, excluded, data, config: config.to_toml()? })
    }

    /// Refuses other training data than that of the start, if that is recorded.
    ///
    /// # Errors
    /// Returns an error if the data has another digest.
    pub fn check_data(&self, now: &Fingerprint) -> Result<()> {
        let now = now.digest();
        match &self.data {
            Some(digest) if *digest != now => Err(Error::input(format!(
                "the data of the run has changed: its digest is {now}, in {FILE} it is {digest}"
            ))
            .hint("give the data that it was trained on: --data PATH")),
            _ => Ok(()),
        }
    }

    /// Returns the resolved configuration.
    ///
    /// # Errors
    /// Returns an error if this version cannot read it.
    pub fn configuration(&self) -> Result<Config> {
        self.config.parse::<Config>().map_err(|e| {
            Error::input(format!("{FILE}: the configuration of a start: {}", e.message()))
                .hint(format!("use hpctrain {}, which wrote it", self.hpctrain))
        })
    }
}

/// A start of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// The number of the start, from 1.
    pub start: u64,
    /// The time at which it begins to train, in seconds since 1970.
    pub time: f64,
    /// The seconds that its process took until then.
    pub startup_seconds: f64,
    /// The number of finished steps from which it goes on.
    pub step: u64,
    /// The start before it; absent in the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<PreviousStart>,
    /// Its job; absent in records of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<StartedJob>,
}

impl Start {
    /// Returns the last of these starts that went on from before `step`: the one that took the step,
    /// or would take it.
    pub fn of_step(starts: &[Self], step: u64) -> Option<&Self> {
        starts.iter().rev().find(|start| start.step < step)
    }
}

/// Reads the starts of the run in directory `run`; lines that cannot be read are skipped.
///
/// # Errors
/// Returns an error if the file is there and cannot be read.
pub fn read(run: &Path) -> Result<Vec<Start>> {
    short_lines::read(&run.join(FILE))
}

/// Records a start that goes on from `step` and whose process has run for `startup_seconds`, before
/// later records at `metrics` are removed. `end` is how the start before ended, `job` the job of this
/// one. Returns all starts.
///
/// # Errors
/// Returns an error if a file cannot be read or written.
pub fn record(
    run: &Path,
    metrics: &Path,
    step: u64,
    startup_seconds: f64,
    end: StartEnd,
    job: Option<StartedJob>,
) -> Result<Vec<Start>> {
    let mut starts = read(run)?;
    let time = super::unix_time();
    let previous = starts.last().map(|before| previous(before, metrics, step, end)).transpose()?;
    let start = starts.last().map_or(1, |before| before.start + 1);
    let this = Start { start, time, startup_seconds, step, previous, job };
    short_lines::append(&run.join(FILE), &this)?;
    starts.push(this);
    Ok(starts)
}

/// Returns the end of the start `before`, whose steps after `step` are lost.
fn previous(before: &Start, metrics: &Path, step: u64, end: StartEnd) -> Result<PreviousStart> {
    let mut found = PreviousStart {
        end,
        time: before.time,
        step: before.step,
        steps_lost: 0,
        seconds_lost: 0.0,
    };
    let unread = |e| Error::io("read", metrics, e);
    let file = match safe_open::open(metrics) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(found),
        Err(e) => return Err(unread(e)),
    };
    let mut lines = FromEnd::new(file).map_err(unread)?;
    let mut is_last = true;
    while let Some(line) = lines.previous().map_err(unread)? {
        // Lines may be cut short or damaged.
        let Some(record) = parse_record::<Step>(line.text) else { continue };
        if std::mem::take(&mut is_last) {
            // A start that took no step has left the records of one before.
            found.time = record.time.max(before.time);
            found.step = record.step;
        }
        if record.step <= step {
            break;
        }
        found.steps_lost += 1;
        found.seconds_lost += record.seconds_with_pauses();
    }
    Ok(found)
}

/// The failures of a run so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Failures {
    /// The number of starts that ended by a failure.
    pub count: u64,
    /// The seconds that all starts but the last one have trained.
    pub seconds: f64,
}

impl Failures {
    /// Counts the failures in the history of a run.
    pub fn from_starts(starts: &[Start]) -> Self {
        let pairs = starts.iter().zip(starts.iter().skip(1));
        pairs.fold(Self::default(), |sum, (start, next)| match next.previous {
            Some(previous) => Self {
                count: sum.count + u64::from(previous.end.is_failure()),
                seconds: sum.seconds + (previous.time - start.time).max(0.0),
            },
            None => sum,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes records of these steps, which take half a second each.
    fn write(path: &Path, steps: std::ops::RangeInclusive<u64>, time: f64) {
        let lines = steps.map(|step| Step {
            step,
            step_ms: 500.0,
            save_ms: (step == 4).then_some(1000.0),
            time: time + step as f64,
            ..Step::default()
        });
        let lines: Vec<String> = lines.map(|step| serde_json::to_string(&step).unwrap()).collect();
        std::fs::write(path, lines.join("\n") + "\n{\"torn").unwrap();
    }

    #[test]
    fn a_start_notes_the_steps_that_the_one_before_has_lost() {
        let run = tempfile::tempdir().unwrap();
        let metrics = run.path().join("metrics.jsonl");
        let data = Fingerprint::of_samples(100);
        let job =
            StartedJob::new(&Config::default(), vec!["a".into()], 0, None, Some(&data)).unwrap();
        let record =
            |step, end| record(run.path(), &metrics, step, 2.0, end, Some(job.clone())).unwrap();
        let first = record(0, StartEnd::Killed);
        assert_eq!((first.len(), first[0].step, first[0].previous), (1, 0, None));
        // Steps 1 to 7, of which 3 are in a checkpoint.
        write(&metrics, 1..=7, first[0].time);
        let second = record(3, StartEnd::Killed)[1].clone();
        let previous = second.previous.unwrap();
        assert_eq!((second.start, second.step, second.startup_seconds), (2, 3, 2.0));
        assert_eq!((previous.step, previous.steps_lost, previous.seconds_lost), (7, 4, 3.0));
        assert_eq!(previous.time, first[0].time + 7.0);
        // The next one took no step, and its line was cut short.
        let path = run.path().join(FILE);
        write(&metrics, 1..=3, first[0].time - 100.0);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text + "{\"start\":").unwrap();
        let all = record(3, StartEnd::Preempted);
        let previous = all[2].previous.unwrap();
        assert_eq!((all[2].start, previous.steps_lost, previous.time), (3, 0, second.time));
        assert_eq!(read(run.path()).unwrap(), all);
        let job = all[0].job.as_ref().unwrap();
        assert_eq!(job.configuration().unwrap(), Config::default());
        job.check_data(&data).unwrap();
        let error = job.check_data(&Fingerprint::of_samples(90)).unwrap_err();
        assert!(error.to_string().contains("the data of the run has changed"), "{error}");
        let unknown = StartedJob { data: None, ..job.clone() };
        unknown.check_data(&Fingerprint::of_samples(90)).unwrap();
        let of_step = |step| Start::of_step(&all, step).map(|start| start.start);
        assert_eq!([0, 1, 3, 4].map(of_step), [None, Some(1), Some(1), Some(3)]);
        let failures = Failures::from_starts(&all);
        assert_eq!(failures, Failures { count: 1, seconds: 7.0 });
    }

    #[test]
    fn ends_are_failures_unless_they_were_asked_for() {
        use StartEnd::{Failed, Finished, Killed, Preempted};
        assert_eq!(
            [Finished, Preempted, Failed, Killed].map(StartEnd::is_failure),
            [false, false, true, true]
        );
    }
}
