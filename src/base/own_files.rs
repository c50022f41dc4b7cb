//! Opens files and directories of a run safely where other users may have put entries before: links
//! are not followed.
//!
//! The last component of a path is never followed. A link to the directory of the file is followed
//! only if it belongs to this user, to root, or to the owner of the directory that it is in, unless
//! all users may write there: the rule of `fs.protected_symlinks`. Components above are not
//! checked.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};

/// The mode bit that lets all users write.
const ALL_WRITE: u32 = 0o002;

/// Creates a file, or truncates it.
///
/// # Errors
/// Returns an error if the file cannot be opened, it is not a regular file, or the path leads
/// through a link of another user.
pub fn create(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().write(true).create(true).truncate(true))
}

/// Creates a file that does not exist.
///
/// # Errors
/// Returns an error if the file exists, and in the same cases as [`create`].
pub fn create_new(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().read(true).write(true).create_new(true))
}

/// Opens a file to append, and creates it if it is missing.
///
/// # Errors
/// Returns an error in the same cases as [`create`].
pub fn append(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().append(true).create(true))
}

/// Opens a file to read and write anywhere in it, and creates it if it is missing.
///
/// # Errors
/// Returns an error in the same cases as [`create`].
pub fn update(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().read(true).write(true).create(true).truncate(false))
}

/// Replaces the content of a file, which is created if it is missing.
///
/// # Errors
/// Returns an error in the same cases as [`create`].
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    create(path)?.write_all(content.as_ref())
}

/// Replaces a file so that a reader finds all of the new content or nothing of it. It is written
/// beside the file under a name of its own, since processes of several hosts may do the same.
///
/// # Errors
/// Returns an error in the same cases as [`create`].
pub fn replace(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}-{nanos}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    write(&temporary, content).and_then(|()| fs::rename(&temporary, path))
}

/// Creates a directory unless it exists. Its parent must exist.
///
/// # Errors
/// Returns an error if it cannot be created, or the path is something else, such as a link of
/// another user.
pub fn create_directory(path: &Path) -> io::Result<()> {
    // Other users may not write there, whatever the umask.
    match DirBuilder::new().mode(0o775).create(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => check_entry(path),
        made => made,
    }
}

fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    check_entry(directory_of(path))?;
    // Opening a FIFO would otherwise wait for its other end.
    let opened = options.mode(0o666).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|e| match e.raw_os_error() {
        Some(libc::ELOOP) => io::Error::other("it is a symbolic link, which is not followed here"),
        _ => e,
    })?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is not a regular file"))
    }
}

/// Returns the directory that a file is in.
fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns an error unless the path is a directory, or a trusted link to one.
fn check_entry(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_symlink() {
        check_link(path)?;
    }
    if fs::metadata(path)?.is_dir() { Ok(()) } else { Err(ErrorKind::NotADirectory.into()) }
}

/// Returns an error if another user may have planted the link.
fn check_link(path: &Path) -> io::Result<()> {
    let link = fs::symlink_metadata(path)?.uid();
    let above = fs::metadata(directory_of(path))?;
    let is_of_owner = link == above.uid() && above.mode() & ALL_WRITE == 0;
    if [rustix::process::geteuid().as_raw(), 0].contains(&link) || is_of_owner {
        return Ok(());
    }
    let message = format!("{} is a link of user {link}, which is not followed", path.display());
    Err(io::Error::new(ErrorKind::PermissionDenied, message))
}

/// Checks that an existing directory can be trusted: it belongs to the owner of the files that this
/// process creates there, which a file server may change, or to the group `group`; and not all
/// users may write to it.
///
/// # Errors
/// Returns an error ([`crate::error::Kind::Input`]) with the remedy if it cannot, and an error if
/// the directory cannot be inspected.
pub fn check_directory(path: &Path, group: Option<u32>) -> Result<()> {
    check_entry(path).map_err(|e| Error::io("open", path, e).hint(FOREIGN))?;
    let found = fs::metadata(path).map_err(|e| Error::io("stat", path, e))?;
    let is_open = found.mode() & ALL_WRITE != 0;
    let user = rustix::process::geteuid().as_raw();
    let is_mine = found.uid() == user || group == Some(found.gid());
    if is_mine && !is_open {
        return Ok(());
    }
    // File servers and volumes may give files another owner or mode than this process asks for.
    let probe = tempfile::Builder::new().prefix(".owner-").suffix(".tmp").tempfile_in(path);
    let probe = probe.and_then(|file| file.as_file().metadata());
    let probe = probe.map_err(|e| Error::io("create a file in", path, e).hint(FOREIGN))?;
    if !is_mine && probe.uid() != found.uid() {
        let name = path.display();
        let owner = found.uid();
        return Err(Error::input(format!(
            "{name} belongs to user {owner}, not to you (user {user})"
        ))
        .hint(FOREIGN));
    }
    // If permissions have an effect, other users cannot write a temporary file.
    if is_open && probe.mode() & ALL_WRITE == 0 {
        let name = path.display();
        let mode = found.mode() & 0o7777;
        let error =
            Error::input(format!("{name} has mode {mode:o}: all users may put files into it"));
        return Err(
            error.hint(format!("check that its files are yours, then close it: chmod o-w {name}"))
        );
    }
    Ok(())
}

