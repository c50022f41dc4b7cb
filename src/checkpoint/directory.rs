//! The `checkpoints/` directory of a run: names, publishing, removal.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::filesystem;
use super::lease::Leases;
use super::retention::{Candidate, Retention, removed};
use super::{Manifest, Reader, refused};
use crate::error::{Error, Result};
use crate::telemetry::evaluations::{self, Evaluation};

/// The checkpoints of one run.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    root: PathBuf,
}

impl Checkpoints {
    /// Those under `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Their directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Steps of the published checkpoints, ascending.
    pub fn steps(&self) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(&self.root) else { return Vec::new() };
        let mut steps: Vec<u64> = entries.flatten().filter_map(|entry| step_of(entry.file_name().to_str()?)).collect();
        steps.sort_unstable();
        steps
    }

    /// Where the checkpoint of a step is, once published.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(name_of(step))
    }

    /// Where a job writes the checkpoint of a step.
    pub fn staging(&self, step: u64, job: &str) -> PathBuf {
        self.root.join(format!("{}.tmp-{job}", name_of(step)))
    }

    /// The link to the newest published checkpoint.
    pub fn latest(&self) -> PathBuf {
        self.root.join("latest")
    }

    /// The step that was saved last, by the link.
    pub fn latest_step(&self) -> Option<u64> {
        step_of(fs::read_link(self.latest()).ok()?.to_str()?)
    }

    /// The link to the checkpoint with the lowest validation loss.
    pub fn best(&self) -> PathBuf {
        self.root.join("best")
    }

    /// Claims on checkpoints.
    pub fn leases(&self) -> Leases {
        Leases::new(self.root.join(".leases"))
    }

    /// Evaluations of the run, as its `eval.jsonl` has them.
    pub fn evaluated(&self) -> Vec<Evaluation> {
        self.root.parent().map(|run| evaluations::read(&run.join(evaluations::FILE))).unwrap_or_default()
    }

    /// Creates the directory, and clears away what earlier jobs left half written or half removed. The caller is the
    /// only one who writes here.
    ///
    /// # Errors
    /// The file system refused, or does not do what checkpoints need.
    pub fn prepare(&self) -> Result<()> {
        fs::create_dir_all(&self.root).map_err(|e| {
            Error::io("create", &self.root, e).hint("choose a directory that can be written with --set run.root=…")
        })?;
        filesystem::check(&self.root)?;
        let entries = fs::read_dir(&self.root).map_err(|e| Error::io("list", &self.root, e))?;
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let staging = name.split_once(".tmp").is_some_and(|(step, _)| step_of(step).is_some());
            let gone = if staging {
                self.discard(&entry.path())
            } else if name.starts_with(TRASH) || entry.path().is_dir() && name.ends_with(".tmp") {
                remove(&entry.path())
            } else if name.starts_with('.') && name.ends_with(".tmp") {
                fs::remove_file(entry.path()).map_err(|e| refused("remove", &entry.path(), e))
            } else {
                Ok(())
            };
            // It does no harm but take space.
            gone.unwrap_or_else(|e| log::warn!("{e}"));
        }
        Ok(())
    }

    /// Forgets a checkpoint that could not be written.
    pub fn abandon(&self, staging: &Path) {
        // It may not even have been created.
        if staging.exists()
            && let Err(e) = self.discard(staging)
        {
            log::warn!("{e}");
        }
    }

    /// Renames a complete directory into place and moves `latest`.
    ///
    /// # Errors
    /// The file system refused.
    pub fn publish(&self, step: u64, staging: &Path) -> Result<PathBuf> {
        let path = self.path(step);
        sync(staging)?;
        // One of the same step is damaged. Its removal takes a while, and `latest` may point to it: it comes last.
        let replaced = self.set_aside(&path)?;
        fs::rename(staging, &path).map_err(|e| refused("publish", &path, e))?;
        sync(&self.root)?;
        self.link(&self.latest(), &path)?;
        sync(&self.root)?;
        if let Some(Err(e)) = replaced.map(|trash| remove(&trash)) {
            log::warn!("{e}");
        }
        Ok(path)
    }

    /// Points `best` at the published checkpoint with the lowest validation loss, if any has one.
    ///
    /// # Errors
    /// The file system refused.
    pub fn point_to_best(&self, evaluated: &[Evaluation]) -> Result<()> {
        self.point_to_best_of(&self.steps(), evaluated)
    }

    /// Points `best` at one of `steps`; without one that has a loss it points nowhere, rather than to what is gone.
    fn point_to_best_of(&self, steps: &[u64], evaluated: &[Evaluation]) -> Result<()> {
        let link = self.best();
        match (evaluations::best(evaluated, steps), fs::read_link(&link)) {
            (Some((step, _)), Ok(target)) if target == Path::new(&name_of(step)) => Ok(()),
            (Some((step, _)), _) => self.link(&link, &self.path(step)),
            (None, _) => match fs::remove_file(&link) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(refused("remove", &link, e)),
                _ => Ok(()),
            },
        }
    }

    /// Removes the checkpoints that need not be kept; `best` is one that stays. One that somebody holds a lease on
    /// stays, and is looked at again the next time; so is one that cannot be removed.
    pub fn retain(&self, retention: &Retention, evaluated: &[Evaluation]) {
        let removable = self.removable(retention, evaluated);
        let mut left = self.steps();
        left.retain(|step| !removable.contains(step));
        let mut done = self.point_to_best_of(&left, evaluated);
        for step in removable {
            done = done.and_then(|()| self.discard_unless_leased(step).map(drop));
            // Too many checkpoints are no reason to end a run.
            done = done.or_else(|e| {
                log::warn!("{}", e.to_string().replace('\n', "; "));
                Ok(())
            });
        }
        done.unwrap_or_else(|e| log::warn!("{e}"));
    }

    /// Steps whose checkpoints need not be kept, ascending.
    pub fn removable(&self, retention: &Retention, evaluated: &[Evaluation]) -> Vec<u64> {
        removed(&self.candidates(evaluated), retention)
    }

    /// The published checkpoints as a retention sees them, ascending by step.
    pub(super) fn candidates(&self, evaluated: &[Evaluation]) -> Vec<Candidate> {
        let leases = self.leases();
        let waits = leases.queue_is_watched();
        // A run that passed over a damaged checkpoint has gone back: what is newer than the last save counts for nothing.
        let latest = self.latest_step().unwrap_or(u64::MAX);
        let candidate = |step| {
            let path = self.path(step);
            let sound = self.sound(step);
            let sound =
                sound.inspect_err(|e| log::warn!("{} does not count as a checkpoint: {e}", path.display())).ok();
            let waited_for = |manifest: &Manifest| waits && !evaluations::is_settled(evaluated, &manifest.id);
            let held = leases.holds(&name_of(step)) || sound.as_ref().is_some_and(waited_for);
            Candidate { step, sound: sound.is_some() && step <= latest, loss: evaluations::loss(evaluated, step), held }
        };
        self.steps().into_iter().map(candidate).collect()
    }

    /// What the checkpoint of a step says of itself, if all of it is there: its manifest, and every file as long as it
    /// should be.
    ///
    /// # Errors
    /// What is missing or too short.
    pub(super) fn sound(&self, step: u64) -> Result<Manifest> {
        let path = self.path(step);
        let manifest = Manifest::read(&path)?;
        for (name, entry) in &manifest.files {
            let file = path.join(name);
            let length = fs::metadata(&file).map_err(|e| Error::io("read", &file, e))?.len();
            if length != entry.bytes {
                return Err(Error::input(format!("{} has {length} bytes", file.display())));
            }
        }
        Ok(manifest)
    }

    /// Removes the checkpoint of a step unless somebody took a lease on it at the last moment.
    ///
    /// # Errors
    /// The file system refused.
    pub fn discard_unless_leased(&self, step: u64) -> Result<bool> {
        let (name, path) = (name_of(step), self.path(step));
        let trash = self.root.join(format!("{TRASH}{name}"));
        if trash.exists() {
            remove(&trash)?;
        }
        fs::rename(&path, &trash).map_err(|e| refused("remove", &path, e))?;
        // A holder makes its lease first and looks for the checkpoint then: either it is seen here, or it saw none.
        if self.leases().holds(&name) {
            fs::rename(&trash, &path).map_err(|e| refused("restore", &path, e))?;
            return Ok(false);
        }
        remove(&trash)?;
        Ok(true)
    }

    /// Opens the checkpoint of a step. It may be missing for an instant, while a removal is taken back.
    ///
    /// # Errors
    /// It is missing or damaged.
    pub fn open(&self, step: u64) -> Result<Reader> {
        let path = self.path(step);
        if !path.exists() {
            std::thread::sleep(Duration::from_millis(100));
        }
        Reader::open(&path)
    }

    /// Points a link at `path` in one rename.
    fn link(&self, link: &Path, path: &Path) -> Result<()> {
        let name = link.file_name().unwrap_or_default().to_string_lossy();
        let temporary = self.root.join(format!(".{name}.{}-{}.tmp", std::process::id(), crate::telemetry::unix_time()));
        let target = path.file_name().unwrap_or_default();
        // A leftover of a process that was killed between the two calls below; it may well not exist.
        let _ = fs::remove_file(&temporary);
        std::os::unix::fs::symlink(target, &temporary)
            .and_then(|()| fs::rename(&temporary, link))
            .map_err(|e| refused("link", link, e))
    }

    /// Removes a directory, if it exists: renamed first, so that no reader sees half of it under its name.
    fn discard(&self, path: &Path) -> Result<()> {
        self.set_aside(path)?.map_or(Ok(()), |trash| remove(&trash))
    }

    /// Renames a directory to one that is to be removed; none if it does not exist.
    fn set_aside(&self, path: &Path) -> Result<Option<PathBuf>> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let trash = self.root.join(format!("{TRASH}{name}"));
        if trash.exists() {
            remove(&trash)?;
        }
        match fs::rename(path, &trash) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(refused("remove", path, e)),
            Ok(()) => Ok(Some(trash)),
        }
    }
}

