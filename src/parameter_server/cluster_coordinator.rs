//! Remote function calls on elastic workers, for custom training loops and other custom work.
//!
//! A program schedules calls by name, and workers that registered the functions execute them, each
//! one call at a time. A call whose worker is lost is rescheduled on another worker. If a function
//! fails, the calls that have not started are cancelled, and the error is returned once. The API
//! resembles `tf.distribute.coordinator.ClusterCoordinator`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::address::{host_name, listen};
use super::heartbeat::HeartbeatThread;
use super::protocol::RemoteError;
use super::rendezvous::{Contact, PsRendezvous};
use super::rpc_client::RpcClient;
use super::rpc_server::{RpcHandler, RpcServer};
use hpctrain_base::error::{Error, Kind, Result};

/// The time that a request for work waits before it is answered with [`CallResponse::Wait`].
const LONG_POLL: Duration = Duration::from_millis(500);

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
    /// The worker is considered lost and must join again.
    Unknown,
    Over,
}

/// The state of a call.
#[derive(Debug, Clone)]
enum Outcome {
    Waiting,
    Done(Value),
    Failed(Error),
}

/// A scheduled call.
#[derive(Debug, Clone)]
struct Call {
    number: u64,
    name: String,
    argument: Value,
    /// The number of workers that were lost while they executed it.
    losses: usize,
}

#[derive(Default)]
struct State {
    last_number: u64,
    /// Calls that no worker executes yet.
    waiting: VecDeque<Call>,
    /// The worker and the call of each ticket.
    running: HashMap<u64, (u64, Call)>,
    outcomes: HashMap<u64, Outcome>,
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
    _listener: RpcServer,
}

/// The future result of a scheduled call.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
    call: u64,
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
        let listener = RpcServer::open(listener, credentials, shared.clone(), timeout * 10)?;
        site.publish(&contact)?;
        Ok(Self { shared, _listener: listener })
    }

    /// Schedules a call of the function `name` with an argument.
    ///
    /// # Errors
    /// Returns an error if the argument cannot be serialized to JSON. Returns the error of an
    /// earlier call once; then this call is not scheduled.
    pub fn schedule(&self, name: &str, argument: &impl Serialize) -> Result<Handle> {
        let argument = serde_json::to_value(argument)
            .map_err(|e| Error::input(format!("the argument of {name}: {e}")))?;
        let call = self.shared.with(|state| {
            if let Some(error) = state.error.take() {
                return Err(error);
            }
            state.last_number += 1;
            state.outcomes.insert(state.last_number, Outcome::Waiting);
            state.waiting.push_back(Call {
                number: state.last_number,
                name: name.into(),
                argument,
                losses: 0,
            });
            Ok(state.last_number)
        })?;
        Ok(Handle { shared: self.shared.clone(), call })
    }

    /// Waits until all scheduled calls have ended.
    ///
    /// # Errors
    /// Returns the error of a failed call once; the calls that had not started were cancelled.
    pub fn join(&self) -> Result<()> {
        self.shared.wait_for(|state| state.is_idle().then_some(()));
        self.shared.with(|state| state.error.take()).map_or(Ok(()), Err)
    }

    /// Returns whether all scheduled calls have ended.
    pub fn done(&self) -> bool {
        self.shared.lock().is_idle()
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> usize {
        self.shared.lock().workers.len()
    }

    /// Ends the workers and cancels the calls that have not started.
    pub fn end(&self) {
        self.shared.with(|state| {
            state.over = true;
            state.cancel("the coordinator has ended");
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
            state.cancel("the coordinator has ended");
        });
    }
}

