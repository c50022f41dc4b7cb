//! `--trace` of a run with parameter servers: one file with workers, servers and the coordinator,
//! on the coordinator's clock.
//!
//! Workers and servers send their events during the run, since they may leave before its end.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::protocol::{CoordinatorRequest, CoordinatorResponse};
use super::rpc_client::RpcClient;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{Activity, now};
use hpctrain_comm::host_name;
use hpctrain_config::telemetry::trace_file::{TraceEvent, TraceFile};

/// The number of readings of the coordinator's clock, of which the one with the shortest round trip
/// is used.
const CLOCK_READINGS: usize = 16;

/// The maximum number of events of a message, which keeps it below 1 MiB.
const EVENTS_PER_MESSAGE: usize = 4096;

/// The name of the coordinator in the trace.
const COORDINATOR: &str = "coordinator";

/// The trace file at the coordinator.
pub struct TraceCollector(Mutex<State>);

struct State {
    /// The file, until it is complete.
    file: Option<TraceFile>,
    /// The threads of each process.
    known: BTreeMap<String, Vec<String>>,
    /// The processes in order of arrival.
    processes: Vec<String>,
    lost: u64,
}

impl TraceCollector {
    /// Starts a trace in a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
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

    /// Writes events of a process, each with its thread; `lost` events were dropped there.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
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

    /// Writes an event of the coordinator that ends now.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn own(&self, name: &str, start: u64, details: serde_json::Value) -> Result<()> {
        let event = TraceEvent { name: name.into(), unit: None, start, end: now(), details };
        self.take(COORDINATOR, &[("steps".into(), event)], 0)
    }

    /// Completes the file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn end(&self) -> Result<()> {
        let mut state = self.lock();
        let lost = state.lost;
        state.file.take().map_or(Ok(()), |file| file.end(lost))
    }
}

/// Sends the events of this process to the coordinator.
pub struct TraceSender {
    process: String,
    /// The nanoseconds to add to the clock of this process.
    offset: i64,
}

impl TraceSender {
    /// Starts a recording for a process with this name, and synchronizes with the coordinator's
    /// clock.
    ///
    /// # Errors
    /// Returns an error if the coordinator cannot be reached.
    pub fn start(process: String, coordinator: &mut RpcClient) -> Result<Self> {
        let mut quickest = u64::MAX;
        let mut offset = 0;
        for _ in 0..CLOCK_READINGS {
            let before = now();
            let CoordinatorResponse::Clock { time, host } =
                coordinator.call(&CoordinatorRequest::Clock)?
            else {
                return Err(Error::comm("the coordinator did not send its time"));
            };
            let after = now();
            // Processes on one host share a clock, so no offset is needed.
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
    /// Returns an error if the coordinator cannot be reached.
    pub fn send(&self, coordinator: &mut RpcClient, activity: &Activity) -> Result<()> {
        let events = activity.take();
        let recorded = events.recorded.iter().map(|event| {
            (event.track.name().to_string(), TraceEvent::from_span(event, self.offset))
        });
        self.send_chunks(coordinator, recorded.collect(), events.lost)
    }

    /// Sends events with times of this process's clock.
    ///
    /// # Errors
    /// Returns an error if the coordinator cannot be reached.
    pub fn send_events(
        &self,
        coordinator: &mut RpcClient,
        events: Vec<(String, TraceEvent)>,
    ) -> Result<()> {
        let shifted = events.into_iter().map(|(thread, event)| {
            let [start, end] =
                [event.start, event.end].map(|time| time.saturating_add_signed(self.offset));
            (thread, TraceEvent { start, end, ..event })
        });
        self.send_chunks(coordinator, shifted.collect(), 0)
    }

    /// Sends events in messages of limited size.
    fn send_chunks(
        &self,
        coordinator: &mut RpcClient,
        events: Vec<(String, TraceEvent)>,
        mut lost: u64,
    ) -> Result<()> {
        for chunk in events.chunks(EVENTS_PER_MESSAGE) {
            let process = self.process.clone();
            let events = chunk.to_vec();
            coordinator.call::<CoordinatorResponse>(&CoordinatorRequest::Events {
                process,
                events,
                lost,
            })?;
            lost = 0;
        }
        Ok(())
    }
}
