//! The state of a rank's audits: of the memory of its parameters, and of the arithmetic of
//! replicas.

/// Audits of a rank.
#[derive(Debug, Clone, Copy)]
pub struct SdcChecks {
    /// Steps between two comparisons of replicas.
    pub every: u64,
    /// The last step before which they were found equal, or the first.
    pub good: Option<u64>,
    /// That step, once they were found to differ.
    pub doubtful_since: Option<u64>,
}

impl SdcChecks {
    /// Of every so many steps; none with 0.
    pub fn every(every: u64) -> Option<Self> {
        (every > 0).then_some(Self { every, good: None, doubtful_since: None })
    }
}
