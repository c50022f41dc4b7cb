//! The `checkpoints/` directory of a run: names, publishing, removal.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::filesystem;
use super::lease::{LeaseGuard, Leases};
use super::names::{name_of, step_of};
use super::pointer::{Pointer, Target};
use super::retention::{Candidate, Retention, steps_to_remove};
use super::{Manifest, Reader, manifest, refused, suspect};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::own_files;
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::{Evaluation, Evaluations, Save};

/// The checkpoints of one run.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    root: PathBuf,
    /// The trainer's lease: without it nothing may be changed.
    lease: Option<Arc<LeaseGuard>>,
}

/// The processes that wait for checkpoints.
#[derive(Debug, Clone, Copy)]
struct Waits {
    /// Whether a process evaluates every checkpoint.
    evaluation: bool,
    /// The step after which an iterator takes every checkpoint.
    after: Option<u64>,
}

impl Checkpoints {
    /// Creates a handle to the checkpoints under `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), lease: None }
    }

    /// Allows changes only while `lease` is held.
    #[must_use]
    pub fn with_lease(self, lease: Option<Arc<LeaseGuard>>) -> Self {
        Self { lease, ..self }
    }

    /// Checks that the lease is still held. Called before every rename.
    pub(super) fn check_lease(&self) -> Result<()> {
        self.lease.as_ref().map_or(Ok(()), |lease| lease.check())
    }

    /// Returns the directory of the checkpoints.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the steps of the published checkpoints, ascending; empty if the directory does not
    /// exist.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let unreadable = |e| Error::io("list the checkpoints in", &self.root, e);
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(unreadable(e)),
        };
        let mut steps = Vec::new();
        for entry in entries {
            steps.extend(entry.map_err(unreadable)?.file_name().to_str().and_then(step_of));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Returns the path of the published checkpoint of a step.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(name_of(step))
    }

    /// Returns the directory in which a job writes the checkpoint of a step.
    pub fn staging(&self, step: u64, job: &str) -> PathBuf {
        self.root.join(format!("{}.tmp-{job}", name_of(step)))
    }

    /// Returns the path of the link to the newest published checkpoint.
    pub fn latest(&self) -> PathBuf {
        self.root.join("latest")
    }

    /// Returns the last saved step, as `latest` names it; `None` if it does not name a checkpoint.
    ///
    /// # Errors
    /// Returns an error if `latest` cannot be read.
    pub fn latest_step(&self) -> Result<Option<u64>> {
        Pointer::at(self.latest()).step()
    }

    /// Returns the step of the checkpoint that readers of the run use: the one that `latest` names,
    /// or the newest intact one if that does not exist. `None` if there are no checkpoints.
    ///
    /// # Errors
    /// Returns an error if the directory or `latest` cannot be read.
    pub fn current_step(&self) -> Result<Option<u64>> {
        let steps = self.steps()?;
        let latest = Pointer::at(self.latest());
        let target = latest.target()?;
        if target == Target::Directory && !steps.is_empty() {
            let path = latest.path().display();
            log::warn!(
                "{path} is a directory, not a link, and may be old: using the newest intact checkpoint"
            );
        }
        if let Target::Step(step) = target
            && steps.contains(&step)
        {
            return Ok(Some(step));
        }
        Ok(steps
            .iter()
            .rev()
            .find(|step| self.read_intact(**step).is_ok())
            .or(steps.last())
            .copied())
    }

    /// Returns the path of the link to the checkpoint with the lowest validation loss.
    pub fn best(&self) -> PathBuf {
        self.root.join("best")
    }

    /// Returns the step that `best` names; `None` if it does not name a checkpoint.
    ///
    /// # Errors
    /// Returns an error if `best` cannot be read.
    pub fn best_step(&self) -> Result<Option<u64>> {
        Pointer::at(self.best()).step()
    }

    /// Returns the leases on the checkpoints.
    pub fn leases(&self) -> Leases {
        Leases::new(self.root.join(".leases"))
    }

    /// Reads the evaluations of the run from its `eval.jsonl`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn evaluated(&self) -> Result<Evaluations> {
        self.root.parent().map_or_else(
            || Ok(Evaluations::default()),
            |run| evaluations::read(&run.join(evaluations::FILE)),
        )
    }

    /// Returns the published save of a step, identified by its manifest.
    pub fn save(&self, step: u64) -> Save {
        match Manifest::read(&self.path(step)) {
            Ok(manifest) => Save::Named(manifest.id),
            Err(e) if e.kind() == Kind::Damaged => Save::Gone,
            // Another version of the program may be able to read it, or this one later.
            Err(e) => {
                log::warn!("{}", one_line(&e));
                Save::Unknown
            }
        }
    }

    /// Returns the step of the last save. It is not the highest if the run has skipped newer
    /// checkpoints; the link may dangle if a user has removed checkpoints.
    ///
    /// # Errors
    /// Returns an error if the directory or `latest` cannot be read.
    pub fn last_step(&self) -> Result<Option<u64>> {
        let steps = self.steps()?;
        Ok(self.latest_step()?.filter(|latest| steps.contains(latest)).or(steps.last().copied()))
    }

    /// Creates the directory, restores checkpoints that an earlier job had renamed in order to
    /// replace them, and removes directories that earlier jobs left incomplete. The caller must be
    /// the only writer.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created or read, the file system lacks an
    /// operation that checkpoints need, another trainer has taken over the run, or `latest` or
    /// `best` is a directory that is not a copy of a checkpoint.
    pub fn prepare(&self) -> Result<()> {
        self.root
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| own_files::create_directory(&self.root))
            .map_err(|e| {
                Error::io("create", &self.root, e)
                    .hint("choose a directory that can be written with --set run.root=…")
            })?;
        filesystem::check(&self.root)?;
        self.check_lease()?;
        let entries = fs::read_dir(&self.root).map_err(|e| Error::io("list", &self.root, e))?;
        for entry in entries {
            let path = entry.map_err(|e| Error::io("list", &self.root, e))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let staging = name.split_once(".tmp").is_some_and(|(step, _)| step_of(step).is_some());
            let gone = if let Some(step) = name.strip_prefix(TRASH).and_then(step_of) {
                self.bring_back(step, &path)
            } else if staging {
                self.discard(&path)
            } else if name.starts_with(TRASH) {
                self.sweep_one(&path).map(drop)
            } else if path.is_dir() && name.ends_with(".tmp") {
                remove(&path)
            } else if name.starts_with('.') && name.ends_with(".tmp") {
                fs::remove_file(&path).map_err(|e| refused("remove", &path, e))
            } else {
                Ok(())
            };
            // Files that are left there only take space.
            gone.unwrap_or_else(|e| log::warn!("{}", one_line(&e)));
        }
        self.remove_unused_marks();
        [self.latest(), self.best()]
            .into_iter()
            .try_for_each(|path| self.free_name(&Pointer::at(path)))
    }

    /// Removes a directory in place of a link if it is a copy of an existing checkpoint: a tool
    /// that follows links has copied the run.
    ///
    /// # Errors
    /// Returns an error ([`Kind::Input`]) if the directory is not such a copy.
    fn free_name(&self, pointer: &Pointer) -> Result<()> {
        let path = pointer.path();
        if !path.is_dir() || path.is_symlink() {
            return Ok(());
        }
        let copied = Manifest::read(path).map_err(|_| pointer.taken())?;
        let is_there =
            whole(&self.path(copied.step)).is_ok_and(|original| original.id == copied.id);
        if !is_there {
            return Err(pointer.taken());
        }
        let path = path.display();
        let name = name_of(copied.step);
        log::warn!(
            "{path}: removed the directory, a copy of {name}, where a link belongs: a tool that follows links has copied the run"
        );
        self.discard(pointer.path())
    }

    /// Restores a checkpoint that was renamed away, if its place is free and it is intact: the job
    /// was killed between two renames. Removes it otherwise, unless it is unknown whether it is
    /// intact.
    fn bring_back(&self, step: u64, trash: &Path) -> Result<()> {
        let path = self.path(step);
        let is_free = !path.try_exists().map_err(|e| Error::io("look for", &path, e))?;
        match is_free.then(|| whole(trash)) {
            Some(Ok(_)) => {
                log::warn!(
                    "{}: restored; a job was killed while it replaced or removed it",
                    path.display()
                );
                fs::rename(trash, &path).map_err(|e| refused("restore", &path, e))?;
                sync(&self.root)
            }
            Some(Err(e)) if e.kind() != Kind::Damaged => Err(e),
            _ => remove(trash),
        }
    }

    /// Discards a checkpoint that could not be written.
    pub fn abandon(&self, staging: &Path) {
        // It may not exist. If another trainer has taken over the run, the save has already failed
        // with that error.
        if staging.exists()
            && self.check_lease().is_ok()
            && let Err(e) = self.discard(staging)
        {
            log::warn!("{e}");
        }
    }

    /// Renames a complete directory into place and moves `latest`. Atomically replaces a checkpoint
    /// of the same step.
    ///
    /// # Errors
    /// Returns an error if the file system fails, or another trainer has taken over the run.
    pub fn publish(&self, step: u64, staging: &Path) -> Result<PathBuf> {
        let path = self.path(step);
        sync(staging)?;
        self.check_lease()?;
        let replaced = self.put(staging, &path, exchange)?;
        sync(&self.root)?;
        self.check_lease()?;
        match Pointer::at(self.latest()).point_to(step) {
            // Retrying would not help, and readers use the newest intact checkpoint.
            Err(e) if e.kind() == Kind::Input => {
                log::warn!("{}; {} is published", one_line(&e), path.display())
            }
            pointed => pointed?,
        }
        sync(&self.root)?;
        if let (Some(_), Some(run)) = (&replaced, self.root.parent()) {
            let manifest = Manifest::read(&path)?;
            evaluations::remove_replaced(&run.join(evaluations::FILE), step, &manifest.id)?;
        }
        // The removal takes a while, so it comes last.
        if let Some(Err(e)) = replaced.map(|old| self.discard_replaced(&old)) {
            log::warn!("{}", one_line(&e));
        }
        Ok(path)
    }

    /// Renames `staging` to `path`, and returns the new path of the directory that it replaced, if
    /// any. If names cannot be exchanged, the job may be killed between two renames; then
    /// [`Checkpoints::prepare`] restores that directory.
    fn put(
        &self,
        staging: &Path,
        path: &Path,
        exchange: impl Fn(&Path, &Path) -> Result<(), Errno>,
    ) -> Result<Option<PathBuf>> {
        let exists = path.try_exists().map_err(|e| refused("look for", path, e))?;
        let replaced = match exists.then(|| exchange(staging, path)) {
            Some(Ok(())) => return Ok(Some(staging.to_path_buf())),
            // The kernel or the file system does not support it.
            Some(Err(Errno::NOSYS | Errno::INVAL | Errno::NOTSUP)) => self.set_aside(path)?,
            Some(Err(e)) => return Err(refused("replace", path, e)),
            None => None,
        };
        let published = fs::rename(staging, path).map_err(|e| refused("publish", path, e));
        if let (Err(_), Some(old)) = (&published, &replaced) {
            fs::rename(old, path).map_err(|e| refused("restore", path, e))?;
        }
        published.map(|()| replaced)
    }

    /// Points `best` to the published checkpoint with the lowest validation loss, if any has one.
    ///
    /// # Errors
    /// Returns an error if the link cannot be written, or evaluations cannot be read.
    pub fn point_to_best(&self, evaluated: &Evaluations) -> Result<()> {
        self.point_to_best_of(&self.steps()?, evaluated.all()?)
    }

    /// Points `best` to one of `steps`; if none of them has a loss, removes the link, which might
    /// dangle.
    fn point_to_best_of(&self, steps: &[u64], evaluated: &[Evaluation]) -> Result<()> {
        let best = Pointer::at(self.best());
        // As in retention, checkpoints newer than the last save do not count.
        let last = self.last_step()?.unwrap_or(u64::MAX);
        let steps: Vec<u64> = steps.iter().copied().filter(|step| *step <= last).collect();
        let steps = &steps[..];
        let target = best.target();
        if matches!(target, Ok(Target::Directory)) {
            // No checkpoint is lost: retention uses the losses, not the link.
            log::warn!("{}", one_line(&best.taken()));
            return Ok(());
        }
        match (evaluations::best(evaluated, steps), target) {
            (Some((step, _)), Ok(Target::Step(old))) if old == step => Ok(()),
            (Some((step, _)), _) => {
                self.check_lease()?;
                best.point_to(step)
            }
            (None, Ok(Target::Absent)) => Ok(()),
            (None, _) => {
                self.check_lease()?;
                fs::remove_file(best.path()).map_err(|e| refused("remove", best.path(), e))
            }
        }
    }

    /// Removes the checkpoints that need not be kept; the one that `best` names is kept. Leased
    /// checkpoints, and those that cannot be removed, are tried again the next time. Nothing is
    /// removed while anything that the decision depends on cannot be read.
    pub fn retain(&self, retention: &Retention) {
        match self.prepare_removal(retention) {
            Err(e) => log::warn!("no checkpoint is removed: {}", one_line(&e)),
            Ok(removable) => {
                for step in removable {
                    // A failed removal must not end the run.
                    if let Err(e) = self.discard_unless_leased(step) {
                        log::warn!("{}", one_line(&e));
                    }
                }
                // Also continues removals of earlier saves, which may take time.
                self.sweep().unwrap_or_else(|e| log::warn!("{}", one_line(&e)));
            }
        }
    }

    /// Points `best` to one of the checkpoints that are kept, and returns the steps of the others.
    fn prepare_removal(&self, retention: &Retention) -> Result<Vec<u64>> {
        let evaluated = self.evaluated()?;
        let removable = self.removable(retention, evaluated.all()?)?;
        let mut left = self.steps()?;
        left.retain(|step| !removable.contains(step));
        self.point_to_best_of(&left, evaluated.all()?)?;
        Ok(removable)
    }

    /// Returns the steps whose checkpoints need not be kept, ascending.
    ///
    /// # Errors
    /// Returns an error if a checkpoint or a lease cannot be read.
    pub fn removable(&self, retention: &Retention, evaluated: &[Evaluation]) -> Result<Vec<u64>> {
        Ok(steps_to_remove(&self.candidates(evaluated)?, retention))
    }

    /// Returns the published checkpoints as candidates for removal, ascending by step.
    ///
    /// # Errors
    /// Returns an error if a checkpoint or a lease cannot be read, so that it is unknown which
    /// checkpoints may be removed.
    pub(super) fn candidates(&self, evaluated: &[Evaluation]) -> Result<Vec<Candidate>> {
        let leases = self.leases();
        let waits =
            Waits { evaluation: leases.queue_is_watched()?, after: leases.watched_after()? };
        // A run that skipped a damaged checkpoint has gone back: checkpoints newer than the last
        // save do not count.
        let latest = Pointer::at(self.latest());
        if latest.target()? == Target::Directory {
            return Err(latest.taken());
        }
        let latest = self.last_step()?.unwrap_or(u64::MAX);
        self.steps()?
            .into_iter()
            .map(|step| self.candidate(step, evaluated, &leases, waits, latest))
            .collect()
    }

    /// Returns the checkpoint of a step as a candidate for removal. It counts as leased if one of
    /// `waits` applies to it, and as intact only up to the last save, `latest`.
    fn candidate(
        &self,
        step: u64,
        evaluated: &[Evaluation],
        leases: &Leases,
        waits: Waits,
        latest: u64,
    ) -> Result<Candidate> {
        let path = self.path(step);
        let mut loss = None;
        let (sound, kept) = match self.sound_id(step) {
            Ok(id) => {
                loss = evaluations::loss_of_save(evaluated, step, &id);
                let is_evaluated = || evaluations::is_settled(evaluated, &id);
                let is_next = waits.after.is_some_and(|after| step > after);
                (true, is_next || waits.evaluation && !is_evaluated())
            }
            Err(e) => {
                log::warn!("{} does not count as a checkpoint: {}", path.display(), one_line(&e));
                match e.kind() {
                    Kind::Damaged => (false, false),
                    // Another version of the program can read it.
                    Kind::Input => (false, true),
                    _ => return Err(e),
                }
            }
        };
        let held = kept || leases.holds(&name_of(step))?;
        Ok(Candidate { step, intact: sound && step <= latest, loss, leased: held })
    }

    /// Returns the id of the save of a step, if it is intact and not suspect. A checkpoint that was
    /// found intact before, and whose manifest has not changed since, is not read again: there may
    /// be hundreds, of thousands of files each.
    fn sound_id(&self, step: u64) -> Result<String> {
        let path = self.path(step);
        let stamp = fs::metadata(path.join(manifest::FILE)).ok().map(|file| Stamp::new(&file));
        let known = || SOUND.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known()
            .get(&path)
            .filter(|(before, _)| stamp.as_ref() == Some(before))
            .map(|(_, id)| id.clone());
        let id = match before {
            Some(id) => id,
            None => {
                let found = whole(&path)?.id;
                let mut known = known();
                // Entries of removed checkpoints are dropped.
                known.retain(|path, _| path.parent() != Some(self.root()) || path.exists());
                known.extend(stamp.map(|stamp| (path.clone(), (stamp, found.clone()))));
                found
            }
        };
        // An SDC check may have marked it since.
        suspect::check(&path, step, &id).map(|()| id)
    }

    /// Reads the manifest of a step's checkpoint, and checks that its files exist with their
    /// lengths, and that the checkpoint is not marked as suspect.
    ///
    /// # Errors
    /// Returns an error if a file is missing or has the wrong length, or the checkpoint is suspect
    /// ([`Kind::Damaged`]), or it cannot be read.
    pub fn read_intact(&self, step: u64) -> Result<Manifest> {
        let path = self.path(step);
        let manifest = whole(&path)?;
        suspect::check(&path, step, &manifest.id).map(|()| manifest)
    }

    /// Opens the checkpoint of a step. Waits a moment if it is missing, since a removal may just be
    /// reverted.
    ///
    /// # Errors
    /// Returns an error if the checkpoint is missing, damaged or suspect, or cannot be read.
    pub fn open(&self, step: u64) -> Result<Reader> {
        let path = self.path(step);
        if !path.exists() {
            std::thread::sleep(Duration::from_millis(100));
        }
        Reader::open(&path)
    }
}

