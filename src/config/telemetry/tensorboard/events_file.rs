//! An events file: a sequence of records in TensorFlow's TFRecord format.
//!
//! A record is its length in eight bytes, a checksum of these, the message, and a checksum of that;
//! numbers are little-endian.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, BufWriter, ErrorKind, Read, Write as _};
use std::path::{Path, PathBuf};

use prost::Message as _;

use super::protocol::{Event, START, SessionLog, VERSION, What};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};

/// The most bytes that are buffered while the file cannot be written. Further records are dropped.
const MAX_BUFFERED: usize = 32 << 20;

/// The prefix of the names of events files. Readers read the files of a directory in the order of
/// their names.
const PREFIX: &str = "events.out.tfevents.";

/// A file of events. While the file cannot be written, a warning is logged once, and up to
/// [`MAX_BUFFERED`] bytes are buffered.
pub struct EventsFile {
    path: PathBuf,
    /// The open file; `None` after a failed write.
    file: Option<File>,
    /// Bytes that are not in the file yet: the first may be the rest of a record.
    waiting: Vec<u8>,
    /// The number of records that were dropped.
    lost: u64,
    /// Whether the failure was logged.
    is_reported: bool,
}

impl EventsFile {
    /// Creates a file in `directory`, the last by name, for a run that is at `step`. Removes the
    /// events of later steps from the files before it, and makes readers that have read them
    /// discard them.
    ///
    /// # Errors
    /// Returns an error if a file cannot be created or rewritten.
    pub fn begin(directory: &Path, step: u64, now: f64) -> Result<Self> {
        let made = own_files::create_directory(directory);
        made.map_err(|e| Error::io("create", directory, e))?;
        let mut second = now as u64;
        for entry in std::fs::read_dir(directory).map_err(|e| Error::io("list", directory, e))? {
            let before = entry.map_err(|e| Error::io("list", directory, e))?;
            let Some(other) = second_of(&before.file_name().to_string_lossy()) else { continue };
            // The name must be the last even after two starts within a second, or if the clock was
            // set back.
            second = second.max(other.saturating_add(1));
            let before = before.path();
            forget_after(&before, step).map_err(|e| Error::io("rewrite", &before, e))?;
        }
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let path = directory.join(format!("{PREFIX}{second:010}.{host}.hpctrain"));
        let file = own_files::create_new(&path).map_err(|e| Error::io("create", &path, e))?;
        let mut begun =
            Self { path, file: Some(file), waiting: Vec::new(), lost: 0, is_reported: false };
        begun.append(&Event {
            wall_time: now,
            step: 0,
            what: Some(What::FileVersion(VERSION.into())),
        });
        let start = What::SessionLog(SessionLog { status: START });
        begun.append(&Event { wall_time: now, step: step as i64 + 1, what: Some(start) });
        Ok(begun)
    }

    /// Appends an event; if the file cannot be written, it is buffered and written later.
    pub fn append(&mut self, event: &Event) {
        let record = framed(&event.encode_to_vec());
        if self.waiting.len() + record.len() > MAX_BUFFERED {
            self.lost += 1;
        } else {
            self.waiting.extend(record);
        }
        self.flush();
    }

    /// Writes all buffered bytes.
    pub fn flush(&mut self) {
        match self.write() {
            Ok(()) if self.is_reported => {
                let lost = match self.lost {
                    0 => String::new(),
                    lost => format!("; {lost} events were dropped"),
                };
                log::warn!("{} can be written again{lost}", self.path.display());
                (self.is_reported, self.lost) = (false, 0);
            }
            Ok(()) => {}
            Err(e) => {
                if !self.is_reported {
                    log::warn!(
                        "{}; training continues, and events are buffered",
                        Error::io("write", &self.path, e).message()
                    );
                }
                // Handles on network file systems may become stale: the file is opened again.
                (self.file, self.is_reported) = (None, true);
            }
        }
    }

