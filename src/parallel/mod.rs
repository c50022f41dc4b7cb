//! Parallel layouts: parameters, gradients and optimizer state distributed over ranks.
//!
//! [`Sharded`] implements every data-parallel mode. Modes differ by the shape of the mesh and by
//! the lifetimes of full gradients and full parameters ([`ShardingPolicy`]).
//!
//! | mode | ZeRO stage | shard × replica | full gradients | full parameters | optimizer state |
//! |---|---|---|---|---|---|
//! | data parallel (DDP) | 0 | 1 × N | always | always | whole |
//! | ZeRO 1 | 1 | N × 1 | always | always | 1/N |
//! | ZeRO 2 | 2 | N × 1 | for a use | always | 1/N |
//! | ZeRO 3 | 3 | N × 1 | for a use | for a use | 1/N |
//! | hybrid sharding (HSDP) | 1 to 3 | S × R | by stage | by stage | 1/S |
//! | central storage | 0 | K × N/K | always | always | 1/K on K owners |
//! | the same, parameters on owners only | 3 | K × N/K | for a use | for a use | 1/K on K owners |
//!
//! With central storage, ranks outside of the first replica own empty ranges. Gradients are reduced
//! to the first replica; updated ranges are broadcast, then all-gathered, with ZeRO 3 before each use.
//!
//! The rules that keep results bitwise identical in all layouts are in `virtual_ranks.rs`. The
//! order of a step is in the documentation of the crate `hpctrain-engine`.

#![forbid(unsafe_code)]

mod control_flags;
mod cpu_offload;
mod device_state;
mod fsdp_unit;
mod groups;
mod local_sgd;
mod memory_trace;
mod norms;
mod optimizer_shard;
mod owned;
mod param_prefetch;
mod pipeline_schedule;
mod pipeline_split;
mod pipeline_stage;
mod progress;
mod restore_source;
mod sdc_check;
mod sdc_checksum;
mod sharded;
mod sparse;
mod step_params;
mod step_summary;
mod tied_replica;
mod virtual_ranks;

pub use control_flags::{AllFlags, ControlFlags};
pub use cpu_offload::host_bytes as offloaded_bytes;
pub use fsdp_unit::{initial, initial_range};
pub use groups::{Groups, StepGroups};
pub use local_sgd::{LocalSgd, OuterOptimizer, ReplicaStep, RoundSummary, mean, steps_of_replicas};
pub use memory_trace::{MemoryMoment, MemoryTimeline, StepPosition};
pub use norms::{Norms, whole as whole_norms};
pub use optimizer_shard::{OptimizerShard, Updates, Values};
pub use owned::{Histograms, Owned};
pub use param_prefetch::{Prefetch, step as turns};
pub use pipeline_schedule::{Action, Flow, PipelineSchedule, StepSchedule};
pub use pipeline_split::partition;
pub use pipeline_stage::{Stage, TiedExport, TiedImport};
pub use progress::Progress;
pub use sharded::{
    HostUnits, OpenGradient, Reduced, ReducedStep, Sharded, UpdateObserver, whole_histograms,
};
pub use sparse::{RowPartition, RowSource, SparseRows, SparseTables, SquareSum, TableSharding};
pub use step_params::{Hyper, state_names};
pub use step_summary::{Squares, sum_of_squares};
pub use virtual_ranks::{ReduceAfter, VirtualRanks};

use hpctrain_device::Element;
use serde::{Deserialize, Serialize};

/// Which ranks have the optimizer state and update parameters: `parallel.storage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Storage {
    /// The ranks of every replica, each of which updates its shard.
    Ranks,
    /// The ranks of one replica, to which the others send gradients and from which they receive
    /// parameters.
    Central,
}

impl Storage {
    /// Returns whether the ranks of a replica own ranges of units.
    fn owns(self, replica: usize) -> bool {
        self == Storage::Ranks || replica == 0
    }
}

/// The lifetime of a full buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// The buffer is always in memory.
    Step,
    /// The buffer is in memory for one use; parameters also while they are prefetched.
    Use,
}

/// The lifetimes of the full buffers. The owned parts are always in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardingPolicy {
    /// The lifetime of full gradients.
    pub grads: Lifetime,
    /// The lifetime of full parameters.
    pub params: Lifetime,
    /// The number of blocks whose full parameters are prefetched, if they are freed after use.
    pub prefetch: usize,
    /// Whether freed buffers are on the host only, from which owners upload parameters and to which
    /// reduced gradients are downloaded.
    pub on_host: bool,
    /// The format in which gradients are reduced over ranks.
    pub reduce_dtype: Element,
    /// When gradients are reduced over shards. After each micro-batch, full gradients are freed
    /// after use.
    pub reduce_after: ReduceAfter,
}

impl ShardingPolicy {
    /// Returns the policy for a mesh of `shards` and `replicas`. A buffer that each rank owns
    /// completely is never freed, since it would only be copied, unless it is on the host.
    pub fn for_mesh(self, shards: usize, replicas: usize, storage: Storage) -> Self {
        let is_elsewhere = storage == Storage::Central && replicas > 1;
        let frees = shards > 1 || is_elsewhere || self.on_host;
        let kept = match frees {
            true => self,
            false => Self { grads: Lifetime::Step, params: Lifetime::Step, ..self },
        };
        match (kept.reduce_after, shards) {
            (ReduceAfter::MicroBatch, 2..) => Self { grads: Lifetime::Use, ..kept },
            // There is nothing to reduce over.
            (ReduceAfter::MicroBatch, _) => Self { reduce_after: ReduceAfter::Step, ..kept },
            // A rank has several sums of gradients, and afterwards one.
            (ReduceAfter::StepInBlocks, _) => Self { grads: Lifetime::Use, ..kept },
            (ReduceAfter::Step, _) => kept,
        }
    }
}

/// The ZeRO stage (Rajbhandari et al., 2020), which determines the full buffers that are freed
/// after use. Optimizer state is sharded by the mesh's shard axis in all stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Zero {
    /// Nothing is sharded (distributed data parallel).
    Zero,
    /// Optimizer state is sharded.
    One,
    /// Optimizer state and gradients are sharded.
    Two,
    /// Optimizer state, gradients and parameters are sharded.
    Three,
}

impl Zero {
    /// Returns the policy of this stage; parameters are prefetched one block ahead.
    pub fn sharding_policy(self) -> ShardingPolicy {
        let life = |is_sharded| if is_sharded { Lifetime::Use } else { Lifetime::Step };
        ShardingPolicy {
            grads: life(self as u8 >= 2),
            params: life(self as u8 >= 3),
            prefetch: 1,
            on_host: false,
            reduce_dtype: Element::F32,
            reduce_after: ReduceAfter::Step,
        }
    }
}

impl TryFrom<u8> for Zero {
    type Error = String;

    fn try_from(stage: u8) -> Result<Self, String> {
        [Zero::Zero, Zero::One, Zero::Two, Zero::Three]
            .get(usize::from(stage))
            .copied()
            .ok_or_else(|| format!("ZeRO has stages 0 to 3, not {stage}"))
    }
}

impl From<Zero> for u8 {
    fn from(stage: Zero) -> u8 {
        stage as u8
    }
}
