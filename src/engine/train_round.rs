//! One round of optimizer steps, from their data to their updates. A run repeats rounds;
//! `hpctrain verify` compares them. A round is one step or, with local SGD, the steps up to the
//! next average.

use std::time::{Duration, Instant};

use super::forward_backward::Engine;
use super::tensor_observer::observe_parameters;
use hpctrain_base::error::{Error, Result};
use hpctrain_config::ResolvedConfig;
use hpctrain_device::Kernels;
use hpctrain_nn::MicroBatch;
use hpctrain_parallel::Progress;
use hpctrain_parallel::{
    AllFlags, ControlFlags, Hyper, LocalSgd, Owned, ReducedStep, ReplicaStep, RoundSummary, mean,
    steps_of_replicas,
};

/// The result of a round: the same on all ranks, except for times.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// The steps, at least one.
    pub steps: Vec<StepResult>,
    /// Control flags of each rank.
    pub flags: AllFlags,
}

/// The result of a step: the same on all ranks, except for times. With local SGD, loss and norm are
/// means over the replicas.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// Mean loss of the global batch.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Number of replicas that skipped the update because loss or gradient was not finite. In a
    /// step that all ranks take together, 0 or 1.
    pub skips: usize,
    /// Seconds that each rank computed, without waits for messages and data.
    pub compute: Vec<f64>,
    /// Time of this rank's update.
    pub update_time: Duration,
}

impl StepResult {
    /// Returns true if an update was skipped.
    pub fn skipped(&self) -> bool {
        self.skips > 0
    }
}

/// A part in a round for its caller. A function that returns this rank's flags does nothing else.
pub trait RoundObserver<B: Kernels> {
    /// Returns this rank's requests. Called once, at the end of the round.
    fn flags(&mut self) -> ControlFlags;

    /// Returns true if [`RoundObserver::updated`] is called for the update that finishes step
    /// `step`, which all ranks take together. `flags` are those of all ranks.
    fn observes(&mut self, _step: u64, _flags: &AllFlags) -> bool {
        false
    }

    /// Receives a part of a unit that this rank saves, after its update.
    ///
    /// # Errors
    /// Returns an error if the round cannot go on.
    fn updated(&mut self, _owned: Owned<'_, B>) -> Result<()> {
        Ok(())
    }
}

impl<B: Kernels, F: FnMut() -> ControlFlags> RoundObserver<B> for F {
    fn flags(&mut self) -> ControlFlags {
        self()
    }
}

/// Takes the next round: for each step the gradients of all micro-batches, then the clipped update,
/// which is skipped if loss or gradient is not finite. `next` returns micro-batches in order.
/// `observer` returns this rank's requests at the end of the round.
///
/// # Errors
/// Returns an error if the data, the device, or a message between ranks fails.
pub fn train_round<B: Kernels>(
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    mut next: impl FnMut() -> Result<MicroBatch<B>>,
    progress: &mut Progress,
    mut observer: impl RoundObserver<B>,
) -> Result<Round> {
    let round = match plan.local_sgd {
        None => sync_step(plan, engine, &mut next, progress, &mut observer)?,
        Some(averaging) => {
            local_sgd_round(plan, averaging, engine, &mut next, progress, &mut observer)?
        }
    };
    progress.step += round.steps.len() as u64;
    progress.position += plan.config.batch.global * round.steps.len() as u64;
    Ok(round)
}

/// Takes a step together with all ranks.
fn sync_step<B: Kernels>(
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    next: &mut dyn FnMut() -> Result<MicroBatch<B>>,
    progress: &mut Progress,
    observer: &mut dyn RoundObserver<B>,
) -> Result<Round> {
    let step = progress.step;
    let reduced = engine.gradients(step, next, || observer.flags())?;
    let flags = reduced.flags.clone();
    let result =
        apply_observed(plan, engine, reduced, step, &mut progress.updates, Some(observer))?;
    Ok(Round { steps: vec![result], flags })
}

/// Takes the clipped update with the gradients of step `step` and counts it in `updates`, as
/// [`train_round`] does, or skips it if loss or gradient is not finite. With local SGD, only
/// [`train_round`] can.
///
/// # Errors
/// Returns an error if the device, or a message between ranks fails.
pub fn apply_gradients<B: Kernels>(
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    reduced: ReducedStep,
    step: u64,
    updates: &mut u64,
) -> Result<StepResult> {
    apply_observed(plan, engine, reduced, step, updates, None)
}

fn apply_observed<B: Kernels>(
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    reduced: ReducedStep,
    step: u64,
    updates: &mut u64,
    observer: Option<&mut dyn RoundObserver<B>>,
) -> Result<StepResult> {
    let Update { loss, skipped, took: update_time } =
        update(plan, engine, &reduced, step, updates, observer)?;
    let ReducedStep { norm, compute, .. } = reduced;
    let lr = plan.schedule.rate(step);
    Ok(StepResult { loss, norm, lr, skips: usize::from(skipped), compute, update_time })
}

