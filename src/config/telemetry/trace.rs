//! `--trace`: the activity of the threads of all ranks, on one clock, as a file for
//! <https://ui.perfetto.dev> or `chrome://tracing`.
//!
//! Events stay in the memory of their rank until the end of the run. Then rank 0 collects and
//! writes them. Its clock counts: ranks on other hosts measure at the start the offset of theirs
//! ([`Comm::clock_offset`]).

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::trace_file::{TraceEvent, TraceFile};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{SpanEvent, Track};
use hpctrain_comm::Comm;
use hpctrain_device::Backend;

/// Events of a rank that travel at once: a few MiB.
const ROUND: usize = 1 << 14;

/// A recording under way on this rank.
pub struct Trace {
    /// On rank 0 only.
    file: Option<TraceFile>,
    /// Nanoseconds to add to this rank's clock.
    offset: i64,
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

impl Trace {
    /// Begins to record, for rank 0 to write to `path`. Collective over the world.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn start<B: Backend>(comm: &Comm<B>, path: &Path) -> Result<Self> {
        let world = comm.world();
        let file = (comm.rank() == 0).then(|| TraceFile::create(path)).transpose();
        let file = world.all_ok(file)?;
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
        let head = Head {
            host: comm.node().host,
            events: recorded.kept.len(),
            lost: recorded.lost,
            first,
        };
        let head = serde_json::to_vec(&head).map_err(|e| Error::internal(e.to_string()))?;
        let heads =
            world.gather_bytes(head).wait()?.into_iter().map(|head| serde_json::from_slice(&head));
        let heads: Vec<Head> =
            heads.collect::<Result<_, _>>().map_err(|e| Error::comm(format!("a trace: {e}")))?;

        let origin = heads.iter().filter_map(|head| head.first).min().unwrap_or_default();
        let mut written = self.file.as_mut().map_or(Ok(()), |file| begin(file, &heads, origin));
        let rounds = heads.iter().map(|head| head.events.div_ceil(ROUND)).max().unwrap_or(0);
        let mut chunks = recorded.kept.chunks(ROUND);
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

    /// A time of this rank on rank 0's clock.
    fn shared_time(&self, time: u64) -> u64 {
        time.saturating_add_signed(self.offset)
    }

    /// Events as lines that each follow a comma.
    fn lines(&self, rank: usize, events: &[SpanEvent], origin: u64) -> Result<Vec<u8>> {
        let mut lines = Vec::new();
        for event in events {
            lines.extend(TraceEvent::of(event, self.offset).line(
                rank,
                thread(event.track),
                origin,
            )?);
        }
        Ok(lines)
    }
}

/// Begins the trace of these ranks.
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

/// Number of a thread.
fn thread(track: Track) -> usize {
    track as usize + 1
}
