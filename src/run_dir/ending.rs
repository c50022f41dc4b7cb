//! The end of training.

/// Reason for the end of training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done.
    Finished,
    /// More steps would not help, as the text says.
    Stopped(String),
    /// The job was asked to end, or its time is up: it has saved, and is to be started again with `--resume auto`.
    Preempted(String),
}
