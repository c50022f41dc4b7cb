//! `metrics.jsonl`: one JSON object per training step, with floats that read back to the same bits.

use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};

use super::long_lines::{FromEnd, parse_record};
use super::times::Times;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// One training step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The number of the step, from 1.
    pub step: u64,
    /// The number of passes over the training data so far.
    pub epoch: f64,
    /// The number of tokens seen so far.
    pub tokens: u64,
    /// The mean loss of the global batch; null when it is not finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// The learning rate.
    pub lr: f64,
    /// The global norm of the gradient before clipping; null when it is not finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub grad_norm: f64,
    /// Whether the update was skipped because loss or gradient was not finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The duration of the step.
    pub step_ms: f64,
    /// The part of the step that rank 0 computed: forwards, backwards and sums. It is the rest
    /// besides exposed communication, loader and optimizer; see [`Times`].
    #[serde(default)]
    pub compute_ms: f64,
    /// The part of the step in which compute of rank 0 was blocked, waiting for messages.
    #[serde(default)]
    pub comm_exposed_ms: f64,
    /// The communication of rank 0 that overlapped with compute.
    #[serde(default)]
    pub comm_hidden_ms: f64,
    /// The part of the step in which rank 0 waited for data.
    #[serde(default)]
    pub loader_ms: f64,
    /// The part of the step that the update took on rank 0.
    #[serde(default)]
    pub optimizer_ms: f64,
    /// The time that hooks of rank 0 took since the record before this one: those called after the
    /// previous step, its evaluation and its checkpoint. It is not a part of `step_ms`; absent if
    /// rank 0 has no hooks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hooks_ms: Option<f64>,
    /// The time for which an evaluation blocked training since the record before this one, with
    /// its hooks; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_ms: Option<f64>,
    /// The time for which saves blocked training since the record before this one, with their
    /// hooks; absent if there were none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save_ms: Option<f64>,
    /// The tokens of this step divided by its duration; null if no time passed.
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_second: f64,
    /// Model TFLOP/s per rank: [`Efficiency`](super::efficiency::Efficiency).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tflops_per_rank: Option<f64>,
    /// Model FLOPs utilisation, from 0 to 1; absent if the peak of a rank's device is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Joules per prediction (token or sample) since the last record that has them, evaluations and
    /// saves included; every `log.every` steps, if all nodes have energy counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules_per_token: Option<f64>,
    /// Energy of the run so far in kWh, including earlier starts and repeated steps; present in the
    /// same records as `joules_per_token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_kwh: Option<f64>,
    /// The peak of memory of rank 0 so far in bytes, all categories together.
    #[serde(default)]
    pub peak_bytes: usize,
    /// Seconds since 1970.
    pub time: f64,
}

impl Step {
    /// Returns the seconds of the step, and of the evaluation and the save before it.
    pub fn seconds_with_pauses(&self) -> f64 {
        (self.step_ms + self.eval_ms.unwrap_or(0.0) + self.save_ms.unwrap_or(0.0)) * 1e-3
    }

    /// Sets the breakdown of the step's time.
    #[must_use]
    pub fn with(self, times: Times) -> Self {
        Self {
            compute_ms: times.compute * 1e3,
            comm_exposed_ms: times.comm_exposed * 1e3,
            comm_hidden_ms: times.comm_hidden * 1e3,
            loader_ms: times.loader * 1e3,
            optimizer_ms: times.optimizer * 1e3,
            ..self
        }
    }
}

/// Deserializes a number that is null if it was not finite; null is read as NaN.
///
/// # Errors
/// Returns an error if the value is neither a number nor null.
pub fn null_is_nan<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// The number of records at the end that are searched for an energy: in units of `log.every`, and
/// the least.
const ENERGY_RECORDS: (u64, u64) = (4, 10_000);

/// Returns the energy in kWh of the newest record at `path` that has one; 0 if none of the last
/// records has one. Every `every`-th record has an energy, if there are counters.
///
/// # Errors
/// Returns an error if the file is there and cannot be read.
pub fn energy_so_far(path: &Path, every: u64) -> Result<f64> {
    #[derive(Deserialize)]
    struct Energy {
        energy_kwh: f64,
    }
    let file = match safe_open::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(0.0),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    let unread = |e| Error::io("read", path, e);
    let mut lines = FromEnd::new(file).map_err(unread)?;
    let (periods, least) = ENERGY_RECORDS;
    for _ in 0..every.saturating_mul(periods).max(least) {
        let Some(line) = lines.previous().map_err(unread)? else { break };
        if let Some(Energy { energy_kwh }) = parse_record(line.text) {
            return Ok(energy_kwh);
        }
    }
    Ok(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f64) -> Step {
        Step {
            step,
            epoch: 0.1,
            tokens: 64,
            loss,
            lr: 1e-3,
            grad_norm: 1.0 / 3.0,
            skipped: false,
            step_ms: 1.5,
            tokens_per_second: 1e5,
            peak_bytes: 1 << 40,
            time: 1.7e9,
            ..Step::default()
        }
    }

    #[test]
    fn steps_without_times_read_back() {
        let short = "{\"step\":3,\"epoch\":0.1,\"tokens\":64,\"loss\":1.0,\"lr\":0.001,\"grad_norm\":0.5,\
                   \"step_ms\":1.5,\"tokens_per_second\":1e5,\"time\":1.7e9}";
        let step: Step = serde_json::from_str(short).unwrap();
        assert_eq!((step.step, step.compute_ms, step.optimizer_ms), (3, 0.0, 0.0));
    }

    #[test]
    fn losses_that_are_not_finite_read_back() {
        let line = serde_json::to_string(&Step {
            skipped: true,
            grad_norm: f64::INFINITY,
            ..step(3, f64::NAN)
        })
        .unwrap();
        let back: Step = serde_json::from_str(&line).unwrap();
        assert!(
            line.contains("\"loss\":null")
                && back.loss.is_nan()
                && back.grad_norm.is_nan()
                && back.skipped
        );
    }

    #[test]
    fn floats_read_back_to_the_same_bits() {
        let before = step(1, 0.1f64 + 0.2);
        let after: Step = serde_json::from_str(&serde_json::to_string(&before).unwrap()).unwrap();
        assert_eq!(after.loss.to_bits(), before.loss.to_bits());
        assert_eq!(after, before);
    }

    #[test]
    fn the_newest_energy_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        assert_eq!(energy_so_far(&path, 2).unwrap(), 0.0);
        let with = |energy_kwh: Option<f64>, number: u64| Step { energy_kwh, ..step(number, 1.0) };
        let steps =
            [with(None, 1), with(Some(0.5), 2), with(None, 3), with(Some(0.75), 4), with(None, 5)];
        let text: String =
            steps.iter().map(|step| serde_json::to_string(step).unwrap() + "\n").collect();
        std::fs::write(&path, text + "{\"energy_kwh\":9").unwrap();
        assert_eq!(energy_so_far(&path, 2).unwrap(), 0.75);
    }
}
