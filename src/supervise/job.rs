//! One start of a supervised job: starts its processes, passes signals on, and waits for its end.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::failure_cause::{Cause, cause};
use crate::error::{Error, Result};
use crate::run_dir::{RunDirectory, SUPERVISED};
use crate::signals;
use crate::spawn::spawn;
use crate::telemetry::restarts::Restart;

/// The interval at which the job and signals are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The interval at which the ranks of the job are searched for.
const RANKS_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The time for which a launcher may outlive its ranks.
const LAUNCHER_GRACE: Duration = Duration::from_secs(30);

/// The time between SIGTERM and SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(5);

/// The environment variable that lists the variables that Open MPI exports to ranks.
const OPEN_MPI_ENV_LIST: &str = "OMPI_MCA_mca_base_env_list";

/// Launchers that have the option `-x`.
const OPEN_MPI: [&str; 4] = ["mpirun", "mpiexec", "orterun", "prterun"];

/// The first words of a command line, which may name a script: interpreter, option, script.
const WORDS: usize = 3;

/// The number of lines of standard error that are kept.
const LINES: usize = 200;

/// Names of programs that start ranks, and are not ranks.
const LAUNCHERS: [&str; 16] = [
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "orterun",
    "orted",
    "prterun",
    "prte",
    "prted",
    "hydra_pmi_proxy",
    "srun",
    "ssh",
    "sh",
    "bash",
    "dash",
    "env",
    "timeout",
];

/// A running job.
pub struct Job {
    child: Child,
    /// The last lines of its standard error.
    lines: Arc<Mutex<Vec<String>>>,
    /// The name of the program by which the launcher reaches other hosts: the processes that it
    /// starts here belong to other hosts.
    agent: Option<String>,
}

/// The end of a start.
pub struct Ended {
    /// The exit code, as a shell reports it.
    pub code: i32,
    /// Whether a signal asked this process to end the job.
    pub asked: bool,
    cause: Cause,
}

impl Ended {
    /// Creates the end of a start that could not be tried.
    pub fn before_start(why: &str) -> Self {
        Self {
            code: 1,
            asked: signals::last_signal().is_some(),
            cause: Cause { reason: why.into(), rank: None, host: None },
        }
    }

    /// Returns the reason, for display.
    pub fn reason(&self) -> &str {
        &self.cause.reason
    }

