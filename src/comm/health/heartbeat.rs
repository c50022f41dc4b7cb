//! The heartbeat and flight-recorder files of the ranks in the watchdog's directory. They are JSON
//! and can be read even if their rank no longer responds.
//!
//! The ranks of a node share one heartbeat file, which is named after the node's first rank. Each
//! writes its own line of fixed length. So there are as many files as nodes, only one kernel writes
//! each, and a report reads each once. A rank opens and closes the file for every heartbeat, which
//! makes it visible to other nodes on NFS.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::flight_recorder::CollectiveRecord;
use super::rank_ranges;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;

/// Bytes of a heartbeat's line.
const LINE: usize = 2048;

/// The most characters of a name in a heartbeat.
const NAME: usize = 120;

/// The number of attempts to read a file that is being written.
const READS: usize = 5;

/// The state of a collective or message of a rank. Times are in seconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CollectiveState {
    pub number: u64,
    pub op: String,
    pub unit: Option<String>,
    pub group: String,
    /// The group's ranks in the world, in runs such as `0-7` and `0-12:4`.
    #[serde(with = "rank_ranges")]
    pub members: Vec<usize>,
    pub in_group: u64,
    pub bytes: usize,
    pub algorithm: String,
    pub root: Option<usize>,
    pub started: f64,
    pub ended: Option<f64>,
}

/// Converts nanoseconds to seconds.
pub fn seconds(ns: u64) -> f64 {
    ns as f64 * 1e-9
}

impl From<&CollectiveRecord> for CollectiveState {
    fn from(entry: &CollectiveRecord) -> Self {
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

impl fmt::Display for CollectiveState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.number, self.op)?;
        self.unit.iter().try_for_each(|unit| write!(f, " of {unit}"))
    }
}

/// The exchange that a rank is in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// The ranks of the world that it waits for.
    pub with: Vec<usize>,
    /// The exchange's number in the collective.
    pub number: u64,
}

/// The state of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    pub rank: usize,
    pub pid: u32,
    pub host: String,
    /// The number of the heartbeat; grows while the rank is alive.
    pub beat: u64,
    /// The time at which it was written, in seconds since 1970.
    pub time: f64,
    /// The activity of the compute thread, and its start.
    pub phase: String,
    pub phase_since: f64,
    /// Whether it is blocked on communication.
    pub waits: bool,
    /// The last collective that finished, and the one in flight.
    pub finished: Option<CollectiveState>,
    pub current: Option<CollectiveState>,
    /// The exchange in flight in the current collective.
    pub exchange: Option<Exchange>,
}

/// The flight recorder of a rank, as it is written to a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlightRecorderFile {
    pub rank: usize,
    pub pid: u32,
    pub host: String,
    pub time: f64,
    pub collectives: Vec<CollectiveState>,
}

/// The files of the watchdogs.
#[derive(Debug, Clone)]
pub struct WatchdogFiles {
    folder: PathBuf,
    /// The number of the node of every rank of the world.
    nodes: Arc<[usize]>,
}

/// File names, or their beginnings.
const HEARTBEAT: &str = "heartbeat-";
const RECORDER: &str = "flight-recorder-rank-";
const MARKER: &str = "stalled";

/// Returns the position of a rank's heartbeat: its node's first rank, and its index on the node.
fn place(nodes: &[usize], rank: usize) -> (usize, usize) {
    let mut ranks = (0..nodes.len()).filter(|&other| nodes[other] == nodes[rank]);
    let first = ranks.next().unwrap_or(rank);
    let before = ranks.take_while(|&other| other <= rank).count();
    (first, before)
}

impl WatchdogFiles {
    pub fn new(folder: &Path, nodes: Arc<[usize]>) -> Self {
        Self { folder: folder.to_path_buf(), nodes }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of the heartbeats of the node whose first rank is `first`.
    fn heartbeats_of(&self, first: usize) -> PathBuf {
        self.folder.join(format!("{HEARTBEAT}{first:05}"))
    }

    pub fn recorder_path(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("{RECORDER}{rank:05}.json"))
    }

    fn marker(&self) -> PathBuf {
        self.folder.join(MARKER)
    }

