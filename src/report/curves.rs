//! The curves of runs, as data for the page's script.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::downsample::{Curve, Point, mean, parts, rounded};
use crate::run_records::RunRecords;
use hpctrain_config::telemetry::evaluations::{EvaluationStatus, LossSplit};
use hpctrain_config::telemetry::metrics::Step;

/// The number of buckets of a curve. With more than four runs the curves share those of four.
const MOST_BUCKETS: usize = 2000;

/// The minimum number of buckets of a curve.
const FEWEST_BUCKETS: usize = 200;

/// The number of buckets in the chart of step times.
const BUCKETS_OF_TIMES: usize = 400;

/// The maximum number of marks of one kind; if there are more, evenly spaced ones are drawn.
const MOST_MARKS: usize = 1000;

/// Names of the parts of a step's time, in the order of the charts.
pub const PARTS: [&str; 4] = ["compute", "exposed communication", "loader", "optimizer"];

/// All data of the page's script.
#[derive(Serialize)]
pub struct PageData {
    runs: Vec<RunData>,
    charts: Vec<Chart>,
    parts: [&'static str; 4],
    /// The range of steps that the charts show.
    range: [u64; 2],
    #[serde(skip)]
    buckets: usize,
}

#[derive(Serialize)]
struct RunData {
    label: String,
    curves: BTreeMap<String, Curve>,
    #[serde(skip_serializing_if = "Option::is_none")]
    times: Option<TimesData>,
    marks: Marks,
}

/// Milliseconds per step for each part, averaged over buckets of steps.
#[derive(Serialize)]
struct TimesData {
    x: Vec<u64>,
    parts: Vec<Vec<f64>>,
}

/// Marks in the charts.
#[derive(Serialize)]
struct Marks {
    checkpoints: Vec<u64>,
    restarts: Vec<u64>,
    skipped: Vec<u64>,
    /// The last step before and the first step after each gap.
    gaps: Vec<[u64; 2]>,
}

/// A chart.
#[derive(Debug, Serialize)]
pub struct Chart {
    /// The id of the chart in the page.
    pub id: String,
    /// The title.
    pub title: String,
    /// The unit of its values: `bytes`, or empty for plain numbers.
    unit: &'static str,
    curves: Vec<CurveName>,
    /// Whether the page offers a logarithmic axis.
    pub may_be_logarithmic: bool,
}

#[derive(Debug, Serialize)]
struct CurveName {
    id: String,
    name: String,
}

impl PageData {
    /// Creates the data of runs with their labels.
    pub fn new(runs: &[RunRecords], labels: &[String]) -> Self {
        let buckets = (4 * MOST_BUCKETS / runs.len().max(1)).clamp(FEWEST_BUCKETS, MOST_BUCKETS);
        let data: Vec<RunData> = runs
            .iter()
            .zip(labels)
            .map(|(run, label)| RunData::new(run, label.clone(), buckets))
            .collect();
        let steps = || {
            data.iter()
                .flat_map(|run| run.curves.values())
                .flat_map(|curve| curve.x.iter().copied())
        };
        let range = [steps().min().unwrap_or(0), steps().max().unwrap_or(1)];
        let range = if range[0] == range[1] {
            [range[0].saturating_sub(1), range[1].saturating_add(1)]
        } else {
            range
        };
        let charts = charts(runs).into_iter().filter(|chart| {
            let holds =
                |run: &RunData| chart.curves.iter().any(|curve| run.curves.contains_key(&curve.id));
            data.iter().any(holds)
        });
        Self { charts: charts.collect(), runs: data, parts: PARTS, range, buckets }
    }

    /// Returns the charts that have a curve.
    pub fn charts(&self) -> &[Chart] {
        &self.charts
    }

    /// Returns the number of buckets of a curve.
    pub fn buckets(&self) -> usize {
        self.buckets
    }

    /// Returns true if curves with this many steps are downsampled.
    pub fn is_downsampled(&self, steps: usize) -> bool {
        steps > 2 * self.buckets
    }

