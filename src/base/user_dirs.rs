//! Directories of the user's own, also in places where others write: nobody else has put files into
//! one.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::error::{Error, Result};

/// Bits of a mode by which the group or all others may write.
const OTHERS_WRITE: u32 = 0o022;
/// Bit of a mode by which only owners remove and rename the entries of a directory.
const STICKY: u32 = 0o1000;

/// State in which a directory was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// It was made, or nobody else could write to it.
    Trusted,
    /// It is the user's, but others could write to it until now: content must be checked, not
    /// believed.
    Opened,
}

/// The user's number, to be part of a name where several users share a place.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Makes the directory `path`, of the user's own, unless it is there; its parent must exist. From
/// now on nobody else writes to it. Any number of processes may call this at once.
///
/// # Errors
/// There is something else, such as a link or a directory of another user; others may replace it in
/// its parent; the file system refused.
pub fn directory(path: &Path) -> Result<Trust> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let above = fs::metadata(parent).map_err(|e| Error::io("look into", parent, e))?;
    let is_closed = above.mode() & OTHERS_WRITE == 0;
    let is_sticky = above.mode() & STICKY != 0;
    // A group that may write to the user's directories is one of the user's own, where it is usual.
    let is_own = above.uid() == user() && above.mode() & 0o002 == 0;
    if !(is_closed || is_sticky || is_own) {
        let name = parent.display();
        let mode = above.mode() & 0o7777;
        return Err(Error::input(format!("{name} has mode {mode:o}: others may replace its entries"))
            .hint("name a directory of your own, or one where only owners remove entries, as in /tmp (chmod +t)"));
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => return Ok(Trust::Trusted),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(Error::io("create", path, e)),
    }
    let there = fs::symlink_metadata(path).map_err(|e| Error::io("look at", path, e))?;
    let refused = |what: String| {
        Err(Error::input(format!("{} {what}", path.display()))
            .hint("it is not used: remove it, ask its owner to, or name another directory"))
    };
    if there.is_symlink() {
        return refused("is a link, not a directory of your own".into());
    }
    if !there.is_dir() {
        return refused("is no directory".into());
    }
    if there.uid() != user() {
        return refused(format!("belongs to user {}, not to you (user {})", there.uid(), user()));
    }
    if there.mode() & OTHERS_WRITE == 0 {
        return Ok(Trust::Trusted);
    }
    fs::set_permissions(path, Permissions::from_mode(0o700))
        .map_err(|e| Error::io("close to others", path, e))?;
    Ok(Trust::Opened)
}

/// The same for `names` below `root`, one within the other; `root` is made if it is missing.
///
/// # Errors
/// As [`directory`].
pub fn below(root: &Path, names: &[&str]) -> Result<PathBuf> {
    fs::create_dir_all(root).map_err(|e| Error::io("create", root, e))?;
    let mut path = root.to_owned();
    for name in names {
        path.push(name);
        directory(&path)?;
    }
    Ok(path)
}

/// Whether `path` is a file of the user's own, not a link: others did not write it.
pub fn is_mine(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && file.uid() == user())
}

/// Whether `path` is a directory of the user's own, not a link.
pub fn is_my_directory(path: &Path) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|directory| directory.is_dir() && directory.uid() == user())
}

/// Opens a file to hold a lock on it, and makes it if it is missing. Links are not followed, and
/// nothing is cut off.
///
/// # Errors
/// It is a link, or the file system refused.
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

/// Places for caches of the user's, best first: in the user's own cache, else in the temporary
/// directory under a name with the user's number.
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
        assert_eq!(directory(&path).unwrap(), Trust::Trusted);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert_eq!(directory(&path).unwrap(), Trust::Trusted);
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        assert_eq!(directory(&path).unwrap(), Trust::Opened);
        assert_eq!(directory(&path).unwrap(), Trust::Trusted);
        assert_eq!(
            below(&root.path().join("a/b"), &["c", "d"]).unwrap(),
            root.path().join("a/b/c/d")
        );
    }

    #[test]
    fn what_others_may_have_put_there_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let refusal = |name: &str| directory(&root.path().join(name)).unwrap_err().to_string();
        fs::create_dir(root.path().join("target")).unwrap();
        symlink(root.path().join("target"), root.path().join("link")).unwrap();
        assert!(refusal("link").contains("link is a link"));
        fs::write(root.path().join("file"), "").unwrap();
        assert!(refusal("file").contains("file is no directory"));
        fs::create_dir(root.path().join("open")).unwrap();
        fs::set_permissions(root.path().join("open"), Permissions::from_mode(0o777)).unwrap();
        assert!(refusal("open/mine").contains("others may replace"));
        assert!(!root.path().join("open/mine").exists());
        fs::set_permissions(root.path().join("open"), Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(directory(&root.path().join("open/mine")).unwrap(), Trust::Trusted);
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
