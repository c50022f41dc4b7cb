//! Forward and backward of all micro-batches of a step through the blocks of this rank's stage. All
//! layouts use the same code.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::activation_offload::{ActivationOffload, OffloadedActivation};
use super::batch_loss::{MicroBatchLoss, batch_loss};
use super::chunked_loss::{ChunkForward, ChunkedHead, RowChunk};
use super::model::Model;
use super::tensor_observer::{
    ObservedTensor, TensorKind, TensorObserver, TensorStatistics, observe_gradients,
    observe_reduced, samples_in_batch, statistics,
};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fault;
use hpctrain_base::random;
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_comm::{Group, Pending};
use hpctrain_config::ResolvedConfig;
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::{Context, DeferredWgrad, MicroBatch, Training};
use hpctrain_parallel::{Action, ControlFlags, Flow, ReducedStep, Sharded, StepSchedule};

/// A model in training.
pub struct Engine<B: Kernels> {
    /// The network, with parameters, gradients and optimizer state.
    pub model: Model<B>,
    /// Virtual ranks and micro-batches of a step.
    pub geometry: Geometry,
    /// Offloads the inputs of recomputed blocks to the host. `None` if they stay on the device.
    pub activation_offload: Option<ActivationOffload<B>>,
    /// Sees the tensors of each step as they are computed. `None` in training.
    pub observer: Option<Box<dyn TensorObserver>>,
}

/// The geometry of a step: its virtual ranks and micro-batches, and the seed of its random streams.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    /// The pipeline schedule: virtual ranks and micro-batches of the ranks that have the most.
    pub schedule: StepSchedule,
    /// The first virtual ranks of the schedule, which this rank does not have. It only takes part in
    /// the all-gathers of parameters for them.
    pub idle_virtual_ranks: usize,
    /// Rows of a micro-batch's activations.
    pub rows: usize,
    /// Predictions in the global batch.
    pub predictions: u64,
    /// Whether only the input of each block is saved for the backward (activation checkpointing).
    pub recompute: bool,
    /// The seed of the run.
    pub seed: u64,
}

impl Geometry {
    /// Returns the factor of the gradient of a loss that is a sum over predictions.
    fn scale(&self) -> f32 {
        1.0 / self.predictions as f32
    }

    /// Returns whether this rank computes nothing in a step.
    fn has_no_virtual_ranks(&self) -> bool {
        self.idle_virtual_ranks == self.schedule.virtual_ranks
    }

    /// Returns whether this rank has no part in an action of its schedule.
    fn is_idle(&self, action: Action) -> bool {
        let (Action::Receive(_, k)
        | Action::Send(_, k)
        | Action::Forward(k)
        | Action::Backward(k)
        | Action::BackwardInput(k)
        | Action::BackwardWeight(k)) = action;
        self.schedule.virtual_rank(k) < self.idle_virtual_ranks
    }

    /// Returns the training context of blocks for a micro-batch.
    fn training<'a, B: Kernels>(
        &self,
        micro: &MicroBatch<B>,
        dropout: u64,
        ranks: &'a Group<B>,
    ) -> Training<'a, B> {
        let share = micro.rows() as f32 / self.predictions as f32;
        Training { dropout, ranks: Some(ranks), batch_fraction: share }
    }
}

/// The state that the backward of a micro-batch needs from its forward.
struct SavedForward<B: Kernels> {
    micro: MicroBatch<B>,
    /// The input of every block.
    inputs: Vec<Input<B>>,
    /// Activations saved by every block. `None` where they are recomputed.
    saved: Vec<Option<Vec<B::Buf>>>,
    /// The rows that the last block has computed, if they are the first of several chunks. Boxed,
    /// since most micro-batches have none.
    chunk: Option<Box<RowChunk<B>>>,
}

impl<B: Kernels> SavedForward<B> {
    /// Returns the rows that the output is for.
    fn computed(&self) -> &MicroBatch<B> {
        self.chunk.as_ref().map_or(&self.micro, |chunk| &chunk.micro)
    }
}

