//! `--trace`: the activity of the threads of all ranks, on one clock, as a file for <https://ui.perfetto.dev> or
//! `chrome://tracing`.
//!
//! Events stay in the memory of their rank until the end of the run. Then rank 0 collects and writes them. Its clock
//! counts: ranks on other hosts measure at the start the offset of theirs ([`Comm::clock_offset`]).

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::activity::{Event, Track};
use crate::backend::Backend;
use crate::comm::Comm;
use crate::error::{Error, Result};

/// Events of a rank that travel at once: a few MiB.
const ROUND: usize = 1 << 14;

/// A recording under way on this rank.
pub struct Trace {
    /// On rank 0 only.
    file: Option<TraceFile>,
    /// Nanoseconds to add to this rank's clock.
    offset: i64,
}

struct TraceFile {
    path: PathBuf,
    out: BufWriter<File>,
}

/// Facts about a rank that every other knows before the events come.
#[derive(Serialize, Deserialize)]
struct Head {
    host: String,
    events: usize,
    lost: u64,
    /// Start of the first event, on rank 0's clock.
    first: Option<u64>,
}

/// An event as the viewers read it; times in microseconds.
#[derive(Serialize)]
struct Complete<'a> {
    name: String,
    cat: &'a str,
    ph: &'a str,
    ts: f64,
    dur: f64,
    pid: usize,
    tid: usize,
    args: serde_json::Value,
}

impl Trace {
    /// Begins to record, for rank 0 to write to `path`. Collective over the world.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn start<B: Backend>(comm: &Comm<B>, path: &Path) -> Result<Self> {
        let world = comm.world();
        let file = (comm.rank() == 0).then(|| TraceFile::create(path)).transpose();
        let file = world.agree(file)?;
        let hosts = world.gather_bytes(comm.node().host.into_bytes()).wait()?;
        let elsewhere = |host: &Vec<u8>| *host != hosts[0];
        let measured = if hosts.iter().any(elsewhere) { comm.clock_offset()? } else { 0 };
        // The processes of one host read the same clock, more exactly than messages could tell.
        let offset = if elsewhere(&hosts[comm.rank()]) { measured } else { 0 };
        comm.activity().record(true);
        Ok(Self { file, offset })
    }

    /// Writes the recorded events. Collective over the world.
    ///
    /// # Errors
    /// The file cannot be written, on all ranks; or a message failed.
    pub fn finish<B: Backend>(mut self, comm: &Comm<B>) -> Result<()> {
        let world = comm.world();
        comm.activity().record(false);
        let mut recorded = comm.activity().take();
        recorded.kept.sort_by_key(|event| (event.track, event.start, u64::MAX - event.end));
        let first = recorded.kept.iter().map(|event| self.shared_time(event.start)).min();
        let head = Head { host: comm.node().host, events: recorded.kept.len(), lost: recorded.lost, first };
        let head = serde_json::to_vec(&head).map_err(|e| Error::internal(e.to_string()))?;
        let heads = world.gather_bytes(head).wait()?.into_iter().map(|head| serde_json::from_slice(&head));
        let heads: Vec<Head> = heads.collect::<Result<_, _>>().map_err(|e| Error::comm(format!("a trace: {e}")))?;

        let origin = heads.iter().filter_map(|head| head.first).min().unwrap_or_default();
        let mut written = self.file.as_mut().map_or(Ok(()), |file| file.begin(&heads, origin));
        let rounds = heads.iter().map(|head| head.events.div_ceil(ROUND)).max().unwrap_or(0);
        let mut chunks = recorded.kept.chunks(ROUND);
        for _ in 0..rounds {
            let mine = self.lines(comm.rank(), chunks.next().unwrap_or_default(), origin)?;
            for lines in world.gather_bytes(mine).wait()? {
                written = written.and_then(|()| self.file.as_mut().map_or(Ok(()), |file| file.write(&lines)));
            }
        }
        world.agree(written.and_then(|()| self.file.map_or(Ok(()), TraceFile::end)))
    }

    /// A time of this rank on rank 0's clock.
    fn shared_time(&self, time: u64) -> u64 {
        time.saturating_add_signed(self.offset)
    }

    /// Events as lines that each follow a comma.
    fn lines(&self, rank: usize, events: &[Event], origin: u64) -> Result<Vec<u8>> {
        let mut lines = Vec::new();
        for event in events {
            let start = self.shared_time(event.start) - origin;
            let complete = Complete {
                name: event.unit.as_ref().map_or(event.name.into(), |unit| format!("{} {unit}", event.name)),
                cat: event.name,
                ph: "X",
                ts: start as f64 * 1e-3,
                dur: (event.end - event.start) as f64 * 1e-3,
                pid: rank,
                tid: thread(event.track),
                args: details(event),
            };
            lines.extend_from_slice(b",\n");
            serde_json::to_writer(&mut lines, &complete).map_err(|e| Error::internal(e.to_string()))?;
        }
        Ok(lines)
    }
}

/// Number of a thread.
fn thread(track: Track) -> usize {
    track as usize + 1
}

/// Details of an event besides its name.
fn details(event: &Event) -> serde_json::Value {
    let mut args = serde_json::Map::new();
    if let Some(unit) = &event.unit {
        args.insert("unit".into(), (**unit).into());
    }
    if let Some(message) = &event.message {
        args.insert("number".into(), message.number.into());
        args.insert("group".into(), message.group.into());
        args.insert("ranks".into(), message.ranks.into());
        args.insert("bytes".into(), message.bytes.into());
        args.insert("algorithm".into(), message.algorithm.into());
    }
    args.into()
}

impl TraceFile {
    fn create(path: &Path) -> Result<Self> {
        // An older trace stays until there is a newer one.
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|e| {
            Error::io("write the trace", path, e).hint("give --trace a file in a directory that can be written")
        })?;
        Ok(Self { path: path.to_path_buf(), out: BufWriter::new(file) })
    }

    fn begin(&mut self, heads: &[Head], origin: u64) -> Result<()> {
        self.out.get_ref().set_len(0).map_err(|e| Error::io("write", &self.path, e))?;
        let lost: u64 = heads.iter().map(|head| head.lost).sum();
        if lost > 0 {
            log::warn!("{} lacks {lost} events: the memory for events was full", self.path.display());
        }
        // Time 0, in seconds since 1970, and the number of events that did not fit.
        let other = json!({ "unix_time": origin as f64 * 1e-9, "lost_events": lost });
        let mut text = format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[");
        let mut comma = "\n";
        for (rank, head) in heads.iter().enumerate() {
            let name = json!({ "name": format!("rank {rank} on {}", head.host) });
            let process = json!({ "name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": name });
            let order = json!({ "sort_index": rank });
            let order = json!({ "name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": order });
            text += &format!("{comma}{process},\n{order}");
            comma = ",\n";
            for track in Track::ALL {
                let name = json!({ "name": track.name() });
                let named = json!({
                    "name": "thread_name", "ph": "M", "pid": rank, "tid": thread(track), "args": name,
                });
                text += &format!(",\n{named}");
            }
        }
        self.write(text.as_bytes())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| Error::io("write", &self.path, e))
    }

    fn end(mut self) -> Result<()> {
        self.write(b"\n]}\n")?;
        self.out.flush().map_err(|e| Error::io("write", &self.path, e))
    }
}