    /// Opens a file that [`EventsFile::begin`] has created, to append to it.
    pub fn reopen(path: PathBuf) -> Self {
        Self { path, file: None, waiting: Vec::new(), lost: 0, is_reported: false }
    }

    /// Appends events.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write_all(&mut self, events: &[Event]) -> Result<()> {
        self.waiting.extend(events.iter().flat_map(|event| framed(&event.encode_to_vec())));
        self.write().map_err(|e| Error::io("write", &self.path, e))
    }

    fn write(&mut self) -> std::io::Result<()> {
        while !self.waiting.is_empty() {
            let file = match &mut self.file {
                Some(file) => file,
                none => none.insert(OpenOptions::new().append(true).open(&self.path)?),
            };
            match file.write(&self.waiting) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.waiting.drain(..written)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// The events files of a directory.
#[derive(Debug, Default)]
pub struct ExistingEvents {
    /// The events that summarize values, in the order in which readers see them.
    pub summaries: Vec<Event>,
    /// The last file, unless its last record is truncated or damaged.
    pub last: Option<PathBuf>,
}

impl ExistingEvents {
    /// Reads the events files of a directory; there are none if it does not exist.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn read(directory: &Path) -> Result<Self> {
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(Error::io("list", directory, e)),
        };
        let mut paths = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("list", directory, e))?;
            if second_of(&entry.file_name().to_string_lossy()).is_some() {
                paths.push(entry.path());
            }
        }
        paths.sort();
        let mut found = Self::default();
        for path in paths {
            let bytes = safe_open::read(&path).map_err(|e| Error::io("read", &path, e))?;
            let mut rest = &bytes[..];
            let mut read = 0;
            while let Some((event, record)) =
                next(&mut rest).map_err(|e| Error::io("read", &path, e))?
            {
                read += record.len();
                found.summaries.extend(
                    Some(event).filter(|event| matches!(event.what, Some(What::Summary(_)))),
                );
            }
            found.last = (read == bytes.len()).then_some(path);
        }
        Ok(found)
    }
}

/// Returns the second in the name of an events file.
fn second_of(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()
}

fn framed(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), message, &masked(message)].concat()
}

/// Returns the checksum of a part of a record: CRC-32C, masked because the data may contain
/// checksums.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// Reads the next event with its record; `None` at the end of the file, or at a truncated or
/// damaged record, where readers of the format stop.
fn next(from: &mut impl Read) -> std::io::Result<Option<(Event, Vec<u8>)>> {
    let mut record = Vec::new();
    from.by_ref().take(12).read_to_end(&mut record)?;
    let Some((length, sum)) = record.split_first_chunk::<8>() else { return Ok(None) };
    if *sum != masked(length) {
        return Ok(None);
    }
    let message = u64::from_le_bytes(*length).saturating_add(4);
    from.by_ref().take(message).read_to_end(&mut record)?;
    let is_whole = (record.len() - 12) as u64 == message;
    let Some((message, sum)) = record[12..].split_last_chunk::<4>().filter(|_| is_whole) else {
        return Ok(None);
    };
    if *sum != masked(message) {
        return Ok(None);
    }
    Ok(Event::decode(message).ok().map(|event| (event, record)))
}

/// Removes the events after step `last` from a file, and all after a truncated or damaged record.
fn forget_after(path: &Path, last: u64) -> std::io::Result<()> {
    let mut from = BufReader::new(File::open(path)?);
    // Readers do not take this name for an events file.
    let temporary = path.with_file_name(".rewritten.tmp");
    let mut to = BufWriter::new(own_files::create(&temporary)?);
    let mut kept = 0;
    while let Some((event, record)) = next(&mut from)? {
        if event.step <= last as i64 {
            to.write_all(&record)?;
            kept += record.len() as u64;
        }
    }
    if kept == std::fs::metadata(path)?.len() {
        return std::fs::remove_file(&temporary);
    }
    to.into_inner()?.sync_all()?;
    std::fs::rename(&temporary, path)
}

