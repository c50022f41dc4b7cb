//! One optimizer step from its data to its update: repeated by a run, compared by `hpctrain verify`.

use std::time::{Duration, Instant};

use super::step::Engine;
use crate::backend::Kernels;
use crate::checkpoint::Progress;
use crate::config::Plan;
use crate::error::Result;
use crate::nn::Micro;
use crate::parallel::{AllFlags, ControlFlags, Hyper, ReducedStep};

/// A step that was taken: the same on all ranks, but for its times.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// Mean loss of the global batch.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Whether the update was left out because loss or gradient was not finite.
    pub skipped: bool,
    /// Seconds that each rank computed, without its waits for messages and data.
    pub compute: Vec<f64>,
    /// Control flags of each rank.
    pub flags: AllFlags,
    /// Time of this rank's update.
    pub updating: Duration,
}

/// Takes the next step: gradients of all micro-batches, then the clipped update, unless they are not finite. `next` gives
/// them in order. `flags` is asked for this rank's requests when the gradients are summed.
///
/// # Errors
/// A failure of the data, the device, or a message between ranks.
pub fn advance<B: Kernels>(
    plan: &Plan,
    engine: &mut Engine<B>,
    next: impl FnMut() -> Result<Micro<B>>,
    progress: &mut Progress,
    flags: impl FnOnce() -> ControlFlags,
) -> Result<StepResult> {
    let step = progress.step;
    let ReducedStep { loss, norm, compute, flags } = engine.gradients(step, next, flags)?;
    let loss = loss / (plan.tokens_per_step() as f64);
    let lr = plan.schedule.rate(step);
    // Loss and norm are the same on all ranks, so they all skip.
    let skipped = !(loss.is_finite() && norm.is_finite());
    let start = Instant::now();
    if skipped {
        engine.model.sharded.skip();
    } else {
        progress.updates += 1;
        let optimizer = &plan.config.optimizer;
        engine.model.sharded.update(Hyper {
            lr: lr as f32,
            weight_decay: optimizer.weight_decay,
            step: progress.updates,
            grad_scale: clip(optimizer.grad_clip, norm) as f32,
        })?;
    }
    let updating = start.elapsed();
    progress.step += 1;
    progress.position += plan.config.batch.global;
    Ok(StepResult { loss, norm, lr, skipped, compute, flags, updating })
}

/// The factor that brings a gradient of norm `norm` down to `limit`; 0 does not limit.
fn clip(limit: f64, norm: f64) -> f64 {
    if limit > 0.0 && norm > limit { limit / (norm + 1e-6) } else { 1.0 }
}
