//! Starts the ranks of a job as processes on this machine that communicate over TCP.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::Elastic;
use crate::elastic_ranks::ElasticRanks;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::{signals, user_dirs};
use hpctrain_comm::{RENDEZVOUS_VARIABLE, TcpRendezvous, write_secret};

/// The interval at which ranks and signals are polled.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The time in which the other ranks must end after one has failed.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// The exit code of a rank that was asked to end.
pub const INTERRUPTED: i32 = 75;

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

/// Returns the error of a program that cannot be started.
pub fn cannot_start(program: &OsStr, why: std::io::Error) -> Error {
    let is_wrong = matches!(why.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied);
    let error = Error::io("start", Path::new(program), why);
    if is_wrong { error.hint("give an executable file, such as ./program") } else { error }
}

/// The processes of a job, which are killed when this is dropped.
pub struct Job {
    pub ranks: Vec<Child>,
}

impl Job {
    /// Waits for all ranks and forwards signals to them. Returns the first exit code that is not 0.
    fn wait(&mut self) -> i32 {
        let mut codes: Vec<Option<i32>> = vec![None; self.ranks.len()];
        let mut first = 0;
        let mut forwarded = None;
        let mut failed = None;
        while codes.contains(&None) {
            std::thread::sleep(POLL_INTERVAL);
            let signal = signals::last_signal();
            if signal != forwarded {
                forwarded = signal;
                self.forward(signal);
            }
            for (rank, (child, code)) in self.ranks.iter_mut().zip(&mut codes).enumerate() {
                let Some(status) = child.try_wait().ok().flatten().filter(|_| code.is_none())
                else {
                    continue;
                };
                let ended = exit_code(status);
                *code = Some(ended);
                if ended != 0 && first == 0 {
                    first = ended;
                    if let Some(signal) = status.signal() {
                        log::error!("rank {rank} was ended by signal {signal}");
                    }
                }
                // Ranks that were asked to end may need longer than the others to save.
                if ![0, INTERRUPTED].contains(&ended) {
                    failed.get_or_insert_with(Instant::now);
                }
            }
            if failed.is_some_and(|since: Instant| since.elapsed() > TIMEOUT) {
                break;
            }
        }
        first
    }

    /// Sends the signal of this name to every rank.
    fn forward(&self, name: Option<&str>) {
        forward(name, self.ranks.iter());
    }
}

/// Sends the signal of this name to processes.
pub fn forward<'a>(name: Option<&str>, children: impl Iterator<Item = &'a Child>) {
    let signal = match name {
        Some("SIGINT") => Signal::INT,
        Some("SIGUSR1") => Signal::USR1,
        Some(_) => Signal::TERM,
        None => return,
    };
    for child in children {
        // This fails for a process that has ended.
        let _ = kill_process(Pid::from_child(child), signal);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            // A process that has ended is only reaped.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the exit code of a process as a shell reports it: 128 plus the signal that killed it.
pub fn exit_code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1)
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
