//! Files of JSON lines that a trainer appends to, a record at a time.
//!
//! A run that goes on cuts the records of later steps off the file itself, which may have millions.
//! A process that has lost the run to this one may still have the file open. It does no harm:
//! before each write a writer compares the file's length with its own, so that such a process finds
//! another length and writes nothing. If it was stopped just between the two, its line comes to lie
//! behind those of the run's trainer, who finds the other length with the next record, looks at its
//! lease, and cuts the line off ([`JsonLines::reopen`]).

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::long_lines::{Kept, until_step};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};

/// A file of JSON lines.
pub struct JsonLines {
    path: PathBuf,
    file: File,
    /// Length of the file after what this process has written.
    length: u64,
    /// Bytes that are not in the file yet: the file system refused them, and is asked again with
    /// the next line.
    waiting: Vec<u8>,
}

impl JsonLines {
    /// Opens `path` to append, first dropping the lines after step `last`: a resumed run writes
    /// them again. Of the lines before it, damaged ones stay.
    ///
    /// # Errors
    /// Returns an error if the file system refuses.
    pub fn open(path: &Path, last: u64) -> Result<Self> {
        let kept = match safe_open::open(path).map(|old| until_step(old, last)) {
            Ok(kept) => kept.map_err(|e| Error::io("read", path, e))?,
            Err(e) if e.kind() == ErrorKind::NotFound => Kept::NOTHING,
            Err(e) => return Err(Error::io("read", path, e)),
        };
        if kept.damaged > 0 {
            log::warn!("{}: {} damaged lines at the end are removed", path.display(), kept.damaged);
        }
        let (file, length) = append(path)?;
        if length > kept.bytes {
            cut(path, &file, kept.bytes)?;
        }
        let waiting = if kept.is_torn { b"\n".to_vec() } else { Vec::new() };
        Ok(Self { path: path.to_path_buf(), file, length: kept.bytes, waiting })
    }

    /// Appends one line.
    ///
    /// # Errors
    /// Returns an error if the file system refuses. The line, or the rest of it, waits for the next
    /// call.
    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line =
            serde_json::to_string(record).map_err(|e| Error::internal(format!("record: {e}")))?;
        line.push('\n');
        self.waiting.extend(line.into_bytes());
        self.flush()
    }

    /// Appends all that waits.
    ///
    /// # Errors
    /// Returns an error if the file system refuses, or another process has changed the file.
    pub fn flush(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let refused = |e| Error::io("write", &self.path, e);
        let length = self.file.metadata().map_err(refused)?.len();
        if length != self.length {
            let why = format!(
                "another process has changed its length from {} to {length} bytes",
                self.length
            );
            return Err(Error::io("write", &self.path, why));
        }
        while !self.waiting.is_empty() {
            match self.file.write(&self.waiting) {
                Ok(0) => return Err(refused(ErrorKind::WriteZero.into())),
                Ok(written) => {
                    self.length += written as u64;
                    self.waiting.drain(..written);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(refused(e)),
            }
        }
        Ok(())
    }

    /// Opens the file anew: it may have become another one by its name, and network file systems
    /// forget files that are open. What another process has appended is cut off: only the run's
    /// trainer may call this.
    ///
    /// # Errors
    /// Returns an error if the file system refuses.
    pub fn reopen(&mut self) -> Result<()> {
        let (file, length) = append(&self.path)?;
        if length > self.length {
            log::warn!(
                "{}: removing {} bytes of another process",
                self.path.display(),
                length - self.length
            );
            cut(&self.path, &file, self.length)?;
        }
        self.length = length.min(self.length);
        self.file = file;
        Ok(())
    }
}

/// Opens a file to append, and returns its length.
fn append(path: &Path) -> Result<(File, u64)> {
    let opened = own_files::append(path);
    let told = opened.and_then(|file| file.metadata().map(|of| (file, of.len())));
    told.map_err(|e| Error::io("open", path, e))
}

fn cut(path: &Path, file: &File, length: u64) -> Result<()> {
    file.set_len(length).and_then(|()| file.sync_all()).map_err(|e| Error::io("cut", path, e))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;
    use crate::telemetry::metrics::Step;

    fn step(step: u64, loss: f64) -> Step {
        Step { step, loss, ..Step::default() }
    }

    /// Steps and losses of the lines that can be read.
    fn seen(path: &Path) -> Vec<(u64, f64)> {
        let bytes = std::fs::read(path).unwrap();
        let steps =
            bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
        steps.map(|step: Step| (step.step, step.loss)).collect()
    }

    #[test]
    fn reopening_drops_what_will_be_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, 0).unwrap();
        (1..=4).for_each(|i| lines.write(&step(i, 1.0)).unwrap());
        drop(lines);
        // A torn last line, as a killed run leaves it.
        OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"{\"step\":2,\"lo")
            .unwrap();
        JsonLines::open(&path, 2).unwrap().write(&step(3, 2.0)).unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (2, 1.0), (3, 2.0)]);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
        // One that lacks nothing but its line break.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.trim_end()).unwrap();
        JsonLines::open(&path, 3).unwrap().write(&step(4, 3.0)).unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0)]);
    }

    #[test]
    fn damage_costs_its_line_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, 0).unwrap();
        (1..=4).for_each(|i| lines.write(&step(i, 1.0)).unwrap());
        let mut bytes = std::fs::read(&path).unwrap();
        let second = bytes.iter().position(|byte| *byte == b'\n').unwrap() + 4;
        bytes[second] = 0xff;
        // In a value that nobody looks at, on the way to other programs.
        bytes.extend(b"{\"step\":3,\"note\":\"\xff\"}\n");
        std::fs::write(&path, bytes).unwrap();
        JsonLines::open(&path, 3).unwrap().write(&step(4, 2.0)).unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (3, 1.0), (4, 2.0)]);
        // An unreadable file is not written anew.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(JsonLines::open(&path, 3).is_err_and(|e| e.to_string().contains("cannot read")));
    }

    /// A trainer that has lost its run and wakes up writes nothing; and what it wrote in its last
    /// moment goes.
    #[test]
    fn a_writer_without_a_right_does_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut old = JsonLines::open(&path, 0).unwrap();
        (1..=4).for_each(|i| old.write(&step(i, 1.0)).unwrap());
        let mut new = JsonLines::open(&path, 2).unwrap();
        let error = old.write(&step(5, 1.0)).unwrap_err();
        assert!(error.message().contains("another process has changed its length"), "{error}");
        new.write(&step(3, 2.0)).unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (2, 1.0), (3, 2.0)]);
        // Stopped between its look at the length and its write.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":5}\n").unwrap();
        new.write(&step(4, 2.0)).unwrap_err();
        new.reopen().unwrap();
        new.flush().unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 4);
    }
}
