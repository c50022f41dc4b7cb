//! `--spawn N`: this program starts its ranks itself, as processes of this machine that talk over
//! TCP.

use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::comm::{MEETING, TcpRendezvous, write_secret};
use crate::error::{Error, Result};
use crate::job::fail;
use crate::run_dir::REQUEUE;
use crate::{signals, user_dirs};

/// Interval at which ranks and signals are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time that the other ranks have to end, once one has failed.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Starts `ranks` processes with the arguments of this one, waits for all, and returns the exit
/// code of the job: that of the first rank that fails.
pub fn run(ranks: usize) -> i32 {
    match spawn(ranks) {
        Ok(code) => code,
        Err(e) => fail(&e),
    }
}

/// Prefix of the names of meeting places.
const PLACE: &str = "hpctrain-spawn-";

/// File in a meeting place that its launcher has locked as long as it lives.
const LOCK: &str = "launcher";

/// The directory in which the ranks of a job meet; it holds their secret.
struct Place {
    folder: TempDir,
    _lock: File,
}

impl Place {
    /// Creates one in `root`, where nobody else can look into it. Removes those of this user's
    /// launchers that were killed.
    fn new(root: &Path) -> Result<Self> {
        remove_abandoned(root);
        let mut builder = tempfile::Builder::new();
        let folder =
            builder.prefix(PLACE).permissions(Permissions::from_mode(0o700)).tempdir_in(root);
        let folder = folder.map_err(|e| Error::io("create a directory in", root, e))?;
        user_dirs::directory(folder.path())?;
        let path = folder.path().join(LOCK);
        let lock = user_dirs::lock_file(&path)?;
        lock.try_lock().map_err(|e| Error::io("lock", &path, e.to_string()))?;
        write_secret(folder.path())?;
        Ok(Self { folder, _lock: lock })
    }
}

/// Removes the meeting places of launchers that no longer live. One that cannot be removed stays:
/// this job does not need it.
fn remove_abandoned(root: &Path) {
    for entry in root.read_dir().into_iter().flatten().flatten() {
        let path = entry.path();
        let is_place = entry.file_name().to_string_lossy().starts_with(PLACE);
        if !is_place || !user_dirs::is_my_directory(&path) {
            continue;
        }
        // A launcher creates the lock before the secret: without one there is nothing to hide.
        let lock = path.join(LOCK);
        if user_dirs::is_mine(&lock)
            && user_dirs::lock_file(&lock).is_ok_and(|lock| lock.try_lock().is_ok())
        {
            match std::fs::remove_dir_all(&path) {
                Ok(()) => {
                    log::info!("removed {}, which a killed launcher has left", path.display())
                }
                Err(e) => log::warn!(
                    "cannot remove {}, which a killed launcher has left: {e}",
                    path.display()
                ),
            }
        }
    }
}

fn spawn(ranks: usize) -> Result<i32> {
    signals::listen()?;
    let place = Place::new(&std::env::temp_dir())?;
    let program = std::env::current_exe()
        .map_err(|e| Error::internal(format!("this program is not found: {e}")))?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut job = Job { ranks: Vec::with_capacity(ranks) };
    for rank in 0..ranks {
        let meeting = TcpRendezvous { dir: place.folder.path().into(), rank, ranks };
        let child =
            Command::new(&program).args(&arguments).env(MEETING, meeting.to_string()).spawn();
        job.ranks.push(child.map_err(|e| Error::io("start", &program, e))?);
    }
    Ok(job.wait())
}

/// The processes of a job; those that are left end with it.
struct Job {
    ranks: Vec<Child>,
}

impl Job {
    /// Waits for all ranks, and hands signals on to them.
    fn wait(&mut self) -> i32 {
        let mut codes: Vec<Option<i32>> = vec![None; self.ranks.len()];
        let mut first = 0;
        let mut told = None;
        let mut failed = None;
        while codes.contains(&None) {
            std::thread::sleep(POLL_INTERVAL);
            let came = signals::came();
            if came != told {
                told = came;
                self.tell(came);
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
                if ![0, REQUEUE].contains(&ended) {
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
    fn tell(&self, name: Option<&str>) {
        let signal = match name {
            Some("SIGINT") => Signal::INT,
            Some("SIGUSR1") => Signal::USR1,
            Some(_) => Signal::TERM,
            None => return,
        };
        for child in &self.ranks {
            // One that has ended needs none.
            let _ = kill_process(Pid::from_child(child), signal);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            // One that has ended is only reaped.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The exit code of a process, as a shell has it.
fn exit_code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_private_and_those_of_killed_launchers_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let alive = Place::new(root.path()).unwrap();
        let mode = alive.folder.path().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        // Killed, it would leave its directory, without a lock.
        let killed = Place::new(root.path()).unwrap();
        let Place { folder, _lock } = killed;
        let left = folder.keep();
        drop(_lock);
        // Others: a directory with another name, and one whose launcher has not locked it yet.
        let other = root.path().join("other");
        let starting = root.path().join(format!("{PLACE}starting"));
        [&other, &starting].iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let next = Place::new(root.path()).unwrap();
        assert!(!left.exists() && other.exists() && starting.exists());
        assert!(alive.folder.path().join("secret").exists() && next.folder.path().exists());
    }
}
