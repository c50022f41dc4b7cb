//! `--trace` of a run on servers: workers, servers and the coordinator in one file, on the
//! coordinator's clock.
//!
//! Workers and servers send their events as they go; nothing is kept for the end of a run that some
//! of them may not see.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::address::host_name;
use super::protocol::{CoordinatorRequest, CoordinatorResponse};
use super::rpc_client::RpcClient;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{Activity, Track, now};
use hpctrain_config::telemetry::trace_file::{TraceEvent, TraceFile};

/// Readings of the coordinator's clock, of which the quickest counts.
const READINGS: usize = 16;

/// Events of a message: less than a MiB.
const AT_ONCE: usize = 4096;

/// The name of the coordinator in the trace.
const COORDINATOR: &str = "coordinator";

/// The file, at the coordinator.
pub struct Collected(Mutex<State>);

struct State {
    /// None once it is written.
    file: Option<TraceFile>,
    /// Threads by process.
    known: BTreeMap<String, Vec<String>>,
    /// Processes in the order of their coming.
    processes: Vec<String>,
    lost: u64,
}

impl Collected {
    /// A trace in this file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn begin(mut file: TraceFile) -> Result<Self> {
        file.begin(now())?;
        Ok(Self(Mutex::new(State {
            file: Some(file),
            known: BTreeMap::new(),
            processes: vec![],
            lost: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes events of a process, by thread; `lost` more found no room there.
    ///
    /// # Errors
    /// The file system refused.
    pub fn take(&self, process: &str, events: &[(String, TraceEvent)], lost: u64) -> Result<()> {
        let mut state = self.lock();
        state.lost += lost;
        let State { file: Some(file), known, processes, .. } = &mut *state else { return Ok(()) };
        let threads = known.entry(process.into()).or_default();
        let number = processes.iter().position(|other| other == process);
        let number = match number {
            Some(number) => number,
            None => {
                processes.push(process.into());
                file.process(processes.len() - 1, process)?;
                processes.len() - 1
            }
        };
        for (name, event) in events {
            let thread = match threads.iter().position(|other| other == name) {
                Some(thread) => thread,
                None => {
                    threads.push(name.clone());
                    file.thread(number, threads.len() - 1, name)?;
                    threads.len() - 1
                }
            };
            file.event(number, thread, event)?;
        }
        Ok(())
    }

    /// Takes an event of the coordinator's own, which has ended now.
    ///
    /// # Errors
    /// As [`Collected::take`].
    pub fn own(&self, name: &str, start: u64, details: serde_json::Value) -> Result<()> {
        let event = TraceEvent { name: name.into(), unit: None, start, end: now(), details };
        self.take(COORDINATOR, &[("steps".into(), event)], 0)
    }

    /// Ends the file.
    ///
    /// # Errors
    /// The file system refused.
    pub fn end(&self) -> Result<()> {
        let mut state = self.lock();
        let lost = state.lost;
        state.file.take().map_or(Ok(()), |file| file.end(lost))
    }
}

/// A recording of this process, for the coordinator.
pub struct Recording {
    process: String,
    /// Nanoseconds to add to this process's clock.
    offset: i64,
}

impl Recording {
    /// Of a process with this name; asks the coordinator for its clock.
    ///
    /// # Errors
    /// The coordinator is gone.
    pub fn start(process: String, coordinator: &mut RpcClient) -> Result<Self> {
        let mut quickest = u64::MAX;
        let mut offset = 0;
        for _ in 0..READINGS {
            let before = now();
            let CoordinatorResponse::Clock { time, host } =
                coordinator.tell(&CoordinatorRequest::Clock)?
            else {
                return Err(Error::comm("the coordinator does not tell the time"));
            };
            let after = now();
            // Processes of one host read the same clock, more exactly than messages could tell.
            if host == host_name() {
                break;
            }
            if after - before < quickest {
                quickest = after - before;
                offset = (i128::from(time) - i128::from(before) - i128::from(quickest / 2)) as i64;
            }
        }
        Ok(Self { process, offset })
    }

    /// Sends the events of an activity since the last call.
    ///
    /// # Errors
    /// The coordinator is gone.
    pub fn send(&self, coordinator: &mut RpcClient, activity: &Activity) -> Result<()> {
        let events = activity.take();
        let event = |event: &hpctrain_base::spans::SpanEvent| {
            (event.track, TraceEvent::of(event, self.offset))
        };
        let named = |(track, event): (Track, TraceEvent)| (track.name().to_string(), event);
        self.tell(coordinator, events.kept.iter().map(event).map(named).collect(), events.lost)
    }

    /// Sends events of this process, by its own clock.
    ///
    /// # Errors
    /// The coordinator is gone.
    pub fn send_events(
        &self,
        coordinator: &mut RpcClient,
        events: Vec<(String, TraceEvent)>,
    ) -> Result<()> {
        let shifted = |(thread, event): (String, TraceEvent)| {
            let [start, end] =
                [event.start, event.end].map(|time| time.saturating_add_signed(self.offset));
            (thread, TraceEvent { start, end, ..event })
        };
        self.tell(coordinator, events.into_iter().map(shifted).collect(), 0)
    }

    fn tell(
        &self,
        coordinator: &mut RpcClient,
        events: Vec<(String, TraceEvent)>,
        mut lost: u64,
    ) -> Result<()> {
        for some in events.chunks(AT_ONCE) {
            let process = self.process.clone();
            let events = some.to_vec();
            coordinator.tell::<CoordinatorResponse>(&CoordinatorRequest::Events {
                process,
                events,
                lost,
            })?;
            lost = 0;
        }
        Ok(())
    }
}
