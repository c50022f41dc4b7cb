//! The coordinator's end of all connections: servers and workers that are there, and the work of
//! each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;

use super::address::host_name;
use super::program::{Program, Programs, Role};
use super::protocol::{
    CoordinatorRequest, CoordinatorResponse, Load, ServerRequest, ServerResponse, Work,
    WorkerReport,
};
use super::rpc_client::RpcClient;
use super::rpc_server::RpcHandler;
use super::run_spec::RunSpec;
use super::scheduler::{Member, WorkScheduler};
use super::trace::Collected;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::now;
use hpctrain_comm::Credentials;

/// Time that a request for work waits for some, before the worker is told to ask again.
const LONG_POLL: Duration = Duration::from_millis(500);

/// Time within which a server whose connection was cut must come again, before it counts as lost.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Most bytes of a body: requests to the coordinator have none.
const BODY: usize = 0;

/// All that connections and the coordinator share.
pub struct CoordinatorService {
    state: Mutex<State>,
    changed: Condvar,
    credentials: Credentials,
    limits: Limits,
    /// The trace, if one is wanted.
    pub trace: Option<Collected>,
}

/// Times after which a worker or a server counts as gone.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Without being heard of.
    pub silent: Duration,
    /// Heard of, but a worker is still at the same piece of work, or a server takes no new
    /// connection.
    pub stuck: Duration,
}

/// The end of a wait for something that will not come.
#[derive(Debug)]
pub enum SessionError {
    /// A server is gone.
    Lost(String),
    /// The run ends with this error.
    Failed(Error),
}

impl From<Error> for SessionError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The state.
pub struct State {
    /// Work and workers.
    pub pool: WorkScheduler,
    /// The terms, while the run takes workers.
    pub terms: Option<RunSpec>,
    /// For people: the step, the rate, and the like.
    pub told: BTreeMap<&'static str, serde_json::Value>,
    /// The digest that the data of workers must have, where it is known.
    pub digest: Option<String>,
    generation: u64,
    callers: u64,
    heard: BTreeMap<u64, Instant>,
    /// Workers at a piece of work: since when.
    busy: BTreeMap<u64, Instant>,
    /// Servers that are there, by the number of their call.
    seats: BTreeMap<u64, RegisteredServer>,
    /// Servers take ranges once their heartbeat has come since then.
    forgiven: Instant,
    /// Of them, those that hold ranges.
    assigned: BTreeSet<u64>,
    /// Servers that hold ranges and whose connection has ended: by address, since when.
    missing: BTreeMap<String, Instant>,
    lost: Option<String>,
    /// Workers that wait for the run to begin.
    waiting: BTreeMap<(String, u32), Instant>,
    failed: Option<Error>,
    over: bool,
    programs: Programs,
}

/// A server that is there.
struct RegisteredServer {
    address: String,
    /// The generation whose ranges it held when it came.
    holds: Option<u64>,
    /// Servers take ranges in this order: that of their coming, but one that was lost is behind all
    /// others.
    order: u64,
    /// The time of its last heartbeat.
    heard: Instant,
    /// Whether that is too long ago.
    silent: bool,
}

/// The one at the other end of a connection.
#[derive(Default)]
pub enum SessionId {
    /// Not known.
    #[default]
    Stranger,
    /// A server.
    Server(u64),
    /// A worker.
    Worker(u64),
}

