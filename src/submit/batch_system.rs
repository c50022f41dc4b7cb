//! The batch systems: which one is here, and the command that submits a script to it.

use std::fmt;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::ValueEnum;
use serde::Deserialize;

use crate::error::{Error, Result};

/// A batch system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum BatchSystem {
    /// Slurm.
    Slurm,
    /// OpenPBS and PBS Professional.
    Pbs,
    /// Flux.
    Flux,
}

impl fmt::Display for BatchSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Slurm => "Slurm",
            Self::Pbs => "PBS",
            Self::Flux => "Flux",
        })
    }
}

impl BatchSystem {
    const ALL: [Self; 3] = [Self::Slurm, Self::Pbs, Self::Flux];

    /// Returns the command that submits a script.
    fn command(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Slurm => ("sbatch", &["--parsable"]),
            Self::Pbs => ("qsub", &[]),
            Self::Flux => ("flux", &["batch"]),
        }
    }

    /// Returns the batch system whose command is on `PATH`.
    ///
    /// # Errors
    /// Returns an error if there is none, or more than one.
    pub(super) fn on_path() -> Result<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let here: Vec<Self> = Self::ALL
            .into_iter()
            .filter(|system| {
                std::env::split_paths(&path).any(|dir| is_program(&dir.join(system.command().0)))
            })
            .collect();
        match here[..] {
            [system] => Ok(system),
            [] => Err(Error::input("none of sbatch, qsub and flux is on PATH")
                .hint("--scheduler slurm|pbs|flux, or scheduler in the site file")),
            _ => {
                let names: Vec<&str> = here.iter().map(|system| system.command().0).collect();
                Err(Error::input(format!("{} are on PATH", names.join(" and ")))
                    .hint("choose by --scheduler, or by scheduler in the site file"))
            }
        }
    }

    /// Submits a script, which is in `file` if there is one. Returns the job's id.
    ///
    /// # Errors
    /// Returns an error if the command cannot be started, or refuses the job.
    pub fn submit(self, script: &str, file: Option<&Path>) -> Result<String> {
        let (name, arguments) = self.command();
        let cannot = |e: std::io::Error| {
            Error::input(format!("cannot submit to {self}: {name}: {e}"))
                .hint("submit from a login node, or without --now: hpctrain submit --out FILE")
        };
        let mut command = Command::new(name);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::inherit());
        match file {
            Some(file) => {
                command.arg(std::path::absolute(file).map_err(cannot)?).stdin(Stdio::null())
            }
            None => command.stdin(Stdio::piped()),
        };
        let mut child = command.spawn().map_err(cannot)?;
        if let Some(mut input) = child.stdin.take() {
            // A command that does not read the script reports why, and fails.
            let _ = input.write_all(script.as_bytes());
        }
        let ended = child.wait_with_output().map_err(cannot)?;
        if !ended.status.success() {
            return Err(Error::input(format!("{name} refused the job: {}", ended.status)).hint(
                "its message is above; check partition, account, qos and extra in the site file",
            ));
        }
        let printed = String::from_utf8_lossy(&ended.stdout);
        let last = printed.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        // sbatch adds the name of a cluster that is not the default one.
        let id = last.split(';').next().unwrap_or_default().trim();
        Ok(id.to_owned())
    }
}

/// Returns true if the path is that of a program.
fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}
