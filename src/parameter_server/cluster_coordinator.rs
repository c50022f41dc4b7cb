//! Calls of functions on workers, for training loops and other work of a program's own.
//!
//! A program schedules calls by name, and workers that know the functions carry them out, one at a
//! time each. A call whose worker is gone is given to another one. After an error of a function the
//! calls that have not begun are cancelled, and the error is told once. It is the
//! `ClusterCoordinator` of `TensorFlow`'s guides to parameter servers.

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

/// Time that a request for work waits for some.
const LONG_POLL: Duration = Duration::from_millis(500);

/// Workers that a call may be lost with: then it is taken for the cause.
const LOSSES: usize = 3;

/// A request of a worker.
#[derive(Serialize, Deserialize)]
enum CallRequest {
    /// It comes.
    Join { place: String },
    /// It has carried out a call, or nothing yet, and asks for another one.
    Next { worker: u64, done: Option<(u64, Result<Value, RemoteError>)> },
    /// It lives.
    Beat { worker: u64 },
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
    /// It counts as gone: it is to join again.
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

/// A call to be carried out.
#[derive(Debug, Clone)]
struct Call {
    number: u64,
    name: String,
    argument: Value,
    /// Workers that were lost with it.
    losses: usize,
}

#[derive(Default)]
struct State {
    numbers: u64,
    /// Calls that nobody carries out.
    waiting: VecDeque<Call>,
    /// By ticket: the worker, and the call.
    given: HashMap<u64, (u64, Call)>,
    outcomes: HashMap<u64, Outcome>,
    workers: BTreeMap<u64, (String, Instant)>,
    /// Not told yet.
    error: Option<Error>,
    over: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    patience: Duration,
}

/// Schedules calls of functions that workers know.
///
/// ```
/// use std::time::Duration;
///
/// use hpctrain_base::error::Result;
/// use hpctrain_parameter_server::{Coordinator, Functions, work_on_calls};
///
/// # fn main() -> Result<()> {
/// let folder = tempfile::tempdir().unwrap();
/// let patience = Duration::from_secs(10);
/// let coordinator = Coordinator::open(folder.path(), None, patience)?;
/// // Workers are other processes, mostly.
/// let workers = [(); 2].map(|()| {
///     let functions = Functions::default().with("square", |x: f64| Ok(x * x));
///     let run = folder.path().to_path_buf();
///     std::thread::spawn(move || work_on_calls(&run, patience, functions))
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

/// A value to come.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
    call: u64,
}

