//! The directory in which the processes of a run find their coordinator: `servers` in the run's
//! directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::wal::WriteAheadLog;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;
use hpctrain_base::signals;
use hpctrain_base::user_dirs;
use hpctrain_checkpoint::run_dir::REQUEUE;
use hpctrain_checkpoint::run_dir::markers::{Markers, RunStatus};
use hpctrain_comm::{Credentials, Secret, write_secret};
use hpctrain_config::telemetry::say;

/// The name of the file with the coordinator's address.
const COORDINATOR: &str = "coordinator";

/// The interval at which the file is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The coordinator's address, and the settings that a process needs to connect to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// The host and port.
    pub address: String,
    /// `comm.encrypt`.
    pub encrypt: bool,
    /// `comm.interface`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
}

/// The rendezvous directory of a run.
#[derive(Debug, Clone)]
pub struct PsRendezvous {
    run: PathBuf,
    dir: PathBuf,
}

impl PsRendezvous {
    /// The time for which a process waits for the coordinator of a run that has finished: one that
    /// continues the run with more steps may be starting.
    pub const FINISHED_GRACE: Duration = Duration::from_secs(3);

    /// Returns the rendezvous directory of the run in `run`.
    pub fn for_run(run: &Path) -> Self {
        Self { run: run.into(), dir: run.join("servers") }
    }

    /// Returns the exit code of the run if it has ended. The coordinator may exit before every
    /// process has received the end of the run.
    pub fn exit_code(&self) -> Option<i32> {
        Markers::new(&self.run).ended().map(|end| match end.status {
            RunStatus::Finished => 0,
            RunStatus::Preempted => REQUEUE,
            RunStatus::Failed => 1,
        })
    }

    /// Returns whether the run has finished, and no coordinator continues it.
    pub fn has_finished(&self) -> bool {
        self.exit_code() == Some(0)
    }

    /// Prints that the run has ended.
    pub fn say_ended(&self) {
        say(format_args!("the run in {} has ended", self.run.display()));
    }

    /// Creates the directory and its secret unless they exist, and returns the secret.
    ///
    /// # Errors
    /// Returns an error if the directory or the secret cannot be created or read, or are accessible
    /// to other users.
    pub fn open(&self) -> Result<Secret> {
        fs::create_dir_all(&self.dir).map_err(|e| Error::io("create", &self.dir, e))?;
        user_dirs::private_directory(&self.dir)?;
        if !Secret::path(&self.dir).exists() {
            write_secret(&self.dir)?;
        }
        self.secret()
    }

    /// Returns the coordinator's write-ahead log.
    pub fn journal(&self) -> WriteAheadLog {
        WriteAheadLog::at(&self.dir)
    }

    /// Returns the run's secret.
    ///
    /// # Errors
    /// Returns an error if the secret cannot be read.
    pub fn secret(&self) -> Result<Secret> {
        let hint = "this file is the run's secret, which only the coordinator's user can read";
        Secret::read(&self.dir).map_err(|e| if e.advice().is_some() { e } else { e.hint(hint) })
    }

    /// Returns the secret with the encryption setting of `contact`.
    ///
    /// # Errors
    /// Returns an error if the secret cannot be read.
    pub fn credentials(&self, contact: &Contact) -> Result<Credentials> {
        Ok(Credentials { secret: self.secret()?, encrypt: contact.encrypt })
    }

    /// Publishes the coordinator's address.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn publish(&self, contact: &Contact) -> Result<()> {
        let path = self.dir.join(COORDINATOR);
        let text = serde_json::to_string(contact).map_err(|e| Error::internal(e.to_string()))?;
        own_files::replace(&path, text + "\n").map_err(|e| Error::io("write", &path, e))
    }

    /// Waits until the coordinator's address is published, and returns it.
    ///
    /// # Errors
    /// Returns an error if it is not published within `timeout`, or a signal asks the process to
    /// end.
    pub fn coordinator(&self, timeout: Duration) -> Result<Contact> {
        let path = self.dir.join(COORDINATOR);
        let since = Instant::now();
        loop {
            match fs::read_to_string(&path) {
                Ok(text) => {
                    return serde_json::from_str(&text).map_err(|e| {
                        Error::comm(format!("{} has no valid address: {e}", path.display()))
                            .hint("start all processes of a run with the same program")
                    });
                }
                Err(_) if since.elapsed() < timeout && signals::last_signal().is_none() => {
                    std::thread::sleep(POLL_INTERVAL)
                }
                Err(e) => {
                    return Err(Error::io("read", &path, e).hint(
                        "start hpctrain ps coordinator for the run, and give its directory",
                    ));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_checkpoint::run_dir::markers::End;

    #[test]
    fn a_finished_run_is_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let site = PsRendezvous::for_run(folder.path());
        assert!(!site.has_finished());
        for (status, expected) in
            [(RunStatus::Finished, true), (RunStatus::Preempted, false), (RunStatus::Failed, false)]
        {
            let end = End { step: 7, status, reason: None };
            Markers::new(folder.path()).end(&end).unwrap();
            assert_eq!(site.has_finished(), expected, "{status:?}");
        }
    }

    #[test]
    fn the_coordinator_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let site = PsRendezvous::for_run(folder.path());
        assert!(
            site.coordinator(Duration::ZERO)
                .unwrap_err()
                .to_string()
                .contains("hpctrain ps coordinator")
        );
        site.open().unwrap();
        site.open().unwrap();
        for interface in [None, Some("ib0".to_owned())] {
            let contact =
                Contact { address: "node7:2222".into(), encrypt: interface.is_none(), interface };
            site.publish(&contact).unwrap();
            assert_eq!(site.coordinator(Duration::ZERO).unwrap(), contact);
            assert_eq!(site.credentials(&contact).unwrap().encrypt, contact.encrypt);
        }
        fs::write(folder.path().join("servers/coordinator"), "node7:2222").unwrap();
        let error = site.coordinator(Duration::ZERO).unwrap_err().to_string();
        assert!(
            error.contains("has no valid address") && error.contains("the same program"),
            "{error}"
        );
    }
}
