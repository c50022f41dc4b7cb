//! Remote function calls on elastic workers, for custom training loops and other custom work.
//!
//! A program schedules calls by name, and workers that registered the functions execute them, each
//! one call at a time. A call whose worker is lost is rescheduled on another worker. If a function
//! fails, all other calls that have not ended are cancelled, and the error is returned once. The
//! API resembles `tf.distribute.coordinator.ClusterCoordinator`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::address::listen;
use super::heartbeat::HeartbeatThread;
use super::parameters::Parameters;
use super::protocol::RemoteError;
use super::rendezvous::{Contact, PsRendezvous};
use super::rpc_client::RpcClient;
use super::rpc_server::{RpcHandler, RpcServer};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_comm::host_name;

/// The time that a request for work waits before it is answered with [`CallResponse::Wait`].
const LONG_POLL: Duration = Duration::from_millis(500);

/// The upper bound of the timeout that heartbeats are sent for, by which a function learns within
/// half a second that its call was cancelled.
const MAX_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason for which calls are cancelled at the end.
const ENDED: &str = "the coordinator has ended";

/// The time for which a connection may be silent.
const LONGEST_CALL: Duration = Duration::from_secs(30 * 24 * 3600);

/// The number of lost workers after which a call is considered their cause and fails.
const MAX_WORKER_LOSSES: usize = 3;

/// A request of a worker.
#[derive(Serialize, Deserialize)]
enum CallRequest {
    /// Joins the workers.
    Join { place: String },
    /// Reports the result of the last call, if there was one, and requests another one.
    Next { worker: u64, done: Option<(u64, Result<Value, RemoteError>)> },
    /// A heartbeat.
    Heartbeat { worker: u64 },
}

/// An answer to a worker.
#[derive(Serialize, Deserialize)]
enum CallResponse {
    Welcome {
        worker: u64,
    },
    Call {
        ticket: u64,
        name: String,
        argument: Value,
    },
    Wait,
    /// Answers a heartbeat, with the ticket of the worker's call if that call was cancelled.
    Heard {
        cancelled: Option<u64>,
    },
    /// The worker is considered lost and must join again.
    Unknown,
    Over,
}

/// The value or the error of a call, once it has ended. Only the call and its handles own it, so
/// that it is freed when the call has ended and all handles are dropped.
type Outcome = OnceLock<Result<Value>>;

/// A scheduled call.
#[derive(Debug, Clone)]
struct Call {
    name: String,
    argument: Value,
    /// The number of workers that were lost while they executed it.
    losses: usize,
    outcome: Arc<Outcome>,
}

impl Call {
    /// Sets the outcome, unless the call has already been cancelled.
    fn end(&self, outcome: Result<Value>) {
        // The late result of a cancelled call is dropped.
        drop(self.outcome.set(outcome));
    }

    fn cancel(&self, why: &str) {
        self.end(Err(Error::cancelled(format!("the call of {} was cancelled: {why}", self.name))));
    }

    /// Returns whether the call has an outcome: a running call has none unless it was cancelled.
    fn has_ended(&self) -> bool {
        self.outcome.get().is_some()
    }
}

/// A call that a worker executes.
struct RunningCall {
    worker: u64,
    call: Call,
}

#[derive(Default)]
struct State {
    last_number: u64,
    /// Calls that no worker executes yet.
    waiting: VecDeque<Call>,
    /// The calls that workers execute, by ticket. A cancelled call stays until its worker returns.
    running: HashMap<u64, RunningCall>,
    /// The host and process of each worker, and the time of its last request.
    workers: BTreeMap<u64, (String, Instant)>,
    /// An error that was not returned yet.
    error: Option<Error>,
    over: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    timeout: Duration,
}

