//! A parameter server: holds ranges of the parameters of a run until it ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::address::listen;
use super::param_store::ParamStore;
use super::program::Program;
use super::protocol::{CoordinatorRequest, CoordinatorResponse, ServerRequest, ServerResponse};
use super::rendezvous::{Contact, PsRendezvous};
use super::rpc_client::RpcClient;
use super::rpc_server::{RpcHandler, RpcServer};
use super::trace::TraceSender;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::simd;
use hpctrain_base::spans::now;
use hpctrain_config::telemetry::trace_file::TraceEvent;
use hpctrain_parallel::Hyper;

/// The interval of a server's heartbeats; `parameter_server.timeout` may be as short as a second.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);

/// The size limit of request bodies before ranges are assigned.
const INITIAL_MAX_BODY: usize = 1 << 16;

/// Options of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The rendezvous directory of the run.
    pub rendezvous: PsRendezvous,
    /// `parameter_server.address`.
    pub address: Option<String>,
    /// The time to wait for the coordinator to start, and to come back after a lost connection.
    pub timeout: Duration,
    /// The number of compute threads.
    pub threads: usize,
}

impl ServerOptions {
    /// Creates a client of the coordinator.
    fn client(&self, contact: &Contact) -> Result<RpcClient> {
        Ok(RpcClient::new(
            "the coordinator",
            &contact.address,
            self.rendezvous.credentials(contact)?,
            self.timeout,
        ))
    }
}

/// Runs a parameter server until the run is over.
///
/// # Errors
/// Returns an error if the address cannot be listened on, the coordinator refuses the server, or it
/// cannot be reached for longer than the timeout.
pub fn serve(options: &ServerOptions) -> Result<()> {
    let program = Program::here(format!("CPU ({})", simd::name()));
    let contact = options.rendezvous.coordinator(options.timeout)?;
    let (listener, address) = listen(options.address.as_deref(), contact.interface.as_deref())?;
    let state = Arc::new(ServerState {
        storage: RwLock::default(),
        threads: options.threads,
        connections: AtomicU64::new(0),
        events: Mutex::default(),
    });
    let mut recording = None;
    let credentials = options.rendezvous.credentials(&contact)?;
    let _listener = RpcServer::open(listener, credentials, state.clone(), options.timeout * 10)?;
    let mut coordinator = options.client(&contact)?;
    let mut heard = Instant::now();
    let mut registered = false;
    loop {
        let generation = state.storage().map(|storage| storage.generation());
        let request = if registered {
            CoordinatorRequest::Served
        } else {
            CoordinatorRequest::Serve {
                address: address.clone(),
                generation,
                program: program.clone(),
            }
        };
        let answer = coordinator.call_once(&request);
        if answer.is_ok() && state.is_traced() {
            // An incomplete trace does not end the server.
            let sent = state.send_events(&mut recording, &address, &mut coordinator);
            sent.unwrap_or_else(|e| log::debug!("the trace lacks events: {e}"));
        }
        match answer {
            Ok(CoordinatorResponse::Serves) => (heard, registered) = (Instant::now(), true),
            Ok(CoordinatorResponse::Over) => return Ok(()),
            Ok(other) => return Err(Error::comm(format!("the coordinator answered {other:?}"))),
            // The coordinator refuses this server.
            Err(e) if e.kind() == Kind::Input => return Err(e),
            Err(_)
                if heard.elapsed() > PsRendezvous::FINISHED_GRACE
                    && options.rendezvous.has_finished() =>
            {
                options.rendezvous.say_ended();
                return Ok(());
            }
            Err(e) if heard.elapsed() > options.timeout => {
                return options
                    .rendezvous
                    .exit_code()
                    .map_or_else(|| Err(e.at("the coordinator")), |_| Ok(()));
            }
            Err(_) => {
                // A restarted coordinator may listen at another address.
                registered = false;
                coordinator = options.client(&options.rendezvous.coordinator(options.timeout)?)?;
            }
        }
        std::thread::sleep(HEARTBEAT_INTERVAL);
    }
}

/// The state shared by all connections of a server.
struct ServerState {
    /// The ranges, once they are assigned.
    storage: RwLock<Option<Arc<ParamStore>>>,
    threads: usize,
    /// The number of connections so far.
    connections: AtomicU64,
    /// The events of all connections, for a trace.
    events: Mutex<Vec<(String, TraceEvent)>>,
}