impl Coordinator {
    /// Listens, for workers that know the directory `run`; `address` as `parameter_server.address`.
    /// A worker that is not heard of for `patience` counts as gone.
    ///
    /// # Errors
    /// The file system or the network refused.
    pub fn open(run: &Path, address: Option<&str>, patience: Duration) -> Result<Self> {
        let (listener, address) = listen(address, None)?;
        let site = PsRendezvous::of(run);
        site.open()?;
        let contact = Contact { address, encrypt: true, interface: None };
        let credentials = site.credentials(&contact)?;
        let shared =
            Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), patience });
        let listener = RpcServer::open(listener, credentials, shared.clone(), patience * 10)?;
        site.publish(&contact)?;
        Ok(Self { shared, _listener: listener })
    }

    /// Schedules a call of a function with an argument.
    ///
    /// # Errors
    /// The error of an earlier call, told once: then this one is not scheduled. Or the argument is
    /// none of JSON.
    pub fn schedule(&self, name: &str, argument: &impl Serialize) -> Result<Handle> {
        let argument = serde_json::to_value(argument)
            .map_err(|e| Error::input(format!("the argument of {name}: {e}")))?;
        let call = self.shared.with(|state| {
            if let Some(error) = state.error.take() {
                return Err(error);
            }
            state.numbers += 1;
            state.outcomes.insert(state.numbers, Outcome::Waiting);
            state.waiting.push_back(Call {
                number: state.numbers,
                name: name.into(),
                argument,
                losses: 0,
            });
            Ok(state.numbers)
        })?;
        Ok(Handle { shared: self.shared.clone(), call })
    }

    /// Waits until nothing is left to do.
    ///
    /// # Errors
    /// The error of a call, told once; the calls that had not begun were cancelled.
    pub fn join(&self) -> Result<()> {
        self.shared.until(|state| state.is_idle().then_some(()));
        self.shared.with(|state| state.error.take()).map_or(Ok(()), Err)
    }

    /// Whether nothing is left to do.
    pub fn done(&self) -> bool {
        self.shared.lock().is_idle()
    }

    /// Workers that are there.
    pub fn workers(&self) -> usize {
        self.shared.lock().workers.len()
    }

    /// Sends the workers home; calls that were not carried out never will be.
    pub fn end(&self) {
        self.shared.with(|state| {
            state.over = true;
            state.cancel("the coordinator has ended");
        });
        // Each hears of it with its next request.
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
    /// Waits for the value.
    ///
    /// # Errors
    /// The function failed, the call was cancelled or lost with too many workers, or the value is
    /// of another type.
    pub fn fetch<T: DeserializeOwned>(&self) -> Result<T> {
        let outcome = self.shared.until(|state| match state.outcomes.get(&self.call) {
            Some(Outcome::Waiting) => None,
            Some(outcome) => Some(outcome.clone()),
            None => Some(Outcome::Failed(Error::internal("a call that was never scheduled"))),
        });
        match outcome {
            Outcome::Done(value) => serde_json::from_value(value)
                .map_err(|e| Error::input(format!("the value is of another type: {e}"))),
            Outcome::Failed(error) => Err(error),
            Outcome::Waiting => Err(Error::internal("a value before it was made")),
        }
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.given.is_empty()
    }

    /// No call that waits will be carried out.
    fn cancel(&mut self, why: &str) {
        for Call { number, name, .. } in std::mem::take(&mut self.waiting) {
            let error = Error::input(format!("the call of {name} was cancelled: {why}"));
            self.outcomes.insert(number, Outcome::Failed(error));
        }
    }

    /// A worker is gone: others get its call, unless that has cost several workers.
    fn leave(&mut self, worker: u64) {
        self.workers.remove(&worker);
        let tickets: Vec<u64> = self
            .given
            .iter()
            .filter(|(_, (of, _))| *of == worker)
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in tickets {
            let Some((_, mut call)) = self.given.remove(&ticket) else { continue };
            call.losses += 1;
            if call.losses < LOSSES && !self.over {
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

    /// Waits until `look` finds something.
    fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut state = self.lock();
        loop {
            let silent: Vec<u64> = {
                let silent =
                    state.workers.iter().filter(|(_, (_, heard))| heard.elapsed() > self.patience);
                silent.map(|(worker, _)| *worker).collect()
            };
            silent.into_iter().for_each(|worker| state.leave(worker));
            if let Some(found) = look(&mut state) {
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
            && let Some((_, Call { number, name, .. })) = state.given.remove(&ticket)
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
                state.numbers += 1;
                let ticket = state.numbers;
                let name = call.name.clone();
                let argument = call.argument.clone();
                state.given.insert(ticket, (worker, call));
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
    type Visit = Option<u64>;

    fn limit(&self) -> usize {
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
                state.numbers += 1;
                state.workers.insert(state.numbers, (place, Instant::now()));
                *visit = Some(state.numbers);
                CallResponse::Welcome { worker: state.numbers }
            }),
            CallRequest::Next { worker, done } => self.next(worker, done),
            CallRequest::Beat { worker } => self.with(|state| {
                if let Some((_, heard)) = state.workers.get_mut(&worker) {
                    *heard = Instant::now();
                }
                CallResponse::Wait
            }),
        })
    }

    fn left(&self, visit: Option<u64>) {
        if let Some(worker) = visit {
            self.with(|state| state.leave(worker));
        }
    }
}

/// A function, from JSON to JSON.
type Function = Box<dyn FnMut(Value) -> Result<Value> + Send>;

/// The functions that a worker knows.
#[derive(Default)]
pub struct Functions {
    by_name: BTreeMap<String, Function>,
}

impl Functions {
    /// And this one.
    #[must_use]
    pub fn with<A: DeserializeOwned, R: Serialize>(
        mut self,
        name: &str,
        mut function: impl FnMut(A) -> Result<R> + Send + 'static,
    ) -> Self {
        let call = move |argument: Value| {
            let argument = serde_json::from_value(argument);
            let argument = argument
                .map_err(|e| Error::input(format!("the argument is of another type: {e}")))?;
            serde_json::to_value(function(argument)?)
                .map_err(|e| Error::input(format!("the value: {e}")))
        };
        self.by_name.insert(name.into(), Box::new(call));
        self
    }

    fn call(&mut self, name: &str, argument: Value) -> Result<Value> {
        match self.by_name.get_mut(name) {
            Some(function) => function(argument),
            None => Err(Error::input("the worker knows no such function")
                .hint("start all workers with the same program")),
        }
    }
}

/// Carries calls out for the [`Coordinator`] of the directory `run`, until it ends.
///
/// # Errors
/// It is not there, or not heard of for `patience`.
pub fn work_on_calls(run: &Path, patience: Duration, mut functions: Functions) -> Result<()> {
    let site = PsRendezvous::of(run);
    let mut heard = Instant::now();
    loop {
        match join(&site, patience, &mut functions) {
            Ok(true) => return Ok(()),
            Ok(false) => heard = Instant::now(),
            Err(e) if e.kind() != Kind::Comm || heard.elapsed() > patience => return Err(e),
            Err(_) => {}
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Joins, and carries calls out; whether the coordinator has ended, or this worker is to join
/// again.
fn join(site: &PsRendezvous, patience: Duration, functions: &mut Functions) -> Result<bool> {
    let contact = site.coordinator(patience)?;
    let credentials = site.credentials(&contact)?;
    let line = || {
        let line =
            RpcClient::new("the coordinator", &contact.address, credentials.clone(), patience);
        line.comes_back(Duration::from_secs(1))
    };
    let mut coordinator = line();
    let mut beats = line();
    let place = format!("{}:{}", host_name(), std::process::id());
    let CallResponse::Welcome { worker } = coordinator.tell(&CallRequest::Join { place })? else {
        return Err(Error::comm("the coordinator does not take this worker"));
    };
    let _heart = HeartbeatThread::start(patience, move || {
        drop(beats.tell_once::<CallResponse>(&CallRequest::Beat { worker }))
    })?;
    let mut done = None;
    loop {
        match coordinator.tell(&CallRequest::Next { worker, done: done.take() })? {
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

    #[test]
    fn an_error_cancels_the_rest_and_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let of = |name: &str, x: u32| coordinator.schedule(name, &x).unwrap();
        let first = of("half", 8);
        let second = of("half", 7);
        let third = of("half", 6);
        std::thread::scope(|scope| {
            let half = |x: u32| {
                if x.is_multiple_of(2) {
                    Ok(x / 2)
                } else {
                    Err(Error::input(format!("{x} is odd")))
                }
            };
            let functions = Functions::default().with("half", half);
            scope.spawn(|| work_on_calls(folder.path(), TIMEOUT, functions).unwrap());
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
            // The next ones are as if nothing had been.
            assert_eq!(of("half", 2).fetch::<u32>(), Ok(1));
            assert!(
                of("half", 2)
                    .fetch::<String>()
                    .unwrap_err()
                    .to_string()
                    .contains("of another type")
            );
            let unknown = of("third", 2).fetch::<u32>().unwrap_err().to_string();
            assert!(unknown.contains("third: the worker knows no such function"), "{unknown}");
            assert!(coordinator.schedule("half", &1).is_err());
            let never = of("half", 2);
            coordinator.end();
            // It was done before the end, or never will be.
            assert!(never.fetch::<u32>().is_ok_and(|x| x == 1) || never.fetch::<u32>().is_err());
        });
    }

    #[test]
    fn a_call_whose_worker_is_gone_is_given_to_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let value = coordinator.schedule("count", &1).unwrap();
        let join = || {
            let site = PsRendezvous::of(folder.path());
            let contact = site.coordinator(TIMEOUT).unwrap();
            let credentials = site.credentials(&contact).unwrap();
            let mut line = RpcClient::new("the coordinator", contact.address, credentials, TIMEOUT);
            let CallResponse::Welcome { worker } =
                line.tell(&CallRequest::Join { place: "x".into() }).unwrap()
            else {
                panic!()
            };
            (line, worker)
        };
        // It takes the call and is never heard of again.
        let (mut line, worker) = join();
        assert!(matches!(
            line.tell(&CallRequest::Next { worker, done: None }).unwrap(),
            CallResponse::Call { .. }
        ));
        assert!(!coordinator.done());
        drop(line);
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let functions = Functions::default()
            .with("count", move |x: usize| Ok(x + counter.fetch_add(1, Ordering::Relaxed)));
        std::thread::scope(|scope| {
            scope.spawn(|| work_on_calls(folder.path(), TIMEOUT, functions).unwrap());
            assert_eq!(value.fetch::<usize>(), Ok(1));
            coordinator.join().unwrap();
            coordinator.end();
        });
        assert_eq!(calls.load(Ordering::Relaxed), 1);

        // One that costs all its workers is given up.
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        let value = coordinator.schedule("crash", &0).unwrap();
        for _ in 0..LOSSES {
            let (mut line, worker) = join();
            assert!(matches!(
                line.tell(&CallRequest::Next { worker, done: None }).unwrap(),
                CallResponse::Call { .. }
            ));
        }
        let error = value.fetch::<usize>().unwrap_err().to_string();
        assert!(error.contains("the call of crash was lost with 3 workers"), "{error}");
    }
}
