//! Host memory for embedding tables that are on the host instead of a GPU, or have sparse updates.

use hpctrain_base::layout::UnitLayout;
use hpctrain_config::ResolvedConfig;
use hpctrain_parallel::{
    Lifetime, MemoryTimeline, RowPartition, Stage, StepPosition, TableSharding,
};

/// Bytes of an f32 or an id.
const WORD: usize = size_of::<f32>();

/// Words of a cache line. The host's buffers take whole cache lines.
const LINE: usize = 16;

/// The embedding tables of a plan on the host.
pub struct HostTables<'a> {
    plan: &'a ResolvedConfig,
    /// The tables' unit.
    layout: UnitLayout,
    /// Elements of embedding rows per row of activations.
    rows: usize,
}

impl<'a> HostTables<'a> {
    /// Creates the tables of a unit, whose block has `rows` elements of output per row of
    /// activations.
    pub fn new(plan: &'a ResolvedConfig, layout: UnitLayout, rows: usize) -> Self {
        Self { plan, layout, rows }
    }

    /// Returns what the tables have in memory from step to step, with `kept` buffers of optimizer
    /// state, and its bytes on the rank that holds the most.
    pub fn kept_bytes(&self, kept: usize) -> (&'static str, usize) {
        match self.plan.sparse_tables {
            Some(sharding) => {
                let bytes = (1 + kept) * self.most_held(sharding) * WORD;
                ("parameters and optimizer state (sparse updates)", bytes)
            }
            None => {
                let owned = self.plan.assignment().largest_shard(self.layout.padded);
                ("parameters, gradient and optimizer state", (2 + kept) * owned * WORD)
            }
        }
    }

    /// Returns the elements that are copied at once at the start, and when a checkpoint is written
    /// without `checkpoint.async_save`.
    pub fn copied_at_once(&self) -> usize {
        match self.plan.sparse_tables {
            Some(TableSharding::Servers) => 0,
            Some(sharding) => self.most_held(sharding),
            None => self.layout.padded,
        }
    }

    /// Returns the most elements that a rank writes to a checkpoint, with `kept` buffers of
    /// optimizer state, of which `copies` replicas write equal parts.
    pub fn saved(&self, kept: usize, copies: usize) -> usize {
        let elements = match self.plan.sparse_tables {
            Some(sharding) => self.partition(sharding).most_owned() * self.width(),
            None => self.plan.assignment().largest_shard(self.layout.padded).div_ceil(copies),
        };
        (1 + kept) * elements
    }

    /// Returns the most elements of the tables that a rank holds.
    fn most_held(&self, sharding: TableSharding) -> usize {
        match sharding {
            TableSharding::Servers => 0,
            _ => self.partition(sharding).most_held() * self.width(),
        }
    }

    fn partition(&self, sharding: TableSharding) -> RowPartition {
        let rows: Vec<usize> = self.layout.tensors.iter().map(|tensor| tensor.shape[0]).collect();
        RowPartition::new(sharding, &rows, 0, self.plan.mesh.data())
    }

    fn width(&self) -> usize {
        self.layout.tensors.first().map_or(0, |tensor| tensor.shape[1])
    }

    /// Returns the peak bytes of tables with sparse updates.
    fn sparse_bytes(&self, sharding: TableSharding, size: usize, kept: usize) -> usize {
        let Self { plan, rows, .. } = self;
        let held = (1 + kept) * self.most_held(sharding);
        let ids = plan.samples.sizes(plan.network.context()).ids;
        let of_samples = |samples: u64| samples as usize * (ids + plan.network.context() * rows);
        let looked_up = of_samples(plan.micro.max(plan.config.eval.batch));
        let own = of_samples(plan.virtual_rank_samples * plan.assignment().most() as u64);
        let received = match sharding {
            TableSharding::Replicated => of_samples(plan.config.batch.global),
            TableSharding::RowWise | TableSharding::TableWise | TableSharding::Servers => own,
        };
        // The rows of a micro-batch and their exchange; the gradients of a virtual rank and their
        // sums; messages, and what they are decoded and added to; the copies of rows that are
        // updated.
        let of_step = 2 * looked_up + 2 * own + 3 * received + (1 + kept) * received;
        (held + of_step) * WORD + (looked_up * size).next_multiple_of(WORD)
    }

    /// Returns the peak bytes: for training with `kept` buffers of optimizer state, the ids and
    /// rows of a micro-batch, and the pinned buffer through which rows with elements of `size`
    /// bytes are copied to the GPU.
    pub fn bytes(&self, size: usize, kept: usize) -> usize {
        if let Some(sharding) = self.plan.sparse_tables {
            return self.sparse_bytes(sharding, size, kept);
        }
        let Self { plan, rows, .. } = *self;
        let padded = self.layout.padded;
        let keep = plan.host_table_sharding_policy();
        let ranks = plan.assignment();
        let owned_params = if keep.params == Lifetime::Use { 1 } else { 0 };
        let owned = (owned_params + kept) * ranks.largest_shard(padded);
        let stage = Stage::embedding_tables(&[None]);
        let sizes = [padded];
        let schedule = plan.step_schedule(0);
        let timeline =
            MemoryTimeline { stage: &stage, sizes: &sizes, ranks: &ranks, policy: keep, schedule };
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
