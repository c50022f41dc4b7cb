//! The end of training.

/// Reason for the end of training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunOutcome {
    /// All steps are done.
    Finished,
    /// More steps would not help, as the text says.
    Stopped(String),
    /// The job was asked to end, or its time is up: it has saved, and is to be started again with
    /// `--resume auto`.
    Preempted(String),
}

/// Exit code of a job that has saved and is to be started again: `EX_TEMPFAIL` of sysexits.h.
pub const REQUEUE: i32 = 75;

impl RunOutcome {
    /// The exit code of a process whose run has ended so.
    pub fn exit_code(&self) -> i32 {
        match self {
            RunOutcome::Finished | RunOutcome::Stopped(_) => 0,
            RunOutcome::Preempted(_) => REQUEUE,
        }
    }
}
