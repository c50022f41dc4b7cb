//! A warm-up step on random data, which shows what training requires of the device. Parameters and
//! optimizer state are unchanged.

use super::forward_backward::Engine;
use super::micro_batches;
use hpctrain_base::error::Result;
use hpctrain_base::random::Stream;
use hpctrain_config::ResolvedConfig;
use hpctrain_data::{Batch, SampleFields};
use hpctrain_device::Kernels;
use hpctrain_parallel::ControlFlags;

/// Computes gradients on random samples and discards them. Parameters and optimizer state are
/// unchanged, and so are random streams, which depend on the number of the step. Collective over
/// the ranks that take a step together; with local SGD, a rank's first replica takes it. Returns the
/// seconds that each of these ranks has computed.
///
/// # Errors
/// Returns an error if the device or a message between ranks fails.
pub fn warmup_step<B: Kernels>(plan: &ResolvedConfig, engine: &mut Engine<B>) -> Result<Vec<f64>> {
    let batch = random_batch(plan, plan.micro as usize);
    let backend = engine.model.backend.clone();
    let time = plan.network.context();
    let stage = engine.model.sharded.stage().clone();
    let reduced = engine.gradients(
        0,
        || micro_batches::upload(&backend, &batch, time, 0, &stage),
        ControlFlags::empty,
    )?;
    engine.model.sharded.skip()?;
    Ok(reduced.compute)
}

/// Returns samples of random inputs and random targets.
pub fn random_batch(plan: &ResolvedConfig, samples: usize) -> Batch {
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
