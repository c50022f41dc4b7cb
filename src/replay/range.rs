//! The steps of a replay, and the checkpoint that it starts from.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::float_bits;
use super::recorder::StopAt;
use crate::checkpoint::tools::resolve_path;
use crate::checkpoint::{Manifest, lease::LeaseGuard, step_of};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::run_dir::{Branch, RestoreScope, RunDirectory};
use crate::run_records::RunRecords;
use crate::telemetry::metrics::Step;
use crate::telemetry::starts::{self, StartedJob};

/// The number of steps before a step of which a spike is measured by their median.
const MEDIAN_OF: usize = 100;

/// The loss and the gradient norm above which a step is a spike.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SpikeBounds {
    /// The bound of the loss.
    #[serde(with = "float_bits")]
    loss: f64,
    /// The bound of the gradient norm.
    #[serde(with = "float_bits")]
    norm: f64,
}

impl SpikeBounds {
    /// Creates the bounds of the step after these records: `factor` times the medians. Nothing is a
    /// spike without records.
    fn new(factor: f64, before: &[Step]) -> Self {
        let bound = |values: &mut dyn Iterator<Item = f64>| {
            median(values).map_or(f64::INFINITY, |usual| factor * usual)
        };
        Self {
            loss: bound(&mut before.iter().map(|step| step.loss)),
            norm: bound(&mut before.iter().map(|step| step.grad_norm)),
        }
    }

    /// Returns true if a step with this loss and norm is a spike.
    pub fn are_exceeded(self, loss: f64, norm: f64) -> bool {
        loss > self.loss || norm > self.norm
    }
}

/// Returns the bounds of the steps of a range that have records.
pub fn spike_bounds(
    records: &[Step],
    steps: &RangeInclusive<u64>,
    factor: f64,
) -> BTreeMap<u64, SpikeBounds> {
    let in_range = records.iter().enumerate().filter(|(_, step)| steps.contains(&step.step));
    let bounds = in_range.map(|(at, step)| (step.step, bounds_at(records, at, factor)));
    bounds.collect()
}

/// Returns the bounds of the step of a record.
fn bounds_at(records: &[Step], at: usize, factor: f64) -> SpikeBounds {
    SpikeBounds::new(factor, &records[at.saturating_sub(MEDIAN_OF)..at])
}

/// Returns the first step whose record is bad.
fn bad_step(records: &[Step], stop: StopAt) -> Option<u64> {
    let is_bad = |at: usize| {
        let Step { loss, grad_norm, skipped, .. } = records[at];
        let is_spike = match stop {
            StopAt::Spike(factor) => bounds_at(records, at, factor).are_exceeded(loss, grad_norm),
            StopAt::Nan | StopAt::Inf => false,
        };
        is_spike || skipped || !(loss.is_finite() && grad_norm.is_finite())
    };
    (0..records.len()).find(|at| is_bad(*at)).map(|at| records[at].step)
}

/// Returns the median of the finite values.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Returns the steps of a replay: those that were asked for, or the bad step of the records and the
/// one before it.
///
/// # Errors
/// Returns an error if the run has not recorded the steps, or if no record is bad.
pub fn steps(
    records: &RunRecords,
    asked: Option<RangeInclusive<u64>>,
    stop: Option<StopAt>,
) -> Result<RangeInclusive<u64>> {
    let file = records.path.join("metrics.jsonl");
    let (Some(first), Some(last)) = (records.steps.first(), records.steps.last()) else {
        return Err(Error::input(format!("{} has no steps", file.display()))
            .hint("replay a run that has trained"));
    };
    let recorded = format!("--steps {}..{}", first.step, last.step);
    if let Some(asked) = asked {
        let is_recorded = records.steps.iter().any(|step| asked.contains(&step.step));
        if *asked.end() > last.step || !is_recorded {
            return Err(Error::input(format!(
                "--steps {}..{}: {} has the steps {} to {}",
                asked.start(),
                asked.end(),
                file.display(),
                first.step,
                last.step
            ))
            .hint(format!("give steps among them, such as {recorded}")));
        }
        return Ok(asked);
    }
    let Some(stop) = stop else {
        return Err(Error::input("replay needs a range of steps")
            .hint(format!("give --steps A..B, such as {recorded}, or --stop-at-first nan")));
    };
    let bad = bad_step(&records.steps, stop).ok_or_else(|| {
        let what = match stop {
            StopAt::Nan | StopAt::Inf => "a loss or gradient norm that is not finite".to_owned(),
            StopAt::Spike(factor) => {
                format!(
                    "a loss or gradient norm above {factor} times the median of the steps before it"
                )
            }
        };
        Error::input(format!("{} has no step with {what}", file.display()))
            .hint(format!("give the steps to search, such as {recorded}"))
    })?;
    Ok(bad.saturating_sub(1).max(1)..=bad)
}

