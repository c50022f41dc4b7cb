//! The directory of a run: its choice, its ownership, and its files.
//!
//! `RunDirectory::prepare` claims the directory before anything in it is touched. The trainer's
//! lease is one `Arc`, of the `RunDirectory` and of the `Checkpoints` it gives out, which check it
//! before every rename; the last one to be dropped releases it, and a run drops its directory last.
//! At each step the trainer checks in its own memory whether the lease was lost or the process
//! stood still, and reads the file only in the second case.

use std::fs::{self, DirBuilder};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use super::branch::Branch;
use super::config_diff;
use super::markers::{End, Markers};
use super::supervisor_hint;
use crate::Checkpoints;
use crate::lease::{Claimed, LeaseGuard, LeaseRecord, Leases};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::own_files;
use hpctrain_config::Config;
use hpctrain_config::telemetry::{
    evaluations, rank_times, tensorboard, text_samples, worker_records,
};

/// A run's directory.
#[derive(Debug, Clone)]
pub struct RunDirectory {
    path: PathBuf,
    /// The trainer's, on its rank 0: released when the last user that changes the directory is
    /// done.
    lease: Option<Arc<LeaseGuard>>,
    /// Whether this start has created the directory.
    is_new: bool,
    /// The end of the trainer before, for the case that this start fails.
    ended: Option<End>,
}

/// Starting point of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// At step 0.
    No,
    /// At the newest whole checkpoint of its own directory; at step 0 while there is none.
    Auto,
    /// At this checkpoint.
    From(PathBuf),
}

/// The name of directories of leases, in that of a run and in that of its checkpoints.
const LEASES: &str = ".leases";

/// The name of the trainer's lease.
const TRAINER: &str = "trainer";

/// The hint where run directories cannot be made.
const HINT: &str = "choose a directory that can be written with --set run.root=…";

