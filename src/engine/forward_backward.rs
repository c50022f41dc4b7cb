//! The one training step: forwards and backwards of all micro-batches through the blocks of this
//! rank's stage, in every layout the same code.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::activation_offload::{ActivationOffload, OffloadedActivation};
use super::chunked_loss::{ChunkForward, ChunkedHead, RowChunk};
use super::model::Model;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::random;
use hpctrain_base::spans::{Doing, span};
use hpctrain_comm::{Group, Pending};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::{Context, DeferredWgrad, MicroBatch, Training};
use hpctrain_parallel::{Action, ControlFlags, Flow, ReducedStep, Sharded, StepSchedule};

/// A model in training.
pub struct Engine<B: Kernels> {
    /// The network with parameters, gradients and optimizer state.
    pub model: Model<B>,
    /// Virtual ranks and micro-batches of a step.
    pub geometry: Geometry,
    /// The host's memory for the inputs of blocks that are computed again; none if they stay on the
    /// device.
    pub host_inputs: Option<ActivationOffload<B>>,
}

/// The geometry of a step: its virtual ranks and micro-batches, and the seed of its random streams.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    /// The order of work: virtual ranks and micro-batches of this rank.
    pub schedule: StepSchedule,
    /// Rows of a micro-batch's activations.
    pub rows: usize,
    /// Predictions in the global batch.
    pub predictions: u64,
    /// Keep only the input of each block for the backward.
    pub recompute: bool,
    /// The run's seed.
    pub seed: u64,
}

impl Geometry {
    /// The factor of the gradient of a loss, which is a sum over predictions.
    fn scale(&self) -> f32 {
        1.0 / self.predictions as f32
    }

    /// The context of a step for blocks, besides a micro-batch.
    fn training<'a, B: Kernels>(
        &self,
        micro: &MicroBatch<B>,
        dropout: u64,
        ranks: &'a Group<B>,
    ) -> Training<'a, B> {
        let share = micro.rows() as f32 / self.predictions as f32;
        Training { dropout, ranks: Some(ranks), share }
    }
}

/// Results of a forward that its backward needs.
struct Tape<B: Kernels> {
    micro: MicroBatch<B>,
    /// Input of every block.
    inputs: Vec<Input<B>>,
    /// Activations saved by every block; none where they are recomputed.
    saved: Vec<Option<Vec<B::Buf>>>,
    /// The rows that the last block has computed, if they are the first of several pieces. In a
    /// box, so that maps of tapes stay small without pieces.
    piece: Option<Box<RowChunk<B>>>,
}

impl<B: Kernels> Tape<B> {
    /// The rows that the output is of.
    fn computed(&self) -> &MicroBatch<B> {
        self.piece.as_ref().map_or(&self.micro, |piece| &piece.micro)
    }
}

/// The input of a block.
enum Input<B: Kernels> {
    /// On the device.
    Here(B::Buf),
    /// On the host.
    Away(OffloadedActivation),
}

/// Products that the backwards of a stage's blocks have put off, the last block's first.
type DeferredWgrads<B> = Vec<(usize, Vec<DeferredWgrad<B>>)>;

impl<B: Kernels> Engine<B> {
    /// Computes and reduces the gradients of step `step`; `next` gives this rank's micro-batches in
    /// order, `flags` its control flags for all ranks, once the gradients are summed.
    ///
    /// # Errors
    /// A failure of the data, the device, or a message between ranks.
    pub fn gradients(
        &mut self,
        step: u64,
        mut next: impl FnMut() -> Result<MicroBatch<B>>,
        flags: impl FnOnce() -> ControlFlags,
    ) -> Result<ReducedStep> {
        let mut flags = Some(flags);
        let mut flags = || flags.take().map_or_else(ControlFlags::empty, |flags| flags());
        self.reduced_gradients(step, &mut next, &mut flags)
    }

