//! Starts the ranks of a job as processes on this machine that communicate over TCP.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::Elastic;
use crate::elastic_ranks::ElasticRanks;
use crate::rank_processes::{Job, cannot_start};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::{signals, user_dirs};
use hpctrain_comm::{RENDEZVOUS_VARIABLE, TcpRendezvous, write_secret};

/// The prefix of the names of rendezvous directories.
const PREFIX: &str = "hpctrain-spawn-";

/// The file in a rendezvous directory that its launcher keeps locked while it lives.
const LOCK: &str = "launcher";

/// The directory in which the ranks of a job find each other; it holds their secret.
struct RendezvousDir {
    folder: TempDir,
    _lock: File,
}

impl RendezvousDir {
    /// Creates a directory in `root` that only this user can access, and removes those of this
    /// user's launchers that were killed.
    fn new(root: &Path) -> Result<Self> {
        remove_abandoned(root);
        let mut builder = tempfile::Builder::new();
        let folder =
            builder.prefix(PREFIX).permissions(Permissions::from_mode(0o700)).tempdir_in(root);
        let folder = folder.map_err(|e| Error::io("create a directory in", root, e))?;
        user_dirs::private_directory(folder.path())?;
        let path = folder.path().join(LOCK);
        let lock = user_dirs::lock_file(&path)?;
        lock.try_lock().map_err(|e| Error::io("lock", &path, e.to_string()))?;
        write_secret(folder.path())?;
        Ok(Self { folder, _lock: lock })
    }
}

/// Removes the rendezvous directories of launchers that were killed. A directory that cannot be
/// removed is left: this job does not need it.
fn remove_abandoned(root: &Path) {
    for entry in root.read_dir().into_iter().flatten().flatten() {
        let path = entry.path();
        let has_prefix = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if !has_prefix || !user_dirs::is_own_directory(&path) {
            continue;
        }
        // A launcher creates the lock before the secret: without a lock, there is no secret to
        // remove.
        let lock = path.join(LOCK);
        if user_dirs::is_own_file(&lock)
            && user_dirs::lock_file(&lock).is_ok_and(|lock| lock.try_lock().is_ok())
        {
            match std::fs::remove_dir_all(&path) {
                Ok(()) => {
                    log::info!("removed {}, left by a killed launcher", path.display())
                }
                Err(e) => {
                    log::warn!("cannot remove {}, left by a killed launcher: {e}", path.display())
                }
            }
        }
    }
}

/// Starts `ranks` processes of a program, waits for all, and returns the exit code of the job: that
/// of the first rank that fails. Signals to this process are forwarded to the ranks. With `elastic`
/// the job goes on without ranks that are lost, and a process that joins is started for each.
///
/// # Errors
/// Returns an error if there are no ranks, or a process cannot be started.
pub fn launch(
    ranks: usize,
    program: &OsStr,
    arguments: &[OsString],
    elastic: Option<&Elastic>,
) -> Result<i32> {
    if ranks == 0 {
        return Err(Error::input("a job of 0 ranks").hint("start 1 or more"));
    }
    signals::record_signals()?;
    let rendezvous = RendezvousDir::new(&std::env::temp_dir())?;
    let dir = rendezvous.folder.path();
    if let Some(elastic) = elastic {
        let job = ElasticRanks {
            program: program.into(),
            arguments: arguments.to_vec(),
            slots: ranks,
            first: Some((0, ranks)),
            rendezvous: dir.into(),
            has_other_hosts: false,
            rejoin: elastic.rejoin,
        };
        return job.launch();
    }
    let mut job = Job { ranks: Vec::with_capacity(ranks) };
    for rank in 0..ranks {
        let meeting = TcpRendezvous::on_this_host(dir.into(), rank, ranks);
        let child = Command::new(program)
            .args(arguments)
            .env(RENDEZVOUS_VARIABLE, meeting.to_string())
            .spawn();
        job.ranks.push(child.map_err(|e| cannot_start(program, e))?);
    }
    Ok(job.wait())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendezvous_dirs_are_private_and_those_of_killed_launchers_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let alive = RendezvousDir::new(root.path()).unwrap();
        let mode = alive.folder.path().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        // Killed, it would leave its directory, without a lock.
        let killed = RendezvousDir::new(root.path()).unwrap();
        let RendezvousDir { folder, _lock } = killed;
        let left = folder.keep();
        drop(_lock);
        // Others: a directory with another name, and one whose launcher has not locked it yet.
        let other = root.path().join("other");
        let starting = root.path().join(format!("{PREFIX}starting"));
        [&other, &starting].iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let next = RendezvousDir::new(root.path()).unwrap();
        assert!(!left.exists() && other.exists() && starting.exists());
        assert!(alive.folder.path().join("secret").exists() && next.folder.path().exists());
    }
}
