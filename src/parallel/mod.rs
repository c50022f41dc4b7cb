//! Parameters, gradients and optimizer state spread over ranks.
//!
//! [`Sharded`] is the one type for every data-parallel mode. Modes differ by the shape of the mesh and by the lifetimes
//! of full gradients and full parameters ([`Residency`]).

#![forbid(unsafe_code)]

mod audits;
mod averaging;
mod control_flags;
mod device_state;
mod groups;
mod guest;
mod hyper;
mod lanes;
mod memory_audit;
mod memory_timeline;
mod norms;
mod offload;
mod partition;
mod prefetch;
mod progress;
mod schedule;
mod shard_owner;
mod sharded;
mod stage;
mod step_summary;
mod unit;

pub use averaging::{Averaging, Outer, ReplicaStep, RoundSummary, mean, steps_of_replicas};
pub use control_flags::{AllFlags, ControlFlags};
pub use groups::{Groups, StepGroups};
pub use hyper::{Hyper, state_names};
pub use lanes::Lanes;
pub use memory_timeline::{MemoryTimeline, Moment, When};
pub use norms::{Norms, whole as whole_norms};
pub use offload::bytes as offloaded_bytes;
pub use partition::partition;
pub use prefetch::{Prefetch, step as turns};
pub use progress::Progress;
pub use schedule::{Action, Flow, PipelineSchedule, StepSchedule};
pub use shard_owner::{ShardOwner, Updates, Values};
pub use sharded::{Histograms, Owned, Reduced, ReducedStep, Sharded, whole_histograms};
pub use stage::{Borrowed, Lent, Stage};
pub use step_summary::{Squares, sum_of_squares};
pub use unit::initial;

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
pub enum Life {
    /// All the time.
    Step,
    /// For one use; parameters also while they are gathered ahead of it.
    Use,
}

/// Lifetimes of the full buffers; the owned parts live always.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residency {
    /// Of full gradients.
    pub grads: Life,
    /// Of full parameters.
    pub params: Life,
    /// Blocks ahead of whose turn full parameters are gathered, where they do not live always.
    pub ahead: usize,
    /// Whether what is given up is on the host alone, from which owners fetch it and to which reduced gradients go.
    pub on_host: bool,
}

impl Residency {
    /// The lifetimes over so many shards: a buffer that one rank owns whole is never given up, since it would only be
    /// copied; unless the host has it.
    pub fn over(self, shards: usize) -> Self {
        let gives_up = shards > 1 || self.on_host;
        if gives_up { self } else { Self { grads: Life::Step, params: Life::Step, ..self } }
    }
}

/// The full buffers that are given up: the stages of ZeRO (Rajbhandari et al., 2020). Optimizer state is sharded
/// by the mesh's shard axis in all of them.
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
    pub fn residency(self) -> Residency {
        let life = |gives_up| if gives_up { Life::Use } else { Life::Step };
        Residency { grads: life(self as u8 >= 2), params: life(self as u8 >= 3), ahead: 1, on_host: false }
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
