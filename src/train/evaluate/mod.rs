//! Evaluation: the validation loss, which does not depend on the ranks that compute it, the
//! evaluator of a running training, predictions, and generated text.

mod classification_counts;
mod generate;
pub mod model;
mod new_checkpoints;
mod predict;
pub mod predictions;
mod queue;
mod run_announcement;
mod sidecar;
mod validation_set_check;

pub use generate::{Sampling, generate};
pub use new_checkpoints::{NewCheckpoint, NewCheckpoints};
pub use predict::{predict, predict_array};
pub use predictions::Predictions;
pub use queue::Policy;
pub use run_announcement::RunAnnouncement;
pub use sidecar::{CustomEvaluation, Evaluated, SidecarOptions, TRAINER_TIMEOUT, watch};

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use classification_counts::{ClassificationCounts, Targets, codes};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::escape::in_one_line;
use hpctrain_base::tree_sum::tree_sum;
use hpctrain_comm::Group;
use hpctrain_config::telemetry::classes::{Classes, MAX_CLASSES};
use hpctrain_config::telemetry::evaluations::Evaluation;
use hpctrain_data::{Batch, Source};
use hpctrain_device::Kernels;
use hpctrain_engine::{Model, micro_batches};
use hpctrain_nn::MicroBatch;
use hpctrain_nn::loss::{Classifier, Objective};

/// Returns the ranks that compute the first chunks of an evaluation, in proportion to their `shares`:
/// each chunk goes to the rank that has fewest for its share with it, of several to the first. The
/// next chunks are dealt in the same order again.
fn deal(shares: &[usize]) -> Vec<usize> {
    let mut counts = vec![0; shares.len()];
    let mut next = || {
        let with_share = (0..shares.len()).filter(|rank| shares[*rank] > 0);
        let rank = with_share.min_by(|one, other| {
            ((counts[*one] + 1) * shares[*other]).cmp(&((counts[*other] + 1) * shares[*one]))
        });
        let rank = rank.unwrap_or(0);
        counts[rank] += 1;
        rank
    };
    (0..shares.iter().sum()).map(|_| next()).collect()
}

/// Results of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct Metrics {
    /// Mean loss per prediction.
    pub loss: f64,
    /// Metrics by name. Empty for language models, which are judged by the loss.
    pub metrics: BTreeMap<String, f64>,
    /// The perplexity, if the loss is a cross-entropy that is judged by it.
    pub perplexity: Option<f64>,
    /// The mean loss of each data set of a mixture, by name.
    pub sets: BTreeMap<String, f64>,
    /// The results per class, for classifiers of few classes.
    pub classes: Option<Classes>,
}

impl Metrics {
    /// Formats loss and metrics for display, for example `loss 2.2638, perplexity 9.62`.
    pub fn describe(&self) -> String {
        let mut text = format!("loss {:.4}", self.loss);
        if let Some(perplexity) = self.perplexity {
            text += &format!(", perplexity {perplexity:.2}");
        }
        let mut add = |name: &str, value: f64| text += &format!(", {name} {value:.4}");
        self.metrics.iter().for_each(|(name, value)| add(name, *value));
        if let Some(classes) = &self.classes {
            add("macro F1", classes.means.f1);
            classes.roc_auc.iter().for_each(|auc| add("ROC AUC", *auc));
        }
        let sets: Vec<String> = self
            .sets
            .iter()
            .map(|(name, loss)| format!("{} {loss:.4}", in_one_line(name)))
            .collect();
        if sets.is_empty() { text } else { format!("{text} ({})", sets.join(", ")) }
    }

    /// Returns the record of this evaluation for `eval.jsonl`, made at `step`.
    pub fn evaluation(&self, step: u64) -> Evaluation {
        let sets = self.sets.iter().map(|(name, loss)| (name.clone(), Some(*loss))).collect();
        Evaluation {
            sets,
            classes: self.classes.clone(),
            perplexity: self.perplexity,
            ..Evaluation::done(step, self.loss, self.metrics.clone())
        }
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "validation {}", self.describe())
    }
}

