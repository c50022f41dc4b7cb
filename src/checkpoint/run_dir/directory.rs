//! The directory of a run: its choice, its ownership, and its files.
//!
//! `RunDirectory::prepare` claims the directory before anything in it is changed. The trainer's
//! lease is an `Arc` shared by the `RunDirectory` and the `Checkpoints` it returns, which check it
//! before every rename; dropping the last of them releases it, and a run drops its directory last.
//! At each step the trainer checks in memory whether the lease was lost or the process was
//! suspended, and reads the file only in the second case.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

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
    evaluations, rank_times, starts, tensorboard, text_samples, worker_records,
};

/// A run's directory.
#[derive(Debug, Clone)]
pub struct RunDirectory {
    path: PathBuf,
    /// The trainer's lease, on its rank 0. Released when the last user that changes the directory
    /// is dropped.
    lease: Option<Arc<LeaseGuard>>,
    /// Whether this start has created the directory.
    is_new: bool,
    /// How the previous trainer ended, in case this start fails.
    ended: Option<End>,
}

/// Where a run starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// At step 0.
    No,
    /// At the newest intact checkpoint of its own directory, or at step 0 if there are none.
    Auto,
    /// At this checkpoint.
    From(PathBuf),
}

/// Name of the directories of leases in a run's directory and in its `checkpoints` directory.
const LEASES: &str = ".leases";

/// Name of the trainer's lease.
const TRAINER: &str = "trainer";

/// The hint if run directories cannot be created.
const HINT: &str = "choose a directory that can be written with --set run.root=…";

/// The id by which in-memory checkpoints know their run, and the directories that they are in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryNote {
    /// The id.
    pub id: String,
    /// The directories on each node, those of the newest start first.
    pub directories: Vec<String>,
}

