//! The communication thread of a rank.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::device::comms::DeviceComms;
use super::device::cuda_aware::DeviceScratch;
use super::device::device_queue::DeviceQueue;
use super::device::host_staged::Slots;
use super::health::flight_recorder::{Label, Size};
use super::polling::{self, Backoff};
use super::reduce_buffer::Scratch;
use super::shared::Shared;
use super::transport::tracked::TrackedTransport;
use super::transport::{GroupRanks, InFlight, Transport, World};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::spans::Track;
use hpctrain_base::spawn::spawn;
use hpctrain_device::{DeviceEvent, DeviceOperation};

/// Duration of polling for the next request after one that a thread waited for: that thread will
/// probably make it soon.
const POLL_AFTER_WAIT: Duration = Duration::from_micros(50);

/// A request to the communication thread.
pub enum CommRequest {
    /// Runs some communication, which answers through a `Reply` that it owns.
    Run(Box<dyn FnOnce(&mut CommThreadState) + Send>),
    /// Leaves the world when all earlier requests are done.
    End,
}

impl CommRequest {
    pub fn run(run: impl FnOnce(&mut CommThreadState) + Send + 'static) -> Self {
        Self::Run(Box::new(run))
    }
}

/// The state of the communication thread, which requests use.
pub struct CommThreadState {
    pub transport: Box<dyn Transport>,
    pub scratch: Scratch,
    /// Pinned slots for host-staged device memory.
    pub slots: Arc<Slots>,
    /// Scratch device memory for CUDA-aware transports.
    pub device_scratch: DeviceScratch,
    /// The communicators of the device vendor's library, such as NCCL.
    pub device_comms: DeviceComms,
    /// Collectives that the device has not finished yet.
    pub device_queue: DeviceQueue,
    pub shared: Arc<Shared>,
    failed: Option<Error>,
    /// Whether a thread was blocked when the last request was done.
    awaited: bool,
}

impl CommThreadState {
    /// Runs `act` unless an earlier request has failed: after a failure, ranks may no longer agree
    /// on the next request.
    pub fn attempt<T>(&mut self, act: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let result = self.unless_failed(act);
        self.shared.add_busy(start.elapsed());
        result
    }

    /// Runs `act` as [`CommThreadState::attempt`] does, without counting its time.
    fn unless_failed<T>(&mut self, act: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.shared.check_interruption().and_then(|()| act(self));
        self.awaited = self.shared.has_waiters();
        if let Err(error) = &result {
            self.fail(error.clone());
        }
        result
    }

    /// Waits for the device work that produces a buffer. The wait does not count as communication.
    pub fn after(&mut self, ready: Option<Box<dyn DeviceEvent>>) -> Result<()> {
        let (Some(ready), None) = (ready, &self.failed) else { return Ok(()) };
        self.wait_for_event(&*ready).inspect_err(|error| self.fail(error.clone()))
    }

    /// Waits for an event of compute, which may come after collectives in the device's queue.
    fn wait_for_event(&mut self, event: &dyn DeviceEvent) -> Result<()> {
        self.shared.add_host_wait();
        let mut backoff = Backoff::new(false);
        while !polling::poll_event(event, &mut *self.transport, &self.shared)? {
            // Another rank may have failed one of them.
            self.device_queue.poll()?;
            backoff.pause(&self.shared);
        }
        Ok(())
    }

    /// Waits until the device has finished all collectives.
    pub fn drain_device(&mut self) -> Result<()> {
        self.device_queue.drain(&mut *self.transport)
    }

    /// Returns the error after which the thread serves no more requests.
    pub fn failure(&self) -> Option<Error> {
        self.failed.clone()
    }

    fn fail(&mut self, error: Error) {
        if error.kind() == Kind::Lost {
            self.shared.note_lost_ranks();
        }
        self.failed = Some(error);
        self.device_comms.abort();
        self.device_queue.clear();
        self.transport.leave(false);
    }

