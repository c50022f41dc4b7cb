//! An RPC client of a server or the coordinator, which reconnects when its connection fails.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::address;
use super::protocol::{self, RemoteError};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_comm::{Connection, Credentials, HANDSHAKE_TIMEOUT, PeerId, call};

/// The delay between two attempts.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// The interval at which a wait for the peer checks whether its response is still needed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The purpose of the connection in its handshake, which differs from those of ranks.
pub const PARAMETER_SERVER_PURPOSE: u32 = 0x5e72;

/// An RPC client.
pub struct RpcClient {
    /// The name of the peer, for messages.
    place: String,
    address: String,
    credentials: Credentials,
    /// The time in which the peer must respond.
    timeout: Duration,
    /// The time for repeating a request after a connection failed.
    reconnect_timeout: Duration,
    /// The time for attempts to connect: the peer may be busy.
    connect_timeout: Duration,
    /// Returns whether a response is still needed.
    is_needed: Arc<dyn Fn() -> bool + Send + Sync>,
    connection: Option<Connection>,
}

impl RpcClient {
    /// Creates a client of `address`, which connects at its first request.
    pub fn new(
        place: impl Into<String>,
        address: impl Into<String>,
        credentials: Credentials,
        timeout: Duration,
    ) -> Self {
        let place = place.into();
        let address = address.into();
        let is_needed = Arc::new(|| true);
        Self {
            place,
            address,
            credentials,
            timeout,
            reconnect_timeout: timeout,
            connect_timeout: timeout,
            is_needed,
            connection: None,
        }
    }

    /// Sets the time for reconnecting and for repeating requests after a failure.
    #[must_use]
    pub fn with_reconnect_timeout(self, timeout: Duration) -> Self {
        Self { reconnect_timeout: timeout, connect_timeout: timeout, ..self }
    }

    /// Sets how the failure of the peer is detected by other means: `is_needed` returns false after
    /// a failure, which ends every wait. Until then, connecting is retried for `connect_timeout`,
    /// because the peer may be busy.
    #[must_use]
    pub fn with_liveness_check(
        self,
        connect_timeout: Duration,
        is_needed: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { connect_timeout, is_needed: Arc::new(is_needed), ..self }
    }

    /// Returns the address of the peer.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connects, unless there is a connection.
    ///
    /// # Errors
    /// Returns an error if nothing listens at the address, or the peer does not authenticate in
    /// time.
    pub fn connect(&mut self) -> Result<()> {
        if self.connection.is_some() {
            return Ok(());
        }
        if !(self.is_needed)() {
            return Err(Error::comm("a response is no longer needed"));
        }
        let limit = self.timeout.min(HANDSHAKE_TIMEOUT);
        let deadline = Instant::now() + limit;
        let stream = address::connect(&self.address, limit)?;
        let caller = PeerId { rank: 0, ranks: 0, channel: PARAMETER_SERVER_PURPOSE };
        let connection = call(stream, &self.credentials, caller, deadline)?;
        // Each wait polls whether the response is still needed.
        let stream = connection.stream();
        let interval = Some(POLL_INTERVAL.min(self.timeout));
        let limited = stream.set_read_timeout(interval).and(stream.set_write_timeout(interval));
        limited.map_err(|e| Error::comm(e.to_string()))?;
        self.connection = Some(connection);
        Ok(())
    }

    /// Sends a request, whose response [`RpcClient::receive`] returns.
    ///
    /// # Errors
    /// Returns an error if the connection fails, which closes it.
    pub fn send(&mut self, head: &impl Serialize, body: &[&[u8]]) -> Result<()> {
        self.connect()?;
        let sent = match self.waiting() {
            Some(mut connection) => protocol::write(&mut connection, head, body),
            None => Err(Error::comm("the connection ended")),
        };
        sent.inspect_err(|_| self.connection = None)
    }

