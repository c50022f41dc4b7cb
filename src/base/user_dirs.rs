//! Directories that only this user can write to, even in places where other users can write.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::error::{Error, Result};

/// The mode bits that let the group or all users write.
const OTHERS_WRITE: u32 = 0o022;
/// The mode bit that lets only owners remove and rename the entries of a directory.
const STICKY: u32 = 0o1000;

/// The state in which a directory was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// The directory was created, or no other user could write to it.
    Trusted,
    /// The directory is the user's, but others could write to it until now, so its content must be
    /// verified.
    Opened,
}

/// Returns the number of the user, for names in places that several users share.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Creates the directory `path` unless it exists, and makes it writable for this user only. Its
/// parent must exist. Any number of processes may call this at once.
///
/// # Errors
/// Returns an error if the path is something else, such as a link or a directory of another user,
/// if other users could replace it in its parent, or if it cannot be created or inspected.
pub fn private_directory(path: &Path) -> Result<Trust> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let above = fs::metadata(parent).map_err(|e| Error::io("stat", parent, e))?;
    let is_closed = above.mode() & OTHERS_WRITE == 0;
    let is_sticky = above.mode() & STICKY != 0;
    // Where the group may write to a user's directories, it is usually the user's private group.
    let is_own = above.uid() == user() && above.mode() & 0o002 == 0;
    if !(is_closed || is_sticky || is_own) {
        let name = parent.display();
        let mode = above.mode() & 0o7777;
        return Err(Error::input(format!("{name} has mode {mode:o}: others may replace its entries"))
            .hint("choose a directory that only you can write to, or one with the sticky bit, like /tmp (chmod +t)"));
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => return Ok(Trust::Trusted),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(Error::io("create", path, e)),
    }
    let there = fs::symlink_metadata(path).map_err(|e| Error::io("stat", path, e))?;
    let refused = |what: String| {
        Err(Error::input(format!("{} {what}", path.display()))
            .hint("it is not used: remove it, ask its owner to, or name another directory"))
    };
    if there.is_symlink() {
        return refused("is a link, not a directory of your own".into());
    }
    if !there.is_dir() {
        return refused("is not a directory".into());
    }
    if there.uid() != user() {
        return refused(format!("belongs to user {}, not to you (user {})", there.uid(), user()));
    }
    if there.mode() & OTHERS_WRITE == 0 {
        return Ok(Trust::Trusted);
    }
    fs::set_permissions(path, Permissions::from_mode(0o700))
        .map_err(|e| Error::io("change the mode of", path, e))?;
    Ok(Trust::Opened)
}

/// Creates nested directories `names` below `root` as [`private_directory`] does. `root` is created if it
/// is missing.
///
/// # Errors
/// Returns an error if `root` cannot be created, or in the same cases as [`private_directory`].
pub fn below(root: &Path, names: &[&str]) -> Result<PathBuf> {
    fs::create_dir_all(root).map_err(|e| Error::io("create", root, e))?;
    let mut path = root.to_owned();
    for name in names {
        path.push(name);
        private_directory(&path)?;
    }
    Ok(path)
}

/// Returns true if `path` is a regular file of this user, not a link.
pub fn is_own_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && file.uid() == user())
}

/// Returns true if `path` is a directory of this user, not a link.
pub fn is_own_directory(path: &Path) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|directory| directory.is_dir() && directory.uid() == user())
}

/// Opens a file to hold a lock on it, and creates it if it is missing. Links are not followed, and
/// the file is not truncated.
///
/// # Errors
/// Returns an error if it is a link, or cannot be opened.
pub fn lock_file(path: &Path) -> Result<File> {
    let flags = OFlags::NOFOLLOW.bits() as i32;
    let opened = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(flags)
        .open(path);
    opened.map_err(|e| Error::io("lock", path, e))
}

/// Returns places for caches of this user, best first: the user's cache directory, and the
/// temporary directory with the user's number in the name.
pub fn cache_roots() -> Vec<(PathBuf, String)> {
    let variable =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let own = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let shared = (std::env::temp_dir(), format!("hpctrain-{}", user()));
    own.map(|root| (root, "hpctrain".to_owned())).into_iter().chain([shared]).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn a_directory_is_made_closed_to_others_and_found_again() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("mine");
        assert_eq!(private_directory(&path).unwrap(), Trust::Trusted);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert_eq!(private_directory(&path).unwrap(), Trust::Trusted);
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        assert_eq!(private_directory(&path).unwrap(), Trust::Opened);
        assert_eq!(private_directory(&path).unwrap(), Trust::Trusted);
        assert_eq!(
            below(&root.path().join("a/b"), &["c", "d"]).unwrap(),
            root.path().join("a/b/c/d")
        );
    }

    #[test]
    fn what_others_may_have_put_there_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let refusal =
            |name: &str| private_directory(&root.path().join(name)).unwrap_err().to_string();
        fs::create_dir(root.path().join("target")).unwrap();
        symlink(root.path().join("target"), root.path().join("link")).unwrap();
        assert!(refusal("link").contains("link is a link"));
        fs::write(root.path().join("file"), "").unwrap();
        assert!(refusal("file").contains("file is not a directory"));
        fs::create_dir(root.path().join("open")).unwrap();
        fs::set_permissions(root.path().join("open"), Permissions::from_mode(0o777)).unwrap();
        assert!(refusal("open/mine").contains("others may replace"));
        assert!(!root.path().join("open/mine").exists());
        fs::set_permissions(root.path().join("open"), Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(private_directory(&root.path().join("open/mine")).unwrap(), Trust::Trusted);
        if user() != 0 {
            return eprintln!("skipped: only root makes directories of another user");
        }
        chown(root.path().join("target"), Some(12345), None).unwrap();
        assert!(refusal("target").contains("target belongs to user 12345, not to you (user 0)"));
    }

    #[test]
    fn a_lock_cuts_nothing_off_and_follows_no_link() {
        let root = tempfile::tempdir().unwrap();
        let victim = root.path().join("victim");
        let link = root.path().join("link");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        assert!(lock_file(&link).unwrap_err().to_string().contains("link"));
        lock_file(&victim).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }
}
