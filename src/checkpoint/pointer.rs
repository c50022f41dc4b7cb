//! `latest` and `best`: names that point to one of a run's checkpoints.
//!
//! Each is a symbolic link or, on file systems without symbolic links, a file whose one line is the
//! name of the checkpoint. Tools that follow links while copying a run leave a directory there: a
//! copy of the checkpoint, which the next save would make stale.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::names::{name_of, step_of};
use super::refused;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};

/// One of these names.
#[derive(Debug, Clone)]
pub struct Pointer {
    path: PathBuf,
}

/// The target of a pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The entry does not exist.
    Absent,
    /// It names the checkpoint of this step, which need not exist.
    Step(u64),
    /// It is a link to something else.
    Elsewhere,
    /// It is a directory, where a link is expected.
    Directory,
}

/// Makes a symbolic link, as [`symlink`] does.
type MakeLink = fn(&Path, &Path) -> io::Result<()>;

impl Pointer {
    /// Creates the pointer at `path`, next to the checkpoints.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns what it points to.
    ///
    /// # Errors
    /// Returns an error if the entry cannot be read, or is a file that does not name a checkpoint.
    pub fn target(&self) -> Result<Target> {
        let path = &self.path;
        let unread = |e| Error::io("read", path, e);
        let kind = match fs::symlink_metadata(path) {
            Ok(entry) => entry.file_type(),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Target::Absent),
            Err(e) => return Err(unread(e)),
        };
        if kind.is_dir() {
            return Ok(Target::Directory);
        }
        if kind.is_symlink() {
            let target = fs::read_link(path).map_err(unread)?;
            return Ok(target.to_str().and_then(step_of).map_or(Target::Elsewhere, Target::Step));
        }
        let text = safe_open::read_to_string(path).map_err(unread)?;
        let step = step_of(text.trim_end()).ok_or_else(|| {
            Error::damaged(format!("{} does not name a checkpoint", path.display()))
                .hint("remove it: the next save writes it again")
        });
        step.map(Target::Step)
    }

    /// Returns the step of the checkpoint that it names, if any.
    ///
    /// # Errors
    /// Returns the errors of [`Pointer::target`].
    pub fn step(&self) -> Result<Option<u64>> {
        Ok(match self.target()? {
            Target::Step(step) => Some(step),
            Target::Absent | Target::Elsewhere | Target::Directory => None,
        })
    }

    /// Makes it point to the checkpoint of a step, with one rename.
    ///
    /// # Errors
    /// Returns an error if its name is taken by a directory
    /// ([`hpctrain_base::error::Kind::Input`]), or the file system refuses.
    pub(super) fn point_to(&self, step: u64) -> Result<()> {
        self.point_to_by(step, |target, link| symlink(target, link))
    }

    fn point_to_by(&self, step: u64, make_link: MakeLink) -> Result<()> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = self.path.with_file_name(format!(
            ".{name}.{}-{}.tmp",
            std::process::id(),
            hpctrain_config::telemetry::unix_time()
        ));
        // A killed process may have left it behind; usually it does not exist.
        let _ = fs::remove_file(&temporary);
        let pointed = make(&temporary, &name_of(step), make_link)
            .and_then(|()| fs::rename(&temporary, &self.path));
        pointed.map_err(|e| {
            // The error of the rename matters, not one of this cleanup.
            let _ = fs::remove_file(&temporary);
            if self.path.is_dir() && !self.path.is_symlink() {
                self.taken()
            } else {
                refused("link", &self.path, e)
            }
        })
    }

    /// Returns the error for a directory under its name.
    pub fn taken(&self) -> Error {
        let path = self.path.display();
        Error::input(format!("{path} is a directory, where a link to a checkpoint is expected"))
            .hint(format!("a copy that follows links may have made it: remove it with rm -r {path}, or rename it"))
    }
}

/// Makes a symbolic link to `name`, or, where the file system has none, a durable file that holds
/// `name`.
fn make(path: &Path, name: &str, make_link: MakeLink) -> io::Result<()> {
    match make_link(Path::new(name), path) {
        Err(e) if lacks_links(&e) => {
            own_files::write(path, format!("{name}\n"))?;
            fs::File::open(path)?.sync_all()
        }
        made => made,
    }
}

/// Returns true if an error means that the file system has no symbolic links. See symlink(2): vfat
/// and exFAT return `EPERM`; SMB, FUSE and others have their own errors.
pub(super) fn lacks_links(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EPERM | libc::ENOSYS | libc::EOPNOTSUPP | libc::EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::error::Kind;

    #[test]
    fn links_and_files_name_a_step() {
        let dir = tempfile::tempdir().unwrap();
        let latest = Pointer::at(dir.path().join("latest"));
        assert_eq!(latest.target().unwrap(), Target::Absent);
        latest.point_to(4).unwrap();
        assert_eq!(fs::read_link(latest.path()).unwrap(), Path::new("step-00000004"));
        assert_eq!(latest.target().unwrap(), Target::Step(4));
        // As on vfat.
        latest.point_to_by(6, |_, _| Err(io::Error::from_raw_os_error(libc::EPERM))).unwrap();
        assert!(!latest.path().is_symlink());
        assert_eq!(fs::read_to_string(latest.path()).unwrap(), "step-00000006\n");
        assert_eq!(latest.target().unwrap(), Target::Step(6));
        latest.point_to(8).unwrap();
        assert_eq!(latest.step().unwrap(), Some(8));
        fs::remove_file(latest.path()).unwrap();
        symlink("/elsewhere", latest.path()).unwrap();
        assert_eq!(latest.target().unwrap(), Target::Elsewhere);
    }

    #[test]
    fn a_failed_rename_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let latest = Pointer::at(dir.path().join("latest"));
        fs::create_dir(latest.path()).unwrap();
        assert_eq!((latest.target().unwrap(), latest.step().unwrap()), (Target::Directory, None));
        let error = latest.point_to(4).unwrap_err();
        assert_eq!(error.kind(), Kind::Input);
        assert!(error.to_string().contains("hint: a copy that follows links"), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn other_files_are_damage() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "step-4\n", "step-00000004\nstep-00000006\n"] {
            fs::write(dir.path().join("latest"), text).unwrap();
            assert_eq!(
                Pointer::at(dir.path().join("latest")).target().unwrap_err().kind(),
                Kind::Damaged,
                "{text:?}"
            );
        }
    }
}