/// The input of a block.
enum Input<B: Kernels> {
    /// The input is on the device.
    OnDevice(B::Buf),
    /// The input is on the host.
    OnHost(OffloadedActivation),
}

/// The deferred wgrads of a stage's blocks, the last block's first.
type DeferredWgrads<B> = Vec<(usize, Vec<DeferredWgrad<B>>)>;

/// Shows the loss of a micro-batch to an observer.
fn observe_loss(
    observer: &mut dyn TensorObserver,
    block: usize,
    samples: Range<u64>,
    loss: f64,
) -> Result<()> {
    observer.observe(&ObservedTensor {
        kind: TensorKind::Loss,
        block,
        unit: "",
        tensor: "",
        samples: Some(samples),
        statistics: TensorStatistics::default().with(loss),
    })
}

impl<B: Kernels> Engine<B> {
    /// Expects the virtual ranks of `plan`, in which only their numbers on the ranks differ from the
    /// plan that the engine was made for.
    pub fn expect_virtual_ranks(&mut self, plan: &ResolvedConfig) {
        let sharded = &mut self.model.sharded;
        sharded.expect(&plan.assignment());
        self.geometry.schedule = plan.step_schedule(sharded.stage().index);
        self.geometry.idle_virtual_ranks = plan.idle_virtual_ranks(sharded.data().rank());
    }

    /// Expects `count` micro-batches of every rank in the next steps, each a virtual rank, instead of
    /// those of the layout. Their gradients are for looking at: no update may take them.
    pub fn expect_micro_batches(&mut self, count: usize) {
        self.geometry.schedule = StepSchedule::alone(count, 1);
        self.geometry.idle_virtual_ranks = 0;
        self.model.sharded.expect_virtual_ranks(count);
    }

    /// Computes and reduces the gradients of step `step`. `next` returns this rank's micro-batches
    /// in order; `flags` returns its control flags, and is called once the gradients are summed.
    ///
    /// # Errors
    /// Returns an error if the data, the device, or a message between ranks fails.
    pub fn gradients(
        &mut self,
        step: u64,
        mut next: impl FnMut() -> Result<MicroBatch<B>>,
        flags: impl FnOnce() -> ControlFlags,
    ) -> Result<ReducedStep> {
        let mut flags = Some(flags);
        self.reduced_gradients(step, &mut next, &mut || {
            flags.take().map_or_else(ControlFlags::empty, |flags| flags())
        })
    }

