//! Memory of the host for embedding tables that it has in a GPU's stead.

use hpctrain_config::ResolvedConfig;
use hpctrain_parallel::{Lifetime, MemoryTimeline, Stage, When};

/// Bytes of an f32, and of an id.
const WORD: usize = size_of::<f32>();

/// The host's buffers take whole cache lines, of so many words.
const LINE: usize = 16;

/// The tables of a plan, and what the host needs for them.
pub struct Tables<'a> {
    plan: &'a ResolvedConfig,
    /// Elements of their unit.
    pub padded: usize,
    /// Elements of their rows, for each row of activations.
    rows: usize,
}

impl<'a> Tables<'a> {
    /// Tables of a unit of `padded` elements, whose block has `rows` elements of output for each
    /// row of activations.
    pub fn of(plan: &'a ResolvedConfig, padded: usize, rows: usize) -> Self {
        Self { plan, padded, rows }
    }

    /// The most bytes at once: all that trains them with `kept` buffers of optimizer state, a
    /// micro-batch's ids and rows, and the piece of memory by which rows of elements of `size`
    /// bytes go to the GPU.
    pub fn bytes(&self, size: usize, kept: usize) -> usize {
        let Self { plan, padded, rows } = *self;
        let keep = plan.host_residency();
        let shards = plan.mesh.shard;
        let masters = if keep.params == Lifetime::Use { 1 } else { 0 };
        let owned = (masters + kept) * padded / shards;
        let stage = Stage::of_tables(&[None]);
        let sizes = [padded];
        let schedule = plan.step_schedule(0);
        let timeline = MemoryTimeline { stage: &stage, sizes: &sizes, shards, keep, schedule };
        let of_samples = |samples: u64| {
            let ids = samples as usize * plan.samples.sizes(plan.network.context()).ids;
            (ids, samples as usize * plan.network.context() * rows)
        };
        let in_lines = |words: usize| words.next_multiple_of(LINE);
        let trained = of_samples(plan.micro);
        let evaluated = of_samples(plan.config.eval.batch);
        let at_work = |when: When, (ids, rows): (usize, usize)| match when {
            When::After(_) | When::BackwardWeight(_) => 0,
            When::Forward(_) | When::Backward(_) | When::BackwardInput(_) => {
                in_lines(ids) + in_lines(rows)
            }
        };
        let training = timeline.step().into_iter().map(|moment| (moment, trained));
        let moments =
            training.chain(timeline.forward().into_iter().map(|moment| (moment, evaluated)));
        let most = moments
            .map(|(moment, of)| moment.params + moment.grads + at_work(moment.when, of))
            .max();
        let slot = (trained.1.max(evaluated.1) * size).next_multiple_of(WORD);
        (owned + most.unwrap_or(0)) * WORD + slot
    }
}