impl RunDirectory {
    /// Creates a handle to the directory at `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), lease: None, is_new: false, ended: None }
    }

    /// Chooses, claims and creates the directory of a run. A run without `config.run.name` is
    /// called `default` with the next free number or, with `Resume::Auto`, continues the directory
    /// of the resumable run of this configuration. From then on this process is the only trainer
    /// there, until the last copy of the result is dropped. Called on one rank.
    ///
    /// # Errors
    /// Returns an error if another trainer holds the directory, it contains another run, several
    /// runs could be resumed, or the file system fails.
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
        // If this fails, no empty directory is left behind.
        match directory.begin(resume) {
            Ok(ended) => Ok(Self { ended, ..directory }),
            Err(e) => {
                directory.abandon();
                Err(e)
            }
        }
    }

    /// Claims the directory at `path`, which need not exist, or returns the holder. With `waits`,
    /// it waits until it is known whether the holder lives. An existing directory must be owned by
    /// this user or by `group`.
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
            Ok(Claimed::HeldBy(other)) => Ok(Err((directory.path, other))),
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
            // A missing one will be created; a dangling link is refused then.
            if path.try_exists().map_err(|e| Error::io("look for", path, e))? {
                own_files::check_directory(path, group)?;
            }
        }
        Ok(())
    }

    /// Claims the first free name of `default`, `default-2`, ….
    fn numbered(root: &Path, default: &str, group: Option<u32>) -> Result<Self> {
        for number in 1.. {
            let path = root.join(numbered(default, number));
            // Most are found taken without changing anything in them.
            if Self::at(&path).holds_a_run()? {
                continue;
            }
            if let Ok(directory) = Self::claim(path, group, false)? {
                // Another trainer may have begun and ended in the meantime.
                if !directory.holds_a_run()? {
                    return Ok(directory);
                }
            }
        }
        Err(Error::internal("no number is free"))
    }

    /// Prepares the claimed directory for a trainer. Returns how the previous one ended.
    fn begin(&self, resume: &Resume) -> Result<Option<End>> {
        if *resume != Resume::Auto && self.holds_a_run()? {
            return Err(Error::input(format!("{} holds another run", self.path.display()))
                .hint("continue it with --resume auto, or choose another --set run.name=…"));
        }
        let logs = self.logs_path();
        own_files::create_directory(&logs).map_err(|e| Error::io("create", &logs, e).hint(HINT))?;
        self.checkpoints().prepare()?;
        let ended = self.markers().begin()?;
        supervisor_hint::write(&self.path);
        Ok(ended)
    }

    /// Returns how the trainer before this one ended, if it had ended.
    pub fn ended_before(&self) -> Option<&End> {
        self.ended.as_ref()
    }

    /// Returns true if a run has begun here.
    fn holds_a_run(&self) -> Result<bool> {
        Ok(exists(&self.config_path())? || !self.checkpoints().steps()?.is_empty())
    }

    /// Returns true if a run can be resumed here: it has saved, may have in-memory checkpoints, or
    /// records where it begins.
    fn can_be_resumed(&self) -> Result<bool> {
        Ok(!self.checkpoints().steps()?.is_empty()
            || self.takes_memory_checkpoints()?
            || exists(&self.branch_path())?)
    }

    /// Returns the first difference of the run here from a resolved configuration; `None` if it is
    /// the same run.
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
            Ok(before) => config_diff::run_conflicts(&before, config).into_iter().next(),
            Err(e) => Some(format!("its config.toml is of another version: {}", e.message())),
        })
    }

    /// Releases the claim after a start that failed before its first step, and restores the
    /// previous END marker. Removes the files of this start if there are no others.
    pub fn abandon(self) {
        // Another trainer may have taken the run over.
        if let Some(end) = self.ended.as_ref().filter(|_| self.check().is_ok()) {
            // The error of the start matters more than one of this.
            let _ = self.markers().end(end);
        }
        if !self.is_new || self.check().is_err() {
            return;
        }
        let is_trained = self.checkpoints().steps().map_or(true, |steps| !steps.is_empty());
        if is_trained || fs::metadata(self.metrics_path()).is_ok_and(|file| file.len() > 0) {
            return;
        }
        let mut files = vec![
            self.config_path(),
            self.metrics_path(),
            self.collectives_path(),
            self.branch_path(),
            self.memory_id_path(),
        ];
        files.extend([self.rank_times_path(), self.samples_path(), self.matmuls_path()]);
        files.push(self.starts_path());
        let inside = |directory| {
            fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
        };
        files.extend(inside(self.tensorboard_path()));
        let logs = inside(self.logs_path());
        // Logs of evaluators are kept.
        files.extend(logs.filter(|log| {
            !log.file_name().is_some_and(|name| name.to_string_lossy().starts_with("evaluator"))
        }));
        // Some do not exist, and directories are removed only if empty: other files stay.
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

    /// Returns true if a trainer, or a process that takes every checkpoint, holds the run.
    ///
    /// # Errors
    /// Returns an error if a lease cannot be read: its holder is then unknown.
    pub fn is_in_use(&self) -> Result<bool> {
        let leases = self.leases();
        let of_checkpoints = self.checkpoints().leases();
        Ok(leases.is_live(TRAINER)?
            || of_checkpoints.queue_is_watched()?
            || of_checkpoints.watched_after()?.is_some())
    }

    /// Returns true if the directory exists and holds nothing, except leases that a trainer may be
    /// about to claim.
    pub fn holds_only_leases(&self) -> bool {
        fs::read_dir(&self.path)
            .is_ok_and(|entries| entries.flatten().all(|entry| entry.file_name() == LEASES))
    }

    /// Checks that this process is still the trainer here.
    ///
    /// # Errors
    /// Returns an error if another trainer has taken over, or the lease cannot be read.
    pub fn check(&self) -> Result<()> {
        self.lease.as_ref().map_or(Ok(()), |lease| lease.check())
    }

    /// Like [`RunDirectory::check`], but cheap enough for every step.
    ///
    /// # Errors
    /// Returns an error if another trainer has taken over.
    pub fn check_often(&self) -> Result<()> {
        self.lease.as_ref().map_or(Ok(()), |lease| lease.check_often())
    }

    /// Returns true if a trainer holds the run according to its lease. One without recent
    /// heartbeats does not count.
    ///
    /// # Errors
    /// Returns an error if the lease cannot be read.
    pub fn has_trainer(&self) -> Result<bool> {
        self.leases().is_live(TRAINER)
    }

    /// Returns the time of the trainer's last heartbeat, by the clock of the file system; `None` if
    /// there is no lease.
    pub fn last_heartbeat(&self) -> Option<SystemTime> {
        fs::metadata(self.leases().path(TRAINER)).ok()?.modified().ok()
    }

    fn leases(&self) -> Leases {
        Leases::new(self.path.join(LEASES))
    }

    /// Returns the path of the run's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the resolved configuration, which has every default.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// Returns the path of the file with one line per step.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// Returns the path of the file with one line per gradient that a worker pushed to parameter
    /// servers.
    pub fn workers_path(&self) -> PathBuf {
        self.path.join(worker_records::FILE)
    }

    /// Returns the path of the file with the compute times of the ranks, one line per window of
    /// steps.
    pub fn rank_times_path(&self) -> PathBuf {
        self.path.join(rank_times::FILE)
    }

    /// Returns the path of the file with one line per start.
    pub fn starts_path(&self) -> PathBuf {
        self.path.join(starts::FILE)
    }

    /// Returns the path of the file with one line per generated sample.
    pub fn samples_path(&self) -> PathBuf {
        self.path.join(text_samples::FILE)
    }

    /// Returns the directory of the TensorBoard events.
    pub fn tensorboard_path(&self) -> PathBuf {
        self.path.join(tensorboard::DIRECTORY)
    }

    /// Returns the path of the directory with the events of evaluators.
    pub fn evaluator_tensorboard_path(&self) -> PathBuf {
        self.tensorboard_path().join(tensorboard::EVALUATOR_DIRECTORY)
    }

    /// Returns the path of the file with one line per evaluation.
    pub fn evaluations_path(&self) -> PathBuf {
        self.path.join(evaluations::FILE)
    }

    /// Returns the path of the run summary.
    pub fn summary_path(&self) -> PathBuf {
        self.path.join("run.json")
    }

    /// Returns the path of the kernel profile, which exists if profiling was enabled.
    pub fn profile_path(&self) -> PathBuf {
        self.path.join("profile.json")
    }

    /// Returns the path of the measured choices of collective algorithms.
    pub fn collectives_path(&self) -> PathBuf {
        self.path.join("collectives.json")
    }

    /// Returns the path of the measured choices of matmul algorithms.
    pub fn matmuls_path(&self) -> PathBuf {
        self.path.join("matmuls.json")
    }

    /// Returns the path of the log of a rank.
    pub fn log_path(&self, rank: usize) -> PathBuf {
        self.logs_path().join(format!("rank-{rank:05}.log"))
    }

    /// Returns the directory of logs, heartbeats, and the flight recorders of a job that hung.
    pub fn logs_path(&self) -> PathBuf {
        self.path.join("logs")
    }

    fn checkpoints_path(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    fn branch_path(&self) -> PathBuf {
        self.path.join("branch.json")
    }

    /// Returns the origin of the run, if it began at a checkpoint of another run.
    ///
    /// # Errors
    /// Returns an error if `branch.json` cannot be read.
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

    /// Records the origin of the run, so that its next start begins there, too, if it is killed
    /// before it saves.
    ///
    /// # Errors
    /// Returns an error if `branch.json` cannot be written.
    pub fn write_branch(&self, mut branch: Branch) -> Result<()> {
        let path = self.branch_path();
        branch.from =
            std::path::absolute(&branch.from).map_err(|e| Error::io("find", &branch.from, e))?;
        let text =
            serde_json::to_string(&branch).map_err(|e| Error::internal(format!("branch: {e}")))?;
        self.write_durably(&path, &(text + "\n"))
    }

    /// Returns the id and the directories of the run's in-memory checkpoints, if it takes some.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn memory_note(&self) -> Result<Option<MemoryNote>> {
        let path = self.memory_id_path();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", &path, e)),
        };
        let mut lines = text.lines().map(String::from);
        let id = lines.next().filter(|id| !id.is_empty());
        Ok(id.map(|id| MemoryNote { id, directories: lines.collect() }))
    }

    /// Notes that the run takes in-memory checkpoints in `directories`. Without a note, or if
    /// `is_fresh`, its id becomes `fresh`; otherwise the directories so far stay noted, too.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or written.
    pub fn note_memory(
        &self,
        is_fresh: bool,
        fresh: &str,
        directories: &[&str],
    ) -> Result<MemoryNote> {
        let before = self.memory_note()?.filter(|_| !is_fresh);
        let mut note =
            before.unwrap_or_else(|| MemoryNote { id: fresh.to_string(), directories: vec![] });
        let mut all: Vec<String> = directories.iter().map(ToString::to_string).collect();
        all.extend(note.directories.drain(..).filter(|one| !directories.contains(&&one[..])));
        note.directories = all;
        self.write_memory_note(&note)?;
        Ok(note)
    }

    /// Removes all directories but `directories` from the note.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or written.
    pub fn note_memory_only(&self, directories: &[&str]) -> Result<()> {
        let Some(mut note) = self.memory_note()? else { return Ok(()) };
        let before = note.directories.len();
        note.directories.retain(|one| directories.contains(&&one[..]));
        if note.directories.len() == before { Ok(()) } else { self.write_memory_note(&note) }
    }

    fn write_memory_note(&self, note: &MemoryNote) -> Result<()> {
        let lines = std::iter::once(&note.id).chain(&note.directories);
        let text: String = lines.flat_map(|line| [&line[..], "\n"]).collect();
        self.write_durably(&self.memory_id_path(), &text)
    }

    /// Returns true if the run takes in-memory checkpoints.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn takes_memory_checkpoints(&self) -> Result<bool> {
        exists(&self.memory_id_path())
    }

    /// Notes that the run takes no in-memory checkpoints.
    ///
    /// # Errors
    /// Returns an error if the file of their id cannot be removed.
    pub fn without_memory_checkpoints(&self) -> Result<()> {
        let path = self.memory_id_path();
        match fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io("remove", &path, e)),
            _ => Ok(()),
        }
    }

    fn memory_id_path(&self) -> PathBuf {
        self.path.join("memory_checkpoint.id")
    }

    /// Saves the choices of matmul algorithms, which the run uses again when it is resumed.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write_matmuls(&self, text: &str) -> Result<()> {
        self.write_durably(&self.matmuls_path(), text)
    }

    /// Writes a file of the directory atomically and durably.
    fn write_durably(&self, path: &Path, text: &str) -> Result<()> {
        self.replace(path, text).map_err(|e| Error::io("write", path, e))
    }

    /// Writes a temporary file, renames it to `path`, and syncs both it and the directory.
    fn replace(&self, path: &Path, text: &str) -> io::Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = self.path.join(format!(".{name}.tmp"));
        let mut file = own_files::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        fs::File::open(&self.path)?.sync_all()
    }

    /// Returns the last component of its path.
    pub fn name(&self) -> String {
        self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Returns the markers by which trainer and evaluators signal each other that they are done.
    pub fn markers(&self) -> Markers {
        Markers::new(&self.path)
    }

    /// Returns the checkpoints of the run.
    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.checkpoints_path()).with_lease(self.lease.clone())
    }

    /// Writes the resolved configuration.
    ///
    /// # Errors
    /// Returns an error if `config.toml` cannot be written.
    pub fn write_config(&self, config: &Config) -> Result<()> {
        let path = self.config_path();
        let text = config.to_toml()?;
        own_files::write(&path, text).map_err(|e| Error::io("write", &path, e))
    }
}