    /// Returns true if the records of a run have the parts of the step time.
    pub fn has_times(&self, run: usize) -> bool {
        self.runs[run].times.is_some()
    }
}

/// Returns all charts that a page may have.
fn charts(runs: &[RunRecords]) -> Vec<Chart> {
    let loss = [
        ("loss", "training"),
        ("validation", "validation"),
        ("epoch_loss", "training, epoch mean"),
    ];
    let mut speeds: Vec<&str> = runs.iter().map(predictions).collect();
    speeds.dedup();
    let speed =
        if speeds.len() == 1 { format!("{}/s", speeds[0]) } else { "tokens/s or samples/s".into() };
    let mut charts = vec![
        chart("loss", "Loss", "", &loss, true),
        chart("norm", "Gradient norm", "", &[("norm", "gradient norm")], true),
        chart("rate", "Learning rate", "", &[("rate", "learning rate")], true),
        chart("speed", &format!("Throughput, {speed}"), "", &[("speed", "throughput")], false),
        chart("mfu", "Model FLOPs utilisation (MFU), %", "", &[("mfu", "MFU")], false),
        chart("energy", "Cumulative energy, kWh", "", &[("energy", "energy")], false),
        chart("memory", "Peak memory of rank 0", "bytes", &[("memory", "peak memory")], false),
        chart(
            "staleness",
            "Gradient staleness, mean of a step",
            "",
            &[("staleness", "staleness")],
            false,
        ),
    ];
    let metrics: BTreeSet<&String> =
        runs.iter().flat_map(|run| &run.evaluations).flat_map(|one| one.metrics.keys()).collect();
    for (at, name) in metrics.into_iter().enumerate() {
        let id = metric_id(at);
        let title = format!("Validation: {name}");
        charts.push(chart(&id, &title, "", &[(&metric_curve(name), name)], false));
    }
    charts
}

/// Returns a chart of curves with these ids and names.
fn chart(
    id: &str,
    title: &str,
    unit: &'static str,
    curves: &[(&str, &str)],
    may_be_logarithmic: bool,
) -> Chart {
    let curves = curves.iter();
    let curves = curves.map(|(id, name)| CurveName { id: (*id).into(), name: (*name).into() });
    Chart { id: id.into(), title: title.into(), unit, curves: curves.collect(), may_be_logarithmic }
}

/// Returns the id of a metric's chart. It is numbered, because names of metrics may have any
/// characters.
fn metric_id(at: usize) -> String {
    format!("metric-{at}")
}

fn metric_curve(name: &str) -> String {
    format!("metric {name}")
}

/// Returns the unit of a run's throughput.
pub fn predictions(run: &RunRecords) -> &'static str {
    if run.is_language() { "tokens" } else { "samples" }
}

impl RunData {
    fn new(run: &RunRecords, label: String, buckets: usize) -> Self {
        let steps = &run.steps;
        let mut curves = BTreeMap::new();
        let mut add = |id: &str, points: Vec<Point>, curve: fn(&[Point], usize) -> Curve| {
            if points.iter().any(|point| point.1.is_finite()) {
                curves.insert(id.to_owned(), curve(&points, buckets));
            }
        };
        let points = |value: fn(&Step) -> f64| with_gaps(steps, value);
        add("loss", points(|step| step.loss), Curve::downsampled);
        add("norm", points(|step| step.grad_norm), Curve::downsampled);
        add("rate", points(|step| step.lr), Curve::downsampled);
        add("speed", points(|step| step.tokens_per_second), Curve::downsampled);
        add("mfu", points(|step| step.mfu.map_or(f64::NAN, |mfu| 100.0 * mfu)), Curve::downsampled);
        add(
            "energy",
            steps.iter().filter_map(|step| Some((step.step, step.energy_kwh?))).collect(),
            Curve::sparse,
        );
        if steps.iter().any(|step| step.peak_bytes > 0) {
            add("memory", points(|step| step.peak_bytes as f64), Curve::downsampled);
        }
        add("staleness", staleness(run), Curve::downsampled);
        add("validation", losses(run, LossSplit::Validation), Curve::sparse);
        add("epoch_loss", losses(run, LossSplit::Training), Curve::sparse);
        let metrics: BTreeSet<&String> =
            run.evaluations.iter().flat_map(|one| one.metrics.keys()).collect();
        for name in metrics {
            let values = run.evaluations.iter();
            let values = values.filter_map(|one| Some((one.step, *one.metrics.get(name)?)));
            add(&metric_curve(name), ascending(values.collect()), Curve::sparse);
        }
        Self { label, curves, times: times(steps), marks: marks(run) }
    }
}

/// Returns the losses of evaluations over one kind of samples.
fn losses(run: &RunRecords, over: LossSplit) -> Vec<Point> {
    let done = run.evaluations.iter();
    let done = done.filter(|one| one.split == over && one.status == EvaluationStatus::Done);
    ascending(done.filter_map(|one| Some((one.step, one.loss?))).collect())
}

/// Sorts points by step, and keeps the last one of each step.
fn ascending(mut points: Vec<Point>) -> Vec<Point> {
    points.reverse();
    points.sort_by_key(|point| point.0);
    points.dedup_by_key(|point| point.0);
    points
}

