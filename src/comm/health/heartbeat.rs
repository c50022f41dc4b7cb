//! Heartbeat and ledger files of the ranks in the run directory, as JSON: readable even if their rank no longer
//! answers.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ledger::Entry;
use crate::error::{Error, Result};

/// Bytes of a heartbeat, unless it needs more: it is written over the one before.
const ROOM: usize = 1024;

/// Attempts to read a file that is being written.
const READS: usize = 5;

/// A collective, as reports describe it. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Told {
    pub number: u64,
    pub op: String,
    pub unit: Option<String>,
    pub group: String,
    /// The group's ranks, as reports number them.
    pub members: Vec<usize>,
    pub in_group: u64,
    pub bytes: usize,
    pub algorithm: String,
    pub root: Option<usize>,
    pub started: f64,
    pub ended: Option<f64>,
}

/// Nanoseconds as seconds.
pub fn seconds(ns: u64) -> f64 {
    ns as f64 * 1e-9
}

impl From<&Entry> for Told {
    fn from(entry: &Entry) -> Self {
        let label = &entry.label;
        Self {
            number: entry.number,
            op: label.op.into(),
            unit: label.unit.as_deref().map(str::to_string),
            group: label.group.into(),
            members: entry.members.to_vec(),
            in_group: entry.in_group,
            bytes: label.size.bytes(),
            algorithm: label.algorithm.into(),
            root: label.root,
            started: seconds(entry.started),
            ended: entry.ended.map(seconds),
        }
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.number, self.op)?;
        self.unit.iter().try_for_each(|unit| write!(f, " of {unit}"))
    }
}

/// The exchange that a rank is in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// The ranks that it waits for, as reports number them.
    pub with: Vec<usize>,
    /// Its number in the collective.
    pub number: u64,
}

/// The state of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    pub rank: usize,
    pub pid: u32,
    pub host: String,
    /// Grows while the rank lives.
    pub beat: u64,
    /// When it was written; seconds since 1970.
    pub time: f64,
    /// Activity of the compute thread, and its start.
    pub phase: String,
    pub phase_since: f64,
    /// Whether it is blocked until a message comes.
    pub waits: bool,
    /// The last collective that was finished, and the one under way.
    pub finished: Option<Told>,
    pub current: Option<Told>,
    /// The exchange under way in the current one.
    pub exchange: Option<Exchange>,
}

/// The ledger of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LedgerFile {
    pub rank: usize,
    pub pid: u32,
    pub host: String,
    pub time: f64,
    pub collectives: Vec<Told>,
}

/// The files of the watch.
#[derive(Debug, Clone)]
pub struct Files {
    folder: PathBuf,
}

/// Beginnings of their names.
const HEARTBEAT: &str = "heartbeat-";
const LEDGER: &str = "ledger-rank-";
const MARKER: &str = "stalled";

impl Files {
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_path_buf() }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn heartbeat(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("{HEARTBEAT}{rank:05}"))
    }

    pub fn ledger(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("{LEDGER}{rank:05}.json"))
    }

    fn marker(&self) -> PathBuf {
        self.folder.join(MARKER)
    }

    /// Removes the files of an earlier job.
    pub fn clear(&self) -> Result<()> {
        let ours = |name: &str| name == MARKER || [HEARTBEAT, LEDGER].iter().any(|start| name.starts_with(start));
        let refused = |e| Error::io("clear", &self.folder, e);
        for entry in fs::read_dir(&self.folder).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            if entry.file_name().to_str().is_some_and(ours) {
                fs::remove_file(entry.path()).map_err(|e| Error::io("remove", &entry.path(), e))?;
            }
        }
        Ok(())
    }

    /// Opens the heartbeat of a rank to write.
    pub fn open(&self, rank: usize) -> Result<File> {
        let path = self.heartbeat(rank);
        OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(&path)
            .map_err(|e| Error::io("create", &path, e).hint("comm.timeout = 0 does without"))
    }

    /// The last heartbeat of a rank.
    pub fn read(&self, rank: usize) -> Option<Heartbeat> {
        let read = || serde_json::from_str(fs::read_to_string(self.heartbeat(rank)).ok()?.lines().next()?).ok();
        (0..READS).find_map(|attempt| {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(10));
            }
            read()
        })
    }

    /// The ledger that a rank has left.
    pub fn read_ledger(&self, rank: usize) -> Option<LedgerFile> {
        serde_json::from_slice(&fs::read(self.ledger(rank)).ok()?).ok()
    }

    /// Says that the job stands still. Whether this is the first rank to say so.
    pub fn mark(&self) -> bool {
        match File::create_new(self.marker()) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
            // If nothing can be written, every rank is the first.
            _ => true,
        }
    }

    /// Leaves the report, for ranks that the end of the job does not reach.
    pub fn tell(&self, report: &str) {
        // Without it they end as well, and say less.
        let _ = fs::write(self.marker(), format!("{report}\n"));
    }

    /// The report that a rank has left.
    pub fn told(&self) -> Option<String> {
        fs::read_to_string(self.marker()).ok()?.strip_suffix('\n').map(str::to_string)
    }

    /// Whether a rank has said so.
    pub fn marked(&self) -> bool {
        self.marker().exists()
    }

    /// It goes on after all.
    pub fn unmark(&self) {
        // If it cannot be removed, the ranks only write ledgers too early.
        let _ = fs::remove_file(self.marker());
    }
}

/// Writes a heartbeat over the one before.
pub fn write(file: &File, heartbeat: &Heartbeat) -> std::io::Result<()> {
    let mut text = serde_json::to_string(heartbeat)?;
    let spaces = (ROOM - 1).saturating_sub(text.len());
    text.extend(std::iter::repeat_n(' ', spaces));
    text.push('\n');
    file.write_all_at(text.as_bytes(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path());
        let file = files.open(3).unwrap();
        let mut heartbeat = Heartbeat {
            rank: 3,
            pid: 17,
            host: "node".into(),
            beat: 1,
            time: 1.5,
            phase: "x".repeat(3 * ROOM),
            phase_since: 1.25,
            waits: true,
            finished: None,
            current: None,
            exchange: Some(Exchange { with: vec![1, 2], number: 3 }),
        };
        assert_eq!(files.read(3), None);
        for phase in ["x".repeat(3 * ROOM), "forward".into()] {
            heartbeat.phase = phase;
            write(&file, &heartbeat).unwrap();
            assert_eq!(files.read(3).as_ref(), Some(&heartbeat));
        }
        assert!(files.mark() && !files.mark() && files.marked());
        assert_eq!(files.told(), None);
        files.tell("it stands\nhint: still");
        assert_eq!((files.marked(), files.told().as_deref()), (true, Some("it stands\nhint: still")));
        fs::write(folder.path().join("rank-00003.log"), "kept").unwrap();
        files.clear().unwrap();
        assert!(!files.marked() && files.read(3).is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
