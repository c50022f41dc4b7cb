//! Opens files whose names come from other files, or that lie in directories of other users, only
//! if they are regular files.
//!
//! Opening a FIFO would wait for its other end, and a device may never end.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path};

/// Opens a regular file, or a link to one, for reading.
///
/// # Errors
/// Returns an error if the file cannot be opened, is a directory, or is a pipe, a socket or a
/// device ([`ErrorKind::InvalidData`]).
pub fn open(path: &Path) -> io::Result<File> {
    check(path)?;
    // If a FIFO has just replaced the file, opening it does not wait either.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    check_kind(&file.metadata()?).map(|()| file)
}

/// Checks that a path is a regular file, or a link to one.
///
/// # Errors
/// Returns an error in the same cases as [`open`].
pub fn check(path: &Path) -> io::Result<()> {
    check_kind(&std::fs::metadata(path)?)
}

/// Reads a regular file.
///
/// # Errors
/// Returns an error in the same cases as [`open`], or if reading fails.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open(path)?.read_to_end(&mut content).map(|_| content)
}

/// Reads a regular file as text.
///
/// # Errors
/// Returns an error in the same cases as [`read`], or if the file is not UTF-8
/// ([`ErrorKind::InvalidData`]).
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut content = String::new();
    open(path)?.read_to_string(&mut content).map(|_| content)
}

fn check_kind(metadata: &std::fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        Ok(())
    } else if metadata.is_dir() {
        // The error that reading a directory returns.
        Err(io::Error::from_raw_os_error(libc::EISDIR))
    } else {
        Err(io::Error::new(
            ErrorKind::InvalidData,
            "it is a pipe, a socket or a device, not a regular file",
        ))
    }
}

/// Returns true if a name is a single path component, so that it cannot lead out of its directory.
pub fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    // A trailing slash is not a component.
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("device")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("pipe"),
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert_eq!(read_to_string(&at("file")).unwrap(), read_to_string(&at("link")).unwrap());
        for name in ["pipe", "device"] {
            let refused = read(&at(name)).unwrap_err();
            assert!(
                refused.kind() == ErrorKind::InvalidData && refused.to_string().contains("a pipe"),
                "{refused}"
            );
        }
        assert_eq!(read(dir.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        assert_eq!(open(&at("absent")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn plain_names_lead_nowhere_else() {
        assert!(["rank-00000.h5", ".hidden", "..x", "a b"].into_iter().all(is_plain_name));
        let others = ["", ".", "..", "/etc/passwd", "../x", "a/b", "a/", "./a", "a\0b"];
        assert!(!others.into_iter().any(is_plain_name));
    }
}
