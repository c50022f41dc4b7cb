//! The roles of the ranks of a job, training and evaluation: one exchange between all ranks, so
//! that one binary serves both.

use serde::{Deserialize, Serialize};

use crate::backend::cpu::Cpu;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::job::fail;
use crate::topology::Topology;

/// The command by which a process was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Start {
    /// `hpctrain train --evaluators N --servers N`.
    Train {
        /// Number of the job's training ranks that evaluate instead.
        evaluators: usize,
        /// Number of the others that hold the parameters instead.
        servers: usize,
    },
    /// `hpctrain eval`.
    Evaluate,
}

/// The work of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankRole {
    /// It trains.
    Trains,
    /// It is this one of the servers.
    Serves(usize),
    /// It evaluates.
    Evaluates,
}

/// The role of this rank.
pub struct Role {
    /// All ranks of the job.
    pub everyone: Comm<Cpu>,
    /// The ranks of the same role, which take themselves for the world.
    pub comm: Comm<Cpu>,
    /// The ranks that train or serve, and take themselves for the world; of an evaluator, all.
    pub side: Comm<Cpu>,
    /// Its work.
    pub part: RankRole,
    /// Ranks that train, and servers.
    pub counts: (usize, usize),
    /// Whether the job evaluates, too.
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
        let parts = parts(&starts)?;
        let evaluates = |part: &RankRole| usize::from(*part == RankRole::Evaluates);
        let serves = |part: &RankRole| matches!(part, RankRole::Serves(_));
        let evaluators: usize = parts.iter().map(evaluates).sum();
        let mixed = 0 < evaluators && evaluators < parts.len();
        let side = match mixed {
            true => everyone.role(&parts.iter().map(evaluates).collect::<Vec<_>>())?,
            false => everyone.clone(),
        };
        let servers = parts.iter().filter(|part| serves(part)).count();
        let part = parts[everyone.rank()];
        // Evaluators are a side of their own.
        let comm = match servers > 0 && part != RankRole::Evaluates {
            true => {
                let others = parts.iter().filter(|part| **part != RankRole::Evaluates);
                side.role(&others.map(|part| usize::from(serves(part))).collect::<Vec<_>>())?
            }
            false => side.clone(),
        };
        let threads = Topology::gather(&world, everyone.node().host)?.threads();
        let counts = (parts.len() - evaluators - servers, servers);
        Ok(Self { everyone: everyone.clone(), comm, side, part, counts, mixed, threads })
    }

    /// Ends the job after an error that all ranks but the evaluators share: these would wait for
    /// ever.
    pub fn release_evaluators(&self, error: &Error) {
        if self.mixed && error.is_shared() && self.side.rank() == 0 {
            fail(error);
            self.everyone.abort(error.exit_code());
        }
    }
}

/// The work of each rank: those started to train do, but for the last ones if some are to evaluate,
/// and those before them if some are to serve.
fn parts(starts: &[Start]) -> Result<Vec<RankRole>> {
    let asked = starts.iter().filter_map(|start| match start {
        Start::Train { evaluators, servers } => Some((*evaluators, *servers)),
        Start::Evaluate => None,
    });
    let count = asked.clone().count();
    let evaluators = asked.clone().map(|(evaluators, _)| evaluators).max().unwrap_or(0);
    let servers = asked.map(|(_, servers)| servers).max().unwrap_or(0);
    if count > 0 && evaluators + servers >= count {
        let ranks = if count == 1 { "the only rank".into() } else { format!("{count} ranks") };
        let counts = [("--evaluators", evaluators), ("--servers", servers)];
        let told: Vec<String> = counts
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        return Err(Error::input(format!(
            "{} of {ranks} leaves none to train",
            told.join(" and ")
        ))
        .hint(format!("start {} ranks or more", evaluators + servers + 1))
        .shared());
    }
    let workers = count - evaluators - servers;
    let mut number = 0;
    let mut part = |start: &Start| {
        if *start == Start::Evaluate {
            return RankRole::Evaluates;
        }
        number += 1;
        match number - 1 {
            number if number < workers => RankRole::Trains,
            number if number < workers + servers => RankRole::Serves(number - workers),
            _ => RankRole::Evaluates,
        }
    };
    Ok(starts.iter().map(&mut part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_training_ranks_evaluate_and_those_before_serve() {
        use RankRole::{Evaluates, Serves, Trains};
        let start = |evaluators, servers| Start::Train { evaluators, servers };
        let plain = start(0, 0);
        let one = start(1, 0);
        assert_eq!(parts(&[plain; 2]).unwrap(), [Trains, Trains]);
        assert_eq!(parts(&[one; 3]).unwrap(), [Trains, Trains, Evaluates]);
        assert_eq!(parts(&[Start::Evaluate, plain, plain]).unwrap(), [Evaluates, Trains, Trains]);
        assert_eq!(parts(&[Start::Evaluate; 2]).unwrap(), [Evaluates, Evaluates]);
        assert_eq!(parts(&[one, Start::Evaluate, one]).unwrap(), [Trains, Evaluates, Evaluates]);
        assert_eq!(
            parts(&[start(1, 2); 5]).unwrap(),
            [Trains, Trains, Serves(0), Serves(1), Evaluates]
        );
        assert!(
            parts(&[one]).unwrap_err().to_string().contains("the only rank leaves none to train")
        );
        assert!(parts(&[start(2, 0); 2]).unwrap_err().to_string().contains("3 ranks or more"));
        let error = parts(&[start(1, 2); 3]).unwrap_err().to_string();
        assert!(
            error.contains("--evaluators 1 and --servers 2 of 3 ranks leaves none to train"),
            "{error}"
        );
    }
}
