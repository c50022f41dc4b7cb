//! The directory of a run's in-memory checkpoints on a node.
//!
//! ```text
//! /dev/shm/hpctrain-<user>/<run>-<digest of its path>/
//!   <job>/
//!     outline.json        what all slots of the job share, as a manifest without tensors' pieces
//!     rank-00003.own.0    slots of rank 3
//!     rank-00003.own.1
//!     rank-00003.of-00005.0  a copy of a slot of rank 5, which is on another node
//! ```
//!
//! Every start of a run writes to a directory of its own, so it overwrites nothing that a restart
//! may need. Once its first in-memory checkpoint is whole on all ranks, it removes those of earlier
//! starts. Only this user can read and write the directories.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open, user_dirs};

/// The types of file systems in memory: tmpfs and ramfs.
const IN_MEMORY: [u64; 2] = [TMPFS, 0x8584_58f6];

/// The type of tmpfs.
pub const TMPFS: u64 = 0x0102_1994;

/// The file with the outline of a job.
const OUTLINE: &str = "outline.json";

/// The directory of a run's in-memory checkpoints on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeDirectory {
    root: PathBuf,
    of_user: String,
    of_run: String,
}

impl NodeDirectory {
    /// Returns the directory in `root` of the run whose directory is at `run`, an absolute path
    /// that is the same on all nodes. Nothing is created.
    pub fn new(root: &Path, run: &Path) -> Self {
        let name = run.file_name().unwrap_or_default().to_string_lossy();
        let digest = crc32fast::hash(run.as_os_str().as_encoded_bytes());
        Self {
            root: root.to_path_buf(),
            of_user: format!("hpctrain-{}", user_dirs::user()),
            of_run: format!("{name}-{digest:08x}"),
        }
    }

    /// Returns its path.
    pub fn path(&self) -> PathBuf {
        self.root.join(&self.of_user).join(&self.of_run)
    }

    /// Returns the root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directories of `noted` that are not one of `now` on this node, each once. Two
    /// paths may be one directory: with another spelling, or by a link.
    pub fn others(noted: Vec<Self>, now: &[Self]) -> Vec<Self> {
        let mut others: Vec<Self> = Vec::new();
        for one in noted {
            if !now.iter().chain(&others).any(|other| one.is_same(other)) {
                others.push(one);
            }
        }
        others
    }

    /// Returns true if both are the same directory on this node.
    fn is_same(&self, other: &Self) -> bool {
        is_same_directory(&self.root, &other.root)
            && (&self.of_user, &self.of_run) == (&other.of_user, &other.of_run)
    }

    /// Creates the directory of a job and returns its path.
    ///
    /// # Errors
    /// Returns an error if it cannot be created, or others can write to the directories above.
    pub fn create_job(&self, job: &str) -> Result<PathBuf> {
        user_dirs::below(&self.root, &[&self.of_user, &self.of_run, job])
    }

    /// Returns the jobs that have left a directory, in order of their names.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read, or belongs to another user.
    pub fn jobs(&self) -> Result<Vec<String>> {
        let path = self.path();
        let of_user = self.root.join(&self.of_user);
        let mut jobs = Vec::new();
        for directory in [&of_user, &path] {
            match fs::symlink_metadata(directory) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(jobs),
                Err(e) => return Err(Error::io("stat", directory, e)),
                Ok(_) if user_dirs::is_own_directory(directory) => {}
                Ok(_) => {
                    return Err(Error::input(format!(
                        "{} does not belong to this user",
                        directory.display()
                    ))
                    .hint("remove it, or set memory_checkpoint.dir to another directory"));
                }
            }
        }
        for entry in fs::read_dir(&path).map_err(|e| Error::io("list", &path, e))? {
            let entry = entry.map_err(|e| Error::io("list", &path, e))?;
            if let Ok(name) = entry.file_name().into_string()
                && user_dirs::is_own_directory(&entry.path())
            {
                jobs.push(name);
            }
        }
        jobs.sort();
        Ok(jobs)
    }

    /// Returns the paths of a job's slots, in order.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn slots(&self, job: &str) -> Result<Vec<PathBuf>> {
        let path = self.path().join(job);
        let mut slots = Vec::new();
        for entry in fs::read_dir(&path).map_err(|e| Error::io("list", &path, e))? {
            let entry = entry.map_err(|e| Error::io("list", &path, e))?;
            if entry.file_name().to_string_lossy().starts_with("rank-") {
                slots.push(entry.path());
            }
        }
        slots.sort();
        Ok(slots)
    }

    /// Returns the bytes of the slots of all jobs, which the next job of the run reuses.
    pub fn bytes(&self) -> u64 {
        let jobs = self.jobs().unwrap_or_default();
        let slots = jobs.iter().flat_map(|job| self.slots(job).unwrap_or_default());
        slots.filter_map(|slot| Some(fs::symlink_metadata(slot).ok()?.len())).sum()
    }

    /// Returns the bytes of all slots here, and of those of `others` in the same file system.
    pub fn bytes_with(&self, others: &[Self]) -> u64 {
        let device = |directory: &Self| Some(fs::metadata(&directory.root).ok()?.dev());
        let is_near = |other: &&Self| device(other).is_some() && device(other) == device(self);
        self.bytes() + others.iter().filter(is_near).map(Self::bytes).sum::<u64>()
    }

    /// Returns true if the files are in memory, not on a disk.
    pub fn is_in_memory(&self) -> bool {
        statfs(&self.root).is_ok_and(|found| IN_MEMORY.contains(&(found.f_type as u64)))
    }

    /// Writes the outline of a job.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write_outline(&self, job: &str, outline: &[u8]) -> Result<()> {
        let path = self.path().join(job).join(OUTLINE);
        let written = own_files::create(&path).and_then(|mut file| file.write_all(outline));
        written.map_err(|e| Error::io("write", &path, e))
    }

    /// Returns the outline of a job if its checksum is `crc32`.
    pub fn outline(&self, job: &str, crc32: u32) -> Option<Vec<u8>> {
        let outline = safe_open::read(&self.path().join(job).join(OUTLINE)).ok()?;
        (crc32fast::hash(&outline) == crc32).then_some(outline)
    }

    /// Removes the directories of all jobs but `kept`.
    pub fn remove_others(&self, kept: &str) {
        for job in self.jobs().unwrap_or_default().iter().filter(|job| *job != kept) {
            remove(&self.path().join(job));
        }
    }

    /// Removes the directory with everything in it.
    pub fn remove(&self) {
        if self.jobs().is_ok() {
            remove(&self.path());
            // Another run may use it.
            let _ = fs::remove_dir(self.root.join(&self.of_user));
        }
    }
}