/// Prefix of the names of directories that are being removed.
pub(super) const TRASH: &str = ".trash-";

/// Checkpoints that retention has found intact, with the identity of the manifest file and the id
/// of the save.
static SOUND: Mutex<BTreeMap<PathBuf, (Stamp, String)>> = Mutex::new(BTreeMap::new());

/// Identifies a version of a file.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    bytes: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn new(file: &fs::Metadata) -> Self {
        let changed = (file.mtime(), file.mtime_nsec());
        Self { inode: (file.dev(), file.ino()), bytes: file.len(), changed }
    }
}

/// The number of checkpoint files whose lengths this process has checked.
static LOOKED_AT: AtomicU64 = AtomicU64::new(0);

/// Returns the number of checkpoint files whose lengths this process has checked, for tests of
/// scale.
#[doc(hidden)]
pub fn files_checked() -> u64 {
    LOOKED_AT.load(Ordering::Relaxed)
}

/// Reads the manifest of the checkpoint in `dir`, and checks that every file exists with its
/// length.
fn whole(dir: &Path) -> Result<Manifest> {
    let manifest = Manifest::read(dir)?;
    for (name, entry) in &manifest.files {
        let file = dir.join(name);
        LOOKED_AT.fetch_add(1, Ordering::Relaxed);
        let length = fs::metadata(&file).map_err(|e| Error::unreadable("read", &file, &e))?.len();
        if length != entry.bytes {
            return Err(Error::damaged(format!(
                "{} has {length} bytes, not {}",
                file.display(),
                entry.bytes
            )));
        }
    }
    Ok(manifest)
}

