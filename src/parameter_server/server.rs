//! A server: holds ranges of the parameters for a run, as long as the run goes on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::address::listen;
use super::line::Line;
use super::listener::{Listener, Service};
use super::message::{FromCoordinator, FromServer, ToCoordinator, ToServer};
use super::program::Program;
use super::site::{Contact, Site};
use super::storage::Storage;
use super::trace::Recording;
use hpctrain_base::activity::now;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::simd;
use hpctrain_config::telemetry::trace_file::TraceEvent;
use hpctrain_parallel::Hyper;

/// Interval of a server's heartbeats: `servers.timeout` may be as short as a second.
const BEAT: Duration = Duration::from_millis(200);

/// Most bytes of a request's body before there are ranges.
const SMALL: usize = 1 << 16;

/// The start of a server.
#[derive(Debug, Clone)]
pub struct Post {
    /// The place of the run.
    pub site: Site,
    /// `servers.address`.
    pub address: Option<String>,
    /// Time within which a coordinator must be there, and come back.
    pub patience: Duration,
    /// Compute threads.
    pub threads: usize,
}

impl Post {
    /// Returns a connection to the coordinator.
    fn line(&self, contact: &Contact) -> Result<Line> {
        Ok(Line::new("the coordinator", &contact.address, self.site.credentials(contact)?, self.patience))
    }
}

