//! Scalars, texts and histograms of a run for TensorBoard, in `tensorboard/` of its directory
//! (`log.tensorboard`). Rank 0 writes them; a failed write does not end a run that has started.
//!
//! Each start of a run creates a new file, and removes the events of steps that it repeats from the
//! files before it.

mod events_file;
mod protocol;

use std::path::Path;

use events_file::EventsFile;
use protocol::{
    Content, Dim, Event, Metadata, Plugin, STRINGS, Shape, Summary, TENSORS, Tensor, Value, What,
};

use super::evaluations::{Evaluation, EvaluationStatus, LossSplit};
use super::metrics::Step;
use super::unix_time;
use hpctrain_base::error::Result;
use hpctrain_base::histogram::Histogram;
use hpctrain_parallel::Histograms;

/// The name of the directory in a run's directory.
pub const DIRECTORY: &str = "tensorboard";

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
        ];
        values.extend(optional.into_iter().filter_map(|(tag, value)| Some(scalar(tag, value?))));
        self.append(step, time, values);
    }

    /// Adds the loss and the metrics of an evaluation, if it is done.
    pub fn evaluation(&mut self, evaluation: &Evaluation) {
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
            return;
        };
        let kind = match over {
            LossSplit::Validation => "validation",
            LossSplit::Training => "training_epoch",
        };
        let mut values = vec![scalar(&format!("loss/{kind}"), loss.unwrap_or(f64::NAN))];
        values
            .extend(perplexity.map(|perplexity| scalar(&format!("{kind}/perplexity"), perplexity)));
        values
            .extend(metrics.iter().map(|(name, value)| scalar(&format!("{kind}/{name}"), *value)));
        self.append(*step, *time, values);
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
        self.file.append(&Event {
            wall_time,
            step: step as i64,
            what: Some(What::Summary(Summary { value })),
        });
    }
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
    use std::collections::BTreeMap;

    use super::*;

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
