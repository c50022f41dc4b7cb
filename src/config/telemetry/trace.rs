//! `--trace`: a trace of the activity of the threads of all ranks, for <https://ui.perfetto.dev> or
//! `chrome://tracing`.
//!
//! Events stay in the memory of their rank until the end of the run. Then rank 0 collects and
//! writes them. All times are converted to its clock: ranks on other hosts measure the offset of
//! their clocks at the start ([`Comm::clock_offset`]).

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::trace_file::{TraceEvent, TraceFile};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{SpanEvent, Track};
use hpctrain_comm::Comm;
use hpctrain_device::Backend;

/// The number of events that a rank sends at once: a few MiB.
const ROUND: usize = 1 << 14;

/// A trace that is being recorded on this rank.
pub struct Trace {
    /// The file; only on rank 0.
    file: Option<TraceFile>,
    /// The nanoseconds to add to this rank's clock.
    offset: i64,
}

/// Metadata that each rank sends before its events.
#[derive(Serialize, Deserialize)]
struct Head {
    host: String,
    events: usize,
    lost: u64,
    /// The start of the first event, by the clock of rank 0.
    first: Option<u64>,
}

impl Trace {
    /// Starts to record; rank 0 will write the trace to `path`. Collective over the world.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, or a message fails.
    pub fn start<B: Backend>(comm: &Comm<B>, path: &Path) -> Result<Self> {
        let world = comm.world();
        let file = (comm.rank() == 0).then(|| TraceFile::create(path)).transpose();
        let file = world.all_ok(file)?;
        let hosts = world.gather_bytes(comm.node().host.into_bytes()).wait()?;
        let elsewhere = |host: &Vec<u8>| *host != hosts[0];
        let measured = if hosts.iter().any(elsewhere) { comm.clock_offset()? } else { 0 };
        // Processes of one host share a clock, which is more exact than an offset measured by
        // messages.
        let offset = if elsewhere(&hosts[comm.rank()]) { measured } else { 0 };
        comm.activity().record(true);
        Ok(Self { file, offset })
    }

    /// Writes the recorded events. Collective over the world.
    ///
    /// # Errors
    /// Returns an error, on all ranks, if the file cannot be written; or if a message fails.
    pub fn finish<B: Backend>(mut self, comm: &Comm<B>) -> Result<()> {
        let world = comm.world();
        comm.activity().record(false);
        let mut recorded = comm.activity().take();
        recorded.recorded.sort_by_key(|event| (event.track, event.start, u64::MAX - event.end));
        let first = recorded.recorded.iter().map(|event| self.shared_time(event.start)).min();
        let head = Head {
            host: comm.node().host,
            events: recorded.recorded.len(),
            lost: recorded.lost,
            first,
        };
        let head = serde_json::to_vec(&head).map_err(|e| Error::internal(e.to_string()))?;
        let heads =
            world.gather_bytes(head).wait()?.into_iter().map(|head| serde_json::from_slice(&head));
        let heads: Vec<Head> = heads.collect::<Result<_, _>>().map_err(|e| {
            Error::comm(format!("a rank sent malformed metadata of its trace: {e}"))
        })?;

        let origin = heads.iter().filter_map(|head| head.first).min().unwrap_or_default();
        let mut written = self.file.as_mut().map_or(Ok(()), |file| begin(file, &heads, origin));
        let rounds = heads.iter().map(|head| head.events.div_ceil(ROUND)).max().unwrap_or(0);
        let mut chunks = recorded.recorded.chunks(ROUND);
        for _ in 0..rounds {
            let mine = self.lines(comm.rank(), chunks.next().unwrap_or_default(), origin)?;
            for lines in world.gather_bytes(mine).wait()? {
                written = written
                    .and_then(|()| self.file.as_mut().map_or(Ok(()), |file| file.lines(&lines)));
            }
        }
        let lost = heads.iter().map(|head| head.lost).sum();
        world.all_ok(written.and_then(|()| self.file.map_or(Ok(()), |file| file.end(lost))))
    }

    /// Converts a time of this rank to the clock of rank 0.
    fn shared_time(&self, time: u64) -> u64 {
        time.saturating_add_signed(self.offset)
    }

    /// Formats events as lines of the file, each after a comma.
    fn lines(&self, rank: usize, events: &[SpanEvent], origin: u64) -> Result<Vec<u8>> {
        let mut lines = Vec::new();
        for event in events {
            lines.extend(TraceEvent::from_span(event, self.offset).line(
                rank,
                thread(event.track),
                origin,
            )?);
        }
        Ok(lines)
    }
}

/// Writes the beginning of the trace, with the names of ranks and threads.
fn begin(file: &mut TraceFile, heads: &[Head], origin: u64) -> Result<()> {
    file.begin(origin)?;
    for (rank, head) in heads.iter().enumerate() {
        file.process(rank, &format!("rank {rank} on {}", head.host))?;
        Track::ALL
            .into_iter()
            .try_for_each(|track| file.thread(rank, thread(track), track.name()))?;
    }
    Ok(())
}

/// Returns the number of a thread in the trace.
fn thread(track: Track) -> usize {
    track as usize + 1
}
