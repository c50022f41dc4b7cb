//! Runs checks that depend on a library or a file system in a child process: a crash or a hang is
//! reported as a finding.
//!
//! The child runs this program. It prints the name of each check before it and the finding after
//! it, each as a line of JSON, so that the last line of a child that crashes or hangs names the
//! check.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Check, CheckStatus, Finding, gpu, h5, limits, run_root};
use crate::error::{Error, Result};
use crate::spawn::spawn;
use crate::telemetry::say;

/// The hidden command of the child; its argument is a [`Probe`] in JSON.
pub const COMMAND: &str = "doctor-probe";

/// The time limit of one check: a driver may take long to initialise eight GPUs.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The checks of a child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probe {
    /// Checks driver and libraries, and every `every`th of the GPUs that this process sees, from
    /// `first` on. Ranks of a node that start at their own numbers check all GPUs together.
    Gpu {
        /// The number of the rank on its node.
        first: usize,
        /// The number of ranks on the node.
        every: usize,
    },
    /// Checks HDF5, the file system, limits and the bundled data.
    Node {
        /// The directory of runs.
        run_root: PathBuf,
    },
}

/// A line from the child.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// The name of the check that starts.
    Trying(String),
    Found(Check),
}

/// Prints the findings of the child.
pub(super) struct ProbeReporter;

impl ProbeReporter {
    fn line(&self, line: &Line) {
        // A line consists of text only, so it can be serialized.
        say(serde_json::to_string(line).unwrap_or_default());
    }

    /// Prints the name of a check, runs it, and prints its finding. Returns false if it failed.
    pub fn attempt(&self, name: &str, check: impl FnOnce() -> Finding) -> bool {
        self.line(&Line::Trying(name.to_owned()));
        let finding = check();
        let passed = finding.status != CheckStatus::Failure;
        self.line(&Line::Found(finding.named(name)));
        passed
    }
}

/// Runs a probe in the child process.
///
/// # Errors
/// Returns an error if the argument is not a [`Probe`] in JSON.
pub fn run_as_child(probe: &str) -> Result<()> {
    let probe = serde_json::from_str(probe)
        .map_err(|e| Error::input(format!("{probe} is not a probe in JSON: {e}")))?;
    match probe {
        Probe::Gpu { first, every } => gpu::probe(&ProbeReporter, first, every),
        Probe::Node { run_root } => {
            h5::probe(&ProbeReporter, &run_root);
            run_root::probe(&ProbeReporter, &run_root);
            limits::probe(&ProbeReporter);
            h5::probe_data(&ProbeReporter);
        }
    }
    Ok(())
}

impl Probe {
    /// Returns the name of the finding if the child fails before its first check.
    fn name(&self) -> &'static str {
        match self {
            Probe::Gpu { .. } => "gpu driver",
            Probe::Node { .. } => "node",
        }
    }
}

/// Runs a probe in a child process and collects its findings.
pub(super) fn run_in_child(probe: &Probe) -> Vec<Check> {
    let argument = serde_json::to_string(probe).unwrap_or_default();
    match std::env::current_exe() {
        Ok(program) => {
            ask_program(probe, Command::new(program).args([COMMAND, &argument]), TIMEOUT)
        }
        Err(e) => not_started(probe, &format!("the path of this program is not known: {e}")),
    }
}

fn not_started(probe: &Probe, why: &str) -> Vec<Check> {
    let hint = "the checks run in child processes, and this one could not be started: see the limit on processes (ulimit -u)";
    vec![Finding::failure(why, hint).named(probe.name())]
}

fn ask_program(probe: &Probe, command: &mut Command, timeout: Duration) -> Vec<Check> {
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(e) => return not_started(probe, &format!("cannot start a child process: {e}")),
    };
    let (sender, receiver) = channel();
    if let Some(stdout) = child.stdout.take() {
        let listening = spawn("doctor-probe", move || {
            let lines = BufReader::new(stdout).lines().map_while(std::io::Result::ok);
            // Other lines are output of libraries.
            lines
                .filter_map(|line| serde_json::from_str(&line).ok())
                .try_for_each(|line| sender.send(line))
        });
        if let Err(e) = listening {
            // The child may have ended already.
            let _ = child.kill();
            let _ = child.wait();
            return vec![
                Finding::failure(e.message(), e.advice().unwrap_or_default()).named(probe.name()),
            ];
        }
    }
    let mut checks = Vec::new();
    let mut trying = None;
    let failure = if receive(&receiver, timeout, &mut checks, &mut trying) {
        match child.wait() {
            Ok(status) if status.success() => return checks,
            Ok(status) => format!("the process of the check ended with {status}"),
            Err(e) => format!("cannot wait for the process of the check: {e}"),
        }
    } else {
        // A child that is blocked in a dead file system does not end; it is not waited for.
        let _ = child.kill();
        format!("no answer for {} seconds", timeout.as_secs())
    };
    let name = trying.unwrap_or_else(|| probe.name().to_owned());
    let hint = "training would crash or hang there as well; messages of the library, if any, are on standard error";
    checks.push(Finding::failure(failure, hint).named(name));
    checks
}

/// Receives lines until the child closes its output; returns false if the next line takes longer
/// than `timeout`.
fn receive(
    lines: &Receiver<Line>,
    timeout: Duration,
    checks: &mut Vec<Check>,
    trying: &mut Option<String>,
) -> bool {
    loop {
        match lines.recv_timeout(timeout) {
            Ok(Line::Trying(name)) => *trying = Some(name),
            Ok(Line::Found(check)) => {
                *trying = None;
                checks.push(check);
            }
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask_shell(script: &str, timeout: Duration) -> Vec<Check> {
        let probe = Probe::Node { run_root: "runs".into() };
        ask_program(&probe, Command::new("sh").args(["-c", script]), timeout)
    }

    #[test]
    fn a_child_that_dies_or_hangs_is_a_finding() {
        let found = r#"echo '{"found":{"name":"one","status":"ok","found":"fine","hint":null}}';"#;
        let trying = r#"echo noise; echo '{"trying":"two"}';"#;
        let minute = Duration::from_secs(60);
        assert_eq!(ask_shell(found, minute), [Finding::ok("fine").named("one")]);
        let checks = ask_shell(&format!("{found}{trying} kill -SEGV $$"), minute);
        assert_eq!((checks.len(), checks[1].name.as_str()), (2, "two"));
        assert!(checks[1].finding.found.contains("signal: 11"), "{checks:?}");
        let checks = ask_shell(&format!("{trying} exec sleep 60"), Duration::from_secs(1));
        assert_eq!(
            (checks[0].name.as_str(), checks[0].finding.found.as_str()),
            ("two", "no answer for 1 seconds")
        );
        // A child that fails after its last finding.
        assert_eq!(ask_shell(&format!("{found} exit 3"), minute)[1].name, "node");
    }
}