    /// Receives the response to a request that was sent, with its body of at most `limit` bytes in
    /// `body`.
    ///
    /// # Errors
    /// Returns an error if the connection fails, which closes it. The inner result has the error of
    /// the peer.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        limit: usize,
        body: &mut Vec<u8>,
    ) -> Result<Result<T>> {
        self.receive_with(limit, |_: &T, len, stream| protocol::read_body(len, stream, body))
    }

    /// Receives the response to a request that was sent, whose body, of at most `limit` bytes,
    /// `take_body` reads whole; it gets the response and the length.
    ///
    /// # Errors
    /// Returns an error if the connection fails, which closes it, or the error of `take_body`. The
    /// inner result has the error of the peer.
    pub fn receive_with<T: DeserializeOwned>(
        &mut self,
        limit: usize,
        take_body: impl FnOnce(&T, usize, &mut dyn Read) -> Result<()>,
    ) -> Result<Result<T>> {
        let mut connection = self.waiting().ok_or_else(|| Error::comm("no request was sent"))?;
        let read = protocol::read_with(
            &mut connection,
            limit,
            |answer: &Result<T, RemoteError>, len, stream| match answer {
                Ok(answer) => take_body(answer, len, stream),
                Err(_) if len == 0 => Ok(()),
                Err(_) => Err(Error::comm("the message of an error has a body")),
            },
        );
        match read {
            Ok(Some(answer)) => Ok(answer.map_err(RemoteError::error)),
            Ok(None) => {
                self.connection = None;
                Err(Error::comm("the connection ended"))
            }
            Err(e) => {
                self.connection = None;
                Err(e)
            }
        }
    }

    /// Sends a request and returns its response; repeats the request if the connection fails, since
    /// requests are idempotent.
    ///
    /// # Errors
    /// Returns an error if there is no response in time, it is no longer needed, or the peer
    /// returns an error.
    pub fn call_with_body<T: DeserializeOwned>(
        &mut self,
        head: &impl Serialize,
        body: &[&[u8]],
        limit: usize,
        into: &mut Vec<u8>,
    ) -> Result<T> {
        self.call_with(head, body, limit, |_: &T, len, stream| {
            protocol::read_body(len, stream, into)
        })
    }

    /// Does the same as [`RpcClient::call_with_body`]; `take_body` reads the body of the response as
    /// in [`RpcClient::receive_with`], again from the beginning if the request is repeated.
    ///
    /// # Errors
    /// Returns the same errors as [`RpcClient::call_with_body`], or that of `take_body`.
    pub fn call_with<T: DeserializeOwned>(
        &mut self,
        head: &impl Serialize,
        body: &[&[u8]],
        limit: usize,
        mut take_body: impl FnMut(&T, usize, &mut dyn Read) -> Result<()>,
    ) -> Result<T> {
        let since = Instant::now();
        let mut warned = false;
        loop {
            let (failed, time) = match self.connect() {
                Err(e) => (e, self.connect_timeout),
                Ok(()) => match self
                    .send(head, body)
                    .and_then(|()| self.receive_with(limit, &mut take_body))
                {
                    Ok(answer) => return answer,
                    // Not the connection failed.
                    Err(e) if e.kind() != Kind::Comm => return Err(e),
                    Err(e) => (e, self.reconnect_timeout),
                },
            };
            if since.elapsed() >= time || !(self.is_needed)() {
                return Err(failed.at(format_args!("{} at {}", self.place, self.address)));
            }
            if !warned && since.elapsed() > self.reconnect_timeout {
                warned = true;
                let waited = since.elapsed().as_secs();
                log::warn!(
                    "{} at {} has accepted no connection for {waited} s: {failed}",
                    self.place,
                    self.address
                );
            }
            std::thread::sleep(RETRY_DELAY);
        }
    }

    /// Returns the connection, whose reads and writes wait for the peer up to the timeout and while
    /// the response is needed.
    fn waiting(&mut self) -> Option<Waiting<'_>> {
        let connection = self.connection.as_mut()?;
        Some(Waiting { connection, timeout: self.timeout, is_needed: &*self.is_needed })
    }

    /// Does the same as [`RpcClient::call_with_body`], without bodies.
    ///
    /// # Errors
    /// Returns the same errors as [`RpcClient::call_with_body`].
    pub fn call<T: DeserializeOwned>(&mut self, head: &impl Serialize) -> Result<T> {
        self.call_with_body(head, &[], 0, &mut Vec::new())
    }

    /// Sends a request without a body once and returns its response, without repeating it if the
    /// connection fails.
    ///
    /// # Errors
    /// Returns an error if the connection fails, or the peer returns an error.
    pub fn call_once<T: DeserializeOwned>(&mut self, head: &impl Serialize) -> Result<T> {
        self.send(head, &[]).and_then(|()| self.receive(0, &mut Vec::new()))?
    }
}

