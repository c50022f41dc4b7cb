//! The progress of a run: step times, evaluations, checkpoints, restarts, skipped steps and
//! generated samples.

use std::collections::BTreeSet;

use super::curves::{PARTS, mean_times};
use super::html::{
    Cell, digits, escaped, heading, muted, number, paragraph, seconds, table, text, time, wide,
};
use crate::run_records::{RunRecords, SavedCheckpoint};
use hpctrain_config::telemetry::evaluations::{Evaluation, EvaluationStatus, LossSplit};
use hpctrain_config::telemetry::restarts::Restart;
use hpctrain_config::telemetry::text_samples::TextSample;
use hpctrain_config::telemetry::{bytes, grouped};

/// The maximum number of rows of a table; of more, the last ones are shown.
const MOST_ROWS: usize = 50;

/// The number of generated samples that are shown.
const MOST_TEXTS: usize = 3;

/// The maximum number of characters shown of a sample.
const MOST_CHARACTERS: usize = 4000;

/// Returns the last rows, as many as a table may have, and a note about the omitted ones.
fn last<'a, T>(all: &'a [T], file: &str) -> (&'a [T], String) {
    let omitted = all.len().saturating_sub(MOST_ROWS);
    let note = match omitted {
        0 => String::new(),
        omitted => muted(&format!(
            "The last {MOST_ROWS}; {} before them are in {file}.",
            grouped(omitted as u64)
        )),
    };
    (&all[omitted..], note)
}

/// Returns the parts of the step time.
pub fn times(at: usize, run: &RunRecords, has_times: bool) -> String {
    if !has_times {
        return match run.steps.is_empty() {
            true => String::new(),
            false => muted("The records do not contain the parts of the step time."),
        };
    }
    let means = mean_times(&run.steps);
    let sum: f64 = means.iter().sum();
    let share = |ms: f64| if sum > 0.0 { 100.0 * ms / sum } else { 0.0 };
    let mut bar = String::new();
    let mut key = String::new();
    for (part, ms) in means.into_iter().enumerate() {
        bar += &format!(
            "<span style=\"width:{:.3}%;background:var(--part{part})\"></span>",
            share(ms)
        );
        key += &format!(
            "<span><span class=\"chip\" style=\"background:var(--part{part})\"></span>{} {} ms, {:.1} %</span>\n",
            PARTS[part],
            escaped(&digits(Some(ms))),
            share(ms)
        );
    }
    format!(
        "<div class=\"parts\">{bar}</div>\n<div class=\"key\">{key}</div>\n<div class=\"chart\" id=\"times-{at}\"></div>\n{}",
        muted("Milliseconds per step on rank 0, averaged over equal parts of the run.")
    )
}

/// Returns the table of evaluations.
pub fn evaluations(run: &RunRecords) -> String {
    let names: BTreeSet<&String> =
        run.evaluations.iter().flat_map(|one| one.metrics.keys()).collect();
    let (shown, note) = last(&run.evaluations, "eval.jsonl");
    if shown.is_empty() {
        return String::new();
    }
    let best = run.evaluations.iter().filter_map(|one| one.loss).fold(f64::INFINITY, f64::min);
    let has_perplexity = shown.iter().any(|one| one.perplexity.is_some());
    let mut head = vec![number("step"), text("over"), number("loss")];
    head.extend(has_perplexity.then(|| number("perplexity")));
    head.extend(names.iter().map(number));
    head.extend(["samples", "of", "written"].map(text));
    let rows = shown.iter().map(|one| evaluation_row(one, &names, best, has_perplexity));
    table(head, rows.collect()) + &note
}

/// Returns the row of an evaluation; `best` is the lowest loss of all evaluations.
fn evaluation_row(
    one: &Evaluation,
    names: &BTreeSet<&String>,
    best: f64,
    has_perplexity: bool,
) -> Vec<Cell> {
    let over = match one.split {
        LossSplit::Validation => "validation",
        LossSplit::Training => "an epoch of training",
    };
    let loss = match (one.status, one.loss) {
        (EvaluationStatus::Done, loss) if loss == Some(best) => {
            format!("{} (best)", digits(loss))
        }
        (EvaluationStatus::Done, loss) => digits(loss),
        (EvaluationStatus::Retried, _) => "retried".into(),
        (EvaluationStatus::Failed, _) => {
            format!("failed: {}", one.error.as_deref().unwrap_or("unknown"))
        }
    };
    let mut row = vec![number(grouped(one.step)), text(over), number(loss)];
    row.extend(has_perplexity.then(|| number(digits(one.perplexity))));
    row.extend(names.iter().map(|name| number(digits(one.metrics.get(*name).copied()))));
    row.push(text(one.samples.map_or_else(|| "–".into(), grouped)));
    row.push(text(one.checkpoint.as_deref().unwrap_or("weights in training")));
    row.push(text(time(one.time)));
    row
}