impl RunDirectory {
    /// The directory at `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), lease: None, is_new: false, ended: None }
    }

    /// Chooses, claims and creates the directory of a run called `config.run.name`, or, unnamed,
    /// `default` with the next free number; unnamed and resumed, the directory of the resumable run
    /// of this configuration. From then on this process is the only trainer there, until the last
    /// copy of the result is dropped. Called on one rank.
    ///
    /// # Errors
    /// Another trainer has it; it holds another run; several runs could be resumed; the file system
    /// refused.
    pub fn prepare(config: &Config, default: &str, resume: &Resume) -> Result<Self> {
        let root = Path::new(&config.run.root);
        let group = config.run.group.as_deref().map(own_files::group).transpose()?;
        let resumed = match (&config.run.name, resume) {
            (Some(name), _) => Some(root.join(name)),
            (None, Resume::Auto) => resumable(root, default, config)?,
            (None, _) => None,
        };
        let directory = match resumed {
            Some(path) => Self::claim(path, group, true)?
                .map_err(|(path, by)| is_trained(&path, by.as_ref()))?,
            None => Self::numbered(root, default, group)?,
        };
        // A failure from here on leaves no empty directory.
        match directory.begin(resume) {
            Ok(ended) => Ok(Self { ended, ..directory }),
            Err(e) => {
                directory.abandon();
                Err(e)
            }
        }
    }

    /// Claims the directory at `path`, which need not exist; else names the holder. Where only time
    /// can tell whether a trainer lives, this waits for it if it `waits`. A directory that exists
    /// must be this user's, or of `group`.
    fn claim(
        path: PathBuf,
        group: Option<u32>,
        waits: bool,
    ) -> Result<Result<Self, (PathBuf, Option<LeaseRecord>)>> {
        let is_new = create(&path)?;
        let directory = Self { path, lease: None, is_new, ended: None };
        directory.check_owners(group)?;
        match directory
            .leases()
            .claim(TRAINER, waits)
            .map_err(|e| if e.kind() == Kind::Io { e.hint(HINT) } else { e })
        {
            Ok(Claimed::Taken(lease)) => Ok(Ok(Self { lease: Some(Arc::new(lease)), ..directory })),
            Ok(Claimed::By(other)) => Ok(Err((directory.path, other))),
            Err(e) => {
                directory.abandon();
                Err(e)
            }
        }
    }

    /// Refuses a directory that another user may have prepared, and directories in it.
    fn check_owners(&self, group: Option<u32>) -> Result<()> {
        let checkpoints = self.checkpoints_path();
        let inside = [
            self.logs_path(),
            self.tensorboard_path(),
            self.path.join(LEASES),
            checkpoints.join(LEASES),
        ];
        for path in [&self.path, &checkpoints].into_iter().chain(&inside) {
            // One that does not exist will be made; a link to nothing is refused then.
            if path.try_exists().map_err(|e| Error::io("look for", path, e))? {
                own_files::check_directory(path, group)?;
            }
        }
        Ok(())
    }

    /// Claims `default`, or `default-2`, …: the first that is free.
    fn numbered(root: &Path, default: &str, group: Option<u32>) -> Result<Self> {
        for number in 1.. {
            let path = root.join(numbered(default, number));
            // Most are found taken without touching them.
            if Self::at(&path).holds_a_run()? {
                continue;
            }
            if let Ok(directory) = Self::claim(path, group, false)? {
                // Another may have begun and ended since.
                if !directory.holds_a_run()? {
                    return Ok(directory);
                }
            }
        }
        Err(Error::internal("no number is free"))
    }

    /// Prepares the claimed directory for a trainer; returns the end of the one before.
    fn begin(&self, resume: &Resume) -> Result<Option<End>> {
        if *resume != Resume::Auto && self.holds_a_run()? {
            return Err(Error::input(format!("{} holds another run", self.path.display()))
                .hint("continue it with --resume auto, or choose another --set run.name=…"));
        }
        let logs = self.logs_path();
        own_files::directory(&logs).map_err(|e| Error::io("create", &logs, e).hint(HINT))?;
        self.checkpoints().prepare()?;
        let ended = self.marks().begin()?;
        supervisor_hint::tell(&self.path);
        Ok(ended)
    }

    /// The end of the trainer before this one, if it had ended.
    pub fn ended_before(&self) -> Option<&End> {
        self.ended.as_ref()
    }

    /// Whether a run has begun here.
    fn holds_a_run(&self) -> Result<bool> {
        Ok(exists(&self.config_path())? || !self.checkpoints().steps()?.is_empty())
    }

    /// Whether a run could go on here: it has saved something, or is told where it begins.
    fn can_be_resumed(&self) -> Result<bool> {
        Ok(!self.checkpoints().steps()?.is_empty() || exists(&self.branch_path())?)
    }

    /// The first difference of the run here from a resolved configuration; none if it is the same
    /// run.
    fn differs_from(&self, config: &Config) -> Result<Option<String>> {
        let path = self.config_path();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Ok(Some("it has no config.toml".into()));
            }
            Err(e) => return Err(Error::io("read", &path, e)),
        };
        Ok(match text.parse() {
            Ok(before) => config_diff::of_run(&before, config).into_iter().next(),
            Err(e) => Some(format!("its config.toml is of another version: {}", e.message())),
        })
    }

    /// Gives up a claim after a start that failed before its first step: the run has ended as it
    /// had before. Files of this start are removed if nothing else is there.
    pub fn abandon(self) {
        // Another trainer may have it by now.
        if let Some(end) = self.ended.as_ref().filter(|_| self.check().is_ok()) {
            // It is as good as it was only if this works; the start's own error says more.
            let _ = self.marks().end(end);
        }
        let may = || self.is_new && self.check().is_ok();
        let trained = || self.checkpoints().steps().map_or(true, |steps| !steps.is_empty());
        if !may() || trained() || fs::metadata(self.metrics_path()).is_ok_and(|file| file.len() > 0)
        {
            return;
        }
        let mut files = vec![
            self.config_path(),
            self.metrics_path(),
            self.collectives_path(),
            self.branch_path(),
        ];
        files.extend([self.rank_times_path(), self.samples_path(), self.matmuls_path()]);
        let inside = |directory| {
            fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
        };
        files.extend(inside(self.tensorboard_path()));
        let logs = inside(self.logs_path());
        // An evaluator's log is its own.
        files.extend(logs.filter(|log| {
            !log.file_name().is_some_and(|name| name.to_string_lossy().starts_with("evaluator"))
        }));
        // Some were never made, and a directory goes only if it is empty: files of others stay.
        for file in files {
            let _ = fs::remove_file(file);
        }
        for directory in [self.logs_path(), self.checkpoints_path(), self.tensorboard_path()] {
            let _ = fs::remove_dir(directory);
        }
        let path = self.path.clone();
        drop(self);
        let _ = fs::remove_dir(path);
    }

    /// Whether a trainer has it, or an evaluator that watches it.
    ///
    /// # Errors
    /// A lease cannot be read: its holder is not known.
    pub fn is_in_use(&self) -> Result<bool> {
        let leases = self.leases();
        Ok(leases.is_live(TRAINER)? || self.checkpoints().leases().queue_is_watched()?)
    }

    /// Looks whether this process still is the trainer here.
    ///
    /// # Errors
    /// Another one has taken over.
    pub fn check(&self) -> Result<()> {
        self.lease.as_ref().map_or(Ok(()), |lease| lease.check())
    }

    /// As [`RunDirectory::check`], and cheap enough for every step.
    ///
    /// # Errors
    /// Another one has taken over.
    pub fn check_often(&self) -> Result<()> {
        self.lease.as_ref().map_or(Ok(()), |lease| lease.check_often())
    }

    /// Whether a trainer has it, as far as its lease shows: one that has not beaten for a while
    /// does not.
    ///
    /// # Errors
    /// The lease cannot be read.
    pub fn has_trainer(&self) -> Result<bool> {
        self.leases().is_live(TRAINER)
    }

    /// Time of the last beat of a trainer's lease, by the clock of the file system; none without a
    /// lease.
    pub fn trainer_seen(&self) -> Option<SystemTime> {
        fs::metadata(self.leases().path(TRAINER)).ok()?.modified().ok()
    }

    fn leases(&self) -> Leases {
        Leases::new(self.path.join(LEASES))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The resolved configuration, with every default.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// One line a step.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// One line a gradient that a worker has given to parameter servers.
    pub fn workers_path(&self) -> PathBuf {
        self.path.join(worker_records::FILE)
    }

    /// One line a window of steps with the compute times of ranks.
    pub fn rank_times_path(&self) -> PathBuf {
        self.path.join(rank_times::FILE)
    }

    /// One line a text that the model has continued.
    pub fn samples_path(&self) -> PathBuf {
        self.path.join(text_samples::FILE)
    }

    /// Points for TensorBoard.
    pub fn tensorboard_path(&self) -> PathBuf {
        self.path.join(tensorboard::DIRECTORY)
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

    /// Measured choices of algorithms for messages between ranks.
    pub fn collectives_path(&self) -> PathBuf {
        self.path.join("collectives.json")
    }

    /// Measured choices of algorithms for matrix products.
    pub fn matmuls_path(&self) -> PathBuf {
        self.path.join("matmuls.json")
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

    /// Origin of the run, if it began at a checkpoint of another run.
    ///
    /// # Errors
    /// The file that records it cannot be read.
    pub fn branch(&self) -> Result<Option<Branch>> {
        let path = self.branch_path();
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", &path, e)),
        };
        let branch = serde_json::from_slice(&text).map_err(|e| {
            Error::damaged(format!("{} does not say where the run began: {e}", path.display()))
                .hint("start again with --resume CHECKPOINT and another --set run.name=…, or remove the file to begin at step 0")
        });
        branch.map(Some)
    }

    /// Records the origin of the run: should it be killed before it saves, its next start begins
    /// there as well.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write_branch(&self, mut branch: Branch) -> Result<()> {
        let path = self.branch_path();
        branch.from =
            std::path::absolute(&branch.from).map_err(|e| Error::io("find", &branch.from, e))?;
        let text =
            serde_json::to_string(&branch).map_err(|e| Error::internal(format!("branch: {e}")))?;
        self.write_durably(&path, &(text + "\n"))
    }

    /// Keeps choices of algorithms for matrix products, by which the run goes on after any end of
    /// this start.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write_matmuls(&self, text: &str) -> Result<()> {
        self.write_durably(&self.matmuls_path(), text)
    }

    /// Writes a file of the directory: whole or not at all, also if the machine loses power.
    fn write_durably(&self, path: &Path, text: &str) -> Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = self.path.join(format!(".{name}.tmp"));
        let write = || {
            let mut file = own_files::create(&temporary)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, path)?;
            fs::File::open(&self.path)?.sync_all()
        };
        write().map_err(|e| Error::io("write", path, e))
    }

    /// The last part of its path.
    pub fn name(&self) -> String {
        self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The marks by which trainer and evaluators tell each other that they are done.
    pub fn marks(&self) -> Markers {
        Markers::new(&self.path)
    }

    /// The checkpoints.
    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.checkpoints_path()).held_by(self.lease.clone())
    }

    /// Writes the resolved configuration.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write_config(&self, config: &Config) -> Result<()> {
        let path = self.config_path();
        let text = config.to_toml()?;
        own_files::write(&path, text).map_err(|e| Error::io("write", &path, e))
    }
}

