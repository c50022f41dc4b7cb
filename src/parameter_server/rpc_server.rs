//! An RPC server with a thread per connection.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::protocol::{self, RemoteError};
use super::rpc_client::PARAMETER_SERVER_PURPOSE;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn;
use hpctrain_comm::{Acceptor, Connection, Credentials, PeerId};

/// The maximum number of concurrent connections.
const MAX_CONNECTIONS: usize = 4096;

/// A service whose requests an [`RpcServer`] answers.
pub trait RpcHandler: Send + Sync + 'static {
    /// The requests.
    type Request: DeserializeOwned;
    /// The responses.
    type Answer: Serialize;
    /// The state of a connection.
    type ConnectionState: Default;

    /// Returns the size limit of request bodies in bytes.
    fn max_body_bytes(&self) -> usize;

    /// Answers a request with the given body; the body of the response is appended to `into`, which
    /// is empty.
    ///
    /// # Errors
    /// Returns an error if the request fails, which is sent to the client.
    fn answer(
        &self,
        visit: &mut Self::ConnectionState,
        request: Self::Request,
        body: &[u8],
        into: &mut Vec<u8>,
    ) -> Result<Self::Answer>;

    /// Called when a connection has ended.
    fn disconnected(&self, visit: Self::ConnectionState);
}

/// An RPC server, which runs until it is dropped.
pub struct RpcServer {
    stopped: Arc<AtomicBool>,
    _acceptor: Acceptor,
}

impl RpcServer {
    /// Serves peers that connect to `listener` and know the secret. A connection without requests
    /// for `idle` is closed.
    ///
    /// # Errors
    /// Returns an error if the system cannot start a thread.
    pub fn open<S: RpcHandler>(
        listener: TcpListener,
        credentials: Credentials,
        service: Arc<S>,
        idle: Duration,
    ) -> Result<Self> {
        let stopped = Arc::new(AtomicBool::new(false));
        let stop = stopped.clone();
        let connections = Arc::new(());
        let acceptor = Acceptor::open(listener, credentials, move |caller, connection| {
            serve(connection, caller, idle, &service, &stop, &connections)
        })?;
        Ok(Self { _acceptor: acceptor, stopped })
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

/// Starts a thread that answers the requests of a connection, unless there are too many
/// `connections`.
fn serve<S: RpcHandler>(
    connection: Connection,
    caller: PeerId,
    idle: Duration,
    service: &Arc<S>,
    stop: &Arc<AtomicBool>,
    connections: &Arc<()>,
) -> Result<()> {
    if Arc::strong_count(connections) > MAX_CONNECTIONS {
        return Err(Error::comm(format!("the limit of {MAX_CONNECTIONS} connections is reached")));
    }
    prepare(&connection, caller, idle)?;
    let service = service.clone();
    let stop = stop.clone();
    let counted = connections.clone();
    // If the system cannot start a thread, the connection ends and the client reconnects.
    let thread = spawn("connection", move || {
        answer_requests(connection, &*service, &stop);
        drop(counted);
    });
    thread.map(drop)
}

/// Checks the purpose of a connection, and sets its time limits.
fn prepare(connection: &Connection, caller: PeerId, idle: Duration) -> Result<()> {
    if caller.channel != PARAMETER_SERVER_PURPOSE {
        return Err(Error::comm(
            "the caller is a rank of a job, not a process of a run with parameter servers",
        ));
    }
    let stream = connection.stream();
    let set =
        stream.set_read_timeout(Some(idle)).and_then(|()| stream.set_write_timeout(Some(idle)));
    set.map_err(|e| Error::comm(e.to_string()))
}

/// Answers the requests of a connection until it ends.
fn answer_requests<S: RpcHandler>(mut connection: Connection, service: &S, stop: &AtomicBool) {
    let mut visit = S::ConnectionState::default();
    // One for each direction: a body that overwrites an earlier one of its size needs no zeros first.
    let [mut body, mut into] = [const { Vec::new() }; 2];
    while !stop.load(Ordering::Relaxed) {
        // A connection that fails is treated like one that ends.
        let mut len = 0;
        let read =
            protocol::read_with(&mut connection, service.max_body_bytes(), |_, bytes, stream| {
                len = bytes;
                // A request without a body leaves the bytes of the last one.
                if len > 0 { protocol::read_body(len, stream, &mut body) } else { Ok(()) }
            });
        let Ok(Some(request)) = read else { break };
        into.clear();
        let answer = service.answer(&mut visit, request, &body[..len], &mut into);
        if answer.is_err() {
            into.clear();
        }
        let answer: Result<S::Answer, RemoteError> = answer.map_err(|e| RemoteError::from(&e));
        if protocol::write(&mut connection, &answer, &[&into]).is_err() {
            break;
        }
    }
    service.disconnected(visit);
}
