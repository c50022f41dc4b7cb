//! Scalars, texts and histograms of a run for TensorBoard, in `tensorboard/` of its directory
//! (`log.tensorboard`). Rank 0 writes them; a failed write does not end a run that has started.
//!
//! Each start of a run creates a new file, and removes the events of steps that it repeats from the
//! files before it. Evaluators write their evaluations into a separate directory
//! ([`write_evaluations`]), which follows from `eval.jsonl`.

mod events_file;
mod protocol;

use std::collections::BTreeMap;
use std::path::Path;

use events_file::{EventsFile, ExistingEvents};
use prost::Message as _;
use protocol::{
    Content, Dim, Event, Metadata, Plugin, STRINGS, Shape, Summary, TENSORS, Tensor, Value, What,
};

use super::evaluations::{Evaluation, EvaluationStatus, LossSplit};
use super::metrics::Step;
use super::unix_time;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::histogram::Histogram;
use hpctrain_base::own_files;
use hpctrain_parallel::Histograms;

/// The name of the directory in a run's directory.
pub const DIRECTORY: &str = "tensorboard";

/// The name of the directory in [`DIRECTORY`] with the events of evaluators. TensorBoard follows
/// one growing file of a directory only, and shows this directory as another run in the same
/// charts.
pub const EVALUATOR_DIRECTORY: &str = "evaluator";

/// The file that a process locks while it writes events of evaluators.
const LOCK: &str = ".lock";

/// Writes the events of a run.
pub struct TensorBoard {
    file: EventsFile,
    /// The tag of the throughput.
    rate: &'static str,
}

impl TensorBoard {
    /// Creates the file of a run that is at `step`. Throughput is in tokens for language models,
    /// else in samples.
    ///
    /// # Errors
    /// Returns an error if a file cannot be created or rewritten.
    pub fn begin(directory: &Path, step: u64, is_language: bool) -> Result<Self> {
        let rate = if is_language { "speed/tokens_per_second" } else { "speed/samples_per_second" };
        Ok(Self { file: EventsFile::begin(directory, step, unix_time())?, rate })
    }

    /// Adds the scalars of a step.
    pub fn step(&mut self, record: &Step) {
        let Step {
            step, loss, lr, grad_norm, skipped, tokens_per_second, peak_bytes, time, ..
        } = *record;
        let mut values = vec![
            scalar("loss/training", loss),
            scalar("optimizer/learning_rate", lr),
            scalar("optimizer/gradient_norm", grad_norm),
            scalar("optimizer/skipped", f64::from(u8::from(skipped))),
            scalar("progress/epoch", record.epoch),
            scalar(self.rate, tokens_per_second),
            scalar("memory/peak_bytes", peak_bytes as f64),
            scalar("time/step_ms", record.step_ms),
        ];
        let parts = [
            ("time/compute_ms", record.compute_ms),
            ("time/exposed_communication_ms", record.comm_exposed_ms),
            ("time/hidden_communication_ms", record.comm_hidden_ms),
            ("time/loader_ms", record.loader_ms),
            ("time/optimizer_ms", record.optimizer_ms),
        ];
        values.extend(parts.map(|(tag, ms)| scalar(tag, ms)));
        let optional = [
            ("speed/tflops_per_rank", record.tflops_per_rank),
            ("speed/mfu", record.mfu),
            ("energy/joules_per_token", record.joules_per_token),
            ("energy/kwh", record.energy_kwh),
            ("time/hooks_ms", record.hooks_ms),
        ];
        values.extend(optional.into_iter().filter_map(|(tag, value)| Some(scalar(tag, value?))));
        self.append(step, time, values);
    }

    /// Adds the loss and the metrics of an evaluation, if it is done.
    pub fn evaluation(&mut self, evaluation: &Evaluation) {
        if let Some(event) = evaluation_event(evaluation) {
            self.file.append(&event);
        }
    }

    /// Adds the mean and the largest staleness of the gradients of a step on parameter servers, if
    /// there are any.
    pub fn staleness(&mut self, step: u64, of_gradients: &[u64]) {
        let Some(largest) = of_gradients.iter().max() else { return };
        let mean = of_gradients.iter().sum::<u64>() as f64 / of_gradients.len() as f64;
        let values = vec![
            scalar("servers/staleness", mean),
            scalar("servers/largest_staleness", *largest as f64),
        ];
        self.append(step, unix_time(), values);
    }

    /// Adds the number of restarts before this start of a supervised run.
    pub fn restarts(&mut self, step: u64, restarts: usize) {
        self.append(step, unix_time(), vec![scalar("supervise/restarts", restarts as f64)]);
    }