/// Creates a directory; returns false if it exists.
fn create(path: &Path) -> Result<bool> {
    let refused = |e| Error::io("create", path, e).hint(HINT);
    path.parent().map_or(Ok(()), fs::create_dir_all).map_err(refused)?;
    // Not writable by others, whatever the umask.
    match DirBuilder::new().mode(0o775).create(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(refused(e)),
    }
}

/// Returns true if a file exists; an error if that cannot be determined.
fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|e| Error::io("look for", path, e))
}

/// Returns the error for a second trainer.
fn is_trained(path: &Path, by: Option<&LeaseRecord>) -> Error {
    let who = by.map_or_else(|| "an unknown process".into(), LeaseRecord::to_string);
    Error::input(format!("{} is being trained by {who}", path.display())).hint(
        "wait until it ends, or stop it; or choose another --set run.name=…. A trainer that is gone is detected at once on its own node, \
         and after a timeout from other nodes",
    )
}

/// Returns the name of an unnamed run.
fn numbered(default: &str, number: u64) -> String {
    if number == 1 { default.to_string() } else { format!("{default}-{number}") }
}

/// Returns the number in the name of an unnamed run.
fn number_of(name: &str, default: &str) -> Option<u64> {
    let number = match name.strip_prefix(default)? {
        "" => 1,
        rest => rest.strip_prefix('-')?.parse().ok()?,
    };
    (numbered(default, number) == name).then_some(number)
}

