//! The processes of a job's ranks on this machine.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use hpctrain_base::error::Error;
use hpctrain_base::signals;

/// The interval at which ranks and signals are polled.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The time in which the other ranks must end after one has failed.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// The exit code of a rank that was asked to end.
pub const INTERRUPTED: i32 = 75;

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
    pub fn wait(&mut self) -> i32 {
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
