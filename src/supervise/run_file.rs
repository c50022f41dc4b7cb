//! The file into which a supervised trainer writes the directory of its run, and such files of
//! supervisors that were killed, whose jobs may still be training.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, test_kill_process};

use crate::error::{Error, Result};
use crate::run_dir::RunDirectory;
use crate::{signals, train};

/// The prefix of the names of these files; an id of the job, the process id of the supervisor and
/// its host follow.
const PREFIX: &str = ".hpctrain-supervised-";

/// The interval at which the run of an orphaned job is polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A job whose supervisor was killed.
#[derive(Debug, PartialEq, Eq)]
pub struct Orphan {
    /// The file of its supervisor.
    place: PathBuf,
    /// The process id of its supervisor.
    pub supervisor: i32,
    /// The directory of its run.
    pub run: PathBuf,
}

/// Returns the file of this supervisor, in the working directory, which ranks on other hosts may
/// share.
///
/// # Errors
/// Returns an error if there is no working directory.
pub fn run_file_of_this_process() -> Result<PathBuf> {
    let name = format!("{PREFIX}{}-{}-{}", train::fresh_id(), std::process::id(), host());
    Ok(here()?.join(name))
}

/// Returns the run's directory, if the trainer has written it.
pub fn read_run_directory(place: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(place).ok()?;
    text.strip_suffix('\n').map(PathBuf::from)
}

/// Returns the orphaned job that trains the run that a start's message `refusal` names as being
/// trained by another process.
///
/// # Errors
/// Returns an error if the working directory cannot be read.
pub fn find_orphan(refusal: &str) -> Result<Option<Orphan>> {
    let here = here()?;
    let entries = fs::read_dir(&here).map_err(|e| Error::io("list", &here, e))?;
    let orphans = entries.flatten().filter_map(|entry| orphan(&entry.path(), &host()));
    Ok(orphans.into_iter().find(|orphan| refuses(refusal, &orphan.run)))
}

/// Returns true if a start was refused because another process trains this run.
fn refuses(refusal: &str, run: &Path) -> bool {
    let Some((path, _)) = refusal.split_once(" is being trained by ") else { return false };
    let path = Path::new(path.rsplit(": ").next().unwrap_or(path));
    std::path::absolute(path).is_ok_and(|path| path == run)
}

/// Returns the orphan that a file names; `None` if its supervisor is alive, or on another host.
fn orphan(place: &Path, host: &str) -> Option<Orphan> {
    let name = place.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    let mut parts = name.splitn(3, '-').skip(1);
    let supervisor: i32 = parts.next()?.parse().ok()?;
    let is_gone = test_kill_process(Pid::from_raw(supervisor)?).is_err();
    (is_gone && parts.next()? == host).then(|| {
        Some(Orphan { place: place.to_path_buf(), supervisor, run: read_run_directory(place)? })
    })?
}

impl Orphan {
    /// Waits until the job has ended, and removes the file of its supervisor; returns early if a
    /// signal comes.
    pub fn wait_for_end(&self) {
        // A lease that cannot be read may be held.
        while signals::last_signal().is_none()
            && RunDirectory::at(&self.run).has_trainer().unwrap_or(true)
        {
            signals::pause(POLL_INTERVAL);
        }
        if signals::last_signal().is_none() {
            // The file may have been removed already.
            let _ = fs::remove_file(&self.place);
        }
    }
}

fn here() -> Result<PathBuf> {
    std::env::current_dir().map_err(|e| Error::internal(format!("no working directory: {e}")))
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_killed_supervisors_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let place =
            |process: u32, host: &str| dir.path().join(format!("{PREFIX}abc-{process}-{host}"));
        let [gone, alive, far] = [
            place(ended.id(), "my-host"),
            place(std::process::id(), "my-host"),
            place(ended.id(), "far"),
        ];
        for path in [&gone, &alive, &far] {
            fs::write(path, "/x/runs/y\n").unwrap();
        }
        let found =
            Orphan { place: gone.clone(), supervisor: ended.id() as i32, run: "/x/runs/y".into() };
        assert_eq!(
            [&gone, &alive, &far].map(|path| orphan(path, "my-host")),
            [Some(found), None, None]
        );
        assert_eq!(orphan(&dir.path().join("other"), "my-host"), None);
    }

    #[test]
    fn the_refusal_names_the_run() {
        let run = Path::new("/x/runs/y");
        assert!(refuses("exit code 2: /x/runs/y is being trained by process 7 on a", run));
        assert!(!refuses("exit code 2: /x/runs/z is being trained by process 7 on a", run));
        assert!(!refuses("exit code 2: /x/runs/y holds another run", run));
        let relative = std::path::absolute("runs/y").unwrap();
        assert!(refuses("exit code 2: runs/y is being trained by process 7 on a", &relative));
    }
}