    /// Adds a text, which is shown verbatim.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) {
        self.append(step, unix_time(), vec![as_text(tag, text)]);
    }

    /// Adds histograms of tensors of one `kind`, such as `gradients`, and the number of values that
    /// are not finite, if any.
    pub fn histograms(&mut self, step: u64, kind: &str, of_tensors: &Histograms) {
        let mut values = Vec::with_capacity(of_tensors.len());
        for (name, histogram) in of_tensors {
            values.extend(as_histogram(format!("{kind}/{name}"), histogram));
            let not_finite = histogram.not_finite();
            values.extend(
                (not_finite > 0)
                    .then(|| scalar(&format!("not_finite/{kind}/{name}"), not_finite as f64)),
            );
        }
        self.append(step, unix_time(), values);
    }

    /// Writes all events that could not be written before.
    pub fn flush(&mut self) {
        self.file.flush();
    }

    fn append(&mut self, step: u64, wall_time: f64, value: Vec<Value>) {
        self.file.append(&summary(step, wall_time, value));
    }
}

/// Makes the events files of evaluators in `directory` contain the evaluations of checkpoints among
/// `evaluations`, each once, in the order of their steps: appends those that are missing, and
/// rewrites those that the run no longer has. Several evaluators may call this at once, and so may
/// the trainer.
///
/// # Errors
/// Returns an error if a file cannot be read or written.
pub fn write_evaluations(directory: &Path, evaluations: &[Evaluation]) -> Result<()> {
    let parent = directory.parent().unwrap_or(directory);
    for path in [parent, directory] {
        own_files::create_directory(path).map_err(|e| Error::io("create", path, e))?;
    }
    let path = directory.join(LOCK);
    let lock = own_files::create(&path).and_then(|file| file.lock().map(|()| file));
    if let Err(e) = &lock {
        log::warn!("cannot lock {}: {e}", path.display());
    }
    // The last evaluation of a step counts.
    let by_step: BTreeMap<u64, Event> = evaluations
        .iter()
        .filter(|one| one.checkpoint.is_some())
        .filter_map(|one| Some((one.step, evaluation_event(one)?)))
        .collect();
    let points: Vec<Event> = by_step.into_values().collect();
    let ExistingEvents { summaries, last } = ExistingEvents::read(directory)?;
    // Encoded, a number that is not finite equals itself.
    let is_same = |(old, new): &(&Event, &Event)| old.encode_to_vec() == new.encode_to_vec();
    let same = summaries.iter().zip(&points).take_while(is_same).count();
    let mut file = match last.filter(|_| same == summaries.len()) {
        Some(_) if same == points.len() => return Ok(()),
        Some(last) => EventsFile::reopen(last),
        None => {
            let before = points[..same].last().map_or(0, |event| event.step as u64);
            EventsFile::begin(directory, before, unix_time())?
        }
    };
    file.write_all(&points[same..])
}

/// Returns the point of an evaluation, if it is done.
fn evaluation_event(evaluation: &Evaluation) -> Option<Event> {
    let Evaluation {
        step,
        status: EvaluationStatus::Done,
        split: over,
        loss,
        perplexity,
        metrics,
        time,
        ..
    } = evaluation
    else {
        return None;
    };
    let kind = match over {
        LossSplit::Validation => "validation",
        LossSplit::Training => "training_epoch",
    };
    let mut values = vec![scalar(&format!("loss/{kind}"), loss.unwrap_or(f64::NAN))];
    values.extend(perplexity.map(|perplexity| scalar(&format!("{kind}/perplexity"), perplexity)));
    values.extend(metrics.iter().map(|(name, value)| scalar(&format!("{kind}/{name}"), *value)));
    Some(summary(*step, *time, values))
}

/// Creates an event with values.
fn summary(step: u64, wall_time: f64, value: Vec<Value>) -> Event {
    Event { wall_time, step: step as i64, what: Some(What::Summary(Summary { value })) }
}

fn scalar(tag: &str, value: f64) -> Value {
    Value { tag: tag.into(), metadata: None, content: Some(Content::Simple(value as f32)) }
}

/// Formats a text as a code block, so that no character of it is interpreted as Markdown.
fn as_text(tag: &str, text: &str) -> Value {
    let block: String = text.lines().flat_map(|line| ["    ", line, "\n"]).collect();
    let plugin = Plugin { name: "text".into() };
    let shape = Shape { dim: vec![Dim { size: 1 }] };
    let tensor =
        Tensor { dtype: STRINGS, shape: Some(shape), string_val: vec![block.into_bytes()] };
    Value {
        tag: tag.into(),
        metadata: Some(Metadata { plugin: Some(plugin), data_class: TENSORS }),
        content: Some(Content::Tensor(tensor)),
    }
}

