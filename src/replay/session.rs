//! The work of one rank of a replay: restores a checkpoint, and takes the steps after it.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::float_bits;
use super::range::SpikeBounds;
use super::recorder::{Observation, Recorder, StopAt, Usual, largest_loss};
use crate::backend::Kernels;
use crate::checkpoint::Progress;
use crate::comm::{self, Comm, Group};
use crate::config::{Config, ResolvedConfig};
use crate::engine::memory::{BaselineMemory, check as check_memory};
use crate::engine::micro_batches::{self, MicroBatches};
use crate::engine::{
    Engine, TensorKind, apply_gradients, engine, observe_parameters, plan, train_round,
};
use crate::error::{Error, Kind, Result};
use crate::parallel::ControlFlags;
use crate::run_dir::{RestoreOptions, RestoreScope, Resume, RunDirectory, resume};
use crate::topology::Topology;
use crate::verify::RankTask;

/// The task of the ranks of a replay.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReplayTask {
    /// The directory of the run.
    pub run: PathBuf,
    /// The configuration in one or several layouts, of which the first that fits into memory is
    /// used.
    pub layouts: Vec<Config>,
    /// The checkpoint to start from; `None` for step 0.
    pub from: Option<PathBuf>,
    /// The parts of it to restore.
    pub take: RestoreScope,
    /// The steps to compare, counted from 1.
    pub steps: RangeInclusive<u64>,
    /// The values at which to stop, if any.
    pub stop: Option<StopAt>,
    /// The bounds of spikes of the steps, from the records before them.
    pub bounds: BTreeMap<u64, SpikeBounds>,
    /// Whether samples of a micro-batch see each other, and why.
    pub mixing: Option<String>,
}

/// The results of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepOutcome {
    /// The step, counted from 1.
    pub step: u64,
    /// The mean loss.
    #[serde(with = "float_bits")]
    pub loss: f64,
    /// The norm of the gradient.
    #[serde(with = "float_bits")]
    pub norm: f64,
    /// The learning rate.
    #[serde(with = "float_bits")]
    pub lr: f64,
    /// Whether the update was skipped.
    pub skipped: bool,
}

/// The first tensor with bad values.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FirstBad {
    /// The step, counted from 1.
    pub step: u64,
    /// The tensor.
    pub seen: Observation,
    /// Its usual largest magnitude, if known.
    pub usual: Option<f64>,
    /// Whether no tensor exceeds the bound, and the largest loss of the step was taken instead.
    pub is_largest_loss: bool,
    /// The position of the first sample of the step.
    pub position: u64,
    /// The micro-batch run sample by sample; `None` if that is impossible.
    pub samples: Option<Vec<SampleOutcome>>,
    /// The parameter that the update before has grown the most, if it is a spike.
    pub grown: Option<GrownParameter>,
}

/// A parameter that an update has grown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GrownParameter {
    /// The step of the update.
    pub step: u64,
    /// The name of the parameter.
    pub tensor: String,
    /// Its usual largest magnitude.
    pub from: f64,
    /// Its largest magnitude after the update.
    pub to: f64,
}

/// One sample of a micro-batch, run alone.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SampleOutcome {
    /// The index of the sample in the global batch.
    pub index: u64,
    /// Its loss, a mean over its predictions.
    #[serde(with = "float_bits")]
    pub loss: f64,
    /// Whether it has bad values.
    pub is_bad: bool,
    /// The largest magnitude of the tensor that was found in the micro-batch.
    pub largest: f64,
}

/// The result of a replay, the same on all ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReplayOutcome {
    /// The step of the checkpoint.
    pub from: u64,
    /// The steps in the range.
    pub steps: Vec<StepOutcome>,
    /// The first tensor with bad values, if one was looked for and found.
    pub first_bad: Option<FirstBad>,
    /// The ZeRO stage of the replay.
    pub zero: u8,
}

impl RankTask for ReplayTask {
    const COMMAND: &'static str = "replay-rank";
    type Output = ReplayOutcome;

    fn config(&self) -> &Config {
        &self.layouts[0]
    }

    fn run<B: Kernels>(
        &self,
        comm: &Comm<B>,
        threads: Option<usize>,
        backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
    ) -> Result<ReplayOutcome> {
        Session::start(comm, self, threads, backend)?.run()
    }
}

/// A replay under way on one rank.
struct Session<'a, B: Kernels> {
    task: &'a ReplayTask,
    world: Group<B>,
    topology: Topology,
    plan: ResolvedConfig,
    engine: Engine<B>,
    feed: MicroBatches<B>,
    progress: Progress,
    from: u64,
    recorder: Recorder,
    usual: Usual,
    grown: Option<GrownParameter>,
}

