//! Detects whether a launcher started this process, before MPI is initialised: a process that runs
//! alone must not initialise it, and that may take seconds.

use std::path::{Path, PathBuf};

use super::tcp::{RENDEZVOUS_VARIABLE, TcpRendezvous};
use hpctrain_base::error::{Error, Result};

/// A start by a launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank, if the launcher states it. Errors before MPI is initialised are printed
    /// by rank 0 only.
    pub rank: Option<usize>,
    /// The name of the launcher, for reports.
    pub by: &'static str,
    /// The rendezvous of ranks that communicate over TCP; `None` with MPI.
    pub meeting: Option<TcpRendezvous>,
    /// The directory in which the processes of an elastic job find each other, if this process
    /// joins one.
    pub joins: Option<PathBuf>,
}

/// The environment variable that holds the rendezvous directory of the elastic job that a process
/// joins.
pub const JOIN_VARIABLE: &str = "HPCTRAIN_JOIN";

/// The environment variable that is set for ranks of a job with ranks on other hosts: they listen
/// at an address that other hosts reach.
pub const ADDRESS_VARIABLE: &str = "HPCTRAIN_ADDRESS";

impl Launch {
    /// Returns the directory in which the processes of the job find each other over TCP.
    pub fn rendezvous(&self) -> Option<&Path> {
        let meeting = self.meeting.as_ref().map(|meeting| meeting.dir.as_path());
        meeting.or(self.joins.as_deref())
    }
}

/// For each launcher: a variable that it sets, the one that holds the rank, and its name.
const LAUNCHERS: [(&str, &str, &str); 5] = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI's mpirun"),
    ("PMIX_RANK", "PMIX_RANK", "a launcher that speaks PMIx, such as srun --mpi=pmix"),
    ("PMI_RANK", "PMI_RANK", "a launcher that speaks PMI, such as MPICH's mpiexec"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MVAPICH's mpirun"),
    ("PALS_RANKID", "PALS_RANKID", "PALS"),
];

/// Overrides the launchers' variables: `1` or `0`.
const OVERRIDE: &str = "HPCTRAIN_MPI";

/// Returns the launch that the environment indicates, or `None` for a process that was started
/// alone.
///
/// # Errors
/// Returns an error if `HPCTRAIN_MPI` is neither 0 nor 1, the variable of a rendezvous cannot be
/// parsed, or Slurm started several tasks without a process-management interface.
pub fn launched(env: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
    if let Some(directory) = env(JOIN_VARIABLE) {
        return Ok(Some(Launch {
            rank: None,
            by: "hpctrain --spawn",
            meeting: None,
            joins: Some(directory.into()),
        }));
    }
    if let Some(place) = env(RENDEZVOUS_VARIABLE) {
        let meeting: TcpRendezvous = place.parse()?;
        return Ok(Some(Launch {
            rank: Some(meeting.rank),
            by: "hpctrain --spawn",
            meeting: Some(meeting),
            joins: None,
        }));
    }
    let launcher = LAUNCHERS.iter().find(|(sign, ..)| env(sign).is_some());
    let rank = launcher.and_then(|(_, rank, _)| env(rank)?.parse().ok());
    let by = launcher.map(|(.., name)| *name);
    match env(OVERRIDE).as_deref() {
        Some("0") => return Ok(None),
        Some("1") => {
            return Ok(Some(Launch {
                rank,
                by: by.unwrap_or("a launcher, as HPCTRAIN_MPI=1 says"),
                meeting: None,
                joins: None,
            }));
        }
        Some(other) => {
            return Err(Error::input(format!("{OVERRIDE}={other} is neither 0 nor 1"))
                .hint("1 says that an MPI launcher started this process, 0 that none did; unset it to detect a launcher"));
        }
        None => {}
    }
    if let Some(by) = by {
        return Ok(Some(Launch { rank, by, meeting: None, joins: None }));
    }
    // Set by srun for the tasks of a step only; SLURM_NTASKS is also seen by a batch script, which
    // runs once.
    let tasks: usize =
        env("SLURM_STEP_NUM_TASKS").and_then(|tasks| tasks.parse().ok()).unwrap_or(1);
    if tasks > 1 && env("SLURM_PROCID").is_some() {
        return Err(Error::input(format!("srun started {tasks} tasks without a process-management interface"))
            .hint("srun --mpi=pmix (or pmi2); HPCTRAIN_MPI=0 if each is to run by itself, as in srun --pty bash"));
    }
    Ok(None)
}

/// Returns the number of processes that the launcher reports, to compare with MPI's.
pub(crate) fn launched_size(env: impl Fn(&str) -> Option<String>) -> Option<usize> {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().find_map(|name| env(name)?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rank of a launch, if it states one.
    fn ask(vars: &[(&str, &str)]) -> Result<Option<Option<usize>>> {
        let launch = launched(|name| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into())
        })?;
        Ok(launch.map(|launch| launch.rank))
    }

    #[test]
    fn launchers_are_recognised() {
        assert_eq!(ask(&[]), Ok(None));
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "2")];
        assert_eq!(ask(&open_mpi), Ok(Some(Some(2))));
        assert_eq!(ask(&[("PMI_RANK", "1")]), Ok(Some(Some(1))));
        assert_eq!(ask(&[("PALS_RANKID", "?")]), Ok(Some(None)));
    }

    #[test]
    fn spawned_processes_know_their_place() {
        let meeting = TcpRendezvous::on_this_host("/tmp/a b/1/2".into(), 3, 4);
        let launch = launched(|name| (name == RENDEZVOUS_VARIABLE).then(|| meeting.to_string()));
        let launch = launch.unwrap().unwrap();
        assert_eq!((launch.rank, launch.meeting.as_ref()), (Some(3), Some(&meeting)));
        for place in ["", "3", "3/4", "4/4/x", "x/4/y"] {
            assert!(
                ask(&[(RENDEZVOUS_VARIABLE, place)])
                    .unwrap_err()
                    .to_string()
                    .contains(RENDEZVOUS_VARIABLE),
                "{place}"
            );
        }
    }

    #[test]
    fn the_override_decides() {
        assert_eq!(ask(&[("HPCTRAIN_MPI", "0"), ("PMI_RANK", "1")]), Ok(None));
        assert_eq!(ask(&[("HPCTRAIN_MPI", "1")]), Ok(Some(None)));
        assert!(ask(&[("HPCTRAIN_MPI", "yes")]).is_err());
    }

    #[test]
    fn srun_without_pmi_is_an_error() {
        let step = [("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "0")];
        let error = ask(&step).unwrap_err();
        assert!(
            error.to_string().contains("srun started 4 tasks")
                && error.to_string().contains("--mpi=pmix")
        );
        let with_pmix = [step[0], step[1], ("PMIX_RANK", "0")];
        assert_eq!(ask(&with_pmix), Ok(Some(Some(0))));
        // A batch script of a job of four tasks.
        assert_eq!(ask(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]), Ok(None));
    }
}
