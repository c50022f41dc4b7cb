//! The launcher of an elastic job on several hosts: one agent a host, which starts the ranks there
//! and replaces those that are lost. An agent is started again when its host answers again.
//!
//! The processes find each other in a directory below `run.root`, which all hosts share.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::hosts::{Asking, HostSlots};
use crate::comm::Secret;
use crate::comm::membership::MembershipDirectory;
use crate::elastic::rendezvous_directory;
use crate::error::{Error, Result};
use crate::job::{NO_RANKS, RUN_FILE, SIGNAL_FILE};
use crate::own_files;
use crate::run_dir::SUPERVISED;
use crate::signals;

/// The interval at which agents and signals are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time after which a host whose agent has ended is asked whether it answers again.
const RETURN_INTERVAL: Duration = Duration::from_secs(5);

/// The time in which the other agents must end after one has failed.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The placeholder for a host in the command that runs another one there.
pub const HOST_PLACEHOLDER: &str = "{host}";

/// An elastic job on several hosts.
#[derive(Debug, Clone)]
pub struct ElasticHosts {
    /// The hosts that answer, with their ranks.
    pub hosts: Vec<HostSlots>,
    /// The command that runs another one on a host, with [`HOST_PLACEHOLDER`].
    pub launcher: Vec<String>,
    /// `run.root`, which all hosts share.
    pub root: PathBuf,
    /// The command of a rank.
    pub command: Vec<String>,
    /// Whether hosts that return, and processes for lost ranks, join.
    pub rejoin: bool,
}

/// The agent of a host.
struct HostAgent {
    host: HostSlots,
    /// `None` once it has ended.
    child: Option<Child>,
    /// The time at which the host is asked whether it answers again.
    retry: Option<Instant>,
    /// The check whether it does.
    asking: Option<Asking>,
}

impl ElasticHosts {
    /// Starts the agents and waits for the end of the job. Returns its exit code: 0 if the ranks of
    /// some host have finished the run, else that of the first host that failed.
    ///
    /// # Errors
    /// Returns an error if the directory in which processes find each other cannot be created.
    pub fn run(&self) -> Result<i32> {
        signals::record_signals()?;
        let bytes = Secret::random()?;
        let job: String = bytes[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let rendezvous = rendezvous_directory(&self.root, &job)?;
        let ended = self.run_in(&rendezvous);
        // The run is in its own directory.
        let _ = std::fs::remove_dir_all(&rendezvous);
        Ok(ended)
    }

    fn run_in(&self, rendezvous: &Path) -> i32 {
        let ranks: usize = self.hosts.iter().map(|host| host.slots).sum();
        let mut first = 0;
        let mut agents: Vec<HostAgent> = Vec::new();
        for host in &self.hosts {
            let child = self.start(host, rendezvous, Some((first, ranks)));
            first += host.slots;
            agents.push(HostAgent { host: host.clone(), child, retry: None, asking: None });
        }
        let mut has_succeeded = false;
        let mut code = None;
        let mut failed_at: Option<Instant> = None;
        let mut succeeded_at: Option<Instant> = None;
        // The newest membership when a process had found no ranks to join.
        let mut without_ranks: Option<u64> = None;
        let mut is_noted = false;
        while agents.iter().any(|agent| agent.child.is_some()) {
            std::thread::sleep(POLL_INTERVAL);
            let signal = signals::last_signal();
            if let Some(signal) = signal {
                // Agents on other hosts read it there.
                let _ = own_files::replace(&rendezvous.join(SIGNAL_FILE), signal);
            }
            is_noted = is_noted || note_run(rendezvous);
            for agent in &mut agents {
                match agent.ended() {
                    None => {}
                    Some(0) => {
                        has_succeeded = true;
                        succeeded_at.get_or_insert_with(Instant::now);
                    }
                    Some(ended) => {
                        if ended == NO_RANKS {
                            without_ranks = Some(newest_membership(rendezvous));
                        }
                        code.get_or_insert(ended);
                        if is_failure(ended) {
                            failed_at.get_or_insert_with(Instant::now);
                        } else {
                            log::warn!("{}: its ranks are lost", agent.host.name);
                        }
                    }
                }
            }
            let is_over = signal.is_some() || has_succeeded || failed_at.is_some();
            let has_ranks =
                without_ranks.is_none_or(|number| newest_membership(rendezvous) > number);
            if self.rejoin && !is_over && is_noted && has_ranks {
                agents.iter_mut().for_each(|agent| self.revive(agent, rendezvous));
            }
            // The program that reaches a host may outlive it.
            let over = failed_at.or(succeeded_at);
            if over.is_some_and(|since| since.elapsed() > TIMEOUT) {
                agents.iter_mut().for_each(HostAgent::kill);
            }
        }
        if has_succeeded && failed_at.is_none() { 0 } else { code.unwrap_or(0) }
    }

    /// Starts the agent of a host. `first` is its first rank and the number of ranks of the job;
    /// `None` if its processes join.
    fn start(
        &self,
        host: &HostSlots,
        rendezvous: &Path,
        first: Option<(usize, usize)>,
    ) -> Option<Child> {
        let started = agent_command(self, host, rendezvous, first).and_then(|mut command| {
            command.stdin(Stdio::null());
            command.spawn().map_err(|e| Error::io("start", Path::new(command.get_program()), e))
        });
        started.inspect_err(|e| log::warn!("{}: {}", host.name, e.message())).ok()
    }

    /// Starts the agent of a host again once the host answers.
    fn revive(&self, agent: &mut HostAgent, rendezvous: &Path) {
        if agent.child.is_some() {
            return;
        }
        if let Some(asking) = &mut agent.asking {
            let Some(answers) = asking.answered() else { return };
            agent.asking = None;
            if answers {
                log::info!("{} answers: its processes join", agent.host.name);
                agent.child = self.start(&agent.host, rendezvous, None);
            }
            agent.retry = None;
            return;
        }
        let retry = *agent.retry.get_or_insert_with(|| Instant::now() + RETURN_INTERVAL);
        if Instant::now() >= retry {
            agent.asking = Some(Asking::start(&launcher_of(&self.launcher, &agent.host.name)));
        }
    }
}

impl HostAgent {
    /// Returns the exit code of the agent if it has ended since the last call.
    fn ended(&mut self) -> Option<i32> {
        let status = self.child.as_mut()?.try_wait().ok().flatten()?;
        self.child = None;
        // A signal has ended the program that reaches the host.
        Some(status.code().unwrap_or(LOST_HOST))
    }

    fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            // A process that has ended is only reaped.
            let _ = child.kill();
        }
    }
}

/// The exit code of `ssh` if the host is gone.
const LOST_HOST: i32 = 255;

/// Returns true if an agent with this exit code has failed in a way that ends the job: its ranks
/// were neither killed nor did they leave.
fn is_failure(code: i32) -> bool {
    !(code > 128 || code == NO_RANKS || code == 75)
}

/// Notes the directory of the run for the supervisor, once the ranks have noted it. Returns true if
/// they have.
fn note_run(rendezvous: &Path) -> bool {
    let Ok(run) = std::fs::read_to_string(rendezvous.join(RUN_FILE)) else { return false };
    if let Some(place) = std::env::var_os(SUPERVISED) {
        // The supervisor does without it: it restarts a run by its name if it has one.
        let _ = std::fs::write(place, run);
    }
    true
}

/// Returns the number of the newest membership of the run, 0 if there is none.
fn newest_membership(rendezvous: &Path) -> u64 {
    let run = std::fs::read_to_string(rendezvous.join(RUN_FILE)).unwrap_or_default();
    MembershipDirectory::of_run(Path::new(&run)).newest_number().unwrap_or(0)
}

/// Returns the words of the command that runs another one on a host.
pub fn launcher_of(launcher: &[String], host: &str) -> Vec<String> {
    launcher.iter().map(|word| word.replace(HOST_PLACEHOLDER, host)).collect()
}

/// Returns the command of a host's agent.
fn agent_command(
    job: &ElasticHosts,
    host: &HostSlots,
    rendezvous: &Path,
    first: Option<(usize, usize)>,
) -> Result<Command> {
    let program = std::env::current_exe()
        .map_err(|e| Error::internal(format!("cannot find this program: {e}")))?;
    let mut words: Vec<OsString> = vec![program.into(), "agent".into()];
    words.extend(["--slots".into(), host.slots.to_string().into()]);
    match first {
        Some((first, ranks)) => {
            words.extend(["--ranks".into(), format!("{first}/{ranks}").into()]);
        }
        None => words.push("--join".into()),
    }
    words.extend(["--rendezvous".into(), rendezvous.into(), "--".into()]);
    words.extend(job.command.iter().map(OsString::from));
    if super::hosts::is_this_host(&host.name) {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        return Ok(command);
    }
    let launcher = launcher_of(&job.launcher, &host.name);
    let [program, arguments @ ..] = &launcher[..] else {
        return Err(Error::input("--agent-launcher has no command"));
    };
    let mut command = Command::new(program);
    command.args(arguments).arg(shell_line(&words));
    Ok(command)
}

/// Returns the line for the shell of another host that runs a command in this directory, with this
/// process's variables that matter to it.
fn shell_line(words: &[OsString]) -> String {
    let mut line = String::new();
    if let Ok(directory) = std::env::current_dir() {
        line += &format!("cd {} && ", quoted(&directory.to_string_lossy()));
    }
    line += "exec env";
    for (name, value) in std::env::vars() {
        let is_passed_on = name != SUPERVISED
            && (name.starts_with("HPCTRAIN_")
                || name.starts_with("RUST_")
                || ["LD_LIBRARY_PATH", "XDG_CACHE_HOME"].contains(&&name[..]));
        if is_passed_on {
            line += &format!(" {}", quoted(&format!("{name}={value}")));
        }
    }
    for word in words {
        line += &format!(" {}", quoted(&word.to_string_lossy()));
    }
    line
}

/// Returns a word in quotes for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_another_shell_unchanged() {
        let words = ["printf", "%s|", "a b", "it's", "$HOME", "", "x\"y"].map(OsString::from);
        let line = shell_line(&words);
        let printed = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert_eq!(String::from_utf8(printed.stdout).unwrap(), "a b|it's|$HOME||x\"y|");
    }

    #[test]
    fn losses_do_not_end_the_job() {
        let codes = [1, 2, 74, 75, 69, 137, 255].map(is_failure);
        assert_eq!(codes, [true, true, true, false, false, false, false]);
        let launcher = ["ssh", "-x", "{host}"].map(String::from);
        assert_eq!(launcher_of(&launcher, "h1"), ["ssh", "-x", "h1"]);
    }
}