/// Returns the table of the existing checkpoints.
pub fn checkpoints(run: &RunRecords) -> String {
    if run.checkpoints.is_empty() {
        return muted("The run has no checkpoints.");
    }
    let (shown, note) = last(&run.checkpoints, "checkpoints/");
    let loss = |step| run.evaluations.iter().rev().find(|one| one.step == step)?.loss;
    let head = vec![number("step"), number("size"), text("written"), number("loss"), text("marks")];
    let rows = shown.iter().map(|saved| checkpoint_row(saved, loss(saved.step)));
    table(head, rows.collect()) + &note
}

/// Returns the row of a checkpoint with its evaluated loss.
fn checkpoint_row(saved: &SavedCheckpoint, loss: Option<f64>) -> Vec<Cell> {
    let marks = [("latest", saved.latest), ("best", saved.best)];
    let marks: Vec<&str> =
        marks.into_iter().filter(|(_, is_set)| *is_set).map(|(mark, _)| mark).collect();
    vec![
        number(grouped(saved.step)),
        number(saved.bytes.map_or_else(|| "cannot be read".into(), |size| bytes(size as usize))),
        text(saved.time.map_or_else(|| "–".into(), time)),
        number(digits(loss)),
        text(marks.join(", ")),
    ]
}

/// Returns the table of the starts of a supervised run.
pub fn restarts(run: &RunRecords) -> String {
    let (shown, note) = last(&run.restarts, "restarts.jsonl");
    if shown.is_empty() {
        return String::new();
    }
    let head = [
        "start",
        "began",
        "took",
        "code",
        "why",
        "rank",
        "host",
        "checkpoint",
        "steps lost",
        "time lost",
    ];
    table(head.map(text).into_iter().collect(), shown.iter().map(restart_row).collect()) + &note
}

/// Returns the row of a start of a supervised run.
fn restart_row(one: &Restart) -> Vec<Cell> {
    vec![
        number(one.start.to_string()),
        text(time(one.time)),
        number(seconds(one.seconds)),
        number(one.code.to_string()),
        wide(&one.reason),
        number(one.rank.map_or_else(|| "–".into(), |rank| rank.to_string())),
        text(one.host.as_deref().unwrap_or("–")),
        number(one.checkpoint.map_or_else(|| "–".into(), grouped)),
        number(grouped(one.steps_lost)),
        number(seconds(one.seconds_lost)),
    ]
}

/// Returns the table of the steps whose update was skipped.
pub fn skipped(run: &RunRecords) -> String {
    let skipped: Vec<_> = run.steps.iter().filter(|step| step.skipped).collect();
    if skipped.is_empty() {
        return String::new();
    }
    let (shown, note) = last(&skipped, "metrics.jsonl");
    let value = |value: f64| number(digits(Some(value)));
    let rows = shown.iter().map(|step| {
        vec![number(grouped(step.step)), value(step.loss), value(step.grad_norm), value(step.lr)]
    });
    let head = ["step", "loss", "gradient norm", "learning rate"].map(number).into_iter().collect();
    let count = skipped.len() as u64;
    let summary =
        format!("{} of {} updates were skipped.", grouped(count), grouped(run.steps.len() as u64));
    paragraph(&summary) + &table(head, rows.collect()) + &note
}

/// Returns the last generated samples.
pub fn samples(run: &RunRecords) -> String {
    let shown = &run.samples[run.samples.len().saturating_sub(MOST_TEXTS)..];
    shown.iter().rev().map(sample_html).collect()
}

/// Returns a generated sample under a heading with its step.
fn sample_html(sample: &TextSample) -> String {
    let text: String = sample.text.chars().take(MOST_CHARACTERS).collect();
    let rest = if text.len() < sample.text.len() { "\n…" } else { "" };
    format!(
        "{}<pre>{}{rest}</pre>\n",
        heading(&format!("at step {}", grouped(sample.step))),
        escaped(text.trim())
    )
}