/// Returns the directory of the unnamed run of a resolved configuration that can be resumed, if
/// there is one.
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
            Some(why) => others.push(format!("{} differs: {why}", run.name())),
        }
    }
    match &matching[..] {
        [] if others.is_empty() => Ok(None),
        [] => {
            log::warn!(
                "--resume auto found no run of this configuration and starts a new one; {}",
                others.join("; ")
            );
            Ok(None)
        }
        [run] => Ok(Some(run.path.clone())),
        [.., newest] => {
            let list = matching.iter().map(|run| {
                let step = run.checkpoints().steps()?.last().copied().unwrap_or(0);
                Ok(format!("{} at step {step}", run.path.display()))
            });
            let list = list.collect::<Result<Vec<_>>>()?;
            Err(Error::input(format!(
                "--resume auto could resume any of {} runs: {}",
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

    /// Writes the files of a run that has saved a step.
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
        // A name whose run was killed as it began is free again.
        fs::remove_file(root.path().join("x-2/config.toml")).unwrap();
        assert_eq!(prepare(&config, &Resume::No).unwrap().name(), "x-2");
    }

    #[test]
    fn runs_that_start_together_get_separate_names() {
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
        // The root is empty; then it has a run that failed before its first save.
        let first = start(&mine, &Resume::Auto);
        first.write_config(&mine).unwrap();
        assert_eq!(first.name(), "x");
        drop(first);
        assert_eq!(start(&mine, &Resume::Auto).name(), "x-2");
        // One that has saved; a newer one of another configuration; a newer one that has not saved.
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
        // A process trains it.
        let held = start(&mine, &Resume::Auto);
        let error = prepare(&mine, &Resume::Auto).unwrap_err().to_string();
        assert!(error.contains("x-2 is being trained by process"), "{error}");
        drop(held);
        // A third configuration has no run.
        let mut third = mine.clone();
        third.model.dropout = 0.25;
        assert_eq!(start(&third, &Resume::Auto).name(), "x-5");
        // Several runs match.
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
        // A job that a scheduler restarts may not have begun yet.
        prepare(&config, &Resume::Auto).unwrap().write_config(&config).unwrap();
        let error = prepare(&config, &Resume::No).unwrap_err().to_string();
        assert!(
            error.contains("mine holds another run") && error.contains("--resume auto"),
            "{error}"
        );
        // Checkpoints without a configuration are a run as well.
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
        // The files of the first one are unchanged.
        assert!(staging.exists());
        let copy = first.clone();
        drop(first);
        assert!(prepare(&config, &Resume::Auto).is_err());
        drop(copy);
        prepare(&config, &Resume::Auto).unwrap();
        assert!(!staging.exists());
    }

    /// Prepares a run's directory and writes the files that precede its first step.
    fn start(config: &Config) -> RunDirectory {
        let directory = prepare(config, &Resume::Auto).unwrap();
        directory.write_config(config).unwrap();
        fs::write(directory.log_path(0), "what went wrong").unwrap();
        fs::write(directory.metrics_path(), "").unwrap();
        directory.write_matmuls("{}").unwrap();
        directory
    }

    #[test]
    fn a_failed_start_leaves_no_empty_directory() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), Some("mine"));
        let path = root.path().join("mine");
        start(&config).abandon();
        assert!(!path.exists());
        // Other files stay; so do a run that has trained, and files of before.
        let directory = start(&config);
        fs::write(directory.logs_path().join("evaluator-00000.log"), "mine").unwrap();
        directory.abandon();
        assert!(
            path.join("logs/evaluator-00000.log").exists() && !path.join("config.toml").exists()
        );
        start(&config).abandon();
        assert!(path.join("config.toml").exists());
        fs::remove_dir_all(&path).unwrap();
        let directory = start(&config);
        fs::write(directory.metrics_path(), "{}").unwrap();
        directory.abandon();
        assert!(path.join("config.toml").exists());
    }

    #[test]
    fn in_memory_checkpoints_know_their_run() {
        let root = tempfile::tempdir().unwrap();
        let directory = RunDirectory::at(root.path());
        assert!(!directory.can_be_resumed().unwrap());
        let id = |is_fresh, fresh| directory.note_memory(is_fresh, fresh, &[]).unwrap().id;
        assert_eq!(id(false, "a"), "a");
        assert!(directory.can_be_resumed().unwrap());
        // A resumed run keeps its id, another run in the same place has another one.
        assert_eq!(id(false, "b"), "a");
        assert_eq!(id(true, "c"), "c");
        assert_eq!(id(false, "d"), "c");
        // A power loss may leave an empty file.
        fs::write(directory.memory_id_path(), "").unwrap();
        assert_eq!(id(false, "e"), "e");
        // Directories of earlier starts stay noted.
        let noted = |is_fresh, all: &[&str]| {
            let note = directory.note_memory(is_fresh, "f", all).unwrap();
            assert_eq!(directory.memory_note().unwrap(), Some(note.clone()));
            note.directories
        };
        assert_eq!(noted(false, &["/shm"]), ["/shm"]);
        assert_eq!(noted(false, &["/other", "/disk"]), ["/other", "/disk", "/shm"]);
        assert_eq!(noted(false, &["/shm"]), ["/shm", "/other", "/disk"]);
        directory.note_memory_only(&["/shm", "/none"]).unwrap();
        assert_eq!(directory.memory_note().unwrap().unwrap().directories, ["/shm"]);
        assert_eq!(noted(true, &["/shm"]), ["/shm"]);
        fs::remove_file(directory.memory_id_path()).unwrap();
        assert_eq!(directory.memory_note().unwrap(), None);
        fs::create_dir(directory.memory_id_path()).unwrap();
        assert!(directory.note_memory(false, "f", &[]).is_err());
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
        // A power loss may leave such a file.
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