/// Exchanges the names of two directories atomically.
fn exchange(a: &Path, b: &Path) -> Result<(), Errno> {
    renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)
}

/// Formats an error as one line of a log.
pub(super) fn one_line(e: &Error) -> String {
    e.to_string().replace('\n', "; ")
}

fn remove(path: &Path) -> Result<()> {
    fs::remove_dir_all(path).map_err(|e| refused("remove", path, e))
}

/// Syncs a file, or the entries of a directory, to disk.
///
/// # Errors
/// Returns an error if the file cannot be opened or synced.
pub fn sync(path: &Path) -> Result<()> {
    fs::File::open(path).and_then(|file| file.sync_all()).map_err(|e| refused("sync", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Removal;

    /// Publishes a checkpoint whose manifest has no tensors.
    fn publish(checkpoints: &Checkpoints, step: u64) {
        let staging = checkpoints.staging(step, "job");
        fs::create_dir_all(&staging).unwrap();
        manifest::tests::empty(step).write(&staging).unwrap();
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
            checkpoints.retain(&Retention { newest: 2, ..Retention::default() });
        }
        assert_eq!(checkpoints.steps().unwrap(), [20, 100]);
        // Leftovers of killed jobs.
        fs::create_dir_all(checkpoints.staging(7, "dead").join("x")).unwrap();
        fs::create_dir_all(checkpoints.root().join(".trash-step-00000001")).unwrap();
        std::os::unix::fs::symlink("step-00000020", checkpoints.root().join(".latest.77.tmp"))
            .unwrap();
        checkpoints.prepare().unwrap();
        let left: Vec<_> =
            fs::read_dir(checkpoints.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 3, "{left:?}");
        checkpoints.abandon(&checkpoints.staging(7, "never"));
    }

    /// A run that skipped the damaged checkpoint of step 5 saves step 4, which must not be removed
    /// in favour of step 5.
    #[test]
    fn a_run_that_went_back_keeps_what_it_saves() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
        checkpoints.prepare().unwrap();
        [3, 5, 4].into_iter().for_each(|step| publish(&checkpoints, step));
        assert_eq!(checkpoints.latest_step().unwrap(), Some(4));
        checkpoints.retain(&Retention { newest: 1, ..Retention::default() });
        assert_eq!(checkpoints.steps().unwrap(), [4, 5]);
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
        checkpoints.retain(&one);
        assert_eq!(checkpoints.discard_unless_leased(1).unwrap(), Removal::Leased);
        assert_eq!(checkpoints.steps().unwrap(), [1, 2]);
        drop(lease);
        checkpoints.retain(&one);
        assert_eq!(checkpoints.steps().unwrap(), [2]);
    }

    fn prepared() -> (tempfile::TempDir, Checkpoints) {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
        checkpoints.prepare().unwrap();
        (dir, checkpoints)
    }

    fn loop_at(path: &Path) {
        std::os::unix::fs::symlink(path, path).unwrap();
    }

    const ONE: Retention = Retention { newest: 1, multiples: 0, best: 1, sdc_checked: None };

    /// The checkpoint of step 1 has the lowest loss, or is leased, and the file that says so cannot
    /// be read.
    #[test]
    fn nothing_is_removed_while_a_file_is_unreadable() {
        type Break = fn(&Path, &Checkpoints);
        let cases: [(&str, Break); 6] = [
            ("a byte in eval.jsonl", |log, _| {
                let text = [&fs::read(log).unwrap()[..], b"\xff"].concat();
                fs::write(log, text).unwrap();
                // The next line is appended below it.
                evaluations::append(log, &Evaluation::done(3, 2.0, Default::default())).unwrap();
            }),
            ("eval.jsonl", |log, _| {
                fs::remove_file(log).unwrap();
                loop_at(log);
            }),
            ("its manifest", |_, checkpoints| {
                let manifest = checkpoints.path(1).join("manifest.json");
                fs::remove_file(&manifest).unwrap();
                fs::create_dir(&manifest).unwrap();
            }),
            ("the leases", |_, checkpoints| loop_at(&checkpoints.root().join(".leases"))),
            ("a lease", |_, checkpoints| {
                fs::create_dir(checkpoints.root().join(".leases")).unwrap();
                loop_at(&checkpoints.leases().path("step-00000002.read"));
            }),
            ("latest", |_, checkpoints| {
                fs::remove_file(checkpoints.latest()).unwrap();
                fs::write(checkpoints.latest(), "").unwrap();
            }),
        ];
        for (what, break_file) in cases {
            let (dir, checkpoints) = prepared();
            let log = dir.path().join(evaluations::FILE);
            for (step, loss) in [(1, 1.0), (2, 3.0), (3, 2.0)] {
                publish(&checkpoints, step);
                let evaluation = Evaluation::done(step, loss, Default::default());
                evaluations::append(&log, &evaluation).unwrap();
            }
            checkpoints.point_to_best(&checkpoints.evaluated().unwrap()).unwrap();
            break_file(&log, &checkpoints);
            checkpoints.retain(&ONE);
            assert_eq!(checkpoints.steps().unwrap(), [1, 2, 3], "{what}");
            assert_eq!(
                fs::read_link(checkpoints.best()).unwrap(),
                Path::new("step-00000001"),
                "{what}"
            );
        }
        let (_dir, checkpoints) = prepared();
        fs::remove_dir_all(checkpoints.root()).unwrap();
        assert!(checkpoints.steps().unwrap().is_empty());
        loop_at(checkpoints.root());
        assert!(
            checkpoints.steps().unwrap_err().to_string().contains("cannot list the checkpoints")
        );
    }

    /// A line torn by a kill is not an evaluation, and does not stop retention.
    #[test]
    fn a_torn_evaluation_does_not_stop_retention() {
        let (dir, checkpoints) = prepared();
        let log = dir.path().join(evaluations::FILE);
        for (step, loss) in [(1, 1.0), (2, 3.0), (3, 2.0)] {
            publish(&checkpoints, step);
            evaluations::append(&log, &Evaluation::done(step, loss, Default::default())).unwrap();
        }
        let text = fs::read_to_string(&log).unwrap();
        fs::write(&log, format!("{text}{{\"step\":4,\"lo")).unwrap();
        checkpoints.retain(&ONE);
        assert_eq!(checkpoints.steps().unwrap(), [1, 3]);
    }

    #[test]
    fn a_checkpoint_of_another_version_stays_and_does_not_count() {
        let (_dir, checkpoints) = prepared();
        [1, 2, 3].into_iter().for_each(|step| publish(&checkpoints, step));
        let newer = Manifest { version: 9, ..manifest::tests::empty(2) };
        newer.write(&checkpoints.path(2)).unwrap();
        checkpoints.retain(&Retention { newest: 2, ..Retention::default() });
        assert_eq!(checkpoints.steps().unwrap(), [1, 2, 3]);
        checkpoints.retain(&Retention { newest: 1, ..Retention::default() });
        assert_eq!(checkpoints.steps().unwrap(), [2, 3]);
    }

    /// Returns the id of the published save of step 7.
    fn id_of_seven(checkpoints: &Checkpoints) -> String {
        Manifest::read(&checkpoints.path(7)).unwrap().id
    }

    fn stage(checkpoints: &Checkpoints, id: &str) -> PathBuf {
        let staging = checkpoints.staging(7, id);
        fs::create_dir_all(&staging).unwrap();
        Manifest { id: id.into(), ..manifest::tests::empty(7) }.write(&staging).unwrap();
        staging
    }

    #[test]
    fn a_step_is_replaced_with_and_without_exchange() {
        let (_dir, checkpoints) = prepared();
        checkpoints.publish(7, &stage(&checkpoints, "first")).unwrap();
        checkpoints.publish(7, &stage(&checkpoints, "second")).unwrap();
        assert_eq!(id_of_seven(&checkpoints), "second");
        // As on a file system that cannot exchange names.
        let staging = stage(&checkpoints, "third");
        let old = checkpoints
            .put(&staging, &checkpoints.path(7), |_, _| Err(Errno::INVAL))
            .unwrap()
            .unwrap();
        assert_eq!(
            (id_of_seven(&checkpoints), Manifest::read(&old).unwrap().id),
            ("third".into(), "second".into())
        );
        // The old one is restored if the new one cannot replace it.
        let missing = checkpoints.staging(7, "missing");
        checkpoints.put(&missing, &checkpoints.path(7), |_, _| Err(Errno::NOSYS)).unwrap_err();
        assert_eq!(id_of_seven(&checkpoints), "third");
        assert!(checkpoints.put(&missing, &checkpoints.path(7), |_, _| Err(Errno::IO)).is_err());
        checkpoints.prepare().unwrap();
        let left: Vec<_> =
            fs::read_dir(checkpoints.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }

    /// A reader finds the step while it is replaced.
    #[test]
    fn a_step_that_is_replaced_is_there_at_every_moment() {
        let (_dir, checkpoints) = prepared();
        let path = checkpoints.publish(7, &stage(&checkpoints, "0")).unwrap();
        let other = stage(&checkpoints, "other");
        if let Err(e) = exchange(&other, &path) {
            println!("skipped: this file system cannot exchange names: {e}");
            return;
        }
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                let mut looks = 0;
                while !done.load(Ordering::Relaxed) {
                    assert!(path.join("manifest.json").exists(), "gone after {looks} looks");
                    looks += 1;
                }
                looks
            });
            for save in 1..=100 {
                checkpoints.publish(7, &stage(&checkpoints, &save.to_string())).unwrap();
            }
            done.store(true, Ordering::Relaxed);
            assert!(looks.join().unwrap() > 0);
        });
        assert_eq!(id_of_seven(&checkpoints), "100");
    }

    #[test]
    fn a_kill_between_two_renames_costs_no_checkpoint() {
        let (_dir, checkpoints) = prepared();
        checkpoints.publish(7, &stage(&checkpoints, "first")).unwrap();
        stage(&checkpoints, "second");
        let trash = checkpoints.root().join(".trash-step-00000007");
        // Killed without exchange, or during removal; then a checkpoint that cannot be read stays
        // where it is.
        fs::rename(checkpoints.path(7), &trash).unwrap();
        let manifest = trash.join("manifest.json");
        fs::rename(&manifest, trash.join("x")).unwrap();
        fs::create_dir(&manifest).unwrap();
        checkpoints.prepare().unwrap();
        assert!(checkpoints.steps().unwrap().is_empty() && trash.exists());
        fs::remove_dir(&manifest).unwrap();
        fs::rename(trash.join("x"), &manifest).unwrap();
        checkpoints.prepare().unwrap();
        assert_eq!(id_of_seven(&checkpoints), "first");
        assert!(!trash.exists() && !checkpoints.staging(7, "second").exists());
        // A partly removed checkpoint is removed.
        fs::rename(checkpoints.path(7), &trash).unwrap();
        fs::remove_file(&manifest).unwrap();
        checkpoints.prepare().unwrap();
        assert!(checkpoints.steps().unwrap().is_empty() && !trash.exists());
    }

    #[test]
    fn without_the_lease_nothing_is_changed() {
        let (dir, free) = prepared();
        publish(&free, 1);
        let leases = Leases::new(dir.path().join(".leases"));
        let crate::lease::Claimed::Taken(lease) = leases.claim("trainer", false).unwrap() else {
            panic!()
        };
        let checkpoints = free.clone().with_lease(Some(Arc::new(lease)));
        publish(&checkpoints, 2);
        let staging = stage(&checkpoints, "late");
        fs::write(
            leases.path("trainer"),
            "{\"host\":\"far\",\"pid\":1,\"started\":1,\"token\":\"x\"}",
        )
        .unwrap();
        let log = dir.path().join(evaluations::FILE);
        evaluations::append(&log, &Evaluation::done(1, 1.0, Default::default())).unwrap();
        let evaluated = free.evaluated().unwrap();
        for refused in [
            checkpoints.publish(7, &staging).map(drop),
            checkpoints.prepare(),
            checkpoints.point_to_best(&evaluated),
            checkpoints.discard_unless_leased(1).map(drop),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("was taken by process 1 on far"), "{error}");
        }
        checkpoints.abandon(&staging);
        checkpoints.retain(&ONE);
        assert_eq!(free.steps().unwrap(), [1, 2]);
        assert!(staging.exists() && fs::read_link(free.best()).is_err());
        assert_eq!(free.latest_step().unwrap(), Some(2));
    }
}
