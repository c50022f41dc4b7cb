//! Files of JSON lines that a trainer appends to, one record at a time.
//!
//! A resumed run truncates the file after the last step it resumes from, without rewriting it. A
//! process that has lost the lease of the run may still have the file open. Before each write a
//! writer compares the length of the file with the length it expects, so that such a process writes
//! nothing. If it was stopped between the two, its line is appended after those of the trainer,
//! which finds another length with its next record, checks its lease, and truncates the file
//! ([`JsonLines::reopen`]).

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::long_lines::{RecordPrefix, prefix_until_step};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};

/// A file of JSON lines.
pub struct JsonLines {
    path: PathBuf,
    file: File,
    /// The length of the file after the last write of this process.
    length: u64,
    /// Bytes that could not be written yet; they are retried with the next line.
    waiting: Vec<u8>,
}

impl JsonLines {
    /// Opens `path` to append, and removes the lines after step `last`, which a resumed run writes
    /// again. Damaged lines before it stay.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or written.
    pub fn open(path: &Path, last: u64) -> Result<Self> {
        let kept = match safe_open::open(path).map(|old| prefix_until_step(old, last)) {
            Ok(kept) => kept.map_err(|e| Error::io("read", path, e))?,
            Err(e) if e.kind() == ErrorKind::NotFound => RecordPrefix::EMPTY,
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
    /// Returns an error if the line cannot be written. The rest of it is written with the next
    /// call.
    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line =
            serde_json::to_string(record).map_err(|e| Error::internal(format!("record: {e}")))?;
        line.push('\n');
        self.waiting.extend(line.into_bytes());
        self.flush()
    }

    /// Appends all bytes that could not be written before.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, or another process has changed it.
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

    /// Opens the file again, as it may have been replaced, and handles on network file systems may
    /// become stale. Removes what another process has appended: only the trainer that holds the
    /// lease of the run may call this.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened or truncated.
    pub fn reopen(&mut self) -> Result<()> {
        let (file, length) = append(&self.path)?;
        if length > self.length {
            log::warn!(
                "{}: removing {} bytes that another process has appended",
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
    let opened = opened.and_then(|file| file.metadata().map(|metadata| (file, metadata.len())));
    opened.map_err(|e| Error::io("open", path, e))
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
        // The last line is cut short, as by a kill.
        OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"{\"step\":2,\"lo")
            .unwrap();
        JsonLines::open(&path, 2).unwrap().write(&step(3, 2.0)).unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (2, 1.0), (3, 2.0)]);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
        // The last line lacks only its line break.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.trim_end()).unwrap();
        JsonLines::open(&path, 3).unwrap().write(&step(4, 3.0)).unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0)]);
    }

    #[test]
    fn damage_affects_only_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, 0).unwrap();
        (1..=4).for_each(|i| lines.write(&step(i, 1.0)).unwrap());
        let mut bytes = std::fs::read(&path).unwrap();
        let second = bytes.iter().position(|byte| *byte == b'\n').unwrap() + 4;
        bytes[second] = 0xff;
        // Damage in a value that is not read here, but by other programs.
        bytes.extend(b"{\"step\":3,\"note\":\"\xff\"}\n");
        std::fs::write(&path, bytes).unwrap();
        JsonLines::open(&path, 3).unwrap().write(&step(4, 2.0)).unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (3, 1.0), (4, 2.0)]);
        // An unreadable file is not overwritten.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(JsonLines::open(&path, 3).is_err_and(|e| e.to_string().contains("cannot read")));
    }

    /// A stalled trainer that has lost its lease writes nothing when it resumes, and a line that it
    /// could still append is removed.
    #[test]
    fn a_writer_without_the_lease_does_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut old = JsonLines::open(&path, 0).unwrap();
        (1..=4).for_each(|i| old.write(&step(i, 1.0)).unwrap());
        let mut new = JsonLines::open(&path, 2).unwrap();
        let error = old.write(&step(5, 1.0)).unwrap_err();
        assert!(error.message().contains("another process has changed its length"), "{error}");
        new.write(&step(3, 2.0)).unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (2, 1.0), (3, 2.0)]);
        // The old trainer was stopped between its check of the length and its write.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":5}\n").unwrap();
        new.write(&step(4, 2.0)).unwrap_err();
        new.reopen().unwrap();
        new.flush().unwrap();
        assert_eq!(seen(&path), [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 4);
    }
}
