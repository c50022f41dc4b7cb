//! The coordinator's connections to all servers of a generation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::coordinator_service::{CoordinatorService, SessionError};
use super::protocol::{Assignment, ServerRequest, ServerResponse};
use super::rpc_client::RpcClient;
use super::run_spec::RunSpec;
use hpctrain_base::error::Kind;
use hpctrain_comm::Credentials;

/// The factor on the timeout for requests that write all of a server's memory to disk.
const LONG_TIMEOUT_FACTOR: u32 = 10;

/// The longest time without a request on a connection that must stay open.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Clients of all servers of a generation.
pub struct ServerClients {
    clients: Vec<RpcClient>,
    hub: Arc<CoordinatorService>,
    credentials: Credentials,
    timeout: Duration,
    /// The last time at which all servers answered.
    heard: Instant,
}

impl ServerClients {
    /// Creates clients of the servers of a run. Requests fail when a server is lost.
    pub fn new(
        terms: &RunSpec,
        hub: Arc<CoordinatorService>,
        credentials: Credentials,
        timeout: Duration,
    ) -> Self {
        let watch = hub.clone();
        Self::with_check(&terms.addresses, hub, credentials, timeout, move || {
            !watch.has_lost_server()
        })
    }

    fn with_check(
        addresses: &[String],
        hub: Arc<CoordinatorService>,
        credentials: Credentials,
        timeout: Duration,
        is_needed: impl Fn() -> bool + Clone + Send + Sync + 'static,
    ) -> Self {
        // Lost servers are detected by their heartbeats; a server that accepts no connection is
        // busy.
        let connect_timeout = hub.limits().stuck;
        let clients = addresses.iter().map(|address| {
            RpcClient::new("the server", address, credentials.clone(), timeout)
                .with_liveness_check(connect_timeout, is_needed.clone())
        });
        Self {
            clients: clients.collect(),
            hub: hub.clone(),
            credentials,
            timeout,
            heard: Instant::now(),
        }
    }

    /// Creates clients of the same servers for another thread, with a longer timeout, whose
    /// requests fail when the generation ends. They connect now, because later strangers may occupy
    /// all handshakes of a server.
    ///
    /// # Errors
    /// Returns an error if a server is lost.
    pub fn with_long_timeout(&self, generation: u64) -> Result<Self, SessionError> {
        let addresses: Vec<String> =
            self.clients.iter().map(|client| client.address().into()).collect();
        let watch = self.hub.clone();
        let mut other = Self::with_check(
            &addresses,
            self.hub.clone(),
            self.credentials.clone(),
            LONG_TIMEOUT_FACTOR * self.timeout,
            move || watch.should_continue(generation),
        );
        other.all(|_| ServerRequest::At { generation })?;
        Ok(other)
    }

    /// Sends a request if none was sent for a while, so that the connections are not closed as
    /// idle.
    ///
    /// # Errors
    /// Returns an error if a server is lost.
    pub fn keep_alive(&mut self, generation: u64) -> Result<(), SessionError> {
        if self.heard.elapsed() < KEEP_ALIVE {
            return Ok(());
        }
        self.all(|_| ServerRequest::At { generation }).map(drop)
    }

    /// Assigns every server its ranges.
    ///
    /// # Errors
    /// Returns an error if a server is lost, or cannot hold its ranges.
    pub fn assign(&mut self, of: impl Fn(usize) -> Assignment) -> Result<(), SessionError> {
        self.all(|server| ServerRequest::Assign(Box::new(of(server)))).map(drop)
    }

    /// Sends requests to all servers concurrently, and returns their responses in order.
    ///
    /// # Errors
    /// Returns an error if a server is lost, belongs to another generation, or fails.
    pub fn all(
        &mut self,
        request: impl Fn(usize) -> ServerRequest,
    ) -> Result<Vec<ServerResponse>, SessionError> {
        let sent: Vec<bool> = self
            .clients
            .iter_mut()
            .enumerate()
            .map(|(server, client)| client.send(&request(server), &[]).is_ok())
            .collect();
        let mut answers = Vec::with_capacity(sent.len());
        for (server, (client, sent)) in self.clients.iter_mut().zip(sent).enumerate() {
            let answer = if sent { client.receive(0, &mut Vec::new()).ok() } else { None };
            let answer = match answer {
                Some(answer) => answer,
                // The connection failed; requests are idempotent.
                None => client.call_with_body(&request(server), &[], 0, &mut Vec::new()),
            };
            match answer {
                Ok(ServerResponse::Stale) => {
                    return Err(self.hub.mark_lost(client.address(), "it has restarted"));
                }
                Ok(answer) => answers.push(answer),
                // A server whose connection fails is lost.
                Err(e) if e.kind() == Kind::Comm => {
                    return Err(self.hub.mark_lost(client.address(), e.message()));
                }
                Err(e) => return Err(SessionError::Failed(e)),
            }
        }
        self.heard = Instant::now();
        Ok(answers)
    }
}
