//! Parameters, gradients and optimizer state spread over ranks.
//!
//! [`Sharded`] is the one type for every data-parallel mode. Modes differ by the shape of the mesh
//! and by the lifetimes of full gradients and full parameters ([`ShardingPolicy`]).

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
mod param_prefetch;
mod pipeline_schedule;
mod pipeline_split;
mod pipeline_stage;
mod progress;
mod sdc_check;
mod sdc_checksum;
mod sharded;
mod step_params;
mod step_summary;
mod tied_replica;
mod virtual_ranks;

pub use control_flags::{AllFlags, ControlFlags};
pub use cpu_offload::bytes as offloaded_bytes;
pub use fsdp_unit::initial;
pub use groups::{Groups, StepGroups};
pub use local_sgd::{LocalSgd, OuterOptimizer, ReplicaStep, RoundSummary, mean, steps_of_replicas};
pub use memory_trace::{MemoryTimeline, Moment, When};
pub use norms::{Norms, whole as whole_norms};
pub use optimizer_shard::{OptimizerShard, Updates, Values};
pub use param_prefetch::{Prefetch, step as turns};
pub use pipeline_schedule::{Action, Flow, PipelineSchedule, StepSchedule};
pub use pipeline_split::partition;
pub use pipeline_stage::{Stage, TiedExport, TiedImport};
pub use progress::Progress;
pub use sharded::{Histograms, Owned, Reduced, ReducedStep, Sharded, whole_histograms};
pub use step_params::{Hyper, state_names};
pub use step_summary::{Squares, sum_of_squares};
pub use virtual_ranks::VirtualRanks;

use serde::{Deserialize, Serialize};

/// The place of the parameters that are updated, and of their optimizer state: `parallel.storage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Storage {
    /// All ranks: every one, or the shards of every replica, update their own.
    Ranks,
    /// One replica: the others send it their gradients and take its parameters.
    Central,
}

impl Storage {
    /// Whether the ranks of a replica own ranges of units.
    fn owns(self, replica: usize) -> bool {
        self == Storage::Ranks || replica == 0
    }
}

/// Lifetime of a full buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// All the time.
    Step,
    /// For one use; parameters also while they are gathered ahead of it.
    Use,
}

/// Lifetimes of the full buffers; the owned parts live always.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardingPolicy {
    /// Of full gradients.
    pub grads: Lifetime,
    /// Of full parameters.
    pub params: Lifetime,
    /// Blocks ahead of whose turn full parameters are gathered, where they do not live always.
    pub ahead: usize,
    /// Whether what is given up is on the host alone, from which owners fetch it and to which
    /// reduced gradients go.
    pub on_host: bool,
}

impl ShardingPolicy {
    /// The lifetimes over so many shards: a buffer that one rank owns whole is never given up,
    /// since it would only be copied; unless the host has it.
    pub fn over(self, shards: usize) -> Self {
        let gives_up = shards > 1 || self.on_host;
        if gives_up { self } else { Self { grads: Lifetime::Step, params: Lifetime::Step, ..self } }
    }
}

/// The full buffers that are given up: the stages of ZeRO (Rajbhandari et al., 2020). Optimizer
/// state is sharded by the mesh's shard axis in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Zero {
    /// Nothing is sharded: distributed data parallel.
    Zero,
    /// Optimizer state.
    One,
    /// And gradients.
    Two,
    /// And parameters.
    Three,
}

impl Zero {
    /// The lifetimes this stage means; parameters are gathered while the block before computes.
    pub fn residency(self) -> ShardingPolicy {
        let life = |gives_up| if gives_up { Lifetime::Use } else { Lifetime::Step };
        ShardingPolicy {
            grads: life(self as u8 >= 2),
            params: life(self as u8 >= 3),
            ahead: 1,
            on_host: false,
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
