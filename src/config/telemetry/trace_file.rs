//! The file of a trace, for <https://ui.perfetto.dev> or `chrome://tracing`: processes, their
//! threads, and events.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::SpanEvent;

/// The file, as it is written.
pub struct TraceFile {
    path: PathBuf,
    out: BufWriter<File>,
    /// Time 0, by the clock that counts.
    origin: u64,
    is_empty: bool,
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

/// Something that a thread did, in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// The name of the work.
    pub name: String,
    /// The block that it concerns.
    pub unit: Option<String>,
    /// Its start and its end.
    pub start: u64,
    /// See `start`.
    pub end: u64,
    /// Details besides the name.
    pub details: serde_json::Value,
}

impl TraceEvent {
    /// That of an event, whose clock lacks `offset` nanoseconds.
    pub fn of(event: &SpanEvent, offset: i64) -> Self {
        Self {
            name: event.name.into(),
            unit: event.unit.as_ref().map(|unit| unit.to_string()),
            start: event.start.saturating_add_signed(offset),
            end: event.end.saturating_add_signed(offset),
            details: details(event),
        }
    }

    /// The event as a line of a trace whose time 0 is `origin`, after others.
    ///
    /// # Errors
    /// None that is known: it is made of text and numbers.
    pub fn line(&self, process: usize, thread: usize, origin: u64) -> Result<Vec<u8>> {
        let complete = self.complete(process, thread, self.start.saturating_sub(origin));
        let mut line = b",\n".to_vec();
        serde_json::to_writer(&mut line, &complete).map_err(|e| Error::internal(e.to_string()))?;
        Ok(line)
    }

    fn complete(&self, process: usize, thread: usize, start: u64) -> Complete<'_> {
        Complete {
            name: self
                .unit
                .as_ref()
                .map_or(self.name.clone(), |unit| format!("{} {unit}", self.name)),
            cat: &self.name,
            ph: "X",
            ts: start as f64 * 1e-3,
            dur: self.end.saturating_sub(self.start) as f64 * 1e-3,
            pid: process,
            tid: thread,
            args: self.details.clone(),
        }
    }
}

impl TraceFile {
    /// A file at `path`, in which nothing is changed yet.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        // An older trace stays until there is a newer one.
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|e| {
            Error::io("write the trace", path, e)
                .hint("give --trace a file in a directory that can be written")
        })?;
        Ok(Self { path: path.to_path_buf(), out: BufWriter::new(file), origin: 0, is_empty: true })
    }

    /// Begins the trace, whose time 0 is `origin`.
    ///
    /// # Errors
    /// As those of all methods below: the file system refused.
    pub fn begin(&mut self, origin: u64) -> Result<()> {
        self.origin = origin;
        self.out.get_ref().set_len(0).map_err(|e| Error::io("write", &self.path, e))?;
        self.write(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")
    }

    /// Names a process.
    pub fn process(&mut self, process: usize, name: &str) -> Result<()> {
        let about = |of: &str, args: serde_json::Value| json!({ "name": of, "ph": "M", "pid": process, "tid": 0, "args": args });
        self.object(&about("process_name", json!({ "name": name })))?;
        self.object(&about("process_sort_index", json!({ "sort_index": process })))
    }

    /// Names a thread of a process.
    pub fn thread(&mut self, process: usize, thread: usize, name: &str) -> Result<()> {
        let args = json!({ "name": name });
        self.object(&json!({ "name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": args }))
    }

    /// An event of a thread, by the clock that counts.
    pub fn event(&mut self, process: usize, thread: usize, event: &TraceEvent) -> Result<()> {
        let start = event.start.saturating_sub(self.origin);
        self.object(&event.complete(process, thread, start))
    }

    /// Events as [`TraceEvent::line`] makes them.
    pub fn lines(&mut self, lines: &[u8]) -> Result<()> {
        self.write(lines)
    }

    fn object(&mut self, object: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(object).map_err(|e| Error::internal(e.to_string()))?;
        let comma = if std::mem::take(&mut self.is_empty) { "\n" } else { ",\n" };
        self.write(format!("{comma}{text}").as_bytes())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| Error::io("write", &self.path, e))
    }

    /// Ends the trace; so many events found no room.
    pub fn end(mut self, lost: u64) -> Result<()> {
        if lost > 0 {
            log::warn!(
                "{} lacks {lost} events: the memory for events was full",
                self.path.display()
            );
        }
        // Time 0, in seconds since 1970, and the number of events that did not fit.
        let other = json!({ "unix_time": self.origin as f64 * 1e-9, "lost_events": lost });
        self.write(format!("\n],\"otherData\":{other}}}\n").as_bytes())?;
        self.out.flush().map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Details of an event besides its name.
fn details(event: &SpanEvent) -> serde_json::Value {
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