impl<'a, B: Kernels> Session<'a, B> {
    /// Restores the state before the first step. Collective.
    fn start(
        comm: &Comm<B>,
        task: &'a ReplayTask,
        threads: Option<usize>,
        backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
    ) -> Result<Self> {
        let world = comm.world();
        let topology = Topology::gather(&world, comm.node().host)?;
        let threads = threads.unwrap_or_else(|| topology.threads());
        let (mut train, _) = micro_batches::open_staged(task.config(), &world, &topology)?;
        let mut fitting = None;
        for (number, config) in task.layouts.iter().enumerate() {
            let plan = plan(comm, config.clone(), &train, Some(threads))?;
            let memory = BaselineMemory::now(comm, &[&train]);
            match world.all_ok(check_memory::<B>(&plan, &topology, memory, None)) {
                Ok(()) => {
                    fitting = Some(plan);
                    break;
                }
                Err(e) if e.kind() == Kind::Input && number + 1 < task.layouts.len() => {}
                Err(e) => return Err(e),
            }
        }
        let plan = fitting.ok_or_else(|| Error::internal("a replay without a layout"))?;
        let comm = &comm.select_transport(plan.config.comm.transport, comm::probe_cuda_aware)?;
        let world = comm.world();
        let (mut engine, _) = engine(comm, &plan, backend(&plan)?, None)?;
        let from = task.from.clone().map_or(Resume::No, Resume::From);
        let directory = RunDirectory::at(&task.run);
        // Other data is refused before.
        let excluded = plan.excluded.as_ref().map(|excluded| excluded.summary());
        let taking = RestoreOptions { take: task.take, excluded, ..RestoreOptions::all() };
        let resumed = resume(
            &world,
            &mut engine.model.sharded,
            &plan,
            &directory,
            &from,
            &taking,
            &mut |manifest| manifest.conform(&mut train).map(drop),
        )?;
        let progress = resumed.progress;
        let feed = world.all_ok(MicroBatches::start(&engine.model, train, &plan, progress))?;
        Ok(Self {
            task,
            world,
            topology,
            plan,
            engine,
            feed,
            progress,
            from: progress.step,
            recorder: Recorder::default(),
            usual: Usual::default(),
            grown: None,
        })
    }

    /// Takes the steps.
    fn run(mut self) -> Result<ReplayOutcome> {
        let first = *self.task.steps.start();
        let last = *self.task.steps.end();
        let mut steps = Vec::new();
        let mut first_bad = None;
        while self.progress.step < last && first_bad.is_none() {
            let before = self.progress.step;
            let taken = match self.task.stop.filter(|_| before + 1 >= first) {
                None => self.round()?,
                Some(stop) => {
                    let (taken, found) = self.observed_step(stop)?;
                    first_bad = found;
                    vec![taken]
                }
            };
            let compared = taken.into_iter().filter(|one| self.task.steps.contains(&one.step));
            steps.extend(compared);
        }
        let zero = u8::from(self.plan.config.parallel.zero);
        Ok(ReplayOutcome { from: self.from, steps, first_bad, zero })
    }

    /// Takes the steps of a round as training does.
    fn round(&mut self) -> Result<Vec<StepOutcome>> {
        let before = self.progress.step;
        let round = train_round(
            &self.plan,
            &mut self.engine,
            || self.feed.next_micro(),
            &mut self.progress,
            ControlFlags::empty,
        )?;
        let steps = round.steps.iter().zip(before + 1..);
        let outcomes = steps.map(|(taken, step)| StepOutcome {
            step,
            loss: taken.loss,
            norm: taken.norm,
            lr: taken.lr,
            skipped: taken.skipped(),
        });
        Ok(outcomes.collect())
    }

    /// Takes a step whose tensors are recorded, up to the first bad one. Also returns that one.
    fn observed_step(&mut self, stop: StopAt) -> Result<(StepOutcome, Option<FirstBad>)> {
        let index = self.progress.step;
        if self.engine.observer.is_none() {
            observe_parameters(&mut self.recorder, &mut self.engine.model.sharded)?;
            let restored = self.recorder.take(&self.world)?;
            self.usual.note(&restored);
            self.engine.observer = Some(Box::new(self.recorder.clone()));
            if let Some(seen) = restored.iter().find(|seen| !seen.statistics.is_finite()) {
                return Err(Error::input(format!(
                    "{} of step {index} has {} elements that are not finite",
                    seen.tensor,
                    seen.statistics.nan + seen.statistics.inf
                ))
                .hint("replay an earlier range of steps, such as with --from-start")
                .shared());
            }
        }
        let reduced =
            self.engine.gradients(index, || self.feed.next_micro(), ControlFlags::empty)?;
        let computed = self.recorder.take(&self.world)?;
        let loss = reduced.loss / self.plan.tokens_per_replica() as f64;
        let norm = reduced.norm;
        let step = index + 1;
        let is_spike =
            self.task.bounds.get(&step).is_some_and(|bounds| bounds.are_exceeded(loss, norm));
        let found = match stop {
            // Gradients of single tensors vary more than those of the whole step.
            StopAt::Spike(_) if !is_spike && loss.is_finite() && norm.is_finite() => None,
            _ => self.find(&computed, stop, is_spike),
        };
        if let Some(found) = found {
            self.engine.model.sharded.skip()?;
            let samples = self.each_sample(&found, stop)?;
            let skipped = !(loss.is_finite() && norm.is_finite());
            let lr = self.plan.schedule.rate(index);
            let taken = StepOutcome { step: index + 1, loss, norm, lr, skipped };
            return Ok((taken, Some(FirstBad { samples, ..found })));
        }
        let taken = apply_gradients(
            &self.plan,
            &mut self.engine,
            reduced,
            index,
            &mut self.progress.updates,
        )?;
        let updated = self.recorder.take(&self.world)?;
        let found = self.find(&updated, stop, false);
        self.grown = self.usual.most_grown(&updated).map(|(seen, from)| GrownParameter {
            step,
            tensor: seen.tensor.clone(),
            from,
            to: seen.statistics.largest,
        });
        self.usual.note(&computed);
        self.usual.note(&updated);
        self.progress.step += 1;
        self.progress.position += self.plan.config.batch.global;
        let skipped = taken.skipped();
        let taken = StepOutcome { step: index + 1, loss, norm, lr: taken.lr, skipped };
        Ok((taken, found))
    }

