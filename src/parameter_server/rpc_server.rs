//! The answering end of connections: a thread for each.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::protocol::{self, RemoteError};
use super::rpc_client::SERVERS;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn;
use hpctrain_comm::{Acceptor, Connection, Credentials, PeerId};

/// Connections at a time.
const CONNECTIONS: usize = 4096;

/// The work of an answering end.
pub trait RpcHandler: Send + Sync + 'static {
    /// A request.
    type Request: DeserializeOwned;
    /// An answer.
    type Answer: Serialize;
    /// The state of a connection.
    type Visit: Default;

    /// Most bytes of a request's body.
    fn limit(&self) -> usize;

    /// Answers a request. `body` holds the request's body, and the answer's afterwards.
    ///
    /// # Errors
    /// Told to the asking end.
    fn answer(
        &self,
        visit: &mut Self::Visit,
        request: Self::Request,
        body: &mut Vec<u8>,
    ) -> Result<Self::Answer>;

    /// A connection has ended.
    fn left(&self, visit: Self::Visit);
}

/// Answers until it is dropped.
pub struct RpcServer {
    over: Arc<AtomicBool>,
    _acceptor: Acceptor,
}

impl RpcServer {
    /// Answers those that connect to `listener` and know the secret. A connection that says nothing
    /// for `idle` is closed.
    ///
    /// # Errors
    /// The system refused a thread.
    pub fn open<S: RpcHandler>(
        listener: TcpListener,
        credentials: Credentials,
        service: Arc<S>,
        idle: Duration,
    ) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let connections = Arc::new(());
        let serve = move |caller: PeerId, connection: Connection| {
            if Arc::strong_count(&connections) > CONNECTIONS {
                return Err(Error::comm(format!(
                    "there are {CONNECTIONS} connections, the most that are served"
                )));
            }
            prepare(&connection, caller, idle)?;
            let service = service.clone();
            let ends = ends.clone();
            let counted = connections.clone();
            let answer = move || {
                converse(connection, &*service, &ends);
                drop(counted);
            };
            // If the system refuses a thread the connection ends, and a known caller calls again.
            spawn("connection", answer).map(drop)
        };
        Ok(Self { _acceptor: Acceptor::open(listener, credentials, serve)?, over })
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Checks the purpose of a connection, and sets its time limits.
fn prepare(connection: &Connection, caller: PeerId, idle: Duration) -> Result<()> {
    if caller.lane != SERVERS {
        return Err(Error::comm("the caller is a rank, not one of a run on servers"));
    }
    let stream = connection.stream();
    let set =
        stream.set_read_timeout(Some(idle)).and_then(|()| stream.set_write_timeout(Some(idle)));
    set.map_err(|e| Error::comm(e.to_string()))
}

/// Answers the requests of a connection until it ends.
fn converse<S: RpcHandler>(mut connection: Connection, service: &S, over: &AtomicBool) {
    let mut visit = S::Visit::default();
    let mut body = Vec::new();
    while !over.load(Ordering::Relaxed) {
        // A connection that fails or ends has nothing more to say.
        let Ok(Some(request)) = protocol::read(&mut connection, service.limit(), &mut body) else {
            break;
        };
        let answer = service.answer(&mut visit, request, &mut body);
        if answer.is_err() {
            body.clear();
        }
        let answer: Result<S::Answer, RemoteError> = answer.map_err(|e| RemoteError::from(&e));
        if protocol::write(&mut connection, &answer, &[&body]).is_err() {
            break;
        }
    }
    service.left(visit);
}
