//! The one training step: forwards and backwards of all micro-batches, in every layout the same code.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::model::Model;
use crate::activity::{Doing, span};
use crate::backend::{Kernels, MemoryKind};
use crate::comm::Group;
use crate::error::{Error, Result};
use crate::nn::{Context, Micro, Training};
use crate::parallel::{self, Action, ControlFlags, ReducedStep, StepSchedule};
use crate::random;

/// A model in training.
pub struct Engine<B: Kernels> {
    /// The network with parameters, gradients and optimizer state.
    pub model: Model<B>,
    /// Lanes and micro-batches of a step.
    pub geometry: Geometry,
}

/// The geometry of a step: its lanes and micro-batches, and the seed of its random streams.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    /// The order of work: lanes and micro-batches of this rank.
    pub schedule: StepSchedule,
    /// Predictions in the global batch.
    pub predictions: u64,
    /// Keep only the input of each block for the backward.
    pub recompute: bool,
    /// The run's seed.
    pub seed: u64,
}

impl Geometry {
    /// The context of a step for blocks, besides a micro-batch.
    fn training<'a, B: Kernels>(&self, micro: &Micro<B>, dropout: u64, ranks: &'a Group<B>) -> Training<'a, B> {
        let share = micro.rows() as f32 / self.predictions as f32;
        Training { dropout, ranks: Some(ranks), share }
    }
}

/// Results of a forward that its backward needs.
struct Tape<B: Kernels> {
    micro: Micro<B>,
    /// Input of every block.
    inputs: Vec<B::Buf>,
    /// Activations saved by every block; none where they are recomputed.
    saved: Vec<Option<Vec<B::Buf>>>,
    /// Gradient of the last block's output.
    dy: B::Buf,
}

impl<B: Kernels> Engine<B> {
    /// Computes and reduces the gradients of step `step`; `next` gives this rank's micro-batches in order, `flags` its
    /// control flags for all ranks, once the gradients are summed.
    ///
    /// # Errors
    /// A failure of the data, the device, or a message between ranks.
    pub fn gradients(
        &mut self,
        step: u64,
        mut next: impl FnMut() -> Result<Micro<B>>,
        flags: impl FnOnce() -> ControlFlags,
    ) -> Result<ReducedStep> {
        let Geometry { schedule, seed, .. } = self.geometry;
        let dropout = random::derive(seed, &[random::name("dropout"), step]);
        let (begun, waited, mut loading) = (Instant::now(), self.model.sharded.waited(), Duration::ZERO);
        self.model.sharded.begin(parallel::step(&self.model.borrows(), schedule), schedule.micros() > 1);
        let mut losses: Vec<Vec<B::Scalar>> =
            (0..schedule.lanes).map(|_| Vec::with_capacity(schedule.micros_per_lane)).collect();
        // By micro-batch.
        let mut tapes = BTreeMap::new();
        for action in schedule.actions() {
            match action {
                Action::Forward(k) => {
                    let asked = Instant::now();
                    let micro = next()?;
                    loading += asked.elapsed();
                    let (tape, loss) = self.forward(micro, dropout)?;
                    losses[schedule.lane(k)].push(loss);
                    tapes.insert(k, tape);
                }
                Action::Backward(k) => {
                    let tape = tapes.remove(&k).ok_or_else(|| Error::internal("a backward before its forward"))?;
                    self.backward(tape, dropout, schedule.lane_end(k))?;
                }
            }
        }
        let compute = begun.elapsed().saturating_sub(loading).as_secs_f64() - (self.model.sharded.waited() - waited);
        // Read now, not before: the device has no more to do.
        let Model { backend, sharded, .. } = &mut self.model;
        let total = |lane: Vec<B::Scalar>| lane.into_iter().try_fold(0.0, |sum, loss| Ok(sum + backend.read(loss)?));
        let losses: Vec<f64> = losses.into_iter().map(total).collect::<Result<_>>()?;
        sharded.reduce(&losses, compute.max(0.0), flags())
    }

    /// Forward of one micro-batch to the loss (a sum over predictions) and the gradient of the logits.
    fn forward(&mut self, micro: Micro<B>, dropout: u64) -> Result<(Tape<B>, B::Scalar)> {
        let Self { model: Model { backend, blocks, objective, sharded }, geometry } = self;
        let ranks = sharded.data().clone();
        let cx = Context { backend, micro: &micro, training: Some(geometry.training(&micro, dropout, &ranks)) };
        let mut x = backend.alloc(MemoryKind::Activations, 0)?;
        let (mut inputs, mut saved) = (Vec::with_capacity(blocks.len()), Vec::with_capacity(blocks.len()));
        for (unit, block) in blocks.iter().enumerate() {
            let name = sharded.name(unit).clone();
            let params = sharded.params(unit, block.borrows())?;
            let span = span(Doing::Forward, Some(&name));
            let (y, kept) = block.forward(&cx, params, &x)?;
            drop(span);
            sharded.release();
            inputs.push(std::mem::replace(&mut x, y));
            // The backward begins with the last block: its saved activations are not recomputed.
            let is_last = unit + 1 == blocks.len();
            let again = geometry.recompute && !is_last && !kept.is_empty();
            saved.push((!again).then_some(kept));
        }
        let scale = 1.0 / geometry.predictions as f32;
        let loss = objective.train(backend, &micro, &mut x, scale)?;
        Ok((Tape { micro, inputs, saved, dy: x }, loss))
    }

    /// Backward of one micro-batch; `lane_end` as [`StepSchedule::lane_end`] has it.
    fn backward(&mut self, tape: Tape<B>, dropout: u64, lane_end: Option<bool>) -> Result<()> {
        let Tape { micro, mut inputs, mut saved, mut dy } = tape;
        let Self { model: Model { backend, blocks, sharded, .. }, geometry } = self;
        let ranks = sharded.data().clone();
        let cx = Context { backend, micro: &micro, training: Some(geometry.training(&micro, dropout, &ranks)) };
        for (unit, block) in blocks.iter().enumerate().rev() {
            let (Some(x), Some(kept)) = (inputs.pop(), saved.pop()) else {
                return Err(Error::internal("a backward without what its forward kept"));
            };
            let name = sharded.name(unit).clone();
            let kept = match kept {
                Some(kept) => kept,
                None => {
                    let _span = span(Doing::Forward, Some(&name));
                    block.forward(&cx, sharded.params(unit, block.borrows())?, &x)?.1
                }
            };
            let (params, grads) = sharded.params_and_grads(unit, block.borrows())?;
            let span = span(Doing::Backward, Some(&name));
            dy = block.backward(&cx, params, grads, &x, kept, dy)?;
            drop(span);
            sharded.release();
            if let Some(last) = lane_end {
                sharded.lane_done(unit, last)?;
            }
        }
        Ok(())
    }
}
