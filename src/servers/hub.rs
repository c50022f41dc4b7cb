//! The coordinator's end of all connections: servers and workers that are there, and the work of each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;

use super::line::Line;
use super::listener::Service;
use super::message::{FromCoordinator, FromServer, Load, Report, ToCoordinator, ToServer, Work};
use super::pool::{Member, Pool};
use super::terms::Terms;
use crate::comm::Secret;
use crate::error::{Error, Kind, Result};

/// Time that a request for work waits for some, before the worker is told to ask again.
const HOLD: Duration = Duration::from_millis(500);

/// Most bytes of a body: requests to the coordinator have none.
const BODY: usize = 0;

/// All that connections and the coordinator share.
pub struct Hub {
    state: Mutex<State>,
    changed: Condvar,
    secret: Secret,
    /// Time after which a worker that is not heard of counts as gone.
    patience: Duration,
}

/// The end of a wait for something that will not come.
#[derive(Debug)]
pub enum Halt {
    /// A server is gone.
    Lost(String),
    /// The run ends with this error.
    Failed(Error),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The state.
pub struct State {
    /// Work and workers.
    pub pool: Pool,
    /// The terms, while the run takes workers.
    pub terms: Option<Terms>,
    /// For people: the step, the rate, and the like.
    pub told: BTreeMap<&'static str, serde_json::Value>,
    /// The digest that the data of workers must have, where it is known.
    pub digest: Option<String>,
    generation: u64,
    callers: u64,
    heard: BTreeMap<u64, Instant>,
    /// Servers that are there, in the order of their coming.
    seats: BTreeMap<u64, String>,
    /// Of them, those that hold ranges.
    assigned: BTreeSet<u64>,
    lost: Option<String>,
    /// Workers that wait for the run to begin.
    waiting: BTreeMap<(String, u32), Instant>,
    failed: Option<Error>,
    over: bool,
}

/// The one at the other end of a connection.
#[derive(Default)]
pub enum Visit {
    /// Not known.
    #[default]
    Stranger,
    /// A server.
    Server(u64),
    /// A worker.
    Worker(u64),
}

impl Hub {
    /// Nobody is there.
    pub fn new(pool: Pool, secret: Secret, patience: Duration) -> Arc<Self> {
        let state = State {
            pool,
            terms: None,
            told: BTreeMap::new(),
            digest: None,
            generation: 0,
            callers: 0,
            heard: BTreeMap::new(),
            seats: BTreeMap::new(),
            assigned: BTreeSet::new(),
            lost: None,
            waiting: BTreeMap::new(),
            failed: None,
            over: false,
        };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new(), secret, patience })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state.
    pub fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    /// Whether a server that holds ranges is gone.
    pub fn has_lost(&self) -> bool {
        self.lock().lost.is_some()
    }

    /// Whether the run goes on with the servers of a generation.
    pub fn goes_on(&self, generation: u64) -> bool {
        let state = self.lock();
        state.lost.is_none() && state.terms.as_ref().is_some_and(|terms| terms.generation == generation)
    }

