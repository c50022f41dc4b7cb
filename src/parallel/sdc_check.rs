//! The state of a rank's SDC (silent data corruption) checks: of the memory of its parameters, and
//! of the arithmetic of replicas.

/// The SDC checks of a rank.
#[derive(Debug, Clone, Copy)]
pub struct SdcChecks {
    /// The number of steps between two comparisons of replicas.
    pub every: u64,
    /// The last step before which replicas were equal, or the first step.
    pub last_good: Option<u64>,
    /// The value of `good`, once replicas were found to differ: later checkpoints are suspect.
    pub suspect_since: Option<u64>,
}

impl SdcChecks {
    /// Creates the state of checks every `every` steps; returns none if `every` is 0.
    pub fn every(every: u64) -> Option<Self> {
        (every > 0).then_some(Self { every, last_good: None, suspect_since: None })
    }
}
