//! The `checkpoints/` directory of a run: names, publishing, retention.

use std::fs;
use std::path::{Path, PathBuf};

use super::Manifest;
use crate::error::{Error, Result};

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

    /// Steps of the published checkpoints, ascending.
    pub fn steps(&self) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(&self.root) else { return Vec::new() };
        let step = |name: &str| name.strip_prefix("step-").and_then(|digits| digits.parse().ok());
        let mut steps: Vec<u64> =
            entries.flatten().filter_map(|entry| step(entry.file_name().to_str().unwrap_or_default())).collect();
        steps.sort_unstable();
        steps
    }

    /// Where the checkpoint of a step is, once published.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step:08}"))
    }

    /// Where the checkpoint of a step is written.
    pub fn staging(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step:08}.tmp"))
    }

    /// The newest checkpoint with a readable manifest; says which ones it passed over.
    ///
    /// # Errors
    /// There is none.
    pub fn newest(&self) -> Result<(PathBuf, Manifest)> {
        for step in self.steps().into_iter().rev() {
            let path = self.path(step);
            match Manifest::read(&path) {
                Ok(manifest) => return Ok((path, manifest)),
                Err(e) => log::warn!("passing over {}: {e}", path.display()),
            }
        }
        Err(Error::input(format!("{} holds no checkpoint to resume from", self.root.display()))
            .hint("it ended before its first checkpoint: start again under another run.name, or remove it"))
    }

    /// Empties the staging directory of a step.
    ///
    /// # Errors
    /// The file system refused.
    pub fn begin(&self, step: u64) -> Result<PathBuf> {
        let staging = self.staging(step);
        if staging.exists() {
            fs::remove_dir_all(&staging).map_err(|e| Error::io("clear", &staging, e))?;
        }
        fs::create_dir_all(&staging).map_err(|e| Error::io("create", &staging, e))?;
        Ok(staging)
    }

    /// Forgets a checkpoint that could not be written.
    pub fn abandon(&self, step: u64) {
        let staging = self.staging(step);
        if let Err(e) = fs::remove_dir_all(&staging) {
            log::warn!("cannot remove {}: {e}", staging.display());
        }
    }

    /// Renames a complete staging directory into place, moves `latest`, and removes all but the newest `keep`.
    ///
    /// # Errors
    /// The file system refused.
    pub fn publish(&self, step: u64, keep: usize) -> Result<PathBuf> {
        let (staging, path) = (self.staging(step), self.path(step));
        sync(&staging)?;
        if path.exists() {
            self.discard(&path)?;
        }
        fs::rename(&staging, &path).map_err(|e| Error::io("publish", &path, e))?;
        self.link_latest(&path)?;
        sync(&self.root)?;
        let steps = self.steps();
        for old in &steps[..steps.len().saturating_sub(keep)] {
            self.discard(&self.path(*old))?;
        }
        Ok(path)
    }

    /// The link to the newest published checkpoint.
    pub fn latest(&self) -> PathBuf {
        self.root.join("latest")
    }

    /// Points `latest` at `path` in one rename.
    fn link_latest(&self, path: &Path) -> Result<()> {
        let (link, temporary) = (self.latest(), self.root.join(".latest.tmp"));
        let target = path.file_name().unwrap_or_default();
        // A leftover of a run that was killed between the two calls below; it may well not exist.
        let _ = fs::remove_file(&temporary);
        std::os::unix::fs::symlink(target, &temporary)
            .and_then(|()| fs::rename(&temporary, &link))
            .map_err(|e| Error::io("link", &link, e))
    }

    /// Removes a checkpoint: renamed first, so that no reader sees half of it under its name.
    fn discard(&self, path: &Path) -> Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let trash = self.root.join(format!(".trash-{name}"));
        let remove = || {
            if trash.exists() {
                fs::remove_dir_all(&trash)?;
            }
            fs::rename(path, &trash)?;
            fs::remove_dir_all(&trash)
        };
        remove().map_err(|e| Error::io("remove", path, e))
    }
}

/// Makes a directory's entries durable.
fn sync(dir: &Path) -> Result<()> {
    fs::File::open(dir).and_then(|file| file.sync_all()).map_err(|e| Error::io("sync", dir, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn publishing_links_and_retains() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path());
        for step in [5, 20, 100] {
            let staging = checkpoints.begin(step).unwrap();
            fs::write(staging.join("x"), step.to_string()).unwrap();
            assert!(!checkpoints.steps().contains(&step));
            checkpoints.publish(step, 2).unwrap();
            assert_eq!(fs::read_to_string(dir.path().join("latest/x")).unwrap(), step.to_string());
        }
        assert_eq!(checkpoints.steps(), [20, 100]);
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 3, "{left:?}");
        checkpoints.begin(7).unwrap();
        checkpoints.abandon(7);
        assert!(!checkpoints.staging(7).exists());
    }

    #[test]
    fn nothing_to_resume_says_so() {
        let error = Checkpoints::new("/no/such/run").newest().unwrap_err().to_string();
        assert!(error.contains("/no/such/run holds no checkpoint"), "{error}");
    }
}