    /// Waits until `look` finds something; it looks at every change, and at least every 50 ms.
    ///
    /// # Errors
    /// A server is gone, or the run failed.
    pub fn wait<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> Result<T, Halt> {
        let mut state = self.lock();
        loop {
            state.sweep(self.patience);
            if let Some(error) = state.failed.take() {
                return Err(Halt::Failed(error));
            }
            if let Some(server) = &state.lost {
                return Err(Halt::Lost(server.clone()));
            }
            if let Some(found) = look(&mut state) {
                return Ok(found);
            }
            state =
                self.changed.wait_timeout(state, Duration::from_millis(50)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Answers a request for work, once there is some.
    fn next(&self, member: u64, generation: u64, data: Option<String>, report: Option<Report>) -> Result<Work> {
        let mut state = self.lock();
        state.heard.insert(member, Instant::now());
        if let Some(expected) = &state.digest
            && data.as_ref().is_some_and(|data| data != expected)
        {
            let e = Error::input("the training data of this worker is not that of the run");
            state.gone(member, "it has other data");
            return Err(e.hint("give all workers the same files"));
        }
        if generation == state.generation {
            match report {
                Some(Report::Failed { fault }) => {
                    // One that was sent away has a reason of its own.
                    if let Some(member) = state.pool.members().get(&member) {
                        let error = fault.error().at(format_args!("worker {}", member.place));
                        state.failed.get_or_insert(error);
                    }
                }
                Some(report) => state.pool.done(member, &report),
                None => {}
            }
            self.changed.notify_all();
        }
        let since = Instant::now();
        loop {
            let is_current = generation == state.generation && state.terms.is_some();
            match state.pool.next(member) {
                Some(Work::End(code)) => {
                    state.gone(member, "the run is over");
                    return Ok(Work::End(code));
                }
                _ if !is_current => return Ok(Work::Renew),
                Some(work) => return Ok(work),
                None => {}
            }
            let left = HOLD.saturating_sub(since.elapsed());
            if left.is_zero() {
                return Ok(Work::Wait);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The state of the run, with the load of every server.
    fn status(&self) -> serde_json::Value {
        let (mut told, addresses) = {
            let state = self.lock();
            let member = |(number, member): (&u64, &Member)| {
                let heard = state.heard.get(number).map_or(0.0, |heard| heard.elapsed().as_secs_f64());
                json!({"worker": number, "place": member.place, "clock": member.clock, "done": member.done,
                       "compute_seconds": member.compute, "heard_seconds_ago": heard})
            };
            let workers: Vec<_> = state.pool.members().iter().map(member).collect();
            let given: Vec<_> = state
                .pool
                .given()
                .map(|(ticket, worker, task)| json!({"ticket": ticket, "worker": worker, "task": task}))
                .collect();
            let staleness: Vec<_> = state.pool.histogram().iter().collect();
            let addresses = state.terms.as_ref().map(|terms| terms.addresses.clone()).unwrap_or_default();
            let told = json!({"run": state.told, "generation": state.generation, "workers": workers, "leases": given, "staleness": staleness});
            (told, addresses)
        };
        let load = |address: &String| {
            let mut line = Line::new("a server", address, self.secret.clone(), Duration::from_secs(2));
            match line.tell_once(&ToServer::Load) {
                Ok(FromServer::Load(load)) => json!({"address": address, "load": load}),
                _ => json!({"address": address, "load": Option::<Load>::None}),
            }
        };
        told["servers"] = addresses.iter().map(load).collect();
        told
    }
}

impl State {
    /// So many servers that are there, with the address of each, which hold ranges from now on; none while there are fewer.
    pub fn seat(&mut self, servers: usize) -> Option<Vec<String>> {
        if self.seats.len() < servers {
            return None;
        }
        self.assigned = self.seats.keys().copied().take(servers).collect();
        self.lost = None;
        Some(self.seats.values().take(servers).cloned().collect())
    }

    /// Servers that are there.
    pub fn servers(&self) -> usize {
        self.seats.len()
    }

    /// Forgets that a server was lost: others are waited for.
    pub fn forgive(&mut self) {
        (self.lost, self.assigned) = (None, BTreeSet::new());
    }

    /// Workers that wait for the run to begin, and the time since the last one came.
    pub fn waiting(&self) -> (usize, Duration) {
        let last = self.waiting.values().max().map_or(Duration::ZERO, Instant::elapsed);
        (self.waiting.len(), last)
    }

    /// The run takes workers, on these terms.
    pub fn open(&mut self, terms: Terms, pool: Pool) {
        (self.generation, self.pool, self.terms) = (terms.generation, pool, Some(terms));
        self.waiting.clear();
    }

    /// The run takes no workers for the moment; those that were there are to come again.
    pub fn close(&mut self) {
        self.terms = None;
        self.heard.clear();
    }

    /// The run is over.
    pub fn end(&mut self, code: i32) {
        self.pool.end(code);
        self.over = true;
    }

    /// Whether all have heard of the end.
    pub fn is_empty(&self) -> bool {
        self.pool.members().is_empty() && self.seats.is_empty()
    }

    /// A worker is gone.
    fn gone(&mut self, member: u64, why: &str) {
        if let Some(member) = self.left(member) {
            let level = if self.over { log::Level::Info } else { log::Level::Warn };
            log::log!(level, "worker {} is gone: {why}", member.place);
        }
    }

    /// A worker is no longer one.
    fn left(&mut self, member: u64) -> Option<Member> {
        self.heard.remove(&member);
        self.pool.leave(member)
    }

    /// Workers that have not been heard of for so long are gone.
    fn sweep(&mut self, patience: Duration) {
        let silent = self.heard.iter().filter(|(_, heard)| heard.elapsed() > patience);
        let silent: Vec<u64> = silent.map(|(member, _)| *member).collect();
        for member in silent {
            self.gone(member, &format!("it was not heard of for {} s", patience.as_secs()));
        }
    }
}

impl Service for Hub {
    type Request = ToCoordinator;
    type Answer = FromCoordinator;
    type Visit = Visit;

    fn limit(&self) -> usize {
        BODY
    }

    fn answer(&self, visit: &mut Visit, request: ToCoordinator, _: &mut Vec<u8>) -> Result<FromCoordinator> {
        match request {
            ToCoordinator::Serve { address } => Ok(self.with(|state| {
                if state.over {
                    return FromCoordinator::Over;
                }
                state.callers += 1;
                state.seats.insert(state.callers, address);
                *visit = Visit::Server(state.callers);
                FromCoordinator::Serves
            })),
            ToCoordinator::Served => Ok(if self.lock().over { FromCoordinator::Over } else { FromCoordinator::Serves }),
            ToCoordinator::Terms { host, process } => Ok(self.with(|state| match &state.terms {
                Some(terms) => FromCoordinator::Terms(Box::new(terms.clone())),
                None => {
                    state.waiting.entry((host, process)).or_insert_with(Instant::now);
                    FromCoordinator::NotYet
                }
            })),
            ToCoordinator::Join { host, process } => Ok(self.with(|state| {
                let Some(terms) = state.terms.clone() else {
                    state.waiting.entry((host, process)).or_insert_with(Instant::now);
                    return FromCoordinator::NotYet;
                };
                state.callers += 1;
                let (member, place) = (state.callers, format!("{host}:{process}"));
                log::info!("worker {place} has come");
                state.pool.join(member, place);
                state.heard.insert(member, Instant::now());
                *visit = Visit::Worker(member);
                FromCoordinator::Welcome { member, terms: Box::new(terms) }
            })),
            ToCoordinator::Next { member, generation, data, report } => {
                self.next(member, generation, data, report).map(FromCoordinator::Work)
            }
            ToCoordinator::Beat { member } => Ok(self.with(|state| {
                state.heard.entry(member).and_modify(|heard| *heard = Instant::now());
                FromCoordinator::Heard
            })),
            ToCoordinator::Leave { member } => Ok(self.with(|state| {
                if let Some(member) = state.left(member) {
                    log::info!("worker {} leaves, as it was asked to", member.place);
                }
                FromCoordinator::Heard
            })),
            ToCoordinator::Status => Ok(FromCoordinator::Status(Box::new(self.status()))),
        }
    }

    fn left(&self, visit: Visit) {
        self.with(|state| match visit {
            Visit::Stranger => {}
            Visit::Worker(member) => state.gone(member, "its connection ended"),
            Visit::Server(server) => {
                let address = state.seats.remove(&server).unwrap_or_default();
                if state.assigned.contains(&server) && !state.over {
                    state.lost.get_or_insert(address);
                }
            }
        });
    }
}

impl Halt {
    /// An error of a server: one whose connection failed is lost.
    pub fn of_server(error: Error) -> Self {
        if error.kind() == Kind::Comm { Self::Lost(error.message().into()) } else { Self::Failed(error) }
    }
}