    /// Returns the first bad tensor of the step under way or, if the step `is_spike` and no tensor
    /// is bad, its largest loss.
    fn find(&self, step: &[Observation], stop: StopAt, is_spike: bool) -> Option<FirstBad> {
        let found = self.usual.first_bad(step, stop);
        let seen = found.or_else(|| largest_loss(step).filter(|_| is_spike))?;
        Some(FirstBad {
            step: self.progress.step + 1,
            seen: seen.clone(),
            usual: self.usual.largest(seen),
            is_largest_loss: found.is_none(),
            position: self.progress.position,
            samples: None,
            grown: self.grown.clone(),
        })
    }

    /// Runs the micro-batch of a bad tensor sample by sample, with the parameters before the
    /// update: each sample as a virtual rank, so that its gradients are separate. Every rank runs
    /// one of its micro-batches, because the ranks make the same requests. Returns none for a
    /// tensor of the whole batch, and for samples that see each other.
    fn each_sample(
        &mut self,
        found: &FirstBad,
        stop: StopAt,
    ) -> Result<Option<Vec<SampleOutcome>>> {
        let counts = self.plan.virtual_rank_counts.as_deref().unwrap_or_default();
        let all_compute = !counts.contains(&0);
        let Some(micro) =
            found.seen.samples.clone().filter(|_| self.task.mixing.is_none() && all_compute)
        else {
            return Ok(None);
        };
        let rank = self.engine.model.sharded.data().rank();
        let progress = self.progress;
        let (mut train, _) =
            micro_batches::open_staged(&self.plan.config, &self.world, &self.topology)?;
        let (all, order) = micro_batches::read_schedule(&self.plan, &train, rank, progress)?;
        let mine: Vec<Range<u64>> = all.take_while(|at| self.is_in_step(at)).collect();
        // On the rank that has it the micro-batch, and any other micro-batch on the others.
        let wanted = progress.position + micro.start;
        let at = mine.iter().find(|at| at.start == wanted).or(mine.first());
        let at = at.cloned().ok_or_else(|| Error::internal("a rank without micro-batches"))?;
        if let Some(from) = &self.task.from {
            let manifest = crate::checkpoint::Manifest::read(from);
            self.world.all_ok(manifest.and_then(|manifest| manifest.conform(&mut train)))?;
        }
        let singles: Vec<Range<u64>> = at.map(|position| position..position + 1).collect();
        let count = singles.len();
        let model = &self.engine.model;
        let start = progress.position;
        let plan = &self.plan;
        let feed =
            MicroBatches::start_in_order(model, train, plan, start, singles.into_iter(), order);
        let mut feed = self.world.all_ok(feed)?;
        self.engine.expect_micro_batches(count);
        self.engine.gradients(progress.step, || feed.next_micro(), ControlFlags::empty)?;
        let seen = self.recorder.take(&self.world)?;
        let samples = micro.map(|index| self.sample(index, &seen, found, stop));
        Ok(Some(samples.collect()))
    }

    /// Returns true if positions belong to the step under way.
    fn is_in_step(&self, positions: &Range<u64>) -> bool {
        positions.start < self.progress.position + self.plan.config.batch.global
    }

    /// Returns the outcome of the sample with an index in the global batch, run alone.
    fn sample(
        &self,
        index: u64,
        seen: &[Observation],
        found: &FirstBad,
        stop: StopAt,
    ) -> SampleOutcome {
        let alone = Some(index..index + 1);
        let mut outcome = SampleOutcome { index, loss: 0.0, is_bad: false, largest: 0.0 };
        for one in seen.iter().filter(|one| one.samples == alone) {
            if one.kind == TensorKind::Loss {
                outcome.loss = match one.statistics.is_finite() {
                    true => one.statistics.largest / self.plan.network.context() as f64,
                    false => f64::NAN,
                };
            }
            let is_same = (one.kind, one.block, &one.tensor)
                == (found.seen.kind, found.seen.block, &found.seen.tensor);
            if is_same {
                outcome.largest = one.statistics.largest;
            }
            outcome.is_bad |= match stop {
                StopAt::Spike(_) => is_same && stop.is_bad(&one.statistics, found.usual),
                StopAt::Nan | StopAt::Inf => stop.is_bad(&one.statistics, None),
            };
        }
        outcome
    }
}