/// Returns the events of a file, as a reader of the format sees them.
#[cfg(test)]
pub(super) fn events(mut bytes: &[u8]) -> Vec<Event> {
    std::iter::from_fn(|| next(&mut bytes).unwrap()).map(|(event, _)| event).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the sorted names of the files of a directory.
    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn records_are_framed_as_published() {
        // The example of RFC 3720, B.4, and its mask.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(
            u32::from_le_bytes(masked(&[0; 32])),
            0x8a91_36aau32.rotate_right(15).wrapping_add(0xa282_ead8)
        );
        let record = framed(b"abc");
        assert_eq!(
            (record.len(), &record[..8], &record[12..15]),
            (19, &[3, 0, 0, 0, 0, 0, 0, 0][..], &b"abc"[..])
        );
    }

    #[test]
    fn files_of_one_second_follow_each_other() {
        let dir = tempfile::tempdir().unwrap();
        for (start, step) in [(0, 0), (1, 7), (2, 3)] {
            // The clock goes back.
            let file = EventsFile::begin(dir.path(), step, 100.0 - f64::from(start)).unwrap();
            assert_eq!(
                names(dir.path()).last().unwrap(),
                &*file.path.file_name().unwrap().to_string_lossy()
            );
        }
        let last = dir.path().join(names(dir.path()).last().unwrap());
        let events = events(&std::fs::read(last).unwrap());
        assert_eq!(events[0].what, Some(What::FileVersion(VERSION.into())));
        assert_eq!(
            (events[1].step, &events[1].what),
            (4, &Some(What::SessionLog(SessionLog { status: START })))
        );
    }

    #[test]
    fn events_of_later_steps_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = EventsFile::begin(dir.path(), 0, 1.0).unwrap();
        let path = file.path.clone();
        for step in 1..=5 {
            file.append(&Event { wall_time: 1.0, step, what: None });
        }
        let whole = std::fs::read(&path).unwrap();
        forget_after(&path, 5).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        let steps = |path: &Path| -> Vec<i64> {
            events(&std::fs::read(path).unwrap()).iter().skip(2).map(|event| event.step).collect()
        };
        // The file is truncated, as by a kill.
        std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        drop(EventsFile::begin(dir.path(), 4, 1.0).unwrap());
        assert_eq!(
            (steps(&path), std::fs::read_dir(dir.path()).unwrap().count()),
            (vec![1, 2, 3, 4], 2)
        );
        // Readers stop at a damaged record.
        let mut damaged = std::fs::read(&path).unwrap();
        let third = damaged.len() - framed(&[]).len() - 12;
        damaged[third] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        drop(EventsFile::begin(dir.path(), 4, 1.0).unwrap());
        assert!(steps(&path).len() < 4);
    }

    #[test]
    fn a_failed_write_in_the_middle_of_a_record_leaves_no_hole() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = EventsFile::begin(dir.path(), 0, 1.0).unwrap();
        let path = file.path.clone();
        let event = |step| Event { wall_time: 1.0, step, what: None };
        // As if the disk had taken five bytes of a record and refused the rest.
        let record = framed(&event(1).encode_to_vec());
        file.file.as_mut().unwrap().write_all(&record[..5]).unwrap();
        file.waiting.extend(&record[5..]);
        file.file = Some(File::open("/dev/null").unwrap());
        file.append(&event(2));
        assert!(
            file.is_reported && file.file.is_none(),
            "a write to a file that is not open for writing succeeded"
        );
        file.append(&event(3));
        assert!(!file.is_reported && file.waiting.is_empty());
        let steps: Vec<i64> =
            events(&std::fs::read(path).unwrap()).iter().skip(2).map(|event| event.step).collect();
        assert_eq!(steps, [1, 2, 3]);
    }
}