impl ServerState {
    fn storage(&self) -> Option<Arc<ParamStore>> {
        self.storage.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ServerState {
    fn is_traced(&self) -> bool {
        self.storage().is_some_and(|storage| storage.is_traced())
    }

    /// Sends the events since the last call to the coordinator.
    fn send_events(
        &self,
        recording: &mut Option<TraceSender>,
        address: &str,
        coordinator: &mut RpcClient,
    ) -> Result<()> {
        let recording = match recording {
            Some(recording) => recording,
            empty => empty.insert(TraceSender::start(format!("server {address}"), coordinator)?),
        };
        let events =
            std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        recording.send_events(coordinator, events)
    }

    /// Records an event of a connection that ends now.
    fn record_event(&self, connection: u64, name: &str, start: u64) {
        let event = TraceEvent {
            name: name.into(),
            unit: None,
            start,
            end: now(),
            details: serde_json::json!({}),
        };
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push((format!("connection {connection}"), event));
    }

    /// Executes a request with the given body, and appends that of the response to `into`.
    fn execute(
        &self,
        request: ServerRequest,
        body: &[u8],
        into: &mut Vec<u8>,
    ) -> Result<ServerResponse> {
        if let ServerRequest::Assign(assignment) = request {
            // Free the memory of the previous ranges first.
            *self.storage.write().unwrap_or_else(PoisonError::into_inner) = None;
            let storage = ParamStore::new(&assignment, self.threads)?;
            *self.storage.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(storage));
            return Ok(ServerResponse::Done);
        }
        let Some(storage) = self.storage() else { return Ok(ServerResponse::Stale) };
        let is_current = |generation: u64| generation == storage.generation();
        Ok(match request {
            ServerRequest::Pull { generation, of, pieces, known } if is_current(generation) => {
                ServerResponse::Pulled { versions: storage.pull(of, pieces, &known, into)? }
            }
            ServerRequest::Push { generation, member, line, number, of, pieces }
                if is_current(generation) =>
            {
                let staleness = storage.push((member, line), number, &of, pieces, body)?;
                ServerResponse::Pushed { staleness }
            }
            ServerRequest::PullRows { generation, of } if is_current(generation) => {
                ServerResponse::Pulled { versions: storage.pull_rows(of, body, into)? }
            }
            ServerRequest::PushRows { generation, member, number, of, rows }
                if is_current(generation) =>
            {
                let staleness = storage.push_rows(member, number, &of, rows, body)?;
                ServerResponse::Pushed { staleness }
            }
            ServerRequest::Set { generation, pieces } if is_current(generation) => {
                storage.set(pieces, body)?;
                ServerResponse::Done
            }
            ServerRequest::Squares { generation, step } if is_current(generation) => {
                ServerResponse::Squares(storage.squares(step)?)
            }
            ServerRequest::Norms { generation, hyper } if is_current(generation) => {
                ServerResponse::Norms(storage.norms(hyper.into())?)
            }
            ServerRequest::Update { generation, step, hyper, trust } if is_current(generation) => {
                let factors =
                    |unit: &Vec<u32>| unit.iter().map(|bits| f32::from_bits(*bits)).collect();
                let trust: Vec<Vec<f32>> = trust.iter().map(factors).collect();
                storage.update(step, hyper.map(Hyper::from), &trust)?;
                ServerResponse::Done
            }
            ServerRequest::Revoke { generation, ticket } if is_current(generation) => {
                storage.revoke(ticket);
                ServerResponse::Done
            }
            ServerRequest::Cut { generation, cut } if is_current(generation) => {
                ServerResponse::Copied { updates: storage.take_snapshot(cut)? }
            }
            ServerRequest::Save { generation, cut, staging } if is_current(generation) => {
                ServerResponse::Saved(Box::new(storage.save(cut, &staging)?))
            }
            ServerRequest::At { generation } if is_current(generation) => {
                let (first, last) = storage.step_range();
                ServerResponse::At(first, last)
            }
            ServerRequest::Load => ServerResponse::Load(storage.load()),
            _ => ServerResponse::Stale,
        })
    }
}

/// Returns the name of a request in a trace.
fn name(request: &ServerRequest) -> &'static str {
    match request {
        ServerRequest::Assign(_) => "assign",
        ServerRequest::Pull { .. } | ServerRequest::PullRows { .. } => "pull",
        ServerRequest::Push { .. } | ServerRequest::PushRows { .. } => "push",
        ServerRequest::Set { .. } => "set",
        ServerRequest::Squares { .. } | ServerRequest::Norms { .. } => "norm",
        ServerRequest::Update { .. } => "update",
        ServerRequest::Revoke { .. } => "revoke",
        ServerRequest::Cut { .. } => "cut",
        ServerRequest::Save { .. } => "checkpoint",
        ServerRequest::At { .. } => "at",
        ServerRequest::Load => "load",
    }
}

impl RpcHandler for ServerState {
    type Request = ServerRequest;
    type Answer = ServerResponse;
    /// The number of the connection.
    type ConnectionState = Option<u64>;

    fn max_body_bytes(&self) -> usize {
        self.storage().map_or(INITIAL_MAX_BODY, |storage| storage.max_body_bytes())
    }

    fn answer(
        &self,
        visit: &mut Self::ConnectionState,
        request: ServerRequest,
        body: &[u8],
        into: &mut Vec<u8>,
    ) -> Result<ServerResponse> {
        let connection =
            *visit.get_or_insert_with(|| self.connections.fetch_add(1, Ordering::Relaxed));
        let name = name(&request);
        let start = now();
        let answer = self.execute(request, body, into);
        if self.is_traced() {
            self.record_event(connection, name, start);
        }
        answer
    }

    fn disconnected(&self, _: Self::ConnectionState) {}
}
