//! Several simulated hosts on this machine (`scripts/hosts`), and jobs across them.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::launch::{in_our_environment, inherits_nothing, processes, test_name};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/hosts");

/// The exit code of the script if hosts cannot be created.
const UNSUPPORTED: i32 = 3;

/// Hosts h0, h1, …, which exist until this is dropped or this process ends.
pub struct Hosts {
    holder: Child,
    folder: tempfile::TempDir,
}

impl Hosts {
    /// Creates `count` hosts. Returns none, and prints the reason, if this system or user cannot
    /// create them.
    pub fn new(count: usize) -> Option<Self> {
        let check = inherits_nothing(Command::new(SCRIPT).arg("check")).output().unwrap();
        if check.status.code() == Some(UNSUPPORTED) {
            let reason = String::from_utf8_lossy(&check.stderr);
            println!("SKIPPED: {}: {}", test_name(), reason.trim());
            return None;
        }
        assert!(check.status.success(), "{check:?}");
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(SCRIPT);
        command
            .args(["hold", &count.to_string()])
            .env("HPCTRAIN_HOSTS", folder.path().join("hosts"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut holder = inherits_nothing(&mut command).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        if line != "ready\n" {
            let mut text = String::new();
            holder.stderr.as_mut().unwrap().read_to_string(&mut text).unwrap();
            panic!("no hosts: {text}");
        }
        Some(Self { holder, folder })
    }

    /// Returns a command of the script.
    pub fn script(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(SCRIPT);
        in_our_environment(&mut command);
        command.args(arguments).env("HPCTRAIN_HOSTS", self.folder());
        command
    }

    /// Runs a command of the script to its end; returns what it prints.
    #[track_caller]
    pub fn run_script(&self, arguments: &[&str]) -> String {
        let output = inherits_nothing(&mut self.script(arguments)).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns a command of the script that runs `command`, with its arguments, folder and
    /// variables.
    fn wrap(&self, words: &[&str], command: &Command) -> Command {
        let mut whole = self.script(words);
        whole.arg(command.get_program()).args(command.get_args());
        whole.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        if let Some(folder) = command.get_current_dir() {
            whole.current_dir(folder);
        }
        whole
    }

    /// Returns the command that runs `command` on one host.
    pub fn on(&self, host: &str, command: &Command) -> Command {
        self.wrap(&["run", host], command)
    }

    /// Returns the command that runs `command` as the ranks of a job, such as `h0:2,h1:2`.
    pub fn across(&self, ranks: &str, command: &Command) -> Command {
        // Other hosts have variables of this test only if mpirun exports them.
        self.wrap(&["mpirun", ranks, "-x", "XDG_CACHE_HOME"], command)
    }

    /// Returns the agent with which a host runs commands on another.
    pub fn agent(&self) -> String {
        format!("{SCRIPT} rsh")
    }

    /// Returns the folder that describes the hosts.
    pub fn folder(&self) -> PathBuf {
        self.folder.path().join("hosts")
    }

    /// Returns the numbers of bytes that a host has sent and received.
    pub fn bytes(&self, host: &str) -> (u64, u64) {
        let text = self.run_script(&["bytes", host]);
        let (sent, received) = text.trim().split_once(' ').unwrap();
        (sent.parse().unwrap(), received.parse().unwrap())
    }

    /// Returns the processes of a host whose command lines contain `words`.
    pub fn processes(&self, host: &str, words: &str) -> Vec<u32> {
        let space = |process: u32| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let of_host = self.keeper(host).and_then(space);
        processes(words)
            .into_iter()
            .filter(|process| of_host.is_some() && space(*process) == of_host)
            .collect()
    }

    /// Returns the process that keeps a host alive, by its id on this machine.
    fn keeper(&self, host: &str) -> Option<u32> {
        let inner = std::fs::read_to_string(self.folder().join(host)).ok()?;
        let switch = std::fs::read_to_string(self.folder().join("switch")).ok()?;
        let children =
            std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", switch.trim())).ok()?;
        children.split_whitespace().filter_map(|child| child.parse().ok()).find(|child: &u32| {
            let status =
                std::fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            numbers.and_then(|numbers| numbers.split_whitespace().last()) == Some(inner.trim())
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// Returns the hosts of a job with half of its `ranks` ranks on each of two hosts.
pub fn halves(ranks: usize) -> String {
    format!("h0:{0},h1:{0}", ranks / 2)
}