    /// Removes the files of an earlier job.
    pub fn clear(&self) -> Result<()> {
        let refused = |e| Error::io("clear", &self.folder, e);
        for entry in fs::read_dir(&self.folder).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            let is_ours = entry.file_name().to_str().is_some_and(|name| {
                name == MARKER || [HEARTBEAT, RECORDER].iter().any(|start| name.starts_with(start))
            });
            if is_ours {
                fs::remove_file(entry.path()).map_err(|e| Error::io("remove", &entry.path(), e))?;
            }
        }
        Ok(())
    }

    /// Returns where a rank writes its heartbeats.
    pub fn heartbeat_slot(&self, rank: usize) -> HeartbeatSlot {
        let (first, line) = place(&self.nodes, rank);
        HeartbeatSlot { path: self.heartbeats_of(first), offset: (line * LINE) as u64 }
    }

    /// Reads the last heartbeats of all ranks.
    pub fn read(&self) -> Vec<Option<Heartbeat>> {
        let mut found = vec![None; self.nodes.len()];
        for first in (0..self.nodes.len()).filter(|&rank| place(&self.nodes, rank) == (rank, 0)) {
            let ranks: Vec<usize> = (first..self.nodes.len())
                .filter(|&rank| self.nodes[rank] == self.nodes[first])
                .collect();
            for attempt in 0..READS {
                if attempt > 0 {
                    std::thread::sleep(Duration::from_millis(10));
                }
                let bytes = fs::read(self.heartbeats_of(first)).unwrap_or_default();
                let mut is_torn = false;
                for (&rank, line) in ranks.iter().zip(bytes.chunks(LINE)) {
                    let text = line.trim_ascii();
                    // A line that was never written holds zeros; a rank that has left writes
                    // spaces.
                    if text.is_empty() || text[0] == 0 {
                        found[rank] = None;
                        continue;
                    }
                    match serde_json::from_slice(text) {
                        Ok(heartbeat) => found[rank] = Some(heartbeat),
                        Err(_) => is_torn = true,
                    }
                }
                if !is_torn {
                    break;
                }
            }
        }
        found
    }

    /// Reads the flight recorder of a rank, if it has written one.
    pub fn read_recorder(&self, rank: usize) -> Option<FlightRecorderFile> {
        serde_json::from_slice(&fs::read(self.recorder_path(rank)).ok()?).ok()
    }

    /// Creates the marker that the job hangs. Returns true if this is the first rank to do so.
    pub fn mark_hang(&self) -> bool {
        match own_files::create_new(&self.marker()) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
            // If nothing can be written, every rank acts as the first.
            _ => true,
        }
    }

    /// Writes the report, for ranks that the abort does not reach.
    pub fn write_report(&self, report: &str) {
        // Without it they abort as well, with a shorter report.
        let _ = own_files::write(&self.marker(), format!("{report}\n"));
    }

    /// Reads the report, if a rank has written one.
    pub fn read_report(&self) -> Option<String> {
        fs::read_to_string(self.marker()).ok()?.strip_suffix('\n').map(str::to_string)
    }

    /// Returns true if a rank has marked the job as hanging.
    pub fn is_hang_marked(&self) -> bool {
        self.marker().exists()
    }

    /// Removes the marker: the job continues after all.
    pub fn clear_hang_mark(&self) {
        // If it cannot be removed, the ranks only write their flight recorders too early.
        let _ = fs::remove_file(self.marker());
    }
}

/// The position of a rank's heartbeat in its node's file.
#[derive(Debug, Clone)]
pub struct HeartbeatSlot {
    pub path: PathBuf,
    offset: u64,
}

impl HeartbeatSlot {
    /// Overwrites the rank's heartbeat.
    pub fn write(&self, heartbeat: &Heartbeat) -> std::io::Result<()> {
        self.put(&line(heartbeat)?)
    }

    /// Erases the rank's heartbeat, which shows that it has left in an orderly way. The last rank
    /// of the node removes the file.
    pub fn leave(&self) {
        let left = self.put(&blank());
        let is_last = left.is_ok()
            && fs::read(&self.path).is_ok_and(|bytes| {
                bytes.iter().all(|byte| *byte == 0 || byte.is_ascii_whitespace())
            });
        if is_last {
            // Another rank of the node may have just removed it.
            let _ = fs::remove_file(&self.path);
        }
    }

    fn put(&self, line: &[u8]) -> std::io::Result<()> {
        own_files::update(&self.path)?.write_all_at(line, self.offset)
    }
}

fn blank() -> Vec<u8> {
    let mut line = vec![b' '; LINE];
    line[LINE - 1] = b'\n';
    line
}