/// The state that a replay starts from.
pub struct Start {
    /// The checkpoint, its manifest, and a lease so that a trainer does not remove it; `None` for
    /// step 0.
    pub checkpoint: Option<(PathBuf, Manifest, Option<LeaseGuard>)>,
    /// The parts of the checkpoint to restore.
    pub take: RestoreScope,
    /// Whether the checkpoint is one of this run.
    pub is_own: bool,
}

impl Start {
    /// Returns the step before the first one of the replay.
    pub fn step(&self) -> u64 {
        match &self.checkpoint {
            Some((_, manifest, _)) if self.take != RestoreScope::Weights => manifest.step,
            _ => 0,
        }
    }

    /// Returns the manifest of the checkpoint, if it is one of this run.
    pub fn own_manifest(&self) -> Option<&Manifest> {
        self.checkpoint.as_ref().filter(|_| self.is_own).map(|(_, manifest, _)| manifest)
    }
}

/// Returns the starts of the run that took the steps after `from` up to `last`, in their order, each
/// with the step from which it went on. The first ones are omitted if they are not recorded.
///
/// # Errors
/// Returns an error if `starts.jsonl` cannot be read.
pub fn jobs(directory: &RunDirectory, from: u64, last: u64) -> Result<Vec<(u64, StartedJob)>> {
    let starts = starts::read(directory.path())?;
    let mut found = Vec::new();
    let mut step = last;
    while step > from
        && let Some(start) = starts::Start::of_step(&starts, step)
        && let Some(job) = &start.job
    {
        found.push((start.step, job.clone()));
        step = start.step;
    }
    found.reverse();
    Ok(found)
}

/// Returns the configuration of the steps up to `last` if their start is not recorded: that of the
/// first checkpoint at or after it, whose job has trained them or gone on from them, else that of
/// the run's last start.
///
/// # Errors
/// Returns an error if a checkpoint cannot be read.
pub fn configuration(directory: &RunDirectory, records: &RunRecords, last: u64) -> Result<Config> {
    let checkpoints = directory.checkpoints();
    for step in checkpoints.steps()?.into_iter().filter(|step| *step >= last) {
        match checkpoints.read_intact(step) {
            Ok(manifest) => return Ok(manifest.config),
            Err(e) if e.kind() == Kind::Damaged => {}
            Err(e) => return Err(e),
        }
    }
    Ok(records.config.clone())
}

/// Returns the beginning of a run: step 0, or the checkpoint of another run.
///
/// # Errors
/// Returns an error if the run began at a checkpoint that cannot be read, or after the first step
/// of the replay.
pub fn beginning(directory: &RunDirectory, first: u64) -> Result<Start> {
    let start = beginning_at(directory.branch()?)?;
    check_first(&start, first).map(|()| start)
}

/// Returns the beginning of a run with this origin.
fn beginning_at(origin: Option<Branch>) -> Result<Start> {
    let Some(Branch { from, take }) = origin else {
        return Ok(Start { checkpoint: None, take: RestoreScope::Everything, is_own: false });
    };
    let path = resolve_path::checkpoint(&from)?;
    let lease = resolve_path::lease(&path);
    let manifest = Manifest::read(&path)?;
    Ok(Start { checkpoint: Some((path, manifest, lease)), take, is_own: false })
}

/// Refuses a replay from step `first` on if the run began after it.
fn check_first(start: &Start, first: u64) -> Result<()> {
    let step = start.step();
    match &start.checkpoint {
        Some((path, ..)) if step >= first => Err(Error::input(format!(
            "--steps {first}: the run began at step {step}, with {}",
            path.display()
        ))
        .hint(format!("give steps from {} on", step + 1))),
        _ => Ok(()),
    }
}

