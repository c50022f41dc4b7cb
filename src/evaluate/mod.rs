//! Evaluation: the validation loss, one number that does not depend on the ranks that computed it, and the evaluator
//! beside a trainer.

mod generate;
pub mod model;
mod queue;
mod sidecar;

pub use generate::{Sampling, generate};
pub use queue::Policy;
pub use sidecar::{Request, watch};

use crate::backend::Kernels;
use crate::comm::Group;
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::nn::Micro;
use crate::parallel::tree_sum;
use crate::train::Engine;

/// A fixed set of validation samples, cut into fixed chunks.
pub struct Evaluator {
    dataset: Dataset,
    samples: u64,
    chunk: u64,
}

impl Evaluator {
    /// The first `samples` of `dataset` (all without), `chunk` at a time.
    pub fn new(dataset: Dataset, samples: Option<u64>, chunk: u64) -> Self {
        let samples = samples.unwrap_or(u64::MAX).min(dataset.samples());
        Self { dataset, samples, chunk }
    }

    /// Samples in the set.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Mean loss a prediction over the set. Collective over `data`: chunks go round the ranks, each is computed
    /// whole by one of them, and all sums are added in chunk order. None if any rank was `interrupted` before the end.
    ///
    /// # Errors
    /// Of the data, the device, or a message between ranks.
    pub fn loss<B: Kernels>(
        &mut self,
        engine: &mut Engine<B>,
        data: &Group<B>,
        interrupted: impl Fn() -> bool,
    ) -> Result<Option<f64>> {
        // Buffers of the training's sizes would lie idle meanwhile, and those of the evaluation afterwards.
        engine.backend.trim();
        let chunks = self.samples.div_ceil(self.chunk);
        let ranks = data.size() as u64;
        let mut sums = Vec::new();
        for round in 0..chunks.div_ceil(ranks) {
            let told = data.gather_bytes(vec![u8::from(interrupted())]).wait()?;
            if told.iter().any(|told| *told != [0]) {
                engine.backend.trim();
                return Ok(None);
            }
            // Every rank computes in every round, because gathers of parameters are collective; what a rank
            // computes beyond the last chunk does not count.
            let chunk = round * ranks + data.rank() as u64;
            let micro = self.micro(&engine.backend, chunk.min(chunks - 1))?;
            let sum = engine.loss(&micro)?;
            if chunk < chunks {
                sums.push(sum);
            }
        }
        engine.backend.trim();
        let message = sums.iter().flat_map(|sum: &f64| sum.to_le_bytes()).collect();
        let everyone = data.gather_bytes(message).wait()?;
        let mut all = vec![0.0; chunks as usize];
        for (rank, message) in everyone.iter().enumerate() {
            for (round, bytes) in message.as_chunks().0.iter().enumerate() {
                let chunk = round * data.size() + rank;
                *all.get_mut(chunk).ok_or_else(|| Error::comm("a rank evaluated chunks that do not exist"))? =
                    f64::from_le_bytes(*bytes);
            }
        }
        Ok(Some(tree_sum(&all) / (self.samples * self.dataset.context() as u64) as f64))
    }

    fn micro<B: Kernels>(&mut self, backend: &B, chunk: u64) -> Result<Micro<B>> {
        let time = self.dataset.context();
        let first = chunk * self.chunk;
        let last = (first + self.chunk).min(self.samples);
        let sequences = (last - first) as usize;
        let (mut inputs, mut targets) = (vec![0; sequences * time], vec![0; sequences * time]);
        for (i, (inputs, targets)) in inputs.chunks_mut(time).zip(targets.chunks_mut(time)).enumerate() {
            self.dataset.read(first + i as u64, inputs, targets)?;
        }
        let (tokens, targets) = (backend.upload_ints(&inputs)?, backend.upload_ints(&targets)?);
        Ok(Micro { tokens, targets, sequences, time, first })
    }
}