    /// [`Self::gradients`], compiled once and not for each caller's closures.
    fn reduced_gradients(
        &mut self,
        step: u64,
        next: &mut dyn FnMut() -> Result<MicroBatch<B>>,
        flags: &mut dyn FnMut() -> ControlFlags,
    ) -> Result<ReducedStep> {
        let Geometry { schedule, rows, seed, .. } = self.geometry;
        let dropout = random::derive(seed, &[random::name("dropout"), step]);
        let begun = Instant::now();
        let waited = self.model.sharded.waited();
        let mut loading = Duration::ZERO;
        self.model.sharded.begin_step(schedule);
        let is_first = self.model.sharded.stage().is_first();
        let is_last = self.model.sharded.stage().is_last();
        let mut losses: Vec<Vec<B::Scalar>> = vec![];
        // Activations and gradients for computations to come, and the result of the last one;
        // tapes, and gradients of weights that were put off, by micro-batch.
        let mut inputs = BTreeMap::new();
        let mut result = None;
        let mut tapes = BTreeMap::new();
        let mut put_off = BTreeMap::new();
        let missing = |what: &str| Error::internal(format!("{what} before it was computed"));
        for action in schedule.actions() {
            match action {
                Action::Receive(flow, k) => {
                    let Model { backend, neighbours, sharded, .. } = &self.model;
                    let rows = sharded.slices().rows(rows).len();
                    let about = format!("micro-batch {k}");
                    inputs.insert((flow, k), neighbours.receive(backend, flow, rows, &about)?);
                }
                Action::Forward(k) => {
                    let asked = Instant::now();
                    let micro = next()?;
                    loading += asked.elapsed();
                    let x = match inputs.remove(&(Flow::Activations, k)) {
                        Some(arriving) => arriving.wait()?,
                        None => self.model.input(&micro)?,
                    };
                    let (tape, mut y) = self.forward(micro, x, dropout)?;
                    if is_last {
                        losses.resize_with(schedule.virtual_rank(k) + 1, Vec::new);
                        losses[schedule.virtual_rank(k)].push(self.loss(tape.computed(), &mut y)?);
                        inputs.insert((Flow::Gradients, k), Pending::ready(y));
                    } else {
                        result = Some(y);
                    }
                    tapes.insert(k, tape);
                }
                Action::Backward(k) | Action::BackwardInput(k) => {
                    let (Some(tape), Some(dy)) =
                        (tapes.remove(&k), inputs.remove(&(Flow::Gradients, k)))
                    else {
                        return Err(missing("a backward"));
                    };
                    let mut later =
                        matches!(action, Action::BackwardInput(_)).then(DeferredWgrads::new);
                    // Of the pieces after the first.
                    let mut more = vec![];
                    let dx = self.backward(
                        tape,
                        dy.wait()?,
                        dropout,
                        schedule.virtual_rank_end(k),
                        later.as_mut(),
                        &mut more,
                    )?;
                    if is_last {
                        losses[schedule.virtual_rank(k)].append(&mut more);
                    }
                    result = (!is_first).then_some(dx);
                    later.and_then(|later| put_off.insert(k, later));
                }
                Action::BackwardWeight(k) => {
                    let put_off =
                        put_off.remove(&k).ok_or_else(|| missing("gradients of weights"))?;
                    self.backward_weight(
                        put_off,
                        schedule.virtual_rank_start(k),
                        schedule.virtual_rank_end(k),
                    )?;
                }
                Action::Send(flow, _) => {
                    self.model
                        .neighbours
                        .send(flow, result.take().ok_or_else(|| missing("a message"))?);
                    // Not before: another stage waits for the message, which would come after them.
                    self.model.sharded.start_reductions()?;
                }
            }
        }
        let compute = begun.elapsed().saturating_sub(loading).as_secs_f64()
            - (self.model.sharded.waited() - waited);
        // Read now, not before: the device has no more to do. Ranks that compute slices of the same
        // have the same.
        let Model { backend, sharded, .. } = &mut self.model;
        if sharded.slices().held.start > 0 {
            losses.clear();
        }
        let total = |virtual_rank: Vec<B::Scalar>| {
            virtual_rank.into_iter().try_fold(0.0, |sum, loss| Ok(sum + backend.read(loss)?))
        };
        let losses: Vec<f64> = losses.into_iter().map(total).collect::<Result<_>>()?;
        sharded.reduce(&losses, compute.max(0.0), flags())
    }

