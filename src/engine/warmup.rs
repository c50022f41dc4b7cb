//! A step on random samples that leaves nothing behind: it shows what training will ask of the
//! device.

use super::forward_backward::Engine;
use super::micro_batches;
use hpctrain_base::error::Result;
use hpctrain_base::random::Stream;
use hpctrain_config::ResolvedConfig;
use hpctrain_data::{Batch, SampleFields};
use hpctrain_device::Kernels;
use hpctrain_parallel::ControlFlags;

/// Takes a step on random samples up to its gradients, which are forgotten: parameters and
/// optimizer state stay as they are, and so do random streams, which know their step by its number.
/// Collective over the ranks that take a step together; where replicas train apart, a rank's first
/// one takes it.
///
/// # Errors
/// The device or a message between ranks failed.
pub fn warmup_step<B: Kernels>(plan: &ResolvedConfig, engine: &mut Engine<B>) -> Result<()> {
    let batch = random(plan, plan.micro as usize);
    let backend = engine.model.backend.clone();
    let time = plan.network.context();
    let stage = engine.model.sharded.stage().clone();
    engine.gradients(
        0,
        || micro_batches::micro(&backend, &batch, time, 0, &stage),
        ControlFlags::empty,
    )?;
    engine.model.sharded.skip()
}

/// Samples of random numbers, and random things to predict.
pub fn random(plan: &ResolvedConfig, samples: usize) -> Batch {
    let below = |stream: u64, len: usize, bound: usize| -> Vec<u32> {
        let stream = Stream::new(stream);
        (0..len as u64).map(|i| (stream.uniform(i) * bound as f64) as u32).collect()
    };
    let normal = |stream: u64, len: usize| {
        let mut numbers = vec![0.0; len];
        Stream::new(stream).fill_normal(&mut numbers);
        numbers
    };
    let sizes = plan.samples.sizes(plan.network.context()).times(samples);
    let outputs = plan.network.outputs();
    let parts = SampleFields {
        ids: below(1, sizes.ids, plan.samples.ids_below().unwrap_or(outputs)),
        features: normal(1, sizes.features),
        classes: below(2, sizes.classes, outputs),
        values: normal(2, sizes.values),
        weights: vec![],
    };
    Batch { positions: 0..samples as u64, parts }
}