    /// Returns the record of the end.
    pub fn restart(&self) -> Restart {
        let Cause { reason: why, rank, host } = self.cause.clone();
        Restart { code: self.code, reason: why, rank, host, ..Restart::default() }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    /// Starts the command in a new process group; a trainer writes its run's directory to the file
    /// `place`. `agent` is the program by which the launcher reaches other hosts, if known.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started, or the system refuses a thread.
    pub fn start(command: &[String], place: &Path, agent: Option<&str>) -> Result<Self> {
        let (command, env_list) = exporting(command, std::env::var(OPEN_MPI_ENV_LIST).ok());
        let [program, arguments @ ..] = &command[..] else {
            return Err(Error::input("no command")
                .hint("hpctrain supervise -- mpirun -np 8 hpctrain train"));
        };
        let mut start = Command::new(program);
        start.args(arguments).env(SUPERVISED, place).process_group(0).stderr(Stdio::piped());
        start.envs(env_list.map(|list| (OPEN_MPI_ENV_LIST, list)));
        let mut child = start.spawn().map_err(|e| {
            let error = Error::input(format!("cannot start {program}: {e}"));
            error.hint("give the command of the job after --, as you would type it in a shell")
        })?;
        let stderr = child.stderr.take();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let mut job = Self { child, lines: lines.clone(), agent: agent.map(str::to_string) };
        if let Some(stderr) = stderr {
            // The thread ends when the last process closes the pipe.
            let copying = spawn("supervise-copy", move || copy(stderr, &lines));
            copying.inspect_err(|_| job.end())?;
        }
        Ok(job)
    }

    /// Waits for the job's end. A signal to this process asks the job to save and end; a launcher
    /// that outlives its ranks is killed. `run` returns the directory of the run, once it is known.
    ///
    /// # Errors
    /// Returns an error if the process cannot be waited for.
    pub fn wait(mut self, run: impl Fn() -> Option<PathBuf>) -> Result<Ended> {
        let mut forwarded = None;
        let mut polled = Instant::now();
        let mut ranks = Ranks::default();
        let mut forced = false;
        let status = loop {
            if let Some(status) =
                self.child.try_wait().map_err(|e| Error::internal(format!("cannot wait: {e}")))?
            {
                break status;
            }
            let came = signals::last_signal();
            if came != forwarded {
                forwarded = came;
                // Launchers forward this signal to their ranks, which save and end.
                let _ = kill_process(Pid::from_child(&self.child), Signal::USR1);
            }
            if polled.elapsed() >= RANKS_POLL_INTERVAL {
                polled = Instant::now();
                if ranks.are_gone(self.child.id(), self.agent.as_deref(), run().as_deref())
                    && !forced
                {
                    log::warn!(
                        "the launcher outlives its ranks by {} s: ending it",
                        LAUNCHER_GRACE.as_secs()
                    );
                    forced = true;
                    self.end();
                }
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        self.sweep();
        let code =
            status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
        // The last lines may still be in the pipe.
        std::thread::sleep(POLL_INTERVAL);
        let mut cause = cause(&locked(&self.lines), code);
        if forced {
            cause.reason = format!("the launcher outlived its ranks; {}", cause.reason);
        }
        // The exit code of a launcher that was killed is not that of its ranks.
        let code = if forced && matches!(code, 0 | 2) { 1 } else { code };
        Ok(Ended { code, asked: forwarded.is_some(), cause })
    }

    /// Ends the launcher with SIGTERM, and after a while with SIGKILL.
    fn end(&mut self) {
        let left = descendants(self.child.id(), None);
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::TERM);
        let asked = Instant::now();
        while asked.elapsed() < TERM_GRACE && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(POLL_INTERVAL);
        }
        for process in left {
            if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
                let _ = kill_process(process, Signal::KILL);
            }
        }
        self.sweep();
    }

    /// Kills the remaining processes of the job's group.
    fn sweep(&self) {
        // There may be none.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
    }
}

/// Makes Open MPI export [`SUPERVISED`] to ranks on other hosts. Returns the command, with another
/// option `-x` if it has some, else the new value of [`OPEN_MPI_ENV_LIST`]: Open MPI does not
/// accept both.
fn exporting(command: &[String], list: Option<String>) -> (Vec<String>, Option<String>) {
    let mut words = command.to_vec();
    let program = words.first().and_then(|program| program.rsplit('/').next()).unwrap_or_default();
    let option = words.iter().position(|word| word == "-x").filter(|_| OPEN_MPI.contains(&program));
    match option {
        Some(at) => {
            words.splice(at..at, ["-x", SUPERVISED].map(String::from));
            (words, None)
        }
        None => {
            (words, Some(list.map_or(SUPERVISED.into(), |others| format!("{others};{SUPERVISED}"))))
        }
    }
}

/// Copies lines to this process's standard error, and keeps the last ones.
fn copy(stderr: impl std::io::Read, lines: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    while reader.by_ref().take(1 << 16).read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
        // There is no other place to report that standard error is closed.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), &line);
        let mut lines = locked(lines);
        if lines.len() == LINES {
            lines.remove(0);
        }
        lines.push(String::from_utf8_lossy(&line).trim_end().to_string());
        line.clear();
    }
}

/// The ranks of a job, as seen from this host.
#[derive(Default)]
struct Ranks {
    /// Whether there were any.
    seen: bool,
    /// The time since which there are none.
    gone: Option<Instant>,
}

