//! A server: holds ranges of the parameters for a run, as long as the run goes on.

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
use super::trace::Recording;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::simd;
use hpctrain_base::spans::now;
use hpctrain_config::telemetry::trace_file::TraceEvent;
use hpctrain_parallel::Hyper;

/// Interval of a server's heartbeats: `parameter_server.timeout` may be as short as a second.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);

/// Most bytes of a request's body before there are ranges.
const SMALL: usize = 1 << 16;

/// The start of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The place of the run.
    pub site: PsRendezvous,
    /// `parameter_server.address`.
    pub address: Option<String>,
    /// Time within which a coordinator must be there, and come back.
    pub patience: Duration,
    /// Compute threads.
    pub threads: usize,
}

impl ServerOptions {
    /// Returns a connection to the coordinator.
    fn line(&self, contact: &Contact) -> Result<RpcClient> {
        Ok(RpcClient::new(
            "the coordinator",
            &contact.address,
            self.site.credentials(contact)?,
            self.patience,
        ))
    }
}

/// Serves until the run is over.
///
/// # Errors
/// The address cannot be listened on, or the coordinator is gone.
pub fn serve(post: &ServerOptions) -> Result<()> {
    let program = Program::here(format!("CPU ({})", simd::name()));
    let contact = post.site.coordinator(post.patience)?;
    let (listener, own) = listen(post.address.as_deref(), contact.interface.as_deref())?;
    let shelves = Arc::new(ServerState {
        storage: RwLock::default(),
        threads: post.threads,
        connections: AtomicU64::new(0),
        events: Mutex::default(),
    });
    let mut recording = None;
    let credentials = post.site.credentials(&contact)?;
    let _listener = RpcServer::open(listener, credentials, shelves.clone(), post.patience * 10)?;
    let mut coordinator = post.line(&contact)?;
    let mut heard = Instant::now();
    let mut known = false;
    loop {
        let generation = shelves.storage().map(|storage| storage.generation());
        let request = if known {
            CoordinatorRequest::Served
        } else {
            CoordinatorRequest::Serve { address: own.clone(), generation, program: program.clone() }
        };
        let answer = coordinator.tell_once(&request);
        if answer.is_ok() && shelves.is_traced() {
            // A trace that lacks a part is no reason to end.
            let told = shelves.tell(&mut recording, &own, &mut coordinator);
            told.unwrap_or_else(|e| log::debug!("the trace lacks events: {e}"));
        }
        match answer {
            Ok(CoordinatorResponse::Serves) => (heard, known) = (Instant::now(), true),
            Ok(CoordinatorResponse::Over) => return Ok(()),
            Ok(other) => return Err(Error::comm(format!("the coordinator answered {other:?}"))),
            // It is refused.
            Err(e) if e.kind() == Kind::Input => return Err(e),
            Err(e) if heard.elapsed() > post.patience => {
                return post.site.ended().map_or_else(|| Err(e.at("the coordinator")), |_| Ok(()));
            }
            Err(_) => {
                // One that comes back may listen elsewhere.
                known = false;
                coordinator = post.line(&post.site.coordinator(post.patience)?)?;
            }
        }
        std::thread::sleep(HEARTBEAT_INTERVAL);
    }
}

/// The ranges, once there are some.
struct ServerState {
    storage: RwLock<Option<Arc<ParamStore>>>,
    threads: usize,
    /// Connections so far.
    connections: AtomicU64,
    /// Events by connection, for a trace.
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

    /// Sends the events since the last call.
    fn tell(
        &self,
        recording: &mut Option<Recording>,
        own: &str,
        coordinator: &mut RpcClient,
    ) -> Result<()> {
        let recording = match recording {
            Some(recording) => recording,
            empty => empty.insert(Recording::start(format!("server {own}"), coordinator)?),
        };
        let events =
            std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        recording.send_events(coordinator, events)
    }

    /// Keeps an event of a connection, which has ended now.
    fn keep(&self, connection: u64, name: &str, start: u64) {
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

    /// Acts on a request.
    fn act(&self, request: ServerRequest, body: &mut Vec<u8>) -> Result<ServerResponse> {
        if let ServerRequest::Assign(assignment) = request {
            body.clear();
            // Of the ranges before, memory is needed no more.
            *self.storage.write().unwrap_or_else(PoisonError::into_inner) = None;
            let storage = ParamStore::new(&assignment, self.threads)?;
            *self.storage.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(storage));
            return Ok(ServerResponse::Done);
        }
        let Some(storage) = self.storage() else {
            body.clear();
            return Ok(ServerResponse::Stale);
        };
        let is_current = |generation: u64| generation == storage.generation();
        match request {
            ServerRequest::Pull { generation, of, pieces, known } if is_current(generation) => {
                return storage
                    .pull(of, pieces, &known, body)
                    .map(|versions| ServerResponse::Pulled { versions });
            }
            ServerRequest::Push { generation, member, line, number, of, pieces }
                if is_current(generation) =>
            {
                let staleness = storage.push((member, line), number, &of, pieces, body)?;
                body.clear();
                return Ok(ServerResponse::Pushed { staleness });
            }
            _ => body.clear(),
        }
        Ok(match request {
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
                ServerResponse::Copied { updates: storage.take_cut(cut)? }
            }
            ServerRequest::Save { generation, cut, staging } if is_current(generation) => {
                ServerResponse::Saved(Box::new(storage.save(cut, &staging)?))
            }
            ServerRequest::At { generation } if is_current(generation) => {
                let (first, last) = storage.at();
                ServerResponse::At(first, last)
            }
            ServerRequest::Load => ServerResponse::Load(storage.load()),
            _ => ServerResponse::Stale,
        })
    }
}

/// The name of a request in a trace.
fn name(request: &ServerRequest) -> &'static str {
    match request {
        ServerRequest::Assign(_) => "assign",
        ServerRequest::Pull { .. } => "pull",
        ServerRequest::Push { .. } => "push",
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
    type Visit = Option<u64>;

    fn limit(&self) -> usize {
        self.storage().map_or(SMALL, |storage| storage.elements() * size_of::<f32>())
    }

    fn answer(
        &self,
        visit: &mut Self::Visit,
        request: ServerRequest,
        body: &mut Vec<u8>,
    ) -> Result<ServerResponse> {
        let connection =
            *visit.get_or_insert_with(|| self.connections.fetch_add(1, Ordering::Relaxed));
        let name = name(&request);
        let start = now();
        let answer = self.act(request, body);
        if self.is_traced() {
            self.keep(connection, name, start);
        }
        answer
    }

    fn left(&self, _: Self::Visit) {}
}