/// A connection whose reads and writes fail when the peer is silent for longer than the timeout, or
/// the response is no longer needed.
struct Waiting<'a> {
    connection: &'a mut Connection,
    timeout: Duration,
    is_needed: &'a dyn Fn() -> bool,
}

impl Waiting<'_> {
    /// Repeats a call while it times out.
    fn repeat<T>(
        &mut self,
        mut call: impl FnMut(&mut Connection) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let since = Instant::now();
        loop {
            match call(self.connection) {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if since.elapsed() >= self.timeout || !(self.is_needed)() {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                done => return done,
            }
        }
    }
}

impl Read for Waiting<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.repeat(|connection| connection.read(into))
    }
}

impl Write for Waiting<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.repeat(|connection| connection.write(bytes))
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> std::io::Result<usize> {
        self.repeat(|connection| connection.write_vectored(slices))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.repeat(Write::flush)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::rpc_server::{RpcHandler, RpcServer};
    use super::*;
    use hpctrain_comm::Secret;

    const SHORT: Duration = Duration::from_millis(100);

    /// Answers a number with the next one.
    struct Next;

    impl RpcHandler for Next {
        type Request = u32;
        type Answer = u32;
        type ConnectionState = ();

        fn max_body_bytes(&self) -> usize {
            0
        }

        fn answer(&self, (): &mut (), request: u32, _: &[u8], _: &mut Vec<u8>) -> Result<u32> {
            Ok(request + 1)
        }

        fn disconnected(&self, (): ()) {}
    }

    fn credentials() -> Credentials {
        Credentials { secret: Secret::new(vec![7; 32]).unwrap(), encrypt: true }
    }

    fn client(listener: &TcpListener) -> RpcClient {
        RpcClient::new(
            "the server",
            listener.local_addr().unwrap().to_string(),
            credentials(),
            SHORT,
        )
    }

    #[test]
    fn a_busy_server_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut patient = client(&listener).with_liveness_check(Duration::MAX, || true);
        let impatient = client(&listener).call::<u32>(&1).unwrap_err();
        assert!(impatient.to_string().starts_with("the server at 127.0.0.1:"), "{impatient}");
        let busy = std::thread::spawn(move || {
            std::thread::sleep(4 * SHORT);
            RpcServer::open(listener, credentials(), Arc::new(Next), Duration::from_secs(60))
                .unwrap()
        });
        assert_eq!(patient.call::<u32>(&1), Ok(2));
        drop(busy.join().unwrap());
    }

    #[test]
    fn waits_end_when_the_response_is_no_longer_needed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let is_needed = Arc::new(AtomicBool::new(true));
        let flag = is_needed.clone();
        let mut client = client(&listener)
            .with_liveness_check(Duration::MAX, move || flag.load(Ordering::Relaxed));
        let request = std::thread::spawn(move || client.call::<u32>(&1).is_err());
        is_needed.store(false, Ordering::Relaxed);
        assert!(request.join().unwrap());
    }
}