/// Converts a histogram; `None` if it has no finite values.
fn as_histogram(tag: String, histogram: &Histogram) -> Option<Value> {
    let (min, max) = histogram.bounds()?;
    let (bucket_limit, bucket) =
        histogram.buckets().into_iter().map(|(limit, count)| (limit, count as f64)).unzip();
    let content = protocol::Histogram {
        min: min.into(),
        max: max.into(),
        num: histogram.count() as f64,
        sum: histogram.sum(),
        sum_squares: histogram.sum_of_squares(),
        bucket_limit,
        bucket,
    };
    Some(Value { tag, metadata: None, content: Some(Content::Histogram(content)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns steps and losses of the points in the files of evaluators.
    fn points(directory: &Path) -> Vec<(i64, f32)> {
        let events = ExistingEvents::read(directory).unwrap().summaries;
        let loss = |event: &Event| match &event.what {
            Some(What::Summary(Summary { value })) => match &value[0].content {
                Some(Content::Simple(loss)) => (event.step, *loss),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        };
        events.iter().map(loss).collect()
    }

    /// Returns the number of events files.
    fn files(directory: &Path) -> usize {
        let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name != LOCK).count()
    }

    #[test]
    fn evaluations_have_one_point_each_whatever_happened_before() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join(DIRECTORY).join(EVALUATOR_DIRECTORY);
        let of = |step, loss| Evaluation {
            checkpoint: Some("x".into()),
            ..Evaluation::done(step, loss, BTreeMap::new())
        };
        let failed = Evaluation { status: EvaluationStatus::Failed, ..of(3, 0.0) };
        let inline = Evaluation::done(2, 9.0, BTreeMap::new());
        let mut all = vec![of(2, 3.0), inline, failed, of(4, 2.5)];
        write_evaluations(&directory, &all).unwrap();
        assert_eq!(points(&directory), [(2, 3.0), (4, 2.5)]);
        // An evaluator that is started again adds what is missing, to the same file.
        write_evaluations(&directory, &all).unwrap();
        all.push(of(6, 2.0));
        write_evaluations(&directory, &all).unwrap();
        assert_eq!(points(&directory), [(2, 3.0), (4, 2.5), (6, 2.0)]);
        assert_eq!(files(&directory), 1);
        // The run goes back to step 2 and reaches step 4 again.
        all.truncate(1);
        all.push(of(4, 2.25));
        write_evaluations(&directory, &all).unwrap();
        assert_eq!((points(&directory), files(&directory)), (vec![(2, 3.0), (4, 2.25)], 2));
        // A kill has truncated the last record, and a loss is not a number.
        let last = ExistingEvents::read(&directory).unwrap().last.unwrap();
        let bytes = std::fs::read(&last).unwrap();
        std::fs::write(&last, &bytes[..bytes.len() - 3]).unwrap();
        write_evaluations(&directory, &all).unwrap();
        assert_eq!(points(&directory), [(2, 3.0), (4, 2.25)]);
        all.push(of(6, f64::NAN));
        write_evaluations(&directory, &all).unwrap();
        let before = files(&directory);
        write_evaluations(&directory, &all).unwrap();
        assert_eq!((points(&directory).len(), files(&directory)), (3, before));
        // Another evaluator has finished an earlier step later.
        all.push(of(5, 2.1));
        write_evaluations(&directory, &all).unwrap();
        let steps: Vec<i64> = points(&directory).iter().map(|point| point.0).collect();
        assert_eq!(steps, [2, 4, 5, 6]);
    }

    #[test]
    fn points_are_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::begin(dir.path(), 4, true).unwrap();
        board.step(&Step { step: 5, loss: 2.5, tokens_per_second: 1e6, ..Step::default() });
        board.evaluation(&Evaluation::done(5, 2.0, BTreeMap::new()));
        board.evaluation(&Evaluation { status: EvaluationStatus::Failed, ..Evaluation::default() });
        board.text(5, "texts/sample", "# one\ntwo");
        let mut histogram = Histogram::default();
        histogram.add(&[1.0, -1.0, 3.0, f32::NAN]);
        let nothing = ("empty".to_string(), Histogram::default());
        board.histograms(
            5,
            "weights",
            &Histograms::from([("h.0".to_string(), histogram), nothing]),
        );
        board.staleness(5, &[]);
        board.staleness(5, &[1, 4]);
        let entry = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap();
        let events = events_file::events(&std::fs::read(entry.path()).unwrap());
        let mut seen = BTreeMap::new();
        for Event { step, what, .. } in &events[2..] {
            let Some(What::Summary(Summary { value })) = what else { panic!("{what:?}") };
            seen.extend(
                value.iter().map(|one| (one.tag.clone(), (*step, one.content.clone().unwrap()))),
            );
        }
        assert_eq!(seen["loss/training"], (5, Content::Simple(2.5)));
        assert_eq!(seen["loss/validation"], (5, Content::Simple(2.0)));
        assert_eq!(seen["speed/tokens_per_second"], (5, Content::Simple(1e6)));
        assert_eq!(seen["servers/staleness"], (5, Content::Simple(2.5)));
        assert_eq!(seen["not_finite/weights/h.0"], (5, Content::Simple(1.0)));
        let (_, Content::Tensor(text)) = &seen["texts/sample"] else { panic!("{seen:?}") };
        assert_eq!(text.string_val, [b"    # one\n    two\n"]);
        let (_, Content::Histogram(found)) = &seen["weights/h.0"] else { panic!("{seen:?}") };
        assert_eq!(
            (found.min, found.max, found.num, found.sum, found.sum_squares),
            (-1.0, 3.0, 3.0, 3.0, 11.0)
        );
        assert_eq!(found.bucket.iter().sum::<f64>(), 3.0);
        assert!(!seen.contains_key("weights/empty"));
    }
}