/// Schedules calls of functions on workers.
///
/// ```
/// use std::time::Duration;
///
/// use hpctrain_base::error::Result;
/// use hpctrain_parameter_server::{Coordinator, Functions, run_worker};
///
/// # fn main() -> Result<()> {
/// let folder = tempfile::tempdir().unwrap();
/// let timeout = Duration::from_secs(10);
/// let coordinator = Coordinator::open(folder.path(), None, timeout)?;
/// // Workers are usually other processes.
/// let workers = [(); 2].map(|()| {
///     let functions = Functions::default().with("square", |x: f64| Ok(x * x));
///     let run = folder.path().to_path_buf();
///     std::thread::spawn(move || run_worker(&run, timeout, functions))
/// });
///
/// let squares = (0..5).map(|x| coordinator.schedule("square", &x)).collect::<Result<Vec<_>>>()?;
/// coordinator.join()?;
/// assert!(coordinator.done());
/// let values = squares.iter().map(|value| value.fetch()).collect::<Result<Vec<f64>>>()?;
/// assert_eq!(values, [0.0, 1.0, 4.0, 9.0, 16.0]);
///
/// coordinator.end();
/// workers.into_iter().try_for_each(|worker| worker.join().unwrap())
/// # }
/// ```
pub struct Coordinator {
    shared: Arc<Shared>,
    run: PathBuf,
    _listener: RpcServer,
}

/// The future result of a scheduled call. The value is kept as long as a handle of the call exists.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
    outcome: Arc<Outcome>,
}