impl Ranks {
    /// Returns true if there were ranks, and there have been none for [`LAUNCHER_GRACE`]: neither a
    /// descendant of the launcher on this host, nor a process that uses the run.
    fn are_gone(&mut self, launcher: u32, agent: Option<&str>, run: Option<&Path>) -> bool {
        let here = std::iter::once(launcher)
            .chain(descendants(launcher, agent))
            .any(|process| !is_launcher(process));
        // A lease that cannot be read may be held.
        if here || run.is_some_and(|run| RunDirectory::at(run).is_in_use().unwrap_or(true)) {
            (self.seen, self.gone) = (true, None);
            return false;
        }
        // If the directory of the run is known, a trainer of this start has written it.
        self.seen |= run.is_some();
        self.seen && self.gone.get_or_insert_with(Instant::now).elapsed() >= LAUNCHER_GRACE
    }
}

/// Returns true if a process is a launcher rather than a rank, by its name.
fn is_launcher(process: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    LAUNCHERS.contains(&name.trim_end())
}

/// Returns true if a process runs a program of this name, which may be a script that an interpreter
/// runs.
fn runs(process: u32, program: &str) -> bool {
    let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).take(WORDS);
    words.any(|word| word.rsplit(|byte| *byte == b'/').next() == Some(program.as_bytes()))
}

/// Returns the living descendants of a process, except for processes of the program `except` and
/// their descendants.
fn descendants(root: u32, except: Option<&str>) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{process}/stat")) else { continue };
        // The name of the program, in parentheses, may contain any characters.
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        if let (Some(state), Some(parent)) =
            (fields.next(), fields.next().and_then(|parent| parent.parse().ok()))
            && state != "Z"
            && !except.is_some_and(|program| runs(process, program))
        {
            children.entry(parent).or_default().push(process);
        }
    }
    let mut found = Vec::new();
    let mut next = vec![root];
    while let Some(process) = next.pop() {
        let its_children = children.remove(&process).unwrap_or_default();
        found.extend(&its_children);
        next.extend(its_children);
    }
    found
}

/// Sleeps for `pause`; returns early if a signal comes. Returns true if a signal has come.
pub fn sleep(pause: Duration) -> bool {
    let since = Instant::now();
    while since.elapsed() < pause {
        if signals::last_signal().is_some() {
            return true;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    signals::last_signal().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_exported_to_ranks_on_other_hosts() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        let plain = words("mpirun -np 2 hpctrain train");
        assert_eq!(exporting(&plain, None), (plain.clone(), Some(SUPERVISED.into())));
        assert_eq!(
            exporting(&plain, Some("A;B".into())),
            (plain, Some(format!("A;B;{SUPERVISED}")))
        );
        let given = exporting(&words("/opt/bin/mpirun -np 2 -x A -x B hpctrain train"), None);
        assert_eq!(
            given,
            (
                words(&format!("/opt/bin/mpirun -np 2 -x {SUPERVISED} -x A -x B hpctrain train")),
                None
            )
        );
        // Slurm's option of the same name excludes nodes.
        let slurm = words("srun -x node7 hpctrain train");
        assert_eq!(exporting(&slurm, None), (slurm, Some(SUPERVISED.into())));
    }

    #[test]
    fn what_an_agent_has_started_belongs_to_another_host() {
        let folder = tempfile::tempdir().unwrap();
        let agent = folder.path().join("agent");
        std::fs::write(&agent, "sleep 60; true").unwrap();
        let script = format!("sh {} h1 & sleep 60; true", agent.display());
        let mut child = Command::new("sh").args(["-c", &script]).process_group(0).spawn().unwrap();
        let counted = |except| descendants(child.id(), except).len();
        let begun = Instant::now();
        // The agent, its sleep, and the other one.
        while counted(None) < 3 && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(POLL_INTERVAL);
        }
        let counts = [None, Some("agent"), Some("age")].map(counted);
        kill_process_group(Pid::from_child(&child), Signal::KILL).unwrap();
        child.wait().unwrap();
        assert_eq!(counts, [3, 1, 3]);
    }
}
