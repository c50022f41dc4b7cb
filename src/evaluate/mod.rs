//! Evaluation: the validation loss, one number that does not depend on the ranks that computed it, and the evaluator
//! beside a trainer.

mod generate;
pub mod model;
mod own;
mod predict;
mod queue;
mod sidecar;

pub use generate::{Sampling, generate};
pub use predict::{Predictions, predict};
pub use queue::Policy;
pub use sidecar::{ABANDONED, Request, watch};

use std::collections::BTreeMap;
use std::fmt;

use crate::backend::Kernels;
use crate::comm::Group;
use crate::data::{Batch, Source};
use crate::engine::{Model, feed};
use crate::error::{Error, Result};
use crate::nn::Micro;
use crate::nn::loss::Metric;
use crate::tree::tree_sum;

/// Results of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct Measures {
    /// Mean loss a prediction.
    pub loss: f64,
    /// Metrics by name; none of language models, which are judged by the loss.
    pub metrics: BTreeMap<String, f64>,
}

impl Measures {
    /// Loss and metrics for people, for example: `loss 2.2638, perplexity 9.62`.
    pub fn told(&self) -> String {
        let loss = format!("loss {:.4}", self.loss);
        if self.metrics.is_empty() {
            return format!("{loss}, perplexity {:.2}", self.loss.exp());
        }
        self.metrics.iter().fold(loss, |told, (name, value)| format!("{told}, {name} {value:.4}"))
    }
}

impl fmt::Display for Measures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "validation {}", self.told())
    }
}

/// A fixed set of validation samples, cut into fixed chunks.
pub struct Evaluator {
    /// None where chunks are only counted.
    dataset: Option<Box<dyn Source>>,
    /// Predictions of a sample.
    context: usize,
    /// Digest of the data, where it is known.
    digest: Option<String>,
    samples: u64,
    chunk: u64,
}

impl Evaluator {
    /// The first `samples` of `dataset` (all without), `chunk` at a time.
    pub fn new(dataset: impl Source + 'static, samples: Option<u64>, chunk: u64) -> Self {
        let counting = Self::counting(&dataset, samples, chunk);
        Self { dataset: Some(Box::new(dataset)), ..counting }
    }

    /// As [`Evaluator::new`], where others read the samples: it counts chunks, and adds up their sums.
    pub fn counting(dataset: &dyn Source, samples: Option<u64>, chunk: u64) -> Self {
        let samples = samples.unwrap_or(u64::MAX).min(dataset.samples());
        let digest = dataset.fingerprint().map(|fingerprint| fingerprint.digest());
        Self { dataset: None, context: dataset.context(), digest, samples, chunk }
    }

    /// Chunks of the set.
    pub fn chunks(&self) -> u64 {
        self.samples.div_ceil(self.chunk)
    }

    /// The sums of a chunk, loss first: of the last stage of the pipeline.
    ///
    /// # Errors
    /// A failure of the data, the device, or a message between ranks.
    pub fn measure_chunk<B: Kernels>(&mut self, model: &mut Model<B>, chunk: u64) -> Result<Option<Vec<f64>>> {
        let micro = self.micro(model, chunk)?;
        model.measure(&micro)
    }

    /// The measures that follow from the sums of all chunks, in order.
    pub fn measures(&self, metrics: &[Metric], chunks: &[Vec<f64>]) -> Measures {
        let mean = |which: usize| {
            let sums: Vec<f64> = chunks.iter().map(|sums| sums.get(which).copied().unwrap_or(f64::NAN)).collect();
            tree_sum(&sums) / (self.samples * self.context as u64) as f64
        };
        let named = metrics.iter().enumerate().map(|(at, metric)| (metric.name().into(), metric.of_mean(mean(at + 1))));
        Measures { loss: mean(0), metrics: named.collect() }
    }

    /// Digest of the data that the set is of, where it is known.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Samples in the set.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Mean loss a prediction over the set, and metrics. Collective over `world`, the ranks of all stages: chunks go round
    /// the ranks with different data, each is computed whole by one of them, and all sums are added in chunk order. None
    /// if any rank was `interrupted` before the end.
    ///
    /// # Errors
    /// A failure of the data, the device, or a message between ranks.
    pub fn measure<B: Kernels>(
        &mut self,
        model: &mut Model<B>,
        world: &Group<B>,
        interrupted: impl Fn() -> bool,
    ) -> Result<Option<Measures>> {
        // Buffers of the training's sizes would lie idle meanwhile, and those of the evaluation afterwards.
        model.backend.trim();
        let chunks = self.chunks();
        let (data, stages) = (model.sharded.data().clone(), model.sharded.stage().count as u64);
        let ranks = data.size() as u64;
        let metrics = model.objective.metrics().to_vec();
        let mut sums = Vec::new();
        for round in 0..chunks.div_ceil(ranks) {
            // Between two meetings of all ranks every stage of the pipeline has a chunk to work on.
            if round.is_multiple_of(stages) {
                let told = world.gather_bytes(vec![u8::from(interrupted())]).wait()?;
                if told.iter().any(|told| *told != [0]) {
                    model.backend.trim();
                    return Ok(None);
                }
            }
            // Every rank computes in every round, because gathers of parameters are collective; results beyond the last
            // chunk do not count.
            let chunk = round * ranks + data.rank() as u64;
            let of_chunk = self.measure_chunk(model, chunk.min(chunks - 1))?;
            if chunk < chunks {
                sums.extend(of_chunk.into_iter().flatten());
            }
        }
        model.backend.trim();
        let message = sums.iter().flat_map(|sum: &f64| sum.to_le_bytes()).collect();
        let everyone = world.gather_bytes(message).wait()?;
        // The last stage has them; ranks that compute slices of the same have the same.
        let slices = model.sharded.slices().ranks();
        let everyone = &everyone[everyone.len() - data.size() * slices..];
        let width = 1 + metrics.len();
        let mut all = vec![vec![]; chunks as usize];
        for (rank, message) in everyone.iter().step_by(slices).enumerate() {
            for (round, of_chunk) in message.as_chunks::<8>().0.chunks_exact(width).enumerate() {
                let chunk = round * data.size() + rank;
                *all.get_mut(chunk).ok_or_else(|| Error::comm("a rank evaluated chunks that do not exist"))? =
                    of_chunk.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
            }
        }
        Ok(Some(self.measures(&metrics, &all)))
    }

    fn micro<B: Kernels>(&mut self, model: &Model<B>, chunk: u64) -> Result<Micro<B>> {
        let first = chunk * self.chunk;
        let last = (first + self.chunk).min(self.samples);
        let dataset = self.dataset.as_mut().ok_or_else(|| Error::internal("an evaluation without samples"))?;
        let batch = Batch::read(dataset, first..last, first..last)?;
        feed::micro(&model.backend, &batch, self.context, 0, model.sharded.stage())
    }
}
