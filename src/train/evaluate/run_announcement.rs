//! The message by which the ranks that train or serve send the evaluators of their job the directory of
//! the run, or the exit code of a run that cannot start.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_comm::{Comm, Group};
use hpctrain_cpu::Cpu;

/// The announcement of a run, which each rank of a job takes part in once.
pub struct RunAnnouncement {
    job: Group<Cpu>,
    is_made: Cell<bool>,
}

/// The knowledge of one rank about the run.
#[derive(Serialize, Deserialize)]
enum Start {
    Unknown,
    Directory(PathBuf),
    /// The exit code of an error that all ranks that train or serve have.
    Failed(i32),
}

impl RunAnnouncement {
    /// Creates the announcement of the run of a job.
    pub fn new(job: &Comm<Cpu>) -> Self {
        Self { job: job.world(), is_made: Cell::new(false) }
    }

    /// Returns whether this rank has taken part.
    pub fn is_made(&self) -> bool {
        self.is_made.get()
    }

    /// Announces the directory of the run, which not all ranks need to know, and returns it.
    /// Collective over the job.
    ///
    /// # Errors
    /// Returns an error if no rank knows it, or a message fails.
    pub fn announce(&self, run: Option<&Path>) -> Result<PathBuf> {
        let start = run.map_or(Start::Unknown, |run| Start::Directory(run.into()));
        self.exchange(&start)?.map_err(|code| {
            Error::internal(format!("a rank announced a failure: exit code {code}"))
        })
    }

    /// Announces an error that all ranks that train or serve have, so that the evaluators end, too.
    /// Collective over the job.
    ///
    /// # Errors
    /// Returns an error if a message fails.
    pub fn announce_failure(&self, code: i32) -> Result<()> {
        self.exchange(&Start::Failed(code)).map(drop)
    }

    /// Waits, on an evaluator, for the directory of the run, or the exit code of the job if the run
    /// cannot start. Collective over the job.
    ///
    /// # Errors
    /// Returns an error if no rank knows the run, or a message fails.
    pub fn wait(&self) -> Result<Result<PathBuf, i32>> {
        self.exchange(&Start::Unknown)
    }

    fn exchange(&self, mine: &Start) -> Result<Result<PathBuf, i32>> {
        self.is_made.set(true);
        let mine = serde_json::to_vec(mine).map_err(|e| Error::internal(e.to_string()))?;
        for message in self.job.gather_bytes(mine).wait()? {
            match serde_json::from_slice(&message) {
                Ok(Start::Unknown) => {}
                Ok(Start::Directory(run)) => return Ok(Ok(run)),
                Ok(Start::Failed(code)) => return Ok(Err(code)),
                Err(e) => {
                    return Err(Error::comm(format!("a rank announced a malformed start: {e}")));
                }
            }
        }
        Err(Error::internal("no rank sent the directory of the run"))
    }
}