/// A fixed set of validation samples, cut into fixed chunks.
pub struct Evaluator {
    /// `None` in an evaluator that only counts chunks.
    dataset: Option<Box<dyn Source>>,
    /// Predictions of a sample.
    context: usize,
    /// Digest of the data, if it is known.
    digest: Option<String>,
    /// Name and samples of each data set of a mixture. Samples are numbered consecutively.
    sets: Vec<(String, Range<u64>)>,
    /// Names of classes, if they have names.
    classes: Vec<String>,
    samples: u64,
    chunk: u64,
    /// The shares of the data-parallel ranks in the chunks, if they are unequal.
    shares: Option<Vec<usize>>,
}

impl Evaluator {
    /// Creates an evaluator of the first `samples` of `dataset` (default: all), `chunk` at a time.
    pub fn new(dataset: impl Source + 'static, samples: Option<u64>, chunk: u64) -> Self {
        let counting = Self::counting_only(&dataset, samples, chunk);
        Self { dataset: Some(Box::new(dataset)), ..counting }
    }

    /// Creates an evaluator that counts chunks and adds up their sums, while other processes read
    /// the samples.
    pub fn counting_only(dataset: &dyn Source, samples: Option<u64>, chunk: u64) -> Self {
        let samples = samples.unwrap_or(u64::MAX).min(dataset.samples());
        let digest = dataset.fingerprint().map(|fingerprint| fingerprint.digest());
        let mut sets = Vec::new();
        let mut first = 0;
        for (number, of_set) in dataset.parts().into_iter().enumerate() {
            sets.push((number.to_string(), first..first + of_set));
            first += of_set;
        }
        if sets.len() < 2 {
            sets.clear();
        }
        let classes = dataset.preprocessing().classes;
        Self {
            dataset: None,
            context: dataset.context(),
            digest,
            sets,
            classes,
            samples,
            chunk,
            shares: None,
        }
    }

    /// Sets names for the data sets of a mixture, which are numbered by default.
    #[must_use]
    pub fn with_set_names(mut self, names: Vec<String>) -> Self {
        for ((name, _), given) in self.sets.iter_mut().zip(names) {
            *name = given;
        }
        self
    }

    /// Returns the samples, unless this evaluator only counts chunks.
    pub fn into_source(self) -> Option<Box<dyn Source>> {
        self.dataset
    }

    /// Makes the data-parallel ranks compute chunks in proportion to these shares, one of which is
    /// not 0.
    pub fn deal_by(&mut self, shares: Vec<usize>) {
        self.shares = Some(shares).filter(|shares| shares.iter().any(|share| *share != shares[0]));
    }

    /// Returns the number of chunks of the set.
    pub fn chunks(&self) -> u64 {
        self.samples.div_ceil(self.chunk)
    }

    /// Returns the samples of a chunk.
    fn samples_of(&self, chunk: u64) -> Range<u64> {
        let first = chunk * self.chunk;
        first..(first + self.chunk).min(self.samples)
    }

    /// Returns the sums of a chunk: the loss, metrics, and losses of the data sets of a mixture,
    /// then a code for each sample of a classifier. `None` except on the last pipeline stage.
    ///
    /// # Errors
    /// Returns an error if the data, the device, or a message between ranks fails.
    pub fn measure_chunk<B: Kernels>(
        &mut self,
        model: &mut Model<B>,
        chunk: u64,
    ) -> Result<Option<Vec<f64>>> {
        let (batch, micro) = self.micro(model, chunk)?;
        let parts = self.rows_of_sets(self.samples_of(chunk));
        let Some(classifier) = classifier(&model.objective) else {
            return model.measure(&micro, &parts);
        };
        let Some(mut output) = model.output(&micro)? else { return Ok(None) };
        let outputs = model.download(&output, micro.rows())?;
        let targets = match classifier {
            Classifier::Softmax(_) => Targets::Classes(&batch.parts.classes),
            Classifier::Logit => Targets::Values(&batch.parts.values),
        };
        let codes = codes(classifier, &outputs, &targets);
        let tensor = model.sharded.tensor();
        let mut sums =
            model.objective.measure(&model.backend, tensor, &micro, &mut output, &parts)?;
        sums.extend(codes);
        Ok(Some(sums))
    }

