//! The steps of runs as one table of comma-separated values, complete.

use std::collections::BTreeMap;
use std::io::Write;

use super::labels;
use crate::run_records::RunRecords;
use hpctrain_base::error::{Error, Result};
use hpctrain_config::telemetry::evaluations::{EvaluationStatus, LossSplit};

/// The columns.
const HEAD: [&str; 18] = [
    "run",
    "step",
    "epoch",
    "tokens",
    "loss",
    "validation_loss",
    "lr",
    "grad_norm",
    "skipped",
    "step_ms",
    "compute_ms",
    "comm_exposed_ms",
    "comm_hidden_ms",
    "loader_ms",
    "optimizer_ms",
    "tokens_per_second",
    "peak_bytes",
    "time",
];

/// Writes a line for each step of each run. Numbers are written exactly; those that are not finite
/// are empty.
///
/// # Errors
/// Returns an error if writing to `to` fails.
pub fn write(runs: &[RunRecords], to: impl Write) -> Result<()> {
    let refused = |e: csv::Error| Error::refused(format!("cannot write the table: {e}"));
    let mut table = csv::Writer::from_writer(to);
    table.write_record(HEAD).map_err(refused)?;
    let shown = |value: f64| if value.is_finite() { value.to_string() } else { String::new() };
    for (run, label) in runs.iter().zip(labels(runs)) {
        let done = run.evaluations.iter();
        let done = done.filter(|one| {
            one.split == LossSplit::Validation && one.status == EvaluationStatus::Done
        });
        let validated: BTreeMap<u64, f64> =
            done.filter_map(|one| Some((one.step, one.loss?))).collect();
        for step in &run.steps {
            table
                .write_record([
                    &label,
                    &step.step.to_string(),
                    &shown(step.epoch),
                    &step.tokens.to_string(),
                    &shown(step.loss),
                    &validated.get(&step.step).map_or_else(String::new, |loss| shown(*loss)),
                    &shown(step.lr),
                    &shown(step.grad_norm),
                    &u8::from(step.skipped).to_string(),
                    &shown(step.step_ms),
                    &shown(step.compute_ms),
                    &shown(step.comm_exposed_ms),
                    &shown(step.comm_hidden_ms),
                    &shown(step.loader_ms),
                    &shown(step.optimizer_ms),
                    &shown(step.tokens_per_second),
                    &step.peak_bytes.to_string(),
                    &shown(step.time),
                ])
                .map_err(refused)?;
        }
    }
    table.flush().map_err(|e| refused(e.into()))
}