/// Takes the steps up to the next average, each replica independently, and averages.
fn local_sgd_round<B: Kernels>(
    plan: &ResolvedConfig,
    averaging: LocalSgd,
    engine: &mut Engine<B>,
    next: &mut dyn FnMut() -> Result<MicroBatch<B>>,
    progress: &mut Progress,
    observer: &mut dyn RoundObserver<B>,
) -> Result<Round> {
    let steps = progress.step..plan.round_end(progress.step);
    let here = engine.model.sharded.replicas_here();
    let mut taken = vec![Vec::new(); here];
    // A replica that skips an update has taken fewer than others.
    let mut updates = vec![progress.updates; here];
    let mut compute = Vec::new();
    let mut updating = Vec::new();
    for step in steps.clone() {
        let mut seconds = 0.0;
        let mut time = Duration::ZERO;
        for replica in 0..here {
            let reduced = engine.gradients(step, &mut *next, ControlFlags::empty)?;
            let Update { loss, skipped, took } =
                update(plan, engine, &reduced, step, &mut updates[replica], None)?;
            taken[replica].push(ReplicaStep { loss, norm: reduced.norm, skipped });
            seconds += reduced.compute[engine.model.sharded.step_rank()];
            time += took;
            engine.model.sharded.next_replica();
        }
        compute.push(seconds);
        updating.push(time);
    }
    let sharded = &mut engine.model.sharded;
    let begun = Instant::now();
    let waited = sharded.waited();
    sharded.average()?;
    let waited = Duration::from_secs_f64(sharded.waited() - waited);
    *updating.last_mut().ok_or_else(|| Error::internal("a round has no steps"))? +=
        begun.elapsed().saturating_sub(waited);

    let mine = RoundSummary {
        flags: observer.flags(),
        compute,
        first_replica: sharded.first_replica(),
        replicas: taken,
    };
    let summaries = sharded.exchange_summaries(&mine)?;
    let replicas = steps_of_replicas(&summaries, averaging.replicas, updating.len())?;
    // The averaged state counts as many updates as the replica that has taken the most.
    let updates =
        |steps: &Vec<ReplicaStep>| steps.iter().filter(|step| !step.skipped).count() as u64;
    progress.updates += replicas.iter().map(updates).max().unwrap_or(0);
    let mut results = Vec::with_capacity(updating.len());
    for (index, (step, update_time)) in steps.zip(updating).enumerate() {
        let of_replicas = || replicas.iter().map(|steps| &steps[index]);
        results.push(StepResult {
            loss: mean(of_replicas().map(|step| step.loss)),
            norm: mean(of_replicas().map(|step| step.norm)),
            lr: plan.schedule.rate(step),
            skips: of_replicas().filter(|step| step.skipped).count(),
            compute: summaries.iter().map(|one| one.compute[index]).collect(),
            update_time,
        });
    }
    Ok(Round {
        steps: results,
        flags: AllFlags(summaries.into_iter().map(|one| one.flags).collect()),
    })
}

/// The result of an update that was taken or skipped.
struct Update {
    /// Mean loss of the samples of the update.
    loss: f64,
    skipped: bool,
    took: Duration,
}

/// Takes the clipped update of step `step` and counts it in `updates`, or skips it if loss or
/// gradient is not finite.
fn update<B: Kernels>(
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    reduced: &ReducedStep,
    step: u64,
    updates: &mut u64,
    mut observer: Option<&mut dyn RoundObserver<B>>,
) -> Result<Update> {
    let loss = reduced.loss / (plan.tokens_per_replica() as f64);
    // Loss and norm are the same on all ranks that update the replica, so they all skip.
    let skipped = !(loss.is_finite() && reduced.norm.is_finite());
    engine.model.sharded.check_sdc(step)?;
    engine.model.sharded.count_gradients(step + 1)?;
    let start = Instant::now();
    if skipped {
        engine.model.sharded.skip()?;
    } else {
        *updates += 1;
        let optimizer = &plan.config.optimizer;
        let hyper = Hyper {
            lr: plan.schedule.rate(step) as f32,
            weight_decay: optimizer.weight_decay,
            step: *updates,
            grad_scale: clip(optimizer.grad_clip, reduced.norm) as f32,
        };
        let sharded = &mut engine.model.sharded;
        let is_observed =
            observer.as_mut().is_some_and(|observer| observer.observes(step + 1, &reduced.flags));
        match observer.filter(|_| is_observed) {
            Some(observer) => {
                sharded.update_observed(hyper, Some(&mut |owned| observer.updated(owned)))?;
            }
            None => sharded.update(hyper)?,
        }
        let Engine { model, observer, .. } = engine;
        if let Some(observer) = observer {
            observe_parameters(&mut **observer, &mut model.sharded)?;
        }
    }
    Ok(Update { loss, skipped, took: start.elapsed() })
}

/// Returns the factor that clips a gradient of norm `norm` to `limit`; 0 disables clipping.
pub fn clip(limit: f64, norm: f64) -> f64 {
    if limit > 0.0 && norm > limit { limit / (norm + 1e-6) } else { 1.0 }
}