impl Handle {
    /// Waits for the call and returns its value.
    ///
    /// # Errors
    /// Returns an error if the function fails, the call is cancelled or lost with too many workers,
    /// or the value is not a `T`.
    pub fn fetch<T: DeserializeOwned>(&self) -> Result<T> {
        let outcome = self.shared.wait_for(|state| match state.outcomes.get(&self.call) {
            Some(Outcome::Waiting) => None,
            Some(outcome) => Some(outcome.clone()),
            None => Some(Outcome::Failed(Error::internal("the call was never scheduled"))),
        });
        match outcome {
            Outcome::Done(value) => serde_json::from_value(value)
                .map_err(|e| Error::input(format!("the value is of another type: {e}"))),
            Outcome::Failed(error) => Err(error),
            Outcome::Waiting => Err(Error::internal("the call has no value yet")),
        }
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Cancels all calls that have not started.
    fn cancel(&mut self, why: &str) {
        for Call { number, name, .. } in std::mem::take(&mut self.waiting) {
            let error = Error::input(format!("the call of {name} was cancelled: {why}"));
            self.outcomes.insert(number, Outcome::Failed(error));
        }
    }

    /// Removes a lost worker, and reschedules its call unless several workers were lost with it.
    fn remove_worker(&mut self, worker: u64) {
        self.workers.remove(&worker);
        let tickets: Vec<u64> = self
            .running
            .iter()
            .filter(|(_, (owner, _))| *owner == worker)
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in tickets {
            let Some((_, mut call)) = self.running.remove(&ticket) else { continue };
            call.losses += 1;
            if call.losses < MAX_WORKER_LOSSES && !self.over {
                self.waiting.push_front(call);
            } else {
                let Call { number, name, losses, .. } = call;
                self.fail(
                    number,
                    Error::comm(format!("the call of {name} was lost with {losses} workers")),
                );
            }
        }
    }

    fn fail(&mut self, call: u64, error: Error) {
        self.outcomes.insert(call, Outcome::Failed(error.clone()));
        self.cancel(&format!("another call failed: {}", error.message()));
        self.error.get_or_insert(error);
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
            let silent: Vec<u64> = {
                let silent =
                    state.workers.iter().filter(|(_, (_, heard))| heard.elapsed() > self.timeout);
                silent.map(|(worker, _)| *worker).collect()
            };
            silent.into_iter().for_each(|worker| state.remove_worker(worker));
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
            && let Some((_, Call { number, name, .. })) = state.running.remove(&ticket)
        {
            match result {
                Ok(value) => drop(state.outcomes.insert(number, Outcome::Done(value))),
                Err(fault) => state.fail(number, fault.error().at(name)),
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
                state.running.insert(ticket, (worker, call));
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
            CallRequest::Heartbeat { worker } => self.with(|state| {
                if let Some((_, heard)) = state.workers.get_mut(&worker) {
                    *heard = Instant::now();
                }
                CallResponse::Wait
            }),
        })
    }

    fn disconnected(&self, visit: Option<u64>) {
        if let Some(worker) = visit {
            self.with(|state| state.remove_worker(worker));
        }
    }
}

/// A function, from JSON to JSON.
type Function = Box<dyn FnMut(Value) -> Result<Value> + Send>;

/// The functions that a worker can execute.
#[derive(Default)]
pub struct Functions {
    by_name: BTreeMap<String, Function>,
}

impl Functions {
    /// Adds a function and returns the functions.
    #[must_use]
    pub fn with<A: DeserializeOwned, R: Serialize>(
        mut self,
        name: &str,
        mut function: impl FnMut(A) -> Result<R> + Send + 'static,
    ) -> Self {
        let call: Function = Box::new(move |argument: Value| {
            let argument = serde_json::from_value(argument);
            let argument = argument
                .map_err(|e| Error::input(format!("the argument is of another type: {e}")))?;
            serde_json::to_value(function(argument)?)
                .map_err(|e| Error::input(format!("the value: {e}")))
        });
        self.by_name.insert(name.into(), call);
        self
    }

    fn call(&mut self, name: &str, argument: Value) -> Result<Value> {
        match self.by_name.get_mut(name) {
            Some(function) => function(argument),
            None => Err(Error::input("the worker has no function of this name")
                .hint("start all workers with the same program")),
        }
    }
}

/// Executes calls for the [`Coordinator`] of the directory `run` until it ends.
///
/// # Errors
/// Returns an error if the coordinator cannot be reached for `timeout`.
pub fn run_worker(run: &Path, timeout: Duration, mut functions: Functions) -> Result<()> {
    let site = PsRendezvous::for_run(run);
    let mut heard = Instant::now();
    loop {
        match join(&site, timeout, &mut functions) {
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
fn join(site: &PsRendezvous, timeout: Duration, functions: &mut Functions) -> Result<bool> {
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
    let _heart = HeartbeatThread::start(timeout, move || {
        drop(heartbeats.call_once::<CallResponse>(&CallRequest::Heartbeat { worker }))
    })?;
    let mut done = None;
    loop {
        match coordinator.call(&CallRequest::Next { worker, done: done.take() })? {
            CallResponse::Call { ticket, name, argument } => {
                let value = functions.call(&name, argument);
                done = Some((ticket, value.map_err(|e| RemoteError::from(&e))));
            }
            CallResponse::Over => return Ok(true),
            CallResponse::Unknown => return Ok(false),
            CallResponse::Wait | CallResponse::Welcome { .. } => {}
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
}