    /// Forms a world of the ranks that are left after a loss, with the communicators of no device.
    pub fn shrink(&mut self) -> Result<World> {
        self.shared.forget_losses();
        let shrunk = self.transport.shrink();
        match &shrunk {
            Ok(_) => {
                self.failed = None;
                self.device_comms = DeviceComms::new(self.shared.clone());
                self.device_queue = DeviceQueue::new(self.shared.clone());
            }
            Err(error) => self.failed = Some(error.clone()),
        }
        shrunk
    }

    /// Progresses posted messages and the device's collectives, and returns which are still in
    /// flight.
    fn in_flight(&mut self) -> InFlight {
        if self.failed.is_some() {
            return InFlight::Nothing;
        }
        let progressed = self.device_queue.poll().and_then(|()| self.transport.progress());
        let in_flight = progressed.unwrap_or_else(|error| {
            self.fail(error);
            InFlight::Nothing
        });
        if self.device_queue.is_empty() { in_flight } else { in_flight.max(InFlight::Arriving) }
    }

    /// Runs an operation as [`CommThreadState::attempt`] does, and records it in the flight
    /// recorder.
    pub fn recorded<T>(
        &mut self,
        group: &GroupRanks,
        label: &Label,
        act: impl FnOnce(&mut Self, u64) -> Result<T>,
    ) -> Result<T> {
        self.attempt(|state| {
            let (number, in_group) = state.shared.flight_recorder().begin(group, label);
            state.shared.partners.restart();
            let result = act(state, in_group)?;
            state.shared.record_end(number);
            Ok(result)
        })
    }

    /// Starts a collective on the device, as [`CommThreadState::collective`] runs one on the host.
    /// The flight recorder shows it until the device has finished it.
    pub fn start_collective<T>(
        &mut self,
        group: &GroupRanks,
        label: &Label,
        act: impl FnOnce(&mut Self) -> Result<(T, Arc<dyn DeviceOperation>)>,
    ) -> Result<(T, Arc<dyn DeviceOperation>)> {
        self.unless_failed(|state| {
            let (number, in_group) = state.shared.flight_recorder().begin(group, label);
            if cfg!(debug_assertions) {
                state.compare(group, label, in_group)?;
            }
            let (value, operation) = act(state)?;
            state.device_queue.push(number, operation.clone());
            Ok((value, operation))
        })
    }

    /// Runs a collective as [`CommThreadState::recorded`] does. Debug builds first check that the
    /// group's ranks agree on it.
    pub fn collective<T>(
        &mut self,
        group: &GroupRanks,
        label: &Label,
        act: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.recorded(group, label, |state, in_group| {
            if cfg!(debug_assertions) {
                state.compare(group, label, in_group)?;
            }
            act(state)
        })
    }

    /// Compares this rank's next collective, `number` of the group, with the neighbour's.
    ///
    /// # Errors
    /// Returns an error if they differ, or a message failed.
    fn compare(&mut self, group: &GroupRanks, label: &Label, number: u64) -> Result<()> {
        let mut mine = format!("collective {number}: {}", announced(label)).into_bytes();
        // The hash covers the end of long names, which is cut off.
        let hash = crc32fast::hash(&mine);
        mine.resize(ANNOUNCED, b' ');
        mine.extend(hash.to_le_bytes());
        let mut theirs = [0; ANNOUNCED + size_of::<u32>()];
        self.transport.exchange_bytes(
            group,
            Some((group.next(), &mine)),
            Some((group.previous(), &mut theirs)),
        )?;
        if mine == theirs {
            return Ok(());
        }
        let me = describe_request(group, group.rank, &mine);
        let other = describe_request(group, group.previous(), &theirs);
        Err(Error::internal(format!("ranks of a group disagree: {me}, {other}")))
    }
}

/// Bytes of a collective's description that are sent to another rank.
const ANNOUNCED: usize = 124;

/// Describes what must be the same about a collective on all ranks of the group.
fn announced(label: &Label) -> String {
    let mut text = label.op.to_string();
    if let Some(unit) = &label.unit {
        text += &format!(" of {unit}");
    }
    if let Size::Same(bytes) = label.size {
        text += &format!(", {bytes} bytes");
    }
    if let Some(root) = label.root {
        text += &format!(" from {root}");
    }
    text + " by " + label.algorithm
}

