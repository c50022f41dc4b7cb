//! The roles of the ranks of a job, training and evaluation: one exchange between all ranks, so that one binary serves
//! both.

use serde::{Deserialize, Serialize};

use crate::backend::cpu::Cpu;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::run_dir::Ending;
use crate::topology::Topology;

/// The command by which a process was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Start {
    /// `hpctrain train --evaluators N`.
    Train {
        /// Number of the job's training ranks that evaluate instead.
        evaluators: usize,
    },
    /// `hpctrain eval`.
    Evaluate,
}

/// The role of this rank.
pub struct Role {
    /// All ranks of the job.
    pub everyone: Comm<Cpu>,
    /// The ranks of the same role, which take themselves for the world.
    pub comm: Comm<Cpu>,
    /// Whether it trains, rather than evaluates.
    pub trains: bool,
    /// Whether the job has both roles.
    pub mixed: bool,
    /// Compute threads a rank when all ranks of a node share its cores.
    pub threads: usize,
}

impl Role {
    /// Finds out: collective over the job.
    ///
    /// # Errors
    /// Nobody would be left to train, or a message between ranks failed.
    pub fn find(everyone: &Comm<Cpu>, start: Start) -> Result<Self> {
        let world = everyone.world();
        let message = serde_json::to_vec(&start).map_err(|e| Error::internal(e.to_string()))?;
        let told = world.gather_bytes(message).wait()?;
        let starts: Vec<Start> = told
            .iter()
            .map(|bytes| serde_json::from_slice(bytes))
            .collect::<Result<_, _>>()
            .map_err(|e| Error::comm(format!("another rank sent a malformed role: {e}")))?;
        let trains = trainers(&starts)?;
        let mixed = trains.contains(&true) && trains.contains(&false);
        let colors: Vec<usize> = trains.iter().map(|trains| usize::from(!trains)).collect();
        let comm = if mixed { everyone.role(&colors)? } else { everyone.clone() };
        let threads = Topology::gather(&world, everyone.node().host)?.threads();
        Ok(Self { everyone: everyone.clone(), comm, trains: trains[everyone.rank()], mixed, threads })
    }
}

/// Whether each rank trains: those started for it do, but for the last ones if some are to evaluate.
fn trainers(starts: &[Start]) -> Result<Vec<bool>> {
    let asked = starts.iter().filter_map(|start| match start {
        Start::Train { evaluators } => Some(*evaluators),
        Start::Evaluate => None,
    });
    let (count, evaluators) = (asked.clone().count(), asked.max().unwrap_or(0));
    if count > 0 && evaluators >= count {
        let ranks = if count == 1 { "the only rank".into() } else { format!("{count} ranks") };
        return Err(Error::input(format!("--evaluators {evaluators} of {ranks} leaves none to train"))
            .hint(format!("start {} ranks or more", evaluators + 1))
            .shared());
    }
    let mut left = count - evaluators.min(count);
    let mut trains = |start: &Start| {
        let trains = left > 0 && *start != Start::Evaluate;
        left -= usize::from(trains);
        trains
    };
    Ok(starts.iter().map(&mut trains).collect())
}

/// Exit code of a job that has saved and is to be started again: `EX_TEMPFAIL` of sysexits.h.
pub const REQUEUE: i32 = 75;

/// The exit code of an ending.
pub fn exit_code(ending: &Ending) -> i32 {
    match ending {
        Ending::Finished | Ending::Stopped(_) => 0,
        Ending::Preempted(_) => REQUEUE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_training_ranks_evaluate() {
        let (plain, one) = (Start::Train { evaluators: 0 }, Start::Train { evaluators: 1 });
        assert_eq!(trainers(&[plain; 2]).unwrap(), [true, true]);
        assert_eq!(trainers(&[one; 3]).unwrap(), [true, true, false]);
        assert_eq!(trainers(&[Start::Evaluate, plain, plain]).unwrap(), [false, true, true]);
        assert_eq!(trainers(&[Start::Evaluate; 2]).unwrap(), [false, false]);
        assert_eq!(trainers(&[one, Start::Evaluate, one]).unwrap(), [true, false, false]);
        assert!(trainers(&[one]).unwrap_err().to_string().contains("the only rank leaves none to train"));
        assert!(trainers(&[Start::Train { evaluators: 2 }; 2]).unwrap_err().to_string().contains("3 ranks or more"));
    }
}