    /// Forward of one micro-batch through the blocks of the stage, from their input to their
    /// output.
    fn forward(
        &mut self,
        micro: MicroBatch<B>,
        mut x: B::Buf,
        dropout: u64,
    ) -> Result<(Tape<B>, B::Buf)> {
        let first_piece = self.model.first_piece(micro.rows());
        let Self { model: Model { backend, blocks, sharded, .. }, geometry, host_inputs } = self;
        let ranks = sharded.step_data().clone();
        let tensor = sharded.tensor().cloned();
        let training = Some(geometry.training(&micro, dropout, &ranks));
        let cx = Context { backend, micro: &micro, training, tensor: tensor.as_ref() };
        let is_last = sharded.stage().is_last();
        let mut inputs = Vec::with_capacity(blocks.len());
        let mut saved = Vec::with_capacity(blocks.len());
        let mut piece = None;
        for (unit, block) in blocks.iter().enumerate() {
            let name = sharded.name(unit).clone();
            // The backward begins at once with the network's last block: its saved activations are
            // not recomputed.
            let begins = is_last && unit + 1 == blocks.len();
            // Beside the forward that reads it.
            let leaves = host_inputs.as_mut().filter(|_| !begins && B::len(&x) > 0);
            let away = leaves.map(|host| host.send(&mut x)).transpose()?;
            let params = sharded.params(unit)?;
            let span = span(Doing::Forward, Some(&name));
            if let Some(rows) = first_piece.clone().filter(|_| begins) {
                piece = Some(Box::new(RowChunk::cut(backend, &micro, &x, rows)?));
            }
            let (y, kept) = match &piece {
                None => block.forward(&cx, params, &x)?,
                Some(piece) => block.forward(&cx.of(&piece.micro), params, &piece.x)?,
            };
            drop(span);
            sharded.release();
            let input = std::mem::replace(&mut x, y);
            inputs.push(match (away, &host_inputs) {
                (Some(away), Some(host)) => {
                    host.sent()?;
                    Input::Away(away)
                }
                _ => Input::Here(input),
            });
            let again = geometry.recompute && !begins && !kept.is_empty();
            saved.push((!again).then_some(kept));
        }
        Ok((Tape { micro, inputs, saved, piece }, x))
    }

    /// The loss of the network's output (a sum over predictions), of which its gradient takes the
    /// place.
    fn loss(&mut self, micro: &MicroBatch<B>, output: &mut B::Buf) -> Result<B::Scalar> {
        let _span = span(Doing::Loss, None);
        let Model { backend, objective, sharded, .. } = &self.model;
        objective.train(backend, sharded.tensor(), micro, output, self.geometry.scale())
    }

