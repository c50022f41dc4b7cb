//! The coordinator's RPC service: tracks servers and workers, and answers their requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;

use super::program::{Program, Programs, Role};
use super::protocol::{
    CoordinatorRequest, CoordinatorResponse, ServerLoad, ServerRequest, ServerResponse, Work,
    WorkerReport,
};
use super::rpc_client::RpcClient;
use super::rpc_server::RpcHandler;
use super::run_spec::RunSpec;
use super::scheduler::{WorkScheduler, WorkerState};
use super::trace::TraceCollector;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::now;
use hpctrain_comm::Credentials;
use hpctrain_comm::host_name;

/// The time that a request for work waits before it is answered with [`Work::Wait`].
const LONG_POLL: Duration = Duration::from_millis(500);

/// The time in which a server whose connection ended must reconnect; otherwise it is lost.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The size limit of request bodies: requests to the coordinator have none.
const MAX_BODY: usize = 0;

/// The state shared by all connections and the coordinator.
pub struct CoordinatorService {
    state: Mutex<State>,
    changed: Condvar,
    credentials: Credentials,
    limits: LivenessTimeouts,
    /// The trace, if one is recorded.
    pub trace: Option<TraceCollector>,
}

/// The timeouts after which a worker or a server is considered lost.
#[derive(Debug, Clone, Copy)]
pub struct LivenessTimeouts {
    /// The timeout without a heartbeat.
    pub silent: Duration,
    /// The timeout of one piece of work of a worker, and of a server that accepts no new
    /// connection, with heartbeats.
    pub stuck: Duration,
}

/// The reason why a session ends early.
#[derive(Debug)]
pub enum SessionError {
    /// A server was lost.
    Lost(String),
    /// The run failed with this error.
    Failed(Error),
}

impl From<Error> for SessionError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The state of the service, which a lock protects.
pub struct State {
    /// The scheduler of the workers.
    pub scheduler: WorkScheduler,
    /// The run specification, while the run accepts workers.
    pub terms: Option<RunSpec>,
    /// The progress that `hpctrain ps status` shows: the step, the rate, and so on.
    pub progress: BTreeMap<&'static str, serde_json::Value>,
    /// The digest that the data of workers must have, if it is known.
    pub digest: Option<String>,
    generation: u64,
    callers: u64,
    heard: BTreeMap<u64, Instant>,
    /// The workers that are busy, and since when.
    busy: BTreeMap<u64, Instant>,
    /// The connected servers, by the number of their connection.
    registered: BTreeMap<u64, RegisteredServer>,
    /// Servers are assigned ranges only after a heartbeat that is newer than this.
    cleared_at: Instant,
    /// The connected servers that hold ranges.
    assigned: BTreeSet<u64>,
    /// The addresses of servers that hold ranges and whose connection ended, and since when.
    missing: BTreeMap<String, Instant>,
    lost: Option<String>,
    /// The workers that wait for the run to start.
    waiting: BTreeMap<(String, u32), Instant>,
    failed: Option<Error>,
    over: bool,
    programs: Programs,
}

/// A connected server.
struct RegisteredServer {
    address: String,
    /// The generation whose ranges it held when it connected.
    holds: Option<u64>,
    /// The position in the order in which servers are assigned ranges: the order in which they
    /// connected, except that a server that was lost comes last.
    order: u64,
    /// The time of its last heartbeat.
    heard: Instant,
    /// Whether its heartbeats have timed out.
    silent: bool,
}

/// The peer of a connection.
#[derive(Default)]
pub enum PeerKind {
    /// A peer that has not registered.
    #[default]
    Stranger,
    /// A server.
    Server(u64),
    /// A worker.
    Worker(u64),
}

