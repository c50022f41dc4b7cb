//! One round of optimizer steps from their data to their updates: repeated by a run, compared by
//! `hpctrain verify`. A round is one step, or where replicas train apart, the steps to their next
//! average.

use std::time::{Duration, Instant};

use super::forward_backward::Engine;
use hpctrain_base::error::{Error, Result};
use hpctrain_config::ResolvedConfig;
use hpctrain_device::Kernels;
use hpctrain_nn::MicroBatch;
use hpctrain_parallel::Progress;
use hpctrain_parallel::{
    AllFlags, ControlFlags, Hyper, LocalSgd, ReducedStep, ReplicaStep, RoundSummary, mean,
    steps_of_replicas,
};

/// A round that was taken: the same on all ranks, but for its times.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// Its steps, at least one.
    pub steps: Vec<StepResult>,
    /// Control flags of each rank.
    pub flags: AllFlags,
}

/// A step that was taken: the same on all ranks, but for its times. Where replicas train apart,
/// loss and norm are means over them.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// Mean loss of the global batch.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Replicas that left the update out because loss or gradient was not finite: of a step that
    /// all take together, 1.
    pub skips: usize,
    /// Seconds that each rank computed, without its waits for messages and data.
    pub compute: Vec<f64>,
    /// Time of this rank's update.
    pub updating: Duration,
}

impl StepResult {
    /// Whether an update was left out.
    pub fn skipped(&self) -> bool {
        self.skips > 0
    }
}

/// Takes the next round: of each step gradients of all micro-batches, then the clipped update,
/// unless they are not finite. `next` gives micro-batches in order. `flags` is asked for this
/// rank's requests at the end of the round.
///
/// # Errors
/// A failure of the data, the device, or a message between ranks.
pub fn train_round<B: Kernels>(
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    mut next: impl FnMut() -> Result<MicroBatch<B>>,
    progress: &mut Progress,
    flags: impl FnOnce() -> ControlFlags,
) -> Result<Round> {
    let mut flags = Some(flags);
    let mut flags = || flags.take().map_or_else(ControlFlags::empty, |flags| flags());
    let round = match plan.averaging {
        None => sync_step(plan, engine, &mut next, progress, &mut flags)?,
        Some(averaging) => {
            local_sgd_round(plan, averaging, engine, &mut next, progress, &mut flags)?
        }
    };
    progress.step += round.steps.len() as u64;
    progress.position += plan.config.batch.global * round.steps.len() as u64;
    Ok(round)
}

/// A step that all ranks take together.
fn sync_step<B: Kernels>(
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    next: &mut dyn FnMut() -> Result<MicroBatch<B>>,
    progress: &mut Progress,
    flags: &mut dyn FnMut() -> ControlFlags,
) -> Result<Round> {
    let step = progress.step;
    let reduced = engine.gradients(step, next, flags)?;
    let Update { loss, skipped, took: updating } =
        update(plan, engine, &reduced, step, &mut progress.updates)?;
    let ReducedStep { norm, compute, flags, .. } = reduced;
    let lr = plan.schedule.rate(step);
    let skips = usize::from(skipped);
    Ok(Round { steps: vec![StepResult { loss, norm, lr, skips, compute, updating }], flags })
}

/// The steps to the next average, which each replica takes by itself, and the average.
fn local_sgd_round<B: Kernels>(
    plan: &ResolvedConfig,
    averaging: LocalSgd,
    engine: &mut Engine<B>,
    next: &mut dyn FnMut() -> Result<MicroBatch<B>>,
    progress: &mut Progress,
    flags: &mut dyn FnMut() -> ControlFlags,
) -> Result<Round> {
    let steps = progress.step..plan.round_end(progress.step);
    let here = engine.model.sharded.replicas_here();
    let mut taken = vec![Vec::new(); here];
    // A replica that leaves an update out has taken fewer than others.
    let mut updates = vec![progress.updates; here];
    let mut compute = Vec::new();
    let mut updating = Vec::new();
    for step in steps.clone() {
        let mut seconds = 0.0;
        let mut time = Duration::ZERO;
        for replica in 0..here {
            let reduced = engine.gradients(step, &mut *next, ControlFlags::empty)?;
            let Update { loss, skipped, took } =
                update(plan, engine, &reduced, step, &mut updates[replica])?;
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
    *updating.last_mut().ok_or_else(|| Error::internal("a round without steps"))? +=
        begun.elapsed().saturating_sub(waited);

    let mine = RoundSummary {
        flags: flags(),
        compute,
        first_replica: sharded.first_replica(),
        replicas: taken,
    };
    let told = sharded.tell(&mine)?;
    let replicas = steps_of_replicas(&told, averaging.replicas, updating.len())?;
    // The state that all have now is that of as many updates as the most that any has taken.
    let updates =
        |steps: &Vec<ReplicaStep>| steps.iter().filter(|step| !step.skipped).count() as u64;
    progress.updates += replicas.iter().map(updates).max().unwrap_or(0);
    let result = |(index, (step, updating)): (usize, (u64, Duration))| {
        let of_replicas = || replicas.iter().map(|steps| &steps[index]);
        StepResult {
            loss: mean(of_replicas().map(|step| step.loss)),
            norm: mean(of_replicas().map(|step| step.norm)),
            lr: plan.schedule.rate(step),
            skips: of_replicas().filter(|step| step.skipped).count(),
            compute: told.iter().map(|one| one.compute[index]).collect(),
            updating,
        }
    };
    let results = steps.zip(updating).enumerate().map(result).collect();
    Ok(Round { steps: results, flags: AllFlags(told.into_iter().map(|one| one.flags).collect()) })
}

/// An update that was taken or left out.
struct Update {
    /// Mean loss of the samples whose gradient it is.
    loss: f64,
    skipped: bool,
    took: Duration,
}

/// The clipped update by the gradients of step `step`, unless they are not finite; it is one more
/// of `updates`.
fn update<B: Kernels>(
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    reduced: &ReducedStep,
    step: u64,
    updates: &mut u64,
) -> Result<Update> {
    let loss = reduced.loss / (plan.tokens_of_replica() as f64);
    // Loss and norm are the same on all ranks that update the replica, so they all skip.
    let skipped = !(loss.is_finite() && reduced.norm.is_finite());
    engine.model.sharded.audit(step)?;
    engine.model.sharded.count_gradients(step + 1)?;
    let start = Instant::now();
    if skipped {
        engine.model.sharded.skip()?;
    } else {
        *updates += 1;
        let optimizer = &plan.config.optimizer;
        engine.model.sharded.update(Hyper {
            lr: plan.schedule.rate(step) as f32,
            weight_decay: optimizer.weight_decay,
            step: *updates,
            grad_scale: clip(optimizer.grad_clip, reduced.norm) as f32,
        })?;
    }
    Ok(Update { loss, skipped, took: start.elapsed() })
}

/// The factor that brings a gradient of norm `norm` down to `limit`; 0 does not limit.
pub fn clip(limit: f64, norm: f64) -> f64 {
    if limit > 0.0 && norm > limit { limit / (norm + 1e-6) } else { 1.0 }
}