/// Returns the step of a run's beginning, by the name of its origin.
fn step_of_origin(origin: Option<&Branch>) -> u64 {
    let origin = origin.filter(|origin| origin.take != RestoreScope::Weights);
    origin.and_then(|origin| step_of(origin.from.file_name()?.to_str()?)).unwrap_or(0)
}

/// Returns the newest whole checkpoint before step `first` that is older than `below`, or the
/// beginning of the run if it comes before all saves.
///
/// # Errors
/// Returns an error if there is none, which names the `checkpoint.keep_every` that would have kept
/// one, or if one cannot be read.
pub fn newest_before(
    directory: &RunDirectory,
    records: &RunRecords,
    first: u64,
    below: u64,
) -> Result<Start> {
    let checkpoints = directory.checkpoints();
    let steps = checkpoints.steps()?;
    for step in steps.iter().rev().copied().filter(|step| *step < first.min(below)) {
        let path = checkpoints.path(step);
        let lease = resolve_path::lease(&path);
        match checkpoints.read_intact(step) {
            Ok(manifest) => {
                return Ok(Start {
                    checkpoint: Some((path, manifest, lease)),
                    take: RestoreScope::Everything,
                    is_own: true,
                });
            }
            Err(e) if e.kind() == Kind::Damaged => {
                log::warn!("skipping {}: {}", path.display(), e.message());
            }
            Err(e) => return Err(e),
        }
    }
    let oldest = match steps.first() {
        Some(oldest) => format!("the oldest is of step {oldest}"),
        None => "there is none".to_owned(),
    };
    let every = records.config.checkpoint.every.number().unwrap_or(0);
    let kept = (first - 1).checked_div(every).map_or(0, |saves| saves * every);
    // A run that began at a checkpoint of another one has none from before, and cannot be repeated
    // without it.
    let origin = directory.branch()?;
    let by_name = step_of_origin(origin.as_ref());
    let began = beginning_at(origin);
    if let Ok(start) = &began {
        check_first(start, first)?;
    }
    let began_after = began.as_ref().map_or(by_name, Start::step);
    if began_after >= first || every > 0 && kept <= began_after {
        // No checkpoint comes before the first one.
        return began;
    }
    let keep = match kept {
        0 => String::new(),
        kept => {
            format!("; checkpoint.keep_every={every} would have kept the checkpoint of step {kept}")
        }
    };
    let (origin, remedy) = match began {
        Ok(_) => (String::new(), "repeat the run from its beginning with --from-start"),
        Err(e) if e.kind() == Kind::Damaged => return Err(e),
        Err(e) => {
            (format!(", nor its beginning: {}", e.message()), "restore the checkpoint it began at")
        }
    };
    Err(Error::input(format!(
        "{} has no whole checkpoint before step {first}: {oldest}{origin}",
        records.path.display()
    ))
    .hint(format!("{remedy}{keep}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(losses: &[f64]) -> Vec<Step> {
        let step = |(number, loss): (u64, &f64)| Step {
            step: number,
            loss: *loss,
            grad_norm: 1.0,
            ..Step::default()
        };
        (1..).zip(losses).map(step).collect()
    }

    #[test]
    fn the_first_bad_record_is_found() {
        let all = records(&[2.0, 3.0, 2.0, 25.0, f64::NAN, 2.0]);
        assert_eq!(bad_step(&all, StopAt::Nan), Some(5));
        assert_eq!(bad_step(&all, StopAt::Inf), Some(5));
        assert_eq!(bad_step(&all, StopAt::Spike(10.0)), Some(4));
        assert_eq!(bad_step(&all[..3], StopAt::Spike(2.0)), None);
        // Nothing comes before the first step.
        assert_eq!(bad_step(&all[3..4], StopAt::Spike(2.0)), None);
    }

    /// A slow rise over many steps is not a spike: only the last hundred count.
    #[test]
    fn the_median_is_of_the_last_steps() {
        let mut losses = vec![1.0; 200];
        losses.extend([15.0; 100]);
        losses.push(140.0);
        let all = records(&losses);
        assert_eq!(bad_step(&all[250..], StopAt::Spike(10.0)), None);
        assert_eq!(bad_step(&all, StopAt::Spike(10.0)), Some(201));
    }
}