/// Creates a directory; false if there is one.
fn create(path: &Path) -> Result<bool> {
    let refused = |e| Error::io("create", path, e).hint(HINT);
    path.parent().map_or(Ok(()), fs::create_dir_all).map_err(refused)?;
    // All others may not write there, whatever the mask.
    match DirBuilder::new().mode(0o775).create(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(refused(e)),
    }
}

/// Whether there is a file; an error if that cannot be determined.
fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|e| Error::io("look for", path, e))
}

/// The refusal of a second trainer.
fn is_trained(path: &Path, by: Option<&LeaseRecord>) -> Error {
    let who = by.map_or_else(|| "an unknown process".into(), LeaseRecord::to_string);
    Error::input(format!("{} is being trained by {who}", path.display())).hint(
        "wait for its end, or end it; or choose another --set run.name=…. One that is gone is found out: on its own node at \
         once, from another within a minute",
    )
}

/// The name of an unnamed run.
fn numbered(default: &str, number: u64) -> String {
    if number == 1 { default.to_string() } else { format!("{default}-{number}") }
}

/// The number in the name of an unnamed run.
fn number_of(name: &str, default: &str) -> Option<u64> {
    let number = match name.strip_prefix(default)? {
        "" => 1,
        rest => rest.strip_prefix('-')?.parse().ok()?,
    };
    (numbered(default, number) == name).then_some(number)
}

