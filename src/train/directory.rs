//! The directory of a run: which one, and whose.

use std::fs;
use std::path::{Path, PathBuf};

use super::marks::Marks;
use super::resume::Branch;
use crate::checkpoint::Checkpoints;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::telemetry::evaluations;

/// A run's directory.
#[derive(Debug, Clone)]
pub struct RunDirectory {
    path: PathBuf,
}

/// Where a run begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// At step 0.
    No,
    /// At the newest whole checkpoint of its own directory; at step 0 while there is none.
    Auto,
    /// At this checkpoint.
    From(PathBuf),
}

impl RunDirectory {
    /// The directory at `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Chooses and creates the directory of a run called `config.run.name`, or, unnamed, `default` with the next
    /// free number (the last one in use, to resume). Called on one rank.
    ///
    /// # Errors
    /// It holds another run; there is none to resume; the file system refused.
    pub fn prepare(config: &Config, default: &str, resume: &Resume) -> Result<Self> {
        let root = Path::new(&config.run.root);
        let directory = match &config.run.name {
            Some(name) => Self::at(root.join(name)),
            None => Self::numbered(root, default, *resume == Resume::Auto),
        };
        let path = &directory.path;
        match resume {
            Resume::No | Resume::From(_) if directory.holds_a_run() => {
                return Err(Error::input(format!("{} holds another run", path.display()))
                    .hint("continue it with --resume auto, or choose another --set run.name=…"));
            }
            _ => {}
        }
        let logs = directory.logs_path();
        fs::create_dir_all(&logs).map_err(|e| {
            Error::io("create", &logs, e).hint("choose a directory that can be written with --set run.root=…")
        })?;
        directory.checkpoints().prepare()?;
        directory.marks().begin()?;
        Ok(directory)
    }

    /// `default`, `default-2`, …: the first free one, or the last one in use.
    fn numbered(root: &Path, default: &str, last_used: bool) -> Self {
        let mut previous = None;
        for number in 1u64.. {
            let name = if number == 1 { default.to_string() } else { format!("{default}-{number}") };
            let candidate = Self::at(root.join(name));
            if !candidate.holds_a_run() {
                return previous.filter(|_| last_used).unwrap_or(candidate);
            }
            previous = Some(candidate);
        }
        unreachable!("some number is free")
    }

    fn holds_a_run(&self) -> bool {
        self.config_path().exists()
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What ran, every default resolved.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// One line a step.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// One line an evaluation.
    pub fn evaluations_path(&self) -> PathBuf {
        self.path.join(evaluations::FILE)
    }

    /// The run card.
    pub fn card_path(&self) -> PathBuf {
        self.path.join("run.json")
    }

    /// The profile of its kernels, if one was asked for.
    pub fn profile_path(&self) -> PathBuf {
        self.path.join("profile.json")
    }

    /// Which algorithms a measurement chose for messages between ranks.
    pub fn collectives_path(&self) -> PathBuf {
        self.path.join("collectives.json")
    }

    /// The log of a rank.
    pub fn log_path(&self, rank: usize) -> PathBuf {
        self.logs_path().join(format!("rank-{rank:05}.log"))
    }

    /// Logs, heartbeats, and the ledgers of a job that stood still.
    pub fn logs_path(&self) -> PathBuf {
        self.path.join("logs")
    }

    fn checkpoints_path(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    fn branch_path(&self) -> PathBuf {
        self.path.join("branch.json")
    }

    /// Where the run began, if that was at a checkpoint of another.
    pub fn branch(&self) -> Option<Branch> {
        serde_json::from_str(&fs::read_to_string(self.branch_path()).ok()?).ok()
    }

    /// Writes down where the run begins: should it be killed before it saves, its next start begins there as well.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write_branch(&self, mut branch: Branch) -> Result<()> {
        let path = self.branch_path();
        branch.from = std::path::absolute(&branch.from).map_err(|e| Error::io("find", &branch.from, e))?;
        let text = serde_json::to_string(&branch).map_err(|e| Error::internal(format!("branch: {e}")))?;
        fs::write(&path, text + "\n").map_err(|e| Error::io("write", &path, e))
    }

    /// The last part of its path.
    pub fn name(&self) -> String {
        self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// How trainer and evaluators tell each other that they are done.
    pub fn marks(&self) -> Marks {
        Marks::new(&self.path)
    }

    /// The checkpoints.
    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.checkpoints_path())
    }

    /// Writes the resolved configuration.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write_config(&self, config: &Config) -> Result<()> {
        let path = self.config_path();
        let text = toml::to_string(config).map_err(|e| Error::internal(format!("configuration: {e}")))?;
        fs::write(&path, text).map_err(|e| Error::io("write", &path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(root: &Path, name: Option<&str>) -> Config {
        let mut config = Config::default();
        config.run.root = root.display().to_string();
        config.run.name = name.map(str::to_string);
        config
    }

    #[test]
    fn unnamed_runs_are_numbered_and_resumed_at_the_last() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), None);
        for name in ["x", "x-2", "x-3"] {
            let directory = RunDirectory::prepare(&config, "x", &Resume::No).unwrap();
            assert_eq!(directory.path(), root.path().join(name));
            directory.write_config(&config).unwrap();
        }
        let resumed = RunDirectory::prepare(&config, "x", &Resume::Auto).unwrap();
        assert_eq!(resumed.path(), root.path().join("x-3"));
    }

    #[test]
    fn a_named_run_is_not_overwritten() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), Some("mine"));
        // What a scheduler starts again may not have begun yet.
        RunDirectory::prepare(&config, "x", &Resume::Auto).unwrap().write_config(&config).unwrap();
        let error = RunDirectory::prepare(&config, "x", &Resume::No).unwrap_err().to_string();
        assert!(error.contains("mine holds another run") && error.contains("--resume auto"), "{error}");
    }
}
