//! The directory in which the processes of an elastic job find each other.
//!
//! `hpctrain --spawn` makes one on its host. Processes that `mpirun` or `srun` has started, and
//! those of several hosts, meet in a directory below `run.root`, which all hosts share, named after
//! the launcher's job.

use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::comm::{Secret, write_secret};
use crate::error::{Error, Result};

/// The longest time that a process waits for the one that creates the directory.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Interval at which the directory is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The rank that a launcher has given to this process, without MPI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchedRank {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The name of the launcher's job, which no other job has.
    pub job: String,
}

/// Returns the rank that the environment states; `None` without a launcher.
pub fn launched_rank(env: impl Fn(&str) -> Option<String>) -> Option<LaunchedRank> {
    let number = |name: &str| env(name)?.parse::<usize>().ok();
    if let (Some(rank), Some(ranks)) =
        (number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE"))
    {
        // The address of mpirun is that of one job only; namespaces are reused.
        let uri = ["OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI21"];
        let uri = uri.iter().find_map(|name| env(name)).unwrap_or_default();
        let namespace = env("PMIX_NAMESPACE").unwrap_or_default();
        let mut hasher = DefaultHasher::new();
        (uri, namespace).hash(&mut hasher);
        return Some(LaunchedRank { rank, ranks, job: format!("mpirun-{:016x}", hasher.finish()) });
    }
    let rank = number("SLURM_PROCID")?;
    let ranks = number("SLURM_STEP_NUM_TASKS").or_else(|| number("SLURM_NTASKS"))?;
    let words = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"];
    let words = words.map(|name| env(name).unwrap_or_else(|| "0".into()));
    Some(LaunchedRank { rank, ranks, job: format!("slurm-{}", words.join("-")) })
}

/// The first characters of the names of such directories below `run.root`.
const PREFIX: &str = ".elastic-";

/// Returns the path of the directory of a launcher's job below `root`.
fn path(root: &Path, job: &str) -> PathBuf {
    root.join(format!("{PREFIX}{job}"))
}

/// Removes the directory after the end of the job, if it is one below `run.root`.
pub fn remove_rendezvous(directory: &Path) {
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if name.starts_with(PREFIX) {
        // It has no results. The launcher may have removed it.
        let _ = fs::remove_dir_all(directory);
    }
}

/// Creates the directory of a launcher's job below `root`, which only this user can read, with a
/// new secret. One of an earlier job is replaced.
///
/// # Errors
/// Returns an error if it cannot be created.
pub fn rendezvous_directory(root: &Path, job: &str) -> Result<PathBuf> {
    let path = path(root, job);
    fs::create_dir_all(root).map_err(|e| Error::io("create", root, e))?;
    match fs::remove_dir_all(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io("remove", &path, e)),
        _ => {}
    }
    // Others see it with its secret.
    let new = root.join(format!("{PREFIX}{job}.new-{}", std::process::id()));
    DirBuilder::new().mode(0o700).create(&new).map_err(|e| Error::io("create", &new, e))?;
    write_secret(&new)?;
    fs::rename(&new, &path).map_err(|e| Error::io("create", &path, e))?;
    fs::canonicalize(&path).map_err(|e| Error::io("find", &path, e))
}

/// Waits for the directory of a launcher's job below `root`, which another process creates.
///
/// # Errors
/// Returns an error if it does not come in time.
pub fn await_rendezvous(root: &Path, job: &str) -> Result<PathBuf> {
    let path = path(root, job);
    let until = Instant::now() + TIMEOUT;
    while Secret::read(&path).is_err() {
        if Instant::now() > until {
            return Err(Error::comm(format!("rank 0 has not created {}", path.display()))
                .hint("run.root must be on a file system that all hosts share"));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(vars: &[(&str, &str)]) -> Option<LaunchedRank> {
        launched_rank(|name| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into())
        })
    }

    #[test]
    fn launchers_state_ranks() {
        assert_eq!(rank(&[]), None);
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_JOB_ID", "17"),
            ("SLURM_STEP_ID", "2"),
        ];
        let found = LaunchedRank { rank: 3, ranks: 4, job: "slurm-17-2-0".into() };
        assert_eq!(rank(&slurm), Some(found));
        let jobs = ["a", "b"].map(|uri| {
            let open_mpi = [
                ("OMPI_COMM_WORLD_RANK", "1"),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_MCA_orte_hnp_uri", uri),
            ];
            rank(&open_mpi).unwrap()
        });
        assert_eq!((jobs[0].rank, jobs[0].ranks), (1, 2));
        assert_ne!(jobs[0].job, jobs[1].job);
    }

    #[test]
    fn processes_meet_in_a_private_directory() {
        let root = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| await_rendezvous(root.path(), "j"));
            let created = rendezvous_directory(root.path(), "j").unwrap();
            let found = waiting.join().unwrap().unwrap();
            assert_eq!(fs::canonicalize(found).unwrap(), created);
        });
        // An earlier job of the same name has left its files.
        fs::write(path(root.path(), "j").join("rank-0"), "old").unwrap();
        let again = rendezvous_directory(root.path(), "j").unwrap();
        assert_eq!(fs::read_dir(again).unwrap().count(), 1);
    }
}