impl CoordinatorService {
    /// Creates a service without servers and workers.
    ///
    /// Peers are numbered from `callers` on, so that they differ from those of a previous
    /// coordinator.
    pub fn new(
        pool: WorkScheduler,
        credentials: Credentials,
        limits: LivenessTimeouts,
        trace: Option<TraceCollector>,
        callers: u64,
    ) -> Arc<Self> {
        let state = State {
            scheduler: pool,
            terms: None,
            progress: BTreeMap::new(),
            digest: None,
            generation: 0,
            callers,
            heard: BTreeMap::new(),
            busy: BTreeMap::new(),
            registered: BTreeMap::new(),
            cleared_at: Instant::now(),
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

    /// Runs `change` on the locked state, and wakes all waits.
    pub fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    /// Returns the timeouts after which a worker or a server is considered lost.
    pub fn limits(&self) -> LivenessTimeouts {
        self.limits
    }

    /// Marks a server as lost, which ends all waits for servers, and moves it to the end of the
    /// order. Returns the error of the first lost server.
    pub fn mark_lost(&self, address: &str, why: &str) -> SessionError {
        SessionError::Lost(self.with(|state| {
            if let Some(before) = &state.lost {
                return before.clone();
            }
            let number = state
                .registered
                .iter()
                .find(|(_, server)| server.address == address)
                .map(|(number, _)| *number);
            if let Some(number) = number {
                state.move_to_end(number);
            }
            let reason = format!("{address}: {why}");
            state.lost = Some(reason.clone());
            reason
        }))
    }

    /// Returns whether a server that holds ranges was lost.
    pub fn has_lost_server(&self) -> bool {
        let mut state = self.lock();
        state.expire_stale(self.limits);
        state.lost.is_some()
    }

    /// Returns whether the run continues with the servers of a generation.
    pub fn should_continue(&self, generation: u64) -> bool {
        let mut state = self.lock();
        state.expire_stale(self.limits);
        state.lost.is_none()
            && state.terms.as_ref().is_some_and(|terms| terms.generation == generation)
    }

    /// Waits until `check` returns a value; it is called at every change, and at least every 50 ms.
    /// The value is a change as well, which wakes all waits: a worker may wait for batches to be
    /// taken.
    ///
    /// # Errors
    /// Returns an error if a server is lost, or the run fails.
    pub fn wait<T>(
        &self,
        mut check: impl FnMut(&mut State) -> Option<T>,
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
            if let Some(found) = check(&mut state) {
                self.changed.notify_all();
                return Ok(found);
            }
            state = self
                .changed
                .wait_timeout(state, Duration::from_millis(50))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Records the report of a worker, and waits for new work for it.
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
            let e = Error::input("the training data of this worker differs from that of the run");
            state.evict(member, "its data differs");
            return Err(e.hint("give all workers the same files"));
        }
        if generation == state.generation {
            match report {
                Some(WorkerReport::Failed { fault }) => {
                    // The reason of a worker that was evicted is already known.
                    if let Some(member) = state.scheduler.members().get(&member) {
                        let error = fault.error().at(format_args!("worker {}", member.place));
                        state.failed.get_or_insert(error);
                    }
                }
                Some(report) => state.scheduler.report(member, &report),
                None => {}
            }
            self.changed.notify_all();
        }
        let since = Instant::now();
        loop {
            let is_current = generation == state.generation && state.terms.is_some();
            match state.scheduler.next(member) {
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

    /// Returns the status of the run as JSON, with the load of every server.
    fn status(&self) -> serde_json::Value {
        let (mut status, addresses) = {
            let state = self.lock();
            let workers = state.scheduler.members().iter();
            let workers: Vec<_> =
                workers.map(|(number, worker)| state.worker_status(*number, worker)).collect();
            let leases: Vec<_> = state
                .scheduler
                .assigned_work()
                .map(|(ticket, worker, task)| json!({"ticket": ticket, "worker": worker, "task": task}))
                .collect();
            let staleness: Vec<_> = state.scheduler.histogram().iter().collect();
            let addresses =
                state.terms.as_ref().map(|terms| terms.addresses.clone()).unwrap_or_default();
            let status = json!({"run": state.progress, "generation": state.generation, "workers": workers, "leases": leases, "staleness": staleness, "devices": state.programs.devices()});
            (status, addresses)
        };
        status["servers"] = addresses.iter().map(|address| self.server_load(address)).collect();
        status
    }

    /// Returns the load of the server at an address as JSON, which is null if it does not answer.
    fn server_load(&self, address: &str) -> serde_json::Value {
        let mut client =
            RpcClient::new("a server", address, self.credentials.clone(), Duration::from_secs(2));
        match client.call_once(&ServerRequest::Load) {
            Ok(ServerResponse::Load(load)) => json!({"address": address, "load": load}),
            _ => json!({"address": address, "load": Option::<ServerLoad>::None}),
        }
    }
}

impl State {
    /// Returns the status of a worker as JSON.
    fn worker_status(&self, number: u64, worker: &WorkerState) -> serde_json::Value {
        let heard = self.heard.get(&number).map_or(0.0, |heard| heard.elapsed().as_secs_f64());
        json!({"worker": number, "place": worker.place, "clock": worker.clock, "done": worker.done,
               "seconds": worker.seconds, "heard_seconds_ago": heard})
    }

    /// Selects the first `servers` servers that send heartbeats to hold ranges, and returns their
    /// addresses, or none if there are fewer.
    pub fn register_servers(&mut self, servers: usize) -> Option<Vec<String>> {
        let mut ready: Vec<(&u64, &RegisteredServer)> = self.ready().collect();
        if ready.len() < servers {
            return None;
        }
        ready.sort_by_key(|(_, server)| server.order);
        ready.truncate(servers);
        let addresses = ready.iter().map(|(_, server)| server.address.clone()).collect();
        self.assigned = ready.into_iter().map(|(number, _)| *number).collect();
        self.lost = None;
        self.missing.clear();
        Some(addresses)
    }

    /// Returns the servers that send heartbeats.
    fn ready(&self) -> impl Iterator<Item = (&u64, &RegisteredServer)> {
        self.registered
            .iter()
            .filter(|(_, server)| !server.silent && server.heard >= self.cleared_at)
    }

    /// Moves a server to the end of the order in which servers are assigned ranges.
    fn move_to_end(&mut self, number: u64) {
        self.callers += 1;
        if let Some(server) = self.registered.get_mut(&number) {
            server.order = self.callers;
        }
    }

    /// Selects the servers at these addresses, if all are connected and hold their ranges of a
    /// generation; returns whether they are.
    pub fn select_previous_servers(&mut self, addresses: &[String], generation: u64) -> bool {
        let numbers: Option<BTreeSet<u64>> =
            addresses.iter().map(|address| self.holder(address, generation)).collect();
        match numbers {
            None => false,
            Some(numbers) => {
                self.assigned = numbers;
                true
            }
        }
    }

    /// Returns the number of the server at an address, if it holds its ranges of a generation.
    fn holder(&self, address: &str, generation: u64) -> Option<u64> {
        let found = self
            .registered
            .iter()
            .find(|(_, server)| server.holds == Some(generation) && server.address == address);
        found.map(|(number, _)| *number)
    }

    /// Returns the number of servers that send heartbeats.
    pub fn servers(&self) -> usize {
        self.ready().count()
    }

    /// Clears the loss of a server; servers are assigned ranges again after their next heartbeat.
    pub fn clear_lost(&mut self) {
        (self.lost, self.assigned, self.cleared_at) = (None, BTreeSet::new(), Instant::now());
        self.missing.clear();
    }

    /// Returns the number of workers that wait for the run to start, and the time since the last
    /// one came.
    pub fn waiting(&self) -> (usize, Duration) {
        let last = self.waiting.values().max().map_or(Duration::ZERO, Instant::elapsed);
        (self.waiting.len(), last)
    }

    /// Lets the run accept workers, with this run specification.
    pub fn open(&mut self, terms: RunSpec, pool: WorkScheduler) {
        (self.generation, self.scheduler, self.terms) = (terms.generation, pool, Some(terms));
        self.waiting.clear();
    }

    /// Stops the run from accepting workers for now; those connected must join again.
    pub fn close(&mut self) {
        self.terms = None;
        self.heard.clear();
        self.busy.clear();
    }

    /// Ends the run with an exit code.
    pub fn end(&mut self, code: i32) {
        self.scheduler.end(code);
        self.over = true;
    }

    /// Compares the program of a new process with those that the run started with.
    ///
    /// # Errors
    /// Returns an error if it differs and all processes must compute the same bits (staleness 0).
    fn admit(&mut self, role: Role, place: &str, program: &Program) -> Result<()> {
        let Some(difference) = self.programs.difference(role, program) else { return Ok(()) };
        if self.scheduler.is_synchronous() {
            log::warn!("{role} {place} is refused: {difference}");
            let message = format!(
                "{role} {place}: {difference}, but parameter_server.staleness = 0 requires the same bits"
            );
            return Err(Error::input(message).hint(
                "start it with the same executable on the same kind of device, or start the run with parameter_server.staleness = \"none\"",
            ));
        }
        log::warn!("{role} {place}: {difference}; its results may differ in their last bits");
        Ok(())
    }

    /// Returns the end of the run, for a process that never joined.
    fn ended(&mut self) -> CoordinatorResponse {
        self.waiting.clear();
        CoordinatorResponse::Work(self.scheduler.next(0).unwrap_or(Work::Wait))
    }

    /// Returns whether all servers and workers have left.
    pub fn is_empty(&self) -> bool {
        self.scheduler.members().is_empty() && self.registered.is_empty()
    }

    /// Removes a lost worker and logs the reason.
    fn evict(&mut self, member: u64, why: &str) {
        if let Some(member) = self.unregister(member) {
            let level = if self.over { log::Level::Info } else { log::Level::Warn };
            log::log!(level, "worker {} is lost: {why}", member.place);
        }
    }

    /// Removes a worker.
    fn unregister(&mut self, member: u64) -> Option<WorkerState> {
        self.heard.remove(&member);
        self.busy.remove(&member);
        self.scheduler.leave(member)
    }

    /// Removes workers that are silent or stuck, and marks servers as lost that are silent or did
    /// not reconnect.
    fn expire_stale(&mut self, limits: LivenessTimeouts) {
        for member in expired(&self.heard, limits.silent) {
            self.evict(member, &format!("no heartbeat for {} s", limits.silent.as_secs()));
        }
        for member in expired(&self.busy, limits.stuck) {
            let reason = format!(
                "it has been at one piece of work for {} s (comm.timeout)",
                limits.stuck.as_secs()
            );
            let place = self.scheduler.members().get(&member).map(|member| member.place.clone());
            self.evict(member, &reason);
            if let (Some(place), true) = (place, self.scheduler.members().is_empty()) {
                let message =
                    format!("worker {place} is stuck: {reason}, and there is no other worker");
                let error = Error::comm(message).hint("see its log for what it was doing");
                self.failed.get_or_insert(error);
            }
        }
        let is_silent =
            |server: &RegisteredServer| !server.silent && server.heard.elapsed() > limits.silent;
        let silent: Vec<u64> = self
            .registered
            .iter()
            .filter(|(_, server)| is_silent(server))
            .map(|(number, _)| *number)
            .collect();
        for number in silent {
            self.move_to_end(number);
            if let Some(server) = self.registered.get_mut(&number) {
                server.silent = true;
                let reason = format!(
                    "{}: no heartbeat for {} s (parameter_server.timeout)",
                    server.address,
                    limits.silent.as_secs()
                );
                if self.assigned.contains(&number) && !self.over {
                    self.lost.get_or_insert(reason);
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

/// Returns the members whose times are longer ago than `limit`.
fn expired(times: &BTreeMap<u64, Instant>, limit: Duration) -> Vec<u64> {
    times.iter().filter(|(_, since)| since.elapsed() > limit).map(|(member, _)| *member).collect()
}

impl RpcHandler for CoordinatorService {
    type Request = CoordinatorRequest;
    type Answer = CoordinatorResponse;
    type ConnectionState = PeerKind;

    fn max_body_bytes(&self) -> usize {
        MAX_BODY
    }

    fn answer(
        &self,
        visit: &mut PeerKind,
        request: CoordinatorRequest,
        _: &[u8],
        _: &mut Vec<u8>,
    ) -> Result<CoordinatorResponse> {
        match request {
            CoordinatorRequest::Serve { address, generation, program } => self.with(|state| {
                if state.over {
                    return Ok(CoordinatorResponse::Over);
                }
                state.admit(Role::Server, &address, &program)?;
                state.callers += 1;
                // A server that still has its ranges was only disconnected.
                if generation == Some(state.generation) && state.missing.remove(&address).is_some()
                {
                    log::info!("server {address} reconnected");
                    state.assigned.insert(state.callers);
                }
                let server = RegisteredServer {
                    address,
                    holds: generation,
                    order: state.callers,
                    heard: Instant::now(),
                    silent: false,
                };
                state.registered.insert(state.callers, server);
                *visit = PeerKind::Server(state.callers);
                Ok(CoordinatorResponse::Serves)
            }),
            CoordinatorRequest::Served => {
                // A heartbeat changes nothing that a wait depends on, so waits are not woken.
                let mut state = self.lock();
                if let PeerKind::Server(number) = visit
                    && let Some(server) = state.registered.get_mut(number)
                {
                    (server.heard, server.silent) = (Instant::now(), false);
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
                log::info!("worker {place} joined");
                state.scheduler.join(member, place);
                state.heard.insert(member, Instant::now());
                *visit = PeerKind::Worker(member);
                Ok(CoordinatorResponse::Welcome { member, terms: Box::new(terms) })
            }),
            CoordinatorRequest::Next { member, generation, data, report } => {
                self.next(member, generation, data, report).map(CoordinatorResponse::Work)
            }
            CoordinatorRequest::Beat { member } => Ok(self.with(|state| {
                if state.terms.is_none() || !state.scheduler.members().contains_key(&member) {
                    return CoordinatorResponse::Work(Work::Renew);
                }
                state.heard.insert(member, Instant::now());
                CoordinatorResponse::Heard
            })),
            CoordinatorRequest::Leave { member } => Ok(self.with(|state| {
                if let Some(member) = state.unregister(member) {
                    log::info!("worker {} left on request", member.place);
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
                // An error of the trace does not end the run.
                taken.unwrap_or_else(|e| log::warn!("{e}"));
                Ok(CoordinatorResponse::Heard)
            }
        }
    }

    fn disconnected(&self, visit: PeerKind) {
        self.with(|state| match visit {
            PeerKind::Stranger => {}
            PeerKind::Worker(member) => state.evict(member, "its connection ended"),
            PeerKind::Server(server) => {
                let removed = state.registered.remove(&server);
                if let (Some(removed), true, false) =
                    (removed, state.assigned.remove(&server), state.over)
                {
                    state.missing.insert(removed.address, Instant::now());
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::WorkerTimes;
    use crate::scheduler::FinishedBatches;
    use hpctrain_checkpoint::Progress;
    use hpctrain_comm::Secret;
    use hpctrain_config::{Config, Staleness};

    const SHORT: Duration = Duration::from_millis(100);

    /// The number of batches of a step.
    const STEP_BATCHES: usize = 1;

    /// Returns the service of a run that accepts workers and has work.
    fn hub() -> Arc<CoordinatorService> {
        hub_with(
            LivenessTimeouts { silent: Duration::from_secs(60), stuck: SHORT },
            Staleness::None,
        )
    }

    fn program() -> Program {
        Program::here("CPU".into())
    }

    fn hub_with(limits: LivenessTimeouts, staleness: Staleness) -> Arc<CoordinatorService> {
        let credentials = Credentials { secret: Secret::new(vec![7; 32]).unwrap(), encrypt: true };
        let pool = || WorkScheduler::new(staleness, 4, 0);
        let hub = CoordinatorService::new(pool(), credentials, limits, None, 0);
        let terms = RunSpec {
            generation: 7,
            config: Config::default(),
            network: None,
            workers: 2,
            vocabulary: None,
            preprocessing: None,
            start: Progress::default(),
            pieces: vec![],
            row_width: None,
            addresses: vec![],
            trace: false,
            metrics: vec![],
        };
        hub.with(|state| {
            state.open(terms, pool());
            state.scheduler.begin_batches(FinishedBatches::default(), 100, STEP_BATCHES);
        });
        hub
    }

    fn ask(
        hub: &CoordinatorService,
        visit: &mut PeerKind,
        request: CoordinatorRequest,
    ) -> CoordinatorResponse {
        hub.answer(visit, request, &[], &mut Vec::new()).unwrap()
    }

    fn join(hub: &CoordinatorService, process: u32) -> u64 {
        let join = CoordinatorRequest::Join { host: "host".into(), process, program: program() };
        match ask(hub, &mut PeerKind::default(), join) {
            CoordinatorResponse::Welcome { member, .. } => member,
            other => panic!("{other:?}"),
        }
    }

    fn next(hub: &CoordinatorService, member: u64) -> CoordinatorResponse {
        ask(
            hub,
            &mut PeerKind::default(),
            CoordinatorRequest::Next { member, generation: 7, data: None, report: None },
        )
    }

    /// Reports a batch of a lease and requests more work.
    fn report(
        hub: &CoordinatorService,
        member: u64,
        ticket: u64,
        batch: u64,
    ) -> CoordinatorResponse {
        let report = Some(WorkerReport::Batch {
            ticket,
            batch,
            loss: 1f64.to_bits(),
            norm: 1f64.to_bits(),
            staleness: Some(0),
            seconds: WorkerTimes::default(),
        });
        ask(
            hub,
            &mut PeerKind::default(),
            CoordinatorRequest::Next { member, generation: 7, data: None, report },
        )
    }

    /// Connects a server and returns the state of its connection.
    fn serve(hub: &CoordinatorService, address: &str, generation: Option<u64>) -> PeerKind {
        let mut visit = PeerKind::default();
        let serve =
            CoordinatorRequest::Serve { address: address.into(), generation, program: program() };
        ask(hub, &mut visit, serve);
        visit
    }

    #[test]
    fn a_stuck_worker_is_lost_despite_heartbeats() {
        let hub = hub();
        let [stuck, idle] = [1, 2].map(|process| join(&hub, process));
        assert!(matches!(next(&hub, stuck), CoordinatorResponse::Work(Work::Lease { .. })));
        std::thread::sleep(2 * SHORT);
        ask(&hub, &mut PeerKind::default(), CoordinatorRequest::Beat { member: stuck });
        let members =
            |state: &mut State| Some(state.scheduler.members().keys().copied().collect::<Vec<_>>());
        assert_eq!(hub.wait(members).unwrap(), [idle]);
        assert!(matches!(next(&hub, stuck), CoordinatorResponse::Work(Work::Renew)));
        // Its batches go to the other worker; if that is stuck as well, no worker is left.
        assert!(
            matches!(next(&hub, idle), CoordinatorResponse::Work(Work::Lease { batches, .. }) if batches == (0..4))
        );
        std::thread::sleep(2 * SHORT);
        let Err(SessionError::Failed(e)) = hub.wait(|_| None::<()>) else {
            panic!("the run continues")
        };
        assert!(e.to_string().contains("worker host:2 is stuck"), "{e}");
    }

    #[test]
    fn a_worker_that_is_far_ahead_goes_on_when_batches_are_taken() {
        let silent = Duration::from_secs(60);
        let hub = hub_with(LivenessTimeouts { silent, stuck: silent }, Staleness::None);
        let member = join(&hub, 1);
        let CoordinatorResponse::Work(Work::Lease { ticket, batches }) = next(&hub, member) else {
            panic!("no lease")
        };
        for batch in 0..batches.end - 1 {
            assert!(matches!(
                report(&hub, member, ticket, batch),
                CoordinatorResponse::Work(Work::ContinueLease)
            ));
        }
        // No batch is taken, so the worker gets no more.
        let last = report(&hub, member, ticket, batches.end - 1);
        assert!(matches!(last, CoordinatorResponse::Work(Work::Wait)), "{last:?}");
        let since = Instant::now();
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| next(&hub, member));
            // Time for the request to reach its wait.
            std::thread::sleep(SHORT);
            assert!(hub.wait(|state| state.scheduler.take_batches(STEP_BATCHES)).is_ok());
            let work = asks.join().unwrap();
            assert!(matches!(work, CoordinatorResponse::Work(Work::Lease { .. })), "{work:?}");
        });
        // It was woken, and did not ask again.
        assert!(since.elapsed() < LONG_POLL, "{:?}", since.elapsed());
    }

    /// Returns whether the service accepts a second worker and a server with `program`.
    fn join_and_serve(staleness: Staleness, program: &Program) -> (Result<()>, Result<()>) {
        let hub =
            hub_with(LivenessTimeouts { silent: Duration::from_secs(60), stuck: SHORT }, staleness);
        join(&hub, 1);
        let join =
            CoordinatorRequest::Join { host: "host".into(), process: 2, program: program.clone() };
        let serve = CoordinatorRequest::Serve {
            address: "host:2".into(),
            generation: None,
            program: program.clone(),
        };
        let ask = |request| hub.answer(&mut PeerKind::default(), request, &[], &mut Vec::new());
        (ask(join).map(drop), ask(serve).map(drop))
    }

    #[test]
    fn programs_that_give_other_bits_are_refused_with_staleness_0() {
        let rebuilt = Program { build: "00000000".into(), ..program() };
        let elsewhere = Program::here("CPU (AVX2)".into());
        for (staleness, is_exact) in
            [(Staleness::Bound(0), true), (Staleness::Bound(3), false), (Staleness::None, false)]
        {
            assert_eq!(join_and_serve(staleness, &program()), (Ok(()), Ok(())));
            let (worker, server) = join_and_serve(staleness, &rebuilt);
            assert_eq!((worker.is_err(), server.is_err()), (is_exact, is_exact));
            let (worker, server) = join_and_serve(staleness, &elsewhere);
            // The first server determines the device of all servers.
            assert_eq!((worker.is_err(), server), (is_exact, Ok(())));
            if let Err(e) = worker {
                let message = e.to_string();
                assert!(
                    message
                        .contains("worker host:2: it computes on CPU (AVX2), the run on CPU, but"),
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
    fn a_server_without_heartbeats_is_lost_and_comes_last() {
        let hub = hub_with(LivenessTimeouts { silent: 2 * SHORT, stuck: SHORT }, Staleness::None);
        let beat = |visit: &mut PeerKind| ask(&hub, visit, CoordinatorRequest::Served);
        let [mut hangs, mut spare] =
            ["hangs:1", "spare:1"].map(|address| serve(&hub, address, None));
        assert_eq!(hub.with(|state| state.register_servers(1)), Some(vec!["hangs:1".into()]));
        let lost = loop {
            beat(&mut spare);
            std::thread::sleep(SHORT / 4);
            if hub.has_lost_server() {
                break hub.wait(|_| None::<()>);
            }
        };
        assert!(
            matches!(lost, Err(SessionError::Lost(reason)) if reason.starts_with("hangs:1: no heartbeat for "))
        );
        // Servers are assigned ranges only after another heartbeat.
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
    fn a_server_that_reconnects_with_its_ranges_is_not_lost() {
        let hub = hub();
        let first = serve(&hub, "host:1", None);
        assert_eq!(hub.with(|state| state.register_servers(1)), Some(vec!["host:1".into()]));
        hub.disconnected(first);
        let again = serve(&hub, "host:1", Some(7));
        std::thread::sleep(RECONNECT_TIMEOUT + SHORT);
        assert!(!hub.has_lost_server());
        hub.disconnected(again);
        // Another process at the same address does not hold the ranges.
        serve(&hub, "host:1", None);
        assert!(hub.should_continue(7));
        std::thread::sleep(RECONNECT_TIMEOUT + SHORT);
        assert!(!hub.should_continue(7));
        assert!(
            matches!(hub.wait(|_| None::<()>), Err(SessionError::Lost(address)) if address.starts_with("host:1: "))
        );
    }
}