/// Removes a directory; another process may do so at the same time.
fn remove(path: &Path) {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            log::warn!("{}: in-memory checkpoints are not removed: {e}", path.display());
        }
        _ => {}
    }
}

/// Returns true if both paths lead to the same directory on this node, with another spelling or by
/// a link.
pub fn is_same_directory(one: &Path, other: &Path) -> bool {
    let place = |path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    match (place(one), place(other)) {
        (Ok(place), Ok(other)) => place == other,
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_of_one_run_share_a_private_directory() {
        let root = tempfile::tempdir().unwrap();
        let run = |name: &str| NodeDirectory::new(root.path(), Path::new(name));
        let [one, two] = [run("/runs/x"), run("/others/x")];
        assert_ne!(one.path(), two.path());
        assert!(one.jobs().unwrap().is_empty());
        for job in ["b", "a"] {
            let path = one.create_job(job).unwrap();
            one.write_outline(job, b"text").unwrap();
            fs::write(path.join("rank-00001.own.0"), "slot").unwrap();
        }
        two.create_job("c").unwrap();
        assert_eq!(one.jobs().unwrap(), ["a", "b"]);
        assert_eq!(one.slots("a").unwrap(), [one.path().join("a/rank-00001.own.0")]);
        assert_eq!(one.outline("a", crc32fast::hash(b"text")).unwrap(), b"text");
        assert_eq!(one.outline("a", 7), None);
        assert_eq!(one.bytes(), 2 * "slot".len() as u64);
        assert_eq!(two.bytes_with(std::slice::from_ref(&one)), one.bytes());
        let elsewhere = NodeDirectory::new(Path::new("/proc"), Path::new("/runs/x"));
        assert_eq!(elsewhere.bytes_with(std::slice::from_ref(&one)), 0);
        one.remove_others("b");
        assert_eq!(one.jobs().unwrap(), ["b"]);
        one.remove();
        assert!(!one.path().exists() && two.path().exists());
        two.remove();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn one_directory_may_have_several_paths() {
        let root = tempfile::tempdir().unwrap();
        let shm = root.path().join("shm");
        let link = root.path().join("link");
        fs::create_dir(&shm).unwrap();
        std::os::unix::fs::symlink(&shm, &link).unwrap();
        let of = |root: &Path| NodeDirectory::new(root, Path::new("/runs/x"));
        let [with_slash, dotted] = ["shm/", "link/../shm"].map(|path| of(&root.path().join(path)));
        let [disk, missing] = ["disk", "missing"].map(|path| of(&root.path().join(path)));
        fs::create_dir(disk.root()).unwrap();
        let noted =
            vec![with_slash, disk.clone(), dotted, of(&link), missing.clone(), disk.clone()];
        assert_eq!(
            NodeDirectory::others(noted.clone(), &[of(&shm)]),
            [disk.clone(), missing.clone()]
        );
        // Of the paths of a directory that is not used any more, one is enough.
        let others = NodeDirectory::others(noted.clone(), &[missing]);
        assert_eq!(others, [noted[0].clone(), disk]);
    }
}