/// Formats the line of a heartbeat. If it is too long, the last finished collective is omitted,
/// then the members of the current one's group.
///
/// # Errors
/// Returns an error if it is still too long.
fn line(heartbeat: &Heartbeat) -> std::io::Result<Vec<u8>> {
    let cut = |text: &str| text.chars().take(NAME).collect::<String>();
    let short = |collective: &CollectiveState| CollectiveState {
        unit: collective.unit.as_deref().map(cut),
        ..collective.clone()
    };
    let mut shortened = Heartbeat {
        host: cut(&heartbeat.host),
        finished: heartbeat.finished.as_ref().map(short),
        current: heartbeat.current.as_ref().map(short),
        ..heartbeat.clone()
    };
    let mut text = serde_json::to_vec(&shortened)?;
    if text.len() >= LINE {
        shortened.finished = None;
        text = serde_json::to_vec(&shortened)?;
    }
    if text.len() >= LINE {
        shortened.current.iter_mut().for_each(|collective| collective.members = Vec::new());
        text = serde_json::to_vec(&shortened)?;
    }
    let mut line = blank();
    line.get_mut(..text.len())
        .filter(|_| text.len() < LINE)
        .ok_or_else(|| std::io::Error::other("a heartbeat does not fit its line"))?
        .copy_from_slice(&text);
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heartbeat(rank: usize, members: Vec<usize>) -> Heartbeat {
        let collective = CollectiveState {
            number: u64::MAX,
            op: "reduce_scatter".into(),
            unit: Some("\u{fc}".repeat(1000)),
            group: "data".into(),
            members,
            in_group: u64::MAX,
            bytes: usize::MAX,
            algorithm: "reduce-to-one".into(),
            root: Some(99_999),
            started: 1.7e9 + 1.0 / 3.0,
            ended: Some(1.7e9 + 1.0 / 3.0),
        };
        Heartbeat {
            rank,
            pid: u32::MAX,
            host: "n".repeat(255),
            beat: 1,
            time: 1.5,
            phase: "forward".into(),
            phase_since: 1.25,
            waits: true,
            finished: Some(collective.clone()),
            current: Some(collective),
            exchange: Some(Exchange { with: vec![1, 2], number: 3 }),
        }
    }

    /// Returns the sorted names of the files in a folder.
    fn names_in(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_node_has_one_file_of_heartbeats() {
        let folder = tempfile::tempdir().unwrap();
        // Ranks in turn on two nodes.
        let files = WatchdogFiles::new(folder.path(), [0, 1, 0, 1, 0].into());
        assert_eq!(files.read(), vec![None; 5]);
        let all: Vec<Heartbeat> = (0..5)
            .map(|rank| Heartbeat {
                host: "node".into(),
                finished: None,
                current: None,
                ..heartbeat(rank, vec![])
            })
            .collect();
        for rank in [4, 3, 0] {
            files.heartbeat_slot(rank).write(&all[rank]).unwrap();
        }
        let some = |ranks: &[usize]| {
            (0..5).map(|rank| ranks.contains(&rank).then(|| all[rank].clone())).collect::<Vec<_>>()
        };
        assert_eq!(files.read(), some(&[0, 3, 4]));
        for rank in [1, 2] {
            files.heartbeat_slot(rank).write(&all[rank]).unwrap();
        }
        assert_eq!(files.read(), some(&[0, 1, 2, 3, 4]));
        assert_eq!(names_in(folder.path()), ["heartbeat-00000", "heartbeat-00001"]);
        // The last rank of a node takes the file with it.
        for rank in [0, 2, 1] {
            files.heartbeat_slot(rank).leave();
        }
        assert_eq!(files.read(), some(&[3, 4]));
        for rank in [4, 3] {
            files.heartbeat_slot(rank).leave();
        }
        assert!(names_in(folder.path()).is_empty());
        assert!(files.mark_hang() && !files.mark_hang() && files.is_hang_marked());
        assert_eq!(files.read_report(), None);
        files.write_report("it stands\nhint: still");
        assert_eq!(
            (files.is_hang_marked(), files.read_report().as_deref()),
            (true, Some("it stands\nhint: still"))
        );
        fs::write(folder.path().join("rank-00003.log"), "kept").unwrap();
        files.heartbeat_slot(3).write(&all[3]).unwrap();
        files.clear().unwrap();
        assert!(!files.is_hang_marked() && files.read()[3].is_none());
        assert_eq!(names_in(folder.path()), ["rank-00003.log"]);
    }

    /// With any number of ranks and any length of names, a heartbeat fits its line and keeps the
    /// most important facts.
    #[test]
    fn a_heartbeat_fits_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let files = WatchdogFiles::new(folder.path(), vec![0; 2].into());
        let regular: Vec<usize> = (0..100_000).step_by(8).collect();
        let odd: Vec<usize> = (0..2000).map(|i| i * i).collect();
        files.heartbeat_slot(0).write(&heartbeat(0, regular.clone())).unwrap();
        files.heartbeat_slot(1).write(&heartbeat(1, odd)).unwrap();
        let read = files.read();
        let [first, second] = [0, 1].map(|rank: usize| read[rank].clone().unwrap());
        assert_eq!(first.current.unwrap().members, regular);
        assert!(first.finished.is_some() && first.host.len() == NAME);
        assert_eq!(
            (second.rank, second.finished, second.current.unwrap().members),
            (1, None, vec![])
        );
    }
}
