//! Files that other files name, or that lie in directories of others: opened only if they are
//! regular files.
//!
//! The open of a FIFO waits for its other end, and a device never ends.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path};

/// Opens a regular file, or one that a link leads to, for reading.
///
/// # Errors
/// The file system refused; it is a directory; or it is a pipe, a socket or a device
/// ([`ErrorKind::InvalidData`]).
pub fn open(path: &Path) -> io::Result<File> {
    check(path)?;
    // Nor does the open of one that has just taken its place wait.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    kind(&file.metadata()?).map(|()| file)
}

/// Refuses all but regular files, and links to them.
///
/// # Errors
/// As [`open`].
pub fn check(path: &Path) -> io::Result<()> {
    kind(&std::fs::metadata(path)?)
}

/// The content of a regular file.
///
/// # Errors
/// As [`open`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open(path)?.read_to_end(&mut content).map(|_| content)
}

/// The content of a regular file, which is text.
///
/// # Errors
/// As [`open`], or it is not UTF-8 ([`ErrorKind::InvalidData`]).
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut content = String::new();
    open(path)?.read_to_string(&mut content).map(|_| content)
}

fn kind(of: &std::fs::Metadata) -> io::Result<()> {
    if of.is_file() {
        Ok(())
    } else if of.is_dir() {
        // As a read has it.
        Err(io::Error::from_raw_os_error(libc::EISDIR))
    } else {
        Err(io::Error::new(
            ErrorKind::InvalidData,
            "it is a pipe, a socket or a device, not a regular file",
        ))
    }
}

/// Whether a name is that of an entry of a directory, and leads nowhere else.
pub fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    // A trailing slash is no component.
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