/// Serves until the run is over.
///
/// # Errors
/// The address cannot be listened on, or the coordinator is gone.
pub fn serve(post: &Post) -> Result<()> {
    let program = Program::here(format!("CPU ({})", simd::name()));
    let contact = post.site.coordinator(post.patience)?;
    let (listener, own) = listen(post.address.as_deref(), contact.interface.as_deref())?;
    let shelves = Arc::new(Shelves {
        storage: RwLock::default(),
        threads: post.threads,
        connections: AtomicU64::new(0),
        events: Mutex::default(),
    });
    let mut recording = None;
    let credentials = post.site.credentials(&contact)?;
    let _listener = Listener::open(listener, credentials, shelves.clone(), post.patience * 10)?;
    let mut coordinator = post.line(&contact)?;
    let (mut heard, mut known) = (Instant::now(), false);
    loop {
        let generation = shelves.storage().map(|storage| storage.generation());
        let request = if known {
            ToCoordinator::Served
        } else {
            ToCoordinator::Serve { address: own.clone(), generation, program: program.clone() }
        };
        let answer = coordinator.tell_once(&request);
        if answer.is_ok() && shelves.is_traced() {
            // A trace that lacks a part is no reason to end.
            let told = shelves.tell(&mut recording, &own, &mut coordinator);
            told.unwrap_or_else(|e| log::debug!("the trace lacks events: {e}"));
        }
        match answer {
            Ok(FromCoordinator::Serves) => (heard, known) = (Instant::now(), true),
            Ok(FromCoordinator::Over) => return Ok(()),
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
        std::thread::sleep(BEAT);
    }
}

/// The ranges, once there are some.
struct Shelves {
    storage: RwLock<Option<Arc<Storage>>>,
    threads: usize,
    /// Connections so far.
    connections: AtomicU64,
    /// Events by connection, for a trace.
    events: Mutex<Vec<(String, TraceEvent)>>,
}

impl Shelves {
    fn storage(&self) -> Option<Arc<Storage>> {
        self.storage.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Shelves {
    fn is_traced(&self) -> bool {
        self.storage().is_some_and(|storage| storage.is_traced())
    }

    /// Sends the events since the last call.
    fn tell(&self, recording: &mut Option<Recording>, own: &str, coordinator: &mut Line) -> Result<()> {
        let recording = match recording {
            Some(recording) => recording,
            empty => empty.insert(Recording::start(format!("server {own}"), coordinator)?),
        };
        let events = std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        recording.send_events(coordinator, events)
    }

    /// Keeps an event of a connection, which has ended now.
    fn keep(&self, connection: u64, name: &str, start: u64) {
        let event = TraceEvent { name: name.into(), unit: None, start, end: now(), details: serde_json::json!({}) };
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push((format!("connection {connection}"), event));
    }

    /// Acts on a request.
    fn act(&self, request: ToServer, body: &mut Vec<u8>) -> Result<FromServer> {
        if let ToServer::Assign(assignment) = request {
            body.clear();
            // Of the ranges before, memory is needed no more.
            *self.storage.write().unwrap_or_else(PoisonError::into_inner) = None;
            let storage = Storage::new(&assignment, self.threads)?;
            *self.storage.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(storage));
            return Ok(FromServer::Done);
        }
        let Some(storage) = self.storage() else {
            body.clear();
            return Ok(FromServer::Stale);
        };
        let is_current = |generation: u64| generation == storage.generation();
        match request {
            ToServer::Pull { generation, of, pieces, known } if is_current(generation) => {
                return storage.pull(of, pieces, &known, body).map(|versions| FromServer::Pulled { versions });
            }
            ToServer::Push { generation, member, line, number, of, pieces } if is_current(generation) => {
                let staleness = storage.push((member, line), number, &of, pieces, body)?;
                body.clear();
                return Ok(FromServer::Pushed { staleness });
            }
            _ => body.clear(),
        }
        Ok(match request {
            ToServer::Squares { generation, step } if is_current(generation) => {
                FromServer::Squares(storage.squares(step)?)
            }
            ToServer::Norms { generation, hyper } if is_current(generation) => {
                FromServer::Norms(storage.norms(hyper.into())?)
            }
            ToServer::Update { generation, step, hyper, trust } if is_current(generation) => {
                let factors = |unit: &Vec<u32>| unit.iter().map(|bits| f32::from_bits(*bits)).collect();
                let trust: Vec<Vec<f32>> = trust.iter().map(factors).collect();
                storage.update(step, hyper.map(Hyper::from), &trust)?;
                FromServer::Done
            }
            ToServer::Revoke { generation, ticket } if is_current(generation) => {
                storage.revoke(ticket);
                FromServer::Done
            }
            ToServer::Cut { generation, cut } if is_current(generation) => {
                FromServer::Copied { updates: storage.take_cut(cut)? }
            }
            ToServer::Save { generation, cut, staging } if is_current(generation) => {
                FromServer::Saved(Box::new(storage.save(cut, &staging)?))
            }
            ToServer::At { generation } if is_current(generation) => {
                let (first, last) = storage.at();
                FromServer::At(first, last)
            }
            ToServer::Load => FromServer::Load(storage.load()),
            _ => FromServer::Stale,
        })
    }
}

/// The name of a request in a trace.
fn name(request: &ToServer) -> &'static str {
    match request {
        ToServer::Assign(_) => "assign",
        ToServer::Pull { .. } => "pull",
        ToServer::Push { .. } => "push",
        ToServer::Squares { .. } | ToServer::Norms { .. } => "norm",
        ToServer::Update { .. } => "update",
        ToServer::Revoke { .. } => "revoke",
        ToServer::Cut { .. } => "cut",
        ToServer::Save { .. } => "checkpoint",
        ToServer::At { .. } => "at",
        ToServer::Load => "load",
    }
}

impl Service for Shelves {
    type Request = ToServer;
    type Answer = FromServer;
    /// The number of the connection.
    type Visit = Option<u64>;

    fn limit(&self) -> usize {
        self.storage().map_or(SMALL, |storage| storage.elements() * size_of::<f32>())
    }

    fn answer(&self, visit: &mut Self::Visit, request: ToServer, body: &mut Vec<u8>) -> Result<FromServer> {
        let connection = *visit.get_or_insert_with(|| self.connections.fetch_add(1, Ordering::Relaxed));
        let (name, start) = (name(&request), now());
        let answer = self.act(request, body);
        if self.is_traced() {
            self.keep(connection, name, start);
        }
        answer
    }

    fn left(&self, _: Self::Visit) {}
}