/// Returns a value for every step, and a NaN where records are missing.
fn with_gaps(steps: &[Step], value: impl Fn(&Step) -> f64) -> Vec<Point> {
    let mut points = Vec::with_capacity(steps.len());
    let mut next = None;
    for step in steps {
        if next.is_some_and(|next| step.step > next) {
            points.extend(next.map(|next| (next, f64::NAN)));
        }
        points.push((step.step, value(step)));
        next = step.step.checked_add(1);
    }
    points
}

/// Returns the mean staleness of the gradients of each step.
fn staleness(run: &RunRecords) -> Vec<Point> {
    let mut of_steps: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for given in &run.worker_records {
        if let Some(staleness) = given.staleness {
            let (sum, count) = of_steps.entry(given.step).or_default();
            (*sum, *count) = (sum.saturating_add(staleness), *count + 1);
        }
    }
    of_steps.into_iter().map(|(step, (sum, count))| (step, sum as f64 / count as f64)).collect()
}

/// Returns the parts of the step time; `None` if no record has them.
fn times(steps: &[Step]) -> Option<TimesData> {
    let parts_of =
        |step: &Step| [step.compute_ms, step.comm_exposed_ms, step.loader_ms, step.optimizer_ms];
    if !steps.iter().any(|step| parts_of(step).iter().any(|ms| *ms > 0.0)) {
        return None;
    }
    let mut x = Vec::new();
    let mut all = vec![Vec::new(); PARTS.len()];
    for bucket in parts(steps, BUCKETS_OF_TIMES) {
        x.push(bucket[bucket.len() / 2].step);
        for (at, values) in all.iter_mut().enumerate() {
            let ms = mean(bucket.iter().map(|step| parts_of(step)[at]));
            values.push(ms.map_or(0.0, |ms| (ms * 1e4).round() / 1e4).max(0.0));
        }
    }
    Some(TimesData { x, parts: all })
}

fn marks(run: &RunRecords) -> Marks {
    let pairs = run.steps.windows(2).map(|pair| [pair[0].step, pair[1].step]);
    Marks {
        checkpoints: few(run.checkpoints.iter().map(|saved| saved.step).collect()),
        restarts: few(run.restarted_at()),
        skipped: few(run.steps.iter().filter(|step| step.skipped).map(|step| step.step).collect()),
        gaps: few(pairs.filter(|[before, after]| after - before > 1).collect()),
    }
}

/// Returns at most [`MOST_MARKS`] of them, evenly spaced.
fn few<T: Copy>(all: Vec<T>) -> Vec<T> {
    let every = all.len().div_ceil(MOST_MARKS).max(1);
    all.into_iter().step_by(every).collect()
}

/// Returns the curves of training and evaluation losses of a run for a plot.
pub fn loss_curves(run: &RunRecords, buckets: usize) -> [Curve; 2] {
    let mut evaluated = losses(run, LossSplit::Validation);
    if evaluated.is_empty() {
        evaluated = losses(run, LossSplit::Training);
    }
    [
        Curve::downsampled(&with_gaps(&run.steps, |step| step.loss), buckets),
        Curve::sparse(&evaluated, buckets),
    ]
}

/// Returns the mean milliseconds of each part of a step over the whole run, in the order of
/// [`PARTS`].
pub fn mean_times(steps: &[Step]) -> [f64; 4] {
    let mean_of = |value: fn(&Step) -> f64| mean(steps.iter().map(value)).map_or(0.0, rounded);
    [
        mean_of(|step| step.compute_ms),
        mean_of(|step| step.comm_exposed_ms),
        mean_of(|step| step.loader_ms),
        mean_of(|step| step.optimizer_ms),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_records_break_the_line() {
        let step = |step: u64, loss: f64| Step { step, loss, ..Step::default() };
        let steps = [step(5, 3.0), step(6, 2.5), step(9, 2.0)];
        let points = with_gaps(&steps, |step| step.loss);
        assert_eq!(points.iter().map(|point| point.0).collect::<Vec<_>>(), [5, 6, 7, 9]);
        assert!(points[2].1.is_nan());
        assert_eq!(Curve::downsampled(&points, 100).y, [Some(3.0), Some(2.5), None, Some(2.0)]);
    }

    #[test]
    fn marks_are_few() {
        assert_eq!(few((0..10).collect::<Vec<u64>>()).len(), 10);
        let marks = few((0..123_456).collect::<Vec<u64>>());
        assert!(marks.len() <= MOST_MARKS && marks[1] == 124, "{}", marks.len());
    }
}
