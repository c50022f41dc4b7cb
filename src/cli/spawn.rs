//! `--spawn N`: this program starts its ranks itself, as processes of this machine that talk over TCP.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::comm::{MEETING, Meeting, write_secret};
use crate::error::{Error, Result};
use crate::job::fail;
use crate::run_dir::REQUEUE;
use crate::{private, signals};

/// Interval at which ranks and signals are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Time that the other ranks have to end, once one has failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts `ranks` processes with the arguments of this one, waits for all, and returns the exit code of the job: that of the
/// first rank that fails.
pub fn run(ranks: usize) -> i32 {
    match spawn(ranks) {
        Ok(code) => code,
        Err(e) => fail(&e),
    }
}

fn spawn(ranks: usize) -> Result<i32> {
    signals::listen()?;
    let folder = tempfile::Builder::new().prefix("hpctrain-spawn-").tempdir();
    let folder = folder.map_err(|e| Error::io("create a directory in", &std::env::temp_dir(), e))?;
    private::directory(folder.path())?;
    write_secret(folder.path())?;
    let program = std::env::current_exe().map_err(|e| Error::internal(format!("this program is not found: {e}")))?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut job = Job { ranks: Vec::with_capacity(ranks) };
    for rank in 0..ranks {
        let meeting = Meeting { dir: folder.path().into(), rank, ranks };
        let child = Command::new(&program).args(&arguments).env(MEETING, meeting.to_string()).spawn();
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
        let (mut first, mut told, mut failed) = (0, None, None);
        while codes.contains(&None) {
            std::thread::sleep(LOOK);
            let came = signals::came();
            if came != told {
                told = came;
                self.tell(came);
            }
            for (rank, (child, code)) in self.ranks.iter_mut().zip(&mut codes).enumerate() {
                let Some(status) = child.try_wait().ok().flatten().filter(|_| code.is_none()) else { continue };
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
            if failed.is_some_and(|since: Instant| since.elapsed() > PATIENCE) {
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
