//! The roles of the ranks of a job: training, parameter server, evaluation. They are agreed on by
//! one collective over all ranks of the job.

use serde::{Deserialize, Serialize};

use crate::backend::cpu::Cpu;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::evaluate::RunAnnouncement;
use crate::job::fail;
use crate::topology::Topology;

/// The command by which a process was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartCommand {
    /// `hpctrain train --evaluators N --servers N`.
    Train {
        /// The number of ranks started by `train` that evaluate instead.
        evaluators: usize,
        /// The number of the other ranks that are parameter servers instead.
        servers: usize,
    },
    /// `hpctrain eval`.
    Evaluate,
}

/// The role of a rank in the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankRole {
    /// It trains.
    Trains,
    /// It is the parameter server of this index.
    Serves(usize),
    /// It evaluates checkpoints.
    Evaluates,
}

/// The role of this rank, with the communicators that go with it.
pub struct RankAssignment {
    /// All ranks of the job.
    job: Comm<Cpu>,
    /// Sends the evaluators the directory of the run.
    pub announcement: RunAnnouncement,
    /// A communicator of the ranks of the same role.
    pub comm: Comm<Cpu>,
    /// A communicator of all ranks that train or serve; on an evaluator, of all evaluators.
    pub peers: Comm<Cpu>,
    /// The role.
    pub role: RankRole,
    /// The numbers of training ranks and of servers.
    pub counts: (usize, usize),
    /// Whether the job has both evaluators and other ranks.
    pub mixed: bool,
    /// The number of compute threads per rank when all ranks of a node share its cores.
    pub threads: usize,
}

impl RankAssignment {
    /// Determines the role of this rank. Collective over the job.
    ///
    /// # Errors
    /// Returns an error if no rank would be left to train, or a message between ranks fails.
    pub fn find(everyone: &Comm<Cpu>, start: StartCommand) -> Result<Self> {
        let world = everyone.world();
        let message = serde_json::to_vec(&(start, everyone.launch_rank()))
            .map_err(|e| Error::internal(e.to_string()))?;
        let messages = world.gather_bytes(message).wait()?;
        let starts: Vec<(StartCommand, usize)> = messages
            .iter()
            .map(|bytes| serde_json::from_slice(bytes))
            .collect::<Result<_, _>>()
            .map_err(|e| Error::comm(format!("another rank sent a malformed role: {e}")))?;
        let roles = assign_by_launch_rank(&starts)?;
        let evaluates = |role: &RankRole| usize::from(*role == RankRole::Evaluates);
        let serves = |role: &RankRole| matches!(role, RankRole::Serves(_));
        let evaluators: usize = roles.iter().map(evaluates).sum();
        let mixed = 0 < evaluators && evaluators < roles.len();
        let side = match mixed {
            true => everyone.role(&roles.iter().map(evaluates).collect::<Vec<_>>())?,
            false => everyone.clone(),
        };
        let servers = roles.iter().filter(|role| serves(role)).count();
        let part = roles[everyone.rank()];
        // Evaluators are already separated from the other ranks.
        let comm = match servers > 0 && part != RankRole::Evaluates {
            true => {
                let others = roles.iter().filter(|role| **role != RankRole::Evaluates);
                side.role(&others.map(|role| usize::from(serves(role))).collect::<Vec<_>>())?
            }
            false => side.clone(),
        };
        let threads = Topology::gather(&world, everyone.node().host)?.threads();
        let counts = (roles.len() - evaluators - servers, servers);
        Ok(Self {
            job: everyone.clone(),
            announcement: RunAnnouncement::new(everyone),
            comm,
            peers: side,
            role: part,
            counts,
            mixed,
            threads,
        })
    }

    /// Ends the evaluators, which would otherwise wait forever, after an error of a rank that trains
    /// or serves, and returns its exit code if all these ranks have it.
    ///
    /// # Errors
    /// Returns the error if there are no evaluators, or only some ranks have it.
    pub fn end_evaluators(&self, error: Error) -> Result<i32> {
        if !(self.mixed && (error.is_shared() || self.peers.size() == 1)) {
            return Err(error);
        }
        let code = error.exit_code();
        if self.peers.rank() == 0 {
            fail(&error);
            if self.announcement.is_made() {
                // They look at the run's directory, and hear no more from its trainer.
                self.job.abort(code)
            }
        }
        if !self.announcement.is_made() {
            self.announcement.announce_failure(code)?;
        }
        Ok(code)
    }
}

