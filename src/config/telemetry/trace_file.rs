//! Trace files for <https://ui.perfetto.dev> or `chrome://tracing`: processes, their threads, and
//! events.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::SpanEvent;

/// A trace file that is being written.
pub struct TraceFile {
    path: PathBuf,
    out: BufWriter<File>,
    /// Time 0 of the trace.
    origin: u64,
    is_empty: bool,
}

/// A complete event in the trace event format; times are in microseconds.
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

/// An activity of a thread; times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// The name of the activity.
    pub name: String,
    /// The block that it concerns.
    pub unit: Option<String>,
    /// The start.
    pub start: u64,
    /// The end.
    pub end: u64,
    /// Details besides the name.
    pub details: serde_json::Value,
}

impl TraceEvent {
    /// Creates a trace event from a span, and adds `offset` nanoseconds to its times.
    pub fn from_span(event: &SpanEvent, offset: i64) -> Self {
        Self {
            name: event.name.into(),
            unit: event.unit.as_ref().map(|unit| unit.to_string()),
            start: event.start.saturating_add_signed(offset),
            end: event.end.saturating_add_signed(offset),
            details: details(event),
        }
    }

    /// Formats the event as a line of a trace whose time 0 is `origin`, after a comma.
    ///
    /// # Errors
    /// Returns an error if the event cannot be serialized, which is not expected.
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
    /// Opens a file at `path` without changing its content yet.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        // An older trace is kept until `begin`.
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|e| {
            Error::io("write the trace", path, e)
                .hint("give --trace a file in a directory that can be written")
        })?;
        Ok(Self { path: path.to_path_buf(), out: BufWriter::new(file), origin: 0, is_empty: true })
    }

    /// Truncates the file and starts the trace, whose time 0 is `origin`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, as do all methods below.
    pub fn begin(&mut self, origin: u64) -> Result<()> {
        self.origin = origin;
        self.out.get_ref().set_len(0).map_err(|e| Error::io("write", &self.path, e))?;
        self.write(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")
    }

    /// Names a process.
    pub fn process(&mut self, process: usize, name: &str) -> Result<()> {
        let metadata = |key: &str, args: serde_json::Value| json!({ "name": key, "ph": "M", "pid": process, "tid": 0, "args": args });
        self.object(&metadata("process_name", json!({ "name": name })))?;
        self.object(&metadata("process_sort_index", json!({ "sort_index": process })))
    }

    /// Names a thread of a process.
    pub fn thread(&mut self, process: usize, thread: usize, name: &str) -> Result<()> {
        let args = json!({ "name": name });
        self.object(&json!({ "name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": args }))
    }

    /// Writes an event of a thread.
    pub fn event(&mut self, process: usize, thread: usize, event: &TraceEvent) -> Result<()> {
        let start = event.start.saturating_sub(self.origin);
        self.object(&event.complete(process, thread, start))
    }

    /// Writes events that [`TraceEvent::line`] has formatted.
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

    /// Ends the trace; `lost` is the number of events that were dropped.
    pub fn end(mut self, lost: u64) -> Result<()> {
        if lost > 0 {
            log::warn!(
                "{} lacks {lost} events: the event buffer of a rank was full",
                self.path.display()
            );
        }
        // Time 0, in seconds since 1970, and the number of events that were dropped.
        let other = json!({ "unix_time": self.origin as f64 * 1e-9, "lost_events": lost });
        self.write(format!("\n],\"otherData\":{other}}}\n").as_bytes())?;
        self.out.flush().map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Returns the details of an event besides its name.
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
