//! The runs at a glance, and the machines that they ran on.

use super::html::{Cell, digits, muted, number, seconds, table, text, time, wide};
use super::{chip, curves};
use crate::run_records::RunRecords;
use hpctrain_checkpoint::run_dir::markers::RunStatus;
use hpctrain_config::telemetry::efficiency::readable_rate;
use hpctrain_config::telemetry::evaluations::{EvaluationStatus as Outcome, LossSplit};
use hpctrain_config::telemetry::goodput::Goodput;
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_config::telemetry::{bytes, grouped};

/// A column of a table of runs.
type Column<'a> = (&'a str, fn(&str) -> Cell, &'a dyn Fn(&RunRecords) -> String);

fn text_cell(value: &str) -> Cell {
    text(value)
}

fn number_cell(value: &str) -> Cell {
    number(value)
}

/// Returns a table with a line for each run. Columns without any value are omitted.
fn run_table(runs: &[RunRecords], labels: &[String], columns: &[Column<'_>]) -> String {
    let has_value =
        |column: &&Column<'_>| runs.iter().any(|run| !matches!(column.2(run).as_str(), "" | "–"));
    let columns: Vec<&Column<'_>> = columns.iter().filter(has_value).collect();
    let mut head = vec![text("run")];
    head.extend(columns.iter().map(|(name, cell, _)| cell(name)));
    let rows = runs.iter().zip(labels).enumerate().map(|(at, (run, label))| {
        let mut row = vec![wide(label).after(&chip(at))];
        row.extend(columns.iter().map(|(_, cell, value)| cell(&value(run))));
        row
    });
    table(head, rows.collect())
}

/// Returns the status of a run.
fn status(run: &RunRecords) -> String {
    match &run.end {
        _ if run.running => "running".into(),
        Some(end) => {
            let status = match end.status {
                RunStatus::Finished => "finished",
                RunStatus::Preempted => "preempted",
                RunStatus::Failed => "failed",
            };
            end.reason.as_ref().map_or_else(|| status.into(), |why| format!("{status}: {why}"))
        }
        None if run.steps.is_empty() => "not begun".into(),
        None => "ended without END marker".into(),
    }
}

/// Returns the last step and the number of all steps of a run.
fn steps(run: &RunRecords) -> String {
    format!(
        "{} of {}",
        grouped(run.steps.last().map_or(0, |step| step.step)),
        grouped(run.config.run.steps)
    )
}

/// Returns the lowest loss of an evaluation and its step, over validation data if there are any.
fn best_loss(run: &RunRecords) -> String {
    lowest_loss(run, LossSplit::Validation)
        .or_else(|| lowest_loss(run, LossSplit::Training))
        .map_or_else(
            || "–".into(),
            |(loss, step)| format!("{} at {}", digits(Some(loss)), grouped(step)),
        )
}

/// Returns the lowest loss of an evaluation over one kind of samples, and its step.
fn lowest_loss(run: &RunRecords, over: LossSplit) -> Option<(f64, u64)> {
    let done = run.evaluations.iter();
    let losses = done.filter(|one| one.split == over && one.status == Outcome::Done);
    let losses = losses.filter_map(|one| Some((one.loss?, one.step)));
    losses.filter(|one| one.0.is_finite()).min_by(|one, other| one.0.total_cmp(&other.0))
}

/// Returns the median throughput of a run's steps.
fn speed(run: &RunRecords) -> String {
    median(run.steps.iter().map(|step| step.tokens_per_second)).map_or_else(
        || "–".into(),
        |speed| format!("{} {}/s", digits(Some(speed)), curves::predictions(run)),
    )
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    let middle = values.len() / 2;
    (!values.is_empty()).then(|| *values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

/// Returns the median model TFLOP/s per rank of a run's steps, and the median MFU.
fn efficiency(run: &RunRecords) -> String {
    let values: [fn(&Step) -> Option<f64>; 2] = [|step| step.tflops_per_rank, |step| step.mfu];
    match values.map(|value| median(run.steps.iter().filter_map(value))) {
        [None, _] => "–".into(),
        [Some(tflops), None] => readable_rate(tflops),
        [Some(tflops), Some(mfu)] => format!("{}, MFU {:.1} %", readable_rate(tflops), 100.0 * mfu),
    }
}

/// Returns the energy of a run so far in kWh, and the median joules per token or sample.
fn energy(run: &RunRecords) -> String {
    let kwh = run.steps.iter().rev().find_map(|step| step.energy_kwh);
    let joules = median(run.steps.iter().filter_map(|step| step.joules_per_token));
    match (kwh, joules) {
        (None, _) => "–".into(),
        (kwh, None) => format!("{} kWh", digits(kwh)),
        (kwh, joules) => {
            let one = curves::predictions(run).trim_end_matches('s');
            format!("{} kWh, {} J/{one}", digits(kwh), digits(joules))
        }
    }
}

/// Returns the goodput of a run that has ended.
fn goodput(run: &RunRecords) -> String {
    let Some(goodput) = run.summary.as_ref().and_then(|summary| summary.goodput) else {
        return "–".into();
    };
    let Goodput { share, starts, steps_lost, .. } = goodput;
    let again = match steps_lost {
        0 => String::new(),
        steps => format!(", {} steps repeated", grouped(steps)),
    };
    let starts = if starts == 1 { String::new() } else { format!(", {starts} starts") };
    format!("{:.1} %{starts}{again}", 100.0 * share)
}

/// Returns the axes of a run's mesh with more than one rank.
fn layout(run: &RunRecords) -> String {
    let mesh = run.mesh();
    let axes = [
        (mesh.pipeline, "pipeline"),
        (mesh.replica, "replica"),
        (mesh.shard, "shard"),
        (mesh.tensor, "tensor"),
    ];
    let axes: Vec<String> = axes
        .iter()
        .filter(|(size, _)| *size > 1)
        .map(|(size, name)| format!("{name} {size}"))
        .collect();
    if axes.is_empty() { "one rank".into() } else { axes.join(" × ") }
}

/// Returns the table of runs.
pub fn section(runs: &[RunRecords], labels: &[String]) -> String {
    let parameters = |run: &RunRecords| {
        run.summary.as_ref().map_or_else(|| "–".into(), |card| grouped(card.parameters))
    };
    let skipped = |run: &RunRecords| match run.steps.iter().filter(|step| step.skipped).count() {
        0 => "–".into(),
        skipped => grouped(skipped as u64),
    };
    let restarts = |run: &RunRecords| match run.restarted_at().len() {
        0 => "–".into(),
        restarts => restarts.to_string(),
    };
    let branch = |run: &RunRecords| {
        run.branch.as_ref().map_or_else(String::new, |from| from.from.display().to_string())
    };
    let columns: [Column<'_>; 14] = [
        ("status", text_cell, &status),
        ("steps", number_cell, &steps),
        ("last loss", number_cell, &|run| digits(run.steps.last().map(|step| step.loss))),
        ("best evaluation", number_cell, &best_loss),
        ("throughput, median", number_cell, &speed),
        ("per rank, median", number_cell, &efficiency),
        ("energy", number_cell, &energy),
        ("goodput", number_cell, &goodput),
        ("parameters", number_cell, &parameters),
        ("layout", text_cell, &layout),
        ("skipped", number_cell, &skipped),
        ("restarts", number_cell, &restarts),
        ("first step", text_cell, &|run| time(run.steps.first().map_or(0.0, |step| step.time))),
        ("began at", text_cell, &branch),
    ];
    run_table(runs, labels, &columns)
}

/// Returns the table of the machines, versions and memory of runs that have ended.
pub fn environment(runs: &[RunRecords], labels: &[String]) -> String {
    if runs.iter().all(|run| run.summary.is_none()) {
        return muted("run.json is written at the end of a run and does not exist yet.");
    }
    let column = |value: fn(&hpctrain_config::telemetry::run_record::RunRecord) -> String| {
        move |run: &RunRecords| run.summary.as_ref().map_or_else(|| "–".into(), value)
    };
    let version = column(|card| card.version.clone());
    let mpi = column(|card| card.mpi.clone());
    let ranks = column(|card| card.ranks.to_string());
    let threads = column(|card| card.threads.map_or("–".into(), |threads| threads.to_string()));
    let hosts = column(|card| {
        let mut hosts = card.hosts.clone();
        hosts.dedup();
        let shown = hosts.iter().take(16).cloned().collect::<Vec<_>>().join(", ");
        if hosts.len() > 16 { format!("{shown} and {} more", hosts.len() - 16) } else { shown }
    });
    let took = column(|card| seconds(card.seconds));
    let resident = column(|card| bytes(card.peak_resident_bytes));
    let gpu = column(|card| card.peak_gpu_bytes.map_or_else(|| "–".into(), bytes));
    let sent =
        column(|card| card.comm_sent_bytes.map_or_else(|| "–".into(), |sent| bytes(sent as usize)));
    let data = column(|card| card.data.clone().unwrap_or_else(|| "–".into()));
    let ended = column(|card| time(card.time));
    let device = |run: &RunRecords| run.settings.get("run.device").cloned().unwrap_or_default();
    let columns: [Column<'_>; 12] = [
        ("hpctrain", text_cell, &version),
        ("transport", text_cell, &mpi),
        ("device", text_cell, &device),
        ("ranks", number_cell, &ranks),
        ("threads per rank", number_cell, &threads),
        ("hosts", text_cell, &hosts),
        ("last start took", number_cell, &took),
        ("peak memory of rank 0", number_cell, &resident),
        ("peak memory of its GPU", number_cell, &gpu),
        ("sent by rank 0", number_cell, &sent),
        ("data", text_cell, &data),
        ("ended", text_cell, &ended),
    ];
    run_table(runs, labels, &columns)
}
