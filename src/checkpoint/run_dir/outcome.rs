//! How training ended.

use serde::{Deserialize, Serialize};

/// The reason for the end of training.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunOutcome {
    /// All steps are done.
    Finished,
    /// Training was stopped early for the given reason.
    Stopped(String),
    /// The job was asked to end, or its time is up. It has saved, and should be restarted with
    /// `--resume auto`.
    Preempted(String),
}

/// Exit code of a job that has saved and should be restarted: `EX_TEMPFAIL` of sysexits.h.
pub const REQUEUE: i32 = 75;

impl RunOutcome {
    /// Returns the exit code of a process whose run has ended this way.
    pub fn exit_code(&self) -> i32 {
        match self {
            RunOutcome::Finished | RunOutcome::Stopped(_) => 0,
            RunOutcome::Preempted(_) => REQUEUE,
        }
    }
}
