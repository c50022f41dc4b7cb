//! The coordinator's connections to all servers of a generation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::coordinator_service::{CoordinatorService, SessionError};
use super::protocol::{Assignment, ServerRequest, ServerResponse};
use super::rpc_client::RpcClient;
use super::run_spec::RunSpec;
use hpctrain_base::error::Kind;
use hpctrain_comm::Credentials;

/// The factor on the time for requests that move all of a server's memory to a disk.
const LONG: u32 = 10;

/// Longest time without a request on a connection that is to stay.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The servers of a generation.
pub struct ServerClients {
    lines: Vec<RpcClient>,
    hub: Arc<CoordinatorService>,
    credentials: Credentials,
    patience: Duration,
    /// The last time that all servers answered.
    heard: Instant,
}

impl ServerClients {
    /// Those of the terms. Requests to them end when one is lost.
    pub fn new(
        terms: &RunSpec,
        hub: Arc<CoordinatorService>,
        credentials: Credentials,
        patience: Duration,
    ) -> Self {
        let watch = hub.clone();
        Self::of(&terms.addresses, hub, credentials, patience, move || !watch.has_lost())
    }

    fn of(
        addresses: &[String],
        hub: Arc<CoordinatorService>,
        credentials: Credentials,
        patience: Duration,
        goes_on: impl Fn() -> bool + Clone + Send + Sync + 'static,
    ) -> Self {
        // The heartbeats of a server say that it is there; one that takes no new connection is
        // busy.
        let reach = hub.limits().stuck;
        let line = |address: &String| {
            RpcClient::new("the server", address, credentials.clone(), patience)
                .watched(reach, goes_on.clone())
        };
        Self {
            lines: addresses.iter().map(line).collect(),
            hub: hub.clone(),
            credentials,
            patience,
            heard: Instant::now(),
        }
    }

    /// Connects to the same servers for another thread, whose requests take longer and end with the
    /// generation. They are connected now: later a server's room for handshakes may be full of
    /// strangers'.
    ///
    /// # Errors
    /// Returns an error if a server is gone.
    pub fn with_long_timeout(&self, generation: u64) -> Result<Self, SessionError> {
        let addresses: Vec<String> = self.lines.iter().map(|line| line.address().into()).collect();
        let watch = self.hub.clone();
        let goes_on = move || watch.should_continue(generation);
        let mut other = Self::of(
            &addresses,
            self.hub.clone(),
            self.credentials.clone(),
            LONG * self.patience,
            goes_on,
        );
        other.all(|_| ServerRequest::At { generation })?;
        Ok(other)
    }

    /// Keeps the connections from being closed as idle, if nothing was asked for long.
    ///
    /// # Errors
    /// Returns an error if a server is gone.
    pub fn keep_alive(&mut self, generation: u64) -> Result<(), SessionError> {
        if self.heard.elapsed() < KEEP_ALIVE {
            return Ok(());
        }
        self.all(|_| ServerRequest::At { generation }).map(drop)
    }

    /// Gives every server its ranges.
    ///
    /// # Errors
    /// One is gone, or cannot hold them.
    pub fn assign(&mut self, of: impl Fn(usize) -> Assignment) -> Result<(), SessionError> {
        self.all(|server| ServerRequest::Assign(Box::new(of(server)))).map(drop)
    }

    /// Asks all servers at the same time; returns their answers, in order.
    ///
    /// # Errors
    /// One is gone, belongs to another generation, or failed.
    pub fn all(
        &mut self,
        request: impl Fn(usize) -> ServerRequest,
    ) -> Result<Vec<ServerResponse>, SessionError> {
        let sent: Vec<bool> = self
            .lines
            .iter_mut()
            .enumerate()
            .map(|(server, line)| line.send(&request(server), &[]).is_ok())
            .collect();
        let mut answers = Vec::with_capacity(sent.len());
        for (server, (line, sent)) in self.lines.iter_mut().zip(sent).enumerate() {
            let answer = if sent { line.receive(0, &mut Vec::new()).ok() } else { None };
            let answer = match answer {
                Some(answer) => answer,
                // The connection was cut: a request that comes twice does no harm.
                None => line.ask(&request(server), &[], 0, &mut Vec::new()),
            };
            match answer {
                Ok(ServerResponse::Stale) => {
                    return Err(self.hub.lose(line.address(), "it has begun anew"));
                }
                Ok(answer) => answers.push(answer),
                // One whose connection failed is lost.
                Err(e) if e.kind() == Kind::Comm => {
                    return Err(self.hub.lose(line.address(), e.message()));
                }
                Err(e) => return Err(SessionError::Failed(e)),
            }
        }
        self.heard = Instant::now();
        Ok(answers)
    }
}
