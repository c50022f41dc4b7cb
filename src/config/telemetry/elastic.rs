//! `elastic.jsonl`: one JSON object per change of the ranks of an elastic job.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::short_lines;
use hpctrain_base::error::Result;

/// The name of the file in a run's directory.
pub const FILE: &str = "elastic.jsonl";

/// A rank that was lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostMember {
    /// The rank that it was.
    pub rank: usize,
    /// The name of its host.
    pub host: String,
    /// How it was lost.
    pub why: String,
}

/// The milliseconds of the parts of a change.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ChangeTimes {
    /// The time from the first sign of a loss on rank 0 until its step had ended.
    pub interrupt: f64,
    /// The time to agree on the ranks.
    pub agree: f64,
    /// The time to connect, build the model and restore its state.
    pub build: f64,
}

impl ChangeTimes {
    /// Returns the sum, in seconds.
    pub fn seconds(&self) -> f64 {
        (self.interrupt + self.agree + self.build) * 1e-3
    }
}

/// A change of the ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The number of the membership.
    pub membership: u64,
    /// The time at which the run continues, in seconds since 1970.
    pub time: f64,
    /// The number of ranks before.
    pub ranks_before: usize,
    /// The number of ranks after.
    pub ranks: usize,
    /// The host of each rank.
    pub hosts: Vec<String>,
    /// The ranks that were lost.
    pub lost: Vec<LostMember>,
    /// The number of processes that joined.
    pub joined: usize,
    /// The finished steps before the change.
    pub step: u64,
    /// The finished steps from which the run continues.
    pub resumed: u64,
    /// The milliseconds of its parts.
    pub ms: ChangeTimes,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "membership {}: {} ranks", self.membership, self.ranks)?;
        for LostMember { rank, host, why } in &self.lost {
            write!(f, ", without rank {rank} on {host} ({why})")?;
        }
        if self.joined > 0 {
            write!(
                f,
                ", with {} new process{}",
                self.joined,
                if self.joined == 1 { "" } else { "es" }
            )?;
        }
        let again = self.step - self.resumed.min(self.step);
        write!(f, "; continues from step {}", self.resumed)?;
        if again > 0 {
            write!(f, ", {again} step{} again", if again == 1 { "" } else { "s" })?;
        }
        write!(f, ", after {:.1} s", self.ms.seconds())
    }
}

/// Appends a change to the records of the run in directory `run`.
///
/// # Errors
/// Returns an error if the file cannot be read or written.
pub fn record(run: &Path, change: &Change) -> Result<()> {
    short_lines::append(&run.join(FILE), change)
}

/// Reads the changes of the run in directory `run`; lines that cannot be read are skipped.
///
/// # Errors
/// Returns an error if the file is there and cannot be read.
pub fn read(run: &Path) -> Result<Vec<Change>> {
    short_lines::read(&run.join(FILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change() -> Change {
        Change {
            membership: 3,
            time: 1.0,
            ranks_before: 4,
            ranks: 3,
            hosts: vec!["a".into(); 3],
            lost: vec![LostMember {
                rank: 1,
                host: "a".into(),
                why: "its process has ended".into(),
            }],
            joined: 0,
            step: 58,
            resumed: 57,
            ms: ChangeTimes { interrupt: 12.0, agree: 80.0, build: 310.0 },
        }
    }

    #[test]
    fn changes_are_read_back() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(read(run.path()), Ok(vec![]));
        let joined = Change { lost: vec![], joined: 2, step: 57, ..change() };
        record(run.path(), &change()).unwrap();
        record(run.path(), &joined).unwrap();
        assert_eq!(read(run.path()), Ok(vec![change(), joined]));
    }

    #[test]
    fn a_change_is_one_line() {
        assert_eq!(
            change().to_string(),
            "membership 3: 3 ranks, without rank 1 on a (its process has ended); continues from step \
             57, 1 step again, after 0.4 s"
        );
        let joined = Change { lost: vec![], joined: 2, step: 57, ..change() };
        assert!(
            joined.to_string().contains("3 ranks, with 2 new processes; continues from step 57, a")
        );
    }
}