    /// Returns the rows of each data set of a mixture among those of these samples.
    fn rows_of_sets(&self, samples: Range<u64>) -> Vec<Range<usize>> {
        let place = |sample: u64| {
            (sample.clamp(samples.start, samples.end) - samples.start) as usize * self.context
        };
        self.sets.iter().map(|(_, set)| place(set.start)..place(set.end)).collect()
    }

    /// Creates empty counts for the predictions of the set, if results per class are wanted.
    fn tally<B: Kernels>(&self, objective: &Objective<B>) -> Option<ClassificationCounts> {
        classifier(objective).map(|classifier| ClassificationCounts::new(classifier, self.samples))
    }

    /// Returns the number of sums in the result of a chunk, before its codes.
    fn width<B: Kernels>(&self, objective: &Objective<B>) -> usize {
        1 + objective.metrics().len() + self.sets.len()
    }

    /// Returns the metrics that follow from the results of [`Evaluator::measure_chunk`] for all
    /// chunks, in order.
    ///
    /// # Errors
    /// Returns an error if the result of a chunk is too short.
    pub fn measures<B: Kernels>(
        &self,
        objective: &Objective<B>,
        chunks: &[Vec<f64>],
    ) -> Result<Metrics> {
        let mut tally = self.tally(objective);
        let mut all = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let parts = chunk.split_at_checked(self.width(objective));
            let (sums, codes) = parts.ok_or_else(|| {
                Error::comm("a worker sent an incomplete result of an evaluation chunk")
            })?;
            all.push(sums);
            tally.iter_mut().for_each(|tally| tally.add(codes));
        }
        Ok(self.metrics_from_sums(objective, &all, tally))
    }

    /// Returns the metrics that follow from the sums of all chunks, in order, and the counts of all
    /// samples.
    fn metrics_from_sums<B: Kernels>(
        &self,
        objective: &Objective<B>,
        chunks: &[&[f64]],
        tally: Option<ClassificationCounts>,
    ) -> Metrics {
        let context = self.context as u64;
        let mean = |which: usize, samples: u64| {
            let sums: Vec<f64> =
                chunks.iter().map(|sums| sums.get(which).copied().unwrap_or(f64::NAN)).collect();
            tree_sum(&sums) / (samples * context) as f64
        };
        let metrics = objective.metrics();
        let named = metrics.iter().zip(1..).map(|(metric, at)| {
            let value = metric.from_mean(mean(at, self.samples));
            (metric.name().into(), value)
        });
        let sets = self.sets.iter().zip(1 + metrics.len()..).filter_map(|((name, set), at)| {
            let samples = set.end.min(self.samples).saturating_sub(set.start);
            (samples > 0).then(|| (name.clone(), mean(at, samples)))
        });
        let classes = tally.and_then(|tally| tally.classes(&self.classes));
        let loss = mean(0, self.samples);
        Metrics {
            loss,
            perplexity: objective.has_perplexity().then(|| loss.exp()),
            metrics: named.collect(),
            sets: sets.collect(),
            classes,
        }
    }

    /// Returns the digest of the data, if it is known.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Returns the number of samples in the set.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns the mean loss per prediction over the set, and metrics, or `None` if any rank was
    /// `interrupted` before the end. Collective over `world`, the ranks of all stages: chunks are
    /// dealt to the data-parallel ranks, equally or by [shares](Evaluator::deal_by), each is computed
    /// by one of them, and all sums are added in chunk order.
    ///
    /// # Errors
    /// Returns an error if the data, the device, or a message between ranks fails.
    pub fn measure<B: Kernels>(
        &mut self,
        model: &mut Model<B>,
        world: &Group<B>,
        interrupted: impl Fn() -> bool,
    ) -> Result<Option<Metrics>> {
        // Cached buffers of the training's sizes are of no use now, and those of the evaluation
        // afterwards.
        model.backend.trim();
        let chunks = self.chunks();
        let data = model.sharded.data().clone();
        let stages = model.sharded.stage().count as u64;
        let cycle = match &self.shares {
            Some(shares) => deal(shares),
            None => (0..data.size()).collect(),
        };
        let rank_of = |chunk: u64| cycle[chunk as usize % cycle.len()];
        let mut counts = vec![0_u64; data.size()];
        (0..chunks).for_each(|chunk| counts[rank_of(chunk)] += 1);
        let rounds = counts.iter().copied().max().unwrap_or(0);
        let mut mine = (0..chunks).filter(|chunk| rank_of(*chunk) == data.rank());
        let width = self.width(&model.objective);
        let mut sums = Vec::new();
        let mut tally = self.tally(&model.objective);
        for round in 0..rounds {
            // The ranks synchronise only every `stages` rounds, so that every pipeline stage has a
            // chunk to work on meanwhile.
            if round.is_multiple_of(stages) {
                let flags = world.gather_bytes(vec![u8::from(interrupted())]).wait()?;
                if flags.iter().any(|flag| *flag != [0]) {
                    model.backend.trim();
                    return Ok(None);
                }
            }
            let Some(chunk) = mine.next() else {
                // The others may all-gather parameters, which is collective.
                model.skip_output()?;
                continue;
            };
            if let Some(result) = self.measure_chunk(model, chunk)? {
                sums.extend_from_slice(&result[..width]);
                tally.iter_mut().for_each(|tally| tally.add(&result[width..]));
            }
        }
        model.backend.trim();
        let message = sums.iter().flat_map(|sum: &f64| sum.to_le_bytes()).collect();
        let everyone = world.gather_bytes(message).wait()?;
        // The ranks of the last stage have the sums, and all ranks of a tensor-parallel group the
        // same.
        let tensor_ranks = model.sharded.slices().ranks();
        let first = everyone.len() - data.size() * tensor_ranks;
        let mut of_ranks = Vec::with_capacity(data.size());
        for (message, count) in everyone[first..].iter().step_by(tensor_ranks).zip(&counts) {
            let of_chunks = message.as_chunks::<8>().0.chunks_exact(width);
            if of_chunks.len() as u64 != *count {
                return Err(Error::comm("a rank evaluated other chunks than it was dealt"));
            }
            of_ranks.push(of_chunks);
        }
        let next = |chunk| of_ranks[rank_of(chunk)].next().into_iter().flatten();
        let number = |bytes: &[u8; 8]| f64::from_le_bytes(*bytes);
        let all: Vec<Vec<f64>> =
            (0..chunks).map(next).map(|sums| sums.map(number).collect()).collect();
        if let Some(mine) = tally {
            let everyone = world.gather_bytes(mine.encode()).wait()?;
            tally = self.tally(&model.objective);
            for message in everyone[first..].iter().step_by(tensor_ranks) {
                tally.iter_mut().try_for_each(|tally| tally.merge(message))?;
            }
        }
        let all: Vec<&[f64]> = all.iter().map(Vec::as_slice).collect();
        Ok(Some(self.metrics_from_sums(&model.objective, &all, tally)))
    }

    fn micro<B: Kernels>(
        &mut self,
        model: &Model<B>,
        chunk: u64,
    ) -> Result<(Batch, MicroBatch<B>)> {
        let samples = self.samples_of(chunk);
        let dataset = self.dataset.as_mut().ok_or_else(|| {
            Error::internal("this evaluator only counts chunks and has no samples")
        })?;
        let batch = Batch::read(dataset, samples.clone(), samples)?;
        let micro =
            micro_batches::upload(&model.backend, &batch, self.context, 0, model.sharded.stage())?;
        Ok((batch, micro))
    }
}

/// Returns the classifier of an objective, if it has few enough classes for results per class.
fn classifier<B: Kernels>(objective: &Objective<B>) -> Option<Classifier> {
    objective.classifier().filter(|classifier| classifier.classes() <= MAX_CLASSES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_dealt_in_proportion() {
        assert_eq!(deal(&[1, 1, 1]), [0, 1, 2]);
        assert_eq!(deal(&[6, 2]), [0, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!(deal(&[0, 1, 2]), [2, 1, 2]);
        assert_eq!(deal(&[0, 3]), [1, 1, 1]);
        assert_eq!(deal(&[1]), [0]);
    }
}
