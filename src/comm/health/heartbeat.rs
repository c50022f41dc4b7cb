//! Heartbeat and ledger files of the ranks in the directory of the watch, as JSON: readable even if
//! their rank no longer answers.
//!
//! The ranks of a node share one file of heartbeats, called by the node's first rank: each writes a
//! line of fixed length, its own. So there are as many files as nodes, whose lines come from one
//! kernel each, and a report reads each file once. A rank opens the file for every beat and closes
//! it again, which is what makes a beat visible to other nodes on NFS.

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

/// Characters of a name in a heartbeat, at most.
const NAME: usize = 120;

/// Attempts to read a file that is being written.
const READS: usize = 5;

/// A collective, as reports describe it. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeerHeartbeat {
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

/// Nanoseconds as seconds.
pub fn seconds(ns: u64) -> f64 {
    ns as f64 * 1e-9
}

impl From<&CollectiveRecord> for PeerHeartbeat {
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

impl fmt::Display for PeerHeartbeat {
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
    pub finished: Option<PeerHeartbeat>,
    pub current: Option<PeerHeartbeat>,
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
    pub collectives: Vec<PeerHeartbeat>,
}

/// The files of the watch.
#[derive(Debug, Clone)]
pub struct Files {
    folder: PathBuf,
    /// The node of every rank of the world.
    nodes: Arc<[usize]>,
}

/// Beginnings of their names.
const HEARTBEAT: &str = "heartbeat-";
const LEDGER: &str = "ledger-rank-";
const MARKER: &str = "stalled";

/// The place of a rank's heartbeat: its node's first rank, and its number among the ranks there.
fn place(nodes: &[usize], rank: usize) -> (usize, usize) {
    let mut ranks = (0..nodes.len()).filter(|&other| nodes[other] == nodes[rank]);
    let first = ranks.next().unwrap_or(rank);
    let before = ranks.take_while(|&other| other <= rank).count();
    (first, before)
}

impl Files {
    pub fn new(folder: &Path, nodes: Arc<[usize]>) -> Self {
        Self { folder: folder.to_path_buf(), nodes }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The heartbeats of the node whose first rank is `first`.
    fn heartbeats_of(&self, first: usize) -> PathBuf {
        self.folder.join(format!("{HEARTBEAT}{first:05}"))
    }

    pub fn ledger(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("{LEDGER}{rank:05}.json"))
    }

    fn marker(&self) -> PathBuf {
        self.folder.join(MARKER)
    }

    /// Removes the files of an earlier job.
    pub fn clear(&self) -> Result<()> {
        let ours = |name: &str| {
            name == MARKER || [HEARTBEAT, LEDGER].iter().any(|start| name.starts_with(start))
        };
        let refused = |e| Error::io("clear", &self.folder, e);
        for entry in fs::read_dir(&self.folder).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            if entry.file_name().to_str().is_some_and(ours) {
                fs::remove_file(entry.path()).map_err(|e| Error::io("remove", &entry.path(), e))?;
            }
        }
        Ok(())
    }

    /// The rank's place among the heartbeats.
    pub fn pulse(&self, rank: usize) -> Pulse {
        let (first, line) = place(&self.nodes, rank);
        Pulse { path: self.heartbeats_of(first), offset: (line * LINE) as u64 }
    }

    /// The last heartbeats of all ranks.
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
                    // A place that nobody has written yet holds zeros, one that was left spaces.
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

    /// The ledger that a rank has left.
    pub fn read_ledger(&self, rank: usize) -> Option<LedgerFile> {
        serde_json::from_slice(&fs::read(self.ledger(rank)).ok()?).ok()
    }

