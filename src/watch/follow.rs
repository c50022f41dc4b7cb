//! A JSON Lines file that grows: each poll returns the records that were appended since the last one.

use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::marker::PhantomData;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use serde::de::DeserializeOwned;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// The maximum number of bytes read at once, which bounds the memory for a long file.
const PIECE: u64 = 16 << 20;

/// The records of a file from the last position on.
pub struct Follower<T> {
    path: PathBuf,
    /// The end of the last complete line that was read.
    position: u64,
    /// The inode of the file, which changes when a start replaces the file by a shorter one.
    inode: u64,
    records: PhantomData<fn() -> T>,
}

/// The records of one poll.
pub struct Appended<T> {
    /// The records, in the order of the file. Lines that cannot be read are skipped.
    pub records: Vec<T>,
    /// Whether the file was replaced or cut, so that records before these are void.
    pub is_new: bool,
    /// Whether more records are there already.
    pub has_more: bool,
}

impl<T: DeserializeOwned> Follower<T> {
    /// Begins at the start of the file at `path`, which need not exist.
    pub fn new(path: PathBuf) -> Self {
        Self { path, position: 0, inode: 0, records: PhantomData }
    }

    /// Reads the complete lines that are new, at most some megabytes.
    ///
    /// # Errors
    /// Returns an error if the file is there and cannot be read.
    pub fn poll(&mut self) -> Result<Appended<T>> {
        let mut found = Appended { records: Vec::new(), is_new: false, has_more: false };
        let failed = |e| Error::io("read", &self.path, e);
        let mut file = match safe_open::open(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                found.is_new = self.position > 0;
                self.position = 0;
                return Ok(found);
            }
            Err(e) => return Err(failed(e)),
        };
        let metadata = file.metadata().map_err(failed)?;
        if metadata.len() < self.position || metadata.ino() != self.inode {
            found.is_new = self.position > 0;
            (self.position, self.inode) = (0, metadata.ino());
        }
        file.seek(SeekFrom::Start(self.position)).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(PIECE).read_to_end(&mut bytes).map_err(failed)?;
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        found.has_more = bytes.len() as u64 == PIECE;
        // A line longer than a piece is not a record.
        let read = if end == 0 && found.has_more { bytes.len() } else { end };
        self.position += read as u64;
        let lines = bytes[..end].split(|byte| *byte == b'\n');
        found.records = lines.filter_map(|line| serde_json::from_slice(line).ok()).collect();
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn each_poll_returns_new_complete_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.jsonl");
        let mut follower = Follower::<u64>::new(path.clone());
        let mut poll = || {
            let Appended { records, is_new, has_more } = follower.poll().unwrap();
            assert!(!has_more);
            (records, is_new)
        };
        assert_eq!(poll(), (vec![], false));
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(b"1\n2\ndamaged\n3").unwrap();
        assert_eq!(poll(), (vec![1, 2], false));
        assert_eq!(poll(), (vec![], false));
        file.write_all(b"4\n5\n").unwrap();
        assert_eq!(poll(), (vec![34, 5], false));

        // A start that goes on from an earlier step replaces the file by its first lines.
        let shorter = directory.path().join("new");
        std::fs::write(&shorter, "1\n2\n7\n8\n9\n10\n11\n12\n").unwrap();
        std::fs::rename(&shorter, &path).unwrap();
        assert_eq!(poll(), (vec![1, 2, 7, 8, 9, 10, 11, 12], true));
        std::fs::write(&path, "1\n").unwrap();
        assert_eq!(poll(), (vec![1], true));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(poll(), (vec![], true));
        assert_eq!(poll(), (vec![], false));
    }
}