/// Returns the number of a group, given its name or number.
///
/// # Errors
/// Returns an error if the system has no such group.
pub fn group(name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    // Groups may be in a directory service, which getent queries.
    let output = Command::new("getent").args(["group", "--", name]).output();
    let number = output
        .ok()
        .and_then(|output| String::from_utf8(output.stdout).ok()?.split(':').nth(2)?.parse().ok());
    number.ok_or_else(|| {
        Error::input(format!("run.group = {name}: the system has no such group"))
            .hint("use the name or number of a group that `id` prints")
    })
}

/// The remedy for a directory of another user.
const FOREIGN: &str = "another user may have put it there: choose another run.root or run.name; the runs of a group need run.group, \
                       the group of their directories";

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt as _, chown, lchown, symlink};
    use std::path::PathBuf;

    use super::*;

    const OTHER: u32 = 12345;

    fn is_root() -> bool {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            eprintln!("skipped: only root makes files of another user");
        }
        is_root
    }

    #[test]
    fn links_are_not_written_through() {
        let root = tempfile::tempdir().unwrap();
        let victim = root.path().join("victim");
        let link = root.path().join("link");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        for open in [create, create_new, append, update] {
            assert!(open(&link).is_err());
        }
        assert!(write(&link, "x").unwrap_err().to_string().contains("symbolic link"));
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        // Nor is a file created where a dangling link points.
        fs::remove_file(&victim).unwrap();
        write(&link, "x").unwrap_err();
        assert!(!victim.exists());
    }

    #[test]
    fn files_are_written() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        write(&path, "one").unwrap();
        append(&path).unwrap().write_all(b" two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one two");
        update(&path).unwrap().write_all(b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two two");
        assert_eq!(create_new(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        write(&path, "").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
        assert!(create(root.path()).is_err() && create(Path::new("/")).is_err());
    }

    #[test]
    fn a_pipe_does_not_hang() {
        let root = tempfile::tempdir().unwrap();
        let pipe = root.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        create(&pipe).unwrap_err();
        update(&pipe).unwrap_err();
    }

    #[test]
    fn directories_may_be_links_of_this_user() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| -> PathBuf { root.path().join(name) };
        create_directory(&path("scratch")).unwrap();
        create_directory(&path("scratch")).unwrap();
        symlink(path("scratch"), path("logs")).unwrap();
        create_directory(&path("logs")).unwrap();
        write(&path("logs/file"), "x").unwrap();
        assert_eq!(fs::read(path("scratch/file")).unwrap(), b"x");
        check_directory(&path("logs"), None).unwrap();
        if !is_root() {
            return;
        }
        // A link of another user, in a directory of this one.
        lchown(path("logs"), Some(OTHER), None).unwrap();
        assert!(
            write(&path("logs/file"), "y")
                .unwrap_err()
                .to_string()
                .contains("is a link of user 12345")
        );
        assert!(
            create_directory(&path("logs")).is_err()
                && check_directory(&path("logs"), None).is_err()
        );
        assert_eq!(fs::read(path("scratch/file")).unwrap(), b"x");
    }

    #[test]
    fn a_directory_that_all_may_write_to_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("open");
        create_directory(&path).unwrap();
        check_directory(&path, None).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        let error = check_directory(&path, None).unwrap_err();
        assert!(
            error.to_string().contains("has mode 777") && error.to_string().contains("chmod o-w"),
            "{error}"
        );
        assert_eq!((error.exit_code(), fs::read_dir(&path).unwrap().count()), (2, 0));
        fs::set_permissions(&path, Permissions::from_mode(0o2775)).unwrap();
        check_directory(&path, None).unwrap();
    }

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!((group("root").unwrap(), group("12345").unwrap()), (0, 12345));
        let error = group("no-such-group").unwrap_err();
        assert!(
            error.to_string().starts_with("run.group = no-such-group") && error.exit_code() == 2,
            "{error}"
        );
    }

    #[test]
    fn a_directory_of_another_user_needs_the_group() {
        if !is_root() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("theirs");
        create_directory(&path).unwrap();
        chown(&path, Some(OTHER), Some(OTHER)).unwrap();
        let error = check_directory(&path, None).unwrap_err();
        assert!(
            error.to_string().contains("belongs to user 12345, not to you (user 0)"),
            "{error}"
        );
        assert_eq!(error.exit_code(), 2);
        check_directory(&path, Some(OTHER)).unwrap();
        assert!(check_directory(&path, Some(OTHER + 1)).is_err());
    }
}