/// The directory of the unnamed run of a resolved configuration that can go on; none if there is
/// none.
fn resumable(root: &Path, default: &str, config: &Config) -> Result<Option<PathBuf>> {
    let unreadable = |e| Error::io("list the runs in", root, e);
    let mut numbers = Vec::new();
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(unreadable(e)),
    };
    for entry in entries {
        numbers.extend(
            entry
                .map_err(unreadable)?
                .file_name()
                .to_str()
                .and_then(|name| number_of(name, default)),
        );
    }
    numbers.sort_unstable();
    let mut matching = Vec::new();
    let mut others = Vec::new();
    for number in numbers {
        let run = RunDirectory::at(root.join(numbered(default, number)));
        if !run.can_be_resumed()? {
            continue;
        }
        match run.differs_from(config)? {
            None => matching.push(run),
            Some(why) => others.push(format!("{} is another: {why}", run.name())),
        }
    }
    match &matching[..] {
        [] if others.is_empty() => Ok(None),
        [] => {
            log::warn!(
                "--resume auto finds no run of this configuration and begins one; {}",
                others.join("; ")
            );
            Ok(None)
        }
        [run] => Ok(Some(run.path.clone())),
        [.., newest] => {
            let at = |run: &RunDirectory| {
                let step = run.checkpoints().steps()?.last().copied().unwrap_or(0);
                Ok(format!("{} at step {step}", run.path.display()))
            };
            let list = matching.iter().map(at).collect::<Result<Vec<_>>>()?;
            Err(Error::input(format!(
                "--resume auto could go on with any of {} runs: {}",
                list.len(),
                list.join(", ")
            ))
            .hint(format!("choose one by its name, such as --set run.name={}", newest.name())))
        }
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

    fn prepare(config: &Config, resume: &Resume) -> Result<RunDirectory> {
        RunDirectory::prepare(config, "x", resume)
    }

    /// Leaves the files of a run that has saved a step.
    fn save(directory: &RunDirectory, config: &Config, step: u64) {
        directory.write_config(config).unwrap();
        fs::create_dir_all(directory.checkpoints().path(step)).unwrap();
    }

    fn names(root: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn unnamed_runs_are_numbered() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), None);
        for name in ["x", "x-2", "x-3"] {
            let directory = prepare(&config, &Resume::No).unwrap();
            assert_eq!(directory.path(), root.path().join(name));
            directory.write_config(&config).unwrap();
        }
        // One that was killed as it began is free again.
        fs::remove_file(root.path().join("x-2/config.toml")).unwrap();
        assert_eq!(prepare(&config, &Resume::No).unwrap().name(), "x-2");
    }

    #[test]
    fn runs_that_start_together_get_names_of_their_own() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), None);
        for resume in [Resume::No, Resume::Auto] {
            let all: Vec<RunDirectory> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    (0..8).map(|_| scope.spawn(|| prepare(&config, &resume).unwrap())).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let mut paths: Vec<&Path> = all.iter().map(RunDirectory::path).collect();
            paths.sort();
            paths.dedup();
            assert_eq!(paths.len(), 8, "{resume:?}");
        }
    }

    #[test]
    fn an_unnamed_run_resumes_the_one_that_matches() {
        let root = tempfile::tempdir().unwrap();
        let mine = config(root.path(), None);
        let start = |config: &Config, resume: &Resume| prepare(config, resume).unwrap();
        // Nothing is there; then a run that failed before it saved anything.
        let first = start(&mine, &Resume::Auto);
        first.write_config(&mine).unwrap();
        assert_eq!(first.name(), "x");
        drop(first);
        assert_eq!(start(&mine, &Resume::Auto).name(), "x-2");
        // One that has saved; a newer one of another configuration; a newer one that has saved
        // nothing.
        save(&start(&mine, &Resume::No), &mine, 3);
        let mut other = mine.clone();
        other.optimizer.lr = 0.5;
        save(&start(&other, &Resume::No), &other, 5);
        start(&mine, &Resume::No).write_config(&mine).unwrap();
        assert_eq!(names(root.path()), ["x", "x-2", "x-3", "x-4"]);
        assert_eq!(start(&mine, &Resume::Auto).name(), "x-2");
        assert_eq!(start(&other, &Resume::Auto).name(), "x-3");
        let longer = Config {
            run: hpctrain_config::Run { steps: 9999, ..mine.run.clone() },
            ..mine.clone()
        };
        assert_eq!(start(&longer, &Resume::Auto).name(), "x-2");
        // Somebody trains it.
        let held = start(&mine, &Resume::Auto);
        let error = prepare(&mine, &Resume::Auto).unwrap_err().to_string();
        assert!(error.contains("x-2 is being trained by process"), "{error}");
        drop(held);
        // Of a third configuration there is none.
        let mut third = mine.clone();
        third.model.dropout = 0.25;
        assert_eq!(start(&third, &Resume::Auto).name(), "x-5");
        // Several: which one?
        save(&start(&mine, &Resume::No), &mine, 7);
        let error = prepare(&mine, &Resume::Auto).unwrap_err().to_string();
        assert!(error.contains("any of 2 runs: ") && error.contains("x-2 at step 3, "), "{error}");
        assert!(
            error.contains("x-5 at step 7\nhint: ") && error.contains("run.name=x-5"),
            "{error}"
        );
        // An unreadable configuration is not an absent one.
        fs::remove_file(root.path().join("x-2/config.toml")).unwrap();
        fs::create_dir(root.path().join("x-2/config.toml")).unwrap();
        assert!(prepare(&mine, &Resume::Auto).unwrap_err().to_string().contains("x-2/config.toml"));
        assert_eq!(number_of("x-02", "x").or(number_of("x-1", "x")).or(number_of("xy", "x")), None);
    }

    #[test]
    fn a_named_run_is_not_overwritten() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), Some("mine"));
        // A job that a scheduler starts again may not have begun yet.
        prepare(&config, &Resume::Auto).unwrap().write_config(&config).unwrap();
        let error = prepare(&config, &Resume::No).unwrap_err().to_string();
        assert!(
            error.contains("mine holds another run") && error.contains("--resume auto"),
            "{error}"
        );
        // Checkpoints alone are a run as well.
        fs::remove_file(root.path().join("mine/config.toml")).unwrap();
        fs::create_dir_all(root.path().join("mine/checkpoints/step-00000003")).unwrap();
        assert!(
            prepare(&config, &Resume::No).unwrap_err().to_string().contains("holds another run")
        );
    }

    #[test]
    fn a_run_has_one_trainer() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), Some("mine"));
        let first = prepare(&config, &Resume::Auto).unwrap();
        let staging = first.checkpoints().staging(3, "first");
        fs::create_dir(&staging).unwrap();
        for resume in [Resume::No, Resume::Auto, Resume::From("elsewhere".into())] {
            let error = prepare(&config, &resume).unwrap_err();
            assert!(
                error.message().contains(&format!(
                    "mine is being trained by process {} on ",
                    std::process::id()
                ))
            );
            assert!(error.message().contains(", since ") && error.advice().is_some());
            assert_eq!(error.exit_code(), 2);
        }
        // Nothing of the first one's was touched.
        assert!(staging.exists());
        let copy = first.clone();
        drop(first);
        assert!(prepare(&config, &Resume::Auto).is_err());
        drop(copy);
        prepare(&config, &Resume::Auto).unwrap();
        assert!(!staging.exists());
    }

    #[test]
    fn a_failed_start_leaves_no_empty_directory() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), Some("mine"));
        let path = root.path().join("mine");
        let start = || {
            let directory = prepare(&config, &Resume::Auto).unwrap();
            directory.write_config(&config).unwrap();
            fs::write(directory.log_path(0), "what went wrong").unwrap();
            fs::write(directory.metrics_path(), "").unwrap();
            directory.write_matmuls("{}").unwrap();
            directory
        };
        start().abandon();
        assert!(!path.exists());
        // Files of others stay; so do a run that has trained, and files of before.
        let directory = start();
        fs::write(directory.logs_path().join("evaluator-00000.log"), "mine").unwrap();
        directory.abandon();
        assert!(
            path.join("logs/evaluator-00000.log").exists() && !path.join("config.toml").exists()
        );
        start().abandon();
        assert!(path.join("config.toml").exists());
        fs::remove_dir_all(&path).unwrap();
        let directory = start();
        fs::write(directory.metrics_path(), "{}").unwrap();
        directory.abandon();
        assert!(path.join("config.toml").exists());
    }

    #[test]
    fn where_a_run_began_is_known_or_an_error() {
        let root = tempfile::tempdir().unwrap();
        let directory = RunDirectory::at(root.path());
        assert_eq!(directory.branch().unwrap(), None);
        let branch = Branch {
            from: "/elsewhere/step-00000003".into(),
            take: crate::run_dir::RestoreScope::Weights,
        };
        directory.write_branch(branch.clone()).unwrap();
        assert_eq!(directory.branch().unwrap(), Some(branch));
        assert_eq!(names(root.path()), ["branch.json"]);
        // As a machine that lost power may leave it.
        fs::write(directory.branch_path(), "").unwrap();
        let error = directory.branch().unwrap_err().to_string();
        assert!(
            error.contains("branch.json does not say where the run began")
                && error.contains("hint: "),
            "{error}"
        );
        fs::remove_file(directory.branch_path()).unwrap();
        fs::create_dir(directory.branch_path()).unwrap();
        assert!(directory.branch().is_err());
    }
}
