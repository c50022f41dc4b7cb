//! Checks that lean on a library or a file system, in a child: one that crashes or hangs is a
//! finding like any other.
//!
//! The child is this program. It prints the name of each check before it and the finding after it,
//! a line of JSON each, so that the last line of a child that did not come back names the culprit.

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

/// The hidden command of the child; a [`Probe`] in JSON follows.
pub const COMMAND: &str = "doctor-probe";

/// Time limit of one attempt: a driver that starts eight GPUs takes its time.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The checks of a child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probe {
    /// Driver and libraries, and of the GPUs that this process sees every `every`th from `first`
    /// on. Ranks of a node that begin at their own numbers look at all of them together.
    Gpu {
        /// Number of the rank on its node.
        first: usize,
        /// Ranks on the node.
        every: usize,
    },
    /// HDF5, file system, limits, data.
    Node {
        /// Directory of the runs.
        run_root: PathBuf,
    },
}

/// A line from the child.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// The name of the check that is tried next.
    Trying(String),
    Found(Check),
}

/// The child's voice.
pub(super) struct ProbeReporter;

impl ProbeReporter {
    fn line(&self, line: &Line) {
        // No line has anything in it that JSON could not say.
        say(serde_json::to_string(line).unwrap_or_default());
    }

    /// Prints the name of a check, then its finding; returns whether that is no failure.
    pub fn attempt(&self, name: &str, work: impl FnOnce() -> Finding) -> bool {
        self.line(&Line::Trying(name.to_owned()));
        let finding = work();
        let fine = finding.status != CheckStatus::Failure;
        self.line(&Line::Found(finding.named(name)));
        fine
    }
}

/// The child's part.
///
/// # Errors
/// The argument is no probe.
pub fn answer(probe: &str) -> Result<()> {
    let probe = serde_json::from_str(probe)
        .map_err(|e| Error::input(format!("{probe} is no probe: {e}")))?;
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
    /// Its name if it fails before its first check.
    fn name(&self) -> &'static str {
        match self {
            Probe::Gpu { .. } => "gpu driver",
            Probe::Node { .. } => "node",
        }
    }
}

/// Starts a child and hears it out.
pub(super) fn ask(probe: &Probe) -> Vec<Check> {
    let argument = serde_json::to_string(probe).unwrap_or_default();
    match std::env::current_exe() {
        Ok(program) => {
            ask_program(probe, Command::new(program).args([COMMAND, &argument]), TIMEOUT)
        }
        Err(e) => lost(probe, &format!("where is this program? {e}")),
    }
}

fn lost(probe: &Probe, why: &str) -> Vec<Check> {
    let hint = "the checks run in processes of their own: this one could not be started";
    vec![Finding::failure(why, hint).named(probe.name())]
}

fn ask_program(probe: &Probe, command: &mut Command, patience: Duration) -> Vec<Check> {
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(e) => return lost(probe, &format!("no process could be started: {e}")),
    };
    let (tell, told) = channel();
    if let Some(stdout) = child.stdout.take() {
        let listening = spawn("doctor-probe", move || {
            let lines = BufReader::new(stdout).lines().map_while(std::io::Result::ok);
            // Libraries may print, too.
            lines
                .filter_map(|line| serde_json::from_str(&line).ok())
                .try_for_each(|line| tell.send(line))
        });
        if let Err(e) = listening {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
            return vec![
                Finding::failure(e.message(), e.advice().unwrap_or_default()).named(probe.name()),
            ];
        }
    }
    let mut checks = Vec::new();
    let mut trying = None;
    let fate = if hear(&told, patience, &mut checks, &mut trying) {
        match child.wait() {
            Ok(status) if status.success() => return checks,
            Ok(status) => format!("the process that tried it ended with {status}"),
            Err(e) => format!("nothing is known of the process that tried it: {e}"),
        }
    } else {
        // One that waits for a dead file system does not end even so, and nobody waits for it.
        let _ = child.kill();
        format!("no answer for {} seconds", patience.as_secs())
    };
    let name = trying.unwrap_or_else(|| probe.name().to_owned());
    let hint = "training would end or hang there as well; what the library said, if anything, is on standard error";
    checks.push(Finding::failure(fate, hint).named(name));
    checks
}

/// Takes lines until the child has no more; whether that was in time.
fn hear(
    told: &Receiver<Line>,
    patience: Duration,
    checks: &mut Vec<Check>,
    trying: &mut Option<String>,
) -> bool {
    loop {
        match told.recv_timeout(patience) {
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

    fn hear_shell(script: &str, patience: Duration) -> Vec<Check> {
        let probe = Probe::Node { run_root: "runs".into() };
        ask_program(&probe, Command::new("sh").args(["-c", script]), patience)
    }

    #[test]
    fn a_child_that_dies_or_hangs_is_a_finding() {
        let found = r#"echo '{"found":{"name":"one","status":"ok","found":"fine","hint":null}}';"#;
        let trying = r#"echo noise; echo '{"trying":"two"}';"#;
        let minute = Duration::from_secs(60);
        assert_eq!(hear_shell(found, minute), [Finding::ok("fine").named("one")]);
        let checks = hear_shell(&format!("{found}{trying} kill -SEGV $$"), minute);
        assert_eq!((checks.len(), checks[1].name.as_str()), (2, "two"));
        assert!(checks[1].finding.found.contains("signal: 11"), "{checks:?}");
        let checks = hear_shell(&format!("{trying} exec sleep 60"), Duration::from_secs(1));
        assert_eq!(
            (checks[0].name.as_str(), checks[0].finding.found.as_str()),
            ("two", "no answer for 1 seconds")
        );
        // One that ends badly after its last finding.
        assert_eq!(hear_shell(&format!("{found} exit 3"), minute)[1].name, "node");
    }
}
