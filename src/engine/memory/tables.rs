//! Host memory for embedding tables that are on the host instead of a GPU.

use hpctrain_config::ResolvedConfig;
use hpctrain_parallel::{Lifetime, MemoryTimeline, Stage, StepPosition};

/// Bytes of an f32 or an id.
const WORD: usize = size_of::<f32>();

/// Words of a cache line. The host's buffers take whole cache lines.
const LINE: usize = 16;

/// The embedding tables of a plan on the host.
pub struct HostTables<'a> {
    plan: &'a ResolvedConfig,
    /// Padded elements of the tables' unit.
    pub padded: usize,
    /// Elements of embedding rows per row of activations.
    rows: usize,
}

impl<'a> HostTables<'a> {
    /// Creates the tables of a unit of `padded` elements, whose block has `rows` elements of
    /// output per row of activations.
    pub fn new(plan: &'a ResolvedConfig, padded: usize, rows: usize) -> Self {
        Self { plan, padded, rows }
    }

    /// Returns the peak bytes: for training with `kept` buffers of optimizer state, the ids and
    /// rows of a micro-batch, and the pinned buffer through which rows with elements of `size`
    /// bytes are copied to the GPU.
    pub fn bytes(&self, size: usize, kept: usize) -> usize {
        let Self { plan, padded, rows } = *self;
        let keep = plan.host_table_sharding_policy();
        let ranks = plan.assignment();
        let owned_params = if keep.params == Lifetime::Use { 1 } else { 0 };
        let owned = (owned_params + kept) * ranks.largest_shard(padded);
        let stage = Stage::embedding_tables(&[None]);
        let sizes = [padded];
        let schedule = plan.step_schedule(0);
        let timeline =
            MemoryTimeline { stage: &stage, sizes: &sizes, ranks, policy: keep, schedule };
        let of_samples = |samples: u64| {
            let ids = samples as usize * plan.samples.sizes(plan.network.context()).ids;
            (ids, samples as usize * plan.network.context() * rows)
        };
        let trained = of_samples(plan.micro);
        let evaluated = of_samples(plan.config.eval.batch);
        let training = timeline.step().into_iter().map(|moment| (moment, trained));
        let moments =
            training.chain(timeline.forward().into_iter().map(|moment| (moment, evaluated)));
        let most = moments
            .map(|(moment, sizes)| moment.params + moment.grads + words_in_use(moment.when, sizes))
            .max();
        let slot = (trained.1.max(evaluated.1) * size).next_multiple_of(WORD);
        (owned + most.unwrap_or(0)) * WORD + slot
    }
}

/// Returns the words of the buffers for a micro-batch's ids and rows that are in use at a moment.
fn words_in_use(when: StepPosition, (ids, rows): (usize, usize)) -> usize {
    match when {
        StepPosition::After(_) | StepPosition::BackwardWeight(_) => 0,
        StepPosition::Forward(_) | StepPosition::Backward(_) | StepPosition::BackwardInput(_) => {
            ids.next_multiple_of(LINE) + rows.next_multiple_of(LINE)
        }
    }
}