impl CoordinatorService {
    /// Nobody is there.
    ///
    /// Callers are numbered from `callers` on: those of a coordinator before it are others.
    pub fn new(
        pool: WorkScheduler,
        credentials: Credentials,
        limits: Limits,
        trace: Option<Collected>,
        callers: u64,
    ) -> Arc<Self> {
        let state = State {
            pool,
            terms: None,
            told: BTreeMap::new(),
            digest: None,
            generation: 0,
            callers,
            heard: BTreeMap::new(),
            busy: BTreeMap::new(),
            seats: BTreeMap::new(),
            forgiven: Instant::now(),
            assigned: BTreeSet::new(),
            missing: BTreeMap::new(),
            lost: None,
            waiting: BTreeMap::new(),
            failed: None,
            over: false,
            programs: Programs::begin(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            credentials,
            limits,
            trace,
        })
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

    /// The times after which a worker or a server counts as gone.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Notes that a server is lost, so that all waits for servers end, and others take ranges
    /// before it. If one is lost already, the wait for this one ended for that reason.
    pub fn lose(&self, address: &str, why: &str) -> SessionError {
        SessionError::Lost(self.with(|state| {
            if let Some(before) = &state.lost {
                return before.clone();
            }
            let seat = state
                .seats
                .iter()
                .find(|(_, seat)| seat.address == address)
                .map(|(number, _)| *number);
            if let Some(number) = seat {
                state.put_behind(number);
            }
            let told = format!("{address}: {why}");
            state.lost = Some(told.clone());
            told
        }))
    }

    /// Whether a server that holds ranges is gone.
    pub fn has_lost(&self) -> bool {
        let mut state = self.lock();
        state.expire_stale(self.limits);
        state.lost.is_some()
    }

    /// Whether the run goes on with the servers of a generation.
    pub fn should_continue(&self, generation: u64) -> bool {
        let mut state = self.lock();
        state.expire_stale(self.limits);
        state.lost.is_none()
            && state.terms.as_ref().is_some_and(|terms| terms.generation == generation)
    }

    /// Waits until `look` finds something; it looks at every change, and at least every 50 ms.
    ///
    /// # Errors
    /// A server is gone, or the run failed.
    pub fn wait<T>(
        &self,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, SessionError> {
        let mut state = self.lock();
        loop {
            state.expire_stale(self.limits);
            if let Some(error) = state.failed.take() {
                return Err(SessionError::Failed(error));
            }
            if let Some(server) = &state.lost {
                return Err(SessionError::Lost(server.clone()));
            }
            if let Some(found) = look(&mut state) {
                return Ok(found);
            }
            state = self
                .changed
                .wait_timeout(state, Duration::from_millis(50))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Answers a request for work, once there is some.
    fn next(
        &self,
        member: u64,
        generation: u64,
        data: Option<String>,
        report: Option<WorkerReport>,
    ) -> Result<Work> {
        let mut state = self.lock();
        state.heard.insert(member, Instant::now());
        state.busy.remove(&member);
        if let Some(expected) = &state.digest
            && data.as_ref().is_some_and(|data| data != expected)
        {
            let e = Error::input("the training data of this worker is not that of the run");
            state.evict(member, "it has other data");
            return Err(e.hint("give all workers the same files"));
        }
        if generation == state.generation {
            match report {
                Some(WorkerReport::Failed { fault }) => {
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
                    state.evict(member, "the run is over");
                    return Ok(Work::End(code));
                }
                _ if !is_current => return Ok(Work::Renew),
                Some(work) => {
                    state.busy.insert(member, Instant::now());
                    return Ok(work);
                }
                None => {}
            }
            let left = LONG_POLL.saturating_sub(since.elapsed());
            if left.is_zero() {
                return Ok(Work::Wait);
            }
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The state of the run, with the load of every server.
    fn status(&self) -> serde_json::Value {
        let (mut told, addresses) = {
            let state = self.lock();
            let member = |(number, member): (&u64, &Member)| {
                let heard =
                    state.heard.get(number).map_or(0.0, |heard| heard.elapsed().as_secs_f64());
                json!({"worker": number, "place": member.place, "clock": member.clock, "done": member.done,
                       "seconds": member.seconds, "heard_seconds_ago": heard})
            };
            let workers: Vec<_> = state.pool.members().iter().map(member).collect();
            let given: Vec<_> = state
                .pool
                .given()
                .map(|(ticket, worker, task)| json!({"ticket": ticket, "worker": worker, "task": task}))
                .collect();
            let staleness: Vec<_> = state.pool.histogram().iter().collect();
            let addresses =
                state.terms.as_ref().map(|terms| terms.addresses.clone()).unwrap_or_default();
            let told = json!({"run": state.told, "generation": state.generation, "workers": workers, "leases": given, "staleness": staleness, "devices": state.programs.devices()});
            (told, addresses)
        };
        let load = |address: &String| {
            let mut line = RpcClient::new(
                "a server",
                address,
                self.credentials.clone(),
                Duration::from_secs(2),
            );
            match line.tell_once(&ServerRequest::Load) {
                Ok(ServerResponse::Load(load)) => json!({"address": address, "load": load}),
                _ => json!({"address": address, "load": Option::<Load>::None}),
            }
        };
        told["servers"] = addresses.iter().map(load).collect();
        told
    }
}

impl State {
    /// Gives ranges to the first `servers` servers whose heartbeats come; returns their addresses.
    /// None while there are fewer.
    pub fn register_servers(&mut self, servers: usize) -> Option<Vec<String>> {
        let mut ready: Vec<(&u64, &RegisteredServer)> = self.ready().collect();
        if ready.len() < servers {
            return None;
        }
        ready.sort_by_key(|(_, seat)| seat.order);
        ready.truncate(servers);
        let addresses = ready.iter().map(|(_, seat)| seat.address.clone()).collect();
        self.assigned = ready.into_iter().map(|(number, _)| *number).collect();
        self.lost = None;
        self.missing.clear();
        Some(addresses)
    }

    /// Servers whose heartbeats come.
    fn ready(&self) -> impl Iterator<Item = (&u64, &RegisteredServer)> {
        self.seats.iter().filter(|(_, seat)| !seat.silent && seat.heard >= self.forgiven)
    }

    /// Puts a server behind all others.
    fn put_behind(&mut self, number: u64) {
        self.callers += 1;
        if let Some(seat) = self.seats.get_mut(&number) {
            seat.order = self.callers;
        }
    }

    /// Takes the servers at these addresses, if all are there with their ranges of a generation.
    pub fn seat_again(&mut self, addresses: &[String], generation: u64) -> bool {
        let seat_of = |address: &String| {
            let mut seats = self.seats.iter();
            let found =
                seats.find(|(_, seat)| seat.holds == Some(generation) && seat.address == *address);
            found.map(|(number, _)| *number)
        };
        let seats: Option<BTreeSet<u64>> = addresses.iter().map(seat_of).collect();
        match seats {
            None => false,
            Some(seats) => {
                self.assigned = seats;
                true
            }
        }
    }

    /// The number of servers whose heartbeats come.
    pub fn servers(&self) -> usize {
        self.ready().count()
    }

    /// Forgets that a server was lost: others are waited for, and a heartbeat of each.
    pub fn clear_lost(&mut self) {
        (self.lost, self.assigned, self.forgiven) = (None, BTreeSet::new(), Instant::now());
        self.missing.clear();
    }

    /// Workers that wait for the run to begin, and the time since the last one came.
    pub fn waiting(&self) -> (usize, Duration) {
        let last = self.waiting.values().max().map_or(Duration::ZERO, Instant::elapsed);
        (self.waiting.len(), last)
    }

    /// The run takes workers, on these terms.
    pub fn open(&mut self, terms: RunSpec, pool: WorkScheduler) {
        (self.generation, self.pool, self.terms) = (terms.generation, pool, Some(terms));
        self.waiting.clear();
    }

    /// The run takes no workers for the moment; those that were there are to come again.
    pub fn close(&mut self) {
        self.terms = None;
        self.heard.clear();
        self.busy.clear();
    }

    /// The run is over.
    pub fn end(&mut self, code: i32) {
        self.pool.end(code);
        self.over = true;
    }

    /// Compares the program of a newcomer with those that the run began with.
    ///
    /// # Errors
    /// Returns an error if it differs and all processes must compute the same bits.
    fn admit(&mut self, role: Role, place: &str, program: &Program) -> Result<()> {
        let Some(difference) = self.programs.difference(role, program) else { return Ok(()) };
        if self.pool.is_synchronous() {
            log::warn!("{role} {place} is refused: {difference}");
            let message = format!(
                "{role} {place}: {difference}, and with parameter_server.staleness = 0 all must give the same bits"
            );
            return Err(Error::input(message).hint(
                "start it with the same executable on the same kind of device, or the run with parameter_server.staleness = \"none\"",
            ));
        }
        log::warn!("{role} {place}: {difference}; what it computes may differ in its last bits");
        Ok(())
    }

    /// The end of the run, for a worker that was never one.
    fn ended(&mut self) -> CoordinatorResponse {
        self.waiting.clear();
        CoordinatorResponse::Work(self.pool.next(0).unwrap_or(Work::Wait))
    }

    /// Whether all have heard of the end.
    pub fn is_empty(&self) -> bool {
        self.pool.members().is_empty() && self.seats.is_empty()
    }

    /// A worker is gone.
    fn evict(&mut self, member: u64, why: &str) {
        if let Some(member) = self.unregister(member) {
            let level = if self.over { log::Level::Info } else { log::Level::Warn };
            log::log!(level, "worker {} is gone: {why}", member.place);
        }
    }

    /// A worker is no longer one.
    fn unregister(&mut self, member: u64) -> Option<Member> {
        self.heard.remove(&member);
        self.busy.remove(&member);
        self.pool.leave(member)
    }

    /// Workers that are silent or stuck are gone; servers that are silent, or did not come again,
    /// are lost.
    fn expire_stale(&mut self, limits: Limits) {
        let past = |times: &BTreeMap<u64, Instant>, limit: Duration| -> Vec<u64> {
            times
                .iter()
                .filter(|(_, since)| since.elapsed() > limit)
                .map(|(member, _)| *member)
                .collect()
        };
        for member in past(&self.heard, limits.silent) {
            self.evict(member, &format!("it was not heard of for {} s", limits.silent.as_secs()));
        }
        for member in past(&self.busy, limits.stuck) {
            let told = format!(
                "it has been at one piece of work for {} s (comm.timeout)",
                limits.stuck.as_secs()
            );
            let place = self.pool.members().get(&member).map(|member| member.place.clone());
            self.evict(member, &told);
            if let (Some(place), true) = (place, self.pool.members().is_empty()) {
                let told = format!("worker {place} is stuck: {told}, and there is no other");
                self.failed.get_or_insert(Error::comm(told).hint("its log says what it was at"));
            }
        }
        let is_silent =
            |seat: &RegisteredServer| !seat.silent && seat.heard.elapsed() > limits.silent;
        let silent: Vec<u64> = self
            .seats
            .iter()
            .filter(|(_, seat)| is_silent(seat))
            .map(|(number, _)| *number)
            .collect();
        for number in silent {
            self.put_behind(number);
            if let Some(seat) = self.seats.get_mut(&number) {
                seat.silent = true;
                let told = format!(
                    "{}: no heartbeat for {} s (parameter_server.timeout)",
                    seat.address,
                    limits.silent.as_secs()
                );
                if self.assigned.contains(&number) && !self.over {
                    self.lost.get_or_insert(told);
                }
            }
        }
        if let Some((address, _)) =
            self.missing.iter().find(|(_, since)| since.elapsed() > RECONNECT_TIMEOUT)
        {
            self.lost.get_or_insert_with(|| format!("{address}: its connection ended"));
        }
    }
}

impl RpcHandler for CoordinatorService {
    type Request = CoordinatorRequest;
    type Answer = CoordinatorResponse;
    type Visit = SessionId;

    fn limit(&self) -> usize {
        BODY
    }

    fn answer(
        &self,
        visit: &mut SessionId,
        request: CoordinatorRequest,
        _: &mut Vec<u8>,
    ) -> Result<CoordinatorResponse> {
        match request {
            CoordinatorRequest::Serve { address, generation, program } => self.with(|state| {
                if state.over {
                    return Ok(CoordinatorResponse::Over);
                }
                state.admit(Role::Server, &address, &program)?;
                state.callers += 1;
                // One that has its ranges still was only cut off.
                if generation == Some(state.generation) && state.missing.remove(&address).is_some()
                {
                    log::info!("server {address} is back");
                    state.assigned.insert(state.callers);
                }
                let seat = RegisteredServer {
                    address,
                    holds: generation,
                    order: state.callers,
                    heard: Instant::now(),
                    silent: false,
                };
                state.seats.insert(state.callers, seat);
                *visit = SessionId::Server(state.callers);
                Ok(CoordinatorResponse::Serves)
            }),
            CoordinatorRequest::Served => {
                // A heartbeat of a server is news for nobody: those who wait are not woken.
                let mut state = self.lock();
                if let SessionId::Server(number) = visit
                    && let Some(seat) = state.seats.get_mut(number)
                {
                    (seat.heard, seat.silent) = (Instant::now(), false);
                }
                Ok(if state.over { CoordinatorResponse::Over } else { CoordinatorResponse::Serves })
            }
            CoordinatorRequest::Terms { host, process } => {
                Ok(self.with(|state| match &state.terms {
                    _ if state.over => state.ended(),
                    Some(terms) => CoordinatorResponse::Terms(Box::new(terms.clone())),
                    None => {
                        state.waiting.entry((host, process)).or_insert_with(Instant::now);
                        CoordinatorResponse::NotYet
                    }
                }))
            }
            CoordinatorRequest::Join { host, process, program } => self.with(|state| {
                if state.over {
                    return Ok(state.ended());
                }
                let Some(terms) = state.terms.clone() else {
                    state.waiting.entry((host, process)).or_insert_with(Instant::now);
                    return Ok(CoordinatorResponse::NotYet);
                };
                let place = format!("{host}:{process}");
                state.admit(Role::Worker, &place, &program)?;
                state.callers += 1;
                let member = state.callers;
                log::info!("worker {place} has come");
                state.pool.join(member, place);
                state.heard.insert(member, Instant::now());
                *visit = SessionId::Worker(member);
                Ok(CoordinatorResponse::Welcome { member, terms: Box::new(terms) })
            }),
            CoordinatorRequest::Next { member, generation, data, report } => {
                self.next(member, generation, data, report).map(CoordinatorResponse::Work)
            }
            CoordinatorRequest::Beat { member } => Ok(self.with(|state| {
                if state.terms.is_none() || !state.pool.members().contains_key(&member) {
                    return CoordinatorResponse::Work(Work::Renew);
                }
                state.heard.insert(member, Instant::now());
                CoordinatorResponse::Heard
            })),
            CoordinatorRequest::Leave { member } => Ok(self.with(|state| {
                if let Some(member) = state.unregister(member) {
                    log::info!("worker {} leaves, as it was asked to", member.place);
                }
                CoordinatorResponse::Heard
            })),
            CoordinatorRequest::Status => Ok(CoordinatorResponse::Status(Box::new(self.status()))),
            CoordinatorRequest::Clock => {
                Ok(CoordinatorResponse::Clock { time: now(), host: host_name() })
            }
            CoordinatorRequest::Events { process, events, lost } => {
                let taken =
                    self.trace.as_ref().map_or(Ok(()), |trace| trace.take(&process, &events, lost));
                // The run does not end for it.
                taken.unwrap_or_else(|e| log::warn!("{e}"));
                Ok(CoordinatorResponse::Heard)
            }
        }
    }

    fn left(&self, visit: SessionId) {
        self.with(|state| match visit {
            SessionId::Stranger => {}
            SessionId::Worker(member) => state.evict(member, "its connection ended"),
            SessionId::Server(server) => {
                let seat = state.seats.remove(&server);
                if let (Some(seat), true, false) =
                    (seat, state.assigned.remove(&server), state.over)
                {
                    state.missing.insert(seat.address, Instant::now());
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Done;
    use hpctrain_checkpoint::Progress;
    use hpctrain_comm::Secret;
    use hpctrain_config::{Config, Staleness};

    const SHORT: Duration = Duration::from_millis(100);

    /// A run that takes workers, of whose work there is some.
    fn hub() -> Arc<CoordinatorService> {
        hub_with(Limits { silent: Duration::from_secs(60), stuck: SHORT }, Staleness::None)
    }

    fn program() -> Program {
        Program::here("CPU".into())
    }

    fn hub_with(limits: Limits, staleness: Staleness) -> Arc<CoordinatorService> {
        let credentials = Credentials { secret: Secret::new(vec![7; 32]).unwrap(), encrypt: true };
        let pool = || WorkScheduler::new(staleness, 4, 0);
        let hub = CoordinatorService::new(pool(), credentials, limits, None, 0);
        let terms = RunSpec {
            generation: 7,
            config: Config::default(),
            workers: 2,
            vocabulary: None,
            preprocessing: None,
            start: Progress::default(),
            pieces: vec![],
            addresses: vec![],
            trace: false,
        };
        hub.with(|state| {
            state.open(terms, pool());
            state.pool.begin_batches(Done::default(), 100);
        });
        hub
    }

    fn ask(
        hub: &CoordinatorService,
        visit: &mut SessionId,
        request: CoordinatorRequest,
    ) -> CoordinatorResponse {
        hub.answer(visit, request, &mut Vec::new()).unwrap()
    }

    fn join(hub: &CoordinatorService, process: u32) -> u64 {
        let join = CoordinatorRequest::Join { host: "host".into(), process, program: program() };
        match ask(hub, &mut SessionId::default(), join) {
            CoordinatorResponse::Welcome { member, .. } => member,
            other => panic!("{other:?}"),
        }
    }

    fn next(hub: &CoordinatorService, member: u64) -> CoordinatorResponse {
        ask(
            hub,
            &mut SessionId::default(),
            CoordinatorRequest::Next { member, generation: 7, data: None, report: None },
        )
    }

    #[test]
    fn a_stuck_worker_is_gone_though_its_heart_beats() {
        let hub = hub();
        let [stuck, idle] = [1, 2].map(|process| join(&hub, process));
        assert!(matches!(next(&hub, stuck), CoordinatorResponse::Work(Work::Lease { .. })));
        std::thread::sleep(2 * SHORT);
        ask(&hub, &mut SessionId::default(), CoordinatorRequest::Beat { member: stuck });
        let members =
            |state: &mut State| Some(state.pool.members().keys().copied().collect::<Vec<_>>());
        assert_eq!(hub.wait(members).unwrap(), [idle]);
        assert!(matches!(next(&hub, stuck), CoordinatorResponse::Work(Work::Renew)));
        // Its batches go to the other one; if that is stuck as well, nobody is left.
        assert!(
            matches!(next(&hub, idle), CoordinatorResponse::Work(Work::Lease { batches, .. }) if batches == (0..4))
        );
        std::thread::sleep(2 * SHORT);
        let Err(SessionError::Failed(e)) = hub.wait(|_| None::<()>) else { panic!("it goes on") };
        assert!(e.to_string().contains("worker host:2 is stuck"), "{e}");
    }

    #[test]
    fn programs_that_give_other_bits_are_refused_where_all_must_give_the_same() {
        let joined = |staleness, program: &Program| {
            let hub = hub_with(Limits { silent: Duration::from_secs(60), stuck: SHORT }, staleness);
            join(&hub, 1);
            let join = CoordinatorRequest::Join {
                host: "host".into(),
                process: 2,
                program: program.clone(),
            };
            let serve = CoordinatorRequest::Serve {
                address: "host:2".into(),
                generation: None,
                program: program.clone(),
            };
            let ask = |request| hub.answer(&mut SessionId::default(), request, &mut Vec::new());
            (ask(join).map(drop), ask(serve).map(drop))
        };
        let rebuilt = Program { build: "00000000".into(), ..program() };
        let elsewhere = Program::here("CPU (AVX2)".into());
        for (staleness, is_exact) in
            [(Staleness::Bound(0), true), (Staleness::Bound(3), false), (Staleness::None, false)]
        {
            assert_eq!(joined(staleness, &program()), (Ok(()), Ok(())));
            let (worker, server) = joined(staleness, &rebuilt);
            assert_eq!((worker.is_err(), server.is_err()), (is_exact, is_exact));
            let (worker, server) = joined(staleness, &elsewhere);
            // It is the first server: its device is that of servers.
            assert_eq!((worker.is_err(), server), (is_exact, Ok(())));
            if let Err(e) = worker {
                let message = e.to_string();
                assert!(
                    message
                        .contains("worker host:2: it computes on CPU (AVX2), the run on CPU, and"),
                    "{message}"
                );
                assert!(
                    e.exit_code() == 2
                        && message.contains("hint: start it with the same executable"),
                    "{message}"
                );
            }
        }
    }

    #[test]
    fn a_server_without_heartbeats_is_lost_and_goes_behind() {
        let hub = hub_with(Limits { silent: 2 * SHORT, stuck: SHORT }, Staleness::None);
        let serve = |address: &str| {
            let mut visit = SessionId::default();
            let serve = CoordinatorRequest::Serve {
                address: address.into(),
                generation: None,
                program: program(),
            };
            ask(&hub, &mut visit, serve);
            visit
        };
        let beat = |visit: &mut SessionId| ask(&hub, visit, CoordinatorRequest::Served);
        let [mut hangs, mut spare] = ["hangs:1", "spare:1"].map(serve);
        assert_eq!(hub.with(|state| state.register_servers(1)), Some(vec!["hangs:1".into()]));
        let lost = loop {
            beat(&mut spare);
            std::thread::sleep(SHORT / 4);
            if hub.has_lost() {
                break hub.wait(|_| None::<()>);
            }
        };
        assert!(
            matches!(lost, Err(SessionError::Lost(told)) if told.starts_with("hangs:1: no heartbeat for "))
        );
        // Nobody takes ranges before a heartbeat has come.
        hub.with(State::clear_lost);
        assert_eq!(hub.with(|state| (state.servers(), state.register_servers(1))), (0, None));
        beat(&mut hangs);
        beat(&mut spare);
        assert_eq!(
            hub.with(|state| (state.servers(), state.register_servers(1))),
            (2, Some(vec!["spare:1".into()]))
        );
        assert_eq!(
            hub.with(|state| state.register_servers(2)),
            Some(vec!["spare:1".into(), "hangs:1".into()])
        );
    }

    #[test]
    fn a_server_that_was_cut_off_is_not_lost_if_it_has_its_ranges() {
        let hub = hub();
        let serve = |generation| {
            let mut visit = SessionId::default();
            let serve = CoordinatorRequest::Serve {
                address: "host:1".into(),
                generation,
                program: program(),
            };
            ask(&hub, &mut visit, serve);
            visit
        };
        let first = serve(None);
        assert_eq!(hub.with(|state| state.register_servers(1)), Some(vec!["host:1".into()]));
        hub.left(first);
        let again = serve(Some(7));
        std::thread::sleep(RECONNECT_TIMEOUT + SHORT);
        assert!(!hub.has_lost());
        hub.left(again);
        // Another process at the same address has nothing.
        serve(None);
        assert!(hub.should_continue(7));
        std::thread::sleep(RECONNECT_TIMEOUT + SHORT);
        assert!(!hub.should_continue(7));
        assert!(
            matches!(hub.wait(|_| None::<()>), Err(SessionError::Lost(address)) if address.starts_with("host:1: "))
        );
    }
}