    /// Does the work of [`Self::gradients`], compiled once rather than for each caller's closures.
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
        let over_batch = self.model.objective.over_batch();
        let mut losses: Vec<Vec<B::Scalar>> = vec![];
        // The outputs of micro-batches, for a loss of the whole batch.
        let mut outputs = vec![];
        // Activations and gradients for later actions, and the result of the last one.
        let mut inputs = BTreeMap::new();
        let mut result = None;
        // By micro-batch.
        let mut saved_forwards = BTreeMap::new();
        let mut deferred_wgrads = BTreeMap::new();
        let missing = |what: &str| {
            Error::internal(format!("{what} is scheduled before its inputs are computed"))
        };
        for action in schedule.actions() {
            if self.geometry.is_idle(action) {
                self.skip(action)?;
                continue;
            }
            match action {
                Action::Receive(flow, k) => {
                    let Model { backend, p2p: neighbours, sharded, .. } = &self.model;
                    let rows = sharded.slices().rows(rows).len();
                    let about = format!("micro-batch {k}");
                    inputs.insert((flow, k), neighbours.receive(backend, flow, rows, &about)?);
                }
                Action::Forward(k) => {
                    fault::point("forward");
                    let asked = Instant::now();
                    let micro = next()?;
                    loading += asked.elapsed();
                    let x = match inputs.remove(&(Flow::Activations, k)) {
                        Some(arriving) => arriving.wait()?,
                        None => self.model.input(&micro)?,
                    };
                    let (saved_forward, mut y) = self.forward(micro, x, dropout)?;
                    let samples = samples_in_batch(&saved_forward.micro);
                    if is_last && over_batch {
                        // The loss waits for the last output.
                        outputs.push(y);
                    } else if is_last {
                        losses.resize_with(schedule.virtual_rank(k) + 1, Vec::new);
                        let loss = self.loss(saved_forward.computed(), &mut y)?;
                        self.observe_losses(&samples, std::slice::from_ref(&loss))?;
                        losses[schedule.virtual_rank(k)].push(loss);
                        inputs.insert((Flow::Gradients, k), Pending::ready(y));
                    } else {
                        result = Some(y);
                    }
                    saved_forwards.insert(k, saved_forward);
                    if is_last && over_batch && k + 1 == schedule.micros() {
                        let results =
                            self.batch_loss(&saved_forwards, std::mem::take(&mut outputs))?;
                        losses.resize_with(schedule.virtual_ranks, Vec::new);
                        let idle =
                            self.geometry.idle_virtual_ranks * schedule.micros_per_virtual_rank;
                        for (k, MicroBatchLoss { loss, gradient }) in (idle..).zip(results) {
                            let samples = saved_forwards
                                .get(&k)
                                .map(|saved: &SavedForward<B>| samples_in_batch(&saved.micro));
                            self.observe_losses(
                                &samples.unwrap_or_default(),
                                std::slice::from_ref(&loss),
                            )?;
                            losses[schedule.virtual_rank(k)].push(loss);
                            inputs.insert((Flow::Gradients, k), Pending::ready(gradient));
                        }
                    }
                }
                Action::Backward(k) | Action::BackwardInput(k) => {
                    let (Some(saved_forward), Some(dy)) =
                        (saved_forwards.remove(&k), inputs.remove(&(Flow::Gradients, k)))
                    else {
                        return Err(missing("a backward"));
                    };
                    let mut wgrads =
                        matches!(action, Action::BackwardInput(_)).then(DeferredWgrads::new);
                    fault::point("backward");
                    let samples = samples_in_batch(&saved_forward.micro);
                    // Losses of the chunks after the first.
                    let mut chunk_losses = vec![];
                    let dx = self.backward(
                        saved_forward,
                        dy.wait()?,
                        dropout,
                        schedule.virtual_rank_end(k),
                        wgrads.as_mut(),
                        &mut chunk_losses,
                    )?;
                    if is_last {
                        self.observe_losses(&samples, &chunk_losses)?;
                        losses[schedule.virtual_rank(k)].append(&mut chunk_losses);
                    }
                    result = (!is_first).then_some(dx);
                    wgrads.and_then(|wgrads| deferred_wgrads.insert(k, (samples, wgrads)));
                }
                Action::BackwardWeight(k) => {
                    let (samples, wgrads) =
                        deferred_wgrads.remove(&k).ok_or_else(|| missing("a wgrad"))?;
                    self.backward_weight(
                        wgrads,
                        &samples,
                        schedule.virtual_rank_start(k),
                        schedule.virtual_rank_end(k),
                    )?;
                }
                Action::Send(flow, _) => {
                    self.model.p2p.send(flow, result.take().ok_or_else(|| missing("a message"))?);
                    // Reductions start after the message, for which another stage waits.
                    self.model.sharded.start_reductions()?;
                }
            }
        }
        losses.drain(..self.geometry.idle_virtual_ranks.min(losses.len()));
        // All tensor-parallel ranks have the same losses, so only the first reports them.
        let sharded = &mut self.model.sharded;
        if sharded.slices().held.start > 0 {
            losses.clear();
        }
        let compute = |waited_now: f64| {
            let spent = begun.elapsed().saturating_sub(loading).as_secs_f64();
            (spent - (waited_now - waited)).max(0.0)
        };
        fault::point("summary");
        let reduced = sharded.reduce(losses, compute, flags())?;
        if let Some(observer) = &mut self.observer {
            observe_reduced(&mut **observer, &self.model.sharded)?;
        }
        Ok(reduced)
    }

    /// Shows losses of the micro-batch with `samples` to the observer, if there is one.
    fn observe_losses(&mut self, samples: &Range<u64>, losses: &[B::Scalar]) -> Result<()> {
        let Some(observer) = &mut self.observer else { return Ok(()) };
        let block = self.model.sharded.units_before() + self.model.blocks.len();
        losses.iter().try_for_each(|loss| {
            let loss = self.model.backend.peek(loss)?;
            observe_loss(&mut **observer, block, samples.clone(), loss)
        })
    }

    /// Takes the turns of blocks in an action of a micro-batch that this rank does not have. A rank
    /// that has none reduces gradients with the last one.
    fn skip(&mut self, action: Action) -> Result<()> {
        let schedule = self.geometry.schedule;
        let reduces = self.geometry.has_no_virtual_ranks();
        let ends_step = |k| reduces && schedule.virtual_rank_end(k) == Some(true);
        if let Action::Forward(_) = action {
            return self.model.skip_forward();
        }
        let Model { blocks, sharded, host_embedding, .. } = &mut self.model;
        let units = 0..blocks.len();
        match action {
            Action::Backward(k) | Action::BackwardInput(k) => {
                // With deferred weight gradients these are reduced later.
                let reduces_now = ends_step(k) && matches!(action, Action::Backward(_));
                for unit in units.rev() {
                    sharded.skip_turn(unit)?;
                    if reduces_now {
                        sharded.reduce_of_others(unit)?;
                    }
                }
                match host_embedding {
                    Some(_) => sharded.host_units()?.skip_backward(),
                    None => Ok(()),
                }
            }
            Action::BackwardWeight(k) if ends_step(k) => {
                units.rev().try_for_each(|unit| sharded.reduce_of_others(unit))
            }
            Action::Forward(_)
            | Action::Receive(..)
            | Action::Send(..)
            | Action::BackwardWeight(_) => Ok(()),
        }
    }

    /// Computes the forward of one micro-batch through the blocks of the stage.
    fn forward(
        &mut self,
        micro: MicroBatch<B>,
        mut x: B::Buf,
        dropout: u64,
    ) -> Result<(SavedForward<B>, B::Buf)> {
        let first_chunk = self.model.first_chunk(micro.rows());
        let Self {
            model: Model { backend, blocks, objective, sharded, .. },
            geometry,
            activation_offload: host_inputs,
            observer,
        } = self;
        let ranks = sharded.step_data().clone();
        let tensor = sharded.tensor().cloned();
        let training = Some(geometry.training(&micro, dropout, &ranks));
        let cx = Context { backend, micro: &micro, training, tensor: tensor.as_ref() };
        let is_last = sharded.stage().is_last();
        let mut inputs = Vec::with_capacity(blocks.len());
        let mut saved = Vec::with_capacity(blocks.len());
        let mut chunk = None;
        for (unit, block) in blocks.iter().enumerate() {
            let name = sharded.name(unit).clone();
            // The backward of the network's last block follows at once: its activations are not
            // recomputed.
            let is_last_block = is_last && unit + 1 == blocks.len();
            // The copy overlaps with the forward that reads the input.
            let offload = host_inputs.as_mut().filter(|_| !is_last_block && B::len(&x) > 0);
            let offloaded = offload.map(|host| host.send(&mut x)).transpose()?;
            let params = sharded.params(unit)?;
            let span = span(ActivityKind::Forward, Some(&name));
            if let Some(rows) = first_chunk.clone().filter(|_| is_last_block) {
                chunk = Some(Box::new(RowChunk::copy_rows(backend, &micro, &x, rows)?));
            }
            let (y, activations) = match &chunk {
                None => block.forward(&cx, params, &x)?,
                Some(chunk) => {
                    block.forward(&cx.with_micro_batch(&chunk.micro), params, &chunk.x)?
                }
            };
            drop(span);
            sharded.release();
            if let Some(observer) = observer {
                let rows = chunk.as_ref().map_or(&micro, |chunk| &chunk.micro).rows();
                let statistics = match block.pads_output() {
                    true => TensorStatistics::new(&objective.download(backend, &y, rows, 0)?),
                    false => statistics(backend, &y)?,
                };
                observer.observe(&ObservedTensor {
                    kind: TensorKind::Output,
                    block: sharded.units_before() + unit,
                    unit: &name,
                    tensor: "",
                    samples: Some(samples_in_batch(&micro)),
                    statistics,
                })?;
            }
            let input = std::mem::replace(&mut x, y);
            inputs.push(match (offloaded, &host_inputs) {
                (Some(offloaded), Some(host)) => {
                    host.sent()?;
                    Input::OnHost(offloaded)
                }
                _ => Input::OnDevice(input),
            });
            let recompute = geometry.recompute && !is_last_block && !activations.is_empty();
            saved.push((!recompute).then_some(activations));
        }
        Ok((SavedForward { micro, inputs, saved, chunk }, x))
    }

    /// Computes the loss of the network's output, a sum over predictions, and replaces the output
    /// by its gradient.
    fn loss(&mut self, micro: &MicroBatch<B>, output: &mut B::Buf) -> Result<B::Scalar> {
        let _span = span(ActivityKind::Loss, None);
        let Model { backend, objective, sharded, .. } = &self.model;
        objective.train(backend, sharded.tensor(), micro, output, self.geometry.scale())
    }

    /// Computes the loss of the whole batch from the outputs of this rank's micro-batches.
    fn batch_loss(
        &self,
        saved_forwards: &BTreeMap<usize, SavedForward<B>>,
        outputs: Vec<B::Buf>,
    ) -> Result<Vec<MicroBatchLoss<B>>> {
        let Model { backend, objective, sharded, .. } = &self.model;
        let micros: Vec<&MicroBatch<B>> =
            saved_forwards.values().map(SavedForward::computed).collect();
        let ranks = sharded.step_data();
        let most = self.geometry.schedule.micros();
        batch_loss(backend, objective, ranks, (&micros, most), outputs, self.geometry.scale())
    }

    /// Computes the backward of one micro-batch, from the gradient of the stage's output to that of
    /// its input. `virtual_rank_end` is the result of [`StepSchedule::virtual_rank_end`]. With
    /// `wgrads`, the wgrads are deferred and added there for [`Engine::backward_weight`]. The
    /// losses of chunks after the first go to `losses`.
    fn backward(
        &mut self,
        saved_forward: SavedForward<B>,
        mut dy: B::Buf,
        dropout: u64,
        virtual_rank_end: Option<bool>,
        mut wgrads: Option<&mut DeferredWgrads<B>>,
        losses: &mut Vec<B::Scalar>,
    ) -> Result<B::Buf> {
        let SavedForward { micro, mut inputs, mut saved, mut chunk } = saved_forward;
        let Self { model, geometry, activation_offload: host_inputs, observer } = self;
        let Model {
            backend,
            blocks,
            objective,
            sharded,
            host_embedding: tables,
            loss_chunk_rows: rows_at_once,
            ..
        } = model;
        let ranks = sharded.step_data().clone();
        let tensor = sharded.tensor().cloned();
        let training = Some(geometry.training(&micro, dropout, &ranks));
        let cx = Context { backend, micro: &micro, training, tensor: tensor.as_ref() };
        let mut input = Self::fetch(inputs.pop(), host_inputs)?;
        if virtual_rank_end.is_some() {
            sharded.virtual_rank_ends()?;
        }
        for (unit, block) in blocks.iter().enumerate().rev() {
            let (Some(x), Some(activations)) = (input.take(), saved.pop()) else {
                return Err(Error::internal("backward called without saved activations"));
            };
            if let Some(host) = host_inputs {
                host.arrived()?;
            }
            // The copy overlaps with the backward of this block.
            input = Self::fetch(inputs.pop(), host_inputs)?;
            let name = sharded.name(unit).clone();
            let activations = match activations {
                Some(activations) => activations,
                None => {
                    let _span = span(ActivityKind::Forward, Some(&name));
                    block.forward(&cx, sharded.params(unit)?, &x)?.1
                }
            };
            let mut deferred = wgrads.is_some().then(Vec::new);
            let (params, mut grads) = sharded.params_and_grads(unit)?;
            grads.deferred = deferred.as_mut();
            let span = span(ActivityKind::Backward, Some(&name));
            dy = match chunk.take() {
                None => block.backward(&cx, params, grads, &x, activations, dy)?,
                Some(chunk) => {
                    let block = &**block;
                    let scale = geometry.scale();
                    let head = ChunkedHead {
                        block,
                        name: &name,
                        objective,
                        scale,
                        chunk_rows: *rows_at_once,
                    };
                    head.backward(
                        &cx,
                        params,
                        grads,
                        &x,
                        ChunkForward { chunk: *chunk, saved: activations, dy },
                        losses,
                    )?
                }
            };
            drop(span);
            sharded.release();
            if let Some(observer) = observer {
                let samples = samples_in_batch(&micro);
                if deferred.is_none() {
                    observe_gradients(&mut **observer, backend, sharded, unit, &samples)?;
                }
                observer.observe(&ObservedTensor {
                    kind: TensorKind::InputGradient,
                    block: sharded.units_before() + unit,
                    unit: &name,
                    tensor: "",
                    samples: Some(samples),
                    statistics: statistics(backend, &dy)?,
                })?;
            }
            match (&mut wgrads, deferred) {
                (Some(wgrads), Some(deferred)) => wgrads.push((unit, deferred)),
                _ => Self::block_done(sharded, unit, virtual_rank_end, sharded.stage().is_first())?,
            }
        }
        match tables {
            None => Ok(dy),
            Some(tables) => {
                tables.backward(sharded.host_units()?, &micro, dy, virtual_rank_end)?;
                backend.alloc(MemoryKind::Activations, 0)
            }
        }
    }

    /// Returns an input on the device, or starts to copy it there.
    fn fetch(
        input: Option<Input<B>>,
        host: &mut Option<ActivationOffload<B>>,
    ) -> Result<Option<B::Buf>> {
        match (input, host) {
            (Some(Input::OnHost(offloaded)), Some(host)) => host.fetch(offloaded).map(Some),
            (Some(Input::OnHost(_)), None) => {
                Err(Error::internal("an input was offloaded without a host"))
            }
            (Some(Input::OnDevice(input)), _) => Ok(Some(input)),
            (None, _) => Ok(None),
        }
    }

    /// Computes the wgrads that the backward of the micro-batch with `samples` has deferred.
    /// `is_virtual_rank_start` is true for the first micro-batch of a virtual rank.
    fn backward_weight(
        &mut self,
        wgrads: DeferredWgrads<B>,
        samples: &Range<u64>,
        is_virtual_rank_start: bool,
        virtual_rank_end: Option<bool>,
    ) -> Result<()> {
        let Model { backend, sharded, .. } = &mut self.model;
        for (unit, deferred) in wgrads {
            let name = sharded.name(unit).clone();
            let span = span(ActivityKind::Weights, Some(&name));
            {
                let mut grads = sharded.open_grads(unit, is_virtual_rank_start)?;
                deferred
                    .into_iter()
                    .try_for_each(|deferred| grads.add_deferred(backend, deferred))?;
            }
            drop(span);
            if let Some(observer) = &mut self.observer {
                observe_gradients(&mut **observer, backend, sharded, unit, samples)?;
            }
            // The virtual rank's last message to the previous stage was sent already.
            Self::block_done(sharded, unit, virtual_rank_end, true)?;
        }
        Ok(())
    }

    /// Notes that a block's gradients of a micro-batch are added. At the end of a virtual rank the
    /// gradients are final. `reduces` is true if no stage waits for a message that a reduction
    /// would delay.
    fn block_done(
        sharded: &mut Sharded<B>,
        unit: usize,
        virtual_rank_end: Option<bool>,
        reduces: bool,
    ) -> Result<()> {
        if let Some(last) = virtual_rank_end {
            sharded.virtual_rank_done(unit, last)?;
        }
        // Reductions overlap with the computations of the other blocks.
        if reduces { sharded.start_reductions() } else { Ok(()) }
    }
}