    /// Says that the job stands still. Whether this is the first rank to say so.
    pub fn mark(&self) -> bool {
        match own_files::create_new(&self.marker()) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
            // If nothing can be written, every rank is the first.
            _ => true,
        }
    }

    /// Leaves the report, for ranks that the end of the job does not reach.
    pub fn tell(&self, report: &str) {
        // Without it they end as well, and say less.
        let _ = own_files::write(&self.marker(), format!("{report}\n"));
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

/// A rank's place among the heartbeats of its node.
#[derive(Debug, Clone)]
pub struct Pulse {
    pub path: PathBuf,
    offset: u64,
}

impl Pulse {
    /// Writes a heartbeat over the one before.
    pub fn write(&self, heartbeat: &Heartbeat) -> std::io::Result<()> {
        self.put(&line(heartbeat)?)
    }

    /// The rank has left in good order, which its heartbeat says by being gone. The last one
    /// removes the file.
    pub fn leave(&self) {
        let left = self.put(&blank());
        let is_empty = || {
            fs::read(&self.path).is_ok_and(|bytes| {
                bytes.iter().all(|byte| *byte == 0 || byte.is_ascii_whitespace())
            })
        };
        if left.is_ok() && is_empty() {
            // Another rank of the node may have removed it in this moment.
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

/// The line of a heartbeat. Of more than fits, the last finished collective is left out, then the
/// group of the present one.
fn line(heartbeat: &Heartbeat) -> std::io::Result<Vec<u8>> {
    let cut = |text: &str| text.chars().take(NAME).collect::<String>();
    let short = |told: &PeerHeartbeat| PeerHeartbeat {
        unit: told.unit.as_deref().map(cut),
        ..told.clone()
    };
    let mut told = Heartbeat {
        host: cut(&heartbeat.host),
        finished: heartbeat.finished.as_ref().map(short),
        current: heartbeat.current.as_ref().map(short),
        ..heartbeat.clone()
    };
    let mut text = serde_json::to_vec(&told)?;
    if text.len() >= LINE {
        told.finished = None;
        text = serde_json::to_vec(&told)?;
    }
    if text.len() >= LINE {
        told.current.iter_mut().for_each(|told| told.members = Vec::new());
        text = serde_json::to_vec(&told)?;
    }
    let mut line = blank();
    line.get_mut(..text.len())
        .filter(|_| text.len() < LINE)
        .ok_or_else(|| std::io::Error::other("too long"))?
        .copy_from_slice(&text);
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heartbeat(rank: usize, members: Vec<usize>) -> Heartbeat {
        let told = PeerHeartbeat {
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
            finished: Some(told.clone()),
            current: Some(told),
            exchange: Some(Exchange { with: vec![1, 2], number: 3 }),
        }
    }

    #[test]
    fn a_node_has_one_file_of_heartbeats() {
        let folder = tempfile::tempdir().unwrap();
        // Ranks in turn on two nodes.
        let files = Files::new(folder.path(), [0, 1, 0, 1, 0].into());
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
            files.pulse(rank).write(&all[rank]).unwrap();
        }
        let some = |ranks: &[usize]| {
            (0..5).map(|rank| ranks.contains(&rank).then(|| all[rank].clone())).collect::<Vec<_>>()
        };
        assert_eq!(files.read(), some(&[0, 3, 4]));
        for rank in [1, 2] {
            files.pulse(rank).write(&all[rank]).unwrap();
        }
        assert_eq!(files.read(), some(&[0, 1, 2, 3, 4]));
        let names = || {
            let mut names: Vec<_> = fs::read_dir(folder.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        assert_eq!(names(), ["heartbeat-00000", "heartbeat-00001"]);
        // The last rank of a node takes the file with it.
        for rank in [0, 2, 1] {
            files.pulse(rank).leave();
        }
        assert_eq!(files.read(), some(&[3, 4]));
        for rank in [4, 3] {
            files.pulse(rank).leave();
        }
        assert!(names().is_empty());
        assert!(files.mark() && !files.mark() && files.marked());
        assert_eq!(files.told(), None);
        files.tell("it stands\nhint: still");
        assert_eq!(
            (files.marked(), files.told().as_deref()),
            (true, Some("it stands\nhint: still"))
        );
        fs::write(folder.path().join("rank-00003.log"), "kept").unwrap();
        files.pulse(3).write(&all[3]).unwrap();
        files.clear().unwrap();
        assert!(!files.marked() && files.read()[3].is_none());
        assert_eq!(names(), ["rank-00003.log"]);
    }

    /// However many ranks there are and however long the names, a heartbeat keeps to its line and
    /// says what matters most.
    #[test]
    fn a_heartbeat_fits_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path(), vec![0; 2].into());
        let regular: Vec<usize> = (0..100_000).step_by(8).collect();
        let odd: Vec<usize> = (0..2000).map(|i| i * i).collect();
        files.pulse(0).write(&heartbeat(0, regular.clone())).unwrap();
        files.pulse(1).write(&heartbeat(1, odd)).unwrap();
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
