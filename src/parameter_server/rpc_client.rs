//! A connection to a server or to the coordinator, made anew when it is cut.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::address;
use super::protocol::{self, RemoteError};
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::{Connection, Credentials, HANDSHAKE_TIMEOUT, PeerId, call};

/// Pause between two attempts to connect.
const BETWEEN: Duration = Duration::from_millis(100);

/// Interval at which a wait for the other end looks whether it still makes sense.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The purpose of a connection, in its handshake: apart from those of ranks.
pub const SERVERS: u32 = 0x5e72;

/// One end of a connection: asks.
pub struct RpcClient {
    /// The other end, for messages.
    place: String,
    address: String,
    credentials: Credentials,
    /// Time within which the other end must answer.
    patience: Duration,
    /// Time within which it must come back once it is cut off.
    comeback: Duration,
    /// Time within which it must take a new connection: it may be busy.
    reach: Duration,
    /// Whether an answer is still of use.
    goes_on: Arc<dyn Fn() -> bool + Send + Sync>,
    connection: Option<Connection>,
}

impl RpcClient {
    /// To `address`, connected at the first request.
    pub fn new(
        place: impl Into<String>,
        address: impl Into<String>,
        credentials: Credentials,
        patience: Duration,
    ) -> Self {
        let place = place.into();
        let address = address.into();
        let goes_on = Arc::new(|| true);
        Self {
            place,
            address,
            credentials,
            patience,
            comeback: patience,
            reach: patience,
            goes_on,
            connection: None,
        }
    }

    /// Returns the same line to an end that must come back within another time once it is cut off.
    #[must_use]
    pub fn comes_back(self, comeback: Duration) -> Self {
        Self { comeback, reach: comeback, ..self }
    }

    /// Returns the same line to an end whose failure is noticed by other means: `goes_on` returns
    /// false after it, which ends every wait. Until then new connections are tried for the time
    /// `reach`, since the other end may be busy.
    #[must_use]
    pub fn watched(
        self,
        reach: Duration,
        goes_on: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { reach, goes_on: Arc::new(goes_on), ..self }
    }

    /// The other end's address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connects, unless the connection stands.
    ///
    /// # Errors
    /// Returns an error if nobody listens, or the other end does not prove in time that it knows
    /// the secret.
    pub fn connect(&mut self) -> Result<()> {
        if self.connection.is_some() {
            return Ok(());
        }
        if !(self.goes_on)() {
            return Err(Error::comm("an answer is of no use any more"));
        }
        let limit = self.patience.min(HANDSHAKE_TIMEOUT);
        let deadline = Instant::now() + limit;
        let stream = address::connect(&self.address, limit)?;
        let caller = PeerId { rank: 0, ranks: 0, lane: SERVERS };
        let connection = call(stream, &self.credentials, caller, deadline)?;
        // Each wait looks again and again whether it still makes sense.
        let stream = connection.stream();
        let look = Some(POLL_INTERVAL.min(self.patience));
        let limited = stream.set_read_timeout(look).and(stream.set_write_timeout(look));
        limited.map_err(|e| Error::comm(e.to_string()))?;
        self.connection = Some(connection);
        Ok(())
    }

    /// Sends a request whose answer [`RpcClient::receive`] takes.
    ///
    /// # Errors
    /// The connection failed, and is closed.
    pub fn send(&mut self, head: &impl Serialize, body: &[&[u8]]) -> Result<()> {
        self.connect()?;
        let sent = match self.waiting() {
            Some(mut connection) => protocol::write(&mut connection, head, body),
            None => Err(Error::comm("the connection ended")),
        };
        sent.inspect_err(|_| self.connection = None)
    }