impl Coordinator {
    /// Starts a coordinator that workers find by the directory `run`. It listens at `address`,
    /// which has the form of `parameter_server.address`. A worker that sends nothing for `timeout`
    /// is considered lost.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be written, or the address cannot be listened on.
    pub fn open(run: &Path, address: Option<&str>, timeout: Duration) -> Result<Self> {
        let (listener, address) = listen(address, None)?;
        let site = PsRendezvous::for_run(run);
        site.open()?;
        let contact = Contact { address, encrypt: true, interface: None };
        let credentials = site.credentials(&contact)?;
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), timeout });
        // A connection is silent while its worker executes a call: heartbeats come by another one.
        let listener = RpcServer::open(listener, credentials, shared.clone(), LONGEST_CALL)?;
        site.publish(&contact)?;
        Ok(Self { shared, run: run.into(), _listener: listener })
    }

    /// Returns the directory by which workers find the coordinator.
    pub fn run(&self) -> &Path {
        &self.run
    }

    /// Returns the time after which a silent worker is considered lost.
    pub fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// Schedules a call of the function `name` with an argument.
    ///
    /// # Errors
    /// Returns an error if the argument cannot be serialized to JSON. Returns the error of an
    /// earlier call once; then this call is not scheduled.
    pub fn schedule(&self, name: &str, argument: &impl Serialize) -> Result<Handle> {
        let argument = serde_json::to_value(argument)
            .map_err(|e| Error::input(format!("the argument of {name}: {e}")))?;
        let outcome = Arc::new(Outcome::new());
        let call = Call { name: name.into(), argument, losses: 0, outcome: outcome.clone() };
        self.shared.with(|state| {
            if let Some(error) = state.error.take() {
                return Err(error);
            }
            if state.over {
                call.cancel(ENDED);
            } else {
                state.waiting.push_back(call);
            }
            Ok(())
        })?;
        Ok(Handle { shared: self.shared.clone(), outcome })
    }

    /// Cancels all calls that have not ended. Their handles return an error of
    /// [`Kind::Cancelled`] with this reason. Calls that have not started never start. A function
    /// that is running learns of it within a second, by [`WorkerContext::is_cancelled`]; whatever
    /// it returns is dropped. [`Coordinator::join`] waits until it has returned.
    pub fn cancel(&self, reason: &str) {
        self.shared.with(|state| state.cancel(reason));
    }

    /// Waits until all scheduled calls have ended, and no worker executes a cancelled one.
    ///
    /// # Errors
    /// Returns the error of a failed call once; the calls that had not ended then were cancelled.
    pub fn join(&self) -> Result<()> {
        self.shared.wait_for(|state| state.is_idle().then_some(()));
        self.shared.with(|state| state.error.take()).map_or(Ok(()), Err)
    }

    /// Returns whether all scheduled calls have ended, and no worker executes a cancelled one.
    pub fn done(&self) -> bool {
        let mut state = self.shared.lock();
        state.remove_silent_workers(self.shared.timeout);
        state.is_idle()
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> usize {
        let mut state = self.shared.lock();
        state.remove_silent_workers(self.shared.timeout);
        state.workers.len()
    }

    /// Ends the workers and cancels the calls that have not ended.
    pub fn end(&self) {
        self.shared.with(|state| {
            state.over = true;
            state.cancel(ENDED);
        });
        // Each worker learns of the end from the answer to its next request.
        let since = Instant::now();
        while self.workers() > 0 && since.elapsed() < 2 * LONG_POLL {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.shared.with(|state| {
            state.over = true;
            state.cancel(ENDED);
        });
    }
}

impl Handle {
    /// Waits for the call and returns its value.
    ///
    /// # Errors
    /// Returns an error if the function fails, the call is cancelled ([`Kind::Cancelled`]) or lost
    /// with too many workers, or the value is not a `T`.
    pub fn fetch<T: DeserializeOwned>(&self) -> Result<T> {
        let value = self.shared.wait_for(|_| self.outcome.get().cloned())?;
        serde_json::from_value(value)
            .map_err(|e| Error::input(format!("the value is of another type: {e}")))
    }

    /// Returns whether the call was cancelled, without waiting: by [`Coordinator::cancel`] or
    /// [`Coordinator::end`], or because another call failed.
    pub fn is_cancelled(&self) -> bool {
        matches!(self.outcome.get(), Some(Err(e)) if e.kind() == Kind::Cancelled)
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Cancels all calls that have not ended.
    fn cancel(&mut self, why: &str) {
        self.waiting.drain(..).for_each(|call| call.cancel(why));
        self.running.values().for_each(|running| running.call.cancel(why));
    }

    /// Removes a lost worker, and reschedules its call unless it was cancelled or several workers
    /// were lost with it.
    fn remove_worker(&mut self, worker: u64) {
        self.workers.remove(&worker);
        let tickets: Vec<u64> = self
            .running
            .iter()
            .filter(|(_, running)| running.worker == worker)
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in tickets {
            let Some(RunningCall { mut call, .. }) = self.running.remove(&ticket) else { continue };
            call.losses += 1;
            if call.has_ended() {
                continue;
            }
            if call.losses < MAX_WORKER_LOSSES {
                self.waiting.push_front(call);
            } else {
                let Call { name, losses, .. } = &call;
                let message = format!("the call of {name} was lost with {losses} workers");
                let error = Error::comm(message)
                    .hint("see why the workers ended: the call may be what ends them");
                self.fail(&call, error);
            }
        }
    }

    /// Removes the workers that have sent nothing for `timeout`.
    fn remove_silent_workers(&mut self, timeout: Duration) {
        let silent = self.workers.iter().filter(|(_, (_, heard))| heard.elapsed() > timeout);
        let silent: Vec<u64> = silent.map(|(worker, _)| *worker).collect();
        silent.into_iter().for_each(|worker| self.remove_worker(worker));
    }

    /// Ends a call with an error, and cancels all others.
    fn fail(&mut self, call: &Call, error: Error) {
        call.end(Err(error.clone()));
        self.cancel(&format!("another call failed: {}", error.message()));
        self.error.get_or_insert(error);
    }

    /// Returns the ticket of a worker's call, if that call was cancelled.
    fn cancelled_ticket(&self, worker: u64) -> Option<u64> {
        let mut tickets = self.running.iter();
        let found =
            tickets.find(|(_, running)| running.worker == worker && running.call.has_ended());
        found.map(|(ticket, _)| *ticket)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    /// Waits until `check` returns a value; removes workers that time out.
    fn wait_for<T>(&self, mut check: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut state = self.lock();
        loop {
            state.remove_silent_workers(self.timeout);
            if let Some(found) = check(&mut state) {
                return found;
            }
            state = self
                .changed
                .wait_timeout(state, LONG_POLL)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn next(&self, worker: u64, done: Option<(u64, Result<Value, RemoteError>)>) -> CallResponse {
        let mut state = self.lock();
        let since = Instant::now();
        let Some((_, heard)) = state.workers.get_mut(&worker) else {
            return if state.over { CallResponse::Over } else { CallResponse::Unknown };
        };
        *heard = Instant::now();
        if let Some((ticket, result)) = done
            && let Some(RunningCall { call, .. }) = state.running.remove(&ticket)
        {
            match result {
                Ok(value) => call.end(Ok(value)),
                // The others were cancelled with this call.
                Err(_) if call.has_ended() => {}
                Err(fault) => state.fail(&call, fault.error().at(&call.name)),
            }
            self.changed.notify_all();
        }
        loop {
            if state.over {
                state.workers.remove(&worker);
                return CallResponse::Over;
            }
            if let Some(call) = state.waiting.pop_front() {
                state.last_number += 1;
                let ticket = state.last_number;
                let name = call.name.clone();
                let argument = call.argument.clone();
                state.running.insert(ticket, RunningCall { worker, call });
                return CallResponse::Call { ticket, name, argument };
            }
            let left = LONG_POLL.saturating_sub(since.elapsed());
            if left.is_zero() {
                return CallResponse::Wait;
            }
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl RpcHandler for Shared {
    type Request = CallRequest;
    type Answer = CallResponse;
    type ConnectionState = Option<u64>;

    fn max_body_bytes(&self) -> usize {
        0
    }

    fn answer(
        &self,
        visit: &mut Option<u64>,
        request: CallRequest,
        _: &[u8],
        _: &mut Vec<u8>,
    ) -> Result<CallResponse> {
        Ok(match request {
            CallRequest::Join { place } => self.with(|state| {
                state.last_number += 1;
                state.workers.insert(state.last_number, (place, Instant::now()));
                *visit = Some(state.last_number);
                CallResponse::Welcome { worker: state.last_number }
            }),
            CallRequest::Next { worker, done } => self.next(worker, done),
            CallRequest::Heartbeat { worker } => {
                // A heartbeat changes nothing that a wait depends on, so waits are not woken.
                let mut state = self.lock();
                match state.workers.get_mut(&worker) {
                    Some((_, heard)) => {
                        *heard = Instant::now();
                        CallResponse::Heard { cancelled: state.cancelled_ticket(worker) }
                    }
                    None => CallResponse::Unknown,
                }
            }
        })
    }

    fn disconnected(&self, visit: Option<u64>) {
        if let Some(worker) = visit {
            self.with(|state| state.remove_worker(worker));
        }
    }
}

/// The worker that executes a function.
pub struct WorkerContext {
    number: u64,
    run: PathBuf,
    timeout: Duration,
    /// The ticket of the current call.
    ticket: u64,
    cancellation: Arc<Cancellation>,
}

/// The answers to a worker's heartbeats.
#[derive(Default)]
struct Cancellation {
    /// The ticket of the last call that was cancelled.
    ticket: AtomicU64,
    /// Whether the coordinator considers this worker lost, or has ended.
    is_lost: AtomicBool,
}

impl Cancellation {
    fn note(&self, answer: &CallResponse) {
        match answer {
            CallResponse::Heard { cancelled: Some(ticket) } => {
                self.ticket.store(*ticket, Ordering::Relaxed);
            }
            CallResponse::Unknown | CallResponse::Over => {
                self.is_lost.store(true, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}

impl WorkerContext {
    /// Returns the number of the worker, which no other worker of the coordinator has. A worker
    /// that joins again gets another number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the directory of the coordinator.
    pub fn run(&self) -> &Path {
        &self.run
    }

    /// Returns whether the current call was cancelled, or assigned to another worker because the
    /// coordinator considers this one lost. Its value is then dropped, so a function that takes
    /// long may return early, with any value or error.
    pub fn is_cancelled(&self) -> bool {
        let Cancellation { ticket, is_lost } = &*self.cancellation;
        ticket.load(Ordering::Relaxed) == self.ticket || is_lost.load(Ordering::Relaxed)
    }

    /// Connects to the parameters that the coordinator has created with
    /// [`Coordinator::create_parameters`], for which it waits.
    ///
    /// # Errors
    /// Returns an error if there are none after the worker's timeout.
    pub fn parameters(&self) -> Result<Parameters> {
        Parameters::connect(&self.run, self.timeout)
    }
}

/// Makes the state `S` of a worker.
type MakeState<S> = Box<dyn FnMut(&WorkerContext) -> Result<S> + Send>;

/// A function of a worker with state `S`, from JSON to JSON.
type Function<S> = Box<dyn FnMut(&mut S, Value, &WorkerContext) -> Result<Value> + Send>;

/// The functions that a worker can execute, and the state `S` that they share.
///
/// The state is made before the first call of a worker, for instance from its data set, its model
/// and its connection to [`Parameters`]. It belongs to one worker and is handed to each of its
/// calls. A worker that has lost the coordinator and joins again makes it anew.
///
/// ```
/// use hpctrain_parameter_server::Functions;
///
/// // Each call returns the next numbers of this worker.
/// let functions = Functions::with_state(|worker| Ok(1000 * worker.number()))
///     .with_context("take", |next: &mut u64, count: u64, worker| {
///         let first = *next;
///         for _ in 0..count {
///             if worker.is_cancelled() {
///                 break;
///             }
///             *next += 1;
///         }
///         Ok(first..*next)
///     })
///     .with("double", |x: f64| Ok(2.0 * x));
/// # drop(functions)
/// ```
pub struct Functions<S = ()> {
    make: MakeState<S>,
    by_name: BTreeMap<String, Function<S>>,
}

impl Default for Functions {
    fn default() -> Self {
        Self::with_state(|_| Ok(()))
    }
}

impl<S: 'static> Functions<S> {
    /// Creates an empty set of functions whose state `make` makes. An error of `make` is that of
    /// the call for which the state was needed; the next call tries again.
    pub fn with_state(make: impl FnMut(&WorkerContext) -> Result<S> + Send + 'static) -> Self {
        Self { make: Box::new(make), by_name: BTreeMap::new() }
    }

    /// Adds a function of its argument alone, and returns the functions.
    #[must_use]
    pub fn with<A: DeserializeOwned, R: Serialize>(
        self,
        name: &str,
        mut function: impl FnMut(A) -> Result<R> + Send + 'static,
    ) -> Self {
        self.with_context(name, move |_: &mut S, argument, _| function(argument))
    }

    /// Adds a function of the worker's state, its argument, and the worker, and returns the
    /// functions.
    #[must_use]
    pub fn with_context<A: DeserializeOwned, R: Serialize>(
        mut self,
        name: &str,
        mut function: impl FnMut(&mut S, A, &WorkerContext) -> Result<R> + Send + 'static,
    ) -> Self {
        let call: Function<S> = Box::new(move |state, argument: Value, worker| {
            let argument = serde_json::from_value(argument);
            let argument = argument
                .map_err(|e| Error::input(format!("the argument is of another type: {e}")))?;
            serde_json::to_value(function(state, argument, worker)?)
                .map_err(|e| Error::input(format!("the value: {e}")))
        });
        self.by_name.insert(name.into(), call);
        self
    }

    /// Calls a function, with the state of the worker, which is made if there is none.
    fn call(
        &mut self,
        name: &str,
        state: &mut Option<S>,
        argument: Value,
        worker: &WorkerContext,
    ) -> Result<Value> {
        let Some(function) = self.by_name.get_mut(name) else {
            return Err(Error::input("the worker has no function of this name")
                .hint("start all workers with the same program"));
        };
        let state = match state {
            Some(state) => state,
            empty => {
                let made = (self.make)(worker).map_err(|e| e.at("the state of the worker"))?;
                empty.insert(made)
            }
        };
        function(state, argument, worker)
    }
}

/// Executes calls for the [`Coordinator`] of the directory `run` until it ends.
///
/// # Errors
/// Returns an error if the coordinator cannot be reached for `timeout`.
pub fn run_worker<S: 'static>(
    run: &Path,
    timeout: Duration,
    mut functions: Functions<S>,
) -> Result<()> {
    let mut heard = Instant::now();
    loop {
        match join(run, timeout, &mut functions) {
            Ok(true) => return Ok(()),
            Ok(false) => heard = Instant::now(),
            Err(e) if e.kind() != Kind::Comm || heard.elapsed() > timeout => return Err(e),
            Err(_) => {}
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Joins the coordinator and executes calls. Returns true if the coordinator has ended, false if
/// this worker must join again.
fn join<S: 'static>(run: &Path, timeout: Duration, functions: &mut Functions<S>) -> Result<bool> {
    let site = PsRendezvous::for_run(run);
    let contact = site.coordinator(timeout)?;
    let credentials = site.credentials(&contact)?;
    let client = || {
        RpcClient::new("the coordinator", &contact.address, credentials.clone(), timeout)
            .with_reconnect_timeout(Duration::from_secs(1))
    };
    let mut coordinator = client();
    let mut heartbeats = client();
    let place = format!("{}:{}", host_name(), std::process::id());
    let CallResponse::Welcome { worker } = coordinator.call(&CallRequest::Join { place })? else {
        return Err(Error::comm("the coordinator did not accept this worker"));
    };
    let cancellation = Arc::new(Cancellation::default());
    let noted = cancellation.clone();
    let _heart = HeartbeatThread::start(timeout.min(MAX_HEARTBEAT_TIMEOUT), move || {
        if let Ok(answer) = heartbeats.call_once(&CallRequest::Heartbeat { worker }) {
            noted.note(&answer);
        }
    })?;
    let mut context =
        WorkerContext { number: worker, run: run.into(), timeout, ticket: 0, cancellation };
    let mut state = None;
    let mut done = None;
    loop {
        match coordinator.call(&CallRequest::Next { worker, done: done.take() })? {
            CallResponse::Call { ticket, name, argument } => {
                context.ticket = ticket;
                let value = functions.call(&name, &mut state, argument, &context);
                done = Some((ticket, value.map_err(|e| RemoteError::from(&e))));
            }
            CallResponse::Over => return Ok(true),
            CallResponse::Unknown => return Ok(false),
            CallResponse::Wait | CallResponse::Heard { .. } | CallResponse::Welcome { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    /// Returns half of an even number.
    fn half(x: u32) -> Result<u32> {
        if x.is_multiple_of(2) { Ok(x / 2) } else { Err(Error::input(format!("{x} is odd"))) }
    }

    #[test]
    fn an_error_cancels_the_rest_and_is_returned_once() {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let schedule = |name: &str, x: u32| coordinator.schedule(name, &x).unwrap();
        let first = schedule("half", 8);
        let second = schedule("half", 7);
        let third = schedule("half", 6);
        std::thread::scope(|scope| {
            let functions = Functions::default().with("half", half);
            scope.spawn(|| run_worker(folder.path(), TIMEOUT, functions).unwrap());
            assert_eq!(first.fetch::<u32>(), Ok(4));
            assert!(second.fetch::<u32>().unwrap_err().to_string().contains("half: 7 is odd"));
            assert!(
                third
                    .fetch::<u32>()
                    .unwrap_err()
                    .to_string()
                    .contains("cancelled: another call failed: half: 7 is odd")
            );
            assert!(coordinator.join().unwrap_err().to_string().contains("7 is odd"));
            assert_eq!(coordinator.join(), Ok(()));
            // Later calls are not affected.
            assert_eq!(schedule("half", 2).fetch::<u32>(), Ok(1));
            assert!(
                schedule("half", 2)
                    .fetch::<String>()
                    .unwrap_err()
                    .to_string()
                    .contains("of another type")
            );
            let unknown = schedule("third", 2).fetch::<u32>().unwrap_err().to_string();
            assert!(
                unknown.contains("third: the worker has no function of this name"),
                "{unknown}"
            );
            assert!(coordinator.schedule("half", &1).is_err());
            let never = schedule("half", 2);
            coordinator.end();
            // The call either ended before the coordinator, or was cancelled.
            assert!(never.fetch::<u32>().is_ok_and(|x| x == 1) || never.fetch::<u32>().is_err());
        });
    }

    /// Joins the coordinator of the directory `run`, and returns the client and the number of the
    /// worker.
    fn join_as_worker(run: &Path) -> (RpcClient, u64) {
        let site = PsRendezvous::for_run(run);
        let contact = site.coordinator(TIMEOUT).unwrap();
        let credentials = site.credentials(&contact).unwrap();
        let mut client = RpcClient::new("the coordinator", contact.address, credentials, TIMEOUT);
        let CallResponse::Welcome { worker } =
            client.call(&CallRequest::Join { place: "x".into() }).unwrap()
        else {
            panic!()
        };
        (client, worker)
    }

    #[test]
    fn a_call_whose_worker_is_lost_is_rescheduled() {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let value = coordinator.schedule("count", &1).unwrap();
        // This worker takes the call and is lost.
        let (mut client, worker) = join_as_worker(folder.path());
        assert!(matches!(
            client.call(&CallRequest::Next { worker, done: None }).unwrap(),
            CallResponse::Call { .. }
        ));
        assert!(!coordinator.done());
        drop(client);
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let functions = Functions::default()
            .with("count", move |x: usize| Ok(x + counter.fetch_add(1, Ordering::Relaxed)));
        std::thread::scope(|scope| {
            scope.spawn(|| run_worker(folder.path(), TIMEOUT, functions).unwrap());
            assert_eq!(value.fetch::<usize>(), Ok(1));
            coordinator.join().unwrap();
            coordinator.end();
        });
        assert_eq!(calls.load(Ordering::Relaxed), 1);

        // A call that loses all its workers fails.
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let value = coordinator.schedule("crash", &0).unwrap();
        for _ in 0..MAX_WORKER_LOSSES {
            let (mut client, worker) = join_as_worker(folder.path());
            assert!(matches!(
                client.call(&CallRequest::Next { worker, done: None }).unwrap(),
                CallResponse::Call { .. }
            ));
        }
        let error = value.fetch::<usize>().unwrap_err().to_string();
        assert!(error.contains("the call of crash was lost with 3 workers"), "{error}");
    }

    /// Waits until a flag is set, for at most the timeout.
    fn wait_for(flag: &AtomicBool) {
        let since = Instant::now();
        while !flag.load(Ordering::Relaxed) && since.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(flag.load(Ordering::Relaxed), "the flag was not set in time");
    }

    /// Only the heartbeats of a worker are heard while a call runs.
    #[test]
    fn calls_may_run_much_longer_than_the_timeout() {
        let folder = tempfile::tempdir().unwrap();
        let timeout = Duration::from_millis(500);
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), timeout).unwrap();
        let started = Arc::new(AtomicUsize::new(0));
        let begun = started.clone();
        let functions = Functions::default().with("long", move |(): ()| {
            begun.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(11 * timeout);
            Ok(7)
        });
        let long = coordinator.schedule("long", &()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| run_worker(folder.path(), 2 * timeout, functions).unwrap());
            let since = Instant::now();
            // Asking does not end the worker either.
            while !coordinator.done() && since.elapsed() < TIMEOUT {
                std::thread::sleep(Duration::from_millis(20));
            }
            assert_eq!((long.fetch::<u32>(), started.load(Ordering::Relaxed)), (Ok(7), 1));
            coordinator.end();
        });
    }

    #[test]
    fn running_calls_learn_that_they_are_cancelled() {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let started = Arc::new(AtomicBool::new(false));
        let begun = started.clone();
        let functions = Functions::default()
            .with_context("wait", move |(): &mut (), (): (), worker| {
                begun.store(true, Ordering::Relaxed);
                let since = Instant::now();
                while !worker.is_cancelled() && since.elapsed() < TIMEOUT {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(worker.is_cancelled())
            })
            .with("half", half);
        let running = coordinator.schedule("wait", &()).unwrap();
        let waiting = coordinator.schedule("half", &8).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| run_worker(folder.path(), TIMEOUT, functions).unwrap());
            wait_for(&started);
            assert!(!running.is_cancelled() && !waiting.is_cancelled());
            let since = Instant::now();
            coordinator.cancel("the time is up");
            for (handle, name) in [(&running, "wait"), (&waiting, "half")] {
                assert!(handle.is_cancelled());
                let error = handle.fetch::<bool>().unwrap_err();
                assert_eq!(error.kind(), Kind::Cancelled);
                let expected = format!("the call of {name} was cancelled: the time is up");
                assert_eq!(error.message(), expected);
            }
            // The function still runs until it asks.
            assert!(!coordinator.done());
            assert_eq!(coordinator.join(), Ok(()));
            assert!(since.elapsed() < TIMEOUT, "the function was not interrupted");
            assert!(running.is_cancelled(), "the late value replaced the outcome");
            assert!(running.fetch::<bool>().is_err());
            // Later calls are not cancelled.
            let later = coordinator.schedule("half", &8).unwrap();
            assert_eq!((later.fetch::<u32>(), later.is_cancelled()), (Ok(4), false));
            coordinator.end();
        });
        let after = coordinator.schedule("half", &8).unwrap();
        assert_eq!(after.fetch::<u32>().unwrap_err().kind(), Kind::Cancelled);
    }

    #[test]
    fn an_error_of_a_function_cancels_the_running_calls() {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let running = coordinator.schedule("half", &8).unwrap();
        let failing = coordinator.schedule("half", &7).unwrap();
        let (mut first, worker) = join_as_worker(folder.path());
        let (mut second, other) = join_as_worker(folder.path());
        let take = |client: &mut RpcClient, worker, done| {
            client.call::<CallResponse>(&CallRequest::Next { worker, done }).unwrap()
        };
        let CallResponse::Call { ticket, .. } = take(&mut first, worker, None) else { panic!() };
        let CallResponse::Call { ticket: odd, .. } = take(&mut second, other, None) else {
            panic!()
        };
        let fault = RemoteError::from(&Error::input("7 is odd"));
        take(&mut second, other, Some((odd, Err(fault))));
        assert_eq!(failing.fetch::<u32>().unwrap_err().kind(), Kind::Input);
        assert_eq!(running.fetch::<u32>().unwrap_err().kind(), Kind::Cancelled);
        let heard = first.call(&CallRequest::Heartbeat { worker }).unwrap();
        assert!(matches!(heard, CallResponse::Heard { cancelled: Some(of) } if of == ticket));
        assert!(!coordinator.done());
        // Neither the late value nor the loss of its worker counts.
        drop(first);
        assert!(coordinator.join().unwrap_err().to_string().contains("half: 7 is odd"));
        assert_eq!(coordinator.join(), Ok(()));
        assert!(running.is_cancelled() && !failing.is_cancelled());
    }

    #[test]
    fn outcomes_without_handles_are_freed() {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let functions = Functions::default().with("half", half);
        std::thread::scope(|scope| {
            scope.spawn(|| run_worker(folder.path(), TIMEOUT, functions).unwrap());
            let mut dropped = vec![];
            let mut kept = vec![];
            for call in 0..1000 {
                let handle = coordinator.schedule("half", &(2 * call)).unwrap();
                if call % 100 == 0 {
                    kept.push(handle.clone());
                }
                dropped.push(Arc::downgrade(&handle.outcome));
            }
            coordinator.join().unwrap();
            let alive = dropped.iter().filter(|outcome| outcome.upgrade().is_some()).count();
            assert_eq!(alive, kept.len());
            let state = coordinator.shared.lock();
            assert!(state.waiting.is_empty() && state.running.is_empty());
            drop(state);
            for (number, handle) in kept.iter().enumerate() {
                assert_eq!(handle.fetch::<u32>(), Ok(100 * number as u32));
            }
            coordinator.end();
        });
    }

    #[test]
    fn each_worker_makes_its_state_once_and_anew_when_it_joins_again() {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let made = Arc::new(AtomicUsize::new(0));
        let makes = made.clone();
        let functions = Functions::with_state(move |worker| {
            let count = makes.fetch_add(1, Ordering::Relaxed);
            if count == 0 { Err(Error::input("no data yet")) } else { Ok((worker.number(), 0)) }
        })
        .with_context("count", |(number, calls): &mut (u64, u64), (): (), worker| {
            *calls += 1;
            assert_eq!(*number, worker.number());
            Ok((*number, *calls))
        });
        let count = || coordinator.schedule("count", &()).and_then(|call| call.fetch());
        std::thread::scope(|scope| {
            scope.spawn(|| run_worker(folder.path(), TIMEOUT, functions).unwrap());
            // An error of the state is that of the call.
            let error = count().map(|_: (u64, u64)| ()).unwrap_err().to_string();
            assert!(error.contains("count: the state of the worker: no data yet"), "{error}");
            assert!(coordinator.join().is_err());
            let (number, calls) = count().unwrap();
            assert_eq!((calls, made.load(Ordering::Relaxed)), (1, 2));
            assert_eq!(count(), Ok((number, 2)));
            // The coordinator loses the worker, which joins again.
            coordinator.shared.with(|state| state.remove_worker(number));
            let (again, calls) = count().unwrap();
            assert!(again != number && calls == 1, "{number} {again} {calls}");
            assert_eq!(made.load(Ordering::Relaxed), 3);
            coordinator.end();
        });
    }
}