/// How the names of what is being removed begin.
const TRASH: &str = ".trash-";

/// The name of the checkpoint of a step.
pub fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step in the name of a published checkpoint.
pub(super) fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

fn remove(path: &Path) -> Result<()> {
    fs::remove_dir_all(path).map_err(|e| refused("remove", path, e))
}

/// Makes a file, or a directory's entries, durable.
///
/// # Errors
/// The file system refused.
pub fn sync(path: &Path) -> Result<()> {
    fs::File::open(path).and_then(|file| file.sync_all()).map_err(|e| refused("sync", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with a manifest that says nothing of any tensor.
    fn publish(checkpoints: &Checkpoints, step: u64) {
        let staging = checkpoints.staging(step, "job");
        fs::create_dir_all(&staging).unwrap();
        crate::checkpoint::manifest::tests::empty(step).write(&staging).unwrap();
        checkpoints.publish(step, &staging).unwrap();
    }

    #[test]
    fn publishing_links_and_retains() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
        checkpoints.prepare().unwrap();
        for step in [5, 20, 100] {
            publish(&checkpoints, step);
            assert_eq!(fs::read_link(checkpoints.latest()).unwrap(), Path::new(&name_of(step)));
            checkpoints.retain(&Retention { newest: 2, ..Retention::default() }, &[]);
        }
        assert_eq!(checkpoints.steps(), [20, 100]);
        // What kills leave.
        fs::create_dir_all(checkpoints.staging(7, "dead").join("x")).unwrap();
        fs::create_dir_all(checkpoints.root().join(".trash-step-00000001")).unwrap();
        std::os::unix::fs::symlink("step-00000020", checkpoints.root().join(".latest.77.tmp")).unwrap();
        checkpoints.prepare().unwrap();
        let left: Vec<_> = fs::read_dir(checkpoints.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 3, "{left:?}");
        checkpoints.abandon(&checkpoints.staging(7, "never"));
    }

    /// A run that passed over the damaged checkpoint of step 5 saves step 4: that one must not go for the sake of step 5.
    #[test]
    fn a_run_that_went_back_keeps_what_it_saves() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
        checkpoints.prepare().unwrap();
        [3, 5, 4].into_iter().for_each(|step| publish(&checkpoints, step));
        assert_eq!(checkpoints.latest_step(), Some(4));
        checkpoints.retain(&Retention { newest: 1, ..Retention::default() }, &[]);
        assert_eq!(checkpoints.steps(), [4, 5]);
    }

    #[test]
    fn a_leased_checkpoint_stays_until_the_lease_ends() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
        checkpoints.prepare().unwrap();
        publish(&checkpoints, 1);
        let lease = checkpoints.leases().take("step-00000001.read").unwrap().unwrap();
        publish(&checkpoints, 2);
        let one = Retention { newest: 1, ..Retention::default() };
        checkpoints.retain(&one, &[]);
        assert!(!checkpoints.discard_unless_leased(1).unwrap());
        assert_eq!(checkpoints.steps(), [1, 2]);
        drop(lease);
        checkpoints.retain(&one, &[]);
        assert_eq!(checkpoints.steps(), [2]);
    }
}