    /// The answer to the request that was sent; its body, of at most `limit` bytes, goes into
    /// `body`.
    ///
    /// # Errors
    /// The connection failed, and is closed; or an error of the other end.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        limit: usize,
        body: &mut Vec<u8>,
    ) -> Result<Result<T>> {
        let mut connection = self.waiting().ok_or_else(|| Error::comm("nothing was asked"))?;
        let read = protocol::read::<Result<T, RemoteError>>(&mut connection, limit, body);
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

    /// Asks once more and again until there is an answer: requests are such that a second one does
    /// no harm.
    ///
    /// # Errors
    /// There was none in time, or it is of no use any more; or an error of the other end.
    pub fn ask<T: DeserializeOwned>(
        &mut self,
        head: &impl Serialize,
        body: &[&[u8]],
        limit: usize,
        into: &mut Vec<u8>,
    ) -> Result<T> {
        let since = Instant::now();
        let mut warned = false;
        loop {
            let (failed, time) = match self.connect() {
                Err(e) => (e, self.reach),
                Ok(()) => match self.send(head, body).and_then(|()| self.receive(limit, into)) {
                    Ok(answer) => return answer,
                    Err(e) => (e, self.comeback),
                },
            };
            if since.elapsed() >= time || !(self.goes_on)() {
                return Err(failed.at(format_args!("{} at {}", self.place, self.address)));
            }
            if !warned && since.elapsed() > self.comeback {
                warned = true;
                let waited = since.elapsed().as_secs();
                log::warn!(
                    "{} at {} has taken no connection for {waited} s: {failed}",
                    self.place,
                    self.address
                );
            }
            std::thread::sleep(BETWEEN);
        }
    }

    /// Returns the connection, whose reads and writes wait for the other end as long as that makes
    /// sense.
    fn waiting(&mut self) -> Option<Waiting<'_>> {
        let connection = self.connection.as_mut()?;
        Some(Waiting { connection, patience: self.patience, goes_on: &*self.goes_on })
    }

    /// As [`RpcClient::ask`], without bodies.
    ///
    /// # Errors
    /// As [`RpcClient::ask`].
    pub fn tell<T: DeserializeOwned>(&mut self, head: &impl Serialize) -> Result<T> {
        self.ask(head, &[], 0, &mut Vec::new())
    }

    /// As [`RpcClient::tell`], once: a connection that is cut is not made anew.
    ///
    /// # Errors
    /// There was no answer; or an error of the other end.
    pub fn tell_once<T: DeserializeOwned>(&mut self, head: &impl Serialize) -> Result<T> {
        self.send(head, &[]).and_then(|()| self.receive(0, &mut Vec::new()))?
    }
}

/// A connection whose reads and writes end when the other end is silent for too long, or an answer
/// is of no use any more.
struct Waiting<'a> {
    connection: &'a mut Connection,
    patience: Duration,
    goes_on: &'a dyn Fn() -> bool,
}

impl Waiting<'_> {
    /// Repeats a call that times out.
    fn repeat<T>(
        &mut self,
        mut call: impl FnMut(&mut Connection) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let since = Instant::now();
        loop {
            match call(self.connection) {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if since.elapsed() >= self.patience || !(self.goes_on)() {
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
        type Visit = ();

        fn limit(&self) -> usize {
            0
        }

        fn answer(&self, (): &mut (), request: u32, _: &mut Vec<u8>) -> Result<u32> {
            Ok(request + 1)
        }

        fn left(&self, (): ()) {}
    }

    fn credentials() -> Credentials {
        Credentials { secret: Secret::new(vec![7; 32]).unwrap(), encrypt: true }
    }

    fn line(listener: &TcpListener) -> RpcClient {
        RpcClient::new(
            "the server",
            listener.local_addr().unwrap().to_string(),
            credentials(),
            SHORT,
        )
    }

    #[test]
    fn one_that_takes_no_connection_is_busy_as_long_as_it_lives() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut patient = line(&listener).watched(Duration::MAX, || true);
        let impatient = line(&listener).tell::<u32>(&1).unwrap_err();
        assert!(impatient.to_string().starts_with("the server at 127.0.0.1:"), "{impatient}");
        let busy = std::thread::spawn(move || {
            std::thread::sleep(4 * SHORT);
            RpcServer::open(listener, credentials(), Arc::new(Next), Duration::from_secs(60))
                .unwrap()
        });
        assert_eq!(patient.tell::<u32>(&1), Ok(2));
        drop(busy.join().unwrap());
    }

    #[test]
    fn waits_end_when_the_answer_is_of_no_use() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let goes_on = Arc::new(AtomicBool::new(true));
        let lives = goes_on.clone();
        let mut line =
            line(&listener).watched(Duration::MAX, move || lives.load(Ordering::Relaxed));
        let asks = std::thread::spawn(move || line.tell::<u32>(&1).is_err());
        goes_on.store(false, Ordering::Relaxed);
        assert!(asks.join().unwrap());
    }
}