/// Describes the request of a rank of the group by the message with which it is compared.
fn describe_request(group: &GroupRanks, rank: usize, message: &[u8]) -> String {
    format!(
        "rank {} requests {}",
        group.ranks[rank],
        String::from_utf8_lossy(&message[..ANNOUNCED]).trim_end()
    )
}

/// The handle to the communication thread.
pub struct Worker {
    requests: Sender<CommRequest>,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

impl Worker {
    /// Starts the thread. `open` creates the transport on it; if it cannot, it reports the reason
    /// itself and returns `None`.
    ///
    /// # Errors
    /// Returns an error if the system refused the thread.
    pub fn start(
        name: &str,
        shared: &Arc<Shared>,
        open: impl FnOnce() -> Option<Box<dyn Transport>> + Send + 'static,
    ) -> Result<Self> {
        let (requests, queue) = channel();
        let here = shared.clone();
        let shared = shared.clone();
        let thread = spawn(name, move || run_thread(shared, open, &queue))?;
        Ok(Self { requests, shared: here, thread })
    }

    pub fn submit(&self, request: CommRequest) {
        // If the thread has ended, the request's `Reply` is dropped, and its `Pending` returns an
        // error.
        let _ = self.requests.send(request);
        self.shared.wake();
    }

    /// Waits until the thread has finished its queue and ended.
    pub fn end(self) {
        self.submit(CommRequest::End);
        // A panic there has failed the requests that were not answered.
        let _ = self.thread.join();
    }
}

/// Runs the communication thread: opens the transport and serves the requests of `queue`.
fn run_thread(
    shared: Arc<Shared>,
    open: impl FnOnce() -> Option<Box<dyn Transport>>,
    queue: &Receiver<CommRequest>,
) {
    shared.register_thread();
    shared.activity.register_thread(Track::Communication);
    let Some(transport) = open() else { return };
    let scratch = Scratch::new(shared.clone());
    let device_scratch = DeviceScratch::new(&shared);
    let transport: Box<dyn Transport> = Box::new(TrackedTransport::new(transport, shared.clone()));
    let slots = Arc::new(Slots::new(shared.clone()));
    let device_comms = DeviceComms::new(shared.clone());
    let device_queue = DeviceQueue::new(shared.clone());
    let state = CommThreadState {
        transport,
        scratch,
        slots,
        device_scratch,
        device_comms,
        device_queue,
        shared,
        failed: None,
        awaited: false,
    };
    serve(state, queue);
}

fn serve(mut state: CommThreadState, queue: &Receiver<CommRequest>) {
    while let Some(CommRequest::Run(run)) = next(&mut state, queue) {
        run(&mut state);
        if let Some(code) = state.shared.aborted() {
            state.transport.abort(code);
            state.failed.get_or_insert_with(|| Error::comm(format!("aborted with code {code}")));
        }
    }
    // Posted messages must complete before the transport is closed.
    let mut backoff = Backoff::new(true);
    while state.in_flight() != InFlight::Nothing {
        backoff.pause(&state.shared);
    }
    if state.failed.is_none() {
        state.device_comms.finalize(&mut *state.transport);
        state.transport.leave(true);
    }
}

/// Returns the next request. The thread sleeps until it comes, unless messages are in flight or the
/// last request was waited for, after which the next one usually follows soon.
fn next(state: &mut CommThreadState, queue: &Receiver<CommRequest>) -> Option<CommRequest> {
    let mut poll_until =
        std::mem::take(&mut state.awaited).then(|| Instant::now() + POLL_AFTER_WAIT);
    let mut backoff = Backoff::new(true);
    loop {
        match queue.try_recv() {
            Ok(request) => return Some(request),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => {}
        }
        poll_until = poll_until.filter(|&end| Instant::now() < end);
        match (state.in_flight(), poll_until) {
            (InFlight::Nothing, None) => return queue.recv().ok(),
            (InFlight::Nothing, Some(_)) => std::thread::yield_now(),
            (InFlight::Arriving, _) => backoff.idle(&state.shared),
            (InFlight::Leaving, _) => backoff.leaving(&state.shared),
        }
    }
}