    /// Backward of one micro-batch, from the gradient of the stage's output to that of its input;
    /// `virtual_rank_end` as [`StepSchedule::virtual_rank_end`] has it. Products for [`Engine::backward_weight`] go
    /// to `later`, if it is there, losses of rows that the forward has left to the backward to
    /// `losses`.
    fn backward(
        &mut self,
        tape: Tape<B>,
        mut dy: B::Buf,
        dropout: u64,
        virtual_rank_end: Option<bool>,
        mut later: Option<&mut DeferredWgrads<B>>,
        losses: &mut Vec<B::Scalar>,
    ) -> Result<B::Buf> {
        let Tape { micro, mut inputs, mut saved, mut piece } = tape;
        let Self { model, geometry, host_inputs } = self;
        let Model { backend, blocks, objective, sharded, tables, rows_at_once, .. } = model;
        let ranks = sharded.step_data().clone();
        let tensor = sharded.tensor().cloned();
        let training = Some(geometry.training(&micro, dropout, &ranks));
        let cx = Context { backend, micro: &micro, training, tensor: tensor.as_ref() };
        let mut input = Self::come(inputs.pop(), host_inputs)?;
        if virtual_rank_end.is_some() {
            sharded.virtual_rank_ends()?;
        }
        for (unit, block) in blocks.iter().enumerate().rev() {
            let (Some(x), Some(kept)) = (input.take(), saved.pop()) else {
                return Err(Error::internal("a backward without what its forward kept"));
            };
            if let Some(host) = host_inputs {
                host.arrived()?;
            }
            // Beside the backward of this block.
            input = Self::come(inputs.pop(), host_inputs)?;
            let name = sharded.name(unit).clone();
            let kept = match kept {
                Some(kept) => kept,
                None => {
                    let _span = span(Doing::Forward, Some(&name));
                    block.forward(&cx, sharded.params(unit)?, &x)?.1
                }
            };
            let mut deferred = later.is_some().then(Vec::new);
            let (params, mut grads) = sharded.params_and_grads(unit)?;
            grads.later = deferred.as_mut();
            let span = span(Doing::Backward, Some(&name));
            dy = match piece.take() {
                None => block.backward(&cx, params, grads, &x, kept, dy)?,
                Some(piece) => {
                    let block = &**block;
                    let scale = geometry.scale();
                    let end = ChunkedHead {
                        block,
                        name: &name,
                        objective,
                        scale,
                        at_once: *rows_at_once,
                    };
                    end.backward(
                        &cx,
                        params,
                        grads,
                        &x,
                        ChunkForward { piece: *piece, saved: kept, dy },
                        losses,
                    )?
                }
            };
            drop(span);
            sharded.release();
            match (&mut later, deferred) {
                (Some(later), Some(deferred)) => later.push((unit, deferred)),
                _ => Self::block_done(sharded, unit, virtual_rank_end, sharded.stage().is_first())?,
            }
        }
        match tables {
            None => Ok(dy),
            Some(tables) => {
                tables.backward(sharded.tables()?, &micro, dy, virtual_rank_end)?;
                backend.alloc(MemoryKind::Activations, 0)
            }
        }
    }

    /// An input on the device, or on its way there.
    fn come(
        input: Option<Input<B>>,
        host: &mut Option<ActivationOffload<B>>,
    ) -> Result<Option<B::Buf>> {
        match (input, host) {
            (Some(Input::Away(away)), Some(host)) => host.fetch(away).map(Some),
            (Some(Input::Away(_)), None) => Err(Error::internal("an input that no host has")),
            (Some(Input::Here(input)), _) => Ok(Some(input)),
            (None, _) => Ok(None),
        }
    }

    /// The gradients of weights that the backward of one micro-batch has put off: of the first of
    /// its virtual rank, or another.
    fn backward_weight(
        &mut self,
        put_off: DeferredWgrads<B>,
        is_virtual_rank_start: bool,
        virtual_rank_end: Option<bool>,
    ) -> Result<()> {
        let Model { backend, sharded, .. } = &mut self.model;
        for (unit, deferred) in put_off {
            let name = sharded.name(unit).clone();
            let span = span(Doing::Weights, Some(&name));
            {
                let mut grads = sharded.open_grads(unit, is_virtual_rank_start)?;
                deferred.into_iter().try_for_each(|deferred| grads.add(backend, deferred))?;
            }
            drop(span);
            // The virtual rank's last message to the stage before has left.
            Self::block_done(sharded, unit, virtual_rank_end, true)?;
        }
        Ok(())
    }

    /// A block has added all that a micro-batch has for its gradients. At the end of a virtual rank they
    /// are final; `reduces` if no stage waits for a message that a reduction would hold up.
    fn block_done(
        sharded: &mut Sharded<B>,
        unit: usize,
        virtual_rank_end: Option<bool>,
        reduces: bool,
    ) -> Result<()> {
        if let Some(last) = virtual_rank_end {
            sharded.virtual_rank_done(unit, last)?;
        }
        // Beside the computations of the other blocks.
        if reduces { sharded.start_reductions() } else { Ok(()) }
    }
}