/// Returns the role of each rank, for its command and its number from the launcher. The last of
/// these numbers evaluate and serve, also where ranks are renumbered by node: the launcher's options
/// then decide which nodes have servers.
fn assign_by_launch_rank(starts: &[(StartCommand, usize)]) -> Result<Vec<RankRole>> {
    let mut order: Vec<usize> = (0..starts.len()).collect();
    order.sort_by_key(|&rank| starts[rank].1);
    let launched: Vec<StartCommand> = order.iter().map(|&rank| starts[rank].0).collect();
    let mut roles = vec![RankRole::Trains; starts.len()];
    for (rank, role) in order.into_iter().zip(assign(&launched)?) {
        roles[rank] = role;
    }
    Ok(roles)
}

/// Returns the role of each rank. Of the ranks that `train` started, the last `evaluators`
/// evaluate, the `servers` before them are parameter servers, and the rest train.
fn assign(starts: &[StartCommand]) -> Result<Vec<RankRole>> {
    let requests = starts.iter().filter_map(|start| match start {
        StartCommand::Train { evaluators, servers } => Some((*evaluators, *servers)),
        StartCommand::Evaluate => None,
    });
    let count = requests.clone().count();
    let evaluators = requests.clone().map(|(evaluators, _)| evaluators).max().unwrap_or(0);
    let servers = requests.map(|(_, servers)| servers).max().unwrap_or(0);
    if count > 0 && evaluators + servers >= count {
        let ranks = if count == 1 { "the only rank".into() } else { format!("{count} ranks") };
        let counts = [("--evaluators", evaluators), ("--servers", servers)];
        let options: Vec<String> = counts
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        return Err(Error::input(format!(
            "{} of {ranks} leaves none to train",
            options.join(" and ")
        ))
        .hint(format!("start {} ranks or more", evaluators + servers + 1))
        .shared());
    }
    let workers = count - evaluators - servers;
    let mut roles = (0..count).map(|number| train_role(number, workers, servers));
    Ok(starts
        .iter()
        .map(|start| match start {
            StartCommand::Train { .. } => roles.next().unwrap_or(RankRole::Evaluates),
            StartCommand::Evaluate => RankRole::Evaluates,
        })
        .collect())
}

/// Returns the role of rank `number` among those that `train` started.
fn train_role(number: usize, workers: usize, servers: usize) -> RankRole {
    match number {
        number if number < workers => RankRole::Trains,
        number if number < workers + servers => RankRole::Serves(number - workers),
        _ => RankRole::Evaluates,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The launcher has placed the ranks on two nodes round robin: 0 and 2 are on the first.
    #[test]
    fn the_numbers_of_the_launcher_decide() {
        use RankRole::{Evaluates, Serves, Trains};
        let starts = [0, 2, 1, 3]
            .map(|launched| (StartCommand::Train { evaluators: 0, servers: 2 }, launched));
        assert_eq!(assign_by_launch_rank(&starts).unwrap(), [Trains, Serves(0), Trains, Serves(1)]);
        let starts = [0, 2, 4, 1, 3]
            .map(|launched| (StartCommand::Train { evaluators: 2, servers: 0 }, launched));
        assert_eq!(
            assign_by_launch_rank(&starts).unwrap(),
            [Trains, Trains, Evaluates, Trains, Evaluates]
        );
    }

    #[test]
    fn the_last_training_ranks_evaluate_and_those_before_serve() {
        use RankRole::{Evaluates, Serves, Trains};
        let start = |evaluators, servers| StartCommand::Train { evaluators, servers };
        let plain = start(0, 0);
        let one = start(1, 0);
        assert_eq!(assign(&[plain; 2]).unwrap(), [Trains, Trains]);
        assert_eq!(assign(&[one; 3]).unwrap(), [Trains, Trains, Evaluates]);
        assert_eq!(
            assign(&[StartCommand::Evaluate, plain, plain]).unwrap(),
            [Evaluates, Trains, Trains]
        );
        assert_eq!(assign(&[StartCommand::Evaluate; 2]).unwrap(), [Evaluates, Evaluates]);
        assert_eq!(
            assign(&[one, StartCommand::Evaluate, one]).unwrap(),
            [Trains, Evaluates, Evaluates]
        );
        assert_eq!(
            assign(&[start(1, 2); 5]).unwrap(),
            [Trains, Trains, Serves(0), Serves(1), Evaluates]
        );
        assert!(
            assign(&[one]).unwrap_err().to_string().contains("the only rank leaves none to train")
        );
        assert!(assign(&[start(2, 0); 2]).unwrap_err().to_string().contains("3 ranks or more"));
        let error = assign(&[start(1, 2); 3]).unwrap_err().to_string();
        assert!(
            error.contains("--evaluators 1 and --servers 2 of 3 ranks leaves none to train"),
            "{error}"
        );
    }
}
